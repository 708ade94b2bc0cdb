//! `config.json` of every family: what is read, what is refused, and that it comes out as it went in.

use lockstep_config::{Activation, Architecture, Config, LayerType, QkNorm, RopeScalingConfig};
use lockstep_ir::Hint;
use lockstep_model::hf::{HfConfig, HfExtras, Quantised, read_config, write_config};
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
        "gpt_oss" => json!({
            "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 16, "swiglu_limit": 5.0,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "original_max_position_embeddings": 128,
                "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            },
        }),
        "dots1" => json!({
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_shared_experts": 2,
            "first_k_dense_replace": 0, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
            "norm_topk_prob": true,
        }),
        "deepseek_v2" | "deepseek_v3" => json!({
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "num_key_value_heads": 4, "kv_lora_rank": 10,
            "q_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7, "head_dim": 4,
        }),
        _ => json!({}),
    };
    for (name, value) in experts.as_object().unwrap() {
        config[name] = value.clone();
    }
    // Where all of Q is normed at once, the heads have no width of their own.
    let family = Architecture::ALL.iter().find(|one| one.word() == model_type);
    if family.is_some_and(|one| one.features().qk_norm == QkNorm::Whole) {
        config["head_dim"] = Value::Null;
    }
    // A RoPE for each kind of layers.
    if ["olmo3", "gemma3_text"].contains(&model_type) {
        config["sliding_window"] = json!(16);
        config["layer_types"] = json!(["sliding_attention", "full_attention"]);
        config["rope_parameters"] = json!({
            "full_attention": { "rope_type": "default", "rope_theta": 1e6 },
            "sliding_attention": { "rope_type": "default", "rope_theta": 3e4 },
        });
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
    let Some(RopeScalingConfig::Llama3 { original_context, .. }) = five.rope_scaling else { panic!("{five:?}") };
    assert_eq!((five.rope_theta, original_context), (5e5, 32));
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
        ("llama", rope("longrope"), "`rope_type` = \"longrope\" is not supported"),
        ("llama", rope("yarn"), "`rope_parameters.original_max_position_embeddings` is not set"),
        ("smollm3", json!({ "no_rope_layers": [1, 1, 0] }), "`no_rope_layers` has 3 entries"),
        ("smollm3", json!({ "no_rope_layers": [1, 2] }), "`no_rope_layers` has an entry that is neither 1 nor 0"),
        ("smollm3", json!({ "use_sliding_window": true }), "`use_sliding_window` = true is not supported"),
        (
            "smollm3",
            json!({ "layer_types": ["full_attention", "sliding_attention"] }),
            "`layer_types` is not supported",
        ),
        ("olmo2", json!({ "attention_bias": true }), "`attention_bias` = true is not supported"),
        ("olmo3", json!({ "layer_types": ["full_attention"] }), "`layer_types` has 1 entries"),
        (
            "olmo3",
            json!({ "layer_types": ["full_attention", "linear_attention"] }),
            "\"linear_attention\", which is not",
        ),
        ("olmo3", json!({ "sliding_window": null }), "`sliding_window` is null, and some layers have one"),
        (
            "olmo3",
            json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 1e4 } }),
            "`rope_parameters` does not say which layers it is of",
        ),
        ("olmo3", json!({ "rope_parameters": null, "rope_theta": 1e4 }), "`rope_theta` does not say whether layers"),
        ("gemma3_text", json!({ "attn_logit_softcapping": 50.0 }), "`attn_logit_softcapping` = 50.0 is not supported"),
        (
            "gemma3_text",
            json!({ "final_logit_softcapping": 30.0 }),
            "`final_logit_softcapping` = 30.0 is not supported",
        ),
        ("gemma3_text", json!({ "use_bidirectional_attention": true }), "`use_bidirectional_attention` = true is not"),
        ("gemma3_text", json!({ "hidden_activation": "gelu" }), "`hidden_activation` = \"gelu\" is not supported"),
        (
            "gemma3_text",
            json!({ "rope_parameters": { "sliding_attention": { "rope_type": "linear", "factor": 2.0 } } }),
            "`rope_parameters.sliding_attention` has linear RoPE scaling, which is not supported",
        ),
        (
            "gemma3_text",
            json!({ "rope_theta": 2e6 }),
            "`rope_parameters.full_attention.rope_theta` = 1000000.0 contradicts `rope_theta` = 2000000.0",
        ),
        (
            "gemma3_text",
            json!({ "rope_local_base_freq": 2e4 }),
            "`rope_parameters.sliding_attention.rope_theta` = 30000.0 contradicts `rope_local_base_freq` = 20000.0",
        ),
        (
            "olmo3",
            json!({ "rope_scaling": { "rope_type": "linear", "factor": 2.0 } }),
            "`rope_parameters.full_attention` = {\"rope_theta\":1000000.0,\"rope_type\":\"default\"} contradicts `rope_scaling` = ",
        ),
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
        ("gpt_oss", json!({ "attention_bias": false }), "`attention_bias` = false is not supported"),
        ("gpt_oss", json!({ "swiglu_alpha": 1.0 }), "`swiglu_alpha` = 1.0 is not supported"),
        ("gpt_oss", json!({ "swiglu_limit": 0.0 }), "`swiglu_limit` is 0.0, which is wrong"),
        (
            "gpt_oss",
            json!({ "quantization_config": { "quant_method": "fp8" } }),
            "`quantization_config` = {\"quant_method\":\"fp8\"} is not supported",
        ),
        (
            "mixtral",
            json!({ "quantization_config": { "quant_method": "mxfp4" } }),
            "`quantization_config` = {\"quant_method\":\"mxfp4\"} is not supported",
        ),
        (
            "deepseek_v3",
            json!({ "quantization_config": { "quant_method": "awq" } }),
            "`quantization_config` = {\"quant_method\":\"awq\"} is not supported",
        ),
        (
            "deepseek_v3",
            json!({ "quantization_config": { "quant_method": "fp8", "weight_block_size": [64, 128] } }),
            "`quantization_config.weight_block_size` = [64,128] is not supported",
        ),
        (
            "deepseek_v3",
            json!({ "quantization_config": { "quant_method": "fp8", "fmt": "e5m2" } }),
            "`quantization_config.fmt` = \"e5m2\" is not supported",
        ),
        (
            "deepseek_v3",
            json!({ "quantization_config": { "quant_method": "fp8", "activation_scheme": "static" } }),
            "`quantization_config.activation_scheme` = \"static\" is not supported",
        ),
        (
            "deepseek_v3",
            json!({ "quantization_config": { "quant_method": "fp8", "bits": 4 } }),
            "`quantization_config.bits` = 4 is not supported",
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

#[test]
fn deepseek_v3_is_read_as_it_was_published() {
    let published = json!({
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        },
    });
    let (found, config) = read(&with("deepseek_v3", published));
    assert_eq!(found.quantised.map(Quantised::name), Some("fp8"));
    assert_eq!(found.unknown, read(&theirs("deepseek_v3")).0.unknown);
    assert_eq!(config.model, read(&theirs("deepseek_v3")).1.model);
    // What a class takes where it is not said, and how scales were rounded.
    let short = json!({ "quantization_config": { "quant_method": "fp8", "scale_fmt": "ue8m0" } });
    assert_eq!(read(&with("deepseek_v3", short)).0.quantised, Some(Quantised::Fp8));
}

