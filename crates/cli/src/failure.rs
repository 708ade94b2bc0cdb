//! How a command ends when it does not succeed.

use std::process::ExitCode;

/// What to print, and whose fault it was.
#[derive(Debug)]
pub struct Failure {
    text: String,
    request: bool,
}

impl Failure {
    /// The request was wrong; the text ends with a hint.
    pub fn request(text: String) -> Self {
        Self { text, request: true }
    }

    /// Prints the error and gives the exit code: 2 where the request was wrong, 1 where the run failed.
    pub fn report(&self) -> ExitCode {
        eprintln!("error: {}", self.text);
        ExitCode::from(if self.request { 2 } else { 1 })
    }
}

impl From<lockstep_config::ConfigError> for Failure {
    fn from(error: lockstep_config::ConfigError) -> Self {
        Self { text: error.to_string(), request: true }
    }
}

impl From<lockstep_train::TrainError> for Failure {
    fn from(error: lockstep_train::TrainError) -> Self {
        Self { request: error.is_request(), text: error.to_string() }
    }
}

impl From<lockstep_data::DataError> for Failure {
    fn from(error: lockstep_data::DataError) -> Self {
        Self { text: error.to_string(), request: true }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self { text: format!("{error}\nhint: check where the output goes"), request: false }
    }
}
