//! What explain says besides the memory breakdown: the cost of a run, recomputation, scaling, formulas, the timeline.

mod common;

use common::Place;
use serde_json::Value;

/// An 8B model at sequence 4096.
fn llama_3_8b() -> Place {
    let place = Place::new();
    place.config(
        "[model]\npreset = \"llama-3-8b\"\n[train]\nseq = 4096\nglobal_batch = 1\n[precision]\npolicy = \"bf16\"",
    );
    place
}

fn json(place: &Place, args: &[&str]) -> Value {
    let args = [&["explain", "run.toml", "--format", "json"], args].concat();
    serde_json::from_str(&place.ok(&args)).unwrap()
}

#[test]
fn a_run_is_priced_in_flops_gpu_days_and_days() {
    let place = llama_3_8b();
    let run = ["--tokens", "15T", "--gpu", "a100", "--mfu", "0.4", "--gpus", "480"];
    let cost = &json(&place, &run)["cost"];
    let near = |field: &str, expected: f64, digits: f64| {
        let found = cost[field].as_f64().unwrap();
        assert!((found - expected).abs() <= digits / 2.0, "{field}: {found}");
    };
    near("model_flops", 7.7e23, 0.1e23);
    near("gpu_days", 71_600.0, 100.0);
    near("days", 149.0, 1.0);
    let text = place.ok(&[&["explain", "run.toml"], &run[..]].concat());
    assert!(text.contains("a run of 15.0T tokens: 7.72e23 model FLOPs"), "{text}");
    assert!(text.contains("GPU-days on a100 at MFU 0.4 of 312 TFLOP/s (bf16)\n  149.2 days on 480 of them"), "{text}");
    assert!(json(&place, &[])["cost"].is_null());
}

