//! Options that several commands have, and warnings.

use crate::failure::Result;
use crate::progress::Progress;
use crate::style;
use clap::ValueEnum;
use lockstep_config::{Config, ConfigError, FrozenPrecision};
use lockstep_hub::{Hub, HubProgress};
use lockstep_infer::{HubNeed, HubOpener, Trained};
use lockstep_rundir::TakenFromHub;
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
    /// The config, with its warnings shown, and all that it names on this machine.
    pub fn load(&self) -> Result<Config, ConfigError> {
        let config = self.load_quietly()?;
        warn(config.warnings());
        Ok(config)
    }

    /// As `load`, where another process says what the user should know.
    pub fn load_quietly(&self) -> Result<Config, ConfigError> {
        Ok(self.open(HubNeed::Start, None, Progress::new(0))?.0)
    }

    /// As `load`, for a command that looks at no weights and no data: they are not downloaded.
    pub fn load_description(&self) -> Result<Config, ConfigError> {
        let config = self.load_description_quietly()?;
        warn(config.warnings());
        Ok(config)
    }

    /// The same without the warnings.
    pub fn load_description_quietly(&self) -> Result<Config, ConfigError> {
        Ok(self.open(HubNeed::Description, None, Progress::new(0))?.0)
    }

    /// The config, and what was taken from the hub. Names are at the revisions of the run that was `begun`, if one was.
    pub fn open(
        &self,
        need: HubNeed,
        begun: Option<&Config>,
        mut progress: Progress,
    ) -> Result<(Config, Vec<TakenFromHub>), ConfigError> {
        let mut show = |at: HubProgress<'_>| progress.downloading(at);
        let opener = HubOpener::new(Hub::from_env(), need, &mut show);
        let opener = match begun {
            Some(run) => opener.with_pins_of(run),
            None => opener,
        };
        let config = Config::load_with(&self.config, &self.set, &opener);
        let taken = opener.taken();
        drop(opener);
        progress.clear();
        Ok((config?, taken))
    }

    /// The run directory that was given, or the one that goes with the config's name.
    pub fn run_dir(&self, given: Option<PathBuf>) -> PathBuf {
        given.unwrap_or_else(|| default_run_dir(&self.config))
    }
}

/// What a model is read with.
#[derive(clap::Args)]
pub struct WeightArgs {
    /// What the weights of layers are kept in: what the model was trained with (policy), or one byte each (fp8, int8) with a scale for each row: half the
    /// memory of bf16, and decoding on a GPU that reads half as much. `lockstep eval --weights` says what it costs in bits per byte.
    #[arg(long, value_name = "FORMAT", value_parser = FrozenPrecision::WORDS.to_vec())]
    weights: Option<String>,
}

impl WeightArgs {
    /// Opens a trained model, and says what the user should know of it.
    pub fn open(&self, from: &Path) -> Result<Trained> {
        let mut trained = Trained::open(&model_folder(from)?)?;
        warn(&trained.warnings);
        self.apply(&mut trained.config);
        Ok(trained)
    }

    /// Lays what was asked for over a config.
    pub fn apply(&self, config: &mut Config) {
        keep_weights(config, self.weights.as_deref());
    }
}

/// Lays a format of weights over a config, where one was given.
pub fn keep_weights(config: &mut Config, word: Option<&str>) {
    config.precision.frozen = match word {
        Some("fp8") => FrozenPrecision::Fp8,
        Some("int8") => FrozenPrecision::Int8,
        Some(_) => FrozenPrecision::Policy,
        None => return,
    };
}

/// The folder of a model that a command is given: a path, or a name on the hub, which is downloaded.
pub fn model_folder(from: &Path) -> Result<PathBuf> {
    let mut progress = Progress::new(0);
    let folder = lockstep_infer::model_folder(&Hub::from_env(), from, &mut |at| progress.downloading(at));
    progress.clear();
    Ok(folder?)
}

/// The text that a command is given: paths, or names of datasets on the hub, which are downloaded.
pub fn text_paths(paths: &[PathBuf], extensions: &[String]) -> Result<Vec<PathBuf>> {
    let mut progress = Progress::new(0);
    let found = lockstep_infer::text_paths(&Hub::from_env(), paths, extensions, &mut |at| progress.downloading(at));
    progress.clear();
    Ok(found?)
}

/// Lets the user hear when a bucket is waited for, and when it answers again.
pub fn tell_of_buckets() {
    // Settings that are wrong are told where a bucket is first needed.
    if let Ok(buckets) = lockstep_bucket::Buckets::of_process() {
        buckets.on_wait(|line| warn(&[line.to_owned()]));
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
