//! The architecture of `docs/adding-an-architecture.md` is this folder's, word for word; it trains, on every kind of layout.

mod parallel_block;

use lockstep_config::{Config, Features};
use lockstep_host::Devices;
use lockstep_ir::{Layout, StepScalars, counter, verify};
use lockstep_model::{CacheShape, Form, ModelBuilder, names};
use lockstep_plan::plan_with;
use lockstep_train::Session;

const SOURCE: &str = include_str!("parallel_block.rs");
const GUIDE: &str = include_str!("../../../../docs/adding-an-architecture.md");

/// The line that would make it part of the project, in the form of `lockstep_config::architectures!`.
macro_rules! line {
    ($Variant:ident = $word:literal, $file:ident, $features:expr;) => {
        const LINE: &str = concat!(
            stringify!($Variant),
            " = ",
            stringify!($word),
            ", ",
            stringify!($file),
            ", ",
            stringify!($features),
            ";"
        );
        const BUILD: ModelBuilder = $file::build;
        const FEATURES: Features = $features;
    };
}

line! { ParallelBlock = "parallel-block", parallel_block, Features::LLAMA; }

#[test]
fn the_guide_has_its_line() {
    assert!(GUIDE.contains(&format!("   {LINE}\n")), "docs/adding-an-architecture.md has no line {LINE}");
    assert_eq!(FEATURES, Features::LLAMA);
}

#[test]
fn the_guide_quotes_what_is_tested() {
    assert!(
        GUIDE.contains(&format!("```rust\n{SOURCE}```\n")),
        "docs/adding-an-architecture.md differs from {}",
        file!()
    );
    assert!(SOURCE.lines().count() < 100);
}

fn config() -> Config {
    let text = "[model]\nvocab_size = 256\nlayers = 2\ndim = 48\nheads = 4\nkv_heads = 2\nffn = 96\ntied_embeddings = true\n\
                [train]\nseq = 32\nglobal_batch = 8\nmicro_batch = 2\nthreads = 2\n[optimizer]\nlr = 3e-3";
    Config::parse(text, "run.toml", &[]).unwrap()
}

/// Text with some structure.
fn corpus() -> Vec<u8> {
    (0..2000).flat_map(|i| format!("the square of {} is {}.\n", i % 97, (i % 97) * (i % 97)).into_bytes()).collect()
}

/// The losses of a run over random pieces of the corpus.
fn losses(config: &Config, steps: u64) -> Vec<f64> {
    let plan = plan_with(&Devices::new(), config, BUILD).unwrap();
    let mut session = Session::new(&Devices::new(), config, &plan).unwrap();
    let (text, seq) = (corpus(), config.train.seq);
    let sequences = config.round();
    let mut step = |step: u64| {
        for m in 0..plan.layout.micro_batches {
            let sample = |i: usize| step * config.train.global_batch as u64 + (m * sequences + i) as u64;
            let start = |i: usize| counter::bits(7, sample(i)) as usize % (text.len() - seq - 1);
            for (name, shift) in [(names::TOKENS, 0), (names::TARGETS, 1)] {
                let piece = |i: usize| text[start(i) + shift..][..seq].iter().flat_map(|b| u32::from(*b).to_le_bytes());
                let bytes: Vec<u8> = (0..sequences).flat_map(piece).collect();
                session.executor().write(name, m, &bytes).unwrap();
            }
        }
        let inverse_count = 1.0 / plan.tokens_per_step as f32;
        let bias = |beta: Option<f64>| beta.map_or(1.0, |beta| 1.0 - beta.powi(step as i32 + 1)) as f32;
        let o = &config.optimizer;
        let (bias1, bias2) = (bias(o.beta1), bias(o.beta2));
        let scalars = StepScalars { lr: o.lr as f32, inverse_count, clip: 1.0, bias1, bias2, loss_scale: 1.0 };
        session.run_step(scalars).unwrap().loss
    };
    (0..steps).map(&mut step).collect()
}

#[test]
fn it_learns() {
    let losses = losses(&config(), 80);
    assert!((5.0..6.0).contains(&losses[0]), "{losses:?}");
    assert!(losses[79] < 2.0, "{losses:?}");
}

#[test]
fn it_computes_the_same_on_other_layouts() {
    let (config, steps) = (config(), 4);
    let single = losses(&config, steps);
    for layout in ["dp=2,zero=3", "tp=2,sp", "tp=4", "pp=2", "dp=2,zero=1,tp=2,sp,pp=2"] {
        let layout: Layout = layout.parse().unwrap();
        for (one, many) in single.iter().zip(losses(&config.at(&layout), steps)) {
            assert!((one - many).abs() < 1e-5 * one, "{layout}: {one} {many}");
        }
    }
}

#[test]
fn it_has_every_form() {
    let loss = Form::Loss { batch: 2, seq: 8, context: 8, documents: true };
    let cache = CacheShape { slots: 1, blocks: 1, page: 32, pages: 1, window_pages: 1, apart: true };
    for form in [
        loss,
        Form::NextToken { batch: 1, positions: 4, cache, known: 256 },
        Form::Score { batch: 2, positions: 4, cache },
    ] {
        verify::graph(&BUILD(&config().model, form).unwrap()).unwrap();
    }
}
