//! The step program: what one rank runs, with every buffer placed.
//!
//! Ranks that differ only by their index share one program, so two things depend on the index. `Arg::part` is a
//! rank's range of a buffer, the one symbolic address: ZeRO 1 and 2 update and gather parameters in place.
//! `Instr::offsets` is a table for ops that number the entries of a dimension: which entries each rank has, in up
//! to two runs, by its index along the axes that split it. Parts of the vocabulary, positions and attention over
//! parts of a sequence use it.

mod memory;
mod print;

pub use memory::{Buffer, BufferId, Class, Lifetime, Region, Saved};

use crate::fusion::FusedGroup;
use crate::graph::{Phase, State};
use crate::mesh::{Axes, Mesh};
use crate::{DType, MatmulType, Op, Placement, Sharding, Span, TensorType, ValueId, counter};
use std::ops::RangeInclusive;
use std::sync::Arc;

/// An operand of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub struct Arg {
    /// Where it is.
    pub buffer: BufferId,
    /// Which value of the program is meant: an index into [`StepProgram::values`]. Several values may use one buffer in turn.
    pub value: usize,
    /// Element type and shape on this rank.
    pub ty: TensorType,
    /// For outputs: whether they add to what is there.
    pub sum: Sum,
    /// Its sharding over the mesh.
    pub sharding: Sharding,
    /// Where it is this rank's part of the buffer, the axes over which parts are counted: as many bytes as the type has, after
    /// those of the ranks before it. The buffer as it is where there are none.
    pub part: Axes,
}

/// Whether an output replaces what is there or adds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sum {
    /// Replaces.
    No,
    /// The first micro-batch of a step replaces, later ones add.
    AfterFirst,
    /// Adds: another instruction has begun the sum.
    Always,
}

/// One kernel call.
#[derive(Clone, Debug, PartialEq)]
pub struct Instr {
    /// What is computed.
    pub op: Op,
    /// Inputs, in the op table's order.
    pub inputs: Vec<Arg>,
    /// Outputs, in the op table's order; `None` where unused.
    pub outputs: Vec<Option<Arg>>,
    /// Scratch, live during this call only.
    pub workspace: Option<BufferId>,
    /// Which part of the step it belongs to.
    pub phase: Phase,
    /// The layer that it belongs to.
    pub layer: Option<usize>,
    /// Who runs it: the others go on meanwhile.
    pub stream: Stream,
    /// Instructions of this segment, on other streams, that must have ended before it starts, and all before them on theirs: at most one of
    /// each stream.
    pub waits: Vec<usize>,
    /// Whether its matmul may round operands of f32 to TF32.
    pub tf32: bool,
    /// As of the [node](crate::graph::Node::repeated): its FLOPs are the hardware's alone.
    pub repeated: bool,
    /// Where ranks split the dimension whose entries the op numbers: which entries each has.
    pub offsets: Option<Offsets>,
    /// The same of the second dimension that it numbers.
    pub counted: Option<Offsets>,
}

/// Which entries of a dimension each part has: of a vocabulary, positions of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offsets {
    /// Parts are counted over these axes.
    pub over: Axes,
    /// The entries of each part, by index over the axes.
    pub parts: Vec<Span>,
    /// Entries of the whole.
    pub whole: usize,
}

impl Offsets {
    /// Those of a dimension; `None` where every rank has all of it.
    pub fn new(ty: &TensorType, sharding: &Sharding, dim: usize, mesh: &Mesh) -> Option<Self> {
        let over = sharding.axes(Placement::Split(dim));
        let parts = || sharding.spans(ty, dim, mesh);
        (!over.is_empty()).then(|| Self { over, parts: parts(), whole: ty.dims[dim].size() })
    }
}

impl Instr {
    /// Its inputs, then its outputs.
    pub fn operands(&self) -> impl Iterator<Item = &Arg> {
        self.inputs.iter().chain(self.outputs.iter().flatten())
    }

    /// Every buffer that it touches: those of its operands, then scratch.
    pub fn buffers(&self) -> impl Iterator<Item = BufferId> {
        self.operands().map(|a| a.buffer).chain(self.workspace)
    }

    /// What its matmuls multiply in, in a program whose linear layers multiply in `linear`: TF32 is only for instructions that may round
    /// to it; attention and experts stay in f32.
    pub fn multiplies_in(&self, linear: MatmulType) -> MatmulType {
        match linear {
            MatmulType::Tf32 if !self.tf32 => MatmulType::Stored(DType::F32),
            MatmulType::Tf32 | MatmulType::Stored(_) => linear,
        }
    }
}

/// Who runs an instruction. Each stream keeps its order; a segment ends when all have. What overlaps with kernels starts after those that
/// stand before it, and its operands stay untouched until an instruction waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stream {
    /// Kernels, and collectives that the next kernel waits for.
    Compute,
    /// Collectives that overlap with kernels.
    Communication,
    /// All-to-alls, which overlap with kernels too and which the layer soon waits for: they do not wait in the queue of weights that are gathered
    /// ahead or gradients that are summed.
    Exchange,
    /// Copies from the host's memory.
    Fetch,
    /// Copies to the host's memory.
    Offload,
}

