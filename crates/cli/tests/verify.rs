//! `lockstep verify`, and what `explain` says of several ranks.

mod common;

use common::Place;
use serde_json::Value;

/// A config that only fits as it is: eight layers for eight stages, sixteen sequences for sixteen ranks.
const WIDE: &str = "[model]\nvocab_size = 64\nlayers = 8\ndim = 32\nheads = 8\nffn = 64\n\
                    [train]\nseq = 96\nglobal_batch = 16\nmicro_batch = 1\nthreads = 1\n";

fn json(place: &Place, args: &[&str]) -> Value {
    let args = [args, &["--format", "json"]].concat();
    serde_json::from_str(&place.ok(&args)).unwrap()
}

#[test]
fn verify_compares_every_kind_of_layout_that_fits() {
    let place = Place::new();
    let found = json(&place, &["verify", "run.toml", "--steps", "2"]);
    assert_eq!(found["kept"], true);
    let layouts = found["layouts"].as_array().unwrap();
    let of = |name: &str| layouts.iter().find(|l| l["layout"] == name).unwrap_or_else(|| panic!("{name}"));
    assert_eq!(of("pp=2 1f1b")["identical"], true);
    let tp = of("tp=2");
    assert_eq!(tp["identical"], false, "tensor parallelism adds in another order");
    assert_eq!(tp["losses"].as_array().unwrap().len(), 2);
    assert!(tp["gradient_difference"].as_f64().unwrap() > 0.0);
    let text = place.ok(&["verify", "run.toml", "--layouts", "dp=2,zero=1", "--steps", "1"]);
    assert!(text.contains("dp=2 zero=1") && text.contains("kept"), "{text}");
    // Where bits are promised, they are all that the table has.
    let text = place.ok(&["verify", "run.toml", "--layouts", "pp=2", "--steps", "1"]);
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(rows.contains(&vec!["layout", "bits"]) && rows.contains(&vec!["pp=2", "1f1b", "same", "kept"]), "{text}");
}

#[test]
fn a_layout_that_does_not_fit_the_model_is_refused_and_one_that_does_survives_making_it_smaller() {
    let place = Place::new();
    let error = place.fails(2, &["verify", "run.toml", "--layouts", "tp=3"]);
    assert!(error.contains("tp = 3 does not divide model.heads = 4"), "{error}");
    assert!(place.fails(2, &["verify", "run.toml", "--layouts", "tp=two"]).contains("hint: "));
    assert!(place.fails(2, &["verify", "run.toml", "--steps", "0"]).contains("steps"));
    place.config(WIDE);
    for layout in ["pp=8", "dp=16", "tp=8", "tp=2,sp", "cp=4,tp=2,sp"] {
        let found = json(&place, &["verify", "run.toml", "--layouts", layout, "--steps", "1"]);
        assert_eq!(found["layouts"].as_array().unwrap().len(), 1, "{layout}");
    }
    place.config(
        &WIDE
            .replace("layers = 8", "layers = 1")
            .replace("global_batch = 16", "global_batch = 1")
            .replace("seq = 96", "seq = 95")
            .replace("heads = 8", "heads = 1"),
    );
    assert!(place.fails(2, &["verify", "run.toml"]).contains("no layout of several ranks fits"));
}

