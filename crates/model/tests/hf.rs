//! `config.json` of every family: what is read, what is refused, and that it comes out as it went in.

use lockstep_config::{Architecture, Config};
use lockstep_ir::Hint;
use lockstep_model::hf::{HfConfig, HfExtras, read_config, write_config};
use serde_json::{Value, json};

const BESIDE: HfExtras = HfExtras { context: 128, dtype: "float32", end_token: Some(7) };

/// A config.json as transformers 5 writes it, less what does not matter.
fn theirs(model_type: &str) -> Value {
    if model_type == "gpt2" {
        return json!({ "model_type": "gpt2", "vocab_size": 53, "n_layer": 2, "n_embd": 30, "n_head": 6, "n_positions": 64 });
    }
    let mut config = json!({
        "model_type": model_type, "vocab_size": 53, "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": false, "max_position_embeddings": 4096, "sliding_window": null,
        "rope_parameters": { "rope_type": "default", "rope_theta": 1e6 },
    });
    let experts = match model_type {
        "mixtral" => json!({ "num_local_experts": 6, "num_experts_per_tok": 3 }),
        "qwen3_moe" => json!({
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": true,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }),
        "olmoe" => json!({ "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": false }),
        "deepseek" => json!({
            "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "moe_layer_freq": 1, "scoring_func": "softmax", "head_dim": null,
        }),
        "dots1" => json!({
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_shared_experts": 2,
            "first_k_dense_replace": 0, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
            "norm_topk_prob": true,
        }),
        _ => json!({}),
    };
    for (name, value) in experts.as_object().unwrap() {
        config[name] = value.clone();
    }
    // Where all of Q is normed at once, the heads have no width of their own.
    let family = Architecture::ALL.iter().find(|one| one.word() == model_type);
    if family.is_some_and(|one| one.features().whole_qk_norm) {
        config["head_dim"] = Value::Null;
    }
    config
}

fn with(model_type: &str, fields: Value) -> Value {
    let mut config = theirs(model_type);
    for (name, value) in fields.as_object().unwrap() {
        config[name] = value.clone();
    }
    config
}

fn read(config: &Value) -> (HfConfig, Config) {
    let read = read_config(config).unwrap_or_else(|e| panic!("{e}"));
    let config = Config::parse(&read.to_toml(), "run.toml", &[]).unwrap_or_else(|e| panic!("{e}"));
    (read, config)
}

#[test]
fn what_is_written_reads_back_as_the_same_model() {
    // Every architecture has a family.
    for &family in Architecture::WORDS {
        let (found, config) = read(&theirs(family));
        assert_eq!((config.model.architecture.word(), found.layers), (family, 2));
        let context = if family == "gpt2" { 64 } else { 4096 };
        assert_eq!((found.context, config.train.seq), (context, context.min(2048)));
        let written = write_config(&config.model, BESIDE).unwrap();
        let dropout = if family == "gpt2" { "resid_pdrop" } else { "attention_dropout" };
        assert_eq!(written[dropout], 0.0);
        assert_eq!(read(&written).1.model, config.model, "{family}");
        assert_eq!((&written["eos_token_id"], &written["torch_dtype"]), (&json!(7), &json!("float32")));
    }
}

#[test]
fn the_weight_of_the_balance_loss_goes_both_ways() {
    for (family, field, default) in [
        ("mixtral", "router_aux_loss_coef", 0.001),
        ("qwen3_moe", "router_aux_loss_coef", 0.001),
        ("olmoe", "router_aux_loss_coef", 0.01),
        ("deepseek", "aux_loss_alpha", 0.001),
    ] {
        assert_eq!(read(&theirs(family)).1.model.balance_loss, default, "{family}");
        for value in [0.0, 0.25] {
            let (_, config) = read(&with(family, json!({ field: value })));
            assert_eq!(config.model.balance_loss, value, "{family}");
            assert_eq!(write_config(&config.model, BESIDE).unwrap()[field], value, "{family}");
        }
    }
}

#[test]
fn what_transformers_would_refuse_is_not_written() {
    let odd = json!({ "hidden_size": 26, "head_dim": 6 });
    for family in ["mistral", "qwen2", "qwen3"] {
        let (_, config) = read(&with(family, odd.clone()));
        let written = write_config(&config.model, BESIDE).unwrap();
        assert_eq!((&written["hidden_size"], &written["head_dim"]), (&json!(26), &json!(6)), "{family}");
    }
    let (_, config) = read(&with("llama", odd));
    let error = write_config(&config.model, BESIDE).unwrap_err().with_hint();
    assert!(error.starts_with("model.dim = 26 is no multiple of model.heads = 4, and transformers refuses"), "{error}");
    assert!(error.contains("\nhint: model.architecture = \"mistral\" "), "{error}");
}

#[test]
fn both_versions_of_the_rotary_fields_are_read() {
    let scaling = json!({
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    });
    let mut new = scaling.clone();
    (new["rope_type"], new["rope_theta"]) = (json!("llama3"), json!(5e5));
    let five = read(&with("llama", json!({ "rope_parameters": new }))).1.model;
    let mut old = scaling.clone();
    old["type"] = json!("llama3");
    let four = with("llama", json!({ "rope_parameters": null, "rope_theta": 5e5, "rope_scaling": old }));
    assert_eq!(read(&four).1.model, five);
    assert_eq!((five.rope_theta, five.rope_scaling.unwrap().original_context), (5e5, 32));
    let bare = with("llama", json!({ "rope_parameters": null }));
    assert_eq!(read(&bare).1.model.rope_theta, 10_000.0);
}

#[test]
fn what_is_not_said_is_what_transformers_takes() {
    let short = |fields: Value| read(&with("llama", fields)).1.model;
    let model = short(
        json!({ "num_key_value_heads": null, "head_dim": null, "rms_norm_eps": null, "tie_word_embeddings": null }),
    );
    assert_eq!((model.kv_heads, model.head_dim, model.norm_eps, model.tied_embeddings), (4, 6, 1e-6, false));
    let model = read(&theirs("gpt2")).1.model;
    assert_eq!((model.ffn, model.positions, model.tied_embeddings, model.norm_eps), (120, Some(64), true, 1e-5));
    let mut mistral = theirs("mistral");
    assert_eq!(read(&mistral).1.model.sliding_window, None);
    mistral.as_object_mut().unwrap().remove("sliding_window");
    assert_eq!(read(&mistral).1.model.sliding_window, Some(4096));
    let sliding =
        with("mistral", json!({ "sliding_window": 5, "layer_types": ["sliding_attention", "sliding_attention"] }));
    assert_eq!(read(&sliding).1.model.sliding_window, Some(5));
}

#[test]
fn what_cannot_be_represented_is_refused_by_field() {
    let rope = |kind: &str| json!({ "rope_parameters": { "rope_type": kind, "rope_theta": 1e4, "factor": 2.0 } });
    let partial = json!({ "rope_parameters": { "rope_theta": 1e4, "partial_rotary_factor": 0.5 } });
    let per_layer = json!({ "rope_parameters": { "full_attention": { "rope_theta": 1e4 } } });
    for (family, fields, expected) in [
        ("bert", json!({}), "`model_type` = \"bert\" is not supported"),
        ("llama", json!({ "model_type": null }), "`model_type` is not set"),
        ("llama", json!({ "model_type": 3 }), "`model_type` is 3, which is wrong"),
        ("llama", json!({ "attention_bias": true }), "`attention_bias` = true is not supported"),
        ("llama", json!({ "mlp_bias": true }), "`mlp_bias` = true is not supported"),
        ("llama", json!({ "hidden_act": "gelu" }), "`hidden_act` = \"gelu\" is not supported"),
        (
            "llama",
            json!({ "quantization_config": { "bits": 4 } }),
            "`quantization_config` = {\"bits\":4} is not supported",
        ),
        ("qwen2", json!({ "is_causal": false }), "`is_causal` = false is not supported"),
        ("gpt2", json!({ "is_causal": false }), "`is_causal` = false is not supported"),
        ("llama", rope("yarn"), "`rope_type` = \"yarn\" is not supported"),
        ("llama", rope("llama3"), "`rope_parameters.original_max_position_embeddings` is not set"),
        ("llama", partial, "`partial_rotary_factor` = 0.5 is not supported"),
        ("llama", per_layer, "`rope_parameters` differs between layers"),
        ("llama", json!({ "layer_types": ["full_attention", "sliding_attention"] }), "`layer_types` is not supported"),
        ("mixtral", json!({ "num_local_experts": null }), "`num_local_experts` is not set"),
        ("qwen3_moe", json!({ "mlp_only_layers": [0] }), "`mlp_only_layers` = [0] is not supported"),
        ("qwen3_moe", json!({ "decoder_sparse_step": 2 }), "`decoder_sparse_step` = 2 is not supported"),
        ("olmoe", json!({ "clip_qkv": 8.0 }), "`clip_qkv` = 8.0 is not supported"),
        ("deepseek", json!({ "scoring_func": "sigmoid" }), "`scoring_func` = \"sigmoid\" is not supported"),
        ("deepseek", json!({ "n_shared_experts": null }), "`n_shared_experts` is not set"),
        (
            "dots1",
            json!({ "sliding_window": 64, "max_window_layers": 1 }),
            "layers from 1 on have a sliding window, which is not supported",
        ),
        ("olmoe", json!({ "head_dim": 16 }), "`head_dim` = 16 is not supported"),
        ("llama", json!({ "per_layer_config": { "1": {} } }), "`per_layer_config` = {\"1\":{}} is not supported"),
        ("mixtral", json!({ "num_experts": 4 }), "`num_local_experts` = 6 contradicts `num_experts` = 4"),
        ("mixtral", json!({ "router_aux_loss_coef": -1.0 }), "`router_aux_loss_coef` is -1.0, which is wrong"),
        ("dots1", json!({ "routed_scaling_factor": 0.0 }), "`routed_scaling_factor` is 0.0, which is wrong"),
        ("mistral", json!({ "num_key_value_heads": null }), "`num_key_value_heads` is not set"),
        ("mistral", json!({ "sliding_window": 0 }), "`sliding_window` is 0, which is wrong"),
        ("qwen2", json!({ "use_sliding_window": true }), "`use_sliding_window` = true is not supported"),
        ("qwen3", json!({ "attention_bias": true }), "`attention_bias` = true is not supported"),
        ("qwen3", json!({ "head_dim": null }), "`head_dim` is not set"),
        ("gpt2", json!({ "activation_function": "relu" }), "`activation_function` = \"relu\" is not supported"),
        ("gpt2", json!({ "scale_attn_by_inverse_layer_idx": true }), "is not supported"),
        ("gpt2", json!({ "scale_attn_weights": false }), "`scale_attn_weights` = false is not supported"),
        ("llama", json!({ "vocab_size": 1_000_000_000_000u64 }), "`vocab_size` is 1000000000000, which is wrong"),
        ("llama", json!({ "hidden_size": 0 }), "`hidden_size` is 0, which is wrong"),
        ("llama", json!({ "hidden_size": -24 }), "`hidden_size` is -24, which is wrong"),
        ("llama", json!({ "hidden_size": 24.5 }), "`hidden_size` is 24.5, which is wrong"),
        ("llama", json!({ "hidden_size": "24" }), "`hidden_size` is \"24\", which is wrong"),
        ("llama", json!({ "rms_norm_eps": 0.0 }), "`rms_norm_eps` is 0.0, which is wrong"),
        ("llama", json!({ "tie_word_embeddings": "yes" }), "`tie_word_embeddings` is \"yes\", which is wrong"),
    ] {
        let error = read_config(&with(family, fields)).expect_err(expected).with_hint();
        assert!(error.contains(expected) && error.contains("\nhint: "), "{error}");
    }
}
