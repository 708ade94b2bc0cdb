//! Which checkpoints stay.

use super::*;
use lockstep_checkpoint::{latest, list, open};

/// The steps in `dir`, after checking that nothing else is there.
fn steps(dir: &Path) -> Vec<u64> {
    let listed = list(dir).unwrap();
    assert_eq!(listed.len(), entries(dir).len(), "{:?}", entries(dir));
    listed.into_iter().map(|(step, _)| step).collect()
}

#[test]
fn the_last_k_stay() {
    let dir = tempfile::tempdir().unwrap();
    for step in 1..=5 {
        save_small(dir.path(), step, 3).unwrap();
    }
    assert_eq!(steps(dir.path()), [3, 4, 5]);
    save_small(dir.path(), 6, 1).unwrap();
    assert_eq!(steps(dir.path()), [6]);
}

#[test]
fn the_one_just_written_stays_even_if_it_is_the_oldest() {
    let dir = tempfile::tempdir().unwrap();
    for step in [10, 20, 30] {
        save_small(dir.path(), step, 9).unwrap();
    }
    save_small(dir.path(), 5, 2).unwrap();
    assert_eq!(steps(dir.path()), [5, 30]);
    save_small(dir.path(), 4, 0).unwrap();
    assert_eq!(steps(dir.path()), [4]);
}

#[test]
fn a_damaged_one_neither_counts_nor_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    for step in 1..=3 {
        save_small(dir.path(), step, 9).unwrap();
    }
    fs::write(dir.path().join("step-00000003/model.safetensors"), "cut").unwrap();
    fs::remove_file(dir.path().join("step-00000001/manifest.json")).unwrap();
    save_small(dir.path(), 4, 2).unwrap();
    assert_eq!(steps(dir.path()), [1, 2, 3, 4]);
    save_small(dir.path(), 5, 2).unwrap();
    assert_eq!(steps(dir.path()), [1, 3, 4, 5]);
}

#[test]
fn saving_a_step_again_replaces_it() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 1, 2).unwrap();
    let path = save_small(dir.path(), 2, 2).unwrap();
    fs::write(path.join("model.safetensors"), "damaged").unwrap();
    save_small(dir.path(), 2, 2).unwrap();
    assert_eq!(steps(dir.path()), [1, 2]);
    assert_eq!(open(&path).unwrap().state, json!({ "position": 2 }));
}

#[test]
fn what_is_not_a_checkpoint_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["step-1", "best", ".tmp-notes", ".trash-can", "step-latest"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    fs::write(dir.path().join("step-00000009"), "a file").unwrap();
    save_small(dir.path(), 1, 1).unwrap();
    save_small(dir.path(), 2, 1).unwrap();
    assert_eq!(list(dir.path()).unwrap(), [(2, dir.path().join("step-00000002"))]);
    assert_eq!(entries(dir.path()).len(), 7);
}

#[test]
fn steps_past_eight_digits_sort_as_numbers() {
    let dir = tempfile::tempdir().unwrap();
    for step in [100_000_000, 99_999_999] {
        save(dir.path(), step, &[], &json!({}), 5, &mut |_, _| {}).unwrap();
    }
    assert_eq!(steps(dir.path()), [99_999_999, 100_000_000]);
    assert_eq!(latest(dir.path()).unwrap().loaded.unwrap().step, 100_000_000);
}
