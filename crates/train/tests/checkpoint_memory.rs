//! A checkpoint of several ranks is written without copies of tensors, and read with one whole tensor at a time. One test
//! alone in its process: it counts the whole process's memory.

mod counting;

use counting::growth;
use lockstep_checkpoint::open;
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_plan::plan;
use lockstep_train::Session;
use serde_json::json;

#[test]
fn saving_copies_no_tensor_and_loading_holds_one() {
    let text = "[model]\nvocab_size = 8192\nlayers = 2\ndim = 256\nheads = 4\nffn = 512\n[train]\nseq = 16\nglobal_batch = 4\n\
                micro_batch = 1\n[precision]\npolicy = \"bf16\"\n[parallel]\ndp = 2\nzero = 1\ntp = 2\n";
    let config = Config::parse(text, "run.toml", &[]).unwrap();
    let plan = plan(&Devices::new(), &config).unwrap();
    let mut session = Session::new(&Devices::new(), &config, &plan).unwrap();
    let dir = tempfile::tempdir().unwrap();
    const MIB: usize = 1 << 20;
    let largest = 8192 * 256 * 4;
    let (grown, path) = growth(|| session.save(dir.path(), 1, &json!({}), 1, &mut |_, _| {}).unwrap());
    assert!(grown < MIB, "saving took {grown} bytes");
    // The checksums are read in pieces of 1 MiB.
    let (grown, loaded) = growth(|| open(&path).unwrap());
    assert!(grown < 2 * MIB, "opening took {grown} bytes");
    let (grown, _) = growth(|| session.restore(&loaded).unwrap());
    assert!(grown < largest + largest / 2 + MIB, "restoring took {grown} bytes");
}
