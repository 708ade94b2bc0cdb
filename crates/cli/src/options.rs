//! Options that several commands have, and warnings.

use crate::failure::Result;
use crate::style;
use clap::ValueEnum;
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The config file and what is laid over it.
#[derive(clap::Args)]
pub struct ConfigArgs {
    /// Config file.
    #[arg(value_name = "RUN.TOML")]
    pub config: PathBuf,
    /// Override a key: --set train.steps=100.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

impl ConfigArgs {
    pub fn load(&self) -> Result<lockstep_config::Config, lockstep_config::ConfigError> {
        let config = self.load_quietly()?;
        warn(config.warnings());
        Ok(config)
    }

    /// As `load`, where another process says what the user should know.
    pub fn load_quietly(&self) -> Result<lockstep_config::Config, lockstep_config::ConfigError> {
        lockstep_config::Config::load_with(&self.config, &self.set, &lockstep_infer::inherited)
    }

    /// The run directory that was given, or the one that goes with the config's name.
    pub fn run_dir(&self, given: Option<PathBuf>) -> PathBuf {
        given.unwrap_or_else(|| default_run_dir(&self.config))
    }
}

/// Says on stderr what the user should know of a config.
pub fn warn(warnings: &[String]) {
    for warning in warnings {
        // Where nobody listens, nobody is warned.
        let _ = writeln!(std::io::stderr(), "{}", style::message(&format!("warning: {warning}")));
    }
}

/// How a result is printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// For programs: stable field names.
    Json,
}

impl Format {
    /// Prints a result in this form.
    pub fn print(self, json: impl FnOnce() -> Value, text: impl FnOnce() -> String) -> Result<()> {
        let text = match self {
            Format::Text => text(),
            Format::Json => format!("{:#}\n", json()),
        };
        Ok(write!(std::io::stdout(), "{text}")?)
    }
}

/// `runs/` and the name of the config.
pub fn default_run_dir(config: &Path) -> PathBuf {
    PathBuf::from("runs").join(config.file_stem().unwrap_or("run".as_ref()))
}
