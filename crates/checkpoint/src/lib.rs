//! Checkpoints on disk: their format, their atomicity and their integrity.
//!
//! A checkpoint is a folder of named tensors, in groups, and a small JSON state. This crate knows nothing of models,
//! optimizers or training: what the names and the state mean is the caller's business.
//!
//! ```text
//! checkpoints/                    DIR: one run's checkpoints, one writer at a time
//!   step-00000100/                complete by construction: it came here by a rename
//!     manifest.json               step, state, length and checksum of every file, and of itself
//!     model.safetensors           one standard safetensors file per group
//!     optimizer.safetensors
//!     tokenizer.json              files of other kinds that its writer attached
//!   step-00000150/                of a run of several ranks
//!     manifest.json
//!     model-00000.safetensors     one file per group and rank that holds something: tensors, or slices of them
//!     model-00001.safetensors
//!     optimizer-00000.safetensors
//!   .tmp-step-00000200-<pid>/     being written, or left by a killed writer
//!   .trash-step-00000050-<pid>-0/ being removed, or left by a killed writer
//! ```
//!
//! Readers see whole tensors by name, however they were written. Nothing under a `step-` name is ever written to:
//! [`save`], or a [`Draft`] that ranks write to at once, fills a temporary folder, syncs it and renames it, and a removal
//! renames first and deletes after. So a kill at any moment leaves whole checkpoints only. Disks fail in other
//! ways, so [`open`] believes nothing: it checks every length, every checksum and every header before it returns.
//!
//! Weights also come from folders that other programs wrote, and go to such: [`WeightsFolder`], [`save_copies`],
//! [`export`]. They pass in chunks.

#![deny(unsafe_code)]

mod bucket;
mod bytes;
mod draft;
mod error;
mod find;
mod folder;
mod keep;
mod load;
mod manifest;
mod memory;
mod mirror;
mod save;
mod slice;
mod stored;
mod tensor_file;
mod weights;

pub use bucket::BucketMirror;
pub use bytes::{Take, TensorBytes};
pub use draft::{Draft, PartRef};
pub use error::{CheckpointError, Result};
pub use find::{LatestCheckpoint, latest, latest_of};
pub use folder::{list, set_aside_from};
pub use keep::{Keep, prune};
pub use load::{HeldByMany, Loaded, TensorView, open, open_found_by_another};
pub use memory::{HeldFile, MemoryFile};
pub use mirror::{free_bytes, mirror, require_space};
pub use save::{About, TensorGroup, TensorRef, looks_whole, save};
pub use slice::Slice;
pub use weights::{
    HeldTensors, Interleaved, LowRank, NewFolder, TensorCopy, TensorSource, WeightsFolder, export, save_copies,
};
