//! The numbers of a line of `metrics.jsonl`.

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::fmt;

/// Calls `each` with the key and the value of every number of a JSON object, in their order. What is inside of an array or of
/// another object has its index or key after a slash: `rank_busy_s/3`. A null is a number that was not finite, and NaN here; text
/// is left out.
pub fn each_scalar(line: &str, each: &mut dyn FnMut(&str, f64)) -> Result<(), serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(line);
    Scalars { key: &mut String::new(), each }.deserialize(&mut deserializer)?;
    deserializer.end()
}

struct Scalars<'a> {
    /// Of the value that is read.
    key: &'a mut String,
    each: &'a mut dyn FnMut(&str, f64),
}

impl Scalars<'_> {
    fn number<E: Error>(self, value: f64) -> Result<(), E> {
        if self.key.is_empty() {
            return Err(E::custom("a line of metrics is an object"));
        }
        (self.each)(self.key, value);
        Ok(())
    }

    /// Reads a value whose key is this after ours.
    fn inside<R>(&mut self, name: fmt::Arguments<'_>, read: impl FnOnce(Scalars<'_>) -> R) -> R {
        let before = self.key.len();
        let slash = if before == 0 { "" } else { "/" };
        // Writing to a string does not fail.
        let _ = fmt::Write::write_fmt(self.key, format_args!("{slash}{name}"));
        let result = read(Scalars { key: self.key, each: self.each });
        self.key.truncate(before);
        result
    }
}

impl<'de> DeserializeSeed<'de> for Scalars<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Scalars<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of numbers")
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<(), E> {
        self.number(value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<(), E> {
        self.number(value as f64)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<(), E> {
        self.number(value as f64)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<(), E> {
        self.number(f64::from(u8::from(value)))
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.number(f64::NAN)
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<Cow<'_, str>>()? {
            self.inside(format_args!("{key}"), |inner| map.next_value_seed(inner))?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut array: A) -> Result<(), A::Error> {
        let mut index = 0;
        while self.inside(format_args!("{index}"), |inner| array.next_element_seed(inner))?.is_some() {
            index += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(line: &str) -> Vec<(String, f64)> {
        let mut found = Vec::new();
        each_scalar(line, &mut |key, value| found.push((key.to_owned(), value))).unwrap();
        found
    }

    #[test]
    fn numbers_have_their_keys_and_their_bits() {
        let found =
            all(r#"{"step":3,"lr":1.0000000000000002e-4,"name":"x","ranks":[0.5,{"b":-2}],"ok":true,"loss":null}"#);
        let expected =
            [("step", 3.0), ("lr", 1.0000000000000002e-4), ("ranks/0", 0.5), ("ranks/1/b", -2.0), ("ok", 1.0)];
        for ((key, value), (name, number)) in found.iter().zip(expected) {
            assert_eq!((key.as_str(), value.to_bits()), (name, f64::to_bits(number)));
        }
        assert!(found[5].0 == "loss" && found[5].1.is_nan() && found.len() == 6);
    }

    #[test]
    fn what_is_no_line_of_metrics_is_refused() {
        for line in ["", "3", "null", "{\"step\":1", "{} {}", "[1]extra", "nonsense", "{\"a\":1}x"] {
            assert!(each_scalar(line, &mut |_, _| ()).is_err(), "{line}");
        }
    }
}
