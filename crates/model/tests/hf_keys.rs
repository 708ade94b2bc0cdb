//! Every field of every family's config class, changed one at a time: what `transformers` says that it does (`hf_keys/keys.json`,
//! by `hf_keys/keys.py`) decides whether it may be left unread.

use lockstep_config::{Config, ModelConfig};
use lockstep_ir::Hint;
use lockstep_model::hf::{HfConfig, HfError, read_config};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

fn families() -> Map<String, Value> {
    let text = include_str!("hf_keys/keys.json");
    serde_json::from_str::<Value>(text).unwrap().as_object().unwrap().clone()
}

/// What became of a field.
#[derive(Debug, PartialEq)]
enum Kind {
    Read,
    Unread,
    Refused(String),
}

fn model(found: &HfConfig) -> Result<ModelConfig, String> {
    Config::parse(&found.to_toml(), "config.json", &[]).map(|config| config.model).map_err(|e| e.with_hint())
}

fn kind(base: &Value, changed: Result<HfConfig, HfError>) -> Kind {
    let before = read_config(base).unwrap_or_else(|e| panic!("{e}"));
    let after = match changed {
        Ok(after) => after,
        Err(error) => return Kind::Refused(error.with_hint()),
    };
    match (model(&before), model(&after)) {
        (_, Err(error)) => Kind::Refused(error),
        (before_model, after_model) if before_model != after_model || before.context != after.context => Kind::Read,
        _ => Kind::Unread,
    }
}

/// `config` with a field set; `a.b` is the field `b` of the object `a`.
fn with(config: &Value, key: &str, value: &Value) -> Value {
    let mut config = config.clone();
    match key.split_once('.') {
        Some((outer, inner)) => {
            if !config[outer].is_object() {
                config[outer] = json!({});
            }
            config[outer][inner] = value.clone();
        }
        None => config[key] = value.clone(),
    }
    config
}

fn without(config: &Value, key: &str) -> Value {
    let mut config = config.clone();
    config.as_object_mut().unwrap().remove(key);
    config
}

/// Fields that are read though no logit depends on them: what a run that starts from the model takes over, and the context.
const READ: [&str; 5] = [
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "router_aux_loss_coef",
    "tie_word_embeddings",
];

/// Fields that are refused though transformers, which reads another field instead, ignores them; what says that the weights
/// are not those of the file; a list that is longer than the model, or more experts than groups have, of which the others weigh nothing.
const REFUSED: [&str; 19] = [
    "attn_logit_softcapping",
    "no_rope_layers",
    "norm_topk_prob",
    "num_experts_per_tok",
    "partial_rotary_factor",
    "per_layer_config",
    "quantization_config",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_parameters.attention_factor",
    "rope_parameters.factor",
    "rope_parameters.original_max_position_embeddings",
    "rope_parameters.partial_rotary_factor",
    "rope_parameters.rope_theta",
    "rope_parameters.rope_type",
    "rope_parameters.type",
    "rope_scaling",
    "rope_theta",
    "use_sliding_window",
];

#[test]
fn every_field_is_read_or_refused_or_without_effect() {
    let mut wrong = Vec::new();
    let mut changes = 0;
    let mut excepted = BTreeSet::new();
    for (name, family) in families() {
        let base = &family["base"];
        assert_eq!(read_config(base).unwrap_or_else(|e| panic!("{name}: {e}")).unknown, Vec::<String>::new(), "{name}");
        for change in family["changes"].as_array().unwrap() {
            let (key, value, effect) = (change[0].as_str().unwrap(), &change[1], change[2].as_str().unwrap());
            let mut changed = with(base, key, value);
            // Another name takes the place of the field's own.
            if let Some(own) = family["same"].get(key).and_then(Value::as_str) {
                changed = without(&changed, own);
            }
            let found = read_config(&changed);
            let unknown = found.as_ref().is_ok_and(|found| !found.unknown.is_empty());
            let kind = kind(base, found);
            let right = match (effect, &kind) {
                ("shape" | "logits", Kind::Read | Kind::Refused(_)) => true,
                // The loss of a router, which `model.balance_loss` decides here.
                ("loss", _) => key == "output_router_logits",
                ("none" | "refused", Kind::Unread) => !(unknown && base.get(key).is_some()),
                ("none", Kind::Read | Kind::Refused(_)) => {
                    excepted.insert(key.to_owned());
                    if kind == Kind::Read { READ.contains(&key) } else { REFUSED.contains(&key) }
                }
                ("refused", Kind::Read | Kind::Refused(_)) => true,
                _ => false,
            };
            if !right {
                wrong.push(format!("{name}: {key} = {value}: {effect} in transformers, {kind:?}"));
            }
            changes += 1;
        }
    }
    assert!(wrong.is_empty(), "{} of {changes} changes:\n{}", wrong.len(), wrong.join("\n"));
    assert!(changes > 400, "{changes}");
    let listed: BTreeSet<String> = READ.iter().chain(&REFUSED).map(|key| key.to_string()).collect();
    assert_eq!(listed, excepted, "every exception is one");
}

