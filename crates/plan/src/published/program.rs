//! From a described row to its programs.

use super::peer::Described;
use crate::plan::{prepare, settle_policy};
use crate::{Machine, Target};
use lockstep_compile::{Estimator, Precision, Recompute, Recomputed};
use lockstep_config::Config;
use lockstep_ir::{Axis, DeviceProfile, Op, StepProgram};
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
        }
    }
}

/// Compiles a row, one program per pipeline stage. `name` is what errors call it.
pub fn compile(described: &Described, name: &str) -> Result<(Config, Vec<StepProgram>), String> {
    let first_line = |error: &dyn std::fmt::Display| error.to_string().lines().next().unwrap_or_default().to_owned();
    let config = Config::parse(&described.toml, name, &[]).map_err(|error| first_line(&error))?;
    let programs = || -> Result<Vec<StepProgram>, crate::PlanError> {
        let (forward, mut context, _) = prepare(&PeerMachine, &config, lockstep_model::build_form)?;
        settle_policy(&config, &forward, &mut context)?;
        let estimator = Estimator::new(&forward, &context)?;
        let recompute = match described.recomputed_matmuls {
            0.0 => context.recompute,
            share => {
                let cheap = |op: &Op, output: usize| op.spec().cheap.contains(&output);
                let first = (share * config.model.layers as f64).round() as usize / context.layout.stages();
                let by_rest = estimator.candidates(|op, output, _| cheap(op, output));
                let by_first = estimator.candidates(|op, output, ty| {
                    let hidden = ty.dims.last().is_some_and(|dim| dim.sections.iter().any(|s| s.axis == Axis::Ffn));
                    cheap(op, output) || (*op == Op::Linear && hidden)
                });
                Recompute::Values(Recomputed { first, by_first, by_rest })
            }
        };
        Ok(estimator.programs(recompute)?)
    };
    programs().map(|programs| (config.clone(), programs)).map_err(|error| first_line(&error))
}
