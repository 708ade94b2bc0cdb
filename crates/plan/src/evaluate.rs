//! One config, compiled and simulated: what layouts are compared by.

use crate::plan::{hardware_flops, prepare, settle_policy};
use crate::{Machine, Result};
use lockstep_compile::{Context, Estimator, Recompute};
use lockstep_config::Config;
use lockstep_ir::account::{self, MemoryBreakdown};
use lockstep_ir::{Graph, Layout, MatmulType, StepProgram};
use lockstep_sim::{
    Asked, Constants, Forecast, Framework, Hardware, MachineProfile, Placed, SimError, Terms, Workload,
};

/// What steps are timed by.
#[derive(Clone, Copy, Debug)]
pub enum Rates<'a> {
    /// GPUs of the catalogue, with the constants of the cost model.
    Catalogue(&'a Hardware),
    /// What was measured on a machine.
    Measured(&'a MachineProfile),
}

/// Programs with what their step is timed by.
pub struct TimedWork<'a> {
    /// The programs.
    pub placed: Placed<'a>,
    /// What they run on.
    pub hardware: Hardware,
    /// The constants of the cost model there.
    pub terms: Terms,
    /// Ops that were never measured there, and are estimated from others.
    pub unmeasured: Vec<String>,
    /// Whether the machine was measured with as many ranks and threads.
    pub measured_as_run: bool,
}

impl TimedWork<'_> {
    /// The forecast of a step that is to achieve this.
    pub fn forecast(&self, asked: &Asked) -> Result<Forecast, SimError> {
        self.placed.forecast(asked, &self.hardware, &self.terms)
    }
}

impl Rates<'_> {
    /// Gives `f` the training step of programs, each rank of which has this many threads.
    pub fn timed<T>(
        self,
        programs: &[StepProgram],
        ranks: usize,
        threads: usize,
        f: impl FnOnce(&TimedWork) -> Result<T, SimError>,
    ) -> Result<T, SimError> {
        let framework = Framework::lockstep();
        let work = Workload::new(programs, StepProgram::TRAIN, &framework)?;
        f(&match self {
            Rates::Catalogue(hardware) => TimedWork {
                placed: work.on(hardware, &framework),
                hardware: hardware.clone(),
                terms: Constants::builtin().terms(&framework, hardware),
                unmeasured: Vec::new(),
                measured_as_run: false,
            },
            Rates::Measured(profile) => {
                let (file, hint) = (format!("{}.toml", profile.name), "measure again: lockstep bench --save NAME");
                let measured = profile.measured(ranks, threads);
                let measured = measured.ok_or_else(|| SimError::file(file, "it has no [[setting]]", hint))?;
                let (placed, unmeasured) = work.measured(&measured, &framework);
                TimedWork {
                    placed,
                    hardware: measured.setting.hardware(&profile.name),
                    terms: measured.setting.terms(),
                    unmeasured: unmeasured.into_iter().collect(),
                    measured_as_run: measured.exact,
                }
            }
        })
    }

    /// Seconds of a step of programs, each rank of which has this many threads.
    pub(crate) fn step_s(self, programs: &[StepProgram], ranks: usize, threads: usize) -> Result<f64, SimError> {
        self.timed(programs, ranks, threads, |work| work.placed.price(&work.terms))
    }
}

/// A config as its programs would run: bytes to the byte, time as the simulator says.
#[derive(Clone, Debug)]
pub struct Evaluated {
    /// How the work is split.
    pub layout: Layout,
    /// What is recomputed in backward: under a budget, what that allows.
    pub recompute: Recompute,
    /// Elements of all parameters.
    pub parameters: u64,
    /// Tokens of one step.
    pub tokens_per_step: u64,
    /// Model FLOPs of one step, on all ranks.
    pub model_flops: f64,
    /// The type that matmuls compute in.
    pub compute: MatmulType,
    /// Bytes by class, layer and moment of a rank of each pipeline stage.
    pub stages: Vec<MemoryBreakdown>,
    /// How long a step takes.
    pub forecast: Forecast,
}

impl Evaluated {
    /// Bytes of the rank that needs most.
    pub fn memory(&self) -> &MemoryBreakdown {
        let largest = self.stages.iter().max_by_key(|stage| stage.total_bytes);
        largest.unwrap_or_else(|| unreachable!("a program has a stage"))
    }
}

/// Compiles a config and simulates a step of it. The programs are those that [`crate::plan`] makes, which also verifies them.
pub fn evaluate(machine: &dyn Machine, config: &Config, rates: Rates) -> Result<Evaluated> {
    let (forward, mut context, threads) = prepare(machine, config, lockstep_model::build_form)?;
    settle_policy(config, &forward, &mut context)?;
    let estimator = Estimator::new(&forward, &context)?;
    let programs = estimator.programs(context.recompute.clone())?;
    evaluated(config, &forward, &context, &estimator, &programs, |asked| {
        rates.timed(&programs, context.layout.mesh.ranks(), threads, |work| work.forecast(asked))
    })
}

/// The same of programs that are there.
pub(crate) fn evaluated(
    config: &Config,
    forward: &Graph,
    context: &Context,
    estimator: &Estimator,
    programs: &[StepProgram],
    forecast: impl FnOnce(&Asked) -> Result<Forecast, SimError>,
) -> Result<Evaluated> {
    let micro_batches = context.layout.micro_batches as f64;
    let asked = Asked {
        tokens: (config.batches().largest() * config.train.seq) as u64,
        model_flops: estimator.model_flops()?.model as f64 * micro_batches,
        hardware_flops: hardware_flops(programs)? as f64,
        compute: context.precision.multiplies(),
    };
    Ok(Evaluated {
        layout: context.layout,
        recompute: context.recompute.clone(),
        parameters: forward.parameters().map(|(_, v, _)| v.ty.elements() as u64).sum(),
        tokens_per_step: asked.tokens,
        model_flops: asked.model_flops,
        compute: asked.compute,
        stages: programs.iter().map(account::memory).collect(),
        forecast: forecast(&asked)?,
    })
}
