//! The list of layouts of `bench/scripts/layouts.sh` over what connects ranks that are processes: a part of it here, all of it by that script.
//! The strict NCCL (`fake_cuda/nccl.c`) runs the whole path of the GPU executor without a GPU: who connects to whom, in which order,
//! and what is sent.

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Every n-th of the mixtures, some of every config, and the most ranks of one. `bench/records` has runs of all.
type Part = (&'static str, &'static str);

/// Up to eight ranks.
const LARGE: Part = ("72", "8");
/// The strict NCCL computes nothing, so there it can be more of those that two cores start soon: 150 layouts and some.
const SMALL: Part = ("2", "4");

/// Eight ranks at a time are enough: beside as many others, one may get no core for so long that it counts as gone.
static ONE: Mutex<()> = Mutex::new(());

/// Runs the script on a part of the list; all layouts must be kept.
fn layouts((every, most): Part, transport: &str) -> usize {
    let _alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/scripts/layouts.sh");
    let mut command = Command::new("bash");
    command.arg(script).args([env!("CARGO_BIN_EXE_lockstep"), every, transport, most]);
    for variable in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"] {
        command.env_remove(variable);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(!text.contains("BROKEN"), "{text}");
    text.lines().filter(|line| line.ends_with(" kept")).count()
}

#[test]
fn layouts_ask_a_strict_nccl_for_what_fits_together() {
    let kept = [LARGE, SMALL].map(|part| layouts(part, "strict-nccl"));
    assert!(kept[0] >= 20 && kept[1] >= 150, "{kept:?}");
}

#[test]
fn layouts_over_sockets_compute_what_one_rank_computes() {
    let kept = layouts(LARGE, "sockets");
    assert!(kept >= 20, "{kept}");
}
