//! From the keys of `[data]` to prepared corpora: which there are, which are taken as they are, which are made.

use super::{RunCorpus, RunData, data_folder, limit_buckets};
use crate::chat::{chat_spec, train_on};
use crate::text::{require_vocabulary, tokenizer_spec, with_tokens_of};
use crate::{InferError, Result};
use lockstep_bucket::is_address;
use lockstep_checkpoint::list;
use lockstep_config::{Config, DataFormat};
use lockstep_data::{
    ChatSpec, DataError, PrepareOptions, PrepareSpec, Prepared, Progress, Survey, Tokenizer, TokenizerSpec, is_current,
    is_same_text, prepare_with, survey, token_files,
};
use lockstep_rundir::RunDir;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Which data that are there [`RunData::prepare`] takes as they are; others are prepared anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Any, whatever the config says now: a run goes on with the data it began with.
    Keep,
    /// Those that were prepared with the same settings.
    Reuse,
    /// Those whose text is what the config names now, wherever it is.
    Refresh,
}

/// Prepares the data of a run before it starts, in `out` or where the run will look for them. Gives the folder too.
///
/// A run directory is locked meanwhile, and a run that has checkpoints keeps its data. `stop` ends it with
/// [`DataError::Interrupted`].
pub fn prepare_data(
    config: &Config,
    run_dir: &Path,
    out: Option<&Path>,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(&str, Progress),
) -> Result<(RunData, PathBuf)> {
    let folder = out.map_or_else(|| data_folder(config, run_dir), Path::to_owned);
    if out.is_some() || config.prepared_dir().is_some() {
        return Ok((RunData::prepare(config, &folder, Existing::Refresh, stop, progress)?, folder));
    }
    config.require_data()?;
    let dir = RunDir::open(run_dir)?;
    let started = list(&dir.checkpoints()).is_ok_and(|found| !found.is_empty());
    let existing = if started { Existing::Keep } else { Existing::Refresh };
    Ok((RunData::prepare(config, &folder, existing, stop, progress)?, folder))
}

/// What is to be prepared for one corpus, and where.
struct Wanted {
    name: String,
    weight: f64,
    schedule: Vec<(u64, f64)>,
    spec: PrepareSpec,
    folder: PathBuf,
}

impl Wanted {
    /// The corpus, with its tokens.
    fn with(self, data: Prepared) -> RunCorpus {
        RunCorpus { name: self.name, weight: self.weight, schedule: self.schedule, data }
    }
}

impl RunData {
    /// Opens the corpora under `folder`, preparing those that are not there.
    ///
    /// `data.paths` are prepared in the folder itself, each of `data.corpora` in a folder of its own inside. Progress
    /// comes with the name of the corpus. `stop` ends it with [`DataError::Interrupted`].
    pub fn prepare(
        config: &Config,
        folder: &Path,
        existing: Existing,
        stop: &AtomicBool,
        progress: &mut dyn FnMut(&str, Progress),
    ) -> Result<Self> {
        config.require_data()?;
        limit_buckets(config)?;
        if existing == Existing::Keep
            && let Some(data) = RunData::open(config, folder)?
        {
            require_vocabulary(config, data.vocabulary())?;
            return Ok(data);
        }
        if let Some(data) = shared_without_source(config, folder, stop)? {
            require_vocabulary(config, data.vocabulary())?;
            return Ok(data);
        }
        let tokenizer = tokenizer_spec(config)?;
        // Before an hour of work, not after it.
        require_vocabulary(config, Tokenizer::open(&tokenizer)?.vocabulary())?;
        let mut options = PrepareOptions { stop, adopt: true, ..PrepareOptions::default() };
        if config.train.threads > 0 {
            options.threads = config.train.threads;
        }
        let shared = config.prepared_dir().is_some_and(|shared| shared == folder);
        let chat = chat_spec(config)?;
        let mut corpora = Vec::new();
        for wanted in wanted(config, folder, &tokenizer, chat.as_ref()) {
            let (spec, folder) = (&wanted.spec, &wanted.folder);
            if let Some(data) = in_place(config, spec)? {
                corpora.push(wanted.with(data));
                continue;
            }
            let found = match Prepared::open(folder)? {
                Some(data) if existing == Existing::Refresh => match is_current(spec, &data, stop)? {
                    true => Some(data),
                    // Text that has changed where it is takes its own place; nothing else does.
                    false if shared && !is_from(spec, &data) => return Err(shared_data(folder)),
                    false => None,
                },
                found => found.filter(|data| is_from(spec, data)),
            };
            let data = match found {
                Some(data) => data,
                None if is_address(folder) => return Err(DataError::NothingPrepared { path: folder.clone() }.into()),
                None => prepare_with(spec, folder, &options, &mut |at| progress(&wanted.name, at))?,
            };
            corpora.push(wanted.with(data));
        }
        Ok(RunData { corpora })
    }

