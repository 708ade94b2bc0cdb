//! Many texts at once are what each would be alone, whatever shares the cache with it and however small the cache is.

use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_infer::{BatchCounts, InferError, Sampling, Stop, TextBatch, TextRequest, Weights, Written};
use lockstep_ir::{Hint, counter};
use lockstep_plan::{GenerationShape, PAGE, cache_plan};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

const CONTEXT: usize = 3 * PAGE + 10;

const GQA: &str = "heads = 6\nkv_heads = 2\ndim = 48\ntied_embeddings = true\n";
const WINDOWS: &str =
    "sliding_window = 110\nlayer_types = [\"sliding\", \"full\"]\nheads = 6\nkv_heads = 2\ndim = 48\n";
const MISTRAL: &str = "architecture = \"mistral\"\nsliding_window = 50\nheads = 6\nkv_heads = 2\ndim = 48\n";
const LATENT: &str =
    "heads = 4\ndim = 48\nkv_lora_rank = 20\nqk_nope_head_dim = 10\nqk_rope_head_dim = 6\nv_head_dim = 12\n";
const GPT2: &str = "architecture = \"gpt2\"\nheads = 4\ndim = 60\npositions = 310\n";
const MIXTURE: &str =
    "architecture = \"mixtral\"\nheads = 4\nkv_heads = 2\ndim = 48\nexperts = 4\nexperts_per_token = 2\n";

