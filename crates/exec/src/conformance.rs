//! The conformance suite: every op of the table on its samples, with pseudo-random inputs, against the f64 reference, for any
//! executor. A seed draws the same inputs everywhere.
//!
//! Four things are checked: values (outputs are poisoned with NaN first), sums over micro-batches in float and fixed
//! point, that a sequence's bits do not depend on the sequences beside it, and what an update leaves that is not applied.

mod inputs;
mod kept;
mod part;
mod single;

use crate::reference;
use crate::{ExecError, Executor};
use inputs::draw;
use lockstep_ir::graph::{Phase, State};
use lockstep_ir::op::{self, ANY, Draw, Elem, LEADING, Operand, ROWS, Sample, Spec, names, samples};
use lockstep_ir::program::{Role, StepProgram, Tensor};
use lockstep_ir::{DType, DeviceProfile, Graph, Op, OpKind, Placement, TensorType, ValueId, verify};
use part::Part;
use single::{decode, encode, single_op};

/// Loads a program on the executor under test.
pub type Load<'a> = &'a mut dyn FnMut(StepProgram) -> Result<Box<dyn Executor>, ExecError>;

/// The seed where nobody names one.
pub const SEED: u64 = 7;

/// What came out for one op and shape.
#[derive(Debug)]
pub struct CaseOutcome {
    /// Op and shape.
    pub case: String,
    /// Largest difference of an output element, divided by the output's largest element.
    pub error: f64,
    /// Largest accepted `error` of this case: that of the coarsest type in it.
    pub limit: f64,
    /// What went wrong, if anything.
    pub failure: Option<String>,
}

/// Largest accepted `error` of kernels that compute in this type.
fn tolerance(compute: DType) -> f64 {
    match compute {
        // Half a unit in the last place of the result, and of what is rounded on the way.
        DType::BF16 => 1.2e-2,
        DType::F16 => 1.5e-3,
        // Of fp8: matrix units add products of bytes with 14 bits, and round on the way.
        DType::E4M3 | DType::E5M2 => 4e-3,
        // Half a step of the coarsest tenth of a block.
        DType::Signed8 | DType::Unsigned8 => 7.1e-3,
        _ => 2e-5,
    }
}

/// Runs every op of the table with parameters and activations in `compute`; `profile` is the device's, for sums that are not in
/// f32. `batch_invariant` says whether the executor promises that a sequence's bits do not depend on its neighbours. Where `ops` names any, only those.
pub fn run(
    profile: &DeviceProfile,
    compute: DType,
    batch_invariant: bool,
    seed: u64,
    ops: &[String],
    load: Load,
) -> Result<Vec<CaseOutcome>, ExecError> {
    let mut outcomes = Vec::new();
    let wanted = |sample: &Sample| ops.is_empty() || ops.iter().any(|op| op == sample.op.name());
    let mut last = None;
    for Case { sample, sums, way } in cases().filter(|case| wanted(&case.sample)) {
        let rounds = if sums == DType::BF16 { sums } else { compute };
        let call = Call::of(&sample, sample.types(compute, sums));
        // The ways of a sample, and the ranks' parts of one, follow each other.
        let defined = match last.take() {
            Some(Defined { call: known, inputs, outputs }) if known == call => Defined { call, inputs, outputs },
            _ => Defined::by_reference(call, seed),
        };
        outcomes.push(check(profile, rounds, load, &sample, &defined, way)?);
        if way == Way::Apart {
            outcomes.extend(kept::check_suppressed(profile, load, &sample, &defined.call.types(), &defined.inputs)?);
        }
        last = Some(defined);
    }
    if batch_invariant {
        for (together, alone) in per_row(BATCH).into_iter().zip(per_row(1)) {
            // Samples that stand alone have no partner.
            for (together, alone) in together.into_iter().zip(alone).filter(|(sample, _)| wanted(sample)) {
                outcomes.extend(check_batch_invariance(profile, compute, load, together, alone, seed)?);
            }
        }
    }
    Ok(outcomes)
}

