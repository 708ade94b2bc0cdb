//! The weights that a new run starts from, where `train.init_from` names some.

use crate::hf::{self, HfFolder, Kept};
use crate::hub::in_cache;
use crate::state::MODEL;
use crate::trained::{TOKENIZER, Trained};
use crate::{InferError, Part, Result, RunTokenizer};
use lockstep_checkpoint::{Loaded, TensorCopy, TensorSource};
use lockstep_config::{Config, ModelConfig, NotInherited};
use lockstep_rundir::RunDirError;
use std::path::{Path, PathBuf};

/// Weights that were found, and fit the model.
#[derive(Debug)]
pub struct InitialWeights {
    /// The folder that the config names.
    pub(crate) path: PathBuf,
    /// What is worth knowing about them.
    pub warnings: Vec<String>,
    origin: Origin,
    copies: Vec<TensorCopy>,
}

/// Where a checkpoint of adapters keeps the fingerprint of the weights beside them.
pub const BASE: &str = "base";

/// Copies of the tensors of a model in a checkpoint of ours.
pub(crate) fn own_copies(model: &ModelConfig) -> Result<Vec<TensorCopy>> {
    let copy = |p: Part| TensorCopy::plain(p.name.clone(), p.name, p.shape);
    Ok(hf::model_parts(model)?.into_iter().map(copy).collect())
}

#[derive(Debug)]
enum Origin {
    Checkpoint(Loaded),
    Folder(HfFolder),
}

impl InitialWeights {
    /// Opens what `train.init_from` names and checks that every tensor of the model is there, in its shape, and no other.
    pub fn open(config: &Config) -> Result<Option<Self>> {
        let Some(path) = config.init_from() else { return Ok(None) };
        if let Some(NotInherited { problem, hint }) = config.init_from_not_found().cloned() {
            return Err(InferError::Unusable { problem, hint });
        }
        Self::at(config, path).map(Some)
    }

    /// Opens those in a folder, for a config.
    fn at(config: &Config, path: PathBuf) -> Result<Self> {
        let model = &config.model;
        let hint = "give [model] the shape of the weights (run.toml in their folder has it), or choose another train.init_from";
        let (origin, copies, theirs, mut warnings);
        if hf::is_foreign(&path) {
            let mut folder = HfFolder::open(&path)?;
            copies = folder.copies(model, hint)?;
            theirs = Config::parse(&folder.config.to_toml(), "config.json", &[])?;
            warnings = folder.warnings();
            warnings.extend(hf::special_warnings(&path)?);
            origin = Origin::Folder(folder);
        } else {
            if Trained::config_at(&path)?.lora.rank.is_some() {
                let problem = format!("train.init_from: {} holds adapters, not the weights of a model", path.display());
                let hint = "merge them first: `lockstep checkpoint export` writes a model to start from".into();
                return Err(InferError::Unusable { problem, hint });
            }
            let Some((config, checkpoint, notes)) = Trained::open(&path)?.into_parts() else {
                return Err(RunDirError::NotTrained { path }.into());
            };
            copies = own_copies(model)?;
            let source = TensorSource::Checkpoint { loaded: &checkpoint, group: MODEL };
            source.check(&copies, hint)?;
            let others = source.names()?.into_iter().filter(|name| !copies.iter().any(|copy| copy.from == *name));
            hf::refuse_others(source.path(), others, hint)?;
            (theirs, warnings) = (config, notes);
            origin = Origin::Checkpoint(checkpoint);
        }
        // Of the same shape, and yet not the same model: a longer context, say, or a mistake.
        let differences = config.differences(&theirs);
        let differences = differences.iter().filter(|d| lockstep_model::hf::matters(model, d.path));
        let made = format!("the weights in {} were made with", path.display());
        warnings.extend(differences.map(|d| format!("{made} {} = {}, the config has {}", d.path, d.theirs, d.ours)));
        Ok(Self { path, warnings, origin, copies })
    }

    /// Those that stand beside the adapters in a checkpoint, if that holds some and they were not drawn: the ones that these were trained with.
    pub fn beside(config: &Config, checkpoint: &Loaded) -> Result<Option<Self>> {
        let Some(path) = config.init_from().filter(|_| config.lora.rank.is_some()) else { return Ok(None) };
        let of = checkpoint.path.display();
        let path = match in_cache(&path)? {
            Ok(folder) => folder.unwrap_or(path),
            Err(name) => {
                let problem = format!(
                    "{name}: the weights that the adapters in {of} were trained with are not in the hub's cache"
                );
                return Err(InferError::Unusable { problem, hint: format!("fetch them: `{}`", name.command()) });
            }
        };
        if !path.exists() {
            let problem =
                format!("{}: the weights that the adapters in {of} were trained with are not there", path.display());
            let hint = "put them back, or name where they are now in train.init_from of the run's run.toml".into();
            return Err(InferError::Unusable { problem, hint });
        }
        let base = Self::at(config, path.clone())?;
        if let Some(known) = checkpoint.state[BASE].as_str()
            && base.fingerprint()? != known
        {
            let problem =
                format!("{}: these are not the weights that the adapters in {of} were trained with", path.display());
            let hint = "put those back; adapters fit no others".into();
            return Err(InferError::Unusable { problem, hint });
        }
        Ok(Some(base))
    }

    /// A number that tells other weights from these: of the first elements of every tensor.
    pub fn fingerprint(&self) -> Result<String> {
        let (source, copies) = self.source();
        Ok(format!("{:016x}", source.fingerprint(copies)?))
    }

    /// Those of a Hugging Face folder that was read.
    pub(crate) fn of_folder(path: &Path, folder: HfFolder, copies: Vec<TensorCopy>) -> Self {
        Self { path: path.to_owned(), warnings: Vec::new(), origin: Origin::Folder(folder), copies }
    }

    /// What came beside them, where that is about the tokens of this tokenizer.
    pub fn kept(&self, tokenizer: &RunTokenizer) -> Result<Kept> {
        Ok(match &self.origin {
            Origin::Checkpoint(loaded) => {
                Kept::of_checkpoint(loaded).with_tokenizer(loaded.attachment(TOKENIZER), tokenizer)
            }
            Origin::Folder(_) => {
                Kept::of_folder(&self.path)?.with_tokenizer(hf::tokenizer_bytes(&self.path)?.as_deref(), tokenizer)
            }
        })
    }

    /// The weights, and what is to be copied of them.
    pub fn source(&self) -> (TensorSource<'_>, &[TensorCopy]) {
        let source = match &self.origin {
            Origin::Checkpoint(loaded) => TensorSource::Checkpoint { loaded, group: MODEL },
            Origin::Folder(folder) => TensorSource::Folder(&folder.weights),
        };
        (source, &self.copies)
    }

    /// The folder, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
