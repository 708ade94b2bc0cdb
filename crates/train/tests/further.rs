//! Modules that predict further tokens (MTP): each layout against one rank, their loss beside the main one, and what is without them.

mod common;

use common::run_with;
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_ir::op::IGNORED_TARGET;
use lockstep_plan::plan;
use lockstep_train::Event;

/// Two modules of DeepSeek-V3, with an output head of their own and with a tied one.
const DEEPSEEK_V3: &str = "architecture = \"deepseek_v3\"\nkv_heads = 4\nkv_lora_rank = 10\nq_lora_rank = 12\n\
    qk_nope_head_dim = 6\nqk_rope_head_dim = 4\nv_head_dim = 7\nexperts = 6\nexpert_ffn = 24\ndense_layers = 1\n\
    expert_groups = 3\nexpert_top_groups = 2\nrouter_scale = 1.5\nbalance_bias = 0.001\nmtp_depth = 2\nmtp_loss = 0.3";
const TIED: &str = "kv_heads = 2\nmtp_depth = 1\nmtp_loss = 0.3\ntied_embeddings = true";
/// Scaled embeddings, norms around blocks, layers of two kinds.
const GEMMA3: &str = "kv_heads = 2\narchitecture = \"gemma3_text\"\nhead_dim = 10\nsliding_window = 5\n\
    layer_types = [\"sliding\", \"full\"]\nmtp_depth = 2";

const LAYOUTS: [&str; 13] = [
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "tp=2",
    "tp=2,sp",
    "pp=2",
    "pp=2,gpipe",
    "pp=2,zb-h1",
    "dp=2,zero=3,tp=2,sp",
    "tp=2,sp,pp=2",
    "dp=2,zero=1,tp=2,sp,pp=2",
    "pp=4",
];

