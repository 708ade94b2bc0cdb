use super::*;
use crate::passes::TRAINING_PASSES;
use crate::passes::tests::small_model_of;
use crate::{Context, Offload, join, lower, memory, offload, stage};
use lockstep_ir::verify;
use lockstep_ir::{Graph, Layout, Mesh, MeshAxis, Schedule};

fn layered() -> Graph {
    let (mut g, _) = small_model_of(2, 64);
    for (n, layer) in [(1, 0), (2, 0), (3, 1), (4, 1)] {
        g.nodes[n].layer = Some(layer);
    }
    g
}

/// A model of two layers with all its moments in the memory of the host, as it is placed before this pass.
fn placed(layout: Layout) -> (StepProgram, Context) {
    let context =
        Context { layout, offload: Offload { optimizer: u64::MAX, activations: 0 }, ..small_model_of(2, 64).1 };
    let g = TRAINING_PASSES.iter().fold(layered(), |g, pass| (pass.run)(&g, &context).unwrap());
    let train = stage::extract(&g, &[], &context.layout.pipeline(), 0).unwrap();
    let lowered = lower::lower(&offload::offload(train, &context, 0).unwrap(), &[], &context, 0).unwrap();
    (memory::place(join::join(lowered, &context.device), &context), context)
}

fn earlier(layout: Layout) -> StepProgram {
    let (program, context) = placed(layout);
    ahead(program, &context.device)
}

fn whole(program: &StepProgram) -> &Segment {
    program.segments.iter().find(|s| s.name.ends_with("_and_update")).unwrap()
}

/// Its segment of the end of a step, by index, and the first copy from the host.
fn first_copy(program: &StepProgram) -> (usize, usize) {
    let at = program.segments.iter().position(|s| s.name.ends_with("_and_update")).unwrap();
    (at, program.segments[at].instrs.iter().position(|i| i.op == Op::Fetch).unwrap())
}

fn refused(program: &StepProgram) -> String {
    verify::program(program, 64).unwrap_err().reason
}

#[test]
fn state_comes_while_the_last_backward_pass_runs_and_the_arena_does_not_grow() {
    for micro_batches in [1, 2, 5] {
        let (before, context) = placed(Layout::single(micro_batches));
        let after = ahead(before.clone(), &context.device);
        verify::program(&before, 64).unwrap();
        verify::program(&after, 64).unwrap();
        assert_eq!((after.arena_bytes, after.host_bytes), (before.arena_bytes, before.host_bytes));
        let instrs = &whole(&after).instrs;
        let update = instrs.iter().position(|i| i.phase == Phase::Update && i.stream == Stream::Compute).unwrap();
        let copies = instrs[..update].iter().filter(|i| i.op == Op::Fetch).count();
        // The moments of a table and two weights.
        assert_eq!(copies, 6, "{after}");
        // Not before there is room: backward reads what was saved.
        let (_, first) = first_copy(&after);
        assert!(instrs[..first].iter().any(|i| i.phase == Phase::InputGrad), "{after}");
        // A step has as many runs as before, but one.
        let runs = |p: &StepProgram| p.entry(StepProgram::TRAIN).unwrap().schedule.len();
        assert_eq!(runs(&after) + 1, runs(&before));
    }
}

#[test]
fn the_steps_of_a_batch_ramp_end_alike() {
    let (_, mut context) = placed(Layout::single(4));
    context.steps.smaller = vec![1, 2];
    let program = crate::compile(&layered(), &context).unwrap().programs.remove(0);
    let (at, _) = first_copy(&program);
    let steps: Vec<_> = program.entries.iter().filter(|e| e.name.starts_with(StepProgram::TRAIN)).collect();
    assert_eq!(steps.len(), 3);
    assert!(steps.iter().all(|e| e.schedule.last().is_some_and(|s| s.segment == at)), "{program}");
}

#[test]
fn what_looks_at_gradients_between_backward_and_update_keeps_them_apart() {
    let (_, mut context) = placed(Layout::single(1));
    context.steps.noise_scale = true;
    let program = crate::compile(&layered(), &context).unwrap().programs.remove(0);
    assert!(program.segments.iter().all(|s| !s.name.ends_with("_and_update")));
}

#[test]
fn a_schedule_that_ends_with_weight_gradients_has_them_and_the_update_as_one() {
    let (schedule, mesh) = ("zb-h1".parse::<Schedule>().unwrap(), Mesh::ONE.with(MeshAxis::Pp, 2));
    let (_, context) = placed(Layout::single(3));
    let context = Context { layout: Layout { schedule, mesh, ..Layout::single(3) }, ..context };
    let programs = crate::compile(&layered(), &context).unwrap().programs;
    assert!(programs.iter().any(|p| p.segments.iter().any(|s| s.name == Segment::WEIGHT_GRAD_AND_UPDATE)));
}

#[test]
fn an_update_that_does_not_wait_for_its_state_is_refused() {
    let mut program = earlier(Layout::single(2));
    let (at, first) = first_copy(&program);
    let is_copy: Vec<bool> = program.segments[at].instrs.iter().map(|i| i.op == Op::Fetch).collect();
    let waits = |i: &&mut Instr| i.waits.iter().any(|w| is_copy[*w]);
    let reader = program.segments[at].instrs.iter_mut().find(waits).unwrap();
    reader.waits.retain(|w| !is_copy[*w]);
    assert_eq!(refused(&program), format!("touches what instruction {first} still works on"));
}

#[test]
fn a_copy_that_comes_before_backward_has_read_what_stands_there_is_refused() {
    let mut program = earlier(Layout::single(2));
    let (at, first) = first_copy(&program);
    let segment = &mut program.segments[at];
    let copy = segment.instrs.remove(first);
    segment.instrs.insert(0, copy);
    for w in segment.instrs.iter_mut().flat_map(|i| &mut i.waits) {
        *w = match *w {
            w if w == first => 0,
            w if w < first => w + 1,
            w => w,
        };
    }
    let reason = refused(&program);
    assert!(reason.starts_with("touches what instruction 0") || reason.contains("the buffer holds"), "{reason}");
}
