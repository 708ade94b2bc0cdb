//! `lockstep validate`: rows of published measurements, and rows that are none.

mod common;

use common::Place;
use serde_json::Value;

const ROWS: &str = include_str!("published/rows.csv");

fn place() -> Place {
    let place = Place::new();
    std::fs::write(place.path("rows.csv"), ROWS).unwrap();
    place
}

fn json(place: &Place, args: &[&str]) -> Value {
    let args = [&["validate", "rows.csv", "--format", "json"], args].concat();
    serde_json::from_str(&place.ok(&args)).unwrap()
}

#[test]
fn bad_rows_are_named_by_line_and_the_rest_goes_on() {
    let found = json(&place(), &[]);
    let refused: Vec<(u64, &str)> = found["not_represented"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["line"].as_u64().unwrap(), row["reason"].as_str().unwrap()))
        .collect();
    let expected = [
        (9, "tp × pp × dp × cp = 2 × 1 × 8 × 1, and gpus = 8"),
        (10, "microbatch × dp = 48 × 8 does not divide global_batch = 2048"),
        (11, "gpu = \"z80\" is not in the catalogue: "),
        (12, "step_time_s = \"1000 ms\" is not a positive number of seconds"),
        (13, "step_time_s = 1000 s, and by tokens_per_s_per_gpu a step takes 1.0000 s"),
        (14, "has 21 fields, and the header has 30"),
        (15, "source \"nobody\" names no framework that is known: give --framework nanotron, "),
        (16, "model.dim = 770"),
        (17, "params = 7e9, and layers, hidden, ffn and vocab make 1.24e8 to "),
        (18, "a step of 1 ms is faster than its matmuls at the peak of h100, "),
        (19, "mem_gb is 900 GiB, and h100 has 78.5 GiB"),
    ];
    assert_eq!(refused.len(), expected.len(), "{refused:?}");
    for ((line, reason), (expected_line, expected_reason)) in refused.iter().zip(expected) {
        assert_eq!(*line, expected_line);
        assert!(reason.starts_with(expected_reason) || reason.contains(expected_reason), "{line}: {reason}");
    }
    assert_eq!(found["rows"].as_array().unwrap().len(), 7);
    let text = place().ok(&["validate", "rows.csv", "--rows"]);
    for wanted in ["rows.csv:11 MPT-125m: gpu = \"z80\"", "clean rows", "step time", "failed, as predicted"] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
}

#[test]
fn json_has_errors_in_sum_and_by_row() {
    let found = json(&place(), &[]);
    for part in ["clean", "all"] {
        let summary = &found["summary"][part];
        assert_eq!(summary["rows"], 7);
        for quantity in ["step_time", "memory"] {
            for statistic in ["median", "mean", "p90"] {
                assert!(summary[quantity][statistic].as_f64().unwrap() >= 0.0, "{part} {quantity} {statistic}");
            }
        }
        // One does not fit, the other has a stage with nothing to do; the rest ran.
        assert_eq!(summary["oom"]["right"], 1.0);
        assert_eq!(summary["oom"]["rows"], 4);
    }
    let rows = found["rows"].as_array().unwrap();
    let row = |line: u64| rows.iter().find(|row| row["line"] == line).unwrap();
    let near = |row: &Value| {
        let (measured, predicted) = (row["measured_s"].as_f64().unwrap(), row["predicted_s"].as_f64().unwrap());
        assert!((row["error"].as_f64().unwrap() - (predicted / measured - 1.0).abs()).abs() < 1e-9);
        predicted / measured
    };
    assert!((0.85..1.15).contains(&near(row(5))), "{}", row(5));
    assert!((0.8..1.2).contains(&(row(6)["predicted_memory_bytes"].as_f64().unwrap() / 36.7 / f64::from(1 << 30))));
    assert_eq!(row(4)["framework"], "llm-foundry fp8");
    assert!(row(4)["measured_s"].as_f64().unwrap() > 1.3, "from tokens per second");
    assert_eq!((&row(7)["failed"], &row(7)["runs"]), (&Value::Bool(true), &Value::Bool(false)));
    let tokens = row(2)["predicted_tokens_per_s_per_gpu"].as_f64().unwrap();
    assert!((tokens * row(2)["predicted_s"].as_f64().unwrap() / (2048.0 * 2048.0 / 8.0) - 1.0).abs() < 1e-9);
}

