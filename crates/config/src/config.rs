//! Loading a [`Config`] and asking it things.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use lockstep_ir::{Axes, Layout, Mesh, MeshAxis};

use crate::declare::Key;
use crate::error::{ConfigError, Location, Problem};
use crate::inherit::{Inherited, Located, NamedFiles, NotInherited, Opener, is_hub_name, is_in_bucket};
use crate::legal::Extents;
use crate::origin::{Given, Origin, Provenance};
use crate::resolve;
use crate::schema::{self, Config, KEYS};
use crate::source::{self, MAX_BYTES, Source, printable};
use crate::value::{Bytes, CorpusConfig, OffloadSize, SaveEvery, Value};
use crate::words::{AttentionMethod, DataFormat, LayoutSource, RecomputePolicy, TrainOnTurns};
use crate::written::Change;

/// Says again what was said when a config was first read.
struct Repeated<'a>(&'a Given);

impl Opener for Repeated<'_> {
    fn inherited(&self, _folder: &Path) -> Result<Option<Inherited>, NotInherited> {
        Ok(self.0.inherited.clone())
    }

    fn located(&self, named: &NamedFiles<'_>) -> Result<Option<Located>, NotInherited> {
        Ok(self.0.located.get(&(named.key, named.text.to_owned())).cloned())
    }
}

const MICRO_BATCH: &str = "train.micro_batch";
const CHECKPOINT_EVERY: &str = "checkpoint.every";
const OFFLOAD_OPTIMIZER: &str = "offload.optimizer";
const OFFLOAD_ACTIVATIONS: &str = "offload.activations";
const BUDGET: &str = "recompute.budget";

/// Keys that `parallel.layout = "auto"` decides where they are not given.
pub const PLANNED: [&str; 14] = [
    "parallel.dp",
    "parallel.dp_replicate",
    "parallel.cp",
    "parallel.context",
    "parallel.ep",
    "parallel.tp",
    "parallel.pp",
    "parallel.zero",
    "parallel.reshard_after_forward",
    "parallel.sequence_parallel",
    "parallel.schedule",
    "parallel.virtual",
    "train.micro_batch",
    "recompute.policy",
];

