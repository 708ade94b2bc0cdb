//! One kernel call: operands as addresses, dimensions as sizes.

use super::float::{Bf16, Float};
use super::pool::Pool;
use super::simd::Simd;
pub use crate::bound::{At, Block, Bound, VocabPart};
use lockstep_ir::program::Slot;
use lockstep_ir::{DType, Op, OpKind, Span, StepScalars, fixed};

/// What runs an op.
pub type Kernel = fn(Call);
/// Those of a family.
pub type Kernels = Vec<(OpKind, Kernel)>;

/// A bound instruction at one slot of a schedule.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    pub bound: &'a Bound,
    pub pool: &'a Pool,
    pub simd: Simd,
    pub base: *mut u8,
    pub slot: Slot,
}

// SAFETY: `base` is the arena; kernels split their outputs between tasks without overlap.
unsafe impl Sync for Call<'_> {}

impl Call<'_> {
    /// What is computed.
    pub fn op(&self) -> Op {
        self.bound.op
    }

    /// Size of a dimension of the op's row.
    pub fn size(&self, name: &str) -> usize {
        self.bound.size(name)
    }

    /// Choices of a token that share a row of it; one where each has its own.
    pub fn sharers(&self, each: bool) -> usize {
        self.bound.sharers(each)
    }

    fn at(&self, at: &At) -> *mut u8 {
        at.address(self.base, self.slot)
    }

    /// Address of an input.
    pub fn input<T>(&self, i: usize) -> *const T {
        self.at(&self.bound.inputs[i]).cast()
    }

    /// Address of an optional input; none where it is not given.
    pub fn given<T>(&self, i: usize) -> Option<*const T> {
        self.bound.inputs.get(i).map(|at| self.at(at).cast_const().cast())
    }

    /// Address of an output; none where it is unused.
    pub fn output<T>(&self, i: usize) -> Option<*mut T> {
        self.bound.outputs[i].as_ref().map(|at| self.at(at).cast())
    }

    /// The scalars of the step, where they are an input.
    pub fn scalars(&self, i: usize) -> StepScalars {
        // SAFETY: the op table says that the input is they.
        StepScalars::from_slice(unsafe { Ptr(self.input::<f32>(i)).slice(0, StepScalars::COUNT) })
    }

    /// What gradients start with: 1, or where input `i` is given the loss scale among its scalars.
    pub fn seed(&self, i: usize) -> f32 {
        if i < self.bound.inputs.len() { self.scalars(i).loss_scale } else { 1.0 }
    }

    /// Address of the scratch.
    pub fn scratch<T>(&self) -> *mut T {
        match &self.bound.workspace {
            Some(at) => self.at(at).cast(),
            None => panic!("{} was compiled without scratch", self.bound.op.name()),
        }
    }

    /// Bytes at the start of a matmul's scratch that the matmul itself uses; its results are in f32.
    pub fn gemm_scratch(&self) -> usize {
        super::gemm::scratch_bytes(self.pool.threads()).0.next_multiple_of(64)
    }

    /// Whether an output adds to what is there.
    pub fn adds(&self, i: usize) -> bool {
        self.bound.adds(i, self.slot)
    }

    /// The part of the vocabulary that this rank has: all of it, if nothing else is said.
    pub fn vocab_part(&self) -> VocabPart {
        self.bound.vocab_part()
    }

    /// The positions that this rank has of its sequences.
    pub fn positions(&self) -> Span {
        self.bound.positions()
    }

    /// Where a weight gradient goes.
    pub fn accumulator(&self, i: usize) -> Option<Accumulator> {
        let at = self.bound.outputs[i].as_ref()?;
        let address = self.at(at);
        let add = self.adds(i);
        Some(match at.dtype {
            DType::Fixed64 => Accumulator::Fixed { sum: address.cast(), add },
            DType::BF16 => Accumulator::Bf16 { sum: address.cast(), add },
            DType::F32 => Accumulator::Float { sum: address.cast(), add },
            other => unreachable!("nothing is summed in {other}"),
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
