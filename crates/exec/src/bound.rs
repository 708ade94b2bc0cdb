//! Instructions as executors run them: operands as places in the arena, dimensions as sizes.

use crate::ExecError;
use lockstep_ir::op::{BATCH, Dims, Elem, IGNORED_TARGET, ROUNDING, ROWS, SEQ, TypeVar};
use lockstep_ir::program::{Arg, BufferId, Instr, Lifetime, Offsets, Role, Slot, StepProgram, Sum, Tensor};
use lockstep_ir::{Coordinates, DType, DeviceProfile, Dim, Op, Placement, Run, Span, TypeError, counter};
use std::collections::BTreeMap;

/// An operand as the executor sees it.
#[derive(Clone, Copy)]
pub struct At {
    lifetime: Lifetime,
    first: u64,
    slot_bytes: u64,
    /// How many elements it has.
    pub elements: usize,
    /// Their type.
    pub dtype: DType,
    /// Whether, as an output, it adds to what is there.
    pub sum: Sum,
    /// Where it is a flat range of a larger tensor: the element of that at which it starts.
    pub cut_at: usize,
}

impl At {
    /// A whole buffer.
    pub fn buffer(program: &StepProgram, buffer: BufferId) -> Self {
        let b = &program.buffers[buffer.0];
        let region = &program.regions[b.region];
        Self {
            lifetime: region.lifetime,
            first: region.offset + b.offset,
            slot_bytes: region.slot_bytes,
            elements: 0,
            dtype: DType::F32,
            sum: Sum::No,
            cut_at: 0,
        }
    }

    /// Bytes that start here, whatever the slot.
    pub(crate) const fn absolute(first: u64) -> Self {
        let (lifetime, dtype, sum) = (Lifetime::Run, DType::F32, Sum::No);
        Self { lifetime, first, slot_bytes: 0, elements: 0, dtype, sum, cut_at: 0 }
    }

    /// An operand of the rank at `here`.
    pub fn arg(program: &StepProgram, arg: &Arg, here: Coordinates) -> Self {
        let at = Self::buffer(program, arg.buffer);
        let before = here.index(arg.part, &program.mesh) as u64 * arg.ty.bytes();
        let (elements, dtype) = (arg.ty.elements(), arg.ty.dtype);
        let cut_at = here.index(arg.sharding.axes(Placement::Flat), &program.mesh) * elements;
        Self { first: at.first + before, elements, dtype, sum: arg.sum, cut_at, ..at }
    }

    /// Whether it is in the memory of the host.
    pub fn is_hosted(&self) -> bool {
        self.lifetime.is_in_host()
    }

    /// Where it starts in the arena at a slot of a schedule, in bytes; in the host's memory, after the arena.
    pub fn offset(&self, slot: Slot) -> u64 {
        self.first + slot.copy(self.lifetime) as u64 * self.slot_bytes
    }

    /// Its address at a slot of a schedule, in an arena that starts at `base`.
    pub fn address(&self, base: *mut u8, slot: Slot) -> *mut u8 {
        base.wrapping_add(self.offset(slot) as usize)
    }
}

/// An instruction, ready to run.
pub struct Bound {
    /// What is computed.
    pub op: Op,
    /// In the op table's order.
    pub inputs: Vec<At>,
    /// In the op table's order; `None` where unused.
    pub outputs: Vec<Option<At>>,
    /// Scratch.
    pub workspace: Option<At>,
    /// Type of the floating-point operands.
    pub float: DType,
    /// Whether its matmul may round operands of f32 to TF32.
    pub tf32: bool,
    /// Where the rank has a part of the dimension that the op numbers.
    part: Option<Part>,
    /// Where it has a part of the second one.
    counted: Option<Part>,
    /// Sizes by letter of the op table.
    dims: Dims,
    /// Rows of the sections of the first input.
    pub sections: Vec<usize>,
    /// Elements of the sections of its last dimension.
    pub columns: Vec<usize>,
    /// What `Op::Part` copies.
    pub blocks: Vec<Block>,
    /// Which random bits an update rounds by, where it does.
    pub rounding: Option<Rounding>,
}

