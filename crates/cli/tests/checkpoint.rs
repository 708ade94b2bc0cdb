//! `lockstep checkpoint`, from whole commands.

mod common;

use common::Place;
use serde_json::Value;

fn loss(place: &Place, run: &str) -> Value {
    let text = place.ok(&["eval", run, "--data", "corpus/0.txt", "--format", "json"]);
    serde_json::from_str::<Value>(&text).unwrap()["loss"].clone()
}

#[test]
fn a_trained_model_goes_out_comes_in_and_is_trained_on() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    let text = place.ok(&["checkpoint", "export", "run", "--out", "models/hf"]);
    assert!(text.starts_with("models/hf: step 20, ") && text.ends_with(" parameters in f32\n"), "{text}");
    let text = place.ok(&["checkpoint", "import", "models/hf", "--out", "imported"]);
    assert!(
        text.starts_with("llama: ") && text.contains("imported: run.toml, checkpoints/step-00000000, tokenizer.json"),
        "{text}"
    );
    assert_eq!(loss(&place, "imported"), loss(&place, "run"));
    // The folder says where its tokenizer is by its own place: it can be moved.
    std::fs::rename(place.path("imported"), place.path("moved")).unwrap();
    let text = place.ok(&["generate", "moved", "--prompt", "line 3", "--max-tokens", "8", "--temperature", "0"]);
    let again = place.ok(&["generate", "run", "--prompt", "line 3", "--max-tokens", "8", "--temperature", "0"]);
    assert_eq!(text, again);
    // The Hugging Face folder is used as it is.
    let as_it_is = ["generate", "models/hf", "--prompt", "line 3", "--max-tokens", "8", "--temperature", "0"];
    assert_eq!(place.ok(&as_it_is), again);
    assert_eq!(loss(&place, "models/hf"), loss(&place, "run"));
    let args =
        ["checkpoint", "export", "moved", "--out", "again", "--dtype", "bf16", "--context", "64", "--format", "json"];
    let json: Value = serde_json::from_str(&place.ok(&args)).unwrap();
    assert_eq!((&json["dtype"], &json["step"]), (&Value::from("bf16"), &Value::from(0)));
    let config: Value = serde_json::from_slice(&std::fs::read(place.path("again/config.json")).unwrap()).unwrap();
    assert_eq!((&config["torch_dtype"], &config["max_position_embeddings"]), (&"bfloat16".into(), &64.into()));
    // A run from the weights begins where the other ended, and says so.
    for from in ["moved", "models/hf", "run"] {
        let dir = format!("next-{}", from.replace('/', "-"));
        let set = format!("train.init_from={from}");
        let output = place.run(&[
            "train",
            "run.toml",
            "--run-dir",
            &dir,
            "--set",
            &set,
            "--set",
            "train.steps=4",
            "--set",
            "train.validation_sequences=10",
        ]);
        let text = String::from_utf8(output.stderr).unwrap();
        // Of eight documents one is more than was asked for.
        let warned = text.lines().any(|line| line.starts_with("warning") && !line.contains("validation_fraction"));
        assert!(output.status.success() && text.contains("weights from ") && !warned, "{text}");
        let first = text.lines().find(|line| line.starts_with("step 0: validation loss")).unwrap();
        let last: f64 = place.trajectory("run").last().unwrap().rsplit(' ').next().unwrap().parse().unwrap();
        assert!(first.contains(&format!("{last:.4} nats")), "{from}: {first}, {last}");
    }
}