/// Runs the same without looking at what comes out, for a device that computes nothing.
pub fn launch(profile: &DeviceProfile, compute: DType, seed: u64, load: Load) -> Result<(), ExecError> {
    for Case { sample, sums, way } in cases() {
        let types = sample.types(compute, sums);
        execute(profile, load, &sample, &types, &draw_as(&sample, &types, seed), way)?;
    }
    Ok(())
}

/// A sample, what gradients are summed in, and how outputs are stored.
struct Case {
    sample: Sample,
    sums: DType,
    way: Way,
}

fn cases() -> impl Iterator<Item = Case> {
    let alone: Vec<Sample> = kernel_samples(1).collect();
    // Samples without sequences are the same in both.
    let together: Vec<Sample> = kernel_samples(BATCH).filter(|sample| !alone.contains(sample)).collect();
    alone.into_iter().chain(together).flat_map(|sample| {
        let usual = |(_, draw): &(TensorType, Draw)| !matches!(draw, Draw::Scaled(by) if *by != 1.0);
        // Fixed point has a range of its own.
        let fits = |sums: &DType| *sums != DType::Fixed64 || sample.inputs.iter().all(usual);
        let all = gradient_types(&sample.op).iter().copied().filter(fits);
        let of = |sums: DType| ways(&sample.op, sums).into_iter().map(move |way| (sums, way));
        let all: Vec<(DType, Way)> = all.flat_map(of).collect();
        all.into_iter().map(move |(sums, way)| Case { sample: sample.clone(), sums, way })
    })
}

/// How the outputs of an op can be stored.
fn ways(op: &Op, sums: DType) -> Vec<Way> {
    let spec = op.spec();
    let mut ways = vec![Way::Apart];
    if spec.sums.is_some() {
        let of_inputs = spec.inputs.iter().any(|i| i.elem == Elem::Accumulator);
        // A sum of another kind than gradients' has one type.
        let fits = |t: &DType| !of_inputs || *t == sums;
        match spec.sums.map(|output| spec.outputs[output].elem) {
            Some(Elem::Is(t)) => ways.push(Way::Summed(t)),
            _ => ways.extend(SUMS.into_iter().filter(fits).map(Way::Summed)),
        }
    }
    ways.extend(spec.in_place.iter().map(|&(input, output)| Way::InPlace(input, output)));
    ways
}

/// Sequences of larger micro-batches.
const BATCH: usize = 3;

/// Samples of ops that a rank computes alone.
fn kernel_samples(batch: usize) -> impl Iterator<Item = Sample> {
    samples(batch).filter(|s| s.op.spec().has_kernel())
}

/// The same by row of the op table.
fn per_row(batch: usize) -> Vec<Vec<Sample>> {
    let of = |row: &&Spec| kernel_samples(batch).filter(|s| s.op.name() == row.name).collect();
    OpKind::ALL.iter().flat_map(|kind| kind.rows()).map(of).collect()
}

/// Types that gradients are summed in.
const SUMS: [DType; 3] = [DType::F32, DType::BF16, DType::Fixed64];

/// The types of gradient sums to try an op with.
fn gradient_types(op: &Op) -> &'static [DType] {
    match op.spec().inputs.iter().any(|i| i.elem == Elem::Accumulator) {
        true => &SUMS,
        false => &SUMS[..1],
    }
}

/// How the outputs of a case are stored.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// Each in memory of its own.
    Apart,
    /// The weight gradient summed over two micro-batches in this type.
    Summed(DType),
    /// This output in the memory of this input.
    InPlace(usize, usize),
}

