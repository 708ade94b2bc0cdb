//! From logits to the next token.

use crate::{InferError, Result};
use lockstep_ir::counter;

/// How the next token is drawn. A token is a pure function of the logits, the seed and its position in the text.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Sampling {
    /// Divides the logits; 0 is greedy decoding.
    pub temperature: f64,
    /// Top-k: sample from this many of the most probable tokens only.
    pub top_k: Option<usize>,
    /// Top-p (nucleus): sample from the most probable tokens that together have this probability only.
    pub top_p: f64,
    /// Min-p: sample from tokens only that are at least this many times as probable as the most probable one.
    pub min_p: f64,
    /// Repetition penalty: logits of tokens that the text has are divided by it where they are positive, and multiplied by it where not; 1 is none.
    pub repetition_penalty: f64,
    /// Seed of the draws.
    pub seed: u64,
}

/// Samples as trained.
impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
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
        if !(0.0..=1.0).contains(&self.min_p) {
            return wrong("min-p", self.min_p.to_string(), "give a share from 0 to 1");
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            let hint = "give a number above 0: 1 is none, 1.1 makes repetition less probable";
            return wrong("repetition-penalty", self.repetition_penalty.to_string(), hint);
        }
        Ok(())
    }

    /// The log-probability that these logits give a token, in nats.
    pub fn log_probability(logits: &[f32], token: u32) -> f32 {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
        (f64::from(logits[token as usize] - most) - sum.ln()) as f32
    }

    /// The same logits with the penalty for tokens that a text has.
    fn penalised(&self, logits: &[f32], text: &[u32]) -> Vec<f32> {
        let mut logits = logits.to_vec();
        let mut seen = text.to_vec();
        seen.sort_unstable();
        seen.dedup();
        let penalty = self.repetition_penalty as f32;
        for token in seen {
            if let Some(x) = logits.get_mut(token as usize) {
                *x = if *x > 0.0 { *x / penalty } else { *x * penalty };
            }
        }
        logits
    }

    /// The token at `position` after a text, or `None` where no logit is a finite number or one is not a number.
    pub fn choose(&self, logits: &[f32], position: u64, text: &[u32]) -> Option<u32> {
        if logits.iter().any(|x| x.is_nan() || *x == f32::INFINITY) {
            return None;
        }
        if self.repetition_penalty != 1.0 {
            let penalised = self.penalised(logits, text);
            return Self { repetition_penalty: 1.0, ..*self }.choose(&penalised, position, &[]);
        }
        let by_likelihood = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        let mut tokens: Vec<usize> = (0..logits.len()).filter(|&t| logits[t].is_finite()).collect();
        let best = *tokens.iter().min_by(|a, b| by_likelihood(a, b))?;
        if self.temperature == 0.0 {
            return Some(best as u32);
        }
        if self.min_p > 0.0 {
            let least = logits[best] + (self.min_p.ln() * self.temperature) as f32;
            tokens.retain(|&t| logits[t] >= least);
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
        Sampling { temperature, top_k, top_p, seed: 7, ..Sampling::default() }
    }

    fn counts(s: Sampling) -> [usize; 4] {
        let mut counts = [0; 4];
        (0..10_000).for_each(|position| counts[s.choose(&LOGITS, position, &[]).unwrap() as usize] += 1);
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
    fn min_p_leaves_out_what_is_less_probable_than_a_share_of_the_most_probable() {
        // Of 0.4, 0.4, 0.15 and 0.05, or 1, 1, 0.37 and 0.14 of the most probable.
        let min_p = |min_p| counts(Sampling { min_p, ..sampling(1.0, None, 1.0) });
        let [a, b, c, d] = min_p(0.3);
        assert!(a == 0 && b > 0 && c > 0 && d > 0);
        let [a, b, c, d] = min_p(0.5);
        assert!(a == 0 && b > 0 && c == 0 && d > 0);
        // The share is of what the temperature makes of probabilities, as top-p's is.
        let hot = counts(Sampling { min_p: 0.5, ..sampling(2.0, None, 1.0) });
        assert!(hot[0] == 0 && hot[2] > 0, "{hot:?}");
    }

    #[test]
    fn a_penalty_makes_tokens_of_the_text_less_probable() {
        let greedy = Sampling { repetition_penalty: 2.0, ..sampling(0.0, None, 1.0) };
        assert_eq!(greedy.choose(&LOGITS, 0, &[]), Some(1));
        assert_eq!(greedy.choose(&LOGITS, 0, &[1, 1]), Some(3));
        assert_eq!(greedy.choose(&LOGITS, 0, &[1, 3, 9]), Some(2));
        assert_eq!(greedy.choose(&[-1.0, -1.5], 0, &[0]), Some(1));
    }

    #[test]
    fn log_probabilities_are_those_of_the_logits() {
        let total: f64 = LOGITS.iter().map(|x| f64::from(*x).exp()).sum();
        let expected = f64::from(LOGITS[2]) - total.ln();
        assert!((f64::from(Sampling::log_probability(&LOGITS, 2)) - expected).abs() < 1e-6);
    }

    #[test]
    fn a_draw_depends_on_seed_and_position_only() {
        let s = sampling(1.0, None, 1.0);
        let draws = |s: Sampling| (0..50).map(|p| s.choose(&LOGITS, p, &[]).unwrap()).collect::<Vec<_>>();
        assert_eq!(draws(s), draws(s));
        assert_ne!(draws(s), draws(Sampling { seed: 8, ..s }));
    }

    #[test]
    fn logits_that_are_no_numbers_give_no_token() {
        let s = sampling(1.0, Some(2), 0.9);
        assert_eq!(s.choose(&[1.0, f32::NAN], 0, &[]), None);
        assert_eq!(s.choose(&[f32::NEG_INFINITY; 3], 0, &[]), None);
        assert_eq!(s.choose(&[f32::NEG_INFINITY, 0.0], 0, &[]), Some(1));
    }

    #[test]
    fn options_without_a_meaning_are_refused() {
        for s in [
            sampling(-1.0, None, 1.0),
            sampling(f64::NAN, None, 1.0),
            sampling(1.0, Some(0), 1.0),
            sampling(1.0, None, 0.0),
            Sampling { min_p: 1.5, ..Sampling::default() },
            Sampling { repetition_penalty: 0.0, ..Sampling::default() },
        ] {
            let text = s.check().unwrap_err().with_hint();
            assert!(text.contains(" has no meaning\nhint: "), "{text}");
        }
        sampling(0.0, None, 1.0).check().unwrap();
    }
}
