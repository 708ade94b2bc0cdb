//! Keys by what people call them: the names, synonyms and old names of their declarations.

use crate::declare::{Key, KeyDoc};
use crate::schema::{KEYS, TABLES};

/// Every key of `run.toml`, in the order of the schema.
pub fn schema() -> Vec<KeyDoc> {
    KEYS.iter().map(Key::doc).collect()
}

/// What a user may look for and is not there yet.
struct Missing {
    /// The table that its keys would be in.
    table: &'static str,
    names: &'static [&'static str],
    what: &'static str,
    /// What to do instead.
    instead: &'static str,
}

impl Missing {
    const fn new(
        table: &'static str,
        names: &'static [&'static str],
        what: &'static str,
        instead: &'static str,
    ) -> Self {
        Missing { table, names, what, instead }
    }
}

const MISSING: &[Missing] = &[
    Missing::new(
        "precision",
        &["mxfp8", "nvfp4", "mxfp4"],
        "mxfp8 and narrower",
        "precision.policy = \"fp8\" is the narrowest",
    ),
    Missing::new(
        "data",
        &["s3", "gcs", "gs", "object storage", "streaming", "cloud storage"],
        "reading from object storage",
        "copy the files to a folder, or mount the bucket, and name the folder in data.paths",
    ),
    Missing::new(
        "train",
        &["push_to_hub", "hub_model_id", "upload"],
        "uploading to the Hugging Face Hub",
        "`lockstep checkpoint export` writes a folder that `hf upload` takes",
    ),
    Missing::new(
        "model",
        &["longrope", "dynamic ntk", "ntk"],
        "LongRoPE and dynamic NTK scaling",
        "model.rope_scaling is that of Llama 3, linear or YaRN, and a larger model.rope_theta extends the context too",
    ),
    Missing::new(
        "model",
        &[
            "softcap",
            "soft cap",
            "softcapping",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "logit soft capping",
        ],
        "soft capping of logits, as Gemma 2 has it,",
        "model.qk_norm keeps scores of attention small, as Gemma 3 does it, and model.z_loss those of a router",
    ),
    Missing::new(
        "model",
        &["partial_rotary_factor", "rotary_pct", "rotary_percent", "rope_dim", "partial rope"],
        "RoPE on a part of every head, but in latent attention,",
        "model.rope_layers says which layers have RoPE, and with model.kv_lora_rank heads have a part with it and one without",
    ),
    Missing::new(
        "model",
        &["attention_bias", "qkv_bias", "add_qkv_bias", "mlp_bias", "add_bias_linear"],
        "a key for biases",
        "model.architecture decides: Qwen 2 has biases of Q, K and V, and gpt-oss of all of attention, the router and experts",
    ),
    Missing::new(
        "model",
        &["output_gate", "attn_output_gate", "attention_output_gate", "gated attention"],
        "an output gate of attention, as Qwen3-Next has it,",
        "model.attention_sinks lets a head attend to nothing",
    ),
    Missing::new(
        "telemetry",
        &["comet", "comet_ml", "neptune", "clearml", "aim"],
        "logging to Comet, Neptune, ClearML or Aim",
        "telemetry.mlflow, telemetry.wandb and telemetry.tensorboard send and write metrics for others",
    ),
    Missing::new(
        "optimizer",
        &["ema", "exponential moving average", "weight averaging", "ema_decay"],
        "an exponential moving average of the weights (EMA)",
        "the checkpoints that a run keeps can be evaluated and exported one by one",
    ),
];

/// Something that is not there yet, and what to do instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingFeature {
    /// What it is.
    pub what: &'static str,
    /// What to do instead.
    pub instead: &'static str,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundKey {
    /// Keys, the nearest first.
    pub keys: Vec<KeyDoc>,
    /// What the words stand for and is not there yet.
    pub missing: Vec<MissingFeature>,
}

/// The keys that go by these words: by name, synonym or old name, else by their meaning.
pub fn search(words: &str) -> FoundKey {
    let wanted = plain(words);
    let missing = MISSING.iter().filter(|missing| {
        missing.names.iter().any(|name| plain(name) == wanted)
            || (wanted.len() > 2 && begins_word(&plain(missing.what), &wanted))
    });
    let missing = missing.map(|missing| MissingFeature { what: missing.what, instead: missing.instead }).collect();
    let mut ranked: Vec<(u8, KeyDoc)> =
        KEYS.iter().zip(schema()).filter_map(|(key, doc)| Some((rank(key, &wanted)?, doc))).collect();
    // What is called so hides what only mentions it.
    let named = ranked.iter().any(|(rank, _)| *rank < MENTIONED);
    ranked.retain(|(rank, _)| !named || *rank < MENTIONED);
    ranked.sort_by_key(|(rank, _)| *rank);
    FoundKey { keys: ranked.into_iter().map(|(_, doc)| doc).collect(), missing }
}

/// The keys at `table`, `table.key` or `key`, by their names of today or before.
pub fn keys_at(path: &str) -> Vec<KeyDoc> {
    let path = path.trim().trim_matches(['[', ']']);
    let at = |key: &Key| {
        let own = [key.name].into_iter().chain(key.old_names.iter().copied());
        key.table == path || own.into_iter().any(|name| name == path || format!("{}.{name}", key.table) == path)
    };
    KEYS.iter().zip(schema()).filter(|(key, _)| at(key)).map(|(_, doc)| doc).collect()
}

const MENTIONED: u8 = 2;

fn rank(key: &Key, wanted: &str) -> Option<u8> {
    let names: Vec<String> = names(key).map(plain).collect();
    match () {
        _ if wanted.is_empty() => None,
        _ if names.iter().any(|name| name == wanted) => Some(0),
        _ if names.iter().any(|name| name.split(' ').any(|word| word == wanted)) => Some(1),
        _ if wanted.len() > 2 && names.iter().any(|name| begins_word(name, wanted)) => Some(1),
        _ if wanted.len() > 2 && begins_word(&plain(key.meaning), wanted) => Some(MENTIONED),
        _ => None,
    }
}

/// Whether a word of a text, or several in a row, begin with these.
fn begins_word(text: &str, wanted: &str) -> bool {
    text.match_indices(wanted).any(|(at, _)| !text[..at].ends_with(char::is_alphanumeric))
}

fn names(key: &Key) -> impl Iterator<Item = &'static str> {
    let own = [key.path, key.name].into_iter();
    own.chain(key.synonyms.iter().copied()).chain(key.old_names.iter().copied())
}

/// Lower case, with blanks for what joins words.
fn plain(text: &str) -> String {
    text.to_lowercase().replace(['_', '-', '.'], " ").trim().to_owned()
}

/// The key that goes by this name in another table, or by this synonym; those of `table` first.
pub(crate) fn meant(table: &str, name: &str) -> Option<&'static Key> {
    let wanted = plain(name);
    let known = |key: &&Key| names(key).any(|known| plain(known) == wanted);
    KEYS.iter().filter(|key| key.table == table).find(known).or_else(|| KEYS.iter().find(known))
}

/// What `table.name` would be about, where that is not there yet.
pub(crate) fn missing(table: &str, name: &str) -> Option<MissingFeature> {
    debug_assert!(MISSING.iter().all(|missing| TABLES.contains(&missing.table)));
    let wanted = plain(name);
    let is_it = |m: &&Missing| m.table == table && m.names.iter().any(|name| plain(name) == wanted);
    MISSING.iter().find(is_it).map(|m| MissingFeature { what: m.what, instead: m.instead })
}
