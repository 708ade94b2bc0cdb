//! Layers, lowest first: default, the weights of `train.init_from`, preset, file, `--set`. From them, one value for every key.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use toml::de::DeValue;

use crate::checks;
use crate::conflict::Conflict;
use crate::declare::{Default, Key};
use crate::defaults;
use crate::document::{Document, Given};
use crate::error::{ConfigError, Location, Problem};
use crate::inherit::{self, Inherited, Located, NamedFiles, NotInherited, Opener};
use crate::kind::{Reading, quote_list};
use crate::origin::Origin;
use crate::presets;
use crate::rules;
use crate::schema::KEYS;
use crate::source::{self, Source};
use crate::value::Value;
use crate::values::Values;
use crate::written::Change;
use crate::{document, overrides};

/// Where a value stands, in the order in which problems are reported.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum GivenAt {
    InitFrom,
    Preset(String),
    File { start: usize, end: usize },
    Override(usize),
    Change(usize),
}

impl GivenAt {
    /// A higher layer wins over a lower one.
    fn layer(&self) -> usize {
        match self {
            GivenAt::InitFrom => 0,
            GivenAt::Preset(_) => 1,
            GivenAt::File { .. } => 2,
            GivenAt::Override(_) => 3,
            GivenAt::Change(_) => 4,
        }
    }
}

/// The values of all keys, and where each came from.
pub(crate) struct Resolved {
    pub values: Values,
    pub origins: BTreeMap<&'static str, Origin>,
    /// What the user should know of what was read, a line each.
    pub warnings: Vec<String>,
    /// Those of them that are about a warmup or decay that is cut to fit the run.
    pub cut_schedule: Vec<String>,
    /// What was taken from the folder that `train.init_from` names.
    pub inherited: Option<Inherited>,
    /// Where names lead that are no paths, by key and text.
    pub located: BTreeMap<(&'static str, String), Located>,
    /// Why the name in `train.init_from` leads nowhere, where nothing else needs it.
    pub not_located: Option<NotInherited>,
}

/// Layers the file over its preset, the overrides over the file and the changes over the overrides, fills what the weights of
/// `train.init_from` decide and the defaults, and checks the whole.
pub(crate) fn resolve(
    source: &Source<'_>,
    overrides: &[String],
    changes: &[Change],
    base_dir: &Path,
    opener: &dyn Opener,
) -> Result<Resolved, ConfigError> {
    let document = document::read(source)?;
    let (values, places) = (Values::none(KEYS.iter().map(|key| key.path)), BTreeMap::new());
    let (warnings, cut_schedule) = (Vec::new(), Vec::new());
    let (located, not_located) = (BTreeMap::new(), None);
    let mut layers = Layers {
        source,
        overrides,
        changes,
        base_dir,
        opener,
        values,
        places,
        warnings,
        cut_schedule,
        located,
        not_located,
    };
    for given in &document.given {
        let line = source.line_number(given.span.start);
        layers.renamed(given.key, given.old_name, format!("{}:{line}", source.name));
        layers.set(given.key, given.value.clone(), GivenAt::File { start: given.span.start, end: given.span.end });
    }
    for (index, text) in overrides.iter().enumerate() {
        let (named, value) = overrides::read(overrides::SET, text)?;
        layers.renamed(named.key, named.old_name, format!("--set {}", source::quoted(text)));
        layers.set(named.key, value, GivenAt::Override(index));
    }
    for (index, change) in changes.iter().enumerate() {
        let (named, value) = overrides::read(overrides::CHANGE, &change.text)?;
        layers.renamed(named.key, named.old_name, format!("--change {}", source::quoted(&change.text)));
        layers.set(named.key, value, GivenAt::Change(index));
    }
    if let Some(Value::Text(name)) = layers.values.get("model.preset").cloned() {
        layers.put_preset_over_the_file();
        for given in preset(&name) {
            if !layers.places.contains_key(given.key.path) {
                layers.set(given.key, given.value, GivenAt::Preset(name.clone()));
            }
        }
    }
    // First: nobody looks for weights there.
    if let Some(conflict) = checks::paths_are_no_addresses(&layers.values) {
        let place = layers.blame(&conflict);
        return Err(ConfigError::new(conflict.problem, layers.locate(place)));
    }
    if let Some(conflict) = rules::servers_hold_no_password(&layers.values) {
        let place = layers.blame(&conflict);
        return Err(ConfigError::new(conflict.problem, layers.locate(place).without_value()));
    }
    let inherited = layers.inherit()?;
    layers.check_required(&document)?;
    layers.fill_and_check()?;
    // Last: what is fetched is for a config that is sound.
    layers.locate_data()?;
    let origins = KEYS.iter().map(|key| (key.path, layers.origin(key))).collect();
    let Layers { values, warnings, cut_schedule, located, not_located, .. } = layers;
    Ok(Resolved { values, origins, warnings, cut_schedule, inherited, located, not_located })
}

struct Layers<'a> {
    source: &'a Source<'a>,
    overrides: &'a [String],
    changes: &'a [Change],
    base_dir: &'a Path,
    opener: &'a dyn Opener,
    values: Values,
    places: BTreeMap<&'static str, GivenAt>,
    warnings: Vec<String>,
    cut_schedule: Vec<String>,
    located: BTreeMap<(&'static str, String), Located>,
    not_located: Option<NotInherited>,
}

impl Layers<'_> {
    fn set(&mut self, key: &'static Key, value: Value, place: GivenAt) {
        self.values.set(key.path, value);
        self.places.insert(key.path, place);
    }

