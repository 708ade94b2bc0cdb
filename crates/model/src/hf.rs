//! Hugging Face's `config.json` and the `[model]` table: one row for each family of models, read in both directions.
//!
//! Every field of a family's config class is read, refused by its name where the model would compute something else, or listed as
//! without effect; of others a reader hears the names. Two fields that say the same must not differ. A test asks `transformers`
//! what each field does (`tests/hf_keys`).

mod families;
mod fields;
mod patterns;
mod quantised;
mod rope;
mod without_effect;

use families::{Absent, FAMILIES, Family, Fixed, MTP_LAYERS, N_GROUP, NEVER, QUANTIZATION, SAME, TOPK_GROUP};
use fields::{Fields, HEAD_DIM, contradiction, is_same, refused};
use lockstep_config::ModelConfig;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::fmt::Write;
use without_effect::WITHOUT_EFFECT;

pub use quantised::Quantised;

/// What a `config.json` says.
#[derive(Clone, Debug, PartialEq)]
pub struct HfConfig {
    /// The `[model]` table, as TOML.
    pub table: String,
    /// How many layers it has.
    pub layers: usize,
    /// Positions that it was made for.
    pub context: usize,
    /// How many modules after the layers predict further tokens (MTP), where its files have them; no part of the table.
    pub further: usize,
    /// How its weights are quantised, if they are.
    pub quantised: Option<Quantised>,
    /// Fields that no config class of its family has: what they mean is not known.
    pub unknown: Vec<String>,
}

impl HfConfig {
    /// The largest sequence of [`to_toml`](Self::to_toml): a cache for more is seldom meant.
    const MOST_SEQ: usize = 2048;

    /// With this number of modules that predict further tokens.
    pub fn with_further(mut self, modules: usize) -> Self {
        if modules > 0 {
            let _ = writeln!(self.table, "mtp_depth = {modules}");
        }
        Self { further: modules, ..self }
    }

    /// A whole config with the model: single sequences, as long as it was made for and no longer than most texts need.
    pub fn to_toml(&self) -> String {
        format!("{}\n[train]\nseq = {}\nglobal_batch = 1\n", self.table, self.context.min(Self::MOST_SEQ))
    }
}

/// Why a model cannot come from a `config.json`, or go to one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, lockstep_ir::Hint)]
#[error("{problem}")]
#[hint("{hint}")]
pub struct HfError {
    /// What is wrong, with the field.
    pub problem: String,
    /// What to do about it.
    pub hint: String,
}

/// What a `config.json` says besides the model.
#[derive(Clone, Copy, Debug)]
pub struct HfExtras<'a> {
    /// Positions that it is made for.
    pub context: usize,
    /// The type of the weights: `float32`, `bfloat16`.
    pub dtype: &'a str,
    /// The token that ends a document, where it is known.
    pub end_token: Option<u32>,
}

