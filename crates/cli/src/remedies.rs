//! What a user can do about an error of a run, in the flags of this command: `train` knows none of them.

use crate::shell::shell_quoted;
use lockstep_config::{Change, Difference};
use lockstep_exec::Remedy;
use lockstep_host::HostError;
use lockstep_infer::InferError;
use lockstep_ir::Hint;
use lockstep_rundir::{Overruled, RunDirError};
use lockstep_train::{TrainError, Unmeasured};
use std::io::ErrorKind;

/// The message: an error that is about a flag begins with it.
pub fn message(error: &TrainError) -> String {
    match error {
        TrainError::Host(HostError::Dir(RunDirError::FinishedRun { changes, .. })) => {
            format!("--change {}: {error}", changes.join(", "))
        }
        TrainError::Host(HostError::Dir(RunDirError::CannotChange { key, .. })) => format!("--change {key}: {error}"),
        TrainError::Infer(InferError::Sampling { .. }) => format!("--{error}"),
        error => error.to_string(),
    }
}

/// What a user is told of a change that does not count any more.
pub fn undone(Change { text, step }: &Change, goes_back: bool) -> String {
    match goes_back {
        true => format!(
            "{text} was changed at step {step}, to which the run goes back: it is undone; --change makes it again"
        ),
        false => format!("{text} was changed at step {step}, which the run has yet to reach: it is undone"),
    }
}

/// And of a value that does not.
pub fn overruled(Overruled { key, step, counts, given }: &Overruled) -> String {
    format!("{key} = {counts} since --change at step {step}; {given} in the config does not count")
}

/// What to do.
pub fn hint(error: &TrainError) -> Option<String> {
    Some(match error {
        TrainError::InStep { error, .. } => return hint(error),
        TrainError::Host(HostError::Exec(e)) if e.remedy() == Some(Remedy::LessMemory) => {
            error.hint()? + "; `lockstep explain RUN.TOML --fit SIZE` shows what fits"
        }
        TrainError::Host(HostError::Dir(error)) => return hint_of_dir(error),
        TrainError::Host(HostError::OtherRanks { ranks, processes, .. }) => {
            format!("start {ranks}, or choose a layout of {processes} ranks: --set parallel.dp={processes}, say")
        }
        TrainError::Host(HostError::FewGpus { .. }) => {
            "start one rank per GPU; `lockstep launch --share-gpus` lets ranks share them, slowly, to check a layout; \
             CUDA_VISIBLE_DEVICES may hide some"
                .into()
        }
        TrainError::Host(HostError::NotShared { .. }) => "give all ranks the same --run-dir, on a file system that all hosts share".into(),
        TrainError::NoSuchStep { there, .. } if there.is_empty() => {
            "there is none of any step: start without --resume-from".into()
        }
        TrainError::Infer(InferError::DataChanged { .. }) => {
            "restore the folder, or restore the text and delete the folder, which is then prepared again, or give \
             --fresh to start over"
                .into()
        }
        TrainError::Infer(InferError::OtherData { .. }) => {
            "undo the change, choose another --run-dir, or give --fresh to start over".into()
        }
        TrainError::Spikes { roll_backs, .. } => format!(
            "no weight was changed in the skipped steps and the last checkpoint is kept; look at the data of these \
             steps; resume with a lower rate (--change optimizer.lr=…), a wider limit (--change spikes.z=…) or more \
             roll-backs (--change spikes.roll_backs={})",
            roll_backs.last().map_or(0, |last| last.number) + 1
        ),
        TrainError::Diverged { .. } => {
            "no weight was changed in these steps and the last checkpoint is kept; start over with a lower optimizer.lr \
             or more optimizer.warmup_steps, in another --run-dir or with --fresh; --debug-nans says where the first \
             such number is made"
                .into()
        }
        TrainError::ExpertBound { bound, .. } => format!(
            "no weight was changed in this step, and checkpoints are kept; {}; where losses rose before, the run has \
             diverged: lower optimizer.lr",
            other_bound(*bound)
        ),
        TrainError::Infer(InferError::EvaluationBound { bound, .. }) => format!("what was trained is kept; {}", other_bound(*bound)),
        TrainError::AlwaysDeterministic => "use --device cuda".into(),
        TrainError::Imported { .. } => {
            "choose another --run-dir, and start from them there: --set train.init_from=FOLDER".into()
        }
        TrainError::Infer(InferError::NoValidationText { .. }) => "name text to evaluate on: --data PATH".into(),
        TrainError::Infer(InferError::EmptyPrompt) => "give some text to continue: --prompt \"Once\"".into(),
        TrainError::Infer(InferError::ContextFull { .. }) => "give a shorter prompt, or a larger --context".into(),
        TrainError::Infer(InferError::AnswerLength { .. }) => "an answer has at least one token, and fits into a sequence: --seq".into(),
        TrainError::Unmeasured { what: Unmeasured::Machine(_), .. } => {
            "measure this machine first: lockstep bench --save NAME".into()
        }
        TrainError::Unmeasured { what, .. } => {
            let times = if let Unmeasured::Times = what { ": such a run times one of its steps" } else { "" };
            format!("measure this machine with lockstep bench --save NAME, and train again{times}")
        }
        error => return error.hint(),
    })
}

