//! How a command ends when it does not succeed.

use crate::remedies;
use lockstep_checkpoint::CheckpointError;
use lockstep_config::ConfigError;
use lockstep_exec::ExecError;
use lockstep_host::HostError;
use lockstep_infer::InferError;
use lockstep_ir::Hint;
use lockstep_plan::PlanError;
use lockstep_rundir::RunDirError;
use lockstep_sim::SimError;
use lockstep_train::TrainError;
use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;

/// Exit codes, for `--help`.
pub const EXIT_CODES: &str = "\
Exit codes:
  0   done
  1   the run failed
  2   the request was wrong
  75  interrupted by a signal, everything saved: the same command goes on";

/// Nothing is wrong: the run was asked to stop, and the same command goes on. Batch systems requeue on it (EX_TEMPFAIL).
pub const INTERRUPTED: u8 = 75;

/// How a rank ends that `lockstep launch` started, where the same command again would end the same way: no restart mends that. To
/// everybody else such a run has failed like any other.
pub const RECURS: u8 = 3;

/// What a command gives, or why it does not.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// What to print, and whose fault it was.
#[derive(Debug, Hint)]
#[hint(hint.clone())]
pub struct Failure {
    text: String,
    hint: Option<String>,
    code: u8,
    recurs: bool,
    reader_gone: bool,
}

impl Failure {
    /// A request that cannot be meant.
    pub fn request(text: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(text.into(), Some(hint.into()), 2)
    }

    /// A run that has failed.
    pub fn run(text: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::failed(text, Some(hint.into()))
    }

    /// The same, where there may be nothing to do about it.
    pub fn failed(text: impl Into<String>, hint: Option<String>) -> Self {
        Self::new(text.into(), hint, 1)
    }

    /// A request that an error refuses.
    pub fn refused(error: &impl Hint) -> Self {
        Self::new(error.to_string(), error.hint(), 2)
    }

    /// With what it is about before the message.
    pub fn about(self, what: impl Display) -> Self {
        Self { text: format!("{what}: {}", self.text), ..self }
    }

    /// With another text and hint, by what they are.
    pub fn reworded(self, word: impl FnOnce(String, Option<String>) -> (String, Option<String>)) -> Self {
        let (text, hint) = word(self.text, self.hint);
        Self { text, hint, ..self }
    }

    /// Prints the error and gives the exit code: 2 where the request was wrong, 1 where the run failed, 75 where it was
    /// interrupted, 0 where whoever read our output has had enough.
    pub fn report(&self) -> ExitCode {
        if self.reader_gone {
            return ExitCode::SUCCESS;
        }
        let text = crate::style::message(&format!("error: {}", self.with_hint())) + "\n";
        // At once, as others may write there. Where nobody listens any more, the exit code still tells.
        let _ = std::io::stderr().write_all(text.as_bytes());
        let launched = std::env::var_os(crate::processes::LAUNCHED).is_some();
        let code = if self.recurs && launched { RECURS } else { self.code };
        lockstep_cuda::end_if_abandoned(code);
        ExitCode::from(code)
    }

    /// As told by a rank: the first speaks for all, others say who they are.
    pub fn of_rank(self, rank: usize) -> Self {
        match rank {
            0 => self,
            _ => self.about(format!("rank {rank} on host {}", lockstep_exec::comm::processes::host())),
        }
    }

    fn new(text: String, hint: Option<String>, code: u8) -> Self {
        Self { text, hint, code, recurs: false, reader_gone: false }
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<TrainError> for Failure {
    fn from(error: TrainError) -> Self {
        Self::from(&error)
    }
}

impl From<&TrainError> for Failure {
    fn from(error: &TrainError) -> Self {
        let code = match (error.is_interrupt(), error.is_request()) {
            (true, _) => INTERRUPTED,
            (false, true) => 2,
            (false, false) => 1,
        };
        let failure = Self::new(remedies::message(error), remedies::hint(error), code);
        Self { recurs: code == 1 && error.recurs(), ..failure }
    }
}

impl From<lockstep_data::DataError> for Failure {
    fn from(error: lockstep_data::DataError) -> Self {
        Self::refused(&TrainError::from(error))
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        let reader_gone = error.kind() == ErrorKind::BrokenPipe;
        Self { reader_gone, ..Self::run(error.to_string(), "check where the output goes") }
    }
}

/// Errors that a run may end with too are told as one of a run.
macro_rules! as_of_a_run {
    ($($error:ty),+) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                TrainError::from(error).into()
            }
        }
    )+};
}

as_of_a_run!(HostError, InferError, ConfigError, PlanError, SimError, RunDirError, CheckpointError, ExecError);
