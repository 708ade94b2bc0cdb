//! Hugging Face folders in and out, and runs that start from them.

mod common;
mod hf_folder;

use common::run_with;
use hf_folder::{CASES, Model};
use lockstep_config::{Config, PrecisionPolicy};
use lockstep_data::{Tokenizer, TokenizerSpec};
use lockstep_host::Devices;
use lockstep_infer::{
    EvaluationShape, ExportOptions, Generator, Sampling, Stop, Text, Trained, evaluate, export, generate, import,
};
use lockstep_ir::Hint;
use lockstep_ir::{DType, bf16};
use lockstep_train::Event;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::fs::read;
use std::path::{Path, PathBuf};

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn import(&self, from: &str, out: &str) -> Config {
        import(&self.at(from), &self.at(out), &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}")).config
    }

    fn refused(&self, from: &str) -> String {
        let error = import(&self.at(from), &self.at("refused"), &mut |_, _| {}).unwrap_err();
        assert!(!self.at("refused").exists());
        error.with_hint()
    }

    fn export(&self, from: &str, out: &str, options: ExportOptions) -> Result<(), String> {
        export(&self.at(from), &self.at(out), options, &mut |_, _| {}).map(drop).map_err(|e| e.with_hint())
    }

    fn weights(&self, folder: &str) -> Vec<u8> {
        read(self.at(folder).join("model.safetensors")).unwrap()
    }
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&read(path).unwrap()).unwrap()
}

#[test]
fn every_architecture_comes_out_as_it_went_in_to_the_byte() {
    for case in CASES {
        let place = Place::new();
        let model = Model::golden(case);
        model.write(&place.at("a"));
        let config = place.import("a", "run");
        assert_eq!(config.model.architecture.word(), model.config["model_type"], "{case}");
        place.export("run", "b", ExportOptions::default()).unwrap();
        assert!(place.weights("b") == model.file(), "{case}");
        // The exported config says the same, in the words of version 4.
        let (again, theirs) = (place.import("b", "again"), json_of(&place.at("b/config.json")));
        assert_eq!(again.model, config.model, "{case}");
        let context = if case.starts_with("gpt2") { "n_positions" } else { "max_position_embeddings" };
        assert_eq!(theirs[context], model.config[context], "{case}");
        // Version 4 cannot say what the class of OLMo 3 reads otherwise in version 5.
        assert!(theirs["rope_parameters"].is_null() || case == "olmo3", "{case}");
        assert_eq!(theirs["torch_dtype"], "float32");
        place.export("again", "c", ExportOptions::default()).unwrap();
        assert!(place.weights("c") == model.file(), "{case}");
    }
}

#[test]
fn shards_are_written_by_size_and_read_back() {
    let place = Place::new();
    for case in ["llama_mha", "gpt2", "dots1"] {
        let (a, run, b) = (&format!("{case}-a"), &format!("{case}-run"), &format!("{case}-b"));
        let model = Model::golden(case);
        model.write(&place.at(a));
        place.import(a, run);
        place.export(run, b, ExportOptions { shard_bytes: 10_000, ..Default::default() }).unwrap();
        let index = json_of(&place.at(b).join("model.safetensors.index.json"));
        let bytes: usize = model.tensors.iter().map(|t| t.3.len()).sum();
        assert_eq!(index["metadata"]["total_size"], bytes);
        let map = index["weight_map"].as_object().unwrap();
        assert_eq!(map.len(), model.tensors.len());
        let mut files: Vec<_> = map.values().map(|v| v.as_str().unwrap()).collect();
        files.sort();
        files.dedup();
        assert!(files.len() > 2 && files[0].starts_with("model-00001-of-000"), "{files:?}");
        let (again, c) = (&format!("{case}-again"), &format!("{case}-c"));
        place.import(b, again);
        place.export(again, c, ExportOptions::default()).unwrap();
        assert!(place.weights(c) == model.file());
    }
}

#[test]
fn experts_in_mxfp4_are_what_transformers_makes_of_them() {
    let place = Place::new();
    Model::of("mxfp4", "file.").write(&place.at("mxfp4"));
    let mut expected = Model::of("mxfp4", "expected.");
    expected.config.as_object_mut().unwrap().remove("quantization_config");
    expected.write(&place.at("bf16"));
    let config = place.import("mxfp4", "run");
    assert_eq!((&config.model, config.precision.policy), (&place.import("bf16", "wide").model, PrecisionPolicy::Bf16));
    place.export("run", "again", ExportOptions::default()).unwrap();
    assert!(place.weights("again") == expected.file());
    // Blocks without scales are no weights.
    let mut torn = Model::of("mxfp4", "file.");
    torn.tensors.retain(|tensor| !tensor.0.ends_with("layers.1.mlp.experts.down_proj_scales"));
    torn.write(&place.at("torn"));
    let error = place.refused("torn");
    assert!(error.contains("1 tensor is missing: `model.layers.1.mlp.experts.down_proj`"), "{error}");
}

