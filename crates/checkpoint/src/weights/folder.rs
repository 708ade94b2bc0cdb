//! Weights as other programs keep them: `model.safetensors`, or shards that `model.safetensors.index.json` lists.
//!
//! The files are anybody's: nothing in them is believed before it was checked, and they are read, not mapped, so that a file
//! that shrinks meanwhile gives an error and not a signal.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use safetensors::Dtype as FileDType;

use super::convert::Float;
use super::{fp8, mxfp4, some_of, tensors};
use crate::error::{AtPath, CheckpointError, Result};
use crate::tensor_file::{self, LENGTH_BYTES};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// The largest JSON file that is read; the index of the largest public models has a few MB.
const MAX_JSON_BYTES: u64 = 32 << 20;
/// The most shards of a model.
const MAX_SHARDS: usize = 1000;
const AGAIN: &str = "fetch or save the file again";

/// The weights in a folder, found and not yet read.
#[derive(Debug)]
pub struct WeightsFolder {
    path: PathBuf,
    files: Vec<(PathBuf, Mutex<File>)>,
    tensors: BTreeMap<String, Located>,
    /// Quantised tensors, by the name that numbers and scales have together.
    packed: BTreeMap<String, Packed>,
}

/// A tensor of numbers and scales, which is read as bf16.
#[derive(Debug)]
struct Packed {
    format: Format,
    numbers: Located,
    scales: Located,
    /// The shape of its elements.
    shape: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Mxfp4,
    Fp8,
}

/// Where a tensor lies: inside its file, in as many bytes as its shape and type take.
#[derive(Debug)]
struct Located {
    file: usize,
    start: u64,
    dtype: FileDType,
    shape: Vec<usize>,
}

impl WeightsFolder {
    /// Whether there are weights in a folder, of whatever content.
    pub fn is_one(path: &Path) -> bool {
        path.join(SINGLE).exists() || path.join(INDEX).exists()
    }

    /// Whether they are those of a Hugging Face model.
    pub fn is_hugging_face(path: &Path) -> bool {
        path.join("config.json").exists() && Self::is_one(path)
    }

    /// Opens the weights of one file, which is called `name` with the ending of safetensors, and checks its header.
    pub fn open_named(path: &Path, name: &str) -> Result<WeightsFolder> {
        let mut folder = Self::empty(path);
        folder.add(&format!("{name}.safetensors"))?;
        Ok(folder)
    }

    fn empty(path: &Path) -> Self {
        WeightsFolder { path: path.to_owned(), files: Vec::new(), tensors: BTreeMap::new(), packed: BTreeMap::new() }
    }

    /// Opens the weights in a folder and checks every header.
    pub fn open(path: &Path) -> Result<WeightsFolder> {
        let mut folder = Self::empty(path);
        if path.join(SINGLE).exists() {
            folder.add(SINGLE)?;
            folder.pack()?;
            return Ok(folder);
        }
        if !path.join(INDEX).exists() {
            let hint = match path.join("pytorch_model.bin").exists() {
                true => "its weights are pickled: save them with safe_serialization=True first",
                false => "name a folder with config.json and model.safetensors",
            };
            return Err(CheckpointError::unfit(path, format!("no {SINGLE} and no {INDEX}"), hint));
        }
        let map = folder.index()?;
        let names: BTreeSet<&String> = map.values().collect();
        if names.len() > MAX_SHARDS {
            let cause = format!("the index names {} files, more than {MAX_SHARDS}", names.len());
            return Err(folder.wrong(INDEX, cause, "save the model in fewer shards"));
        }
        for name in names {
            if !path.join(name).exists() {
                let cause = format!("it names {name}, which is not in the folder");
                return Err(folder.wrong(INDEX, cause, "fetch the missing file too"));
            }
            folder.add(name)?;
        }
        let at = |name: &str| folder.tensors.get(name).map(|found| &folder.files[found.file].0);
        for (name, file) in &map {
            if at(name) != Some(&path.join(file)) {
                let cause =
                    format!("it says that tensor `{}` is in {file}, which does not have it", name.escape_debug());
                return Err(folder.wrong(INDEX, cause, AGAIN));
            }
        }
        let unnamed: Vec<&str> = folder.names().filter(|name| !map.contains_key(*name)).collect();
        if !unnamed.is_empty() {
            let cause = format!("{} in the shards and not in it: {}", tensors(unnamed.len()), some_of(&unnamed));
            return Err(folder.wrong(INDEX, cause, AGAIN));
        }
        folder.pack()?;
        Ok(folder)
    }

