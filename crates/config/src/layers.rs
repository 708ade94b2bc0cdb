//! Patterns over layers: what each layer of a model has, and what the keys of patterns must keep.

use crate::architecture::Architecture;
use crate::conflict::{Conflict, Derived};
use crate::defaults;
use crate::schema::ModelConfig;
use crate::value::{Field, Value};
use crate::values::Values;
use crate::words::{Activation, AttentionMethod, LayerType};

/// The RoPE of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LayerRope {
    /// Of `model.rope_theta`, scaled by `model.rope_scaling`.
    Global,
    /// Of `model.rope_local_theta`.
    Local,
}

/// Parts that differ between layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerParts {
    /// The sliding window of its attention; all tokens before if there is none.
    pub window: Option<usize>,
    /// Its RoPE, if it has one.
    pub rope: Option<LayerRope>,
}

impl ModelConfig {
    /// What layer `layer` has, by the patterns.
    pub fn layer_parts(&self, layer: usize) -> LayerParts {
        let window = match at(&self.layer_types, layer) {
            Some(LayerType::Full) => None,
            Some(LayerType::Sliding) | None => self.sliding_window,
        };
        let local = window.is_some() && self.rope_local_theta.is_some();
        let rope = if local { LayerRope::Local } else { LayerRope::Global };
        LayerParts { window, rope: (at(&self.rope_layers, layer) != Some(0)).then_some(rope) }
    }

    /// The same model with every pattern as short as can be, so that two that mean the same are equal.
    pub fn with_short_patterns(&self) -> ModelConfig {
        let usual = if self.sliding_window.is_some() { LayerType::Sliding } else { LayerType::Full };
        let layer_types = shortest(&self.layer_types, self.layers, usual);
        ModelConfig { layer_types, rope_layers: shortest(&self.rope_layers, self.layers, 1), ..self.clone() }
    }
}

/// The entry of a pattern for a layer; none of an empty one.
fn at<T: Copy>(pattern: &[T], layer: usize) -> Option<T> {
    pattern.get(layer % pattern.len().max(1)).copied()
}

/// The shortest pattern that says the same of this many layers: nothing where all are as `usual`.
pub fn shortest<T: Copy + PartialEq>(pattern: &[T], layers: usize, usual: T) -> Vec<T> {
    let all: Vec<T> = (0..layers).filter_map(|layer| at(pattern, layer)).collect();
    if all.iter().all(|one| *one == usual) {
        return Vec::new();
    }
    let repeats = |period: &usize| all.iter().enumerate().all(|(i, one)| *one == all[i % period]);
    let period = (1..=all.len()).find(repeats).unwrap_or(all.len());
    all[..period].to_vec()
}

/// The pattern of `model.layer_types`, once it has a value.
fn layer_types(values: &Values) -> Option<Vec<LayerType>> {
    Field::from_value(values.get("model.layer_types").cloned())
}

/// Whether some layer has a sliding window and another none.
pub(crate) fn some_slide(values: &Values) -> bool {
    let (Some(pattern), Some(layers)) = (layer_types(values), values.count("model.layers")) else { return false };
    let used = &pattern[..pattern.len().min(usize::try_from(layers).unwrap_or(usize::MAX))];
    used.contains(&LayerType::Sliding) && used.contains(&LayerType::Full)
}

/// Patterns are no longer than the model, and windows go with them.
pub(crate) fn patterns_fit_the_layers(values: &Values) -> Option<Conflict> {
    let layers = values.count("model.layers")?;
    let (Value::Texts(kinds), Value::Counts(rope)) =
        (values.get("model.layer_types")?, values.get("model.rope_layers")?)
    else {
        return None;
    };
    for (key, entries) in [("model.layer_types", kinds.len()), ("model.rope_layers", rope.len())] {
        if entries as u64 > layers {
            return Some(Conflict::new(
                &[key, "model.layers"],
                format!("{key} has {entries} entries, and there are model.layers = {layers}"),
                "the list repeats over the layers: give at most model.layers entries",
            ));
        }
    }
    let slides = kinds.iter().any(|kind| kind == LayerType::Sliding.word());
    match (values.count("model.sliding_window"), slides) {
        (None, true) => Some(Conflict::new(
            &["model.layer_types", "model.sliding_window"],
            "model.layer_types has \"sliding\" layers, and model.sliding_window is not set".to_owned(),
            "say how many tokens they see, such as model.sliding_window = 1024",
        )),
        (Some(window), false) if !kinds.is_empty() => Some(Conflict::new(
            &["model.sliding_window", "model.layer_types"],
            format!("model.sliding_window = {window} is given, and model.layer_types has no \"sliding\" layer"),
            "remove one of the two, or name layers that slide",
        )),
        _ => None,
    }
}

/// A base of its own is of layers that slide where others do not.
pub(crate) fn local_bases_have_layers(values: &Values) -> Option<Conflict> {
    let theta = values.get("model.rope_local_theta")?;
    Conflict::when(
        !some_slide(values),
        &["model.rope_local_theta", "model.layer_types", "model.sliding_window"],
        format!("model.rope_local_theta = {theta} is for models with both sliding and full layers; here all are alike"),
        "use model.rope_theta, or say by model.sliding_window and model.layer_types which layers slide",
    )
}