/// Reads a `config.json`.
pub fn read_config(config: &Value) -> Result<HfConfig, HfError> {
    let Some(fields) = config.as_object() else {
        return Err(refused("it is not a JSON object", "name the folder of a model"));
    };
    let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
    let known = format!("the model types are {}", names.join(", "));
    let outer = Fields(fields);
    let name = outer.text("model_type")?.ok_or_else(|| refused("`model_type` is not set", &known))?;
    let family = FAMILIES.iter().find(|family| family.name == name);
    let family = family.ok_or_else(|| outer.unsupported("model_type", &known))?;
    let joined = join(family, fields)?;
    let fields = Fields(&joined);
    let quantised = quantised::read(family, &fields)?;
    for (field, fixed) in family.fixed.iter().chain(NEVER) {
        let as_expected = match (fields.get(field), fixed) {
            (None, _) => true,
            (Some(found), Fixed::Is(expected)) => is_same(found, &expected.json()),
            (Some(_), Fixed::Absent) => false,
        };
        if !as_expected {
            let hint = match fixed {
                Fixed::Is(expected) => format!("only {} is supported", expected.json()),
                Fixed::Absent => "only models without it are supported".to_owned(),
            };
            return Err(fields.unsupported(field, &hint));
        }
    }
    if fields.flag("is_causal")? == Some(false) {
        return Err(fields.unsupported("is_causal", "only models whose tokens see no later tokens are supported"));
    }
    check_head_dim(family, &fields)?;

    let mut table = format!("[model]\narchitecture = \"{}\"\n", family.name);
    let mut layers = 0;
    let limited = groups_limit(family, &fields)?;
    for count in family.counts.iter().copied().flatten() {
        if !limited && [N_GROUP, TOPK_GROUP].contains(&count.theirs) {
            continue;
        }
        let found = match (fields.count_from(count.least, count.theirs)?, &count.absent) {
            (Some(found), _) => found,
            (None, Absent::Derived) => continue,
            (None, Absent::Is(count)) => *count,
            (None, Absent::NoneIfNull) if fields.0.contains_key(count.theirs) => continue,
            (None, Absent::Refused | Absent::NoneIfNull) => {
                return Err(refused(
                    &format!("`{}` is not set", count.theirs),
                    "take the config.json of a whole model",
                ));
            }
        };
        if count.ours == "layers" {
            layers = found;
        }
        let _ = writeln!(table, "{} = {found}", count.ours);
    }
    for switch in family.switches {
        let _ = writeln!(table, "{} = {}", switch.ours, fields.flag(switch.theirs)?.unwrap_or(switch.absent));
    }
    for number in family.numbers {
        let found = if number.zero { fields.number_or_zero(number.theirs)? } else { fields.number(number.theirs)? };
        let _ = writeln!(table, "{} = {:?}", number.ours, found.unwrap_or(number.absent));
    }
    let slides = patterns::read(family, &fields, layers)?;
    table += &slides.table();
    if family.no_rope {
        table += &patterns::read_rope_layers(&fields, layers)?;
    }
    let (eps, default) = family.norm_eps;
    let _ = writeln!(table, "norm_eps = {:?}", fields.number(eps)?.unwrap_or(default));
    let _ = writeln!(table, "tied_embeddings = {}", fields.flag("tie_word_embeddings")?.unwrap_or(family.tied));
    if let Some(std) = fields.number("initializer_range")? {
        let _ = writeln!(table, "init_std = {std:?}");
    }
    if family.rotary {
        table += &rope::read(family, &fields, &slides)?;
    }
    let further = if family.mtp { fields.count_from(0, MTP_LAYERS)?.unwrap_or(1) } else { 0 };
    let meant = known_fields(family);
    let unknown = joined.keys().filter(|name| !meant.contains(name.as_str())).cloned().collect();
    let (field, default) = family.context;
    Ok(HfConfig { table, layers, context: fields.count(field)?.unwrap_or(default), further, quantised, unknown })
}

const TOPK_METHOD: &str = "topk_method";
const GREEDY: &str = "greedy";
const GROUP_LIMITED: &str = "group_limited_greedy";

/// Whether groups of experts limit the choice, where a field says so; else they do as far as there are any.
fn groups_limit(family: &Family, fields: &Fields) -> Result<bool, HfError> {
    match fields.text(TOPK_METHOD)?.filter(|_| family.topk_method) {
        None => Ok(!family.topk_method),
        Some(GREEDY) => Ok(false),
        Some(GROUP_LIMITED) => Ok(true),
        Some(_) => Err(fields.unsupported(TOPK_METHOD, &format!("{GREEDY} and {GROUP_LIMITED} are supported"))),
    }
}

/// The fields by one name each, where a class takes several for the same.
fn join(family: &Family, fields: &Map<String, Value>) -> Result<Map<String, Value>, HfError> {
    let mut joined = fields.clone();
    for (other, name) in family.same.iter().chain(SAME) {
        let Some(value) = joined.remove(*other).filter(|value| !value.is_null()) else { continue };
        match joined.get(*name).filter(|found| !found.is_null()) {
            Some(found) if !is_same(found, &value) => return Err(contradiction((name, found), (other, &value))),
            Some(_) => {}
            None => drop(joined.insert((*name).to_owned(), value)),
        }
    }
    Ok(joined)
}

