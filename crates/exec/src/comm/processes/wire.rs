//! What processes tell each other, as bytes. They are of the same build, so there is one form of everything.

use crate::comm::peers::{Pulse, Waiting};
use crate::comm::{CommError, ProgramPlace};
use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::sync::{Mutex, PoisonError};

/// The most bytes of one note.
const MOST: u32 = 1 << 24;

/// Bytes being written.
#[derive(Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    pub fn u8(&mut self, x: u8) {
        self.0.push(x);
    }

    pub fn u32(&mut self, x: u32) {
        self.0.extend(x.to_le_bytes());
    }

    pub fn u64(&mut self, x: u64) {
        self.0.extend(x.to_le_bytes());
    }

    pub fn size(&mut self, x: usize) {
        self.u64(x as u64);
    }

    pub fn text(&mut self, text: &str) {
        self.u32(text.len() as u32);
        self.0.extend(text.as_bytes());
    }

    pub fn option<T>(&mut self, x: Option<T>, write: impl FnOnce(&mut Self, T)) {
        self.u8(u8::from(x.is_some()));
        if let Some(x) = x {
            write(self, x);
        }
    }

    pub fn place(&mut self, place: ProgramPlace) {
        self.text(place.op);
        self.option(place.layer, Self::size);
        self.size(place.micro_batch);
    }

    pub fn pulse(&mut self, pulse: Pulse) {
        self.u64(pulse.alive);
        self.option(pulse.place, Self::place);
        self.u64(pulse.since);
        self.option(pulse.waits, |to, waiting| {
            to.size(waiting.other);
            to.place(waiting.place);
            to.u64(waiting.since);
        });
    }

    pub fn error(&mut self, error: &CommError) {
        match error {
            CommError::Failed { rank, host, place, reason, hint: _ } => {
                self.u8(0);
                self.size(*rank);
                self.option(host.as_deref(), Self::text);
                self.option(*place, Self::place);
                self.text(reason);
            }
            CommError::Lost { rank, host, place, reason, seen } => {
                self.u8(1);
                self.size(*rank);
                self.text(host);
                self.option(*place, Self::place);
                self.text(reason);
                self.option(seen.as_deref().copied(), |to, (rank, place)| {
                    to.size(rank);
                    to.place(place);
                });
            }
            CommError::Cut { ranks, hosts, reason } => {
                self.u8(6);
                self.size(ranks.0);
                self.size(ranks.1);
                hosts.iter().for_each(|host| self.text(host));
                self.text(reason);
            }
            CommError::Stalled { rank, place, other, other_place, seconds, other_waits_for } => {
                self.u8(2);
                self.size(*rank);
                self.place(*place);
                self.size(*other);
                self.option(*other_place, Self::place);
                self.u32(seconds.to_bits());
                self.option(*other_waits_for, Self::size);
            }
            CommError::Left { rank, place, other } => {
                self.u8(3);
                self.size(*rank);
                self.place(*place);
                self.size(*other);
            }
            CommError::Mismatch { ranks, first, second } => {
                self.u8(4);
                self.size(ranks.0);
                self.size(ranks.1);
                self.text(first);
                self.text(second);
            }
            CommError::Refused { rank, place, reason } => {
                self.u8(5);
                self.size(*rank);
                self.place(*place);
                self.text(reason);
            }
        }
    }
}

