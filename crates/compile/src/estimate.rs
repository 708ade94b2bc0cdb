//! The programs of a model under any recompute policy, for looking at: nothing verifies them, nothing runs them.

use crate::passes::{AUTODIFF, FORWARD_PASSES, Layers, passes_after};
use crate::settings::{Candidate, Recompute, Recomputed};
use crate::stage::RankGraph;
use crate::{
    CompileError, Context, Evaluation, evaluations, in_place, lower, model_flops, of_rank, offload, placed, stage,
};
use lockstep_ir::op::Flops;
use lockstep_ir::schedule::Pipeline;
use lockstep_ir::{Graph, Op, StepProgram, TensorType, TypeError, ValueId};
use std::collections::BTreeSet;

/// What all policies share, and what is left to do for one.
pub struct Estimator {
    /// The graph with its backward pass, before recomputation.
    pub(crate) derived: Graph,
    /// What each rank evaluates.
    evaluations: Vec<Vec<Evaluation<RankGraph>>>,
    pub(crate) cuts: Vec<usize>,
    pub(crate) pipeline: Pipeline,
    context: Context,
}

impl Estimator {
    /// For a model's forward graph, in a context whose policy does not count.
    pub fn new(forward: &Graph, context: &Context) -> Result<Self, CompileError> {
        let stored = FORWARD_PASSES.iter().try_fold(forward.clone(), |graph, pass| (pass.run)(&graph, context))?;
        let derived = (AUTODIFF.run)(&stored, context)?;
        let evaluations = evaluations(forward, &stored, context)?;
        let pipeline = context.layout.pipeline();
        let cuts = stage::cut(&derived, context)?;
        let ranks = 0..pipeline.slots.len();
        let rank = |r| of_rank(&evaluations, |graph| stage::extract(graph, &cuts, &pipeline, r));
        let evaluations = ranks.map(rank).collect::<Result<_, _>>()?;
        Ok(Self { derived, evaluations, cuts, pipeline, context: context.clone() })
    }

    /// The placed programs under a policy, one per pipeline stage.
    pub fn programs(&self, recompute: Recompute) -> Result<Vec<StepProgram>, CompileError> {
        let context = Context { recompute, ..self.context.clone() };
        let mut graph = None;
        for pass in passes_after(&AUTODIFF) {
            graph = Some((pass.run)(graph.as_ref().unwrap_or(&self.derived), &context)?);
        }
        let graph = graph.as_ref().unwrap_or(&self.derived);
        let program = |s: usize| -> Result<StepProgram, TypeError> {
            let own = in_place::in_place(stage::extract(graph, &self.cuts, &self.pipeline, s)?, &context);
            let train = offload::offload(own, &context, s)?;
            Ok(placed(lower::lower(&train, &self.evaluations[s], &context, s)?, &context))
        };
        Ok((0..self.evaluations.len()).map(program).collect::<Result<_, _>>()?)
    }

    /// The graph with its backward pass, before recomputation and sharding.
    pub fn derived(&self) -> &Graph {
        &self.derived
    }

    /// FLOPs that the model needs for one micro-batch of all ranks, forward and backward.
    pub fn model_flops(&self) -> Result<Flops, TypeError> {
        model_flops(&self.derived)
    }

    /// FLOPs of every layer, by which stages are cut: the embedding counts with the first, the output head with the last.
    pub fn layer_flops(&self) -> Result<Vec<f64>, TypeError> {
        stage::layer_flops(&self.derived)
    }

    /// Names of the ops whose outputs a layer saves for backward and could recompute instead.
    pub fn recomputable(&self) -> BTreeSet<&'static str> {
        self.layers().ops(&self.derived)
    }

    /// The values of all kinds of layers that could be recomputed and are `wanted`: by op, output and type.
    pub fn candidates(&self, wanted: impl Fn(&Op, usize, &TensorType) -> bool) -> BTreeSet<Candidate> {
        let layers = self.layers();
        let is_wanted = |(c, v): &(Candidate, ValueId)| {
            let layer = layers.representatives().find(|(kind, _)| *kind == c.kind).map(|(_, layer)| layer);
            let node = layer.and_then(|layer| layers.nodes[layer].get(c.node)).map(|n| &self.derived.nodes[*n]);
            node.is_some_and(|node| wanted(&node.op, c.output, self.derived.ty(*v)))
        };
        layers.candidates(&self.derived).into_iter().filter(is_wanted).map(|(c, _)| c).collect()
    }

    /// Which layers recompute which values, by op and output.
    pub fn recomputed_values(&self, values: &Recomputed) -> Vec<(String, Vec<String>)> {
        let Recomputed { first, by_first, by_rest } = values;
        let of = if self.cuts.is_empty() { "" } else { " of each stage" };
        let layers = self.layers();
        let others = layers.in_stage.iter().any(|position| position >= first);
        let those = match first {
            1 => format!("the first layer{of}"),
            _ => format!("the first {first} layers{of}"),
        };
        let rows = [(those, by_first, *first > 0), ("the other layers".into(), by_rest, *first > 0 && others)];
        let all = ("all layers".to_owned(), by_rest, *first == 0);
        rows.into_iter().chain([all]).filter(|row| row.2).map(|(who, what, _)| (who, self.names(what))).collect()
    }

    /// What candidates are called: kind of layer, op and output.
    fn names(&self, candidates: &BTreeSet<Candidate>) -> Vec<String> {
        let layers = self.layers();
        let several = layers.representatives().count() > 1;
        let name = |c: &Candidate| {
            let layer = layers.representatives().find(|(kind, _)| *kind == c.kind)?.1;
            let op = self.derived.nodes[*layers.nodes[layer].get(c.node)?].op;
            let kind = if several { format!("kind {}: ", c.kind) } else { String::new() };
            Some(format!("{kind}{}.{}", op.name(), op.output(c.output).name))
        };
        candidates.iter().filter_map(name).collect()
    }

    /// `bytes` rounded up to the device's alignment.
    pub(crate) fn align(&self, bytes: u64) -> u64 {
        self.context.device.align(bytes)
    }

    /// The layers, each a block of its own.
    pub(crate) fn layers(&self) -> Layers {
        Layers::new(&self.derived, 1, &self.cuts)
    }
}
