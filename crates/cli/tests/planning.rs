//! explain as a planner: what fits which GPU, the largest micro-batch, layouts side by side, the peak of the config's precision.

mod common;

use common::Place;
use serde_json::Value;

fn json(place: &Place, args: &[&str]) -> Value {
    let args = [&["explain", "run.toml", "--format", "json"], args].concat();
    serde_json::from_str(&place.ok(&args)).unwrap()
}

/// A small model of 64 ranks.
const RANKS: &str = "[model]\nvocab_size = 512\nlayers = 2\ndim = 64\nheads = 8\nffn = 128\n[train]\nseq = 64\n\
                     global_batch = 8\n[parallel]\ndp = 8\ntp = 8\n";

#[test]
fn a_named_gpu_fits_or_does_not() {
    let place = Place::new();
    let fits = &json(&place, &["--gpu", "h100"])["fits"];
    assert_eq!((fits["fits"].as_bool(), fits["memory_bytes"].as_u64()), (Some(true), Some((81_559 - 1_160) << 20)));
    let text = place.ok(&["explain", "run.toml", "--gpu", "h100"]);
    assert!(text.contains("\nfits: ") && text.contains(" of 78.5 GiB on an H100 80GB\n"), "{text}");
    place.config("[model]\npreset = \"llama-3-8b\"\n[train]\nseq = 512\nmicro_batch = 8\n");
    let text = place.ok(&["explain", "run.toml", "--gpu", "a100"]);
    assert!(text.contains("\ndoes NOT fit: ") && text.contains(" planned, 78.9 GiB on an A100 80GB\n"), "{text}");
    let found = json(&place, &["--gpu", "a100"]);
    assert_eq!(found["fits"]["fits"], false);
    assert_eq!(found["fits"]["planned_bytes"], found["memory"]["total_bytes"]);
    // Without one, it is this machine that counts.
    place.config(common::CONFIG);
    assert_eq!(json(&place, &[])["fits"]["fits"], true);
}

#[test]
fn a_preset_says_where_its_values_come_from() {
    let place = Place::new();
    place.config("[model]\npreset = \"llama-15m\"\n");
    let text = place.ok(&["explain", "run.toml"]);
    assert!(text.contains("256 tokens (preset llama-15m)") && text.contains("bf16 (preset llama-15m)"), "{text}");
    place.config("[model]\npreset = \"llama-15m\"\n[train]\nseq = 128\n[precision]\npolicy = \"fp32\"\n");
    assert!(!place.ok(&["explain", "run.toml"]).contains("preset llama-15m"));
}

#[test]
fn gpus_are_a_multiple_of_the_layouts_ranks() {
    let place = Place::new();
    place.config(RANKS);
    let run =
        |gpus: &'static str| ["explain", "run.toml", "--tokens", "1B", "--gpu", "h100", "--mfu", "0.4", "--gpus", gpus];
    let error = place.fails(2, &run("32"));
    assert!(error.contains("--gpus 32: the layout has 64 ranks (dp=8 tp=8)\nhint: give a multiple of 64"), "{error}");
    let text = place.ok(&run("128"));
    assert!(text.contains("days on 128 of them, 2 data-parallel copies of the layout"), "{text}");
    assert!(place.ok(&run("64")).contains("days on 64 of them\n"));
}

#[test]
fn a_run_is_estimated_at_the_peak_of_its_precision() {
    let place = Place::new();
    let run = ["--tokens", "1B", "--gpu", "h100", "--mfu", "0.4"];
    let days = |precision: &str| {
        let set = format!("precision.policy={precision}");
        json(&place, &[&run[..], &["--set", &set]].concat())["cost"]["gpu_days"].as_f64().unwrap()
    };
    assert!((days("fp32") / days("bf16") / (989.0 / 67.0) - 1.0).abs() < 1e-9);
    let text = place.ok(&[&["explain", "run.toml"], &run[..]].concat());
    assert!(text.contains("at MFU 0.4 of 67.0 TFLOP/s (f32)"), "{text}");
}

