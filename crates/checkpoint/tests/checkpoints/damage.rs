//! Every kind of damage is noticed, and the checkpoint before it is used.

use super::*;
use lockstep_checkpoint::{latest, list, open};
use lockstep_ir::Hint;

/// A run with checkpoints 1 and 2, and the path of the second.
fn two_checkpoints() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 1, 5).unwrap();
    let newest = save_small(dir.path(), 2, 5).unwrap();
    (dir, newest)
}

/// Step 1 must be found, with a warning about step 2 that says `expected`.
fn check_falls_back(dir: &Path, expected: &str) {
    let found = latest(dir).unwrap();
    let loaded = found.loaded.unwrap();
    assert_eq!(loaded.step, 1);
    assert_eq!(loaded.tensor("optimizer", "embed.m").unwrap().bytes()[..], [1; 16]);
    let [warning] = &found.warnings[..] else { panic!("{:?}", found.warnings) };
    assert!(warning.starts_with("checkpoint step 2 is ") && warning.ends_with("; using step 1"), "{warning}");
    assert!(warning.contains(expected), "{warning}");
}

const FILES: [&str; 3] = ["manifest.json", "model.safetensors", "optimizer.safetensors"];

#[test]
fn a_file_cut_at_any_length_is_noticed() {
    let (dir, newest) = two_checkpoints();
    for file in FILES {
        let path = newest.join(file);
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            check_falls_back(dir.path(), file);
        }
        fs::write(&path, whole).unwrap();
    }
    assert_eq!(latest(dir.path()).unwrap().loaded.unwrap().step, 2);
}

#[test]
fn a_flipped_byte_anywhere_is_noticed() {
    let (dir, newest) = two_checkpoints();
    for file in FILES {
        let path = newest.join(file);
        let whole = fs::read(&path).unwrap();
        for position in 0..whole.len() {
            // 0x20 changes the case of letters, 0x2a turns a blank into a line end: JSON hides neither.
            for flip in [0x01, 0x20, 0x2a, 0xff] {
                let mut flipped = whole.clone();
                flipped[position] ^= flip;
                fs::write(&path, flipped).unwrap();
                check_falls_back(dir.path(), file);
            }
        }
        fs::write(&path, whole).unwrap();
    }
}

#[test]
fn the_warning_names_step_file_and_cause() {
    let (dir, newest) = two_checkpoints();
    let path = newest.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, &bytes).unwrap();
    assert_eq!(
        latest(dir.path()).unwrap().warnings,
        ["checkpoint step 2 is damaged (model.safetensors: checksum differs); using step 1"]
    );
}

#[test]
fn bytes_appended_to_a_file_are_noticed() {
    let (dir, newest) = two_checkpoints();
    for file in FILES {
        let path = newest.join(file);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, [whole.as_slice(), b"\n"].concat()).unwrap();
        check_falls_back(dir.path(), file);
        fs::write(&path, whole).unwrap();
    }
}

#[test]
fn a_missing_file_is_noticed() {
    for file in FILES {
        let (dir, newest) = two_checkpoints();
        fs::remove_file(newest.join(file)).unwrap();
        check_falls_back(dir.path(), &format!("({file}: missing)"));
    }
}

#[test]
fn a_folder_in_place_of_a_file_is_noticed() {
    for file in FILES {
        let (dir, newest) = two_checkpoints();
        fs::remove_file(newest.join(file)).unwrap();
        fs::create_dir(newest.join(file)).unwrap();
        check_falls_back(dir.path(), &format!("({file}: not a plain file)"));
    }
}

#[test]
fn an_empty_checkpoint_folder_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 1, 5).unwrap();
    fs::create_dir(dir.path().join("step-00000002")).unwrap();
    check_falls_back(dir.path(), "(manifest.json: missing)");
}

#[test]
fn a_checkpoint_under_the_name_of_another_step_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 1, 5).unwrap();
    fs::rename(save_small(dir.path(), 3, 5).unwrap(), dir.path().join("step-00000002")).unwrap();
    check_falls_back(dir.path(), "(manifest.json: it belongs to step 3)");
}

#[test]
fn a_file_of_another_checkpoint_is_noticed() {
    let (dir, newest) = two_checkpoints();
    fs::copy(dir.path().join("step-00000001/model.safetensors"), newest.join("model.safetensors")).unwrap();
    check_falls_back(dir.path(), "(model.safetensors: checksum differs)");
}

#[test]
fn what_a_killed_writer_left_is_passed_over_and_swept_by_the_next_save() {
    let (dir, newest) = two_checkpoints();
    fs::rename(&newest, dir.path().join(".tmp-step-00000002-4711")).unwrap();
    fs::create_dir(dir.path().join(".trash-step-00000000-4711-0")).unwrap();
    fs::write(dir.path().join(".trash-step-00000000-4711-0/model.safetensors"), "rest").unwrap();
    check_falls_back(dir.path(), "is unfinished (.tmp-step-00000002-4711)");
    assert_eq!(list(dir.path()).unwrap(), [(1, dir.path().join("step-00000001"))]);

    save_small(dir.path(), 3, 5).unwrap();
    assert_eq!(entries(dir.path()), ["step-00000001", "step-00000003"]);
}

#[test]
fn a_first_save_that_was_killed_leaves_nothing_to_load() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join(".tmp-step-00000002-4711")).unwrap();
    let found = latest(dir.path()).unwrap();
    assert!(found.loaded.is_none());
    assert_eq!(found.warnings, ["checkpoint step 2 is unfinished (.tmp-step-00000002-4711); there is none before it"]);
}

#[test]
fn several_damaged_ones_are_named_newest_first() {
    let (dir, newest) = two_checkpoints();
    let third = save_small(dir.path(), 3, 5).unwrap();
    fs::remove_file(newest.join("manifest.json")).unwrap();
    fs::write(third.join("optimizer.safetensors"), "").unwrap();
    let found = latest(dir.path()).unwrap();
    assert_eq!(found.loaded.unwrap().step, 1);
    assert_eq!(
        found.warnings,
        [
            "checkpoint step 3 is damaged (optimizer.safetensors: 0 bytes instead of 88); using step 1",
            "checkpoint step 2 is damaged (manifest.json: missing); using step 1",
        ]
    );
}

#[test]
fn when_none_is_whole_it_is_an_error_and_nothing_is_removed() {
    let (dir, newest) = two_checkpoints();
    fs::remove_file(newest.join("manifest.json")).unwrap();
    fs::remove_file(dir.path().join("step-00000001/model.safetensors")).unwrap();
    let error = latest(dir.path()).unwrap_err().with_hint();
    assert!(error.contains("step 2 is damaged (manifest.json: missing); checkpoint step 1 is damaged"), "{error}");
    assert!(error.contains("\nhint: nothing was removed"), "{error}");
    assert_eq!(entries(dir.path()), ["step-00000001", "step-00000002"]);
}

#[test]
fn opening_a_damaged_checkpoint_says_what_to_do() {
    let (_dir, newest) = two_checkpoints();
    fs::remove_file(newest.join("model.safetensors")).unwrap();
    let error = open(&newest).unwrap_err().with_hint();
    assert!(error.contains("step-00000002 is damaged (model.safetensors: missing)\nhint: move this folder"), "{error}");
}
