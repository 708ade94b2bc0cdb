//! The gradient noise scale: how much of a gradient is chance.
//!
//! Squared norms of gradients over few and over many sequences differ by the variance of a sequence's gradient: E|g_B|² =
//! |G|² + tr Σ ÷ B. Two sizes give unbiased estimates of both terms (McCandlish et al. 2018, appendix A.1). Each is smoothed
//! on its own, since their ratio has no unbiased estimate; tr Σ ÷ |G|², in sequences, is the noise scale. Steps of more
//! sequences than it gain little from each.

use serde::{Deserialize, Serialize};

/// The squared norm of a mean gradient over some sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// How many.
    pub sequences: f64,
    /// The squared norm, or the mean of several.
    pub square: f64,
}

/// Share of what came before in the smoothed estimates.
const KEEP: f64 = 0.99;

/// The estimates of a run so far. Both lack the same factor at first, which their ratio does not see.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Noise {
    /// |G|².
    signal: f64,
    /// tr Σ.
    variance: f64,
}

impl Noise {
    /// Takes in a step.
    pub(crate) fn add(&mut self, small: Measured, large: Measured) {
        let signal =
            (large.sequences * large.square - small.sequences * small.square) / (large.sequences - small.sequences);
        let variance = (small.square - large.square) / (1.0 / small.sequences - 1.0 / large.sequences);
        // What is not finite would stay for ever.
        if signal.is_finite() && variance.is_finite() {
            self.signal = KEEP * self.signal + (1.0 - KEEP) * signal;
            self.variance = KEEP * self.variance + (1.0 - KEEP) * variance;
        }
    }

    /// The noise scale, in sequences; none while the estimates are not of a gradient and a variance.
    pub(crate) fn scale(&self) -> Option<f64> {
        (self.signal > 0.0 && self.variance >= 0.0).then(|| self.variance / self.signal)
    }

    /// As checkpoints hold it: bit by bit, so that a resumed run goes on as if it had not stopped.
    pub(crate) fn to_bits(self) -> NoiseBits {
        NoiseBits { signal: self.signal.to_bits(), variance: self.variance.to_bits() }
    }
}

/// [`Noise`] in a checkpoint.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct NoiseBits {
    signal: u64,
    variance: u64,
}

impl From<NoiseBits> for Noise {
    fn from(bits: NoiseBits) -> Self {
        Self { signal: f64::from_bits(bits.signal), variance: f64::from_bits(bits.variance) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::counter;

    #[test]
    fn the_noise_of_known_gradients_is_found() {
        // Gradients G + noise in 50 dimensions: |G|² = 50, tr Σ = 50 · 9.
        let (dims, small, large) = (50, 2, 64);
        let mut noise = Noise::default();
        for step in 0..1000u64 {
            let key = counter::key(step, "noise");
            let gradient =
                |sequence: usize, d: usize| 1.0 + 3.0 * f64::from(counter::normal(key, (sequence * dims + d) as u64));
            let mean = |n: usize| {
                let at = |d: usize| (0..n).map(|s| gradient(s, d)).sum::<f64>() / n as f64;
                Measured { sequences: n as f64, square: (0..dims).map(|d| at(d).powi(2)).sum() }
            };
            noise.add(mean(small), mean(large));
        }
        let scale = noise.scale().unwrap();
        assert!((scale / 9.0 - 1.0).abs() < 0.1, "{scale}");
    }

    #[test]
    fn equal_gradients_have_no_noise() {
        let mut noise = Noise::default();
        let at = |sequences| Measured { sequences, square: 3.0 };
        noise.add(at(1.0), at(8.0));
        assert_eq!(noise.scale(), Some(0.0));
    }

    #[test]
    fn what_is_no_number_is_left_out() {
        let mut noise = Noise::default();
        assert_eq!(noise.scale(), None);
        let at = |sequences, square| Measured { sequences, square };
        noise.add(at(1.0, 5.0), at(2.0, 4.0));
        let before = noise;
        noise.add(at(1.0, f64::NAN), at(2.0, 4.0));
        assert_eq!(noise, before);
        assert_eq!(Noise::from(noise.to_bits()), before);
    }
}
