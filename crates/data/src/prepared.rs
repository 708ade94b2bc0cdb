//! A folder of prepared data.

use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use lockstep_bucket::{BucketAddress, Buckets, Reads};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::indexed::open_divided;
use crate::output::{DATA_JSON, FILES_JSONL, TOKENIZER_JSON, hexadecimal};
use crate::scan::Found;
use crate::{
    DataError, PrepareSpec, Result, Shard, ShardFault, ShardSummary, TokenFile, TokenStream, Tokenizer, TokenizerSpec,
};

/// A complete folder of prepared data, its shards open.
#[derive(Debug)]
pub struct Prepared {
    folder: PathBuf,
    description: Description,
    train: Arc<TokenStream>,
    validation: Option<Arc<TokenStream>>,
    /// The `.idx` files, where the tokens are Megatron's and are read where they are.
    in_place: Option<Vec<PathBuf>>,
}

impl Prepared {
    /// Takes Megatron's files, named by their `.idx`, as they are: nothing is written. The last `validation_fraction` of their
    /// documents are held out. Their tokenizer is the one that the spec names.
    ///
    /// An index under 64 MiB is checked in full, of the tokens only samples are.
    pub fn in_place(spec: &PrepareSpec, files: &[PathBuf]) -> Result<Self> {
        let tokenizer = Tokenizer::open(&spec.tokenizer)?;
        let (train, validation) = open_divided(files, spec.validation_fraction, tokenizer.vocabulary())?;
        let summary = |parts: &[Arc<dyn TokenFile>]| {
            let shard = |part: &Arc<dyn TokenFile>| ShardSummary {
                file: part.path().display().to_string(),
                documents: part.documents(),
                bytes: 0,
                tokens: part.len(),
                xxh3: part.hash(),
                sampled: None,
            };
            SplitSummary::of(parts.iter().map(shard).collect())
        };
        let description = Description {
            format: Description::FORMAT,
            files: files.len() as u64,
            empty_files: 0,
            listing: 0,
            content: None,
            vocabulary: tokenizer.vocabulary(),
            eos: tokenizer.eos(),
            bos: None,
            train: summary(&train),
            validation: (!validation.is_empty()).then(|| summary(&validation)),
            spec: spec.clone(),
        };
        Ok(Prepared {
            folder: files[0].parent().map_or_else(PathBuf::new, Path::to_owned),
            description,
            train: Arc::new(TokenStream::new(train)),
            validation: (!validation.is_empty()).then(|| Arc::new(TokenStream::new(validation))),
            in_place: Some(files.to_vec()),
        })
    }

    /// Whether the tokens are Megatron's files, read where they are.
    pub fn is_in_place(&self) -> bool {
        self.in_place.is_some()
    }

    /// Whether the tokens are in a bucket.
    pub fn is_remote(&self) -> bool {
        self.train.is_remote()
    }

    /// Opens a folder that [`prepare`](crate::prepare) wrote, on the disk or in a bucket; `None` if it has no `data.json`, so was not finished.
    ///
    /// Checks that the shards are those of `data.json`. The tokens of large shards are not read; [`Shard::verify`]
    /// does that.
    pub fn open(folder: &Path) -> Result<Option<Self>> {
        if let Some(address) = BucketAddress::of(folder) {
            let there = Buckets::of_process()?.look(&address?.join(DATA_JSON))?.is_some();
            return if there { Prepared::load(folder).map(Some) } else { Ok(None) };
        }
        match folder.join(DATA_JSON).try_exists() {
            Ok(true) => Prepared::load(folder).map(Some),
            Ok(false) => Ok(None),
            Err(cause) => Err(DataError::unreadable(&folder.join(DATA_JSON), cause)),
        }
    }

    /// Opens a folder that has a `data.json`.
    pub(crate) fn load(folder: &Path) -> Result<Self> {
        let description = Description::read(folder)?;
        let train = open_described(folder, &description.train)?;
        let validation = match &description.validation {
            Some(summary) => Some(open_described(folder, summary)?),
            None => None,
        };
        Ok(Prepared { folder: folder.to_owned(), description, train, validation, in_place: None })
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
    pub fn train(&self) -> &Arc<TokenStream> {
        &self.train
    }

    /// The tokens held out, unless the spec holds out nothing.
    pub fn validation(&self) -> Option<&Arc<TokenStream>> {
        self.validation.as_ref()
    }

    /// What the training tokens were made of.
    pub fn train_summary(&self) -> &SplitSummary {
        &self.description.train
    }

    /// What the held-out tokens were made of.
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

    /// The smallest vocabulary that holds every token.
    pub fn vocabulary(&self) -> u32 {
        self.description.vocabulary
    }

    /// The token after each document.
    pub fn eos(&self) -> u32 {
        self.description.eos
    }

    /// The token before each document, if there is one.
    pub fn bos(&self) -> Option<u32> {
        self.description.bos
    }

    /// The tokenizer that made the tokens, from its copy in the folder; of tokens that are read in place, from where it is.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        match &self.spec().tokenizer {
            spec if self.is_in_place() => Tokenizer::open(spec),
            TokenizerSpec::Bytes => Ok(Tokenizer::bytes()),
            spec @ TokenizerSpec::File { .. } if self.is_remote() => {
                let path = self.folder.join(TOKENIZER_JSON);
                Tokenizer::of_json(&spec.clone().at(path.clone()), contents(&path)?)
            }
            spec @ TokenizerSpec::File { .. } => Tokenizer::open(&spec.clone().at(self.folder.join(TOKENIZER_JSON))),
        }
    }

    /// The files that were read, in order: what the `file` of an [`Origin`](crate::Origin) counts.
    pub fn sources(&self) -> Result<Vec<PathBuf>> {
        if let Some(files) = &self.in_place {
            return Ok(files.clone());
        }
        let path = self.folder.join(FILES_JSONL);
        let text = contents(&path)?;
        let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        let refuse = |cause: serde_json::Error| DataError::Description { path: path.clone(), cause: cause.to_string() };
        lines.map(|line| Ok(serde_json::from_slice::<FileLine>(line).map_err(refuse)?.path.into())).collect()
    }

    /// A number that differs where any token or document differs; of tokens that are read in place, by their number and samples.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = Xxh3::new();
        for stream in [Some(&self.train), self.validation.as_ref()].into_iter().flatten() {
            for shard in stream.shards() {
                hasher.update(&shard.hash().to_le_bytes());
            }
        }
        hasher.digest()
    }

    /// Whether this is the text that was read. Data that were prepared before content was looked at know it by its paths and
    /// lengths.
    pub(crate) fn is_of(&self, found: &Found, stop: &AtomicBool) -> Result<bool> {
        match &self.description.content {
            Some(content) => Ok(*content == hexadecimal(found.content(stop)?)),
            None => Ok(self.description.listing == found.listing()),
        }
    }
}

