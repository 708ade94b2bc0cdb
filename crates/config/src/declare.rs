//! The form of a declaration: the `tables!` macro, and what it makes of a key.

use serde::Serialize;

use crate::conflict::Conflict;
use crate::kind::Kind;
use crate::optimizers::{self, Constant};
use crate::value::Value;
use crate::values::Values;

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
    /// A constant of the optimizer, where that has it.
    OfOptimizer(Constant),
}

impl Default {
    fn text(&self) -> String {
        match self {
            Default::Fixed(text) | Default::Derived(text, _) | Default::DerivedOrRequired(text, _) => text,
            Default::Required => "required, or from model.preset",
            Default::Unset => "not set",
            Default::OfOptimizer(constant) => return optimizers::defaults(*constant),
        }
        .to_owned()
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

impl Key {
    pub(crate) fn doc(&self) -> KeyDoc {
        KeyDoc {
            path: self.path,
            type_text: self.kind.type_text(),
            default: self.default.text(),
            meaning: self.meaning.trim().to_owned(),
            synonyms: self.synonyms,
            old_names: self.old_names,
        }
    }
}

/// The name of a key whose field has this name: the same, and without `r#` where it is a word of Rust.
macro_rules! name {
    (r#virtual) => {
        "virtual"
    };
    ($field:ident) => {
        stringify!($field)
    };
}
pub(crate) use name;

/// Declares the tables and keys of `run.toml`: the structs, [`Config`], `TABLES`, `KEYS`, `value_of` and `build`.
macro_rules! tables {
    ($(
        $(#[doc = $about:literal])+
        $table:ident: $Struct:ident {
            $(
                $(#[doc = $meaning:expr])+
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
                name: name!($field),
                path: concat!(stringify!($table), ".", name!($field)),
                kind: $kind,
                default: $default,
                effect: $effect,
                meaning: concat!($($meaning),+),
                synonyms: &[$($($synonym),+)?],
                old_names: &[$($($old),+)?],
            },
        )+)+];

        /// The value that a config has for a key.
        pub(crate) fn value_of(config: &Config, key: &Key) -> Option<Value> {
            match key.path {
                $($(concat!(stringify!($table), ".", name!($field)) => config.$table.$field.to_value(),)+)+
                path => unreachable!("{path} is declared above"),
            }
        }

        /// The typed config of a complete set of values.
        pub(crate) fn build(values: &Values, provenance: Provenance) -> Config {
            Config {
                $(
                    $table: $Struct {
                        $(
                            $field: values.take(concat!(stringify!($table), ".", name!($field))),
                        )+
                    },
                )+
                provenance,
            }
        }
    };
}
pub(crate) use tables;