    /// Warns of a key that is given by an old name.
    fn renamed(&mut self, key: &Key, old: Option<&str>, place: String) {
        let text = |old| format!("{}.{old} is now called {}: {place}", key.table, key.path);
        self.warnings.extend(old.map(text));
    }

    /// A preset that `--set` names wins over the shape that the file has, with a warning.
    fn put_preset_over_the_file(&mut self) {
        if !matches!(self.places.get("model.preset"), Some(GivenAt::Override(_))) {
            return;
        }
        let in_file = |(path, place): (&&'static str, &GivenAt)| {
            (inherit::is_of_presets(path) && matches!(place, GivenAt::File { .. })).then_some(*path)
        };
        let paths: Vec<&'static str> = self.places.iter().filter_map(in_file).collect();
        for path in &paths {
            self.places.remove(path);
            self.values.clear(path);
        }
        if !paths.is_empty() {
            let (file, keys) = (&self.source.name, paths.join(", "));
            self.warnings.push(format!("--set model.preset takes the place of keys of {file}: {keys}"));
        }
    }

    /// Takes what the weights of `train.init_from` decide where nobody said it; who said otherwise is refused.
    fn inherit(&mut self) -> Result<Option<Inherited>, ConfigError> {
        let Some(Value::Text(named)) = self.values.get("train.init_from").cloned() else { return Ok(None) };
        let inherited = self.find("train.init_from", &named).and_then(|path| {
            let folder = path.unwrap_or_else(|| self.base_dir.join(&named));
            self.opener.inherited(&folder)
        });
        let inherited = match inherited {
            Ok(Some(inherited)) => inherited,
            Ok(None) => return Ok(None),
            // A run that goes on needs nothing from there, if its config is whole.
            Err(why) if self.missing().is_none() => {
                self.not_located = Some(why).filter(|_| !self.located.contains_key(&("train.init_from", named)));
                return Ok(None);
            }
            Err(why) => return Err(self.not_found("train.init_from", why)),
        };
        let Inherited { name, text } = &inherited;
        let theirs = document::read(&Source::new(name, text)?)?;
        let own_tokenizer = self.places.contains_key("data.tokenizer");
        for given in theirs.given {
            let path = given.key.path;
            let Some(place) = self.places.get(path).cloned() else {
                if !["data.eos_token", "data.bos_token"].contains(&path) || !own_tokenizer {
                    self.set(given.key, given.value, GivenAt::InitFrom);
                }
                continue;
            };
            let ours = self.values.get(path).cloned();
            if let (true, Some(ours)) = (inherit::is_shape(path), ours.filter(|ours| *ours != given.value)) {
                let blamed = match &place {
                    GivenAt::Preset(preset) => format!("model.preset = \"{preset}\" has {path} = {ours}, which"),
                    _ => format!("{path} = {ours}"),
                };
                let problem = Problem::new(
                    format!("{blamed} contradicts the weights of train.init_from: {} in {name}", given.value),
                    "leave it out: the shape of the model is taken from train.init_from",
                );
                let place = match place {
                    GivenAt::Preset(_) => self.places.get("model.preset").cloned(),
                    _ => Some(place),
                };
                return Err(ConfigError::new(problem, self.locate(place)));
            }
        }
        Ok(Some(inherited))
    }