#[test]
fn gpt_oss_is_read_as_it_was_published() {
    // RoPE of version 4, fields that the class does not read, and experts in mxfp4.
    let published = json!({
        "rope_parameters": null, "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": false,
        },
        "swiglu_limit": 7.0, "experts_per_token": 4, "initial_context_length": 4096, "router_aux_loss_coef": 0.9,
        "output_router_logits": false, "attention_bias": true, "attention_dropout": 0.0,
        "quantization_config": { "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"] },
    });
    let (found, config) = read(&with("gpt_oss", published));
    assert!(found.unknown.is_empty(), "{:?}", found.unknown);
    let m = &config.model;
    assert_eq!((m.attention_sinks, m.activation, m.swiglu_limit), (true, Activation::ClampedSwiGlu, Some(7.0)));
    // Layers with a window have the RoPE of the others.
    assert_eq!((m.rope_theta, m.rope_local_theta, m.sliding_window), (150_000.0, None, Some(16)));
    let yarn = RopeScalingConfig::Yarn {
        factor: 32.0,
        original_context: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
        mscale_all_dim: None,
        truncate: false,
    };
    assert_eq!(m.rope_scaling, Some(yarn.clone()));
    // Where nothing is said of RoPE it is that too, and a model without scaling says so.
    let (_, bare) = read(&with("gpt_oss", json!({ "rope_parameters": null, "layer_types": null })));
    assert_eq!((bare.model.rope_scaling.as_ref(), &bare.model.layer_types), (Some(&yarn), &m.layer_types));
    let mut plain = m.clone();
    plain.rope_scaling = None;
    assert_eq!(read(&write_config(&plain, BESIDE).unwrap()).1.model.rope_scaling, None);
}