/// The random bits of a tensor: those of its elements where they stand in the whole, whatever a rank has of it.
pub struct Rounding {
    /// The input with the step's key.
    pub input: usize,
    /// A number of the tensor's name.
    pub site: u64,
    /// Where the rank's elements stand.
    pub places: Vec<Block>,
}

impl Rounding {
    /// Of the state that an update changes first: weights, or a moment where it changes nothing else.
    fn of(program: &StepProgram, instr: &Instr, here: Coordinates) -> Result<Option<Self>, TypeError> {
        let (op, given) = (instr.op, instr.inputs.len());
        let Some(input) = (0..given).find(|i| op.input(*i, given).name == ROUNDING) else { return Ok(None) };
        let missing = || TypeError { op: op.name(), reason: "changes no state that it could round".to_owned() };
        let changed = &instr.inputs[op.spec().in_place.first().ok_or_else(missing)?.0];
        // State that is kept in the host's memory was copied from there.
        let instrs = program.segments.iter().flat_map(|s| &s.instrs);
        let mut copies =
            instrs.filter(|i| i.op == Op::Fetch && i.outputs.iter().flatten().any(|o| o.value == changed.value));
        let home = copies.next().map_or(changed.buffer, |copy| copy.inputs[0].buffer);
        let is_state = |t: &&Tensor| t.buffer == home && matches!(t.role, Role::State(_));
        let tensor = program.tensors.iter().find(is_state).ok_or_else(missing)?;
        // Runs count blocks where it is kept in such.
        let numbers = tensor.whole.dtype.numbers();
        let mut runs = changed.sharding.runs(&tensor.whole, &program.mesh, here);
        for run in &mut runs {
            (run.whole, run.local, run.len) = (run.whole * numbers, run.local * numbers, run.len * numbers);
        }
        let places = Block::of(&runs);
        Ok(Some(Self { input, site: counter::key(0, &tensor.name), places }))
    }
}

/// Rows of elements that a rank copies from a whole to its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The first element, in the whole.
    pub whole: usize,
    /// The first element, in the part.
    pub part: usize,
    /// Elements of a row.
    pub len: usize,
    /// Rows.
    pub rows: usize,
    /// From one row of the whole to the next.
    pub whole_stride: usize,
    /// From one row of the part to the next.
    pub part_stride: usize,
}

impl Block {
    /// Runs in order, those that follow each other in equal steps together.
    pub(crate) fn of(runs: &[Run]) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        for run in runs {
            if let Some(block) = blocks.last_mut().filter(|block| block.len == run.len) {
                let steps = (run.whole - block.whole, run.local - block.part);
                if block.rows == 1 {
                    (block.whole_stride, block.part_stride) = steps;
                }
                if steps == (block.rows * block.whole_stride, block.rows * block.part_stride) {
                    block.rows += 1;
                    continue;
                }
            }
            let (whole, part, len) = (run.whole, run.local, run.len);
            blocks.push(Block { whole, part, len, rows: 1, whole_stride: len, part_stride: len });
        }
        blocks
    }
}

/// The parts that ranks have of a dimension, and which of them is this rank's.
struct Part {
    all: Vec<Span>,
    index: usize,
    /// Entries of the whole.
    whole: usize,
}

impl Part {
    fn new(Offsets { over, parts, whole }: &Offsets, program: &StepProgram, here: Coordinates) -> Self {
        Self { all: parts.clone(), index: here.index(*over, &program.mesh), whole: *whole }
    }
}

/// A rank's part of the vocabulary.
#[derive(Clone, Copy)]
pub struct VocabPart {
    /// Its first entry.
    pub first: usize,
    /// Its entries, without padding.
    pub entries: usize,
    /// Entries of the whole.
    pub whole: usize,
}

