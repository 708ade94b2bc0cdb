//! Expert parallelism beside every other axis: each layout against one rank, the same routing, and the same bits over pipelines and
//! recompute policies.

mod common;

use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_infer::InferError;
use lockstep_ir::program::{Instr, Stream};
use lockstep_ir::{Layout, Op};
use lockstep_plan::plan;
use lockstep_train::{Comparison, TrainError};

/// Two of four experts for every token, and three of eight, narrower than the block that they take the place of.
const MIXTRAL: &str = "architecture = \"mixtral\"\nexperts = 4";
const QWEN3_MOE: &str = "architecture = \"qwen3_moe\"\nexperts = 8\nexperts_per_token = 3\nexpert_ffn = 24";

/// Biases of experts and of the router, attention sinks and a clamped SwiGLU.
const GPT_OSS: &str =
    "architecture = \"gpt_oss\"\nexperts = 8\nexperts_per_token = 3\nexpert_ffn = 24\nsliding_window = 5";

/// Two key heads: with tp=4 neighbours share one.
const LAYOUTS: [&str; 49] = [
    "ep=2",
    "ep=4",
    "ep=2,zero=1",
    "ep=2,zero=2",
    "ep=2,zero=3",
    "ep=2,zero=3,no-reshard",
    "dp=2,ep=2",
    "dp=2,zero=1,ep=2",
    "dp=2,zero=2,ep=2",
    "dp=2,zero=3,ep=2",
    "dp=2,zero=3,no-reshard,ep=2",
    "dp_replicate=2,ep=2",
    "dp_replicate=2,zero=1,ep=2",
    "dp_replicate=2,zero=2,ep=2",
    "dp_replicate=2,zero=3,ep=2",
    "dp_replicate=2,dp=2,zero=1,ep=2",
    "dp_replicate=2,dp=2,zero=3,ep=2",
    "ep=2,pp=2",
    "ep=2,pp=2,gpipe",
    "ep=2,pp=2,interleaved,virtual=2",
    "ep=2,pp=2,zb-h1",
    "ep=2,pp=2,zb-v",
    "ep=4,pp=2",
    "ep=2,zero=1,pp=2",
    "ep=2,zero=2,pp=2",
    "ep=2,zero=3,pp=2",
    "dp=2,zero=1,ep=2,pp=2",
    "dp=2,zero=3,ep=2,pp=2,zb-h1",
    "ep=2,tp=2",
    "ep=2,tp=2,sp",
    "ep=2,tp=4",
    "ep=2,tp=4,sp",
    "ep=4,tp=2,sp",
    "dp=2,ep=2,tp=2",
    "dp=2,zero=1,ep=2,tp=2,sp",
    "dp=2,zero=2,ep=2,tp=2",
    "dp=2,zero=3,ep=2,tp=2,sp",
    "cp=2,ep=2",
    "cp=2,context=gather,ep=2",
    "cp=2,context=a2a,ep=2",
    "cp=2,context=a2a,zero=3,ep=2,pp=2",
    "cp=2,zero=1,ep=2",
    "cp=2,zero=3,ep=2",
    "dp=2,zero=2,cp=2,ep=2",
    "cp=2,ep=2,tp=2,sp",
    "cp=2,ep=2,pp=2",
    "ep=2,tp=2,sp,pp=2",
    "dp=2,zero=1,ep=2,tp=2,sp,pp=2",
    "cp=2,zero=1,ep=2,tp=2,pp=2",
];

/// A few of them.
const SOME: [&str; 8] = [
    "ep=2",
    "ep=4,pp=2",
    "dp=2,zero=1,ep=2",
    "dp=2,zero=2,ep=2,tp=2",
    "dp=2,zero=3,ep=2,pp=2,zb-h1",
    "ep=2,tp=4,sp",
    "cp=2,zero=3,ep=2",
    "dp_replicate=2,zero=3,ep=2",
];