#[test]
fn experts_that_one_tensor_has_are_those_that_have_one_each() {
    for case in ["mixtral", "qwen3_moe", "olmoe", "deepseek", "dots1", "deepseek_v2", "deepseek_v3"] {
        let place = Place::new();
        let together = Model::golden(case).with_experts_together();
        assert!(together.tensors.iter().any(|tensor| tensor.0.ends_with(".mlp.experts.gate_up_proj")), "{case}");
        together.write(&place.at("together"));
        place.import("together", "run");
        place.export("run", "again", ExportOptions::default()).unwrap();
        assert!(place.weights("again") == Model::golden(case).file(), "{case}");
        // A run starts from them, too.
        let theirs = place.import("again", "own");
        let fingerprint = |folder: &str| {
            let config = config_for(&place, &theirs, &format!("init_from = \"{folder}\"\n"));
            lockstep_infer::InitialWeights::open(&config).unwrap().unwrap().fingerprint().unwrap()
        };
        assert_eq!(fingerprint("together"), fingerprint("again"), "{case}");
    }
    // Of fewer experts, of rows that are no halves, of no elements at all.
    let sizes: [fn(&mut hf_folder::Tensor); 3] = [
        |tensor| (tensor.2[0], tensor.3) = (8, tensor.3[..tensor.3.len() / 9 * 8].to_vec()),
        |tensor| tensor.2 = vec![9, 5, 256],
        |tensor| (tensor.2, tensor.3) = (vec![1 << 40, 0, 32], Vec::new()),
    ];
    for change in sizes {
        let place = Place::new();
        let mut model = Model::golden("qwen3_moe").with_experts_together();
        change(model.tensor("model.layers.1.mlp.experts.gate_up_proj"));
        model.write(&place.at("torn"));
        let error = place.refused("torn");
        assert!(error.contains("18 tensors are missing: `model.layers.1.mlp.experts.0.gate_proj.weight`"), "{error}");
    }
}

#[test]
fn matrices_in_fp8_are_what_transformers_makes_of_them() {
    let place = Place::new();
    let file = || Model::of("fp8", "file.");
    file().write(&place.at("fp8"));
    let mut expected = Model::of("fp8", "expected.");
    expected.config.as_object_mut().unwrap().remove("quantization_config");
    expected.write(&place.at("bf16"));
    let config = place.import("fp8", "run");
    assert_eq!((&config.model, config.precision.policy), (&place.import("bf16", "wide").model, PrecisionPolicy::Bf16));
    // Biases of the choice are too large for a bf16, and stay in f32.
    let exported = export(&place.at("run"), &place.at("again"), ExportOptions::default(), &mut |_, _| {}).unwrap();
    assert!(place.weights("again") == expected.file());
    assert_eq!(exported.warnings, ["the model came with weights in fp8, and goes out in bf16"]);
    assert!(json_of(&place.at("again/config.json"))["quantization_config"].is_null());
    // A run that starts from it computes in bf16 as well.
    let config = fine_tuning(&place, "init_from = \"fp8\"\n");
    assert_eq!(config.precision.policy, PrecisionPolicy::Bf16);

    let gate = "model.layers.1.mlp.experts.1.gate_proj.weight";
    let scales = &format!("{gate}_scale_inv");
    let refused = |change: &dyn Fn(&mut Model), expected: &str| {
        let mut model = file();
        change(&mut model);
        model.write(&place.at("torn"));
        let error = place.refused("torn");
        assert!(error.contains(expected) && error.contains("\nhint: "), "{error}");
    };
    refused(
        &|model| model.tensors.retain(|tensor| tensor.0 != *scales),
        &format!("tensor `{gate}` is in fp8, and there is no `{scales}`"),
    );
    refused(&|model| model.tensors.retain(|tensor| tensor.0 != gate), &format!("1 tensor is missing: `{gate}`"));
    refused(
        &|model| {
            let tensor = model.tensor(scales);
            (tensor.2, tensor.3) = (vec![2, 1], vec![0; 8]);
        },
        &format!("tensor `{scales}` is [2, 1], and `{gate}`, which is [36, 64], wants [1, 1]"),
    );
    refused(
        &|model| {
            let tensor = model.tensor(scales);
            (tensor.1, tensor.3) = (Dtype::BF16, vec![0; 2]);
        },
        &format!("tensor `{scales}` has elements of type BF16"),
    );
    refused(
        &|model| model.tensor(scales).3 = f32::NAN.to_le_bytes().to_vec(),
        &format!("tensor `{gate}` has a number that is not finite"),
    );
    refused(
        &|model| drop(model.config.as_object_mut().unwrap().remove("quantization_config")),
        "is in fp8, and config.json has no `quantization_config` of fp8",
    );
    refused(
        &|model| {
            let norm = "model.norm.weight";
            (model.tensor(norm).1, model.tensor(norm).3) = (Dtype::F8_E4M3, vec![0; 64]);
        },
        "tensor `model.norm.weight` is in fp8 and [64], which is no matrix",
    );
}

/// The same tensors in another type, but for those that files have in f32 always.
fn narrowed(mut model: Model, dtype: Dtype, narrow: impl Fn(f32) -> u16) -> Model {
    let narrows = |tensor: &&mut hf_folder::Tensor| !lockstep_model::hf::stays_f32(&tensor.0);
    for (_, of, _, data) in model.tensors.iter_mut().filter(narrows) {
        *data = data.as_chunks().0.iter().flat_map(|b| narrow(f32::from_le_bytes(*b)).to_le_bytes()).collect();
        *of = dtype;
    }
    model
}

#[test]
fn types_are_converted_on_the_way() {
    let place = Place::new();
    for case in ["gpt2_untied", "dots1"] {
        let place = Place::new();
        let narrow = narrowed(Model::golden(case), Dtype::BF16, bf16::from_f32);
        narrow.write(&place.at("bf16"));
        assert_eq!(place.import("bf16", "run").precision.policy, PrecisionPolicy::Bf16);
        place.export("run", "again", ExportOptions::default()).unwrap();
        assert!(place.weights("again") == narrow.file());
        assert_eq!(json_of(&place.at("again/config.json"))["torch_dtype"], "bfloat16");
        place.export("run", "wide", ExportOptions { dtype: Some(DType::F32), ..Default::default() }).unwrap();
        let wide = place.weights("wide");
        place.import("wide", "wide-run");
        place.export("wide-run", "narrow", ExportOptions { dtype: Some(DType::BF16), ..Default::default() }).unwrap();
        assert!(place.weights("narrow") == narrow.file() && wide.len() > narrow.file().len());
    }

    // Halves of 1.5, −0.25 and 65504: an f32 has them all.
    let halves = narrowed(Model::golden("llama_mha"), Dtype::F16, |x| match x {
        x if x > 0.1 => 0x3e00,
        x if x < -0.1 => 0xb400,
        _ => 0x7bff,
    });
    halves.write(&place.at("f16"));
    assert_eq!(place.import("f16", "f16-run").precision.policy, PrecisionPolicy::Fp32);
    place.export("f16-run", "f16-out", ExportOptions::default()).unwrap();
    let mut expected = Model::golden("llama_mha");
    for (_, _, _, data) in &mut expected.tensors {
        let wide = |x: f32| if x > 0.1 { 1.5 } else { if x < -0.1 { -0.25 } else { 65504.0f32 } };
        *data = data.as_chunks().0.iter().flat_map(|b| wide(f32::from_le_bytes(*b)).to_le_bytes()).collect();
    }
    assert!(place.weights("f16-out") == expected.file());
}

