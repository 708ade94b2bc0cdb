//! What can go wrong with data, each with its file, its cause and one hint.

use lockstep_bucket::BucketError;
use lockstep_ir::Hint;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// What reading data gives, or why it does not.
pub type Result<T, E = DataError> = std::result::Result<T, E>;

/// Why data could not be prepared, opened or sampled.
#[derive(Debug, Error, Hint)]
pub enum DataError {
    /// The spec names no path at all.
    #[error("no path to read text from")]
    #[hint("name at least one file or folder")]
    NoPaths,

    /// A path of the spec does not exist.
    #[error("{path}: no such file or folder")]
    #[hint("check the spelling; paths in a config start at the config's folder")]
    MissingPath {
        /// The path as given.
        path: PathBuf,
    },

    /// A path of the spec is a device, a pipe or a socket.
    #[error("{path}: neither a file nor a folder")]
    #[hint("write the text to a file first")]
    NotAFile {
        /// The path as given.
        path: PathBuf,
    },

    /// A path of the spec cannot be written into `data.json`.
    #[error("{path}: the path is not valid UTF-8")]
    #[hint("rename it, or name a folder above it")]
    PathNotUtf8 {
        /// The path as given.
        path: PathBuf,
    },

    /// The folders hold no file with a wanted extension.
    #[error("{}: found 0 files{}", list_paths(.paths), with_extensions(.extensions))]
    #[hint("name other extensions, or name the files themselves")]
    NoFiles {
        /// The paths as given.
        paths: Vec<PathBuf>,
        /// The wanted extensions.
        extensions: Vec<String>,
    },

    /// Every file that was found has no bytes.
    #[error("{}: found {files} file{}, all empty", list_paths(.paths), if *.files == 1 { "" } else { "s" })]
    #[hint("name files that hold text")]
    AllEmpty {
        /// The paths as given.
        paths: Vec<PathBuf>,
        /// How many empty files were found.
        files: u64,
    },

    /// The share of text to hold out is not a share.
    #[error("validation fraction {value} is not in 0 ≤ fraction < 1")]
    #[hint("hold out 0.05, or 0 for no validation")]
    Fraction {
        /// The fraction as given.
        value: f64,
    },

    /// One byte of text cannot be divided between training and validation.
    #[error("{path}: 1 byte is too little to hold some out")]
    #[hint("add text, or set the validation fraction to 0")]
    TooSmallToHoldOut {
        /// The only document.
        path: PathBuf,
    },

    /// A record of a file cannot be used.
    #[error("{path}:{record}: {problem}")]
    #[hint("{hint}")]
    Record {
        /// The file.
        path: PathBuf,
        /// The line or row, from 1.
        record: u64,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        hint: DataHint,
    },

    /// A file of records cannot be used at all.
    #[error("{path}: {problem}")]
    #[hint("{hint}")]
    Source {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        hint: DataHint,
    },

    /// A tokenizer cannot be used.
    #[error("{path}: {problem}")]
    #[hint("{hint}")]
    Tokenizer {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        hint: DataHint,
    },

    /// A chat template cannot be used.
    #[error("{path}: {problem}")]
    #[hint("{hint}")]
    Template {
        /// The file that it came from.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        hint: DataHint,
    },

    /// The weight of a corpus is not one, or all are 0 at some time.
    #[error("weight {value} is not greater than 0")]
    #[hint("give every corpus a weight above 0 at some time, and some corpus at all times")]
    Weight {
        /// The weight as given.
        value: f64,
    },

    /// The caller asked to stop. Finished parts are kept.
    #[error("preparing data was interrupted")]
    #[hint("the same command again goes on after the last finished part")]
    Interrupted,

    /// A file or folder cannot be read.
    #[error("{path}: cannot be read: {cause}")]
    #[hint("check that it still exists and that you may read it")]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },

    /// A file changed its length between the listing and the reading.
    #[error("{path}: changed while being read; it had {bytes} bytes before")]
    #[hint("prepare again once it is at rest")]
    Changed {
        /// The file.
        path: PathBuf,
        /// Its length when it was listed.
        bytes: u64,
    },

