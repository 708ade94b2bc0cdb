//! From a described row to its programs.

use super::peer::Described;
use crate::plan::{prepare, settle_policy};
use crate::{Machine, Result, Target};
use lockstep_compile::{Context, Estimator, Precision, Recompute, Recomputed};
use lockstep_config::Config;
use lockstep_ir::{Axis, DeviceProfile, Graph, Op, StepProgram};
use std::collections::BTreeMap;

/// What programs of other frameworks are compiled for: a GPU that fuses nothing and has the logits of a micro-batch whole.
pub struct PeerMachine;

impl Machine for PeerMachine {
    fn cores(&self) -> usize {
        1
    }

    fn has_gpus(&self, _ranks: usize) -> bool {
        true
    }

    fn profile(&self, _device: Target, _threads: usize, _precision: Precision) -> DeviceProfile {
        DeviceProfile {
            name: "a framework's GPU".into(),
            alignment: 512,
            cross_entropy_logits: usize::MAX,
            cross_entropy_rows: usize::MAX,
            workspaces: BTreeMap::new(),
            workspaces_with_optional: BTreeMap::new(),
            fusions: Vec::new(),
            faster: Vec::new(),
            fp8_weights: 0,
        }
    }
}

/// A row with all that its programs came from.
pub(super) struct Built {
    pub config: Config,
    pub forward: Graph,
    /// With what is recomputed.
    pub context: Context,
    pub estimator: Estimator,
    pub programs: Vec<StepProgram>,
}

/// Compiles a row, one program per pipeline stage. `name` is what errors call it.
pub fn compile(described: &Described, name: &str) -> Result<(Config, Vec<StepProgram>), String> {
    built(described, name).map(|built| (built.config, built.programs))
}

/// The same, with all that the programs came from.
pub(super) fn built(described: &Described, name: &str) -> Result<Built, String> {
    let first_line = |error: &dyn std::fmt::Display| error.to_string().lines().next().unwrap_or_default().to_owned();
    let config = Config::parse(&described.toml, name, &[]).map_err(|error| first_line(&error))?;
    let built = || -> Result<Built> {
        let (forward, mut context, _) = prepare(&PeerMachine, &config, lockstep_model::build_form)?;
        settle_policy(&config, &forward, &mut context)?;
        let estimator = Estimator::new(&forward, &context)?;
        if described.recomputed_matmuls > 0.0 {
            let cheap = |op: &Op, output: usize| op.spec().cheap.contains(&output);
            let layers = (described.recomputed_matmuls * config.model.layers as f64).round() as usize;
            let first = layers / context.layout.stages();
            let by_rest = estimator.candidates(|op, output, _| cheap(op, output));
            let by_first = estimator.candidates(|op, output, ty| {
                let hidden = ty.dims.last().is_some_and(|dim| dim.sections.iter().any(|s| s.axis == Axis::Ffn));
                cheap(op, output) || (matches!(op, Op::Linear | Op::Fp8Linear { .. } | Op::FineLinear { .. }) && hidden)
            });
            context.recompute = Recompute::Values(Recomputed { first, by_first, by_rest });
        }
        let programs = estimator.programs(context.recompute.clone())?;
        Ok(Built { config: config.clone(), forward, context, estimator, programs })
    };
    built().map_err(|error| first_line(&error))
}
