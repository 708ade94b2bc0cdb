use lockstep_checkpoint::CheckpointError;
use lockstep_config::ConfigError;
use lockstep_data::{DataError, DataSetting};
use lockstep_exec::ExecError;
use lockstep_host::{HostError, from_below};
use lockstep_hub::HubError;
use lockstep_ir::units;
use lockstep_plan::PlanError;
use lockstep_rundir::RunDirError;
use std::path::PathBuf;

/// What a model gives, or why it does not.
pub type Result<T, E = InferError> = std::result::Result<T, E>;

/// Why a model, its data or its tokenizer cannot be used.
#[derive(Debug, thiserror::Error, lockstep_ir::Hint)]
pub enum InferError {
    /// The machine cannot do it.
    #[error("{0}")]
    #[hint(_0.hint())]
    Host(Box<HostError>),
    /// The config is wrong.
    #[error("{0}")]
    #[hint(_0.hint())]
    Config(#[from] ConfigError),
    /// The data are missing, empty, too short or damaged.
    #[error("{0}")]
    #[hint(_0.hint_by(key_of))]
    Data(#[from] DataError),
    /// A checkpoint cannot be written or read.
    #[error("{0}")]
    #[hint(_0.hint())]
    Checkpoint(CheckpointError),
    /// A name on the hub leads nowhere, or what it names does not come.
    #[error("{0}")]
    #[hint(Some(_0.hint()))]
    Hub(#[from] HubError),
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
    /// Tokens that a model is evaluated on went to experts whose rank has no room for them.
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
    /// A file, folder or value that was asked for is not what it must be.
    #[error("{problem}")]
    #[hint("{hint}")]
    Unusable {
        /// What is wrong.
        problem: String,
        /// What would be right.
        hint: String,
    },
    /// A model gives no probabilities.
    #[error("{what} not finite")]
    #[hint("the model has diverged: use an earlier checkpoint")]
    NotFinite {
        /// Which numbers of it, and a verb.
        what: String,
    },
}

impl InferError {
    /// Whether the request was wrong, rather than what was done.
    pub fn is_request(&self) -> bool {
        match self {
            InferError::Host(error) => error.is_request(),
            InferError::Checkpoint(error) => matches!(error, CheckpointError::Unfit { .. }),
            // A server that is gone is not the user's mistake.
            InferError::Data(DataError::Bucket { error }) => error.is_request(),
            InferError::Data(error) => !matches!(error, DataError::Interrupted),
            InferError::Hub(error) => error.is_request(),
            InferError::EvaluationBound { .. } | InferError::NotFinite { .. } => false,
            _ => true,
        }
    }
}

impl From<HostError> for InferError {
    fn from(error: HostError) -> Self {
        InferError::Host(Box::new(error))
    }
}

from_below!(InferError, HostError: ExecError, PlanError, RunDirError);

impl From<CheckpointError> for InferError {
    fn from(error: CheckpointError) -> Self {
        match error {
            // What is saved is fetched from the device: where that fails, the disk is not to blame.
            CheckpointError::Io { action, path, cause } => match cause.downcast::<ExecError>() {
                Ok(error) => error.into(),
                Err(cause) => InferError::Checkpoint(CheckpointError::Io { action, path, cause }),
            },
            error => InferError::Checkpoint(error),
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
        DataSetting::ChatTemplate => "data.chat_template",
        DataSetting::TrainOn => "data.train_on",
        DataSetting::SpecialTokens => "data.special_tokens",
        DataSetting::BosToken => "data.bos_token",
        DataSetting::EosToken => "data.eos_token",
        DataSetting::Corpora => "data.corpora",
        DataSetting::ValidationFraction => "data.validation_fraction",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::Hint;

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
        assert_eq!(InferError::from(error).with_hint(), expected);
    }
}
