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
    let fold = |s: &str| s.to_lowercase().replace('-', "_");
    strsim::osa_distance(&fold(a), &fold(b))
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
