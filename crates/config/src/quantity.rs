//! Counts with a decimal suffix: `"2K"`, `"4M"`, `"15T"`, `"4M tokens"`.

/// A quantity split into its number and the unit word behind it, if any.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Quantity<'a> {
    pub number: u64,
    pub unit: Option<&'a str>,
}

/// Reads digits, an optional decimal fraction, an optional K, M, B or T, and an optional unit word.
/// `None` when the text has another form, is not a whole number, or passes 2⁶⁴.
pub(crate) fn parse(text: &str) -> Option<Quantity<'_>> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    let rest = rest.trim_start();
    let word_end = rest.find(char::is_whitespace).unwrap_or(rest.len());
    let (word, after) = rest.split_at(word_end);
    let after = after.trim_start();

    let (power, unit) = match (suffix_power(word), after) {
        (Some(power), "") => (power, None),
        (Some(power), unit) => (power, Some(unit)),
        (None, "") => (0, (!word.is_empty()).then_some(word)),
        (None, _) => return None,
    };
    Some(Quantity { number: scaled(digits, power)?, unit })
}

fn suffix_power(word: &str) -> Option<u32> {
    match word {
        "K" => Some(3),
        "M" => Some(6),
        "B" => Some(9),
        "T" => Some(12),
        _ => None,
    }
}

/// `digits` times ten to the `power`, exactly.
fn scaled(digits: &str, power: u32) -> Option<u64> {
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
    if whole.is_empty() || fraction.is_empty() {
        return None;
    }
    let fraction = fraction.trim_end_matches('0');
    let places = u32::try_from(fraction.len()).ok().filter(|&places| places <= power)?;
    let whole = whole.parse::<u64>().ok()?.checked_mul(10u64.pow(power))?;
    let fraction = if fraction.is_empty() { 0 } else { fraction.parse::<u64>().ok()? };
    whole.checked_add(fraction * 10u64.pow(power - places))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Option<(u64, Option<&str>)>) {
        assert_eq!(parse(text).map(|q| (q.number, q.unit)), expected, "{text:?}");
    }

    #[test]
    fn suffixes_are_decimal() {
        check("512", Some((512, None)));
        check("2K", Some((2_000, None)));
        check("1.5 M", Some((1_500_000, None)));
        check("15T", Some((15_000_000_000_000, None)));
        check("4M tokens", Some((4_000_000, Some("tokens"))));
        check("8192 tokens", Some((8192, Some("tokens"))));
        check("4 GiB", Some((4, Some("GiB"))));
    }

    #[test]
    fn other_forms_are_refused() {
        for text in ["", "M", "1.5", "1.2345K", ".5K", "5.K", "1..2K", "-4", "4 5 6", "4 big tokens", "4m x"] {
            check(text, None);
        }
        check("18446744073709551615", Some((u64::MAX, None)));
        check("18446744073709551616", None);
        check("99999999T", None);
    }
}
