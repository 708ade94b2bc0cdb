//! How long a step takes, by whatever is known of where it will run.

use crate::PlanError;
use crate::plan::hardware_flops;
use lockstep_ir::StepProgram;
use lockstep_sim::{Constants, Framework, Hardware, MachineProfile, Workload};

/// What the time of a step is estimated by.
#[derive(Clone, Copy)]
pub enum Pace<'a> {
    /// Hardware that was named, simulated.
    On(&'a Hardware),
    /// What was measured of the machine, simulated.
    Measured(&'a MachineProfile),
    /// Nothing but FLOPs: recomputation counts, communication and kernel launches do not.
    Flops,
}

impl Pace<'_> {
    /// The time of a step of these programs, on so many threads of each rank: seconds, or for [`Pace::Flops`] the FLOPs of a rank.
    pub(crate) fn step(self, programs: &[StepProgram], threads: usize) -> Result<f64, PlanError> {
        let framework = Framework::lockstep();
        let ranks = programs.first().map_or(1, |p| p.mesh.ranks());
        let work = || Workload::new(programs, StepProgram::TRAIN, &framework);
        match self {
            Pace::On(hardware) => {
                Ok(work()?.on(hardware, &framework).price(&Constants::builtin().terms(&framework, hardware))?)
            }
            Pace::Measured(profile) => match profile.measured(ranks, threads) {
                Some(measured) => {
                    let work = work()?;
                    let (placed, _) = work.measured(&measured, &framework);
                    Ok(placed.price(&measured.setting.terms())?)
                }
                None => Pace::Flops.step(programs, threads),
            },
            Pace::Flops => Ok(hardware_flops(programs)? as f64 / ranks as f64),
        }
    }

    /// Whether [`Pace::step`] is in seconds.
    pub(crate) fn is_time(self) -> bool {
        match self {
            Pace::On(_) => true,
            Pace::Measured(profile) => !profile.settings.is_empty(),
            Pace::Flops => false,
        }
    }

    /// What an estimate rests on: `predicted on A100 80GB, Leonardo`.
    pub(crate) fn basis(self) -> String {
        match self {
            Pace::On(hardware) => format!("predicted on {}, {}", hardware.gpu.label(), hardware.cluster.label),
            Pace::Measured(profile) => format!("predicted by profile {} of this machine", profile.name),
            Pace::Flops => "estimated by FLOPs alone: no GPU was named, and this machine has no profile".into(),
        }
    }
}
