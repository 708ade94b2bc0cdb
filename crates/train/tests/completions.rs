//! `data.prompt_field`: prompts are read, and the loss is over what comes after them.

mod common;

use common::{losses, run_to};
use lockstep_config::{Batch, Config};
use lockstep_host::Devices;
use lockstep_infer::{EvaluationShape, Existing, RunData, Text, Trained, evaluate};
use lockstep_ir::op::IGNORED_TARGET;
use lockstep_ir::{StepProgram, StepScalars};
use lockstep_model::names;
use lockstep_plan::plan;
use lockstep_train::Session;
use std::path::Path;
use std::sync::atomic::AtomicBool;

const SEQ: usize = 32;

/// Questions and answers, and a small model over them.
fn config(dir: &Path, more: &str) -> Config {
    let line = |i: u64| format!("{{\"question\": \"the square of {i}? \", \"answer\": \"{}\"}}\n", i * i);
    std::fs::write(dir.join("records.jsonl"), (0..600).map(line).collect::<String>()).unwrap();
    let text = format!(
        "[model]\nvocab_size = 256\nlayers = 2\ndim = 48\nheads = 4\nkv_heads = 2\nffn = 96\n\
         [data]\npaths = [\"records.jsonl\"]\ntext_field = \"answer\"\nprompt_field = \"question\"\ndocument_mask = true\n\
         [optimizer]\nlr = 3e-3\nwarmup_steps = 4\n[train]\nseq = {SEQ}\nglobal_batch = 8\nthreads = 2\n{more}\n"
    );
    std::fs::write(dir.join("run.toml"), text).unwrap();
    Config::load(&dir.join("run.toml"), &[]).unwrap()
}

#[test]
fn the_loss_is_the_mean_over_the_tokens_of_completions() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "steps = 5\nmicro_batch = 1");
    let never = AtomicBool::new(false);
    let data = RunData::prepare(&config, &dir.path().join("data"), Existing::Refresh, &never, &mut |_, _| ()).unwrap();
    let samples = data.train(&config).unwrap();
    let mut session = Session::new(&Devices::new(), &config, &plan(&Devices::new(), &config).unwrap()).unwrap();
    let bytes = |ids: &[u32]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
    let (mut sum, mut count) = (0.0, 0);
    for sample in 0..8 {
        let (mut tokens, mut targets, mut starts) = ([0; SEQ], [0; SEQ], [0; SEQ]);
        samples.fill(sample, &mut tokens, &mut targets);
        samples.document_starts(sample, &mut starts);
        // The loss of each token alone.
        for (i, target) in targets.iter().enumerate().filter(|(_, target)| **target != IGNORED_TARGET) {
            let mut one = [IGNORED_TARGET; SEQ];
            one[i] = *target;
            let inputs = [(names::TOKENS, tokens), (names::TARGETS, one), (names::DOCUMENT_STARTS, starts)];
            inputs.iter().for_each(|(name, ids)| session.executor().write(name, 0, &bytes(ids)).unwrap());
            session.executor().run(StepProgram::EVALUATE).unwrap();
            let loss = session.executor().read(names::LOSS, 0).unwrap();
            let loss = f64::from_le_bytes(*loss.first_chunk().unwrap());
            assert!(loss > 0.5, "{loss}");
            (sum, count) = (sum + loss, count + 1);
        }
    }
    assert!(count > 20 && count < 8 * SEQ / 2, "{count}");
    let scalars = StepScalars { lr: 0.0, inverse_count: 1.0, clip: 1.0, bias1: 1.0, bias2: 1.0, loss_scale: 1.0 };
    let step = session.step(&samples, Batch { first_sample: 0, sequences: 8 }, scalars).unwrap();
    let expected = sum / count as f64;
    assert!((step.loss - expected).abs() < 1e-6, "{} and {expected}", step.loss);
}

#[test]
fn completions_count_the_same_however_the_batch_is_split() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &str| {
        let config = config(dir.path(), &format!("steps = 6\nvalidate_every = 3\nreproducible = true\n{more}"));
        losses(&config, &dir.path().join(name))
    };
    let whole = run("whole", "micro_batch = 8");
    assert_eq!(run("split", "micro_batch = 2"), whole);
    assert_eq!(run("ranks", "micro_batch = 1\n[parallel]\ndp = 2\nzero = 3"), whole);
    assert!(whole[5].0 < whole[0].0, "{whole:?}");
}

#[test]
fn evaluation_counts_what_validation_counts() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "steps = 4\nvalidate_every = 0");
    let ran = run_to(&config, &dir.path().join("run"), 4);
    let trained = Trained::open(&dir.path().join("run")).unwrap();
    let found =
        evaluate(&Devices::new(), &trained, &Text::Validation, EvaluationShape::OF_TRAINING, &mut |_| ()).unwrap();
    assert!((found.score.loss - ran.outcome.last_val_loss.unwrap()).abs() < 1e-9);
    // Answers and EOS tokens only.
    assert!(found.score.tokens < found.score.bytes * 2 && found.score.bytes < found.score.tokens, "{found:?}");
    let text = Text::Paths(vec![dir.path().join("records.jsonl")]);
    let found = evaluate(&Devices::new(), &trained, &text, EvaluationShape::OF_TRAINING, &mut |_| ()).unwrap();
    let answers: u64 = (0..600u64).map(|i| (i * i).to_string().len() as u64).sum();
    assert_eq!((found.score.bytes, found.score.tokens), (answers, answers + 600));
}
