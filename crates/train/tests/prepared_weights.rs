//! Runs in fp8 whose weights are quantised once per step, in the memory of the weights in bf16.

mod common;

use common::{Ran, run_to, write_corpus};
use lockstep_config::Config;

/// A model whose matmuls can all be in fp8, for steps that jump.
fn config(dir: &std::path::Path, set: &[&str]) -> Config {
    let text = "[model]\nvocab_size = 256\nlayers = 2\ndim = 64\nheads = 4\nkv_heads = 2\nffn = 128\n\
         [data]\npaths = [\".\"]\nextensions = [\"txt\"]\n[optimizer]\nlr = 3e-2\nwarmup_steps = 2\n\
         [train]\nsteps = 16\nseq = 32\nglobal_batch = 8\nmicro_batch = 2\nvalidate_every = 1\n\
         [precision]\npolicy = \"fp8\"\nfp8_weights = 0\n\
         [spikes]\nskip = true\nz = 0.1\nwindow = 4\nskips = 100\n";
    std::fs::write(dir.join("run.toml"), text).unwrap();
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    Config::load(&dir.join("run.toml"), &set).unwrap()
}

#[test]
fn a_step_whose_update_is_not_applied_leaves_the_weights_as_they_were() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    for optimizer in ["optimizer.name=adamw", "optimizer.name=lion", "optimizer.name=sgd", "optimizer.name=muon"] {
        let config = config(dir.path(), &[optimizer]);
        let Ran { steps, skipped, .. } = run_to(&config, &dir.path().join(optimizer), 16);
        assert!((1..12).contains(&skipped.len()), "{optimizer}: {skipped:?}");
        let mut unchanged = 0;
        for pair in steps.windows(2) {
            let same = pair[0].val_loss == pair[1].val_loss;
            assert_eq!(same, skipped.contains(&pair[1].step), "{optimizer}, step {}: {pair:?}", pair[1].step);
            unchanged += usize::from(same);
        }
        assert_eq!(unchanged, skipped.len(), "{optimizer}");
    }
}
