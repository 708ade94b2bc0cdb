//! The bytes of a file of text, on the disk or in a bucket.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use bytes::Bytes;
use lockstep_bucket::{BucketAddress, BucketReader, Buckets, Reads};
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::reader::{ChunkReader, Length};

/// An open file, or an object.
pub(crate) enum Input {
    File(File),
    Object(BucketReader),
}

impl Input {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        match BucketAddress::of(path) {
            None => File::open(path).map(Input::File),
            Some(address) => {
                let open = || Buckets::of_process()?.open(&address?, Reads::InOrder);
                open().map(|file| Input::Object(file.reader(0))).map_err(io::Error::other)
            }
        }
    }
}

impl Read for Input {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Input::File(file) => file.read(into),
            Input::Object(reader) => reader.read(into),
        }
    }
}

impl Seek for Input {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match self {
            Input::File(file) => file.seek(to),
            Input::Object(reader) => reader.seek(to),
        }
    }
}

impl Length for Input {
    fn len(&self) -> u64 {
        match self {
            Input::File(file) => file.len(),
            Input::Object(reader) => reader.file().len(),
        }
    }
}

impl ChunkReader for Input {
    type T = BufReader<Input>;

    fn get_read(&self, start: u64) -> ParquetResult<Self::T> {
        Ok(match self {
            // As the library does: clones of a file share a place.
            Input::File(file) => {
                let mut file = file.try_clone()?;
                file.seek(SeekFrom::Start(start))?;
                BufReader::new(Input::File(file))
            }
            Input::Object(reader) => BufReader::new(Input::Object(reader.file().reader(start))),
        })
    }

    fn get_bytes(&self, start: u64, length: usize) -> ParquetResult<Bytes> {
        match self {
            Input::File(file) => file.get_bytes(start, length),
            Input::Object(reader) => {
                let file = reader.file();
                if start.checked_add(length as u64).is_none_or(|end| end > file.len()) {
                    return Err(ParquetError::EOF(format!(
                        "{length} bytes from {start} on are outside {}",
                        file.len()
                    )));
                }
                let mut bytes = vec![0; length];
                file.read_at(start, &mut bytes).map_err(|error| ParquetError::External(Box::new(error)))?;
                Ok(bytes.into())
            }
        }
    }
}
