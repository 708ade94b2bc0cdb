//! Weights that are not trained in one byte each: what is multiplied, in generation, evaluation and beside adapters, in any layout.

mod common;

use common::{check_layouts, losses, run_to, run_with, write_corpus};
use lockstep_config::{Config, FrozenPrecision};
use lockstep_exec::initial::encode_rows;
use lockstep_host::Devices;
use lockstep_infer::{EvaluationShape, Generator, Sampling, Text, Trained, Weights, evaluate, generate, state};
use lockstep_ir::graph::State;
use lockstep_ir::program::Role;
use lockstep_ir::{DType, Hint, Op, StepProgram, account, rows8};
use lockstep_model::names;
use lockstep_plan::{GenerationShape, Target, cache_plan, generation_program, inference_account, plan};
use std::path::{Path, PathBuf};

const FORMATS: [FrozenPrecision; 2] = [FrozenPrecision::Fp8, FrozenPrecision::Int8];
const LLAMA: &str = "kv_heads = 2\ntied_embeddings = true";
const MIXTRAL: &str = "architecture = \"mixtral\"\nexperts = 4\nkv_heads = 2";
const GPT2: &str = "architecture = \"gpt2\"\npositions = 32";
const LATENT: &str =
    "kv_lora_rank = 20\nq_lora_rank = 24\nqk_nope_head_dim = 10\nqk_rope_head_dim = 6\nv_head_dim = 12";

struct Place(tempfile::TempDir);

impl Place {
    /// A folder with text and a model `base` that was trained a little.
    fn new(model: &str) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        write_corpus(place.0.path());
        run_to(&place.config(model, &["train.steps=12"]), &place.at("base"), 12);
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn try_config(&self, model: &str, set: &[&str]) -> Result<Config, String> {
        let text = format!(
            "[model]\nvocab_size = 256\nlayers = 2\ndim = 48\nheads = 4\nffn = 96\n{model}\n\
             [data]\npaths = [\".\"]\nextensions = [\"txt\"]\n[optimizer]\nlr = 2e-2\nwarmup_steps = 0\n\
             [train]\nsteps = 4\nseq = 32\nglobal_batch = 8\nmicro_batch = 2\nvalidate_every = 4\n"
        );
        std::fs::write(self.at("run.toml"), text).unwrap();
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        Config::load(&self.at("run.toml"), &set).map_err(|e| e.with_hint())
    }

    fn config(&self, model: &str, set: &[&str]) -> Config {
        self.try_config(model, set).unwrap_or_else(|e| panic!("{e}"))
    }

    /// One that trains adapters beside `base`, in bytes.
    fn lora(&self, model: &str, format: FrozenPrecision, set: &[&str]) -> Config {
        let frozen = format!("precision.frozen={format}");
        self.config(model, &[&["train.init_from=base", "lora.rank=4", &frozen], set].concat())
    }
}

fn loss(path: &Path, format: Option<FrozenPrecision>) -> f64 {
    let mut trained = Trained::open(path).unwrap();
    trained.config.precision.frozen = format.unwrap_or(trained.config.precision.frozen);
    evaluate(&Devices::new(), &trained, &Text::Validation, EvaluationShape::OF_TRAINING, &mut |_| {})
        .unwrap()
        .score
        .loss
}