/// A key, and what makes its default.
type KeyDefault = (&'static str, fn(&Values) -> Derived);

/// Keys of parts that the block of GPT-2 does not have, besides the window, and their defaults.
const NOT_IN_GPT2: [KeyDefault; 9] = [
    ("model.layer_types", defaults::layer_types),
    ("model.rope_layers", defaults::rope_layers),
    ("model.norms", defaults::norms),
    ("model.norm_plus_one", defaults::norm_plus_one),
    ("model.qk_norm", defaults::qk_norm),
    ("model.activation", defaults::activation),
    ("model.attention_sinks", defaults::attention_sinks),
    ("model.embedding_scale", defaults::embedding_scale),
    ("model.softmax_scale_dim", defaults::softmax_scale_dim),
];

/// The block of GPT-2 has parts of its own.
pub(crate) fn gpt2_has_its_own_block(values: &Values) -> Option<Conflict> {
    let architecture = values.word::<Architecture>("model.architecture")?;
    if !architecture.features().gpt2_block {
        return None;
    }
    let differs = |(key, default): &KeyDefault| {
        let (given, usual) = (values.get(key)?, default(values).ok()??);
        (*given != usual).then_some((*key, given))
    };
    // No window is the default of every family.
    let window = values.get("model.sliding_window").map(|given| ("model.sliding_window", given));
    let (key, given) = window.or_else(|| NOT_IN_GPT2.iter().find_map(differs))?;
    Some(Conflict::new(
        &[key, "model.architecture"],
        format!(
            "{key} = {given} is given, and model.architecture = \"{architecture}\" has a block of its own without it"
        ),
        format!("choose another model.architecture, or remove {key}"),
    ))
}

/// Modules that predict further tokens are made of the shared decoder's layers, and are trained whole.
pub(crate) fn further_tokens_have_layers(values: &Values) -> Option<Conflict> {
    let depth = values.count("model.mtp_depth").filter(|depth| *depth > 0)?;
    let architecture = values.word::<Architecture>("model.architecture")?;
    if architecture.features().gpt2_block {
        return Some(Conflict::new(
            &["model.mtp_depth", "model.architecture"],
            format!(
                "model.mtp_depth = {depth} is given, and model.architecture = \"{architecture}\" has no such modules"
            ),
            "choose another model.architecture, or set model.mtp_depth = 0",
        ));
    }
    Conflict::when(
        values.count("lora.rank").is_some(),
        &["model.mtp_depth", "lora.rank"],
        format!("model.mtp_depth = {depth} is given, and with lora.rank only adapters are trained"),
        "set model.mtp_depth = 0, or train all weights",
    )
}

/// A limit is of what is clamped.
pub(crate) fn limits_clamp_something(values: &Values) -> Option<Conflict> {
    let (limit, activation) = (values.get("model.swiglu_limit")?, values.word::<Activation>("model.activation")?);
    Conflict::when(
        activation != Activation::ClampedSwiGlu,
        &["model.swiglu_limit", "model.activation"],
        format!("model.swiglu_limit = {limit} is given, and model.activation = \"{activation}\" clamps nothing"),
        "remove model.swiglu_limit, or choose model.activation = \"clamped_swiglu\"",
    )
}

/// Weights of attention that exist have no sum of their own that a sink could enter.
pub(crate) fn sinks_go_with_flash_attention(values: &Values) -> Option<Conflict> {
    let naive = values.word("model.attention") == Some(AttentionMethod::Naive);
    Conflict::when(
        naive && values.switch("model.attention_sinks") == Some(true),
        &["model.attention", "model.attention_sinks"],
        "model.attention = \"naive\" has no attention sinks, and model.attention_sinks = true".to_owned(),
        "use model.attention = \"flash\", which computes the same, or set model.attention_sinks = false",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    fn model(keys: &str) -> ModelConfig {
        let text = format!("[model]\nvocab_size = 64\nlayers = 6\ndim = 32\nheads = 4\nffn = 48\n{keys}\n");
        Config::parse(&text, "run.toml", &[]).unwrap_or_else(|e| panic!("{e}")).model
    }

    #[test]
    fn patterns_repeat_over_the_layers() {
        let m = model(
            "sliding_window = 8\nlayer_types = [\"sliding\", \"sliding\", \"full\", \"full\"]\nrope_local_theta = 100.0\n\
             rope_layers = [1, 1, 0]",
        );
        let parts: Vec<_> = (0..6).map(|layer| m.layer_parts(layer)).map(|p| (p.window, p.rope)).collect();
        let (local, global) = (Some(LayerRope::Local), Some(LayerRope::Global));
        let expected =
            [(Some(8), local), (Some(8), local), (None, None), (None, global), (Some(8), local), (Some(8), None)];
        assert_eq!(parts, expected);
        // Without patterns all layers are the same.
        let plain = LayerParts { window: Some(8), rope: global };
        assert!((0..6).all(|layer| model("sliding_window = 8").layer_parts(layer) == plain));
    }

    #[test]
    fn patterns_that_mean_the_same_are_equal_when_they_are_short() {
        use LayerType::{Full, Sliding};
        assert_eq!(shortest(&[Sliding, Full, Sliding, Full], 6, Sliding), [Sliding, Full]);
        assert_eq!(shortest(&[Sliding, Sliding, Sliding, Full], 3, Sliding), []);
        assert_eq!(shortest(&[Full, Full, Sliding], 3, Full), [Full, Full, Sliding]);
        assert_eq!(shortest(&[1, 1, 1, 0], 5, 1), [1, 1, 1, 0]);
        assert_eq!(shortest(&[1, 1], 5, 1), []);
        let (a, b) = (model("rope_layers = [1, 0, 1, 0]"), model("rope_layers = [1, 0]"));
        assert_ne!(a, b);
        assert_eq!(a.with_short_patterns(), b.with_short_patterns());
        // Without a window all layers are full, said or not.
        let (said, not) = (model("layer_types = [\"full\"]"), model(""));
        assert_ne!(said, not);
        assert_eq!(said.with_short_patterns(), not.with_short_patterns());
    }
}
