//! `data.document_mask`: a document in a packed sequence is as if it were alone.

mod common;

use common::{losses, tiny, write_corpus};
use lockstep_compile::{AdamW, Context, Optimizer, Precision, compile};
use lockstep_config::Config;
use lockstep_exec::Executor;
use lockstep_exec::cpu::{CpuExecutor, profile};
use lockstep_host::Devices;
use lockstep_ir::graph::State;
use lockstep_ir::program::Role;
use lockstep_ir::{DType, Layout, StepProgram, ValueId, counter};
use lockstep_model::{Form, build_form, names};
use lockstep_plan::plan;
use lockstep_train::Session;

const VOCAB: usize = 300;

const LLAMA: &str = "kv_heads = 2";
const GPT2: &str = "architecture = \"gpt2\"";

fn config(model: &str, seq: usize) -> Config {
    let text = format!(
        "[model]\nvocab_size = {VOCAB}\nlayers = 3\nffn = 80\ninit_std = 0.2\nheads = 6\ndim = 48\n{model}\n\
         [train]\nseq = {seq}\nglobal_batch = 1\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

/// The loss of every token, by the forward pass of a training program. Parameters are the same for every length.
fn token_losses(model: &str, tokens: &[u32], starts: Option<&[u32]>) -> Vec<f64> {
    let (inputs, targets) = (&tokens[..tokens.len() - 1], &tokens[1..]);
    let config = config(model, inputs.len());
    let context = Context {
        device: profile(2, DType::F32, DType::F32),
        layout: Layout::single(1),
        optimizer: Optimizer::adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, 0.0),
        precision: Precision::FP32,
        recompute: lockstep_compile::Recompute::None,
        stages: vec![],
        steps: lockstep_compile::Steps::default(),
        offload: lockstep_compile::Offload::default(),
    };
    let seq = inputs.len();
    let form = Form::Loss { batch: 1, seq, context: seq, documents: starts.is_some() };
    let mut forward = build_form(&config.model, form).unwrap();
    // Logits that are used are not fused away.
    let logits = forward.values.iter().position(|v| v.name == names::LOGITS).unwrap();
    forward.outputs.push(ValueId(logits));
    let program = compile(&forward, &context).unwrap().programs.remove(0);
    let mut executor = CpuExecutor::load(program.clone(), 2).unwrap();
    let mut session = Session::new(&Devices::new(), &config, &plan(&Devices::new(), &config).unwrap()).unwrap();
    for tensor in &program.tensors {
        if matches!(tensor.role, Role::State(State::Parameter(_) | State::Constant(_))) {
            executor.write(&tensor.name, 0, &session.executor().read(&tensor.name, 0).unwrap()).unwrap();
        }
    }
    let mut write = |name: &str, ids: &[u32]| {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        executor.write(name, 0, &bytes).unwrap();
    };
    write(names::TOKENS, inputs);
    write(names::TARGETS, targets);
    if let Some(starts) = starts {
        write(names::DOCUMENT_STARTS, starts);
    }
    executor.run(StepProgram::EVALUATE).unwrap();
    let bytes = executor.read(names::LOGITS, 0).unwrap();
    let logits: Vec<f64> = bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
    let loss = |(row, target): (&[f64], &u32)| {
        let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        top + row.iter().map(|x| (x - top).exp()).sum::<f64>().ln() - row[*target as usize]
    };
    logits.chunks(VOCAB).zip(targets).map(loss).collect()
}

/// The largest relative difference.
fn difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs() / b.abs()).fold(0.0, f64::max)
}

#[test]
fn a_document_in_a_packed_sequence_has_the_losses_that_it_has_alone() {
    // The second document begins inside a tile, at its border, and after several; the last token only predicts.
    let cuts = [(150, 131), (128, 60), (5, 300), (290, 1)];
    for (model, (first, second)) in [LLAMA, GPT2].into_iter().flat_map(|m| cuts.map(|cut| (m, cut))) {
        let token_losses = |tokens: &[u32], starts: Option<&[u32]>| token_losses(model, tokens, starts);
        let tokens: Vec<u32> =
            (0..(first + second + 1) as u64).map(|i| (counter::bits(5, i) % VOCAB as u64) as u32).collect();
        let starts: Vec<u32> = (0..first + second).map(|s| if s < first { 0 } else { first as u32 }).collect();
        let with = token_losses(&tokens, Some(&starts));
        let without = token_losses(&tokens, None);
        let alone = token_losses(&tokens[first..], None);
        assert!(difference(&with[first..], &alone) < 1e-6, "{first} {second}: {}", difference(&with[first..], &alone));
        assert!(difference(&without[first..], &alone) > 1e-3, "{first} {second}");
        let before = token_losses(&tokens[..=first], None);
        assert!(difference(&with[..first], &before) < 1e-6);
        // One document is no mask.
        let one = token_losses(&tokens, Some(&vec![0; first + second]));
        assert!(difference(&one, &without) < 1e-6);
    }
}

#[test]
fn every_micro_batch_and_the_validation_know_their_documents() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    // Short documents, so that most sequences hold several.
    let lines: String = (0..3000).map(|i| format!("{{\"text\": \"record {i}\"}}\n")).collect();
    std::fs::write(dir.path().join("records.jsonl"), lines).unwrap();
    let train = |run: &str, micro_batch: usize, mask: bool| {
        let more = format!("steps = 6\nvalidate_every = 3\nreproducible = true\nmicro_batch = {micro_batch}");
        tiny(dir.path(), &more);
        let set = [format!("data.document_mask={mask}"), "data.paths=[\"records.jsonl\"]".to_owned()];
        losses(&Config::load(&dir.path().join("run.toml"), &set).unwrap(), &dir.path().join("runs").join(run))
    };
    let whole = train("whole", 8, true);
    assert_eq!(train("split", 2, true), whole);
    let without = train("without", 8, false);
    let differs = |step: usize| {
        let (with, without) = (whole[step], without[step]);
        with.0 != without.0 && with.1 != without.1
    };
    assert!((0..6).all(differs) && whole[2].2 != without[2].2, "{whole:?} {without:?}");
}
