//! Megatron's `.bin` and `.idx` files, read where they are.
//!
//! They are token files like shards. They are known by samples of their content, and every token is held against
//! the vocabulary when it is read. Data over 4 GiB are checked by samples when a run begins.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use lockstep_bucket::is_address;
use memmap2::{Mmap, MmapOptions};
use xxhash_rust::xxh3::Xxh3;

use crate::scan::sample_blocks;
use crate::shard::Width;
use crate::stop::{NEVER, go_on};
use crate::token_file::check_range;
use crate::{DataError, DataHint, DataSetting, Document, Origin, PrepareSpec, Result, TokenFile};

pub(crate) const MAGIC: [u8; 9] = *b"MMIDIDX\0\0";
pub(crate) const VERSION: u64 = 1;
/// Magic, version, code of the type, number of sequences, entries of the document table.
pub(crate) const HEADER_BYTES: usize = 9 + 8 + 1 + 8 + 8;

/// Indices below this are checked whenever they are opened.
const CHECK_ON_OPEN_BYTES: usize = 64 << 20;

/// Sequences that are checked between two looks at whether to go on.
const CHECK_PIECE: u64 = 1 << 20;

const COPY: &str = "copy both files again from where they were made (x.bin and x.idx belong together)";
const MAKE: &str = "make them with Megatron's tools/preprocess_data.py, or with `lockstep data export`";

/// Documents of a pair of files that Megatron-LM calls an indexed dataset: the tokens in `x.bin`, what they are in `x.idx`.
///
/// # Format, version 1
///
/// `x.bin` is tokens and nothing else. All numbers of `x.idx` are little endian.
///
/// | bytes | what |
/// |---|---|
/// | 0..9 | the magic `MMIDIDX\0\0` |
/// | 9..17 | format version, u64: 1 |
/// | 17..18 | code of the tokens' type, u8: 1 (uint8), 4 (int32) or 8 (uint16); 2, 3, 5, 6 and 7 are types that are not read |
/// | 18..26 | number of sequences S, u64 |
/// | 26..34 | entries of the document table D, u64 |
/// | then | tokens of each sequence, i32 × S |
/// | then | byte of `x.bin` that each sequence begins at, i64 × S |
/// | then | the sequence that each document begins with, i64 × D; the last entry is S |
///
/// A document is one or more sequences, or none.
#[derive(Debug)]
pub struct IndexedTokens {
    file: Arc<Indexed>,
    /// The place of the pair among those of its corpus.
    ordinal: u64,
    documents: Range<u64>,
    tokens: Range<u64>,
    hash: u64,
}

/// A pair of files, open.
#[derive(Debug)]
struct Indexed {
    bin_path: PathBuf,
    index_path: PathBuf,
    bin: Mmap,
    index: Mmap,
    width: Width,
    sequences: u64,
    /// Entries of the document table, one more than there are documents.
    entries: u64,
}

/// The `.idx` files that a spec names, in order, where it names Megatron's files: by `.idx`, by `.bin`, by what both begin with, or as
/// a folder that is searched for the extension `idx`. None where it names text.
pub fn token_files(spec: &PrepareSpec) -> Result<Option<Vec<PathBuf>>> {
    let wanted = spec.extensions.iter().any(|extension| extension.trim_start_matches('.').eq_ignore_ascii_case("idx"));
    let (mut files, mut text) = (Vec::new(), None);
    for path in &spec.paths {
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        if is_address(path) && (extension == "idx" || extension == "bin" || wanted) {
            return Err(DataError::source(
                path,
                "Megatron's tokens are read from files, not from a bucket",
                "copy them to a folder (`aws s3 sync`), and name it",
            ));
        }
        if extension == "idx" || extension == "bin" {
            files.push(path.with_extension("idx"));
        } else if beside(path, "idx").is_file() && !path.exists() {
            files.push(beside(path, "idx"));
        } else if wanted && path.is_dir() {
            let unreadable = |cause| DataError::unreadable(path, cause);
            let mut inside = Vec::new();
            for entry in fs::read_dir(path).map_err(unreadable)? {
                let file = entry.map_err(unreadable)?.path();
                if file.extension().is_some_and(|extension| extension == "idx") {
                    inside.push(file);
                }
            }
            if inside.is_empty() {
                text = Some(path);
            }
            inside.sort();
            files.extend(inside);
        } else {
            text = Some(path);
        }
    }
    match (files.is_empty(), text) {
        (true, _) => Ok(None),
        (false, None) => Ok(Some(files)),
        (false, Some(path)) => Err(DataError::source(
            path,
            format!("no tokens of Megatron's, as {} are: one corpus has either", files[0].display()),
            DataHint::of("make each a corpus of its own in {}, with a name and a weight", DataSetting::Corpora),
        )),
    }
}