/// The names of all fields whose meaning for a family is known.
fn known_fields(family: &Family) -> BTreeSet<&'static str> {
    let mut known = BTreeSet::from([
        "model_type",
        "is_causal",
        "layer_types",
        "tie_word_embeddings",
        "initializer_range",
        QUANTIZATION,
    ]);
    known.extend(family.counts.iter().copied().flatten().map(|count| count.theirs));
    known.extend(family.switches.iter().map(|switch| switch.theirs));
    known.extend(family.numbers.iter().map(|number| number.theirs));
    known.extend(family.fixed.iter().chain(NEVER).map(|(field, _)| *field));
    known.extend(family.dropout.iter().map(|(field, _)| *field));
    known.extend(family.window.map(|(field, _)| field));
    known.extend([family.norm_eps.0, family.context.0]);
    known.extend(family.topk_method.then_some(TOPK_METHOD));
    if family.sliding_from.is_some() {
        known.extend(["sliding_window", "max_window_layers"]);
    }
    if family.rotary {
        known.extend(rope::FIELDS);
        known.extend(family.local_theta.and_then(|(field, _)| field));
        known.insert(HEAD_DIM);
    }
    known.extend(family.pattern.and_then(|(field, _)| field));
    if family.no_rope {
        known.extend(patterns::ROPE_LAYERS);
    }
    known.extend(family.without_effect.iter().chain(WITHOUT_EFFECT));
    known
}

/// Families without a field for the width of a head derive it; transformers looks for one all the same.
fn check_head_dim(family: &Family, fields: &Fields) -> Result<(), HfError> {
    let has_field = family.counts.iter().copied().flatten().any(|count| count.theirs == HEAD_DIM);
    // With latent attention, transformers puts another number in its place.
    if !family.rotary || has_field || family.latent {
        return Ok(());
    }
    match (fields.count(HEAD_DIM)?, fields.count("hidden_size")?, fields.count("num_attention_heads")?) {
        (Some(head), Some(dim), Some(heads)) if head != dim / heads => {
            Err(fields.unsupported(HEAD_DIM, "only `hidden_size` / `num_attention_heads` is"))
        }
        _ => Ok(()),
    }
}

/// Writes the `config.json` of a model, in the form that transformers 4 and 5 read.
///
/// Keys that the family has no field for are left out: reading the result back shows whether the model is still the same.
pub fn write_config(model: &ModelConfig, beside: HfExtras) -> Result<Value, HfError> {
    let family = family(model).ok_or_else(|| {
        let problem = format!("model.architecture = \"{}\" is not a Hugging Face model", model.architecture);
        refused(&problem, "there is no folder to export it to")
    })?;
    if family.whole_heads && !model.dim.is_multiple_of(model.heads) {
        let problem = format!(
            "model.dim = {} is no multiple of model.heads = {}, and transformers refuses such a {} model, with model.head_dim or \
             without",
            model.dim, model.heads, family.name
        );
        let hint = match family.name {
            "llama" => {
                "model.architecture = \"mistral\" without a sliding window computes the same, and may have such heads"
            }
            _ => "choose model.heads that divide model.dim",
        };
        return Err(refused(&problem, hint));
    }
    let mut fields = Map::new();
    let mut set = |name: &str, value: Value| drop(fields.insert(name.to_owned(), value));
    set("architectures", json!([family.class]));
    set("model_type", json!(family.name));
    set("torch_dtype", json!(beside.dtype));
    for (name, fixed) in family.fixed {
        if let Fixed::Is(expected) = fixed {
            set(name, expected.json());
        }
    }
    // Where positions are learned, their count is an extent of the model, and wins.
    set(family.context.0, json!(beside.context));
    for count in family.counts.iter().copied().flatten() {
        let value = match ((count.get)(model), &count.absent) {
            (0, Absent::NoneIfNull) => Value::Null,
            (value, _) => json!(value),
        };
        set(count.theirs, value);
    }
    if family.mtp {
        set(MTP_LAYERS, json!(model.mtp_depth));
    }
    if family.topk_method {
        set(TOPK_METHOD, json!(if model.expert_groups > 1 { GROUP_LIMITED } else { GREEDY }));
    }
    for switch in family.switches {
        set(switch.theirs, json!((switch.get)(model)));
    }
    for number in family.numbers {
        set(number.theirs, json!((number.get)(model)));
    }
    if let Some((field, usual)) = family.window {
        // Classes with kinds of layers ask for a window even where no layer has it.
        let window = model.sliding_window.or(family.pattern.map(|_| usual));
        set(field, json!(window));
    }
    if family.pattern.is_some() {
        set("layer_types", patterns::layer_types(model));
    }
    if family.no_rope {
        set(patterns::ROPE_LAYERS[0], patterns::rope_layers(model));
    }
    if family.sliding_from.is_some() {
        set("sliding_window", Value::Null);
    }
    for (field, ours) in family.dropout {
        set(field, json!(if *ours { model.dropout } else { 0.0 }));
    }
    set(family.norm_eps.0, json!(model.norm_eps));
    set("tie_word_embeddings", json!(model.tied_embeddings));
    set("initializer_range", json!(model.init_std));
    set("use_cache", json!(true));
    // Classes have tokens of their own where nothing is said, which may lie outside the vocabulary.
    set("bos_token_id", Value::Null);
    set("pad_token_id", Value::Null);
    set("eos_token_id", json!(beside.end_token));
    for (name, value) in rope::write(family, model) {
        set(name, value);
    }
    Ok(Value::Object(fields))
}

