//! The form of a declaration: the `tables!` macro, what it makes of a key, and the listing.

use serde::Serialize;

use crate::checks::Conflict;
use crate::error::Problem;
use crate::kind::Kind;
use crate::resolve::Values;
use crate::schema::{Config, KEYS, TABLES};
use crate::search;
use crate::suggest;
use crate::value::Value;

/// One key, as `lockstep config` lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KeyDoc {
    /// `table.key`.
    pub path: &'static str,
    /// The type and the values it accepts.
    #[serde(rename = "type")]
    pub type_text: String,
    /// The value where the file gives none.
    pub default: String,
    /// What it means, in a sentence.
    pub meaning: String,
    /// What else people call it.
    pub synonyms: &'static [&'static str],
    /// Names that it had before and that are still read, with a warning.
    pub old_names: &'static [&'static str],
}

/// Every key of `run.toml`, in the order of the schema.
pub fn schema() -> Vec<KeyDoc> {
    KEYS.iter().map(Key::doc).collect()
}

/// The declaration of one key.
pub(crate) struct Key {
    pub table: &'static str,
    pub name: &'static str,
    pub path: &'static str,
    pub kind: Kind,
    pub default: Default,
    pub effect: Effect,
    pub meaning: &'static str,
    pub synonyms: &'static [&'static str],
    pub old_names: &'static [&'static str],
    pub get: fn(&Config) -> Option<Value>,
}

/// The value of a key that was not given.
pub(crate) enum Default {
    /// TOML text.
    Fixed(&'static str),
    /// None: the user must give it, or a preset.
    Required,
    /// None, and none is needed.
    Unset,
    /// As `Derived` where it can be made, as `Required` where not.
    DerivedOrRequired(&'static str, fn(&Values) -> Result<Option<Value>, Conflict>),
    /// Made from keys declared earlier; the text says how.
    Derived(&'static str, fn(&Values) -> Result<Option<Value>, Conflict>),
}

impl Default {
    fn text(&self) -> &'static str {
        match self {
            Default::Fixed(text) | Default::Derived(text, _) | Default::DerivedOrRequired(text, _) => text,
            Default::Required => "required, or from model.preset",
            Default::Unset => "not set",
        }
    }
}

/// Whether a run may be resumed with another value of the key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// It says what the weights or the data mean, or how a run begins: no.
    Trajectory,
    /// It changes the losses from the step on at which it changes: where the user says so, with `--change`.
    Changeable,
    /// It changes only how the run is carried out or watched: yes.
    Conduct,
}

/// A key, and the old name that it was given by, if it was.
pub(crate) struct Named {
    pub key: &'static Key,
    pub old_name: Option<&'static str>,
}

impl Key {
    fn doc(&self) -> KeyDoc {
        KeyDoc {
            path: self.path,
            type_text: self.kind.type_text(),
            default: self.default.text().to_owned(),
            meaning: self.meaning.trim().to_owned(),
            synonyms: self.synonyms,
            old_names: self.old_names,
        }
    }

    /// The key at `table.name`, or why there is none.
    pub(crate) fn find(table: &str, name: &str) -> Result<Named, Problem> {
        let siblings = || KEYS.iter().filter(|key| key.table == table);
        if let Some(key) = siblings().find(|key| key.name == name) {
            return Ok(Named { key, old_name: None });
        }
        let renamed = |key: &'static Key| {
            let old_name = key.old_names.iter().copied().find(|old| *old == name)?;
            Some(Named { key, old_name: Some(old_name) })
        };
        if let Some(named) = siblings().find_map(renamed) {
            return Ok(named);
        }
        let shown = crate::source::quoted(name);
        let list =
            || format!("the keys of [{table}] are {}", siblings().map(|key| key.name).collect::<Vec<_>>().join(", "));
        if let Some(what) = search::missing(table, name) {
            return Err(Problem::new(format!("{table}.{shown}: {what} is not there yet"), list()));
        }
        let problem = format!("{table}.{shown} is not a key of [{table}]");
        let hint = if let Some(key) = search::meant(table, name) {
            let near = if key.table == table { key.name } else { key.path };
            format!("did you mean `{near}`?")
        } else if let Some(near) = suggest::nearest(name, siblings().map(|key| key.name)) {
            format!("did you mean `{near}`?")
        } else {
            list()
        };
        Err(Problem::new(problem, hint))
    }

    /// Checks that `[table]` exists, or says why not.
    pub(crate) fn check_table(table: &str) -> Result<(), Problem> {
        if TABLES.contains(&table) {
            return Ok(());
        }
        let problem = format!("{} is not a table of the config", crate::source::quoted(table));
        let hint = if let Some(key) = search::meant("", table) {
            format!("did you mean `{}`?", key.path)
        } else if let Some(near) = suggest::nearest(table, TABLES.iter().copied()) {
            format!("did you mean `{near}`?")
        } else {
            format!("the tables are {}", TABLES.join(", "))
        };
        Err(Problem::new(problem, hint))
    }
}

/// Declares the tables and keys of `run.toml`: the structs, [`Config`], `TABLES`, `KEYS` and `build`.
macro_rules! tables {
    ($(
        $(#[doc = $about:literal])+
        $table:ident: $Struct:ident {
            $(
                $(#[doc = $meaning:literal])+
                $field:ident: $ty:ty = $kind:expr, $default:expr, $effect:expr
                    $(, finds [$($synonym:literal),+ $(,)?])? $(, was [$($old:literal),+])?;
            )+
        }
    )+) => {
        $(
            $(#[doc = $about])+
            #[derive(Clone, Debug, PartialEq)]
            pub struct $Struct {
                $(
                    $(#[doc = $meaning])+
                    pub $field: $ty,
                )+
            }
        )+

        /// A whole config with every default resolved. Two are equal when their values are, wherever those came from.
        #[derive(Clone, Debug)]
        pub struct Config {
            $(
                $(#[doc = $about])+
                pub $table: $Struct,
            )+
            pub(crate) provenance: Provenance,
        }

        /// The names of the tables, in order.
        pub(crate) static TABLES: &[&str] = &[$(stringify!($table)),+];

        /// Every key, in order.
        pub(crate) static KEYS: &[Key] = &[$($(
            Key {
                table: stringify!($table),
                name: stringify!($field),
                path: concat!(stringify!($table), ".", stringify!($field)),
                kind: $kind,
                default: $default,
                effect: $effect,
                meaning: concat!($($meaning),+),
                synonyms: &[$($($synonym),+)?],
                old_names: &[$($($old),+)?],
                get: |config| config.$table.$field.to_value(),
            },
        )+)+];

        /// The typed config of a complete set of values.
        pub(crate) fn build(values: &Values, provenance: Provenance) -> Config {
            Config {
                $(
                    $table: $Struct {
                        $(
                            $field: values.take(concat!(stringify!($table), ".", stringify!($field))),
                        )+
                    },
                )+
                provenance,
            }
        }
    };
}
pub(crate) use tables;
