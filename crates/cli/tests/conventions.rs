//! What people expect of any command: help, completions, manuals, 80 columns, colour where it is wanted.

mod common;

use common::Place;
use serde_json::Value;

#[test]
fn every_command_has_help_in_both_ways() {
    let place = Place::new();
    let (mut commands, mut next) = (vec![Vec::new()], 0);
    while let Some(command) = commands.get(next).cloned() {
        let path: Vec<&str> = command.iter().map(String::as_str).collect();
        let help = place.ok(&[&path[..], &["--help"]].concat());
        assert_eq!(place.ok(&[&["help"], &path[..]].concat()), help, "{command:?}");
        let listed = help.split("\nCommands:\n").nth(1).unwrap_or_default().split("\n\n").next().unwrap_or_default();
        let names = listed.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
        let names = names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help");
        commands.extend(names.map(|name| [&command[..], &[name.to_owned()]].concat()));
        next += 1;
    }
    assert!(commands.len() > 30, "{commands:?}");
    assert!(place.ok(&["help", "bench", "train"]).contains("--profile"));
}

#[test]
fn shells_can_complete_and_manuals_can_be_read() {
    let place = Place::new();
    for (shell, part) in
        [("bash", "complete -F _lockstep"), ("zsh", "#compdef lockstep"), ("fish", "complete -c lockstep")]
    {
        let script = place.ok(&["completions", shell]);
        assert!(script.contains(part) && script.contains("explain"), "{shell}");
    }
    let page = place.ok(&["man"]);
    assert!(page.contains(".TH lockstep 1") && page.contains("SUBCOMMANDS"), "{page}");
    assert!(place.ok(&["man", "--out", "man"]).contains("wrote manual pages to man"));
    for name in ["lockstep.1", "lockstep-train.1", "lockstep-bench-train.1"] {
        assert!(place.path("man").join(name).exists(), "{name}");
    }
}

/// On the sources of this very checkout, whatever has been added to them.
#[test]
fn the_quick_start_trains() {
    let place = Place::new();
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/quickstart.toml");
    let small = ["train.steps=1", "optimizer.warmup_steps=0", "train.global_batch=2", "train.micro_batch=2"];
    let set: Vec<&str> = small.into_iter().flat_map(|key| ["--set", key]).collect();
    let text =
        place.ok(&[&["train", config, "--run-dir", "run", "--set", "train.validation_sequences=2"], &set[..]].concat());
    assert!(text.contains("finished 1 step"), "{text}");
}

#[test]
fn doctor_speaks_json() {
    let place = Place::new();
    let found: Value = serde_json::from_str(&place.ok(&["doctor", "--format", "json"])).unwrap();
    assert!(found["cpu"]["cores"].as_u64() >= Some(1) && found["gpu_ready"].is_boolean());
    let rows = found["cuda"].as_array().unwrap();
    assert!(rows.iter().all(|r| r["what"].is_string() && r["found"].is_boolean() && r["needed"].is_boolean()));
}

#[test]
fn one_switch_lowers_the_vector_path_and_what_the_cpu_lacks_is_refused() {
    let place = Place::new();
    let doctor = |path: &str, more: &[&str]| {
        let args = [&["doctor"], more].concat();
        place.command(&args).env("LOCKSTEP_CPU", path).output().unwrap()
    };
    let found: Value = serde_json::from_slice(&doctor("portable", &["--format", "json"]).stdout).unwrap();
    assert_eq!(found["cpu"]["vector_path"], "portable");
    let text = String::from_utf8(doctor("portable", &[]).stdout).unwrap();
    assert!(text.lines().next().unwrap_or_default().contains(", vector path portable"), "{text}");
    let refused = doctor("sse9", &[]);
    let error = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(2), "{error}");
    assert!(error.contains("LOCKSTEP_CPU = \"sse9\" is no vector path\nhint: unset it"), "{error}");
}

#[test]
fn config_shows_one_key_and_finds_keys_by_other_names() {
    let place = Place::new();
    let text = place.ok(&["config", "model.kv_heads"]);
    assert!(text.starts_with("[model]\nkv_heads = ") && text.contains("also called: GQA"), "{text}");
    assert!(place.ok(&["config", "window"]).contains("old name: window"));
    assert!(place.ok(&["config", "--search", "fsdp"]).starts_with("[parallel]\nzero = "));
    assert!(place.ok(&["config", "--search", "master weights"]).starts_with("[precision]\npolicy = "));
    assert!(place.ok(&["config", "--search", "expert parallelism"]).starts_with("[parallel]\nep = "));
    assert!(place.ok(&["config", "--search", "fp8"]).starts_with("[precision]\npolicy = "));
    assert!(place.ok(&["config", "--search", "mxfp8"]).contains("mxfp8 and narrower is not there yet"));
    let error = place.fails(2, &["config", "precision.nvfp4"]);
    assert!(error.contains("mxfp8 and narrower is not there yet"), "{error}");
    let found: Value = serde_json::from_str(&place.ok(&["config", "lr", "--format", "json"])).unwrap();
    assert_eq!((found[0]["path"].as_str(), found.as_array().map(Vec::len)), (Some("optimizer.lr"), Some(1)));
    assert!(place.fails(2, &["config", "learning_rate"]).contains("did you mean `optimizer.lr`?"));
    assert!(place.fails(2, &["config", "--search", "bananas"]).contains("hint: "));
}

