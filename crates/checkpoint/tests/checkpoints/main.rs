//! Checkpoints as a run sees them: saved, found again, damaged, and thinned out.

mod damage;
mod disk_errors;
mod kills;
mod parts;
mod retention;
mod round_trip;

use std::fs;
use std::path::{Path, PathBuf};

use lockstep_checkpoint::{CheckpointError, TensorGroup, TensorRef, save};
use lockstep_ir::DType;
use serde_json::json;

/// A tensor that owns its bytes.
fn tensor(name: &str, dtype: DType, shape: &[usize], data: Vec<u8>) -> TensorRef<'static> {
    TensorRef { name: name.into(), dtype, shape: shape.into(), data: data.into() }
}

/// Saves a small checkpoint whose every tensor byte is `step`, and keeps `keep`.
fn save_small(dir: &Path, step: u8, keep: usize) -> Result<PathBuf, CheckpointError> {
    let model =
        vec![tensor("embed", DType::F32, &[2, 3], vec![step; 24]), tensor("norm", DType::F32, &[3], vec![step; 12])];
    let optimizer = vec![tensor("embed.m", DType::F64, &[2], vec![step; 16])];
    let groups = [TensorGroup { name: "model", tensors: model }, TensorGroup { name: "optimizer", tensors: optimizer }];
    save(dir, step.into(), &groups, &json!({ "position": step }), keep, &mut |_, _| {})
}

/// The names of everything in `dir`, hidden entries included.
fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
