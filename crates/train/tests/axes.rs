//! Meshes of all axes, also of those that no key of a config names yet: what is compiled for them is sound and computes what one rank
//! computes, and a wrong axis is refused.

use lockstep_compile::{AdamW, Compiled, Context, Offload, Optimizer, Precision, Recompute, Steps, compile};
use lockstep_config::Config;
use lockstep_exec::{Executor, ThreadWorld, cpu};
use lockstep_ir::graph::{Phase, State};
use lockstep_ir::program::{Arg, Instr, Role};
use lockstep_ir::{
    Axes, ContextParallel, DType, Layout, Mesh, MeshAxis, Op, Placement, StepProgram, StepScalars, counter, verify,
};
use lockstep_model::names;
use std::collections::BTreeMap;
use std::time::Duration;

const MODEL: &str = "[model]\narchitecture = \"gpt2\"\nvocab_size = 59\nlayers = 2\ndim = 16\nheads = 4\npositions = 8\nffn = 24\n\
                     [train]\nseq = 8\nglobal_batch = 8";
const ALIGNMENT: u64 = 64;

/// A mesh by the sizes of some axes.
fn mesh(sizes: &[(MeshAxis, usize)]) -> Mesh {
    sizes.iter().fold(Mesh::ONE, |mesh, (axis, size)| mesh.with(*axis, *size))
}

fn compiled(mesh: Mesh, zero: u8, sequence_parallel: bool) -> Compiled {
    compiled_as(Layout { mesh, zero, sequence_parallel, ..Layout::single(2) })
}

fn compiled_as(layout: Layout) -> Compiled {
    let config = Config::parse(MODEL, "run.toml", &[]).unwrap();
    let gradients = DType::Fixed64;
    let context = Context {
        device: cpu::profile(1, DType::F32, gradients),
        layout,
        optimizer: Optimizer::adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, 0.1),
        precision: Precision::of(DType::F32, gradients),
        recompute: Recompute::None,
        stages: vec![],
        steps: Steps::default(),
        offload: Offload::default(),
    };
    let forward = lockstep_model::build(&config.model, 8, config.train.seq).unwrap();
    compile(&forward, &context).unwrap_or_else(|error| panic!("{}: {error}", context.layout))
}

/// Losses and parameters after two steps from the same weights on the same tokens.
fn trained(programs: Vec<StepProgram>) -> BTreeMap<String, Vec<f64>> {
    let tensors: BTreeMap<String, _> =
        programs.iter().flat_map(|p| &p.tensors).map(|t| (t.name.clone(), (t.whole.clone(), t.role.clone()))).collect();
    let mut world = ThreadWorld::on_cpu(programs, 1, Duration::from_secs(30)).unwrap();
    for (name, (ty, role)) in &tensors {
        let draw = |i: usize| counter::bits(counter::key(5, name), i as u64);
        let number = |i: usize| (draw(i) % 2001) as f32 / 1e4 - 0.1;
        match role {
            Role::Input => {
                for m in 0..2 {
                    let token = |i: usize| (draw(m * ty.elements() + i) % 59) as u32;
                    let bytes: Vec<u8> = (0..ty.elements()).flat_map(|i| token(i).to_le_bytes()).collect();
                    world.write(name, m, &bytes).unwrap();
                }
            }
            Role::State(State::Parameter(_)) => {
                let bytes: Vec<u8> = (0..ty.elements()).flat_map(|i| number(i).to_le_bytes()).collect();
                world.write(name, 0, &bytes).unwrap();
            }
            Role::State(State::Scalars) => {
                let inverse_count = 1.0 / (2 * 8 * 8) as f32;
                let scalars =
                    StepScalars { lr: 1e-2, inverse_count, clip: 1.0, bias1: 0.1, bias2: 0.05, loss_scale: 1.0 };
                let bytes: Vec<u8> = scalars.to_array().iter().flat_map(|x| x.to_le_bytes()).collect();
                world.write(name, 0, &bytes).unwrap();
            }
            Role::State(State::Moment { .. }) => world.write(name, 0, &vec![0; ty.bytes() as usize]).unwrap(),
            Role::State(_) | Role::Output | Role::StepOutput => {}
        }
    }
    let mut found = BTreeMap::new();
    for step in 0..2 {
        world.run(StepProgram::TRAIN).unwrap();
        for m in 0..2 {
            let bytes = world.read(names::LOSS, m).unwrap();
            let losses = bytes.as_chunks().0.iter().map(|x| f64::from_le_bytes(*x)).collect();
            found.insert(format!("loss {step} {m}"), losses);
        }
    }
    for (name, _) in tensors.iter().filter(|(_, (_, role))| matches!(role, Role::State(State::Parameter(_)))) {
        let bytes = world.read(name, 0).unwrap();
        let numbers = bytes.as_chunks().0.iter().map(|x| f64::from(f32::from_le_bytes(*x))).collect();
        found.insert(name.clone(), numbers);
    }
    found
}

