//! A trained model on disk: a run directory, one checkpoint, or a Hugging Face folder.

use crate::chat::{beside_tokenizer, chat_of_files};
use crate::hf::{self, FolderModel, Kept, unfit};
use crate::initial::{InitialWeights, own_copies};
use crate::state::MODEL;
use crate::text::{require_vocabulary, with_tokens_of};
use crate::{InferError, Result, RunData, RunTokenizer, Weights, data_folder};
use lockstep_checkpoint::{Loaded, TensorCopy, TensorSource, latest, open};
use lockstep_config::{Config, DataFormat, DeviceChoice};
use lockstep_data::{Chat, ChatSpec, TokenizerSpec};
use lockstep_rundir::{RunDirError, read_config};
use std::path::{Path, PathBuf};

/// Weights, with the config that they were trained with.
#[derive(Debug)]
pub struct Trained {
    /// The config of its run.
    pub config: Config,
    model: Model,
    /// What was passed over to find it.
    pub warnings: Vec<String>,
    /// Folder of the run's prepared data, where it is known.
    pub data: PathBuf,
}

/// Where the weights are.
#[derive(Debug)]
enum Model {
    Checkpoint(Box<Loaded>),
    /// Adapters, and the weights that they stand beside, where those were not drawn.
    Adapters(Box<Loaded>, Option<Box<InitialWeights>>),
    Folder(Box<InitialWeights>),
}

impl Trained {
    /// Opens the latest whole checkpoint of a run directory, the checkpoint in a folder, or a Hugging Face model as it is.
    pub fn open(path: &Path) -> Result<Self> {
        let mut trained = Self::find(path)?;
        // What a GPU has trained, any machine can use.
        if trained.config.train.device == DeviceChoice::Cuda {
            trained.config.train.device = DeviceChoice::Auto;
        }
        Ok(trained)
    }

