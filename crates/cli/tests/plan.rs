//! `lockstep plan`: the fastest layouts of a run, whose numbers are those of the programs that would run.

mod common;

use common::Place;
use lockstep_ir::Layout;
use serde_json::Value;

/// A model that every axis divides.
const SMALL: &str = "[model]\nvocab_size = 1024\nlayers = 4\ndim = 256\nheads = 8\nkv_heads = 4\nffn = 512\n[train]\nseq = 1024\n\
                     global_batch = 32\n[precision]\npolicy = \"bf16\"\n";

fn json(place: &Place, args: &[&str]) -> Value {
    let args = [&["plan", "run.toml", "--format", "json"], args].concat();
    serde_json::from_str(&place.ok(&args)).unwrap()
}

#[test]
fn what_is_shown_of_a_layout_is_what_explain_says_of_its_keys() {
    let place = Place::new();
    place.config(SMALL);
    let found = json(&place, &["--gpu", "h100", "--gpus", "8", "--top", "3"]);
    let layouts = found["layouts"].as_array().unwrap();
    assert_eq!(layouts.len(), 3, "{found}");
    let step = |layout: &Value| layout["forecast"]["step_s"].as_f64().unwrap();
    for layout in layouts {
        assert!(step(layout) >= step(&layouts[0]) * 0.995, "{layout}");
        let keys = layout["keys"].as_object().unwrap();
        let set: Vec<String> = keys.iter().flat_map(|(key, v)| ["--set".into(), format!("{key}={v}")]).collect();
        let args: Vec<&str> = ["explain", "run.toml", "--gpu", "h100", "--format", "json"]
            .into_iter()
            .chain(set.iter().map(String::as_str))
            .collect();
        let explained: Value = serde_json::from_str(&place.ok(&args)).unwrap();
        assert_eq!(explained["layout"]["ranks"], 8, "{layout}");
        assert_eq!(explained["memory"]["total_bytes"], layout["memory"]["total_bytes"], "{layout}");
        assert_eq!(explained["forecast"]["step_s"], layout["forecast"]["step_s"], "{layout}");
    }
}

#[test]
fn experts_are_planned_for_with_a_bound_or_the_bound_is_named() {
    let place = Place::new();
    let model = "architecture = \"mixtral\"\nexperts = 4\nexperts_per_token = 2\nvocab_size";
    place.config(&SMALL.replacen("vocab_size", model, 1));
    let args = ["plan", "run.toml", "--gpu", "h100", "--gpus", "4", "--set", "parallel.pp=1"];
    assert!(place.ok(&args).contains("parallel.ep_bound is not set: "));
    assert!(!place.ok(&[&args[..], &["--set", "parallel.ep_bound=1.5"]].concat()).contains("ep_bound is not set"));
}

#[test]
fn a_wrong_request_is_refused_with_what_would_do() {
    let place = Place::new();
    place.config(SMALL);
    let error = place.fails(2, &["plan", "run.toml", "--gpu", "h100", "--gpus", "0"]);
    assert!(error.contains("--gpus 0 trains nothing\nhint: give a number from 1"), "{error}");
    let error = place.fails(2, &["plan", "run.toml", "--cluster", "leonrado", "--gpus", "8"]);
    assert!(error.contains("did you mean leonardo?"), "{error}");
    let error = place.fails(2, &["plan", "run.toml", "--gpu", "h100", "--gpus", "8", "--tokens", "many"]);
    assert!(error.contains("--tokens many is not a count"), "{error}");
}

