//! Hugging Face's `config.json` and the `[model]` table: one row for each family of models, read in both directions.
//!
//! A field that would change what the model computes, and that `[model]` has no key for, is refused by its name. Fields that
//! only matter to other programs are not looked at.

mod families;

use families::{Absent, FAMILIES, Family, Fixed};
use lockstep_config::ModelConfig;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// What a `config.json` says.
#[derive(Clone, Debug, PartialEq)]
pub struct HfConfig {
    /// The `[model]` table, as TOML.
    pub table: String,
    /// How many layers it has.
    pub layers: usize,
    /// Positions that it was made for.
    pub context: usize,
}

impl HfConfig {
    /// The largest sequence of [`to_toml`](Self::to_toml): a cache for more is seldom meant.
    const MOST_SEQ: usize = 2048;

    /// A whole config with the model: single sequences, as long as it was made for and no longer than most texts need.
    pub fn to_toml(&self) -> String {
        format!("{}\n[train]\nseq = {}\nglobal_batch = 1\n", self.table, self.context.min(Self::MOST_SEQ))
    }
}

/// Why a model cannot come from a `config.json`, or go to one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}\nhint: {hint}")]
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

/// The largest extent that a config accepts.
const MOST: u64 = 1 << 24;

/// Reads a `config.json`.
pub fn read_config(config: &Value) -> Result<HfConfig, HfError> {
    let Some(fields) = config.as_object() else {
        return Err(refused("it is not a JSON object", "name the folder of a model"));
    };
    let fields = Fields(fields);
    let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
    let known = format!("the model types are {}", names.join(", "));
    let name = fields.text("model_type")?.ok_or_else(|| refused("`model_type` is not set", &known))?;
    let family = FAMILIES.iter().find(|family| family.name == name);
    let family = family.ok_or_else(|| fields.unsupported("model_type", &known))?;
    for (field, fixed) in family.fixed {
        let as_expected = match (fields.get(field), fixed) {
            (None, _) => true,
            (Some(found), Fixed::Is(expected)) => *found == expected.json(),
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
    let window = match family.window {
        Some((field, default)) if !fields.0.contains_key(field) => Some(default),
        Some((field, _)) => fields.count(field)?,
        None => None,
    };
    if let Some(Value::Array(types)) = fields.get("layer_types") {
        let expected = if window.is_some() { "sliding_attention" } else { "full_attention" };
        if types.iter().any(|kind| kind != expected) {
            return Err(refused("`layer_types` is not supported", &format!("only layers of {expected} are")));
        }
    }

    let mut table = format!("[model]\narchitecture = \"{}\"\n", family.name);
    let mut layers = 0;
    for count in family.counts.iter().copied().flatten() {
        let found = match (fields.count_from(count.least, count.theirs)?, &count.absent) {
            (Some(found), _) => found,
            (None, Absent::Derived) => continue,
            (None, Absent::Refused) => {
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
        if let Some(found) = fields.number(number.theirs)? {
            let _ = writeln!(table, "{} = {found:?}", number.ours);
        }
    }
    if let Some(window) = window {
        let _ = writeln!(table, "sliding_window = {window}");
    }
    let (eps, default) = family.norm_eps;
    let _ = writeln!(table, "norm_eps = {:?}", fields.number(eps)?.unwrap_or(default));
    let _ = writeln!(table, "tied_embeddings = {}", fields.flag("tie_word_embeddings")?.unwrap_or(family.tied));
    if let Some(std) = fields.number("initializer_range")? {
        let _ = writeln!(table, "init_std = {std:?}");
    }
    if family.rotary {
        table += &rotary(&fields)?;
    }
    let (field, default) = family.context;
    Ok(HfConfig { table, layers, context: fields.count(field)?.unwrap_or(default) })
}

/// The keys of the rotary embedding. Version 5 of transformers writes `rope_parameters`, others `rope_theta` and
/// `rope_scaling`.
fn rotary(fields: &Fields) -> Result<String, HfError> {
    let name = if fields.get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    let empty = Map::new();
    let inner = match fields.get(name) {
        None => Fields(&empty),
        Some(Value::Object(inner)) => Fields(inner),
        Some(_) => return Err(fields.unsupported(name, "it should be an object")),
    };
    for fields in [fields, &inner] {
        if fields.number("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
            return Err(fields.unsupported("partial_rotary_factor", "only 1.0 is supported"));
        }
    }
    let theta = match inner.number("rope_theta")? {
        Some(theta) => theta,
        None => fields.number("rope_theta")?.unwrap_or(10_000.0),
    };
    let mut text = format!("rope_theta = {theta:?}\n");
    let field = if inner.get("rope_type").is_some() { "rope_type" } else { "type" };
    if !inner.0.is_empty() && inner.0.values().all(Value::is_object) {
        return Err(refused(&format!("`{name}` differs between layers"), "one for all layers is supported"));
    }
    match inner.text(field)?.unwrap_or("default") {
        "default" => {}
        "llama3" => {
            let needed = |field: &str| {
                let set = inner.number(field)?;
                set.ok_or_else(|| refused(&format!("`{name}.{field}` is not set"), "a llama3 scaling needs it"))
            };
            let original = inner.count(ORIGINAL)?;
            let original = original
                .ok_or_else(|| refused(&format!("`{name}.{ORIGINAL}` is not set"), "a llama3 scaling needs it"))?;
            let (low, high) = (needed("low_freq_factor")?, needed("high_freq_factor")?);
            let _ = writeln!(
                text,
                "rope_scaling = {{ factor = {:?}, low_freq_factor = {low:?}, high_freq_factor = {high:?}, \
                 original_context = {original} }}",
                needed("factor")?
            );
        }
        _ => return Err(inner.unsupported(field, "default and llama3 are supported")),
    }
    Ok(text)
}

const ORIGINAL: &str = "original_max_position_embeddings";

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
        let hint =
            "model.architecture = \"mistral\" without a sliding window computes the same, and may have such heads";
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
        set(count.theirs, json!((count.get)(model)));
    }
    for switch in family.switches {
        set(switch.theirs, json!((switch.get)(model)));
    }
    for number in family.numbers {
        set(number.theirs, json!((number.get)(model)));
    }
    if let Some((field, _)) = family.window {
        set(field, json!(model.sliding_window));
    }
    for (field, ours) in family.dropout {
        set(field, json!(if *ours { model.dropout } else { 0.0 }));
    }
    set(family.norm_eps.0, json!(model.norm_eps));
    set("tie_word_embeddings", json!(model.tied_embeddings));
    set("initializer_range", json!(model.init_std));
    set("use_cache", json!(true));
    set("bos_token_id", Value::Null);
    set("eos_token_id", json!(beside.end_token));
    if family.rotary {
        set("rope_theta", json!(model.rope_theta));
        if let Some(scaling) = &model.rope_scaling {
            let scaling = json!({
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                ORIGINAL: scaling.original_context,
            });
            set("rope_scaling", scaling);
        }
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
        "model.balance_loss" | "model.z_loss" | "model.balance_bias" => false,
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

/// Whether a tensor of a file holds no weights: masks and tables that old versions of transformers stored.
pub fn is_buffer(name: &str) -> bool {
    [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"].iter().any(|end| name.ends_with(end))
}

fn family(model: &ModelConfig) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.name == model.architecture.word())
}

fn refused(problem: &str, hint: &str) -> HfError {
    HfError { problem: problem.to_owned(), hint: hint.to_owned() }
}

/// The fields of a JSON object; null is as good as not there.
struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn text(&self, name: &str) -> Result<Option<&'a str>, HfError> {
        self.typed(name, "a string", Value::as_str)
    }

    fn flag(&self, name: &str) -> Result<Option<bool>, HfError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    fn number(&self, name: &str) -> Result<Option<f64>, HfError> {
        self.typed(name, "a number greater than 0", |value| value.as_f64().filter(|x| x.is_finite() && *x > 0.0))
    }

    fn count(&self, name: &str) -> Result<Option<usize>, HfError> {
        self.count_from(1, name)
    }

    fn count_from(&self, least: u64, name: &str) -> Result<Option<usize>, HfError> {
        let accepted = format!("an integer from {least} to {MOST}");
        let count = |value: &Value| value.as_u64().filter(|n| (least..=MOST).contains(n)).map(|n| n as usize);
        self.typed(name, &accepted, count)
    }

    fn typed<T>(&self, name: &str, kind: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, HfError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let wrong =
            || refused(&format!("`{name}` is {}, which is wrong", shown(value)), &format!("it should be {kind}"));
        read(value).map(Some).ok_or_else(wrong)
    }

    fn unsupported(&self, name: &str, hint: &str) -> HfError {
        let value = self.get(name).map_or(String::new(), |value| format!(" = {}", shown(value)));
        refused(&format!("`{name}`{value} is not supported"), hint)
    }
}

/// A value on one line, shortened.
fn shown(value: &Value) -> String {
    const SHOWN: usize = 60;
    let text = value.to_string();
    let short: String = text.chars().take(SHOWN).collect();
    if short.len() < text.len() { short + "…" } else { short }
}