/// A line of `files.jsonl`.
#[derive(Serialize, Deserialize)]
struct FileLine {
    path: String,
    bytes: u64,
}

/// The contents of `files.jsonl`.
pub(crate) fn files_jsonl(found: &Found) -> Vec<u8> {
    let mut text = Vec::new();
    for file in &found.files {
        let line = FileLine { path: file.path.to_string_lossy().into_owned(), bytes: file.bytes };
        serde_json::to_writer(&mut text, &line).expect("strings and numbers are JSON");
        text.push(b'\n');
    }
    text
}

/// What the tokens of one split were made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitSummary {
    /// Stretches of text that end with an EOS token: records, files, or parts of files that are divided between the
    /// splits.
    pub documents: u64,
    /// Bytes of text, without the EOS tokens; 0 where they are not known.
    pub bytes: u64,
    /// Tokens, the EOS tokens among them.
    pub tokens: u64,
    /// The files that hold them, in order.
    pub shards: Vec<ShardSummary>,
}

impl SplitSummary {
    pub(crate) fn of(shards: Vec<ShardSummary>) -> Self {
        let sum = |of: fn(&ShardSummary) -> u64| shards.iter().map(of).sum();
        SplitSummary { documents: sum(|s| s.documents), bytes: sum(|s| s.bytes), tokens: sum(|s| s.tokens), shards }
    }
}

/// The contents of `data.json`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Description {
    pub(crate) format: u32,
    pub(crate) files: u64,
    pub(crate) empty_files: u64,
    #[serde(with = "hexadecimal")]
    pub(crate) listing: u64,
    /// What the text is known by; see [`Found::content`].
    #[serde(default)]
    pub(crate) content: Option<String>,
    pub(crate) vocabulary: u32,
    #[serde(rename = "separator")]
    pub(crate) eos: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bos: Option<u32>,
    pub(crate) train: SplitSummary,
    pub(crate) validation: Option<SplitSummary>,
    pub(crate) spec: PrepareSpec,
}

impl Description {
    pub(crate) const FORMAT: u32 = 2;

    fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(DATA_JSON);
        let text = contents(&path)?;
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

/// All of a file, or of an object.
fn contents(path: &Path) -> Result<Vec<u8>> {
    match BucketAddress::of(path) {
        None => fs::read(path).map_err(|cause| DataError::unreadable(path, cause)),
        Some(address) => {
            let read = Buckets::of_process()?.read(&address?, MOST_OBJECT_BYTES)?;
            read.ok_or_else(|| DataError::unreadable(path, std::io::ErrorKind::NotFound.into()))
        }
    }
}

/// Objects that are read whole have less: the names of the files of a corpus, at the most.
const MOST_OBJECT_BYTES: u64 = 4 << 30;

#[derive(Deserialize)]
struct Format {
    format: u32,
}

fn parse<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, String> {
    serde_json::from_slice(text).map_err(|error| format!("not a description of prepared data: {error}"))
}

fn open_described(folder: &Path, summary: &SplitSummary) -> Result<Arc<TokenStream>> {
    let refuse = |cause: &str| DataError::Description { path: folder.join(DATA_JSON), cause: cause.to_owned() };
    if summary.shards.is_empty() {
        return Err(refuse("not a description of prepared data: a split has no shards"));
    }
    let mut shards = Vec::new();
    for described in &summary.shards {
        // Only names of files in the folder itself.
        if !matches!(Path::new(&described.file).components().collect::<Vec<_>>()[..], [Component::Normal(_)]) {
            return Err(refuse("not a description of prepared data: a shard is not in the folder"));
        }
        let path = folder.join(&described.file);
        let shard = match BucketAddress::of(&path) {
            None => Shard::open(&path)?,
            Some(address) => Shard::remote(Buckets::of_process()?.open(&address?, Reads::Scattered)?)?,
        };
        let differs = |what| Err(DataError::shard(&path, ShardFault::NotDescribed { what }));
        if shard.len() != described.tokens {
            return differs("another number of tokens");
        }
        if shard.hash() != described.xxh3 {
            return differs("another hash");
        }
        if let Some(sampled) = described.sampled.as_ref().filter(|_| !shard.is_verified())
            && !shard.is_remote()
            && *sampled != hexadecimal(shard.sampled())
        {
            return differs("samples of the tokens are others");
        }
        shards.push(Arc::new(shard) as Arc<dyn TokenFile>);
    }
    Ok(Arc::new(TokenStream::new(shards)))
}
