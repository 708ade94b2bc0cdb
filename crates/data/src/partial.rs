//! Work in progress: finished parts of a data set in a hidden folder, until the whole takes its place.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::chat::Turn;
use crate::holdout::Split;
use crate::new_file::{NewFile, remove_if_present, sync_folder};
use crate::output::{DATA_JSON, FILES_JSONL, TOKENIZER_JSON, hexadecimal, is_output};
use crate::shard::Width;
use crate::shard_writer::{ShardSummary, ShardWriter};
use crate::source::Cursor;
use crate::workers::Tokenised;
use crate::{DataError, Result, Shard, TokenFile};

/// The folder of parts, inside the folder that the data set will be in.
const FOLDER: &str = ".partial";

/// Documents whose table may wait in memory; a part is closed early rather than have more.
const TABLE_BYTES: u64 = 16 << 20;

/// A finished part: its shards are on the disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Part {
    /// Of what the data set is made of; parts of another one are of no use.
    #[serde(with = "hexadecimal")]
    key: u64,
    pub(crate) train: ShardSummary,
    pub(crate) validation: Option<ShardSummary>,
    /// Where the next part begins.
    pub(crate) after: Cursor,
    /// Bytes of input files read up to there.
    pub(crate) input_bytes: u64,
}

/// The folder of parts of one data set.
pub(crate) struct Partial {
    folder: PathBuf,
    out: PathBuf,
    key: u64,
    pub(crate) parts: Vec<Part>,
}

impl Partial {
    /// Opens the folder and takes over the parts that belong to the same `key`; removes what else is there.
    pub(crate) fn open(out: &Path, key: u64) -> Result<Self> {
        let folder = out.join(FOLDER);
        fs::create_dir_all(&folder).map_err(|cause| DataError::unwritable(&folder, cause))?;
        let mut this = Partial { folder, out: out.to_owned(), key, parts: Vec::new() };
        while let Some(part) = this.read_part(this.parts.len()) {
            this.parts.push(part);
        }
        this.remove_others()?;
        Ok(this)
    }

    /// A part that is there, whole, and of this data set. In the middle of [`install`](Self::install) its shards may
    /// stand in their final place already.
    fn read_part(&self, index: usize) -> Option<Part> {
        let text = fs::read(self.folder.join(manifest_name(index))).ok()?;
        let part: Part = serde_json::from_slice(&text).ok()?;
        let names = [(Split::Train, Some(&part.train)), (Split::Validation, part.validation.as_ref())];
        let whole = names.into_iter().filter_map(|(split, summary)| Some((split, summary?))).all(|(split, summary)| {
            let folder =
                if self.installing() && !self.folder.join(&summary.file).exists() { &self.out } else { &self.folder };
            let shard = Shard::open(&folder.join(&summary.file));
            summary.file == shard_name(split, index)
                && shard.is_ok_and(|shard| shard.hash() == summary.xxh3 && shard.len() == summary.tokens)
        });
        (part.key == self.key && whole).then_some(part)
    }

    /// A finished shard, before it takes its place.
    pub(crate) fn shard(&self, summary: &ShardSummary) -> Result<Shard> {
        Shard::open(&self.folder.join(&summary.file))
    }

    /// Whether the data set is complete and only has to take its place.
    pub(crate) fn installing(&self) -> bool {
        self.folder.join(DATA_JSON).exists()
    }

    fn remove_others(&self) -> Result<()> {
        let keep_all = self.installing() && !self.parts.is_empty();
        let ours = format!(".{}.tmp", std::process::id());
        for name in names(&self.folder)? {
            let known = keep_all
                || (0..self.parts.len()).any(|index| {
                    name == manifest_name(index)
                        || name == shard_name(Split::Train, index)
                        || name == shard_name(Split::Validation, index)
                });
            if !known && !name.ends_with(&ours) {
                remove_if_present(&self.folder.join(&name))?;
            }
        }
        Ok(())
    }

    /// Starts the next part.
    pub(crate) fn begin(&self, width: Width, validation: bool, prompts: bool) -> Result<PartWriter> {
        let create = |split| ShardWriter::create(&self.folder, &shard_name(split, self.parts.len()), width, prompts);
        let validation = if validation { Some(create(Split::Validation)?) } else { None };
        Ok(PartWriter { train: create(Split::Train)?, validation, after: None, input_bytes: 0 })
    }

    /// Brings a part to the disk; from then on it need not be made again.
    pub(crate) fn finish(&mut self, part: PartWriter, at: Cursor) -> Result<()> {
        let (train_file, train) = part.train.finish()?;
        let (validation_file, validation) = part.validation.map(ShardWriter::finish).transpose()?.unzip();
        let after = part.after.unwrap_or(at);
        let finished = Part { key: self.key, train, validation, after, input_bytes: part.input_bytes };
        train_file.publish()?;
        validation_file.map_or(Ok(()), NewFile::publish)?;
        // Should the machine go down now, a part without its manifest or without a shard is made again.
        let text =
            serde_json::to_vec_pretty(&finished).map_err(|error| DataError::unwritable(&self.folder, error.into()))?;
        self.write(&manifest_name(self.parts.len()), &text)?;
        self.parts.push(finished);
        Ok(())
    }