#[test]
fn files_of_the_hub_are_read_in_their_old_forms() {
    // Without the prefix and with buffers, as the first GPT-2 was published; a tied head stored once more.
    let place = Place::new();
    let model = Model::golden("gpt2");
    let mut old = Model::golden("gpt2");
    old.tensors.iter_mut().for_each(|t| t.0 = t.0.strip_prefix("transformer.").unwrap().to_owned());
    old.tensors.push(("h.0.attn.bias".into(), Dtype::U8, vec![1, 1, 12, 12], vec![1; 144]));
    old.tensors.push(("h.0.attn.masked_bias".into(), Dtype::F32, vec![], vec![0; 4]));
    old.write(&place.at("old"));
    place.import("old", "run");
    place.export("run", "new", ExportOptions::default()).unwrap();
    assert!(place.weights("new") == model.file());

    let mut tied = Model::golden("llama_gqa_tied");
    let (_, dtype, shape, data) = tied.tensor("model.embed_tokens.weight").clone();
    tied.tensors.push(("lm_head.weight".into(), dtype, shape, data));
    tied.tensors.push(("model.layers.0.self_attn.rotary_emb.inv_freq".into(), Dtype::F32, vec![1], vec![0; 4]));
    tied.config["rope_theta"] = json!(500000.0);
    tied.config["rope_parameters"] = Value::Null;
    tied.write(&place.at("tied"));
    assert_eq!(place.import("tied", "tied-run").model.rope_theta, 500000.0);
    place.export("tied-run", "tied-new", ExportOptions::default()).unwrap();
    assert!(place.weights("tied-new") == Model::golden("llama_gqa_tied").file());
    tied.tensor("lm_head.weight").3[0] ^= 1;
    tied.write(&place.at("other"));
    let text = place.refused("other");
    assert!(
        text.contains("`lm_head.weight` differs from `model.embed_tokens.weight`") && text.contains("hint: "),
        "{text}"
    );
}

#[test]
fn modules_that_predict_further_tokens_go_both_ways_where_files_have_them() {
    for case in ["deepseek_v3_mtp", "deepseek_v3_mtp_tied"] {
        let place = Place::new();
        let mut model = Model::golden(case);
        // Published files have the embedding and the head once more in every module.
        let depth = if case == "deepseek_v3_mtp" { 2 } else { 1 };
        let head = if depth == 2 { "lm_head.weight" } else { "model.embed_tokens.weight" };
        for layer in 2..2 + depth {
            for (name, of) in [("embed_tokens", "model.embed_tokens.weight"), ("shared_head.head", head)] {
                let (_, dtype, shape, data) = model.tensor(of).clone();
                model.tensors.push((format!("model.layers.{layer}.{name}.weight"), dtype, shape, data));
            }
        }
        model.tensors.sort_by(|a, b| a.0.cmp(&b.0));
        model.write(&place.at("a"));
        let config = place.import("a", "run");
        assert_eq!((config.model.mtp_depth, config.model.layers), (depth, 2));
        place.export("run", "b", ExportOptions::default()).unwrap();
        assert!(place.weights("b") == model.file(), "{case}");
        assert_eq!(json_of(&place.at("b/config.json"))["num_nextn_predict_layers"], depth);
        assert_eq!(place.import("b", "again").model, config.model);
        // Evaluation is that of the model without them.
        let mut bare = Model::golden(case);
        bare.tensors.retain(|tensor| lockstep_model::hf::layer_of(&tensor.0) < Some(2));
        bare.write(&place.at("bare"));
        assert_eq!(place.import("bare", "bare-run").model.mtp_depth, 0);
        model.tensor("model.layers.2.embed_tokens.weight").3[0] ^= 1;
        model.write(&place.at("other"));
        let text = place.refused("other");
        assert!(
            text.contains("`model.layers.2.embed_tokens.weight` differs from `model.embed_tokens.weight`"),
            "{text}"
        );
    }
}

#[test]
fn modules_that_config_json_does_not_name_are_left_out() {
    let place = Place::new();
    let mut further = Model::golden("deepseek_v3");
    further.config["num_nextn_predict_layers"] = Value::Null;
    further.config["num_mtp_layers"] = json!(0);
    further.tensors.push(("model.layers.3.enorm.weight".into(), Dtype::F32, vec![24], vec![0; 96]));
    further.write(&place.at("further"));
    place.import("further", "run");
    place.export("run", "new", ExportOptions::default()).unwrap();
    assert!(place.weights("new") == Model::golden("deepseek_v3").file());
    // Of other families every tensor has its place.
    let mut other = Model::golden("dots1");
    other.tensors.push(("model.layers.3.enorm.weight".into(), Dtype::F32, vec![20], vec![0; 80]));
    other.write(&place.at("other"));
    let text = place.refused("other");
    assert!(text.contains("1 tensor is not part of the model: `model.layers.3.enorm.weight`"), "{text}");
}

