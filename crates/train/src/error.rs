use crate::analysis::Unmeasured;
use crate::background_save::SaveFailure;
use crate::spikes::{RollBack, SkippedStep, rolled_back, spike_report};
use lockstep_checkpoint::CheckpointError;
use lockstep_config::ConfigError;
use lockstep_data::{DataError, DataSetting};
use lockstep_exec::comm::processes::JoinError;
use lockstep_exec::{ExecError, Remedy};
use lockstep_ir::{Hint, units};
use lockstep_plan::PlanError;
use lockstep_rundir::RunDirError;
use std::path::{Path, PathBuf};

/// Why a run did not start or did not finish. Nothing that was saved is lost by any of these.
#[derive(Debug, thiserror::Error, lockstep_ir::Hint)]
pub enum TrainError {
    /// The config is wrong.
    #[error("{0}")]
    #[hint(_0.hint())]
    Config(#[from] ConfigError),
    /// The data are missing, empty, too short or damaged.
    #[error("{0}")]
    #[hint(_0.hint_by(key_of))]
    Data(#[from] DataError),
    /// The run directory cannot be used as it is asked for.
    #[error("{0}")]
    #[hint(_0.hint())]
    Dir(#[from] RunDirError),
    /// A checkpoint cannot be written or read.
    #[error("{0}")]
    #[hint(_0.hint())]
    Checkpoint(CheckpointError),
    /// A checkpoint could not be written, not in a second attempt either.
    #[error("step {step} was not saved: {cause}")]
    #[hint(cause.hint())]
    NotSaved {
        /// Its step.
        step: u64,
        /// Why.
        cause: SaveFailure,
    },
    /// There is no memory for a snapshot.
    #[error("cannot take {} of host memory for snapshots of checkpoints", lockstep_ir::units::bytes(*bytes))]
    #[hint("set checkpoint.asynchronous = false: steps then wait while a checkpoint is written")]
    NoSnapshot {
        /// How much it takes.
        bytes: u64,
    },
    /// The config has no program, or one that does not fit.
    #[error("{0}")]
    #[hint(_0.hint())]
    Plan(#[from] PlanError),
    /// A data file of hardware, or what it says of a program.
    #[error("{0}")]
    #[hint(_0.hint())]
    Hardware(#[from] lockstep_sim::SimError),
    /// What a measurement of this machine would tell is not known.
    #[error("{}: {what}", file.display())]
    Unmeasured {
        /// The file that would have it.
        file: PathBuf,
        /// What.
        what: Unmeasured,
    },
    /// The executor cannot load or run the program.
    #[error("{0}")]
    #[hint(exec_hint(_0))]
    Exec(#[from] ExecError),
    /// A file of tasks is not one.
    #[error("{place}: {text}")]
    #[hint("{hint}")]
    Task {
        /// The file, and the line if it is one.
        place: String,
        /// What is wrong.
        text: String,
        /// What would be right.
        hint: String,
    },
    /// An answer of a task has no token, or more than a sequence.
    #[error("{place}: the answer {answer:?} has {tokens} tokens")]
    AnswerLength {
        /// The file and the line.
        place: String,
        /// The answer.
        answer: String,
        /// How many it has.
        tokens: usize,
    },
    /// A model gives no probabilities.
    #[error("{task}: a log-likelihood is no number")]
    #[hint("the model has diverged: use an earlier checkpoint")]
    TaskLoss {
        /// The task.
        task: String,
    },
    /// The processes of a run do not find each other.
    #[error("{0}")]
    #[hint(_0.hint())]
    Join(#[from] JoinError),
    /// There are more or fewer processes than ranks.
    #[error(
        "the config has {ranks} rank{} ({layout}), and {processes} processes were started",
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
        "host {host} has {} for {ranks} ranks",
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
    #[error("rank {rank} on host {host} cannot use a GPU: {problem}")]
    #[hint("{hint}, or train with train.device = \"cpu\"")]
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
        "rank 0 on host {} and rank {rank} on host {} do not have the same {what}: {first} against {other}",
        .hosts[0], .hosts[1]
    )]
    #[hint("start all ranks with the same binary, config file, options and data")]
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
        "the run directory of rank {rank}, {} on host {}, is not that of rank 0, {} on host {}",
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
        "rank 0 on host {} and rank {rank} on host {} were told different things:{}",
        .hosts[0], .hosts[1], differences.iter().map(|text| format!("\n  {text}")).collect::<String>()
    )]
    #[hint("start all ranks with the same config file, options and variables")]
    ToldOtherwise {
        /// The rank that was told something else than the first.
        rank: usize,
        /// The hosts of both.
        hosts: Box<[String; 2]>,
        /// What differs, with both values.
        differences: Vec<String>,
    },
    /// The vocabulary is too small for the tokenizer.
    #[error("model.vocab_size is {vocab}, the tokenizer \"{tokenizer}\" makes tokens up to {}", needed - 1)]
    #[hint("set model.vocab_size = {needed}")]
    Vocabulary {
        /// The model's vocabulary.
        vocab: usize,
        /// The tokenizer, as the config has it.
        tokenizer: String,
        /// The smallest vocabulary that would do.
        needed: u32,
    },
    /// A shared folder holds other data than the config asks for.
    #[error("{} holds data that were prepared with other settings", dir.display())]
    #[hint("choose another data.prepared, or delete the folder if nothing else uses it")]
    SharedData {
        /// The folder of prepared data.
        dir: PathBuf,
    },
    /// There is no checkpoint of a step.
    #[error("{} has no checkpoint of step {step}", dir.display())]
    #[hint((!there.is_empty()).then(|| format!("there are those of {}", steps(there))))]
    NoSuchStep {
        /// The run directory.
        dir: PathBuf,
        /// The step that was asked for.
        step: u64,
        /// Steps that have one.
        there: Vec<u64>,
    },
    /// The checkpoint was made from other data than those in the run directory.
    #[error("the prepared data in {} are not those that the checkpoint was trained on", dir.display())]
    DataChanged {
        /// The folder of prepared data.
        dir: PathBuf,
    },
    /// The config names other text than the run was begun with.
    #[error("{} holds text prepared from {before}, the config now says {now}", dir.display())]
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
    #[hint(error.hint())]
    InStep {
        /// The step; in a validation, the one before it.
        step: u64,
        /// What.
        error: Box<TrainError>,
    },
    /// The spike policy has rolled back as often as it may.
    #[error(
        "step {step}: {} updates were skipped in a row, and spikes.roll_backs = {} allows no further roll-back{}",
        skipped.len(), rolled_back(roll_backs), spike_report(roll_backs, skipped)
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
        "{what} not finite for {steps} steps in a row (last at step {step}: loss {loss}, gradient norm {grad_norm})",
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
        "step {step} sends experts {} rows more than parallel.ep_bound = {bound} times an even share has room for",
        units::thousands(*.rows)
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
        "evaluation sends experts {} rows more than parallel.ep_bound = {bound} times an even share has room for",
        units::thousands(*.rows)
    )]
    EvaluationBound {
        /// Rows that found no place, in all layers, of a micro-batch.
        rows: u64,
        /// The config's.
        bound: f64,
    },
    /// What determinism costs was asked for where it costs nothing.
    #[error("runs on the CPU always give the same bits: there is nothing to compare")]
    AlwaysDeterministic,
    /// A run directory holds imported weights.
    #[error("{} holds imported weights, not a run", dir.display())]
    Imported {
        /// The run directory.
        dir: PathBuf,
    },
    /// A run directory has no checkpoint yet.
    #[error("{} has no checkpoint yet", dir.display())]
    #[hint("train it first, or wait: one is saved every checkpoint.every steps")]
    NoCheckpoint {
        /// The run directory.
        dir: PathBuf,
    },
    /// A checkpoint does not say which model it is of.
    #[error("{} holds no config", path.display())]
    #[hint("name the run directory instead of the checkpoint")]
    NoConfig {
        /// The manifest.
        path: PathBuf,
    },
    /// The tokenizer of a checkpoint is gone.
    #[error("{}: the tokenizer of {} is not there any more", path.display(), checkpoint.display())]
    #[hint("put it back; checkpoints that this version saves hold their own")]
    NoTokenizer {
        /// Where it was.
        path: PathBuf,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
    /// A run has no validation text, or it is gone.
    #[error("{} holds no validation text", dir.display())]
    NoValidationText {
        /// The folder of prepared data.
        dir: PathBuf,
    },
    /// There is nothing to continue.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A text does not fit the context.
    #[error("{tokens} tokens leave no room in a context of {context}")]
    ContextFull {
        /// Tokens of the text.
        tokens: usize,
        /// Positions of the cache.
        context: usize,
    },
    /// A sampling option has a value without a meaning.
    #[error("{option} {value} has no meaning")]
    #[hint("{hint}")]
    Sampling {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// What to give instead.
        hint: &'static str,
    },
    /// A model's logits are not numbers.
    #[error("the model's logits at position {position} are not finite")]
    #[hint("it has diverged; use an earlier checkpoint")]
    Logits {
        /// Position of the token that was wanted.
        position: usize,
    },
    /// A rehearsal has found what a run would only warn of.
    #[error("{problem}")]
    #[hint("{hint}")]
    Rehearsal {
        /// What.
        problem: String,
        /// What to do.
        hint: String,
    },
}

impl TrainError {
    pub(crate) fn io(action: &'static str, path: &Path, cause: std::io::Error) -> Self {
        RunDirError::io(action, path, cause).into()
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
            TrainError::Dir(error) => return error.is_request(),
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
                | TrainError::NoSuchStep { .. }
                | TrainError::DataChanged { .. }
                | TrainError::OtherData { .. }
                | TrainError::AlwaysDeterministic
                | TrainError::Imported { .. }
                | TrainError::Checkpoint(CheckpointError::Unfit { .. })
                | TrainError::NoCheckpoint { .. }
                | TrainError::NoConfig { .. }
                | TrainError::NoTokenizer { .. }
                | TrainError::NoValidationText { .. }
                | TrainError::EmptyPrompt
                | TrainError::Task { .. }
                | TrainError::AnswerLength { .. }
                | TrainError::Unmeasured { .. }
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

/// What an executor says to do, with the keys of the config that may help.
pub(crate) fn exec_hint(error: &ExecError) -> Option<String> {
    let (behind_a_hint, keys) = match error.remedy() {
        None => return error.hint(),
        Some(Remedy::LessMemory) => {
            (", ", "lower train.micro_batch, or set recompute.policy = \"selective\" or precision.policy = \"bf16\"")
        }
        Some(Remedy::FewerThreads) => ("; ", "lower train.threads; 0 uses one thread per core"),
        Some(Remedy::LongerTimeout) => ("; ", "raise parallel.timeout if an op legitimately takes that long"),
        Some(Remedy::OtherDevice) => (", or ", "train with train.device = \"cpu\""),
    };
    Some(error.hint().map_or_else(|| keys.to_owned(), |hint| hint + behind_a_hint + keys))
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
        assert!(error.with_hint().contains("; TextField names the field"), "{error}");
        let expected = format!(
            "{}:1: the object has no field \"text\"\n\
             hint: every line is a JSON object; data.text_field names the field with the text",
            path.display()
        );
        assert_eq!(TrainError::from(error).with_hint(), expected);
    }

    #[test]
    fn what_an_executor_says_ends_with_the_keys_that_may_help() {
        let shown = |error: ExecError| TrainError::from(error).with_hint();
        let memory = "lower train.micro_batch, or set recompute.policy = \"selective\" or precision.policy = \"bf16\"";
        assert_eq!(
            shown(ExecError::OutOfMemory("3 GiB".into())),
            format!("cannot allocate the arena of 3 GiB\nhint: {memory}")
        );
        let device = |text: &str, hint: &str, remedy| {
            shown(ExecError::Device { text: text.to_owned(), hint: Some(hint.to_owned()), remedy: Some(remedy) })
        };
        assert_eq!(device("full", "end others", Remedy::LessMemory), format!("full\nhint: end others, {memory}"));
        assert_eq!(
            device("none", "check", Remedy::OtherDevice),
            "none\nhint: check, or train with train.device = \"cpu\""
        );
        let threads = shown(ExecError::Threads(9, std::io::Error::other("no")));
        assert!(threads.ends_with("threads: no\nhint: lower train.threads; 0 uses one thread per core"), "{threads}");
        let left = CommError::Failed { rank: 1, host: None, place: None, reason: "it is gone".into(), hint: None };
        assert_eq!(shown(ExecError::Rank(left)), "rank 1 failed before its first op: it is gone");
    }
}
