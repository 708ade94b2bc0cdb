//! Counts with a decimal suffix: `"2K"`, `"4M"`, `"15T"`, `"4M tokens"`. Sizes in bytes: `"4 GiB"`, `"1.5 GB"`.

/// A quantity split into its number and the unit word after it, if any.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Quantity<'a> {
    pub number: u64,
    pub unit: Option<&'a str>,
}

/// Reads digits, an optional decimal fraction, an optional K, M, B or T, and an optional unit word.
/// `None` when the text has another form, is not a whole number, or passes 2⁶⁴.
pub(crate) fn parse(text: &str) -> Option<Quantity<'_>> {
    let (digits, rest) = number_and_rest(text);
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

/// A whole number with an optional decimal suffix and no unit: `15T` is 15·10¹².
pub fn count(text: &str) -> Option<u64> {
    parse(text).filter(|quantity| quantity.unit.is_none()).map(|quantity| quantity.number)
}

/// A size in bytes: a number, which may have a decimal fraction, and its unit. `None` when the text has another form or
/// passes 2⁶⁴.
pub fn bytes(text: &str) -> Option<u64> {
    let (digits, unit) = number_and_rest(text);
    let unit: u128 = match unit {
        "B" => 1,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return None,
    };
    // A millionth of a unit is fine enough.
    let millionths = scaled(digits, 6)?;
    u64::try_from(u128::from(millionths) * unit / 1_000_000).ok()
}

/// Digits with a decimal point, and what comes after them.
fn number_and_rest(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    (digits, rest.trim_start())
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
    fn sizes_have_a_unit() {
        for (text, expected) in [
            ("4 GiB", Some(4 << 30)),
            ("1.5GiB", Some(3 << 29)),
            ("80 GB", Some(80_000_000_000)),
            ("512 B", Some(512)),
            ("0.5 KiB", Some(512)),
            ("4", None),
            ("4 gib", None),
            ("GiB", None),
            ("-4 GiB", None),
            ("99999999999 TiB", None),
        ] {
            assert_eq!(bytes(text), expected, "{text:?}");
        }
        assert_eq!((count("15T"), count("4M tokens"), count("x")), (Some(15_000_000_000_000), None, None));
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
