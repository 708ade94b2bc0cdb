//! The data of a run: from the keys of `[data]` to prepared corpora and their samplers.

use crate::InferError;
use crate::text::{require_vocabulary, tokenizer_spec};
use lockstep_checkpoint::list;
use lockstep_config::Config;
use lockstep_data::{
    Corpus, DataError, PrepareOptions, PrepareSpec, Prepared, Progress, Sampler, SpecialInText, Survey, TokenStream,
    Tokenizer, TokenizerSpec, is_current, is_same_text, prepare_with, survey, token_files,
};
use lockstep_rundir::RunDir;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The prepared corpora of a run, in the order of the config.
#[derive(Debug)]
pub struct RunData {
    corpora: Vec<RunCorpus>,
}

/// One corpus of a run.
#[derive(Debug)]
pub struct RunCorpus {
    /// Its name; empty where `data.paths` is the only one.
    pub name: String,
    /// Its share of the samples, relative to the others'.
    pub weight: f64,
    /// Other weights later in the run: tokens after which each counts.
    pub schedule: Vec<(u64, f64)>,
    /// Its tokens.
    pub data: Prepared,
}

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

/// Data of up to so many bytes are read in full whenever a run begins.
const MOST_CHECKED_BYTES: u64 = 4 << 30;

/// The folder of a run's prepared data: `data.prepared`, or else one in the run directory.
pub fn data_folder(config: &Config, run_dir: &Path) -> PathBuf {
    config.prepared_dir().unwrap_or_else(|| run_dir.join("data"))
}