#[test]
fn layers_that_stay_in_bf16_are_named_with_the_reason() {
    let place = llama_3_8b();
    let fp8 = |set: &[&str]| {
        let sets = set.iter().flat_map(|set| ["--set", *set]).collect::<Vec<_>>();
        let text = place.ok(&[&["explain", "run.toml", "--set", "precision.policy=fp8"][..], &sets].concat());
        let from = text.find("fp8: ").unwrap();
        text[from..].split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let all = "fp8: the matmuls of 128 of 128 linear layers; weights are quantised: 128";
    let once = format!("{all} once per step, in the memory of the weights in bf16 ");
    assert!(fp8(&[]).starts_with(&once), "{}", fp8(&[]));
    let gathered = fp8(&["parallel.dp=2", "parallel.zero=3", "train.global_batch=2"]);
    assert!(gathered.starts_with(&format!("{all} in every micro-batch, as ZeRO 3 gathers them")), "{gathered}");
    let small = fp8(&["precision.fp8_weights=20000000"]);
    let why = "32 × wo in bf16: 16,777,216 weights on a rank, and fp8 is faster from 20,000,000 on";
    assert!(small.starts_with("fp8: the matmuls of 96 of 128 linear layers; ") && small.contains(why), "{small}");
    let edges = fp8(&["precision.fp8_skip_first=1", "precision.fp8_skip_last=2"]);
    assert!(
        edges.starts_with("fp8: the matmuls of 116 of 128") && edges.contains("3 × wo in bf16: of the first"),
        "{edges}"
    );
}

#[test]
fn a_price_that_cannot_be_meant_is_refused() {
    let place = llama_3_8b();
    for (args, part) in [
        (&["--tokens", "15T", "--gpu", "a10O", "--mfu", "0.4"][..], "did you mean a100?"),
        (&["--tokens", "15T", "--gpu", "a100", "--mfu", "40"], "--mfu 40 is no share"),
        (&["--tokens", "15 parsecs"], "--tokens 15 parsecs is not a count"),
        (&["--tokens", "1T", "--gpu", "a100", "--mfu", "0.4", "--gpus", "0"], "--gpus 0 trains nothing"),
        (&["--gpus", "8"], "--gpus needs to know which"),
        (&["--tokens", "1T", "--mfu", "0.4"], "--mfu needs to know which"),
        (&["--cluster", "leonrdo"], "did you mean leonardo?"),
        (&["--cluster", "vega", "--gpus", "256"], "--gpus 256: vega has 240 GPUs"),
        (&["--gpu", "a100", "--cluster", "vega"], "cannot be used with"),
        (&["--trace", "t.json"], "--trace writes a predicted step"),
        (&["--gpu", "a100", "--trace", "t.svg"], "--trace t.svg is not a .json"),
    ] {
        let args = [&["explain", "run.toml"], args].concat();
        let error = place.fails(2, &args);
        assert!(error.contains(part), "{args:?}: {error}");
    }
}

#[test]
fn policies_scaling_and_formulas_stand_side_by_side() {
    let place = Place::new();
    let explained = json(&place, &["--set", "recompute.policy=selective"]);
    let policies = explained["recompute"]["policies"].as_array().unwrap();
    let names: Vec<&str> = policies.iter().map(|p| p["policy"].as_str().unwrap()).collect();
    assert_eq!(names, ["none", "selective", "full", "every-k, k = 2", "sqrt"]);
    let chosen = policies.iter().find(|p| p["chosen"] == true).unwrap();
    assert_eq!(chosen["policy"], "selective");
    assert_eq!(chosen["arena_bytes"], explained["memory"]["total_bytes"]);
    let none = policies[0]["arena_bytes"].as_i64().unwrap();
    for p in policies {
        assert_eq!(p["less_than_none_bytes"].as_i64().unwrap(), none - p["arena_bytes"].as_i64().unwrap());
        assert!(p["saved_bytes"].is_u64() && p["added_flops"].is_number() && p["added_share"].is_number());
    }
    let scaling: Vec<&Value> = explained["scaling"].as_array().unwrap().iter().collect();
    assert_eq!(
        scaling.iter().map(|g| g["doubled"].as_str().unwrap()).collect::<Vec<_>>(),
        ["batch", "sequence", "width", "depth"]
    );
    assert_eq!(scaling[0]["model_flops"], 2.0);
    assert!(scaling[2]["classes"]["parameters"].as_f64() > Some(2.0));
    for f in explained["formulas"].as_array().unwrap() {
        assert_eq!(f["program"], f["closed"], "{f}");
    }
    let text = place.ok(&["explain", "run.toml"]);
    for part in ["none *", "at twice the", "attention FLOPs of a layer and sequence = 12 · S · D · (Q + KV) + 12 · S²"]
    {
        assert!(text.contains(part), "{part}\n{text}");
    }
}

#[test]
fn a_budget_says_what_it_computes_again_and_one_that_is_too_small_what_is_least() {
    let place = Place::new();
    let set = |policy: &str| place.ok(&["explain", "run.toml", "--format", "json", "--set", policy]);
    let arena = |text: String| serde_json::from_str::<Value>(&text).unwrap()["memory"]["total_bytes"].as_u64().unwrap();
    let budget = format!("recompute.budget=\"{} B\"", arena(set("recompute.policy=selective")));
    let text = place.ok(&["explain", "run.toml", "--set", "recompute.policy=budget", "--set", &budget]);
    assert!(text.contains("budget *") && text.contains("  recomputed in ") && text.contains(": rms_norm.y"), "{text}");
    let small = ["explain", "run.toml", "--set", "recompute.policy=budget", "--set", "recompute.budget=\"1 KiB\""];
    let error = place.fails(2, &small);
    assert!(error.contains("recompute.budget = 1.00 KiB cannot be kept: the arena needs at least"), "{error}");
}

#[test]
fn a_schedule_is_drawn_with_every_slot_its_legend_and_its_units() {
    let place = Place::new();
    let zb_v = ["--set", "model.layers=4", "--set", "parallel.pp=2", "--set", "parallel.schedule=zb-v"];
    place.ok(&[&["explain", "run.toml", "--schedule", "s.svg"], &zb_v[..]].concat());
    let svg = std::fs::read_to_string(place.path("s.svg")).unwrap();
    assert!(svg.starts_with("<svg xmlns=") && svg.trim_end().ends_with("</svg>"));
    let parts = ["rank 0", "rank 1", "F: forward", "B: input gradients", "W: weight gradients", "idle (bubble)"];
    for part in parts.iter().chain(&["time, as FLOPs of one rank", "chunk 1", "class=\"sent\""]) {
        assert!(svg.contains(part), "{part}");
    }
    let layout = &json(&place, &zb_v)["layout"];
    let m = json(&place, &zb_v)["step"]["accumulation_steps"].as_u64().unwrap() as usize;
    // Two ranks, two chunks, three kinds of work.
    assert_eq!(svg.matches("class=\"slot\"").count(), 12 * m);
    assert_eq!((&layout["virtual"], &layout["schedule"]), (&Value::from(2), &Value::from("zb-v")));
    assert_eq!(layout["roles"][0]["chunks"], serde_json::json!([[0, 0], [3, 3]]));
    let error = place.fails(2, &["explain", "run.toml", "--schedule", "s.svg"]);
    assert!(error.contains("parallel.pp = 1\nhint: add --set parallel.pp=2"), "{error}");
    let error = place.fails(2, &["explain", "run.toml", "--schedule", "s.png"]);
    assert!(error.contains("s.png is not an .svg\nhint: name it schedule.svg"), "{error}");
}

#[test]
fn timelines_are_pictures_or_traces_one_for_each_stage() {
    let place = Place::new();
    place.ok(&["explain", "run.toml", "--timeline", "memory.svg"]);
    let svg = std::fs::read_to_string(place.path("memory.svg")).unwrap();
    let explained = json(&place, &["--timeline", "memory.json"]);
    assert!(svg.starts_with("<svg xmlns=") && svg.trim_end().ends_with("</svg>"));
    for part in ["parameters ", "activations ", "time, instructions", "forward 0", "prefers-color-scheme: dark", "MiB"]
    {
        assert!(svg.contains(part), "{part}");
    }
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(place.path("memory.json")).unwrap()).unwrap();
    let counters: Vec<&Value> = trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "C").collect();
    let total = |e: &Value| e["args"].as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum::<u64>();
    let most = counters.iter().map(|e| total(e)).max().unwrap();
    assert_eq!(most, explained["memory"]["peak"]["live_bytes"].as_u64().unwrap());
    assert_eq!(trace["otherData"]["arena_bytes"], explained["memory"]["total_bytes"]);
    place.ok(&["explain", "run.toml", "--set", "parallel.pp=2", "--gpu", "a100", "--timeline", "stages.svg"]);
    for stage in 0..2 {
        let svg = std::fs::read_to_string(place.path(&format!("stages-stage{stage}.svg"))).unwrap();
        assert!(svg.contains(&format!("stage {stage}")) && svg.contains("at the peak rates of a100"));
    }
    let error = place.fails(2, &["explain", "run.toml", "--timeline", "memory.png"]);
    assert!(error.contains("memory.png is neither .svg nor .json"), "{error}");
    let measured = [
        "bench",
        "train",
        "--preset",
        "llama-15m",
        "--batch",
        "1",
        "--seq",
        "16",
        "--steps",
        "1",
        "--timeline",
        "run.json",
    ];
    place.ok(&measured);
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(place.path("run.json")).unwrap()).unwrap();
    assert!(
        trace["otherData"]["touched_bytes"].as_u64().unwrap() <= trace["otherData"]["arena_bytes"].as_u64().unwrap()
    );
    assert_eq!(trace["otherData"]["clock"], "seconds");
}