fn hint_of_dir(error: &RunDirError) -> Option<String> {
    Some(match error {
        RunDirError::ConfigChanged { differences, step, stays_finished, .. } => {
            ways_on(differences, *step, *stays_finished)
        }
        RunDirError::FinishedRun { step, .. } => format!(
            "give --change train.steps=N too, with N more than {step}, to go on with it; or take the run back with \
             --resume-from STEP (`lockstep checkpoint list` shows which there are)"
        ),
        RunDirError::CannotChange { key, .. } => format!(
            "{}: start another run, or give --fresh to start over (the old run is kept in a folder inside)",
            why_fixed(key)
        ),
        RunDirError::NothingToChange { .. } => "give the values with --set instead of --change".into(),
        RunDirError::StepsDone { step, .. } => format!(
            "choose at least {step}, or go back with --resume-from STEP (`lockstep checkpoint list` shows which there are)"
        ),
        RunDirError::Locked { .. } => "wait for it, or choose another --run-dir".into(),
        RunDirError::Io { cause, .. } => match cause.kind() {
            ErrorKind::PermissionDenied => "choose a --run-dir that you may write to".into(),
            ErrorKind::NotADirectory | ErrorKind::AlreadyExists => "choose a --run-dir that is a folder".into(),
            _ => return error.hint(),
        },
        error => return error.hint(),
    })
}

fn other_bound(bound: f64) -> String {
    format!(
        "go on with --set parallel.ep_bound={}, or without the key, which plans for all that there can be",
        2.0 * bound
    )
}

/// How to go on where the config has changed: with the changes that a run may take on, or without them.
fn ways_on(differences: &[Difference], step: u64, stays_finished: bool) -> String {
    const ELSE: &str =
        "choose another --run-dir, or give --fresh to start over (the old run is kept in a folder inside)";
    // A run cannot have fewer steps than it has done.
    let too_few = |d: &Difference| d.path == "train.steps" && d.ours.parse::<u64>().is_ok_and(|steps| steps < step);
    let given = differences.iter().filter(|d| d.changeable && !d.follows && !too_few(d));
    let mut flags: Vec<String> =
        given.map(|d| format!("--change {}", shell_quoted(&format!("{}={}", d.path, d.ours)))).collect();
    let fixed: Vec<&str> = differences.iter().filter(|d| !d.changeable).map(|d| d.path).collect();
    let mut undo: Vec<String> = if fixed.is_empty() { Vec::new() } else { vec![fixed.join(", ")] };
    undo.extend(
        differences.iter().filter(|d| too_few(d)).map(|d| format!("train.steps to {}, {step} steps are done", d.ours)),
    );
    if flags.is_empty() {
        return format!("undo these changes to resume it, {ELSE}");
    }
    if stays_finished {
        flags.insert(0, "--change train.steps=N".to_owned());
    }
    let more = if stays_finished { format!(" (it is finished: N must be more than {step})") } else { String::new() };
    let flags = flags.join(" ") + &more;
    match undo.is_empty() {
        true => format!("go on with the new values from here on: {flags}; or undo these changes, {ELSE}"),
        false => {
            format!("a run cannot change {}: undo that; with the rest it goes on: {flags}; or {ELSE}", undo.join("; "))
        }
    }
}

/// Why a run keeps the value of a key.
fn why_fixed(key: &str) -> &'static str {
    match key.split_once('.') {
        Some(("model", _)) => "its weights belong to the model they were trained as",
        Some(("data", _)) | Some(("train", "seq" | "global_batch" | "batch_ramp" | "seed")) => {
            "samples would be left out or seen twice"
        }
        Some(("optimizer", _)) => "its optimizer state belongs to the optimizer it was made by",
        _ => "it only counts when a run begins",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_exec::ExecError;

    fn shown(error: TrainError) -> String {
        crate::failure::Failure::from(error).with_hint()
    }

    #[test]
    fn flags_are_named_that_may_help() {
        let memory = shown(ExecError::OutOfMemory("3 GiB".into()).into());
        assert!(memory.starts_with("cannot allocate the arena of 3 GiB\nhint: lower train.micro_batch, "), "{memory}");
        assert!(memory.ends_with("\"bf16\"; `lockstep explain RUN.TOML --fit SIZE` shows what fits"), "{memory}");
        let few = shown(HostError::FewGpus { host: "a".into(), ranks: 2, gpus: 1 }.into());
        assert!(few.starts_with("host a has 1 GPU for 2 ranks\nhint: ") && few.contains("--share-gpus"), "{few}");
        let bounds = [
            TrainError::ExpertBound { step: 1, rows: 3, bound: 1.0 },
            InferError::EvaluationBound { rows: 3, bound: 1.0 }.into(),
        ];
        for text in bounds.map(shown) {
            assert!(text.contains("go on with --set parallel.ep_bound=2, or without the key"), "{text}");
        }
        let imported = shown(TrainError::Imported { dir: "a".into() });
        assert!(
            imported.starts_with("a holds imported weights, not a run\nhint: choose another --run-dir"),
            "{imported}"
        );
        let long = InferError::AnswerLength { place: "a.jsonl, line 1".into(), answer: "de".into(), tokens: 4 };
        let expected = "a.jsonl, line 1: the answer \"de\" has 4 tokens\n\
                        hint: an answer has at least one token, and fits into a sequence: --seq";
        assert_eq!(shown(TrainError::InStep { step: 3, error: Box::new(long.into()) }), format!("step 3: {expected}"));
    }

    #[test]
    fn an_error_about_a_flag_begins_with_it() {
        let option =
            InferError::Sampling { option: "top-k", value: "0".into(), hint: "give at least 1, or leave it out" };
        assert_eq!(shown(option.into()), "--top-k 0 has no meaning\nhint: give at least 1, or leave it out");
        let fixed = HostError::Dir(RunDirError::CannotChange { key: "model.dim", before: "8".into(), now: "9".into() });
        let text = shown(TrainError::from(fixed));
        assert!(
            text.starts_with("--change model.dim: a run that has begun cannot go from 8 to 9\nhint: its weights "),
            "{text}"
        );
    }
}
