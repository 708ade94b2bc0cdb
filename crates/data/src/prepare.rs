//! From files of text to a folder of shards.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::holdout::{self, HoldOut, Split};
use crate::new_file::remove_if_present;
use crate::prepared::{DATA_JSON, Description, TRAIN_SHARD, VALIDATION_SHARD};
use crate::scan::{Document, Found, scan};
use crate::shard_writer::ShardWriter;
use crate::{DataError, Prepared};

const BUFFER_BYTES: usize = 1 << 20;

/// Which text to prepare, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrepareSpec {
    /// Files and folders, read in this order.
    ///
    /// Folders are walked by name. Hidden entries, symbolic links, and folders named `target`, `node_modules` or `runs`
    /// inside them are skipped. A file that is reached twice is read once.
    pub paths: Vec<PathBuf>,
    /// Extensions of the files to take from folders, in any case; none takes every file. Files that `paths` names are
    /// always read.
    pub extensions: Vec<String>,
    /// The share of the text to hold out for validation, at least 0 and below 1.
    pub validation_fraction: f64,
    /// The seed of the choice of what is held out.
    pub seed: u64,
}

/// How far [`prepare`] has come. Empty files are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of text read.
    pub bytes_done: u64,
    /// Bytes of text to read in all.
    pub bytes_total: u64,
    /// Files read.
    pub files_done: u64,
    /// Files to read in all.
    pub files_total: u64,
}

/// Reads the text of `spec` as bytes and writes `train.shard`, `validation.shard` and `data.json` into `out`.
///
/// A token is a byte. A document is a file's bytes and one separator. What is held out are whole documents, or 64 KiB
/// pieces of longer ones: neighbouring pieces of one split stay together, and where the split changes the part before
/// it ends with a separator as if it were a document. If the text is a single piece, its end is held out. With a
/// validation fraction of 0 there is no `validation.shard`.
///
/// Files appear whole, `data.json` last; so a folder that has one is complete, and an earlier one stays as it was if
/// reading or writing fails. Memory does not grow with the size of the files. `progress` is called at least once per
/// MiB.
pub fn prepare(spec: &PrepareSpec, out: &Path, progress: &mut dyn FnMut(Progress)) -> Result<Prepared, DataError> {
    let found = scan(spec, out)?;
    let holdout = HoldOut::choose(spec.validation_fraction, spec.seed, &found.documents)?;
    fs::create_dir_all(out).map_err(|cause| DataError::unwritable(out, cause))?;

    let mut shards = Shards {
        train: ShardWriter::create(out, TRAIN_SHARD)?,
        validation: match holdout {
            HoldOut::Nothing => None,
            _ => Some(ShardWriter::create(out, VALIDATION_SHARD)?),
        },
    };
    write_documents(&found, &holdout, &mut shards, progress)?;
    publish(spec, &found, shards, out)?;
    Prepared::load(out)
}

struct Shards {
    train: ShardWriter,
    /// Always there if the [`HoldOut`] holds anything out.
    validation: Option<ShardWriter>,
}

impl Shards {
    fn of(&mut self, split: Split) -> &mut ShardWriter {
        match split {
            Split::Train => &mut self.train,
            Split::Validation => self.validation.as_mut().expect("held-out text has a shard"),
        }
    }
}

fn write_documents(
    found: &Found,
    holdout: &HoldOut,
    shards: &mut Shards,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), DataError> {
    let mut at = Progress {
        bytes_total: found.documents.iter().map(|document| document.bytes).sum(),
        files_total: found.documents.len() as u64,
        ..Progress::default()
    };
    progress(at);
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut first_piece = 0;
    for document in &found.documents {
        let mut reader = Reader::open(document)?;
        let mut offset = 0;
        while offset < document.bytes {
            let (split, end) = holdout.stretch(document, first_piece, offset);
            while offset < end {
                let part = &mut buffer[..(end - offset).min(BUFFER_BYTES as u64) as usize];
                reader.read(part)?;
                shards.of(split).text(part)?;
                offset += part.len() as u64;
                at.bytes_done += part.len() as u64;
                progress(at);
            }
            shards.of(split).end_document()?;
        }
        reader.finish()?;
        first_piece += holdout::pieces(document);
        at.files_done += 1;
        progress(at);
    }
    Ok(())
}

/// Replaces what is in `out` by the finished shards.
///
/// An old `data.json` goes first and the new one comes last, so that none ever stands beside shards it does not
/// describe.
fn publish(spec: &PrepareSpec, found: &Found, shards: Shards, out: &Path) -> Result<(), DataError> {
    let (train_file, train) = shards.train.finish()?;
    let (validation_file, validation) = shards.validation.map(ShardWriter::finish).transpose()?.unzip();
    let description = Description {
        format: Description::FORMAT,
        files: found.documents.len() as u64,
        empty_files: found.empty_files,
        train,
        validation,
        spec: spec.clone(),
    };
    let description_file = description.write(out)?;

    remove_if_present(&out.join(DATA_JSON))?;
    train_file.publish()?;
    match validation_file {
        Some(file) => file.publish()?,
        None => remove_if_present(&out.join(VALIDATION_SHARD))?,
    }
    description_file.publish()
}

/// Reads a document that must have the length it was listed with.
struct Reader<'a> {
    document: &'a Document,
    file: File,
}

impl<'a> Reader<'a> {
    fn open(document: &'a Document) -> Result<Self, DataError> {
        let file = File::open(&document.path).map_err(|cause| DataError::unreadable(&document.path, cause))?;
        Ok(Reader { document, file })
    }

    fn read(&mut self, part: &mut [u8]) -> Result<(), DataError> {
        self.file.read_exact(part).map_err(|cause| match cause.kind() {
            io::ErrorKind::UnexpectedEof => self.changed(),
            _ => DataError::unreadable(&self.document.path, cause),
        })
    }

    /// Checks that nothing is left.
    fn finish(mut self) -> Result<(), DataError> {
        match self.file.read(&mut [0]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(self.changed()),
            Err(cause) => Err(DataError::unreadable(&self.document.path, cause)),
        }
    }

    fn changed(&self) -> DataError {
        DataError::Changed { path: self.document.path.clone(), bytes: self.document.bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::new_file::temporary_path;

    #[test]
    fn a_full_disk_is_reported_and_leaves_the_earlier_data_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("a.txt");
        let out = folder.path().join("out");
        let spec = PrepareSpec { paths: vec![text.clone()], extensions: vec![], validation_fraction: 0.0, seed: 1 };
        fs::write(&text, "earlier").unwrap();
        let earlier = prepare(&spec, &out, &mut |_| ()).unwrap().fingerprint();

        fs::write(&text, "later").unwrap();
        std::os::unix::fs::symlink("/dev/full", temporary_path(&out, TRAIN_SHARD)).unwrap();
        let error = prepare(&spec, &out, &mut |_| ()).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "{}: cannot be written: No space left on device (os error 28)\n\
                 hint: free some disk space, or choose a folder elsewhere",
                out.join(TRAIN_SHARD).display()
            )
        );
        assert_eq!(fs::read_dir(&out).unwrap().count(), 2, "train.shard and data.json");
        assert_eq!(Prepared::open(&out).unwrap().unwrap().fingerprint(), earlier);
    }
}
