//! The static verifier accepts every program that the compiler makes, and refuses planted faults.

use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_ir::program::{BufferId, Instr, Lifetime, Stream};
use lockstep_ir::{Op, StepProgram, counter, verify};
use lockstep_plan::plan;

const ALIGNMENT: u64 = 64;

fn program(text: &str) -> StepProgram {
    plan(&Devices::new(), &Config::parse(text, "run.toml", &[]).unwrap()).unwrap().program().clone()
}

fn small() -> StepProgram {
    program(
        "[model]\nvocab_size = 256\nlayers = 2\ndim = 32\nheads = 4\nkv_heads = 2\nffn = 64\ntied_embeddings = true\n\
         [train]\nseq = 16\nglobal_batch = 4\nmicro_batch = 2",
    )
}

/// Plants a fault and gives the verifier's words for it.
fn refusal(plant: impl FnOnce(&mut StepProgram)) -> String {
    let mut program = small();
    verify::program(&program, ALIGNMENT).unwrap();
    plant(&mut program);
    verify::program(&program, ALIGNMENT).unwrap_err().to_string()
}

fn segment<'a>(program: &'a mut StepProgram, name: &str) -> &'a mut lockstep_ir::program::Segment {
    program.segments.iter_mut().find(|s| s.name == name).unwrap()
}

#[test]
fn random_shapes_give_sound_programs() {
    for case in 0..60u64 {
        let pick = |what: u64, of: &[usize]| of[(counter::bits(case, what) % of.len() as u64) as usize];
        let kv_heads = pick(0, &[1, 2, 3]);
        let heads = kv_heads * pick(1, &[1, 2, 4]);
        let micro_batch = pick(2, &[1, 2, 3]);
        let text = format!(
            "[model]\nvocab_size = {}\nlayers = {}\ndim = {}\nheads = {heads}\nkv_heads = {kv_heads}\nhead_dim = {}\nffn = {}\n\
             tied_embeddings = {}\n[train]\nseq = {}\nmicro_batch = {micro_batch}\nglobal_batch = {}\nreproducible = {}",
            pick(3, &[5, 256, 1000]),
            pick(4, &[1, 2, 5]),
            pick(5, &[8, 30, 64]),
            pick(6, &[2, 8, 20]),
            pick(7, &[1, 24, 100]),
            pick(8, &[0, 1]) == 1,
            pick(9, &[1, 7, 48]),
            micro_batch * pick(10, &[1, 2, 5]),
            pick(11, &[0, 1]) == 1,
        );
        verify::program(&program(&text), ALIGNMENT).unwrap();
    }
}

#[test]
fn buffers_that_overlap_while_both_are_live_are_refused() {
    let text = refusal(|p| {
        let frame = p.regions.iter().position(|r| r.lifetime == Lifetime::Frame).unwrap();
        p.buffers.iter_mut().filter(|b| b.region == frame).for_each(|b| b.offset = 0);
    });
    assert!(text.contains("overlaps") || text.contains("the buffer holds nothing"), "{text}");
}

#[test]
fn saved_tensors_that_share_memory_are_refused() {
    let text = refusal(|p| {
        let saved = p.regions.iter().position(|r| matches!(r.lifetime, Lifetime::Saved(_))).unwrap();
        p.buffers.iter_mut().filter(|b| b.region == saved).for_each(|b| b.offset = 0);
    });
    assert!(text.contains("holds") || text.contains("overlaps"), "{text}");
}

#[test]
fn a_read_before_the_write_is_refused() {
    let text = refusal(|p| segment(p, "forward").instrs.swap(1, 2));
    assert!(text.contains("reads `layers.0.n1`, the buffer holds nothing"), "{text}");
}

#[test]
fn a_missing_instruction_is_refused() {
    let text = refusal(|p| {
        segment(p, "forward").instrs.remove(4);
    });
    assert!(text.contains("the buffer holds nothing"), "{text}");
}

#[test]
fn a_wrong_in_place_write_is_refused() {
    let text = refusal(|p| {
        let linear = segment(p, "forward").instrs.iter_mut().find(|i| i.op.name() == "linear").unwrap();
        let input = linear.inputs[0].buffer;
        linear.outputs[0].as_mut().unwrap().buffer = input;
    });
    assert!(text.contains("linear: "), "{text}");
}

#[test]
fn a_backward_pass_before_its_forward_pass_is_refused() {
    let text = refusal(|p| p.entries[0].schedule.swap(0, 1));
    assert!(text.contains("the buffer holds nothing"), "{text}");
}

#[test]
fn a_micro_batch_that_finds_another_ones_activations_is_refused() {
    let text = refusal(|p| {
        let schedule = &mut p.entries[0].schedule;
        // forward 0, forward 1, backward 0: one saved slot cannot hold both.
        schedule.swap(1, 2);
    });
    assert!(text.contains("backward of micro-batch 0"), "{text}");
}

#[test]
fn wrong_types_are_refused() {
    let text = refusal(|p| {
        let instr = &mut segment(p, "forward").instrs[0];
        instr.outputs[0].as_mut().unwrap().ty.dims.pop();
    });
    assert!(text.contains("embedding: output 0 is"), "{text}");
}

