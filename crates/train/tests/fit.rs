//! What fits a memory: the default micro-batch, the largest one under each policy, layouts side by side, what saves bytes.

use lockstep_config::Config;
use lockstep_ir::Layout;
use lockstep_plan::{PlanError, Room, largest_micro_batches, layout_costs, plan, with_fitting_micro_batch};
use lockstep_train::{Devices, TrainError, settled};

const MODEL: &str = "[model]\nvocab_size = 256\nlayers = 4\ndim = 64\nheads = 4\nkv_heads = 2\nffn = 128\n";

fn config(keys: &str) -> Config {
    let text = format!("{MODEL}[train]\nseq = 64\nglobal_batch = 12\ndevice = \"cpu\"\nthreads = 1\n{keys}");
    Config::parse(&text, "run.toml", &[]).unwrap_or_else(|error| panic!("{error}"))
}

fn arena(config: &Config) -> u64 {
    plan(&Devices::new(), config).unwrap().memory.total_bytes
}

fn room(bytes: u64) -> Room {
    Room { bytes, shared: true, place: "on a test".into() }
}

#[test]
fn the_default_micro_batch_is_the_largest_divisor_that_fits() {
    let whole = config("");
    assert_eq!(with_fitting_micro_batch(&Devices::new(), &whole, &room(arena(&whole))).unwrap().train.micro_batch, 12);
    for expected in [6, 4, 3, 2, 1] {
        let bytes = arena(&config(&format!("micro_batch = {expected}\n")));
        let found = with_fitting_micro_batch(&Devices::new(), &whole, &room(bytes)).unwrap();
        assert_eq!(found.train.micro_batch, expected);
        assert_eq!(arena(&found), bytes);
        let line = format!("micro_batch = {expected}  # default: the largest that fits ");
        assert!(found.resolved_toml().contains(&line), "{}", found.resolved_toml());
    }
    // Nothing fits: the error says what would.
    let least = with_fitting_micro_batch(&Devices::new(), &whole, &room(1000)).unwrap();
    assert_eq!(least.train.micro_batch, 1);
    assert!(
        least.resolved_toml().contains("micro_batch = 1  # default: the least, and more than fits 1000 B on a test")
    );
    // A step never has more micro-batches than a schedule can have.
    let text = format!("{MODEL}[train]\nseq = 64\nglobal_batch = 4194304\ndevice = \"cpu\"\nthreads = 1\n");
    let many = Config::parse(&text, "run.toml", &[]).unwrap();
    assert_eq!(with_fitting_micro_batch(&Devices::new(), &many, &room(1000)).unwrap().train.micro_batch, 64);
    // What somebody gave stays.
    let given = config("micro_batch = 6\n");
    assert_eq!(with_fitting_micro_batch(&Devices::new(), &given, &room(1000)).unwrap().train.micro_batch, 6);
}

#[test]
fn a_run_keeps_the_default_micro_batch_that_it_began_with() {
    let dir = tempfile::tempdir().unwrap();
    let begun =
        with_fitting_micro_batch(&Devices::new(), &config(""), &room(arena(&config("micro_batch = 3\n")))).unwrap();
    std::fs::write(dir.path().join("run.toml"), begun.resolved_toml()).unwrap();
    let resumed = settled(&Devices::new(), &config(""), Some(dir.path())).unwrap();
    assert_eq!(resumed.train.micro_batch, 3);
    assert!(resumed.resolved_toml().contains("micro_batch = 3  # default: as the run began"));
    assert_eq!(settled(&Devices::new(), &config(""), None).unwrap().train.micro_batch, 12);
    assert_eq!(settled(&Devices::new(), &config("micro_batch = 4\n"), Some(dir.path())).unwrap().train.micro_batch, 4);
    // A layout that this micro-batch does not divide takes another.
    let other = config("[parallel]\ndp = 3\n");
    assert_eq!(settled(&Devices::new(), &other, Some(dir.path())).unwrap().train.micro_batch, 4);
}

#[test]
fn the_largest_micro_batch_is_found_under_every_policy() {
    let config = config("micro_batch = 1\n");
    let bytes = 8 << 20;
    let at = |sequences: usize, policy: &str| {
        let text = format!(
            "{MODEL}[train]\nseq = 64\nglobal_batch = {}\nmicro_batch = {sequences}\ndevice = \"cpu\"\nthreads = 1\n\
             [recompute]\npolicy = \"{policy}\"\n",
            12 * sequences
        );
        arena(&Config::parse(&text, "run.toml", &[]).unwrap())
    };
    let rows = largest_micro_batches(&Devices::new(), &config, bytes).unwrap();
    let names: Vec<&str> = rows.iter().map(|r| r.policy.as_str()).collect();
    assert_eq!(names, ["none", "selective", "full", "every-k, k = 2", "sqrt"]);
    for row in &rows[..3] {
        let found = row.micro_batch.unwrap();
        assert_eq!(row.arena_bytes, at(found, &row.policy), "{}", row.policy);
        assert!(row.arena_bytes <= bytes && at(found + 1, &row.policy) > bytes, "{}: {found}", row.policy);
    }
    assert!(rows[2].micro_batch > rows[1].micro_batch && rows[1].micro_batch > rows[0].micro_batch);
    assert!(rows[2].hardware_flops > 1.1 && rows[0].hardware_flops == 1.0);
    let none = largest_micro_batches(&Devices::new(), &config, 1000).unwrap();
    assert!(none.iter().all(|row| row.micro_batch.is_none() && row.arena_bytes > 1000));
}