/// The logits of a few tokens, with weights drawn by a seed; where a program keeps some in bytes, what those stand for can be had.
fn logits(config: &Config, rounded: Option<DType>) -> Vec<u32> {
    let devices = Devices::new();
    let cache = cache_plan(&devices, config, &GenerationShape::one(32)).unwrap();
    let (program, threads) = generation_program(&devices, config, &cache).unwrap();
    let mut executor = devices.device(Target::of(&devices, config)).unwrap().load(program.clone(), threads).unwrap();
    state::load(&program.tensors, executor.as_mut(), Weights::Initial, 7).unwrap();
    if let Some(format) = rounded {
        for tensor in program.tensors.iter().filter(|t| is_matrix_of_layer(&program, t.buffer.0)) {
            let bytes = executor.read(&tensor.name, 0).unwrap().into_owned();
            let numbers: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            let columns = *tensor.whole.sizes().last().unwrap();
            let (rounded, units) = encode_rows(&numbers, format, columns);
            let back = |(i, byte): (usize, &u8)| rows8::to_f32(format, *byte) * units[i / columns];
            let back: Vec<u8> = rounded.iter().enumerate().flat_map(|x| back(x).to_le_bytes()).collect();
            assert_ne!(back, bytes, "{}", tensor.name);
            executor.write(&tensor.name, 0, &back).unwrap();
        }
    }
    let numbers = |of: &[u32]| of.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
    let mut all = Vec::new();
    for position in 0..20u32 {
        let (_, entry) = StepProgram::DECODE[0];
        let inputs =
            [(names::TOKENS, position * 11 % 256), (names::START, position), (names::COUNT, 1), (names::SLOT, 0)];
        for (name, number) in inputs {
            executor.write(&StepProgram::name_in(entry, name), 0, &numbers(&[number])).unwrap();
        }
        executor.run(entry).unwrap();
        let logits = executor.read(&StepProgram::name_in(entry, names::LOGITS), 0).unwrap();
        all.extend(logits.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)));
    }
    all
}

/// Whether a buffer is what a matmul of a layer has as its weights.
fn is_matrix_of_layer(program: &StepProgram, buffer: usize) -> bool {
    let instrs = program.segments.iter().flat_map(|s| &s.instrs);
    instrs.filter(|i| i.op == Op::Linear && i.layer.is_some()).any(|i| i.inputs[1].buffer.0 == buffer)
}

#[test]
fn generation_multiplies_what_the_bytes_stand_for_to_the_bit() {
    let place = Place(tempfile::tempdir().unwrap());
    write_corpus(place.0.path());
    for model in [LLAMA, GPT2, LATENT] {
        let mut config = place.config(model, &[]);
        let whole = logits(&config, None);
        for (format, dtype) in FORMATS.into_iter().zip([DType::E4M3, DType::Int8]) {
            config.precision.frozen = FrozenPrecision::Policy;
            let expected = logits(&config, Some(dtype));
            config.precision.frozen = format;
            let found = logits(&config, None);
            assert_eq!(found, expected, "{model}: {format}");
            assert_ne!(found, whole, "{model}: {format}");
        }
    }
}

#[test]
fn a_trained_model_loses_little_and_takes_less_memory() {
    for model in [LLAMA, GPT2, MIXTRAL] {
        let place = Place::new(model);
        let whole = loss(&place.at("base"), None);
        for (format, most) in FORMATS.into_iter().zip([2e-2, 2e-3]) {
            let found = loss(&place.at("base"), Some(format));
            assert!(found != whole && (found - whole).abs() < most * whole, "{model}, {format}: {found} and {whole}");
        }
        let account = |format| {
            let mut config = place.config(model, &["precision.policy=bf16"]);
            config.precision.frozen = format;
            let devices = Devices::new();
            let cache = cache_plan(&devices, &config, &GenerationShape::one(32)).unwrap();
            let (program, _) = generation_program(&devices, &config, &cache).unwrap();
            let weight = |role: &Role| matches!(role, Role::State(State::Parameter(_) | State::Unit { .. }));
            let bytes = program.tensors.iter().filter(|t| weight(&t.role)).map(|t| t.ty.bytes()).sum::<u64>();
            // What `explain --inference` says.
            assert_eq!(inference_account(&devices, &config, 32, None).unwrap().weight_bytes, bytes, "{model}");
            bytes
        };
        let [bf16, fp8, int8] = [FrozenPrecision::Policy, FrozenPrecision::Fp8, FrozenPrecision::Int8].map(account);
        assert!(fp8 < bf16 && fp8 == int8, "{model}: {bf16}, {fp8}, {int8}");
    }
}

