use lockstep_config::{Config, LrSchedule};
use lockstep_ir::StepScalars;

/// Learning rate of step `step` (counted from 0): linear warmup, then as the schedule says. The last step has
/// `min_lr_ratio` of the highest.
pub fn learning_rate(config: &Config, step: u64) -> f64 {
    let (o, steps) = (&config.optimizer, config.train.steps);
    if step < o.warmup_steps {
        return o.lr * (step + 1) as f64 / o.warmup_steps as f64;
    }
    // From the last step at the highest rate to the last of the run.
    let fall = |highest: u64| {
        let span = steps.saturating_sub(1 + highest).max(1);
        (step.saturating_sub(highest) as f64 / span as f64).min(1.0)
    };
    let rest = || fall(o.warmup_steps.saturating_sub(1));
    let lowest = o.lr * o.min_lr_ratio.unwrap_or(1.0);
    match o.schedule {
        LrSchedule::Constant => o.lr,
        LrSchedule::Linear => o.lr - (o.lr - lowest) * rest(),
        LrSchedule::Wsd => {
            let stable = steps.saturating_sub(o.decay_steps.unwrap_or(0));
            o.lr - (o.lr - lowest) * fall(stable.saturating_sub(1))
        }
        LrSchedule::Cosine => lowest + 0.5 * (o.lr - lowest) * (1.0 + (std::f64::consts::PI * rest()).cos()),
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
        for &(step, lr) in [(0, 0.1), (4, 0.5), (9, 1.0)].iter().chain(expected) {
            let found = learning_rate(&config, step);
            assert!((found - lr).abs() < 1e-12, "{keys}: {found} at step {step}, not {lr}");
        }
    }

    #[test]
    fn cosine_falls_slowly_at_both_ends() {
        let at = |progress: f64| 0.1 + 0.45 * (1.0 + (std::f64::consts::PI * progress).cos());
        check("", &[(10, at(0.01)), (34, at(0.25)), (59, 0.55), (108, at(0.99)), (109, 0.1), (1000, 0.1)]);
        check("min_lr_ratio = 0.0", &[(59, 0.5), (109, 0.0)]);
    }

    #[test]
    fn linear_falls_evenly() {
        check("schedule = \"linear\"", &[(34, 0.775), (59, 0.55), (108, 0.109), (109, 0.1), (1000, 0.1)]);
        check("schedule = \"linear\"\nmin_lr_ratio = 0.0", &[(59, 0.5), (108, 0.01), (109, 0.0)]);
    }

    #[test]
    fn wsd_stays_and_then_falls() {
        check("schedule = \"wsd\"\ndecay_steps = 20", &[(60, 1.0), (89, 1.0), (90, 0.955), (99, 0.55), (109, 0.1)]);
        check("schedule = \"wsd\"", &[(98, 1.0), (108, 1.0 - 0.9 * 10.0 / 11.0), (109, 0.1)]);
        check("schedule = \"wsd\"\ndecay_steps = 100", &[(10, 0.991), (59, 0.55)]);
        check("schedule = \"wsd\"\ndecay_steps = 0", &[(109, 1.0)]);
    }

    #[test]
    fn without_warmup_the_first_step_has_the_highest_rate_and_the_last_the_lowest() {
        for schedule in ["\"cosine\"", "\"linear\"", "\"wsd\"\ndecay_steps = 9"] {
            let text = format!(
                "[model]\npreset = \"llama-15m\"\n[train]\nsteps = 10\n[optimizer]\nlr = 1.0\nwarmup_steps = 0\nschedule = {schedule}"
            );
            let config = Config::parse(&text, "run.toml", &[]).unwrap_or_else(|error| panic!("{error}"));
            let rates: Vec<f64> = (0..10).map(|step| learning_rate(&config, step)).collect();
            assert!((rates[0] - 1.0).abs() < 1e-12 && (rates[9] - 0.1).abs() < 1e-12, "{schedule}: {rates:?}");
            assert!(rates.windows(2).all(|r| r[1] < r[0]), "{schedule}: {rates:?}");
        }
    }

    #[test]
    fn constant_stays() {
        check("schedule = \"constant\"", &[(11, 1.0), (109, 1.0), (1000, 1.0)]);
    }
}
