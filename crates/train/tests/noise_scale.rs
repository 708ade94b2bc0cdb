//! The gradient noise scale of whole runs, against gradients computed one by one.

mod common;

use common::{Ran, run_to, tiny, write_corpus};
use lockstep_config::{Batch, Config};
use lockstep_host::Devices;
use lockstep_infer::{Existing, RunData, data_folder};
use lockstep_ir::{StepScalars, counter};
use lockstep_model::names;
use lockstep_plan::plan;
use lockstep_train::{Session, StepMetrics};
use std::sync::atomic::AtomicBool;

fn config(tied: bool, keys: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 67\nlayers = 4\ndim = 16\nheads = 4\nkv_heads = 2\nffn = 24\ntied_embeddings = {tied}\n\
         [train]\nseq = 8\nglobal_batch = 8\nmicro_batch = 1\nthreads = 2\n{keys}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

const FROZEN: StepScalars =
    StepScalars { lr: 0.0, inverse_count: 1.0, clip: f32::INFINITY, bias1: 1.0, bias2: 1.0, loss_scale: 1.0 };

/// Writes sequences, each known by a number, and runs a step that moves nothing.
fn measure(config: &Config, sequences: &[u64]) -> (f64, Option<(f64, f64)>) {
    let plan = plan(&Devices::new(), config).unwrap();
    let mut session = Session::new(&Devices::new(), config, &plan).unwrap();
    for (m, chunk) in sequences.chunks(config.round()).enumerate() {
        for name in [names::TOKENS, names::TARGETS] {
            let id = |sequence: u64, i: u64| (counter::bits(counter::key(sequence, name), i) % 67) as u32;
            let all = chunk.iter().flat_map(|s| (0..8).flat_map(move |i| id(*s, i).to_le_bytes()));
            session.executor().write(name, m, &all.collect::<Vec<u8>>()).unwrap();
        }
    }
    let inverse_count = 1.0 / (8 * sequences.len()) as f32;
    let found = session.run_step(StepScalars { inverse_count, ..FROZEN }).unwrap();
    (f64::from(found.grad_norm).powi(2), found.first.map(|f| (f.sequences, f.square)))
}

/// The squared norm of the mean gradient over these sequences.
fn square(tied: bool, sequences: &[u64]) -> f64 {
    let set = vec![format!("train.global_batch={}", sequences.len())];
    let config = Config::parse(&config(tied, "").resolved_toml(), "run.toml", &set).unwrap();
    measure(&config, sequences).0
}

#[test]
fn the_first_gradient_is_that_of_the_first_micro_batch() {
    let sequences: Vec<u64> = (0..8).collect();
    for tied in [false, true] {
        let close = |found: f64, expected: f64, what: &str| {
            assert!((found / expected - 1.0).abs() < 1e-4, "{what}, tied {tied}: {found}, not {expected}");
        };
        for keys in ["", "reproducible = true"] {
            let (all, first) = measure(&config(tied, &format!("noise_scale = true\n{keys}")), &sequences);
            close(all, square(tied, &sequences), "all");
            let (count, first) = first.unwrap();
            assert_eq!(count, 1.0);
            close(first, square(tied, &[0]), "first");
        }
        // Each rank has a gradient of its own, or both have one together.
        for (zero, own) in [(0, true), (1, true), (2, false), (3, false)] {
            let keys = format!("noise_scale = true\n[parallel]\ndp = 2\nzero = {zero}");
            let (all, first) = measure(&config(tied, &keys), &sequences);
            close(all, square(tied, &sequences), "all");
            let (count, first) = first.unwrap();
            let expected = match own {
                true => (square(tied, &[0]) + square(tied, &[1])) / 2.0,
                false => square(tied, &[0, 1]),
            };
            assert_eq!(count, if own { 1.0 } else { 2.0 });
            close(first, expected, &format!("first, zero {zero}"));
        }
        // Two groups of ranks have a gradient each.
        let keys = "noise_scale = true\n[parallel]\ndp_replicate = 2\ndp = 2\nzero = 2";
        let (all, first) = measure(&config(tied, keys), &sequences);
        close(all, square(tied, &sequences), "all of two groups");
        let (count, first) = first.unwrap();
        assert_eq!(count, 2.0);
        close(first, (square(tied, &[0, 1]) + square(tied, &[2, 3])) / 2.0, "first of two groups");
        assert_eq!(measure(&config(tied, ""), &sequences).1, None);
    }
}

#[test]
fn ranks_that_split_matrices_and_layers_measure_the_same() {
    let sequences: Vec<u64> = (0..8).collect();
    let mean = |tied: bool, groups: &[&[u64]]| -> f64 {
        groups.iter().map(|group| square(tied, group)).sum::<f64>() / groups.len() as f64
    };
    // A layout, and the sequences whose gradients are measured, each group's on its own. On four ranks neighbours share a key head.
    let layouts: [(&str, bool, &[&[u64]]); 31] = [
        ("tp = 2", true, &[&[0]]),
        ("tp = 4\nsequence_parallel = true", true, &[&[0]]),
        ("tp = 4", false, &[&[0]]),
        ("dp = 2\nzero = 1\ntp = 4", true, &[&[0], &[1]]),
        ("dp = 2\nzero = 2\ntp = 2\nsequence_parallel = true", true, &[&[0, 1]]),
        ("dp = 2\nzero = 3\ntp = 4", false, &[&[0, 1]]),
        ("cp = 2", true, &[&[0]]),
        ("dp = 2\nzero = 1\ncp = 2\ntp = 4", false, &[&[0], &[1]]),
        ("dp = 2\nzero = 3\ncp = 2\npp = 2", false, &[&[0, 1]]),
        ("pp = 2", false, &[&[0]]),
        ("pp = 2\nschedule = \"gpipe\"", false, &[&[0]]),
        ("pp = 2\nschedule = \"interleaved\"", false, &[&[0]]),
        ("pp = 2\nschedule = \"zb-h1\"", false, &[&[0]]),
        ("dp = 2\nzero = 2\npp = 2\nschedule = \"zb-v\"", false, &[&[0, 1]]),
        ("dp = 2\npp = 2\nschedule = \"gpipe\"", false, &[&[0], &[1]]),
        ("dp = 2\nzero = 2\npp = 2", false, &[&[0, 1]]),
        ("dp_replicate = 2\ndp = 2\nzero = 3\npp = 2", false, &[&[0, 1], &[2, 3]]),
        ("tp = 4\nsequence_parallel = true\npp = 2", false, &[&[0]]),
        // A table whose two gradients lie on two stages, or with zb-v on one.
        ("pp = 2", true, &[&[0]]),
        ("pp = 4", true, &[&[0]]),
        ("pp = 2\nschedule = \"gpipe\"", true, &[&[0]]),
        ("pp = 2\nschedule = \"interleaved\"", true, &[&[0]]),
        ("pp = 2\nschedule = \"zb-h1\"", true, &[&[0]]),
        ("pp = 2\nschedule = \"zb-v\"", true, &[&[0]]),
        ("dp = 2\nzero = 1\npp = 2", true, &[&[0], &[1]]),
        ("dp = 2\nzero = 2\npp = 2", true, &[&[0, 1]]),
        ("dp = 2\nzero = 1\ncp = 2\npp = 2", true, &[&[0], &[1]]),
        ("dp = 2\nzero = 2\npp = 2\nschedule = \"zb-v\"", true, &[&[0, 1]]),
        ("dp = 2\nzero = 3\ncp = 2\npp = 2", true, &[&[0, 1]]),
        ("cp = 2\npp = 2", true, &[&[0]]),
        ("tp = 4\nsequence_parallel = true\npp = 2", true, &[&[0]]),
    ];
    for (layout, tied, groups) in layouts {
        let keys = format!("noise_scale = true\n[parallel]\n{layout}");
        let (all, first) = measure(&config(tied, &keys), &sequences);
        let (count, first) = first.unwrap();
        assert_eq!(count, groups[0].len() as f64, "{layout}");
        for (what, found, expected) in [("all", all, square(tied, &sequences)), ("first", first, mean(tied, groups))] {
            assert!((found / expected - 1.0).abs() < 1e-4, "{what} of {layout}: {found}, not {expected}");
        }
    }
}

#[test]
fn a_step_of_equal_sequences_has_no_noise() {
    let (all, first) = measure(&config(true, "noise_scale = true"), &[5; 8]);
    let (_, first) = first.unwrap();
    assert!((first / all - 1.0).abs() < 1e-5, "{first} and {all}");
}

#[test]
fn a_run_reports_it_and_goes_on_with_it() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let keys = "steps = 8\nmicro_batch = 1\nvalidate_every = 0\n";
    let measured = tiny(dir.path(), &format!("{keys}noise_scale = true"));
    let Ran { outcome, steps: whole, .. } = run_to(&measured, &dir.path().join("whole"), 8);
    let parts = dir.path().join("parts");
    let parts = [run_to(&measured, &parts, 3).steps, run_to(&measured, &parts, 8).steps].concat();
    let noise = |m: &StepMetrics| (m.loss.to_bits(), m.noise_scale.map(f64::to_bits));
    assert_eq!(parts.iter().map(noise).collect::<Vec<_>>(), whole.iter().map(noise).collect::<Vec<_>>());
    let last = &whole[7];
    assert_eq!(outcome.noise_scale, last.noise_scale);
    assert!(last.noise_scale.unwrap() > 0.0);
    assert_eq!(last.critical_batch_tokens.unwrap(), last.noise_scale.unwrap() * 32.0);
    // It is looked at, and changes nothing.
    let plain = run_to(&tiny(dir.path(), keys), &dir.path().join("plain"), 8).steps;
    assert!(plain.iter().all(|m| m.noise_scale.is_none()));
    let losses = |steps: &[StepMetrics]| steps.iter().map(|m| m.loss.to_bits()).collect::<Vec<_>>();
    assert_eq!(losses(&plain), losses(&whole));
}

#[test]
fn steps_of_a_ramp_are_measured_at_their_own_size() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let ramp = "steps = 6\nmicro_batch = 2\nvalidate_every = 0\nnoise_scale = true\n\
                batch_ramp = [{ tokens = 300, global_batch = 16 }]";
    let config = tiny(dir.path(), ramp);
    let plan = plan(&Devices::new(), &config).unwrap();
    let mut session = Session::new(&Devices::new(), &config, &plan).unwrap();
    let folder = data_folder(&config, dir.path());
    let data = RunData::prepare(&config, &folder, Existing::Refresh, &AtomicBool::new(false), &mut |_, _| ()).unwrap();
    let data = data.train(&config).unwrap();
    let mut squares = |sequences: usize| {
        let inverse_count = 1.0 / (sequences * 32) as f32;
        let batch = Batch { first_sample: 0, sequences };
        session.step(&data, batch, StepScalars { inverse_count, ..FROZEN }).unwrap().first.unwrap().square
    };
    let (small, large) = (squares(8), squares(16));
    assert!((small / large - 1.0).abs() < 1e-5, "{small} and {large}");
}