impl Config {
    /// Reads the config file at `path` and lays the overrides (`"train.steps=100"`) over it.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Config, ConfigError> {
        Config::load_with(path, overrides, &|_: &Path| Ok(None))
    }

    /// The same, where `opener` says what the weights decide that `train.init_from` names: their shape need not be written in
    /// `[model]`, and what contradicts them is refused. It says too where names lead that are no paths.
    pub fn load_with(path: &Path, overrides: &[String], opener: &dyn Opener) -> Result<Config, ConfigError> {
        let name = path.display().to_string();
        let bytes = read_bounded(path).map_err(|error| {
            let problem = Problem::new(
                format!("cannot read {}: {error}", printable(&name)),
                "give the path of a config file that exists and can be read",
            );
            ConfigError::new(problem, Location::File { name: printable(&name) })
        })?;
        if bytes.len() > MAX_BYTES {
            return Err(source::too_large(&name));
        }
        let text = std::str::from_utf8(&bytes).map_err(|error| {
            let line = 1 + bytes[..error.valid_up_to()].iter().filter(|&&b| b == b'\n').count();
            let problem = Problem::new("the config file is not UTF-8 text", "save the file as UTF-8");
            ConfigError::new(problem, Location::File { name: format!("{}:{line}", printable(&name)) })
        })?;
        let config = Config::read(text, &name, path, overrides, &[], opener)?;
        match config.tokenizer_on_the_hub() {
            None => Ok(config),
            Some((problem, hint)) => {
                let file = Location::File { name: printable(&name) };
                let problem = format!("{}: {problem}", config.data.tokenizer);
                Err(ConfigError::new(Problem::new(problem, hint), file))
            }
        }
    }

    /// Reads a config from text. `file_name` is what errors call it, and its folder is where `data.paths` start.
    pub fn parse(text: &str, file_name: &str, overrides: &[String]) -> Result<Config, ConfigError> {
        Config::read(text, file_name, Path::new(file_name), overrides, &[], &|_: &Path| Ok(None))
    }

    /// The same config with what was changed in a run laid over it, the later changes over the earlier ones. They win over the
    /// file and over `--set`: a run that is resumed by its first command keeps them.
    pub fn with_changes(&self, changes: &[Change]) -> Result<Config, ConfigError> {
        let given = &self.provenance.given;
        let Given { path, text, overrides, .. } = given;
        let config = Config::read(text, &self.provenance.file_name, path, overrides, changes, &Repeated(given))?;
        Ok(match self.micro_batch_found() {
            Some(how) if config.micro_batch_is_default() => {
                config.with_default_micro_batch(self.train.micro_batch, how)
            }
            _ => config,
        })
    }

    /// Whether the config, as it was read, keeps every rule with these overrides (`"parallel.ep=2"`) laid over it.
    pub fn accepts(&self, keys: &[String]) -> bool {
        let given = &self.provenance.given;
        let overrides = [given.overrides.as_slice(), keys].concat();
        let (text, path) = (&given.text, &given.path);
        Config::read(text, &self.provenance.file_name, path, &overrides, &[], &Repeated(given)).is_ok()
    }

    fn read(
        text: &str,
        name: &str,
        path: &Path,
        overrides: &[String],
        changes: &[Change],
        opener: &dyn Opener,
    ) -> Result<Config, ConfigError> {
        let source = Source::new(name, text)?;
        let base_dir = folder_of(path);
        let resolved = resolve::resolve(&source, overrides, changes, &base_dir, opener)?;
        let (path, text, overrides) = (path.to_owned(), text.to_owned(), overrides.to_vec());
        let provenance = Provenance {
            file_name: source.name.clone(),
            base_dir,
            origins: resolved.origins,
            warnings: resolved.warnings,
            cut_schedule: resolved.cut_schedule,
            given: Given {
                path,
                text,
                overrides,
                inherited: resolved.inherited,
                located: resolved.located,
                not_located: resolved.not_located,
            },
        };
        Ok(schema::build(&resolved.values, provenance))
    }

    /// What the user should know of what was read, a line each: keys given by an old name, a schedule that was shortened, a
    /// preset that won over the file.
    pub fn warnings(&self) -> &[String] {
        &self.provenance.warnings
    }

    /// Those of the [`warnings`](Self::warnings) that are about a warmup or decay that was cut to fit the run: news when a run begins,
    /// not when it goes on.
    pub fn cut_schedule(&self) -> &[String] {
        &self.provenance.cut_schedule
    }

    /// The preset that gave a key its value, if one did.
    pub fn preset_of(&self, path: &str) -> Option<&str> {
        match self.provenance.origins.get(path) {
            Some(Origin::Preset(name)) => Some(name),
            _ => None,
        }
    }

    /// The switches of a table that are on, by name.
    pub fn switched_on(&self, table: &str) -> Vec<&'static str> {
        let on = |key: &&Key| schema::value_of(self, key) == Some(Value::Bool(true));
        KEYS.iter().filter(|key| key.table == table).filter(on).map(|key| key.name).collect()
    }

    /// Whether `train.micro_batch` was not given, so that another default may take its place.
    pub fn micro_batch_is_default(&self) -> bool {
        matches!(self.provenance.origins.get(MICRO_BATCH), Some(Origin::Default))
    }

    /// How the default of `train.micro_batch` was found, where it is not the whole batch.
    pub fn micro_batch_found(&self) -> Option<&str> {
        match self.provenance.origins.get(MICRO_BATCH) {
            Some(Origin::Found(how)) => Some(how),
            _ => None,
        }
    }

    /// The same run with another default of `train.micro_batch`; `how` it was found is its origin in [`Config::resolved_toml`].
    pub fn with_default_micro_batch(&self, sequences: usize, how: &str) -> Config {
        let mut config = self.clone();
        config.train.micro_batch = sequences;
        config.provenance.origins.insert(MICRO_BATCH, Origin::Found(how.to_owned()));
        config
    }

    /// The same run with the interval that `checkpoint.every = "auto"` found; `how` is its origin in [`Config::resolved_toml`].
    pub fn with_checkpoint_every(&self, steps: u64, how: &str) -> Config {
        let mut config = self.clone();
        config.checkpoint.every = SaveEvery::Steps(steps);
        config.provenance.origins.insert(CHECKPOINT_EVERY, Origin::Auto(how.to_owned()));
        config
    }

    /// The same run with the bytes that `offload.optimizer = "auto"` found; `how` is their origin in [`Config::resolved_toml`].
    pub fn with_optimizer_offload(&self, bytes: u64, how: &str) -> Config {
        let mut config = self.clone();
        config.offload.optimizer = OffloadSize::of(bytes);
        config.provenance.origins.insert(OFFLOAD_OPTIMIZER, Origin::Auto(how.to_owned()));
        config
    }

    /// The same run with the bytes that `offload.activations = "auto"` found.
    pub fn with_activation_offload(&self, bytes: u64, how: &str) -> Config {
        let mut config = self.clone();
        config.offload.activations = OffloadSize::of(bytes);
        config.provenance.origins.insert(OFFLOAD_ACTIVATIONS, Origin::Auto(how.to_owned()));
        config
    }

    /// The same run with the layout that `parallel.layout = "auto"` found; `how` is the origin in [`Config::resolved_toml`] of what was
    /// not given.
    pub fn with_planned_layout(
        &self,
        layout: &Layout,
        micro_batch: usize,
        recompute: (RecomputePolicy, Option<Bytes>),
        how: &str,
    ) -> Config {
        let mut config = self.at(layout);
        config.train.micro_batch = micro_batch;
        (config.recompute.policy, config.recompute.budget) = recompute;
        if recompute.1.is_some() && !self.is_given(BUDGET) {
            config.provenance.origins.insert(BUDGET, Origin::Auto(how.to_owned()));
        }
        for key in PLANNED.into_iter().filter(|key| *key == "parallel.dp" || !self.is_given(key)) {
            config.provenance.origins.insert(key, Origin::Auto(how.to_owned()));
        }
        config
    }

    /// How `parallel.layout = "auto"` was settled; none where it has not been, or the layout is given.
    pub fn layout_planned(&self) -> Option<&str> {
        match self.provenance.origins.get("parallel.dp") {
            Some(Origin::Auto(how)) => Some(how),
            _ => None,
        }
    }

    /// Whether the layout is still to be found.
    pub fn plans_layout(&self) -> bool {
        self.parallel.layout == LayoutSource::Auto && self.layout_planned().is_none()
    }

    /// Ranks of the run; none where it is to be planned for as many processes as there are.
    pub fn ranks(&self) -> Option<usize> {
        if self.plans_layout() { self.parallel.ranks } else { Some(self.layout().mesh.ranks()) }
    }

    /// The folder of the config file.
    pub fn base_dir(&self) -> &Path {
        &self.provenance.base_dir
    }

    /// Where the text of a key leads that names files or folders: what a name on the hub was found to be, or a path, resolved
    /// against the folder of the config file.
    fn paths_of(&self, key: &'static str, text: &str) -> Vec<PathBuf> {
        match self.located(key, text) {
            Some(located) => located.paths.clone(),
            None if is_hub_name(text) || is_in_bucket(text) => vec![text.into()],
            None => vec![self.base_dir().join(text)],
        }
    }

    fn located(&self, key: &'static str, text: &str) -> Option<&Located> {
        self.provenance.given.located.get(&(key, text.to_owned()))
    }

    /// The text of such a key as it means the same at any time and in any folder: names at their revision, paths absolute.
    pub(crate) fn pinned(&self, key: &'static str, text: &str) -> String {
        match self.located(key, text) {
            Some(located) => located.pinned.clone(),
            None if is_hub_name(text) || is_in_bucket(text) => text.to_owned(),
            None => self.base_dir().join(text).to_string_lossy().into_owned(),
        }
    }

    /// Names on the hub that the config has, at their revisions, each with its key.
    pub fn hub_names(&self) -> Vec<(&'static str, String)> {
        let data = self.data.paths.iter().map(|path| ("data.paths", path));
        let corpora = self.data.corpora.iter().flat_map(|corpus| &corpus.paths).map(|path| ("data.corpora", path));
        let others = [
            ("data.tokenizer", Some(&self.data.tokenizer)),
            ("train.init_from", self.train.init_from.as_ref()),
            ("lora.init_from", self.lora.init_from.as_ref()),
        ];
        let others = others.into_iter().filter_map(|(key, text)| Some((key, text?)));
        let all = others.chain(data).chain(corpora).map(|(key, text)| (key, self.pinned(key, text)));
        all.filter(|(_, name)| is_hub_name(name)).collect()
    }

    /// `data.paths`, resolved against the folder of the config file.
    pub fn data_paths(&self) -> Vec<PathBuf> {
        self.data.paths.iter().flat_map(|path| self.paths_of("data.paths", path)).collect()
    }

    /// `data.corpora`, with their paths resolved in the same way.
    pub fn corpora(&self) -> Vec<CorpusConfig> {
        let resolved = |path: &String| self.paths_of("data.corpora", path);
        let corpus = |corpus: &CorpusConfig| {
            let paths = corpus.paths.iter().flat_map(resolved).map(|path| path.to_string_lossy().into_owned());
            CorpusConfig { paths: paths.collect(), ..corpus.clone() }
        };
        self.data.corpora.iter().map(corpus).collect()
    }

    /// The path of the tokenizer's file, resolved in the same way; none for "bytes".
    pub fn tokenizer_path(&self) -> Option<PathBuf> {
        let paths = self.paths_of("data.tokenizer", &self.data.tokenizer);
        paths.into_iter().next().filter(|_| self.data.tokenizer != "bytes")
    }

    /// `data.chat_template`, resolved in the same way.
    pub fn chat_template_path(&self) -> Option<PathBuf> {
        self.data.chat_template.as_ref().map(|path| self.base_dir().join(path))
    }

    /// Whether some targets do not count in the loss: prompts, or what others than the assistant say.
    pub fn leaves_targets_out(&self) -> bool {
        let chat = self.data.format == DataFormat::Chat && self.data.train_on != Some(TrainOnTurns::All);
        self.data.prompt_field.is_some() || chat
    }

    /// The token that begins a document, if one does.
    pub fn bos_token(&self) -> Option<&str> {
        self.data.bos_token.as_deref().filter(|token| *token != "none")
    }

    /// What is wrong with a tokenizer that is named as on the Hub and is no file here, and a hint.
    pub fn tokenizer_on_the_hub(&self) -> Option<(&'static str, &'static str)> {
        let name = &self.data.tokenizer;
        if is_hub_name(name) || self.located("data.tokenizer", name).is_some() {
            return None;
        }
        let path = self.tokenizer_path()?;
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
        let is_name = name.chars().all(plain) && name.matches('/').count() < 2 && !name.starts_with(['.', '/']);
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        let problem = "no such file: data.tokenizer is \"bytes\", the path of a tokenizer.json, or hf:OWNER/NAME for one on the Hub";
        (is_name && !is_json && !path.exists()).then_some((problem, crate::checks::FETCH_TOKENIZER))
    }

    /// A folder of this machine, or an address in a bucket as it is.
    fn folder(&self, text: &str) -> PathBuf {
        if is_in_bucket(text) { text.into() } else { self.base_dir().join(text) }
    }

    /// `data.cache`, resolved in the same way.
    pub fn cache_dir(&self) -> Option<PathBuf> {
        self.data.cache.as_ref().map(|folder| self.base_dir().join(folder))
    }

    /// `data.prepared`, resolved in the same way.
    pub fn prepared_dir(&self) -> Option<PathBuf> {
        self.data.prepared.as_ref().map(|folder| self.folder(folder))
    }

    /// `checkpoint.mirror`, resolved in the same way.
    pub fn mirror_dir(&self) -> Option<PathBuf> {
        self.checkpoint.mirror.as_ref().map(|folder| self.folder(folder))
    }

    /// The files of `eval.tasks`, resolved in the same way.
    pub fn task_paths(&self) -> Vec<PathBuf> {
        self.eval.tasks.iter().map(|path| self.base_dir().join(path)).collect()
    }

    /// `train.init_from`, resolved in the same way.
    pub fn init_from(&self) -> Option<PathBuf> {
        self.paths_of("train.init_from", self.train.init_from.as_ref()?).into_iter().next()
    }

    /// Why the name in `train.init_from` leads nowhere, where the config was whole without it. Only a run that begins needs it.
    pub fn init_from_not_found(&self) -> Option<&NotInherited> {
        self.provenance.given.not_located.as_ref()
    }

    /// `lora.init_from`, resolved in the same way.
    pub fn adapter_dir(&self) -> Option<PathBuf> {
        self.paths_of("lora.init_from", self.lora.init_from.as_ref()?).into_iter().next()
    }

    /// Refuses a config without data; only training needs any.
    pub fn require_data(&self) -> Result<(), ConfigError> {
        if !self.data.paths.is_empty() || !self.data.corpora.is_empty() {
            return Ok(());
        }
        let problem = Problem::new(
            "data.paths is empty, so there is nothing to train on",
            "list files or folders, relative to the config file's folder: [data] paths = [\"docs\"]",
        );
        Err(ConfigError::new(problem, Location::File { name: self.provenance.file_name.clone() }))
    }

    /// Micro-batches of a rank per optimizer step, of the largest that the run has: its share of the batch divided by the
    /// micro-batch.
    pub fn accumulation_steps(&self) -> usize {
        self.batches().largest() / self.round()
    }

    /// Sequences that all ranks compute at once: a micro-batch of each that has its own.
    pub fn round(&self) -> usize {
        self.train.micro_batch * self.mesh().size(Axes::SEQUENCES)
    }

    fn mesh(&self) -> Mesh {
        let p = &self.parallel;
        Mesh::ONE
            .with(MeshAxis::Pp, p.pp)
            .with(MeshAxis::DpReplicate, p.dp_replicate)
            .with(MeshAxis::DpShard, p.dp)
            .with(MeshAxis::Cp, p.cp)
            .with(MeshAxis::Ep, p.ep)
            .with(MeshAxis::Tp, p.tp)
    }

    /// The same run with its work split otherwise. The layout's count of micro-batches is not looked at: it follows from the
    /// batch.
    pub fn at(&self, layout: &Layout) -> Config {
        let mut config = self.clone();
        let p = &mut config.parallel;
        let size = |axis: MeshAxis| layout.mesh.size(axis);
        (p.dp_replicate, p.dp) = (size(MeshAxis::DpReplicate), size(MeshAxis::DpShard));
        (p.cp, p.ep, p.tp, p.pp) = (size(MeshAxis::Cp), size(MeshAxis::Ep), size(MeshAxis::Tp), size(MeshAxis::Pp));
        (p.zero, p.sequence_parallel) = (layout.zero, layout.sequence_parallel);
        p.reshard_after_forward = layout.reshard_after_forward;
        p.context = layout.context;
        p.ep_bound = layout.expert_bound.map(|percent| percent as f64 / 100.0).or(p.ep_bound);
        (p.schedule, p.r#virtual) = (layout.schedule, layout.chunks);
        // Stages cut by hand are those of as many.
        if p.stages.len() != layout.stages() {
            p.stages.clear();
        }
        config
    }

    /// How the work is split.
    pub fn layout(&self) -> Layout {
        let p = &self.parallel;
        Layout {
            micro_batches: self.accumulation_steps(),
            mesh: self.mesh(),
            zero: p.zero,
            reshard_after_forward: p.reshard_after_forward,
            sequence_parallel: p.sequence_parallel,
            context: p.context,
            expert_bound: p.ep_bound.filter(|_| p.ep > 1).map(|share| (share * 100.0).round() as usize),
            schedule: p.schedule,
            chunks: p.r#virtual,
        }
    }

    /// What a layout must split: for other layouts than [`Config::layout`], which has been checked against it.
    pub fn extents(&self) -> Extents {
        let (model, train) = (&self.model, &self.train);
        Extents {
            layers: model.layers,
            heads: model.heads,
            kv_heads: model.kv_heads,
            ffn: model.expert_ffn.unwrap_or(model.ffn),
            dense_ffn: (model.dense_layers > 0).then_some(model.ffn),
            experts: model.experts,
            vocab: model.vocab_size,
            seq: train.seq,
            global_batch: train.global_batch,
            micro_batch: train.micro_batch,
            gathered_head: self
                .optimizer
                .name
                .facts()
                .gathers_matrices
                .then_some(model.head_dim.max(model.value_dim()) * model.dim),
            naive_attention: model.attention == AttentionMethod::Naive,
            latent: model.latent().is_some() && self.lora.rank.is_none(),
            noise_scale: train.noise_scale,
        }
    }
}

/// The bytes of a file, cut one past [`MAX_BYTES`].
fn read_bounded(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The folder of a file, absolute wherever the current folder is known.
fn folder_of(path: &Path) -> PathBuf {
    let folder = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned())
}