#[test]
fn layers_of_several_kinds_are_read_in_every_form() {
    // As Gemma 3 was published: a pattern by its length, bases in fields of their own.
    let old = json!({
        "num_hidden_layers": 8, "layer_types": null, "sliding_window_pattern": 3, "rope_parameters": null, "rope_theta": 1e6,
        "rope_local_base_freq": 2e4, "rope_scaling": { "rope_type": "linear", "factor": 8.0 },
        "query_pre_attn_scalar": 168,
    });
    let (_, config) = read(&with("gemma3_text", old));
    let m = &config.model;
    let full: Vec<usize> = (0..8).filter(|layer| m.layer_parts(*layer).window.is_none()).collect();
    assert_eq!((full, m.layer_types.len(), m.sliding_window), (vec![2, 5], 3, Some(16)));
    assert_eq!((m.rope_theta, m.rope_local_theta, m.softmax_scale_dim), (1e6, Some(2e4), 168));
    assert_eq!(m.rope_scaling, Some(RopeScalingConfig::Linear { factor: 8.0 }));
    assert_eq!((m.norm_plus_one, m.embedding_scale), (true, 24f64.sqrt()));
    let written = write_config(m, BESIDE).unwrap();
    assert_eq!((&written["rope_local_base_freq"], &written["query_pre_attn_scalar"]), (&json!(2e4), &json!(168)));
    assert_eq!(written["layer_types"].as_array().unwrap().len(), 8);
    assert_eq!(read(&written).1.model, config.model);

    // All layers of one kind: their RoPE is that of the model.
    let one = |kind: &str| read(&with("gemma3_text", json!({ "layer_types": [kind, kind] }))).1.model;
    let (sliding, full) = (one("sliding_attention"), one("full_attention"));
    assert_eq!((sliding.sliding_window, sliding.rope_theta, sliding.rope_local_theta), (Some(16), 3e4, None));
    assert_eq!((full.sliding_window, full.rope_theta, full.rope_local_theta), (None, 1e6, None));
    for model in [sliding, full] {
        assert_eq!(read(&write_config(&model, BESIDE).unwrap()).1.model, model);
    }

    // OLMo 3 scales its full layers alone; every fourth layer is one where nothing is said.
    let yarn = json!({ "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2 });
    let fields = json!({ "num_hidden_layers": 8, "layer_types": null, "rope_parameters": null, "rope_scaling": yarn });
    let (_, config) = read(&with("olmo3", fields));
    let m = &config.model;
    assert_eq!(m.layer_types, [LayerType::Sliding, LayerType::Sliding, LayerType::Sliding, LayerType::Full]);
    assert_eq!((m.rope_theta, m.rope_local_theta), (5e5, Some(5e5)));
    assert!(matches!(
        m.rope_scaling,
        Some(RopeScalingConfig::Yarn { attention_factor: Some(1.2), truncate: true, .. })
    ));
    assert_eq!(read(&write_config(m, BESIDE).unwrap()).1.model, config.model);

    // SmolLM3: a list, or every n-th layer.
    let rope = |fields: Value| read(&with("smollm3", fields)).1.model.rope_layers;
    assert_eq!(rope(json!({ "num_hidden_layers": 8 })), [1, 1, 1, 0]);
    assert_eq!(rope(json!({ "num_hidden_layers": 5, "no_rope_layer_interval": 2 })), [1, 0]);
    assert_eq!(rope(json!({ "no_rope_layers": [0, 1], "no_rope_layer_interval": 2 })), [0, 1]);
    assert_eq!(rope(json!({ "no_rope_layers": [1, 1] })), [0usize; 0]);
}

#[test]
fn yarn_takes_its_factor_by_weights_too() {
    let read_yarn = |more: Value| {
        let mut rope = json!({
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096,
            "beta_fast": 16, "beta_slow": 2, "truncate": false,
        });
        more.as_object().unwrap().iter().for_each(|(name, value)| rope[name] = value.clone());
        let (_, config) = read(&with("llama", json!({ "rope_parameters": rope })));
        let written = write_config(&config.model, BESIDE).unwrap();
        assert_eq!(read(&written).1.model, config.model);
        config.model.rope_scaling.unwrap()
    };
    let yarn = |attention_factor| RopeScalingConfig::Yarn {
        mscale_all_dim: None,
        factor: 40.0,
        original_context: 4096,
        beta_fast: 16.0,
        beta_slow: 2.0,
        attention_factor,
        truncate: false,
    };
    assert_eq!(read_yarn(json!({})), yarn(None));
    assert_eq!(read_yarn(json!({ "mscale": 1.0, "mscale_all_dim": 1.0 })), yarn(Some(1.0)));
    assert_eq!(read_yarn(json!({ "mscale": 1.0 })), yarn(None));
    assert_eq!(read_yarn(json!({ "mscale": 0.0, "mscale_all_dim": 1.0 })), yarn(None));
}
