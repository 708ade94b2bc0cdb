//! Programs of one instruction, and numbers as devices hold them.

use super::{Part, Way};
use lockstep_ir::dynamic8::Table;
use lockstep_ir::graph::{Phase, State};
use lockstep_ir::program::{
    Arg, Buffer, BufferId, Class, Entry, Instr, Lifetime, Offsets, Region, Role, Segment, Slot, StepProgram, Stream,
    Sum, Tensor,
};
use lockstep_ir::{
    Axes, Axis, DType, DeviceProfile, Dim, F8, Mesh, Op, Sharding, TensorType, ValueId, bf16, f16, fixed,
};

/// Elements of a guard: memory after scratch and after every output that no instruction may write.
const GUARD: usize = 1 << 16;

/// A program of one instruction, run for two micro-batches where it sums; `part` where types are those of one rank.
pub(super) fn single_op(
    profile: &DeviceProfile,
    op: &Op,
    types: &[TensorType],
    way: Way,
    part: Option<(Part, Offsets)>,
) -> Result<StepProgram, String> {
    let refs: Vec<&TensorType> = types.iter().collect();
    let mut outputs = op.infer(&refs).map_err(|e| e.to_string())?;
    if let (Way::Summed(dtype), Some(sum)) = (way, op.spec().sums) {
        outputs[sum].dtype = dtype;
    }
    let scratch = profile.workspace(op, &refs).map_err(|e| e.to_string())?;
    let mut regions = Vec::new();
    let mut buffers = Vec::new();
    // Scratch comes first: what is written after its end is seen in the first guard.
    let workspace = (scratch > 0).then(|| {
        let slot_bytes = profile.align(scratch);
        regions.push(Region { lifetime: Lifetime::Frame, offset: 0, slot_bytes, slots: 1 });
        let name = "scratch".to_owned();
        buffers.push(Buffer { name, class: Class::Workspace, layer: None, region: 0, offset: 0, bytes: scratch });
        BufferId(0)
    });
    let (first, region) = (regions.first().map_or(0, Region::bytes), regions.len());
    let (mut end, mut host_bytes) = (0, 0);
    let mut tensors = Vec::new();
    let mut values = Vec::new();
    let mut args = Vec::new();
    let guard = TensorType::new(DType::U32, [Dim::new(Axis::Scalar, GUARD)]);
    let guards = |i: usize| if i < types.len() { None } else { Some(("guard", &guard)) };
    let named = types.iter().map(|t| ("in", t)).chain(outputs.iter().map(|t| ("out", t))).enumerate();
    let all = named.flat_map(|(i, of)| [Some((i, of)), guards(i).map(|g| (i, g))]).flatten();
    for (i, (kind, ty)) in [(0, ("guard", &guard))].into_iter().chain(all) {
        let name = format!("{kind}{i}");
        let buffer = BufferId(buffers.len());
        let bytes = ty.bytes();
        // Copies have one side in the memory of the host, after the others.
        let hosted = (*op == Op::Fetch && kind == "in") || (*op == Op::Offload && kind == "out");
        let (region, end) = if hosted { (region + 1, &mut host_bytes) } else { (region, &mut end) };
        buffers.push(Buffer { name: name.clone(), class: Class::Optimizer, layer: None, region, offset: *end, bytes });
        *end += profile.align(bytes);
        let value = ValueId(values.len());
        // Inputs are there when the step begins, sums are not.
        let state = if kind == "in" { State::Cache } else { State::Gradient { of: value } };
        let (role, sharding) = (Role::State(state), Sharding::REPLICATED);
        let (ty, whole) = (ty.clone(), ty.clone());
        let placed = match (&part, i.checked_sub(types.len())) {
            (None, _) => sharding,
            (Some((part, _)), None) => part.sharding(op, op.input(i, types.len()), ty.dims.len()),
            (Some((part, _)), Some(output)) => part.output_sharding(op, output, ty.dims.len()),
        };
        tensors.push(Tensor {
            name: name.clone(),
            value,
            ty: ty.clone(),
            whole,
            sharding,
            buffer,
            part: Axes::NONE,
            role,
        });
        if kind != "guard" {
            args.push(Arg { buffer, value: values.len(), ty, sum: Sum::No, sharding: placed, part: Axes::NONE });
        }
        values.push(name);
    }
    regions.push(Region { lifetime: Lifetime::Run, offset: first, slot_bytes: end, slots: 1 });
    if host_bytes > 0 {
        regions.push(Region { lifetime: Lifetime::Host, offset: first + end, slot_bytes: host_bytes, slots: 1 });
    }
    let mut outputs = args.split_off(types.len());
    if let (Way::Summed(_), Some(sum)) = (way, op.spec().sums) {
        outputs[sum].sum = Sum::AfterFirst;
    }
    for &(input, output) in op.spec().in_place {
        // A change of state: all its outputs are its inputs' memory.
        if way == Way::InPlace(input, output) || op.spec().always_in_place {
            outputs[output].buffer = args[input].buffer;
            let name = format!("out{}", types.len() + output);
            for tensor in tensors.iter_mut().filter(|t| t.name == name) {
                (tensor.buffer, tensor.role) = (args[input].buffer, Role::StepOutput);
            }
        }
    }
    let outputs = outputs.into_iter().map(Some).collect();
    let (stream, phase) = (Stream::Compute, Phase::Forward);
    let (op, waits) = (*op, Vec::new());
    let (mesh, offsets) = part.map_or((Mesh::ONE, None), |(part, offsets)| (part.mesh, Some(offsets)));
    let instr = Instr {
        op,
        inputs: args,
        outputs,
        workspace,
        phase,
        layer: None,
        stream,
        waits,
        tf32: false,
        repeated: false,
        offsets,
        counted: None,
    };
    let micro_batches = if let Way::Summed(_) = way { 2 } else { 1 };
    let slot = |micro_batch| Slot::new(0, micro_batch);
    Ok(StepProgram {
        mesh,
        stage: 0,
        arena_bytes: first + end,
        host_bytes,
        regions,
        buffers,
        values,
        tensors,
        segments: vec![Segment { name: "op", chunk: 0, instrs: vec![instr], groups: Vec::new() }],
        entries: vec![Entry { name: StepProgram::TRAIN.into(), schedule: (0..micro_batches).map(slot).collect() }],
    })
}

