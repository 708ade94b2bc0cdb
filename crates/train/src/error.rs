use crate::fit::Saving;
use crate::shell::shell_quoted;
use lockstep_checkpoint::CheckpointError;
use lockstep_compile::CompileError;
use lockstep_config::{ConfigError, Difference};
use lockstep_data::DataError;
use lockstep_exec::ExecError;
use lockstep_ir::account::MemoryBreakdown;
use lockstep_ir::program::Class;
use lockstep_ir::units;
use std::path::{Path, PathBuf};

/// Why a run did not start or did not finish. Nothing that was saved is lost by any of these.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The config is wrong.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// The data are missing, empty, too short or damaged.
    #[error("{0}")]
    Data(#[from] DataError),
    /// A checkpoint cannot be written or read.
    #[error("{0}")]
    Checkpoint(CheckpointError),
    /// A bug in the compiler.
    #[error("{0}")]
    Compile(#[from] CompileError),
    /// The executor cannot load or run the program.
    #[error("{0}")]
    Exec(#[from] ExecError),
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
    #[error("{} holds a run with another config:{}\nhint: {}", dir.display(), list(differences), ways_on(differences))]
    ConfigChanged {
        /// The run directory.
        dir: PathBuf,
        /// What differs.
        differences: Vec<Difference>,
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
    /// Losses or gradients are not finite.
    #[error(
        "{what} not finite for {steps} steps in a row (last at step {step}: loss {loss}, gradient norm {grad_norm})\n\
         hint: no weight was changed in these steps and the last checkpoint is kept; start over with a lower optimizer.lr \
         or more optimizer.warmup_steps, in another --run-dir or with --fresh",
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
    /// The arena is larger than the memory that is free.
    #[error(
        "the step needs {} of memory{}, {} are free:{}\nhint: {}",
        units::bytes(memory.total_bytes),
        if *ranks > 1 { format!(" on each of {ranks} ranks") } else { String::new() },
        units::bytes(*available),
        breakdown(memory),
        smaller(savings, *ranks)
    )]
    DoesNotFit {
        /// What it needs.
        memory: Box<MemoryBreakdown>,
        /// Ranks that share the memory.
        ranks: usize,
        /// Bytes that are free.
        available: u64,
        /// What would save some.
        savings: Vec<Saving>,
    },
    /// An op of `recompute.ops` makes nothing that could be recomputed.
    #[error(
        "recompute.ops: \"{op}\" makes nothing that a layer of this model saves for backward\nhint: {}choose of {}",
        guess.as_ref().map_or(String::new(), |guess| format!("did you mean \"{guess}\"? ")),
        known.join(", ")
    )]
    NotRecomputable {
        /// The op.
        op: String,
        /// What was perhaps meant.
        guess: Option<String>,
        /// Ops whose outputs can be recomputed.
        known: Vec<&'static str>,
    },
    /// No choice of what is recomputed lets the arena fit.
    #[error(
        "recompute.budget = {} cannot be kept: the arena needs at least {} ({least} bytes), whatever is \
         recomputed\nhint: raise it to that, or lower train.micro_batch or train.seq, or split the model over more ranks",
        units::bytes(*budget),
        units::bytes(*least)
    )]
    OverBudget {
        /// What was allowed.
        budget: u64,
        /// The least that is possible.
        least: u64,
    },
    /// A number of the config is not one in the type that the device computes with.
    #[error("{key} = {value} is {rounded} in fp32\nhint: choose a value that fp32 can hold")]
    Rounded {
        /// The key.
        key: &'static str,
        /// Its value.
        value: f64,
        /// What is left of it.
        rounded: f32,
    },
    /// A group of the optimizer has no parameter.
    #[error(
        "optimizer.groups: \"{pattern}\" matches no parameter{}\nhint: the parameters are {}",
        if *taken { " that groups before it have not taken" } else { "" },
        names.join(", ")
    )]
    EmptyGroup {
        /// Its pattern.
        pattern: String,
        /// Whether it would match some that others have.
        taken: bool,
        /// What there is, with `*` for the number of a layer.
        names: Vec<String>,
    },
    /// Two groups want parts of one stored tensor.
    #[error(
        "optimizer.groups: {first} and {second} are stored as one tensor and must be in the same group\nhint: give a pattern \
         that matches all of {}",
        names.join(", ")
    )]
    SplitGroup {
        /// A parameter.
        first: String,
        /// One in another group.
        second: String,
        /// All that are stored together.
        names: Vec<String>,
    },
    /// The schedule of a step would be absurdly long.
    #[error(
        "a step of {micro_batches} micro-batches is too long, at most {most} are allowed\nhint: raise train.micro_batch or lower \
         train.global_batch"
    )]
    TooManyMicroBatches {
        /// Asked for.
        micro_batches: usize,
        /// Allowed.
        most: usize,
    },
    /// The device does not do what the config asks for.
    #[error(
        "{what} does not run with train.device = \"{device}\"\nhint: change it, or use the CPU: train.device = \"cpu\", or --device cpu"
    )]
    NotOnDevice {
        /// What.
        what: &'static str,
        /// The device.
        device: &'static str,
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
    /// A model has no positions for a text of this length.
    #[error(
        "sequences of {tokens} tokens are longer than the {positions} positions that the model has learned\nhint: use at most {positions} tokens"
    )]
    Positions {
        /// Tokens of a sequence.
        tokens: usize,
        /// Rows of the model's table.
        positions: usize,
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
        matches!(self, TrainError::Data(DataError::Interrupted))
    }

    /// Whether the request was wrong, rather than the run.
    pub fn is_request(&self) -> bool {
        if self.is_interrupt() {
            return false;
        }
        matches!(
            self,
            TrainError::Config(_)
                | TrainError::Data(_)
                | TrainError::Vocabulary { .. }
                | TrainError::SharedData { .. }
                | TrainError::ConfigChanged { .. }
                | TrainError::CannotChange { .. }
                | TrainError::NothingToChange { .. }
                | TrainError::StepsDone { .. }
                | TrainError::NoSuchStep { .. }
                | TrainError::Locked { .. }
                | TrainError::DataChanged { .. }
                | TrainError::OtherData { .. }
                | TrainError::DoesNotFit { .. }
                | TrainError::NotRecomputable { .. }
                | TrainError::OverBudget { .. }
                | TrainError::Rounded { .. }
                | TrainError::TooManyMicroBatches { .. }
                | TrainError::NotOnDevice { .. }
                | TrainError::AlwaysDeterministic
                | TrainError::EmptyGroup { .. }
                | TrainError::SplitGroup { .. }
                | TrainError::NotTrained { .. }
                | TrainError::Imported { .. }
                | TrainError::Checkpoint(CheckpointError::Unfit { .. })
                | TrainError::NoCheckpoint { .. }
                | TrainError::NoConfig { .. }
                | TrainError::NoTokenizer { .. }
                | TrainError::NoValidationText { .. }
                | TrainError::EmptyPrompt
                | TrainError::ContextFull { .. }
                | TrainError::Positions { .. }
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

fn list(differences: &[Difference]) -> String {
    differences.iter().map(|d| format!("\n  {}: {} before, {} now", d.path, d.theirs, d.ours)).collect()
}

/// How to go on where the config has changed: with the changes that a run may take on, or without them.
fn ways_on(differences: &[Difference]) -> String {
    const ELSE: &str =
        "choose another --run-dir, or give --fresh to start over (the old run is kept in a folder inside)";
    let given = differences.iter().filter(|d| d.changeable && !d.follows);
    let flags: Vec<String> =
        given.map(|d| format!("--change {}", shell_quoted(&format!("{}={}", d.path, d.ours)))).collect();
    let fixed: Vec<&str> = differences.iter().filter(|d| !d.changeable).map(|d| d.path).collect();
    match (flags.is_empty(), fixed.is_empty()) {
        (true, _) => format!("undo these changes to resume it, {ELSE}"),
        (false, true) => {
            format!("go on with the new values from here on: {}; or undo these changes, {ELSE}", flags.join(" "))
        }
        (false, false) => format!(
            "a run cannot change {}: undo that; with the rest it goes on: {}; or {ELSE}",
            fixed.join(", "),
            flags.join(" ")
        ),
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

fn breakdown(memory: &MemoryBreakdown) -> String {
    let line = |c: &Class| format!("\n  {:<13} {}", c.name(), units::bytes(memory.classes[c.name()]));
    Class::ALL.iter().filter(|c| memory.classes[c.name()] > 0).map(line).collect()
}

fn smaller(savings: &[Saving], ranks: usize) -> String {
    const LAST: &str = "choose a smaller model, a shorter train.seq, or a machine with more memory";
    if savings.is_empty() {
        return LAST.to_owned();
    }
    let width = savings.iter().map(|saving| saving.change.len()).max().unwrap_or(0);
    let line = |s: &Saving| {
        let fits = if s.fits { ", and fits" } else { "" };
        format!("\n  {:<width$}  saves {}{fits}", s.change, units::bytes(s.saved_bytes))
    };
    let each = if ranks > 1 { ", on the rank that needs most" } else { "" };
    let none = if savings.iter().any(|saving| saving.fits) { String::new() } else { format!("\n  none fits: {LAST}") };
    format!("each of these saves memory{each}:{}{none}", savings.iter().map(line).collect::<String>())
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
