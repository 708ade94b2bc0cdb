use lockstep_config::Config;
use lockstep_ir::StepScalars;

/// Learning rate of step `step` (counted from 0): linear warmup, then as the schedule says.
pub fn learning_rate(config: &Config, step: u64) -> f64 {
    let (o, steps) = (&config.optimizer, config.train.steps);
    if step < o.warmup_steps {
        return o.lr * (step + 1) as f64 / o.warmup_steps as f64;
    }
    // Falls from here over this many steps.
    let fall = |from: u64, span: u64| (step.saturating_sub(from) as f64 / span.max(1) as f64).min(1.0);
    let rest = || fall(o.warmup_steps, steps.saturating_sub(o.warmup_steps));
    let lowest = o.lr * o.min_lr_ratio.unwrap_or(1.0);
    match o.schedule.as_str() {
        "constant" => o.lr,
        "linear" => o.lr - (o.lr - lowest) * rest(),
        "wsd" => {
            let span = o.decay_steps.unwrap_or(0);
            o.lr - (o.lr - lowest) * fall(steps.saturating_sub(span), span)
        }
        _ => lowest + 0.5 * (o.lr - lowest) * (1.0 + (std::f64::consts::PI * rest()).cos()),
    }
}

/// The scalars of step `step` (counted from 0) on this many targets, after `updates` steps that changed parameters.
pub(crate) fn step_scalars(config: &Config, step: u64, updates: u64, targets: u64) -> StepScalars {
    let o = &config.optimizer;
    let bias = |beta: Option<f64>| beta.map_or(1.0, |beta| (1.0 - beta.powf((updates + 1) as f64)) as f32);
    StepScalars {
        lr: learning_rate(config, step) as f32,
        inverse_count: 1.0 / targets as f32,
        clip: if o.grad_clip > 0.0 { o.grad_clip as f32 } else { f32::INFINITY },
        bias1: bias(o.beta1),
        bias2: bias(o.beta2),
        loss_scale: 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Learning rates of some steps of a run of 110 steps with 10 of warm-up and a highest rate of 1.
    fn check(keys: &str, expected: &[(u64, f64)]) {
        let text = format!(
            "[model]\npreset = \"llama-15m\"\n[train]\nsteps = 110\n[optimizer]\nlr = 1.0\nwarmup_steps = 10\n{keys}"
        );
        let config = Config::parse(&text, "run.toml", &[]).unwrap_or_else(|error| panic!("{error}"));
        for &(step, lr) in [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0)].iter().chain(expected) {
            let found = learning_rate(&config, step);
            assert!((found - lr).abs() < 1e-12, "{keys}: {found} at step {step}, not {lr}");
        }
    }

    #[test]
    fn cosine_falls_slowly_at_both_ends() {
        let at = |progress: f64| 0.1 + 0.45 * (1.0 + (std::f64::consts::PI * progress).cos());
        check("", &[(35, at(0.25)), (60, 0.55), (109, at(0.99)), (110, 0.1), (1000, 0.1)]);
        check("min_lr_ratio = 0.0", &[(60, 0.5), (110, 0.0)]);
    }

    #[test]
    fn linear_falls_evenly() {
        check("schedule = \"linear\"", &[(35, 0.775), (60, 0.55), (109, 0.109), (110, 0.1), (1000, 0.1)]);
        check("schedule = \"linear\"\nmin_lr_ratio = 0.0", &[(60, 0.5), (109, 0.01), (110, 0.0)]);
    }

    #[test]
    fn wsd_stays_and_then_falls() {
        check("schedule = \"wsd\"\ndecay_steps = 20", &[(60, 1.0), (90, 1.0), (91, 0.955), (100, 0.55), (110, 0.1)]);
        check("schedule = \"wsd\"", &[(99, 1.0), (109, 1.0 - 0.9 * 10.0 / 11.0), (110, 0.1)]);
        check("schedule = \"wsd\"\ndecay_steps = 100", &[(11, 0.991), (60, 0.55)]);
        check("schedule = \"wsd\"\ndecay_steps = 0", &[(109, 1.0)]);
    }

    #[test]
    fn constant_stays() {
        check("schedule = \"constant\"", &[(11, 1.0), (109, 1.0), (1000, 1.0)]);
    }
}
