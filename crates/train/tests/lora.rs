//! Adapters (LoRA): what is trained and kept, in any layout; merged, exported, read back, refused. `golden.rs` holds them against PEFT.

mod common;

use common::{check_layouts, losses, run_to, run_with, write_corpus};
use lockstep_checkpoint::open;
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_infer::{ExportOptions, Generator, Sampling, Text, Trained, evaluate, export, generate};
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

fn loss(path: &Path) -> f64 {
    let trained = Trained::open(path).unwrap_or_else(|e| panic!("{}", e.with_hint()));
    evaluate(&Devices::new(), &trained, &Text::Validation, None, &mut |_| {}).unwrap().score.loss
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
    let layouts = ["parallel.pp=2", "parallel.dp=2", "parallel.cp=2"];
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
    check_layouts(&dropped, &["dp=2,zero=2", "pp=2,cp=2"]);
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
    check_layouts(&mixture.lora(MIXTRAL, &[]), &["dp=2", "ep=2", "ep=2,zero=3", "tp=2,sp", "pp=2,ep=2"]);
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
    for (model, modules) in [(LLAMA, 7), (GPT2, 4)] {
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
        let other = place.lora(model, &["lora.init_from=adapter", &format!("lora.targets=[\"{target}\"]")]);
        let error = refused(&other, &place.at("other"));
        assert!(error.contains(" tensors are not part of the model: ") && error.contains("target_modules"), "{error}");
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
    let mixture = Place::new(MIXTRAL);
    run_to(&mixture.lora(MIXTRAL, &[]), &mixture.at("run"), 4);
    let error = mixture.export("run", "adapter", true).unwrap_err();
    assert!(
        error.contains("PEFT adapts experts all at once\nhint: export the model with its adapters merged"),
        "{error}"
    );
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