    /// The weights, for a program of the model.
    pub fn weights(&self) -> Weights<'_> {
        match &self.model {
            Model::Checkpoint(checkpoint) => Weights::Checkpoint(checkpoint),
            Model::Adapters(checkpoint, base) => {
                Weights::Adapters { checkpoint, base: base.as_ref().map(|base| base.source()) }
            }
            Model::Folder(weights) => Weights::Copies(weights.source()),
        }
    }

    /// The folder of the weights.
    pub fn path(&self) -> &Path {
        match &self.model {
            Model::Checkpoint(checkpoint) | Model::Adapters(checkpoint, _) => &checkpoint.path,
            Model::Folder(weights) => weights.path(),
        }
    }

    /// Steps that it was trained for; 0 for a model of others.
    pub fn step(&self) -> u64 {
        self.checkpoint().map_or(0, |checkpoint| checkpoint.step)
    }

    /// The checkpoint, unless it is a Hugging Face folder.
    pub fn checkpoint(&self) -> Option<&Loaded> {
        match &self.model {
            Model::Checkpoint(checkpoint) | Model::Adapters(checkpoint, _) => Some(checkpoint),
            Model::Folder(_) => None,
        }
    }

    /// The same, with the config and the warnings.
    pub fn into_parts(self) -> Option<(Config, Loaded, Vec<String>)> {
        match self.model {
            Model::Checkpoint(checkpoint) => Some((self.config, *checkpoint, self.warnings)),
            Model::Adapters(..) | Model::Folder(_) => None,
        }
    }

    /// Where the tensors of the model are, without adapters, and how they are copied from there to those of ours.
    pub(crate) fn model_source(&self) -> Result<(TensorSource<'_>, Vec<TensorCopy>)> {
        match &self.model {
            Model::Checkpoint(loaded) => {
                let copies = own_copies(&self.config.model)?;
                Ok((TensorSource::Checkpoint { loaded, group: MODEL }, copies))
            }
            Model::Adapters(_, Some(base)) | Model::Folder(base) => {
                let (source, copies) = base.source();
                Ok((source, copies.to_vec()))
            }
            Model::Adapters(checkpoint, None) => {
                let problem =
                    format!("{}: the weights beside its adapters were drawn, not trained", checkpoint.path.display());
                let hint =
                    "name the weights in train.init_from before training adapters; those alone can be exported".into();
                Err(InferError::Unusable { problem, hint })
            }
        }
    }

    /// What came beside the weights of the Hugging Face model that it is, or was made from.
    pub fn kept(&self) -> Result<Kept> {
        match &self.model {
            Model::Checkpoint(checkpoint) | Model::Adapters(checkpoint, _) => Ok(Kept::of_checkpoint(checkpoint)),
            Model::Folder(weights) => Kept::of_folder(weights.path()),
        }
    }

    /// Tokens that end a text: the EOS token of its tokenizer, and those that a Hugging Face model names.
    pub fn end_tokens(&self, tokenizer: &RunTokenizer) -> Result<Vec<u32>> {
        let mut tokens = self.kept()?.end_tokens();
        if !tokens.contains(&tokenizer.eos()) {
            tokens.push(tokenizer.eos());
        }
        Ok(tokens)
    }

    /// Its tokenizer: the one that was saved with the checkpoint, or else the one beside the run's data. Only where there is
    /// neither does the path that the config names count.
    pub fn tokenizer(&self) -> Result<RunTokenizer> {
        let config = &self.config;
        let Some(path) = config.tokenizer_path() else {
            if let Model::Folder(weights) = &self.model {
                let hint = "fetch the tokenizer.json of the model too";
                return Err(unfit(weights.path(), "no tokenizer.json".into(), hint.into()).into());
            }
            return RunTokenizer::of(config);
        };
        let Some(checkpoint) = self.checkpoint() else { return RunTokenizer::of(config) };
        let own = match checkpoint.attachment(TOKENIZER) {
            Some(json) => {
                let path = checkpoint.path.join(TOKENIZER);
                let spec = with_tokens_of(config, TokenizerSpec::of_json(&path, json));
                lockstep_data::Tokenizer::of_json(&spec, json.to_vec())?
            }
            None => match RunData::open(config, &self.data) {
                Ok(Some(data)) => data.tokenizer()?,
                _ if path.exists() => return RunTokenizer::of(config),
                _ => {
                    let (path, of) = (path.display(), checkpoint.path.display());
                    let problem = format!("{path}: the tokenizer of {of} is not there any more");
                    let hint = "put it back; checkpoints that this version saves hold their own".into();
                    return Err(InferError::Unusable { problem, hint });
                }
            },
        };
        require_vocabulary(config, own.vocabulary())?;
        Ok(own.into())
    }

    /// How its conversations become text: as in its training, or as the files of a Hugging Face model say. None where nothing says it.
    pub(crate) fn chat_spec(&self) -> Result<Option<ChatSpec>> {
        let config = &self.config;
        if config.data.format == DataFormat::Chat
            && let Ok(Some(data)) = RunData::open(config, &self.data)
            && let Some(chat) = data.chat()
        {
            // As of today, where the template asks.
            return Ok(Some(chat.clone().as_of_today()));
        }
        if let Some(chat) = chat_of_files(config, self.path(), &self.kept()?) {
            return Ok(Some(chat));
        }
        let tokenizer = config.tokenizer_path().filter(|path| path.exists());
        match config.chat_template_path().or(tokenizer) {
            Some(_) => beside_tokenizer(config),
            None => Ok(None),
        }
    }

    /// What makes tokens of a conversation with it.
    pub fn chat(&self, tokenizer: &RunTokenizer) -> Result<Chat> {
        let Some(spec) = self.chat_spec()? else {
            let problem = format!("{}: it has no chat template", self.path().display());
            let hint =
                "train with data.format = \"chat\", or put chat_template.jinja into the folder of the model".into();
            return Err(InferError::Unusable { problem, hint });
        };
        Ok(Chat::open(&spec, tokenizer)?)
    }

    /// The config of a run directory or a checkpoint, without a look at the weights where `run.toml` has it.
    pub fn config_at(path: &Path) -> Result<Config> {
        let runs = [Some(path), path.parent().and_then(Path::parent).filter(|_| path.join("manifest.json").exists())];
        match runs.into_iter().flatten().map(|run| run.join("run.toml")).find(|file| file.exists()) {
            Some(file) => Ok(read_config(&file)?),
            None => Ok(Self::find(path)?.config),
        }
    }

    fn find(path: &Path) -> Result<Self> {
        let run_config = path.join("run.toml");
        if path.join("manifest.json").exists() {
            let checkpoint = open(path)?;
            let config = config_of(&checkpoint)?;
            // `RUN/checkpoints/step-…`, unless it was moved.
            let run = path.canonicalize().ok().and_then(|p| Some(p.parent()?.parent()?.to_owned()));
            let data = data_of(&config, &checkpoint, &run.unwrap_or_else(|| path.to_owned()));
            let model = Model::of(checkpoint, &config)?;
            return Ok(Self { config, model, warnings: Vec::new(), data });
        }
        if hf::is_foreign(path) {
            let FolderModel { folder, copies, text, warnings } = hf::read_folder(path)?;
            let config = Config::parse(&text, &path.join(hf::CONFIG).display().to_string(), &[])?;
            let model = Model::Folder(InitialWeights::of_folder(path, folder, copies).into());
            return Ok(Self { config, model, warnings, data: path.to_owned() });
        }
        if !run_config.exists() && !path.join("checkpoints").exists() {
            return Err(RunDirError::NotTrained { path: path.to_owned() }.into());
        }
        let found = latest(&path.join("checkpoints"))?;
        let Some(checkpoint) = found.loaded else {
            let problem = format!("{} has no checkpoint yet", path.display());
            let hint = "train it first, or wait: one is saved every checkpoint.every steps".into();
            return Err(InferError::Unusable { problem, hint });
        };
        let config = if run_config.exists() { read_config(&run_config)? } else { config_of(&checkpoint)? };
        let data = data_of(&config, &checkpoint, path);
        let model = Model::of(checkpoint, &config)?;
        Ok(Self { config, model, warnings: found.warnings, data })
    }
}

