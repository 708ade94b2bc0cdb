//! A trained model on disk: a run directory or one checkpoint.

use crate::{TrainError, data_folder};
use lockstep_checkpoint::{Loaded, latest, open};
use lockstep_config::Config;
use std::path::{Path, PathBuf};

/// A checkpoint, with the config that it was trained with.
#[derive(Debug)]
pub struct Trained {
    /// The config of its run.
    pub config: Config,
    /// The checkpoint.
    pub checkpoint: Loaded,
    /// What was passed over to find it.
    pub warnings: Vec<String>,
    /// Folder of the run's prepared data, where it is known.
    pub(crate) data: PathBuf,
}

impl Trained {
    /// Opens the latest whole checkpoint of a run directory, or the checkpoint in a folder.
    pub fn open(path: &Path) -> Result<Self, TrainError> {
        let mut trained = Self::find(path)?;
        // What a GPU has trained, any machine can use.
        if trained.config.train.device == "cuda" {
            trained.config.train.device = "auto".into();
        }
        Ok(trained)
    }

    fn find(path: &Path) -> Result<Self, TrainError> {
        let run_config = path.join("run.toml");
        if path.join("manifest.json").exists() {
            let checkpoint = open(path)?;
            let config = config_of(&checkpoint)?;
            // `RUN/checkpoints/step-…`, unless it was moved.
            let run = path.canonicalize().ok().and_then(|p| Some(p.parent()?.parent()?.to_owned()));
            let data = data_folder(&config, &run.unwrap_or_else(|| path.to_owned()));
            return Ok(Self { config, checkpoint, warnings: Vec::new(), data });
        }
        if !run_config.exists() && !path.join("checkpoints").exists() {
            return Err(TrainError::NotTrained { path: path.to_owned() });
        }
        let found = latest(&path.join("checkpoints"))?;
        let Some(checkpoint) = found.loaded else { return Err(TrainError::NoCheckpoint { dir: path.to_owned() }) };
        let config = match run_config.exists() {
            true => Config::load(&run_config, &[])?,
            false => config_of(&checkpoint)?,
        };
        let data = data_folder(&config, path);
        Ok(Self { config, checkpoint, warnings: found.warnings, data })
    }
}

fn config_of(checkpoint: &Loaded) -> Result<Config, TrainError> {
    let manifest = checkpoint.path.join("manifest.json");
    match checkpoint.state["config"].as_str() {
        Some(text) => Ok(Config::parse(text, &manifest.display().to_string(), &[])?),
        None => Err(TrainError::NoConfig { path: manifest }),
    }
}
