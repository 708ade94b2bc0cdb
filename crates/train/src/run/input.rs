//! What a run reads: its data, their tokenizer, and tasks.

use crate::event::{Event, Show};
use crate::{Result, TrainError};
use lockstep_checkpoint::{LatestCheckpoint, list};
use lockstep_config::Config;
use lockstep_data::{DataError, Progress, Sampler};
use lockstep_exec::Note;
use lockstep_host::{ProcessGroup, StopSignal};
use lockstep_infer::{
    Existing, InferError, InitialWeights, Kept, RunData, RunTokenizer, TaskFile, TaskRequests, data_folder,
    unused_vocabulary,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a run reads: its data, their tokenizer, and tasks.
pub(super) struct RunInput {
    pub(super) data: RunData,
    pub(super) folder: PathBuf,
    /// Whether all bytes of the data were checked.
    pub(super) read_in_full: bool,
    pub(super) tokenizer: RunTokenizer,
    pub(super) tasks: Vec<TaskFile>,
    pub(super) requests: TaskRequests,
    pub(super) kept: Kept,
    pub(super) train: Arc<Sampler>,
}

impl RunInput {
    /// Opens them; data that are not prepared yet are prepared.
    pub(super) fn open(
        config: &Config,
        group: ProcessGroup<'_>,
        dir: &Path,
        (found, initial): (&LatestCheckpoint, Option<&InitialWeights>),
        stop: &StopSignal<'_>,
        show: Show,
    ) -> Result<Self> {
        // A run with checkpoints keeps the data it started with; before that, changed files are prepared anew.
        let started = found.loaded.is_some() || list(&dir.join("checkpoints")).is_ok_and(|l| !l.is_empty());
        let existing = if started { Existing::Keep } else { Existing::Refresh };
        let folder = data_folder(config, dir);
        if !group.is_first() && RunData::open(config, &folder)?.is_none() {
            show(Event::Preparing(Progress { waiting: true, ..Progress::default() }));
        }
        let mut read_in_full = true;
        let data = first_then_others(group, "prepare data", || {
            let data =
                RunData::prepare(config, &folder, existing, stop.asked(), &mut |_, p| show(Event::Preparing(p)))?;
            if group.is_first() {
                data.refuse_other_text(config, &folder, stop.asked(), &mut |text| show(Event::Warning(text)))?;
                read_in_full = data.check(stop.asked(), &mut |done, total| show(Event::Checking { done, total }))?;
            }
            Ok(data)
        })?;
        if !read_in_full {
            let text = "of the data lengths, headers and samples were checked; `lockstep data verify` reads what has checksums";
            show(Event::Note(&Note::Cost(text.into())));
        }
        group.agree("data", &format!("{:016x}", data.fingerprint()))?;
        let tokenizer = RunTokenizer::from(data.tokenizer()?);
        if let Some((problem, hint)) = unused_vocabulary(config, &tokenizer) {
            show(Event::Trouble { what: "", error: &TrainError::Rehearsal { problem, hint } });
        }
        if group.is_first() && found.loaded.is_none() {
            data.warnings()?.iter().for_each(|w| show(Event::Warning(w)));
        }
        let tasks = TaskFile::open_all(&config.task_paths(), config.eval.items)?;
        let requests = TaskRequests::new(&tasks, &tokenizer, config.train.seq)?;
        let kept = match (initial, &found.loaded) {
            (Some(weights), _) => weights.kept(&tokenizer)?,
            (None, Some(loaded)) => Kept::of_checkpoint(loaded),
            (None, None) => Kept::default(),
        };
        let kept = match data.chat() {
            Some(chat) => kept.with_chat(chat),
            None => kept,
        };
        let train = Arc::new(data.train(config)?);
        Ok(Self { data, folder, read_in_full, tokenizer, tasks, requests, kept, train })
    }
}

/// Lets the first process do something, and then the others. Where the first was interrupted, all are.
fn first_then_others<T>(
    group: ProcessGroup<'_>,
    op: &'static str,
    work: impl FnOnce() -> Result<T, InferError>,
) -> Result<T, InferError> {
    let Some(processes) = group.0 else { return work() };
    if !group.is_first() {
        return match group.told::<bool, InferError>(op, || Ok(false))? {
            true => Err(DataError::Interrupted.into()),
            false => processes.busy(op, work),
        };
    }
    let result = processes.busy(op, work);
    let interrupted = matches!(result, Err(InferError::Data(DataError::Interrupted)));
    // Of other errors the others hear when this run ends.
    if result.is_ok() || interrupted {
        group.told::<bool, InferError>(op, || Ok(interrupted))?;
    }
    result
}
