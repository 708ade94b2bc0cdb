//! The loss scale of fp16 runs: gradients start with it, so that small ones do not vanish.
//!
//! The scale is a power of 2 and a scalar of the step: it enters where gradients start and leaves in the factor
//! that clips. Sums in fixed point use it too: a step whose sums leave their range is run again with a smaller
//! scale, which is exact.

use lockstep_config::Config;
use serde::{Deserialize, Serialize};

/// The scale now, and how it has fared. Always a power of 2, so that dividing gradients by it is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LossScale {
    scale: u64,
    /// Steps since it changed, all with finite gradients.
    good_steps: u64,
}

/// The largest scale.
const MOST: u64 = 1 << 30;

impl LossScale {
    /// That of a run's first step; none where gradients are not in fp16.
    pub(crate) fn new(config: &Config) -> Option<Self> {
        config.precision.loss_scale.map(|scale| Self { scale: scale as u64, good_steps: 0 })
    }

    /// The factor on the mean loss.
    pub(crate) fn scale(&self) -> f64 {
        self.scale as f64
    }

    /// What the gradient of each token's loss starts with. Gradients are of the sum over targets, not of the mean: their
    /// count, rounded down to a power of 2, is a part of the scale already.
    pub(crate) fn seed(&self, targets: u64) -> f32 {
        (self.scale as f64 / (1u64 << targets.max(1).ilog2()) as f64) as f32
    }

    /// Whether it can fall no further: gradients that are not finite have another cause.
    pub(crate) fn is_least(&self) -> bool {
        self.scale == 1
    }

    /// Takes in a step: half where gradients were not finite, double after enough steps where they were.
    pub(crate) fn after(&mut self, finite: bool, growth_interval: u64) {
        self.good_steps = if finite { self.good_steps + 1 } else { 0 };
        if !finite {
            self.scale = (self.scale / 2).max(1);
        } else if self.good_steps >= growth_interval {
            (self.scale, self.good_steps) = ((self.scale * 2).min(MOST), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_halves_at_once_and_doubles_after_good_steps() {
        let mut scale = LossScale { scale: 8, good_steps: 0 };
        let mut after = |finite: bool| {
            scale.after(finite, 3);
            scale.scale()
        };
        assert_eq!([after(false), after(true), after(true), after(true)], [4.0, 4.0, 4.0, 8.0]);
        assert_eq!([after(true), after(true), after(false), after(true)], [8.0, 8.0, 4.0, 4.0]);
        assert_eq!([after(false), after(false), after(false), after(false)], [2.0, 1.0, 1.0, 1.0]);
        assert!(scale.is_least());
        let mut most = LossScale { scale: MOST, good_steps: 0 };
        most.after(true, 1);
        assert_eq!(most.scale, MOST);
    }

    #[test]
    fn the_count_of_targets_is_a_part_of_it() {
        let scale = LossScale { scale: 65536, good_steps: 0 };
        assert_eq!([scale.seed(1), scale.seed(256), scale.seed(300)], [65536.0, 256.0, 256.0]);
        assert_eq!(LossScale { scale: 1, good_steps: 0 }.seed(1 << 20), 1.0 / (1 << 20) as f32);
    }
}
