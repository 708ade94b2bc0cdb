//! The programs of a compiled model under other recompute policies, for looking at: nothing verifies them, nothing runs them.

use crate::passes::{DERIVED, FORWARD_PASSES, Layers, Recompute, SPREADING, TRAINING_PASSES};
use crate::{CompileError, Compiled, Context, lower, memory, stage};
use lockstep_ir::{Graph, StepProgram, TypeError};
use std::collections::BTreeSet;

/// What all policies share, and what is left to do for one.
pub struct Estimator<'a> {
    /// The graph with its backward pass, before anything is given up.
    pub(crate) derived: &'a Graph,
    evaluate: Graph,
    pub(crate) cuts: Vec<usize>,
    context: Context,
}

impl<'a> Estimator<'a> {
    /// For a model that was compiled in this context, under whatever policy.
    pub fn new(compiled: &'a Compiled, context: &Context) -> Result<Self, CompileError> {
        let mut evaluate = compiled.stages[FORWARD_PASSES.len() - 1].graph.clone().without_dead_code();
        for pass in &TRAINING_PASSES[SPREADING] {
            evaluate = (pass.run)(&evaluate, context)?;
        }
        let derived = &compiled.stages[DERIVED].graph;
        let cuts = stage::cut(derived, context.layout.mesh.pp)?;
        Ok(Self { derived, evaluate, cuts, context: context.clone() })
    }

    /// The placed programs under a policy, one per pipeline stage.
    pub fn programs(&self, recompute: Recompute) -> Result<Vec<StepProgram>, CompileError> {
        let context = Context { recompute, ..self.context.clone() };
        let mut graph = None;
        for pass in &TRAINING_PASSES[DERIVED + 1..] {
            graph = Some((pass.run)(graph.as_ref().unwrap_or(self.derived), &context)?);
        }
        let graph = graph.as_ref().unwrap_or(self.derived);
        let program = |s: usize| -> Result<StepProgram, TypeError> {
            let train = stage::extract(graph, &self.cuts, s)?;
            let evaluate = stage::extract(&self.evaluate, &self.cuts, s)?;
            Ok(memory::place(lower::lower(&train, &evaluate, &context, s)?, &context))
        };
        Ok((0..context.layout.mesh.pp).map(program).collect::<Result<_, _>>()?)
    }

    /// Names of the ops whose outputs a layer keeps for backward and could compute again instead.
    pub fn recomputable(&self) -> BTreeSet<&'static str> {
        self.layers().ops(self.derived)
    }

    /// `bytes` rounded up to the device's alignment.
    pub(crate) fn align(&self, bytes: u64) -> u64 {
        self.context.device.align(bytes)
    }

    /// The layers, each a block of its own.
    pub(crate) fn layers(&self) -> Layers {
        Layers::new(self.derived, 1, &self.cuts)
    }
}