/// A config for a golden model of bytes, with text to train on.
fn config_for(place: &Place, theirs: &Config, more: &str) -> Config {
    std::fs::create_dir_all(place.at("text")).unwrap();
    let text: String = (0..400).map(|i| format!("{} ", (b'!' + (i * i % 7) as u8) as char)).collect();
    std::fs::write(place.at("text/a.txt"), text.replace(' ', "\u{1}").repeat(3)).unwrap();
    std::fs::write(place.at("text/b.txt"), "\u{2}\u{3}!\u{4}\"".repeat(300)).unwrap();
    let model = theirs.resolved_toml();
    let model = &model[..model.find("[data]").unwrap()];
    let text = format!(
        "{model}[data]\npaths = [\"text\"]\nvalidation_fraction = 0.3\n[train]\nseq = 8\nglobal_batch = 4\nmicro_batch = 1\n\
         steps = 2\nvalidate_every = 1\n{more}"
    );
    Config::parse(&text, place.at("run.toml").to_str().unwrap(), &[]).unwrap_or_else(|e| panic!("{e}"))
}

/// The golden Llama with a vocabulary for bytes.
fn byte_model() -> Model {
    let mut model = Model::golden("llama_mha");
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let (_, _, shape, data) = model.tensor(name);
        *data = data.iter().copied().cycle().take(256 * shape[1] * 4).collect();
        shape[0] = 256;
    }
    model.config["vocab_size"] = json!(256);
    model
}

#[test]
fn a_run_starts_from_weights_of_any_origin_in_any_layout() {
    let place = Place::new();
    byte_model().write(&place.at("hf"));
    let theirs = place.import("hf", "imported");
    let first = |name: &str, more: &str| {
        let config = config_for(&place, &theirs, more);
        let outcome = run_with(&config, &place.at(name), &mut |_| {}).unwrap_or_else(|e| panic!("{name}: {e}"));
        outcome.first_val_loss.unwrap()
    };
    let expected = first("a", "init_from = \"imported\"\n");
    assert_ne!(expected, first("random", ""));
    for (name, from) in [("b", "hf"), ("c", "imported/checkpoints/step-00000000")] {
        assert_eq!(first(name, &format!("init_from = \"{from}\"\n")), expected, "{from}");
    }
    for (name, layout) in [("tp", "tp = 2"), ("pp", "pp = 2"), ("zero", "dp = 2\nzero = 3")] {
        let loss = first(name, &format!("init_from = \"imported\"\n[parallel]\n{layout}\n"));
        assert!((loss - expected).abs() < 1e-5, "{layout}: {loss} and {expected}");
    }
    // Other weights than before: an evaluation of the run agrees, and so does a run that starts from the run, or from one in parts.
    let trained = Trained::open(&place.at("a")).unwrap();
    let after = evaluate(&Devices::new(), &trained, &Text::Validation, EvaluationShape::OF_TRAINING, &mut |_| {})
        .unwrap()
        .score
        .loss;
    assert_ne!(after, expected);
    assert_eq!(first("next", "init_from = \"a\"\n"), after);
    assert!((first("from-parts", "init_from = \"zero\"\n") - after).abs() < 1e-4);
    // It resumes as it is, wherever the weights are now.
    std::fs::remove_dir_all(place.at("imported")).unwrap();
    let config = config_for(&place, &theirs, "init_from = \"imported\"\n");
    assert!(run_with(&config, &place.at("a"), &mut |_| {}).unwrap().finished);
    let error = run_with(&config, &place.at("gone"), &mut |_| {}).unwrap_err().with_hint();
    assert!(error.contains("imported: no such run or checkpoint"), "{error}");
}

#[test]
fn weights_that_do_not_fit_are_named() {
    let place = Place::new();
    byte_model().write(&place.at("hf"));
    let theirs = place.import("hf", "imported");
    let refusal = |set: &[&str], from: &str| {
        let text = config_for(&place, &theirs, &format!("init_from = \"{from}\"\n")).resolved_toml();
        let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
        let config = Config::parse(&text, "run.toml", &set).unwrap();
        run_with(&config, &place.at("new"), &mut |_| {}).unwrap_err().with_hint()
    };
    for from in ["hf", "imported"] {
        let text = refusal(&["model.ffn=48"], from);
        let shape = "tensor `model.layers.0.mlp.gate_proj.weight` is [40, 24], the model wants [48, 24]\nhint: give [model] the shape";
        assert!(text.contains(shape), "{text}");
        let text = refusal(&["model.layers=3"], from);
        assert!(text.contains("9 tensors are missing: `model.layers.2."), "{text}");
        let text = refusal(&["model.layers=1"], from);
        assert!(text.contains("9 tensors are not part of the model: `model.layers.1."), "{text}");
    }
    // Of the same shapes, and not the same model.
    let mut warnings = Vec::new();
    let text = config_for(&place, &theirs, "init_from = \"imported\"\n").resolved_toml();
    let config = Config::parse(&text, "run.toml", &["model.rope_theta=777.0".to_owned()]).unwrap();
    run_with(&config, &place.at("warned"), &mut |event| {
        warnings.extend(warning(event));
    })
    .unwrap();
    assert!(warnings.iter().any(|w| w.contains("model.rope_theta = 10000.0, the config has 777.0")), "{warnings:?}");
    // Nobody trains into an imported folder by mistake.
    let config = config_for(&place, &theirs, "");
    let error = run_with(&config, &place.at("imported"), &mut |_| {}).unwrap_err();
    assert!(error.to_string().ends_with("holds imported weights, not a run") && error.is_request(), "{error}");
}