/// The example of layers that no family has, made small: trained in several layouts, taken from its checkpoint elsewhere, generated from.
#[test]
fn a_model_that_no_family_has_is_trained_in_any_layout_and_goes_on_from_its_checkpoint() {
    let place = Place::new();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/own-layers.toml");
    std::fs::copy(example, place.path("own.toml")).unwrap();
    let small = [
        "model.layers=4",
        "model.dim=48",
        "model.heads=4",
        "model.ffn=64",
        "model.sliding_window=9",
        "data.paths=[\"corpus\"]",
        "train.steps=6",
        "train.seq=32",
        "train.global_batch=8",
        "train.micro_batch=1",
        "train.validate_every=6",
        "train.threads=1",
        "checkpoint.every=3",
    ];
    let train = |run: &str, more: &[&str]| {
        let mut args = vec!["train", "own.toml", "--run-dir", run];
        small.iter().chain(more).for_each(|set| args.extend(["--set", set]));
        place.ok(&args);
    };
    train("one", &[]);
    let losses = |run: &str| -> Vec<f64> {
        let of = |line: &String| line.split(' ').nth(1).unwrap().parse().unwrap();
        place.trajectory(run).iter().map(of).collect()
    };
    let write =
        |from: &str| place.ok(&["generate", from, "--prompt", "line 3", "--max-tokens", "16", "--temperature", "0"]);
    let text = write("one");
    let layouts: [&[&str]; 2] = [
        &["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.pp=2"],
        &["parallel.dp=2", "parallel.zero=3", "parallel.cp=2"],
    ];
    for (i, layout) in layouts.into_iter().enumerate() {
        let run = format!("layout-{i}");
        train(&run, layout);
        for (one, other) in losses("one").iter().zip(losses(&run)) {
            assert!((one - other).abs() < 1e-4 * one, "{layout:?}: {one} and {other}");
        }
        assert_eq!(write(&run).len(), text.len(), "{layout:?}");
    }
    // A checkpoint is all of the model: elsewhere text comes from it and a run starts from it.
    std::fs::rename(place.path("layout-0/checkpoints/step-00000006"), place.path("mine")).unwrap();
    assert_eq!(write("mine").len(), text.len());
    train("next", &["train.init_from=mine", "train.steps=1"]);
    let [last, first] = [losses("one")[5], losses("next")[0]];
    assert!(first < losses("one")[0] - 0.2 && (first - last).abs() < 0.5, "{first} after {last}");
    // No class of transformers loads it, and which key stands in the way is said.
    let error = place.fails(2, &["checkpoint", "export", "one", "--out", "hf"]);
    assert!(error.contains("model.") && error.contains("\nhint: "), "{error}");
}

#[test]
fn mistakes_are_named_with_a_hint() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run", "--set", "train.steps=4"]);
    place.ok(&["checkpoint", "export", "run", "--out", "hf"]);
    for (args, expected) in [
        (
            &["import", "nowhere", "--out", "x"][..],
            "error: nowhere: no config.json\nhint: name the folder of a Hugging Face model",
        ),
        (&["export", "nowhere", "--out", "x"], "error: nowhere: no such run or checkpoint\nhint: "),
        (
            &["export", "hf", "--out", "x"],
            "error: hf: neither a run directory nor a checkpoint\nhint: it is a Hugging Face model",
        ),
        (
            &["export", "run", "--out", "hf"],
            "error: hf: there is something in this folder\nhint: give --out another path",
        ),
        (&["export", "run", "--out", "x", "--dtype", "int4"], "error: invalid value 'int4' for '--dtype <DTYPE>'"),
        (&["import", "hf"], "error: the following required arguments were not provided"),
    ] {
        let text = place.fails(2, &[&["checkpoint"], args].concat());
        assert!(text.starts_with(expected), "{args:?}: {text}");
        assert!(!place.path("x").exists());
    }
    let mut config: Value = serde_json::from_slice(&std::fs::read(place.path("hf/config.json")).unwrap()).unwrap();
    config["rope_scaling"] = serde_json::json!({ "type": "dynamic", "factor": 2.0 });
    std::fs::write(place.path("hf/config.json"), config.to_string()).unwrap();
    let text = place.fails(2, &["checkpoint", "import", "hf", "--out", "x"]);
    assert_eq!(
        text,
        "error: hf/config.json: `type` = \"dynamic\" is not supported\nhint: default, linear, llama3 and yarn are supported\n"
    );
}
