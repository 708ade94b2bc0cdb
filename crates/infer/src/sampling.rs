//! From logits to the next token.

use crate::{InferError, Result};
use lockstep_ir::counter;

/// How the next token is drawn. A token is a pure function of the logits, the seed and its position in the text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 is greedy decoding.
    pub temperature: f64,
    /// Top-k: sample from this many of the most probable tokens only.
    pub top_k: Option<usize>,
    /// Top-p (nucleus): sample from the most probable tokens that together have this probability only.
    pub top_p: f64,
    /// Seed of the draws.
    pub seed: u64,
}

impl Sampling {
    /// Refuses what cannot be meant.
    pub fn check(&self) -> Result<()> {
        let wrong = |option, value: String, hint| Err(InferError::Sampling { option, value, hint });
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return wrong("temperature", self.temperature.to_string(), "0 is greedy decoding, 1 samples as trained");
        }
        if self.top_k == Some(0) {
            return wrong("top-k", "0".to_owned(), "give at least 1, or leave it out");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return wrong("top-p", self.top_p.to_string(), "give a share above 0, at most 1");
        }
        Ok(())
    }

    /// The token at `position`, or `None` where no logit is a finite number or one is not a number.
    pub fn choose(&self, logits: &[f32], position: u64) -> Option<u32> {
        if logits.iter().any(|x| x.is_nan() || *x == f32::INFINITY) {
            return None;
        }
        let by_likelihood = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        let mut tokens: Vec<usize> = (0..logits.len()).filter(|&t| logits[t].is_finite()).collect();
        let best = *tokens.iter().min_by(|a, b| by_likelihood(a, b))?;
        if self.temperature == 0.0 {
            return Some(best as u32);
        }
        if let Some(k) = self.top_k.filter(|k| *k < tokens.len()) {
            tokens.select_nth_unstable_by(k - 1, by_likelihood);
            tokens.truncate(k);
        }
        if self.top_p < 1.0 || self.top_k.is_some() {
            tokens.sort_unstable_by(by_likelihood);
        }
        let weight = |t: usize| (f64::from(logits[t] - logits[best]) / self.temperature).exp();
        let mut weights: Vec<f64> = tokens.iter().map(|t| weight(*t)).collect();
        let mut total: f64 = weights.iter().sum();
        if self.top_p < 1.0 {
            let share = self.top_p * total;
            let mut sum = 0.0;
            let enough = weights.iter().position(|w| {
                sum += w;
                sum >= share
            });
            weights.truncate(enough.map_or(weights.len(), |i| i + 1));
            total = weights.iter().sum();
        }
        let bits = counter::bits(counter::key(self.seed, "generate"), position);
        let mut left = (bits >> 11) as f64 / (1u64 << 53) as f64 * total;
        let drawn = weights.iter().position(|w| {
            left -= w;
            left < 0.0
        });
        Some(tokens[drawn.unwrap_or(weights.len() - 1)] as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::Hint;

    const LOGITS: [f32; 4] = [1.0, 3.0, 2.0, 3.0];

    fn sampling(temperature: f64, top_k: Option<usize>, top_p: f64) -> Sampling {
        Sampling { temperature, top_k, top_p, seed: 7 }
    }

    fn counts(s: Sampling) -> [usize; 4] {
        let mut counts = [0; 4];
        (0..10_000).for_each(|position| counts[s.choose(&LOGITS, position).unwrap() as usize] += 1);
        counts
    }

    #[test]
    fn temperature_0_takes_the_first_of_the_most_probable() {
        assert_eq!(counts(sampling(0.0, None, 1.0)), [0, 10_000, 0, 0]);
    }

    #[test]
    fn tokens_come_as_often_as_their_probability_says() {
        let weights = LOGITS.map(|x| f64::from(x).exp());
        let total: f64 = weights.iter().sum();
        for (count, weight) in counts(sampling(1.0, None, 1.0)).iter().zip(weights) {
            assert!((*count as f64 / 10_000.0 - weight / total).abs() < 0.02, "{count}");
        }
    }

    #[test]
    fn top_k_and_top_p_leave_the_unlikely_out() {
        let [a, b, c, d] = counts(sampling(1.0, Some(3), 1.0));
        assert!(a == 0 && b > 0 && c > 0 && d > 0);
        assert_eq!(counts(sampling(1.0, Some(1), 1.0)), [0, 10_000, 0, 0]);
        // Two tokens have 0.4 each: both are needed for 0.7, the first alone for 0.3.
        let [a, b, c, d] = counts(sampling(1.0, None, 0.7));
        assert!(a == 0 && b > 0 && c == 0 && d > 0);
        assert_eq!(counts(sampling(1.0, None, 0.3)), [0, 10_000, 0, 0]);
    }

    #[test]
    fn a_draw_depends_on_seed_and_position_only() {
        let s = sampling(1.0, None, 1.0);
        let draws = |s: Sampling| (0..50).map(|p| s.choose(&LOGITS, p).unwrap()).collect::<Vec<_>>();
        assert_eq!(draws(s), draws(s));
        assert_ne!(draws(s), draws(Sampling { seed: 8, ..s }));
    }

    #[test]
    fn logits_that_are_no_numbers_give_no_token() {
        let s = sampling(1.0, Some(2), 0.9);
        assert_eq!(s.choose(&[1.0, f32::NAN], 0), None);
        assert_eq!(s.choose(&[f32::NEG_INFINITY; 3], 0), None);
        assert_eq!(s.choose(&[f32::NEG_INFINITY, 0.0], 0), Some(1));
    }

    #[test]
    fn options_without_a_meaning_are_refused() {
        for s in [
            sampling(-1.0, None, 1.0),
            sampling(f64::NAN, None, 1.0),
            sampling(1.0, Some(0), 1.0),
            sampling(1.0, None, 0.0),
        ] {
            let text = s.check().unwrap_err().with_hint();
            assert!(text.contains(" has no meaning\nhint: "), "{text}");
        }
        sampling(0.0, None, 1.0).check().unwrap();
    }
}