fn evaluate(op: Op, types: &[TensorType], inputs: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let mut g = Graph::new();
    let ids: Vec<_> = types
        .iter()
        .enumerate()
        .map(|(i, ty)| g.state(format!("in{i}"), ty.clone(), State::Gradient { of: ValueId(i) }))
        .collect();
    let outputs = g.node(op, &ids, "out", Phase::Forward, None).unwrap_or_else(|e| panic!("{e}"));
    let values = reference::evaluate(&g, |v| inputs.get(v.0).cloned());
    outputs.iter().map(|v| values[v.0].clone().unwrap_or_default()).collect()
}

/// The numbers of a sample whose inputs have these types.
fn draw_as(sample: &Sample, types: &[TensorType], seed: u64) -> Vec<Vec<f64>> {
    let inputs: Vec<_> = types.iter().cloned().zip(sample.inputs.iter().map(|(_, draw)| *draw)).collect();
    draw(&sample.op, &inputs, seed)
}

/// An op, and the types and draws of its inputs.
#[derive(PartialEq)]
struct Call {
    op: Op,
    inputs: Vec<(TensorType, Draw)>,
}

impl Call {
    fn of(sample: &Sample, types: Vec<TensorType>) -> Self {
        let inputs = types.into_iter().zip(sample.inputs.iter().map(|(_, draw)| *draw)).collect();
        Self { op: sample.op, inputs }
    }

    fn types(&self) -> Vec<TensorType> {
        self.inputs.iter().map(|(ty, _)| ty.clone()).collect()
    }
}

/// What a call must give.
struct Defined {
    call: Call,
    inputs: Vec<Vec<f64>>,
    outputs: Vec<Vec<f64>>,
}

impl Defined {
    fn by_reference(call: Call, seed: u64) -> Self {
        let inputs = draw(&call.op, &call.inputs, seed);
        let outputs = evaluate(call.op, &call.types(), &inputs);
        Self { call, inputs, outputs }
    }
}