impl VocabPart {
    /// Where a target stands in this part; `None` if it is in another, or ignored.
    #[inline(always)]
    pub fn find(&self, token: u32) -> Option<usize> {
        if token == IGNORED_TARGET {
            return None;
        }
        let token = token as usize;
        assert!(token < self.whole, "token {token} is outside the vocabulary of {}", self.whole);
        token.checked_sub(self.first).filter(|i| *i < self.entries)
    }
}

impl Bound {
    /// Resolves an instruction of a program for the rank at `here`.
    pub fn new(program: &StepProgram, instr: &Instr, here: Coordinates) -> Result<Self, TypeError> {
        let types: Vec<_> = instr.inputs.iter().map(|a| &a.ty).collect();
        let rows = types.first().and_then(|ty| ty.dims.first());
        let columns = types.first().and_then(|ty| ty.dims.last());
        let sizes_of = |dim: Option<&Dim>| dim.map_or(Vec::new(), |d| d.sections.iter().map(|s| s.size()).collect());
        let (dims, float) = match instr.op.communicates() {
            true => (Dims::default(), DType::F32),
            false => {
                let dims = instr.op.bind(&types)?;
                let float = dims.float(TypeVar::T);
                (dims, float)
            }
        };
        let blocks = match (instr.op, &instr.outputs[..]) {
            (Op::Part { .. }, [Some(part)]) => {
                let (whole, mesh) = (&instr.inputs[0], &program.mesh);
                Block::of(&part.sharding.beyond(whole.sharding).runs(&whole.ty, mesh, here))
            }
            _ => Vec::new(),
        };
        Ok(Self {
            op: instr.op,
            inputs: instr.inputs.iter().map(|a| At::arg(program, a, here)).collect(),
            outputs: instr.outputs.iter().map(|o| o.as_ref().map(|a| At::arg(program, a, here))).collect(),
            workspace: instr.workspace.map(|w| At::buffer(program, w)),
            float,
            tf32: instr.tf32,
            part: instr.offsets.as_ref().map(|offsets| Part::new(offsets, program, here)),
            counted: instr.counted.as_ref().map(|offsets| Part::new(offsets, program, here)),
            dims,
            sections: sizes_of(rows),
            columns: sizes_of(columns),
            blocks,
            rounding: Rounding::of(program, instr, here)?,
        })
    }

    /// Size of a dimension of the op's row. Kernels that several ops share ask for some that one of these ops lacks, and take it for 1.
    pub fn size(&self, name: &str) -> usize {
        const SHARED: [&str; 5] = [BATCH, SEQ, ROWS, "parts", "choices"];
        let known = self.dims.get(name).is_some() || SHARED.contains(&name);
        debug_assert!(known, "{} has no dimension `{name}`", self.op.name());
        self.dims.size(name)
    }

    /// Choices of a token that share a row of it; one where each has its own.
    pub fn sharers(&self, each: bool) -> usize {
        if each { 1 } else { self.size("choices") }
    }

    /// Whether an output adds to what is there.
    pub fn adds(&self, output: usize, slot: Slot) -> bool {
        match self.outputs[output].as_ref().map_or(Sum::No, |at| at.sum) {
            Sum::No => false,
            Sum::AfterFirst => slot.micro_batch > 0,
            Sum::Always => true,
        }
    }

    /// The part of the vocabulary that the rank has: all of it, if nothing else is said.
    pub fn vocab_part(&self) -> VocabPart {
        let entries = self.size("vocab");
        let (first, whole) = self.part.as_ref().map_or((0, entries), |part| (part.all[part.index].first, part.whole));
        VocabPart { first, entries: entries.min(whole.saturating_sub(first)), whole }
    }

    /// The first entry that the rank has of the second dimension that the op numbers.
    pub fn counted_from(&self) -> usize {
        self.counted.as_ref().map_or(0, |part| part.all[part.index].first)
    }

    /// The positions that the rank has of its sequences.
    pub fn positions(&self) -> Span {
        self.positions_before(0)
    }

    /// The positions that the rank this many before this one around the ring has: where keys are that have come so far.
    pub fn positions_before(&self, step: usize) -> Span {
        let of = |Part { all, index, .. }: &Part| all[(index + all.len() - step % all.len()) % all.len()];
        self.part.as_ref().map_or(Span::ALL, of)
    }
}

