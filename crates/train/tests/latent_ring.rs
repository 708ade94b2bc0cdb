//! The ring of the latent (`parallel.context = "latent"`) against one rank: keys and values of other ranks are rebuilt from what goes around.

mod common;

use common::check_layouts as check;
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_ir::account::{self, Communication};
use lockstep_ir::op::Flops;
use lockstep_ir::{Layout, Op, StepProgram};
use lockstep_plan::{Plan, plan};

/// Latents of queries and of keys and values, heads of V of another size, scores that YaRN makes larger.
const LATENT: &str = "kv_lora_rank = 10\nq_lora_rank = 12\nqk_nope_head_dim = 6\nqk_rope_head_dim = 4\nv_head_dim = 7\n\
    rope_scaling = { type = \"yarn\", factor = 4.0, original_context = 8, mscale_all_dim = 1.0 }";
/// Both latents as wide, wider heads of V, windows in every other layer, and sinks.
const WINDOW: &str = "kv_lora_rank = 10\nq_lora_rank = 10\nqk_nope_head_dim = 3\nqk_rope_head_dim = 2\nv_head_dim = 8\n\
    sliding_window = 7\nlayer_types = [\"sliding\", \"full\"]\nattention_sinks = true";
/// Layers without RoPE, and queries without a latent.
const NO_ROPE: &str =
    "kv_lora_rank = 10\nqk_nope_head_dim = 6\nqk_rope_head_dim = 4\nv_head_dim = 7\nrope_layers = [1, 0]";
/// All of DeepSeek-V3, with a module that predicts a further token.
const DEEPSEEK_V3: &str = "architecture = \"deepseek_v3\"\nkv_lora_rank = 10\nq_lora_rank = 12\nqk_nope_head_dim = 6\n\
    qk_rope_head_dim = 4\nv_head_dim = 7\nexperts = 4\nexpert_ffn = 24\ndense_layers = 1\nbalance_bias = 0.001\nmtp_depth = 1";

const BF16: &str = "[precision]\npolicy = \"bf16\"";
const DOCUMENTS: &str = "[data]\ndocument_mask = true";

fn config(model: &str, keys: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 131\nlayers = 4\ndim = 32\nheads = 4\nffn = 48\n{model}\n\
         [train]\nseq = 24\nglobal_batch = 4\nthreads = 1\nmicro_batch = 1\n{keys}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap_or_else(|e| panic!("{e}"))
}

const LAYOUTS: [&str; 14] = [
    "cp=2",
    "cp=3",
    "cp=4",
    "dp=2,cp=2",
    "cp=2,zero=1",
    "cp=2,zero=2",
    "dp=2,cp=2,zero=3",
    "cp=2,tp=2",
    "cp=2,tp=2,sp",
    "cp=3,tp=2,sp",
    "cp=2,pp=2",
    "cp=2,pp=2,zb-h1",
    "cp=2,pp=2,zb-v",
    "dp=2,zero=3,cp=2,tp=2,pp=2,zb-v",
];
/// Those that differ most.
const FEW: [&str; 4] = ["cp=4", "cp=2,tp=2,sp", "dp=2,zero=3,cp=2", "cp=2,pp=2,zb-v"];

/// These layouts, with the latent going around.
fn latent(layouts: &[&str]) -> Vec<String> {
    layouts.iter().map(|layout| format!("{layout},context=latent")).collect()
}

