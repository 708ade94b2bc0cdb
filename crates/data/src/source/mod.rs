//! From files to stretches of text, in order, from any place on.

mod input;
mod lines;
mod nested;
mod pages;
mod rows;
mod text;

use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};

use crate::holdout::{self, HoldOut, Split};
use crate::scan::{Form, Found, SourceFile};
use crate::{Origin, Result, Tokenizer};
pub(crate) use input::Input;
use lines::Lines;
use nested::Nested;
use rows::Rows;
use text::Text;

/// The longest record that is read, in bytes of its line or of its text. It bounds the memory that one takes.
pub(crate) const MAX_RECORD_BYTES: usize = 64 << 20;

/// A stretch of text that is tokenised on its own.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) content: Content,
    /// The end of what stands before it in its document, where it continues one.
    pub(crate) context: Vec<u8>,
    pub(crate) split: Split,
    pub(crate) origin: Origin,
    /// Whether a document begins with it; if not, it continues the one before.
    pub(crate) begins: bool,
    /// Whether its document ends with it.
    pub(crate) ends: bool,
    /// Where the first byte stands in its file, for a file of text.
    pub(crate) offset: u64,
    /// Where to go on after it.
    pub(crate) after: Cursor,
    /// Bytes of all input files that have been read with it.
    pub(crate) input_bytes: u64,
}

/// The text of a unit, or what it is still in.
#[derive(Debug)]
pub(crate) enum Content {
    /// The text itself.
    Text(Vec<u8>),
    /// A JSON object with the text in a field.
    JsonLine(Vec<u8>),
    /// A prompt and the text after it.
    Completion { prompt: Vec<u8>, text: Vec<u8> },
}

/// The fields of records, or columns, that are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a> {
    pub(crate) text: &'a str,
    pub(crate) prompt: Option<&'a str>,
    /// Whether the text is a list of messages.
    pub(crate) chat: bool,
}

impl Content {
    /// How many bytes it has.
    pub(crate) fn len(&self) -> usize {
        match self {
            Content::Text(bytes) | Content::JsonLine(bytes) => bytes.len(),
            Content::Completion { prompt, text } => prompt.len() + text.len(),
        }
    }
}

/// A place between two units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cursor {
    /// The file that is next, in reading order.
    pub(crate) file: u64,
    /// Bytes of it that are done; after decompression.
    pub(crate) offset: u64,
    /// Where that offset was meant to be, before it moved to a place where text may be cut.
    pub(crate) nominal: u64,
    /// Lines or rows of the file that are done.
    pub(crate) records: u64,
    /// Records of all files that are done.
    pub(crate) ordinal: u64,
}

impl Cursor {
    fn next_file(self) -> Self {
        Cursor { file: self.file + 1, ordinal: self.ordinal, ..Cursor::default() }
    }
}

/// What is read, and how.
#[derive(Clone, Copy)]
pub(crate) struct Reading<'a> {
    pub(crate) found: &'a Found,
    pub(crate) holdout: &'a HoldOut,
    pub(crate) fields: Fields<'a>,
    /// What says where long text may be cut.
    pub(crate) tokenizer: &'a Tokenizer,
    /// Ends the work, also while it goes to the place where it left off.
    pub(crate) stop: &'a AtomicBool,
}

/// Reads the units of all files.
pub(crate) struct Units<'a> {
    reading: Reading<'a>,
    open: Option<Open>,
    at: Cursor,
    /// Pieces of the files of text before the open one.
    first_piece: u64,
    /// Bytes of the files before the open one.
    bytes_before: u64,
}

enum Open {
    Text(Text),
    Lines(Lines),
    Rows(Box<Rows>),
    Nested(Box<Nested>),
}

impl<'a> Units<'a> {
    /// The units from a place on.
    pub(crate) fn from(at: Cursor, reading: Reading<'a>) -> Self {
        let files = &reading.found.files;
        let before = &files[..files.len().min(at.file as usize)];
        Units {
            reading,
            open: None,
            at,
            first_piece: before.iter().map(holdout::pieces).sum(),
            bytes_before: before.iter().map(|file| file.bytes).sum(),
        }
    }

    /// The next unit; none after the last.
    pub(crate) fn next(&mut self) -> Result<Option<Unit>> {
        let Reading { found, holdout, fields, tokenizer, stop } = self.reading;
        while let Some(file) = found.files.get(self.at.file as usize) {
            let at = self.at;
            let open = match &mut self.open {
                Some(open) => open,
                closed => closed.insert(match file.form {
                    Form::Text => Open::Text(Text::open(file, at)?),
                    Form::Lines { compressed } => Open::Lines(Lines::open(file, compressed, at, stop)?),
                    Form::Rows if fields.chat => Open::Nested(Box::new(Nested::open(file, fields, at, stop)?)),
                    Form::Rows => Open::Rows(Box::new(Rows::open(file, fields, at, stop)?)),
                }),
            };
            let read = match open {
                Open::Text(text) => text.next(file, holdout, self.first_piece, tokenizer, at)?,
                Open::Lines(lines) => lines.next(file, holdout, at)?,
                Open::Rows(rows) => rows.next(file, holdout, at)?,
                Open::Nested(rows) => rows.next(file, holdout, at)?,
            };
            match read {
                Some(mut unit) => {
                    unit.input_bytes += self.bytes_before;
                    self.at = unit.after;
                    return Ok(Some(unit));
                }
                None => self.close(file),
            }
        }
        Ok(None)
    }

    fn close(&mut self, file: &SourceFile) {
        self.open = None;
        self.first_piece += holdout::pieces(file);
        self.bytes_before += file.bytes;
        self.at = self.at.next_file();
    }
}

/// A whole record as a unit.
fn record(content: Content, holdout: &HoldOut, at: Cursor, after_offset: u64, input_bytes: u64) -> Unit {
    let records = at.records + 1;
    Unit {
        content,
        context: Vec::new(),
        split: holdout.record(at.ordinal),
        origin: Origin { file: at.file, record: records },
        begins: true,
        ends: true,
        offset: 0,
        after: Cursor { offset: after_offset, nominal: after_offset, records, ordinal: at.ordinal + 1, ..at },
        input_bytes,
    }
}