#[test]
fn a_field_that_is_not_there_is_what_transformers_takes_or_is_refused() {
    let mut wrong = Vec::new();
    for (name, family) in families() {
        for (key, default) in family["defaults"].as_object().unwrap() {
            let Ok(absent) = read_config(&without(&family["base"], key)) else { continue };
            let said = read_config(&with(&family["base"], key, default));
            let same = said.as_ref().is_ok_and(|said| model(said) == model(&absent) && said.context == absent.context);
            // Where the default does not fit the other fields, there is no model to compare.
            if !same && said.as_ref().is_ok_and(|said| model(said).is_ok()) {
                wrong.push(format!(
                    "{name}: {key}, by default {default}:\n{}\nagainst\n{}",
                    absent.table,
                    said.unwrap().table
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_field_may_have_another_name_and_both_must_agree() {
    let mut names = 0;
    for (name, family) in families() {
        let base = &family["base"];
        let expected = read_config(base).unwrap();
        for (other, own) in family["same"].as_object().unwrap() {
            let own = own.as_str().unwrap();
            // What a class calls its own differs between versions: a base may have either.
            let Some((have, lack)) =
                [(own, &**other), (other, own)].into_iter().find(|(key, _)| base.get(key).is_some())
            else {
                panic!("{name}: neither {own} nor {other}")
            };
            let value = &base[have];
            assert_eq!(read_config(&without(&with(base, lack, value), have)).unwrap(), expected, "{name}: {lack}");
            assert_eq!(read_config(&with(base, lack, value)).unwrap(), expected, "{name}: {lack}");
            let differs = json!(value.as_u64().unwrap() + 2);
            let error = read_config(&with(base, lack, &differs)).unwrap_err().with_hint();
            assert!(error.contains("contradicts") && error.contains(own) && error.contains(other), "{name}: {error}");
            names += 1;
        }
    }
    assert_eq!(names, 12);
}

#[test]
fn rope_is_said_once_or_twice_the_same() {
    let llama3 = json!({
        "rope_type": "llama3", "rope_theta": 20000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    });
    for (name, family) in families() {
        let base = &family["base"];
        // Of families with a RoPE for each kind of layers, `hf.rs` has tests.
        if name == "gpt2" || base["rope_parameters"]["full_attention"].is_object() {
            continue;
        }
        let refused = |config: &Value, both: [&str; 2]| {
            let error = read_config(config).unwrap_err().with_hint();
            assert!(both.iter().all(|field| error.contains(field)) && error.contains("contradicts"), "{name}: {error}");
            assert!(error.contains("\nhint: keep the one in config.json"), "{error}");
        };
        let scaled = with(base, "rope_scaling", &llama3);
        refused(&scaled, ["`rope_parameters`", "`rope_scaling`"]);
        let agreed = with(&scaled, "rope_parameters", &llama3);
        assert_eq!(read_config(&agreed).unwrap(), read_config(&with(base, "rope_parameters", &llama3)).unwrap());
        // An integer is the same number.
        assert_eq!(read_config(&with(base, "rope_theta", &json!(20000))).unwrap(), read_config(base).unwrap());
        refused(
            &with(base, "rope_theta", &json!(300.0)),
            ["`rope_parameters.rope_theta` = 20000.0", "`rope_theta` = 300.0"],
        );
        refused(
            &with(base, "rope_parameters.type", &json!("llama3")),
            ["rope_parameters.rope_type", "rope_parameters.type"],
        );
        let outside = with(&agreed, "original_max_position_embeddings", &json!(32));
        refused(&outside, ["`rope_parameters.original_max_position_embeddings` = 16", "= 32"]);
        refused(
            &with(&with(base, "dtype", &json!("float32")), "torch_dtype", &json!("bfloat16")),
            ["dtype", "torch_dtype"],
        );
    }
}

#[test]
fn fields_that_nobody_knows_are_named() {
    let base = &families()["llama"]["base"];
    let found = read_config(&with(&with(base, "attn_logit_cap", &json!(30.0)), "made_by", &json!("me"))).unwrap();
    assert_eq!(found.unknown, ["attn_logit_cap", "made_by"]);
}