#[test]
fn a_trained_run_exports_from_any_layout() {
    let place = Place::new();
    byte_model().write(&place.at("hf"));
    let theirs = place.import("hf", "imported");
    for (name, layout) in [("whole", ""), ("parts", "[parallel]\ndp = 2\nzero = 3\ntp = 2\n")] {
        let config = config_for(&place, &theirs, layout);
        run_with(&config, &place.at(name), &mut |_| {}).unwrap();
        let out = format!("{name}-hf");
        place.export(name, &out, ExportOptions::default()).unwrap();
        place.import(&out, &format!("{name}-again"));
        let score = |run: &str, text: &Text| {
            let trained = Trained::open(&place.at(run)).unwrap();
            evaluate(&Devices::new(), &trained, text, EvaluationShape::of(8), &mut |_| {}).unwrap().score.loss
        };
        // Its tokenizer has become a file; the text is the same.
        let text = Text::Paths(vec![place.at("text/b.txt")]);
        let trained = Trained::open(&place.at(&format!("{name}-again"))).unwrap();
        assert!(trained.config.tokenizer_path().is_some());
        let expected = score(name, &text);
        assert_eq!(score(&format!("{name}-again"), &text), expected);
    }
    let text = place.export("whole", "whole-hf", ExportOptions::default()).unwrap_err();
    assert!(text.contains("there is something in this folder\nhint: give --out another path"), "{text}");
    std::fs::create_dir(place.at("empty")).unwrap();
    place.export("whole", "empty", ExportOptions { context: Some(77), ..Default::default() }).unwrap();
    assert_eq!(json_of(&place.at("empty/config.json"))["max_position_embeddings"], 77);
    assert_eq!(json_of(&place.at("empty/generation_config.json")), json!({ "eos_token_id": 0 }));
}

/// The golden Llama with the tokenizer of 1000 tokens that the tests of data have, and what an instruct model has beside it.
fn instruct_model(place: &Place, folder: &str) {
    let mut model = Model::golden("llama_mha");
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let (_, _, shape, data) = model.tensor(name);
        *data = data.iter().copied().cycle().take(1000 * shape[1] * 4).collect();
        shape[0] = 1000;
    }
    model.config["vocab_size"] = json!(1000);
    model.config["max_position_embeddings"] = json!(512);
    (model.config["bos_token_id"], model.config["eos_token_id"]) = (json!(1), json!([0, 7, 9]));
    model.config["pad_token_id"] = json!(3);
    let folder = model.write(&place.at(folder));
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tests/fixtures/tokenizer.json");
    std::fs::copy(tokenizer, folder.join("tokenizer.json")).unwrap();
    for (name, text) in BESIDE {
        std::fs::write(folder.join(name), text).unwrap();
    }
}

const BESIDE: [(&str, &str); 4] = [
    ("generation_config.json", "{ \"eos_token_id\": [0, 7, 11], \"temperature\": 0.6 }"),
    ("tokenizer_config.json", "{ \"eos_token\": \"<|endoftext|>\", \"padding_side\": \"left\" }"),
    ("special_tokens_map.json", "{ \"pad_token\": \"!\" }"),
    ("chat_template.jinja", "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"),
];

/// What came in goes out.
fn check_instruct(place: &Place, run: &str) {
    let out = format!("{run}-out");
    place.export(run, &out, ExportOptions::default()).unwrap();
    for (name, text) in BESIDE {
        assert_eq!(std::fs::read_to_string(place.at(&format!("{out}/{name}"))).unwrap(), text, "{run}: {name}");
    }
    let config = json_of(&place.at(&format!("{out}/config.json")));
    assert_eq!((&config["bos_token_id"], &config["pad_token_id"]), (&json!(1), &json!(3)), "{run}");
    assert_eq!(
        (&config["eos_token_id"], &config["max_position_embeddings"]),
        (&json!([0, 7, 9]), &json!(512)),
        "{run}"
    );
    assert_eq!(
        std::fs::read(place.at(&format!("{out}/tokenizer.json"))).unwrap(),
        std::fs::read(place.at("hf/tokenizer.json")).unwrap(),
        "{run}"
    );
}

fn fine_tuning_text(place: &Place) {
    std::fs::create_dir_all(place.at("text")).unwrap();
    std::fs::write(place.at("text/a.txt"), "let the square of the number be a number. ".repeat(200)).unwrap();
}

