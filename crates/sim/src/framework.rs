//! What other frameworks do otherwise, as data: the cost of the same programs is estimated with it. What was fitted stands in the table of
//! constants, under the framework's name.

use crate::{Result, SimError};
use serde::{Deserialize, Serialize};

/// A framework's way of running a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Framework {
    /// Its name, and that of its constants.
    pub name: String,
    /// Whether the gathers of sharded parameters overlap with kernels.
    pub overlaps_gathers: bool,
    /// Whether sums of gradients over ranks overlap with kernels.
    pub overlaps_reductions: bool,
    /// Whether it does as one what the program joins to groups.
    pub fuses_groups: bool,
    /// Whether ranks of experts are neighbours, whatever else ranks split: they are those of tensor and context parallelism too.
    #[serde(default)]
    pub folds_experts: bool,
    /// Whether a row that goes to several experts of another node is sent there once, and passed on inside the node.
    #[serde(default)]
    pub sends_once_per_node: bool,
    /// Where the forward pass of a micro-batch runs beside the backward pass of another, so that all-to-alls of either are hidden by kernels of
    /// both (DualPipe): the share of a GPU's multiprocessors that is left to kernels.
    #[serde(default)]
    pub kernels_beside_exchanges: Option<f64>,
    /// The framework whose constants hold where it has none of its own.
    #[serde(default)]
    pub constants_of: Option<String>,
    /// Where it comes from and what is known of it.
    pub source: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FrameworkFile {
    framework: Vec<Framework>,
}

impl Framework {
    /// What every build knows; the first is Lockstep.
    pub fn builtin() -> Vec<Self> {
        Self::parse("frameworks.toml", include_str!("../data/frameworks.toml"))
            .unwrap_or_else(|error| unreachable!("{error}"))
    }

    /// Those of a data file.
    pub fn parse(file: &str, text: &str) -> Result<Vec<Self>> {
        let refuse = |reason: &str| SimError::file(file, reason, "write it as entries of [[framework]]");
        let parsed: FrameworkFile = toml::from_str(text).map_err(|error| refuse(error.to_string().trim_end()))?;
        Ok(parsed.framework)
    }

    /// This program's own way.
    pub fn lockstep() -> Self {
        Self::builtin().remove(0)
    }

    /// The framework called `name`, in any letter case.
    pub fn named(name: &str) -> Option<Self> {
        Self::builtin().into_iter().find(|framework| framework.name.eq_ignore_ascii_case(name))
    }
}
