//! Generation over tensor-parallel ranks: logits of one rank up to rounding, texts that do not depend on what is beside them, a part of the memory each.

use lockstep_config::{Config, FrozenPrecision};
use lockstep_host::Devices;
use lockstep_infer::{Generator, Sampling, TextBatch, TextRequest, Weights};
use lockstep_ir::{Hint, counter};
use lockstep_plan::{GenerationShape, PAGE, cache_plan, generation_program};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

const CONTEXT: usize = 2 * PAGE + 8;

const MODELS: [&str; 9] = [
    "heads = 4\nkv_heads = 2\ndim = 48\ntied_embeddings = true\nvocab_size = 301",
    "architecture = \"qwen2\"\nheads = 4\nkv_heads = 2\ndim = 48",
    "heads = 4\nkv_heads = 2\ndim = 48\nqk_norm = \"head\"\nsliding_window = 60\nlayer_types = [\"sliding\", \"full\"]",
    "heads = 4\nkv_heads = 2\ndim = 48\nqk_norm = \"whole\"",
    "heads = 4\nkv_heads = 2\ndim = 48\nattention_sinks = true",
    "heads = 4\ndim = 48\nkv_lora_rank = 20\nq_lora_rank = 24\nqk_nope_head_dim = 10\nqk_rope_head_dim = 6\nv_head_dim = 12",
    "architecture = \"gpt2\"\nheads = 4\ndim = 48\npositions = 300",
    "architecture = \"mixtral\"\nheads = 4\nkv_heads = 2\ndim = 48\nexperts = 4\nexperts_per_token = 2",
    "architecture = \"gemma3_text\"\nheads = 4\nkv_heads = 2\ndim = 48\nsliding_window = 60\nlayer_types = [\"sliding\", \"full\"]",
];

fn config(model: &str, rest: &str) -> Config {
    let vocabulary = if model.contains("vocab_size") { "" } else { "vocab_size = 300\n" };
    let text = format!(
        "[model]\nlayers = 2\nffn = 96\ninit_std = 0.3\n{vocabulary}{model}\n[train]\nseq = 64\nglobal_batch = 1\n{rest}"
    );
    Config::parse(&text, "run.toml", &[]).unwrap_or_else(|e| panic!("{model}: {}", e.with_hint()))
}

fn token(key: u64, i: usize) -> u32 {
    (counter::bits(key, i as u64) % 256) as u32
}

/// Logits after a prompt that is read in chunks, and after each token of more.
fn logits(config: &Config, tp: usize) -> Vec<Vec<f32>> {
    let mut generator = Generator::shared(&Devices::new(), config, (CONTEXT, tp), Weights::Initial).unwrap();
    let tokens: Vec<u32> = (0..CONTEXT).map(|i| token(5, i)).collect();
    let mut all = vec![generator.read(&tokens[..PAGE + 50]).unwrap().to_vec()];
    all.extend(tokens[PAGE + 50..].chunks(1).map(|one| generator.read(one).unwrap().to_vec()));
    all
}

#[test]
fn logits_are_those_of_one_rank() {
    for model in MODELS {
        let config = config(model, "");
        let one = logits(&config, 1);
        let most = one.iter().flatten().fold(0.0f32, |most, x| most.max(x.abs()));
        let found = logits(&config, 2);
        let apart = one.iter().flatten().zip(found.iter().flatten()).fold(0.0f32, |far, (a, b)| far.max((a - b).abs()));
        assert!(most > 0.1 && apart <= 2e-5 * most, "{model}: {apart} apart, the largest is {most}");
    }
}

#[test]
fn weights_in_bytes_are_shared_too() {
    for format in [FrozenPrecision::Fp8, FrozenPrecision::Int8] {
        let mut config = config(MODELS[0], "[precision]\npolicy = \"bf16\"");
        config.precision.frozen = format;
        let (one, found) = (logits(&config, 1), logits(&config, 2));
        let most = one.iter().flatten().fold(0.0f32, |most, x| most.max(x.abs()));
        let apart = one.iter().flatten().zip(found.iter().flatten()).fold(0.0f32, |far, (a, b)| far.max((a - b).abs()));
        assert!(apart <= 3e-2 * most, "{format}: {apart} apart, the largest is {most}");
    }
}

#[test]
fn texts_do_not_depend_on_what_is_beside_them() {
    texts_alone_and_together(MODELS[2]);
    texts_alone_and_together(MODELS[5]);
}

fn texts_alone_and_together(model: &str) {
    let config = config(model, "");
    let requests: Vec<TextRequest> = (0..9)
        .map(|n| {
            let prompt = (0..1 + 17 * n).map(|i| token(7 + n as u64 % 2, i)).collect();
            let sampling = Sampling { temperature: [0.0, 1.0][n % 2], seed: n as u64, ..Sampling::default() };
            TextRequest { prompt, max_tokens: 12, sampling, ends: vec![7], logprobs: true }
        })
        .collect();
    let written = |texts: usize, cache: Option<u64>, of: &[usize]| {
        let shape = GenerationShape { texts, cache, tp: 2, ..GenerationShape::one(CONTEXT) };
        let mut batch = TextBatch::new(&Devices::new(), &config, shape, Weights::Initial).unwrap();
        of.iter().for_each(|n| batch.submit(*n as u64, requests[*n].clone()).unwrap());
        let mut all = BTreeMap::new();
        while !batch.is_done() {
            let ended = batch.step(&mut |_, _| ControlFlow::Continue(())).unwrap();
            all.extend(ended.into_iter().map(|(id, text)| (id, text.unwrap())));
        }
        all
    };
    let all: Vec<usize> = (0..requests.len()).collect();
    let together = written(4, None, &all);
    let shape = GenerationShape { tp: 2, ..GenerationShape::one(CONTEXT) };
    let one = cache_plan(&Devices::new(), &config, &shape).unwrap().bytes();
    assert_eq!(written(3, Some(one), &all), together);
    for n in all {
        assert_eq!(written(1, None, &[n])[&(n as u64)], together[&(n as u64)], "text {n}");
    }
}

#[test]
fn each_rank_has_its_part_of_weights_and_cache() {
    let config = config(MODELS[0], "");
    let devices = Devices::new();
    let of = |tp| {
        let shape = GenerationShape { tp, ..GenerationShape::one(CONTEXT) };
        let cache = cache_plan(&devices, &config, &shape).unwrap();
        let (program, _) = generation_program(&devices, &config, &cache).unwrap();
        let caches = program.tensors.iter().filter(|t| t.name.ends_with("kv_cache")).map(|t| t.ty.bytes()).sum::<u64>();
        assert_eq!(caches, cache.bytes(), "tp {tp}");
        (program.arena_bytes, cache.bytes())
    };
    let (one, two) = (of(1), of(2));
    assert!(two.1 * 2 == one.1 && two.0 < one.0 * 3 / 4, "{one:?} and {two:?}");
}

#[test]
fn more_ranks_than_there_are_heads_for_are_refused() {
    let config = config(MODELS[0], "");
    let shape = GenerationShape { tp: 3, ..GenerationShape::one(CONTEXT) };
    let error = cache_plan(&Devices::new(), &config, &shape).unwrap_err().with_hint();
    assert!(
        error.contains("tensor-parallel ranks cannot share this model") && error.contains("hint: use tp = "),
        "{error}"
    );
}
