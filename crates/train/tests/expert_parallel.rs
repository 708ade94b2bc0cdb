//! Expert parallelism beside every other axis: each layout against one rank, the same routing, and the same bits over pipelines and
//! recompute policies.

mod common;

use lockstep_config::Config;
use lockstep_train::Comparison;

/// Two of four experts for every token, and three of eight, narrower than the block that they take the place of.
const MIXTRAL: &str = "architecture = \"mixtral\"\nexperts = 4";
const QWEN3_MOE: &str = "architecture = \"qwen3_moe\"\nexperts = 8\nexperts_per_token = 3\nexpert_ffn = 24";

/// Two key heads: with tp=4 neighbours share one.
const LAYOUTS: [&str; 47] = [
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