#[test]
fn an_old_key_is_read_with_a_warning() {
    let place = Place::new();
    let output = place.run(&["explain", "run.toml", "--set", "parallel.patience=9"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    assert_eq!(said, "warning: parallel.patience is now called parallel.timeout: --set parallel.patience=9\n");
}

#[test]
fn output_fits_80_columns_and_has_no_escapes_where_nobody_looks() {
    let place = Place::new();
    let parallel = [
        "--set",
        "parallel.dp=2",
        "--set",
        "parallel.zero=1",
        "--set",
        "parallel.pp=2",
        "--set",
        "train.micro_batch=1",
    ];
    place.config(&common::CONFIG.replace("[optimizer]", "[precision]\npolicy = \"bf16\"\n[optimizer]"));
    let commands: [&[&str]; 8] = [
        &["explain", "run.toml"],
        &[&["explain", "run.toml"], &parallel[..]].concat(),
        &["explain", "run.toml", "--fit", "16MiB"],
        &["explain", "run.toml", "--layouts", "dp=2;tp=2;pp=2;dp=2,zero=1,tp=2,sp,pp=2;dp=4,zero=1;dp=8,zero=2"],
        &["config"],
        &["verify", "run.toml", "--steps", "1", "--layouts", "dp=2,zero=1,tp=2,sp,pp=2,gpipe"],
        &["help", "bench"],
        &["bench", "train", "run.toml", "--steps", "1", "--profile", "trace.json"],
    ];
    for command in commands {
        let text = place.ok(command);
        assert!(!text.contains('\u{1b}'), "{command:?}\n{text}");
        let wide: Vec<&str> = text.lines().filter(|line| line.chars().count() > 80).collect();
        assert!(wide.is_empty(), "{command:?}\n{}", wide.join("\n"));
    }
}

#[test]
fn files_that_were_asked_for_are_named_when_they_are_written() {
    let place = Place::new();
    let said = |args: &[&str]| {
        let output = place.run(args);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{text}");
        text
    };
    assert!(
        said(&["explain", "run.toml", "--timeline", "memory.svg"]).contains("wrote memory.svg: memory over time\n")
    );
    let bench = ["bench", "train", "run.toml", "--steps", "1", "--profile", "trace.json", "--timeline", "run.json"];
    let text = said(&bench);
    assert!(text.contains("wrote trace.json: ") && text.contains("wrote run.json: "), "{text}");
}

#[test]
fn bench_times_any_config_and_any_preset() {
    let place = Place::new();
    let found: Value = serde_json::from_str(&place.ok(&[
        "bench",
        "train",
        "run.toml",
        "--steps",
        "1",
        "--set",
        "train.seq=16",
        "--precision",
        "bf16",
        "--format",
        "json",
        "--profile",
        "trace.json",
    ]))
    .unwrap();
    assert_eq!(
        (found["name"].as_str(), found["batch"].as_u64(), found["seq"].as_u64()),
        (Some("run"), Some(8), Some(16))
    );
    assert_eq!(found["precision"], "bf16");
    assert!(found["profile"]["ops"].as_array().unwrap().iter().any(|o| o["roofline_s"].as_f64() > Some(0.0)));
    let text = place.ok(&["bench", "train", "--preset", "llama-15m", "--batch", "1", "--seq", "16", "--steps", "1"]);
    assert!(text.starts_with("llama-15m on cpu, batch 1, seq 16, bf16\n"), "{text}");
    assert!(place.fails(2, &["bench", "train", "--preset", "llama-15x"]).contains("did you mean \"llama-15m\"?"));
}

#[test]
fn train_profiles_the_steps_that_it_is_told_to_and_computes_the_same() {
    let place = Place::new();
    let steps = ["--set", "train.steps=6"];
    place.ok(&[&["train", "run.toml", "--run-dir", "plain"], &steps[..]].concat());
    let args = ["train", "run.toml", "--run-dir", "run", "--profile-steps", "3:4"];
    let text = place.ok(&[&args[..], &steps].concat());
    assert!(text.contains("time per op of a step, mean of 2 steps\n") && text.contains("roofline bound"), "{text}");
    let trace: Value =
        serde_json::from_str(&std::fs::read_to_string(place.path("run/profile-3-4.json")).unwrap()).unwrap();
    // Beside the names of the streams.
    let events: Vec<&Value> = trace.as_array().unwrap().iter().filter(|e| e["ph"] == "X").collect();
    assert!(events.iter().any(|e| e["args"]["step"] == 3) && events.iter().any(|e| e["args"]["step"] == 4));
    assert!(events.iter().all(|e| e["args"]["step"] == 3 || e["args"]["step"] == 4));
    // In whole nanoseconds, as Perfetto reads it: it drops events that overlap.
    let nanoseconds = |e: &Value, key: &str| (e[key].as_f64().unwrap() * 1e3).round() as u64;
    let ends = |e: &Value| nanoseconds(e, "ts") + nanoseconds(e, "dur");
    assert!(events.windows(2).all(|e| e[0]["tid"] != e[1]["tid"] || ends(e[0]) <= nanoseconds(e[1], "ts")));
    assert_eq!(place.trajectory("run"), place.trajectory("plain"));
    assert!(place.fails(2, &["train", "run.toml", "--profile-steps", "8:5"]).contains("such as 5:8"));
}
