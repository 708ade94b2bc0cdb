//! This machine's profile, and what it or the catalogue says of a step before it runs.

use crate::{Devices, TrainError, catalogue};
use lockstep_exec::Timing;
use lockstep_plan::{Plan, Rates, Target, TimedWork};
use lockstep_sim::machine::{Sample, Table, observe};
use lockstep_sim::{Forecast, Hardware, MachineProfile, Setting, SimError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The folder of machine profiles: `LOCKSTEP_MACHINES`, else `lockstep/machines` in the user's config folder.
pub fn machines_folder() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("LOCKSTEP_MACHINES") {
        return Some(PathBuf::from(folder));
    }
    let named = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
    Some(named.or_else(home)?.join("lockstep/machines"))
}

/// How long a step takes, said before it runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// What it rests on: `profile laptop`, or `catalogue h200`.
    pub by: String,
    /// Whether the profile was measured with as many ranks and threads as the run has.
    pub measured_as_run: bool,
    /// Ops that were never measured, and are estimated from others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unmeasured: Vec<String>,
    /// The step.
    #[serde(flatten)]
    pub forecast: Forecast,
}

/// What computes, as the system or the driver calls it.
pub fn processor(devices: &Devices, target: Target) -> Result<String, TrainError> {
    Ok(devices.device(target)?.processor())
}

/// Ranks and threads of a plan, as a profile counts them.
pub(crate) fn shared_by(plan: &Plan) -> (usize, usize) {
    match plan.target {
        Target::Cpu => (plan.layout.mesh.ranks(), plan.threads),
        Target::Cuda { .. } => (plan.layout.mesh.ranks(), 0),
    }
}

/// The profile that was last saved for what computes here, and its file.
pub(crate) fn profile_of(processor: &str) -> Result<Option<(PathBuf, MachineProfile)>, TrainError> {
    let Some(folder) = machines_folder() else { return Ok(None) };
    // A folder that is not there has no files.
    let Ok(entries) = fs::read_dir(folder) else { return Ok(None) };
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "toml"));
    files.sort();
    let mut latest: Option<(PathBuf, MachineProfile)> = None;
    for path in files {
        let found = read(&path)?;
        let later = latest.as_ref().is_none_or(|(_, known)| known.saved_unix_s <= found.saved_unix_s);
        if found.processor == processor && later {
            latest = Some((path, found));
        }
    }
    Ok(latest)
}

fn read(path: &Path) -> Result<MachineProfile, TrainError> {
    let text = fs::read_to_string(path).map_err(|e| TrainError::io("read", path, e))?;
    Ok(MachineProfile::parse(&path.display().to_string(), &text)?)
}

/// Writes a profile into the folder of profiles, and says where.
pub fn save_machine(profile: &MachineProfile) -> Result<PathBuf, TrainError> {
    let folder = machines_folder().ok_or_else(|| {
        let reason = "there is no home folder to save it in".to_owned();
        let hint = "set LOCKSTEP_MACHINES to a folder".to_owned();
        TrainError::Hardware(SimError::File { file: format!("{}.toml", profile.name), reason, hint })
    })?;
    fs::create_dir_all(&folder).map_err(|e| TrainError::io("create", &folder, e))?;
    let path = folder.join(format!("{}.toml", profile.name));
    profile_file(&path, profile)?;
    Ok(path)
}

/// Writes a profile so that its file is either the old or the new one.
pub(crate) fn profile_file(path: &Path, profile: &MachineProfile) -> Result<(), TrainError> {
    let temporary = path.with_extension("new");
    fs::write(&temporary, profile.to_toml())
        .and_then(|()| fs::rename(&temporary, path))
        .map_err(|e| TrainError::io("write", path, e))
}

/// This machine's profile of the device that a plan is for.
pub fn machine_profile(devices: &Devices, plan: &Plan) -> Result<Option<MachineProfile>, TrainError> {
    Ok(profile_of(&processor(devices, plan.target)?)?.map(|(_, profile)| profile))
}

/// How long a step of a plan takes on what it was planned for: by this machine's profile, or by the catalogue where that has the GPU.
/// None where neither is known.
pub fn predict(devices: &Devices, plan: &Plan) -> Result<Option<Prediction>, TrainError> {
    if let Some(profile) = machine_profile(devices, plan)? {
        return predict_by(&profile, plan).map(Some);
    }
    let one = plan.layout.mesh.ranks() == 1;
    match (plan.target, catalogue()?.of_device(&processor(devices, plan.target)?)) {
        (Target::Cuda { .. }, Some(gpu)) if one => {
            let by = format!("catalogue {}", gpu.name);
            predict_at(Rates::Catalogue(&Hardware::assumed(gpu)), by, plan).map(Some)
        }
        _ => Ok(None),
    }
}

/// The same by a profile.
pub(crate) fn predict_by(profile: &MachineProfile, plan: &Plan) -> Result<Prediction, TrainError> {
    predict_at(Rates::Measured(profile), format!("profile {}", profile.name), plan)
}

fn predict_at(rates: Rates, by: String, plan: &Plan) -> Result<Prediction, TrainError> {
    let predict = |work: &TimedWork| {
        let (unmeasured, measured_as_run) = (work.unmeasured.clone(), work.measured_as_run);
        Ok(Prediction { by, measured_as_run, unmeasured, forecast: work.forecast(&plan.asked())? })
    };
    Ok(rates.timed(&plan.compiled.programs, plan.layout.mesh.ranks(), plan.threads, predict)?)
}

/// What timed steps of a plan say of the machine: points by op, and the mean seconds of a step
/// by what they were spent on.
pub(crate) fn observed(
    plan: &Plan,
    setting: &Setting,
    steps: &[Vec<Timing>],
) -> Result<(Vec<Table>, BTreeMap<String, f64>), TrainError> {
    let sample = |t: &Timing| Sample { segment: t.slot.segment, instr: t.instr, seconds: t.seconds };
    let samples: Vec<Sample> = steps.iter().flatten().map(sample).collect();
    let (tables, mut classes) = observe(plan.program(), setting, &samples)?;
    classes.values_mut().for_each(|seconds| *seconds /= steps.len().max(1) as f64);
    Ok((tables, classes))
}
