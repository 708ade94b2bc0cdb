//! "Did you mean": the nearest of a few known names.

/// The candidate closest to `given`, if one is close enough to be a slip of the hand.
pub fn nearest<'a>(given: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    const LONGEST: usize = 40;
    if given.is_empty() || given.len() > LONGEST {
        return None;
    }
    let allowed = (given.chars().count() / 3).max(1);
    candidates
        .into_iter()
        .map(|candidate| (distance(given, candidate), candidate))
        .filter(|&(d, _)| d <= allowed)
        .min_by_key(|&(d, _)| d)
        .map(|(_, candidate)| candidate)
}

/// Edit distance in which swapping two neighbours is one edit; letter case and `-` for `_` are free.
fn distance(a: &str, b: &str) -> usize {
    let fold = |s: &str| -> Vec<char> { s.to_lowercase().replace('-', "_").chars().collect() };
    let (a, b) = (fold(a), fold(b));
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let replace = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let mut best = replace.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                    best = best.min(rows[i - 2][j - 2] + 1);
                }
                best
            };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_found_and_other_words_are_not() {
        let keys = ["steps", "seq", "seed", "micro_batch"];
        assert_eq!(nearest("stesp", keys), Some("steps"));
        assert_eq!(nearest("step", keys), Some("steps"));
        assert_eq!(nearest("micro-batch", keys), Some("micro_batch"));
        assert_eq!(nearest("Seed", keys), Some("seed"));
        assert_eq!(nearest("banana", keys), None);
        assert_eq!(nearest("", keys), None);
        assert_eq!(nearest(&"s".repeat(100_000), keys), None);
    }
}
