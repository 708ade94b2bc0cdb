//! A run on an executor that answers late, as a GPU does, against the same run on the CPU.

use super::*;
use crate::metrics::GpuMetrics;
use lockstep_checkpoint::latest;
use lockstep_compile::STATS;
use lockstep_exec::{DeviceTime, ExecError, Executor, Taken, Ticket, Timing};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Results are as they were when they were asked for. While steps are under way, nothing but a next step may be asked for.
struct Late {
    inner: Box<dyn Executor>,
    under_way: VecDeque<(u64, Vec<Vec<u8>>)>,
    readings: u64,
    /// A reading that says that the update was left out.
    spoiled: Option<u64>,
    /// Whether it has a clock.
    clock: bool,
    /// Most steps that were under way at a time.
    most: Arc<AtomicUsize>,
}

impl Executor for Late {
    fn host_bytes(&self) -> u64 {
        0
    }

    fn arena_bytes(&self) -> u64 {
        self.inner.arena_bytes()
    }

    fn write(&mut self, tensor: &str, micro_batch: usize, data: &[u8]) -> Result<(), ExecError> {
        self.inner.write(tensor, micro_batch, data)
    }

    fn read(&self, tensor: &str, micro_batch: usize) -> Result<Cow<'_, [u8]>, ExecError> {
        assert!(self.under_way.is_empty(), "`{tensor}` is read while a step is under way");
        self.inner.read(tensor, micro_batch)
    }

    fn run(&mut self, entry: &str) -> Result<(), ExecError> {
        assert!(self.under_way.is_empty() || entry.starts_with("train"), "`{entry}` runs while a step is under way");
        self.inner.run(entry)
    }

    fn profile(&mut self, entry: &str) -> Result<Vec<Timing>, ExecError> {
        self.inner.profile(entry)
    }

    fn read_later(&mut self, tensors: &[(String, usize)]) -> Result<Option<Ticket>, ExecError> {
        let number = self.readings;
        self.readings += 1;
        let mut all = Vec::new();
        for (name, m) in tensors.iter().flat_map(|(name, count)| (0..*count).map(move |m| (name, m))) {
            let mut bytes = self.inner.read(name, m)?.into_owned();
            if self.spoiled == Some(number) && name == STATS {
                bytes[4..].copy_from_slice(&f32::NAN.to_le_bytes());
            }
            all.push(bytes);
        }
        self.under_way.push_back((number, all));
        self.most.fetch_max(self.under_way.len(), Ordering::SeqCst);
        Ok(Some(Ticket(number)))
    }

    fn take(&mut self, ticket: Ticket) -> Result<Taken, ExecError> {
        let (number, tensors) = self.under_way.pop_front().expect("a reading was queued");
        assert_eq!(number, ticket.0);
        // A device whose steps take a second each, whatever the host sees.
        let time = DeviceTime { since_begin: 1.0, since_last: Some(1.0) };
        Ok(Taken { tensors, time: self.clock.then_some(time) })
    }
}

fn config(dir: &Path, keys: &str) -> Config {
    let text: String = (0..900).map(|i| format!("{} times {} is {}.\n", i % 31, i % 17, (i % 31) * (i % 17))).collect();
    std::fs::write(dir.join("all.txt"), text).unwrap();
    let toml = format!(
        "[model]\nvocab_size = 256\nlayers = 1\ndim = 16\nheads = 2\nffn = 32\n[data]\npaths = [\".\"]\n\
         extensions = [\"txt\"]\n[optimizer]\nlr = 3e-3\n[train]\nseq = 16\nglobal_batch = 4\nmicro_batch = 2\nthreads = 1\n{keys}\n"
    );
    std::fs::write(dir.join("run.toml"), toml).unwrap();
    Config::load(&dir.join("run.toml"), &[]).unwrap()
}

/// How a run is to go.
#[derive(Clone, Copy, Default)]
struct How {
    late: bool,
    spoiled: Option<u64>,
    clock: bool,
    /// The step at which it is told to stop.
    stop_at: Option<u64>,
}

