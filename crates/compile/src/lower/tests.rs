use super::*;
use crate::passes::TRAINING_PASSES;
use crate::passes::tests::small_model;
use crate::stage;
use lockstep_ir::graph::Parameter;
use lockstep_ir::schedule::{Generator, PipeRank, PipeSlot};
use lockstep_ir::{Axis, DType, Dim, Init, Layout, Mesh, MeshAxis, Schedule, TensorType};

/// Weight gradients of two micro-batches after the input gradients of both.
struct Late;

impl Generator for Late {
    fn slots(&self, _of: PipeRank) -> Vec<PipeSlot> {
        let (f, b, w) = (PipeSlot::forward, PipeSlot::input_grad, PipeSlot::weight_grad);
        vec![f(0, 0), b(0, 0), f(0, 1), b(0, 1), w(0, 0), w(0, 1)]
    }

    fn separates_weight_grads(&self) -> bool {
        true
    }
}

fn lowered(schedule: Schedule) -> Unplaced {
    lowered_for(Layout { schedule, ..Layout::single(2) }, &[])
}

/// The small model in two layers with two matmuls in the first, after all passes.
fn with_matmuls(layout: Layout) -> (Graph, Context) {
    let (mut g, context) = small_model();
    let n1 = g.nodes[1].outputs[0].unwrap();
    let [embed, ffn] = [g.ty(n1).dims[2].clone(), Dim::new(Axis::Ffn, 3)];
    let mut parameter = |name: &str, dims: [Dim; 2]| {
        let parameter = Parameter::new(Init::Ones, vec![name.to_owned()]);
        g.state(name, TensorType::new(DType::F32, dims), State::Parameter(parameter))
    };
    let weights = [parameter("up", [ffn.clone(), embed.clone()]), parameter("down", [embed, ffn])];
    let out = weights.iter().fold(n1, |x, w| g.op(Op::Linear, &[x, *w], "h").unwrap()[0]);
    let matmuls = g.nodes.split_off(g.nodes.len() - 2);
    g.nodes[2].inputs[1] = out;
    g.nodes.splice(2..2, matmuls);
    for (n, layer) in [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (6, 1)] {
        g.nodes[n].layer = Some(layer);
    }
    let context = Context { layout, ..context };
    (TRAINING_PASSES.iter().fold(g, |g, pass| (pass.run)(&g, &context).unwrap()), context)
}

/// What the first rank runs.
fn lowered_for(layout: Layout, cuts: &[usize]) -> Unplaced {
    let (train, context) = with_matmuls(layout);
    let pipeline = context.layout.pipeline();
    let rank = stage::extract(&train, cuts, &pipeline, 0).unwrap();
    let mut forward = train.clone();
    forward.nodes.retain(|n| n.phase == Phase::Forward);
    forward.outputs.truncate(1);
    (forward.updates, forward.parts) = (vec![], vec![]);
    let evaluate = stage::extract(&forward, cuts, &pipeline, 0).unwrap();
    lower(&rank, &[(StepProgram::EVALUATE, evaluate)], &context, 0).unwrap()
}

fn schedule_of(program: &Unplaced) -> String {
    let slot = |s: &Slot| format!("{}({}) {:?}", program.segments[s.segment], s.micro_batch, s.saved);
    program.entries[0].schedule.iter().map(slot).collect::<Vec<_>>().join(", ")
}

/// Segments that touch each buffer of a lifetime.
fn touched(program: &Unplaced, lifetime: Lifetime) -> Vec<Vec<&'static str>> {
    let members = (0..program.buffers.len()).filter(|b| program.buffers[*b].lifetime == lifetime);
    let touches = |s: &Segment, b: usize| s.instrs.iter().flat_map(Instr::buffers).any(|x| x.0 == b);
    let names = |b: usize| program.segments.iter().filter(|s| touches(s, b)).map(|s| s.name).collect();
    members.map(names).collect()
}

#[test]
fn a_backward_pass_in_one_has_one_saved_region() {
    let program = lowered(Schedule::USUAL);
    assert_eq!(
        schedule_of(&program),
        "forward(0) [0, 0, 0], backward(0) [0, 0, 0], forward(1) [0, 0, 0], backward(1) [0, 0, 0], update(0) [0, 0, 0]"
    );
    assert_eq!(program.saved, [(Saved::ForwardToBackward, 1)]);
    let saved = touched(&program, Lifetime::Saved(Saved::ForwardToBackward));
    assert!(!saved.is_empty() && saved.iter().all(|s| *s == ["forward", "backward"]), "{saved:?}");
    let frame = touched(&program, Lifetime::Frame);
    assert!(!frame.is_empty() && frame.iter().all(|s| s.len() == 1), "{frame:?}");
}

#[test]
fn a_gradient_is_received_with_the_input_gradients() {
    let mesh = Mesh::ONE.with(MeshAxis::Pp, 2);
    let program = lowered_for(Layout { mesh, schedule: Schedule::new("late", &Late), ..Layout::single(2) }, &[1]);
    let receives = |s: &&Segment| s.instrs.iter().any(|i| matches!(i.op, Op::Receive { .. }));
    let names: Vec<&str> = program.segments.iter().filter(receives).map(|s| s.name).collect();
    assert_eq!(names, ["input_grad", "update"]);
}

#[test]
fn separate_weight_gradients_have_a_segment_and_regions_by_lifetime() {
    let program = lowered(Schedule::new("late", &Late));
    assert_eq!(
        schedule_of(&program),
        "forward(0) [0, 0, 0], input_grad(0) [0, 0, 0], forward(1) [0, 1, 0], input_grad(1) [0, 1, 1], \
         weight_grad(0) [0, 0, 0], weight_grad(1) [0, 1, 1], update(0) [0, 0, 0]"
    );
    let [to_b, to_w, from_b] = Saved::ALL;
    assert_eq!(program.saved, [(to_b, 1), (to_w, 2), (from_b, 2)]);
    let to_w = touched(&program, Lifetime::Saved(to_w));
    let ends = |s: &Vec<&str>| (s[0], s[s.len() - 1]) == ("forward", "weight_grad");
    assert!(!to_w.is_empty() && to_w.iter().all(ends), "{to_w:?}");
    let from_b = touched(&program, Lifetime::Saved(from_b));
    assert!(!from_b.is_empty() && from_b.iter().all(|s| *s == ["input_grad", "weight_grad"]), "{from_b:?}");
    let to_b = touched(&program, Lifetime::Saved(to_b));
    assert!(to_b.iter().all(|s| *s == ["forward", "input_grad"]), "{to_b:?}");
}

#[test]
fn weight_gradients_that_are_no_matmuls_are_summed_with_the_input_gradients() {
    let program = lowered(Schedule::new("late", &Late));
    let sums = |name: &str| {
        let segment = program.segments.iter().find(|s| s.name == name).unwrap();
        let sums = |i: &&Instr| i.outputs.iter().flatten().any(|arg| arg.sum != Sum::No);
        segment.instrs.iter().filter(sums).map(|i| i.op.name()).collect::<Vec<_>>()
    };
    assert_eq!(sums("input_grad"), ["rms_norm_grad_weight", "rms_norm_grad_weight", "embedding_grad"]);
    assert_eq!(sums("weight_grad"), ["linear_grad_weight", "linear_grad_weight"]);
}