    /// Makes one tensor of every two that are numbers and scales.
    fn pack(&mut self) -> Result<()> {
        let named = |end: &str| -> Vec<String> {
            self.tensors.keys().filter_map(|name| name.strip_suffix(end)).map(str::to_owned).collect()
        };
        for name in named(mxfp4::BLOCKS) {
            let both = [format!("{name}{}", mxfp4::BLOCKS), format!("{name}{}", mxfp4::SCALES)];
            let bytes = |name: &String| self.tensors.get(name).filter(|found| found.dtype == FileDType::U8);
            let (Some(blocks), Some(scales)) = (bytes(&both[0]), bytes(&both[1])) else { continue };
            let Some(shape) = mxfp4::shape(&blocks.shape, &scales.shape) else { continue };
            if !self.tensors.contains_key(&name) {
                self.join(name, Format::Mxfp4, both, shape);
            }
        }
        let is_fp8 = |(_, found): &(&String, &Located)| found.dtype == FileDType::F8_E4M3;
        let fp8: Vec<(String, Vec<usize>)> =
            self.tensors.iter().filter(is_fp8).map(|(name, found)| (name.clone(), found.shape.clone())).collect();
        for (name, shape) in fp8 {
            let scales = format!("{name}{}", fp8::SCALES);
            self.check_scales(&name, &shape, &scales)?;
            self.join(name.clone(), Format::Fp8, [name, scales], shape);
        }
        Ok(())
    }

    /// Checks that a matrix in fp8 has a scale for each of its blocks.
    fn check_scales(&self, name: &str, shape: &[usize], scales: &str) -> Result<()> {
        let refused = |cause: String, hint: &str| Err(CheckpointError::unfit(&self.path, cause, hint));
        let (matrix, with) = (name.escape_debug(), scales.escape_debug());
        let Some(wanted) = fp8::scales_of(shape) else {
            let cause = format!("tensor `{matrix}` is in fp8 and {shape:?}, which is no matrix");
            return refused(cause, "only matrices in fp8 are read: save this tensor in bf16");
        };
        let Some(found) = self.tensors.get(scales) else {
            let cause = format!("tensor `{matrix}` is in fp8, and there is no `{with}`");
            return refused(
                cause,
                "numbers in fp8 mean nothing without the scales of their blocks: fetch all files of the model",
            );
        };
        let hint = format!("a matrix in fp8 has one F32 scale for each block of {0} × {0}", fp8::BLOCK);
        if found.dtype != FileDType::F32 {
            return refused(format!("tensor `{with}` has elements of type {}", found.dtype), &hint);
        }
        if found.shape != wanted {
            let cause =
                format!("tensor `{with}` is {:?}, and `{matrix}`, which is {shape:?}, wants {wanted:?}", found.shape);
            return refused(cause, &hint);
        }
        Ok(())
    }

    fn join(&mut self, name: String, format: Format, both: [String; 2], shape: Vec<usize>) {
        if let [Some(numbers), Some(scales)] = both.map(|name| self.tensors.remove(&name)) {
            self.packed.insert(name, Packed { format, numbers, scales, shape });
        }
    }

    /// Lets the entries of a tensor of all experts be found as tensors of their own: `names` has those of each entry, over which its rows are
    /// shared out in order. A tensor of another form stays as it is, and so does one whose entries are there already.
    pub fn take_apart(&mut self, name: &str, names: &[Vec<String>]) {
        let Some(Located { file, start, dtype, shape }) = self.tensors.get(name) else { return };
        let (&[entries, rows, columns], Some(parts)) = (&shape[..], names.first().map(Vec::len)) else { return };
        let is_there = names.iter().flatten().any(|name| self.tensors.contains_key(name));
        if entries != names.len() || parts == 0 || rows % parts != 0 || dtype.bitsize() % 8 != 0 || is_there {
            return;
        }
        let (file, start, dtype, shape) = (*file, *start, *dtype, vec![rows / parts, columns]);
        let bytes = (rows / parts * columns * dtype.bitsize() / 8) as u64;
        self.tensors.remove(name);
        for (part, name) in names.iter().flatten().enumerate() {
            let located = Located { file, start: start + part as u64 * bytes, dtype, shape: shape.clone() };
            self.tensors.insert(name.clone(), located);
        }
    }

    /// The first tensor that is in fp8, if one is.
    pub fn fp8(&self) -> Option<&str> {
        self.packed.iter().find(|(_, packed)| packed.format == Format::Fp8).map(|(name, _)| name.as_str())
    }

