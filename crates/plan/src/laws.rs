//! Scaling laws: how large a model and how many tokens a budget of compute is best spent on, by two published fits, and what a
//! smaller model that is trained longer costs in loss.
//!
//! C is training compute in FLOPs, N parameters, D tokens, and C = 6·N·D, as both papers count.

use serde::Serialize;

/// A model size and its tokens, for some compute.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ModelAndTokens {
    /// Parameters.
    pub parameters: f64,
    /// Training tokens.
    pub tokens: f64,
}

impl ModelAndTokens {
    /// Tokens per parameter.
    pub fn ratio(&self) -> f64 {
        self.tokens / self.parameters
    }

    /// What a budget of FLOPs buys at this many tokens per parameter.
    pub fn at_ratio(flops: f64, ratio: f64) -> Self {
        let parameters = (flops / (6.0 * ratio)).sqrt();
        Self { parameters, tokens: ratio * parameters }
    }

    /// What a budget of FLOPs buys for a model of this many parameters.
    pub fn of_size(flops: f64, parameters: f64) -> Self {
        Self { parameters, tokens: flops / (6.0 * parameters) }
    }
}

/// Chinchilla's approach 2 (IsoFLOP profiles): N ∝ C^0.49. Hoffmann et al. 2022 (arXiv 2203.15556), the exponent from table 2, the constant
/// from table A3: 1.20·10²⁰ FLOPs are best spent on 1 billion parameters and 20.0 billion tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct IsoFlop {
    /// Exponent of the parameters.
    pub exponent: f64,
    /// A known point: parameters.
    pub parameters: f64,
    /// A known point: FLOPs.
    pub flops: f64,
}

/// The published values.
pub const CHINCHILLA_APPROACH_2: IsoFlop = IsoFlop { exponent: 0.49, parameters: 1e9, flops: 1.20e20 };

impl IsoFlop {
    /// The best use of some compute.
    pub fn best(&self, flops: f64) -> ModelAndTokens {
        ModelAndTokens::of_size(flops, self.parameters * (flops / self.flops).powf(self.exponent))
    }
}

/// The parametric law of Chinchilla's approach 3: L(N, D) = E + A·N^−α + B·D^−β, in nats per token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LossLaw {
    /// Loss that no model and no data take away.
    pub irreducible: f64,
    /// A.
    pub parameters: f64,
    /// α.
    pub parameters_exponent: f64,
    /// B.
    pub tokens: f64,
    /// β.
    pub tokens_exponent: f64,
}

/// The 2024 refit of approach 3: Besiroglu et al. 2024, Chinchilla Scaling: A replication attempt (arXiv 2404.10102), table 1. Standard
/// errors are 0.03 of E, 124.58 of A, 1293.23 of B and 0.02 of both exponents.
pub const BESIROGLU_2024: LossLaw = LossLaw {
    irreducible: 1.8172,
    parameters: 482.01,
    parameters_exponent: 0.3478,
    tokens: 2085.43,
    tokens_exponent: 0.3658,
};

impl LossLaw {
    /// The predicted loss, in nats per token of the data and tokenizer that the law was fitted on.
    pub fn loss(&self, at: ModelAndTokens) -> f64 {
        self.irreducible
            + self.parameters * at.parameters.powf(-self.parameters_exponent)
            + self.tokens * at.tokens.powf(-self.tokens_exponent)
    }

    /// The best use of some compute.
    pub fn best(&self, flops: f64) -> ModelAndTokens {
        let (a, b) = (self.parameters_exponent, self.tokens_exponent);
        let g = (a * self.parameters / (b * self.tokens)).powf(1.0 / (a + b));
        ModelAndTokens::of_size(flops, g * (flops / 6.0).powf(b / (a + b)))
    }

    /// The least compute that reaches the loss of such a model: what over-training costs.
    pub fn least_flops(&self, loss: f64) -> Option<f64> {
        if loss <= self.irreducible {
            return None;
        }
        let (mut low, mut high) = (1.0f64, 1e40f64);
        for _ in 0..200 {
            let middle = (low * high).sqrt();
            if self.loss(self.best(middle)) > loss { low = middle } else { high = middle }
        }
        Some((low * high).sqrt())
    }
}

/// A line through points in logarithms: y = factor · x^exponent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PowerLaw {
    /// At x = 1.
    pub factor: f64,
    /// The exponent.
    pub exponent: f64,
    /// The share of the variance of ln y that it explains.
    pub r_squared: f64,
    /// Points that it rests on.
    pub points: usize,
}

impl PowerLaw {
    /// By least squares on the logarithms of the points that have some; none where these are fewer than two different ones.
    pub fn fit(points: &[(f64, f64)]) -> Option<Self> {
        let usable = |(x, y): &&(f64, f64)| *x > 0.0 && *y > 0.0 && x.is_finite() && y.is_finite();
        let logs: Vec<(f64, f64)> = points.iter().filter(usable).map(|(x, y)| (x.ln(), y.ln())).collect();
        let n = logs.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| logs.iter().map(of).sum::<f64>() / n;
        let (x, y) = (mean(|p| p.0), mean(|p| p.1));
        let sum = |of: &dyn Fn(&(f64, f64)) -> f64| logs.iter().map(of).sum::<f64>();
        let (xx, xy) = (sum(&|p| (p.0 - x).powi(2)), sum(&|p| (p.0 - x) * (p.1 - y)));
        let yy = sum(&|p| (p.1 - y).powi(2));
        if logs.len() < 2 || xx <= 1e-12 {
            return None;
        }
        let exponent = xy / xx;
        let r_squared = if yy > 0.0 { xy * xy / (xx * yy) } else { 1.0 };
        Some(Self { factor: (y - exponent * x).exp(), exponent, r_squared, points: logs.len() })
    }

