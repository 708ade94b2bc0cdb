//! One kernel call: operands as addresses, dimensions as sizes.

use super::float::{Bf16, Float};
use super::pool::Pool;
use super::simd::Simd;
use lockstep_ir::program::{Arg, BufferId, Instr, Lifetime, Slot, StepProgram, Sum};
use lockstep_ir::{Axis, Coordinates, DType, Op, StepScalars, TypeError, fixed};

/// An operand as the executor sees it.
#[derive(Clone, Copy)]
pub struct At {
    lifetime: Lifetime,
    offset: u64,
    slot_bytes: u64,
    pub elements: usize,
    pub dtype: DType,
    pub sum: Sum,
    /// Whether it is a flat range of a larger tensor.
    pub flat: bool,
}

impl At {
    /// A whole buffer.
    pub fn buffer(program: &StepProgram, buffer: BufferId) -> Self {
        let b = &program.buffers[buffer.0];
        let region = &program.regions[b.region];
        Self {
            lifetime: region.lifetime,
            offset: region.offset + b.offset,
            slot_bytes: region.slot_bytes,
            elements: 0,
            dtype: DType::F32,
            sum: Sum::No,
            flat: false,
        }
    }

    /// An operand of the rank at `here`.
    pub fn arg(program: &StepProgram, arg: &Arg, here: Coordinates) -> Self {
        let at = Self::buffer(program, arg.buffer);
        let before = if arg.part { here.dp as u64 * arg.ty.bytes() } else { 0 };
        let flat = arg.ty.dims.iter().any(|d| d.sections.iter().any(|s| s.axis == Axis::Flat));
        let (elements, dtype) = (arg.ty.elements(), arg.ty.dtype);
        Self { offset: at.offset + before, elements, dtype, sum: arg.sum, flat, ..at }
    }

    /// Its address at a slot of a schedule.
    pub fn address(&self, base: *mut u8, slot: Slot) -> *mut u8 {
        let copy = match self.lifetime {
            Lifetime::Run | Lifetime::Frame | Lifetime::Overlay => 0,
            Lifetime::MicroBatch => slot.micro_batch,
            Lifetime::Saved => slot.saved_slot,
        };
        // SAFETY: the verifier has checked that every copy of every buffer lies in the arena.
        unsafe { base.add((self.offset + copy as u64 * self.slot_bytes) as usize) }
    }
}

/// An instruction, ready to run.
pub struct Bound {
    pub op: Op,
    pub inputs: Vec<At>,
    pub outputs: Vec<Option<At>>,
    pub workspace: Option<At>,
    /// Type of the floating-point operands.
    pub float: DType,
    /// Where the rank holds a part of the vocabulary: entries of the whole.
    vocab: Option<usize>,
    /// Sizes by letter of the op table.
    sizes: [usize; 26],
    /// Rows of the sections of the first input.
    pub sections: Vec<usize>,
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
    /// Where a token stands in this part; `None` if it is in another.
    #[inline(always)]
    pub fn find(&self, token: u32) -> Option<usize> {
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
        let (sizes, float) = match instr.op.communicates() {
            true => ([1; 26], DType::F32),
            false => {
                let dims = instr.op.bind(&types)?;
                (std::array::from_fn(|i| dims.size((b'a' + i as u8) as char)), dims.float())
            }
        };
        Ok(Self {
            op: instr.op,
            inputs: instr.inputs.iter().map(|a| At::arg(program, a, here)).collect(),
            outputs: instr.outputs.iter().map(|o| o.as_ref().map(|a| At::arg(program, a, here))).collect(),
            workspace: instr.workspace.map(|w| At::buffer(program, w)),
            float,
            vocab: instr.vocab,
            sizes,
            sections: rows.map_or(Vec::new(), |d| d.sections.iter().map(|s| s.size()).collect()),
        })
    }
}

/// A bound instruction at one slot of a schedule.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    pub bound: &'a Bound,
    pub pool: &'a Pool,
    pub simd: Simd,
    pub base: *mut u8,
    pub slot: Slot,
    pub coordinates: Coordinates,
}

// SAFETY: `base` is the arena; kernels split their outputs between tasks without overlap.
unsafe impl Sync for Call<'_> {}