#[test]
fn outputs_or_scratch_on_the_same_bytes_are_refused() {
    let attention = |p: &mut StepProgram, plant: fn(&mut lockstep_ir::program::Instr)| {
        plant(segment(p, "forward").instrs.iter_mut().find(|i| i.op.name() == "attention").unwrap());
    };
    let text = refusal(|p| {
        attention(p, |i| {
            let first = i.outputs[0].as_ref().unwrap().buffer;
            i.outputs[1].as_mut().unwrap().buffer = first;
        });
    });
    assert!(text.contains("two outputs overlap"), "{text}");
    let text = refusal(|p| attention(p, |i| i.workspace = i.outputs[0].as_ref().map(|a| a.buffer)));
    assert!(text.contains("scratch overlaps an operand"), "{text}");
}

#[test]
fn a_micro_batch_without_memory_is_refused() {
    let text = refusal(|p| p.entries[0].schedule[0].micro_batch = 100);
    assert!(text.contains("micro-batch 100: the micro-batch region has no such copy"), "{text}");
}

#[test]
fn a_buffer_outside_its_region_and_a_wrong_arena_are_refused() {
    let text = refusal(|p| p.buffers[0].offset = 1 << 40);
    assert!(text.contains("leaves its region"), "{text}");
    let text = refusal(|p| p.arena_bytes += 64);
    assert!(text.starts_with("arena: "), "{text}");
}

#[test]
fn an_evaluation_that_touches_what_training_saved_is_refused() {
    let text = refusal(|p| {
        let saved = p.regions.iter().position(|r| matches!(r.lifetime, Lifetime::Saved(_))).unwrap();
        let buffer = BufferId(p.buffers.iter().position(|b| b.region == saved).unwrap());
        segment(p, "evaluate").instrs[0].outputs[0].as_mut().unwrap().buffer = buffer;
    });
    assert!(text.contains("does not fit") || text.contains("overlay"), "{text}");
}

fn parallel(keys: &str) -> lockstep_plan::Plan {
    let text = format!(
        "[model]\nvocab_size = 64\nlayers = 4\ndim = 16\nheads = 4\nffn = 32\n[train]\nseq = 8\nglobal_batch = 8\n\
         micro_batch = 1\nthreads = 1\n[parallel]\n{keys}\n"
    );
    plan(&Devices::new(), &Config::parse(&text, "run.toml", &[]).unwrap()).unwrap()
}

#[test]
fn a_partial_sum_that_is_not_reduced_is_refused() {
    let plan = parallel("tp = 2");
    let stage = plan.compiled.stages.iter().find(|s| s.pass.name == "shard").unwrap();
    let mut graph = stage.graph.clone();
    let at = graph.nodes.iter().position(|n| n.op.name() == "all_reduce").unwrap();
    let node = graph.nodes.remove(at);
    let (partial, sum) = (node.inputs[0], node.outputs[0].unwrap());
    for v in graph.nodes.iter_mut().flat_map(|n| &mut n.inputs).filter(|v| **v == sum) {
        *v = partial;
    }
    let error = verify::graph(&graph).unwrap_err().to_string();
    assert!(error.contains("which is not summed over ranks"), "{error}");
}

#[test]
fn two_micro_batches_in_flight_in_one_slot_are_refused() {
    let plan = parallel("pp = 4");
    let mut program = plan.compiled.programs[0].clone();
    verify::program(&program, ALIGNMENT).unwrap();
    // Four are in flight on the first of four stages.
    program.entries[0].schedule.iter_mut().for_each(|slot| slot.saved[0] %= 3);
    assert!(verify::program(&program, ALIGNMENT).is_err());
}

#[test]
fn a_sum_that_was_not_begun_is_refused() {
    let mut program = parallel("dp = 2\nzero = 2").compiled.programs.swap_remove(0);
    let mut outputs = program.segments.iter_mut().flat_map(|s| &mut s.instrs).flat_map(|i| &mut i.outputs).flatten();
    let first = outputs.find(|a| program.values[a.value].ends_with(".here")).unwrap();
    first.sum = lockstep_ir::program::Sum::Always;
    assert!(verify::program(&program, ALIGNMENT).is_err());
}

