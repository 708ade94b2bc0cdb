//! Adapters (LoRA): what is trained and kept, in any layout; merged, exported, read back, refused. `golden.rs` holds them against PEFT.

mod common;

use common::{check_layouts, losses, run_to, run_with, write_corpus};
use lockstep_checkpoint::open;
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_infer::{EvaluationShape, ExportOptions, Generator, Sampling, Text, Trained, evaluate, export, generate};
use lockstep_ir::{Hint, StepProgram, account};
use lockstep_plan::plan;
use lockstep_train::Event;
use std::path::{Path, PathBuf};

struct Place(tempfile::TempDir);

impl Place {
    /// A folder with text and a model `base` that was trained a little.
    fn new(model: &str) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        write_corpus(place.0.path());
        run_to(&place.config(model, &["train.steps=3"]), &place.at("base"), 3);
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn config(&self, model: &str, set: &[&str]) -> Config {
        let text = format!(
            "[model]\nvocab_size = 256\nlayers = 2\ndim = 48\nheads = 4\nffn = 96\n{model}\n\
             [data]\npaths = [\".\"]\nextensions = [\"txt\"]\n[optimizer]\nlr = 1e-2\nwarmup_steps = 0\n\
             [train]\nsteps = 4\nseq = 32\nglobal_batch = 8\nmicro_batch = 2\nvalidate_every = 4\n"
        );
        std::fs::write(self.at("run.toml"), text).unwrap();
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        Config::load(&self.at("run.toml"), &set).unwrap_or_else(|e| panic!("{e}"))
    }

    /// One that trains adapters beside `base`.
    fn lora(&self, model: &str, set: &[&str]) -> Config {
        self.config(model, &[&["train.init_from=base", "lora.rank=4"], set].concat())
    }

    fn export(&self, run: &str, out: &str, adapter: bool) -> Result<u64, String> {
        let options = ExportOptions { adapter, ..ExportOptions::default() };
        let done = export(&self.at(run), &self.at(out), options, &mut |_, _| {});
        done.map(|done| done.parameters).map_err(|e| e.with_hint())
    }
}

const LLAMA: &str = "kv_heads = 2\ntied_embeddings = true";
const MIXTRAL: &str = "architecture = \"mixtral\"\nexperts = 4\nkv_heads = 2";
const GPT2: &str = "architecture = \"gpt2\"\npositions = 32";
const DEEPSEEK: &str = "architecture = \"deepseek_v2\"\nexperts = 4\nkv_lora_rank = 20\nqk_nope_head_dim = 10\nqk_rope_head_dim = 6\n\
    v_head_dim = 12";

fn loss(path: &Path) -> f64 {
    let trained = Trained::open(path).unwrap_or_else(|e| panic!("{}", e.with_hint()));
    evaluate(&Devices::new(), &trained, &Text::Validation, EvaluationShape::OF_TRAINING, &mut |_| {})
        .unwrap()
        .score
        .loss
}

fn refused(config: &Config, dir: &Path) -> String {
    run_with(config, dir, &mut |_| {}).unwrap_err().with_hint()
}

#[test]
fn adapters_are_trained_and_kept_alone_and_merged_weights_compute_the_same() {
    for (model, targets) in
        [(LLAMA, "[\"q_proj\", \"v_proj\", \"down_proj\"]"), (MIXTRAL, "[\"*\"]"), (GPT2, "[\"c_attn\", \"c_fc\"]")]
    {
        let place = Place::new(model);
        let before = loss(&place.at("base"));
        // What experts read has no dropout.
        let dropout = if model == MIXTRAL { "lora.dropout=0.0" } else { "lora.dropout=0.05" };
        let config = place.lora(model, &[&format!("lora.targets={targets}"), dropout]);
        let steps = losses(&config, &place.at("run"));
        let after = steps[3].2.unwrap();
        assert!(after < before, "{model}: {before} and {after}");
        let checkpoint = open(&place.at("run/checkpoints/step-00000004")).unwrap();
        for group in ["model", "optimizer"] {
            assert!(checkpoint.names(group).unwrap().iter().all(|name| name.contains(".lora_")), "{model}");
        }
        // Evaluation and generation take the weights from where the run has them.
        assert!((loss(&place.at("run")) - after).abs() < 1e-6, "{model}");
        place.export("run", "merged", false).unwrap();
        let merged = loss_of_folder(&place, model);
        assert!((merged - after).abs() < 2e-6 * after, "{model}: {merged} and {after}");
    }
}

