//! What a run would do, without doing any of it.

use crate::run::resume;
use crate::{Result, RunOptions, settled};
use lockstep_checkpoint::{LatestCheckpoint, list};
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_infer::{Existing, InitialWeights, RunData, data_folder};
use lockstep_plan::{Plan, plan};
use lockstep_rundir::{Changed, Overruled, require_sinks};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

/// A run that could start.
#[derive(Debug)]
pub struct DryRun {
    /// Its config, with what was changed in the run.
    pub config: Config,
    /// Its program and the account of it.
    pub plan: Plan,
    /// Bytes of the arenas of all ranks.
    pub arena_bytes: u64,
    /// Bytes of memory that are free, where the device tells.
    pub available_bytes: Option<u64>,
    /// Steps that it has done.
    pub from_step: u64,
    /// What it would do otherwise from here on.
    pub changed: Vec<Changed>,
    /// Steps of checkpoints that it would set aside.
    pub later: Vec<u64>,
    /// Its data.
    pub data: DryData,
    /// The folder of its data.
    pub data_folder: PathBuf,
    /// What is worth knowing.
    pub warnings: Vec<String>,
    /// Values of the config that changes made before overrule.
    pub overruled: Vec<Overruled>,
}

/// The data of a run that could start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DryData {
    /// They are prepared.
    Prepared {
        /// Training tokens.
        train_tokens: u64,
    },
    /// They would be prepared first.
    Text {
        /// Files to read.
        files: u64,
        /// Their bytes.
        bytes: u64,
    },
}

/// Resolves, checks and plans a run as [`run`](crate::run()) would, and refuses what it would refuse: the config, the
/// checkpoint, the paths of the data, the memory. Writes nothing and computes nothing.
pub fn dry_run(devices: &Devices, config: &Config, options: &RunOptions, stop: &AtomicBool) -> Result<DryRun> {
    config.require_data()?;
    let config = &settled(devices, config, Some(options.dir.as_path()).filter(|_| !options.fresh), &mut |_, _| {})?;
    let (LatestCheckpoint { loaded, mut warnings }, course) = resume(devices, config, options, None)?;
    warnings.extend(course.warnings);
    let config = course.config;
    require_sinks(&config)?;
    let plan = plan(devices, &config)?;
    let arena_bytes = devices.require_memory(&config, &plan)?;
    let there = if options.fresh { Vec::new() } else { list(&options.dir.join("checkpoints"))? };
    if loaded.is_none()
        && let Some(weights) = InitialWeights::open(&config)?
    {
        warnings.extend(weights.warnings);
    }
    let folder = data_folder(&config, &options.dir);
    let existing = if there.is_empty() { Existing::Refresh } else { Existing::Keep };
    // A run that starts over sets its own data aside too.
    let own = options.fresh && config.prepared_dir().is_none();
    let data = match RunData::look(&config, &if own { folder.join("old") } else { folder.clone() }, existing, stop)? {
        Ok(data) => {
            data.refuse_other_text(&config, &folder, stop, &mut |text| warnings.push(text.to_owned()))?;
            // Refuses data that are less than a sequence.
            data.train(&config)?;
            DryData::Prepared { train_tokens: data.train_tokens() }
        }
        Err(text) => DryData::Text { files: text.files, bytes: text.bytes },
    };
    let from_step = loaded.as_ref().map_or(0, |loaded| loaded.step);
    let later = there.into_iter().map(|(step, _)| step).filter(|step| *step > from_step);
    Ok(DryRun {
        available_bytes: devices.device(plan.target)?.available_bytes()?,
        plan,
        arena_bytes,
        from_step,
        changed: course.new,
        later: if options.resume_from.is_some() { later.collect() } else { Vec::new() },
        data,
        data_folder: folder,
        warnings,
        overruled: course.overruled,
        config,
    })
}