    /// Finds where the names of data, their tokenizer and adapters lead.
    fn locate_data(&mut self) -> Result<(), ConfigError> {
        for key in ["data.tokenizer", "data.paths", "data.corpora", "lora.init_from"] {
            let named: Vec<String> = match self.values.get(key) {
                Some(Value::Text(text)) => vec![text.clone()],
                Some(Value::Texts(texts)) => texts.clone(),
                Some(Value::Corpora(corpora)) => corpora.iter().flat_map(|corpus| corpus.paths.clone()).collect(),
                _ => continue,
            };
            for text in named {
                self.find(key, &text).map_err(|why| self.not_found(key, why))?;
            }
        }
        Ok(())
    }

    /// Asks where a name leads, and keeps the answer; gives its first path.
    fn find(&mut self, key: &'static str, text: &str) -> Result<Option<PathBuf>, NotInherited> {
        let extensions = match self.values.get("data.extensions") {
            Some(Value::Texts(extensions)) => extensions.as_slice(),
            _ => &[],
        };
        let located = self.opener.located(&NamedFiles { key, text, base_dir: self.base_dir, extensions })?;
        let path = located.as_ref().and_then(|located| located.paths.first().cloned());
        self.located.extend(located.map(|located| ((key, text.to_owned()), located)));
        Ok(path)
    }

    fn not_found(&self, key: &str, why: NotInherited) -> ConfigError {
        let place = self.places.get(key).cloned();
        ConfigError::new(Problem::new(why.problem, why.hint), self.locate(place))
    }