/// A config that says what to read and where to start from, and no more.
fn fine_tuning(place: &Place, more: &str) -> Config {
    fine_tuning_text(place);
    let text = format!(
        "[data]\npaths = [\"text\"]\n[train]\nseq = 8\nglobal_batch = 4\nsteps = 2\nvalidate_every = 1\n{more}"
    );
    std::fs::write(place.at("run.toml"), text).unwrap();
    Config::load_with(&place.at("run.toml"), &[], &lockstep_infer::inherited).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn what_an_instruct_model_needs_goes_through_import_training_and_export() {
    let place = Place::new();
    instruct_model(&place, "hf");
    place.import("hf", "imported");
    check_instruct(&place, "imported");
    // [model] and the tokenizer are the folder's.
    for (run, from) in [("a", "hf"), ("b", "imported"), ("c", "a"), ("d", "a/checkpoints/step-00000002")] {
        let config = fine_tuning(&place, &format!("init_from = \"{from}\"\n"));
        assert_eq!((config.model.vocab_size, config.model.layers), (1000, 2), "{from}");
        let resolved = config.resolved_toml();
        let tokenizer = resolved.lines().find(|line| line.starts_with("tokenizer = ")).unwrap();
        assert!(tokenizer.ends_with("tokenizer.json\"  # train.init_from"), "{from}: {tokenizer}");
        let mut warnings = Vec::new();
        run_with(&config, &place.at(run), &mut |event| {
            warnings.extend(warning(event));
        })
        .unwrap_or_else(|e| panic!("{from}: {e}"));
        assert!(!warnings.iter().any(|text| text.contains("vocab_size")), "{warnings:?}");
        check_instruct(&place, run);
    }
    // Another tokenizer has other tokens: nothing that is about the old ones goes out.
    let config = fine_tuning(&place, "init_from = \"hf\"\n[parallel]\ndp = 2\nzero = 1\n");
    let text = config.resolved_toml();
    let bytes = Config::parse(&text, "run.toml", &["data.tokenizer=bytes".to_owned()]).unwrap();
    let mut warnings = Vec::new();
    run_with(&bytes, &place.at("bytes"), &mut |event| {
        warnings.extend(warning(event));
    })
    .unwrap();
    assert!(
        warnings
            .iter()
            .any(|w| w.starts_with("model.vocab_size = 1000, and data.tokenizer (\"bytes\") has 256 tokens")),
        "{warnings:?}"
    );
    place.export("bytes", "bytes-out", ExportOptions::default()).unwrap();
    assert_eq!(json_of(&place.at("bytes-out/config.json"))["eos_token_id"], 0);
    assert!(!place.at("bytes-out/chat_template.jinja").exists());
    // In parts, it is attached too.
    run_with(&config, &place.at("parts"), &mut |_| {}).unwrap();
    check_instruct(&place, "parts");
}

#[test]
fn a_folder_is_used_as_it_is() {
    let place = Place::new();
    instruct_model(&place, "hf");
    place.import("hf", "imported");
    fine_tuning(&place, "init_from = \"hf\"\n");
    let text = Text::Paths(vec![place.at("text/a.txt")]);
    let score = |from: &str| {
        let trained = Trained::open(&place.at(from)).unwrap();
        let loss = evaluate(&Devices::new(), &trained, &text, EvaluationShape::of(16), &mut |_| {}).unwrap().score.loss;
        let tokenizer = trained.tokenizer().unwrap();
        (loss, trained.end_tokens(&tokenizer).unwrap(), trained.step())
    };
    assert_eq!(score("hf"), score("imported"));
    assert_eq!(score("hf").1, [0, 7, 9, 11], "those of config.json and of generation_config.json");
    // A text ends with any of them.
    let trained = Trained::open(&place.at("hf")).unwrap();
    let tokenizer = trained.tokenizer().unwrap();
    let mut generator = Generator::new(&Devices::new(), &trained.config, 64, trained.weights()).unwrap();
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let mut listen = |_| std::ops::ControlFlow::Continue(());
    let mut run =
        |ends: &[u32]| generate(&mut generator, &tokenizer, ends, &[40, 41], 20, &sampling, &mut listen).unwrap();
    let free = run(&[]);
    assert_eq!(free.tokens.len(), 20);
    let ended = run(&[0, free.tokens[5]]);
    let first = free.tokens.iter().position(|token| *token == free.tokens[5]).unwrap();
    assert_eq!((ended.tokens.len(), ended.stop), (first, Stop::Eos));
    // It is no run.
    let error = place.export("hf", "again", ExportOptions::default()).unwrap_err();
    assert!(error.contains("it is a Hugging Face model"), "{error}");
    std::fs::remove_file(place.at("hf/tokenizer.json")).unwrap();
    let error = Trained::open(&place.at("hf")).unwrap().tokenizer().unwrap_err().with_hint();
    assert!(error.contains("no tokenizer.json\nhint: "), "{error}");
}

fn warning(event: Event<'_>) -> Option<String> {
    match event {
        Event::Warning(text) => Some(text.to_owned()),
        Event::Trouble { what, error } => Some(format!("{what}{error}")),
        _ => None,
    }
}

/// Warnings and notes of a run.
fn heard(config: &Config, dir: &Path) -> Vec<String> {
    let mut heard = Vec::new();
    let outcome = run_with(config, dir, &mut |event| match event {
        Event::Note(note) => heard.push(note.to_string()),
        Event::PrecisionInherited(policy) => {
            heard.push(format!("precision.policy = \"{policy}\", as these weights are"))
        }
        event => heard.extend(warning(event)),
    });
    outcome.unwrap_or_else(|e| panic!("{e}"));
    heard
}

#[test]
fn a_folder_says_which_token_ends_a_text() {
    let place = Place::new();
    instruct_model(&place, "hf");
    std::fs::remove_file(place.at("hf/generation_config.json")).unwrap();
    let own = "{ \"eos_token\": { \"content\": \"!\" }, \"bos_token\": \"no such token\" }";
    std::fs::write(place.at("hf/tokenizer_config.json"), own).unwrap();
    let tokenizer = TokenizerSpec::file(&place.at("hf/tokenizer.json"), Some("!".to_owned())).unwrap();
    let eos = Tokenizer::open(&tokenizer).unwrap().eos();
    let imported = import(&place.at("hf"), &place.at("imported"), &mut |_, _| {}).unwrap();
    let named = imported.warnings.join("\n");
    let expected = format!(
        "tokenizer_config.json ends a text with \"!\" (token {eos}), config.json with \"<|endoftext|>\" (token 0), "
    );
    assert!(named.contains(&expected) && named.contains("data.eos_token another"), "{named}");
    assert!(named.contains("begins a text with \"no such token\", which tokenizer.json does not have"), "{named}");
    // What was not trained goes out as it came.
    place.export("imported", "untouched", ExportOptions::default()).unwrap();
    assert_eq!(std::fs::read_to_string(place.at("untouched/tokenizer_config.json")).unwrap(), own);
    for (run, from) in [("a", "hf"), ("b", "imported")] {
        let config = fine_tuning(&place, &format!("init_from = \"{from}\"\n"));
        assert_eq!(config.data.eos_token.as_deref(), Some("!"), "{from}");
        let heard = heard(&config, &place.at(run));
        assert_eq!(heard.iter().any(|text| text.contains(&expected)), from == "hf", "{heard:?}");
        place.export(run, &format!("{run}-out"), ExportOptions::default()).unwrap();
        let out = |name: &str| json_of(&place.at(&format!("{run}-out/{name}")));
        assert_eq!(out("config.json")["eos_token_id"], json!([eos, 0, 7, 9]), "{from}");
        assert_eq!(out("generation_config.json")["eos_token_id"], json!([eos, 0, 7, 9]), "{from}");
        assert_eq!(out("tokenizer_config.json")["eos_token"]["content"], "!", "{from}");
    }
    // Another one that the user names is trained with, and goes out.
    let config = fine_tuning(&place, "init_from = \"hf\"\n").resolved_toml();
    let config = Config::parse(&config, "run.toml", &["data.eos_token=<|endoftext|>".to_owned()]).unwrap();
    run_with(&config, &place.at("c"), &mut |_| {}).unwrap();
    place.export("c", "c-out", ExportOptions::default()).unwrap();
    assert_eq!(json_of(&place.at("c-out/tokenizer_config.json"))["eos_token"], "<|endoftext|>");
    assert_eq!(json_of(&place.at("c-out/config.json"))["eos_token_id"], json!([0, 7, 9]));
}

#[test]
fn a_folder_says_which_token_begins_a_text() {
    let place = Place::new();
    instruct_model(&place, "hf");
    let tokenizer = json_of(&place.at("hf/tokenizer.json"));
    let bos = tokenizer["model"]["vocab"]["!"].as_u64().unwrap() as u32;
    let sequence = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
    let template = json!({ "type": "Sequence", "processors": [{
        "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": "!", "type_id": 0 } }, sequence("A")],
        "pair": [sequence("A"), sequence("B")],
        "special_tokens": { "!": { "id": "!", "ids": [bos], "tokens": ["!"] } },
    }] });
    for (name, beside, processor, begins) in [
        ("flag", json!({ "bos_token": "!", "add_bos_token": true }), Value::Null, true),
        ("template", json!({ "padding_side": "left" }), template.clone(), true),
        ("off", json!({ "bos_token": "!", "add_bos_token": false }), template, false),
        ("none", json!({ "bos_token": "!" }), Value::Null, false),
    ] {
        let folder = format!("hf-{name}");
        instruct_model(&place, &folder);
        let mut file = tokenizer.clone();
        file["post_processor"] = processor;
        std::fs::write(place.at(&folder).join("tokenizer.json"), file.to_string()).unwrap();
        std::fs::write(place.at(&folder).join("tokenizer_config.json"), beside.to_string()).unwrap();
        let imported = format!("imported-{name}");
        place.import(&folder, &imported);
        for (run, from) in [(format!("a-{name}"), &folder), (format!("b-{name}"), &imported)] {
            let config = fine_tuning(&place, &format!("init_from = \"{from}\"\n"));
            assert_eq!(config.data.bos_token.as_deref(), begins.then_some("!"), "{name}");
            heard(&config, &place.at(&run));
            // Each document begins with it, and so does a prompt.
            let data = lockstep_infer::RunData::open(&config, &place.at(&run).join("data")).unwrap().unwrap();
            let data = &data.corpora()[0].data;
            let mut first = [0; 2];
            data.train().copy(0, &mut first);
            assert_eq!((first[0] == bos, data.bos()), (begins, begins.then_some(bos)), "{name}");
            let trained = Trained::open(&place.at(&run)).unwrap();
            let prompt = trained.tokenizer().unwrap().encode_beginning("let the").unwrap();
            assert_eq!(prompt[0] == bos, begins, "{name}");
            // It is no text.
            let text = Text::Paths(vec![place.at("text/a.txt")]);
            let score = evaluate(&Devices::new(), &trained, &text, EvaluationShape::of(16), &mut |_| {}).unwrap().score;
            // Where there is none, the first token of the text is not predicted.
            assert_eq!((score.bytes == 42 * 200, score.bytes > 42 * 199), (begins, true), "{name}");
            let out = format!("{run}-out");
            place.export(&run, &out, ExportOptions::default()).unwrap();
            assert_eq!(
                json_of(&place.at(&out).join("tokenizer_config.json"))["add_bos_token"],
                beside["add_bos_token"]
            );
            let id = json_of(&place.at(&out).join("config.json"))["bos_token_id"].clone();
            assert_eq!(id, if begins { bos } else { 1 }, "{name}");
        }
    }
    // The user has the last word, and it goes out.
    for (set, added) in [("none", false), ("#", true)] {
        let config = fine_tuning(&place, "init_from = \"hf-flag\"\n").resolved_toml();
        let config = Config::parse(&config, "run.toml", &[format!("data.bos_token={set}")]).unwrap();
        let out = format!("{set}-out");
        run_with(&config, &place.at(set), &mut |_| {}).unwrap();
        place.export(set, &out, ExportOptions::default()).unwrap();
        let beside = json_of(&place.at(&out).join("tokenizer_config.json"));
        assert_eq!(
            (&beside["add_bos_token"], &beside["bos_token"]),
            (&json!(added), &json!(if added { set } else { "!" }))
        );
    }
    // One that is added and that nobody names is told of.
    std::fs::write(place.at("hf/tokenizer_config.json"), "{ \"add_bos_token\": true }").unwrap();
    let mut config = json_of(&place.at("hf/config.json"));
    config["bos_token_id"] = Value::Null;
    std::fs::write(place.at("hf/config.json"), config.to_string()).unwrap();
    let warnings = import(&place.at("hf"), &place.at("unnamed"), &mut |_, _| {}).unwrap().warnings.join("\n");
    assert!(
        warnings.contains("has add_bos_token, and no file names the token: documents begin with none"),
        "{warnings}"
    );
}

