//! A checkpoint of any layout is one of every other.

mod common;

use common::write_corpus;
use lockstep_checkpoint::open;
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_ir::Hint;
use lockstep_ir::counter;
use lockstep_ir::graph::State;
use lockstep_ir::program::{Role, Tensor};
use lockstep_ir::{DType, bf16};
use lockstep_plan::plan;
use lockstep_train::{Event, Promise, RunOptions, SaveEnd, SaveRequest, Session, run};
use serde_json::json;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

const MODEL: &str = "[model]\nvocab_size = 259\nlayers = 4\ndim = 32\nheads = 4\nkv_heads = 2\nffn = 48\n";
/// One tensor of its checkpoints holds Q, K and V.
const GPT2: &str =
    "[model]\narchitecture = \"gpt2\"\nvocab_size = 259\nlayers = 4\ndim = 32\nheads = 4\npositions = 13\n";

/// A tiny model over the corpus in `dir`, with extra lines of config and these changes.
fn config(dir: &Path, train: &str, set: &[&str]) -> Config {
    let text = format!(
        "{MODEL}tied_embeddings = true\n[data]\npaths = [\".\"]\nextensions = [\"txt\"]\n[optimizer]\nlr = 3e-3\n\
         warmup_steps = 2\n[train]\nsteps = 8\nseq = 12\nglobal_batch = 8\nthreads = 2\nvalidation_sequences = 8\n{train}\n"
    );
    std::fs::write(dir.join("run.toml"), text).unwrap();
    let set: Vec<String> =
        set.iter().map(|s| format!("{}{s}", if s.contains('.') { "" } else { "parallel." })).collect();
    Config::load(&dir.join("run.toml"), &set).unwrap()
}

/// One line per step: its loss, gradient norm and validation loss.
type Trajectory = Vec<(u64, f64, f32, Option<f64>)>;

/// Runs a config up to a step and gives its trajectory; stopped there, it leaves a checkpoint.
fn run_to(config: &Config, dir: &Path, last: u64) -> Trajectory {
    let stop = AtomicBool::new(false);
    let options = RunOptions { dir: dir.to_owned(), ..RunOptions::default() };
    let mut steps = Vec::new();
    let outcome = run(&Devices::new(), config, &options, &stop, &mut |event| match event {
        Event::Stepped(m) => {
            steps.push((m.step, m.loss, m.grad_norm, m.val_loss));
            stop.store(m.step >= last, Ordering::SeqCst);
        }
        // Of eight documents one is more than was asked for.
        Event::Warning(text) if !text.contains("data.validation_fraction") => panic!("{text}"),
        Event::Trouble { what, error } => panic!("{what}{error}"),
        _ => {}
    });
    assert_eq!(outcome.unwrap().step, last);
    steps
}

/// Runs legs of two steps, each in the layout it names, in one run directory.
fn run_legs(dir: &Path, name: &str, train: &str, legs: &[&[&str]]) -> Trajectory {
    let leg = |(n, set): (usize, &&[&str])| run_to(&config(dir, train, set), &dir.join(name), 2 * (n as u64 + 1));
    legs.iter().enumerate().flat_map(leg).collect()
}

#[test]
fn a_reproducible_run_has_the_same_bits_however_its_layout_changes() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    for precision in ["", "[precision]\npolicy = \"bf16\""] {
        let train = format!("reproducible = true\n{precision}");
        let name = |kind: &str| format!("{kind}-{}", precision.len());
        let whole = run_to(&config(dir.path(), &train, &[]), &dir.path().join(name("whole")), 8);
        let legs: [&[&str]; 4] = [
            &["dp_replicate=2", "dp=2", "zero=3"],
            &["train.micro_batch=2"],
            &["dp=2", "zero=3", "pp=2", "train.micro_batch=2"],
            &["dp=4", "zero=2", "train.micro_batch=1"],
        ];
        assert_eq!(run_legs(dir.path(), &name("changing"), &train, &legs), whole, "{precision}");
    }
}