#[test]
fn the_recipe_comes_to_1024_sequences_as_2_times_128_ranks_times_4_steps() {
    let place = Place::new();
    place.config("[model]\npreset = \"llama-3-8b\"\n[train]\nseq = 4096\nglobal_batch = 1024\n");
    let args = ["--recipe", "--gpu", "h100", "--gpus", "128", "--tokens", "15T"];
    let found = json(&place, &args);
    let chosen = &found["sizes"][found["chosen"].as_u64().unwrap() as usize];
    assert_eq!((chosen["micro_batch"].as_u64(), found["data_parallel"].as_u64()), (Some(2), Some(128)), "{found}");
    assert_eq!(found["accumulation"], 4);
    // The largest of each policy is followed by the first that does not fit, and the chosen is the fastest that does.
    let sizes = found["sizes"].as_array().unwrap();
    let speed = |size: &Value| size["tokens_per_s_per_gpu"].as_f64().unwrap();
    assert!(sizes.iter().filter(|s| s["fits"] == true).all(|s| speed(s) <= speed(chosen)), "{found}");
    assert!(sizes.iter().any(|s| s["fits"] == false));
    let text = place.ok(&[&["plan", "run.toml"], &args[..]].concat());
    for part in
        ["1,024 = 2 · 128 · 4", "4,194,304 tokens = 1,024 sequences", "zero=1", "tp, then pp, then cp", "GPU-days"]
    {
        assert!(text.contains(part), "{part}\n{text}");
    }
    // What does not fit however it is sharded is said with the bytes.
    let error = place.fails(2, &["plan", "run.toml", "--recipe", "--gpu", "h100", "--gpus", "1"]);
    assert!(
        error.contains("one sequence with full recomputation needs ") && error.contains("hint: give more GPUs"),
        "{error}"
    );
    let error = place.fails(2, &["plan", "run.toml", "--recipe", "--gpu", "h100", "--gpus", "7"]);
    assert!(error.contains("no layout of 7 GPUs divides train.global_batch = 1024"), "{error}");
}

#[test]
fn the_last_line_says_how_often_to_save() {
    let place = Place::new();
    place.config(SMALL);
    let args = ["--gpu", "h100", "--gpus", "8", "--top", "1"];
    let found = &json(&place, &args)["checkpoint"];
    assert!(found["every_steps"].as_u64() > Some(0) && found["lost"].as_f64() < Some(0.1), "{found}");
    assert!(found["failure_rate"]["source"].as_str().unwrap().contains("Llama 3"), "{found}");
    let text = place.ok(&[&["plan", "run.toml"], &args[..]].concat());
    assert!(text.contains("\ncheckpoint.every = "), "{text}");
}

#[test]
fn what_failures_cost_is_shown_up_to_16_384_gpus() {
    let place = Place::new();
    place.config(SMALL);
    let found = json(&place, &["--gpu", "h100", "--gpus", "16", "--goodput"]);
    let rows = found["rows"].as_array().unwrap();
    let gpus: Vec<u64> = rows.iter().map(|row| row["gpus"].as_u64().unwrap()).collect();
    assert_eq!(gpus, [16, 512, 1024, 2048, 4096, 8192, 16_384]);
    let share = |row: &Value, way: &str| row["goodput"][way].as_f64().unwrap();
    for pair in rows.windows(2) {
        assert!(share(&pair[1], "restart") < share(&pair[0], "restart"), "{pair:?}");
    }
    let last = &rows[6];
    assert!(
        share(last, "restart") < share(last, "elastic") && share(last, "spares") >= share(last, "snapshots"),
        "{last}"
    );
    let text = place.ok(&["plan", "run.toml", "--gpu", "h100", "--gpus", "16", "--goodput"]);
    assert!(text.contains("419 unexpected interruptions in 54 days") && text.contains("16,384"), "{text}");
}

#[test]
fn a_budget_buys_a_model_and_tokens() {
    let place = Place::new();
    let ask = |args: &[&str]| -> Value {
        serde_json::from_str(&place.ok(&[&["plan", "--format", "json", "--budget"], args].concat())).unwrap()
    };
    let found = ask(&["5.76e23 FLOPs"]);
    let choices = found["choices"].as_array().unwrap();
    let parameters = |i: usize| choices[i]["parameters"].as_f64().unwrap();
    // Chinchilla's own budget: 63 to 73 billion parameters by either.
    assert!((60e9..75e9).contains(&parameters(0)) && (60e9..75e9).contains(&parameters(1)), "{found}");
    let losses: Vec<f64> = choices.iter().map(|c| c["loss_above_best"].as_f64().unwrap()).collect();
    assert!(losses.iter().all(|loss| *loss >= -1e-12) && losses[5] > losses[3], "{losses:?}");
    let hours = ask(&["1M GPU-hours", "--gpu", "a100", "--mfu", "0.5"]);
    assert!((hours["flops"].as_f64().unwrap() / (1e6 * 3600.0 * 312e12 * 0.5) - 1.0).abs() < 1e-9, "{hours}");
    // With a config, the MFU is that of its recipe.
    place.config(SMALL);
    let recipe = json(&place, &["--recipe", "--gpu", "a100", "--gpus", "2"]);
    let mfu = &recipe["sizes"][recipe["chosen"].as_u64().unwrap() as usize]["mfu"];
    let hours = json(&place, &["--budget", "1M GPU-hours", "--gpu", "a100", "--gpus", "2"]);
    assert_eq!(&hours["gpu_hours"]["mfu"], mfu);
    for (args, part) in [
        (&["lots"][..], "is no amount"),
        (&["3 apples"], "is no unit of compute"),
        (&["3 GPU-days"], "hint: add --cluster or --gpu"),
        (&["3 GPU-days", "--gpu", "h100", "--mfu", "4"], "--mfu 4 is no share"),
        (&["1e20 FLOPs", "--run", "nowhere"], "hint: name the directory of a run"),
    ] {
        let error = place.fails(2, &[&["plan", "--budget"], args].concat());
        assert!(error.contains(part), "{part}\n{error}");
    }
}