    /// The value at `x`.
    pub fn at(&self, x: f64) -> f64 {
        self.factor * x.powf(self.exponent)
    }

    /// Where it has the value `y`.
    pub fn reaches(&self, y: f64) -> Option<f64> {
        Some((y / self.factor).powf(1.0 / self.exponent)).filter(|x| x.is_finite() && *x > 0.0)
    }
}

/// A size of the batch, and from how many tokens on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RampStep {
    /// Tokens that the run has seen.
    pub tokens: u64,
    /// Sequences of a step from there on.
    pub sequences: usize,
}

/// The batch ramp that a noise scale over tokens suggests: twice the batch whenever the noise scale has come to it, from a batch of
/// this many sequences to the last of `tokens`. Empty where the noise scale does not grow.
pub fn batch_ramp(noise_sequences: &PowerLaw, first: usize, tokens: u64) -> Vec<RampStep> {
    const MOST: usize = 12;
    let mut ramp = Vec::new();
    if noise_sequences.exponent <= 0.0 {
        return ramp;
    }
    let mut sequences = first;
    for _ in 0..MOST {
        sequences = sequences.saturating_mul(2);
        match noise_sequences.reaches(sequences as f64) {
            Some(at) if at < tokens as f64 => {
                // Three digits are as many as are known; steps of the ramp come in order.
                let digits = 10f64.powf(at.max(1.0).log10().floor() - 2.0).max(1.0);
                let tokens = ((at / digits).round() * digits) as u64;
                match ramp.last() {
                    Some(RampStep { tokens: before, .. }) if *before >= tokens => break,
                    _ => ramp.push(RampStep { tokens: tokens.max(1), sequences }),
                }
            }
            _ => break,
        }
    }
    ramp
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn approach_2_gives_its_published_table() {
        // FLOPs, parameters, tokens: Hoffmann et al. 2022, table A3.
        for (flops, parameters, tokens) in
            [(1.84e19, 0.4e9, 7.7e9), (1.20e20, 1e9, 20.0e9), (1.32e22, 10e9, 219.5e9), (6.88e23, 67e9, 1.7e12)]
        {
            let best = CHINCHILLA_APPROACH_2.best(flops);
            assert!((best.parameters / parameters - 1.0).abs() < 0.05, "{flops}: {best:?}");
            assert!((best.tokens / tokens - 1.0).abs() < 0.05, "{flops}: {best:?}");
        }
    }

    #[test]
    fn the_refit_is_at_its_least_where_it_says_and_near_twenty_tokens_per_parameter() {
        for flops in [1e19, 5.76e23, 1e26] {
            let best = BESIROGLU_2024.best(flops);
            let loss = BESIROGLU_2024.loss(best);
            for factor in [0.5, 0.8, 1.25, 2.0] {
                let other = ModelAndTokens::of_size(flops, factor * best.parameters);
                assert!(BESIROGLU_2024.loss(other) > loss, "{flops} {factor}");
            }
            assert!((15.0..26.0).contains(&best.ratio()), "{flops}: {}", best.ratio());
            let least = BESIROGLU_2024.least_flops(loss).unwrap();
            assert!((least / flops - 1.0).abs() < 1e-6);
        }
        // Chinchilla itself: 70B parameters on 1.4T tokens.
        let best = BESIROGLU_2024.best(5.76e23);
        assert!((60e9..80e9).contains(&best.parameters), "{best:?}");
        let over = ModelAndTokens::at_ratio(5.76e23, 1000.0);
        assert!((over.ratio() - 1000.0).abs() < 1e-6 && BESIROGLU_2024.loss(over) > BESIROGLU_2024.loss(best));
        assert_eq!(BESIROGLU_2024.least_flops(1.5), None);
    }

    #[test]
    fn a_power_law_is_found_again_and_its_ramp_doubles_where_it_says() {
        let law = |x: f64| 3e-4 * x.powf(0.5);
        let points: Vec<(f64, f64)> = (1..200).map(|i| (1e6 * f64::from(i), law(1e6 * f64::from(i)))).collect();
        let found = PowerLaw::fit(&points).unwrap();
        assert!((found.exponent - 0.5).abs() < 1e-9 && found.r_squared > 0.999_999, "{found:?}");
        assert!((found.at(1e8) / law(1e8) - 1.0).abs() < 1e-9);
        let ramp = batch_ramp(&found, 2, 1_000_000_000);
        // 4 sequences at (4 / 3e-4)² = 1.78e8 tokens, 8 at 7.11e8.
        let expected = [(178_000_000, 4), (711_000_000, 8)].map(|(tokens, sequences)| RampStep { tokens, sequences });
        assert_eq!(ramp, expected);
        assert_eq!(batch_ramp(&PowerLaw { exponent: -0.1, ..found }, 2, 1 << 40), []);
        assert_eq!(PowerLaw::fit(&[(1.0, 2.0), (1.0, 3.0), (f64::NAN, 1.0), (0.0, 1.0)]), None);
    }
}
