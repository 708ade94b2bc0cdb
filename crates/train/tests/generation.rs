//! Generation computes what training computes: the same logits, bit for bit, however a text is cut into calls. With latent attention, which
//! generation computes by other matmuls, they are those of training up to rounding.

use lockstep_compile::{AdamW, Context, Offload, Optimizer, Precision, Recompute, Steps, compile};
use lockstep_config::Config;
use lockstep_exec::Executor;
use lockstep_exec::cpu::{CpuExecutor, profile};
use lockstep_host::Devices;
use lockstep_infer::{Generator, InferError, RunTokenizer, Sampling, Stop, Weights, generate};
use lockstep_ir::Hint;
use lockstep_ir::graph::State;
use lockstep_ir::program::{Class, Role};
use lockstep_ir::{DType, Layout, StepProgram, account, counter};
use lockstep_model::names;
use lockstep_plan::{GenerationShape, PAGE, cache_plan, generation_program, inference_account, plan};
use lockstep_train::Session;
use std::ops::ControlFlow;

/// Longer than two tiles of keys, and no multiple of any tile or chunk.
const SEQ: usize = 300;

const MHA: &str = "heads = 3\ndim = 60\n";
const GQA_TIED: &str = "heads = 6\nkv_heads = 2\ndim = 48\ntied_embeddings = true\n";
const LLAMA_3: &str = "heads = 4\nkv_heads = 1\ndim = 64\nhead_dim = 20\n\
    rope_scaling = { factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_context = 64 }\n";
const QWEN3: &str = "architecture = \"qwen3\"\nheads = 4\nkv_heads = 2\ndim = 48\nhead_dim = 20\n";
/// A window across tiles of keys, of no multiple of them.
const MISTRAL: &str = "architecture = \"mistral\"\nsliding_window = 110\nheads = 6\nkv_heads = 2\ndim = 48\n";

/// Windows and full layers, RoPE of two bases and none, norms around blocks.
const KINDS: &str = "qk_norm = \"head\"\nnorms = \"sandwich\"\nnorm_plus_one = true\nactivation = \"gelu\"\nembedding_scale = 3.0\n\
    sliding_window = 110\nlayer_types = [\"sliding\", \"full\"]\nrope_local_theta = 100.0\nsoftmax_scale_dim = 11\n\
    heads = 6\nkv_heads = 2\ndim = 48\n";
const WITHOUT_ROPE: &str = "norms = \"post\"\nqk_norm = \"whole\"\nsliding_window = 110\nlayer_types = [\"sliding\", \"full\"]\n\
    rope_layers = [1, 0]\nheads = 6\nkv_heads = 2\ndim = 48\n\
    rope_scaling = { type = \"yarn\", factor = 4.0, original_context = 64 }\n";

/// Latent attention, with a window and without, and wider heads of V.
const LATENT: &str = "heads = 4\ndim = 48\nkv_lora_rank = 20\nq_lora_rank = 24\nqk_nope_head_dim = 10\nqk_rope_head_dim = 6\n\
    v_head_dim = 12\nrope_scaling = { type = \"yarn\", factor = 4.0, original_context = 64, mscale_all_dim = 1.0 }\n";
const LATENT_WINDOW: &str = "heads = 4\ndim = 48\nkv_lora_rank = 20\nqk_nope_head_dim = 10\nqk_rope_head_dim = 6\n\
    v_head_dim = 20\nsliding_window = 110\nlayer_types = [\"sliding\", \"full\"]\n";

/// Attention sinks, with a window and without; these start at 0, where they count as much as a score of 0.
const SINKS: &str = "attention_sinks = true\nactivation = \"clamped_swiglu\"\nheads = 6\nkv_heads = 2\ndim = 48\n\
    sliding_window = 110\nlayer_types = [\"sliding\", \"full\"]\n";

const GPT2: &str = "architecture = \"gpt2\"\nheads = 4\ndim = 60\npositions = 310\n";
const QWEN2: &str = "architecture = \"qwen2\"\nheads = 6\nkv_heads = 2\ndim = 48\n";