#[test]
fn the_largest_micro_batch_that_fits_is_shown_under_every_policy() {
    let place = Place::new();
    let text = place.ok(&["explain", "run.toml", "--fit", "16 MiB"]);
    assert!(
        text.starts_with("largest train.micro_batch in 16.0 MiB per rank\n") && text.contains("\n  selective "),
        "{text}"
    );
    let found = &json(&place, &["--fit", "16 MiB"])["fit"]["policies"];
    assert_eq!(found.as_array().map(Vec::len), Some(5));
    let largest = found[0]["micro_batch"].as_u64().unwrap();
    // It is what train would allocate.
    let set = [format!("train.micro_batch={largest}"), format!("train.global_batch={largest}")];
    let explained = json(&place, &["--set", &set[0], "--set", &set[1]]);
    assert_eq!(explained["memory"]["total_bytes"], found[0]["arena_bytes"]);
    let error = place.fails(2, &["explain", "run.toml", "--fit", "lots"]);
    assert!(error.contains("--fit lots is not a size\nhint: "), "{error}");
}

#[test]
fn a_typed_size_is_decimal_and_where_a_gpu_is_called_so_a_hint_says_what_it_has() {
    let place = Place::new();
    let fit = |args: &[&str]| place.ok(&[&["explain", "run.toml", "--fit"], args].concat());
    let text = fit(&["80GB"]);
    assert!(text.starts_with("largest train.micro_batch in 74.5 GiB per rank\n"), "{text}");
    let hint = "hint: 80GB is 74.5 GiB; an H100 80GB has 78.5 GiB by its driver, less what a\n  context takes: --fit 78.5GiB, or --gpu h100\n";
    assert!(text.ends_with(hint), "{text}");
    assert_eq!(json(&place, &["--fit", "80GB"])["fit"]["memory_bytes"], 80_000_000_000u64);
    // Of a GPU that was named.
    assert!(fit(&["80 GB", "--gpu", "a100"]).contains("an A100 80GB has 78.9 GiB by its driver"));
    assert!(fit(&["80 GB", "--gpu", "a100"]).ends_with(" --fit 78.8GiB\n"));
    // No GPU is called so; and an MI325X has what it is called by, as far as is known.
    for size in ["78.5GiB", "81GB", "256GB"] {
        assert!(!fit(&[size]).contains("hint"), "{size}");
    }
}

#[test]
fn ranks_of_one_machine_share_its_memory_and_every_output_says_so() {
    let place = Place::new();
    let ranks = ["--set", "parallel.dp=4", "--set", "train.global_batch=4", "--set", "train.micro_batch=1"];
    let text = |more: &[&str]| place.ok(&[&["explain", "run.toml"], &ranks[..], more].concat());
    let found = |more: &[&str]| json(&place, &[&ranks[..], more].concat());
    // On the CPU of one machine, all ranks together.
    assert!(text(&[]).contains(" free on this machine, for all 4 ranks together\n"), "{}", text(&[]));
    let here = found(&[]);
    let one = here["memory"]["total_bytes"].as_u64().unwrap();
    assert_eq!(here["fits"]["planned_bytes"].as_u64(), Some(4 * one));
    assert_eq!((here["fits"]["ranks"].as_u64(), here["fits"]["shared"].as_bool()), (Some(4), Some(true)));
    let layouts = ["--layouts", "dp=4;dp=2"];
    let shown = text(&layouts);
    assert!(shown.ends_with(" free on this machine, for all ranks of a layout together\n"), "{shown}");
    assert_eq!(found(&layouts)["layouts"][0]["verdict"]["planned_bytes"], here["fits"]["planned_bytes"]);
    let shown = text(&["--fit", "64MiB"]);
    assert!(shown.contains(" in 64.0 MiB per rank\n"), "{shown}");
    assert!(shown.contains(" free on this machine, for all 4 ranks together: "), "{shown}");
    let lengths = text(&["--sequence-lengths", "32"]).replace("\n  ", " ");
    assert!(lengths.contains(" free on this machine, for all 4 ranks together: "), "{lengths}");
    assert!(text(&["--sequence-lengths", "32", "--gpu", "h100"]).ends_with(" on an H100 80GB, for each rank\n"));
    // On several nodes, as much for each of them.
    let nodes = ["--set", "cluster.nodes=2"];
    let there = found(&nodes);
    let memory = |found: &Value| found["memory_bytes"].as_f64().unwrap();
    assert_eq!(there["fits"]["place"], "free on 2 nodes such as this machine");
    assert!((1.5..2.5).contains(&(memory(&there["fits"]) / memory(&here["fits"]))), "{there}");
    let of_nodes = found(&["--set", "cluster.gpus_per_node=2", "--layouts", "dp=4;dp=2"]);
    let places = [0, 1].map(|row| of_nodes["layouts"][row]["verdict"]["place"].as_str().unwrap());
    assert_eq!(places, ["free on 2 nodes such as this machine", "free on this machine"]);
    // On GPUs, each rank has its own.
    let gpus = ["--gpu", "h100"];
    assert!(text(&gpus).contains(" of 78.5 GiB on an H100 80GB, for the rank that needs most\n"), "{}", text(&gpus));
    let on_gpus = found(&gpus);
    assert_eq!(on_gpus["fits"]["planned_bytes"], on_gpus["memory"]["total_bytes"]);
    let shown = text(&[&layouts[..], &gpus].concat());
    assert!(shown.ends_with("memory: 78.5 GiB on an H100 80GB, for each rank\n"), "{shown}");
    assert!(!text(&["--fit", "64MiB", "--gpu", "h100"]).contains("together"));
}