    /// What [`RunData::prepare`] would find: the corpora under `folder` where all are there and would be taken as they are;
    /// else the text that would be prepared. Writes nothing.
    pub fn look(config: &Config, folder: &Path, existing: Existing, stop: &AtomicBool) -> Result<Result<Self, Survey>> {
        config.require_data()?;
        limit_buckets(config)?;
        let open = RunData::open(config, folder)?;
        if let (Existing::Keep, Some(data)) = (existing, open) {
            return Ok(Ok(data));
        }
        if let Some(data) = shared_without_source(config, folder, stop)? {
            require_vocabulary(config, data.vocabulary())?;
            return Ok(Ok(data));
        }
        let tokenizer = tokenizer_spec(config)?;
        require_vocabulary(config, Tokenizer::open(&tokenizer)?.vocabulary())?;
        let (mut text, mut corpora) = (Survey { files: 0, bytes: 0 }, Vec::new());
        let chat = chat_spec(config)?;
        for wanted in wanted(config, folder, &tokenizer, chat.as_ref()) {
            let (spec, folder) = (&wanted.spec, &wanted.folder);
            if let Some(data) = in_place(config, spec)? {
                corpora.push(wanted.with(data));
                continue;
            }
            let Survey { files, bytes } = survey(spec, folder, stop)?;
            text = Survey { files: text.files + files, bytes: text.bytes + bytes };
            if let Some(data) = Prepared::open(folder)?
                && is_current(spec, &data, stop)?
            {
                corpora.push(wanted.with(data));
            }
        }
        let all = corpora.len() == config.data.corpora.len().max(1);
        Ok(if all { Ok(RunData { corpora }) } else { Err(text) })
    }

    /// What is to be prepared for each corpus.
    pub fn specs(config: &Config, tokenizer: &TokenizerSpec) -> Result<Vec<PrepareSpec>> {
        let wanted = wanted(config, Path::new(""), tokenizer, chat_spec(config)?.as_ref());
        Ok(wanted.into_iter().map(|wanted| wanted.spec).collect())
    }

    /// Opens the corpora under `folder`; none where one of them is not prepared.
    pub fn open(config: &Config, folder: &Path) -> Result<Option<Self>, DataError> {
        limit_buckets(config)?;
        let mut corpora = Vec::new();
        for wanted in wanted(config, folder, &TokenizerSpec::Bytes, None) {
            let data = match token_files(&wanted.spec)? {
                Some(_) => {
                    in_place(config, &PrepareSpec { tokenizer: tokenizer_spec(config)?, ..wanted.spec.clone() })?
                }
                None => Prepared::open(&wanted.folder)?,
            };
            let Some(data) = data else { return Ok(None) };
            corpora.push(wanted.with(data));
        }
        Ok(Some(RunData { corpora }).filter(|data| !data.corpora.is_empty()))
    }

    /// Refuses data that were prepared from other text or in another way than the config says now. The text is known by its
    /// content, so it may have moved; of text that is gone, a warning is all there is to say.
    pub fn refuse_other_text(
        &self,
        config: &Config,
        folder: &Path,
        stop: &AtomicBool,
        warn: &mut dyn FnMut(&str),
    ) -> Result<()> {
        for (corpus, Wanted { spec, folder, .. }) in
            self.corpora.iter().zip(wanted(config, folder, &TokenizerSpec::Bytes, None))
        {
            // What is read in place is known by its fingerprint, which checkpoints have.
            if corpus.data.is_in_place() {
                continue;
            }
            let before = corpus.data.spec();
            let (ours, theirs) = (settings(&spec), settings(before));
            if ours == theirs {
                continue;
            }
            // The data keep their tokenizer and its template; the files that these came from may be gone.
            let spec = PrepareSpec { tokenizer: before.tokenizer.clone(), chat: before.chat.clone(), ..spec };
            let same = match is_same_text(&spec, &corpus.data, stop) {
                Err(DataError::MissingPath { path }) => {
                    warn(&format!(
                        "{}: no such file or folder; the run goes on with the text that it was begun with, in {}",
                        path.display(),
                        folder.display()
                    ));
                    true
                }
                same => same?,
            };
            if !same || !spec.reads_alike(before) {
                return Err(InferError::OtherData { dir: folder, before: theirs, now: ours });
            }
        }
        Ok(())
    }
}

