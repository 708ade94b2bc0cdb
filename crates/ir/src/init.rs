//! Initial values, as pure functions of a name, a seed and an index.

use crate::counter;

/// How a tensor is filled before the first step.
#[derive(Clone, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f32,
    },
    /// All ones.
    Ones,
    /// All zeros.
    Zeros,
    /// All this number.
    All(f32),
    /// Cosines, then sines, of every position (rows) and frequency.
    RopeTable {
        /// Base of the frequencies.
        theta: f64,
        /// Long-context scaling of the frequencies.
        scaling: Option<RopeScaling>,
    },
}

/// The frequency scaling that Llama 3.1 introduced: low frequencies are divided by `factor`, high ones left as they
/// are, those between interpolated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeScaling {
    /// How much longer the context becomes.
    pub factor: f64,
    /// Wavelengths above `original_context / low_freq_factor` are scaled in full.
    pub low_freq_factor: f64,
    /// Wavelengths below `original_context / high_freq_factor` are left as they are.
    pub high_freq_factor: f64,
    /// Context length of the unscaled model.
    pub original_context: f64,
}

impl Init {
    /// Fills `out`, the tensor called `name` with `columns` elements per row, with its values under `seed`.
    pub fn fill(&self, seed: u64, name: &str, columns: usize, out: &mut [f32]) {
        self.fill_from(seed, name, columns, 0, out);
    }

    /// The same for a part of the tensor that starts with row `row`.
    pub fn fill_from(&self, seed: u64, name: &str, columns: usize, row: usize, out: &mut [f32]) {
        match self {
            Init::Ones => out.fill(1.0),
            Init::Zeros => out.fill(0.0),
            Init::All(value) => out.fill(*value),
            Init::Normal { std } => {
                let key = counter::key(seed, name);
                for (i, x) in out.iter_mut().enumerate() {
                    *x = counter::normal(key, (row * columns + i) as u64) * std;
                }
            }
            Init::RopeTable { theta, scaling } => {
                let half = columns / 2;
                for (position, row) in (row..).zip(out.chunks_exact_mut(columns)) {
                    for i in 0..half {
                        let plain = theta.powf(-(i as f64) / half as f64);
                        let frequency = scaling.map_or(plain, |s| s.apply(plain));
                        let angle = position as f64 * frequency;
                        row[i] = angle.cos() as f32;
                        row[half + i] = angle.sin() as f32;
                    }
                }
            }
        }
    }
}

impl RopeScaling {
    fn apply(&self, frequency: f64) -> f64 {
        let wavelength = 2.0 * std::f64::consts::PI / frequency;
        if wavelength < self.original_context / self.high_freq_factor {
            return frequency;
        }
        if wavelength > self.original_context / self.low_freq_factor {
            return frequency / self.factor;
        }
        let keep = (self.original_context / wavelength - self.low_freq_factor)
            / (self.high_freq_factor - self.low_freq_factor);
        (1.0 - keep) * frequency / self.factor + keep * frequency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_depends_on_its_name_and_seed_only() {
        let draw = |seed, name| {
            let mut x = vec![0.0; 8];
            Init::Normal { std: 0.02 }.fill(seed, name, 4, &mut x);
            x
        };
        assert_eq!(draw(1, "a"), draw(1, "a"));
        assert_ne!(draw(1, "a"), draw(2, "a"));
        assert_ne!(draw(1, "a"), draw(1, "b"));
    }

    #[test]
    fn rope_scaling_divides_low_frequencies_and_leaves_high_ones() {
        let s = RopeScaling { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
        assert_eq!(s.apply(1.0), 1.0);
        assert_eq!(s.apply(1e-5), 1e-5 / 8.0);
        let between = s.apply(2.0 * std::f64::consts::PI / 4000.0);
        assert!(between < 2.0 * std::f64::consts::PI / 4000.0 && between > 2.0 * std::f64::consts::PI / 32000.0);
    }
}
