//! What a rehearsal of a run looks at, and the small run that it makes of a large one.
//!
//! The small run is made by child processes of `train`, one of which is killed. Only what cannot be seen in small
//! (memory, folders, vocabulary) is looked at apart.

use crate::event::Event;
use crate::run::{look_at_disk, places};
use crate::{Result, TrainError, shrink};
use lockstep_checkpoint::list;
use lockstep_config::{Config, DeviceChoice, SaveEvery};
use lockstep_data::{Excerpt, excerpt};
use lockstep_infer::{
    Existing, InitialWeights, RunData, RunTokenizer, TaskFile, data_folder, require_vocabulary, tokenizer_spec,
    unused_vocabulary,
};
use lockstep_ir::Layout;
use lockstep_ir::units::{self, thousands};
use lockstep_rundir::RunDirError;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Bytes of text that are prepared for the small run of a large one.
const EXCERPT_BYTES: u64 = 16 << 20;

/// The data of a rehearsal.
pub struct RehearsalData {
    /// What there is to train on: all of it, or what was prepared of an excerpt.
    pub data: RunData,
    /// What was found, in a line.
    pub found: String,
    /// Whether it is a part of the text alone.
    pub partial: bool,
    /// The config with the paths of what was prepared.
    config: Config,
}

impl RehearsalData {
    /// Looks at the data of a run as its first step would find them: those that are prepared are checked; of text that is not, every
    /// file is opened, and an excerpt is prepared in `work`.
    pub fn look(
        config: &Config,
        run_dir: &Path,
        work: &Path,
        stop: &AtomicBool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        let folder = data_folder(config, run_dir);
        let started = list(&run_dir.join("checkpoints")).is_ok_and(|there| !there.is_empty());
        let existing = if started { Existing::Keep } else { Existing::Refresh };
        let mut small = config.clone();
        if let Ok(data) = RunData::look(config, &folder, existing, stop)? {
            require_vocabulary(config, data.vocabulary())?;
            let full = data.check(stop, progress)?;
            // Refuses data that are less than a sequence.
            data.train(config)?;
            let how = if full { "every byte was read" } else { "lengths, headers and samples were read" };
            let found = format!("{} training tokens; {how}", thousands(data.train_tokens()));
            small.data.prepared = Some(absolute(&folder).display().to_string());
            return Ok(Self { data, found, partial: false, config: small });
        }
        let (mut files, mut bytes, mut whole) = (0, 0, true);
        let corpora = config.data.corpora.len().max(1) as u64;
        for (place, spec) in RunData::specs(config, &tokenizer_spec(config)?)?.into_iter().enumerate() {
            let to = work.join(format!("text-{place}"));
            let Excerpt { survey, paths, all } = excerpt(&spec, &folder, &to, EXCERPT_BYTES / corpora, stop)?;
            (files, bytes, whole) = (files + survey.files, bytes + survey.bytes, whole && all);
            let paths = paths.into_iter().map(|path| path.display().to_string()).collect();
            match small.data.corpora.get_mut(place) {
                Some(corpus) => corpus.paths = paths,
                None => small.data.paths = paths,
            }
        }
        let prepared = work.join("data");
        small.data.prepared = Some(absolute(&prepared).display().to_string());
        let data = RunData::prepare(&small, &prepared, Existing::Refresh, stop, &mut |_, at| {
            progress(at.bytes_done, at.bytes_total);
        })?;
        if whole {
            data.train(config)?;
        }
        let (of, tokens) = (if whole { "" } else { " of an excerpt" }, thousands(data.train_tokens()));
        let found =
            format!("{files} files of text, {}, could be read; {tokens} tokens{of} prepared", units::bytes(bytes));
        Ok(Self { data, found, partial: !whole, config: small })
    }

    /// Refuses a run that is to validate and has nothing to validate on. Says what there is.
    pub fn validation(&self, config: &Config) -> Result<String> {
        let (seq, most) = (config.train.seq, config.train.validation_sequences as u64);
        let asked = config.data.validation_fraction > 0.0
            || config.is_given("train.validate_every")
            || config.is_given("train.validation_sequences")
            || config.checkpoint.keep_best;
        if most == 0 || !asked {
            return Ok("none is asked for".into());
        }
        let mut reasons = Vec::new();
        match self.data.validation_samples(seq, &mut |text| reasons.push(text.to_owned())) {
            Some((samples, _)) => {
                let sequences = samples.samples_before_repeat().min(most);
                Ok(format!("{} sequences of {} tokens", thousands(sequences), thousands(seq as u64)))
            }
            None if self.partial => Ok("not known before all text is prepared; the excerpt has none".into()),
            None => {
                let why = reasons.first().map_or_else(
                    || format!("data.validation_fraction = {} holds out nothing", config.data.validation_fraction),
                    String::clone,
                );
                let hint = "raise data.validation_fraction or add text, or set train.validation_sequences = 0";
                Err(TrainError::Rehearsal { problem: format!("the validation set is empty: {why}"), hint: hint.into() })
            }
        }
    }

