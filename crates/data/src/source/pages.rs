//! The pages of a Parquet file, looked at before the library reads them: it believes the sizes in their headers and makes
//! room for them.

use std::io::{self, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use parquet::errors::{ParquetError, Result};
use parquet::file::reader::{ChunkReader, Length};

use super::Input;

/// The largest page that is read, after decompression; writers aim at 1 MiB.
const MAX_PAGE_BYTES: i64 = 256 << 20;

/// A file whose pages are checked.
pub(super) struct Pages {
    file: Input,
    /// Whether reads are of pages; before, they are of the footer.
    begun: Arc<AtomicBool>,
}

impl Pages {
    /// The file, and what to set when its footer has been read.
    pub(super) fn new(file: Input) -> (Self, Arc<AtomicBool>) {
        let begun = Arc::new(AtomicBool::new(false));
        (Pages { file, begun: begun.clone() }, begun)
    }
}

impl Length for Pages {
    fn len(&self) -> u64 {
        self.file.len()
    }
}

impl ChunkReader for Pages {
    type T = BufReader<Input>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        if self.begun.load(Ordering::Relaxed) {
            check(&mut self.file.get_read(start)?)?;
        }
        self.file.get_read(start)
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        self.file.get_bytes(start, length)
    }
}

/// Refuses a page header that asks for more than a page has. Headers that cannot be read are left to the library.
fn check(header: &mut impl Read) -> Result<()> {
    let mut sizes = Sizes::default();
    // Whatever was found before the header turned out to be damaged counts.
    let _ = structure(header, 0, 0, &mut |depth, parent, field, value| match (depth, parent, field) {
        (0, _, 2) => sizes.page = sizes.page.max(value),
        (1, 7, 1) => sizes.dictionary = sizes.dictionary.max(value),
        _ => {}
    });
    // A string of a dictionary has four bytes of length at least.
    match sizes.page > MAX_PAGE_BYTES || sizes.dictionary > sizes.page / 4 {
        true => Err(ParquetError::General(format!(
            "a page of {} bytes with a dictionary of {} strings",
            sizes.page, sizes.dictionary
        ))),
        false => Ok(()),
    }
}

/// What a page header says of its size.
#[derive(Default)]
struct Sizes {
    /// Bytes after decompression.
    page: i64,
    /// Strings of a dictionary.
    dictionary: i64,
}

/// Deepest structure in a structure of a page header that is looked at; the format has two.
const DEPTH: usize = 4;

/// Reads a structure of Thrift's compact protocol and shows every integer in it: depth, field of the structure it is in,
/// field, value.
fn structure(
    from: &mut impl Read,
    depth: usize,
    parent: i64,
    show: &mut dyn FnMut(usize, i64, i64, i64),
) -> io::Result<()> {
    let mut field = 0i64;
    loop {
        let head = byte(from)?;
        field = match head >> 4 {
            0 if head & 15 == 0 => return Ok(()),
            0 => zigzag(varint(from)?),
            delta => field + i64::from(delta),
        };
        match head & 15 {
            // Booleans are in the head.
            1 | 2 => {}
            3 => drop(byte(from)?),
            4..=6 => show(depth, parent, field, zigzag(varint(from)?)),
            7 => drop(io::copy(&mut from.take(8), &mut io::sink())?),
            8 => {
                let length = varint(from)?;
                io::copy(&mut from.take(length), &mut io::sink())?;
            }
            12 if depth < DEPTH => structure(from, depth + 1, field, show)?,
            // No list, set or map is in a page header.
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

fn byte(from: &mut impl Read) -> io::Result<u8> {
    let mut byte = [0];
    from.read_exact(&mut byte)?;
    Ok(byte[0])
}

fn varint(from: &mut impl Read) -> io::Result<u64> {
    let mut value = 0;
    for shift in (0..70).step_by(7) {
        let next = byte(from)?;
        value |= u64::from(next & 0x7f).checked_shl(shift).unwrap_or(0);
        if next < 0x80 {
            return Ok(value);
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

fn zigzag(bits: u64) -> i64 {
    (bits >> 1) as i64 ^ -((bits & 1) as i64)
}