pub(super) fn encode(dtype: DType, data: &[f64]) -> Vec<u8> {
    match dtype {
        DType::F32 => data.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
        DType::BF16 => data.iter().flat_map(|x| bf16::from_f32(*x as f32).to_le_bytes()).collect(),
        DType::F16 => data.iter().flat_map(|x| f16::from_f32(*x as f32).to_le_bytes()).collect(),
        DType::E4M3 => data.iter().map(|x| F8::E4M3.from_f32(*x as f32)).collect(),
        DType::E5M2 => data.iter().map(|x| F8::E5M2.from_f32(*x as f32)).collect(),
        DType::Int8 => data.iter().map(|x| x.round_ties_even().clamp(-127.0, 127.0) as i8 as u8).collect(),
        DType::F64 => data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::U32 => data.iter().flat_map(|x| (*x as u32).to_le_bytes()).collect(),
        DType::Fixed64 => data.iter().flat_map(|x| fixed::add(0, *x as f32).to_le_bytes()).collect(),
        DType::Signed8 | DType::Unsigned8 => {
            blocks(dtype, |table| table.round(&data.iter().map(|x| *x as f32).collect::<Vec<_>>()))
        }
    }
}

pub(super) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::F32 => bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
        DType::BF16 => bytes.as_chunks().0.iter().map(|b| f64::from(bf16::to_f32(u16::from_le_bytes(*b)))).collect(),
        DType::F16 => bytes.as_chunks().0.iter().map(|b| f64::from(f16::to_f32(u16::from_le_bytes(*b)))).collect(),
        DType::E4M3 => bytes.iter().map(|b| f64::from(F8::E4M3.to_f32(*b))).collect(),
        DType::E5M2 => bytes.iter().map(|b| f64::from(F8::E5M2.to_f32(*b))).collect(),
        DType::Int8 => bytes.iter().map(|b| f64::from(*b as i8)).collect(),
        DType::F64 => bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        DType::U32 => bytes.as_chunks().0.iter().map(|b| f64::from(u32::from_le_bytes(*b))).collect(),
        DType::Fixed64 => {
            bytes.as_chunks().0.iter().map(|b| f64::from(fixed::to_f32(i64::from_le_bytes(*b)))).collect()
        }
        DType::Signed8 | DType::Unsigned8 => {
            blocks(dtype, |table| table.expand(bytes).into_iter().map(f64::from).collect())
        }
    }
}

/// What the table of a type of blocks makes.
fn blocks<T>(dtype: DType, make: impl Fn(&Table) -> Vec<T>) -> Vec<T> {
    Table::of(dtype).map_or(Vec::new(), make)
}