    /// The same run made small enough for this machine, with what was changed. Every axis of its layout is kept, of size 2.
    pub fn small_run(&self, steps: u64) -> (Config, Vec<String>) {
        let mut few = self.config.clone();
        let p = &mut few.parallel;
        for axis in [&mut p.dp, &mut p.dp_replicate, &mut p.cp, &mut p.ep, &mut p.tp, &mut p.pp] {
            *axis = (*axis).min(2);
        }
        if few.parallel.pp != self.config.parallel.pp {
            few.parallel.stages.clear();
        }
        few.parallel.r#virtual = few.parallel.r#virtual.min(2);
        few.train.batch_ramp.clear();
        let (mut small, mut changed) = shrink(&few, &[few.layout()]);
        // Tokens are those of the tokenizer.
        small.model.vocab_size = self.config.model.vocab_size;
        changed.retain(|change| !change.starts_with("model.vocab_size"));
        let (before, now) = (self.config.layout(), small.layout());
        if before.mesh != now.mesh {
            changed.push(format!("layout {before} -> {now}"));
        }
        let t = &mut small.train;
        (t.steps, t.device, t.init_from) = (steps, DeviceChoice::Cpu, None);
        (t.validate_every, t.validation_sequences) = (steps / 3, t.validation_sequences.min(4));
        let o = &mut small.optimizer;
        (o.warmup_steps, o.decay_steps) = (o.warmup_steps.min(2), o.decay_steps.map(|decay| decay.min(2)));
        let c = &mut small.checkpoint;
        (c.every, c.every_minutes, c.keep) = (SaveEvery::Steps(SAVE_EVERY), None, c.keep.min(2));
        (small.eval.every, small.eval.items) = (0, 4);
        // It is nobody's run.
        (small.telemetry.mlflow, small.telemetry.wandb) = (false, false);
        (small, changed)
    }
}

/// Steps from one checkpoint of a small run to the next.
const SAVE_EVERY: u64 = 4;

/// A layout that a run can go on in instead of its own: one rank, or two where it has one.
pub fn other_layout(config: &Config) -> Config {
    let alone = config.at(&Layout::single(1));
    match config.layout().mesh.ranks() {
        1 if (config.train.global_batch / config.train.micro_batch).is_multiple_of(2) => {
            let mut two = alone;
            two.parallel.dp = 2;
            two
        }
        _ => alone,
    }
}

/// Refuses a tokenizer that is not the model's: tokens that the model has no embedding for, or far fewer tokens than it has.
pub fn check_tokenizer(config: &Config) -> Result<String> {
    // Shared data have a copy, which is what a run reads where the file is gone.
    let gone = config.tokenizer_path().is_some_and(|path| !path.exists());
    let shared = match config.prepared_dir().filter(|_| gone) {
        Some(folder) => RunData::open(config, &folder)?,
        None => None,
    };
    let tokenizer = match shared {
        Some(data) => data.tokenizer()?.into(),
        None => RunTokenizer::of(config)?,
    };
    if let Some((problem, hint)) = unused_vocabulary(config, &tokenizer) {
        return Err(TrainError::Rehearsal { problem, hint });
    }
    let (tokens, vocab) = (thousands(tokenizer.vocabulary().into()), thousands(config.model.vocab_size as u64));
    let bos = tokenizer.bos().map_or(String::new(), |bos| format!(", BOS token {bos}"));
    Ok(format!("{tokens} tokens of a vocabulary of {vocab}, EOS token {}{bos}", tokenizer.eos()))
}

/// Opens what else a run begins with: tasks, weights. None where there is nothing.
pub fn check_beginnings(config: &Config) -> Result<Option<String>> {
    let tasks = TaskFile::open_all(&config.task_paths(), config.eval.items)?;
    let weights = InitialWeights::open(config)?;
    let mut found = Vec::new();
    if !tasks.is_empty() {
        found.push(format!("{} file{} of tasks", tasks.len(), if tasks.len() == 1 { "" } else { "s" }));
    }
    if let Some(weights) = &weights {
        found.push(format!("weights in {}", weights.path().display()));
    }
    Ok((!found.is_empty()).then(|| found.join(", ")))
}

/// Refuses places for checkpoints that cannot be written, or that one of `bytes` does not fit into; says what there is. Leaves nothing
/// after.
pub fn check_places(config: &Config, run_dir: &Path, bytes: u64, warn: &mut dyn FnMut(&str)) -> Result<String> {
    let places = places(config, run_dir);
    for place in &places {
        let there = existing(place);
        let probe = there.join(format!(".lockstep-rehearsal-{}", std::process::id()));
        let written = std::fs::create_dir(&probe).and_then(|()| std::fs::write(probe.join("probe"), b"probe"));
        // What could not be made cannot be removed.
        let _ = std::fs::remove_dir_all(&probe);
        written.map_err(|cause| RunDirError::io("write checkpoints into", place, cause))?;
    }
    let there: Vec<PathBuf> = places.iter().map(|place| existing(place)).collect();
    let mut show = |event: Event<'_>| {
        if let Event::Warning(text) = event {
            warn(text);
        }
    };
    look_at_disk(&there, bytes, config, &mut show)?;
    let names: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
    Ok(format!("{} can be written, one is {}", names.join(" and "), units::bytes(bytes)))
}

/// The folder itself, or the nearest above it that is there. What is there and no folder will say so when it is written to.
fn existing(place: &Path) -> PathBuf {
    let whole = absolute(place);
    whole.ancestors().find(|folder| folder.exists()).map_or_else(|| whole.clone(), Path::to_owned)
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
