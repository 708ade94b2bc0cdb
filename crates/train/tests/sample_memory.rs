//! The text at the end of a run takes no more memory than the run. One test alone in its process: it counts the whole process's
//! memory.

mod counting;

use counting::growth;
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_plan::plan;
use lockstep_train::{RunOptions, run};
use std::sync::atomic::AtomicBool;

#[test]
fn the_closing_sample_fits_into_the_planned_memory() {
    let dir = tempfile::tempdir().unwrap();
    let text: String = (0..2000).map(|i| format!("{i} and {} make {}.\n", i + 7, 2 * i + 7)).collect();
    std::fs::write(dir.path().join("all.txt"), text).unwrap();
    let toml = "[model]\nvocab_size = 2048\nlayers = 6\ndim = 320\nheads = 5\nffn = 896\n[data]\npaths = [\".\"]\n\
                extensions = [\"txt\"]\n[optimizer]\nwarmup_steps = 0\n[train]\nsteps = 1\nseq = 128\nglobal_batch = 2\n\
                micro_batch = 1\nvalidation_sequences = 1\n";
    std::fs::write(dir.path().join("run.toml"), toml).unwrap();
    let config = Config::load(&dir.path().join("run.toml"), &[]).unwrap();
    let plan = plan(&Devices::new(), &config).unwrap();
    let planned = (plan.memory.total_bytes + plan.snapshot_bytes(0)) as usize;
    let most = |sample_tokens: usize| {
        let options =
            RunOptions { dir: dir.path().join(format!("run-{sample_tokens}")), sample_tokens, ..Default::default() };
        let (grown, outcome) =
            growth(|| run(&Devices::new(), &config, &options, &AtomicBool::new(false), &mut |_| ()).unwrap());
        assert_eq!(outcome.sample.is_some(), sample_tokens > 0);
        grown
    };
    let (without, with) = (most(0), most(40));
    const MIB: usize = 1 << 20;
    assert!(without < planned + planned / 20 + 8 * MIB, "{without} bytes, {planned} planned");
    assert!(with < without + MIB, "{with} bytes with a sample, {without} without");
}