#[test]
fn adapters_train_beside_bytes_and_are_read_beside_them() {
    for (model, format) in [(LLAMA, FORMATS[0]), (LLAMA, FORMATS[1]), (MIXTRAL, FORMATS[1]), (GPT2, FORMATS[0])] {
        let place = Place::new(model);
        let (exact, config) = (place.lora(model, FrozenPrecision::Policy, &[]), place.lora(model, format, &[]));
        let [whole, bytes] =
            [(&exact, "exact"), (&config, "run")].map(|(config, name)| losses(config, &place.at(name)));
        for (a, b) in whole.iter().zip(&bytes) {
            assert!(a.0 != b.0 && (a.0 - b.0).abs() < 2e-2 * a.0, "{model}, {format}: {} and {}", a.0, b.0);
        }
        let (before, after) = (loss(&place.at("base"), Some(format)), bytes[3].2.unwrap());
        assert!(after < before, "{model}, {format}: {before} and {after}");
        assert!((loss(&place.at("run"), None) - after).abs() < 1e-6, "{model}, {format}");
        // A run that stops ends with the same bits.
        let parts = [2, 4].map(|last| run_to(&config, &place.at("parts"), last).steps).concat();
        assert_eq!(parts.iter().map(|m| m.loss).collect::<Vec<_>>(), bytes.iter().map(|m| m.0).collect::<Vec<_>>());
        let trained = Trained::open(&place.at("run")).unwrap();
        let mut generator = Generator::new(&Devices::new(), &trained.config, 32, trained.weights()).unwrap();
        let tokenizer = trained.tokenizer().unwrap();
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        let prompt = tokenizer.encode_beginning("line 3").unwrap();
        let text =
            generate(
                &mut generator,
                &tokenizer,
                &[],
                &prompt,
                8,
                &greedy,
                &mut |_| std::ops::ControlFlow::Continue(()),
            );
        assert_eq!(text.unwrap().tokens.len(), 8);
        let memory = |config: &Config| account::memory(plan(&Devices::new(), config).unwrap().program());
        let [exact, bytes] = [&exact, &config].map(|config| memory(config).classes["parameters"]);
        assert!(bytes < exact, "{model}, {format}: {bytes} and {exact}");
    }
}

#[test]
fn layouts_compute_what_one_rank_computes() {
    let place = Place::new(LLAMA);
    let dense = ["dp=2,zero=3", "tp=2", "tp=2,sp", "pp=2", "cp=2", "dp=2,tp=2,sp,zero=2", "pp=2,tp=2"];
    check_layouts(&place.lora(LLAMA, FORMATS[1], &[]), &dense);
    let bf16 = ["precision.policy=bf16", "recompute.policy=full"];
    check_layouts(&place.lora(LLAMA, FORMATS[0], &bf16), &["dp=2,zero=3", "tp=2,sp", "pp=2,cp=2"]);
    let mixture = Place::new(MIXTRAL);
    check_layouts(&mixture.lora(MIXTRAL, FORMATS[1], &[]), &["ep=2,zero=3", "tp=2,sp", "pp=2,ep=2"]);
}

#[test]
fn bytes_are_for_weights_that_are_not_trained() {
    let place = Place(tempfile::tempdir().unwrap());
    write_corpus(place.0.path());
    let error = place.try_config(LLAMA, &["precision.frozen=int8"]).unwrap_err();
    assert!(error.contains("all weights are trained") && error.contains("--weights int8"), "{error}");
    let error = place.try_config(LLAMA, &["precision.frozen=fp8", "precision.policy=fp8", "lora.rank=4"]).unwrap_err();
    assert!(error.contains("makes bytes of weights in bf16 in every step"), "{error}");
    // Adapters of weights that were drawn.
    let config = place.config(LLAMA, &["precision.frozen=int8", "lora.rank=4"]);
    run_with(&config, &place.at("drawn"), &mut |_| {}).unwrap();
}
