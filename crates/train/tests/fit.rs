//! What fits a memory: the default micro-batch, the largest one under each policy, layouts side by side, what saves bytes.

use lockstep_config::Config;
use lockstep_host::{Devices, HostError};
use lockstep_ir::Hint;
use lockstep_ir::Layout;
use lockstep_plan::{
    PlanError, Rates, Room, largest_micro_batches, layout_costs, plan, ways_to_fit, with_fitting_micro_batch,
};
use lockstep_sim::{Catalogue, Constants, Framework, Hardware, simulate};
use lockstep_train::{TrainError, settled};

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
    let resumed = settled(&Devices::new(), &config(""), Some(dir.path()), &mut |_, _| {}).unwrap();
    assert_eq!(resumed.train.micro_batch, 3);
    assert!(resumed.resolved_toml().contains("micro_batch = 3  # default: as the run began"));
    assert_eq!(settled(&Devices::new(), &config(""), None, &mut |_, _| {}).unwrap().train.micro_batch, 12);
    assert_eq!(
        settled(&Devices::new(), &config("micro_batch = 4\n"), Some(dir.path()), &mut |_, _| {})
            .unwrap()
            .train
            .micro_batch,
        4
    );
    // A layout that this micro-batch does not divide takes another.
    let other = config("[parallel]\ndp = 3\n");
    assert_eq!(settled(&Devices::new(), &other, Some(dir.path()), &mut |_, _| {}).unwrap().train.micro_batch, 4);
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

const WIDE: &str = "[model]\nvocab_size = 256\nlayers = 8\ndim = 1024\nheads = 8\nffn = 4096\n[train]\nseq = 4096\n\
                    global_batch = 64\nmicro_batch = 8\ndevice = \"cpu\"\nthreads = 1\n";

fn wide(keys: &str) -> Config {
    Config::parse(&format!("{WIDE}{keys}"), "run.toml", &[]).unwrap_or_else(|error| panic!("{error}"))
}

