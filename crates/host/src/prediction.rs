//! How long a step takes, said before it runs: by this machine's profile or the catalogue.

use crate::{Devices, Result, catalogue, profile_of};
use lockstep_plan::{Plan, Rates, TimedWork};
use lockstep_sim::{Forecast, Hardware, MachineProfile};
use serde::{Deserialize, Serialize};

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

/// This machine's profile of the device that a plan is for.
pub fn machine_profile(devices: &Devices, plan: &Plan) -> Result<Option<MachineProfile>> {
    Ok(profile_of(&devices.processor(plan.target)?)?.map(|(_, profile)| profile))
}

/// How long a step of a plan takes on what it was planned for: by this machine's profile, or by the catalogue where that has the GPU.
/// None where neither is known.
pub fn predict(devices: &Devices, plan: &Plan) -> Result<Option<Prediction>> {
    if let Some(profile) = machine_profile(devices, plan)? {
        return predict_by(&profile, plan).map(Some);
    }
    match catalogue()?.of_device(&devices.processor(plan.target)?) {
        Some(gpu) if plan.layout.mesh.ranks() == 1 => {
            let by = format!("catalogue {}", gpu.name);
            predict_at(Rates::Catalogue(&Hardware::assumed(gpu)), by, plan).map(Some)
        }
        _ => Ok(None),
    }
}

/// How long a step of a plan takes, by a profile.
pub fn predict_by(profile: &MachineProfile, plan: &Plan) -> Result<Prediction> {
    predict_at(Rates::Measured(profile), format!("profile {}", profile.name), plan)
}

fn predict_at(rates: Rates, by: String, plan: &Plan) -> Result<Prediction> {
    let predict = |work: &TimedWork| {
        let (unmeasured, measured_as_run) = (work.unmeasured.clone(), work.measured_as_run);
        Ok(Prediction { by, measured_as_run, unmeasured, forecast: work.forecast(&plan.asked())? })
    };
    Ok(rates.timed(&plan.compiled.programs, plan.layout.mesh.ranks(), plan.threads, predict)?)
}