#[test]
fn dropout_goes_on_where_it_was_in_another_layout() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let model = ["model.architecture=gpt2", "model.kv_heads=4", "model.dropout=0.3"];
    // A micro-batch that is not given would stay as it is, with a warning.
    let two = "train.micro_batch=2";
    let layouts: [&[&str]; 4] = [&["dp=2"], &["pp=2", two], &["dp=4", "zero=3", two], &[two]];
    let legs = layouts.map(|layout| [&model[..], layout].concat());
    let legs: Vec<&[&str]> = legs.iter().map(Vec::as_slice).collect();
    let whole = run_to(&config(dir.path(), "reproducible = true", &model), &dir.path().join("whole"), 8);
    assert_eq!(run_legs(dir.path(), "changing", "reproducible = true", &legs), whole);
    let other = [&model[..2], &["model.dropout=0.2"]].concat();
    let other = run_to(&config(dir.path(), "reproducible = true", &other), &dir.path().join("other"), 8);
    assert!(other.iter().zip(&whole).all(|(a, b)| a.1 != b.1));
}

#[test]
fn stages_and_shared_optimizer_state_may_change_without_a_trace() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let train = "micro_batch = 1";
    for (name, legs) in [
        ("dp", [&["dp=2"][..], &["dp=2", "zero=1"], &["dp=2", "pp=4"], &["dp=2", "zero=1", "pp=2"]]),
        ("tp", [&["tp=2"][..], &["tp=2", "pp=2"], &["tp=2"], &["tp=2", "pp=4"]]),
    ] {
        let whole = run_to(&config(dir.path(), train, legs[0]), &dir.path().join(format!("{name}-whole")), 8);
        assert_eq!(run_legs(dir.path(), &format!("{name}-changing"), train, &legs), whole, "{name}");
    }
}

#[test]
fn a_run_goes_on_in_another_layout_within_the_promised_bounds() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    for (name, precision) in [("fp32", ""), ("bf16", "[precision]\npolicy = \"bf16\"")] {
        let train = format!("micro_batch = 1\n{precision}");
        let begin = config(dir.path(), &train, &["dp=2", "tp=2"]);
        let Promise::Close { loss: bound, .. } = Promise::of(&begin.layout(), &begin) else {
            panic!("tp changes sums")
        };
        let whole = run_to(&begin, &dir.path().join(name), 8);
        for layout in [&["pp=4"][..], &["dp=4", "zero=3"], &["cp=2", "dp=2", "zero=3"], &["train.micro_batch=8"]] {
            let legs = [&["dp=2", "tp=2"][..], &["dp=2", "tp=2"], layout, layout];
            let steps = run_legs(dir.path(), &format!("{name}-{}", layout.join("-")), &train, &legs);
            assert_eq!(steps[..4], whole[..4], "a resume in the same layout leaves no trace");
            for (a, b) in steps.iter().zip(&whole) {
                assert!((a.1 - b.1).abs() <= bound * b.1, "{layout:?} step {}: {} and {}", b.0, a.1, b.1);
            }
            assert_eq!(steps.len(), 8);
        }
    }
}

#[test]
fn a_checkpoint_goes_round_through_every_kind_of_parallelism() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let (train, deep) = ("micro_batch = 1", "model.layers=8");
    let legs: [&[&str]; 4] = [
        &[deep, "cp=2", "tp=2"],
        &[deep, "pp=4", "schedule=interleaved", "virtual=2"],
        &[deep, "dp_replicate=2", "dp=2", "zero=3"],
        &[deep],
    ];
    let whole = run_to(&config(dir.path(), train, &[deep]), &dir.path().join("whole"), 8);
    let steps = run_legs(dir.path(), "round", train, &legs);
    let first = config(dir.path(), train, legs[0]);
    let Promise::Close { loss: bound, .. } = Promise::of(&first.layout(), &first) else { panic!("tp changes sums") };
    assert_eq!(steps.len(), whole.len());
    for (a, b) in steps.iter().zip(&whole) {
        assert!(a.0 == b.0 && (a.1 - b.1).abs() <= bound * b.1, "step {}: {} and {}", b.0, a.1, b.1);
    }
}

