//! What Python has and minijinja has otherwise: JSON, values as text, dates and methods of strings.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// The filter `tojson` as transformers has it: Python's `json.dumps`, which leaves letters of all scripts as they are.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let separators: Option<Vec<String>> = options.get("separators")?;
    let indent: Option<Value> = options.get("indent")?;
    let indent = match indent {
        Some(indent) if !indent.is_none() => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?.min(MOST_INDENT)),
        }),
        _ => None,
    };
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators are a pair of strings")),
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let json = Json {
        indent,
        item,
        key,
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut text = String::new();
    json.write(value, 0, &mut text)?;
    Ok(text)
}

const MOST_INDENT: usize = 64;
const MOST_DEPTH: usize = 128;

struct Json {
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sorted: bool,
}

impl Json {
    fn write(&self, value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
        if depth > MOST_DEPTH {
            return Err(Error::new(ErrorKind::InvalidOperation, "a value is too deep for JSON"));
        }
        match value.kind() {
            ValueKind::None => text.push_str("null"),
            ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => text.push_str(&match number(value) {
                number if number == "inf" => "Infinity".to_owned(),
                number if number == "-inf" => "-Infinity".to_owned(),
                number if number == "nan" => "NaN".to_owned(),
                number => number,
            }),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), text),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.items(('[', ']'), items.len(), depth, text, |at, text| self.write(&items[at], depth + 1, text))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.items(('{', '}'), keys.len(), depth, text, |at, text| {
                    self.string(&shown(&keys[at]), text);
                    text.push_str(&self.key);
                    self.write(&value.get_item(&keys[at])?, depth + 1, text)
                })?;
            }
            kind => {
                return Err(Error::new(ErrorKind::InvalidOperation, format!("a value of type {kind} is no JSON")));
            }
        }
        Ok(())
    }

    fn items(
        &self,
        (open, close): (char, char),
        count: usize,
        depth: usize,
        text: &mut String,
        mut write: impl FnMut(usize, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |depth: usize, text: &mut String| {
            if let Some(indent) = self.indent.as_ref().filter(|_| count > 0) {
                text.push('\n');
                text.push_str(&indent.repeat(depth));
            }
        };
        text.push(open);
        for at in 0..count {
            if at > 0 {
                text.push_str(&self.item);
            }
            line(depth + 1, text);
            write(at, text)?;
        }
        line(depth, text);
        text.push(close);
        Ok(())
    }

    fn string(&self, string: &str, text: &mut String) {
        text.push('"');
        for c in string.chars() {
            match c {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{8}' => text.push_str("\\b"),
                '\u{c}' => text.push_str("\\f"),
                c if c < ' ' || (self.ascii && !(' '..='~').contains(&c)) => {
                    c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| text.push_str(&format!("\\u{unit:04x}")));
                }
                c => text.push(c),
            }
        }
        text.push('"');
    }
}

/// A value as Python's `str` shows it; nothing for what is undefined.
pub(super) fn shown(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => repr(value, 0),
    }
}

/// A value as Python's `repr` shows it.
fn repr(value: &Value, depth: usize) -> String {
    if depth > MOST_DEPTH {
        return "...".to_owned();
    }
    let several = |items: &mut dyn Iterator<Item = String>| items.collect::<Vec<_>>().join(", ");
    match value.kind() {
        ValueKind::Undefined => "Undefined".to_owned(),
        ValueKind::None => "None".to_owned(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::Number => number(value),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => match value.try_iter() {
            Ok(mut items) => format!("[{}]", several(&mut items.by_ref().map(|item| repr(&item, depth + 1)))),
            Err(_) => value.to_string(),
        },
        ValueKind::Map => match value.try_iter() {
            Ok(keys) => {
                let pair = |key: Value| {
                    let item = value.get_item(&key).unwrap_or_default();
                    format!("{}: {}", repr(&key, depth + 1), repr(&item, depth + 1))
                };
                format!("{{{}}}", several(&mut keys.map(pair)))
            }
            Err(_) => value.to_string(),
        },
        _ => value.to_string(),
    }
}

fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut shown = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => shown.push_str("\\\\"),
            '\n' => shown.push_str("\\n"),
            '\r' => shown.push_str("\\r"),
            '\t' => shown.push_str("\\t"),
            c if c == quote => shown.extend(['\\', c]),
            c if c < ' ' || c == '\u{7f}' => shown.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => shown.push(c),
        }
    }
    shown.push(quote);
    shown
}

/// A number as Python shows it: floats with the fewest digits that read back, and an exponent from 1e16 on and below 1e-4.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(x) = f64::try_from(value.clone()) else { return value.to_string() };
    if !x.is_finite() {
        return if x.is_nan() {
            "nan"
        } else if x > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .to_owned();
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if x != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{x}");
    if plain.contains('.') { plain } else { format!("{plain}.0") }
}

