//! `lockstep rehearse`: a whole run in small, and five faults that it finds before the real one meets them.

mod common;

use common::{CONFIG, Place};
use serde_json::Value;
use std::path::Path;

/// What a rehearsal prints as JSON; it must end with this exit code.
fn rehearse(place: &Place, code: i32, more: &[&str]) -> Value {
    let output = place.run(&[&["rehearse", "run.toml", "--format", "json"], more].concat());
    let (text, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{text}{error}");
    assert!(!error.contains("panicked"), "{error}");
    if code != 0 {
        assert!(error.contains("hint: mend what is said above and rehearse again"), "{error}");
    }
    serde_json::from_str(&text).unwrap()
}

/// The one fault that is found, after its name; it says what to do.
fn fault(place: &Place, what: &str, more: &[&str]) -> String {
    let found = rehearse(place, 1, more);
    assert_eq!(found["faults"], 1, "{found:#}");
    let items = found["proven"].as_array().unwrap();
    let item = items.iter().find(|item| item["fault"].is_string()).unwrap();
    assert_eq!(item["what"], what, "{found:#}");
    assert!(
        !items.iter().any(|item| item["what"] == "train, save, kill"),
        "a run that cannot be is not tried in small"
    );
    let text = item["fault"].as_str().unwrap().to_owned();
    assert!(text.contains("hint: ") || text.contains("it fits on 2 ranks:"), "{text}");
    text
}

fn tokenizer(place: &Place) {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/fixtures/tokenizer.json");
    std::fs::copy(fixture, place.path("tokenizer.json")).unwrap();
}

#[test]
fn a_mixture_of_experts_is_exported_in_small_as_it_is_at_large() {
    let place = Place::new();
    let experts = "[model]\narchitecture = \"mixtral\"\nexperts = 4\nexperts_per_token = 2\nexpert_ffn = 96\n";
    let config = CONFIG.replacen("[model]\n", experts, 1).replacen("tied_embeddings = true\n", "", 1);
    place.config(&format!("{config}[parallel]\nep = 2\n"));
    assert_eq!(rehearse(&place, 0, &[])["faults"], 0);
}

#[test]
fn a_run_that_is_sound_is_gone_through_in_small() {
    let place = Place::new();
    place.config(&format!("{CONFIG}mirror = \"second\"\n[parallel]\ndp = 4\nzero = 1\ntp = 2\npp = 2\n"));
    let found = rehearse(&place, 0, &["--gpu", "h100"]);
    let items = found["proven"].as_array().unwrap();
    let names: Vec<&str> = items.iter().map(|item| item["what"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "layout",
            "tokenizer",
            "data",
            "validation",
            "checkpoint folder",
            "train, save, kill",
            "resume on another layout",
            "validate",
            "export"
        ]
    );
    let proven = |what: &str| items.iter().find(|item| item["what"] == what).unwrap()["proven"].as_str().unwrap();
    assert!(
        proven("train, save, kill").contains("8 ranks (") && proven("train, save, kill").contains("SIGKILL"),
        "{found:#}"
    );
    assert!(proven("train, save, kill").contains("layout "), "every axis is made 2: {found:#}");
    assert!(proven("resume on another layout").contains("; loss "), "{found:#}");
    assert!(items.iter().all(|item| item["seconds"].as_f64().unwrap() > 0.0));
    for key in ["step_s", "tokens_per_s", "days", "gpu_hours"] {
        assert!(found["predicted"][key].as_f64().unwrap() > 0.0, "{key}: {found:#}");
    }
    assert_eq!((&found["predicted"]["steps"], &found["predicted"]["ranks"]), (&20.into(), &16.into()));
    for left in ["runs", "second"] {
        assert!(!place.path(left).exists(), "{left}: nothing of the real run is touched");
    }
    // Text, and a folder that stays.
    place.config(CONFIG);
    let text = place.ok(&["rehearse", "run.toml", "--work", "kept"]);
    assert!(text.contains("proven  export: Hugging Face folder of step 24"), "{text}");
    assert!(text.contains("one rank"), "{text}");
    assert!(place.path("kept/hf/config.json").exists());
    let error = place.fails(2, &["rehearse", "run.toml", "--work", "kept"]);
    assert!(error.contains("kept has a rehearsal already"), "{error}");
}

#[test]
fn a_shard_that_cannot_be_read_is_found() {
    let place = Place::new();
    place.ok(&["data", "prepare", "run.toml", "--out", "shared"]);
    place.config(&CONFIG.replace("paths", "prepared = \"shared\"\npaths"));
    let shard = place.path("shared/train.shard");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::remove_file(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() / 2]).unwrap();
    let text = fault(&place, "data", &[]);
    assert!(text.contains("shared/train.shard: ") && text.contains("bytes long where the header says"), "{text}");
    // And one of Megatron's, half of which is gone.
    std::fs::write(&shard, &bytes).unwrap();
    place.ok(&["data", "export", "shared", "--out", "tokens"]);
    std::fs::remove_file(place.path("tokens/train.bin")).unwrap();
    place.config(&CONFIG.replace("\"corpus\"", "\"tokens/train.idx\""));
    let text = fault(&place, "data", &[]);
    assert!(text.contains("tokens/train.bin: missing"), "{text}");
}