/// The tensors of a session's programs that a checkpoint is to bring back, each once.
fn kept(config: &Config) -> Vec<Tensor> {
    let is_kept =
        |t: &&Tensor| matches!(t.role, Role::State(State::Parameter(_) | State::Master { .. } | State::Moment { .. }));
    let mut kept: Vec<Tensor> = Vec::new();
    for tensor in
        plan(&Devices::new(), config).unwrap().compiled.programs.iter().flat_map(|p| &p.tensors).filter(is_kept)
    {
        if kept.iter().all(|t| t.name != tensor.name) {
            kept.push(tensor.clone());
        }
    }
    kept.sort_by(|a, b| a.name.cmp(&b.name));
    kept
}

/// Numbers of a tensor's own; a rounded parameter has those of its original.
fn numbers(seed: u64, tensor: &Tensor, all: &[Tensor]) -> Vec<u8> {
    let name = match &tensor.role {
        Role::State(State::Master { of }) => &all.iter().find(|t| t.value == *of).unwrap().name,
        _ => &tensor.name,
    };
    let value = |i| (counter::bits(counter::key(seed, name), i as u64) >> 40) as f32 / 7.0 - 1e6;
    let values = (0..tensor.whole.elements()).map(value);
    match tensor.whole.dtype {
        DType::BF16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => values.flat_map(f32::to_le_bytes).collect(),
    }
}

/// A layout that the model takes.
fn draw_layout(case: u64, model: &str, precision: &str, tied: bool) -> Config {
    for attempt in 0.. {
        let draw = |i: u64, n: u64| counter::bits(counter::key(case, "layouts"), attempt * 8 + i) % n;
        let power = |i: u64| 1u64 << draw(i, 3);
        let (dp, tp, pp, zero) = (power(0), power(1), power(2), draw(3, 4));
        let (replicas, cp) = (1 + draw(4, 2), 1 + draw(5, 3));
        let text = format!(
            "{model}tied_embeddings = {tied}\n[train]\nseq = 12\nglobal_batch = 8\nmicro_batch = 1\nthreads = 1\n{precision}\n\
             [parallel]\ndp_replicate = {replicas}\ndp = {dp}\ncp = {cp}\ntp = {tp}\npp = {pp}\nzero = {zero}\n"
        );
        if let Some(config) =
            (replicas * dp * cp * tp * pp <= 8).then(|| Config::parse(&text, "run.toml", &[]).ok()).flatten()
        {
            return config;
        }
    }
    unreachable!()
}

/// How many slices a file's part of a tensor takes at most.
fn most_slices(checkpoint: &Path) -> usize {
    let mut most = 0;
    for file in std::fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap().path()) {
        if file.extension().is_some_and(|e| e == "safetensors") {
            let bytes = std::fs::read(file).unwrap();
            let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
            let parts = header.metadata().as_ref().map_or("{}", |m| m["lockstep.parts"].as_str());
            let parts: serde_json::Map<String, serde_json::Value> = serde_json::from_str(parts).unwrap();
            let slices = parts.values().map(|part| part["slices"].as_array().unwrap().len());
            most = slices.fold(most, usize::max);
        }
    }
    most
}

fn request(dir: &Path, step: u64) -> SaveRequest {
    SaveRequest { dir: dir.to_owned(), step, state: json!({}), attachments: vec![], keep: 1.into(), mirror: None }
}

/// The names and bytes of the files of a folder.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entry = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    };
    let mut files: Vec<_> = folder.read_dir().unwrap().map(entry).collect();
    files.sort();
    files
}

