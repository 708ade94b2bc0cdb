//! How the files of a run directory are read: only regular ones, and whatever they hold in bounded memory.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Most bytes of a line of `metrics.jsonl` or of another file of lines. Longer ones are left out: no run writes them, and a line of
/// zeros that a broken file system has left must not fill the memory.
pub const MOST_LINE_BYTES: usize = 1 << 20;

/// Most bytes of a file that is read whole.
const MOST_BYTES: u64 = 64 << 20;

/// Opens a file of a run directory. What is not a regular file is refused: a FIFO or a device may never end.
pub fn open_file(path: &Path) -> io::Result<File> {
    refuse_special(path)?;
    File::open(path)
}

/// Refuses what is there and neither a regular file nor a folder.
pub fn refuse_special(path: &Path) -> io::Result<()> {
    let metadata = std::fs::metadata(path)?;
    match metadata.is_file() || metadata.is_dir() {
        true => Ok(()),
        false => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file (a FIFO, socket or device)"))
        }
    }
}

/// The bytes of a file of a run directory that is not one of lines, such as `plan.json`.
pub fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_file(path)?.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > MOST_BYTES {
        true => Err(io::Error::new(io::ErrorKind::FileTooLarge, "it has more than 64 MiB")),
        false => Ok(bytes),
    }
}

/// Calls `each` with every whole line of a file, with its line break; lines of more than [`MOST_LINE_BYTES`] are left out.
pub fn each_line(path: &Path, each: &mut dyn FnMut(&[u8])) -> io::Result<()> {
    let mut file = open_file(path)?;
    let (mut lines, mut chunk) = (LineReader::default(), vec![0; 1 << 18]);
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(()),
            bytes => lines.add(&chunk[..bytes], &mut |line| line.into_iter().for_each(&mut *each)),
        }
    }
}

/// Cuts bytes that come in pieces into lines, in bounded memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LineReader {
    /// A line that is not whole yet.
    pending: Vec<u8>,
    /// Whether it was too long already: what comes of it is dropped.
    too_long: bool,
}

impl LineReader {
    /// Calls `each` with every line that these bytes complete, none for one that is too long.
    pub(crate) fn add(&mut self, bytes: &[u8], each: &mut dyn FnMut(Option<&[u8]>)) {
        for part in bytes.split_inclusive(|b| *b == b'\n') {
            let whole = part.ends_with(b"\n");
            if self.too_long || self.pending.len() + part.len() > MOST_LINE_BYTES {
                (self.pending, self.too_long) = (Vec::new(), !whole);
                if whole {
                    each(None);
                }
            } else if whole && self.pending.is_empty() {
                each(Some(part));
            } else {
                self.pending.extend_from_slice(part);
                if whole {
                    each(Some(&self.pending));
                    self.pending.clear();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_whole_and_of_bounded_length() {
        let long = vec![0; MOST_LINE_BYTES + 1];
        let text = [b"one\n", &long[..], b"\ntwo\n\ntorn"].concat();
        for size in [1 << 12, 1 << 18, text.len()] {
            let (mut reader, mut lines, mut skipped) = (LineReader::default(), Vec::new(), 0);
            for chunk in text.chunks(size) {
                reader.add(chunk, &mut |line| match line {
                    Some(line) => lines.push(line.to_vec()),
                    None => skipped += 1,
                });
                assert!(reader.pending.capacity() <= 2 * MOST_LINE_BYTES);
            }
            assert_eq!((lines, skipped), (vec![b"one\n".to_vec(), b"two\n".to_vec(), b"\n".to_vec()], 1));
        }
    }

    #[test]
    fn what_is_not_a_regular_file_is_refused() {
        let refused = [open_file(Path::new("/dev/zero")).map(|_| ()), read_file(Path::new("/dev/null")).map(|_| ())];
        for error in refused.map(Result::unwrap_err) {
            assert_eq!(error.to_string(), "it is not a regular file (a FIFO, socket or device)");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "a\nb\nc").unwrap();
        let mut lines = Vec::new();
        each_line(&path, &mut |line| lines.push(line.to_vec())).unwrap();
        assert_eq!(lines, [b"a\n", b"b\n"]);
        File::options().write(true).open(&path).unwrap().set_len(MOST_BYTES + 1).unwrap();
        assert_eq!(read_file(&path).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }
}
