//! Every layout against one rank.

use lockstep_config::Config;
use lockstep_ir::Layout;
use lockstep_train::compare;

fn config(keys: &str, tied: bool) -> Config {
    let text = format!(
        "[model]\nvocab_size = 131\nlayers = 4\ndim = 32\nheads = 4\nkv_heads = 2\nffn = 48\ntied_embeddings = {tied}\n\
         [train]\nseq = 12\nglobal_batch = 8\nmicro_batch = 1\nthreads = 2\n{keys}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

fn check(config: &Config, layouts: &[&str]) {
    let layouts: Vec<Layout> = layouts.iter().map(|l| l.parse().unwrap()).collect();
    let mut broken = Vec::new();
    let result = compare(config, &layouts, 3, &mut |c| {
        eprintln!(
            "{:<32} loss {:.1e} gradient {:.1e} ({}) {}",
            c.layout, c.loss_difference, c.gradient_difference, c.worst_gradient, c.identical
        );
        if !c.kept {
            broken.push(format!("{c:?}"));
        }
    });
    result.unwrap();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

const AXES: [&str; 11] = [
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "dp=4,zero=1",
    "tp=2",
    "tp=2,sp",
    "tp=4",
    "tp=4,sp",
    "pp=2",
    "pp=4,gpipe",
];
const PAIRS: [&str; 14] = [
    "dp=2,tp=2",
    "dp=2,zero=1,tp=2",
    "dp=2,zero=1,tp=2,sp",
    "dp=2,zero=2,tp=2,sp",
    "dp=2,zero=3,tp=2",
    "dp=2,zero=3,tp=2,sp",
    "dp=2,zero=3,tp=4,sp",
    "dp=2,pp=2",
    "dp=2,zero=1,pp=2,gpipe",
    "tp=2,pp=2",
    "tp=2,sp,pp=2,gpipe",
    "tp=2,sp,pp=4",
    "dp=2,tp=2,pp=2",
    "dp=2,zero=1,tp=2,sp,pp=2",
];

#[test]
fn one_axis_at_a_time() {
    check(&config("", false), &AXES);
}

#[test]
fn axes_together() {
    check(&config("", false), &PAIRS);
}

#[test]
fn tied_embeddings() {
    check(&config("", true), &AXES);
    check(&config("", true), &PAIRS);
}

#[test]
fn with_documents_kept_apart() {
    check(&config("[data]\ndocument_mask = true", false), &[&AXES[..], &PAIRS].concat());
}

#[test]
fn in_bf16() {
    check(&config("[precision]\npolicy = \"bf16\"", false), &[&AXES[..], &PAIRS].concat());
    check(&config("[precision]\npolicy = \"bf16\"\ngradients = \"bf16\"", true), &[&AXES[..], &PAIRS].concat());
}

#[test]
fn reproducible_runs() {
    check(&config("reproducible = true", true), &[&AXES[..], &PAIRS].concat());
}