fn config(model: &str, seq: usize) -> Config {
    let text = format!(
        "[model]\nvocab_size = 300\nlayers = 2\nffn = 80\ninit_std = 0.3\n{model}[train]\nseq = {seq}\nglobal_batch = 1\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

fn tokens() -> Vec<u32> {
    (0..SEQ as u64).map(|i| (counter::bits(5, i) % 300) as u32).collect()
}

/// The logits at every position, by the forward pass of the training program.
fn training_logits(config: &Config, session: &mut Session) -> Vec<Vec<f32>> {
    let optimizer = Optimizer::adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, 0.0);
    let context = Context {
        device: profile(2, DType::F32, DType::F32),
        layout: Layout::single(1),
        optimizer,
        precision: Precision::FP32,
        recompute: Recompute::None,
        stages: vec![],
        steps: Steps::default(),
        offload: Offload::default(),
    };
    let mut forward = lockstep_model::build(&config.model, 1, SEQ).unwrap();
    // Logits that are read are not fused away.
    let logits = forward.values.iter().position(|v| v.name == names::LOGITS).unwrap();
    forward.outputs.push(lockstep_ir::ValueId(logits));
    let program = compile(&forward, &context).unwrap().programs.swap_remove(0);
    let mut executor = CpuExecutor::load(program.clone(), 2).unwrap();
    for tensor in &program.tensors {
        if matches!(tensor.role, Role::State(State::Parameter(_) | State::Constant(_))) {
            executor.write(&tensor.name, 0, &session.executor().read(&tensor.name, 0).unwrap()).unwrap();
        }
    }
    let ids: Vec<u8> = tokens().iter().flat_map(|t| t.to_le_bytes()).collect();
    executor.write(names::TOKENS, 0, &ids).unwrap();
    executor.run(StepProgram::EVALUATE).unwrap();
    let bytes = executor.read(names::LOGITS, 0).unwrap();
    let all: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    all.chunks(300).map(<[f32]>::to_vec).collect()
}

fn check(model: &str) {
    let config = config(model, SEQ);
    let mut session = Session::new(&Devices::new(), &config, &plan(&Devices::new(), &config).unwrap()).unwrap();
    let mut expected = training_logits(&config, &mut session);
    let tokens = tokens();
    let mut generator = Generator::new(&Devices::new(), &config, SEQ, session.weights()).unwrap();
    if config.model.latent().is_some() {
        let found: Vec<Vec<f32>> = tokens.iter().map(|t| generator.read(&[*t]).unwrap().to_vec()).collect();
        let most = expected.iter().flatten().fold(0.0f32, |most, x| most.max(x.abs()));
        let pairs = found.iter().flatten().zip(expected.iter().flatten());
        let apart = pairs.fold(0.0f32, |far, (a, b)| far.max((a - b).abs()));
        assert!(most > 0.1 && apart <= 1e-5 * most, "{model}: {apart} apart, the largest is {most}");
        expected = found;
    }
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let mut same = |cut: &[usize], what: &str| {
        generator.forget();
        for piece in cut {
            let end = generator.position() + piece;
            let logits = bits(generator.read(&tokens[end - piece..end]).unwrap());
            assert_eq!(logits, bits(&expected[end - 1]), "{model}{what}, position {}", end - 1);
        }
    };
    for length in [1, 2, 47, 48, 49, 127, 128, 129, 130, 255, 256, 257, 299, 300] {
        same(&[length], "a prompt at once");
    }
    same(&[1; SEQ], "one by one");
    same(&[37, 37, 37, 37, 37, 37, 37, 37, 4], "in pieces");
    same(&[130, 1, 1, 48, 1, 119], "a prompt, then more");
}

#[test]
fn logits_are_those_of_training_with_every_head_its_own_keys() {
    check(MHA);
}

#[test]
fn logits_are_those_of_training_with_grouped_queries_and_a_tied_head() {
    check(GQA_TIED);
}

#[test]
fn logits_are_those_of_training_with_latent_attention() {
    check(LATENT);
    check(LATENT_WINDOW);
}

#[test]
fn logits_are_those_of_training_with_attention_sinks() {
    check(SINKS);
}

#[test]
fn logits_are_those_of_training_with_stretched_positions() {
    check(LLAMA_3);
}

#[test]
fn logits_are_those_of_training_with_normed_heads() {
    check(QWEN3);
}

#[test]
fn logits_are_those_of_training_with_a_window() {
    check(MISTRAL);
}

#[test]
fn logits_are_those_of_training_with_layers_of_several_kinds() {
    check(KINDS);
    check(WITHOUT_ROPE);
}

#[test]
fn logits_are_those_of_training_with_learned_positions() {
    check(GPT2);
    let error = Generator::new(&Devices::new(), &config(GPT2, SEQ), 311, Weights::Initial).err().unwrap();
    assert_eq!(
        error.with_hint(),
        "sequences of 311 tokens are longer than the 310 positions that the model has learned\nhint: use at most 310 tokens"
    );
}

#[test]
fn logits_are_those_of_training_with_biases() {
    check(QWEN2);
}

#[test]
fn a_longer_context_does_not_change_what_fits_a_shorter_one() {
    let config = config(GQA_TIED, 32);
    let read = |context| {
        let mut generator = Generator::new(&Devices::new(), &config, context, Weights::Initial).unwrap();
        generator.read(&tokens()[..20]).unwrap().to_vec()
    };
    assert_eq!(read(20), read(32));
    assert_eq!(read(32), read(500));
}

#[test]
fn the_program_holds_parameters_and_caches_and_nothing_of_training() {
    let config = config(MHA, SEQ);
    let cache = cache_plan(&Devices::new(), &config, &GenerationShape::one(SEQ)).unwrap();
    let (program, _) = generation_program(&Devices::new(), &config, &cache).unwrap();
    let bill = account::memory(&program);
    assert_eq!(bill.classes[Class::Gradients.name()] + bill.classes[Class::Optimizer.name()], 0);
    let caches = program.tensors.iter().filter(|t| t.role == Role::State(State::Cache) && t.name.ends_with("kv_cache"));
    let caches: Vec<_> = caches.collect();
    assert_eq!(caches.len(), 2);
    // Keys and values of every position of four pages: two times three heads of twenty elements.
    assert!(caches.iter().all(|t| t.ty.bytes() == (4 * PAGE * 2 * 60 * 4) as u64));
    assert_eq!(cache.bytes(), caches.iter().map(|t| t.ty.bytes()).sum::<u64>());
    assert!(caches.iter().all(|t| program.buffers[t.buffer.0].class == Class::Activations));
    let generator = Generator::new(&Devices::new(), &config, SEQ, Weights::Initial).unwrap();
    assert_eq!(generator.arena_bytes(), bill.total_bytes);
    let flops = |entry| account::flops(&program, program.entry(entry).unwrap()).unwrap().hardware;
    assert!(flops(StepProgram::PREFILL) > 50 * flops(StepProgram::DECODE[0].1));
}

#[test]
fn latent_attention_keeps_the_latent_and_the_shared_key_alone() {
    for tp in [1, 2] {
        let config = config(LATENT, SEQ);
        let shape = GenerationShape { tp, ..GenerationShape::one(SEQ) };
        let cache = cache_plan(&Devices::new(), &config, &shape).unwrap();
        let (program, _) = generation_program(&Devices::new(), &config, &cache).unwrap();
        let caches = program.tensors.iter().filter(|t| t.name.ends_with("kv_cache"));
        let bytes: Vec<u64> = caches.map(|t| t.ty.bytes()).collect();
        // Of every position of four pages a latent of 20 elements and a key of 6, on every rank.
        assert_eq!(bytes, [(4 * PAGE * 26 * 4) as u64; 2], "tp {tp}");
        assert_eq!(cache.bytes(), bytes.iter().sum::<u64>());
        // What `explain --inference` says.
        let account = inference_account(&Devices::new(), &config, SEQ, None).unwrap();
        assert_eq!((account.text_bytes, account.kinds[0].kept), (cache.bytes(), true));
        assert_eq!(account.kinds[0].token_bytes * (4 * PAGE) as u64, cache.bytes());
    }
}

#[test]
fn a_cache_that_is_not_changed_in_place_is_refused() {
    let config = config(MHA, 16);
    let cache = cache_plan(&Devices::new(), &config, &GenerationShape::one(16)).unwrap();
    let (mut program, _) = generation_program(&Devices::new(), &config, &cache).unwrap();
    let instrs = &mut program.segments[0].instrs;
    let other = instrs[0].outputs[0].as_ref().unwrap().buffer;
    let attention = instrs.iter_mut().find(|i| i.op.name() == "cached_attention").unwrap();
    attention.outputs[1].as_mut().unwrap().buffer = other;
    let error = lockstep_ir::verify::program(&program, 64).unwrap_err();
    assert!(error.to_string().contains("cached_attention: output 1 must be in place"), "{error}");
}

#[test]
fn more_tokens_than_the_context_are_refused_and_change_nothing() {
    let mut generator = Generator::new(&Devices::new(), &config(MHA, 16), 16, Weights::Initial).unwrap();
    generator.read(&tokens()[..10]).unwrap();
    let error = generator.read(&tokens()[10..17]).unwrap_err();
    assert!(matches!(error, InferError::ContextFull { tokens: 17, context: 16 }), "{error}");
    assert_eq!(generator.position(), 10);
    generator.read(&tokens()[10..16]).unwrap();
}

#[test]
fn a_text_is_a_function_of_prompt_and_seed_and_ends_at_the_context() {
    let config = config(GQA_TIED, 64);
    let mut generator = Generator::new(&Devices::new(), &config, 64, Weights::Initial).unwrap();
    let mut write = |seed, temperature, prompt: &str, max_tokens| {
        let tokenizer = RunTokenizer::of(&config).unwrap();
        let sampling = Sampling { temperature, seed, ..Sampling::default() };
        let mut heard = Vec::new();
        let listen = &mut |token| {
            heard.push(token);
            ControlFlow::Continue(())
        };
        let (ends, prompt) = ([tokenizer.eos()], tokenizer.tokens(prompt).unwrap());
        let text = generate(&mut generator, &tokenizer, &ends, &prompt, max_tokens, &sampling, listen).unwrap();
        assert_eq!(text.tokens, heard);
        // Tokens that stand for no text are never drawn.
        assert!(heard.iter().all(|t| *t < 256));
        (text.tokens, text.stop)
    };
    let (one, stop) = write(1, 1.0, "some prompt", 20);
    assert!(matches!(stop, Stop::MaxTokens | Stop::Eos), "{stop:?}");
    assert_eq!(write(1, 1.0, "some prompt", 20).0, one);
    assert_ne!(write(2, 1.0, "some prompt", 20).0, one);
    assert_eq!(write(1, 0.0, "some prompt", 20), write(2, 0.0, "some prompt", 20));
    let (all, stop) = write(3, 2.0, "some prompt", 1000);
    assert!(stop == Stop::Context && all.len() == 64 - 11 || stop == Stop::Eos, "{stop:?}");
}