#[test]
fn the_noise_of_a_run_suggests_a_batch_ramp() {
    let place = Place::new();
    let dir = place.path("noisy");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("run.toml"), SMALL).unwrap();
    // Noise that grows with the root of the tokens: 64 sequences after 1,024 steps of 32,768 tokens.
    let line = |step: u64| {
        let tokens = step * 32_768;
        let (loss, noise) = (4.0 / (step as f64).powf(0.05), 2.0 * (step as f64).sqrt());
        format!(
            "{{\"step\":{step},\"tokens\":{tokens},\"loss\":{loss},\"grad_norm\":1.0,\"lr\":1e-3,\"step_s\":1.0,\"tokens_per_s\":1.0,\
             \"mfu\":0.1,\"arena_bytes\":1,\"noise_scale\":{noise}}}\n"
        )
    };
    std::fs::write(dir.join("metrics.jsonl"), (1..=1024).map(line).collect::<String>()).unwrap();
    let args = ["plan", "--budget", "1e18 FLOPs", "--run", "noisy"];
    let found: Value = serde_json::from_str(&place.ok(&[&args[..], &["--format", "json"]].concat())).unwrap();
    let noise = &found["noise"];
    assert!((noise["over_tokens"]["exponent"].as_f64().unwrap() - 0.5).abs() < 1e-6, "{noise}");
    assert_eq!(
        (noise["noise_scale_sequences"].as_f64(), noise["critical_batch_tokens"].as_f64()),
        (Some(64.0), Some(65536.0))
    );
    // Twice the batch of 32 at the tokens of step 1,024.
    assert_eq!(
        (noise["batch_ramp"][0]["tokens"].as_u64(), noise["batch_ramp"][0]["sequences"].as_u64()),
        (Some(33_600_000), Some(64))
    );
    let text = place.ok(&args);
    assert!(text.contains("train.batch_ramp = [{ tokens =") || text.contains("train.batch_ramp ="), "{text}");
}

#[test]
fn candidates_are_run_on_this_machine() {
    let place = Place::new();
    let found: Value = serde_json::from_str(&place.ok(&[
        "plan",
        "run.toml",
        "--measure",
        "--format",
        "json",
        "--set",
        "train.global_batch=1",
    ]))
    .unwrap();
    let candidates = found["candidates"].as_array().unwrap();
    assert_eq!(candidates.len(), 3, "{found}");
    let best = found["best"].as_u64().unwrap() as usize;
    assert!(candidates.iter().all(|c| c["measured"].as_f64() <= candidates[best]["measured"].as_f64()), "{found}");
    assert!(candidates.iter().all(|c| c["measured"].as_f64() > Some(0.0) && c["failed"].is_null()), "{found}");
}

#[test]
fn the_first_ten_layouts_compute_what_one_rank_computes() {
    let place = Place::new();
    place.config(
        &SMALL
            .replace("1024\nglobal", "512\nglobal")
            .replace("dim = 256", "dim = 64")
            .replace("512\n[train]", "128\n[train]"),
    );
    let found = json(&place, &["--gpu", "h100", "--gpus", "4", "--top", "10"]);
    let mut layouts: Vec<&str> =
        found["layouts"].as_array().unwrap().iter().map(|l| l["layout"].as_str().unwrap()).collect();
    assert_eq!(layouts.len(), 10);
    layouts.sort_unstable();
    layouts.dedup();
    let verified =
        place.ok(&["verify", "run.toml", "--steps", "1", "--layouts", &layouts.join(";"), "--format", "json"]);
    let verified: Value = serde_json::from_str(&verified).unwrap();
    assert_eq!(
        (verified["kept"].as_bool(), verified["layouts"].as_array().map(Vec::len)),
        (Some(true), Some(layouts.len()))
    );
}