#[test]
fn a_named_row_teaches_a_factor_for_its_source_and_gpu_and_is_left_out() {
    let place = place();
    let before = json(&place, &[]);
    let after = json(&place, &["--calibrate", "rows.csv:2"]);
    assert_eq!(after["rows"].as_array().unwrap().len(), 6);
    let of = |found: &Value, line: u64| {
        let rows = found["rows"].as_array().unwrap().clone();
        rows.into_iter().find(|row| row["line"] == line).unwrap()["predicted_s"].as_f64().unwrap()
    };
    let factor = after["calibrated"][0]["factor"].as_f64().unwrap();
    assert!((factor * of(&before, 2) - 1.0).abs() < 1e-9);
    assert!((of(&after, 3) / of(&before, 3) / factor - 1.0).abs() < 1e-9);
    assert_eq!(of(&after, 5), of(&before, 5), "another source");
    let calibrated = &after["calibrated"][0];
    assert_eq!((&calibrated["rows"], &calibrated["precision"]), (&Value::from(1), &Value::from("16-bit")));
    // Of several rows, the median; with as many as there are, none is left to report.
    let several = json(&place, &["--calibrate", "rows.csv:2-3", "--calibrate", "rows.csv:3"]);
    assert_eq!(several["calibrated"][0]["rows"], 2);
    let both = [2, 3].map(|line| {
        let row = before["rows"].as_array().unwrap().iter().find(|row| row["line"] == line).unwrap().clone();
        row["measured_s"].as_f64().unwrap() / row["predicted_s"].as_f64().unwrap()
    });
    let factor = several["calibrated"][0]["factor"].as_f64().unwrap();
    assert!((factor / (both[0] * both[1]).sqrt() - 1.0).abs() < 1e-9, "{both:?} {factor}");
    for (named, said) in [("rows.csv:3-2", "the first is after the last"), ("rows.csv:2-x", "a line number")] {
        let error = place.fails(2, &["validate", "rows.csv", "--calibrate", named]);
        assert!(error.contains(said) && error.contains("rows.csv:2-5"), "{error}");
    }
    let error = place.fails(2, &["validate", "rows.csv", "--calibrate", "rows.csv:7"]);
    assert!(error.contains("is no row that was measured and predicted") && error.contains("hint: "), "{error}");
}

#[test]
fn the_fit_is_the_same_every_time_and_does_not_make_errors_larger() {
    let place = place();
    let fit = |out: &str| {
        place.ok(&["validate", "rows.csv", "--fit", out, "--rounds", "2"]);
        std::fs::read_to_string(place.path(out)).unwrap()
    };
    assert_eq!(fit("a.toml"), fit("b.toml"));
    let mean = |args: &[&str]| json(&place, args)["summary"]["clean"]["step_time"]["mean"].as_f64().unwrap();
    assert!(mean(&["--constants", "a.toml"]) <= mean(&[]) + 0.02);
    let left = json(&place, &["--fit", "c.toml", "--rounds", "1", "--leave-out", "nanotron"]);
    assert_eq!(left["rows"].as_array().unwrap().len(), 4);
    assert!(left["left_out_with_one_factor"]["rows"]["median"].as_f64().is_some());
    assert!(left["left_out_without_profile"]["step_time"]["rows"]["median"].as_f64().is_some());
}

/// Rows that are no part of a fit say how sure predicted times are; nine of ten lie inside.
#[test]
fn intervals_hold_nine_of_ten_rows_that_were_left_out() {
    let place = place();
    let found = json(&place, &[]);
    let left_out = &found["intervals"]["left_out"];
    let share = |of: &Value| of["inside"].as_f64().unwrap();
    assert!(left_out["model"]["rows"].as_u64().unwrap() > 1000, "{left_out}");
    for distance in ["model", "gpu"] {
        assert!((0.85..=0.95).contains(&share(&left_out[distance])), "{distance}: {left_out}");
    }
    // What holds nanotron up beside a pipeline over several nodes shows in no other framework.
    assert!((0.75..=0.95).contains(&share(&left_out["framework"])), "{left_out}");
    for row in found["rows"].as_array().unwrap().iter().filter(|row| row["predicted_s"].is_f64()) {
        let interval = &row["interval"];
        let (share, distance) = (interval["share"].as_f64().unwrap(), interval["distance"].as_str().unwrap());
        assert!((0.01..1.5).contains(&share) && distance == "model", "{row}");
        if let (Some(predicted), Some(measured)) = (row["predicted_s"].as_f64(), row["measured_s"].as_f64()) {
            let inside = measured <= predicted * (1.0 + share) && measured >= predicted / (1.0 + share);
            assert_eq!(row["inside"], inside, "{row}");
        }
    }
    // Residuals are computed from the rows that are given, and this program's own are kept.
    let text = place.ok(&["validate", "rows.csv", "--residuals", "residuals.toml", "--rounds", "1"]);
    assert!(text.contains("left out by framework") && text.contains("residuals in residuals.toml"), "{text}");
    let written = std::fs::read_to_string(place.path("residuals.toml")).unwrap();
    for part in [
        "framework = \"nanotron\"",
        "framework = \"llm-foundry fp8\"",
        "framework = \"lockstep\"",
        "distance = \"framework\"",
    ] {
        assert!(written.contains(part), "{part}: {written}");
    }
    let error = place.fails(2, &["validate", "rows.csv", "--rounds", "2"]);
    assert!(error.contains("--fit") && error.contains("--residuals"), "{error}");
}

