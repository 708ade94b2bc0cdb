//! The CPU executor: all kernels in f32, on all cores, in one arena, without allocating while a step runs.

mod arena;
mod attention;
mod cached_attention;
mod call;
mod gemm;
mod linear;
mod loss;
mod norm;
mod optimizer;
mod pointwise;
mod pool;
mod positions;
mod simd;

use crate::{ExecError, Executor};
use arena::Arena;
use call::{Bound, Call};
use lockstep_ir::program::{Instr, Lifetime, Role, Slot, Tensor};
use lockstep_ir::{DeviceProfile, Op, StepProgram, Workspace, units};
use pool::Pool;
use simd::Simd;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Instant;

/// What the compiler must know of this executor: alignment, and the scratch of every kernel.
pub fn profile(threads: usize, reproducible: bool) -> DeviceProfile {
    let product = gemm::scratch_bytes(threads) as u64;
    let fixed = |bytes| Workspace { fixed: bytes, terms: Vec::new() };
    // A fixed-point sum needs each sequence's product once, on its own.
    let share = |letters| if reproducible { vec![(4, letters)] } else { Vec::new() };
    let head = [(4, "cv"), (4, "c")];
    let (attention, per_element) = attention::scratch_bytes(threads);
    let attention = Workspace { fixed: attention, terms: vec![(per_element, "e")] };
    let workspaces = BTreeMap::from([
        ("linear", fixed(product)),
        ("linear_grad_input", fixed(product)),
        ("linear_grad_weight", Workspace { fixed: product, terms: share("nk") }),
        ("linear_cross_entropy", Workspace { fixed: product, terms: [&head[..], &share("vk")].concat() }),
        ("attention", attention.clone()),
        ("attention_grad", attention.clone()),
        ("cached_attention", attention),
        ("global_norm", fixed(optimizer::NORM_SCRATCH as u64)),
    ]);
    DeviceProfile {
        name: format!("cpu, {threads} threads"),
        alignment: arena::ALIGNMENT,
        cross_entropy_rows: 256,
        workspaces,
    }
}

/// Number of cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// The speed of large f32 matrix products on `threads` threads, in FLOP per second: the best of a few short runs.
pub fn matmul_ceiling(threads: usize) -> f64 {
    const N: usize = 768;
    let (pool, simd) = (Pool::new(threads), Simd::detect());
    let (a, b) = (vec![1.0f32; N * N], vec![1.0f32; N * N]);
    let mut c = vec![0.0f32; N * N];
    let mut scratch = vec![0.0f32; gemm::scratch_bytes(threads) / 4];
    let mut best = f64::INFINITY;
    for _ in 0..12 {
        let start = Instant::now();
        let (a, b) = (gemm::Matrix::rows(a.as_ptr(), N), gemm::Matrix::rows(b.as_ptr(), N));
        // SAFETY: the vectors have these sizes.
        unsafe { gemm::gemm(&pool, simd, (N, N, N), a, b, c.as_mut_ptr(), N, false, scratch.as_mut_ptr()) };
        best = best.min(start.elapsed().as_secs_f64());
    }
    2.0 * (N as f64).powi(3) / best
}

/// A loaded program on the CPU.
pub struct CpuExecutor {
    program: StepProgram,
    arena: Arena,
    pool: Pool,
    simd: Simd,
    segments: Vec<Vec<Bound>>,
    tensors: BTreeMap<String, usize>,
}

impl CpuExecutor {
    /// Allocates the arena of a program that was compiled for [`profile`] with this number of threads.
    pub fn load(program: StepProgram, threads: usize) -> Result<Self, ExecError> {
        let bind = |i: &Instr| Bound::new(&program, i).map_err(|e| ExecError::Internal(e.to_string()));
        let segments = program
            .segments
            .iter()
            .map(|s| s.instrs.iter().map(bind).collect::<Result<Vec<_>, _>>())
            .collect::<Result<Vec<_>, _>>()?;
        for (instr, types) in
            program.segments.iter().flat_map(|s| &s.instrs).map(|i| (i, i.inputs.iter().map(|a| &a.ty)))
        {
            let reproducible = instr.outputs.iter().flatten().any(|a| a.ty.dtype == lockstep_ir::DType::Fixed64);
            let needed = profile(threads, reproducible)
                .workspace(&instr.op, &types.collect::<Vec<_>>())
                .map_err(|e| ExecError::Internal(e.to_string()))?;
            let planned = instr.workspace.map_or(0, |w| program.buffers[w.0].bytes);
            if planned < needed {
                let op = instr.op.name();
                return Err(ExecError::Internal(format!(
                    "{op} needs {needed} bytes of scratch, {planned} are planned"
                )));
            }
        }
        let too_large = || ExecError::OutOfMemory(units::bytes(program.arena_bytes));
        let arena = Arena::new(program.arena_bytes).ok_or_else(too_large)?;
        let tensors = program.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        Ok(Self { pool: Pool::new(threads), simd: Simd::detect(), arena, segments, tensors, program })
    }