/// The tensors of a program by name.
pub struct Names(BTreeMap<String, usize>);

impl Names {
    /// Those of a program.
    pub fn new(program: &StepProgram) -> Self {
        Self(program.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect())
    }

    /// A tensor, and where the rank at `here` has it in its arena, in bytes.
    pub fn find<'p>(
        &self,
        program: &'p StepProgram,
        here: Coordinates,
        (name, micro_batch): (&str, usize),
    ) -> Result<(&'p Tensor, u64), ExecError> {
        let unknown = || ExecError::Internal(format!("the program has no tensor `{name}`"));
        let tensor = &program.tensors[*self.0.get(name).ok_or_else(unknown)?];
        let region = &program.regions[program.buffers[tensor.buffer.0].region];
        if region.lifetime == Lifetime::MicroBatch && micro_batch >= region.slots {
            return Err(ExecError::Internal(format!("`{name}` has no micro-batch {micro_batch}")));
        }
        let before = here.index(tensor.part, &program.mesh) as u64 * tensor.ty.bytes();
        Ok((tensor, program.address(tensor.buffer, &Slot::new(0, micro_batch)) + before))
    }
}

/// Whether a host may write these bytes to a tensor.
pub fn check_write(tensor: &Tensor, data: &[u8]) -> Result<(), ExecError> {
    let (name, bytes) = (&tensor.name, tensor.ty.bytes());
    match data.len() as u64 == bytes && !matches!(tensor.role, Role::Output | Role::StepOutput) {
        true => Ok(()),
        false => Err(ExecError::Internal(format!("`{name}` takes {bytes} bytes, got {}", data.len()))),
    }
}

/// What kernels will use must be what was planned. `profile` is the executor's, for types of operands and of gradient sums.
pub fn check_scratch(
    program: &StepProgram,
    segments: &[Vec<Bound>],
    profile: impl Fn(DType, DType) -> DeviceProfile,
) -> Result<(), ExecError> {
    let mut profiles: BTreeMap<(DType, DType), DeviceProfile> = BTreeMap::new();
    let instrs = program.segments.iter().flat_map(|s| &s.instrs).zip(segments.iter().flatten());
    for (instr, bound) in instrs.filter(|(i, _)| !i.op.communicates()) {
        let sums = |(o, arg): (usize, &Option<Arg>)| {
            arg.as_ref().filter(|_| instr.op.output(o).elem == Elem::Accumulator).map(|a| a.ty.dtype)
        };
        let gradients = instr.outputs.iter().enumerate().find_map(sums).unwrap_or(DType::F32);
        let types: Vec<_> = instr.inputs.iter().map(|a| &a.ty).collect();
        let profile = profiles.entry((bound.float, gradients)).or_insert_with(|| profile(bound.float, gradients));
        let needed = profile.workspace(&instr.op, &types).map_err(|e| ExecError::Internal(e.to_string()))?;
        let planned = instr.workspace.map_or(0, |w| program.buffers[w.0].bytes);
        if planned < needed {
            let op = instr.op.name();
            return Err(ExecError::Internal(format!("{op} needs {needed} bytes of scratch, {planned} are planned")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_in_equal_steps_are_one_block() {
        let run = |whole, local, len| Run { whole, local, len };
        let columns = Block::of(&[run(2, 0, 2), run(6, 2, 2), run(10, 4, 2)]);
        assert_eq!(columns, [Block { whole: 2, part: 0, len: 2, rows: 3, whole_stride: 4, part_stride: 2 }]);
        let sections = Block::of(&[run(8, 0, 8), run(20, 8, 4), run(28, 12, 4), run(40, 16, 4)]);
        assert_eq!(
            sections.iter().map(|b| (b.whole, b.part, b.len * b.rows)).collect::<Vec<_>>(),
            [(8, 0, 8), (20, 8, 8), (40, 16, 4)]
        );
        assert_eq!(Block::of(&[]), []);
    }
}