    /// A file or folder cannot be written. Temporary files have been removed.
    #[error("{path}: cannot be written: {cause}")]
    #[hint("{}", write_hint(cause))]
    Unwritable {
        /// The file or folder that was to be written.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },

    /// A shard is not what it should be.
    #[error("{path}: {fault}")]
    #[hint("delete the folder {} to prepare it again", folder(path))]
    Shard {
        /// The shard.
        path: PathBuf,
        /// What is wrong with it.
        fault: ShardFault,
    },

    /// A `data.json` is not what it should be.
    #[error("{path}: {cause}")]
    #[hint("delete the folder {} to prepare it again", folder(path))]
    Description {
        /// The `data.json`.
        path: PathBuf,
        /// What is wrong with it.
        cause: String,
    },

    /// An object in a bucket cannot be read.
    #[error("{error}")]
    #[hint("{}", error.hint())]
    Bucket {
        /// What the bucket or the connection said.
        error: BucketError,
    },

    /// A bucket has no prepared data where a config says that they are.
    #[error("{path}: no prepared data there (no data.json)")]
    #[hint("prepare them in a folder, and copy it there: `aws s3 sync DIR {}`", path.display())]
    NothingPrepared {
        /// The address.
        path: PathBuf,
    },

    /// A sequence of no tokens was asked for.
    #[error("{path}: cannot be cut into sequences of 0 tokens")]
    #[hint("use a sequence length of at least 1")]
    SequenceZero {
        /// The shard.
        path: PathBuf,
    },

    /// The shard does not hold one whole sequence and its last target.
    #[error("{path}: {tokens} tokens are too few for a sequence of {seq} and its last target")]
    #[hint("{}", sequence_hint(*tokens))]
    SequenceTooLong {
        /// The shard.
        path: PathBuf,
        /// The sequence length asked for.
        seq: u64,
        /// The tokens the shard holds.
        tokens: u64,
    },
}

/// What to do. In the text, `{}` stands for a setting, if there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHint(&'static str, Option<DataSetting>);

/// What a caller chooses. How it asks its user for it, it knows: see [`DataError::hint_by`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataSetting {
    /// Which files of a folder are read.
    Extensions,
    /// The field or column with the text.
    TextField,
    /// The field or column with the prompt.
    PromptField,
    /// The tokenizer.
    Tokenizer,
    /// The template that conversations are written with.
    ChatTemplate,
    /// What of a conversation counts in the loss.
    TrainOn,
    /// The special tokens that text may spell.
    SpecialTokens,
    /// The token that documents begin with.
    BosToken,
    /// The token that documents end with.
    EosToken,
    /// The corpora, each with a name and a weight.
    Corpora,
    /// The share of the text that is held out.
    ValidationFraction,
}

impl DataHint {
    pub(crate) const fn of(text: &'static str, setting: DataSetting) -> Self {
        DataHint(text, Some(setting))
    }
}

impl From<&'static str> for DataHint {
    fn from(text: &'static str) -> Self {
        DataHint(text, None)
    }
}

impl std::fmt::Display for DataHint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.1 {
            None => f.write_str(self.0),
            Some(setting) => f.write_str(&self.0.replace("{}", &format!("{setting:?}"))),
        }
    }
}