use MeshAxis::{Cp, DpReplicate, DpShard, Ep, Pp, Tp};

#[test]
fn ranks_that_split_sequences_over_several_axes_compute_the_same_bits() {
    let single = trained(compiled(Mesh::ONE, 0, false).programs);
    assert_ne!(single["loss 0 0"], single["loss 1 0"]);
    let meshes = [
        (mesh(&[(DpReplicate, 2), (DpShard, 2)]), &[0, 1, 2, 3][..]),
        (mesh(&[(DpShard, 2), (Ep, 2)]), &[0, 1, 2, 3]),
        (mesh(&[(DpReplicate, 2), (DpShard, 2), (Ep, 2)]), &[1, 3]),
        (mesh(&[(Pp, 2), (DpReplicate, 2), (DpShard, 2)]), &[0, 1, 2, 3]),
    ];
    for (mesh, zeros) in meshes {
        for &zero in zeros {
            let many = trained(compiled(mesh, zero, false).programs);
            assert!(many == single, "{mesh} with ZeRO {zero}");
        }
    }
}

#[test]
fn tensor_parallel_ranks_inside_them_compute_the_same_but_for_the_order_of_sums() {
    let single = trained(compiled(Mesh::ONE, 0, false).programs);
    for (zero, sequence_parallel) in [(1, true), (3, false)] {
        let many = mesh(&[(DpReplicate, 2), (DpShard, 2), (Tp, 2)]);
        let many = trained(compiled(many, zero, sequence_parallel).programs);
        for (name, one) in &single {
            let far = one.iter().zip(&many[name]).map(|(a, b)| (a - b).abs() / a.abs().max(0.05)).fold(0.0, f64::max);
            assert!(far < 1e-3, "{name} with ZeRO {zero}: {far}");
        }
    }
}

#[test]
fn random_meshes_of_all_axes_give_sound_programs() {
    for case in 0..24u64 {
        let draw = |i: u64, n: u64| (counter::bits(counter::key(11, "axes"), case * 16 + i) % n) as usize;
        let sizes = [(Pp, 1 + draw(0, 2)), (Tp, 1 << draw(1, 3))];
        let mut all = mesh(&sizes);
        for axis in Axes::SEQUENCES.iter().filter(|_| draw(2, 8) > 0) {
            if 2 * all.size(Axes::SEQUENCES) <= 8 {
                all = all.with(axis, 1 + draw(3 + axis as u64, 2));
            }
        }
        all = all.with(Cp, 1 + draw(15, 2));
        // Four heads.
        let kinds = if all.size(Axes::of(&[Cp, Tp])) <= 4 { 3 } else { 2 };
        let context = [ContextParallel::Ring, ContextParallel::Gather, ContextParallel::AllToAll][draw(10, kinds)];
        let zero = draw(12, 4) as u8;
        let sequence_parallel = all.size(Tp) > 1 && draw(13, 2) == 1;
        let reshard_after_forward = zero < 3 || draw(14, 2) == 0;
        let layout = Layout { mesh: all, zero, sequence_parallel, reshard_after_forward, context, ..Layout::single(2) };
        for program in compiled_as(layout).programs {
            verify::program(&program, ALIGNMENT).unwrap_or_else(|error| panic!("{all} zero={zero}: {error}"));
        }
    }
}