#[test]
fn a_checkpoint_folder_that_cannot_be_written_is_found() {
    let place = Place::new();
    std::fs::write(place.path("file"), "in the way").unwrap();
    place.config(&format!("{CONFIG}mirror = \"file/second\"\n"));
    let text = fault(&place, "checkpoint folder", &[]);
    assert!(text.contains("cannot write checkpoints into") && text.contains("file/second/run"), "{text}");
    // The run directory itself.
    place.config(&CONFIG.replace("paths", "prepared = \"shared\"\npaths"));
    let text = fault(&place, "checkpoint folder", &["--run-dir", "file/run"]);
    assert!(text.contains("file/run/checkpoints"), "{text}");
}

#[test]
fn a_layout_that_does_not_fit_is_found() {
    let place = Place::new();
    let large = ["model.layers=4", "model.dim=16384", "model.heads=128", "model.kv_heads=128", "model.ffn=65536"];
    let set: Vec<&str> = large.iter().flat_map(|key| ["--set", key]).collect();
    let text = fault(&place, "layout", &[&set[..], &["--gpu", "h100"]].concat());
    assert!(text.contains("does NOT fit: ") && text.contains("GiB planned"), "{text}");
}

#[test]
fn a_tokenizer_that_is_not_the_models_is_found() {
    let place = Place::new();
    // Fewer tokens than the model has, by far; and more.
    let text = fault(&place, "tokenizer", &["--set", "model.vocab_size=32000"]);
    assert!(text.contains("model.vocab_size = 32000, and data.tokenizer (\"bytes\") has 256 tokens"), "{text}");
    tokenizer(&place);
    let found = rehearse(&place, 1, &["--set", "data.tokenizer=tokenizer.json"]);
    let item = found["proven"].as_array().unwrap().iter().find(|item| item["what"] == "tokenizer").unwrap();
    assert!(item["fault"].as_str().unwrap().contains("1000"), "{found:#}");
    // Tokens of another tokenizer, in Megatron's files.
    place.config(
        &CONFIG
            .replace("vocab_size = 256", "vocab_size = 1000")
            .replace("paths", "tokenizer = \"tokenizer.json\"\npaths"),
    );
    place.ok(&["data", "prepare", "run.toml", "--out", "shared"]);
    place.ok(&["data", "export", "shared", "--out", "tokens"]);
    place.config(&CONFIG.replace("\"corpus\"", "\"tokens/train\""));
    let text = fault(&place, "data", &[]);
    assert!(text.contains("tokens/train.bin: token ") && text.contains("the tokenizer has tokens below 256"), "{text}");
}

#[test]
fn a_validation_set_that_is_empty_is_found() {
    let place = Place::new();
    let text = fault(&place, "validation", &["--set", "data.validation_fraction=0"]);
    assert!(text.contains("the validation set is empty: data.validation_fraction = 0 holds out nothing"), "{text}");
    // Some is held out, and less than a sequence.
    std::fs::write(place.path("corpus/0.txt"), "short").unwrap();
    place.config(&CONFIG.replace("seq = 32", "seq = 8192"));
    let text = fault(&place, "validation", &[]);
    assert!(text.contains("not one sequence of 8192"), "{text}");
}