fn check_on(model: &str, keys: &str, layouts: &[&str]) -> Vec<lockstep_train::Comparison> {
    let layouts = latent(layouts);
    check(&config(model, keys), &layouts.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn every_layout_computes_what_one_rank_does() {
    check_on(LATENT, "", &LAYOUTS);
    check_on(LATENT, BF16, &LAYOUTS);
}

#[test]
fn documents_windows_sinks_and_layers_without_rope() {
    check_on(LATENT, DOCUMENTS, &FEW);
    check_on(WINDOW, "", &FEW);
    check_on(WINDOW, &format!("{BF16}\n{DOCUMENTS}"), &FEW);
    check_on(NO_ROPE, DOCUMENTS, &FEW);
}

#[test]
fn experts_and_further_tokens() {
    check_on(DEEPSEEK_V3, "", &["cp=2,tp=2,sp", "dp=2,zero=3,cp=2,pp=2", "cp=2,ep=2"]);
    check_on(DEEPSEEK_V3, BF16, &["cp=2,ep=2,pp=2"]);
}

#[test]
fn recomputed_attention_goes_around_again() {
    let under = |policy: &str| check_on(LATENT, &format!("[recompute]\npolicy = \"{policy}\""), &FEW);
    let kept = under("none");
    for policy in ["selective", "full", "sqrt"] {
        for (with, without) in under(policy).iter().zip(&kept) {
            assert_eq!(with.losses, without.losses, "{policy}, {}", with.layout);
        }
    }
}

#[test]
fn sums_in_fixed_point_muon_and_tf32() {
    for keys in ["reproducible = true", "[optimizer]\nname = \"muon\"", "[precision]\npolicy = \"tf32\""] {
        check_on(LATENT, keys, &FEW[..2]);
    }
}

#[test]
fn schedules_and_recomputation_change_no_bits() {
    let losses = |layouts: &[&str]| check_on(LATENT, "", layouts).into_iter().map(|c| c.losses).collect::<Vec<_>>();
    let all = losses(&["cp=2", "cp=2,zero=1", "cp=2,pp=2", "cp=2,pp=2,gpipe", "cp=2,pp=2,zb-h1", "cp=2,pp=2,zb-v"]);
    assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
}

#[test]
fn in_fp8_rebuilt_matmuls_stay_in_bf16() {
    let text = "[model]\nvocab_size = 131\nlayers = 2\ndim = 32\nheads = 4\nffn = 64\nkv_lora_rank = 32\nq_lora_rank = 48\n\
        qk_nope_head_dim = 16\nqk_rope_head_dim = 16\nv_head_dim = 8\n[train]\nseq = 64\nglobal_batch = 2\nmicro_batch = 1\n\
        threads = 1\n[precision]\npolicy = \"fp8\"\nfp8_weights = 0\n";
    for recipe in ["current", "rowwise", "delayed"] {
        let config = Config::parse(&format!("{text}fp8_recipe = \"{recipe}\"\n"), "run.toml", &[]).unwrap();
        check(&config, &["cp=2,context=latent", "cp=2,context=latent,tp=2,sp"]);
        let plan = plan(&Devices::new(), &config.at(&"cp=2,context=latent".parse().unwrap())).unwrap();
        let instrs = || plan.program().segments.iter().flat_map(|s| &s.instrs);
        let rebuilt: Vec<Op> = instrs().filter(|i| i.repeated).map(|i| i.op).collect();
        assert!(
            rebuilt.iter().all(|op| matches!(op, Op::Linear | Op::LinearGradInput | Op::LinearGradWeight)),
            "{rebuilt:?}"
        );
        assert!(rebuilt.contains(&Op::LinearGradWeight), "{rebuilt:?}");
    }
}

fn planned(layout: &str, model: &str, keys: &str) -> Plan {
    let layout: Layout = layout.parse().unwrap();
    plan(&Devices::new(), &config(model, keys).at(&layout)).unwrap()
}

/// Bytes that a rank sends along `cp` in these segments, of one layer and micro-batch, by shifts.
fn sent(layout: &str, keys: &str, segments: &[&str]) -> u64 {
    let total = |layers: usize| {
        let mut config = config(LATENT, keys);
        config.model.layers = layers;
        let plan = plan(&Devices::new(), &config.at(&layout.parse().unwrap())).unwrap();
        let program = plan.program();
        let all = account::communication(program, program.entry(StepProgram::TRAIN).unwrap());
        let mine = |e: &&Communication| segments.contains(&e.segment) && (e.op, e.axis.as_str()) == ("shift", "cp");
        all.iter().filter(mine).map(|e| e.sent_bytes).sum::<u64>()
    };
    (total(3) - total(2)) / 4
}

#[test]
fn a_message_is_the_latent_and_the_shared_key_and_its_gradient_in_f32() {
    // 24 positions, a latent of 10 and a key of 4; packed K·V of 4 heads of 10 and 7.
    let backward = ["backward", "backward_last"];
    for (keys, bytes) in [("", 4), (BF16, 2)] {
        for cp in [2, 3, 4] {
            for (context, width) in [("latent", 10 + 4), ("ring", 4 * (10 + 7))] {
                let elements = (cp - 1) * 24 / cp * width;
                let layout = format!("cp={cp},context={context}");
                assert_eq!(sent(&layout, keys, &["forward"]), elements * bytes, "forward, {layout}");
                assert_eq!(sent(&layout, keys, &backward), elements * (bytes + 4), "backward, {layout}");
            }
            // Recomputed from the residual stream on, attention goes around once more.
            let full = format!("{keys}\n[recompute]\npolicy = \"full\"");
            let elements = (cp - 1) * 24 / cp * 14;
            assert_eq!(
                sent(&format!("cp={cp},context=latent"), &full, &backward),
                elements * (2 * bytes + 4),
                "cp={cp}"
            );
        }
    }
}

#[test]
fn rebuilding_counts_as_flops_of_the_hardware_alone() {
    let flops = |plan: &Plan| {
        let program = plan.program();
        account::flops(program, program.entry(StepProgram::TRAIN).unwrap()).unwrap()
    };
    let one = flops(&planned("dp=1", LATENT, ""));
    for cp in [2u128, 3, 4] {
        let of = |context: &str| flops(&planned(&format!("cp={cp},context={context}"), LATENT, ""));
        let (ring, Flops { model, causal, hardware }) = (of("ring"), of("latent"));
        assert_eq!((model * cp, causal * cp), (one.model, one.causal), "cp={cp}");
        // Of cp − 1 parts of a sequence, 4 sequences, 4 layers: once in forward; once more, and two gradients, in backward.
        let positions = (cp - 1) * 24 / cp;
        assert_eq!(hardware - ring.hardware, 4 * 4 * positions * 4 * (2 * 10 * 4 * (6 + 7)), "cp={cp}");
    }
}

#[test]
fn gradients_of_messages_are_reduced_over_tp_with_those_of_the_owner() {
    let calls = |context: &str| {
        let plan = planned(&format!("cp=4,context={context},tp=2"), LATENT, "");
        let program = plan.program();
        let all = account::communication(program, program.entry(StepProgram::TRAIN).unwrap());
        let mine = |e: &&Communication| (e.op, e.axis.as_str()) == ("all_reduce", "tp") && e.segment == "backward";
        all.iter().filter(mine).map(|e| e.calls).sum::<u64>()
    };
    assert_eq!(calls("latent"), calls("ring"));
}
