//! The disk says no.

use super::*;
use lockstep_checkpoint::{Draft, PartRef, Slice, latest, list, open};
use lockstep_ir::Hint;
use std::process::Command;

#[test]
fn a_folder_that_is_not_there_holds_no_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("checkpoints");
    assert!(list(&missing).unwrap().is_empty());
    let found = latest(&missing).unwrap();
    assert!(found.loaded.is_none() && found.warnings.is_empty());
    let error = open(&missing).unwrap_err().with_hint();
    assert!(error.contains("cannot open") && error.contains("\nhint: check the path"), "{error}");
}

#[test]
fn a_file_in_place_of_the_folder_is_an_error_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("checkpoints");
    fs::write(&file, "precious").unwrap();
    let below = file.join("run");
    let errors = [
        save_small(&file, 1, 1).unwrap_err(),
        save_small(&below, 1, 1).unwrap_err(),
        latest(&file).unwrap_err(),
        list(&file).unwrap_err(),
        open(&file).unwrap_err(),
    ];
    for error in errors {
        let message = error.with_hint();
        assert!(message.contains(file.to_str().unwrap()), "{message}");
        assert!(message.contains("\nhint: a file stands where a folder is needed"), "{message}");
    }
    assert_eq!(fs::read(&file).unwrap(), b"precious");
}

const CHILD: &str = "LOCKSTEP_CHECKPOINT_TEST_DIR";

/// Not a test by itself: the part of the next one that runs under a limit on file size.
#[test]
fn child_that_saves_under_a_file_size_limit() {
    let Some(dir) = std::env::var_os(CHILD) else { return };
    let mut done = 0;
    let tensors = vec![tensor("big", DType::U32, &[1 << 20], vec![5; 4 << 20])];
    let groups = [TensorGroup { name: "model", tensors }];
    let error = save(Path::new(&dir), 2, &groups, &json!({}), 1, &mut |bytes, _| done = bytes).unwrap_err();
    let message = error.with_hint();
    assert!(done > 1 << 20, "the limit must strike in the middle of the file");
    assert!(message.contains("cannot write") && message.contains("step-00000002"), "{message}");
    assert!(message.contains("model.safetensors: File too large"), "{message}");
    assert!(message.contains("\nhint: raise the file size limit"), "{message}");

    let data = vec![5; 4 << 20];
    let slices = vec![Slice { start: 0, len: 1 << 20, stride: 1 << 20, count: 1 }];
    let part = PartRef {
        name: "big".into(),
        dtype: DType::U32,
        shape: vec![1 << 20],
        slices,
        data: vec![data.as_slice().into()],
    };
    let draft = Draft::begin(Path::new(&dir), 2).unwrap();
    let message = draft.write(3, "model", &[part], &mut |_| {}).unwrap_err().with_hint();
    assert!(message.contains("model-00003.safetensors: File too large"), "{message}");
    assert!(message.contains("\nhint: raise the file size limit"), "{message}");
}

#[test]
fn a_write_that_fails_midway_leaves_the_earlier_checkpoint_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 1, 1).unwrap();
    // The shell sets the limit (in blocks of 512 or 1024 bytes: 1.5 or 3 MiB) and ignores the signal that comes with it.
    let child = Command::new("sh")
        .args(["-c", r#"trap "" XFSZ; ulimit -f 3072; exec "$0" "$@""#])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "disk_errors::child_that_saves_under_a_file_size_limit", "--nocapture"])
        .env(CHILD, dir.path())
        .output()
        .unwrap();
    let said = [child.stdout, child.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(child.status.success() && said.contains("1 passed"), "{said}");

    assert_eq!(entries(dir.path()), ["step-00000001"]);
    let found = latest(dir.path()).unwrap();
    assert_eq!((found.loaded.unwrap().step, found.warnings.len()), (1, 0));
}