fn check(
    profile: &DeviceProfile,
    compute: DType,
    load: Load,
    sample: &Sample,
    defined: &Defined,
    way: Way,
) -> Result<CaseOutcome, ExecError> {
    let (op, types) = (&sample.op, defined.call.types());
    let (mut drawn, mut expected) = (defined.inputs.clone(), defined.outputs.clone());
    let part = Part::of(sample);
    let inferred = op.infer(&types.iter().collect::<Vec<_>>()).map_err(|e| ExecError::Internal(e.to_string()))?;
    if let Some(part) = &part {
        let partial = |o: usize| part.output_sharding(op, o, inferred[o].dims.len()).axes(Placement::Partial);
        if (0..inferred.len()).any(|o| !partial(o).is_empty()) {
            part.alone(op, op.input(0, types.len()), &types[0], &mut drawn[0]);
            expected = evaluate(*op, &types, &drawn);
        }
    }
    let copy = (0..inferred.len()).find(|o| op.output(*o).elem == Elem::Rounded);
    if let Some(copy) = copy.filter(|_| inferred[0].dtype == DType::F32) {
        // What is rounded is the first output; weights that are their own master weights have no copy.
        expected[copy] = expected[0].clone();
    }
    if let Some(part) = &part {
        let outputs = expected.iter().zip(&inferred).enumerate();
        expected = outputs.map(|(o, (data, ty))| part.local(op, op.output(o), ty, data).1).collect();
    }
    if let (Way::Summed(_), Some(sum)) = (way, op.spec().sums) {
        // Two micro-batches with the same inputs.
        expected[sum].iter_mut().for_each(|x| *x *= 2.0);
    }
    let shapes: Vec<String> = types.iter().map(ToString::to_string).collect();
    let how = match way {
        Way::Apart => String::new(),
        Way::Summed(dtype) => format!(", summed in {dtype}"),
        Way::InPlace(input, output) => format!(", output {output} in place of input {input}"),
    };
    let magnitude = match sample.inputs[0].1 {
        Draw::Scaled(by) if by != 1.0 => format!(", of about {by:.0e}"),
        Draw::Squares(norm) => format!(", of a norm of {norm:.1e}"),
        _ => String::new(),
    };
    let rank = sample.part.map_or(String::new(), |(index, parts)| format!(", on rank {index} of {parts}"));
    let case = format!("{}({}{how}{magnitude}{rank}) as {op:?}", op.name(), shapes.join(", "));
    let mut found = execute(profile, load, sample, &types, &drawn, way)?;
    if op.output(0).elem == Elem::Is(DType::Fixed64) {
        // An integer in parts counts as a whole.
        for parts in [&mut found[0], &mut expected[0]] {
            *parts = vec![reference::from_limbs(parts).sqrt()];
        }
    }
    if op.output(0).name == "stats" {
        // The norm and the factor are of different magnitudes.
        for outputs in [&mut found, &mut expected] {
            *outputs = outputs[0].iter().map(|x| vec![*x]).collect();
        }
    }
    let floats = inferred.iter().enumerate().filter(|(o, _)| matches!(op.output(*o).elem, Elem::Float(_)));
    let summed = if let Way::Summed(dtype) = way { Some(dtype) } else { None };
    let multiplied = op.spec().multiplies.iter().map(|input| types[*input].dtype);
    let stored = floats.map(|(_, ty)| ty.dtype).chain(summed).chain([compute]).chain(multiplied);
    // Bytes are the same on all devices, and so is what stands beside them.
    let bytes = inferred.iter().any(|ty| ty.dtype.is_fp8());
    let limit = if bytes { 0.0 } else { stored.map(tolerance).fold(0.0, f64::max) };
    let (mut error, mut loosest) = (0.0f64, limit);
    let mut failure = None;
    for (o, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let largest = expected.iter().filter(|x| x.is_finite()).fold(1e-40, |m: f64, x| m.max(x.abs()));
        let difference = found
            .iter()
            .zip(expected)
            // NaN is an answer too: that of an update that is not applied.
            .map(|(a, b)| if a == b || (a.is_nan() && b.is_nan()) { 0.0 } else { (a - b).abs() })
            .fold(0.0, |m, x| if x > m || x.is_nan() { x } else { m });
        let relative = difference / largest;
        let is_kept =
            matches!(op.spec().outputs.get(o), Some(Operand { elem: Elem::Weight | Elem::Moment | Elem::Rounded, .. }));
        // What an update keeps is rounded once, to its own type.
        let limit = if is_kept { tolerance(inferred[o].dtype) } else { limit };
        loosest = limit.max(loosest);
        // A rank's part has the bits of the whole.
        let whole = sample.part.is_none() && o < inferred.len();
        if let Some(wrong) = whole.then(|| kept::strays(op, o, inferred[o].dtype, &drawn, expected, found)).flatten() {
            failure = Some(wrong);
        }
        if relative.is_nan() || relative > limit {
            failure = Some(format!("output {o} differs by {relative:.2e} of its largest element"));
        }
        error = if relative > error || relative.is_nan() { relative } else { error };
    }
    Ok(CaseOutcome { case, error, limit: loosest, failure })
}

