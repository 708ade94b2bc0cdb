//! Every architecture on every kind of layout against one rank, and what each has to say about layouts.

mod common;

use common::check_layouts;
use lockstep_config::{Config, legal};
use lockstep_host::Devices;
use lockstep_ir::Hint;
use lockstep_ir::{Layout, Op};
use lockstep_model::names;
use lockstep_plan::plan;
use lockstep_train::{Comparison, compare};

const GPT2: &str = "architecture = \"gpt2\"\npositions = 14";
const GPT2_DROPOUT: &str = "architecture = \"gpt2\"\npositions = 14\ndropout = 0.2";
const QWEN2: &str = "architecture = \"qwen2\"\nkv_heads = 2\nffn = 48";

fn config(model: &str, train: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 131\nlayers = 4\ndim = 32\nheads = 4\n{model}\n\
         [train]\nseq = 12\nglobal_batch = 8\nthreads = 2\n{train}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap_or_else(|e| panic!("{e}"))
}

const LAYOUTS: [&str; 12] = [
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "tp=2",
    "tp=2,sp",
    "tp=4,sp",
    "pp=2",
    "pp=4,gpipe",
    "dp=2,zero=3,tp=2,sp",
    "tp=4,pp=2",
    "dp=2,zero=1,tp=2,sp,pp=2",
];

fn check(config: &Config) -> Vec<Comparison> {
    check_layouts(config, &LAYOUTS)
}

const BF16: &str = "[precision]\npolicy = \"bf16\"";

/// Both precisions, tied and not, sums in fixed point.
fn check_all(model: &str) {
    check(&config(model, "micro_batch = 1"));
    check(&config(&format!("{model}\ntied_embeddings = {}", model == QWEN2), &format!("micro_batch = 2\n{BF16}")));
    for c in check(&config(model, "micro_batch = 1\nreproducible = true\n[data]\ndocument_mask = true")) {
        assert!(c.identical || c.layout.contains("tp="), "{c:?}");
    }
}

#[test]
fn gpt2_computes_the_same_on_every_layout() {
    check_all(GPT2);
}

#[test]
fn gpt2_drops_the_same_on_every_layout() {
    check_all(GPT2_DROPOUT);
}

#[test]
fn qwen2_computes_the_same_on_every_layout() {
    check_all(QWEN2);
}

/// Recomputing changes no bit on any layout.
fn check_recompute(model: &str) {
    let layouts: Vec<Layout> = ["dp=2,zero=3", "tp=2,sp", "pp=2"].map(|l| l.parse().unwrap()).to_vec();
    let run = |policy: &str| {
        let keys = format!("micro_batch = 1\n[recompute]\npolicy = \"{policy}\"");
        compare(&Devices::new(), &config(model, &keys), &layouts, 3, &mut |_| ()).unwrap()
    };
    let kept = run("none");
    for policy in ["selective", "full", "every-k"] {
        for (with, without) in run(policy).iter().zip(&kept) {
            assert_eq!(with.losses, without.losses, "{policy}, {}", with.layout);
            assert!(with.kept, "{policy}: {with:?}");
        }
    }
}

#[test]
fn gpt2_recomputes_the_same() {
    check_recompute(GPT2);
}

#[test]
fn gpt2_recomputes_the_same_dropout_masks() {
    check_recompute(GPT2_DROPOUT);
}

#[test]
fn qwen2_recomputes_the_same() {
    check_recompute(QWEN2);
}