#[test]
fn a_micro_batch_that_fits_divides_the_batch_or_comes_with_one_that_it_divides() {
    let place = Place::new();
    let run = ["--set", "parallel.dp=2", "--set", "train.global_batch=48", "--set", "train.micro_batch=2"];
    let found = json(&place, &[&run[..], &["--fit", "8 MiB"]].concat());
    let policies = found["fit"]["policies"].as_array().unwrap();
    for policy in policies {
        let number = |key: &str| policy[key].as_u64().unwrap_or_else(|| panic!("{key}: {policy}"));
        let (dividing, most) = (number("dividing_micro_batch"), number("micro_batch"));
        // 24 sequences for each of two ranks.
        assert!(24 % dividing == 0 && dividing <= most, "{policy}");
        // Twelve micro-batches on each of two ranks, as now.
        assert_eq!(number("global_batch"), most * 2 * 12, "{policy}");
        for (micro_batch, batch) in [(dividing, 48), (most, number("global_batch"))] {
            let sizes = [format!("train.micro_batch={micro_batch}"), format!("train.global_batch={batch}")];
            let name = policy["policy"].as_str().unwrap().split(',').next().unwrap();
            let set = ["--set", "parallel.dp=2", "--set", &sizes[0], "--set", &sizes[1]];
            let recompute = format!("recompute.policy={name}");
            let explained = json(&place, &[&set[..], &["--set", &recompute]].concat());
            assert!(explained["memory"]["total_bytes"].as_u64().unwrap() <= 8 << 20, "{policy} at {sizes:?}");
        }
    }
    let text = place.ok(&[&["explain", "run.toml"], &run[..], &["--fit", "8 MiB"]].concat());
    assert!(text.contains("divides a rank's batch of 24 sequences"), "{text}");
}

#[test]
fn what_is_shown_instead_refuses_options_that_it_would_drop() {
    let place = Place::new();
    for instead in [["--fit", "1GB"], ["--layouts", "dp=2"], ["--sequence-lengths", "64"]] {
        for dropped in [
            &["--verbose"][..],
            &["--timeline", "m.svg"],
            &["--schedule", "s.svg"],
            &["--trace", "t.json"],
            &["--analyze"],
            &["--tokens", "1T"],
            &["--tokens", "1T", "--mfu", "0.4", "--gpu", "h100"],
        ] {
            let args = [&["explain", "run.toml"], &instead[..], dropped].concat();
            let error = place.fails(2, &args);
            assert!(error.contains("cannot be used with") && error.contains(dropped[0]), "{args:?}: {error}");
        }
    }
    assert!(!place.path("m.svg").exists() && !place.path("t.json").exists());
}