/// A path with something after its last dot.
fn beside(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    name.into()
}

/// What trains and what validates.
pub(crate) type Divided = (Vec<Arc<dyn TokenFile>>, Vec<Arc<dyn TokenFile>>);

/// Opens pairs of files, named by their `.idx`, and holds out the last of all their documents. Samples of the tokens must be below
/// `vocabulary`.
pub(crate) fn open_divided(files: &[PathBuf], fraction: f64, vocabulary: u32) -> Result<Divided> {
    if !(0.0..1.0).contains(&fraction) {
        return Err(DataError::Fraction { value: fraction });
    }
    let open: Vec<_> = files.iter().map(|path| Indexed::open(path).map(Arc::new)).collect::<Result<_, _>>()?;
    let all: u64 = open.iter().map(|file| file.documents()).sum();
    let held = match fraction {
        0.0 => 0,
        fraction => ((all as f64 * fraction).round() as u64).max(1),
    };
    if held >= all {
        return Err(DataError::source(
            &files[0],
            format!(
                "{all} document{} cannot be divided between training and validation",
                if all == 1 { "" } else { "s" }
            ),
            DataHint::of("add documents, or set {} = 0", DataSetting::ValidationFraction),
        ));
    }
    let (mut train, mut validation): Divided = (Vec::new(), Vec::new());
    let mut first = 0;
    for (ordinal, file) in open.iter().enumerate() {
        let documents = file.documents();
        let cut = (all - held).saturating_sub(first).min(documents);
        for (part, to) in [(0..cut, &mut train), (cut..documents, &mut validation)] {
            let part = IndexedTokens::part(file.clone(), ordinal as u64, part)?;
            if let Some((largest, at)) = part.largest_sampled().filter(|(largest, _)| *largest >= vocabulary) {
                return Err(DataError::source(
                    part.path(),
                    format!(
                        "token {} is {largest}, and the tokenizer has tokens below {vocabulary}",
                        part.tokens.start + at
                    ),
                    DataHint::of("set {} to the tokenizer.json that the tokens were made with", DataSetting::Tokenizer),
                ));
            }
            if !part.is_empty() {
                to.push(Arc::new(part));
            }
        }
        first += documents;
    }
    let none =
        |what: &str| DataError::source(&files[0], format!("no token for {what}"), "add documents that are not empty");
    match (train.is_empty(), validation.is_empty() && held > 0) {
        (true, _) => Err(none("training")),
        (_, true) => Err(none("validation")),
        (false, false) => Ok((train, validation)),
    }
}

impl IndexedTokens {
    /// All documents of a pair of files, named by its `.idx`.
    pub fn open(index: &Path) -> Result<Self> {
        let file = Arc::new(Indexed::open(index)?);
        let documents = 0..file.documents();
        IndexedTokens::part(file, 0, documents)
    }

    fn part(file: Arc<Indexed>, ordinal: u64, documents: Range<u64>) -> Result<Self> {
        let tokens = file.start(documents.start)..file.start(documents.end);
        if tokens.end > file.tokens() || tokens.start > tokens.end {
            return Err(file.damaged("the document table is not in order"));
        }
        let mut part = IndexedTokens { file, ordinal, documents, tokens, hash: 0 };
        part.hash = part.sampled_hash();
        Ok(part)
    }

    /// Of the type, the counts, and samples of index and tokens: all of what is short, some blocks of what is long.
    fn sampled_hash(&self) -> u64 {
        let mut hasher = Xxh3::new();
        let width = self.file.width as u64;
        for number in [width, self.documents.end - self.documents.start, self.tokens.start, self.tokens.end] {
            hasher.update(&number.to_le_bytes());
        }
        let index = &self.file.index;
        for (from, length) in sample_blocks(index.len() as u64) {
            hasher.update(&index[from as usize..(from + length) as usize]);
        }
        for (from, length) in sample_blocks(self.len() * width) {
            let from = self.tokens.start * width + from;
            hasher.update(&self.file.bin[from as usize..(from + length) as usize]);
        }
        hasher.digest()
    }

