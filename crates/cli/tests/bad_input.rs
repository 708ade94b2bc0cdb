//! Every mistake gives one clear error with a hint, and loses nothing.

mod common;

use common::{CONFIG, Place, damage};

#[test]
fn an_unknown_key() {
    let place = Place::new();
    place.config(&CONFIG.replace("steps = 20", "stesp = 20"));
    assert_eq!(
        place.fails(2, &["train", "run.toml"]),
        "error: train.stesp is not a key of [train]\n   --> run.toml:14\n   |\n14 | stesp = 20\n   | ^^^^^\nhint: did you mean `steps`?\n"
    );
}

#[test]
fn a_wrong_unit() {
    let place = Place::new();
    place.config(&CONFIG.replace("steps = 20", "steps = \"20 parsecs\""));
    let text = place.fails(2, &["explain", "run.toml"]);
    assert!(text.contains("train.steps") && text.contains("20 parsecs") && text.contains("hint: "), "{text}");
}

#[test]
fn heads_that_do_not_divide() {
    let place = Place::new();
    place.config(&CONFIG.replace("heads = 4\n", "heads = 5\n").replace("kv_heads = 2", "kv_heads = 1"));
    let text = place.fails(2, &["explain", "run.toml"]);
    assert!(text.contains("model.heads") && text.contains("hint: "), "{text}");
    place.config(&CONFIG.replace("kv_heads = 2", "kv_heads = 3"));
    let text = place.fails(2, &["explain", "run.toml"]);
    assert!(text.contains("model.kv_heads") && text.contains("hint: "), "{text}");
}

#[test]
fn what_determinism_costs_where_it_costs_nothing() {
    let text = Place::new().fails(2, &["bench", "train", "--shape", "15m", "--device", "cpu", "--deterministic"]);
    assert_eq!(
        text,
        "error: runs on the CPU always give the same bits: there is nothing to compare\nhint: use --device cuda\n"
    );
}

#[test]
fn a_missing_config() {
    let text = Place::new().fails(2, &["train", "nowhere.toml"]);
    assert!(text.contains("cannot read nowhere.toml") && text.contains("hint: "), "{text}");
}

#[test]
fn no_data_named() {
    let place = Place::new();
    place.config(&CONFIG.replace("paths = [\"corpus\"]", ""));
    let text = place.fails(2, &["train", "run.toml"]);
    assert!(text.contains("data.paths") && text.contains("hint: "), "{text}");
}

#[test]
fn missing_data() {
    let place = Place::new();
    place.config(&CONFIG.replace("\"corpus\"", "\"corpse\""));
    assert_eq!(
        place.fails(2, &["train", "run.toml"]),
        "error: corpse: no such file or folder\nhint: check the spelling; paths in a config start at the config's folder\n"
    );
}

#[test]
fn empty_data() {
    let place = Place::new();
    std::fs::create_dir(place.path("empty")).unwrap();
    std::fs::write(place.path("empty/a.txt"), "").unwrap();
    place.config(&CONFIG.replace("\"corpus\"", "\"empty\""));
    assert_eq!(
        place.fails(2, &["train", "run.toml"]),
        "error: empty: found 1 file, all empty\nhint: name files that hold text\n"
    );
}

#[test]
fn a_sequence_longer_than_the_data() {
    let place = Place::new();
    let text = place.fails(2, &["train", "run.toml", "--set", "train.seq=1M"]);
    assert!(text.contains("1000000") && text.contains("hint: "), "{text}");
}

#[test]
fn a_vocabulary_smaller_than_bytes() {
    let text = Place::new().fails(2, &["train", "run.toml", "--set", "model.vocab_size=100"]);
    assert_eq!(
        text,
        "error: model.vocab_size is 100, the tokenizer \"bytes\" makes tokens up to 255\nhint: set model.vocab_size = 256\n"
    );
}

#[test]
fn a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint() {
    let place = Place::new();
    // One sane step and its checkpoint, then a learning rate that no model survives.
    let wild = ["--set", "optimizer.lr=1e30", "--set", "optimizer.warmup_steps=0", "--set", "optimizer.grad_clip=0"];
    let args = [&["train", "run.toml", "--run-dir", "run", "--set", "checkpoint.every=1"][..], &wild].concat();
    let text = place.fails(1, &args);
    assert!(text.contains(" is not finite for 3 steps in a row (last at step "), "{text}");
    assert!(text.contains("hint: no weight was changed") && text.contains("lower optimizer.lr"), "{text}");
    let kept = std::fs::read_dir(place.path("run/checkpoints")).unwrap().count();
    assert!(kept > 0);
    let events = std::fs::read_to_string(place.path("run/events.jsonl")).unwrap();
    assert_eq!(events.matches("\"skipped\"").count(), 3, "{events}");
}

#[test]
fn a_full_disk_is_named_and_the_run_goes_on_after_it() {
    let place = Place::new();
    let args = ["train", "run.toml", "--run-dir", "run"];
    // Files may not grow past 100 blocks of 512 bytes: the first checkpoint does not fit.
    let binary = env!("CARGO_BIN_EXE_lockstep");
    let limited = format!("trap '' XFSZ; ulimit -f 200; exec {binary} {}", args.join(" "));
    let output =
        std::process::Command::new("bash").args(["-c", &limited]).current_dir(place.path(".")).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("error: step ") && text.contains(" was not saved: cannot write "), "{text}");
    assert!(text.contains("\nhint: "), "{text}");
    let text = place.ok(&args);
    assert!(text.contains("finished 20 steps"), "{text}");
}

#[test]
fn a_corrupt_shard() {
    let place = Place::new();
    let args = ["train", "run.toml", "--run-dir", "run"];
    place.ok(&args);
    damage(&place.path("run/data/train.shard"));
    let text = place.fails(2, &args);
    assert!(text.contains("train.shard") && text.contains("hint: "), "{text}");
}

#[test]
fn a_wrong_command_line() {
    let output = Place::new().run(&["trian"]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("unrecognized subcommand 'trian'") && text.contains("'train'"), "{text}");
}