    /// Writes a file of the data set.
    pub(crate) fn write(&self, name: &str, contents: &[u8]) -> Result<()> {
        let mut new = NewFile::create(&self.folder, name)?;
        new.write_all(contents).map_err(|cause| DataError::unwritable(&self.out.join(name), cause))?;
        new.sync()?;
        new.publish()
    }

    /// Puts the complete data set in the place of what is there.
    ///
    /// An old `data.json` goes first and the new one comes last, so that none ever stands beside shards it does not
    /// describe. Interrupted at any point, the same call completes it.
    pub(crate) fn install(self, has_tokenizer: bool) -> Result<()> {
        remove_if_present(&self.out.join(DATA_JSON))?;
        let is_part = |name: &str| name.starts_with("part-");
        let shards = self.parts.iter().flat_map(|part| [Some(&part.train), part.validation.as_ref()]);
        let mut kept: Vec<&str> = shards.flatten().map(|shard| shard.file.as_str()).collect();
        kept.push(FILES_JSONL);
        kept.extend(has_tokenizer.then_some(TOKENIZER_JSON));
        for name in names(&self.out)? {
            // What another data set left here.
            if is_output(&name) && !kept.contains(&name.as_str()) {
                remove_if_present(&self.out.join(&name))?;
            }
        }
        let staged = names(&self.folder)?;
        for name in staged.iter().filter(|name| *name != DATA_JSON && !is_part(name)) {
            self.move_out(name)?;
        }
        sync_folder(&self.out)?;
        self.move_out(DATA_JSON)?;
        sync_folder(&self.out)?;
        self.discard()
    }

    fn move_out(&self, name: &str) -> Result<()> {
        let target = self.out.join(name);
        fs::rename(self.folder.join(name), &target).map_err(|cause| DataError::unwritable(&target, cause))
    }

    fn discard(&self) -> Result<()> {
        fs::remove_dir_all(&self.folder).map_err(|cause| DataError::unwritable(&self.folder, cause))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // Only an empty folder goes: finished parts are kept for the next time.
        let _ = fs::remove_dir(&self.folder);
    }
}

/// A part under way.
pub(crate) struct PartWriter {
    train: ShardWriter,
    /// There if anything is held out.
    validation: Option<ShardWriter>,
    after: Option<Cursor>,
    input_bytes: u64,
}

impl PartWriter {
    /// Appends a unit.
    pub(crate) fn append(&mut self, unit: &Tokenised) -> Result<()> {
        self.after = Some(unit.after);
        self.input_bytes = unit.input_bytes;
        if unit.tokens.is_empty() {
            return Ok(());
        }
        let shard = match unit.split {
            Split::Train => &mut self.train,
            Split::Validation => self.validation.as_mut().expect("validation text has a shard"),
        };
        for (index, turn) in unit.turns.iter().enumerate() {
            let goes_on = !unit.begins || index > 0;
            // A stretch of text that goes on needs an entry only at the beginning of a shard.
            if unit.begins || shard.is_empty() {
                shard.document(unit.origin, goes_on, turn.prompt);
            }
            let place = |turn: &Turn| turn.start as usize * shard.width() as usize;
            let end = unit.turns.get(index + 1).map_or(unit.tokens.len(), place);
            let text_bytes = if index == 0 { unit.text_bytes } else { 0 };
            shard.tokens(&unit.tokens[place(turn)..end], text_bytes)?;
        }
        Ok(())
    }

    /// Whether it has reached a size.
    pub(crate) fn is_full(&self, part_bytes: u64) -> bool {
        let shards = || [Some(&self.train), self.validation.as_ref()].into_iter().flatten();
        shards().map(ShardWriter::file_bytes).sum::<u64>() >= part_bytes
            || shards().map(ShardWriter::table_bytes).sum::<u64>() >= TABLE_BYTES
    }
}

fn manifest_name(index: usize) -> String {
    format!("part-{index}.json")
}

/// `train.shard`, `train-1.shard`, `train-2.shard` …
fn shard_name(split: Split, index: usize) -> String {
    let split = match split {
        Split::Train => "train",
        Split::Validation => "validation",
    };
    match index {
        0 => format!("{split}.shard"),
        _ => format!("{split}-{index}.shard"),
    }
}

/// What is directly in a folder, by name.
fn names(folder: &Path) -> Result<Vec<String>> {
    let read = || -> io::Result<Vec<String>> {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    };
    let mut names = read().map_err(|cause| DataError::unreadable(folder, cause))?;
    names.sort();
    Ok(names)
}
