use crate::shell::shell_quoted;
use crate::spikes::{RollBack, SkippedStep};
use lockstep_checkpoint::CheckpointError;
use lockstep_config::{ConfigError, Difference};
use lockstep_data::{DataError, DataSetting};
use lockstep_exec::comm::processes::JoinError;
use lockstep_exec::{ExecError, Remedy};
use lockstep_ir::units;
use lockstep_plan::PlanError;
use std::path::{Path, PathBuf};

/// Why a run did not start or did not finish. Nothing that was saved is lost by any of these.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The config is wrong.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// The data are missing, empty, too short or damaged.
    #[error("{}", .0.worded(key_of))]
    Data(#[from] DataError),
    /// A checkpoint cannot be written or read.
    #[error("{0}")]
    Checkpoint(CheckpointError),
    /// A checkpoint could not be written, not in a second attempt either.
    #[error("step {step} was not saved: {cause}")]
    NotSaved {
        /// Its step.
        step: u64,
        /// Why, with a hint.
        cause: String,
    },
    /// There is no memory for a snapshot.
    #[error(
        "cannot take {} of host memory for snapshots of checkpoints\nhint: set checkpoint.asynchronous = false: steps then wait \
         while a checkpoint is written",
        lockstep_ir::units::bytes(*bytes)
    )]
    NoSnapshot {
        /// How much it takes.
        bytes: u64,
    },
    /// The config has no program, or one that does not fit.
    #[error("{0}")]
    Plan(#[from] PlanError),
    /// A data file of hardware, or what it says of a program.
    #[error("{0}")]
    Hardware(#[from] lockstep_sim::SimError),
    /// The executor cannot load or run the program.
    #[error("{}", worded(.0))]
    Exec(#[from] ExecError),
    /// A file of tasks is not one.
    #[error("{place}: {text}\nhint: {hint}")]
    Task {
        /// The file, and the line if it is one.
        place: String,
        /// What is wrong.
        text: String,
        /// What would be right.
        hint: String,
    },
    /// A model gives no probabilities.
    #[error("{task}: a log-likelihood is no number\nhint: the model has diverged: use an earlier checkpoint")]
    TaskLoss {
        /// The task.
        task: String,
    },
    /// The processes of a run do not find each other.
    #[error("{0}")]
    Join(#[from] JoinError),
    /// There are more or fewer processes than ranks.
    #[error(
        "the config has {ranks} rank{} ({layout}), and {processes} processes were started\nhint: start {ranks}, or choose a \
         layout of {processes} ranks: --set parallel.dp={processes}, say",
        if *.ranks == 1 { "" } else { "s" }
    )]
    OtherRanks {
        /// The layout of the config.
        layout: String,
        /// Its ranks.
        ranks: usize,
        /// Processes that there are.
        processes: usize,
    },
    /// A host has more ranks than GPUs.
    #[error(
        "host {host} has {} for {ranks} ranks\nhint: start one rank per GPU; `lockstep launch --share-gpus` lets ranks share them, \
         slowly, to check a layout; CUDA_VISIBLE_DEVICES may hide some",
        if *.gpus == 1 { "1 GPU".to_owned() } else { format!("{gpus} GPUs") }
    )]
    FewGpus {
        /// The host.
        host: String,
        /// Ranks there.
        ranks: usize,
        /// GPUs there.
        gpus: usize,
    },
    /// A process has no GPU that it can use.
    #[error(
        "rank {rank} on host {host} cannot use a GPU: {problem}\nhint: {hint}, or train with train.device = \"cpu\""
    )]
    NoGpu {
        /// The rank.
        rank: usize,
        /// Its host.
        host: String,
        /// Why not.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// Processes have other things in hand.
    #[error(
        "rank 0 on host {} and rank {rank} on host {} do not have the same {what}: {first} against {other}\n\
         hint: start all ranks with the same binary, config file, options and data",
        .hosts[0], .hosts[1]
    )]
    Disagree {
        /// What differs.
        what: &'static str,
        /// The rank that has something else than the first.
        rank: usize,
        /// The hosts of both.
        hosts: Box<[String; 2]>,
        /// What the first has.
        first: String,
        /// What the other has.
        other: String,
    },
    /// The run directory of one host is not that of another.
    #[error(
        "the run directory of rank {rank}, {} on host {}, is not that of rank 0, {} on host {}\nhint: give all ranks the same \
         --run-dir, on a file system that all hosts share",
        .dirs[1], .hosts[1], .dirs[0], .hosts[0]
    )]
    NotShared {
        /// The rank that does not find it.
        rank: usize,
        /// The hosts of rank 0 and of that rank.
        hosts: Box<[String; 2]>,
        /// Their run directories.
        dirs: Box<[String; 2]>,
    },
    /// Processes were started with other configs, options or variables.
    #[error(
        "rank 0 on host {} and rank {rank} on host {} were told different things:{}\nhint: start all ranks with the same config file, \
         options and variables",
        .hosts[0], .hosts[1], differences.iter().map(|text| format!("\n  {text}")).collect::<String>()
    )]
    ToldOtherwise {
        /// The rank that was told something else than the first.
        rank: usize,
        /// The hosts of both.
        hosts: Box<[String; 2]>,
        /// What differs, with both values.
        differences: Vec<String>,
    },
    /// The vocabulary is too small for the tokenizer.
    #[error(
        "model.vocab_size is {vocab}, the tokenizer \"{tokenizer}\" makes tokens up to {}\nhint: set model.vocab_size = \
         {needed}",
        needed - 1
    )]
    Vocabulary {
        /// The model's vocabulary.
        vocab: usize,
        /// The tokenizer, as the config has it.
        tokenizer: String,
        /// The smallest vocabulary that would do.
        needed: u32,
    },
    /// A shared folder holds other data than the config asks for.
    #[error(
        "{} holds data that were prepared with other settings\nhint: choose another data.prepared, or delete the folder \
         if nothing else uses it",
        dir.display()
    )]
    SharedData {
        /// The folder of prepared data.
        dir: PathBuf,
    },
    /// The run directory holds a run with another config.
    #[error("{} holds a run with another config:{}\nhint: {}", dir.display(), list(differences), ways_on(differences, *step, *stays_finished))]
    ConfigChanged {
        /// The run directory.
        dir: PathBuf,
        /// What differs.
        differences: Vec<Difference>,
        /// Steps that the run has done.
        step: u64,
        /// Whether these are all of its steps, with the new config too.
        stays_finished: bool,
    },
    /// Changes were asked for where no step is left that they could have an effect on.
    #[error(
        "--change {}: the run in {} is finished, all {step} steps are done: it would have no effect, and nothing was recorded\n\
         hint: give --change train.steps=N too, with N more than {step}, to go on with it; or take the run back with --resume-from \
         STEP (`lockstep checkpoint list` shows which there are)",
        changes.join(", "),
        dir.display()
    )]
    FinishedRun {
        /// The run directory.
        dir: PathBuf,
        /// Steps done.
        step: u64,
        /// What was asked for, as `table.key=value`.
        changes: Vec<String>,
    },
    /// A run may not take on another value of this key.
    #[error(
        "--change {key}: a run that has begun cannot go from {before} to {now}\nhint: {}: start another run, or give --fresh to \
         start over (the old run is kept in a folder inside)",
        why_fixed(key)
    )]
    CannotChange {
        /// `table.key`.
        key: &'static str,
        /// Its value in the run.
        before: String,
        /// The value that was asked for.
        now: String,
    },
    /// Changes were asked for where there is no run to change.
    #[error("{} has no checkpoint, so there is no run to change\nhint: give the values with --set instead of --change", dir.display())]
    NothingToChange {
        /// The run directory.
        dir: PathBuf,
    },
    /// A run is to have fewer steps than it has done.
    #[error(
        "train.steps = {steps} is less than the {step} steps that the run has done\nhint: choose at least {step}, or go back with \
         --resume-from STEP (`lockstep checkpoint list` shows which there are)"
    )]
    StepsDone {
        /// Asked for.
        steps: u64,
        /// Done.
        step: u64,
    },
    /// There is no checkpoint of a step.
    #[error(
        "{} has no checkpoint of step {step}\nhint: {}",
        dir.display(),
        match &there[..] {
            [] => "there is none of any step: start without --resume-from".to_owned(),
            there => format!("there are those of {}", steps(there)),
        }
    )]
    NoSuchStep {
        /// The run directory.
        dir: PathBuf,
        /// The step that was asked for.
        step: u64,
        /// Steps that have one.
        there: Vec<u64>,
    },
    /// Another process trains in this directory.
    #[error("{} is in use by another process\nhint: wait for it, or choose another --run-dir", dir.display())]
    Locked {
        /// The run directory.
        dir: PathBuf,
    },
    /// The checkpoint was made from other data than those in the run directory.
    #[error(
        "the prepared data in {} are not those that the checkpoint was trained on\nhint: restore the folder, or restore \
         the text and delete the folder, which is then prepared again, or give --fresh to start over",
        dir.display()
    )]
    DataChanged {
        /// The folder of prepared data.
        dir: PathBuf,
    },
    /// The config names other text than the run was begun with.
    #[error(
        "{} holds text prepared from {before}, the config now says {now}\nhint: undo the change, choose another --run-dir, or \
         give --fresh to start over",
        dir.display()
    )]
    OtherData {
        /// The folder of prepared data.
        dir: PathBuf,
        /// What was read.
        before: String,
        /// What the config says now.
        now: String,
    },
    /// What went wrong while all numbers were looked at.
    #[error("step {step}: {error}")]
    InStep {
        /// The step; in a validation, the one before it.
        step: u64,
        /// What.
        error: Box<TrainError>,
    },
    /// The spike policy has rolled back as often as it may.
    #[error(
        "step {step}: {} updates were skipped in a row, and spikes.roll_backs = {} allows no further roll-back{}\n\
         hint: no weight was changed in the skipped steps and the last checkpoint is kept; look at the data of these steps; resume with a lower \
         rate (--change optimizer.lr=…), a wider limit (--change spikes.z=…) or more roll-backs (--change spikes.roll_backs={})",
        skipped.len(), rolled_back(roll_backs), spike_report(roll_backs, skipped), rolled_back(roll_backs) + 1
    )]
    Spikes {
        /// The last step.
        step: u64,
        /// What has been done.
        roll_backs: Vec<RollBack>,
        /// What would have led to one more.
        skipped: Vec<SkippedStep>,
    },
    /// Losses or gradients are not finite.
    #[error(
        "{what} not finite for {steps} steps in a row (last at step {step}: loss {loss}, gradient norm {grad_norm})\n\
         hint: no weight was changed in these steps and the last checkpoint is kept; start over with a lower optimizer.lr \
         or more optimizer.warmup_steps, in another --run-dir or with --fresh; --debug-nans says where the first such number is made",
        what = if loss.is_finite() { "the gradient is" } else { "the loss is" }
    )]
    Diverged {
        /// Consecutive bad steps.
        steps: u64,
        /// The last of them.
        step: u64,
        /// Its loss.
        loss: f64,
        /// Its gradient norm.
        grad_norm: f32,
    },
    /// Tokens that went to experts whose rank has no room for them.
    #[error(
        "step {step} sends experts {} rows more than parallel.ep_bound = {bound} times an even share has room for\n\
         hint: no weight was changed in this step, and checkpoints are kept; go on with --set parallel.ep_bound={}, or without \
         the key, which plans for all that there can be; where losses rose before, the run has diverged: lower optimizer.lr",
        units::thousands(*.rows), 2.0 * .bound
    )]
    ExpertBound {
        /// The step.
        step: u64,
        /// Rows that found no place, in all layers.
        rows: u64,
        /// The config's.
        bound: f64,
    },
    /// The same of tokens that a model is evaluated on.
    #[error(
        "evaluation sends experts {} rows more than parallel.ep_bound = {bound} times an even share has room for\n\
         hint: what was trained is kept; go on with --set parallel.ep_bound={}, or without the key, which plans for all that there \
         can be",
        units::thousands(*.rows), 2.0 * .bound
    )]
    EvaluationBound {
        /// Rows that found no place, in all layers, of a micro-batch.
        rows: u64,
        /// The config's.
        bound: f64,
    },
    /// What determinism costs was asked for where it costs nothing.
    #[error("runs on the CPU always give the same bits: there is nothing to compare\nhint: use --device cuda")]
    AlwaysDeterministic,
    /// A path is neither a run directory nor a checkpoint.
    #[error(
        "{}: {}\nhint: {}",
        path.display(),
        if path.exists() { "neither a run directory nor a checkpoint" } else { "no such run or checkpoint" },
        match crate::hf::is_foreign(path) {
            true => "it is a Hugging Face model: make a run directory of it with `lockstep checkpoint import`",
            false => "name a run directory (runs/quickstart, say) or a checkpoint in it (checkpoints/step-…)",
        }
    )]
    NotTrained {
        /// The path.
        path: PathBuf,
    },
    /// A run directory holds imported weights.
    #[error(
        "{} holds imported weights, not a run\nhint: choose another --run-dir, and start from them there: --set \
         train.init_from=FOLDER",
        dir.display()
    )]
    Imported {
        /// The run directory.
        dir: PathBuf,
    },
    /// A run directory has no checkpoint yet.
    #[error("{} has no checkpoint yet\nhint: train it first, or wait: one is saved every checkpoint.every steps", dir.display())]
    NoCheckpoint {
        /// The run directory.
        dir: PathBuf,
    },
    /// A checkpoint does not say which model it is of.
    #[error("{} holds no config\nhint: name the run directory instead of the checkpoint", path.display())]
    NoConfig {
        /// The manifest.
        path: PathBuf,
    },
    /// The tokenizer of a checkpoint is gone.
    #[error(
        "{}: the tokenizer of {} is not there any more\nhint: put it back; checkpoints that this version saves hold their own",
        path.display(),
        checkpoint.display()
    )]
    NoTokenizer {
        /// Where it was.
        path: PathBuf,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
    /// A run has no validation text, or it is gone.
    #[error("{} holds no validation text\nhint: name text to evaluate on: --data PATH", dir.display())]
    NoValidationText {
        /// The folder of prepared data.
        dir: PathBuf,
    },
    /// There is nothing to continue.
    #[error("the prompt is empty\nhint: give some text to continue: --prompt \"Once\"")]
    EmptyPrompt,
    /// A text does not fit the context.
    #[error(
        "{tokens} tokens leave no room in a context of {context}\nhint: give a shorter prompt, or a larger --context"
    )]
    ContextFull {
        /// Tokens of the text.
        tokens: usize,
        /// Positions of the cache.
        context: usize,
    },
    /// A sampling option has a value without a meaning.
    #[error("--{option} {value} has no meaning\nhint: {hint}")]
    Sampling {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// What to give instead.
        hint: &'static str,
    },
    /// A model's logits are not numbers.
    #[error(
        "the model's logits at position {position} are not finite\nhint: it has diverged; use an earlier checkpoint"
    )]
    Logits {
        /// Position of the token that was wanted.
        position: usize,
    },
    /// A rehearsal has found what a run would only warn of.
    #[error("{problem}\nhint: {hint}")]
    Rehearsal {
        /// What.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// A file of the run directory cannot be read or written.
    #[error("cannot {action} {}: {cause}\nhint: {}", path.display(), hint(cause))]
    Io {
        /// What was being done.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
}

impl TrainError {
    pub(crate) fn io(action: &'static str, path: &Path, cause: std::io::Error) -> Self {
        TrainError::Io { action, path: path.to_owned(), cause }
    }

    /// Whether nothing is wrong: the run was asked to stop, and the same command goes on.
    pub fn is_interrupt(&self) -> bool {
        matches!(self, TrainError::Data(DataError::Interrupted) | TrainError::Join(JoinError::Stopped))
    }

    /// Whether the same command again would end the same way, from the last checkpoint too: what it computes has failed, not what it
    /// runs on.
    pub fn recurs(&self) -> bool {
        matches!(
            self,
            TrainError::Spikes { .. }
                | TrainError::Diverged { .. }
                | TrainError::ExpertBound { .. }
                | TrainError::EvaluationBound { .. }
                | TrainError::InStep { .. }
                | TrainError::Plan(_)
                | TrainError::NoSnapshot { .. }
                | TrainError::Exec(ExecError::OutOfMemory(_) | ExecError::Internal(_))
                | TrainError::Join(
                    JoinError::OtherSize { .. } | JoinError::OtherBuild { .. } | JoinError::Twice { .. }
                )
        ) || self.is_request()
    }

    /// Whether the request was wrong, rather than the run.
    pub fn is_request(&self) -> bool {
        match self {
            TrainError::Plan(error) => return error.is_request(),
            _ if self.is_interrupt() => return false,
            _ => {}
        }
        matches!(
            self,
            TrainError::Config(_)
                | TrainError::Hardware(lockstep_sim::SimError::File { .. })
                | TrainError::Data(_)
                | TrainError::OtherRanks { .. }
                | TrainError::FewGpus { .. }
                | TrainError::Disagree { .. }
                | TrainError::NotShared { .. }
                | TrainError::ToldOtherwise { .. }
                | TrainError::Vocabulary { .. }
                | TrainError::SharedData { .. }
                | TrainError::ConfigChanged { .. }
                | TrainError::CannotChange { .. }
                | TrainError::NothingToChange { .. }
                | TrainError::StepsDone { .. }
                | TrainError::FinishedRun { .. }
                | TrainError::NoSuchStep { .. }
                | TrainError::Locked { .. }
                | TrainError::DataChanged { .. }
                | TrainError::OtherData { .. }
                | TrainError::AlwaysDeterministic
                | TrainError::NotTrained { .. }
                | TrainError::Imported { .. }
                | TrainError::Checkpoint(CheckpointError::Unfit { .. })
                | TrainError::NoCheckpoint { .. }
                | TrainError::NoConfig { .. }
                | TrainError::NoTokenizer { .. }
                | TrainError::NoValidationText { .. }
                | TrainError::EmptyPrompt
                | TrainError::Task { .. }
                | TrainError::ContextFull { .. }
                | TrainError::Sampling { .. }
        )
    }
}

impl From<CheckpointError> for TrainError {
    fn from(error: CheckpointError) -> Self {
        match error {
            // What is saved is fetched from the device: where that fails, the disk is not to blame.
            CheckpointError::Io { action, path, cause } => match cause.downcast::<ExecError>() {
                Ok(error) => TrainError::Exec(error),
                Err(cause) => TrainError::Checkpoint(CheckpointError::Io { action, path, cause }),
            },
            error => TrainError::Checkpoint(error),
        }
    }
}

/// The key of the config that a setting of data is asked for with.
fn key_of(setting: DataSetting) -> &'static str {
    match setting {
        DataSetting::Extensions => "data.extensions",
        DataSetting::TextField => "data.text_field",
        DataSetting::PromptField => "data.prompt_field",
        DataSetting::Tokenizer => "data.tokenizer",
        DataSetting::BosToken => "data.bos_token",
        DataSetting::EosToken => "data.eos_token",
        DataSetting::Corpora => "data.corpora",
        DataSetting::ValidationFraction => "data.validation_fraction",
    }
}