/// The config with the keys of a change.
fn with(keys: &str, change: &[String]) -> Config {
    let overrides: Vec<String> = change.iter().map(|key| key.replacen(" = ", "=", 1)).collect();
    Config::parse(&format!("{WIDE}{keys}"), "run.toml", &overrides).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn what_does_not_fit_is_told_the_cheapest_changes_that_do() {
    let devices = Devices::new();
    let h100 = Hardware::assumed(Catalogue::builtin().gpu("h100").unwrap());
    let keys = "[parallel]\ndp = 4\n[precision]\npolicy = \"bf16\"\n";
    let config = wide(keys);
    let before = arena(&config);
    let room = Room { bytes: before / 2, shared: false, place: "on a test".into() };
    let ways = ways_to_fit(&devices, &config, &room, Some(Rates::Catalogue(&h100))).unwrap();
    assert_eq!((ways.changes.len(), &ways.nearest, ways.needed_bytes), (3, &None, before), "{ways:?}");
    let seconds = |config: &Config| {
        let planned = plan(&devices, config).unwrap();
        let (programs, framework) = (&planned.compiled.programs, Framework::lockstep());
        simulate(programs, "train", &planned.asked(), &h100, &framework, &Constants::builtin()).unwrap().step_s
    };
    for change in &ways.changes {
        // The keys can be set, and the arena and the time are those of a plan with them.
        let changed = with(keys, &change.keys);
        assert_eq!(arena(&changed), change.arena_bytes, "{change:?}");
        assert_eq!(before - change.arena_bytes, change.saved_bytes, "{change:?}");
        assert!(change.arena_bytes <= room.bytes && !change.other_numbers, "{change:?}");
        let slowdown = seconds(&changed) / seconds(&config) - 1.0;
        assert!((slowdown - change.slowdown).abs() < 1e-6, "{change:?}: {slowdown}");
    }
    let slowdowns: Vec<f64> = ways.changes.iter().map(|change| change.slowdown).collect();
    assert!(slowdowns.windows(2).all(|pair| pair[0] <= pair[1] + 1e-3), "{slowdowns:?}");
    // None is another one with something more to set.
    assert!(!ways.changes[0].keys.iter().all(|key| ways.changes[1].keys.contains(key)), "{ways:?}");
    // What is alone cheaper than all that was chosen does not fit.
    for alone in ["train.micro_batch = 4", "recompute.policy = \"selective\"", "parallel.zero = 1"] {
        let changed = with(keys, &[alone.to_owned()]);
        let fits = arena(&changed) <= room.bytes;
        assert!(!fits || seconds(&changed) / seconds(&config) - 1.0 >= slowdowns[0] - 1e-3, "{alone}");
    }
    // FLOPs alone say so.
    let ways = ways_to_fit(&devices, &config, &room, None).unwrap();
    assert!(ways.basis.starts_with("estimated by FLOPs alone"), "{ways}");
    assert!(ways.changes.iter().all(|change| change.step_s.is_none() && change.slowdown > -1e-9), "{ways:?}");
}

#[test]
fn gradients_in_bf16_and_expert_parallelism_are_tried_too_and_each_change_is_compiled_alone() {
    let devices = Devices::new();
    // Full recomputation of one sequence leaves states, of which gradients are the only ones that shrink on one rank.
    let keys = "[precision]\npolicy = \"bf16\"\n";
    let least = with(keys, &["train.micro_batch = 1", "recompute.policy = \"full\""].map(String::from));
    let gradients = with(
        keys,
        &["train.micro_batch = 1", "recompute.policy = \"full\"", "precision.gradients = \"bf16\""].map(String::from),
    );
    assert!(arena(&gradients) < arena(&least));
    let room = Room { bytes: arena(&gradients), shared: false, place: "on a test".into() };
    let ways = ways_to_fit(&devices, &wide(keys), &room, None).unwrap();
    assert!(!ways.changes.is_empty(), "{ways:?}");
    for change in &ways.changes {
        assert!(change.keys.contains(&"precision.gradients = \"bf16\"".to_owned()), "{change:?}");
        assert!(change.other_numbers && arena(&with(keys, &change.keys)) == change.arena_bytes, "{change:?}");
    }
    let experts = |more: &str| {
        format!(
            "[model]\narchitecture = \"mixtral\"\nexperts = 4\nexperts_per_token = 1\nvocab_size = 256\nlayers = 4\ndim = 256\n\
             heads = 8\nffn = 2048\n[train]\nseq = 64\nglobal_batch = 8\nmicro_batch = 1\ndevice = \"cpu\"\nthreads = 1\n{more}\
             [parallel]\ndp = 2\n[recompute]\npolicy = \"full\"\n"
        )
    };
    let read = |more: &str, set: &[String]| {
        let set: Vec<String> = set.iter().map(|key| key.replacen(" = ", "=", 1)).collect();
        Config::parse(&experts(more), "run.toml", &set).unwrap_or_else(|error| panic!("{error}"))
    };
    let mixture = read("", &[]);
    let room = Room { bytes: arena(&mixture) * 3 / 4, shared: false, place: "on a test".into() };
    let ways = ways_to_fit(&devices, &mixture, &room, None).unwrap();
    let ep = ways.changes.iter().find(|change| change.keys.contains(&"parallel.ep = 2".to_owned()));
    let ep = ep.unwrap_or_else(|| panic!("{ways:?}"));
    assert_eq!(arena(&read("", &ep.keys)), ep.arena_bytes);
    // What a rule refuses is not offered: expert-parallel ranks measure no noise scale.
    let ways = ways_to_fit(&devices, &read("noise_scale = true\n", &[]), &room, None).unwrap();
    for change in &ways.changes {
        read("noise_scale = true\n", &change.keys);
        assert!(change.keys.iter().all(|key| !key.starts_with("parallel.ep ")), "{change:?}");
    }
    // No two levels of ZeRO are in one change, and what a change saves is what a plan with it needs less.
    let room = Room { bytes: arena(&mixture) * 9 / 10, shared: false, place: "on a test".into() };
    for change in &ways_to_fit(&devices, &mixture, &room, None).unwrap().changes {
        assert!(change.keys.iter().filter(|key| key.starts_with("parallel.zero ")).count() <= 1, "{change:?}");
        assert_eq!(arena(&mixture) - arena(&read("", &change.keys)), change.saved_bytes, "{change:?}");
    }
}

#[test]
fn where_nothing_fits_the_nearest_miss_and_what_it_takes_is_told() {
    let devices = Devices::new();
    let config = wide("[precision]\npolicy = \"bf16\"\n");
    let least = with(
        "",
        &[
            "precision.policy = \"bf16\"",
            "train.micro_batch = 1",
            "recompute.policy = \"full\"",
            "precision.gradients = \"bf16\"",
            "precision.moments = \"int8\"",
            "precision.master = \"bf16\"",
        ]
        .map(String::from),
    );
    let room = |shared| Room { bytes: arena(&least) / 3, shared, place: "on a test".into() };
    let ways = ways_to_fit(&devices, &config, &room(false), None).unwrap();
    let miss = ways.nearest.clone().unwrap();
    assert!(ways.changes.is_empty());
    let keys =
        ["micro_batch = 1", "policy = \"full\"", "gradients = \"bf16\"", "moments = \"int8\"", "master = \"bf16\""];
    assert!(miss.keys.iter().map(|key| key.split_once('.').unwrap().1).eq(keys), "{:?}", miss.keys);
    assert_eq!((miss.needed_bytes, miss.missing_bytes), (arena(&least), arena(&least) - arena(&least) / 3));
    let more = miss.ranks.unwrap();
    assert!(more.ranks > 1 && more.keys.iter().any(|key| key.starts_with("parallel.")), "{more:?}");
    assert!(arena(&with("[precision]\npolicy = \"bf16\"\n", &more.keys)) <= room(false).bytes);
    assert!(ways.to_string().contains("it fits on "), "{ways}");
    // More ranks of one memory do not help.
    let shared = ways_to_fit(&devices, &config, &room(true), None).unwrap();
    assert!(shared.nearest.is_some_and(|miss| miss.ranks.is_none()));
}

#[test]
fn a_session_that_does_not_fit_says_what_does() {
    // Some thousand times what any machine has.
    let keys = ["train.seq = 1024", "train.global_batch = 262144", "train.micro_batch = 262144"].map(String::from);
    let config = with("", &keys);
    let planned = plan(&Devices::new(), &config).unwrap();
    let Err(TrainError::Host(HostError::Plan(error @ PlanError::DoesNotFit { .. }))) =
        lockstep_train::Session::new(&Devices::new(), &config, &planned)
    else {
        panic!("it fits?");
    };
    let text = error.with_hint();
    assert!(text.contains("hint: the 3 cheapest changes that make it fit (time ") && text.contains("saves "), "{text}");
    assert!(text.contains("train.micro_batch = ") && !text.contains("zero"), "{text}");
}