#[test]
fn parameters_and_flops_are_those_of_the_literature() {
    let planned = |shape: &str| {
        let text = format!("[model]\n{shape}\n[train]\nseq = 1024\nglobal_batch = 1\n");
        plan(&Devices::new(), &Config::parse(&text, "run.toml", &[]).unwrap()).unwrap()
    };
    let gpt2 = planned("architecture = \"gpt2\"\nvocab_size = 50257\nlayers = 12\ndim = 768\nheads = 12");
    assert_eq!(gpt2.parameters, 124_439_808);
    // 6 × matrices, the tied head included, + 12 × layers × seq × heads × head_dim: no positions, biases or norms.
    let matrices = 12 * 12 * 768 * 768 + 50257 * 768u64;
    assert_eq!(gpt2.model_flops_per_token(), (6 * matrices + 12 * 12 * 1024 * 768) as f64);
    let qwen2 = planned(
        "architecture = \"qwen2\"\nvocab_size = 151936\nlayers = 24\ndim = 896\nheads = 14\nkv_heads = 2\nffn = 4864\n\
         tied_embeddings = true",
    );
    assert_eq!(qwen2.parameters, 494_032_768);
    let matrices = 24 * (896 * 64 * (14 + 4) + 896 * 896 + 3 * 4864 * 896) + 151_936 * 896u64;
    assert_eq!(qwen2.model_flops_per_token(), (6 * matrices + 12 * 24 * 1024 * 896) as f64);
}

#[test]
fn training_drops_and_evaluation_does_not() {
    let dropouts = |model: &str, segment: &str| {
        let program = plan(&Devices::new(), &config(model, "")).unwrap().program().clone();
        let segment = program.segments.iter().find(|s| s.name == segment).unwrap().clone();
        let inputs = program.tensors.iter().filter(|t| t.name == names::DROPOUT_KEYS).count();
        (segment.instrs.iter().filter(|i| i.op.name() == "dropout").count(), inputs)
    };
    // After the embedding, and twice in each of four layers; backward once more.
    for segment in ["forward", "backward"] {
        assert_eq!(dropouts(GPT2_DROPOUT, segment), (9, 1));
        assert_eq!(dropouts(GPT2, segment), (0, 0));
    }
    assert_eq!(dropouts(GPT2_DROPOUT, "evaluate"), (0, 1));
    let first_loss = |model: &str, train: &str| {
        compare(&Devices::new(), &config(model, train), &[Layout::single(1)], 1, &mut |_| ()).unwrap()[0].losses[0].0
    };
    let dropped = first_loss(GPT2_DROPOUT, "");
    // Masks depend on the seed and not on micro-batches, and change a first loss, though not by much.
    assert_eq!(dropped, first_loss(GPT2_DROPOUT, "micro_batch = 2"));
    let without = first_loss(GPT2, "");
    assert!(dropped != without && (dropped - without).abs() < 0.1, "{dropped} {without}");
}

#[test]
fn weight_decay_spares_biases_and_norms() {
    let program = plan(&Devices::new(), &config(GPT2, "")).unwrap().program().clone();
    let update = program.segments.iter().find(|s| s.name == "update").unwrap();
    let mut spared = 0;
    for instr in &update.instrs {
        let Op::AdamW { decay, .. } = instr.op else { continue };
        let vector = instr.inputs[0].ty.dims.len() == 1;
        assert_eq!(decay == 0.0, vector, "{}", program.values[instr.inputs[0].value]);
        spared += usize::from(vector);
    }
    // Two norms with a bias and four biases per layer, and the last norm.
    assert_eq!(spared, 4 * (4 + 4) + 2);
}

#[test]
fn tensor_parallelism_must_split_gpt2s_heads_and_hidden_units() {
    let refused = |model: &str, layout: &str| {
        let text = format!("[model]\narchitecture = \"gpt2\"\nvocab_size = 50257\nlayers = 48\n{model}");
        let config = Config::parse(&text, "run.toml", &[]).unwrap();
        let layout: Layout = layout.parse().unwrap();
        legal::check(&layout, &config.extents()).into_iter().map(|r| r.with_hint()).collect::<Vec<_>>()
    };
    let xl = "dim = 1600\nheads = 25";
    assert_eq!(refused(xl, "tp=5"), [""; 0]);
    let [heads, kv_heads] = &refused(xl, "tp=2")[..] else { panic!("both are odd") };
    assert_eq!(heads, "parallel.tp = 2 does not divide model.heads = 25\nhint: use tp = 1 or 5");
    assert!(kv_heads.contains("does not divide model.kv_heads = 25"));
    assert!(refused("dim = 1600\nheads = 16\nffn = 6", "tp=4")[0].contains("does not divide model.ffn = 6"));
}
