//! Initial values, as pure functions of a name, a seed and an index.

use crate::counter;
use std::f64::consts::PI;

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

/// Scaling of frequencies for a longer context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// The one that Llama 3.1 introduced: low frequencies are divided by `factor`, high ones left as they are, those between
    /// interpolated.
    Llama3 {
        /// How much longer the context becomes.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are scaled in full.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are left as they are.
        high_freq_factor: f64,
        /// Context length of the unscaled model.
        original_context: f64,
    },
    /// All frequencies are divided by `factor`.
    Linear {
        /// How much longer the context becomes.
        factor: f64,
    },
    /// YaRN: frequencies that turn at most `beta_slow` times in the original context are divided by `factor`, those that turn at
    /// least `beta_fast` times are left as they are, those between are interpolated by their index. Cosines and sines are
    /// multiplied by `attention_factor`.
    Yarn {
        /// How much longer the context becomes.
        factor: f64,
        /// Context length of the unscaled model.
        original_context: f64,
        /// Turns from which on a frequency is left as it is.
        beta_fast: f64,
        /// Turns up to which a frequency is scaled in full.
        beta_slow: f64,
        /// Whether the indices between which is interpolated are whole numbers.
        truncate: bool,
        /// What cosines and sines are multiplied by.
        attention_factor: f64,
    },
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
                let size = scaling.map_or(1.0, |s| s.size());
                for (position, row) in (row..).zip(out.chunks_exact_mut(columns)) {
                    for i in 0..half {
                        let plain = theta.powf(-(i as f64) / half as f64);
                        let frequency = scaling.map_or(plain, |s| s.apply(plain, *theta, (i, half)));
                        let angle = position as f64 * frequency;
                        row[i] = (size * angle.cos()) as f32;
                        row[half + i] = (size * angle.sin()) as f32;
                    }
                }
            }
        }
    }
}

impl RopeScaling {
    /// What cosines and sines are multiplied by.
    fn size(&self) -> f64 {
        match self {
            RopeScaling::Llama3 { .. } | RopeScaling::Linear { .. } => 1.0,
            RopeScaling::Yarn { attention_factor, .. } => *attention_factor,
        }
    }

    /// The `i`-th of `half` frequencies of a base, scaled.
    fn apply(&self, frequency: f64, theta: f64, (i, half): (usize, usize)) -> f64 {
        match *self {
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let wavelength = 2.0 * PI / frequency;
                if wavelength < original_context / high_freq_factor {
                    return frequency;
                }
                if wavelength > original_context / low_freq_factor {
                    return frequency / factor;
                }
                let keep = (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - keep) * frequency / factor + keep * frequency
            }
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
                let width = 2 * half;
                let [low, high] =
                    yarn_range([beta_fast, beta_slow], (width as f64, theta), (original_context, truncate));
                let scaled = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                frequency * (1.0 - scaled) + frequency / factor * scaled
            }
        }
    }
}

/// The indices of frequencies between which YaRN interpolates: where one turns as often as each of `betas` in the original context.
fn yarn_range(betas: [f64; 2], (width, theta): (f64, f64), (original_context, truncate): (f64, bool)) -> [f64; 2] {
    let index = |turns: f64| width * (original_context / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let [mut low, mut high] = betas.map(index);
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(width - 1.0));
    // Nothing to interpolate between: a step.
    [low, if low == high { high + 0.001 } else { high }]
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
        let s =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
        let apply = |frequency| s.apply(frequency, 5e5, (0, 64));
        assert_eq!(apply(1.0), 1.0);
        assert_eq!(apply(1e-5), 1e-5 / 8.0);
        let between = apply(2.0 * PI / 4000.0);
        assert!(between < 2.0 * PI / 4000.0 && between > 2.0 * PI / 32000.0);
    }

    #[test]
    fn yarn_interpolates_between_the_frequencies_that_published_models_do() {
        // DeepSeek-V3, and gpt-oss, which does not truncate.
        assert_eq!(yarn_range([32.0, 1.0], (64.0, 1e4), (4096.0, true)), [10.0, 23.0]);
        let [low, high] = yarn_range([32.0, 1.0], (64.0, 150_000.0), (4096.0, false));
        assert!((low - 8.09278).abs() < 1e-5 && (high - 17.39802).abs() < 1e-5, "{low} {high}");
        let yarn = RopeScaling::Yarn {
            factor: 40.0,
            original_context: 4096.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: 1.25,
        };
        let mut table = vec![0.0; 2 * 64];
        Init::RopeTable { theta: 1e4, scaling: Some(yarn) }.fill(0, "", 64, &mut table);
        let angle = |i: usize| f64::from(table[64 + 32 + i] / 1.25).asin();
        let plain = |i: usize| 1e4f64.powf(-(i as f64) / 32.0);
        assert!((angle(10) - plain(10)).abs() < 1e-6 && (angle(23) - plain(23) / 40.0).abs() < 1e-8);
        let share = 3.0 / 13.0;
        assert!((angle(13) - plain(13) * (1.0 - share + share / 40.0)).abs() < 1e-6);
        assert!(table[..32].iter().all(|cos| *cos == 1.25), "cosines of position 0");
    }
}
