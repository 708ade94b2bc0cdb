//! Random small models of every family against `transformers`: loss, logits and every gradient, and their files in and out.
//!
//! `golden/families` has one of each. `LOCKSTEP_FAMILIES=FOLDER` names a folder with others, which `golden/families.py` makes;
//! `bench/scripts/families.sh` does both.

mod golden_model;
mod hf_folder;

use golden_model::{Golden, TOLERANCE, error, gradient_errors, largest_gradient, loaded, step};
use hf_folder::Model;
use lockstep_exec::Executor;
use lockstep_infer::{ExportOptions, export, import};
use lockstep_ir::StepProgram;
use lockstep_model::names;
use std::path::{Path, PathBuf};

/// What losses and logits may differ by.
const CLOSE: f64 = 2e-6;
/// How many times as far off as transformers in float32 logits and gradients may be, where that is more: some models are so sensitive to rounding.
const AS_FAR: f64 = 4.0;

/// The files, ascending by name.
fn files() -> Vec<PathBuf> {
    let own = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/families"));
    let folder = std::env::var_os("LOCKSTEP_FAMILIES").map_or_else(own, PathBuf::from);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn name(path: &Path) -> String {
    path.file_stem().unwrap().to_string_lossy().into_owned()
}

#[test]
fn losses_logits_and_gradients_of_random_models_are_those_of_transformers() {
    println!(
        "model                  train loss   eval loss    logits       gradients    transformers in f32: logits, gradients"
    );
    let mut worse = Vec::new();
    for path in files() {
        let (golden, name) = (Golden::read(&path), name(&path));
        let config = golden.config();
        let (expected, logits) = (golden.f32("loss"), golden.f32("logits"));
        let theirs = |key: &str| AS_FAR * golden.metadata[key].parse::<f64>().unwrap();
        let most_of_logits = CLOSE.max(theirs("logits_in_float32"));
        let most_of_gradients = TOLERANCE.max(theirs("gradients_in_float32"));
        let mut errors = [0.0f64; 4];
        for fused in [true, false] {
            let (program, mut executor) = loaded(&golden, &config, 1, fused, false);
            let train = step(&mut executor, 1, 0.0, [1.0; 2]);
            errors[0] = errors[0].max(error(&[train], &expected));
            // With one expert for a token, whose weight is 1, a router has a gradient of rounding errors.
            let largest = largest_gradient(&golden);
            let gradients = gradient_errors(&golden, &config, (&program, &executor), false, largest);
            for (parameter, e) in gradients {
                errors[3] = errors[3].max(e);
                if e > most_of_gradients {
                    worse.push(format!("{name}: the gradient of {parameter} differs by {e:.1e}"));
                }
            }
            if !fused {
                let bytes = executor.read(names::LOGITS, 0).unwrap();
                let found: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                errors[2] = error(&found, &logits);
            }
            executor.run(StepProgram::EVALUATE).unwrap();
            let bytes = executor.read(names::LOSS, 0).unwrap();
            let eval = bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).sum::<f64>() / 24.0;
            errors[1] = errors[1].max(error(&[eval as f32], &expected));
        }
        let own = ["logits_in_float32", "gradients_in_float32"].map(|key| golden.metadata[key].parse::<f64>().unwrap());
        let columns: Vec<String> = errors.iter().chain(&own).map(|e| format!("{e:<12.1e}")).collect();
        println!("{name:<22} {}", columns.join(" ").trim_end());
        let what = ["the loss of training", "the loss of evaluation", "the logits"];
        let most = [CLOSE, CLOSE, most_of_logits];
        let far = errors.iter().zip(most).zip(what).filter(|((e, most), _)| *e > most);
        worse.extend(far.map(|((e, _), what)| format!("{name}: {what} differ by {e:.1e}")));
    }
    assert!(worse.is_empty(), "{}", worse.join("\n"));
}

#[test]
fn files_of_random_models_come_out_as_they_went_in_to_the_byte() {
    for path in files() {
        let (model, name) = (Model::read(&path, "param."), name(&path));
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        model.write(&at("a"));
        let come = |from: &str, to: &str| {
            import(&at(from), &at(to), &mut |_, _| {}).unwrap_or_else(|e| panic!("{name}: {e}")).config.model
        };
        let go = |from: &str, to: &str| {
            let options = ExportOptions::default();
            export(&at(from), &at(to), options, &mut |_, _| {}).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(std::fs::read(at(to).join("model.safetensors")).unwrap() == model.file(), "{name}");
        };
        let first = come("a", "run");
        go("run", "b");
        let second = come("b", "again");
        assert_eq!(first.with_short_patterns(), second.with_short_patterns(), "{name}");
        go("again", "c");
    }
}