/// Changes every instruction that `change` finds something to change in, one at a time, and expects the verifier to name op and
/// layer; says how many there were.
fn refused(program: &StepProgram, change: impl Fn(&mut Instr) -> bool) -> usize {
    let mut planted = 0;
    for s in 0..program.segments.len() {
        for i in 0..program.segments[s].instrs.len() {
            let mut faulty = program.clone();
            let instr = &mut faulty.segments[s].instrs[i];
            if !change(instr) {
                continue;
            }
            planted += 1;
            let (op, layer) = (instr.op.name(), instr.layer);
            let error = verify::program(&faulty, ALIGNMENT).expect_err(op).to_string();
            let layer = layer.map_or(String::new(), |layer| format!(", layer {layer}"));
            let place = format!("instruction {i} ({op}{layer}): {op}: ");
            let segment = faulty.segments[s].name;
            assert!(error.contains(&place) && error.contains(segment), "{error} does not say {segment}, {place}");
        }
    }
    planted
}

#[test]
fn a_wrong_axis_is_refused_with_op_and_layer() {
    let (hybrid, context) = ([DpReplicate, DpShard, Tp], [DpShard, Cp, Tp]);
    for (axes, zero, sequence_parallel) in [(hybrid, 1, true), (hybrid, 3, false), (context, 1, true)] {
        let mesh = axes.into_iter().fold(Mesh::ONE, |mesh, axis| mesh.with(axis, 2));
        let program = compiled(mesh, zero, sequence_parallel).programs.remove(0);
        let sets = (1..8).map(|bits| (0..3).filter(|i| bits >> i & 1 == 1).map(|i| axes[i]).collect::<Axes>());
        for set in sets {
            let other = |over: &mut Axes| std::mem::replace(over, set) != set;
            let collectives = refused(&program, |instr| match &mut instr.op {
                Op::AllReduce { over } | Op::ReduceScatter { over, .. } | Op::AllGather { over, .. } => other(over),
                Op::SumShared { over, .. } | Op::Shift { over } | Op::AllToAll { over, .. } => other(over),
                _ => false,
            });
            let offsets = refused(&program, |instr| instr.offsets.as_mut().is_some_and(|o| other(&mut o.over)));
            let parts = refused(&program, |instr| {
                let outputs = instr.outputs.iter_mut().flatten();
                let mut parts = instr.inputs.iter_mut().chain(outputs).filter(|arg: &&mut Arg| !arg.part.is_empty());
                parts.next().is_some_and(|arg| other(&mut arg.part))
            });
            assert!(collectives > 10 && (offsets > 2 || set == Tp.into()), "{set}: {collectives} and {offsets}");
            assert!(parts > 0 || zero == 3 || set == mesh.wide(Axes::ZERO), "{set}: {parts}");
        }
    }
}

#[test]
fn a_table_of_offsets_that_leaves_entries_out_is_refused() {
    let program = compiled(mesh(&[(Tp, 2)]), 0, false).programs.remove(0);
    let moved = refused(&program, |instr| {
        instr.offsets.as_mut().is_some_and(|o| std::mem::replace(&mut o.parts[1].first, 40) != 40)
    });
    let missing = refused(&program, |instr| instr.offsets.take().is_some());
    assert!(moved > 2 && moved == missing);
}

#[test]
fn an_operand_that_is_not_split_as_the_others_is_refused() {
    let program = compiled(mesh(&[(DpShard, 2), (Tp, 2)]), 1, true).programs.remove(0);
    for axis in [DpShard, Tp] {
        let planted = refused(&program, |instr| {
            let computes = matches!(instr.phase, Phase::Forward | Phase::InputGrad | Phase::WeightGrad);
            let Some(arg) = instr.inputs.first_mut().filter(|_| computes && !instr.op.communicates()) else {
                return false;
            };
            let other = match arg.sharding.over(axis) {
                Placement::Replicated => Placement::Split(0),
                Placement::Split(_) | Placement::Flat | Placement::Partial => Placement::Replicated,
            };
            arg.sharding = arg.sharding.with(axis, other);
            true
        });
        assert!(planted > 30, "{planted}");
    }
}