/// A step of two stages on a cluster.
const STAGES: &str = "[model]\npreset = \"llama-3.2-1b\"\n[train]\nseq = 1024\nglobal_batch = 64\nmicro_batch = 1\n\
                      [parallel]\ntp = 2\npp = 2\n";

#[test]
fn a_cluster_gives_step_time_mfu_and_where_the_time_goes() {
    let place = Place::new();
    place.config(STAGES);
    let explained = json(&place, &["--cluster", "leonardo", "--gpus", "16", "--tokens", "1T"]);
    assert_eq!(explained["layout"]["mesh"]["dp"], 4);
    let forecast = &explained["forecast"];
    let number = |field: &str| forecast[field].as_f64().unwrap();
    assert!(number("step_s") > 0.01 && number("step_s") < 10.0, "{forecast}");
    assert!((number("tokens_per_s") * number("step_s") / 65_536.0 - 1.0).abs() < 1e-9);
    assert!(number("mfu") > 0.05 && number("mfu") < number("hfu") && number("hfu") < 0.8, "{forecast}");
    assert!(number("bubble") > 0.0 && number("exposed_communication_s") > 0.0, "{forecast}");
    assert_eq!(forecast["memory_bytes"], explained["memory"]["total_bytes"]);
    let roles = forecast["roles"].as_array().unwrap();
    for class in ["matmul", "attention", "memory-bound", "optimizer", "collectives tp", "collectives dp", "bubble"] {
        assert!(roles.iter().all(|role| role["classes"][class].as_f64().unwrap() > 0.0), "{class}: {roles:?}");
    }
    assert!(forecast["unverified"].as_array().unwrap().contains(&"a100-64gb.tflops".into()));
    // Fp32 weights and two moments of the first rank, at 20 GB/s, and the tokens of a step on four nodes.
    let stalls = &forecast["stalls"];
    let stall = |field: &str| stalls[field].as_f64().unwrap();
    assert!((stall("checkpoint_s") * 20e9 / stall("checkpoint_bytes") - 1.0).abs() < 1e-9, "{stalls}");
    assert!((stall("step_s") * stall("checkpoint_every") / stall("checkpoint_s") - 1.0).abs() < 1e-9, "{stalls}");
    assert_eq!(stalls["data_bytes"], 65_536 * 4 / 4, "{stalls}");
    // Days by the predicted MFU.
    let cost = &explained["cost"];
    assert_eq!((cost["mfu"].as_f64(), cost["mfu_predicted"].as_bool()), (forecast["mfu"].as_f64(), Some(true)));
    let args = ["explain", "run.toml", "--cluster", "leonardo", "--gpus", "16", "--tokens", "1T"];
    let text = place.ok(&args);
    for part in [
        "forecast of a step: 16 × A100 64GB in Leonardo Booster",
        "unverified figures of the catalogue: a100-64gb.tflops",
        "reading data          64.0 KiB per node",
        "checkpoint            holds steps up for ",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert!(text.contains("GPU-days on a100-64gb at the predicted MFU of 0."), "{text}");
    assert_eq!(text, place.ok(&args), "the same every time");
}

#[test]
fn a_step_on_a_gpu_of_8_gb_is_named_timed_and_priced_in_tenths_of_a_gpu_day() {
    let place = Place::new();
    place.config(
        "[model]\npreset = \"llama-124m\"\n[train]\nseq = 1024\nmicro_batch = 4\n[precision]\npolicy = \"bf16\"\n",
    );
    let args = ["--gpu", "rtx4060", "--tokens", "2.5B"];
    let explained = json(&place, &args);
    assert_eq!(explained["fits"]["memory_bytes"].as_u64(), Some((8_188 - 1_160) << 20));
    let (mfu, days) = (explained["cost"]["mfu"].as_f64().unwrap(), explained["cost"]["gpu_days"].as_f64().unwrap());
    assert!((0.2..0.9).contains(&mfu) && (0.5..9.9).contains(&days), "{mfu}, {days}");
    // PCIe 4.0 x8 is slower than what a copy to the host is taken to be.
    let stalls = &explained["forecast"]["stalls"];
    let stall = |field: &str| stalls[field].as_f64().unwrap();
    assert!((stall("checkpoint_s") * 16e9 / stall("checkpoint_bytes") - 1.0).abs() < 1e-9, "{stalls}");
    let text = place.ok(&[&["explain", "run.toml"], &args[..]].concat());
    for part in [
        " of 6.86 GiB on an RTX 4060 8GB\n",
        "forecast of a step: 1 × RTX 4060 8GB in nodes of 8, 100 Gb/s for each node",
        " of 30.2 TFLOP/s (bf16)",
        "unverified figures of the catalogue: rtx4060.link_gb_per_s",
        &format!("\n  {days:.1} GPU-days on rtx4060 at the predicted MFU of 0."),
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn the_predicted_step_is_a_trace_of_all_stages() {
    let place = Place::new();
    place.config(STAGES);
    place.ok(&["explain", "run.toml", "--gpu", "h100", "--trace", "t.json", "--schedule", "s.svg"]);
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(place.path("t.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let step = trace["otherData"]["step_s"].as_f64().unwrap() * 1e6;
    for stage in 0..2 {
        let of =
            |thread: usize| events.iter().filter(move |e| e["ph"] == "X" && e["pid"] == stage && e["tid"] == thread);
        for thread in 0..2 {
            // In whole nanoseconds, as Perfetto reads it: it drops events that overlap.
            let mut end = 0;
            for event in of(thread) {
                let [start, dur] = ["ts", "dur"].map(|key| (event[key].as_f64().unwrap() * 1e3).round() as u64);
                assert!(start >= end, "stage {stage}, thread {thread}: {event} before {end} ns");
                end = start + dur;
            }
            let end = end as f64 / 1e3;
            assert!(end > 0.5 * step && end <= step + 1e-3, "{end} of {step}");
        }
        assert_eq!(of(0).filter(|e| e["name"].as_str().unwrap().starts_with("forward")).count(), 64);
        // An event is named after its op, is of its class, and says what it is about.
        let matmul = of(1).find(|e| e["name"] == "linear").unwrap();
        assert_eq!((&matmul["cat"], &matmul["args"]["segment"]), (&"matmul".into(), &"forward".into()), "{matmul}");
        let (layer, tensor) = (matmul["args"]["layer"].as_u64().unwrap(), matmul["args"]["tensor"].as_str().unwrap());
        assert_eq!(tensor, format!("layers.{layer}.wqkv"), "{matmul}");
        let update = of(1).find(|e| e["name"] == "adamw").unwrap();
        assert_eq!(update["cat"], "optimizer", "{update}");
        assert!(update["args"]["tensor"].is_string(), "{update}");
    }
    assert!(std::fs::read_to_string(place.path("s.svg")).unwrap().contains("time as predicted for H100 80GB"));
}

#[test]
fn hardware_of_the_users_own_is_known_by_name() {
    let place = Place::new();
    place.config(STAGES);
    let gpu = "[[gpu]]\nname = \"mine\"\nfamily = \"h100\"\ntflops = 500.0\ntflops_fp32 = 50.0\nmemory_gb = 40.0\n\
               memory_tb_per_s = 2.0\nunits = 100\nlink_gb_per_s = 100.0\nsource = \"a guess\"\nunverified = [\"tflops\"]\n";
    std::fs::create_dir(place.path("hardware")).unwrap();
    std::fs::write(place.path("hardware/mine.toml"), gpu).unwrap();
    let text = place.ok(&["explain", "run.toml", "--gpu", "mine"]);
    assert!(text.contains("4 × MINE 40GB") && text.contains("mine.tflops"), "{text}");
    std::fs::write(place.path("hardware/mine.toml"), gpu.replace("500.0", "-5.0")).unwrap();
    let error = place.fails(2, &["explain", "run.toml", "--gpu", "mine"]);
    assert!(error.contains("mine.toml: gpu mine: tflops is not above 0"), "{error}");
}

/// The projections of a config as explain has them, and all that it has of the model.
fn projections(config: &str) -> (Vec<Value>, Value) {
    let place = Place::new();
    place.config(config);
    let explained = json(&place, &[]);
    (explained["projections"].as_array().unwrap().clone(), explained)
}

#[test]
fn parameters_and_flops_by_projection_sum_to_those_of_the_model() {
    let small = "layers = 3\n[train]\nseq = 64\nglobal_batch = 2\n";
    for preset in ["llama-3.2-1b", "gpt2", "olmoe-1b-7b", "deepseek-moe-16b", "mixtral-8x7b"] {
        let (found, explained) = projections(&format!("[model]\npreset = \"{preset}\"\n{small}"));
        let sum = |key: &str| found.iter().map(|p| p[key].as_f64().unwrap()).sum::<f64>();
        let model = &explained["model"];
        assert_eq!(sum("parameters"), model["parameters"].as_f64().unwrap(), "{preset}");
        assert_eq!(sum("active_parameters"), model["active_parameters"].as_f64().unwrap(), "{preset}");
        let all = explained["flops"]["model_per_token"].as_f64().unwrap();
        assert!((sum("flops_per_token") / all - 1.0).abs() < 1e-12, "{preset}: {} of {all}", sum("flops_per_token"));
        let of = |name: &str| found.iter().find(|p| p["name"] == name).unwrap_or_else(|| panic!("{preset}: {name}"));
        assert!(found.iter().all(|p| p["part"] != "other"), "{preset}: {found:?}");
        // Six FLOPs for every element of a matrix that a token meets; biases have none.
        if preset != "gpt2" {
            for p in found.iter().filter(|p| ["attention", "MLP"].contains(&p["part"].as_str().unwrap())) {
                let elements = p["active_parameters"].as_f64().unwrap();
                let six = p["name"] == "scores (QKᵀ, PV)" || p["flops_per_token"].as_f64().unwrap() == 6.0 * elements;
                assert!(six, "{preset}: {p}");
            }
        }
        assert!(of("q")["parameters"].as_u64() >= of("k")["parameters"].as_u64(), "{preset}");
        assert!(of("head")["flops_per_token"].as_f64().unwrap() > 0.0, "{preset}");
    }
    let (found, _) = projections(&format!("[model]\npreset = \"deepseek-moe-16b\"\n{small}"));
    let names: Vec<&str> = found.iter().map(|p| p["name"].as_str().unwrap()).collect();
    for name in ["gate", "router", "expert gate", "expert down", "shared expert up"] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
}

#[test]
fn parts_of_the_model_are_shown_with_their_projections() {
    let place = Place::new();
    let text = place.ok(&["explain", "run.toml"]);
    for part in ["\n  attention ", "\n    q ", "\n    scores (QKᵀ, PV) ", "\n  MLP ", "\n    down ", "\n  head "] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    // A table that is also the head counts once.
    let head = text.lines().find(|line| line.starts_with("  head ")).unwrap();
    assert!(head.split_whitespace().nth(1) == Some("-") && head.contains("FLOP"), "{head}");
}

#[test]
fn a_timeline_says_when_the_four_phases_of_a_step_begin_and_end() {
    let place = Place::new();
    let run = ["--set", "parallel.dp=2", "--set", "train.micro_batch=2"];
    let args = [&run[..], &["--timeline", "memory.json"]].concat();
    let explained = json(&place, &args);
    let stage = &explained["phases"][0];
    let phases = stage["phases"].as_array().unwrap();
    let names: Vec<&str> = phases.iter().map(|p| p["phase"].as_str().unwrap()).collect();
    assert_eq!(names, ["forward", "backward", "gradient_reduction", "optimizer_step"]);
    assert_eq!(stage["unit"], "instructions");
    let number = |i: usize, key: &str| phases[i][key].as_f64().unwrap();
    // They make up the step: the last one ends when all have taken their time.
    let whole: f64 = (0..4).map(|i| number(i, "takes")).sum();
    assert_eq!((number(0, "begins"), number(3, "ends")), (0.0, whole));
    assert!(number(1, "begins") < number(2, "begins") && number(2, "ends") <= number(3, "ends"));
    assert!(number(2, "communicated_bytes") > 0.0 && number(0, "communicated_bytes") == 0.0, "{phases:?}");
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(place.path("memory.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let takes = |name: &str| -> f64 {
        let mine = events.iter().filter(|e| e["cat"] == "phase" && e["name"] == name && e["args"]["step"] == 0);
        mine.map(|e| e["dur"].as_f64().unwrap()).sum()
    };
    assert!((takes("backward") - number(1, "takes")).abs() < 1e-6, "{}", takes("backward"));
    let args = [&["explain", "run.toml"], &run[..], &["--timeline", "memory.svg", "--gpu", "h100"]].concat();
    let text = place.ok(&args);
    let table = &text[text.find("phases of the first step").unwrap()..];
    for name in ["forward", "backward", "gradient reduction", "optimizer step"] {
        assert!(table.contains(&format!("\n  {name} ")), "{name}\n{table}");
    }
    assert!(table.contains(" ms ") && table.contains("collectives are not timed here"), "{table}");
    let svg = std::fs::read_to_string(place.path("memory.svg")).unwrap();
    assert!(svg.contains("class=\"phase2\"") && svg.contains("optimizer step: ") && svg.contains(", takes "));
}

#[test]
fn memory_against_sequence_length_is_a_table_and_a_plot() {
    let place = Place::new();
    let lengths = ["--sequence-lengths", "128,32,64", "--gpu", "h100"];
    let found = json(&place, &lengths);
    let rows = found["sequence_lengths"].as_array().unwrap();
    assert_eq!(rows.iter().map(|r| r["seq"].as_u64().unwrap()).collect::<Vec<_>>(), [32, 64, 128]);
    for row in rows {
        let set = format!("train.seq={}", row["seq"]);
        let alone = json(&place, &["--gpu", "h100", "--set", &set]);
        assert_eq!(row["memory"], alone["memory"], "{set}");
    }
    let bytes = |i: usize, class: &str| rows[i]["memory"]["classes"][class].as_u64().unwrap();
    assert!(bytes(2, "activations") > bytes(0, "activations") && bytes(2, "optimizer") == bytes(0, "optimizer"));
    let text = place.ok(&[&["explain", "run.toml"], &lengths[..], &["--plot", "lengths.svg"]].concat());
    for part in ["memory against sequence length: ", " activations ", "\n  128 ", " yes\n", "on an H100 80GB"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let svg = std::fs::read_to_string(place.path("lengths.svg")).unwrap();
    assert!(svg.starts_with("<svg xmlns=") && svg.contains("activations, 128 tokens: ") && svg.contains(">128</text>"));
    for (args, part) in [
        (&["--sequence-lengths", "64", "--plot", "lengths.png"][..], "--plot lengths.png is not an .svg\nhint: "),
        (&["--plot", "lengths.svg"], "--sequence-lengths"),
        (&["--sequence-lengths", "0"], "--sequence-lengths 0: "),
        (&["--sequence-lengths", "64", "--fit", "1GB"], "cannot be used with"),
        (&["--sequence-lengths", "63", "--set", "parallel.cp=2"], "--sequence-lengths 63: "),
    ] {
        let error = place.fails(2, &[&["explain", "run.toml"], args].concat());
        assert!(error.contains(part), "{args:?}: {error}");
    }
}

#[test]
fn matrices_whose_moments_stay_in_bf16_are_named() {
    let place = Place::new();
    place.config("[model]\nvocab_size = 256\nlayers = 2\ndim = 192\nheads = 4\nffn = 256\n[precision]\npolicy = \"bf16\"\nmoments = \"int8\"\n");
    let text = place.ok(&["explain", "run.toml"]).replace("\n  ", " ");
    assert!(text.contains("are no whole blocks of 256: 7 with rows of 192"), "{text}");
    let whole = place.ok(&["explain", "run.toml", "--set", "model.dim=256"]);
    assert!(!whole.contains("int8 moments"), "{whole}");
}

#[test]
fn every_line_fits_80_columns() {
    let check = |place: &Place, args: &[&str]| {
        let args = [&["explain", "run.toml"], args].concat();
        for line in place.ok(&args).lines() {
            assert!(line.chars().count() <= 80, "{args:?}: {} columns: {line}", line.chars().count());
        }
    };
    // The largest model has the longest numbers; of others some.
    let names: Vec<&str> = lockstep_config::presets().step_by(7).chain(["deepseek-v3-mha"]).collect();
    std::thread::scope(|scope| {
        for half in names.chunks(names.len().div_ceil(2)) {
            scope.spawn(move || {
                for name in half {
                    let place = Place::new();
                    place.config(&format!("[model]\npreset = \"{name}\"\n"));
                    check(&place, &["--gpu", "h100"]);
                }
            });
        }
    });
    let place = Place::new();
    place.config(include_str!("../../../examples/quickstart.toml"));
    check(&place, &[]);
    for more in ["parallel.dp=4,parallel.zero=3", "parallel.pp=2", "parallel.tp=2,parallel.sequence_parallel=true"] {
        let set: Vec<&str> = more.split(',').flat_map(|key| ["--set", key]).collect();
        check(&place, &[&set[..], &["--set", "train.micro_batch=2", "--gpu", "h100", "--tokens", "1T"]].concat());
    }
    // What does not fit on several ranks, and a run whose batch grows.
    let ramp = "train.batch_ramp=[{ tokens = \"1B\", global_batch = \"8M tokens\" }]";
    for keys in [
        &["model.preset=mixtral-8x7b", "parallel.ep=4", "train.micro_batch=1"],
        &["train.global_batch=512", "train.seq=8192", ramp],
    ] {
        let set: Vec<&str> = keys.iter().flat_map(|key| ["--set", key]).collect();
        check(&place, &[&set[..], &["--gpu", "h100"]].concat());
    }
    check(&place, &["--sequence-lengths", "128,1024,131072", "--gpu", "h100"]);
    check(&place, &["--fit", "16MiB"]);
    check(&place, &["--inference", "--gpu", "h100"]);
    check(&place, &["--inference"]);
}

#[test]
fn recomputation_is_named_only_where_there_is_some() {
    let place = Place::new();
    let hardware = |policy: &str| {
        let text = place.ok(&["explain", "run.toml", "--set", &format!("recompute.policy={policy}")]);
        text.lines().find(|line| line.starts_with("  hardware ")).unwrap().to_owned()
    };
    assert!(hardware("none").ends_with("the same: nothing is recomputed"), "{}", hardware("none"));
    assert!(hardware("full").ends_with("with recomputation"), "{}", hardware("full"));
}

#[test]
fn inference_is_counted_in_bytes_of_the_cache_and_bounds_of_a_gpu() {
    let place = llama_3_8b();
    let account = &json(&place, &["--inference", "--gpu", "h100"])["inference"];
    // 32 layers of two times 8 heads of 128, in bf16; every head its own K and V has four times as many.
    let kinds = account["kinds"].as_array().unwrap();
    let bytes: Vec<(u64, bool)> =
        kinds.iter().map(|k| (k["token_bytes"].as_u64().unwrap(), k["kept"].as_bool().unwrap())).collect();
    assert_eq!(bytes[..2], [(131_072, true), (524_288, false)]);
    assert!(kinds[2]["name"].as_str().unwrap().starts_with("MLA"), "{kinds:?}");
    // 43 pages of 96 positions.
    assert_eq!(account["text_bytes"], 43 * 96 * 131_072u64);
    assert_eq!(account["weight_bytes"], 2 * 8_030_261_248u64);
    // Two FLOPs for each weight of a matmul: all but the embedding table.
    let flops = account["token_flops"].as_f64().unwrap();
    assert!((flops / (2.0 * (8_030_261_248.0 - 128_256.0 * 4096.0)) - 1.0).abs() < 1e-3, "{flops}");
    let gpus = &account["gpus"];
    assert_eq!((&gpus["gpus"], &gpus["decode"][0]["texts"]), (&1.into(), &1.into()));
    // Weights and half of a text's cache at 3.35 TB/s.
    let seconds = gpus["decode"][0]["seconds"].as_f64().unwrap();
    let bound = (2.0 * 8_030_261_248.0 + 43.0 * 48.0 * 131_072.0) / 3.35e12;
    assert!((seconds / bound - 1.0).abs() < 0.01, "{seconds} {bound}");
    let text = place.ok(&["explain", "run.toml", "--inference", "--gpu", "h100"]);
    assert!(text.contains("GQA, 8 heads of K and V for 32 of Q") && text.contains("bound by"), "{text}");
    // Of a model with latent attention, generation keeps the latent and the shared key.
    place.config("[model]\npreset = \"deepseek-v2-lite\"\n[train]\nseq = 4096\nglobal_batch = 1\n");
    let kinds = &json(&place, &["--inference"])["inference"]["kinds"];
    assert_eq!((&kinds[0]["token_bytes"], &kinds[0]["kept"]), (&(27 * (512 + 64) * 2).into(), &true.into()));
    assert_eq!((&kinds[1]["token_bytes"], &kinds[1]["kept"]), (&(27 * 16 * (192 + 128) * 2).into(), &false.into()));
}