impl Stream {
    /// All of them.
    pub const ALL: [Stream; 5] =
        [Stream::Compute, Stream::Communication, Stream::Exchange, Stream::Fetch, Stream::Offload];
    /// Those that run beside kernels.
    pub const BESIDE: [Stream; 4] = [Stream::Communication, Stream::Exchange, Stream::Fetch, Stream::Offload];

    /// Its place in [`Stream::BESIDE`]; `None` for that of kernels.
    pub fn beside(self) -> Option<usize> {
        Stream::BESIDE.iter().position(|stream| *stream == self)
    }

    /// Whether it copies between the device's memory and the host's.
    pub fn copies(self) -> bool {
        matches!(self, Stream::Fetch | Stream::Offload)
    }

    /// Name, for people.
    pub fn name(self) -> &'static str {
        match self {
            Stream::Compute => "kernels",
            Stream::Communication => "communication",
            Stream::Exchange => "all-to-alls",
            Stream::Fetch => "copies from host memory",
            Stream::Offload => "copies to host memory",
        }
    }
}

/// A linear list of kernel calls, compiled once and run for any micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Name, for people.
    pub name: &'static str,
    /// Which of the rank's chunks of layers it computes; 0 for what is none's.
    pub chunk: usize,
    /// The calls, in order.
    pub instrs: Vec<Instr>,
    /// Those that the device does as one, in order. Each is one moment for memory.
    pub groups: Vec<FusedGroup>,
}

impl std::fmt::Display for Segment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)?;
        if self.chunk > 0 { write!(f, ".{}", self.chunk) } else { Ok(()) }
    }
}

/// The instructions of a segment during which a buffer is in use (see [`Segment::in_use`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// The buffer.
    pub buffer: BufferId,
    /// The first.
    pub first: usize,
    /// The last.
    pub last: usize,
}

impl Segment {
    /// The last backward pass of a step and its update as one, where state that is offloaded comes back beside both.
    pub const BACKWARD_AND_UPDATE: &'static str = "backward_and_update";
    /// The same where the schedule ends with weight gradients.
    pub const WEIGHT_GRAD_AND_UPDATE: &'static str = "weight_grad_and_update";

    /// The lives of the buffers that it touches, in order of first use.
    pub fn lives(&self, counts: impl Fn(BufferId) -> bool) -> Vec<Life> {
        let mut lives: Vec<Life> = Vec::new();
        let mut known: Vec<Option<usize>> = Vec::new();
        for (t, instr) in self.instrs.iter().enumerate() {
            let (first, last) = self.in_use(t).into_inner();
            for buffer in instr.buffers().filter(|b| counts(*b)) {
                known.resize(known.len().max(buffer.0 + 1), None);
                let at = *known[buffer.0].get_or_insert_with(|| {
                    lives.push(Life { buffer, first, last });
                    lives.len() - 1
                });
                lives[at].last = lives[at].last.max(last);
            }
        }
        lives
    }

    /// The group that an instruction belongs to.
    pub fn group_of(&self, i: usize) -> Option<&FusedGroup> {
        let behind = self.groups.partition_point(|g| g.instrs.start <= i);
        self.groups[..behind].last().filter(|g| g.instrs.contains(&i))
    }

    /// The instructions during which the operands and scratch of instruction `i` are in use: its group, or itself; where it overlaps with others,
    /// up to the first that waits for it.
    pub fn in_use(&self, i: usize) -> RangeInclusive<usize> {
        let moment = |i: usize| self.group_of(i).map_or(i..i + 1, |g| g.instrs.clone());
        moment(i).start..=moment(self.held_until(i)).end - 1
    }

    /// The first kernel that waits for instruction `i` of another stream (or for one issued there after it), or the last instruction;
    /// itself where none overlaps with it. All streams start after the kernels before: what a kernel has waited for has ended for all.
    fn held_until(&self, i: usize) -> usize {
        let stream = self.instrs[i].stream;
        if stream == Stream::Compute {
            return i;
        }
        let ended = |w: &usize| *w >= i && self.instrs[*w].stream == stream;
        let waited = |instr: &Instr| instr.stream == Stream::Compute && instr.waits.iter().any(ended);
        let mut later = self.instrs.iter().enumerate().skip(i + 1);
        later.find(|(_, instr)| waited(instr)).map_or(self.instrs.len() - 1, |(t, _)| t)
    }
}

/// One run of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Index of the segment.
    pub segment: usize,
    /// Which micro-batch of the step it works on.
    pub micro_batch: usize,
    /// Which copy of each saved region it uses, in the order of [`Saved::ALL`].
    pub saved: [usize; Saved::ALL.len()],
}

impl Slot {
    /// A run that has the saved regions to itself.
    pub const fn new(segment: usize, micro_batch: usize) -> Self {
        Self { segment, micro_batch, saved: [0; Saved::ALL.len()] }
    }