/// Whether a key of `[model]` has to do with what a model computes from its weights.
pub fn matters(model: &ModelConfig, key: &str) -> bool {
    let rotary = family(model).is_none_or(|family| family.rotary);
    match key {
        "model.rope_theta" | "model.rope_scaling" => rotary,
        // The same function, and how weights were made.
        "model.attention" | "model.dropout" | "model.init_std" => false,
        "model.balance_loss" | "model.z_loss" | "model.balance_bias" | "model.mtp_loss" => false,
        _ => key.starts_with("model."),
    }
}

/// What the names of all tensors but the output head's begin with; files of a model without its head leave it out.
pub fn base_prefix(model: &ModelConfig) -> &'static str {
    family(model).map_or("", |family| family.prefix)
}

/// The names of the output head and of the embedding, which are one tensor in a tied model.
pub fn head_and_embedding(model: &ModelConfig) -> (&'static str, &'static str) {
    ("lm_head.weight", family(model).map_or("", |family| family.embedding))
}

/// Whether checkpoints hold this matrix as [in, out], where the graph's is [out, in].
pub fn is_transposed(model: &ModelConfig, name: &str) -> bool {
    family(model).is_some_and(|family| family.transposed.iter().any(|end| name.ends_with(end)))
}

/// Whether checkpoints alternate between the two halves of this tensor's outputs: gate and up of an expert, where the graph has one after the
/// other.
pub fn is_interleaved(model: &ModelConfig, name: &str) -> bool {
    family(model).is_some_and(|family| family.interleaved.iter().any(|end| name.ends_with(end)))
}

/// The names of the modules' own copies of the embedding and of the output head, each with that of the model's: published files have them.
pub fn further_copies(model: &ModelConfig) -> Vec<(String, &'static str)> {
    let (head, embedding) = head_and_embedding(model);
    let of = if model.tied_embeddings { embedding } else { head };
    let copies = |layer| {
        let at = format!("model.layers.{layer}");
        [(format!("{at}.embed_tokens.weight"), embedding), (format!("{at}.shared_head.head.weight"), of)]
    };
    (model.layers..model.layers + model.mtp_depth).flat_map(copies).collect()
}

/// Whether a tensor of a file is of a module after the last layer that predicts further tokens (MTP).
pub fn is_further_prediction(model: &ModelConfig, name: &str) -> bool {
    family(model).is_some_and(|family| family.mtp) && layer_of(name).is_some_and(|layer| layer >= model.layers)
}

/// The layer that a tensor is of, by its name.
pub fn layer_of(name: &str) -> Option<usize> {
    let (layer, _) = name.split_once("layers.")?.1.split_once('.')?;
    layer.parse().ok()
}

/// Whether files hold this tensor in f32, whatever the type of others: a bias of the choice of experts, which a narrower type would change.
pub fn stays_f32(name: &str) -> bool {
    name.ends_with(".e_score_correction_bias")
}

/// Whether a tensor of a file holds no weights: masks and tables that old versions of transformers stored.
pub fn is_buffer(name: &str) -> bool {
    [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"].iter().any(|end| name.ends_with(end))
}

fn family(model: &ModelConfig) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.name == model.architecture.word())
}