/// The loss of the folder `merged` on the validation text of a run that starts from it.
fn loss_of_folder(place: &Place, model: &str) -> f64 {
    let config = place.config(model, &["train.init_from=merged"]);
    let outcome =
        run_with(&config, &place.at("from-merged"), &mut |_| {}).unwrap_or_else(|e| panic!("{}", e.with_hint()));
    outcome.first_val_loss.unwrap()
}

#[test]
fn killed_and_taken_up_again_in_another_layout_adapters_end_with_the_same_bits() {
    let place = Place::new(LLAMA);
    let whole = losses(&place.lora(LLAMA, &["lora.dropout=0.1"]), &place.at("whole"));
    let config = place.lora(LLAMA, &["lora.dropout=0.1"]);
    let parts = [2, 4].map(|last| run_to(&config, &place.at("parts"), last).steps).concat();
    assert_eq!(parts.iter().map(|m| m.loss).collect::<Vec<_>>(), whole.iter().map(|m| m.0).collect::<Vec<_>>());
    let layouts = ["parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "parallel.cp=2"];
    for (first, second) in layouts.iter().zip(layouts.iter().skip(1)) {
        let dir = place.at(&format!("{first}-{second}"));
        run_to(&place.lora(LLAMA, &["lora.dropout=0.1", first]), &dir, 2);
        let rest = run_to(&place.lora(LLAMA, &["lora.dropout=0.1", second]), &dir, 4).steps;
        for (found, expected) in rest.iter().zip(&whole[2..]) {
            assert!((found.loss - expected.0).abs() < 1e-4, "{first}, {second}: {} and {}", found.loss, expected.0);
        }
    }
}

#[test]
fn layouts_compute_what_one_rank_computes() {
    let place = Place::new(LLAMA);
    let dropped = place.lora(LLAMA, &["lora.dropout=0.1"]);
    check_layouts(
        &dropped,
        &["dp=2,zero=2", "pp=2,cp=2", "tp=2", "tp=2,sp", "cp=2,tp=2", "dp=2,tp=2,sp,zero=3", "pp=2,tp=2"],
    );
    for set in [&["precision.policy=fp32"][..], &["precision.policy=bf16", "recompute.policy=full"]] {
        let config = place.lora(LLAMA, set);
        check_layouts(
            &config,
            &[
                "dp=2",
                "dp=2,zero=3",
                "tp=2",
                "tp=2,sp",
                "pp=2",
                "cp=2",
                "dp=2,tp=2,sp,zero=2",
                "pp=2,tp=2",
                "cp=2,pp=2",
            ],
        );
    }
    let mixture = Place::new(MIXTRAL);
    let dropped = ["lora.dropout=0.1", "lora.targets=[\"q_proj\", \"o_proj\"]"];
    check_layouts(&mixture.lora(MIXTRAL, &dropped), &["ep=2", "ep=2,zero=3", "tp=2,sp", "pp=2,ep=2"]);
    let error = refused(&mixture.lora(MIXTRAL, &["lora.dropout=0.1"]), &mixture.at("dropped"));
    let says = "lora.dropout: \"*\" of lora.targets is model.layers.*.block_sparse_moe.experts.*.w1 too";
    assert!(error.contains(says) && error.contains("\nhint: remove lora.dropout, or give lora.targets"), "{error}");
    let every = ["dp=2", "ep=2", "ep=2,zero=3", "tp=2,sp", "pp=2,ep=2", "ep=2,tp=2", "ep=2,tp=2,sp,zero=2"];
    check_layouts(&mixture.lora(MIXTRAL, &[]), &every);
}

#[test]
fn frozen_weights_have_no_gradients_and_cost_four_flops_a_parameter() {
    let place = Place::new(LLAMA);
    let (whole, lora) = (place.config(LLAMA, &[]), place.lora(LLAMA, &[]));
    let [full, adapted] = [&whole, &lora].map(|config| plan(&Devices::new(), config).unwrap());
    // Every matmul of a layer: 4 · (inputs + outputs).
    let of = |inputs: u64, outputs: u64| 4 * (inputs + outputs);
    let layer = of(48, 48) + 2 * of(48, 24) + of(48, 48) + 2 * of(48, 96) + of(96, 48);
    assert_eq!(adapted.trained_parameters, 2 * layer);
    assert_eq!(adapted.parameters, full.parameters + 2 * layer);
    assert_eq!(full.trained_parameters, full.parameters);
    let memory = account::memory(adapted.program());
    assert!(memory.classes["gradients"] < full.memory.classes["gradients"] / 5, "{memory:?}");
    assert!(memory.classes["optimizer"] < full.memory.classes["optimizer"] / 5, "{memory:?}");
    let share = adapted.model_flops_per_token() / full.model_flops_per_token();
    assert!((0.65..0.85).contains(&share), "{share}");
    assert!(adapted.program().entry(StepProgram::TRAIN).is_some());
}

#[test]
fn a_folder_that_peft_loads_goes_out_and_comes_in() {
    for (model, modules) in [(LLAMA, 7), (GPT2, 4), (MIXTRAL, 4 + 4 * 3)] {
        let place = Place::new(model);
        run_to(&place.lora(model, &[]), &place.at("run"), 4);
        place.export("run", "adapter", true).unwrap();
        let text = std::fs::read_to_string(place.at("adapter/adapter_config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&config["r"], &config["lora_alpha"]), (&4.into(), &8.0.into()));
        assert_eq!(config["target_modules"].as_array().unwrap().len(), 2 * modules);
        assert_eq!(config["fan_in_fan_out"], model == GPT2);
        // A run that starts with them begins where the other ended.
        let again = place.lora(model, &["lora.init_from=adapter"]);
        let began = run_with(&again, &place.at("again"), &mut |_| {}).unwrap().first_val_loss.unwrap();
        assert!((began - loss(&place.at("run"))).abs() < 1e-6);
        let wrong = place.lora(model, &["lora.init_from=adapter", "lora.rank=8", "lora.alpha=8.0"]);
        let error = refused(&wrong, &place.at("wrong"));
        assert!(error.contains("r is 4\nhint: set lora.rank = 4"), "{error}");
        let target = if model == GPT2 { "c_fc" } else { "o_proj" };
        assert_eq!(config["lora_dropout"], 0.0);
        let other = place.lora(model, &["lora.init_from=adapter", &format!("lora.targets=[\"{target}\"]")]);
        let error = refused(&other, &place.at("other"));
        assert!(error.contains(" tensors are not part of the model: ") && error.contains("target_modules"), "{error}");
    }
}

/// Adapters of a folder with a module per expert in the form of PEFT with transformers 5: gate and up together, as `gate_up` makes them of
/// both, and all experts of a layer in a tensor.
fn packed(place: &Place, name: &str, gate_up: impl Fn(&Matrices) -> [Matrix; 2], pattern: serde_json::Value) {
    const EXPERTS: usize = 4;
    let bytes = std::fs::read(place.at("adapter/adapter_model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let read = |name: &str| {
        let view = file.tensor(name).unwrap();
        let elements: Vec<f32> = view.data().as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
        (view.shape().to_vec(), elements)
    };
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = file
        .names()
        .into_iter()
        .filter(|name| !name.contains(".experts."))
        .map(|name| (name.to_owned(), read(name).0, read(name).1))
        .collect();
    for layer in 0..2 {
        let block = |block: &str| format!("base_model.model.model.layers.{layer}.{block}.experts");
        let of = |expert: usize, module: &str| {
            let name = |end: &str| format!("{}.{expert}.{module}.lora_{end}.weight", block("block_sparse_moe"));
            [read(&name("A")), read(&name("B"))]
        };
        let down: Vec<_> = (0..EXPERTS).map(|expert| of(expert, "w2")).collect();
        let both: Vec<_> = (0..EXPERTS).map(|expert| gate_up(&[of(expert, "w1"), of(expert, "w3")])).collect();
        for (inner, experts) in [("", down), (".base_layer", both)] {
            let [(a, _), (b, _)] = &experts[0];
            let all_a = experts.iter().flat_map(|[(_, a), _]| a.clone()).collect();
            let columns = b[1];
            let all_b = (0..b[0] * columns).flat_map(|at| experts.iter().map(move |[_, (_, b)]| b[at])).collect();
            tensors.push((format!("{}{inner}.lora_A.weight", block("mlp")), vec![EXPERTS * a[0], a[1]], all_a));
            tensors.push((format!("{}{inner}.lora_B.weight", block("mlp")), vec![b[0], columns * EXPERTS], all_b));
        }
    }
    let text = std::fs::read_to_string(place.at("adapter/adapter_config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config["target_modules"] = serde_json::json!(["q_proj", "k_proj", "v_proj", "o_proj"]);
    config["target_parameters"] = serde_json::json!(["mlp.experts.gate_up_proj", "down_proj"]);
    for (field, plain) in [("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")] {
        let twice = config[plain].as_f64().unwrap() * 2.0;
        config[field] = pattern.as_str().map_or(serde_json::json!({}), |key| serde_json::json!({ key: twice }));
    }
    std::fs::create_dir(place.at(name)).unwrap();
    std::fs::write(place.at(&format!("{name}/adapter_config.json")), config.to_string()).unwrap();
    let raw: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .into_iter()
        .map(|(name, shape, x)| (name, shape, x.into_iter().flat_map(f32::to_le_bytes).collect()))
        .collect();
    let views = raw.iter().map(|(name, shape, bytes)| {
        (name, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap())
    });
    std::fs::write(
        place.at(&format!("{name}/adapter_model.safetensors")),
        safetensors::serialize(views, None).unwrap(),
    )
    .unwrap();
}

/// Dims and elements.
type Matrix = (Vec<usize>, Vec<f32>);

/// A and B of gate, and of up.
type Matrices = [[Matrix; 2]; 2];

/// One A, which both have, and their Bs one below the other.
fn with_one_a([gate, up]: &Matrices) -> [Matrix; 2] {
    let rows = gate[1].0[0] + up[1].0[0];
    [gate[0].clone(), (vec![rows, gate[1].0[1]], [gate[1].1.clone(), up[1].1.clone()].concat())]
}

/// Both As one below the other, and both Bs as blocks.
fn as_blocks([gate, up]: &Matrices) -> [Matrix; 2] {
    let ([a, inputs], [b, rank]) = ([gate[0].0[0], gate[0].0[1]], [gate[1].0[0], gate[1].0[1]]);
    let empty = vec![0.0; rank];
    let left = gate[1].1.chunks(rank).flat_map(|row| [row, &empty].concat());
    let right = up[1].1.chunks(rank).flat_map(|row| [&empty, row].concat());
    [
        (vec![2 * a, inputs], [gate[0].1.clone(), up[0].1.clone()].concat()),
        (vec![2 * b, 2 * rank], left.chain(right).collect()),
    ]
}

#[test]
fn adapters_of_all_experts_in_one_tensor_come_in() {
    let place = Place::new(MIXTRAL);
    run_to(&place.lora(MIXTRAL, &[]), &place.at("run"), 4);
    place.export("run", "adapter", true).unwrap();
    let begins = |adapter: &str| {
        let config = place.lora(MIXTRAL, &[&format!("lora.init_from={adapter}")]);
        let outcome = run_with(&config, &place.at(&format!("from-{adapter}")), &mut |_| {});
        outcome.map(|outcome| outcome.first_val_loss.unwrap()).map_err(|e| e.with_hint())
    };
    let expected = begins("adapter").unwrap();
    assert!((expected - loss(&place.at("run"))).abs() < 1e-6);
    let twice = serde_json::json!(".*\\.gate_up_proj");
    packed(&place, "blocks", as_blocks, twice.clone());
    assert_eq!(begins("blocks").unwrap(), expected);
    // Gate and up of one A: a module each of ours that has the same.
    packed(&place, "one", with_one_a, serde_json::Value::Null);
    let one = begins("one").unwrap();
    assert!(one.is_finite() && one != expected);
    // Exported again, every expert has its own, and PEFT's form of these is the same model.
    place.export("from-one", "adapter-of-one", true).unwrap();
    let full = |m: &Matrices| {
        let [a, (shape, mut b)] = as_blocks(m);
        b[shape[1] - 1] = 1.0;
        [a, (shape, b)]
    };
    packed(&place, "full", full, twice);
    let error = begins("full").unwrap_err();
    assert!(error.contains("gate and up read both halves of its rank"), "{error}");
    packed(&place, "wide", as_blocks, serde_json::Value::Null);
    let error = begins("wide").unwrap_err();
    assert!(error.contains("which is not rank 4 for each of 4 experts\nhint: "), "{error}");
}

#[test]
fn adapters_that_peft_with_transformers_5_cannot_load_go_out_with_a_warning() {
    let place = Place::new(MIXTRAL);
    let warnings = |targets: &str, out: &str| {
        let config = place.lora(MIXTRAL, &[&format!("lora.targets={targets}"), "train.steps=1"]);
        run_to(&config, &place.at(&format!("run-{out}")), 1);
        let options = ExportOptions { adapter: true, ..ExportOptions::default() };
        export(&place.at(&format!("run-{out}")), &place.at(out), options, &mut |_, _| {}).unwrap().warnings
    };
    assert_eq!(warnings("[\"w1\", \"w2\", \"w3\"]", "all"), [""; 0]);
    assert_eq!(warnings("[\"w2\"]", "down"), [""; 0]);
    for (targets, out) in [("[\"w1\"]", "gate"), ("[\"w1\", \"w3\"]", "both")] {
        let alone = warnings(targets, out);
        assert!(
            alone[0].contains("reads adapters of w1 and w3 of experts only where w1, w3 and w2 have some"),
            "{alone:?}"
        );
    }
}

#[test]
fn adapters_that_change_more_than_they_say_are_refused() {
    let place = Place::new(LLAMA);
    run_to(&place.lora(LLAMA, &["train.steps=1"]), &place.at("run"), 1);
    place.export("run", "adapter", true).unwrap();
    let path = place.at("adapter/adapter_config.json");
    let plain: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for (field, value, says) in [
        (
            "init_lora_weights",
            serde_json::json!("pissa_niter_16"),
            "init_lora_weights is \"pissa_niter_16\", which has changed the",
        ),
        ("target_parameters", serde_json::json!(["router.weight"]), "target_parameters has \"router.weight\""),
        ("rank_pattern", serde_json::json!({"q_proj": 8}), "rank_pattern gives modules ranks of their own"),
        ("use_dora", serde_json::json!(true), "use_dora is true"),
    ] {
        let mut config = plain.clone();
        config[field] = value;
        std::fs::write(&path, config.to_string()).unwrap();
        let error = refused(&place.lora(LLAMA, &["lora.init_from=adapter"]), &place.at(field));
        assert!(error.contains(says) && error.contains("\nhint: "), "{error}");
    }
}

#[test]
fn what_does_not_go_together_is_refused_and_said() {
    let place = Place::new(LLAMA);
    let error = refused(&place.lora(LLAMA, &["lora.targets=[\"q_prj\"]"]), &place.at("run"));
    let expected =
        "lora.targets: no matmul of a layer is called \"q_prj\"\nhint: they are model.layers.*.mlp.down_proj, ";
    assert!(error.contains(expected), "{error}");
    run_to(&place.lora(LLAMA, &[]), &place.at("run"), 4);
    // Adapters are no model to start from, and fit no other weights than theirs.
    let error = refused(&place.config(LLAMA, &["train.init_from=run"]), &place.at("next"));
    assert!(error.contains("run holds adapters, not the weights of a model\nhint: merge them first"), "{error}");
    std::fs::rename(place.at("base"), place.at("moved")).unwrap();
    let error = Trained::open(&place.at("run")).unwrap_err().with_hint();
    assert!(error.contains("base: the weights that the adapters in ") && error.contains("put them back"), "{error}");
    run_to(&place.config(LLAMA, &["train.steps=2"]), &place.at("base"), 2);
    let error = Trained::open(&place.at("run")).unwrap_err().with_hint();
    assert!(error.contains("base: these are not the weights that the adapters in "), "{error}");
    // Weights that were drawn are worth a warning, and cannot be merged.
    let mut warned = Vec::new();
    let config = place.config(LLAMA, &["lora.rank=2"]);
    run_with(&config, &place.at("drawn"), &mut |event| {
        if let Event::Warning(text) = event {
            warned.push(text.to_owned());
        }
    })
    .unwrap();
    assert!(warned.iter().any(|text| text.contains("are random: train.init_from names none")), "{warned:?}");
    let error = place.export("drawn", "out", false).unwrap_err();
    assert!(error.contains("were drawn, not trained"), "{error}");
    assert!(place.export("drawn", "out", true).is_ok());
    let error = place.export("moved", "none", true).unwrap_err();
    assert!(error.contains("there are no adapters"), "{error}");
}

#[test]
fn text_is_generated_with_the_adapters() {
    let place = Place::new(LLAMA);
    run_to(&place.lora(LLAMA, &[]), &place.at("run"), 4);
    place.export("run", "merged", false).unwrap();
    let text = |path: &str| {
        let trained = Trained::open(&place.at(path)).unwrap();
        let tokenizer = trained.tokenizer().unwrap();
        let mut generator = Generator::new(&Devices::new(), &trained.config, 32, trained.weights()).unwrap();
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let mut listen = |_| std::ops::ControlFlow::Continue(());
        generate(&mut generator, &tokenizer, &[], &[108, 105, 110], 16, &sampling, &mut listen).unwrap().tokens
    };
    assert_eq!(text("run"), text("merged"));
}

#[test]
fn adapters_of_latents_are_read_in_generation_too() {
    let place = Place::new(DEEPSEEK);
    let targets = "lora.targets=[\"q_proj\", \"kv_b_proj\", \"o_proj\"]";
    run_to(&place.lora(DEEPSEEK, &[targets]), &place.at("run"), 4);
    place.export("run", "merged", false).unwrap();
    let logits = |path: &str, tp: usize| -> Vec<f32> {
        let trained = Trained::open(&place.at(path)).unwrap();
        let mut generator = Generator::shared(&Devices::new(), &trained.config, (32, tp), trained.weights()).unwrap();
        (0..20).flat_map(|i| generator.read(&[97 + i]).unwrap().to_vec()).collect()
    };
    let [base, merged] = ["base", "merged"].map(|path| logits(path, 1));
    let apart = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0.0f32, |far, (a, b)| far.max((a - b).abs()));
    let most = apart(&merged, &vec![0.0; merged.len()]);
    assert!(apart(&base, &merged) > 1e-2 * most, "a test that tells nothing");
    for tp in [1, 2] {
        let found = apart(&logits("run", tp), &merged);
        assert!(found < 1e-5 * most, "tp {tp}: {found} apart, the largest is {most}");
    }
}
