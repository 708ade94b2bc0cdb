//! How the losses of an fp8 run compare with those in bf16, from its metrics.

use crate::MetricColumns;

/// The comparisons of a run in fp8 that compares losses.
#[derive(Clone, Debug, PartialEq)]
pub struct LossComparisons {
    /// How many there are: lines with a loss in bf16.
    pub count: usize,
    /// Of these, how many in which the loss in fp8 was not finite.
    pub not_finite: usize,
    /// Where both are finite, each step and its difference as a share of the loss in bf16: above 0 where fp8 has the larger loss.
    pub differences: Vec<(f64, f64)>,
}

impl LossComparisons {
    /// None of a run that has compared nothing. Differences come from the losses: files of older versions have them without a sign.
    pub fn of(columns: &MetricColumns) -> Option<Self> {
        let (steps, bf16) = (columns.get("step")?, columns.get("shadow_loss_bf16")?);
        // Without a single number there is no column.
        let fp8 = columns.get("shadow_loss_fp8").unwrap_or_default().iter().chain(std::iter::repeat(&f64::NAN));
        let mut all = Self { count: 0, not_finite: 0, differences: Vec::new() };
        for ((step, bf16), fp8) in steps.iter().zip(bf16).zip(fp8).filter(|((_, bf16), _)| bf16.is_finite()) {
            all.count += 1;
            all.not_finite += usize::from(!fp8.is_finite());
            let share = (fp8 - bf16) / bf16;
            all.differences.extend(share.is_finite().then_some((*step, share)));
        }
        (all.count > 0).then_some(all)
    }

    /// The mean difference, as a share.
    pub fn mean(&self) -> Option<f64> {
        let sum: f64 = self.differences.iter().map(|(_, share)| share).sum();
        (!self.differences.is_empty()).then(|| sum / self.differences.len() as f64)
    }

    /// The step and the difference that is largest by its magnitude.
    pub fn largest(&self) -> Option<(f64, f64)> {
        self.differences.iter().copied().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(lines: &str) -> Option<LossComparisons> {
        let mut columns = MetricColumns::default();
        columns.add_bytes(lines.as_bytes());
        LossComparisons::of(&columns)
    }

    #[test]
    fn differences_have_a_sign_and_losses_that_are_not_finite_are_counted() {
        let all = compared(
            "{\"step\":1,\"loss\":2.0,\"shadow_loss_bf16\":2.0,\"shadow_loss_fp8\":2.5,\"shadow_difference\":0.25}\n\
             {\"step\":2,\"loss\":2.0}\n\
             {\"step\":3,\"loss\":2.0,\"shadow_loss_bf16\":2.0,\"shadow_loss_fp8\":1.0,\"shadow_difference\":0.5}\n\
             {\"step\":4,\"loss\":2.0,\"shadow_loss_bf16\":2.0,\"shadow_loss_fp8\":null}\n",
        );
        let all = all.unwrap();
        assert_eq!((all.count, all.not_finite), (3, 1));
        assert_eq!(all.differences, [(1.0, 0.25), (3.0, -0.5)]);
        assert_eq!((all.mean(), all.largest()), (Some(-0.125), Some((3.0, -0.5))));
        // A run whose every loss in fp8 is lost still says so.
        let lost = compared("{\"step\":1,\"shadow_loss_bf16\":2.0,\"shadow_loss_fp8\":null}\n").unwrap();
        assert_eq!((lost.count, lost.not_finite, lost.mean(), lost.largest()), (1, 1, None, None));
        assert_eq!(compared("{\"step\":1,\"loss\":2.0}\n"), None);
    }
}