    /// Whether a tensor is in mxfp4.
    pub fn is_mxfp4(&self, name: &str) -> bool {
        self.packed.get(name).is_some_and(|packed| packed.format == Format::Mxfp4)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of the tensors, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let names: BTreeSet<&str> = self.tensors.keys().chain(self.packed.keys()).map(String::as_str).collect();
        names.into_iter()
    }

    /// Whether all tensors that count are bf16, or quantised, which is read as bf16.
    pub fn is_bf16(&self, counts: impl Fn(&str) -> bool) -> bool {
        let mut counted = self.tensors.iter().filter(|(name, _)| counts(name)).peekable();
        (counted.peek().is_some() || !self.packed.is_empty())
            && counted.all(|(_, found)| found.dtype == FileDType::BF16)
    }

    /// Reads a JSON file of a folder, which is no larger than a few MB and not a link to somewhere else.
    pub fn json(path: &Path, name: &str) -> Result<serde_json::Value> {
        let wrong = |cause: String| CheckpointError::unfit(&path.join(name), cause, AGAIN);
        serde_json::from_slice(&WeightsFolder::bytes(path, name, MAX_JSON_BYTES)?)
            .map_err(|error| wrong(format!("not the JSON that is expected: {error}")))
    }

    /// Reads a file of a folder, of at most this many bytes, which is not a link to somewhere else.
    pub fn bytes(path: &Path, name: &str, most: u64) -> Result<Vec<u8>> {
        let (file, length) = open_inside(path, name)?;
        if length > most {
            let cause = format!("{length} bytes, more than {most}");
            return Err(CheckpointError::unfit(&path.join(name), cause, "check that this is the file that is meant"));
        }
        let mut bytes = Vec::new();
        file.take(most).read_to_end(&mut bytes).at("read", &path.join(name))?;
        Ok(bytes)
    }

    /// The type of a tensor, what it is read as, if it can be, and its shape.
    pub(super) fn find(&self, name: &str) -> Option<(FileDType, Option<Float>, &[usize])> {
        if let Some(packed) = self.packed.get(name) {
            return Some((packed.numbers.dtype, Some(Float::Bf16), &packed.shape));
        }
        self.tensors.get(name).map(|found| (found.dtype, Float::of(found.dtype), found.shape.as_slice()))
    }

    /// Reads elements of a tensor from `start` on.
    pub(crate) fn read(&self, name: &str, start: usize, bytes: &mut [u8]) -> Result<()> {
        if let Some(packed) = self.packed.get(name) {
            return match packed.format {
                Format::Mxfp4 => self.read_mxfp4(packed, start, bytes),
                Format::Fp8 => self.read_fp8(packed, start, bytes),
            };
        }
        let Some(found) = self.tensors.get(name) else {
            return Err(CheckpointError::unfit(&self.path, format!("no tensor `{}`", name.escape_debug()), AGAIN));
        };
        self.read_located(found, start, bytes)
    }