fn config(model: &str, keys: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 131\nlayers = 4\ndim = 32\nheads = 4\nkv_heads = 2\nffn = 48\n{model}\n\
         [train]\nseq = 16\nglobal_batch = 8\nmicro_batch = 1\nthreads = 1\n{keys}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

/// Whether a layout rounds as one rank does up to the loss: no rank has a part of a sequence, or of a matrix but an expert's.
fn whole(layout: &str) -> bool {
    !layout.contains("tp=") && !layout.contains("cp=")
}

/// Ranks that have the experts of others compute what those would: tokens go to the same experts, and losses are the same bits.
fn same_losses(found: &[Comparison]) {
    for c in found.iter().filter(|c| whole(&c.layout)) {
        let (flipped, all) = c.flipped_choices.unwrap();
        assert!(flipped == 0 && all > 1000, "{}: {flipped} of {all} choices", c.layout);
        assert!(c.losses.iter().all(|(one, many)| one.to_bits() == many.to_bits()), "{}: {:?}", c.layout, c.losses);
    }
}

#[test]
fn every_layout_computes_what_one_rank_computes() {
    same_losses(&common::check_layouts(&config(MIXTRAL, ""), &LAYOUTS));
}

#[test]
fn other_models_precisions_and_sums_do_too() {
    for keys in [
        "[precision]\npolicy = \"bf16\"",
        "[data]\ndocument_mask = true",
        "reproducible = true",
        "[precision]\npolicy = \"fp16\"",
    ] {
        same_losses(&common::check_layouts(&config(QWEN3_MOE, keys), &SOME));
        same_losses(&common::check_layouts(&config(GPT_OSS, keys), &SOME));
    }
    same_losses(&common::check_layouts(&config(MIXTRAL, "[optimizer]\nname = \"muon\""), &SOME));
}

#[test]
fn pipelines_and_zero_1_change_no_bit() {
    let alike = [
        &["ep=2", "ep=2,pp=2", "ep=2,pp=2,gpipe", "ep=2,pp=2,interleaved,virtual=2", "ep=2,pp=2,zb-h1", "ep=2,zero=1"]
            [..],
        &["dp=2,ep=2", "dp=2,zero=1,ep=2", "dp=2,zero=1,ep=2,pp=2"],
        &["ep=2,tp=2,sp", "ep=2,tp=2,sp,pp=2"],
    ];
    for layouts in alike {
        let found = common::check_layouts(&config(MIXTRAL, ""), layouts);
        for c in &found {
            assert_eq!(
                (&c.losses, c.gradient_difference),
                (&found[0].losses, found[0].gradient_difference),
                "{}",
                c.layout
            );
        }
    }
}

#[test]
fn recompute_policies_change_no_bit() {
    let run =
        |policy: &str| common::check_layouts(&config(QWEN3_MOE, &format!("[recompute]\npolicy = \"{policy}\"")), &SOME);
    let kept = run("none");
    for policy in ["selective", "full", "sqrt"] {
        for (with, without) in run(policy).iter().zip(&kept) {
            let layout = &with.layout;
            assert_eq!(with.losses, without.losses, "{policy}, {layout}");
            assert_eq!(with.gradient_difference, without.gradient_difference, "{policy}, {layout}");
        }
    }
}

/// A run on text whose experts are on two ranks, with more lines of its config.
fn bounded(dir: &std::path::Path, lines: &str) -> Config {
    let text = format!(
        "[model]\narchitecture = \"mixtral\"\nvocab_size = 256\nlayers = 2\ndim = 32\nheads = 4\nffn = 48\nexperts = 4\n\
         [data]\npaths = [\".\"]\nextensions = [\"txt\"]\n[train]\nseq = 32\nglobal_batch = 8\nsteps = 3\nthreads = 1\n\
         {lines}\n"
    );
    std::fs::write(dir.join("run.toml"), text).unwrap();
    Config::load(&dir.join("run.toml"), &[]).unwrap()
}

#[test]
fn a_step_that_needs_more_rows_than_are_planned_ends_the_run_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    common::write_corpus(dir.path());
    let run = |name: &str, bound: &str| {
        let mut steps = Vec::new();
        let result = common::run_with(&bounded(dir.path(), bound), &dir.path().join(name), &mut |event| {
            if let lockstep_train::Event::Stepped(m) = event {
                steps.push((m.loss.to_bits(), m.rows_beyond));
            }
        });
        (result, steps)
    };
    let (Err(error), steps) = run("even", "validation_sequences = 0\n[parallel]\nep = 2\nep_bound = 1.0") else {
        panic!("some expert gets more than its share")
    };
    let TrainError::ExpertBound { step: 1, rows, bound: 1.0 } = error else { panic!("{error}") };
    assert!(rows > 0, "{error}");
    let [(_, Some(told))] = steps[..] else { panic!("{steps:?}") };
    assert_eq!(told, rows);
    // The same folder goes on with room for all; twice an even share of two ranks is as much as there can be.
    let (ended, steps) = run("even", "validation_sequences = 0\n[parallel]\nep = 2\nep_bound = 2.0");
    ended.unwrap();
    assert_eq!(steps, run("all", "validation_sequences = 0\n[parallel]\nep = 2").1);
    assert_eq!(steps.len(), 3);
}

#[test]
fn a_validation_that_needs_more_rows_than_are_planned_ends_the_run_before_its_first_step() {
    let dir = tempfile::tempdir().unwrap();
    common::write_corpus(dir.path());
    let config = bounded(dir.path(), "[parallel]\nep = 2\nep_bound = 1.0");
    let error = common::run_with(&config, &dir.path().join("run"), &mut |event| {
        assert!(!matches!(event, lockstep_train::Event::Stepped(_)), "there is room");
    });
    let error = error.expect_err("some expert gets more than its share");
    assert!(matches!(error, TrainError::Infer(InferError::EvaluationBound { rows: 1.., bound: 1.0 })), "{error}");
}

