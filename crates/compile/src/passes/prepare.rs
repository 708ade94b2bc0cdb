//! Prepare: quantises weights to fp8 once per step instead of in every micro-batch.
//!
//! The passes before this one quantise a weight where it is used: in forward, in backward once more for the transpose, and again where forward is
//! recomputed. All of these read the same weight, so one node before the first micro-batch makes what they make ([`Phase::Prepare`]), bit for
//! bit, and all micro-batches read that. Ranks that have parts of a weight tell each other the largest magnitudes once per step.
//!
//! During the step bytes and transpose take the memory of the weight in bf16 (`in_place.rs`), which nothing else reads before the update
//! writes it anew from the master weights. So there is no second copy of any weight, and between steps, where evaluation, checkpoints and the host look, a
//! weight is in bf16.
//!
//! A weight is quantised in every micro-batch as before where its memory is needed or not written anew:
//!
//! - ZeRO 3 has ranges of it, and gathers it for every unit;
//! - bf16 weights that are their own master weights are what the update reads;
//! - frozen weights beside adapters have no update.

use crate::Context;
use lockstep_ir::graph::{Node, Parameter, Phase, Value};
use lockstep_ir::{Axes, DType, Graph, Op, Placement, TypeError, ValueId};
use std::collections::{BTreeMap, BTreeSet};

pub(super) fn prepare(graph: &Graph, _: &Context) -> Result<Graph, TypeError> {
    let weights = weights(graph);
    if weights.is_empty() {
        return Ok(graph.clone());
    }
    let mut g = graph.clone();
    let mut now: Vec<ValueId> = (0..g.values.len()).map(ValueId).collect();
    // Weights, and what is made of them alone.
    let mut known = weights.clone();
    let mut prepared: Vec<Node> = Vec::new();
    let mut by_inputs: BTreeMap<Vec<ValueId>, Vec<usize>> = BTreeMap::new();
    let mut rest: Vec<Node> = Vec::new();
    for mut node in std::mem::take(&mut g.nodes) {
        node.inputs.iter_mut().for_each(|v| *v = now[v.0]);
        if !prepares(&node, &weights, &known) {
            rest.push(node);
            continue;
        }
        known.extend(node.outputs.iter().flatten());
        node.phase = Phase::Prepare;
        let alike = by_inputs.entry(node.inputs.clone()).or_default();
        let Some(first) = alike.iter().copied().find(|n| prepared[*n].op == node.op) else {
            alike.push(prepared.len());
            prepared.push(node);
            continue;
        };
        for (made, again) in prepared[first].outputs.iter_mut().zip(node.outputs) {
            match (*made, again) {
                (Some(made), Some(again)) => now[again.0] = made,
                (None, again) => *made = again,
                (Some(_), None) => {}
            }
        }
    }
    g.nodes = prepared.into_iter().chain(rest).collect();
    Ok(g)
}

/// Whether an op makes bytes of a weight, or looks for their unit.
fn reads_weight(op: Op) -> bool {
    matches!(op, Op::Amax { of, .. } if of.is_weight()) || op.quantises_weight()
}

/// Whether a node reads nothing but such weights and what is made of them, and is needed once per step.
fn prepares(node: &Node, weights: &BTreeSet<ValueId>, known: &BTreeSet<ValueId>) -> bool {
    // Largest magnitudes of parts, gathered over the ranks that have them.
    let gathers = matches!(node.op, Op::AllGather { over, .. } if over.within(Axes::TOKENS).is_empty())
        && node.inputs.iter().all(|v| !weights.contains(v));
    (reads_weight(node.op) || gathers) && node.inputs.iter().all(|v| known.contains(v))
}

/// The parameters in bf16 that are read to be quantised and for nothing else, in one way, and that the update writes anew.
fn weights(g: &Graph) -> BTreeSet<ValueId> {
    let readers = g.readers();
    let updated: BTreeSet<ValueId> = g.updates.iter().map(|(state, _)| *state).collect();
    let is_one = |(v, value, _): &(ValueId, &Value, &Parameter)| {
        let readers = &readers[v.0];
        let mut ways = readers.iter().map(|n| g.nodes[*n].op).filter(Op::quantises_weight);
        let way = ways.next();
        value.ty.dtype == DType::BF16
            && value.sharding.axes(Placement::Flat).is_empty()
            && updated.contains(v)
            && readers.iter().all(|n| reads_weight(g.nodes[*n].op))
            && way.is_some_and(|way| ways.all(|other| other == way))
    };
    g.parameters().filter(is_one).map(|(v, ..)| v).collect()
}

