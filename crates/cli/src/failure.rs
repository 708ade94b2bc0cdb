//! How a command ends when it does not succeed.

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

/// What to print, and whose fault it was.
#[derive(Debug)]
pub struct Failure {
    text: String,
    code: u8,
    recurs: bool,
    reader_gone: bool,
}

impl Failure {
    /// A request that cannot be meant; `text` ends with a hint.
    pub fn request(text: String) -> Self {
        Self::new(text, 2)
    }

    /// A run that has failed; `text` ends with a hint.
    pub fn run(text: String) -> Self {
        Self::new(text, 1)
    }

    /// Prints the error and gives the exit code: 2 where the request was wrong, 1 where the run failed, 75 where it was
    /// interrupted, 0 where whoever read our output has had enough.
    pub fn report(&self) -> ExitCode {
        if self.reader_gone {
            return ExitCode::SUCCESS;
        }
        let text = crate::style::message(&format!("error: {}", self.text)) + "\n";
        // At once, as others may write there. Where nobody listens any more, the exit code still tells.
        let _ = std::io::stderr().write_all(text.as_bytes());
        let launched = std::env::var_os(crate::processes::LAUNCHED).is_some();
        let code = if self.recurs && launched { RECURS } else { self.code };
        lockstep_cuda::end_if_abandoned(code);
        ExitCode::from(code)
    }

    /// As told by a rank that is not the first.
    pub fn of_rank(self, rank: usize) -> Self {
        let host = lockstep_exec::comm::processes::host();
        Self { text: format!("rank {rank} on host {host}: {}", self.text), ..self }
    }

    fn new(text: String, code: u8) -> Self {
        Self { text, code, recurs: false, reader_gone: false }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<lockstep_config::ConfigError> for Failure {
    fn from(error: lockstep_config::ConfigError) -> Self {
        Self::new(error.to_string(), 2)
    }
}

impl From<lockstep_train::TrainError> for Failure {
    fn from(error: lockstep_train::TrainError) -> Self {
        let code = match (error.is_interrupt(), error.is_request()) {
            (true, _) => INTERRUPTED,
            (false, true) => 2,
            (false, false) => 1,
        };
        Self { recurs: code == 1 && error.recurs(), ..Self::new(error.to_string(), code) }
    }
}

impl From<lockstep_plan::PlanError> for Failure {
    fn from(error: lockstep_plan::PlanError) -> Self {
        Self::new(error.to_string(), if error.is_request() { 2 } else { 1 })
    }
}

impl From<lockstep_sim::SimError> for Failure {
    fn from(error: lockstep_sim::SimError) -> Self {
        let request = matches!(error, lockstep_sim::SimError::File { .. });
        Self::new(error.to_string(), if request { 2 } else { 1 })
    }
}

impl From<lockstep_data::DataError> for Failure {
    fn from(error: lockstep_data::DataError) -> Self {
        Self::new(lockstep_train::TrainError::from(error).to_string(), 2)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        let reader_gone = error.kind() == ErrorKind::BrokenPipe;
        Self { reader_gone, ..Self::new(format!("{error}\nhint: check where the output goes"), 1) }
    }
}

impl From<lockstep_checkpoint::CheckpointError> for Failure {
    fn from(error: lockstep_checkpoint::CheckpointError) -> Self {
        lockstep_train::TrainError::from(error).into()
    }
}

impl From<lockstep_exec::ExecError> for Failure {
    fn from(error: lockstep_exec::ExecError) -> Self {
        lockstep_train::TrainError::from(error).into()
    }
}
