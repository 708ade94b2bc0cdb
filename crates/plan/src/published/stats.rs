//! Statistics of predictions: errors in sum, and whether layouts come out in the right order.

use serde::Serialize;

/// A list of errors in sum. Errors are fractions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Errors {
    /// How many there are.
    pub rows: usize,
    /// The middle one.
    pub median: f64,
    /// Their mean.
    pub mean: f64,
    /// Nine of ten are not larger.
    pub p90: f64,
}

impl Errors {
    /// Of these errors; `None` where there are none.
    pub fn of(errors: &[f64]) -> Option<Self> {
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        Some(Self { rows: errors.len(), median: quantile(errors, 0.5)?, mean, p90: quantile(errors, 0.9)? })
    }
}

/// The value that so great a share of the others does not exceed, between neighbours in proportion.
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = share * sorted.len().checked_sub(1)? as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    Some(sorted[low] + (sorted[high] - sorted[low]) * (at - low as f64))
}

/// Ranks of values, from 1; equal values share the mean of theirs.
fn ranks(values: &[f64]) -> Vec<f64> {
    let below = |x: f64| values.iter().filter(|y| **y < x).count() as f64;
    let equal = |x: f64| values.iter().filter(|y| **y == x).count() as f64;
    values.iter().map(|x| below(*x) + (equal(*x) + 1.0) / 2.0).collect()
}

/// Spearman's rank correlation of pairs; `None` for fewer than two, or where one side is all equal.
pub fn spearman(pairs: &[(f64, f64)]) -> Option<f64> {
    let (a, b): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
    let (a, b) = (ranks(&a), ranks(&b));
    let mean = (pairs.len() as f64 + 1.0) / 2.0;
    let covariance = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum::<f64>();
    let scale = (covariance(&a, &a) * covariance(&b, &b)).sqrt();
    (pairs.len() > 1 && scale > 0.0).then(|| covariance(&a, &b) / scale)
}

/// How much longer than the best measured time the best of the first `tries` by prediction took, as a fraction. Pairs are (predicted,
/// measured) times.
pub fn regret(pairs: &[(f64, f64)], tries: usize) -> Option<f64> {
    let mut by_prediction = pairs.to_vec();
    by_prediction.sort_by(|a, b| a.0.total_cmp(&b.0));
    let least = |pairs: &[(f64, f64)]| pairs.iter().map(|p| p.1).min_by(f64::total_cmp);
    Some(least(&by_prediction[..tries.min(pairs.len())])? / least(pairs)? - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_neighbours() {
        assert_eq!(quantile(&[3.0, 1.0, 2.0], 0.5), Some(2.0));
        assert_eq!(quantile(&[1.0, 2.0, 3.0, 4.0], 0.5), Some(2.5));
        assert_eq!(quantile(&[0.0, 10.0], 0.9), Some(9.0));
        assert_eq!(quantile(&[], 0.5), None);
        let errors = Errors::of(&[0.1, 0.2, 0.6]).unwrap();
        assert_eq!((errors.rows, errors.median), (3, 0.2));
        assert!((errors.mean - 0.3).abs() < 1e-12 && (errors.p90 - 0.52).abs() < 1e-12, "{errors:?}");
    }

    #[test]
    fn spearman_is_that_of_ranks() {
        assert_eq!(spearman(&[(1.0, 10.0), (2.0, 1000.0), (3.0, 1e6)]), Some(1.0));
        assert_eq!(spearman(&[(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]), Some(-1.0));
        // Ranks 1 2 3 4 against 2 1 4 3: 1 − 6·4 / (4·15).
        let of = spearman(&[(1.0, 2.0), (2.0, 1.0), (3.0, 4.0), (4.0, 3.0)]).unwrap();
        assert!((of - 0.6).abs() < 1e-12, "{of}");
        // Ranks 1 2 3 against 1.5 1.5 3.
        let of = spearman(&[(1.0, 5.0), (2.0, 5.0), (3.0, 9.0)]).unwrap();
        assert!((of - 1.5 / (2.0f64 * 1.5).sqrt()).abs() < 1e-12, "{of}");
        assert_eq!(spearman(&[(1.0, 2.0)]), None);
        assert_eq!(spearman(&[(1.0, 2.0), (2.0, 2.0)]), None);
    }

    #[test]
    fn regret_is_what_the_predicted_best_takes_longer_than_the_measured_best() {
        let pairs = [(1.0, 1.2), (2.0, 1.0), (3.0, 2.0)];
        assert!((regret(&pairs, 1).unwrap() - 0.2).abs() < 1e-12);
        assert_eq!(regret(&pairs, 2), Some(0.0));
        assert_eq!(regret(&pairs, 5), Some(0.0));
        assert_eq!(regret(&[], 1), None);
    }
}
