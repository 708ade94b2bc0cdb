//! Every kind of layout of four ranks, and how two runs of one are compared.
// Each test binary uses a part of this.
#![allow(dead_code)]

use crate::common::{CONFIG, Place};
use std::fs;

/// A place whose model has layers for four stages.
pub fn place() -> Place {
    let place = Place::new();
    place.config(&CONFIG.replace("layers = 2", "layers = 4").replace("kv_heads = 2", "kv_heads = 4"));
    place
}

/// A run of a few steps.
pub const SHORT: [&str; 3] = ["train.steps=4", "train.validate_every=2", "checkpoint.every=2"];

/// What is set for each layout.
pub const LAYOUTS: [&[&str]; 18] = [
    &["parallel.dp=4"],
    &["parallel.dp=4", "parallel.zero=1", "precision.policy=bf16"],
    &["parallel.dp=4", "parallel.zero=3"],
    &["parallel.tp=4"],
    &["parallel.tp=2", "parallel.dp=2", "parallel.sequence_parallel=true", "train.micro_batch=1"],
    &["parallel.pp=4", "parallel.schedule=gpipe", "train.micro_batch=2"],
    &["parallel.pp=2", "parallel.dp=2", "parallel.schedule=1f1b", "train.micro_batch=1"],
    &["parallel.pp=2", "parallel.dp=2", "parallel.schedule=interleaved", "train.micro_batch=1"],
    &["parallel.pp=2", "parallel.tp=2", "parallel.schedule=zb-v", "train.micro_batch=1"],
    &["parallel.cp=4"],
    &["parallel.cp=2", "parallel.dp=2", "parallel.context=gather", "train.micro_batch=1"],
    &["parallel.cp=4", "parallel.context=a2a", "data.document_mask=true"],
    &["parallel.dp=2", "parallel.dp_replicate=2", "parallel.zero=3"],
    &["parallel.pp=2", "parallel.dp=2", "parallel.zero=2", "train.micro_batch=1", "parallel.schedule=zb-h1"],
    &[MIXTRAL, EXPERTS, "parallel.ep=4", "parallel.zero=1", "precision.policy=bf16"],
    &[MIXTRAL, EXPERTS, "parallel.ep=2", "parallel.dp=2", "parallel.zero=3"],
    &[MIXTRAL, EXPERTS, "parallel.ep=2", "parallel.tp=2", "parallel.sequence_parallel=true", "train.micro_batch=1"],
    &[LATENT[0], LATENT[1], LATENT[2], LATENT[3], "parallel.cp=2", "parallel.context=latent", "parallel.tp=2"],
];

/// Latent attention.
const LATENT: [&str; 4] =
    ["model.kv_lora_rank=12", "model.qk_nope_head_dim=6", "model.qk_rope_head_dim=4", "model.v_head_dim=8"];

/// A model with experts.
const MIXTRAL: &str = "model.architecture=mixtral";
const EXPERTS: &str = "model.experts=4";

/// A command on the usual config with these keys set.
pub fn command<'a>(verb: &'a str, dir: &'a str, set: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec![verb, "run.toml", "--run-dir", dir];
    set.iter().for_each(|s| args.extend(["--set", s]));
    args
}

/// Two short runs have the same losses and the same checkpoints, up to the texts that say when they were made.
pub fn same(place: &Place, a: &str, b: &str, layout: &[&str]) {
    assert_eq!(place.trajectory(a), place.trajectory(b), "{layout:?}");
    for group in ["model", "optimizer"] {
        for rank in 0..4 {
            let file = |dir: &str| {
                let path = format!("{dir}/checkpoints/step-00000004/{group}-{rank:05}.safetensors");
                fs::read(place.path(&path)).ok()
            };
            assert!(file(a) == file(b), "{layout:?}: {group} of rank {rank}");
        }
    }
}
