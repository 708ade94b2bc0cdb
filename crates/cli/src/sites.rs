//! What jobs ask for at known sites: `lockstep launch --slurm --cluster NAME`.
//!
//! The file `data/sites.toml` is part of the program. A user's own files have the same form: `*.toml` in the folder that
//! `LOCKSTEP_SITES` names, else in `lockstep/sites` of the user's config folder. An entry of a known name replaces it.

use crate::failure::{Failure, Result};
use lockstep_config::nearest;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    site: Vec<Site>,
}

/// A site, whose values are those of `[cluster]` where they have the same names.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Site {
    name: String,
    label: String,
    partition: Option<String>,
    qos: Option<String>,
    gpus_per_node: Option<usize>,
    cpus_per_rank: Option<usize>,
    #[serde(default)]
    modules: Vec<String>,
    #[serde(default)]
    setup: Vec<String>,
    #[serde(default)]
    srun: Vec<String>,
    #[serde(default)]
    sbatch: Vec<String>,
    /// Whether jobs are refused without an account.
    #[serde(default)]
    account: bool,
    /// What a user must know besides.
    note: Option<String>,
    /// Where these values were read.
    source: String,
    /// Whether somebody has run a job with them.
    #[serde(default)]
    tried: bool,
}

impl Site {
    /// Overrides of the config, but for what a job may choose and the `[cluster]` of this file has. GPUs per node are a fact.
    pub fn overrides(&self, config: &Path) -> Vec<String> {
        // A file that cannot be read is an error of whoever reads it in full.
        let text = std::fs::read_to_string(config).unwrap_or_default();
        let table: toml::Table = text.parse().unwrap_or_default();
        let given =
            |key: &str| key != "gpus_per_node" && table.get("cluster").and_then(|cluster| cluster.get(key)).is_some();
        let text = |key, value: &Option<String>| value.as_ref().map(|value| (key, format!("{value:?}")));
        let count = |key, value: &Option<usize>| value.map(|value| (key, value.to_string()));
        let list = |key, value: &[String]| (!value.is_empty()).then(|| (key, format!("{value:?}")));
        let all = [
            text("partition", &self.partition),
            text("qos", &self.qos),
            count("gpus_per_node", &self.gpus_per_node),
            count("cpus_per_rank", &self.cpus_per_rank),
            list("modules", &self.modules),
            list("setup", &self.setup),
            list("srun", &self.srun),
            list("sbatch", &self.sbatch),
        ];
        let missing = all.into_iter().flatten().filter(|(key, _)| !given(key));
        missing.map(|(key, value)| format!("cluster.{key}={value}")).collect()
    }

    /// What a user should know before a job of this site is submitted.
    pub fn warnings(&self, account: Option<&str>) -> Vec<String> {
        let Self { label, source, note, .. } = self;
        let tried =
            (!self.tried).then(|| format!("nobody has run a job on {label} with these values; they are from {source}"));
        let account = (self.account && account.is_none())
            .then(|| format!("{label} refuses jobs without an account: give --account NAME, or set cluster.account"));
        let note = note.as_ref().map(|note| format!("{label}: {note}"));
        [tried, note, account].into_iter().flatten().collect()
    }
}

/// All sites that are known.
pub fn all() -> Result<Vec<Site>> {
    let mut sites = Vec::new();
    add(&mut sites, "sites.toml", include_str!("../data/sites.toml"))?;
    for path in files() {
        let text = std::fs::read_to_string(&path).map_err(|error| {
            let hint = "make it readable, or move it out of the folder";
            Failure::request(format!("cannot read {}: {error}", path.display()), hint)
        })?;
        add(&mut sites, &path.display().to_string(), &text)?;
    }
    Ok(sites)
}

/// The site called `name`, in any letter case.
pub fn named(name: &str) -> Result<Option<Site>> {
    Ok(all()?.into_iter().find(|site| site.name.eq_ignore_ascii_case(name)))
}

/// Refuses a name that is neither a site's nor a cluster's of the catalogue.
pub fn require_known(name: Option<&str>) -> Result<()> {
    let Some(name) = name else { return Ok(()) };
    let (sites, catalogue) = (all()?, lockstep_host::catalogue()?);
    let names = sites.iter().map(|site| &site.name).chain(catalogue.clusters.iter().map(|cluster| &cluster.name));
    let known: BTreeSet<&str> = names.map(String::as_str).collect();
    if known.iter().any(|known| known.eq_ignore_ascii_case(name)) {
        return Ok(());
    }
    let guess = nearest(name, known.iter().copied()).map_or(String::new(), |near| format!("did you mean {near}? "));
    let list = Vec::from_iter(known).join(", ");
    Err(Failure::request(format!("--cluster {name} is not known"), format!("{guess}known are {list}")))
}

fn add(sites: &mut Vec<Site>, file: &str, text: &str) -> Result<()> {
    let parsed: File = toml::from_str(text).map_err(|error| {
        Failure::request(
            format!("{file}: {}", error.to_string().trim_end()),
            "a [[site]] has name, label and source, and may have partition, qos, gpus_per_node, cpus_per_rank, modules, setup, srun, \
             sbatch, account, note and tried",
        )
    })?;
    for site in parsed.site {
        sites.retain(|known| !known.name.eq_ignore_ascii_case(&site.name));
        sites.push(site);
    }
    Ok(())
}

/// The user's files, in the order of their names.
fn files() -> Vec<PathBuf> {
    let folder = std::env::var_os("LOCKSTEP_SITES").map(PathBuf::from).or_else(|| {
        let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
        let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
        Some(config.or_else(home)?.join("lockstep/sites"))
    });
    let entries = folder.and_then(|folder| std::fs::read_dir(folder).ok());
    let mut files: Vec<PathBuf> = entries.into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_site_of_the_program_says_where_its_values_are_from() {
        let sites = all().unwrap_or_else(|_| panic!("the built-in file is whole"));
        assert!(sites.len() > 10);
        for site in &sites {
            assert!(!site.source.is_empty() && !site.label.is_empty(), "{}", site.name);
            assert!(
                site.cpus_per_rank.is_some() && (site.gpus_per_node.is_some() || site.note.is_some()),
                "{}",
                site.name
            );
        }
    }
}