    /// Which copy of a region it uses.
    pub const fn copy(&self, lifetime: Lifetime) -> usize {
        match lifetime {
            Lifetime::Run | Lifetime::Step | Lifetime::Host | Lifetime::Frame | Lifetime::Overlay => 0,
            Lifetime::MicroBatch => self.micro_batch,
            Lifetime::Saved(saved) | Lifetime::SavedInHost(saved) => self.saved[saved as usize],
        }
    }
}

/// A schedule with a name: what the host can ask the executor to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Name: [`StepProgram::TRAIN`] or another of its constants, or that of a [smaller step](StepProgram::train_of).
    pub name: Arc<str>,
    /// Segments in order.
    pub schedule: Vec<Slot>,
}

/// What the host may do with a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Role {
    /// Written before an entry runs, for every micro-batch.
    Input,
    /// Read after an entry has run, for every micro-batch.
    Output,
    /// Read after a step, once.
    StepOutput,
    /// Outlives the step.
    State(State),
}

/// A tensor that the host knows by name.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Which value it is: an index into [`StepProgram::values`], the same in all stages of a run. States of a parameter name it by this.
    pub value: ValueId,
    /// Element type and shape on this rank.
    pub ty: TensorType,
    /// Element type and shape of the whole.
    pub whole: TensorType,
    /// The sharding of the whole.
    pub sharding: Sharding,
    /// Where it is.
    pub buffer: BufferId,
    /// Where it is this rank's part of the buffer: over these axes (see [`Arg::part`]).
    pub part: Axes,
    /// What the host may do with it.
    pub role: Role,
}

/// Everything that one rank runs in a step. Ranks of a pipeline stage share it: what differs between them is their place on
/// the other axes, which the executor knows.
#[derive(Clone, Debug, PartialEq)]
pub struct StepProgram {
    /// The mesh that it was compiled for.
    pub mesh: Mesh,
    /// The pipeline stage that runs it.
    pub stage: usize,
    /// Size of the one allocation.
    pub arena_bytes: u64,
    /// Size of the second one, in the memory of the host. Addresses go on there after those of the arena.
    pub host_bytes: u64,
    /// Parts of the arena, in order and without gaps, then the host's; last those that overlay parts of the arena.
    pub regions: Vec<Region>,
    /// All buffers.
    pub buffers: Vec<Buffer>,
    /// Names of the values that instructions speak of.
    pub values: Vec<String>,
    /// Tensors that the host knows by name.
    pub tensors: Vec<Tensor>,
    /// Code.
    pub segments: Vec<Segment>,
    /// Schedules.
    pub entries: Vec<Entry>,
}

impl StepProgram {
    /// The entry that runs one training step.
    pub const TRAIN: &'static str = "train";
    /// The entry that runs the forward pass of one micro-batch and yields its losses.
    pub const EVALUATE: &'static str = "evaluate";
    /// The entry that does the same without fp8.
    pub const EVALUATE_BF16: &'static str = "evaluate_bf16";
    /// The entry that evaluates the sequence left over where a text does not divide into sequences.
    pub const EVALUATE_REST: &'static str = "evaluate_rest";
    /// The entry that reads a chunk of tokens into the cache and yields the logits after the last.
    pub const PREFILL: &'static str = "prefill";
    /// The entry that reads runs of tokens into the cache and yields the loss of the tokens after them.
    pub const SCORE: &'static str = "score";
    /// The entries that read one token each of this many texts into the cache and yield the logits after them.
    pub const DECODE: [(usize, &'static str); 7] = [
        (1, "decode"),
        (2, "decode_2"),
        (4, "decode_4"),
        (8, "decode_8"),
        (16, "decode_16"),
        (32, "decode_32"),
        (64, "decode_64"),
    ];

    /// Whether any instruction runs on a stream.
    pub fn uses(&self, stream: Stream) -> bool {
        self.segments.iter().flat_map(|s| &s.instrs).any(|i| i.stream == stream)
    }

    /// What an entry's own input or output is called in a program of several forward passes.
    pub fn name_in(entry: &str, name: &str) -> String {
        format!("{entry}.{name}")
    }

    /// The entry that runs one training step of fewer micro-batches than [`StepProgram::TRAIN`].
    pub fn train_of(micro_batches: usize) -> String {
        format!("{}_of_{micro_batches}", Self::TRAIN)
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|t| t.name == name)
    }

    /// The entry called `name`.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|e| *e.name == *name)
    }

    /// How long a buffer lives.
    pub fn lifetime(&self, buffer: BufferId) -> Lifetime {
        self.regions[self.buffers[buffer.0].region].lifetime
    }

    /// Where a buffer starts in the arena at a slot of a schedule.
    pub fn address(&self, buffer: BufferId, slot: &Slot) -> u64 {
        let buffer = &self.buffers[buffer.0];
        let region = &self.regions[buffer.region];
        region.offset + slot.copy(region.lifetime) as u64 * region.slot_bytes + buffer.offset
    }

    /// A number that is equal for equal programs.
    pub fn fingerprint(&self) -> u64 {
        // All of it: what people read leaves out where values come from.
        counter::key(0, &format!("{self:?}"))
    }
}