#[test]
fn a_save_in_the_background_that_fails_says_why_and_the_next_may_succeed() {
    for set in [&[][..], &["dp=2", "zero=1"]] {
        let dir = tempfile::tempdir().unwrap();
        write_corpus(dir.path());
        let config = config(dir.path(), "", set);
        let mut session = Session::new(&Devices::new(), &config, &plan(&Devices::new(), &config).unwrap()).unwrap();
        session.reserve_snapshot().unwrap();
        std::fs::write(dir.path().join("file"), "in the way").unwrap();
        session.begin_save(request(&dir.path().join("file"), 3)).unwrap();
        assert!(session.begin_save(request(dir.path(), 4)).is_err(), "one at a time");
        match session.wait_save(&mut |_, _| {}).unwrap() {
            Some(SaveEnd::Failed { step: 3, cause, .. }) => {
                assert!(cause.to_string().contains("file") && cause.hint().is_some(), "{cause}")
            }
            end => panic!("{end:?}"),
        }
        session.begin_save(request(&dir.path().join("checkpoints"), 4)).unwrap();
        // Whoever drops a session waits for what it writes.
        drop(session);
        assert_eq!(open(&dir.path().join("checkpoints/step-00000004")).unwrap().step, 4);
    }
}

#[test]
fn what_any_layout_saves_any_other_loads() {
    let (dir, background) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for case in 0..36u64 {
        let model = if case % 3 == 2 { GPT2 } else { MODEL };
        let (precision, tied) = (["", "[precision]\npolicy = \"bf16\""][case as usize % 2], case % 4 < 2);
        let [from, to] = [2 * case, 2 * case + 1].map(|n| draw_layout(n, model, precision, tied));
        let what = format!("{} to {}, {precision}", from.layout(), to.layout());
        let planned = plan(&Devices::new(), &from).unwrap();
        let mut session = Session::new(&Devices::new(), &from, &planned).unwrap();
        let saved = kept(&from);
        for tensor in &saved {
            session.executor().write(&tensor.name, 0, &numbers(case, tensor, &saved)).unwrap();
        }
        let (mut last, mut all) = (0, 0);
        let path =
            session.save(dir.path(), case, &json!({}), 1, &mut |done, total| (last, all) = (done, total)).unwrap();
        assert_eq!(last, all, "{what}");
        // In the background, the same bytes, whatever becomes of the tensors meanwhile.
        let bytes = session.reserve_snapshot().unwrap();
        let by_rank: u64 = (0..from.layout().mesh.ranks()).map(|rank| planned.snapshot_bytes(rank)).sum();
        assert_eq!((bytes, by_rank), (planned.checkpoint_bytes(), all), "{what}");
        session.begin_save(request(background.path(), case)).unwrap();
        for tensor in &saved {
            let zeros = vec![0; tensor.whole.bytes() as usize];
            session.executor().write(&tensor.name, 0, &zeros).unwrap();
        }
        let Some(SaveEnd::Saved { path: copy, .. }) = session.wait_save(&mut |_, _| {}).unwrap() else {
            panic!("{what}: not saved")
        };
        assert_eq!(files(&copy), files(&path), "{what}");
        drop(session);

        let loaded = open(&path).unwrap_or_else(|e| panic!("{what}: {e}"));
        let mut session = Session::new(&Devices::new(), &to, &plan(&Devices::new(), &to).unwrap()).unwrap();
        session.restore(&loaded).unwrap_or_else(|e| panic!("{what}: {e}"));
        let restored = kept(&to);
        for tensor in &restored {
            let read = session.executor().read(&tensor.name, 0).unwrap();
            assert_eq!(*read, numbers(case, tensor, &restored), "{what}: {}", tensor.name);
        }
        let ranks = from.layout().mesh.ranks();
        let files = [("model", 0), ("optimizer", 0), ("model", ranks), ("optimizer", ranks)]
            .map(|(group, rank)| path.join(format!("{group}-{rank:05}.safetensors")).exists());
        assert_eq!(files, [ranks > 1, ranks > 1, false, false], "{what}");
        let most = most_slices(&path);
        assert!(most <= 3, "{what}: a part of a tensor takes {most} slices");
    }
}