#[test]
fn the_first_layout_is_written_into_the_config_and_its_comments_stay() {
    let place = Place::new();
    place.config(&format!("# a run\n{SMALL}[parallel]\ntp = 2  # as agreed\n"));
    let text = place.ok(&["plan", "run.toml", "--gpu", "h100", "--gpus", "8", "--write"]);
    assert!(text.contains("kept as in the config: parallel.tp") && text.contains("wrote to run.toml: "), "{text}");
    let written = std::fs::read_to_string(place.path("run.toml")).unwrap();
    assert!(written.starts_with("# a run\n") && written.contains("tp = 2  # as agreed\n"), "{written}");
    // The interval of the last line.
    let shown = text.split("checkpoint.every = ").nth(1).and_then(|rest| rest.split(':').next()).unwrap();
    assert!(written.contains(&format!("[checkpoint]\nevery = {}\n", shown.replace(',', ""))), "{shown}: {written}");
    let explained: Value =
        serde_json::from_str(&place.ok(&["explain", "run.toml", "--gpu", "h100", "--format", "json"])).unwrap();
    assert_eq!(explained["layout"]["ranks"], 8);
    // What changes losses is not written, so it is not searched either.
    assert!(!written.contains("gradients"), "{written}");
    let again = json(&place, &["--gpu", "h100", "--gpus", "8", "--set", "precision.gradients=\"fp32\""]);
    assert_eq!(again["layouts"][0]["forecast"]["step_s"], explained["forecast"]["step_s"]);
    // How sure that is, and the energy, are those of explain.
    let [layout, forecast] = [&again["layouts"][0], &explained["forecast"]];
    assert_eq!(layout["interval"], forecast["interval"]);
    assert_eq!(layout["forecast"]["energy"], forecast["energy"]);
    let share = layout["interval"]["share"].as_f64().unwrap();
    let [step_s, most_s] = [&layout["forecast"]["step_s"], &layout["interval"]["most_s"]].map(|s| s.as_f64().unwrap());
    assert!((most_s / step_s / (1.0 + share) - 1.0).abs() < 1e-9, "{layout}");
    let lines = text.replace("\n  ", " ");
    assert!(lines.contains(" ± ") && lines.contains("Lockstep was not timed on several GPUs"), "{text}");
    let energy = &forecast["energy"];
    let [step_j, power_w] = ["step_j", "power_w"].map(|key| energy[key].as_f64().unwrap());
    assert!((105.0..=700.0).contains(&power_w) && (step_j / (8.0 * power_w * step_s) - 1.0).abs() < 1e-9, "{energy}");
    assert!(text.contains("energy of the first: "), "{text}");
}