/// Prepared data in `data.prepared` whose text or tokenizer is gone: they hold all that a run needs. Whatever is left of both must
/// be what they were made of. None where nothing is gone, or nothing was prepared.
fn shared_without_source(config: &Config, folder: &Path, stop: &AtomicBool) -> Result<Option<RunData>> {
    // A bucket that cannot be reached is no text that is gone.
    let lacks_text = |spec: &PrepareSpec| spec.paths.iter().any(|path| !is_address(path) && !path.exists());
    let lacks_tokenizer = config.tokenizer_path().is_some_and(|path| !path.exists());
    let wanted = wanted(config, folder, &TokenizerSpec::Bytes, None);
    let is_shared = config.prepared_dir().is_some_and(|shared| shared == folder);
    if !is_shared || !(lacks_tokenizer || wanted.iter().any(|wanted| lacks_text(&wanted.spec))) {
        return Ok(None);
    }
    for wanted in &wanted {
        // Megatron's tokens are read where they are, and nothing was prepared of them.
        if token_files(&wanted.spec)?.is_some() {
            return Ok(None);
        }
    }
    let Some(data) = RunData::open(config, folder)? else { return Ok(None) };
    let tokenizer = if lacks_tokenizer { None } else { Some(tokenizer_spec(config)?) };
    let chat = if lacks_tokenizer { None } else { chat_spec(config)? };
    for (corpus, Wanted { spec, folder, .. }) in data.corpora.iter().zip(wanted) {
        let then = corpus.data.spec();
        let own = || with_tokens_of(config, then.tokenizer.clone());
        let own_chat = || {
            let chat = then.chat.clone().filter(|_| lacks_tokenizer && config.data.format == DataFormat::Chat)?;
            Some(ChatSpec { train_on: train_on(config), ..chat })
        };
        let chat = chat.clone().or_else(own_chat);
        let spec = PrepareSpec { tokenizer: tokenizer.clone().unwrap_or_else(own), chat, ..spec };
        let other_kind = lacks_tokenizer && then.tokenizer == TokenizerSpec::Bytes;
        let same = !other_kind && spec.reads_alike(then);
        if !same || !(lacks_text(&spec) || is_same_text(&spec, &corpus.data, stop)?) {
            return Err(shared_data(&folder));
        }
    }
    Ok(Some(data))
}

/// A shared folder holds other data than the config asks for.
fn shared_data(dir: &Path) -> InferError {
    InferError::Unusable {
        problem: format!("{} holds data that were prepared with other settings", dir.display()),
        hint: "choose another data.prepared, or delete the folder if nothing else uses it".into(),
    }
}

/// Megatron's files, where a spec names such: they are read where they are.
fn in_place(config: &Config, spec: &PrepareSpec) -> Result<Option<Prepared>, DataError> {
    let Some(files) = token_files(spec)? else { return Ok(None) };
    match (&config.data.prompt_field, config.data.format) {
        (None, DataFormat::Text) => Prepared::in_place(spec, &files).map(Some),
        (Some(field), _) => Err(DataError::Source {
            path: files[0].clone(),
            problem: format!("data.prompt_field names the field {field:?}, and tokens have no fields"),
            hint: "remove data.prompt_field, or name the text instead of its tokens in data.paths".into(),
        }),
        (None, DataFormat::Chat) => Err(DataError::Source {
            path: files[0].clone(),
            problem: "data.format = \"chat\" reads conversations, and these are tokens already".to_owned(),
            hint: "remove data.format, or name JSON lines or Parquet files with messages in data.paths".into(),
        }),
    }
}

/// Whether data were prepared from these paths, in this way.
fn is_from(spec: &PrepareSpec, data: &Prepared) -> bool {
    let (now, then) = (spec, data.spec());
    now.reads_alike(then) && now.paths == then.paths && now.extensions == then.extensions
}

/// What decides which text is read, for comparison: paths without `.` and `..`, extensions, field.
fn settings(spec: &PrepareSpec) -> String {
    let plain = |path: &PathBuf| {
        if is_address(path) {
            return path.display().to_string();
        }
        let whole = std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let mut plain = PathBuf::new();
        for part in whole.components() {
            match part {
                Component::ParentDir => {
                    plain.pop();
                }
                Component::CurDir => {}
                part => plain.push(part),
            }
        }
        plain.display().to_string()
    };
    let paths: Vec<String> = spec.paths.iter().map(plain).collect();
    let prompt = spec.prompt_field.as_ref().map_or(String::new(), |field| format!("; prompt {field}"));
    format!("{} (extensions {}; field {}{prompt})", paths.join(", "), spec.extensions.join(" "), spec.text_field)
}

fn wanted(config: &Config, folder: &Path, tokenizer: &TokenizerSpec, chat: Option<&ChatSpec>) -> Vec<Wanted> {
    let spec = |paths: Vec<PathBuf>| PrepareSpec {
        paths,
        extensions: config.data.extensions.clone(),
        text_field: config.data.text_field.clone(),
        prompt_field: config.data.prompt_field.clone(),
        chat: chat.cloned(),
        tokenizer: tokenizer.clone(),
        validation_fraction: config.data.validation_fraction,
        seed: config.train.seed,
    };
    if config.data.corpora.is_empty() {
        let spec = spec(config.data_paths());
        return vec![Wanted {
            name: String::new(),
            weight: 1.0,
            schedule: Vec::new(),
            spec,
            folder: folder.to_owned(),
        }];
    }
    let corpora = config.corpora().into_iter();
    let wanted = corpora.map(|corpus| Wanted {
        folder: folder.join(&corpus.name),
        spec: spec(corpus.paths.into_iter().map(PathBuf::from).collect()),
        weight: corpus.weight,
        schedule: corpus.schedule.iter().map(|later| (later.tokens, later.weight)).collect(),
        name: corpus.name,
    });
    wanted.collect()
}
