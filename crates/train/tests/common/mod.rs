//! Small runs for tests.

use lockstep_config::{Config, DeviceChoice, legal};
use lockstep_host::Devices;
use lockstep_ir::Layout;
use lockstep_train::{Comparison, Event, Outcome, RunOptions, StepMetrics, TrainError, compare, run};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Text with some structure, about 60 kB.
#[allow(dead_code)] // not every test binary trains on text
pub fn write_corpus(dir: &Path) {
    let line = |i: u64| format!("line {i}: the square of {} is {}, and so on.\n", i % 97, (i % 97) * (i % 97));
    for file in 0..8u64 {
        let text: String = (0..180).map(|i| line(i * 7 + file * 31)).collect();
        std::fs::write(dir.join(format!("{file}.txt")), text).unwrap();
    }
}

/// A tiny model over the corpus in `dir`, with extra lines of config.
#[allow(dead_code)] // not every test binary wants this model
pub fn tiny(dir: &Path, train: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 256\nlayers = 2\ndim = 48\nheads = 4\nkv_heads = 2\nffn = 96\ntied_embeddings = true\n\
         [data]\npaths = [\".\"]\nextensions = [\"txt\"]\n[optimizer]\nlr = 3e-3\nwarmup_steps = 4\n\
         [train]\nseq = 32\nglobal_batch = 8\n{train}\n"
    );
    std::fs::write(dir.join("run.toml"), text).unwrap();
    Config::load(&dir.join("run.toml"), &[]).unwrap()
}

/// Runs a config to its end and gives (loss, gradient norm, validation loss) of every step.
#[allow(dead_code)] // not every test binary wants losses
pub fn losses(config: &Config, run_dir: &Path) -> Vec<(f64, f32, Option<f64>)> {
    let mut losses = Vec::new();
    run_with(config, run_dir, &mut |event| {
        if let Event::Stepped(m) = event {
            losses.push((m.loss, m.grad_norm, m.val_loss));
        }
    })
    .unwrap();
    losses
}

/// What a run gave up to a step.
#[allow(dead_code)] // not every test binary looks at all of it
pub struct Ran {
    pub outcome: Outcome,
    pub steps: Vec<StepMetrics>,
    /// Steps whose update was not applied.
    pub skipped: Vec<u64>,
}

/// Runs a config up to a step; stopped there, it leaves a checkpoint.
#[allow(dead_code)] // not every test binary stops runs
pub fn run_to(config: &Config, run_dir: &Path, last: u64) -> Ran {
    let stop = AtomicBool::new(false);
    let options = RunOptions { dir: run_dir.to_owned(), ..RunOptions::default() };
    let (mut steps, mut skipped) = (Vec::new(), Vec::new());
    let outcome = run(&Devices::new(), config, &options, &stop, &mut |event| match event {
        Event::Stepped(m) => {
            steps.push(m.clone());
            stop.store(m.step >= last, Ordering::SeqCst);
        }
        Event::Skipped(of) => skipped.push(of.step),
        _ => {}
    })
    .unwrap();
    // On a device the next step is under way when a result is there.
    let ahead = u64::from(config.train.device == DeviceChoice::Cuda);
    assert!((last..=last + ahead).contains(&outcome.step), "stopped after step {} of {last}", outcome.step);
    Ran { outcome, steps, skipped }
}

/// Runs a config with an observer.
pub fn run_with(config: &Config, run_dir: &Path, show: &mut dyn FnMut(Event)) -> Result<Outcome, TrainError> {
    let options = RunOptions { dir: run_dir.to_owned(), ..RunOptions::default() };
    run(&Devices::new(), config, &options, &AtomicBool::new(false), show)
}

/// Compares layouts with one rank; each must fit, and keep its promise.
#[allow(dead_code)] // not every test binary compares layouts
pub fn check_layouts(config: &Config, layouts: &[&str]) -> Vec<Comparison> {
    let layouts: Vec<Layout> = layouts.iter().map(|l| l.parse().unwrap()).collect();
    for layout in &layouts {
        assert_eq!(legal::check(layout, &config.extents()), [], "{layout}");
    }
    let found = compare(&Devices::new(), config, &layouts, 3, &mut |_| ()).unwrap();
    let broken: Vec<&Comparison> = found.iter().filter(|c| !c.kept).collect();
    assert!(broken.is_empty(), "{broken:#?}");
    found
}
