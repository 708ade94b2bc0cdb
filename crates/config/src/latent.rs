//! Multi-head latent attention (MLA): its sizes, and what its keys must keep.

use crate::architecture::Architecture;
use crate::conflict::{Conflict, Derived};
use crate::schema::ModelConfig;
use crate::value::Value;
use crate::values::Values;
use crate::words::QkNorm;

/// The sizes of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentAttention {
    /// Width of the latent of queries; none where they are projected at once.
    pub q_rank: Option<usize>,
    /// Width of the latent of keys and values.
    pub kv_rank: usize,
    /// Elements of a head of Q and K without position.
    pub nope: usize,
    /// Elements of a head of Q and K with RoPE; those of K are one head that all share.
    pub rope: usize,
    /// Elements of a head of V.
    pub value: usize,
}

impl ModelConfig {
    /// The sizes of its latent attention, if it has one.
    pub fn latent(&self) -> Option<LatentAttention> {
        Some(LatentAttention {
            q_rank: self.q_lora_rank,
            kv_rank: self.kv_lora_rank?,
            nope: self.qk_nope_head_dim?,
            rope: self.qk_rope_head_dim?,
            value: self.v_head_dim?,
        })
    }

    /// Elements of a head of V.
    pub fn value_dim(&self) -> usize {
        self.latent().map_or(self.head_dim, |latent| latent.value)
    }

    /// Elements of a head that RoPE rotates.
    pub fn rope_dim(&self) -> usize {
        self.latent().map_or(self.head_dim, |latent| latent.rope)
    }
}

const RANK: &str = "model.kv_lora_rank";
const NOPE: &str = "model.qk_nope_head_dim";
const ROPE: &str = "model.qk_rope_head_dim";

/// The rank of DeepSeek-V2 and V3.
pub(crate) fn kv_lora_rank(values: &Values) -> Derived {
    Ok(crate::checks::features(values).latent.then_some(Value::Count(512)))
}

fn size(values: &Values, usual: u64) -> Derived {
    Ok(values.count(RANK).map(|_| Value::Count(usual)))
}

/// That of DeepSeek-V2 and V3, where attention is latent.
pub(crate) fn nope(values: &Values) -> Derived {
    size(values, 128)
}

/// That of DeepSeek-V2 and V3, where attention is latent.
pub(crate) fn rope(values: &Values) -> Derived {
    size(values, 64)
}

/// That of DeepSeek-V2 and V3, where attention is latent.
pub(crate) fn value(values: &Values) -> Derived {
    size(values, 128)
}

/// Elements of a head of Q and K, where attention is latent.
pub(crate) fn head_dim(values: &Values) -> Option<u64> {
    values.count(RANK)?;
    Some(values.count(NOPE)? + values.count(ROPE)?)
}

/// Keys of latent attention go with a latent, and its heads are what they say.
pub(crate) fn sizes_go_together(values: &Values) -> Option<Conflict> {
    let Some(rank) = values.count(RANK) else {
        let keys = ["model.q_lora_rank", NOPE, ROPE, "model.v_head_dim"];
        let (key, given) = keys.into_iter().find_map(|key| Some((key, values.count(key)?)))?;
        return Some(Conflict::new(
            &[key, RANK],
            format!("{key} = {given} is of latent attention, and {RANK} is not set"),
            format!("set {RANK}, or remove {key}"),
        ));
    };
    let architecture: Architecture = values.word("model.architecture")?;
    let features = architecture.features();
    if features.gpt2_block || features.qkv_bias {
        return Some(Conflict::new(
            &[RANK, "model.architecture"],
            format!("{RANK} = {rank} is given, and model.architecture = \"{architecture}\" has no latent attention"),
            format!("choose another model.architecture, or remove {RANK}"),
        ));
    }
    if let Some(kind) = values.word::<QkNorm>("model.qk_norm").filter(|kind| *kind != QkNorm::None) {
        return Some(Conflict::new(
            &["model.qk_norm", RANK],
            format!("model.qk_norm = \"{kind}\" is given, and with {RANK} norms are of the latents"),
            "set model.qk_norm = \"none\"",
        ));
    }
    let (heads, kv_heads) = (values.count("model.heads")?, values.count("model.kv_heads")?);
    if heads != kv_heads {
        return Some(Conflict::new(
            &["model.kv_heads", RANK],
            format!("model.kv_heads = {kv_heads} is given, and with {RANK} there are as many as heads, {heads}"),
            "remove model.kv_heads",
        ));
    }
    let (nope, rope, head_dim) = (values.count(NOPE)?, values.count(ROPE)?, values.count("model.head_dim")?);
    if rope % 2 != 0 {
        return Some(Conflict::new(
            &[ROPE],
            format!("{ROPE} = {rope} is odd, and RoPE rotates pairs"),
            format!("choose an even {ROPE}"),
        ));
    }
    Conflict::when(
        head_dim != nope + rope,
        &["model.head_dim", NOPE, ROPE],
        format!("model.head_dim = {head_dim} is given, and {NOPE} + {ROPE} = {}", nope + rope),
        "remove model.head_dim",
    )
}
