//! The data of a run: its prepared corpora, checks of them, and their samplers. How they come to be there: [`prepare`].

mod prepare;

pub use prepare::{Existing, prepare_data};

use lockstep_bucket::{Buckets, Limits, is_address};
use lockstep_config::Config;
use lockstep_data::{ChatSpec, Corpus, DataError, Prepared, Sampler, SpecialInText, TokenStream, Tokenizer};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

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

/// Data of up to this many bytes are read in full whenever a run begins.
const MOST_CHECKED_BYTES: u64 = 4 << 30;

/// The folder of a run's prepared data: `data.prepared`, or else one in the run directory.
pub fn data_folder(config: &Config, run_dir: &Path) -> PathBuf {
    config.prepared_dir().unwrap_or_else(|| run_dir.join("data"))
}

/// Gives the client of this process the limits of a config that names a bucket.
pub fn limit_buckets(config: &Config) -> Result<(), DataError> {
    let mirror = config.mirror_dir();
    let mut paths = config.data_paths();
    paths.extend(config.corpora().into_iter().flat_map(|corpus| corpus.paths).map(PathBuf::from));
    if !paths.iter().chain(&config.prepared_dir()).chain(&mirror).any(|path| is_address(path)) {
        return Ok(());
    }
    let limits = Limits {
        cache: config.cache_dir(),
        cache_bytes: config.data.cache_size.0,
        give_up: Duration::try_from_secs_f64(config.data.bucket_timeout).unwrap_or(Duration::MAX),
    };
    Buckets::of_process()?.set_limits(limits);
    Ok(())
}

/// The way from a folder to another, so that it is found where both were moved.
pub fn way(from: &Path, to: &Path) -> Option<PathBuf> {
    let (from, to) = (from.canonicalize().ok()?, to.canonicalize().ok()?);
    let common = from.components().zip(to.components()).take_while(|(a, b)| a == b).count();
    let up = from.components().skip(common).map(|_| Component::ParentDir);
    Some(up.chain(to.components().skip(common)).collect())
}

impl RunData {
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

    /// As [`RunData::verify`] for data that are read in some seconds, which is most; of larger ones, headers, lengths and samples were
    /// looked at when they were opened, and of Megatron's files the index is all that can be checked. Says whether every token was read.
    pub fn check(&self, stop: &AtomicBool, progress: &mut dyn FnMut(u64, u64)) -> Result<bool, DataError> {
        // Of a bucket, every range is checked against the object's ETag when it is read.
        if self.verified_bytes() > MOST_CHECKED_BYTES || self.streams().any(|tokens| tokens.is_remote()) {
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

    /// Refuses what was read of them since the last call where some of it did not come.
    pub fn require_read(&self) -> Result<(), DataError> {
        self.streams().try_for_each(|tokens| tokens.require_read())
    }

    /// The tokenizer that made the tokens, from the copy beside them.
    pub fn tokenizer(&self) -> Result<Tokenizer, DataError> {
        self.corpora.first().map_or_else(|| Ok(Tokenizer::bytes()), |corpus| corpus.data.tokenizer())
    }

    /// How their conversations became text, where they are such.
    pub fn chat(&self) -> Option<&ChatSpec> {
        self.corpora.first()?.data.spec().chat.as_ref()
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