/// Ops whose outputs belong to sequences: each sequence alone must give the same bits.
fn check_batch_invariance(
    profile: &DeviceProfile,
    compute: DType,
    load: Load,
    together: Sample,
    alone: Sample,
    seed: u64,
) -> Result<Option<CaseOutcome>, ExecError> {
    let spec = together.op.spec();
    let per_sequence = |dims: &'static str| names(dims).next().is_some_and(|name| [op::BATCH, LEADING].contains(&name));
    // Chunks of positions, and blocks of rows, are of the whole micro-batch.
    let chunks = spec.inputs.iter().chain(spec.outputs).any(|o| names(o.dims).any(|name| [ANY, ROWS].contains(&name)));
    // Of units in blocks, what a sequence has lies apart.
    let apart = spec.inputs.iter().any(|o| names(o.dims).skip(1).any(|name| name == op::BATCH));
    if chunks || apart || !spec.outputs.iter().any(|o| per_sequence(o.dims)) {
        return Ok(None);
    }
    let types = together.types(compute, DType::F32);
    let drawn = draw_as(&together, &types, seed);
    let together = execute(profile, load, &together, &types, &drawn, Way::Apart)?;
    let (op, types) = (alone.op, alone.types(compute, DType::F32));
    let sample = &alone;
    let mut failure = None;
    for b in 0..BATCH {
        let share = |data: &[f64], dims: &'static str| match per_sequence(dims) {
            true => data[b * data.len() / BATCH..(b + 1) * data.len() / BATCH].to_vec(),
            false => data.to_vec(),
        };
        let alone: Vec<Vec<f64>> =
            drawn.iter().enumerate().map(|(i, x)| share(x, op.input(i, drawn.len()).dims)).collect();
        let found = execute(profile, load, sample, &types, &alone, Way::Apart)?;
        for (o, output) in spec.outputs.iter().enumerate().filter(|(_, o)| per_sequence(o.dims)) {
            if found[o] != share(&together[o], output.dims) {
                failure = Some(format!("sequence {b} of output {o} depends on its neighbours"));
            }
        }
    }
    Ok(Some(CaseOutcome { case: format!("{} one sequence at a time", op.name()), error: 0.0, limit: 0.0, failure }))
}

/// Runs a sample's op on these inputs, or one rank's part of it.
fn execute(
    profile: &DeviceProfile,
    load: Load,
    sample: &Sample,
    types: &[TensorType],
    inputs: &[Vec<f64>],
    way: Way,
) -> Result<Vec<Vec<f64>>, ExecError> {
    let internal = |e: String| ExecError::Internal(e);
    let (op, part) = (&sample.op, Part::of(sample));
    let local = |(i, (ty, data)): (usize, (&TensorType, &Vec<f64>))| match &part {
        Some(part) => part.local(op, op.input(i, types.len()), ty, data),
        None => (ty.clone(), data.clone()),
    };
    let offsets = part.and_then(|part| part.offsets(op, types));
    let (types, inputs): (Vec<_>, Vec<_>) = types.iter().zip(inputs).enumerate().map(local).unzip();
    let program = single_op(profile, op, &types, way, part.zip(offsets)).map_err(internal)?;
    verify::program(&program, profile.alignment).map_err(|e| internal(e.to_string()))?;
    let mut executor = load(program.clone())?;
    for (i, (ty, data)) in types.iter().zip(&inputs).enumerate() {
        executor.write(&format!("in{i}"), 0, &encode(ty.dtype, data))?;
    }
    let outputs: Vec<&Tensor> = program.tensors.iter().filter(|t| t.name.starts_with("out")).collect();
    for t in outputs.iter().filter(|t| t.role != Role::StepOutput) {
        executor.write(&t.name, 0, &encode(t.ty.dtype, &vec![f64::NAN; t.ty.elements() * t.ty.dtype.numbers()]))?;
    }
    let guards: Vec<&Tensor> = program.tensors.iter().filter(|t| t.name.starts_with("guard")).collect();
    let pattern = |t: &Tensor| 0xa5u8.wrapping_mul(t.name.len() as u8);
    for t in &guards {
        executor.write(&t.name, 0, &vec![pattern(t); t.ty.bytes() as usize])?;
    }
    executor.run(StepProgram::TRAIN)?;
    for t in &guards {
        if executor.read(&t.name, 0)?.iter().any(|b| *b != pattern(t)) {
            return Err(internal(format!("{} writes outside its outputs and scratch, into {}", op.name(), t.name)));
        }
    }
    outputs.iter().map(|t| Ok(decode(t.ty.dtype, &executor.read(&t.name, 0)?))).collect()
}