    /// The first key that must be given and is not.
    fn missing(&self) -> Option<&'static Key> {
        let required = |key: &Key| match key.default {
            Default::Required => true,
            Default::DerivedOrRequired(_, derive) => matches!(derive(&self.values), Ok(None)),
            Default::Fixed(_) | Default::Unset | Default::Derived(..) | Default::OfOptimizer(_) => false,
        };
        KEYS.iter().find(|key| self.values.get(key.path).is_none() && required(key))
    }

    fn check_required(&self, document: &Document) -> Result<(), ConfigError> {
        let Some(key) = self.missing() else { return Ok(()) };
        let names = quote_list(&presets::NAMES);
        let problem =
            Problem::new(format!("{} is not set", key.path), format!("set it, or choose a model.preset: {names}"));
        let header = document.tables.iter().find(|(name, _)| name == key.table);
        let location = header.map_or(self.source.whole(), |(_, span)| self.source.locate(span));
        Err(ConfigError::new(problem, location))
    }

    /// Fills what was not given, first the fixed defaults, then the derived ones in the order of the schema; then checks
    /// the keys against each other. Of several conflicts, the first in file order is the error.
    fn fill_and_check(&mut self) -> Result<(), ConfigError> {
        let mut conflicts = Vec::new();
        for key in KEYS {
            if let (None, Default::Fixed(text)) = (self.values.get(key.path), &key.default) {
                self.values.set(key.path, fixed_default(key, text));
            }
        }
        self.cut_schedule.extend(rules::shorten_warmup(&mut self.values));
        for key in KEYS {
            let filled = match (self.values.get(key.path), &key.default) {
                (Some(Value::Tokens(tokens)), _) => {
                    defaults::sequences(key, *tokens, &self.values).map(|(value, note)| {
                        self.warnings.extend(note);
                        Some(value)
                    })
                }
                (Some(Value::Ramp(stages)), _) => defaults::ramp(key, stages, &self.values).map(|(value, notes)| {
                    self.warnings.extend(notes);
                    Some(value)
                }),
                (None, Default::Derived(_, derive) | Default::DerivedOrRequired(_, derive)) => derive(&self.values),
                (None, Default::OfOptimizer(constant)) => rules::constant(&self.values, *constant),
                (Some(_), _) | (None, Default::Unset | Default::Required | Default::Fixed(_)) => continue,
            };
            match filled {
                Ok(Some(value)) => self.values.set(key.path, value),
                Ok(None) => {}
                Err(conflict) => conflicts.push(conflict),
            }
        }
        self.cut_schedule.extend(rules::shorten_decay(&mut self.values));
        self.warnings.extend(self.cut_schedule.iter().cloned());
        conflicts.extend(checks::CHECKS.iter().filter_map(|check| check(&self.values)));
        conflicts.extend(checks::layout_conflicts(&self.values));
        let located = conflicts.into_iter().map(|conflict| (self.blame(&conflict), conflict));
        match located.min_by_key(|(place, _)| place.clone()) {
            None => Ok(()),
            Some((place, conflict)) => Err(ConfigError::new(conflict.problem, self.locate(place))),
        }
    }

    /// The most likely of the keys in conflict that stands in the highest layer; for a value out of a
    /// preset, the key that chose the preset.
    fn blame(&self, conflict: &Conflict) -> Option<GivenAt> {
        let places = conflict.keys.iter().filter_map(|path| self.places.get(path));
        match places.min_by_key(|place| Reverse(place.layer())) {
            Some(GivenAt::Preset(_)) => self.places.get("model.preset").cloned(),
            Some(GivenAt::InitFrom) => self.places.get("train.init_from").cloned(),
            place => place.cloned(),
        }
    }

    fn locate(&self, place: Option<GivenAt>) -> Location {
        match place {
            Some(GivenAt::File { start, end }) => self.source.locate(&(start..end)),
            Some(GivenAt::Override(index)) => overrides::location(overrides::SET, &self.overrides[index]),
            Some(GivenAt::Change(index)) => overrides::location(overrides::CHANGE, &self.changes[index].text),
            Some(GivenAt::InitFrom | GivenAt::Preset(_)) | None => self.source.whole(),
        }
    }

    fn origin(&self, key: &Key) -> Origin {
        match self.places.get(key.path) {
            None => Origin::Default,
            Some(GivenAt::Preset(name)) => Origin::Preset(name.clone()),
            Some(GivenAt::File { start, .. }) => Origin::File { line: self.source.line_number(*start) },
            Some(GivenAt::Override(_)) => Origin::Set,
            Some(GivenAt::InitFrom) => Origin::InitFrom,
            Some(GivenAt::Change(index)) => Origin::Change { step: self.changes[*index].step },
        }
    }
}

/// The values of a preset; none for a name that is not one.
fn preset(name: &str) -> Vec<Given> {
    let Some(text) = presets::text(name) else { return Vec::new() };
    let read = Source::new(name, &text).and_then(|source| document::read(&source));
    read.expect("presets are valid tables").given
}

fn fixed_default(key: &Key, text: &str) -> Value {
    let value = DeValue::parse(text).expect("defaults are valid TOML");
    key.kind.read(Reading { path: key.path, text }, &value).expect("defaults are of their kind")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_reads() {
        for name in presets::presets() {
            assert!(preset(name).len() >= 7, "{name}");
        }
        assert!(preset("llama-9000b").is_empty());
    }
}
