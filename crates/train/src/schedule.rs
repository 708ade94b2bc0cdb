use lockstep_config::Config;

/// Learning rate of step `step` (counted from 0): linear warm-up, then a cosine down to the smallest rate.
pub fn learning_rate(config: &Config, step: u64) -> f64 {
    let o = &config.optimizer;
    if step < o.warmup_steps {
        return o.lr * (step + 1) as f64 / o.warmup_steps as f64;
    }
    let span = config.train.steps.saturating_sub(o.warmup_steps).max(1);
    let progress = ((step - o.warmup_steps) as f64 / span as f64).min(1.0);
    let lowest = o.lr * o.min_lr_ratio;
    lowest + 0.5 * (o.lr - lowest) * (1.0 + (std::f64::consts::PI * progress).cos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_then_cosine() {
        let text = "[model]\npreset = \"llama-15m\"\n[train]\nsteps = 110\n[optimizer]\nlr = 1.0\nwarmup_steps = 10";
        let config = Config::parse(text, "run.toml", &[]).unwrap();
        let lr = |step| learning_rate(&config, step);
        assert_eq!(lr(0), 0.1);
        assert_eq!(lr(9), 1.0);
        assert_eq!(lr(10), 1.0);
        assert!((lr(60) - 0.55).abs() < 1e-12);
        assert!((lr(110) - 0.1).abs() < 1e-12);
    }
}