    fn read_located(&self, found: &Located, start: usize, bytes: &mut [u8]) -> Result<()> {
        let (path, file) = &self.files[found.file];
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        let start = found.start + (start * found.dtype.bitsize() / 8) as u64;
        file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(bytes)).at("read", path)
    }

    /// Reads numbers in mxfp4 as bf16, by the blocks that hold them.
    fn read_mxfp4(&self, packed: &Packed, start: usize, bytes: &mut [u8]) -> Result<()> {
        let end = start + bytes.len() / 2;
        let (first, last) = (start / mxfp4::BLOCK, end.div_ceil(mxfp4::BLOCK));
        let mut blocks = vec![0; (last - first) * mxfp4::BLOCK_BYTES];
        let mut scales = vec![0; last - first];
        self.read_located(&packed.numbers, first * mxfp4::BLOCK_BYTES, &mut blocks)?;
        self.read_located(&packed.scales, first, &mut scales)?;
        let mut to = bytes.as_chunks_mut::<2>().0.iter_mut();
        let mut before = start - first * mxfp4::BLOCK;
        mxfp4::widen(&blocks, &scales, |bits| {
            if before > 0 {
                before -= 1;
            } else if let Some(to) = to.next() {
                *to = bits.to_le_bytes();
            }
        });
        Ok(())
    }

    /// Reads numbers in fp8 as bf16.
    fn read_fp8(&self, packed: &Packed, start: usize, bytes: &mut [u8]) -> Result<()> {
        let columns = packed.shape.last().copied().unwrap_or(1).max(1);
        let mut numbers = vec![0; bytes.len() / 2];
        if numbers.is_empty() {
            return Ok(());
        }
        // The rows of blocks that these elements are in.
        let row = |element: usize| element / columns / fp8::BLOCK;
        let (first, last) = (row(start), row(start + numbers.len() - 1) + 1);
        let per_row = columns.div_ceil(fp8::BLOCK);
        let mut scales = vec![0; (last - first) * per_row * 4];
        self.read_located(&packed.numbers, start, &mut numbers)?;
        self.read_located(&packed.scales, first * per_row, &mut scales)?;
        let scales: Vec<f32> = scales.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        fp8::widen(&numbers, start, columns, (&scales, first), bytes);
        Ok(())
    }

    /// Which tensor is in which file.
    fn index(&self) -> Result<BTreeMap<String, String>> {
        let index = WeightsFolder::json(&self.path, INDEX)?;
        let map = index["weight_map"].as_object();
        let map = map.ok_or_else(|| self.wrong(INDEX, "it has no `weight_map`".into(), AGAIN))?;
        let mut files = BTreeMap::new();
        for (tensor, file) in map {
            let file = file.as_str().filter(|file| is_plain(file)).ok_or_else(|| {
                let cause =
                    format!("{} is not the name of a safetensors file in this folder", shortened(&file.to_string()));
                self.wrong(INDEX, cause, "an index names files beside itself; do not use one that does otherwise")
            })?;
            files.insert(tensor.clone(), file.to_owned());
        }
        Ok(files)
    }

    fn add(&mut self, name: &str) -> Result<()> {
        let path = self.path.join(name);
        let (mut file, bytes) = open_inside(&self.path, name)?;
        let wrong = |cause: String| CheckpointError::unfit(&path, cause, AGAIN);
        let rest = bytes.checked_sub(LENGTH_BYTES as u64).ok_or_else(|| wrong("too short for a header".into()))?;
        let mut first = [0; LENGTH_BYTES];
        file.read_exact(&mut first).at("read", &path)?;
        let length = tensor_file::header_length(first, rest).map_err(wrong)?;
        // No longer than the file, so no more memory than somebody has written.
        let mut header = vec![0; length];
        file.read_exact(&mut header).at("read", &path)?;
        let metadata = tensor_file::read_metadata(&header, rest - length as u64).map_err(wrong)?;
        let index = self.files.len();
        for (name, info) in metadata.tensors() {
            let start = (LENGTH_BYTES + length + info.data_offsets.0) as u64;
            let found = Located { file: index, start, dtype: info.dtype, shape: info.shape.clone() };
            if self.tensors.insert(name.clone(), found).is_some() {
                return Err(wrong(format!("tensor `{}` is in another file too", name.escape_debug())));
            }
        }
        self.files.push((path, Mutex::new(file)));
        Ok(())
    }

    fn wrong(&self, file: &str, cause: String, hint: &str) -> CheckpointError {
        CheckpointError::unfit(&self.path.join(file), cause, hint)
    }
}

/// The name of a safetensors file, and no path.
fn is_plain(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    name.ends_with(tensor_file::EXTENSION) && name.len() <= 255 && !name.starts_with('.') && name.chars().all(plain)
}

/// Opens a plain file of `folder` and tells its length. A link may lead to the blobs of a Hugging Face cache that the folder
/// is a snapshot of, and to nowhere else outside.
fn open_inside(folder: &Path, name: &str) -> Result<(File, u64)> {
    let path = folder.join(name);
    let (home, target) = (folder.canonicalize().at("open", folder)?, path.canonicalize().at("open", &path)?);
    // `models--x--y/snapshots/<revision>` and `models--x--y/blobs`.
    let snapshots = home.parent().filter(|parent| parent.ends_with("snapshots"));
    let blobs = snapshots.and_then(Path::parent).map(|model| model.join("blobs"));
    if !target.starts_with(&home) && !blobs.is_some_and(|blobs| target.starts_with(blobs)) {
        let cause = format!("a link to {}, outside of its folder", target.display());
        return Err(CheckpointError::unfit(&path, cause, "copy the file into the folder, if it is what you mean"));
    }
    let file_metadata = target.metadata().at("read", &path)?;
    if !file_metadata.is_file() {
        return Err(CheckpointError::unfit(&path, "not a plain file", AGAIN));
    }
    Ok((File::open(&target).at("open", &path)?, file_metadata.len()))
}

/// A text for a message, without what a terminal would act on.
fn shortened(text: &str) -> String {
    const SHOWN: usize = 80;
    let short: String = text.chars().take(SHOWN).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if short.len() < text.len() { short + "…" } else { short }
}