/// Methods of strings, lists and dictionaries: those of minijinja's own package, with places counted in characters, and a few more.
pub(super) fn method(state: &State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let (Some(text), [argument]) = (value.as_str(), args)
        && let Some(part) = argument.as_str()
    {
        let place = |at: Option<usize>| Value::from(at.map_or(-1, |at| text[..at].chars().count() as i64));
        match name {
            "find" => return Ok(place(text.find(part))),
            "rfind" => return Ok(place(text.rfind(part))),
            "removeprefix" => return Ok(Value::from(text.strip_prefix(part).unwrap_or(text))),
            "removesuffix" => return Ok(Value::from(text.strip_suffix(part).unwrap_or(text))),
            _ => {}
        }
    }
    match (value.as_str(), name, args) {
        (Some(text), "title", []) => Ok(Value::from(title(text))),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// A text whose words begin with capitals: letters that follow no letter.
fn title(text: &str) -> String {
    let (mut titled, mut inside) = (String::with_capacity(text.len()), false);
    for c in text.chars() {
        match inside {
            true => titled.extend(c.to_lowercase()),
            false => titled.extend(c.to_uppercase()),
        }
        inside = c.is_alphabetic();
    }
    titled
}

/// The filter `trim`, of any value as text.
pub(super) fn trim(value: &Value, letters: Option<String>) -> String {
    let text = shown(value);
    match letters {
        None => text.trim().to_owned(),
        Some(letters) => text.trim_matches(|c| letters.contains(c)).to_owned(),
    }
}

/// The filter `length`: what is undefined has none.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    let none = || Error::new(ErrorKind::InvalidOperation, format!("a value of type {} has no length", value.kind()));
    value.len().ok_or_else(none)
}

/// Whether a value is a sequence to Jinja: something with a length and items, which strings and dictionaries are too.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::String | ValueKind::Map)
}

/// Whether Jinja can go over a value: `none` is not one of those.
pub(super) fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || value.is_undefined()
}

/// A day, counted from 1 January 1970, in the format of `strftime`.
pub(super) fn strftime(day: i64, format: &str) -> Result<String, Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const WEEKDAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let (year, month, date) = civil(day);
    let (month_name, weekday) = (MONTHS[month as usize - 1], WEEKDAYS[day.rem_euclid(7) as usize]);
    let mut text = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        let (plain, letter) = match letters.next() {
            Some('-') => (true, letters.next()),
            letter => (false, letter),
        };
        let two = |n: i64| if plain { n.to_string() } else { format!("{n:02}") };
        text += &match letter {
            Some('Y') => year.to_string(),
            Some('y') => two(year.rem_euclid(100)),
            Some('m') => two(month),
            Some('d') => two(date),
            Some('e') => format!("{date:2}"),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('F') => format!("{year}-{month:02}-{date:02}"),
            Some('D') => format!("{month:02}/{date:02}/{:02}", year.rem_euclid(100)),
            // A day has no time.
            Some('H' | 'M' | 'S') => two(0),
            Some('T') => "00:00:00".to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let other = other.map_or(String::new(), |c| c.to_string());
                let problem = format!("strftime_now: %{other} is not supported");
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            }
        };
    }
    Ok(text)
}

/// Year, month and day of a day counted from 1 January 1970. Years begin in March here, so that leap days are their last.
fn civil(day: i64) -> (i64, i64, i64) {
    let day = day + 719_468;
    let (era, of_era) = (day.div_euclid(146_097), day.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let date = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year + era * 400 + i64::from(month <= 2), month, date)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_shown_as_python_shows_them() {
        for (x, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (123_456.789, "123456.789"),
            (1.5e300, "1.5e+300"),
        ] {
            assert_eq!(number(&Value::from(x)), text);
        }
        assert_eq!(number(&Value::from(-12)), "-12");
    }

    #[test]
    fn values_are_shown_as_python_shows_them() {
        let value: Value = serde_json::from_str(r#"{"a": [1, 2.5, null, true, "it's", "\"'\n"], "é": {}}"#).unwrap();
        assert_eq!(shown(&value), "{'a': [1, 2.5, None, True, \"it's\", '\"\\'\\n'], 'é': {}}");
        assert_eq!(shown(&Value::from("it's")), "it's");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (day, text) in
            [(0, "01 Jan 1970 Thursday"), (19_782, "29 Feb 2024 Thursday"), (20_774, "17 Nov 2026 Tuesday")]
        {
            assert_eq!(strftime(day, "%d %b %Y %A").unwrap(), text);
        }
        assert_eq!(strftime(-1, "%F %-d %% %y").unwrap(), "1969-12-31 31 % 69");
        assert!(strftime(0, "%Q").unwrap_err().to_string().contains("%Q is not supported"));
    }
}