/// What is seen of a run: events and files without times and speeds, saves last.
struct Seen {
    outcome: Result<Outcome, TrainError>,
    events: Vec<String>,
    files: Vec<String>,
    most: usize,
    /// Tokens done and tokens in all, while validations went on.
    validating: Vec<(u64, u64)>,
}

fn go(config: &Config, dir: &Path, how: How) -> Seen {
    let (stop, most) = (AtomicBool::new(false), Arc::new(AtomicUsize::new(0)));
    let (mut events, mut validating) = (Vec::new(), Vec::new());
    let mut show = |event: Event| match event {
        Event::Stepped(m) => {
            events.push(format!(
                "stepped {}: {:x} {:x} {:?}",
                m.step,
                m.loss.to_bits(),
                m.grad_norm.to_bits(),
                m.val_loss
            ));
            assert_eq!(m.gpu, GpuMetrics::default());
            stop.fetch_or(how.stop_at == Some(m.step), Ordering::SeqCst);
        }
        Event::Skipped(skipped) => events.push(format!("skipped {}", skipped.step)),
        Event::Validated { step, loss } => events.push(format!("validated {step}: {loss}")),
        Event::Saved { step, .. } => events.push(format!("saved {step}")),
        Event::Validating { done, total } => validating.push((done, total)),
        _ => {}
    };
    let devices = Devices::new();
    let asked = StopSignal::new(&stop, devices.group());
    let plan = plan(&devices, config).unwrap();
    let options = RunOptions { dir: dir.to_owned(), ..RunOptions::default() };
    let (found, course) = resume(&devices, config, &options, None).unwrap();
    let mut run = start::start(
        &course,
        (&plan, &devices),
        RunDir::open(dir).unwrap(),
        found,
        (&options, None),
        &asked,
        &mut show,
    )
    .unwrap();
    if how.late {
        run.session = run.session.with_executor(|inner| {
            let most = most.clone();
            Box::new(Late {
                inner,
                under_way: VecDeque::new(),
                readings: 0,
                spoiled: how.spoiled,
                clock: how.clock,
                most,
            })
        });
    }
    let outcome = run.go(&asked, &mut show);
    let lines = ["metrics.jsonl", "events.jsonl"].map(|name| std::fs::read_to_string(dir.join(name)).unwrap());
    let without_times = |line: &str| {
        let mut value: serde_json::Value = serde_json::from_str(line).unwrap();
        let fields = value.as_object_mut().unwrap();
        ["step_s", "data_wait_s", "tokens_per_s", "mfu", "unix_s", "peak_flops", "ceiling_flops", "stall_s", "save_s"]
            .iter()
            .for_each(|key| drop(fields.remove(*key)));
        value.to_string()
    };
    let mut files: Vec<String> = lines.iter().flat_map(|text| text.lines().map(without_times)).collect();
    // Between which steps a save in the background ends is a matter of time.
    files.sort_by_key(|line| line.contains("\"event\":\"checkpoint\""));
    events.sort_by_key(|event| event.starts_with("saved"));
    Seen { outcome, events, files, most: most.load(Ordering::SeqCst), validating }
}

fn updates(seen: &Seen) -> u64 {
    let path = seen.outcome.as_ref().unwrap().checkpoint.clone().unwrap();
    let loaded = latest(path.parent().unwrap()).unwrap().loaded.unwrap();
    loaded.state["updates"].as_u64().unwrap()
}

