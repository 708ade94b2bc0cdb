//! Where a config and its values came from.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::inherit::{Inherited, Located, NotInherited};

/// Where the values of a config came from.
#[derive(Clone, Debug)]
pub(crate) struct Provenance {
    /// The config file as the user named it.
    pub file_name: String,
    /// The folder that `data.paths` start from.
    pub base_dir: PathBuf,
    /// Of every key.
    pub origins: BTreeMap<&'static str, Origin>,
    /// What the user should know of what was read, a line each.
    pub warnings: Vec<String>,
    /// Those of them that are about a warmup or decay that was cut to fit the run.
    pub cut_schedule: Vec<String>,
    /// What it was all made from.
    pub given: Given,
}

/// What a config was read from.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    pub path: PathBuf,
    pub text: String,
    pub overrides: Vec<String>,
    /// What was taken from the folder that `train.init_from` names.
    pub inherited: Option<Inherited>,
    /// Where names lead that are no paths, by key and text.
    pub located: BTreeMap<(&'static str, String), Located>,
    /// Why the name in `train.init_from` leads nowhere, where nothing else needs it.
    pub not_located: Option<NotInherited>,
}

/// Where one value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Default,
    Preset(String),
    File {
        line: usize,
    },
    Set,
    /// From the folder that `train.init_from` names.
    InitFrom,
    /// A default that was found when the machine was known; the text says how.
    Found(String),
    /// What "auto" was found to be; the text says how.
    Auto(String),
    Change {
        step: u64,
    },
}