fn config(model: &str, rest: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 300\nlayers = 2\nffn = 80\ninit_std = 0.3\n{model}[train]\nseq = 64\nglobal_batch = 1\n{rest}"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

fn token(key: u64, i: usize) -> u32 {
    (counter::bits(key, i as u64) % 256) as u32
}

/// Prompts of one token up to nearly the context; two in three begin as another does, with more than a page.
fn requests(count: usize) -> Vec<TextRequest> {
    let of = |n: usize| {
        let length = 1 + counter::bits(3, n as u64) as usize % (CONTEXT - 30);
        let shared = if n.is_multiple_of(3) { 0 } else { 2 * PAGE + 5 };
        let prompt =
            (0..length).map(|i| token(if i < shared { 7 + n as u64 % 2 } else { 100 + n as u64 }, i)).collect();
        let sampling = Sampling { temperature: [0.0, 1.0, 0.7][n % 3], seed: n as u64, ..Sampling::default() };
        TextRequest { prompt, max_tokens: 1 + n % 50, sampling, ends: vec![7, 8, 9], logprobs: n.is_multiple_of(2) }
    };
    (0..count).map(of).collect()
}

/// Runs all requests to their ends.
fn run(config: &Config, shape: GenerationShape, requests: &[TextRequest]) -> (BTreeMap<u64, Written>, BatchCounts) {
    let mut batch = TextBatch::new(&Devices::new(), config, shape, Weights::Initial).unwrap();
    for (id, request) in requests.iter().enumerate() {
        batch.submit(id as u64, request.clone()).unwrap();
    }
    let mut heard: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    let mut all = BTreeMap::new();
    while !batch.is_done() {
        let ended = batch.step(&mut |id, token| {
            heard.entry(id).or_default().push(token);
            ControlFlow::Continue(())
        });
        all.extend(ended.unwrap().into_iter().map(|(id, written)| (id, written.unwrap())));
    }
    for (id, written) in &all {
        assert_eq!(heard.get(id).cloned().unwrap_or_default(), written.tokens);
        assert_eq!(written.logprobs.len(), if requests[*id as usize].logprobs { written.tokens.len() } else { 0 });
    }
    (all, batch.counts())
}

/// Texts at once, in a cache of this many texts' pages, against each alone.
fn check(model: &str, rest: &str) {
    let config = config(model, rest);
    let requests = requests(24);
    let one = GenerationShape { known: Some(256), ..GenerationShape::one(CONTEXT) };
    let alone: BTreeMap<u64, Written> =
        (0..requests.len()).map(|n| (n as u64, run(&config, one, &requests[n..=n]).0.remove(&0).unwrap())).collect();
    assert!(alone.values().any(|w| w.stop == Stop::MaxTokens) && alone.values().any(|w| w.stop == Stop::Eos));
    let text = cache_plan(&Devices::new(), &config, &one).unwrap().bytes();
    for (texts, cache) in [(5, None), (7, Some(2 * text)), (3, Some(text))] {
        let (all, counts) = run(&config, GenerationShape { texts, cache, ..one }, &requests);
        assert_eq!(all.len(), alone.len());
        for (id, text) in &all {
            assert_eq!(text, &alone[id], "{model}{texts} texts in {cache:?} bytes: text {id}");
        }
        assert_eq!(counts.recomputed > 0, cache.is_some(), "{model}{counts:?}");
        // Layers with windows give back what beginnings would be shared by.
        assert_eq!(counts.shared > 0, !model.contains("window"), "{model}{counts:?}");
    }
}

#[test]
fn texts_are_those_of_one_alone_with_grouped_queries() {
    check(GQA, "");
    check(GQA, "[precision]\npolicy = \"bf16\"\n");
}

#[test]
fn texts_are_those_of_one_alone_with_windows() {
    check(WINDOWS, "");
    check(MISTRAL, "");
}

#[test]
fn texts_are_those_of_one_alone_with_latent_attention() {
    check(LATENT, "");
    check(LATENT, "[precision]\npolicy = \"bf16\"\n");
}

#[test]
fn texts_are_those_of_one_alone_with_learned_positions() {
    check(GPT2, "");
}

#[test]
fn texts_are_those_of_one_alone_in_a_mixture() {
    check(MIXTURE, "");
}

#[test]
fn what_cannot_be_continued_is_refused_and_the_rest_goes_on() {
    let config = config(GQA, "");
    let mut batch = TextBatch::new(&Devices::new(), &config, GenerationShape::one(CONTEXT), Weights::Initial).unwrap();
    let good = requests(1).remove(0);
    let with = |prompt: Vec<u32>| TextRequest { prompt, ..good.clone() };
    assert!(matches!(batch.submit(0, with(Vec::new())), Err(InferError::EmptyPrompt)));
    let error = batch.submit(1, with(vec![1; CONTEXT])).unwrap_err();
    assert!(matches!(error, InferError::ContextFull { tokens: CONTEXT, context: CONTEXT }), "{error}");
    batch.submit(2, good.clone()).unwrap();
    let mut ended = Vec::new();
    while !batch.is_done() {
        ended.extend(batch.step(&mut |_, _| ControlFlow::Continue(())).unwrap());
    }
    assert_eq!(ended.len(), 1);
    let small = GenerationShape { cache: Some(1000), ..GenerationShape::one(CONTEXT) };
    let error = TextBatch::new(&Devices::new(), &config, small, Weights::Initial).err().unwrap();
    let text = error.with_hint();
    assert!(
        text.contains("holds no text of 298 tokens") && text.contains("hint: give the cache more memory"),
        "{text}"
    );
}

#[test]
fn a_text_ends_where_its_listener_says_so_and_its_pages_are_free() {
    let config = config(GQA, "");
    let shape = GenerationShape { texts: 2, ..GenerationShape::one(CONTEXT) };
    let mut batch = TextBatch::new(&Devices::new(), &config, shape, Weights::Initial).unwrap();
    for (id, request) in requests(3).into_iter().enumerate() {
        batch.submit(id as u64, TextRequest { ends: Vec::new(), max_tokens: 1000, ..request }).unwrap();
    }
    let mut stops = Vec::new();
    while !batch.is_done() {
        let listen = &mut |id, _| if id == 1 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        let ended = batch.step(listen).unwrap();
        stops.extend(ended.into_iter().map(|(id, written)| (id, written.unwrap().stop)));
    }
    stops.sort_by_key(|(id, _)| *id);
    assert_eq!(stops, [(0, Stop::Context), (1, Stop::Listener), (2, Stop::Context)]);
    assert_eq!(batch.filled(), 0.0);
}
