//! One instruction on the device: operands as addresses, dimensions as sizes.

use crate::CudaError;
use crate::attention::plans::Plans;
use crate::driver::{Address, Stream};
use crate::kernels::{Kernels, Launcher, Value};
use crate::matmul::{Matmul, MatmulShape};
use lockstep_exec::bound::{At, Bound, VocabPart};
use lockstep_ir::program::Slot;
use lockstep_ir::{DType, FEW_ROWS, Op, Span};

/// A bound instruction at one slot of a schedule.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    pub bound: &'a Bound,
    pub kernels: &'a Kernels,
    pub matmul: &'a Matmul,
    pub attention: &'a Plans,
    pub stream: &'a Stream,
    pub base: Address,
    /// Where addresses of the host's memory count from: they go on after the arena's.
    pub host: Address,
    pub slot: Slot,
}

/// Threads of kernels that take each element on its own.
pub const THREADS: usize = 256;

impl Call<'_> {
    /// What is computed.
    pub fn op(&self) -> Op {
        self.bound.op
    }

    /// Size of a dimension of the op's row.
    pub fn size(&self, name: &str) -> usize {
        self.bound.size(name)
    }

    /// Positions of all sequences.
    pub fn rows(&self) -> usize {
        self.size("batch") * self.size("seq")
    }

    fn at(&self, at: &At) -> Address {
        let base = if at.is_hosted() { self.host } else { self.base };
        base.wrapping_add(at.offset(self.slot))
    }

    /// Address of an input.
    pub fn input(&self, i: usize) -> Address {
        self.at(&self.bound.inputs[i])
    }

    /// Address of an optional input; none where it is not given.
    pub fn given(&self, i: usize) -> Option<Address> {
        self.bound.inputs.get(i).map(|at| self.at(at))
    }

    /// Address of an output; none where it is unused.
    pub fn output(&self, i: usize) -> Option<Address> {
        self.bound.outputs[i].as_ref().map(|at| self.at(at))
    }

    /// Address of the scratch.
    pub fn scratch(&self) -> Result<Address, CudaError> {
        let none = || CudaError::Internal(format!("{} was compiled without scratch", self.bound.op.name()));
        Ok(self.at(self.bound.workspace.as_ref().ok_or_else(none)?))
    }

    /// Whether an output adds to what is there.
    pub fn adds(&self, i: usize) -> bool {
        self.bound.adds(i, self.slot)
    }

    /// The part of the vocabulary that this rank has.
    pub fn vocab_part(&self) -> VocabPart {
        self.bound.vocab_part()
    }

    /// The positions that this rank has of its sequences, as kernels take them (`Span` in `common.cuh`).
    pub fn span(&self) -> [usize; 3] {
        self.span_of(self.bound.positions())
    }

    /// Positions as kernels take them.
    pub fn span_of(&self, Span { first, count, then }: Span) -> [usize; 3] {
        [first, count, then].map(|n| n.min(i32::MAX as usize))
    }

    /// Type of the floating-point operands.
    pub fn float(&self) -> DType {
        self.bound.float
    }

    /// What kernels of that type are called.
    pub fn suffix(&self) -> &'static str {
        suffix(self.float())
    }

    /// Whether rows of `n` elements are whole packs of 16 bytes.
    pub fn wide(&self, n: usize) -> bool {
        (n * self.float().bytes()).is_multiple_of(16)
    }

    /// Elements of a pack of 16 bytes.
    pub fn pack(&self) -> usize {
        16 / self.float().bytes()
    }

    /// Whether this is a step of decoding: kernels are so short that the time between two of them counts.
    fn has_few_rows(&self) -> bool {
        self.kernels.capability() >= 90 && self.rows() <= FEW_ROWS
    }

    /// Kernels on its stream.
    pub fn on(&self) -> Launcher<'_> {
        Launcher { early: self.has_few_rows(), ..self.kernels.on(self.stream) }
    }

    /// Queues the kernel `name` for the type of the floating-point operands.
    ///
    /// # Safety
    /// The arguments are those of the kernel's parameters.
    pub unsafe fn typed(
        &self,
        (source, name): (&str, &str),
        grid: [usize; 3],
        threads: usize,
        args: &[Value],
    ) -> Result<(), CudaError> {
        let name = format!("{name}_{}", suffix(self.float()));
        // SAFETY: the type's kernel has the same parameters, and the contract is this one's.
        unsafe { self.on().launch((source, &name), grid, threads, args) }
    }

    /// Queues a kernel that has no type.
    ///
    /// # Safety
    /// The arguments are those of the kernel's parameters.
    pub unsafe fn plain(
        &self,
        kernel: (&str, &str),
        grid: [usize; 3],
        threads: usize,
        args: &[Value],
    ) -> Result<(), CudaError> {
        // SAFETY: the contract is this one's.
        unsafe { self.on().launch(kernel, grid, threads, args) }
    }

    /// Queues a matmul whose scratch starts at `scratch`.
    ///
    /// # Safety
    /// The matrices are as large as the shape says.
    pub unsafe fn multiply(
        &self,
        shape: &MatmulShape,
        factors: (Address, Address),
        to: Address,
        scratch: Address,
    ) -> Result<(), CudaError> {
        let shape = MatmulShape { tf32: self.bound.tf32, ..*shape };
        // SAFETY: the caller vouches; sums go where they are.
        unsafe { self.matmul.multiply(self.stream, &shape, factors, to, to, scratch) }
    }
}

/// What kernels of a type are called.
pub fn suffix(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::E4M3 => "e4m3",
        DType::E5M2 => "e5m2",
        DType::Int8 => "int8",
        DType::Signed8 => "signed8",
        DType::Unsigned8 => "unsigned8",
        DType::F64 => "f64",
        DType::U32 => "u32",
        DType::Fixed64 => "fixed",
    }
}

/// What kernels call a type of gradient sums.
pub fn sum_kind(dtype: DType) -> i32 {
    match dtype {
        DType::F32 => 0,
        DType::BF16 => 1,
        DType::Fixed64 => 2,
        _ => unreachable!("nothing is summed in {dtype}"),
    }
}
