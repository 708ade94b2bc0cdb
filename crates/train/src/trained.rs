//! A trained model on disk: a run directory or one checkpoint.

use crate::data::require_vocabulary;
use crate::{RunData, Tokenizer, TrainError, data_folder};
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

    /// Its tokenizer: the one that was saved with the checkpoint, or else the one beside the run's data. Only where there is
    /// neither does the path that the config names count.
    pub fn tokenizer(&self) -> Result<Tokenizer, TrainError> {
        let config = &self.config;
        let Some(path) = config.tokenizer_path() else { return Tokenizer::of(config) };
        let own = match self.checkpoint.attachment(TOKENIZER) {
            Some(json) => {
                let path = self.checkpoint.path.join(TOKENIZER);
                lockstep_data::Tokenizer::of_json(&path, json.to_vec(), config.data.eos_token.as_deref())?
            }
            None => match RunData::open(config, &self.data) {
                Ok(Some(data)) => data.tokenizer()?,
                _ if path.exists() => return Tokenizer::of(config),
                _ => return Err(TrainError::NoTokenizer { path, checkpoint: self.checkpoint.path.clone() }),
            },
        };
        require_vocabulary(config, own.vocabulary())?;
        Ok(own.into())
    }

    fn find(path: &Path) -> Result<Self, TrainError> {
        let run_config = path.join("run.toml");
        if path.join("manifest.json").exists() {
            let checkpoint = open(path)?;
            let config = config_of(&checkpoint)?;
            // `RUN/checkpoints/step-…`, unless it was moved.
            let run = path.canonicalize().ok().and_then(|p| Some(p.parent()?.parent()?.to_owned()));
            let data = data_of(&config, &checkpoint, &run.unwrap_or_else(|| path.to_owned()));
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
        let data = data_of(&config, &checkpoint, path);
        Ok(Self { config, checkpoint, warnings: found.warnings, data })
    }
}

/// The file of a checkpoint that holds the tokenizer it was trained with, where that is not bytes.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// The folder of a run's data. Shared ones that are not where they were may have moved along with the run.
fn data_of(config: &Config, checkpoint: &Loaded, run: &Path) -> PathBuf {
    let folder = data_folder(config, run);
    match checkpoint.state["prepared"].as_str() {
        Some(way) if !folder.exists() => run.join(way),
        _ => folder,
    }
}

fn config_of(checkpoint: &Loaded) -> Result<Config, TrainError> {
    let manifest = checkpoint.path.join("manifest.json");
    match checkpoint.state["config"].as_str() {
        Some(text) => Ok(Config::parse(text, &manifest.display().to_string(), &[])?),
        None => Err(TrainError::NoConfig { path: manifest }),
    }
}