#[test]
fn a_plan_says_its_precision_and_what_fewer_gpus_or_the_network_would_change() {
    let place = Place::new();
    place.config(&SMALL.replace("[precision]\npolicy = \"bf16\"\n", ""));
    let notes = |args: &[&str]| {
        let found = json(&place, args);
        found["notes"].as_array().unwrap().iter().map(|note| note.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let fp32 = notes(&["--gpu", "h100", "--gpus", "8"]);
    let said =
        "precision.policy is not set: this is a plan in fp32; with --set precision.policy=bf16 the first layout takes ";
    assert!(fp32[0].starts_with(said), "{fp32:?}");
    let bf16 = ["--set", "precision.policy=\"bf16\""];
    let wide = notes(&[&["--cluster", "leonardo", "--gpus", "8", "--set", "parallel.tp=8"][..], &bf16].concat());
    assert!(wide[0].starts_with("tp = 8 goes beyond the 4 GPUs of a node"), "{wide:?}");
    let odd = notes(&[&["--gpu", "h100", "--gpus", "10", "--set", "train.global_batch=720"][..], &bf16].concat());
    assert!(odd.iter().all(|note| !note.contains("fp32") && !note.contains("goes beyond")), "{odd:?}");
}

#[test]
fn reasons_are_shown_for_any_layout_and_for_what_was_left_out() {
    let place = Place::new();
    place.config(SMALL);
    let text = place.ok(&["plan", "run.toml", "--gpu", "h100", "--gpus", "8", "--why", "tp=8,sp", "--rejected"]);
    assert!(text.contains("why not tp=8 sp, micro-batch") && text.contains("exposed communication"), "{text}");
    assert!(text.contains("\nleft out\n") && text.contains("a bound on the step time is above"), "{text}");
    let error = place.fails(2, &["plan", "run.toml", "--gpu", "h100", "--gpus", "8", "--why", "tp=2"]);
    assert!(error.contains("--why tp=2 has 2 ranks, and the plan is for 8 GPUs"), "{error}");
}

#[test]
fn what_cannot_be_met_is_refused_with_the_gpus_that_would_do() {
    let place = Place::new();
    place.config(SMALL);
    let wanted = ["plan", "run.toml", "--gpu", "h100", "--gpus", "1", "--tokens", "1T", "--deadline"];
    let days = json(&place, &["--gpu", "h100", "--gpus", "1", "--tokens", "1T"])["layouts"][0]["run"]["days"]
        .as_f64()
        .unwrap();
    let soon = format!("{:.1}d", days * 0.7);
    let error = place.fails(2, &[&wanted[..], &[soon.as_str()]].concat());
    assert!(
        error.contains("cannot be met: the fastest layout of 1 GPU takes") && error.contains("hint: give --gpus 2: "),
        "{error}"
    );
    let late = format!("{:.1}d", days * 2.0);
    place.ok(&[&wanted[..], &[late.as_str()]].concat());
    assert!(place.fails(2, &[&wanted[..], &["soon"]].concat()).contains("--deadline soon is not a time"));
    place.config("[model]\npreset = \"llama-3-8b\"\n[train]\nseq = 512\nglobal_batch = 16\nmicro_batch = 1\n[parallel]\ntp = 1\npp = 1\ncp = 1\n[offload]\noptimizer = false\n");
    let error = place.fails(2, &["plan", "run.toml", "--gpu", "a100-40gb", "--gpus", "2"]);
    assert!(error.contains("layouts of 2 GPUs fits") && error.contains("give --gpus 4: dp=4 zero="), "{error}");
}

#[test]
fn scaling_is_told_as_tables_and_drawn_as_a_page() {
    let place = Place::new();
    place.config(SMALL);
    let args =
        ["--scaling", "--gpu", "h100", "--gpus", "4", "--tokens", "1B", "--price", "2", "--html", "scaling.html"];
    let found = json(&place, &args);
    let points = |curve: &str| found[curve]["points"].as_array().unwrap().clone();
    let gpus: Vec<u64> = points("strong").iter().map(|p| p["gpus"].as_u64().unwrap()).collect();
    assert_eq!(gpus, [1, 2, 4], "{found}");
    let batches: Vec<u64> = points("weak").iter().map(|p| p["global_batch"].as_u64().unwrap()).collect();
    assert_eq!(batches, [8, 16, 32], "{found}");
    let tokens: Vec<u64> =
        points("sequence").iter().map(|p| p["seq"].as_u64().unwrap() * p["global_batch"].as_u64().unwrap()).collect();
    assert!(tokens.len() == 5 && tokens.iter().all(|n| *n == 32 * 1024), "{found}");
    // A point is what the recipe comes to there.
    let walked = json(&place, &["--recipe", "--gpu", "h100", "--gpus", "4"]);
    let chosen = &walked["sizes"][walked["chosen"].as_u64().unwrap() as usize];
    let last = &points("strong")[2];
    assert_eq!(last["tokens_per_s_per_gpu"], chosen["tokens_per_s_per_gpu"]);
    let cost = 2.0 * last["gpu_hours"].as_f64().unwrap();
    assert!((last["cost"].as_f64().unwrap() / cost - 1.0).abs() < 1e-9, "{last}");
    let page = std::fs::read_to_string(place.path("scaling.html")).unwrap();
    assert_eq!(page.matches("<svg ").count(), 8, "{page}");
    assert!(!page.contains("http://") || page.matches("http").count() == 8, "it loads something");
    assert!(!page.contains("<script") && page.contains("time against cost"));
    let text = place.ok(&["plan", "run.toml", "--scaling", "--gpu", "h100", "--gpus", "4"]);
    for part in
        ["strong scaling", "weak scaling", "sequence length", "micro-batch, 4 GPUs", "\n  1 GPU, ", "\n  2 GPUs, "]
    {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(!text.contains("\n  1 GPUs"), "{text}");
    // A heading names no column that was left out for want of room.
    let section = &text[text.find("strong scaling").unwrap()..text.find("weak scaling").unwrap()];
    let (heading, table) = section.split_once('\n').unwrap();
    assert_eq!(heading.contains("GPU-hours"), table.contains("GPU-hours"), "{section}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

/// `parallel.layout = "auto"`: what the run directory has says which layout a run trains in.
#[test]
fn an_automatic_layout_is_kept_with_as_many_ranks_and_planned_again_for_others() {
    let place = Place::new();
    let train = |dir: &str, more: &[&str]| {
        let constant = ["--set", "optimizer.schedule=constant", "--set", "train.steps=5"];
        let args = [&["train", "run.toml", "--run-dir", dir], &constant[..], more].concat();
        let output = place.run(&args);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{text}");
        text
    };
    let auto = |ranks: &str, more: &[&str]| {
        let ranks = format!("parallel.ranks={ranks}");
        let said = train("run", &[&["--set", "parallel.layout=auto", "--set", &ranks], more].concat());
        let plan: Value = serde_json::from_slice(&std::fs::read(place.path("run/plan.json")).unwrap()).unwrap();
        let layout: Layout = plan["layout"].as_str().unwrap().parse().unwrap();
        (said, layout)
    };
    let (said, first) = auto("4", &[]);
    assert!(said.contains("parallel.layout = \"auto\": ") && said.contains(" layouts of 4 ranks"), "{said}");
    assert_eq!(first.mesh.ranks(), 4);
    let resolved = std::fs::read_to_string(place.path("run/run.toml")).unwrap();
    assert!(resolved.contains("layout = \"auto\"") && resolved.contains("# auto: the fastest of "), "{resolved}");
    let (said, same) = auto("4", &["--change", "train.steps=10"]);
    assert!(said.contains("as the run began"), "{said}");
    assert_eq!(same, first);
    let (said, other) = auto("2", &["--change", "train.steps=15"]);
    assert!(said.contains(" layouts of 2 ranks"), "{said}");
    assert_eq!(other.mesh.ranks(), 2);
    // The losses go on as those of one rank do.
    train("alone", &["--set", "train.steps=15"]);
    let losses = |dir: &str| -> Vec<f64> {
        let text = std::fs::read_to_string(place.path(dir).join("metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap()).collect()
    };
    let (ours, alone) = (losses("run"), losses("alone"));
    assert_eq!((ours.len(), alone.len()), (15, 15));
    for (a, b) in ours.iter().zip(&alone) {
        assert!((a - b).abs() < 2e-3, "{ours:?} {alone:?}");
    }
}

#[test]
fn processes_plan_for_as_many_as_they_are() {
    let place = Place::new();
    let args = ["launch", "run.toml", "--run-dir", "run", "--set", "parallel.layout=auto", "--set", "train.steps=3"];
    let error = place.fails(2, &args);
    assert!(error.contains("for how many ranks\nhint: give --ranks N, or set parallel.ranks"), "{error}");
    place.ok(&[&args[..], &["--ranks", "2"]].concat());
    let plan: Value = serde_json::from_slice(&std::fs::read(place.path("run/plan.json")).unwrap()).unwrap();
    assert_eq!(plan["layout"].as_str().unwrap().parse::<Layout>().unwrap().mesh.ranks(), 2, "{plan}");
}

#[test]
fn where_nothing_fits_the_cheapest_changes_are_named() {
    let place = Place::new();
    place.config(
        "[model]\npreset = \"llama-3-8b\"\n[train]\nseq = 4096\nglobal_batch = 8\nmicro_batch = 1\n[precision]\npolicy = \"bf16\"\n\
         [parallel]\ntp = 1\npp = 1\ncp = 1\nzero = 0\n[offload]\noptimizer = false\n",
    );
    let error = place.fails(2, &["plan", "run.toml", "--gpu", "h100", "--gpus", "8"]);
    for wanted in
        ["none of the ", "comes nearest and needs ", "cheapest changes that make it fit", "parallel.zero = ", "saves "]
    {
        assert!(error.contains(wanted), "{wanted}: {error}");
    }
}