#[test]
fn layouts_are_shown_side_by_side() {
    let place = Place::new();
    let text = place.ok(&["explain", "run.toml", "--layouts", "dp=2; dp=2,zero=3", "--layouts", "tp=2,pp=2"]);
    for part in ["layout ", "ranks ", "optimizer ", "total ", "sent by a rank ", "fits ", "dp=2"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let found = json(&place, &["--layouts", "dp=2;tp=2,pp=2"]);
    let rows = found["layouts"].as_array().unwrap();
    assert_eq!(rows.iter().map(|r| r["ranks"].as_u64().unwrap()).collect::<Vec<_>>(), [2, 4]);
    let alone = json(&place, &["--set", "parallel.dp=2"]);
    assert_eq!(rows[0]["memory"]["total_bytes"], alone["memory"]["total_bytes"]);
    let error = place.fails(2, &["explain", "run.toml", "--layouts", "dp=2;tp=3"]);
    assert!(error.contains("tp=3") && error.contains("hint: "), "{error}");
    let error = place.fails(2, &["explain", "run.toml", "--layouts", "ep=2"]);
    assert!(error.contains("parallel.ep = 2 splits experts among ranks, and the model has none"), "{error}");
}

#[test]
fn a_run_that_does_not_fit_is_told_what_to_set() {
    let place = Place::new();
    let set = ["--set", "train.global_batch=4194304", "--set", "train.micro_batch=4194304"];
    let error = place.fails(2, &[&["train", "run.toml"], &set[..]].concat());
    for part in [
        "the step needs ",
        "hint: the 3 cheapest changes that make it fit (time ",
        "\n  train.micro_batch = ",
        " saves ",
    ] {
        assert!(error.contains(part), "{part}\n{error}");
    }
    // As explain says of a GPU that was named, with the time there.
    let ranks = ["--set", "train.seq=16384", "--set", "train.global_batch=4096", "--set", "parallel.dp=4"];
    let ranks = [&ranks[..], &["--set", "train.micro_batch=1024"]].concat();
    let found = json(&place, &[&ranks[..], &["--gpu", "a100"]].concat());
    let changes = found["ways_to_fit"]["changes"].as_array().unwrap();
    assert_eq!(changes.len(), 3, "{found}");
    for change in changes {
        assert!(change["step_s"].as_f64() > Some(0.0) && change["slowdown"].as_f64() > Some(-0.9), "{change}");
        let keys: Vec<String> = change["keys"]
            .as_array()
            .unwrap()
            .iter()
            .map(|key| key.as_str().unwrap().replacen(" = ", "=", 1))
            .collect();
        let set: Vec<&str> = keys.iter().flat_map(|key| ["--set", key]).collect();
        let changed = json(&place, &[&ranks[..], &set, &["--gpu", "a100"]].concat());
        assert_eq!(changed["fits"]["fits"], true, "{change}");
        assert_eq!(changed["memory"]["total_bytes"], change["arena_bytes"], "{change}");
    }
    let text = place.ok(&[&["explain", "run.toml", "--gpu", "a100"], &ranks[..]].concat());
    assert!(text.contains("(time predicted on A100 80GB"), "{text}");
}

#[test]
fn the_interval_of_checkpoints_is_found_when_a_run_begins_and_measured_when_it_goes_on() {
    let place = Place::new();
    let run = |more: &[&str]| {
        let set = ["train.steps=3", "optimizer.warmup_steps=2", "checkpoint.every=auto", "train.validate_every=0"];
        let set: Vec<&str> = set.iter().flat_map(|key| ["--set", key]).collect();
        let output = place.run(&[&["train", "run.toml", "--run-dir", "run"], &set[..], more].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        let resolved = std::fs::read_to_string(place.path("run/run.toml")).unwrap();
        let every = resolved.lines().find(|line| line.starts_with("every = ") && line.contains("# auto: ")).unwrap();
        (said, every.to_owned())
    };
    let (said, every) = run(&[]);
    assert!(said.contains("checkpoint.every = ") && said.contains("of the time lost"), "{said}");
    assert!(every.contains("(predicted)") && every.contains("1 node (published)"), "{every}");
    let events = std::fs::read_to_string(place.path("run/events.jsonl")).unwrap();
    assert!(events.lines().any(|line| line.contains("\"checkpoint\"") && line.contains("\"stall_s\":")), "{events}");
    let (_, every) = run(&["--change", "train.steps=5"]);
    assert!(every.matches("(measured)").count() == 2, "{every}");
}