#[cfg(test)]
mod tests {
    use crate::passes::TRAINING_PASSES;
    use crate::passes::fp8::tests::graph;
    use crate::passes::tests::lines;
    use crate::settings::{Fp8, Recompute};
    use crate::{Context, compile};
    use lockstep_ir::graph::{Phase, Source, State};
    use lockstep_ir::program::{Buffer, Lifetime, StepProgram};
    use lockstep_ir::{Axis, Dim, Graph};

    /// Two matmuls of one layer that read the same, in fp8.
    fn in_fp8(layout: &str) -> (Graph, Context) {
        let (g, mut context) = graph(64, layout);
        context.precision.fp8 = Some(Fp8 { weights: Some(0), ..Fp8::default() });
        (g, context)
    }

    /// The nodes of weights alone after all passes.
    fn prepared((g, context): (Graph, Context)) -> String {
        let g = TRAINING_PASSES.iter().fold(g, |g, pass| (pass.run)(&g, &context).unwrap());
        lines(&g, &["weight_amax", "quantise_weight", "amax.gathered"], true)
    }

    const ONCE: &str = "\
Q up.amax: f32[scalar:1] = weight_amax(up) { parts: 1 }
Q up.fp8: e4m3[vocab:32, embed:16], up.fp8.again.transposed: e4m3[embed:16, vocab:32], up.fp8.unit: f32[scalar:1], up.seen: f64[scalar:128] += up.seen.4.total = quantise_weight(up, up.amax) { to: E4M3, measures: false }
Q other.amax: f32[scalar:1] = weight_amax(other) { parts: 1 }
Q other.fp8: e4m3[vocab:32, embed:16], other.fp8.again.transposed: e4m3[embed:16, vocab:32], other.fp8.unit: f32[scalar:1], other.seen: f64[scalar:128] += other.seen.7.total = quantise_weight(other, other.amax) { to: E4M3, measures: false }
";

    #[test]
    fn a_weight_is_quantised_once_for_forward_backward_and_what_is_recomputed() {
        assert_eq!(prepared(in_fp8("dp=1")), ONCE);
        let (g, mut context) = in_fp8("dp=1");
        context.recompute = Recompute::Full;
        assert_eq!(prepared((g, context)), ONCE);
        assert_eq!(prepared(in_fp8("dp=2,zero=2")), ONCE);
    }

    #[test]
    fn ranges_own_masters_and_frozen_weights_are_quantised_where_they_are_used() {
        let before = |text: &str| text.lines().all(|line| !line.starts_with('Q')) && text.contains("quantise_weight");
        assert!(before(&prepared(in_fp8("dp=2,zero=3"))));
        // Small matrices have f32 master weights anyhow.
        let (mut g, mut context) = in_fp8("dp=1");
        let dims = g.values.iter_mut().flat_map(|value| &mut value.ty.dims);
        dims.filter(|d| d.sections[0].axis == Axis::Vocab).for_each(|d| *d = Dim::new(Axis::Vocab, 256));
        context.precision.own_master = true;
        assert!(before(&prepared((g, context))));
        let (mut g, context) = in_fp8("dp=1");
        for value in &mut g.values {
            if let Source::State(State::Parameter(parameter)) = &mut value.source {
                parameter.frozen = value.name != "table";
            }
        }
        assert!(before(&prepared((g, context))));
    }

    /// The one program of a layout.
    fn program(layout: &str) -> StepProgram {
        let (g, context) = in_fp8(layout);
        compile(&g, &context).unwrap().programs.swap_remove(0)
    }

    #[test]
    fn bytes_take_the_memory_of_weights_in_bf16_until_the_update_writes_those_anew() {
        for layout in ["dp=1", "dp=2,zero=1"] {
            let program = program(layout);
            let bytes: Vec<_> =
                program.buffers.iter().filter(|b| program.regions[b.region].lifetime == Lifetime::Step).collect();
            // Two weights, each with its transpose.
            assert_eq!(bytes.len(), 4, "{layout}");
            for weight in program.tensors.iter().filter(|t| ["up", "other"].contains(&t.name.as_str())) {
                let home = &program.buffers[weight.buffer.0];
                let within = |b: &&&Buffer| b.offset >= home.offset && b.offset < home.offset + home.bytes;
                assert_eq!(bytes.iter().filter(within).map(|b| b.bytes).sum::<u64>(), weight.ty.bytes(), "{layout}");
            }
            let first = program.entry(StepProgram::TRAIN).unwrap().schedule[0];
            assert_eq!(program.segments[first.segment].name, "prepare");
            let others = || program.segments.iter().filter(|s| s.name != "prepare").flat_map(|s| &s.instrs);
            assert!(others().all(|i| i.phase != Phase::Prepare), "{layout}");
        }
    }
}
