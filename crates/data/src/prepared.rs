//! A folder of prepared data.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::new_file::NewFile;
use crate::{DataError, PrepareSpec, Shard, ShardFault};

pub(crate) const DATA_JSON: &str = "data.json";
pub(crate) const TRAIN_SHARD: &str = "train.shard";
pub(crate) const VALIDATION_SHARD: &str = "validation.shard";

/// The names of everything that is written into a folder of prepared data.
pub(crate) const OUTPUT_NAMES: [&str; 3] = [DATA_JSON, TRAIN_SHARD, VALIDATION_SHARD];

/// A complete folder of prepared data, its shards open.
#[derive(Debug)]
pub struct Prepared {
    folder: PathBuf,
    description: Description,
    train: Arc<Shard>,
    validation: Option<Arc<Shard>>,
}

impl Prepared {
    /// Opens a folder that [`prepare`](crate::prepare) wrote; `None` if it has no `data.json`, so was not finished.
    ///
    /// Checks that the shards are those of `data.json`. The tokens of large shards are not read; [`Shard::verify`]
    /// does that.
    pub fn open(folder: &Path) -> Result<Option<Self>, DataError> {
        match folder.join(DATA_JSON).try_exists() {
            Ok(true) => Prepared::load(folder).map(Some),
            Ok(false) => Ok(None),
            Err(cause) => Err(DataError::unreadable(&folder.join(DATA_JSON), cause)),
        }
    }

    /// Opens a folder that has a `data.json`.
    pub(crate) fn load(folder: &Path) -> Result<Self, DataError> {
        let description = Description::read(folder)?;
        let train = open_described(&folder.join(TRAIN_SHARD), &description.train)?;
        let validation = match &description.validation {
            Some(summary) => Some(open_described(&folder.join(VALIDATION_SHARD), summary)?),
            None => None,
        };
        Ok(Prepared { folder: folder.to_owned(), description, train, validation })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The spec the data was prepared with.
    pub fn spec(&self) -> &PrepareSpec {
        &self.description.spec
    }

    /// The tokens to train on.
    pub fn train(&self) -> &Arc<Shard> {
        &self.train
    }

    /// The tokens held out, unless the spec holds out nothing.
    pub fn validation(&self) -> Option<&Arc<Shard>> {
        self.validation.as_ref()
    }

    /// What the training shard was made of.
    pub fn train_summary(&self) -> &SplitSummary {
        &self.description.train
    }

    /// What the validation shard was made of.
    pub fn validation_summary(&self) -> Option<&SplitSummary> {
        self.description.validation.as_ref()
    }

    /// How many files were read.
    pub fn files(&self) -> u64 {
        self.description.files
    }

    /// How many files were skipped because they were empty.
    pub fn empty_files(&self) -> u64 {
        self.description.empty_files
    }

    /// A number that differs where any token differs.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = Xxh3::new();
        hasher.update(&self.train.hash().to_le_bytes());
        if let Some(validation) = &self.validation {
            hasher.update(&validation.hash().to_le_bytes());
        }
        hasher.digest()
    }
}

/// What one shard was made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitSummary {
    /// Stretches of text that end with a separator: files, or parts of files that are divided between the splits.
    pub documents: u64,
    /// Bytes of text, without the separators.
    pub bytes: u64,
    /// Tokens, the separators among them.
    pub tokens: u64,
    /// The hash of the tokens. In `data.json` it is 16 hexadecimal digits, since many JSON readers round large numbers.
    #[serde(with = "hexadecimal")]
    pub xxh3: u64,
}

/// The contents of `data.json`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Description {
    pub(crate) format: u32,
    pub(crate) files: u64,
    pub(crate) empty_files: u64,
    pub(crate) train: SplitSummary,
    pub(crate) validation: Option<SplitSummary>,
    pub(crate) spec: PrepareSpec,
}

impl Description {
    pub(crate) const FORMAT: u32 = 1;

    /// Writes and syncs `data.json` under its temporary name.
    pub(crate) fn write(&self, folder: &Path) -> Result<NewFile, DataError> {
        let path = folder.join(DATA_JSON);
        let unwritable = |cause: io::Error| DataError::unwritable(&path, cause);
        let mut text = serde_json::to_vec_pretty(self).map_err(|error| unwritable(error.into()))?;
        text.push(b'\n');
        let mut new = NewFile::create(folder, DATA_JSON)?;
        new.write_all(&text).map_err(unwritable)?;
        new.sync()?;
        Ok(new)
    }

    fn read(folder: &Path) -> Result<Self, DataError> {
        let path = folder.join(DATA_JSON);
        let text = fs::read(&path).map_err(|cause| DataError::unreadable(&path, cause))?;
        let refuse = |cause| DataError::Description { path: path.clone(), cause };
        // The format is looked at first: another one may have other fields.
        let Format { format } = parse(&text).map_err(refuse)?;
        if format != Self::FORMAT {
            let known = Self::FORMAT;
            return Err(refuse(format!("format {format} is not supported (this build reads format {known})")));
        }
        parse(&text).map_err(refuse)
    }
}

#[derive(Deserialize)]
struct Format {
    format: u32,
}

fn parse<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, String> {
    serde_json::from_slice(text).map_err(|error| format!("not a description of prepared data: {error}"))
}

fn open_described(path: &Path, summary: &SplitSummary) -> Result<Arc<Shard>, DataError> {
    let shard = Shard::open(path)?;
    let differs = |what| Err(DataError::shard(path, ShardFault::NotDescribed { what }));
    if shard.len() != summary.tokens {
        return differs("another number of tokens");
    }
    if shard.hash() != summary.xxh3 {
        return differs("another hash");
    }
    Ok(Arc::new(shard))
}

mod hexadecimal {
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{value:016x}"))
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16)
            .map_err(|_| de::Error::invalid_value(de::Unexpected::Str(&text), &"16 hexadecimal digits"))
    }
}
