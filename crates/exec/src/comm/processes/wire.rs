//! What processes tell each other: notes, whose bodies are JSON. They are of the same build, so there is one form of everything.

use crate::comm::ProgramPlace;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::sync::{Mutex, PoisonError};

/// The most bytes of one note.
const MOST: u32 = 1 << 24;

/// Something as bytes.
pub fn written(what: &(impl Serialize + ?Sized)) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(&mut bytes, what);
    bytes
}

/// The same, after other bytes.
pub fn write(to: &mut Vec<u8>, what: &(impl Serialize + ?Sized)) {
    serde_json::to_writer(to, what).unwrap_or_else(|error| unreachable!("what is told has a form: {error}"));
}

/// What these bytes say, with texts that may be shown; `None` where they end too early or say what nobody says.
pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    fn show(value: &mut Value) {
        match value {
            Value::String(text) => *text = plain(text),
            Value::Array(all) => all.iter_mut().for_each(show),
            Value::Object(fields) => fields.values_mut().for_each(show),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
    let mut value = serde_json::from_slice(bytes).ok()?;
    show(&mut value);
    serde_json::from_value(value).ok()
}

impl Serialize for ProgramPlace {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        (self.op, self.layer, self.micro_batch).serialize(to)
    }
}

impl<'de> Deserialize<'de> for ProgramPlace {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let (op, layer, micro_batch) = <(String, _, _)>::deserialize(from)?;
        Ok(Self { op: interned(&op), layer, micro_batch })
    }
}

/// A text of another process as it may be shown: control characters, which a terminal would obey, are escaped.
pub fn plain(text: &str) -> String {
    let escaped = |c: char| match c.is_control() && c != '\n' {
        true => c.escape_default().collect::<String>(),
        false => c.to_string(),
    };
    text.chars().map(escaped).collect()
}

/// The name of an op as a text that lasts. Few are ever heard of.
fn interned(text: &str) -> &'static str {
    const MOST_NAMES: usize = 4096;
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(name) = names.get(text) {
        return name;
    }
    if names.len() == MOST_NAMES {
        return "another op";
    }
    let name: &'static str = Box::leak(text.to_owned().into_boxed_str());
    names.insert(name);
    name
}

/// Writes a note: its kind, its length, its bytes.
pub fn write_note(mut to: impl Write, kind: u8, body: &(impl Serialize + ?Sized)) -> io::Result<()> {
    let body = written(body);
    to.write_all(&[&[kind][..], &(body.len() as u32).to_le_bytes(), &body].concat())
}

/// Reads a note.
pub fn read_note(from: impl Read) -> io::Result<(u8, Vec<u8>)> {
    read_note_up_to(from, MOST)
}

/// Reads a note of at most this many bytes.
pub fn read_note_up_to(mut from: impl Read, most: u32) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    from.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let length = u32::from_le_bytes(length);
    if length > most {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a note that is too long"));
    }
    let mut body = vec![0; length as usize];
    from.read_exact(&mut body)?;
    Ok((kind, body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::CommError;
    use crate::comm::peers::{Pulse, Waiting};

    #[test]
    fn what_is_written_is_read() {
        let place = ProgramPlace { op: "all_reduce", layer: Some(3), micro_batch: 7 };
        let before = ProgramPlace { layer: None, ..place };
        let errors = [
            CommError::Failed {
                rank: 2,
                host: Some("n1".into()),
                place: Some(place),
                reason: "no more memory".into(),
                hint: None,
            },
            CommError::Failed { rank: 2, host: None, place: None, reason: String::new(), hint: None },
            CommError::Lost {
                rank: 1,
                host: "n1".into(),
                place: Some(before),
                reason: "cut".into(),
                seen: Some(Box::new((0, place))),
            },
            CommError::Stalled {
                rank: 0,
                place,
                other: 1,
                other_place: Some(before),
                seconds: 1.5,
                other_waits_for: Some(2),
            },
            CommError::Cut { ranks: (1, 2), hosts: Box::new(["a".into(), "b".into()]), reason: "cut".into() },
            CommError::Left { rank: 0, place, other: 3 },
            CommError::Mismatch { ranks: (0, 4), first: "a".into(), second: "b".into() },
            CommError::Refused { rank: 5, place, reason: "u32".into() },
        ];
        for error in errors {
            let bytes = written(&error);
            assert_eq!(read(&bytes), Some(error));
            for end in 0..bytes.len() {
                assert_eq!(read::<CommError>(&bytes[..end]), None);
            }
        }
        let waits = Some(Waiting { other: 1, place: before, since: 9 });
        let pulse = Pulse { alive: 5, place: Some(place), since: 6, waits };
        assert_eq!(read(&written(&pulse)), Some(pulse));
    }

    #[test]
    fn escapes_of_others_are_shown_escaped() {
        let (host, reason) = ("\x1b[2Jn1\u{9b}31m".into(), "\x07 cut\nhint".into());
        let bytes = written(&CommError::Lost { rank: 1, host, place: None, reason, seen: None });
        let text = read::<CommError>(&bytes).unwrap().to_string();
        assert!(text.contains("host \\u{1b}[2Jn1\\u{9b}31m is gone: \\u{7} cut\nhint"), "{text}");
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    }

    #[test]
    fn a_note_that_is_too_long_is_refused_before_it_is_read() {
        let mut note = Vec::new();
        write_note(&mut note, 3, "text").unwrap();
        assert_eq!(read_note(&note[..]).unwrap(), (3, b"\"text\"".to_vec()));
        note[1..5].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(read_note(&note[..]).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