#[test]
fn a_run_follows_the_type_of_the_weights_that_it_starts_from() {
    let place = Place::new();
    narrowed(byte_model(), Dtype::BF16, bf16::from_f32).write(&place.at("bf16"));
    byte_model().write(&place.at("f32"));
    place.import("bf16", "imported");
    for (run, from, dtype) in [("a", "bf16", "bfloat16"), ("b", "imported", "bfloat16"), ("c", "f32", "float32")] {
        let config = fine_tuning(&place, &format!("init_from = \"{from}\"\n"));
        let is_bf16 = dtype == "bfloat16";
        assert_eq!(config.precision.policy == PrecisionPolicy::Bf16, is_bf16, "{from}");
        let heard = heard(&config, &place.at(run));
        let said = "precision.policy = \"bf16\", as these weights are";
        assert_eq!(heard.iter().any(|text| text.starts_with(said)), is_bf16, "{heard:?}");
        let out = format!("{run}-out");
        place.export(run, &out, ExportOptions::default()).unwrap();
        assert_eq!(json_of(&place.at(&out).join("config.json"))["torch_dtype"], dtype, "{from}");
    }
    let config = fine_tuning(&place, "init_from = \"bf16\"\n[precision]\npolicy = \"fp32\"\n");
    assert_eq!(config.precision.policy, PrecisionPolicy::Fp32);
}

