//! A writer killed at any moment costs the checkpoint it was writing, and no other.

use super::*;
use lockstep_checkpoint::latest;
use std::process::{Command, Stdio};
use std::time::Duration;

const CHILD: &str = "LOCKSTEP_CHECKPOINT_TEST_WRITER";

/// Not a test by itself: the writer that the next one kills.
#[test]
fn child_that_saves_without_end() {
    let Some(dir) = std::env::var_os(CHILD) else { return };
    let dir = Path::new(&dir);
    let first = latest(dir).unwrap().loaded.unwrap().step + 1;
    for step in first..first + 1000 {
        let tensors = vec![tensor("big", DType::U32, &[1 << 18], vec![step as u8; 1 << 20])];
        let groups = [TensorGroup { name: "model", tensors }];
        save(dir, step, &groups, &json!({ "position": step }), 2, &mut |_, _| {}).unwrap();
    }
}

#[test]
fn a_killed_writer_leaves_whole_checkpoints_only() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 1, 2).unwrap();
    let mut last = 1;
    for round in 0..12u64 {
        let mut writer = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kills::child_that_saves_without_end"])
            .env(CHILD, dir.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(5_000 + 3_700 * round));
        writer.kill().unwrap();
        writer.wait().unwrap();

        let found = latest(dir.path()).unwrap();
        let step = found.loaded.unwrap().step;
        assert!(step >= last, "step {step} after step {last}");
        assert!(found.warnings.iter().all(|w| w.contains("is unfinished")), "{:?}", found.warnings);
        last = step;
    }
}
