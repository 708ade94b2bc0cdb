//! Which checkpoints stay.

use super::*;
use lockstep_checkpoint::{
    Keep, free_bytes, latest, latest_of, list, mirror, open, prune, require_space, set_aside_from,
};
use lockstep_ir::Hint;

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

#[test]
fn every_nth_and_the_best_stay_beside_the_last() {
    let dir = tempfile::tempdir().unwrap();
    for step in 1..=7u64 {
        let keep = Keep { last: 2, every: 3, best: Some(2) };
        save(dir.path(), step, &[], &json!({}), keep, &mut |_, _| {}).unwrap();
    }
    assert_eq!(steps(dir.path()), [2, 3, 6, 7]);
    assert_eq!(prune(dir.path(), None, &1.into()).unwrap(), [2, 3, 6]);
    assert_eq!(steps(dir.path()), [7]);
}

#[test]
fn a_mirror_has_the_same_bytes_takes_over_and_spreads_no_damage() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let places = [first.path().to_owned(), second.path().to_owned()];
    for step in 1..=3 {
        let path = save_small(first.path(), step, 9).unwrap();
        let copy = mirror(&path, second.path(), &2.into()).unwrap();
        for name in entries(&path) {
            assert_eq!(fs::read(path.join(&name)).unwrap(), fs::read(copy.join(&name)).unwrap(), "{name}");
        }
    }
    assert_eq!(steps(second.path()), [2, 3]);
    let used = |expected: &Path| {
        let found = latest_of(&places).unwrap();
        assert_eq!(found.loaded.unwrap().path, expected.join("step-00000003"));
        found.warnings
    };
    assert!(used(first.path()).is_empty());
    let model = first.path().join("step-00000003/model.safetensors");
    fs::write(&model, "cut").unwrap();
    let warnings = used(second.path());
    assert!(
        warnings[0].contains("step 3 is damaged") && warnings[0].contains("using step 3 of the mirror"),
        "{warnings:?}"
    );
    assert!(mirror(model.parent().unwrap(), second.path(), &9.into()).is_err());
    assert_eq!(entries(second.path()).len(), 2);
    fs::remove_dir_all(first.path()).unwrap();
    assert_eq!(used(second.path()).len(), 1);
    // Without a mirror there is nothing to fall back on.
    fs::create_dir(first.path()).unwrap();
    assert!(latest_of(&places[..1]).unwrap().loaded.is_none());
    // One that cannot be read is told, and no more.
    save_small(first.path(), 3, 9).unwrap();
    fs::remove_dir_all(second.path()).unwrap();
    fs::write(second.path(), "a file").unwrap();
    assert!(used(first.path())[0].starts_with("the mirror cannot be read: "));
    fs::remove_file(second.path()).unwrap();
    fs::create_dir(second.path()).unwrap();
}

#[test]
fn a_disk_without_room_is_told_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("not/yet/there");
    assert!(free_bytes(&folder).unwrap() > 0);
    require_space(&folder, 1).unwrap();
    let error = require_space(&folder, u64::MAX).unwrap_err().with_hint();
    assert!(error.contains("No space left on device") && error.contains("are free\nhint: "), "{error}");
    assert!(!dir.path().join("not").exists());
}

#[test]
fn later_ones_are_set_aside_in_folders_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    for step in 1..=4 {
        save_small(dir.path(), step, 9).unwrap();
    }
    assert!(set_aside_from(dir.path(), 9).unwrap().is_empty());
    assert_eq!(set_aside_from(dir.path(), 3).unwrap(), [3, 4]);
    assert_eq!(set_aside_from(dir.path(), 0).unwrap(), [1, 2]);
    assert_eq!(entries(dir.path()), ["old-1", "old-2"]);
    assert_eq!(entries(&dir.path().join("old-1")), ["step-00000003", "step-00000004"]);
}