    /// The largest token of samples of the tokens, all of them where they are few; and where it is.
    pub fn largest_sampled(&self) -> Option<(u32, u64)> {
        let width = self.file.width as u64;
        let mut tokens = Vec::new();
        let mut largest = None;
        for (from, length) in sample_blocks(self.len() * width) {
            let from = from.div_ceil(width);
            let count = (length / width).min(self.len() - from);
            tokens.resize(count as usize, 0);
            self.copy(from, &mut tokens);
            let of_block = tokens.iter().copied().zip(from..).max_by_key(|(token, _)| *token);
            largest = largest.max(of_block);
        }
        largest
    }
}

impl TokenFile for IndexedTokens {
    fn path(&self) -> &Path {
        &self.file.bin_path
    }

    fn len(&self) -> u64 {
        self.tokens.end - self.tokens.start
    }

    fn documents(&self) -> u64 {
        self.documents.end - self.documents.start
    }

    fn document(&self, index: u64) -> Document {
        let origin = Origin { file: self.ordinal, record: self.documents.start + index + 1 };
        Document { start: self.start_of(index), origin, continued: false, prompt: 0 }
    }

    fn start_of(&self, index: u64) -> u64 {
        assert!(index < self.documents(), "document {index} is outside a table of {}", self.documents());
        self.file.start(self.documents.start + index).saturating_sub(self.tokens.start).min(self.len())
    }

    fn has_prompts(&self) -> bool {
        false
    }

    fn hash(&self) -> u64 {
        self.hash
    }

    fn payload_bytes(&self) -> u64 {
        self.file.index.len() as u64
    }

    /// The index: there is no hash of the tokens.
    fn verify_with(&self, stop: &AtomicBool, read: &mut dyn FnMut(u64)) -> Result<()> {
        self.file.check(stop, read)
    }

    fn copy(&self, offset: u64, tokens: &mut [u32]) {
        check_range(offset, tokens.len(), self.len());
        let width = self.file.width as usize;
        // In range of the map, so of usize.
        let from = (self.tokens.start + offset) as usize * width;
        self.file.width.read(&self.file.bin[from..][..tokens.len() * width], tokens);
    }
}

impl Indexed {
    /// Opens both files, and checks that they belong together; an index under 64 MiB in full.
    fn open(index_path: &Path) -> Result<Self> {
        let bin_path = index_path.with_extension("bin");
        let index = map(index_path, &bin_path)?;
        let refuse = |problem: String, hint| Err(DataError::source(index_path, problem, hint));
        let Some(header) = index.first_chunk::<HEADER_BYTES>() else {
            let bytes = index.len();
            return refuse(format!("{bytes} bytes are too few for the header of an index (34 bytes)"), COPY);
        };
        if header.starts_with(b"TNTIDX\0\0") {
            return refuse("an index of the old kind (TNTIDX), which is not read".into(), MAKE);
        }
        if !header.starts_with(&MAGIC) {
            return refuse("not an index of Megatron's: it does not begin with `MMIDIDX`".into(), MAKE);
        }
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        let version = number(9);
        if version != VERSION {
            return refuse(format!("index version {version} is not supported (this build reads version 1)"), MAKE);
        }
        let width = match header[17] {
            1 => Width::One,
            4 => Width::Four,
            8 => Width::Two,
            code => {
                let known = ["int8", "int16", "int64", "float64", "float32"];
                let place = [2, 3, 5, 6, 7].iter().position(|known| *known == code);
                let name = place.map_or(String::new(), |place| format!(" ({})", known[place]));
                return refuse(format!("tokens of type {code}{name} are not read, only uint8, uint16 and int32"), MAKE);
            }
        };
        let (sequences, entries) = (number(18), number(26));
        let expected = index_bytes(sequences, entries);
        if expected != Some(index.len() as u64) {
            let found = index.len();
            return refuse(
                match expected {
                    Some(expected) => format!("{found} bytes long where the header says {expected}"),
                    None => format!("the header claims {sequences} sequences, more than a file can hold"),
                },
                COPY,
            );
        }
        if entries < 2 || sequences == 0 {
            return refuse("it has no document".into(), MAKE);
        }
        let bin = map(&bin_path, index_path)?;
        let this = Indexed { bin_path, index_path: index_path.to_owned(), bin, index, width, sequences, entries };
        let last = sequences - 1;
        let tokens = this.pointer(last).checked_div(width as u64).and_then(|from| from.checked_add(this.length(last)));
        let bytes = tokens.and_then(|tokens| tokens.checked_mul(width as u64));
        if bytes != Some(this.bin.len() as u64) {
            let found = this.bin.len();
            let expected = bytes.map_or("more than a file can have".to_owned(), |bytes| bytes.to_string());
            let problem = format!("{found} bytes long where {} says {expected}", index_path.display());
            return Err(DataError::source(&this.bin_path, problem, COPY));
        }
        if this.first_sequence(0) != 0 || this.first_sequence(entries - 1) != sequences {
            return Err(this.damaged("the document table does not hold all sequences"));
        }
        if this.index.len() < CHECK_ON_OPEN_BYTES {
            this.check(&NEVER, &mut |_| ())?;
        }
        Ok(this)
    }

