//! Weights on the way between programs: safetensors folders of others in, checkpoints in, either out again.
//!
//! A model is never in memory as a whole. Tensors pass one after the other in chunks, converted and, where one side keeps
//! them the other way round, transposed or in another order. What the tensors are for is the caller's business: it gives a list of
//! [`TensorCopy`].

mod convert;
mod folder;
mod fp8;
mod held;
mod mxfp4;
mod new_folder;
mod stream;
mod write;

pub use folder::WeightsFolder;
pub use held::HeldTensors;
pub use new_folder::NewFolder;
pub use write::{export, save_copies};

use std::collections::BTreeMap;
use std::path::Path;

use lockstep_ir::DType;

use crate::error::{CheckpointError, Result};
use crate::load::Loaded;
use convert::Float;

/// Tensors of floating-point numbers, wherever they lie.
#[derive(Debug, Clone, Copy)]
pub enum TensorSource<'a> {
    /// A group of a checkpoint.
    Checkpoint {
        /// The checkpoint.
        loaded: &'a Loaded,
        /// The name of the group.
        group: &'a str,
    },
    /// A folder that another program wrote.
    Folder(&'a WeightsFolder),
    /// Tensors in memory.
    Held(&'a HeldTensors),
    /// Tensors of another source, to some of which a product is added.
    Sum {
        /// The other source.
        base: &'a TensorSource<'a>,
        /// The products, by names in the result.
        added: &'a BTreeMap<String, LowRank>,
    },
}

/// A product of two thin matrices.
#[derive(Debug, Clone, PartialEq)]
pub struct LowRank {
    /// Rows of `rank` elements.
    pub left: Vec<f32>,
    /// `rank` rows of `columns` elements.
    pub right: Vec<f32>,
    /// Width of the one and height of the other.
    pub rank: usize,
    /// Width of the product.
    pub columns: usize,
}

/// One tensor to be copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorCopy {
    /// Its name in the source.
    pub from: String,
    /// Its name in the result.
    pub to: String,
    /// Its dims in the result.
    pub shape: Vec<usize>,
    /// Whether the source has its last two dims the other way round.
    pub transposed: bool,
    /// Whether rows of two halves alternate on one side.
    pub interleaved: Interleaved,
    /// Whether the result has it in f32, whatever the type of others.
    pub exact: bool,
}

/// Where the rows of a matrix, which are outputs, alternate between those of two halves: gate and up of an expert, say. A tensor of three dims
/// has a matrix in every entry of the first, one of two a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interleaved {
    /// On both sides, or on neither.
    Alike,
    /// In the source alone.
    InSource,
    /// In the result alone.
    InResult,
}

impl Interleaved {
    /// That of a source and a result of which each is interleaved or not.
    pub fn between(source: bool, result: bool) -> Self {
        match (source, result) {
            (true, false) => Interleaved::InSource,
            (false, true) => Interleaved::InResult,
            (true, true) | (false, false) => Interleaved::Alike,
        }
    }
}

impl TensorCopy {
    /// Copies a tensor as it is.
    pub fn plain(from: String, to: String, shape: Vec<usize>) -> Self {
        Self { from, to, shape, transposed: false, interleaved: Interleaved::Alike, exact: false }
    }

    /// Its dims in the source.
    fn source_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let (true, [.., a, b]) = (self.transposed, &mut shape[..]) {
            std::mem::swap(a, b);
        }
        shape
    }

    /// How many matrices of this many rows and columns it is in the source, where rows change their order; none where they do not.
    fn matrices(&self) -> Option<(usize, [usize; 2])> {
        match (self.interleaved, self.transposed, &self.source_shape()[..]) {
            (Interleaved::Alike, false, _) => None,
            (_, _, &[entries, rows, columns]) => Some((entries, [rows, columns])),
            (Interleaved::Alike, true, _) => None,
            (_, _, &[entries, rows]) => Some((entries, [rows, 1])),
            (_, _, _) => None,
        }
    }

    /// The type of its elements in a result of this type.
    fn dtype(&self, of_others: DType) -> DType {
        if self.exact { DType::F32 } else { of_others }
    }

    fn elements(&self) -> Option<usize> {
        // Four bytes each, in the widest case.
        let bytes = self.shape.iter().try_fold(4usize, |product, dim| product.checked_mul(*dim));
        bytes.map(|bytes| bytes / 4)
    }
}

