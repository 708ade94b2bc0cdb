//! Runs in fp16: the loss scale, and that they learn as others do.

mod common;

use common::{Ran, run_to, run_with, tiny, write_corpus};
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_ir::Layout;
use lockstep_train::{Event, StepMetrics, TrainError, compare};

#[test]
fn fp16_learns_as_fp32_does() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let keys = "steps = 40\nmicro_batch = 4\nvalidate_every = 0\n";
    let Ran { steps: wide, .. } = run_to(&tiny(dir.path(), keys), &dir.path().join("fp32"), 40);
    for gradients in ["fp32", "bf16"] {
        let keys = format!("{keys}[precision]\npolicy = \"fp16\"\ngradients = \"{gradients}\"");
        let Ran { steps: half, skipped, .. } =
            run_to(&tiny(dir.path(), &keys), &dir.path().join(format!("fp16-{gradients}")), 40);
        assert_eq!(skipped, [0; 0], "65536 suits this model");
        for (a, b) in half.iter().zip(&wide) {
            assert!((a.loss / b.loss - 1.0).abs() < 0.02, "step {}: {} and {}", a.step, a.loss, b.loss);
        }
        let (first, last) = (&half[0], &half[39]);
        assert!(last.loss < first.loss - 1.0 && last.val_loss.unwrap() < first.loss - 1.0, "{last:?}");
        assert_ne!(last.loss, wide[39].loss);
        assert_eq!(last.loss_scale, Some(65536.0));
        assert_eq!(wide[39].loss_scale, None);
    }
}

#[test]
fn a_scale_that_is_too_large_is_halved_until_gradients_are_finite_and_grows_again() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let keys =
        "steps = 40\nvalidate_every = 0\n[precision]\npolicy = \"fp16\"\nloss_scale = 1073741824\ngrowth_interval = 5";
    let Ran { steps, skipped, .. } = run_to(&tiny(dir.path(), keys), &dir.path().join("run"), 40);
    let scales: Vec<f64> = steps.iter().map(|m| m.loss_scale.unwrap()).collect();
    // More than three in a row, each at half the scale before.
    assert!(skipped.len() > 4 && skipped[..5] == [1, 2, 3, 4, 5], "{skipped:?}");
    assert!(scales[..5].iter().enumerate().all(|(i, s)| *s == (1u64 << (30 - i)) as f64), "{scales:?}");
    let first = skipped.iter().zip(1..).take_while(|(step, n)| **step == *n).count();
    // Five good steps double it.
    let grows = |w: &[f64]| w[..5].iter().all(|s| *s == w[0]) && w[5] == 2.0 * w[0];
    assert!(scales[first..].windows(6).any(grows), "{scales:?}");
    assert!(steps[39].loss < steps[first].loss - 0.5, "{steps:?}");
    // A skipped step leaves the weights: its neighbours start from the same loss.
    assert!((steps[0].loss - steps[1].loss).abs() < 0.1);
}

#[test]
fn a_resumed_run_goes_on_with_its_scale() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let keys =
        "steps = 24\nvalidate_every = 0\n[precision]\npolicy = \"fp16\"\nloss_scale = 67108864\ngrowth_interval = 3";
    let config = tiny(dir.path(), keys);
    let Ran { steps: whole, .. } = run_to(&config, &dir.path().join("whole"), 24);
    let parts = dir.path().join("parts");
    let parts: Vec<StepMetrics> = [2, 9, 17, 24].iter().flat_map(|last| run_to(&config, &parts, *last).steps).collect();
    let bits = |m: &StepMetrics| (m.loss.to_bits(), m.grad_norm.to_bits(), m.loss_scale);
    assert_eq!(parts.iter().map(bits).collect::<Vec<_>>(), whole.iter().map(bits).collect::<Vec<_>>());
    let scales: Vec<f64> = whole.iter().map(|m| m.loss_scale.unwrap()).collect();
    assert!(scales.windows(2).any(|s| s[1] < s[0]) && scales.windows(2).any(|s| s[1] > s[0]), "{scales:?}");
}

#[test]
fn at_the_least_scale_gradients_that_are_not_finite_end_the_run() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let keys = "steps = 40\nvalidate_every = 0\n[precision]\npolicy = \"fp16\"\nloss_scale = 4";
    let config = tiny(dir.path(), keys);
    // Weights that leave the range of f16.
    let set = ["model.init_std=1e6".to_owned()];
    let wild = Config::parse(&config.resolved_toml(), "run.toml", &set).unwrap();
    let mut steps = 0;
    let error =
        run_with(&wild, &dir.path().join("run"), &mut |event| steps += u64::from(matches!(event, Event::Skipped(_))));
    assert!(matches!(error, Err(TrainError::Diverged { steps: 3, .. })), "{error:?}");
    assert_eq!(steps, 2 + 3, "two steps of search, three at scale 1");
}

#[test]
fn every_layout_computes_what_one_rank_computes() {
    let text = "[model]\nvocab_size = 131\nlayers = 4\ndim = 32\nheads = 4\nkv_heads = 2\nffn = 48\ntied_embeddings = true\n\
                [train]\nseq = 12\nglobal_batch = 8\nthreads = 2\nmicro_batch = 1\n[precision]\npolicy = \"fp16\"\n";
    let layouts = ["dp=2", "dp=2,zero=3", "tp=2,sp", "tp=4", "pp=2", "pp=4,gpipe", "dp=2,zero=1,tp=2,sp,pp=2"];
    let layouts: Vec<Layout> = layouts.iter().map(|l| l.parse().unwrap()).collect();
    for set in [vec![], vec!["train.reproducible=true".to_owned()], vec!["optimizer.name=lion".to_owned()]] {
        let config = Config::parse(text, "run.toml", &set).unwrap();
        for c in compare(&Devices::new(), &config, &layouts, 3, &mut |_| ()).unwrap() {
            assert!(c.kept, "{set:?} {c:#?}");
            assert!(c.identical || !config.train.reproducible || c.layout.contains("tp="), "{c:#?}");
        }
    }
}
