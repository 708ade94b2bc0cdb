//! Metrics as columns.

use crate::files::LineReader;
use crate::{each_scalar, open_file};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// The numbers of a `metrics.jsonl`: a row per line, a column per key, NaN where a line has no number for a key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MetricColumns {
    columns: Vec<(String, Vec<f64>)>,
    rows: usize,
    /// Bytes of the file that were read, and what of them is no whole line yet.
    read: u64,
    lines: LineReader,
    /// Lines that were not understood.
    skipped: usize,
}

impl MetricColumns {
    /// Reads a whole file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut columns = Self::default();
        columns.follow(path)?;
        Ok(columns)
    }

    /// Reads what was added to a file since the last call; true if anything changed. A file that has become shorter is read anew: a
    /// run that goes back to an earlier step cuts its metrics.
    pub fn follow(&mut self, path: &Path) -> io::Result<bool> {
        let mut file = open_file(path)?;
        let length = file.metadata()?.len();
        let shorter = length < self.read;
        if shorter {
            *self = Self::default();
        }
        if length == self.read {
            return Ok(shorter);
        }
        file.seek(SeekFrom::Start(self.read))?;
        let mut chunk = vec![0; (length - self.read).min(1 << 20) as usize];
        loop {
            let bytes = file.read(&mut chunk)?;
            if bytes == 0 {
                return Ok(true);
            }
            self.read += bytes as u64;
            self.add_bytes(&chunk[..bytes]);
        }
    }

    /// Adds the rows of the whole lines of some bytes, which follow those before them.
    pub fn add_bytes(&mut self, bytes: &[u8]) {
        let mut lines = std::mem::take(&mut self.lines);
        lines.add(bytes, &mut |line| match line {
            Some(line) => self.add_line(line),
            None => self.skipped += 1,
        });
        self.lines = lines;
    }

    fn add_line(&mut self, line: &[u8]) {
        let text = str::from_utf8(line).unwrap_or_default().trim_end();
        let row = self.rows;
        let columns = &mut self.columns;
        let mut next = 0;
        let read = each_scalar(text, &mut |key, value| {
            // Lines mostly have the same keys in the same order.
            let at = match columns.get(next) {
                Some((name, _)) if name == key => next,
                _ => columns.iter().position(|(name, _)| name == key).unwrap_or_else(|| {
                    columns.push((key.to_owned(), vec![f64::NAN; row]));
                    columns.len() - 1
                }),
            };
            let values = &mut columns[at].1;
            values.truncate(row);
            values.push(value);
            next = at + 1;
        });
        match read {
            Ok(()) => self.rows += 1,
            Err(_) => self.skipped += 1,
        }
        let rows = self.rows;
        columns.iter_mut().for_each(|(_, values)| values.resize(rows, f64::NAN));
        columns.retain(|(_, values)| rows > 0 || !values.is_empty());
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Lines that are no objects, or too long for any.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// The keys, in the order in which they first came.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.columns.iter().map(|(name, _)| name.as_str())
    }

    /// The numbers of a key, one per row.
    pub fn get(&self, key: &str) -> Option<&[f64]> {
        self.columns.iter().find(|(name, _)| name == key).map(|(_, values)| values.as_slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;

    #[test]
    fn columns_grow_with_the_file_whatever_the_cuts() {
        let text = "{\"step\":1,\"loss\":5.5}\n{\"step\":2,\"val_loss\":5.0,\"loss\":5.25}\nnonsense\n{\"step\":3,\"loss\":null}\n";
        let mut whole = MetricColumns::default();
        whole.add_bytes(text.as_bytes());
        assert_eq!(whole.keys().collect::<Vec<_>>(), ["step", "loss", "val_loss"]);
        assert_eq!((whole.rows(), whole.skipped()), (3, 1));
        assert_eq!(whole.get("step").unwrap(), [1.0, 2.0, 3.0]);
        assert_eq!(format!("{:?}", whole.get("val_loss").unwrap()), "[NaN, 5.0, NaN]");
        assert_eq!(format!("{:?}", whole.get("loss").unwrap()), "[5.5, 5.25, NaN]");
        for cut in 0..text.len() {
            let mut parts = MetricColumns::default();
            parts.add_bytes(&text.as_bytes()[..cut]);
            parts.add_bytes(&text.as_bytes()[cut..]);
            assert_eq!(format!("{:?}", parts.columns), format!("{:?}", whole.columns), "{cut}");
        }
    }

    #[test]
    fn a_file_is_followed_and_read_anew_when_it_was_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut columns = MetricColumns::default();
        assert!(columns.follow(&path).is_err());
        std::fs::write(&path, "{\"step\":1}\n{\"step\":2}\n{\"st").unwrap();
        assert!(columns.follow(&path).unwrap());
        assert!(!columns.follow(&path).unwrap());
        assert_eq!(columns.rows(), 2);
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"ep\":3}\n").unwrap();
        assert!(columns.follow(&path).unwrap());
        assert_eq!(columns.get("step").unwrap(), [1.0, 2.0, 3.0]);
        std::fs::write(&path, "{\"step\":1}\n").unwrap();
        assert!(columns.follow(&path).unwrap());
        assert_eq!(columns.get("step").unwrap(), [1.0]);
    }
}