#[test]
fn layouts_stand_side_by_side_as_their_plans_have_them() {
    let config = config("micro_batch = 3\n");
    let layouts: Vec<Layout> = ["dp=2", "dp=2,zero=3", "tp=2,pp=2"].map(|text| text.parse().unwrap()).to_vec();
    let rows = layout_costs(&Devices::new(), &config, &layouts, Some(&room(1 << 30))).unwrap();
    for (layout, row) in layouts.iter().zip(&rows) {
        let planned = plan(&Devices::new(), &config.at(layout)).unwrap();
        assert_eq!(row.memory, planned.memory, "{layout}");
        assert!(row.sent_bytes > 0 && row.verdict.as_ref().is_some_and(|v| v.fits));
    }
    assert!(rows[1].memory.classes["optimizer"] < rows[0].memory.classes["optimizer"]);
    let small = layout_costs(&Devices::new(), &config, &layouts[..1], Some(&room(1000))).unwrap();
    let verdict = small[0].verdict.clone().unwrap();
    assert!(!verdict.fits && verdict.to_string().starts_with("does NOT fit: "), "{verdict}");
}

#[test]
fn what_does_not_fit_says_what_each_change_saves() {
    // Some thousand times what any machine has.
    let text = "[model]\nvocab_size = 256\nlayers = 8\ndim = 4096\nheads = 32\nffn = 16384\n[train]\nseq = 32768\n\
                global_batch = 4096\nmicro_batch = 1024\ndevice = \"cpu\"\nthreads = 1\n[parallel]\ndp = 2\n";
    let config = Config::parse(text, "run.toml", &[]).unwrap();
    let planned = plan(&Devices::new(), &config).unwrap();
    let Err(TrainError::Plan(error @ PlanError::DoesNotFit { .. })) =
        lockstep_train::Session::new(&Devices::new(), &config, &planned)
    else {
        panic!("it fits?");
    };
    let text = error.to_string();
    let PlanError::DoesNotFit { savings, .. } = &error else { unreachable!() };
    let changes: Vec<&str> = savings.iter().map(|s| s.change.as_str()).collect();
    let expected = [
        "train.micro_batch = 1",
        "recompute.policy = \"selective\"",
        "recompute.policy = \"full\"",
        "precision.policy = \"bf16\"",
        "parallel.zero = 1",
        "parallel.zero = 2",
        "parallel.zero = 3",
        "the last of each key, together",
    ];
    assert!(changes.iter().all(|c| expected.contains(c) || c.starts_with("train.micro_batch = ")), "{changes:?}");
    for change in &expected[1..] {
        assert!(changes.contains(change), "{change} of {changes:?}");
    }
    // Each saves what a plan with it has less.
    let mut changed = config.clone();
    changed.precision.policy = lockstep_config::PrecisionPolicy::Bf16;
    let bf16 = savings.iter().find(|s| s.change.contains("bf16")).unwrap();
    assert_eq!(bf16.saved_bytes, planned.memory.total_bytes - arena(&changed));
    assert!(text.contains("hint: each of these saves memory"), "{text}");
    assert!(text.contains("  precision.policy = \"bf16\"         saves ") || text.contains("bf16\"  "), "{text}");
    // Only what applies: on one rank there is no ZeRO, and bf16 is not offered to bf16.
    let text = text_of("[train]\nseq = 32768\nglobal_batch = 4096\ndevice = \"cpu\"\n[precision]\npolicy = \"bf16\"\n");
    assert!(!text.contains("zero") && !text.contains("bf16\"") && text.contains("train.micro_batch = "), "{text}");
}

fn text_of(keys: &str) -> String {
    let model = "[model]\nvocab_size = 256\nlayers = 8\ndim = 4096\nheads = 32\nffn = 16384\n";
    let config = Config::parse(&format!("{model}{keys}"), "run.toml", &[]).unwrap();
    let planned = plan(&Devices::new(), &config).unwrap();
    lockstep_train::Session::new(&Devices::new(), &config, &planned)
        .err()
        .map_or(String::new(), |error| error.to_string())
}
