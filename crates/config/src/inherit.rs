//! What a config takes from outside of its text: where names on a hub lead, and what the folder that `train.init_from` names
//! decides, which is the shape of its weights, and its tokenizer.

use std::path::{Path, PathBuf};

/// Opens what a config names. This crate reads text alone: whoever reads folders and asks hubs, says what is there.
///
/// A function that takes a folder is one for configs that name paths.
pub trait Opener {
    /// The keys that the weights in a folder decide.
    fn inherited(&self, folder: &Path) -> Result<Option<Inherited>, NotInherited>;

    /// Where a name leads that is no path; none for a path.
    fn located(&self, _named: &NamedFiles<'_>) -> Result<Option<Located>, NotInherited> {
        Ok(None)
    }
}

impl<F: Fn(&Path) -> Result<Option<Inherited>, NotInherited>> Opener for F {
    fn inherited(&self, folder: &Path) -> Result<Option<Inherited>, NotInherited> {
        self(folder)
    }
}

/// A path or a name, as a config has it.
#[derive(Clone, Copy, Debug)]
pub struct NamedFiles<'a> {
    /// Of `train.init_from`, `data.tokenizer`, `data.paths` and `data.corpora`, the key that it is from.
    pub key: &'static str,
    /// The text.
    pub text: &'a str,
    /// The folder of the config file, where paths start.
    pub base_dir: &'a Path,
    /// `data.extensions`.
    pub extensions: &'a [String],
}

/// Where a name leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// The same name with its revision: what it means at any time.
    pub pinned: String,
    /// The files or the folder.
    pub paths: Vec<PathBuf>,
}

/// Whether a text names objects in a bucket, which are the same from any folder.
pub(crate) fn is_in_bucket(text: &str) -> bool {
    text.starts_with("s3://")
}

/// Whether a text is a name on a hub, whatever files there are.
pub(crate) fn is_hub_name(text: &str) -> bool {
    text.starts_with("hf:")
}

/// The keys that the weights in a folder decide. This crate does not read such folders: whoever does, writes them down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inherited {
    /// What they were read from, for messages.
    pub name: String,
    /// Keys of `[model]` and `[data]`, as TOML.
    pub text: String,
}

/// Why nothing can be taken from a folder or found by a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotInherited {
    /// What is wrong.
    pub problem: String,
    /// What to do about it.
    pub hint: String,
}

/// Keys that weights of another shape cannot be loaded with. Others may be changed when training goes on: the base of the
/// rotary embedding for a longer context, say.
const SHAPE: [&str; 23] = [
    "model.architecture",
    "model.vocab_size",
    "model.layers",
    "model.dim",
    "model.heads",
    "model.kv_heads",
    "model.head_dim",
    "model.kv_lora_rank",
    "model.q_lora_rank",
    "model.qk_nope_head_dim",
    "model.qk_rope_head_dim",
    "model.v_head_dim",
    "model.ffn",
    "model.experts",
    "model.expert_ffn",
    "model.shared_experts",
    "model.dense_layers",
    "model.positions",
    "model.tied_embeddings",
    "model.norms",
    "model.qk_norm",
    "model.attention_sinks",
    "model.mtp_depth",
];

/// Whether a key must be what the weights say.
pub(crate) fn is_shape(path: &str) -> bool {
    SHAPE.contains(&path)
}

/// Keys of `[model]` that a preset decides, by its table or by leaving them out; the others say how a model is trained.
pub(crate) fn is_of_presets(path: &str) -> bool {
    let more = [
        "model.rope_theta",
        "model.rope_scaling",
        "model.rope_layers",
        "model.sliding_window",
        "model.layer_types",
        "model.rope_local_theta",
        "model.softmax_scale_dim",
        "model.activation",
        "model.swiglu_limit",
        "model.norm_plus_one",
        "model.embedding_scale",
        "model.norm_eps",
        "model.experts_per_token",
        "model.norm_topk",
        "model.router_scale",
        "model.expert_groups",
        "model.expert_top_groups",
    ];
    is_shape(path) || more.contains(&path)
}