impl Call<'_> {
    /// Size behind a letter of the op table.
    pub fn size(&self, letter: char) -> usize {
        self.bound.sizes[letter as usize - 'a' as usize]
    }

    /// Address of an input.
    pub fn input<T>(&self, i: usize) -> *const T {
        self.bound.inputs[i].address(self.base, self.slot).cast()
    }

    /// Address of an output, if somebody wants it.
    pub fn output<T>(&self, i: usize) -> Option<*mut T> {
        self.bound.outputs[i].map(|at| at.address(self.base, self.slot).cast())
    }

    /// The scalars of the step, where they are an input.
    pub fn scalars(&self, i: usize) -> StepScalars {
        // SAFETY: the op table says that the input is they.
        StepScalars::from_slice(unsafe { Ptr(self.input::<f32>(i)).slice(0, StepScalars::COUNT) })
    }

    /// What gradients start with: 1, or where the op is scaled the loss scale among the scalars at input `i`.
    pub fn seed(&self, scaled: bool, i: usize) -> f32 {
        if scaled { self.scalars(i).loss_scale } else { 1.0 }
    }

    /// Address of the scratch.
    pub fn scratch<T>(&self) -> *mut T {
        match &self.bound.workspace {
            Some(at) => at.address(self.base, self.slot).cast(),
            None => panic!("{} was compiled without scratch", self.bound.op.name()),
        }
    }

    /// Bytes at the start of a matrix product's scratch that the product itself uses; its results are in f32.
    pub fn gemm_scratch(&self) -> usize {
        super::gemm::scratch_bytes(self.pool.threads()).0.next_multiple_of(64)
    }

    /// Whether an output adds to what is there.
    pub fn adds(&self, i: usize) -> bool {
        match self.bound.outputs[i].as_ref().map_or(Sum::No, |at| at.sum) {
            Sum::No => false,
            Sum::AfterFirst => self.slot.micro_batch > 0,
            Sum::Always => true,
        }
    }

    /// The part of the vocabulary that this rank has: all of it, if nothing else is said.
    pub fn vocab_part(&self) -> VocabPart {
        let here = self.size('v');
        match self.bound.vocab {
            None => VocabPart { first: 0, entries: here, whole: here },
            Some(whole) => {
                let first = self.coordinates.tp * here;
                VocabPart { first, entries: here.min(whole.saturating_sub(first)), whole }
            }
        }
    }

    /// The first position that this rank has of sequences of `seq`: all ranks that share one have equally many.
    pub fn first_position(&self, seq: usize) -> usize {
        if self.size('s') < seq { self.coordinates.tp * self.size('s') } else { 0 }
    }

    /// Where a weight gradient goes.
    pub fn accumulator(&self, i: usize) -> Option<Accumulator> {
        let at = self.bound.outputs[i].as_ref()?;
        let address = at.address(self.base, self.slot);
        let add = self.adds(i);
        Some(match at.dtype {
            DType::Fixed64 => Accumulator::Fixed { sum: address.cast(), add },
            DType::BF16 => Accumulator::Bf16 { sum: address.cast(), add },
            _ => Accumulator::Float { sum: address.cast(), add },
        })
    }

    /// Calls `f(first, last + 1)` for ranges that cover `0..n`, on all threads.
    pub fn ranges(&self, n: usize, grain: usize, f: impl Fn(usize, usize) + Sync) {
        self.pool.run(n.div_ceil(grain), |task, _| f(task * grain, n.min((task + 1) * grain)));
    }

    /// As `ranges`, with a grain that gives every thread a few tasks.
    pub fn rows(&self, n: usize, f: impl Fn(usize, usize) + Sync) {
        self.ranges(n, n.div_ceil(4 * self.pool.threads()).max(1), f);
    }
}

/// A gradient accumulator: a float sum, or a fixed-point sum whose order does not matter. The first micro-batch of a step
/// overwrites what the last step left.
#[derive(Clone, Copy)]
pub enum Accumulator {
    Float { sum: *mut f32, add: bool },
    Bf16 { sum: *mut Bf16, add: bool },
    Fixed { sum: *mut i64, add: bool },
}

impl Accumulator {
    /// Adds a number to element `i`, or puts it there.
    ///
    /// # Safety
    /// The sum has that element, and nobody else touches it meanwhile.
    pub unsafe fn put(self, i: usize, x: f32) {
        // SAFETY: the caller vouches.
        unsafe {
            match self {
                Accumulator::Float { sum, add } => *sum.add(i) = if add { *sum.add(i) + x } else { x },
                Accumulator::Bf16 { sum, add } => {
                    *sum.add(i) = Bf16::of(if add { (*sum.add(i)).to() + x } else { x });
                }
                Accumulator::Fixed { sum, add } => *sum.add(i) = fixed::add(if add { *sum.add(i) } else { 0 }, x),
            }
        }
    }

    /// The same, adding to what is there in any case where `add` says so.
    pub fn adding(self, add: bool) -> Self {
        match self {
            Accumulator::Float { sum, add: before } => Accumulator::Float { sum, add: before || add },
            Accumulator::Bf16 { sum, add: before } => Accumulator::Bf16 { sum, add: before || add },
            Accumulator::Fixed { sum, add: before } => Accumulator::Fixed { sum, add: before || add },
        }
    }
}

/// An address that may travel to the pool's threads. Kernels write disjoint ranges.
#[derive(Clone, Copy)]
pub struct Ptr<T>(pub T);
// SAFETY: kernels split their outputs between tasks without overlap.
unsafe impl<T> Send for Ptr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Ptr<T> {}

impl<T: Copy> Ptr<T> {
    /// What was wrapped.
    #[inline(always)]
    pub fn get(self) -> T {
        self.0
    }
}

impl<T: Copy> Ptr<*const T> {
    /// One element.
    ///
    /// # Safety
    /// It lies in the operand.
    #[inline(always)]
    pub unsafe fn at(self, i: usize) -> *const T {
        // SAFETY: the caller vouches.
        unsafe { self.0.add(i) }
    }

    /// Elements `start .. start + n`.
    ///
    /// # Safety
    /// They lie in the operand, and nobody writes them meanwhile.
    #[inline(always)]
    pub unsafe fn slice<'a>(self, start: usize, n: usize) -> &'a [T] {
        // SAFETY: the caller vouches.
        unsafe { std::slice::from_raw_parts(self.0.add(start), n) }
    }
}

impl<T: Copy> Ptr<*mut T> {
    /// Elements `start .. start + n`.
    ///
    /// # Safety
    /// They lie in the operand, and nobody else touches them meanwhile.
    #[inline(always)]
    pub unsafe fn slice<'a>(self, start: usize, n: usize) -> &'a mut [T] {
        // SAFETY: the caller vouches.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), n) }
    }

    /// One element.
    ///
    /// # Safety
    /// It lies in the operand.
    #[inline(always)]
    pub unsafe fn at(self, i: usize) -> *mut T {
        // SAFETY: the caller vouches.
        unsafe { self.0.add(i) }
    }
}
