//! Steps that grow during a run.

mod common;

use common::{run_to, tiny, write_corpus};
use lockstep_checkpoint::open;
use lockstep_config::{Batch, Config};
use lockstep_host::Devices;
use lockstep_infer::{Existing, RunData, data_folder};
use lockstep_ir::{StepProgram, StepScalars};
use lockstep_plan::plan;
use lockstep_train::{Session, StepMetrics, learning_rate};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// 4 sequences for four steps, 8 for three, then 12.
const RAMP: &str = "steps = 9\nmicro_batch = 2\nvalidate_every = 0\nbatch_ramp = [{ tokens = 400, global_batch = 8 }, \
                    { tokens = \"1.2K\", global_batch = \"384 tokens\" }]\n";

fn config(dir: &Path, keys: &str) -> Config {
    tiny(dir, "");
    let text = std::fs::read_to_string(dir.join("run.toml")).unwrap().replace("global_batch = 8", "global_batch = 4");
    std::fs::write(dir.join("run.toml"), format!("{text}{keys}")).unwrap();
    Config::load(&dir.join("run.toml"), &[]).unwrap()
}

fn bits(steps: &[StepMetrics]) -> Vec<(u64, u64, u64, u32)> {
    steps.iter().map(|m| (m.step, m.tokens, m.loss.to_bits(), m.grad_norm.to_bits())).collect()
}

#[test]
fn steps_grow_and_tokens_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let steps = run_to(&config(dir.path(), RAMP), &dir.path().join("run"), 9).steps;
    let tokens: Vec<u64> = steps.iter().map(|m| m.tokens / 32).collect();
    assert_eq!(tokens, [4, 8, 12, 16, 24, 32, 40, 52, 64]);
    // The learning rate goes by steps.
    assert_eq!(steps[6].lr, learning_rate(&config(dir.path(), RAMP), 6));
}

#[test]
fn a_step_of_a_ramp_has_the_bits_of_a_program_for_its_size() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let ramped = run_to(&config(dir.path(), RAMP), &dir.path().join("ramped"), 9).steps;
    let fixed = config(dir.path(), "steps = 9\nmicro_batch = 2\nvalidate_every = 0");
    let fixed = run_to(&fixed, &dir.path().join("fixed"), 9).steps;
    assert_eq!(bits(&ramped[..4]), bits(&fixed[..4]));
    assert_ne!(ramped[4].loss, fixed[4].loss);
    // Each later step once more, from a checkpoint before it, by a program for its size alone.
    for (step, sequences, first_sample) in [(4, 8, 16), (6, 8, 32), (7, 12, 40)] {
        let until = dir.path().join(format!("until-{step}"));
        run_to(&config(dir.path(), RAMP), &until, step);
        let set = vec![format!("train.global_batch={sequences}"), "train.batch_ramp=[]".into()];
        let text = config(dir.path(), RAMP).resolved_toml();
        let alone = Config::parse(&text, "run.toml", &set).unwrap();
        let plan = plan(&Devices::new(), &alone).unwrap();
        assert!(plan.smaller_steps.is_empty());
        let mut session = Session::new(&Devices::new(), &alone, &plan).unwrap();
        let path = std::fs::read_dir(until.join("checkpoints")).unwrap().next().unwrap().unwrap().path();
        session.restore(&open(&path).unwrap()).unwrap();
        let folder = data_folder(&alone, &until);
        let stop = AtomicBool::new(false);
        let data = RunData::prepare(&alone, &folder, Existing::Keep, &stop, &mut |_, _| ()).unwrap();
        let bias = |beta: f64| (1.0 - beta.powf((step + 1) as f64)) as f32;
        let scalars = StepScalars {
            lr: learning_rate(&alone, step) as f32,
            inverse_count: 1.0 / (sequences * 32) as f32,
            clip: 1.0,
            bias1: bias(0.9),
            bias2: bias(0.95),
            loss_scale: 1.0,
        };
        let found = session.step(&data.train(&alone).unwrap(), Batch { first_sample, sequences }, scalars).unwrap();
        let expected = &ramped[step as usize];
        assert_eq!((found.loss, found.grad_norm), (expected.loss, expected.grad_norm), "step {step}");
    }
}

#[test]
fn a_run_resumes_anywhere_in_its_ramp_and_in_any_layout() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let at = |layout: &str| config(dir.path(), &format!("{RAMP}reproducible = true\n[parallel]\n{layout}"));
    let whole = run_to(&at(""), &dir.path().join("whole"), 9).steps;
    let legs =
        [("dp = 2\nzero = 1", 2), ("pp = 2", 5), ("dp = 2\nzero = 3", 6), ("pp = 2\nschedule = \"zb-h1\"", 8), ("", 9)];
    let parts = dir.path().join("parts");
    let parts: Vec<StepMetrics> =
        legs.iter().flat_map(|(layout, last)| run_to(&at(layout), &parts, *last).steps).collect();
    assert_eq!(bits(&parts), bits(&whole));
}

#[test]
fn one_arena_serves_all_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let ramped = plan(&Devices::new(), &config(dir.path(), RAMP)).unwrap();
    let text = config(dir.path(), RAMP).resolved_toml();
    let set = ["train.batch_ramp=[]".into(), "train.global_batch=12".into()];
    let largest = plan(&Devices::new(), &Config::parse(&text, "run.toml", &set).unwrap()).unwrap();
    assert_eq!(ramped.memory.total_bytes, largest.memory.total_bytes);
    assert_eq!(ramped.smaller_steps, [2, 4]);
    let slots = |entry: &str| ramped.program().entry(entry).unwrap().schedule.len();
    assert_eq!(slots(StepProgram::TRAIN), 2 * 6 + 1);
    assert_eq!(slots(&StepProgram::train_of(2)), 2 * 2 + 1);
    assert_eq!(slots(&StepProgram::train_of(4)), 2 * 4 + 1);
}
