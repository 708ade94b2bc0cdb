//! How a command ends when it does not succeed.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

/// What to print, and whose fault it was.
#[derive(Debug)]
pub struct Failure {
    text: String,
    request: bool,
    reader_gone: bool,
}

impl Failure {
    /// A request that cannot be meant; `text` ends with a hint.
    pub fn request(text: String) -> Self {
        Self::new(text, true)
    }

    /// A run that has failed; `text` ends with a hint.
    pub fn run(text: String) -> Self {
        Self::new(text, false)
    }

    /// Prints the error and gives the exit code: 2 where the request was wrong, 1 where the run failed, 0 where whoever read
    /// our output has had enough.
    pub fn report(&self) -> ExitCode {
        if self.reader_gone {
            return ExitCode::SUCCESS;
        }
        // Where nobody listens any more, the exit code still tells.
        let _ = writeln!(std::io::stderr(), "{}", crate::style::message(&format!("error: {}", self.text)));
        ExitCode::from(if self.request { 2 } else { 1 })
    }

    fn new(text: String, request: bool) -> Self {
        Self { text, request, reader_gone: false }
    }
}

impl From<lockstep_config::ConfigError> for Failure {
    fn from(error: lockstep_config::ConfigError) -> Self {
        Self::new(error.to_string(), true)
    }
}

impl From<lockstep_train::TrainError> for Failure {
    fn from(error: lockstep_train::TrainError) -> Self {
        Self::new(error.to_string(), error.is_request())
    }
}

impl From<lockstep_data::DataError> for Failure {
    fn from(error: lockstep_data::DataError) -> Self {
        Self::new(error.to_string(), true)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        let reader_gone = error.kind() == ErrorKind::BrokenPipe;
        Self { reader_gone, ..Self::new(format!("{error}\nhint: check where the output goes"), false) }
    }
}

impl From<lockstep_exec::ExecError> for Failure {
    fn from(error: lockstep_exec::ExecError) -> Self {
        Self::new(error.to_string(), false)
    }
}
