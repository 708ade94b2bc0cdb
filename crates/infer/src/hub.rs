//! Names on the Hugging Face Hub, where a config or a command has them instead of paths.

use crate::hf;
use crate::inherited::{inherited, keys_of_hub};
use crate::{InferError, Result};
use lockstep_config::{Config, Inherited, Located, NamedFiles, NotInherited, Opener};
use lockstep_hub::{Fetched, Hub, HubError, HubFiles, HubName, HubProgress, PREFIX};
use lockstep_rundir::TakenFromHub;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Hears of downloads.
pub type ShowHub<'a> = &'a mut dyn FnMut(HubProgress<'_>);

/// What of a hub a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubNeed {
    /// What describes a model; neither its weights nor data.
    Description,
    /// All that a run begins with.
    Start,
    /// What a run needs that goes on: it has its own weights, tokens and tokenizer.
    Resume,
}

/// Opens what a config names: folders of this machine, and names on the hub.
pub struct HubOpener<'a> {
    hub: Hub,
    need: HubNeed,
    /// Names at the revisions that the run was begun with, by key.
    pins: Vec<(&'static str, HubName)>,
    show: RefCell<ShowHub<'a>>,
    fetched: RefCell<Vec<Fetched>>,
}

impl<'a> HubOpener<'a> {
    /// One that asks the hub for what a command needs.
    pub fn new(hub: Hub, need: HubNeed, show: ShowHub<'a>) -> Self {
        Self { hub, need, pins: Vec::new(), show: RefCell::new(show), fetched: RefCell::new(Vec::new()) }
    }

    /// The same for a run that was begun: a name without a revision is that of the run's config.
    pub fn with_pins_of(mut self, run: &Config) -> Self {
        let name = |(key, text): (&'static str, String)| Some((key, name_by_key(key, &text).ok()?));
        self.pins = run.hub_names().into_iter().filter_map(name).collect();
        self
    }

    /// What was taken from the hub, or is there in the cache.
    pub fn taken(&self) -> Vec<TakenFromHub> {
        let mut all: BTreeMap<String, TakenFromHub> = BTreeMap::new();
        for fetched in self.fetched.borrow().iter() {
            let name = fetched.name.without_revision().to_string();
            let taken = all.entry(fetched.name.to_string()).or_insert_with(|| TakenFromHub {
                name,
                revision: fetched.commit.clone(),
                files: BTreeMap::new(),
            });
            taken.files.extend(fetched.files.clone());
        }
        all.into_values().collect()
    }

    /// The name that a text is, where it is one.
    fn name(&self, named: &NamedFiles<'_>) -> Result<Option<HubName>, HubError> {
        let NamedFiles { key, text, base_dir, extensions } = *named;
        let is_path = match key {
            "data.tokenizer" => text == "bytes" || text.ends_with(".json"),
            "train.init_from" | "lora.init_from" => false,
            _ => is_file(text, extensions),
        };
        if !text.starts_with(PREFIX) && (is_path || !is_bare_name(text, base_dir)) {
            return Ok(None);
        }
        let name = name_by_key(key, text)?;
        if name.has_revision() {
            return Ok(Some(name));
        }
        let pinned = self.pins.iter().find(|(own, pin)| *own == key && pin.without_revision() == name);
        Ok(Some(pinned.map_or(name, |(_, pin)| pin.clone())))
    }

    /// Where a name leads.
    fn find(&self, key: &str, name: &HubName, extensions: &[String]) -> Result<Located, HubError> {
        // Where it would be.
        let unknown = |name: &HubName| {
            let file = if key == "data.tokenizer" { hf::TOKENIZER } else { name.path() };
            let path = self.hub.folder(name).map_or_else(|| name.to_string().into(), |folder| folder.join(file));
            Located { pinned: name.to_string(), paths: vec![path] }
        };
        let files = match (key, self.need) {
            ("train.init_from", HubNeed::Start) => HubFiles::Model,
            ("train.init_from", _) => HubFiles::Description,
            (_, HubNeed::Description) => return Ok(unknown(name)),
            ("data.tokenizer", _) => HubFiles::Tokenizer,
            ("lora.init_from", _) => HubFiles::Adapters,
            _ => HubFiles::Data(extensions.to_vec()),
        };
        let goes_on = self.need == HubNeed::Resume && key != "train.init_from";
        let hub = if goes_on { self.hub.offline() } else { self.hub.clone() };
        let result = hub.fetch(name, &files, &mut **self.show.borrow_mut());
        let fetched = match result {
            // A run that goes on has its own tokens.
            Err(_) if goes_on => return Ok(unknown(name)),
            fetched => fetched?,
        };
        let paths = match &files {
            HubFiles::Model | HubFiles::Description | HubFiles::Adapters => vec![fetched.folder.clone()],
            HubFiles::Tokenizer => vec![fetched.folder.join(hf::TOKENIZER)],
            // Files are links: whoever searches folders passes over those.
            HubFiles::Data(_) => fetched.files.keys().map(|file| fetched.folder.join(file)).collect(),
        };
        let pinned = fetched.name.to_string();
        self.fetched.borrow_mut().push(fetched);
        Ok(Located { pinned, paths })
    }
}

impl Opener for HubOpener<'_> {
    fn inherited(&self, folder: &Path) -> Result<Option<Inherited>, NotInherited> {
        let fetched = self.fetched.borrow();
        match fetched.iter().find(|fetched| fetched.folder == folder) {
            Some(fetched) => keys_of_hub(folder, &fetched.name.to_string()).map(Some),
            None => inherited(folder),
        }
    }