#[test]
fn sizes_of_layouts_are_those_that_divide_the_model() {
    let place = Place::new();
    place.config(
        &WIDE.replace("heads = 8", "heads = 9").replace("dim = 32", "dim = 36").replace("ffn = 64", "ffn = 63"),
    );
    let text = place.ok(&["verify", "run.toml", "--steps", "1"]);
    assert!(text.contains("tp=3 sp") && text.contains("dp=2 tp=3") && !text.contains("tp=2"), "{text}");
    // Every criterion with its bound.
    for word in ["loss", "grad", "norm", "state", "update", "eval", "same", "at most", "kept", "dp=2 zero=1 tp=3 sp "] {
        assert!(text.contains(word), "{word} in {text}");
    }
    assert!(text.contains("1.0e-5") && text.contains("1.0e-4") && text.contains("2.0e-2"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn layouts_that_choose_other_experts_are_compared_with_replayed_choices() {
    let place = Place::new();
    let experts = "architecture = \"mixtral\"\nexperts = 8\nexperts_per_token = 3\nffn = 24\n";
    place.config(&format!("{}[precision]\npolicy = \"bf16\"\n", WIDE.replace("ffn = 64\n", experts)));
    let args = ["verify", "run.toml", "--layouts", "ep=2;ep=2,tp=2,sp;cp=2,ep=2", "--steps", "2"];
    let text = place.ok(&args);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains("2 of 3 layouts chose other experts because they round otherwise. They were run again"),
        "{text}"
    );
    assert!(words.contains("choices of experts, those that differ from one rank's: ep=2 tp=2 sp "), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let found = json(&place, &args);
    let [alone, tp, cp] = [0, 1, 2].map(|i| &found["layouts"][i]);
    assert!(alone["flipped_choices"][0] == 0 && alone.get("own_choices").is_none(), "{alone}");
    for layout in [tp, cp] {
        let of = |layout: &Value| layout["gradient_difference"].as_f64().unwrap();
        assert!(layout["flipped_choices"][0].as_u64().unwrap() > 0, "{layout}");
        assert!(of(layout) < of(&layout["own_choices"]), "{layout}");
    }
}

#[test]
fn a_bound_that_cannot_hold_is_no_bug() {
    let place = Place::new();
    let experts = "architecture = \"mixtral\"\nexperts = 8\nexperts_per_token = 3\nffn = 24\n";
    place.config(&WIDE.replace("ffn = 64\n", experts));
    let error = place.fails(1, &["verify", "run.toml", "--layouts", "ep=2,bound=1", "--steps", "1"]);
    assert!(error.contains("hint: beyond a bound on the rows of experts nothing is computed: raise it"), "{error}");
}

#[test]
fn explain_shows_every_stage_with_its_bytes_and_exchanges() {
    let place = Place::new();
    place.config(&format!("{WIDE}[parallel]\ndp = 2\nzero = 1\ntp = 2\npp = 2\n"));
    let layout = &json(&place, &["explain", "run.toml"])["layout"];
    assert_eq!((layout["ranks"].as_u64(), layout["layout"].as_str()), (Some(8), Some("dp=2 zero=1 tp=2 pp=2 1f1b")));
    assert!(layout["bubble"].as_f64().unwrap() > 0.0);
    for role in layout["roles"].as_array().unwrap() {
        let classes = role["memory"]["classes"].as_object().unwrap();
        let sum: u64 = classes.values().map(|v| v.as_u64().unwrap()).sum();
        assert_eq!(role["memory"]["total_bytes"], sum);
        let ops: Vec<&str> =
            role["collectives"].as_array().unwrap().iter().map(|e| e["op"].as_str().unwrap()).collect();
        for op in ["all_reduce", "reduce_scatter", "all_gather", "send", "receive"] {
            assert!(ops.contains(&op), "{op} on stage {}", role["stage"]);
        }
    }
    let text = place.ok(&["explain", "run.toml"]);
    assert!(text.contains("stage 1: ranks 4 to 7, layers 4 to 7") && text.contains("pipeline: bubble"), "{text}");
}

#[test]
fn explain_shows_how_equal_attention_is_on_context_parallel_ranks() {
    let place = Place::new();
    let keys = "[train]\nseq = 2048\nglobal_batch = 2\ndevice = \"cpu\"\n[parallel]\ncp = 2\n";
    let model = "[model]\nvocab_size = 64\nlayers = 2\ndim = 16\nheads = 2\nffn = 16\n";
    place.config(&format!("{model}{keys}"));
    let layout = &json(&place, &["explain", "run.toml"])["layout"];
    assert_eq!((layout["layout"].as_str(), layout["context"].as_str()), (Some("cp=2"), Some("ring")));
    let blocks = &layout["roles"][0]["attention_blocks"];
    assert!(blocks[0] == blocks[1] && blocks[0].as_u64() > Some(0), "{blocks}");
    let text = place.ok(&["explain", "run.toml"]);
    assert!(text.contains("attention over cp, in blocks of 128 × 128 positions") && text.contains(" on every rank"));
    place.config(&format!("{model}architecture = \"mistral\"\nsliding_window = 300\n{keys}"));
    let text = place.ok(&["explain", "run.toml"]);
    assert!(text.contains("% more than the mean"), "{text}");
    let error = place.fails(2, &["explain", "run.toml", "--set", "parallel.cp=3"]);
    assert!(error.contains("6 chunks") && error.contains("cp = 2 or 4"), "{error}");
}

#[test]
fn a_last_stage_with_the_head_alone_computes_the_same() {
    let place = Place::new();
    let stages = ["--set", "parallel.pp=2", "--set", "parallel.stages=[2, 0]", "--full-size", "--steps", "2"];
    let found = json(&place, &[&["verify", "run.toml", "--layouts", "pp=2"][..], &stages].concat());
    assert_eq!(found["layouts"][0]["identical"], true, "{found}");
}