#[test]
fn collectives_of_two_streams_that_touch_the_same_bytes_wait_for_each_other() {
    let model = "[model]\nvocab_size = 67\nlayers = 2\ndim = 16\nheads = 2\nffn = 24\n";
    let mut p = program(&format!("{model}[train]\nseq = 32\nglobal_batch = 2\n[parallel]\ncp = 4"));
    let forward = segment(&mut p, "forward");
    let is_shift = |i: &Instr| matches!(i.op, Op::Shift { .. });
    // A ring passes on what it has received.
    let first = forward.instrs.iter().position(is_shift).unwrap();
    let next = first + 1 + forward.instrs[first + 1..].iter().position(is_shift).unwrap();
    assert!(forward.instrs[next].waits.is_empty() && forward.instrs[next].stream == Stream::Communication);
    forward.instrs[next].stream = Stream::Exchange;
    // A kernel after it waits for the stream on which it was.
    let waiting = forward.instrs.iter_mut().filter(|i| i.waits.contains(&next));
    waiting.for_each(|i| i.waits.push(first));
    let refused = verify::program(&p, ALIGNMENT).unwrap_err().to_string();
    assert!(refused.contains(&format!("touches what instruction {first} still works on")), "{refused}");
    let forward = segment(&mut p, "forward");
    forward.instrs[next].waits.push(first);
    let last = next + 1 + forward.instrs[next + 1..].iter().position(is_shift).unwrap();
    forward.instrs[last].waits.push(next);
    verify::program(&p, ALIGNMENT).unwrap();
    segment(&mut p, "forward").instrs[next].waits.push(0);
    let refused = verify::program(&p, ALIGNMENT).unwrap_err().to_string();
    assert!(refused.contains("waits for instruction 0"), "{refused}");
}

/// The buffers that live for a step.
fn of_step(p: &StepProgram) -> impl Iterator<Item = usize> {
    (0..p.buffers.len()).filter(|b| p.lifetime(BufferId(*b)) == Lifetime::Step)
}

/// A program whose weights are quantised in their own memory for the length of a step, with a planted fault, in the verifier's words.
fn refusal_in_fp8(plant: impl FnOnce(&mut StepProgram)) -> String {
    let mut program = program(
        "[model]\nvocab_size = 256\nlayers = 2\ndim = 32\nheads = 4\nkv_heads = 2\nffn = 64\n\
         [train]\nseq = 16\nglobal_batch = 4\nmicro_batch = 2\n[precision]\npolicy = \"fp8\"\nfp8_weights = 0",
    );
    verify::program(&program, ALIGNMENT).unwrap();
    plant(&mut program);
    verify::program(&program, ALIGNMENT).unwrap_err().to_string()
}

#[test]
fn a_weight_whose_memory_bytes_have_taken_must_be_back_at_the_end_of_the_step() {
    let text = refusal_in_fp8(|p| {
        let taken: Vec<u64> = of_step(p).map(|b| p.buffers[b].offset).collect();
        let is_home =
            |i: &Instr| i.outputs[3].as_ref().is_some_and(|copy| taken.contains(&p.buffers[copy.buffer.0].offset));
        let update = p.segments.iter().position(|s| s.name == "update").unwrap();
        let rounds = p.segments[update].instrs.iter().position(|i| i.op.name() == "adamw" && is_home(i)).unwrap();
        p.segments[update].instrs[rounds].outputs[3] = None;
    });
    assert!(text.starts_with("end of entry train: `") && text.ends_with("` is not there any more"), "{text}");
}

#[test]
fn a_step_that_does_not_quantise_its_weights_is_refused() {
    let text = refusal_in_fp8(|p| {
        p.entries[0].schedule.remove(0);
    });
    assert!(text.contains(".fp8`, the buffer holds"), "{text}");
}

#[test]
fn bytes_in_the_memory_of_a_weight_that_is_still_to_be_read_are_refused() {
    let text = refusal_in_fp8(|p| {
        let all: Vec<usize> = of_step(p).collect();
        let places: Vec<u64> = all.iter().rev().map(|b| p.buffers[*b].offset).collect();
        all.iter().zip(places).for_each(|(b, place)| p.buffers[*b].offset = place);
    });
    assert!(text.contains("prepare of micro-batch 0") && text.contains("an output overlaps an input"), "{text}");
}

#[test]
fn ranks_with_parts_of_weights_gather_their_largest_magnitudes_at_once() {
    for (layout, gathers) in [("tp = 2", 1), ("dp = 2\nzero = 2", 0)] {
        let program = &program(&format!(
            "[model]\nvocab_size = 256\nlayers = 4\ndim = 64\nheads = 4\nkv_heads = 2\nffn = 128\n\
             [train]\nseq = 16\nglobal_batch = 8\nmicro_batch = 1\n[precision]\npolicy = \"fp8\"\nfp8_weights = 0\n\
             [parallel]\n{layout}"
        ));
        let schedule = &program.entry(StepProgram::TRAIN).unwrap().schedule;
        let first = &program.segments[schedule[0].segment];
        assert_eq!(first.name, "prepare", "{layout}");
        let inputs: Vec<usize> = first.instrs.iter().filter(|i| i.op.communicates()).map(|i| i.inputs.len()).collect();
        // Four layers of four matmuls.
        assert_eq!(inputs, vec![16; gathers], "{layout}");
        // No micro-batch of several quantises a weight.
        let others =
            program.segments.iter().filter(|s| s.name.starts_with("forward") || s.name.starts_with("backward"));
        let again = others.flat_map(|s| &s.instrs).filter(|i| i.op.name() == "quantise_weight").count();
        assert_eq!((again, schedule.iter().filter(|s| s.segment == schedule[0].segment).count()), (0, 1), "{layout}");
    }
}