    fn located(&self, named: &NamedFiles<'_>) -> Result<Option<Located>, NotInherited> {
        let (key, text) = (named.key, named.text);
        let told = |error: HubError| NotInherited {
            problem: match text.starts_with(PREFIX) {
                true => format!("{key}: {error}"),
                false => format!("{key}: {text}: no such file or folder, and {error}"),
            },
            hint: error.hint(),
        };
        let Some(name) = self.name(named).map_err(told)? else { return Ok(None) };
        self.find(key, &name, named.extensions).map(Some).map_err(told)
    }
}

/// The folder of a model that a command names: a path, or a name on the hub.
pub fn model_folder(hub: &Hub, path: &Path, show: ShowHub<'_>) -> Result<PathBuf> {
    let Some(text) = path.to_str().filter(|text| text.starts_with(PREFIX) || is_bare_name(text, Path::new(""))) else {
        return Ok(path.to_owned());
    };
    let name = HubName::model(text)?;
    hub.fetch(&name, &HubFiles::Model, show)
        .map(|fetched| fetched.folder)
        .map_err(|error| not_there(text, "folder", error))
}

/// The folder of the model that a config names on the hub, from the cache alone: the name is given back where it is not there. None where the path
/// is no name.
pub(crate) fn in_cache(path: &Path) -> Result<std::result::Result<Option<PathBuf>, HubName>> {
    let Some(text) = path.to_str().filter(|text| text.starts_with(PREFIX)) else { return Ok(Ok(None)) };
    let name = HubName::model(text)?;
    let fetched = Hub::from_env().offline().fetch(&name, &HubFiles::Model, &mut |_| {});
    Ok(fetched.map(|fetched| Some(fetched.folder)).map_err(|_| name))
}

/// The files and folders of text that a command names: paths, and names of datasets on the hub, of which files with one of the
/// extensions are taken.
pub fn text_paths(hub: &Hub, paths: &[PathBuf], extensions: &[String], show: ShowHub<'_>) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for path in paths {
        let is_name =
            |text: &&str| text.starts_with(PREFIX) || is_bare_name(text, Path::new("")) && !is_file(text, extensions);
        let Some(text) = path.to_str().filter(is_name) else {
            found.push(path.clone());
            continue;
        };
        let files = HubFiles::Data(extensions.to_vec());
        let fetched = hub
            .fetch(&HubName::dataset(text)?, &files, show)
            .map_err(|error| not_there(text, "file or folder", error))?;
        found.extend(fetched.files.keys().map(|file| fetched.folder.join(file)));
    }
    Ok(found)
}

/// Why neither the hub nor this machine has the file or folder that a text names.
fn not_there(text: &str, what: &str, error: HubError) -> InferError {
    match text.starts_with(PREFIX) {
        true => error.into(),
        false => InferError::Unusable { problem: format!("{text}: no such {what}, and {error}"), hint: error.hint() },
    }
}

/// Whether a text has one of the extensions of files.
fn is_file(text: &str, extensions: &[String]) -> bool {
    extensions.iter().any(|extension| text.ends_with(&format!(".{}", extension.trim_start_matches('.'))))
}

/// Whether a text without the prefix is a name: an owner and a name, where neither is there as a path.
pub(crate) fn is_bare_name(text: &str, folder: &Path) -> bool {
    let owner = text.split('/').next().unwrap_or_default();
    HubName::is_plausible(text) && !folder.join(owner).exists()
}

fn name_by_key(key: &str, text: &str) -> Result<HubName, HubError> {
    match key {
        "data.paths" | "data.corpora" => HubName::dataset(text),
        _ => HubName::model(text),
    }
}
