//! Every architecture on every kind of layout against one rank, and what each has to say about layouts.

use lockstep_config::Config;
use lockstep_ir::{Layout, legal};
use lockstep_train::{Comparison, compare};

const GPT2: &str = "architecture = \"gpt2\"\npositions = 14";
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

/// Compares layouts with one rank; each must fit, and keep its promise.
fn check(config: &Config) -> Vec<Comparison> {
    let layouts: Vec<Layout> = LAYOUTS.iter().map(|l| l.parse().unwrap()).collect();
    for layout in &layouts {
        assert_eq!(legal::check(layout, &config.shape()), [], "{layout}");
    }
    let found = compare(config, &layouts, 3, &mut |_| ()).unwrap();
    let broken: Vec<&Comparison> = found.iter().filter(|c| !c.kept).collect();
    assert!(broken.is_empty(), "{broken:#?}");
    found
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
fn qwen2_computes_the_same_on_every_layout() {
    check_all(QWEN2);
}

/// Recomputing changes no bit on any layout.
fn check_recompute(model: &str) {
    let layouts: Vec<Layout> = ["dp=2,zero=3", "tp=2,sp", "pp=2"].map(|l| l.parse().unwrap()).to_vec();
    let run = |policy: &str| {
        let keys = format!("micro_batch = 1\n[recompute]\npolicy = \"{policy}\"");
        compare(&config(model, &keys), &layouts, 3, &mut |_| ()).unwrap()
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
fn gpt2_computes_the_same_again() {
    check_recompute(GPT2);
}

#[test]
fn qwen2_computes_the_same_again() {
    check_recompute(QWEN2);
}