#[test]
fn a_model_that_cannot_be_exported_is_told_of_when_it_starts() {
    let place = Place::new();
    fine_tuning_text(&place);
    for (ffn, told) in [(32, false), (48, true)] {
        let text = format!(
            "[model]\narchitecture = \"mixtral\"\nvocab_size = 256\nlayers = 1\ndim = 16\nheads = 2\nffn = {ffn}\nexperts = 4\n\
             expert_ffn = 32\n[data]\npaths = [\"text\"]\n[train]\nseq = 8\nglobal_batch = 4\nsteps = 1\n"
        );
        let config = Config::parse(&text, place.at("run.toml").to_str().unwrap(), &[]).unwrap();
        let heard = heard(&config, &place.at(&format!("run-{ffn}")));
        let said = "what this run trains cannot be exported as a Hugging Face model: Hugging Face's mixtral has no model.ffn = 48";
        assert_eq!(heard.iter().any(|text| text == said), told, "{heard:?}");
    }
}

#[test]
fn data_that_are_not_what_one_thinks_are_told_of() {
    let place = Place::new();
    instruct_model(&place, "hf");
    let lines =
        |texts: &[&str]| texts.iter().map(|text| json!({ "text": text }).to_string() + "\n").collect::<String>();
    let long = "let the square of the number be a number. ".repeat(40);
    let chat = format!("{long}<|endoftext|>{long}");
    let config = |name: &str, lines: String, more: &str| {
        std::fs::write(place.at(name), lines).unwrap();
        let text = format!(
            "[data]\npaths = [\"{name}\"]\n{more}[train]\ninit_from = \"hf\"\nseq = 8\nglobal_batch = 1\nsteps = 3\nvalidate_every = 0\n"
        );
        std::fs::write(place.at("run.toml"), text).unwrap();
        Config::load_with(&place.at("run.toml"), &[], &lockstep_infer::inherited).unwrap_or_else(|e| panic!("{e}"))
    };
    let many = [&*long; 39];
    let plain = heard(&config("plain.jsonl", lines(&many), ""), &place.at("plain"));
    assert!(!plain.iter().any(|text| text.contains("special tokens") || text.contains("held out")), "{plain:?}");
    // A special token in the text of one of four documents.
    let found = heard(
        &config("chat.jsonl", lines(&[&long, &chat, &long, &long]), "validation_fraction = 0\n"),
        &place.at("chat"),
    );
    let said = "become ordinary tokens: \"<|endoftext|>\", in 25.0% of 4 documents that were looked at";
    assert!(found.iter().any(|text| text.ends_with(said)), "{found:?}");
    // A prompt that is longer than the sequences.
    let prompts = json!({ "prompt": long, "text": "yes" }).to_string() + "\n";
    let found =
        heard(&config("p.jsonl", prompts, "validation_fraction = 0\nprompt_field = \"prompt\"\n"), &place.at("p"));
    let told = found.iter().filter(|text| text.contains("has no target: all of its tokens are prompts")).count();
    assert_eq!(told, 1, "{found:?}");
}

#[test]
fn names_and_addresses_are_not_paths() {
    let place = Place::new();
    let error = |text: &str| {
        std::fs::write(place.at("run.toml"), text).unwrap();
        let config = Config::load_with(&place.at("run.toml"), &[], &lockstep_infer::inherited);
        match config {
            Err(error) => error.with_hint(),
            Ok(_) => panic!("{text} is read"),
        }
    };
    let hub = error("[train]\ninit_from = \"meta-llama/Llama-3.2-1B\"\n[data]\npaths = [\"x\"]\n");
    let said = "hint: for a model on the Hugging Face Hub, set train.init_from = \"hf:meta-llama/Llama-3.2-1B\"";
    assert!(hub.contains(said), "{hub}");
    let model = "[model]\npreset = \"llama-15m\"\n";
    let bucket = error(&format!("{model}[data]\npaths = [\"gs://bucket/text\"]\n"));
    assert!(
        bucket.starts_with("gs://bucket/text: this is an address") && bucket.contains("of others, copy the files"),
        "{bucket}"
    );
    let model_at = error("[train]\ninit_from = \"https://hub/model\"\n[data]\npaths = [\"x\"]\n");
    assert!(model_at.starts_with("https://hub/model: this is an address, and train.init_from names"), "{model_at}");
    // All of these are refused when the config is read, by whichever command.
    let tokenizer = error(&format!("{model}[data]\npaths = [\"run.toml\"]\ntokenizer = \"gpt2\"\n"));
    assert!(
        tokenizer.starts_with("gpt2: no such file")
            && tokenizer.contains("hint: set data.tokenizer = \"hf:OWNER/NAME\""),
        "{tokenizer}"
    );
}
