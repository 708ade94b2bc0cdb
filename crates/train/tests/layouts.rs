//! Every layout against one rank: the same bits where that is promised, close elsewhere.

mod common;

use common::check_layouts as check;
use lockstep_config::{Config, legal};
use lockstep_host::Devices;
use lockstep_ir::{Layout, Schedule, counter};
use lockstep_train::{Comparison, compare};

fn config(model: &str, train: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 131\nlayers = 4\ndim = 32\nheads = 4\nkv_heads = 2\nffn = 48\n{model}\n\
         [train]\nseq = 12\nglobal_batch = 8\nthreads = 2\n{train}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

/// All pairs of what an axis, ZeRO, sequence parallelism and a schedule can be, and triples.
const LAYOUTS: [&str; 56] = [
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "dp=4,zero=1",
    "dp=4,zero=3",
    "tp=2",
    "tp=2,sp",
    "tp=4",
    "tp=4,sp",
    "pp=2",
    "pp=2,gpipe",
    "pp=4",
    "pp=4,gpipe",
    "dp=2,tp=2",
    "dp=2,tp=4,sp",
    "dp=2,zero=1,tp=2",
    "dp=2,zero=1,tp=2,sp",
    "dp=2,zero=2,tp=2",
    "dp=2,zero=2,tp=2,sp",
    "dp=2,zero=3,tp=2",
    "dp=2,zero=3,tp=4,sp",
    "dp=2,pp=2",
    "dp=2,zero=1,pp=2,gpipe",
    "dp=2,zero=1,pp=4",
    "tp=2,pp=2",
    "tp=2,sp,pp=2,gpipe",
    "tp=2,sp,pp=4",
    "dp=2,tp=2,pp=2",
    "dp=2,zero=1,tp=2,sp,pp=2",
    "pp=2,interleaved",
    "pp=2,zb-h1",
    "pp=4,zb-h1",
    "pp=2,zb-v",
    "dp=2,zero=1,pp=2,interleaved",
    "dp=2,zero=1,pp=2,zb-v",
    "dp=2,pp=4,zb-h1",
    "tp=2,sp,pp=2,zb-v",
    "tp=2,pp=2,interleaved",
    "dp=2,zero=1,tp=2,sp,pp=2,zb-h1",
    "dp_replicate=2,dp=2",
    "dp_replicate=2,dp=2,zero=2",
    "dp_replicate=2,dp=2,zero=3",
    "dp_replicate=2,dp=2,zero=1,tp=2,sp",
    "dp_replicate=2,dp=2,zero=3,pp=2",
    "dp=2,zero=3,no-reshard",
    "dp=2,zero=2,pp=2",
    "dp=2,zero=2,pp=4,gpipe",
    "dp=2,zero=3,pp=2,gpipe",
    "dp=2,zero=3,no-reshard,pp=4",
    "dp=2,zero=3,tp=2,sp,pp=2",
    "dp_replicate=2,dp=2,zero=1,cp=2",
    "dp=2,zero=3,cp=2,pp=2",
    "dp=2,zero=3,pp=2,zb-v",
    "dp=2,zero=2,pp=2,zb-h1",
    "dp=2,zero=3,no-reshard,pp=2,interleaved",
];

const BF16: &str = "[precision]\npolicy = \"bf16\"";
const BF16_GRADIENTS: &str = "[precision]\npolicy = \"bf16\"\ngradients = \"bf16\"";

#[test]
fn with_accumulation_in_fp32() {
    check(&config("", "micro_batch = 1"), &LAYOUTS);
}

#[test]
fn with_larger_micro_batches() {
    check(&config("", "micro_batch = 2"), &LAYOUTS);
}

#[test]
fn with_tied_embeddings() {
    check(&config("tied_embeddings = true", "micro_batch = 1"), &LAYOUTS);
}

#[test]
fn with_documents_kept_apart() {
    check(&config("", "micro_batch = 1\n[data]\ndocument_mask = true"), &LAYOUTS);
}

#[test]
fn with_prompts_that_do_not_count() {
    let prompts = "[data]\nprompt_field = \"prompt\"\ndocument_mask = true";
    let found = check(&config("", &format!("micro_batch = 1\n{prompts}")), &LAYOUTS);
    check(&config("tied_embeddings = true", &format!("micro_batch = 2\n{BF16}\n{prompts}")), &LAYOUTS);
    // Something is left out, and not everything.
    let whole = check(&config("", "micro_batch = 1\n[data]\ndocument_mask = true"), &["dp=2"]);
    let share = found[0].losses[0].0 / whole[0].losses[0].0;
    assert!(share > 0.5 && share < 0.75, "{share}");
}

#[test]
fn with_accumulation_in_bf16() {
    check(&config("", &format!("micro_batch = 1\n{BF16}")), &LAYOUTS);
}

#[test]
fn with_bf16_gradients_and_tied_embeddings() {
    check(&config("tied_embeddings = true", &format!("micro_batch = 2\n{BF16_GRADIENTS}")), &LAYOUTS);
}

#[test]
fn reproducible_runs_have_the_same_bits_on_any_data_parallel_and_pipeline_layout() {
    for (model, train) in [("", ""), ("tied_embeddings = true", BF16)] {
        let config = config(model, &format!("micro_batch = 1\nreproducible = true\n{train}"));
        for c in check(&config, &LAYOUTS) {
            assert!(c.identical || ["tp=", "cp="].iter().any(|axis| c.layout.contains(axis)), "{c:?}");
        }
    }
}

#[test]
fn sharding_the_optimizer_changes_no_bit() {
    for keys in ["micro_batch = 1".to_owned(), format!("micro_batch = 2\n{BF16_GRADIENTS}")] {
        let config = config("", &keys);
        for (plain, sharded) in [("dp=2", "dp=2,zero=1"), ("dp=2,tp=2,pp=2", "dp=2,zero=1,tp=2,pp=2,gpipe")] {
            let found = check(&config, &[plain, sharded]);
            let losses = |c: &Comparison| c.losses.iter().map(|(_, l)| l.to_bits()).collect::<Vec<_>>();
            assert_eq!(losses(&found[0]), losses(&found[1]), "{plain} and {sharded}");
        }
    }
}

#[test]
fn random_models_on_random_layouts() {
    let mut tried = 0;
    for case in 0..200u64 {
        let draw = |i: u64, n: u64| counter::bits(counter::key(11, "layouts"), case * 32 + i) % n;
        let pick = |i: u64, from: &[usize]| from[draw(i, from.len() as u64) as usize];
        let (dp, tp, pp) = (pick(0, &[1, 2, 3, 4]), pick(1, &[1, 2, 4]), pick(2, &[1, 2, 3]));
        let replicas = pick(18, &[1, 1, 2]);
        let (cp, context) = (pick(19, &[1, 1, 2, 5]), ["ring", "gather", "a2a"][draw(20, 3) as usize]);
        let sizes = format!("dp_replicate={replicas},dp={dp},cp={cp},context={context},tp={tp},pp={pp}");
        let mut layout: Layout = sizes.parse().unwrap();
        layout.zero = draw(3, 4) as u8;
        layout.reshard_after_forward = layout.zero < 3 || draw(19, 2) == 0;
        layout.sequence_parallel = draw(4, 2) == 0;
        let schedules = if pp == 1 { 1 } else { Schedule::ALL.len() as u64 };
        layout.schedule = Schedule::ALL[draw(5, schedules) as usize];
        layout.chunks = layout.schedule.chunks().start()
            + if layout.schedule.name() == "interleaved" { pick(18, &[0, 1]) } else { 0 };
        let (heads, kv_heads, head_dim) = (pick(6, &[4, 8]), pick(7, &[1, 2, 4]), pick(8, &[4, 6]));
        let (layers, dim, ffn) = (pick(9, &[4, 6, 7]), pick(10, &[20, 33]), pick(11, &[16, 24]));
        let (vocab, seq, micro_batch) = (40 + draw(12, 30), pick(13, &[4, 8, 20]), pick(14, &[1, 2]));
        let precision = ["", BF16, BF16_GRADIENTS][draw(15, 3) as usize];
        let (tied, reproducible) = (draw(16, 2) == 0, draw(17, 3) == 0);
        let text = format!(
            "[model]\nvocab_size = {vocab}\nlayers = {layers}\ndim = {dim}\nheads = {heads}\nkv_heads = {kv_heads}\n\
             head_dim = {head_dim}\nffn = {ffn}\ntied_embeddings = {tied}\n[train]\nseq = {seq}\nglobal_batch = 24\n\
             micro_batch = {micro_batch}\nthreads = 1\nreproducible = {reproducible}\n{precision}\n"
        );
        let config = Config::parse(&text, "run.toml", &[]).unwrap();
        if layout.mesh.ranks() == 1 || layout.mesh.ranks() > 8 || !legal::check(&layout, &config.extents()).is_empty() {
            continue;
        }
        tried += 1;
        let found = compare(&Devices::new(), &config, &[layout], 2, &mut |_| ()).unwrap();
        assert!(found[0].kept, "{text}{found:#?}");
    }
    assert!(tried >= 20, "{tried}");
}

#[test]
fn rules_that_look_at_signs_raise_no_alarm() {
    // The gradient of a key's bias is zero but for rounding.
    let text = "[model]\narchitecture = \"gpt2\"\nvocab_size = 131\nlayers = 4\ndim = 48\nheads = 12\nffn = 96\n\
                [train]\nseq = 12\nglobal_batch = 8\nthreads = 2\nmicro_batch = 1\n[optimizer]\nname = \"lion\"\n";
    let layouts = ["tp=2", "tp=2,sp", "tp=3", "tp=3,sp", "tp=4,sp", "dp=2,tp=2", "dp=2,zero=3,tp=2,sp", "tp=2,sp,pp=2"];
    for precision in ["", BF16] {
        check(&Config::parse(&format!("{text}{precision}\n"), "run.toml", &[]).unwrap(), &layouts);
    }
}

#[test]
fn high_learning_rates_raise_no_alarm() {
    for name in ["adamw", "lion", "sgd", "muon"] {
        for lr in ["0.3", "30.0"] {
            let keys = format!("micro_batch = 1\n[optimizer]\nname = \"{name}\"\nlr = {lr}\ngrad_clip = 0.0");
            let layouts = ["dp=2,zero=1", "dp=4", "tp=2", "tp=4,sp", "dp=2,zero=3,tp=2,sp"];
            check(&config("", &keys), &layouts);
        }
    }
}