/// The way from a folder to another, so that it is found where both were moved.
pub fn way(from: &Path, to: &Path) -> Option<PathBuf> {
    let (from, to) = (from.canonicalize().ok()?, to.canonicalize().ok()?);
    let common = from.components().zip(to.components()).take_while(|(a, b)| a == b).count();
    let up = from.components().skip(common).map(|_| Component::ParentDir);
    Some(up.chain(to.components().skip(common)).collect())
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
) -> Result<(RunData, PathBuf), InferError> {
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
    ) -> Result<Self, InferError> {
        config.require_data()?;
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
        let mut corpora = Vec::new();
        for wanted in wanted(config, folder, &tokenizer) {
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
                None => prepare_with(spec, folder, &options, &mut |at| progress(&wanted.name, at))?,
            };
            corpora.push(wanted.with(data));
        }
        Ok(RunData { corpora })
    }

    /// What [`RunData::prepare`] would find: the corpora under `folder` where all are there and would be taken as they are;
    /// else the text that would be prepared. Writes nothing.
    pub fn look(
        config: &Config,
        folder: &Path,
        existing: Existing,
        stop: &AtomicBool,
    ) -> Result<Result<Self, Survey>, InferError> {
        config.require_data()?;
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
        for wanted in wanted(config, folder, &tokenizer) {
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
    pub fn specs(config: &Config, tokenizer: &TokenizerSpec) -> Vec<PrepareSpec> {
        wanted(config, Path::new(""), tokenizer).into_iter().map(|wanted| wanted.spec).collect()
    }

    /// Opens the corpora under `folder`; none where one of them is not prepared.
    pub fn open(config: &Config, folder: &Path) -> Result<Option<Self>, DataError> {
        let mut corpora = Vec::new();
        for wanted in wanted(config, folder, &TokenizerSpec::Bytes) {
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

    /// Opens the data in a folder without a config: one corpus, or the corpora in its folders, by name, with equal
    /// weights. None where there are none.
    pub fn find(folder: &Path) -> Result<Option<Self>, DataError> {
        if let Some(data) = Prepared::open(folder)? {
            let only = RunCorpus { name: String::new(), weight: 1.0, schedule: Vec::new(), data };
            return Ok(Some(RunData { corpora: vec![only] }));
        }
        let entries = folder.read_dir().into_iter().flatten().flatten().filter(|entry| entry.path().is_dir());
        let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        let mut corpora = Vec::new();
        for name in names {
            if let Some(data) = Prepared::open(&folder.join(&name))? {
                corpora.push(RunCorpus { name, weight: 1.0, schedule: Vec::new(), data });
            }
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
    ) -> Result<(), InferError> {
        for (corpus, Wanted { spec, folder, .. }) in
            self.corpora.iter().zip(wanted(config, folder, &TokenizerSpec::Bytes))
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
            // The data keep their tokenizer; the file that it came from may be gone.
            let spec = PrepareSpec { tokenizer: before.tokenizer.clone(), ..spec };
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

    /// As [`RunData::verify`] for data that are read in some seconds, which is most; of larger ones, headers, lengths and samples were
    /// looked at when they were opened, and of Megatron's files the index is all that can be checked. Says whether every token was read.
    pub fn check(&self, stop: &AtomicBool, progress: &mut dyn FnMut(u64, u64)) -> Result<bool, DataError> {
        if self.verified_bytes() > MOST_CHECKED_BYTES {
            return Ok(false);
        }
        self.verify(stop, progress)?;
        Ok(!self.corpora.iter().any(|corpus| corpus.data.is_in_place()))
    }

    /// Bytes that [`RunData::verify`] reads.
    pub fn verified_bytes(&self) -> u64 {
        self.streams().map(|tokens| tokens.payload_bytes()).sum()
    }

    fn streams(&self) -> impl Iterator<Item = &Arc<TokenStream>> {
        self.corpora.iter().flat_map(|c| [Some(c.data.train()), c.data.validation()].into_iter().flatten())
    }

    /// Refuses data that are not what was prepared: every token is read once; of Megatron's files, which have no checksum, the index. `progress` hears of the bytes done and of all;
    /// `stop` ends it with [`DataError::Interrupted`].
    pub fn verify(&self, stop: &AtomicBool, progress: &mut dyn FnMut(u64, u64)) -> Result<(), DataError> {
        let total = self.verified_bytes();
        let mut done = 0;
        for tokens in self.streams() {
            tokens.verify_with(stop, &mut |bytes| {
                done += bytes;
                progress(done, total);
            })?;
        }
        Ok(())
    }

    /// The tokenizer that made the tokens, from the copy beside them.
    pub fn tokenizer(&self) -> Result<Tokenizer, DataError> {
        self.corpora.first().map_or_else(|| Ok(Tokenizer::bytes()), |corpus| corpus.data.tokenizer())
    }

    /// The corpora, in the order of the config.
    pub fn corpora(&self) -> &[RunCorpus] {
        &self.corpora
    }

    /// Training tokens of all corpora.
    pub fn train_tokens(&self) -> u64 {
        self.corpora.iter().map(|corpus| corpus.data.train_summary().tokens).sum()
    }

    /// A number that differs where any token or document differs.
    pub fn fingerprint(&self) -> u64 {
        match &self.corpora[..] {
            [only] => only.data.fingerprint(),
            corpora => corpora.iter().fold(0, |all, corpus| {
                let key = lockstep_ir::counter::key(corpus.data.fingerprint(), &corpus.name);
                lockstep_ir::counter::bits(key, all)
            }),
        }
    }

    /// The samples to train on.
    pub fn train(&self, config: &Config) -> Result<Sampler, DataError> {
        let (seq, seed) = (config.train.seq, config.train.seed);
        match &self.corpora[..] {
            [only] if only.name.is_empty() => Sampler::new(only.data.train().clone(), seq, seed),
            corpora => {
                let corpus = |c: &RunCorpus| Corpus {
                    name: c.name.clone(),
                    weight: c.weight,
                    schedule: c.schedule.clone(),
                    tokens: c.data.train().clone(),
                };
                Sampler::mixed(corpora.iter().map(corpus).collect(), seq, seed)
            }
        }
    }

    /// The validation samples of `seq` tokens in the mixture of training, and the names of the corpora that they are from. Where
    /// weights change, the largest of each corpus counts: a run validates on the same samples from its beginning to its end.
    /// Corpora whose validation tokens are less than a sequence are left out, with a warning each.
    pub fn validation_samples(&self, seq: usize, warn: &mut dyn FnMut(&str)) -> Option<(Sampler, Vec<String>)> {
        let mut corpora = Vec::new();
        for RunCorpus { name, weight, schedule, data } in &self.corpora {
            let Some(tokens) = data.validation() else { continue };
            if tokens.len() > seq as u64 {
                let weight = schedule.iter().fold(*weight, |most, (_, weight)| most.max(*weight));
                corpora.push(Corpus { name: name.clone(), weight, schedule: Vec::new(), tokens: tokens.clone() });
                continue;
            }
            let of = if name.is_empty() { String::new() } else { format!(" of {name}") };
            let tokens = tokens.len();
            warn(&format!("the validation text{of} has {tokens} tokens, not one sequence of {seq}: no validation{of}"));
        }
        let names = corpora.iter().map(|corpus| corpus.name.clone()).collect();
        let sampler = Sampler::mixed_in_order(corpora, seq).ok()?;
        (sampler.samples_before_repeat() > 0).then_some((sampler, names))
    }

    /// What the user should know of the data before training on them, a line each: special tokens that stand in the text, and a share of
    /// validation text far above the one that was asked for. Looks at samples, so that it takes about a second at most.
    pub fn warnings(&self) -> Result<Vec<String>, DataError> {
        let mut warnings = Vec::new();
        for RunCorpus { name, data, .. } in &self.corpora {
            let of = if name.is_empty() { String::new() } else { format!(" of {name}") };
            if let Some(SpecialInText { tokens, documents, looked_at }) = data.special_in_text()? {
                let (shown, share) = (&tokens[..tokens.len().min(5)], 100.0 * documents as f64 / looked_at as f64);
                let more = if tokens.len() > 5 { format!(" and {} more", tokens.len() - 5) } else { String::new() };
                let shown: Vec<String> = shown.iter().map(|token| format!("{token:?}")).collect();
                warnings.push(format!(
                    "the text{of} spells special tokens of the tokenizer, which become ordinary tokens: {}{more}, in {share:.1}% of \
                     {looked_at} documents that were looked at",
                    shown.join(", ")
                ));
            }
            let (fraction, train) = (data.spec().validation_fraction, data.train_summary());
            let Some(held) = data.validation_summary().filter(|_| fraction > 0.0) else { continue };
            let share = held.tokens as f64 / (held.tokens + train.tokens).max(1) as f64;
            if share > 2.0 * fraction && share > fraction + 0.02 {
                warnings.push(format!(
                    "data.validation_fraction = {fraction}, and {:.1}% of the tokens{of} are held out: {} of {} documents",
                    100.0 * share,
                    held.documents,
                    held.documents + train.documents
                ));
            }
        }
        Ok(warnings)
    }

    /// Tokens are below this.
    pub fn vocabulary(&self) -> u32 {
        self.corpora.iter().map(|corpus| corpus.data.vocabulary()).max().unwrap_or(0)
    }
}

/// Prepared data in `data.prepared` whose text or tokenizer is gone: they hold all that a run needs. Whatever is left of both must
/// be what they were made of. None where nothing is gone, or nothing was prepared.
fn shared_without_source(config: &Config, folder: &Path, stop: &AtomicBool) -> Result<Option<RunData>, InferError> {
    let lacks_text = |spec: &PrepareSpec| spec.paths.iter().any(|path| !path.exists());
    let lacks_tokenizer = config.tokenizer_path().is_some_and(|path| !path.exists());
    let wanted = wanted(config, folder, &TokenizerSpec::Bytes);
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
    for (corpus, Wanted { spec, folder, .. }) in data.corpora.iter().zip(wanted) {
        let then = corpus.data.spec();
        let own = || then.tokenizer.clone().with_eos(config.data.eos_token.as_deref()).with_bos(config.bos_token());
        let spec = PrepareSpec { tokenizer: tokenizer.clone().unwrap_or_else(own), ..spec };
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
    match &config.data.prompt_field {
        None => Prepared::in_place(spec, &files).map(Some),
        Some(field) => Err(DataError::Source {
            path: files[0].clone(),
            problem: format!("data.prompt_field names the field {field:?}, and tokens have no fields"),
            hint: "remove data.prompt_field, or name the text instead of its tokens in data.paths".into(),
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
        let whole = std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let mut plain = PathBuf::new();
        for part in whole.components() {
            match part {
                std::path::Component::ParentDir => {
                    plain.pop();
                }
                std::path::Component::CurDir => {}
                part => plain.push(part),
            }
        }
        plain.display().to_string()
    };
    let paths: Vec<String> = spec.paths.iter().map(plain).collect();
    let prompt = spec.prompt_field.as_ref().map_or(String::new(), |field| format!("; prompt {field}"));
    format!("{} (extensions {}; field {}{prompt})", paths.join(", "), spec.extensions.join(" "), spec.text_field)
}

fn wanted(config: &Config, folder: &Path, tokenizer: &TokenizerSpec) -> Vec<Wanted> {
    let spec = |paths: Vec<PathBuf>| PrepareSpec {
        paths,
        extensions: config.data.extensions.clone(),
        text_field: config.data.text_field.clone(),
        prompt_field: config.data.prompt_field.clone(),
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
