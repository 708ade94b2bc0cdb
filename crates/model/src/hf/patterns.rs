//! Which layers have a sliding window, and which have no RoPE.

use super::HfError;
use super::families::Family;
use super::fields::{Fields, refused};
use lockstep_config::{LayerType, ModelConfig, shortest};
use serde_json::{Value, json};

const LAYER_TYPES: &str = "layer_types";
/// The kinds of layers.
pub(super) const SLIDING: &str = "sliding_attention";
pub(super) const FULL: &str = "full_attention";

/// The fields of layers without RoPE: a list, and how many layers there are from one to the next where it is not there.
pub(super) const ROPE_LAYERS: [&str; 2] = ["no_rope_layers", "no_rope_layer_interval"];

/// How many tokens layers see, if not all, and which do.
pub(super) struct Slides {
    pub window: Option<usize>,
    /// A pattern; empty where all layers are the same.
    pub pattern: Vec<LayerType>,
}

impl Slides {
    /// As keys of `[model]`.
    pub(super) fn table(&self) -> String {
        let Some(window) = self.window else { return String::new() };
        let words: Vec<String> = self.pattern.iter().map(|kind| format!("\"{kind}\"")).collect();
        format!("sliding_window = {window}\nlayer_types = [{}]\n", words.join(", "))
    }
}

/// How many tokens each of this many layers sees.
pub(super) fn read(family: &Family, fields: &Fields, layers: usize) -> Result<Slides, HfError> {
    let window = match family.window {
        Some((field, default)) if !fields.0.contains_key(field) => Some(default),
        Some((field, _)) => fields.count(field)?,
        None => None,
    };
    if let Some((every, default)) = family.pattern {
        return kinds(fields, layers, window, (every, default));
    }
    if let Some(Value::Array(types)) = fields.get(LAYER_TYPES) {
        let expected = if window.is_some() { SLIDING } else { FULL };
        if types.iter().any(|kind| kind != expected) {
            return Err(refused("`layer_types` is not supported", &format!("only layers of {expected} are")));
        }
    } else if let Some(default) = family.sliding_from {
        let slides = !matches!(fields.0.get("sliding_window"), Some(Value::Null));
        let first = fields.count_from(0, "max_window_layers")?.unwrap_or(default);
        if slides && fields.count("num_hidden_layers")?.is_some_and(|layers| layers > first) {
            let problem = format!("layers from {first} on have a sliding window, which is not supported");
            return Err(refused(
                &problem,
                "only models whose `sliding_window` is null are, or whose layers are all before \
                                          `max_window_layers`",
            ));
        }
    }
    Ok(Slides { window, pattern: Vec::new() })
}

/// The same where layers are of two kinds: by a list, or every n-th is full.
fn kinds(
    fields: &Fields,
    layers: usize,
    window: Option<usize>,
    (every, default): (Option<&str>, usize),
) -> Result<Slides, HfError> {
    let every = every.map(|field| fields.count(field)).transpose()?.flatten().unwrap_or(default);
    let kinds: Vec<LayerType> = match list(fields, LAYER_TYPES, layers)? {
        Some(types) => types
            .iter()
            .map(|kind| match kind.as_str() {
                Some(SLIDING) => Ok(LayerType::Sliding),
                Some(FULL) => Ok(LayerType::Full),
                _ => Err(refused(
                    &format!("`{LAYER_TYPES}` has {kind}, which is not supported"),
                    &format!("{SLIDING} and {FULL} are"),
                )),
            })
            .collect::<Result<_, _>>()?,
        None => {
            (1..=layers).map(|i| if i.is_multiple_of(every) { LayerType::Full } else { LayerType::Sliding }).collect()
        }
    };
    if !kinds.contains(&LayerType::Sliding) {
        return Ok(Slides { window: None, pattern: Vec::new() });
    }
    if window.is_none() {
        let hint = format!("say how many tokens layers of {SLIDING} see");
        return Err(refused("`sliding_window` is null, and some layers have one", &hint));
    }
    Ok(Slides { window, pattern: shortest(&kinds, layers, LayerType::Sliding) })
}

/// A list with an entry for each layer.
fn list<'a>(fields: &Fields<'a>, field: &str, layers: usize) -> Result<Option<&'a Vec<Value>>, HfError> {
    match fields.get(field) {
        None => Ok(None),
        Some(Value::Array(entries)) if entries.len() == layers => Ok(Some(entries)),
        Some(Value::Array(entries)) => {
            let problem = format!("`{field}` has {} entries, and `num_hidden_layers` is {layers}", entries.len());
            Err(refused(&problem, "it should have one for each layer"))
        }
        Some(_) => Err(fields.unsupported(field, "it should be a list")),
    }
}

/// Which layers have RoPE, as a key of `[model]`.
pub(super) fn read_rope_layers(fields: &Fields, layers: usize) -> Result<String, HfError> {
    let [field, interval] = ROPE_LAYERS;
    let every = fields.count(interval)?.unwrap_or(4);
    let has: Vec<usize> = match list(fields, field, layers)? {
        Some(entries) => {
            let flag = |entry: &Value| entry.as_u64().filter(|n| *n < 2).map(|n| n as usize);
            let wrong =
                || refused(&format!("`{field}` has an entry that is neither 1 nor 0"), "1 is a layer with RoPE");
            entries.iter().map(|entry| flag(entry).ok_or_else(wrong)).collect::<Result<_, _>>()?
        }
        None => (1..=layers).map(|i| usize::from(!i.is_multiple_of(every))).collect(),
    };
    Ok(format!("rope_layers = {:?}\n", shortest(&has, layers, 1)))
}

/// The kind of every layer.
pub(super) fn layer_types(model: &ModelConfig) -> Value {
    let kind = |layer| if model.layer_parts(layer).window.is_some() { SLIDING } else { FULL };
    json!((0..model.layers).map(kind).collect::<Vec<_>>())
}

/// Whether each layer has RoPE.
pub(super) fn rope_layers(model: &ModelConfig) -> Value {
    let has = |layer| u8::from(model.layer_parts(layer).rope.is_some());
    json!((0..model.layers).map(has).collect::<Vec<_>>())
}