    /// Refuses an index whose sequences do not follow each other, or whose documents do not.
    fn check(&self, stop: &AtomicBool, read: &mut dyn FnMut(u64)) -> Result<()> {
        let width = self.width as u64;
        let mut next = 0u64;
        for sequence in 0..self.sequences {
            if sequence % CHECK_PIECE == 0 {
                go_on(stop)?;
                read(12 * CHECK_PIECE.min(self.sequences - sequence));
            }
            if self.pointer(sequence) != next {
                return Err(self.damaged(&format!("sequence {sequence} does not begin where the one before ends")));
            }
            let length = self.length(sequence);
            if length > i32::MAX as u64 {
                return Err(self.damaged(&format!("sequence {sequence} has less than no token")));
            }
            next = next.saturating_add(length * width);
        }
        let mut last = 0;
        for entry in 0..self.entries {
            if entry % CHECK_PIECE == 0 {
                go_on(stop)?;
                read(8 * CHECK_PIECE.min(self.entries - entry));
            }
            let first = self.first_sequence(entry);
            if first < last || first > self.sequences {
                return Err(self.damaged("the document table is not in order"));
            }
            last = first;
        }
        Ok(())
    }

    fn damaged(&self, problem: &str) -> DataError {
        DataError::source(&self.index_path, format!("damaged: {problem}"), COPY)
    }

    fn documents(&self) -> u64 {
        self.entries - 1
    }

    fn tokens(&self) -> u64 {
        self.bin.len() as u64 / self.width as u64
    }

    /// The token that a document begins with; for the one after the last, the end.
    fn start(&self, document: u64) -> u64 {
        match self.first_sequence(document) {
            sequence if sequence < self.sequences => self.pointer(sequence) / self.width as u64,
            _ => self.tokens(),
        }
    }

    /// Tokens of a sequence. One of less than none is longer than any file.
    fn length(&self, sequence: u64) -> u64 {
        let at = HEADER_BYTES + 4 * sequence as usize;
        i64::from(i32::from_le_bytes(std::array::from_fn(|i| self.index[at + i]))) as u64
    }

    fn pointer(&self, sequence: u64) -> u64 {
        self.number(HEADER_BYTES + 4 * self.sequences as usize + 8 * sequence as usize)
    }

    fn first_sequence(&self, entry: u64) -> u64 {
        self.number(HEADER_BYTES + 12 * self.sequences as usize + 8 * entry as usize)
    }

    fn number(&self, at: usize) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|i| self.index[at + i]))
    }
}

/// Bytes of an index.
fn index_bytes(sequences: u64, entries: u64) -> Option<u64> {
    let table = entries.checked_mul(8)?;
    sequences.checked_mul(12)?.checked_add(table)?.checked_add(HEADER_BYTES as u64)
}

/// A file of a pair, mapped into memory.
fn map(path: &Path, other: &Path) -> Result<Mmap> {
    let unreadable = |cause| DataError::unreadable(path, cause);
    let file = File::open(path).map_err(|cause| match cause.kind() {
        io::ErrorKind::NotFound => {
            DataError::source(path, format!("missing, and {} is nothing without it", other.display()), COPY)
        }
        _ => unreadable(cause),
    })?;
    // SAFETY: The map is read-only and any byte is a valid u8. Files that others made are not known to stay as they are: bytes that
    // change are other tokens, which are checked when they are used, and a file that is cut short while it is read ends the
    // process, as any mapped file does.
    unsafe { MmapOptions::new().map(&file) }.map_err(unreadable)
}
