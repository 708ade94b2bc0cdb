//! Files of a JSON object per line, plain or compressed.

use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{Content, Cursor, Input, MAX_RECORD_BYTES, Unit, record};
use crate::holdout::HoldOut;
use crate::scan::SourceFile;
use crate::stop::go_on;
use crate::{DataError, Result};

/// Bytes that are passed over at a time on the way to where reading goes on.
const SKIP_BYTES: u64 = 16 << 20;

/// Reads the lines that are not blank.
pub(super) struct Lines {
    reader: Box<dyn BufRead>,
    /// Bytes read of the file itself.
    raw: Arc<AtomicU64>,
    compressed: bool,
}

impl Lines {
    pub(super) fn open(file: &SourceFile, compressed: bool, at: Cursor, stop: &AtomicBool) -> Result<Self> {
        let unreadable = |cause| DataError::unreadable(&file.path, cause);
        let mut opened = Input::open(&file.path).map_err(unreadable)?;
        let raw = Arc::new(AtomicU64::new(0));
        let reader: Box<dyn BufRead> = if compressed {
            let counted = Counted { reader: opened, count: raw.clone() };
            let decoder = zstd::stream::read::Decoder::new(counted).map_err(unreadable)?;
            let mut reader = BufReader::with_capacity(1 << 18, decoder);
            let mut left = at.offset;
            while left > 0 {
                go_on(stop)?;
                let here = left.min(SKIP_BYTES);
                match io::copy(&mut (&mut reader).take(here), &mut io::sink()) {
                    Ok(bytes) if bytes == here => left -= here,
                    Ok(_) => return Err(changed(file)),
                    Err(cause) => return Err(damaged(file, at.records + 1, &cause)),
                }
            }
            Box::new(reader)
        } else {
            opened.seek(SeekFrom::Start(at.offset)).map_err(unreadable)?;
            raw.store(at.offset, Ordering::Relaxed);
            Box::new(BufReader::with_capacity(1 << 18, Counted { reader: opened, count: raw.clone() }))
        };
        Ok(Lines { reader, raw, compressed })
    }

    pub(super) fn next(&mut self, file: &SourceFile, holdout: &HoldOut, mut at: Cursor) -> Result<Option<Unit>> {
        loop {
            let mut line = Vec::new();
            let read = self.line(&mut line).map_err(|cause| match self.compressed {
                true => damaged(file, at.records + 1, &cause),
                false => DataError::unreadable(&file.path, cause),
            })?;
            if line.len() > MAX_RECORD_BYTES {
                let problem = format!("a line longer than {} MiB", MAX_RECORD_BYTES >> 20);
                let hint = "check that the file has one JSON object per line, or divide the document";
                return Err(DataError::record(&file.path, at.records + 1, problem, hint));
            }
            if read == 0 {
                return if self.raw.load(Ordering::Relaxed) == file.bytes { Ok(None) } else { Err(changed(file)) };
            }
            if !line.trim_ascii().is_empty() {
                let raw = self.raw.load(Ordering::Relaxed).min(file.bytes);
                return Ok(Some(record(Content::JsonLine(line), holdout, at, at.offset + read, raw)));
            }
            at = Cursor { offset: at.offset + read, records: at.records + 1, ..at };
        }
    }

    /// Reads up to and with the next line end, but little more than the longest record. Gives the bytes read.
    fn line(&mut self, line: &mut Vec<u8>) -> io::Result<u64> {
        let mut read = 0;
        loop {
            let available = match self.reader.fill_buf() {
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => continue,
                result => result?,
            };
            let end = memchr::memchr(b'\n', available);
            let taken = end.map_or(available.len(), |end| end + 1);
            line.extend(&available[..end.unwrap_or(taken)]);
            self.reader.consume(taken);
            read += taken as u64;
            if end.is_some() || taken == 0 || line.len() > MAX_RECORD_BYTES {
                return Ok(read);
            }
        }
    }
}

/// Counts what is read through it.
struct Counted {
    reader: Input,
    count: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.count.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

fn damaged(file: &SourceFile, line: u64, cause: &io::Error) -> DataError {
    let problem = format!("the compressed data are damaged or cut off in this line: {cause}");
    DataError::record(&file.path, line, problem, "get the file again, or check it with `zstd --test`")
}

/// A file that was written to between its listing and its reading.
pub(super) fn changed(file: &SourceFile) -> DataError {
    DataError::Changed { path: file.path.clone(), bytes: file.bytes }
}