impl Model {
    /// What a checkpoint holds, with the weights beside it where it holds adapters.
    fn of(checkpoint: Loaded, config: &Config) -> Result<Self> {
        if config.lora.rank.is_none() {
            return Ok(Model::Checkpoint(checkpoint.into()));
        }
        let base = InitialWeights::beside(config, &checkpoint)?;
        Ok(Model::Adapters(checkpoint.into(), base.map(Box::new)))
    }
}

/// The file of a checkpoint that holds the tokenizer it was trained with, where that is not bytes.
pub const TOKENIZER: &str = "tokenizer.json";

/// The folder of a run's data. Shared ones that are not where they were may have moved along with the run.
fn data_of(config: &Config, checkpoint: &Loaded, run: &Path) -> PathBuf {
    let folder = data_folder(config, run);
    match checkpoint.state["prepared"].as_str() {
        Some(way) if !folder.exists() => run.join(way),
        _ => folder,
    }
}

fn config_of(checkpoint: &Loaded) -> Result<Config> {
    let manifest = checkpoint.path.join("manifest.json").display().to_string();
    let Some(text) = checkpoint.state["config"].as_str() else {
        let hint = "name the run directory instead of the checkpoint".into();
        return Err(InferError::Unusable { problem: format!("{manifest} holds no config"), hint });
    };
    Ok(Config::parse(text, &manifest, &[])?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_data::{PrepareSpec, prepare};
    use lockstep_ir::Hint;
    use serde_json::json;
    use std::fs;

    #[test]
    fn a_checkpoint_that_holds_no_tokenizer_uses_the_one_beside_the_data() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/fixtures/tokenizer.json");
        fs::copy(fixture, path(TOKENIZER)).unwrap();
        fs::write(path("text.txt"), "a short text, but long enough\n".repeat(50)).unwrap();
        let tokenizer = TokenizerSpec::file(&path(TOKENIZER), None).unwrap();
        let spec = PrepareSpec { paths: vec![path("text.txt")], tokenizer, ..PrepareSpec::default() };
        prepare(&spec, &path("run/data"), &mut |_| ()).unwrap();
        let config = format!(
            "[model]\nvocab_size = 1000\nlayers = 1\ndim = 16\nheads = 2\nffn = 32\n[data]\npaths = [\"text.txt\"]\ntokenizer = {:?}\n",
            path(TOKENIZER)
        );
        let state = json!({ "config": config });
        lockstep_checkpoint::save(&path("run/checkpoints"), 1, &[], &state, 1, &mut |_, _| {}).unwrap();
        let trained = Trained::open(&path("run")).unwrap();
        let before = trained.tokenizer().unwrap().tokens("a short text").unwrap();
        fs::remove_file(path(TOKENIZER)).unwrap();
        assert_eq!(trained.tokenizer().unwrap().tokens("a short text").unwrap(), before);
        fs::remove_dir_all(path("run/data")).unwrap();
        let error = trained.tokenizer().unwrap_err().with_hint();
        assert!(error.contains("is not there any more\nhint: put it back"), "{error}");
    }

    #[test]
    fn a_chat_template_that_cannot_be_read_is_not_taken_for_none() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/fixtures/tokenizer.json");
        fs::copy(fixture, path(TOKENIZER)).unwrap();
        let config = format!(
            "[model]\nvocab_size = 1000\nlayers = 1\ndim = 16\nheads = 2\nffn = 32\n\
             [data]\nformat = \"chat\"\npaths = [\"chats.jsonl\"]\ntokenizer = {:?}\nchat_template = {:?}\neos_token = \"e\"\n",
            path(TOKENIZER),
            path("chat.jinja")
        );
        let state = json!({ "config": config });
        lockstep_checkpoint::save(&path("run/checkpoints"), 1, &[], &state, 1, &mut |_, _| {}).unwrap();
        let trained = Trained::open(&path("run")).unwrap();
        let error = trained.chat_spec().unwrap_err().with_hint();
        assert!(error.starts_with(&format!("{}: cannot be read", path("chat.jinja").display())), "{error}");
        fs::write(path("chat.jinja"), "{{ messages }}").unwrap();
        // What the config names counts, whatever the files beside the tokenizer say.
        let beside = json!({ "eos_token": "a", "pad_token": { "content": "p" } });
        fs::write(path("tokenizer_config.json"), beside.to_string()).unwrap();
        let spec = trained.chat_spec().unwrap().unwrap();
        assert_eq!(spec.template, "{{ messages }}");
        assert_eq!(spec.tokens, [("eos_token", "e"), ("pad_token", "p")].map(|(k, v)| (k.into(), v.into())).into());
        fs::write(path(hf::ATTACHMENT), "[]").unwrap();
        let error = trained.chat_spec().unwrap_err().with_hint();
        assert!(error.contains("hugging_face.json: not the files of a Hugging Face model: "), "{error}");
    }
}