/// What an executor says, with the keys of the config that may help.
pub(crate) fn worded(error: &ExecError) -> String {
    let text = error.to_string();
    let (behind_a_hint, keys) = match error.remedy() {
        None => return text,
        Some(Remedy::LessMemory) => (
            ", ",
            "lower train.micro_batch, or set recompute.policy = \"selective\" or precision.policy = \"bf16\"; \
             `lockstep explain RUN.TOML --fit SIZE` shows what fits",
        ),
        Some(Remedy::FewerThreads) => ("; ", "lower train.threads; 0 uses one thread per core"),
        Some(Remedy::LongerTimeout) => ("; ", "raise parallel.timeout if an op legitimately takes that long"),
        Some(Remedy::OtherDevice) => (", or ", "train with train.device = \"cpu\""),
    };
    match text.contains("\nhint: ") {
        true => text + behind_a_hint + keys,
        false => text + "\nhint: " + keys,
    }
}

fn list(differences: &[Difference]) -> String {
    differences.iter().map(|d| format!("\n  {}: {} before, {} now", d.path, d.theirs, d.ours)).collect()
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

/// `5, 10 and 15`.
fn steps(steps: &[u64]) -> String {
    let text: Vec<String> = steps.iter().map(u64::to_string).collect();
    match &text[..] {
        [] => String::new(),
        [only] => format!("step {only}"),
        [first @ .., last] => format!("steps {} and {last}", first.join(", ")),
    }
}

/// How often a run has rolled back.
fn rolled_back(roll_backs: &[RollBack]) -> u64 {
    roll_backs.last().map_or(0, |last| last.number)
}

/// What the spike policy did, a line each.
fn spike_report(roll_backs: &[RollBack], skipped: &[SkippedStep]) -> String {
    let done = roll_backs.iter().map(|roll_back| format!("\n  rolled back {roll_back}"));
    done.chain(skipped.iter().map(|s| format!("\n  step {}: {s}", s.step))).collect()
}

fn hint(cause: &std::io::Error) -> &'static str {
    match cause.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::FileTooLarge | std::io::ErrorKind::QuotaExceeded => {
            "free some space and run the same command again: it resumes from the last checkpoint"
        }
        std::io::ErrorKind::PermissionDenied => "choose a --run-dir that you may write to",
        std::io::ErrorKind::NotADirectory | std::io::ErrorKind::AlreadyExists => "choose a --run-dir that is a folder",
        _ => "check the path; the same command resumes from the last checkpoint",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_exec::comm::CommError;

    #[test]
    fn what_is_wrong_with_data_comes_with_the_key_that_may_help() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        std::fs::write(&path, "{}\n").unwrap();
        let spec = lockstep_data::PrepareSpec { paths: vec![path.clone()], ..Default::default() };
        let error = lockstep_data::prepare(&spec, &folder.path().join("out"), &mut |_| ()).err().unwrap();
        assert!(error.to_string().contains("; TextField names the field"), "{error}");
        let expected = format!(
            "{}:1: the object has no field \"text\"\n\
             hint: every line is a JSON object; data.text_field names the field with the text",
            path.display()
        );
        assert_eq!(TrainError::from(error).to_string(), expected);
    }

    #[test]
    fn what_an_executor_says_ends_with_the_keys_that_may_help() {
        let shown = |error: ExecError| TrainError::from(error).to_string();
        let memory = "lower train.micro_batch, or set recompute.policy = \"selective\" or precision.policy = \"bf16\"; \
                      `lockstep explain RUN.TOML --fit SIZE` shows what fits";
        assert_eq!(
            shown(ExecError::OutOfMemory("3 GiB".into())),
            format!("cannot allocate the arena of 3 GiB\nhint: {memory}")
        );
        let device = |text: &str, remedy| shown(ExecError::Device { text: text.to_owned(), remedy: Some(remedy) });
        assert_eq!(device("full\nhint: end others", Remedy::LessMemory), format!("full\nhint: end others, {memory}"));
        assert_eq!(
            device("none\nhint: check", Remedy::OtherDevice),
            "none\nhint: check, or train with train.device = \"cpu\""
        );
        let threads = shown(ExecError::Threads(9, std::io::Error::other("no")));
        assert!(threads.ends_with("threads: no\nhint: lower train.threads; 0 uses one thread per core"), "{threads}");
        let left = CommError::Failed { rank: 1, host: None, place: None, reason: "it is gone".into() };
        assert_eq!(shown(ExecError::Rank(left)), "rank 1 failed before its first op: it is gone");
    }
}