fn config(model: &str, keys: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 131\nlayers = 4\ndim = 32\nheads = 4\nffn = 48\n{model}\n\
         [train]\nseq = 12\nglobal_batch = 8\nmicro_batch = 2\nthreads = 1\n{keys}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn modules_that_predict_further_tokens_on_every_layout() {
    for model in [DEEPSEEK_V3, TIED, GEMMA3] {
        common::check_layouts(&config(model, ""), &LAYOUTS);
        for keys in ["[precision]\npolicy = \"bf16\"", "[data]\ndocument_mask = true", "reproducible = true"] {
            common::check_layouts(&config(model, keys), &["dp=2,zero=3", "tp=2,sp", "pp=2", "tp=2,sp,pp=2"]);
        }
    }
}

#[test]
fn they_follow_every_pipeline_schedule() {
    for model in [DEEPSEEK_V3, TIED] {
        let interleaved = ["pp=2,interleaved,virtual=2", "pp=2,zb-v"];
        common::check_layouts(&config(model, ""), &interleaved);
        // All of them on a stage of their own, with the head.
        common::check_layouts(&config(model, "[parallel]\npp = 2\nstages = [4, 0]"), &["pp=2"]);
    }
}

#[test]
fn they_go_over_parts_of_sequences_and_with_experts_on_ranks_of_their_own() {
    for context in ["ring", "gather"] {
        let keys = format!("[parallel]\ncontext = \"{context}\"");
        for model in [DEEPSEEK_V3, TIED] {
            common::check_layouts(&config(model, &keys), &["cp=2", "cp=2,tp=2,sp", "dp=2,zero=3,cp=2,pp=2"]);
        }
    }
    common::check_layouts(&config(DEEPSEEK_V3, ""), &["dp=2,ep=2", "dp=2,ep=2,zero=3"]);
}

#[test]
fn their_layers_are_recomputed_as_others() {
    let layouts = ["dp=2,zero=3", "tp=2,sp", "pp=2"];
    let run = |policy: &str| {
        common::check_layouts(&config(DEEPSEEK_V3, &format!("[recompute]\npolicy = \"{policy}\"")), &layouts)
    };
    let kept = run("none");
    for policy in ["selective", "full"] {
        for (with, without) in run(policy).iter().zip(&kept) {
            assert_eq!(with.losses, without.losses, "{policy}, {}", with.layout);
        }
    }
}

#[test]
fn a_module_reads_tokens_further_on_and_predicts_their_targets_inside_a_document() {
    let (tokens, targets) = ([10, 11, 12, 13, 20, 21, 22, 23], [11, IGNORED_TARGET, 13, 14, 21, 22, 23, 24]);
    let none = IGNORED_TARGET;
    let [read, wanted] = lockstep_infer::feed::further((&tokens, &targets), None, 4, 1);
    assert_eq!(read, [11, 12, 13, 13, 21, 22, 23, 23]);
    assert_eq!(wanted, [none, 13, 14, none, 22, 23, 24, none]);
    let starts = [0, 0, 2, 2, 0, 0, 0, 3];
    let [read, wanted] = lockstep_infer::feed::further((&tokens, &targets), Some(&starts), 4, 2);
    assert_eq!(read, [12, 13, 13, 13, 22, 23, 23, 23]);
    assert_eq!(wanted, [none, none, none, none, 23, none, none, none]);
}

#[test]
fn metrics_have_their_loss_beside_the_main_one_and_evaluation_is_without_them() {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("a.txt"), "let the square of the number be a number. ".repeat(200)).unwrap();
    let run = |name: &str, model: &str| {
        let text = format!(
            "[model]\nvocab_size = 256\nlayers = 2\ndim = 32\nheads = 4\nffn = 48\n{model}\n[data]\npaths = [\"a.txt\"]\n\
             [train]\nseq = 32\nglobal_batch = 4\nsteps = 20\nvalidate_every = 20\n[optimizer]\nlr = 0.01\nwarmup_steps = 0\n"
        );
        let config = Config::parse(&text, place.path().join("run.toml").to_str().unwrap(), &[]).unwrap();
        let mut steps = Vec::new();
        run_with(&config, &place.path().join(name), &mut |event| {
            if let Event::Stepped(line) = event {
                steps.push((line.loss, line.mtp_loss, line.val_loss));
            }
        })
        .unwrap_or_else(|e| panic!("{e}"));
        steps
    };
    let (with, without) = (run("with", "mtp_depth = 1"), run("without", ""));
    assert!(without.iter().all(|(_, further, _)| further.is_none()));
    let further: Vec<f64> = with.iter().map(|(_, further, _)| further.unwrap()).collect();
    // Of random weights both are those of guessing; positions at the end of a sequence have no target.
    let share = 31.0 / 32.0;
    assert!((further[0] - with[0].0 * share).abs() < 0.1, "{further:?}");
    assert!(further[19] < further[0] - 0.5 && with[0].0 == without[0].0, "{further:?}");
    assert!(with[1].0 != without[1].0);
}

#[test]
fn programs_of_evaluation_hold_no_module() {
    let config = config(TIED, "");
    let plan = plan(&Devices::new(), &config).unwrap();
    let program = &plan.compiled.programs[0];
    let text = program.to_string();
    assert!(text.contains("layers.4.wjoin"), "{text}");
    let evaluate = program.entry(lockstep_ir::StepProgram::EVALUATE).unwrap();
    let instrs: usize = evaluate.schedule.iter().map(|slot| program.segments[slot.segment].instrs.len()).sum();
    let whole: usize = {
        let config = self::config(&TIED.replace("mtp_depth = 1", "mtp_depth = 0"), "");
        let plan = lockstep_plan::plan(&Devices::new(), &config).unwrap();
        let program = &plan.compiled.programs[0];
        let evaluate = program.entry(lockstep_ir::StepProgram::EVALUATE).unwrap();
        evaluate.schedule.iter().map(|slot| program.segments[slot.segment].instrs.len()).sum()
    };
    assert_eq!(instrs, whole);
}