    fn tensor(&self, name: &str, micro_batch: usize) -> Result<(&Tensor, *mut u8, usize), ExecError> {
        let index = self.tensors.get(name);
        let unknown = || ExecError::Internal(format!("the program has no tensor `{name}`"));
        let tensor = &self.program.tensors[*index.ok_or_else(unknown)?];
        let region = &self.program.regions[self.program.buffers[tensor.buffer.0].region];
        if region.lifetime == Lifetime::MicroBatch && micro_batch >= region.slots {
            return Err(ExecError::Internal(format!("`{name}` has no micro-batch {micro_batch}")));
        }
        let offset = self.program.address(tensor.buffer, micro_batch, 0) as usize;
        // SAFETY: the verifier has checked that every copy of every buffer lies in the arena.
        Ok((tensor, unsafe { self.arena.base().add(offset) }, tensor.ty.bytes() as usize))
    }

    fn call(&self, bound: &Bound, slot: Slot) {
        let call = Call { bound, pool: &self.pool, simd: self.simd, base: self.arena.base(), slot };
        match bound.op {
            Op::Embedding => pointwise::embedding(call),
            Op::EmbeddingGrad { .. } => pointwise::embedding_grad(call),
            Op::Linear => linear::forward(call),
            Op::LinearGradInput => linear::grad_input(call),
            Op::LinearGradWeight => linear::grad_weight(call),
            Op::RmsNorm { eps } => norm::forward(call, eps, false),
            Op::AddRmsNorm { eps } => norm::forward(call, eps, true),
            Op::RmsNormGrad => norm::grad(call, false),
            Op::AddRmsNormGrad => norm::grad(call, true),
            Op::RmsNormGradWeight => norm::grad_weight(call),
            Op::Rope { inverse } => pointwise::rope(call, inverse),
            Op::RopeAt => positions::rope_at(call),
            Op::Attention => attention::forward(call),
            Op::AttentionGrad => attention::grad(call),
            Op::CachedAttention => cached_attention::forward(call),
            Op::LastPosition => positions::last_position(call),
            Op::SwiGlu => pointwise::swiglu(call),
            Op::SwiGluGrad => pointwise::swiglu_grad(call),
            Op::Add => pointwise::add(call),
            Op::CrossEntropy => loss::cross_entropy(call),
            Op::CrossEntropyGrad => loss::cross_entropy_grad(call),
            Op::LinearCrossEntropy { rows } => loss::linear_cross_entropy(call, rows),
            Op::AddState => optimizer::add_state(call),
            Op::GlobalNorm => optimizer::global_norm(call),
            Op::AdamW { beta1, beta2, eps, decay } => optimizer::adamw(call, beta1, beta2, eps, decay),
        }
    }
}

impl Executor for CpuExecutor {
    fn arena_bytes(&self) -> u64 {
        self.arena.bytes()
    }

    fn write(&mut self, tensor: &str, micro_batch: usize, data: &[u8]) -> Result<(), ExecError> {
        let (found, address, bytes) = self.tensor(tensor, micro_batch)?;
        if data.len() != bytes || matches!(found.role, Role::Output | Role::StepOutput) {
            return Err(ExecError::Internal(format!("`{tensor}` takes {bytes} bytes, got {}", data.len())));
        }
        // SAFETY: `&mut self`, so nothing runs; the address and size are the tensor's.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), address, bytes) };
        Ok(())
    }

    fn read(&self, tensor: &str, micro_batch: usize) -> Result<Cow<'_, [u8]>, ExecError> {
        let (_, address, bytes) = self.tensor(tensor, micro_batch)?;
        // SAFETY: the address and size are the tensor's; running needs `&mut self`, so nothing writes meanwhile.
        Ok(Cow::Borrowed(unsafe { std::slice::from_raw_parts(address, bytes) }))
    }

    fn run(&mut self, entry: &str) -> Result<(), ExecError> {
        let unknown = || ExecError::Internal(format!("the program has no entry `{entry}`"));
        let entry = self.program.entry(entry).ok_or_else(unknown)?;
        for &slot in &entry.schedule {
            for bound in &self.segments[slot.segment] {
                self.call(bound, slot);
            }
        }
        Ok(())
    }
}