impl<'a> TensorSource<'a> {
    /// The folder, for messages.
    pub fn path(&self) -> &'a Path {
        match self {
            TensorSource::Checkpoint { loaded, .. } => &loaded.path,
            TensorSource::Folder(folder) => folder.path(),
            TensorSource::Held(held) => held.path(),
            TensorSource::Sum { base, .. } => base.path(),
        }
    }

    /// The names of its tensors, ascending.
    pub fn names(&self) -> Result<Vec<&'a str>> {
        match self {
            TensorSource::Checkpoint { loaded, group } => loaded.names(group),
            TensorSource::Folder(folder) => Ok(folder.names().collect()),
            TensorSource::Held(held) => Ok(held.names().collect()),
            TensorSource::Sum { base, .. } => base.names(),
        }
    }

    /// The type and the dims of a tensor, the type as its file spells it.
    fn find(&self, name: &str) -> Option<(String, Option<Float>, &'a [usize])> {
        match self {
            TensorSource::Checkpoint { loaded, group } => {
                let view = loaded.tensor(group, name).ok()?;
                let float = match view.dtype {
                    DType::F32 => Some(Float::F32),
                    DType::BF16 => Some(Float::Bf16),
                    DType::F16 => Some(Float::F16),
                    _ => None,
                };
                Some((view.dtype.to_string(), float, view.shape))
            }
            TensorSource::Folder(folder) => {
                let (dtype, float, shape) = folder.find(name)?;
                Some((dtype.to_string(), float, shape))
            }
            TensorSource::Held(held) => Some((DType::F32.to_string(), Some(Float::F32), held.shape(name)?)),
            TensorSource::Sum { base, .. } => base.find(name),
        }
    }

    /// Reads elements from `start` on.
    fn read(&self, name: &str, start: usize, bytes: &mut [u8]) -> Result<()> {
        match self {
            TensorSource::Checkpoint { loaded, group } => {
                loaded.tensor(group, name)?.copy_range(start, bytes);
                Ok(())
            }
            TensorSource::Folder(folder) => folder.read(name, start, bytes),
            TensorSource::Held(held) => held.read(name, start, bytes),
            TensorSource::Sum { base, .. } => base.read(name, start, bytes),
        }
    }

    /// Checks that the source has every tensor that is to be copied, in its shape and in floating-point numbers. `hint` says
    /// what to do where one is missing or of another shape.
    pub fn check(&self, copies: &[TensorCopy], hint: &str) -> Result<()> {
        let unfit = |cause: String, hint: &str| Err(CheckpointError::unfit(self.path(), cause, hint));
        let missing: Vec<&str> =
            copies.iter().filter(|copy| self.find(&copy.from).is_none()).map(|copy| copy.from.as_str()).collect();
        if !missing.is_empty() {
            return unfit(format!("{} missing: {}", tensors(missing.len()), some_of(&missing)), hint);
        }
        for copy in copies {
            let Some((dtype, float, shape)) = self.find(&copy.from) else { continue };
            let wanted = copy.source_shape();
            if shape != wanted {
                return unfit(format!("tensor `{}` is {shape:?}, the model wants {wanted:?}", copy.from), hint);
            }
            if float.is_none() {
                let cause = format!("tensor `{}` has elements of type {dtype}", copy.from);
                return unfit(cause, "F32, BF16 and F16 are supported: save the weights in one of them");
            }
        }
        Ok(())
    }

    /// A tensor of floating-point numbers, whole: its dims and its elements.
    pub fn whole(&self, name: &str) -> Result<Option<(Vec<usize>, Vec<f32>)>> {
        let Some((_, Some(_), shape)) = self.find(name) else { return Ok(None) };
        let copy = TensorCopy::plain(name.into(), name.into(), shape.to_vec());
        let mut elements = Vec::with_capacity(copy.elements().unwrap_or(0));
        self.stream(&copy, DType::F32, &mut |chunk| {
            elements.extend(chunk.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)));
            Ok(())
        })?;
        Ok(Some((copy.shape, elements)))
    }

    /// A number that tells other tensors from these: of the first elements of each.
    pub fn fingerprint(&self, copies: &[TensorCopy]) -> Result<u64> {
        const ELEMENTS: usize = 4096;
        let mut hasher = xxhash_rust::xxh3::Xxh3::new();
        let mut raw = Vec::new();
        for copy in copies {
            let Some((_, Some(float), shape)) = self.find(&copy.from) else { continue };
            raw.resize(shape.iter().product::<usize>().min(ELEMENTS) * float.bytes(), 0);
            self.read(&copy.from, 0, &mut raw)?;
            hasher.update(copy.to.as_bytes());
            hasher.update(&raw);
        }
        Ok(hasher.digest())
    }

    /// Whether two tensors of the source are equal, element by element; false where one is not there.
    pub fn equal(&self, a: &str, b: &str) -> Result<bool> {
        let digest = |name: &str| -> Result<Option<(u128, &[usize])>> {
            let Some((_, Some(_), shape)) = self.find(name) else { return Ok(None) };
            let copy = TensorCopy::plain(name.into(), name.into(), shape.to_vec());
            let mut hasher = xxhash_rust::xxh3::Xxh3::new();
            self.stream(&copy, DType::F32, &mut |chunk| {
                hasher.update(chunk);
                Ok(())
            })?;
            Ok(Some((hasher.digest128(), shape)))
        };
        let of_a = digest(a)?;
        Ok(of_a.is_some() && of_a == digest(b)?)
    }

    /// Whether every tensor is of this type, but for those that are exact.
    pub fn all_are(&self, copies: &[TensorCopy], dtype: DType) -> bool {
        let float = if dtype == DType::BF16 { Float::Bf16 } else { Float::F32 };
        copies
            .iter()
            .filter(|copy| !copy.exact)
            .all(|copy| self.find(&copy.from).is_some_and(|(_, found, _)| found == Some(float)))
    }
}

/// `1 tensor is`, `3 tensors are`.
pub(crate) fn tensors(count: usize) -> String {
    if count == 1 { "1 tensor is".to_owned() } else { format!("{count} tensors are") }
}

/// The first names of a list, and how many more there are.
pub(crate) fn some_of(names: &[&str]) -> String {
    const SHOWN: usize = 5;
    let shown: Vec<String> = names.iter().take(SHOWN).map(|name| format!("`{}`", name.escape_debug())).collect();
    let more = names.len().saturating_sub(SHOWN);
    shown.join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() }
}