/// A run on text whose last part, which validates, is one letter over and over: all of its tokens go to the same experts. Of some
/// seeds these are on both ranks at first and on one of them later, while the text before has room all along.
fn one_letter(dir: &std::path::Path, seed: u64, lines: &str) -> Config {
    let text: String =
        (0..1440).map(|i| format!("line {i}: the square of {} is {}.\n", i % 97, (i % 97) * (i % 97))).collect();
    let letters = text.len() / 15;
    std::fs::write(dir.join("text.txt"), text + &"a".repeat(letters)).unwrap();
    let always = "[optimizer]\nlr = 0.1\nwarmup_steps = 0\n[parallel]\nep = 2\nep_bound = 1.75";
    bounded(dir, &format!("seed = {seed}\n{lines}\n{always}"))
}

#[test]
fn a_validation_behind_a_step_that_needs_more_rows_keeps_what_was_trained() {
    let dir = tempfile::tempdir().unwrap();
    let lines = "validate_every = 1\nvalidation_sequences = 8";
    let found = (1..40).find_map(|seed| {
        let (run, mut steps) = (dir.path().join(seed.to_string()), Vec::new());
        let ended = common::run_with(&one_letter(dir.path(), seed, lines), &run, &mut |event| {
            if let lockstep_train::Event::Stepped(m) = event {
                steps.push((m.rows_beyond, m.val_loss.is_some()));
            }
        });
        match ended {
            Err(TrainError::Infer(InferError::EvaluationBound { rows, bound: 1.75 })) if !steps.is_empty() => {
                Some((run, steps, rows))
            }
            Ok(_) | Err(TrainError::Infer(InferError::EvaluationBound { .. }) | TrainError::ExpertBound { .. }) => None,
            Err(error) => panic!("{error}"),
        }
    });
    let (run, steps, rows) = found.expect("a seed whose validation alone has no room");
    let (last, before) = steps.split_last().unwrap();
    assert_eq!(*last, (Some(rows), false));
    assert!(before.iter().all(|step| *step == (None, true)), "{steps:?}");
    let written = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    assert!(written.lines().last().unwrap().contains(&format!("\"rows_beyond\":{rows}")), "{written}");
    assert_eq!(lockstep_infer::Trained::open(&run).unwrap().step(), steps.len() as u64);
}

#[test]
fn tasks_that_need_more_rows_than_are_planned_have_no_scores_and_the_run_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let item = format!("{{\"query\":\"{}\",\"target\":\"a\",\"delimiter\":\"\"}}\n", "a".repeat(30));
    // As many as are scored at once: rows of the last find no place.
    std::fs::write(dir.path().join("ends.jsonl"), item.repeat(8)).unwrap();
    let lines = "validation_sequences = 0\n[eval]\ntasks = [\"ends.jsonl\"]\nevery = 1";
    let found = (1..40).find_map(|seed| {
        let (mut scored, mut warned) = (0, Vec::new());
        let config = one_letter(dir.path(), seed, lines);
        let ended = common::run_with(&config, &dir.path().join(seed.to_string()), &mut |event| match event {
            lockstep_train::Event::EvaluatedTasks { .. } => scored += 1,
            lockstep_train::Event::Trouble { what, error } if what.starts_with("no scores") => {
                assert!(matches!(error, TrainError::Infer(InferError::EvaluationBound { bound: 1.75, .. })), "{error}");
                warned.push(error.to_string());
            }
            _ => {}
        });
        (ended.is_ok() && !warned.is_empty()).then_some((scored, warned))
    });
    let (scored, warned) = found.expect("a seed whose tasks alone have no room");
    assert_eq!(scored + warned.len(), 3);
    assert!(warned[0].contains("more than parallel.ep_bound = 1.75 times an even share"), "{warned:?}");
}

#[test]
fn rows_of_experts_do_not_queue_behind_weights_that_are_gathered() {
    let layout: Layout = "dp=2,zero=3,ep=2".parse().unwrap();
    let plan = plan(&Devices::new(), &config(MIXTRAL, "").at(&layout)).unwrap();
    let (mut exchanges, mut beside_gathers) = (0, 0);
    for segment in &plan.program().segments {
        for (at, instr) in segment.instrs.iter().enumerate().filter(|(_, i)| matches!(i.op, Op::AllToAll { .. })) {
            assert_eq!(instr.stream, Stream::Exchange);
            exchanges += 1;
            let made: Vec<usize> = instr.outputs.iter().flatten().map(|o| o.value).collect();
            let reads = |i: &Instr| i.inputs.iter().any(|x| made.contains(&x.value));
            let reader = at + 1 + segment.instrs[at + 1..].iter().position(reads).unwrap();
            // Of the other stream the reader waits for what it reads alone: what was begun since is still under way.
            let stream = |on: Stream| (0..=reader).rev().find(|i| segment.instrs[*i].stream == on);
            let waited = |on: Stream| {
                let waits = segment.instrs[at..=reader].iter().flat_map(|i| &i.waits);
                waits.copied().filter(|w| segment.instrs[*w].stream == on).max()
            };
            assert!(waited(Stream::Exchange) >= Some(at), "{at} of {segment}");
            beside_gathers += usize::from(stream(Stream::Communication) > waited(Stream::Communication));
        }
    }
    assert!(exchanges > 0 && beside_gathers > 0, "{beside_gathers} of {exchanges}");
}