#[test]
fn with_no_rows_left_nothing_is_said_to_be_right_and_assumptions_stand_once() {
    let place = place();
    let found = json(&place, &["--fit", "d.toml", "--rounds", "1", "--leave-out", "nobody@h100"]);
    let clean = &found["summary"]["clean"];
    assert_eq!((&clean["rows"], &clean["step_time"], &clean["regret"]), (&Value::from(0), &Value::Null, &Value::Null));
    for share in ["right", "ran_right", "failed_right"] {
        assert_eq!(clean["oom"][share], Value::Null, "{share}");
    }
    assert_eq!(found["assumed"].as_array().unwrap().len(), 0);
    let sources = "source,model,layers,hidden,heads,seq,gpus,gpu,tp,pp,dp,cp,ep,zero,microbatch,global_batch,precision,step_time_s,notes\n\
                   dgxc,Llama3.1-8b,,,,8192,8,DGX-H100,1,1,4,2,,1,1,128,BF16,12.27,VP=NA\n\
                   dgxc,Llama3.1-8b,,,,8192,16,8xH100,1,1,8,2,n/a,1,1,256,BF16,12.3,VP=NA\n\
                   Megatron-Bridge,Qwen3_30B_a3B,,,,4096,16,DGX-H100,1,2,8,1,8,1,1,1024,FP8,28.941,VP=12\n";
    std::fs::write(place.path("written.csv"), sources).unwrap();
    let found: Value = serde_json::from_str(&place.ok(&["validate", "written.csv", "--format", "json"])).unwrap();
    assert_eq!(found["not_represented"], Value::Array(Vec::new()));
    let rows = found["rows"].as_array().unwrap();
    assert!(rows.iter().all(|row| row["framework"].as_str().unwrap().starts_with("megatron-core")), "{rows:?}");
    assert!(rows[..2].iter().all(|row| row["error"].as_f64().unwrap() < 0.05), "{rows:?}");
    assert_eq!(rows[2]["layout"], "pp=2 dp=8 ep=8 zero=1 mb=1");
    let assumed = found["assumed"].as_array().unwrap();
    let shape = assumed.iter().find(|one| one["what"] == "the shape of llama-3.1-8b").unwrap();
    assert_eq!((&shape["rows"], &shape["first"]), (&Value::from(2), &Value::from("written.csv:2")));
    let text = place.ok(&["validate", "written.csv"]);
    assert!(text.contains("the shape of llama-3.1-8b: 2 rows, the first written.csv:2"), "{text}");
}

#[test]
fn pictures_have_a_point_for_every_row() {
    let place = place();
    place.ok(&["validate", "rows.csv", "--plot", "plots"]);
    let svg = std::fs::read_to_string(place.path("plots/rows.svg")).unwrap();
    assert_eq!(svg.matches("class=\"point\"").count(), 5, "{svg}");
    assert!(svg.contains("predicted against measured") && svg.ends_with("</svg>\n"));
    let memory = std::fs::read_to_string(place.path("plots/rows-memory.svg")).unwrap();
    assert_eq!(memory.matches("class=\"point\"").count(), 2);
}

#[test]
fn a_missing_column_or_file_is_named() {
    let place = place();
    std::fs::write(place.path("short.csv"), ROWS.replacen("hidden", "width", 1)).unwrap();
    let text = place.ok(&["validate", "short.csv", "rows.csv"]);
    assert!(text.contains("short.csv:1: the header has no column `hidden`"), "{text}");
    assert!(text.contains("clean rows"), "{text}");
    let error = place.fails(2, &["validate", "none.csv"]);
    assert!(error.contains("cannot read none.csv") && error.contains("hint: "), "{error}");
    let error = place.fails(2, &["validate", "rows.csv", "--framework", "caffe"]);
    assert!(error.contains("known are nanotron"), "{error}");
}

/// The sweep of the Ultra-Scale Playbook, as far as it was run on one node: the rest takes a minute (bench/records/regret.txt).
#[test]
fn on_one_node_the_search_proposes_what_was_measured_to_be_fast() {
    const SWEEP: &str = include_str!("../../../bench/records/published/nanotron_ok.csv");
    let place = Place::new();
    let rows: Vec<&str> =
        SWEEP.lines().enumerate().filter(|(i, row)| *i == 0 || row.contains(",8,H100")).map(|(_, row)| row).collect();
    std::fs::write(place.path("rows.csv"), rows.join("\n")).unwrap();
    let found = json(&place, &["--search"]);
    let cells = found["search"]["cells"].as_array().unwrap();
    let models: Vec<&str> = cells.iter().map(|cell| cell["model"].as_str().unwrap()).collect();
    assert_eq!(models, ["nanotron-llama-1B", "nanotron-llama-3B"]);
    for cell in cells {
        assert!(cell["regret"].as_f64().unwrap() <= 0.05, "{cell}");
        assert!(cell["regret_of_five"].as_f64().unwrap() <= 0.01, "{cell}");
        let proposals = cell["proposals"].as_array().unwrap();
        assert_eq!(proposals.iter().filter(|p| p["measured_s"].is_f64()).count(), 5, "{cell}");
        // What nanotron does not have is not proposed.
        for proposal in proposals {
            let layout = proposal["layout"].as_str().unwrap();
            assert!(!["cp=", "zero=2", "zero=3"].iter().any(|word| layout.contains(word)), "{layout}");
        }
    }
}