/// Bytes being read; `None` where they end too early or say what nobody says.
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|[x]| x)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    pub fn size(&mut self) -> Option<usize> {
        self.u64()?.try_into().ok()
    }

    pub fn text(&mut self) -> Option<&'a str> {
        let length = self.u32()? as usize;
        let (text, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        std::str::from_utf8(text).ok()
    }

    /// A text that may be shown.
    pub fn shown(&mut self) -> Option<String> {
        self.text().map(plain)
    }

    /// `Some(None)` where nothing was written.
    pub fn option<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<Option<T>> {
        match self.u8()? {
            0 => Some(None),
            1 => read(self).map(Some),
            _ => None,
        }
    }

    pub fn place(&mut self) -> Option<ProgramPlace> {
        let op = interned(self.text()?);
        Some(ProgramPlace { op, layer: self.option(Self::size)?, micro_batch: self.size()? })
    }

    pub fn pulse(&mut self) -> Option<Pulse> {
        let (alive, place, since) = (self.u64()?, self.option(Self::place)?, self.u64()?);
        let waits =
            self.option(|from| Some(Waiting { other: from.size()?, place: from.place()?, since: from.u64()? }))?;
        Some(Pulse { alive, place, since, waits })
    }

    pub fn error(&mut self) -> Option<CommError> {
        Some(match self.u8()? {
            0 => CommError::Failed {
                rank: self.size()?,
                host: self.option(|from| from.shown())?,
                place: self.option(Self::place)?,
                reason: self.shown()?,
                hint: None,
            },
            1 => CommError::Lost {
                rank: self.size()?,
                host: self.shown()?,
                place: self.option(Self::place)?,
                reason: self.shown()?,
                seen: self.option(|from| Some(Box::new((from.size()?, from.place()?))))?,
            },
            2 => CommError::Stalled {
                rank: self.size()?,
                place: self.place()?,
                other: self.size()?,
                other_place: self.option(Self::place)?,
                seconds: f32::from_bits(self.u32()?),
                other_waits_for: self.option(Self::size)?,
            },
            3 => CommError::Left { rank: self.size()?, place: self.place()?, other: self.size()? },
            4 => {
                CommError::Mismatch { ranks: (self.size()?, self.size()?), first: self.shown()?, second: self.shown()? }
            }
            5 => CommError::Refused { rank: self.size()?, place: self.place()?, reason: self.shown()? },
            6 => CommError::Cut {
                ranks: (self.size()?, self.size()?),
                hosts: Box::new([self.shown()?, self.shown()?]),
                reason: self.shown()?,
            },
            _ => return None,
        })
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
pub fn write_note(mut to: impl Write, kind: u8, body: &[u8]) -> io::Result<()> {
    let mut note = Vec::with_capacity(5 + body.len());
    note.push(kind);
    note.extend((body.len() as u32).to_le_bytes());
    note.extend(body);
    to.write_all(&note)
}

/// Reads a note.
pub fn read_note(from: impl Read) -> io::Result<(u8, Vec<u8>)> {
    read_note_up_to(from, MOST)
}

/// Reads a note of at most so many bytes.
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
            let mut writer = Writer::default();
            writer.error(&error);
            let mut reader = Reader(&writer.0);
            assert_eq!(reader.error(), Some(error));
            assert!(reader.0.is_empty());
            for end in 0..writer.0.len() {
                assert_eq!(Reader(&writer.0[..end]).error(), None);
            }
        }
        let waits = Some(Waiting { other: 1, place: before, since: 9 });
        let pulse = Pulse { alive: 5, place: Some(place), since: 6, waits };
        let mut writer = Writer::default();
        writer.pulse(pulse);
        assert_eq!(Reader(&writer.0).pulse(), Some(pulse));
    }

    #[test]
    fn escapes_of_others_are_shown_escaped() {
        let mut writer = Writer::default();
        writer.error(&CommError::Lost {
            rank: 1,
            host: "\x1b[2Jn1\u{9b}31m".into(),
            place: None,
            reason: "\x07 cut\nhint".into(),
            seen: None,
        });
        let text = Reader(&writer.0).error().unwrap().to_string();
        assert!(text.contains("host \\u{1b}[2Jn1\\u{9b}31m is gone: \\u{7} cut\nhint"), "{text}");
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    }

    #[test]
    fn a_note_that_is_too_long_is_refused_before_it_is_read() {
        let mut note = Vec::new();
        write_note(&mut note, 3, b"text").unwrap();
        assert_eq!(read_note(&note[..]).unwrap(), (3, b"text".to_vec()));
        note[1..5].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(read_note(&note[..]).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
