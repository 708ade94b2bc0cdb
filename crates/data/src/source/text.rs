//! Files that are one document each.

use std::io::{self, Read, Seek, SeekFrom};

use super::lines::changed;
use super::{Content, Cursor, Input, Unit};
use crate::cut::{self, CONTEXT_BYTES, LOOK_AHEAD, PIECE_BYTES};
use crate::holdout::{HoldOut, Split};
use crate::scan::SourceFile;
use crate::{DataError, Origin, Result, Tokenizer};

/// The most text in one unit, before its end moves to a fitting place.
const UNIT_BYTES: u64 = 16 * PIECE_BYTES;

/// Reads a file of text, which must have the length it was listed with.
pub(super) struct Text {
    reader: Input,
    /// The end of what stands before the next unit, of whatever split.
    before: Vec<u8>,
    /// Bytes that were read but are after the last unit.
    ahead: Vec<u8>,
    /// The stretch of one split that was read last, and the byte it ends at.
    stretch: Option<(Split, u64)>,
}

impl Text {
    pub(super) fn open(file: &SourceFile, at: Cursor) -> Result<Self> {
        let unreadable = |cause| DataError::unreadable(&file.path, cause);
        let mut reader = Input::open(&file.path).map_err(unreadable)?;
        let mut before = vec![0; at.offset.min(CONTEXT_BYTES as u64) as usize];
        reader.seek(SeekFrom::Start(at.offset - before.len() as u64)).map_err(unreadable)?;
        reader.read_exact(&mut before).map_err(|cause| unread(file, cause))?;
        Ok(Text { reader, before, ahead: Vec::new(), stretch: None })
    }

    pub(super) fn next(
        &mut self,
        file: &SourceFile,
        holdout: &HoldOut,
        first_piece: u64,
        tokenizer: &Tokenizer,
        at: Cursor,
    ) -> Result<Option<Unit>> {
        if at.offset == file.bytes {
            return self.finish(file);
        }
        // After a restart, the byte before says whether a stretch goes on.
        let before = || Some(holdout.stretch(file, first_piece, at.nominal.checked_sub(1)?));
        let (begins, (split, stretch_end)) = match self.stretch.or_else(before) {
            Some((split, end)) if at.nominal < end => (false, (split, end)),
            _ => (true, holdout.stretch(file, first_piece, at.nominal)),
        };
        self.stretch = Some((split, stretch_end));
        // Units end at the same places wherever reading began.
        let unit_end = (at.nominal / UNIT_BYTES + 1) * UNIT_BYTES;
        let nominal = stretch_end.min(unit_end);
        let ahead = if tokenizer.is_bytes() { 0 } else { LOOK_AHEAD as u64 };
        let have = at.offset + self.ahead.len() as u64;
        let wanted = (nominal + ahead).min(file.bytes).saturating_sub(have) as usize;
        let mut text = std::mem::take(&mut self.ahead);
        let start = text.len();
        text.resize(start + wanted, 0);
        self.reader.read_exact(&mut text[start..]).map_err(|cause| unread(file, cause))?;

        let planned = (nominal - at.offset) as usize;
        let cut = if nominal == file.bytes { planned } else { tokenizer.cut(&self.before, &text, planned) };
        self.ahead = text.split_off(cut);
        let after = cut::context(&self.before, &text);
        let before = std::mem::replace(&mut self.before, after);
        let offset = at.offset + cut as u64;
        // A split that ends in the middle of the last character has nothing left after it.
        let ends = nominal == stretch_end || offset == file.bytes;
        Ok(Some(Unit {
            content: Content::Text(text),
            context: if begins { Vec::new() } else { before },
            split,
            origin: Origin { file: at.file, record: 0 },
            begins,
            ends,
            offset: at.offset,
            after: Cursor { offset, nominal, ..at },
            input_bytes: offset,
        }))
    }

    /// Checks that nothing is left.
    fn finish(&mut self, file: &SourceFile) -> Result<Option<Unit>> {
        match self.reader.read(&mut [0]) {
            Ok(0) => Ok(None),
            Ok(_) => Err(changed(file)),
            Err(cause) => Err(DataError::unreadable(&file.path, cause)),
        }
    }
}

fn unread(file: &SourceFile, cause: io::Error) -> DataError {
    match cause.kind() {
        io::ErrorKind::UnexpectedEof => changed(file),
        _ => DataError::unreadable(&file.path, cause),
    }
}