#[test]
fn a_run_that_is_a_step_ahead_writes_what_another_writes() {
    let dir = tempfile::tempdir().unwrap();
    let keys = "steps = 15\nvalidate_every = 4\nvalidation_sequences = 4\nnoise_scale = true\n[checkpoint]\nevery = 6";
    let config = config(dir.path(), keys);
    let plain = go(&config, &dir.path().join("plain"), How::default());
    let late = go(&config, &dir.path().join("late"), How { late: true, ..How::default() });
    assert_eq!(late.events, plain.events);
    assert_eq!(late.files, plain.files);
    // Every sequence of a validation is told: here of 4 with 16 tokens each, before the first step and after 4, 8, 12 and 15.
    assert_eq!(plain.validating, [(16, 64), (32, 64), (48, 64), (64, 64)].repeat(5));
    assert_eq!((plain.most, late.most), (0, 2));
    assert_eq!([updates(&plain), updates(&late)], [15, 15]);
    let order: Vec<&str> = plain.events.iter().filter_map(|e| e.split(':').next()).collect();
    assert_eq!(
        order[..7],
        ["validated 0", "stepped 1", "stepped 2", "stepped 3", "validated 4", "stepped 4", "stepped 5"]
    );
    assert_eq!(order[order.len() - 5..], ["validated 15", "stepped 15", "saved 6", "saved 12", "saved 15"]);
}

#[test]
fn the_time_of_a_step_is_the_devices_up_to_the_last() {
    let dir = tempfile::tempdir().unwrap();
    let keys = "steps = 9\nvalidate_every = 4\nvalidation_sequences = 4\n[checkpoint]\nevery = 6";
    let config = config(dir.path(), keys);
    let run = dir.path().join("run");
    go(&config, &run, How { late: true, clock: true, ..How::default() }).outcome.unwrap();
    let lines = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let times: Vec<f64> = lines
        .lines()
        .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()["step_s"].as_f64().unwrap())
        .collect();
    // Those that begin after nothing have what the host did before, here much less than a second.
    assert!(times.len() == 9 && times.iter().all(|t| (1.0..1.5).contains(t)), "{times:?}");
    assert_eq!(times.iter().filter(|t| **t == 1.0).count(), 5, "{times:?}");
}

#[test]
fn a_run_that_is_stopped_ends_with_the_step_that_was_queued() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "steps = 12\nvalidate_every = 0\n[checkpoint]\nevery = 0");
    let whole = go(&config, &dir.path().join("whole"), How::default());
    let stopped = dir.path().join("stopped");
    let first = go(&config, &stopped, How { late: true, stop_at: Some(5), ..How::default() });
    let outcome = first.outcome.as_ref().unwrap();
    assert_eq!((outcome.step, outcome.finished, updates(&first)), (6, false, 6));
    assert_eq!(first.events.last().unwrap(), "saved 6");
    let second = go(&config, &stopped, How { late: true, ..How::default() });
    let steps = |seen: &Seen| seen.events.iter().filter(|e| e.starts_with("stepped")).cloned().collect::<Vec<_>>();
    // Validation losses aside, of which a new call takes one.
    let both: Vec<String> = [steps(&first), steps(&second)].concat();
    assert_eq!(both, steps(&whole));
}

#[test]
fn a_step_that_is_left_out_is_told_once_and_not_counted() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "steps = 8\nvalidate_every = 0\n[checkpoint]\nevery = 0");
    let seen = go(&config, &dir.path().join("run"), How { late: true, spoiled: Some(3), ..How::default() });
    let order: Vec<&str> = seen.events.iter().filter_map(|e| e.split(':').next()).collect();
    assert_eq!(order[4..7], ["skipped 4", "stepped 4", "stepped 5"]);
    assert_eq!(updates(&seen), 7);
}

#[test]
fn gradients_that_stay_without_bounds_end_a_run_that_is_ahead() {
    let dir = tempfile::tempdir().unwrap();
    let calm = config(dir.path(), "steps = 12\nvalidate_every = 0");
    let wild = Config::parse(&calm.resolved_toml(), "run.toml", &["model.init_std=1e30".to_owned()]).unwrap();
    let [plain, late] =
        [false, true].map(|late| go(&wild, &dir.path().join(format!("{late}")), How { late, ..How::default() }));
    for seen in [&plain, &late] {
        assert!(matches!(seen.outcome, Err(TrainError::Diverged { steps: 3, step: 3, .. })), "{:?}", seen.outcome);
    }
    assert_eq!(late.files, plain.files);
    assert_eq!(late.events, plain.events);
}