/// What is wrong with a shard.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ShardFault {
    /// The file is not there.
    #[error("the shard is missing")]
    Missing,
    /// The file cannot even hold a header.
    #[error("{bytes} bytes are too few for the header of a shard (64 bytes)")]
    NoHeader {
        /// The file's length.
        bytes: u64,
    },
    /// The file does not begin as a shard does.
    #[error("not a shard: it does not begin with `LKSHARD1`")]
    Magic,
    /// The format is newer than this code.
    #[error("shard version {version} is not supported (this build reads version 2)")]
    Version {
        /// The version in the header.
        version: u32,
    },
    /// A token takes a number of bytes that no token type has.
    #[error("tokens of {width} bytes are not supported (1, 2 or 4)")]
    Width {
        /// The width in the header.
        width: u32,
    },
    /// The header claims more bytes than a file can have.
    #[error("the header claims {tokens} tokens, more than a file can hold")]
    Count {
        /// The token count in the header.
        tokens: u64,
    },
    /// The header claims more bytes for documents than a file can have.
    #[error("the header claims {documents} documents, more than a file can hold")]
    DocumentCount {
        /// The document count in the header.
        documents: u64,
    },
    /// A part of the header that no version uses is in use.
    #[error("the reserved bytes of the header are not zero")]
    Reserved,
    /// The document table does not divide the tokens.
    #[error("the document starts are not in order")]
    Documents,
    /// The file is longer or shorter than its header says.
    #[error("{found} bytes long where the header says {expected}")]
    Length {
        /// Header and payload as the header has it.
        expected: u64,
        /// The file's length.
        found: u64,
    },
    /// The payload is not the one that was written.
    #[error("the tokens hash to {found:016x} where the header says {expected:016x}")]
    Hash {
        /// The hash in the header.
        expected: u64,
        /// The hash of the payload.
        found: u64,
    },
    /// A sound shard, but of another data set.
    #[error("not the shard that data.json describes ({what})")]
    NotDescribed {
        /// The property that differs.
        what: &'static str,
    },
}

impl From<BucketError> for DataError {
    fn from(error: BucketError) -> Self {
        DataError::Bucket { error }
    }
}

impl DataError {
    /// The hint, in which the setting that may help has the name that `name` gives it.
    pub fn hint_by(&self, name: impl Fn(DataSetting) -> &'static str) -> Option<String> {
        match self {
            DataError::Record { hint: DataHint(hint, Some(setting)), .. }
            | DataError::Source { hint: DataHint(hint, Some(setting)), .. }
            | DataError::Template { hint: DataHint(hint, Some(setting)), .. }
            | DataError::Tokenizer { hint: DataHint(hint, Some(setting)), .. } => {
                Some(hint.replace("{}", name(*setting)))
            }
            _ => self.hint(),
        }
    }

    pub(crate) fn unreadable(path: &Path, cause: io::Error) -> Self {
        // What a bucket says has a hint of its own.
        match cause.get_ref().and_then(|inner| inner.downcast_ref::<BucketError>()) {
            Some(error) => error.clone().into(),
            None => DataError::Unreadable { path: path.to_owned(), cause },
        }
    }

    pub(crate) fn unwritable(path: &Path, cause: io::Error) -> Self {
        DataError::Unwritable { path: path.to_owned(), cause }
    }

    pub(crate) fn tokenizer(path: &Path, problem: impl Into<String>, hint: impl Into<DataHint>) -> Self {
        DataError::Tokenizer { path: path.to_owned(), problem: problem.into(), hint: hint.into() }
    }

    pub(crate) fn template(path: &Path, problem: impl Into<String>, hint: impl Into<DataHint>) -> Self {
        DataError::Template { path: path.to_owned(), problem: problem.into(), hint: hint.into() }
    }

    pub(crate) fn source(path: &Path, problem: impl Into<String>, hint: impl Into<DataHint>) -> Self {
        DataError::Source { path: path.to_owned(), problem: problem.into(), hint: hint.into() }
    }

    pub(crate) fn record(path: &Path, record: u64, problem: impl Into<String>, hint: impl Into<DataHint>) -> Self {
        DataError::Record { path: path.to_owned(), record, problem: problem.into(), hint: hint.into() }
    }

    pub(crate) fn shard(path: &Path, fault: ShardFault) -> Self {
        DataError::Shard { path: path.to_owned(), fault }
    }
}

fn write_hint(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free some disk space, or choose a folder elsewhere"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "choose a folder that you may write to",
        _ => "choose another folder",
    }
}

fn sequence_hint(tokens: u64) -> String {
    match tokens {
        0 | 1 => "add text".to_owned(),
        _ => format!("use a sequence length of at most {}, or add text", tokens - 1),
    }
}

fn list_paths(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn with_extensions(extensions: &[String]) -> String {
    match extensions {
        [] => String::new(),
        _ => format!(" with extensions {}", extensions.join(", ")),
    }
}

fn folder(path: &Path) -> String {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder.display().to_string(),
        _ => ".".to_owned(),
    }
}
