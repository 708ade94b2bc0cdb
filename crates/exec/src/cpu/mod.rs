//! The CPU executor: all kernels in f32, on all cores, in one arena, without allocating while a step runs.

pub(crate) mod arena;
mod attention;
mod bytes;
mod call;
mod columns;
mod context;
mod dispatch;
mod dropout;
mod embedding;
mod expert_bias;
mod experts;
mod fine;
mod float;
mod gemm;
mod gradient;
mod head;
mod head_norm;
mod heads;
mod kept;
mod latent;
mod linear;
mod loss;
mod memory;
mod norm;
mod optimizer;
mod orthogonal;
pub mod peaks;
mod pointwise;
mod pool;
mod position;
mod quantise;
mod router;
mod section;
mod simd;
mod sink;
mod vocab;

pub use crate::host::{available_bytes, cores};
pub use simd::{Simd, UnusablePath};

use crate::bound::{At, Names, check_scratch, check_write};
use crate::comm::{
    CommunicationCalls, CommunicationQueue, CommunicationThread, Enqueued, HostCommunicator, Inline, Link,
    ProgramPlace, communication_calls, waited,
};
use crate::{ExecError, Executor, Rank, Timing, numbers};
use arena::Arena;
use call::{Bound, Call, Kernel};
use float::{Bf16, F16, Float};
use lockstep_ir::program::{Instr, Slot, Stream, Tensor};
use lockstep_ir::{Coordinates, DType, DeviceProfile, FP8_WEIGHTS, OpKind, StepProgram, Workspace, units};
use pool::Pool;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Instant;

/// What the compiler must know of this executor: alignment, and the scratch of every kernel, for these types of parameters
/// and of gradient sums.
pub fn profile(threads: usize, compute: DType, gradients: DType) -> DeviceProfile {
    profile_of(Simd::current(), threads, compute, gradients)
}

/// The same for a vector path, which this machine need not have.
pub fn profile_of(simd: Simd, threads: usize, compute: DType, gradients: DType) -> DeviceProfile {
    let (gemm, per_k) = gemm::scratch_bytes(threads);
    let (gemm, per_k) = (gemm.next_multiple_of(64) as u64, per_k as u64);
    let fixed = |bytes| Workspace { fixed: bytes, terms: Vec::new() };
    // A result that is rounded is summed whole.
    let rounded = |letter| match compute {
        DType::BF16 | DType::F16 => Workspace { fixed: gemm, terms: vec![(per_k, letter)] },
        _ => fixed(gemm),
    };
    let of_bytes = |Workspace { fixed, terms }| Workspace {
        fixed: fixed + 64,
        terms: [terms, vec![bytes::scratch(compute)]].concat(),
    };
    // A sum that is not in f32 needs each matmul once, on its own.
    let share = |letters| if gradients == DType::F32 { Vec::new() } else { vec![(4, letters)] };
    let (head, per_letters) = head::scratch_bytes(simd, compute, threads);
    let of = |(fixed, terms)| Workspace { fixed, terms };
    let attention = attention::scratch(simd, compute, threads);
    let backward = attention::grad_scratch(simd, compute, threads);
    let in_runs = attention::scratch(simd, compute, threads).in_runs();
    let backward_in_runs = attention::grad_scratch(simd, compute, threads).in_runs();
    let loss_head = Workspace { fixed: head, terms: [&per_letters[..], &share("vocab inputs")].concat() };
    let vocab_grad = Workspace {
        fixed: gemm,
        terms: [&[(4, "rows vocab"), (4, "rows inputs")], &share("vocab inputs")[..]].concat(),
    };
    let rounds = if compute == DType::F32 { 0 } else { per_k };
    let naive = |terms: &[_]| Workspace { fixed: gemm + attention::naive::SLACK as u64, terms: terms.to_vec() };
    let fp8_grouped = |operands| experts::fp8_scratch(experts::scratch(gemm, Some((per_k, "inputs")), None), operands);
    let fp8_grouped_weight =
        |operands| experts::fp8_scratch(experts::scratch(gemm, None, share("outputs inputs").pop()), operands);
    let workspaces = BTreeMap::from([
        ("linear", rounded("inputs")),
        ("linear_grad_input", rounded("outputs")),
        ("byte_linear", of_bytes(rounded("inputs"))),
        ("byte_linear_grad_input", of_bytes(rounded("outputs"))),
        ("linear_grad_weight", Workspace { fixed: gemm, terms: share("outputs inputs") }),
        ("fp8_linear", of(quantise::scratch(gemm, per_k))),
        ("fp8_grad_weight", of(quantise::weight_scratch(gemm, share("outputs inputs")))),
        ("rowwise_linear", of(quantise::scratch(gemm, per_k))),
        ("blockwise_linear", of(quantise::scratch(gemm, per_k))),
        ("rowwise_grad_weight", of(quantise::weight_scratch(gemm, share("outputs inputs")))),
        ("blockwise_grad_weight", of(quantise::weight_scratch(gemm, share("outputs inputs")))),
        ("route", of(router::route_scratch(threads))),
        ("route_to", of(router::route_to_scratch(threads))),
        ("router_loss", of(router::router_loss_scratch(threads))),
        ("router_loss_grad", of(router::router_loss_scratch(threads))),
        ("grouped_linear", of(experts::scratch(gemm, Some((rounds, "inputs")), None))),
        ("grouped_linear_each", of(experts::scratch(gemm, Some((rounds, "inputs")), None))),
        ("grouped_grad_input", of(experts::scratch(gemm, Some((rounds, "outputs")), None))),
        ("grouped_grad_weight", of(experts::scratch(gemm, None, share("outputs inputs").pop()))),
        ("grouped_grad_weight_each", of(experts::scratch(gemm, None, share("outputs inputs").pop()))),
        ("rows_linear", of(experts::scratch(gemm, Some((rounds, "inputs")), None))),
        ("rows_grad_input", of(experts::scratch(gemm, Some((rounds, "outputs")), None))),
        ("rows_grad_weight", of(experts::scratch(gemm, None, share("outputs inputs").pop()))),
        ("fp8_grouped", of(fp8_grouped(["… inputs", "experts outputs inputs"]))),
        ("fp8_grouped_each", of(fp8_grouped(["… choices inputs", "experts outputs inputs"]))),
        ("fp8_rows", of(fp8_grouped(["parts rows inputs", "experts outputs inputs"]))),
        ("fp8_grouped_grad_weight", of(fp8_grouped_weight(["… choices outputs", "… inputs"]))),
        ("fp8_grouped_grad_weight_each", of(fp8_grouped_weight(["… choices outputs", "… choices inputs"]))),
        ("fp8_rows_grad_weight", of(fp8_grouped_weight(["parts rows outputs", "parts rows inputs"]))),
        ("linear_cross_entropy", loss_head),
        ("linear_score", Workspace { fixed: head, terms: per_letters }),
        ("attention", of(attention.terms("seq", "seq widest_dim"))),
        ("cached_attention", of(attention.terms("blocks page", "blocks page widest_dim"))),
        ("cached_latent_attention", of(attention.terms("blocks page", "blocks page widest_dim"))),
        ("absorbed_latent_heads", Workspace { fixed: gemm, terms: vec![(4, "batch seq latent")] }),
        ("latent_values", rounded("latent")),
        ("attention_grad", of(backward.terms("seq", "seq widest_dim"))),
        ("ring_attention", of(in_runs.terms("keys", "keys widest_dim"))),
        ("ring_attention_grad", of(backward_in_runs.terms("keys", "keys widest_dim"))),
        ("gathered_attention", of(in_runs.terms("keys", "keys widest_dim"))),
        ("gathered_attention_grad", of(backward_in_runs.terms("keys", "keys widest_dim"))),
        ("attention_scores", naive(&[(4, "seq keys")])),
        ("attention_scores_grad", naive(&[(rounds, "keys"), (4, "seq keys"), (4, "keys widest_dim")])),
        ("attention_mix", naive(&[(rounds, "keys")])),
        ("attention_mix_grad", naive(&[(rounds, "widest_dim"), (4, "keys widest_dim")])),
        ("vocab_logits", fixed(gemm)),
        ("vocab_grad", vocab_grad),
        ("square_sum", fixed(gradient::NORM_SCRATCH as u64)),
        ("orthogonalise", of(orthogonal::scratch(gemm))),
    ]);
    DeviceProfile {
        name: format!("cpu, {threads} thread{}", if threads == 1 { "" } else { "s" }),
        alignment: arena::ALIGNMENT,
        cross_entropy_logits: 16 << 20,
        cross_entropy_rows: 1024,
        workspaces,
        workspaces_with_optional: BTreeMap::new(),
        fusions: Vec::new(),
        faster: Vec::new(),
        fp8_weights: FP8_WEIGHTS,
    }
}

/// A loaded program on the CPU.
pub struct CpuExecutor {
    program: StepProgram,
    /// Those of [`Stream::BESIDE`] that the program uses. Ended before the arena goes.
    communication: [Option<CommunicationThread>; Stream::BESIDE.len()],
    arena: Arena,
    pool: Pool,
    simd: Simd,
    segments: Vec<Vec<Bound>>,
    kernels: Vec<Vec<Option<Kernel>>>,
    communication_calls: CommunicationCalls,
    link: Option<Link<dyn HostCommunicator>>,
    /// What the compute stream has of communication.
    inline: Option<Inline>,
    /// The communication threads' numbers of the instructions of a segment.
    numbers: Vec<Enqueued>,
    names: Names,
    busy_s: Option<f64>,
    /// Whether all that instructions make is looked at.
    checks: bool,
}

impl CpuExecutor {
    /// Allocates the arena of a program of one rank, or of the first of several that do not communicate, which was compiled for
    /// [`profile`] with this number of threads.
    pub fn load(program: StepProgram, threads: usize) -> Result<Self, ExecError> {
        let (ranks, mut instrs) = (program.mesh.ranks(), program.segments.iter().flat_map(|s| &s.instrs));
        match ranks == 1 || !instrs.any(|i| i.op.communicates()) {
            true => Self::load_rank(program, threads, None),
            false => Err(ExecError::Internal(format!("a program of {ranks} ranks was loaded on one"))),
        }
    }

    /// The same for one of several ranks.
    pub fn load_rank(
        program: StepProgram,
        threads: usize,
        link: Option<Link<dyn HostCommunicator>>,
    ) -> Result<Self, ExecError> {
        let here = link.as_ref().map_or(Coordinates::default(), |l| l.coordinates);
        let bind = |i: &Instr| Bound::new(&program, i, here).map_err(|e| ExecError::Internal(e.to_string()));
        let segments = program
            .segments
            .iter()
            .map(|s| s.instrs.iter().map(bind).collect::<Result<Vec<_>, _>>())
            .collect::<Result<Vec<_>, _>>()?;
        check_scratch(&program, &segments, |compute, gradients| profile(threads, compute, gradients))?;
        let communication_calls = communication_calls(&program, here);
        let too_large = || ExecError::OutOfMemory(units::bytes(program.arena_bytes + program.host_bytes));
        let arena = Arena::new(program.arena_bytes, program.host_bytes).ok_or_else(too_large)?;
        let pool = Pool::new(threads).map_err(|e| ExecError::Threads(threads, e))?;
        let mut communication = Stream::BESIDE.map(|_| None);
        for (thread, stream) in communication.iter_mut().zip(Stream::BESIDE) {
            if let Some(link) = link.as_ref().filter(|_| program.uses(stream) && !stream.copies()) {
                let started = CommunicationThread::start(link.comm.clone());
                *thread = Some(started.map_err(|e| ExecError::Threads(1, e))?);
            }
        }
        let longest = segments.iter().map(Vec::len).max().unwrap_or(0);
        Ok(Self {
            pool,
            simd: Simd::current(),
            communication,
            arena,
            kernels: kernels_of(&segments),
            segments,
            communication_calls,
            inline: link.as_ref().map(|link| Inline::new(link.comm.clone())),
            link,
            numbers: vec![Enqueued::default(); longest],
            names: Names::new(&program),
            busy_s: None,
            checks: false,
            program,
        })
    }

    /// The program that was loaded.
    pub fn program(&self) -> &StepProgram {
        &self.program
    }

    fn tensor(&self, name: &str, micro_batch: usize) -> Result<(&Tensor, *mut u8, usize), ExecError> {
        let here = self.link.as_ref().map_or(Coordinates::default(), |l| l.coordinates);
        let (tensor, offset) = self.names.find(&self.program, here, (name, micro_batch))?;
        // SAFETY: the verifier has checked that every copy of every buffer lies in the arena.
        Ok((tensor, unsafe { self.arena.base().add(offset as usize) }, tensor.ty.bytes() as usize))
    }

    /// Runs one instruction, or hands it to the communication thread of its stream.
    fn instr(&mut self, index: usize, slot: Slot) -> Result<(), ExecError> {
        let instrs = &self.program.segments[slot.segment].instrs;
        let instr = &instrs[index];
        for last in &instr.waits {
            let thread = instrs[*last].stream.beside().and_then(|at| self.communication[at].as_mut());
            thread.map_or(Ok(()), |thread| thread.wait(self.numbers[*last]))?;
        }
        let Some(call) = &self.communication_calls[slot.segment][index] else {
            self.kernel(index, slot);
            return if self.checks { self.look(index, slot) } else { Ok(()) };
        };
        let thread = instr.stream.beside().and_then(|at| self.communication[at].as_mut());
        let queue: &mut dyn CommunicationQueue = match (thread, &mut self.inline) {
            (Some(thread), _) => thread,
            (None, Some(inline)) => inline,
            (None, None) => return Err(ExecError::Internal(format!("{} on one rank", instr.op.name()))),
        };
        // SAFETY: the arena is this program's and is dropped after the queues; the verifier has checked what runs at the same
        // time, and ranks leave before their arenas go.
        self.numbers[index] = unsafe { queue.enqueue(call, self.arena.base(), slot)? };
        Ok(())
    }

    /// Looks at what a kernel has made. What communication brings was looked at where it was made.
    fn look(&self, index: usize, slot: Slot) -> Result<(), ExecError> {
        // SAFETY: the operand lies in the arena, and the kernel that wrote it is done; what is under way on the communication thread does
        // not touch what this instruction reads or writes.
        let read = |at: &At| unsafe {
            std::slice::from_raw_parts(at.address(self.arena.base(), slot), at.elements * at.dtype.bytes())
        };
        let find = |at: &At, may_see_nothing| Ok(numbers::first(at.dtype, read(at), may_see_nothing));
        numbers::look(&self.program, &self.segments[slot.segment], (slot, index..index + 1, index), find)
    }

    fn kernel(&self, index: usize, slot: Slot) {
        let bound = &self.segments[slot.segment][index];
        if let Some(link) = &self.link {
            let layer = self.program.segments[slot.segment].instrs[index].layer;
            link.comm.at(ProgramPlace { op: bound.op.name(), layer, micro_batch: slot.micro_batch });
        }
        let call = Call { bound, pool: &self.pool, simd: self.simd, base: self.arena.base(), slot };
        match self.kernels[slot.segment][index] {
            Some(kernel) => kernel(call),
            None => unreachable!("{} is no kernel", bound.op.name()),
        }
    }

    /// A segment ends when all streams have.
    fn join(&mut self) -> Result<(), ExecError> {
        let threads = self.communication.iter_mut().flatten();
        Ok(threads.map(CommunicationThread::finish).fold(Ok(()), Result::and)?)
    }

    fn schedule(&self, entry: &str) -> Result<Vec<Slot>, ExecError> {
        let unknown = || ExecError::Internal(format!("the program has no entry `{entry}`"));
        Ok(self.program.entry(entry).ok_or_else(unknown)?.schedule.clone())
    }
}

/// The kernels of all families, for operands of one type.
fn kernels<T: Float>() -> BTreeMap<OpKind, Kernel> {
    let families = [
        attention::kernels::<T>(),
        context::kernels::<T>(),
        dispatch::kernels::<T>(),
        embedding::kernels::<T>(),
        expert_bias::kernels::<T>(),
        experts::kernels::<T>(),
        fine::kernels::<T>(),
        gradient::kernels(),
        head::kernels::<T>(),
        heads::kernels::<T>(),
        latent::kernels::<T>(),
        linear::kernels::<T>(),
        memory::kernels(),
        norm::kernels::<T>(),
        optimizer::kernels(),
        pointwise::kernels::<T>(),
        position::kernels::<T>(),
        bytes::kernels::<T>(),
        quantise::kernels::<T>(),
        section::kernels::<T>(),
        sink::kernels::<T>(),
    ];
    families.into_iter().flatten().collect()
}

/// The kernel of every instruction; none where something else than a kernel does it.
fn kernels_of(segments: &[Vec<Bound>]) -> Vec<Vec<Option<Kernel>>> {
    let [single, brain, half] = [kernels::<f32>(), kernels::<Bf16>(), kernels::<F16>()];
    let of = |bound: &Bound| {
        let table = match bound.float {
            DType::BF16 => &brain,
            DType::F16 => &half,
            _ => &single,
        };
        table.get(&bound.op.kind()).copied()
    };
    segments.iter().map(|segment| segment.iter().map(of).collect()).collect()
}

impl Executor for CpuExecutor {
    fn arena_bytes(&self) -> u64 {
        self.arena.bytes()
    }

    fn host_bytes(&self) -> u64 {
        self.arena.host_bytes()
    }

    fn touched_bytes(&self) -> Option<u64> {
        Some(self.arena.touched())
    }

    fn write(&mut self, tensor: &str, micro_batch: usize, data: &[u8]) -> Result<(), ExecError> {
        let (found, address, bytes) = self.tensor(tensor, micro_batch)?;
        check_write(found, data)?;
        // SAFETY: `&mut self`, so nothing runs; the address and size are the tensor's.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), address, bytes) };
        Ok(())
    }

    fn read(&self, tensor: &str, micro_batch: usize) -> Result<Cow<'_, [u8]>, ExecError> {
        let (_, address, bytes) = self.tensor(tensor, micro_batch)?;
        // SAFETY: the address and size are the tensor's; running needs `&mut self`, so nothing writes meanwhile.
        Ok(Cow::Borrowed(unsafe { std::slice::from_raw_parts(address, bytes) }))
    }

    fn profile(&mut self, entry: &str) -> Result<Vec<Timing>, ExecError> {
        let begin = Instant::now();
        let mut timings = Vec::new();
        for slot in self.schedule(entry)? {
            for instr in 0..self.segments[slot.segment].len() {
                let start = Instant::now();
                self.instr(instr, slot).inspect_err(|_| self.drain())?;
                let (start_s, seconds) = ((start - begin).as_secs_f64(), start.elapsed().as_secs_f64());
                timings.push(Timing { slot, instr, start_s, seconds });
            }
            self.join()?;
        }
        Ok(timings)
    }

    fn run(&mut self, entry: &str) -> Result<(), ExecError> {
        let unknown = || ExecError::Internal(format!("the program has no entry `{entry}`"));
        let entry = self.program.entries.iter().position(|e| *e.name == *entry).ok_or_else(unknown)?;
        let (begin, before) = (Instant::now(), waited());
        for s in 0..self.program.entries[entry].schedule.len() {
            let slot = self.program.entries[entry].schedule[s];
            for instr in 0..self.segments[slot.segment].len() {
                self.instr(instr, slot).inspect_err(|_| self.drain())?;
            }
            self.join()?;
        }
        self.busy_s = Some(begin.elapsed().saturating_sub(waited() - before).as_secs_f64());
        Ok(())
    }

    fn busy_s(&self) -> Option<f64> {
        self.busy_s
    }

    fn check_numbers(&mut self) -> bool {
        self.checks = true;
        true
    }
}

impl Rank for CpuExecutor {
    /// Waits until the communication threads have ended what they were handed.
    fn drain(&mut self) {
        let Some(link) = self.link.as_ref().filter(|_| self.communication.iter().any(Option::is_some)) else { return };
        link.comm.fail("ended by another error");
        for thread in self.communication.iter_mut().flatten() {
            // What went wrong is known.
            let _ = thread.finish();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_that_a_kernel_runs_has_one() {
        let with_kernel = OpKind::ALL.iter().filter(|kind| kind.rows()[0].has_kernel());
        let with_kernel: Vec<OpKind> = with_kernel.copied().collect();
        for kernels in [kernels::<f32>(), kernels::<Bf16>(), kernels::<F16>()] {
            assert_eq!(kernels.into_keys().collect::<Vec<_>>(), with_kernel);
        }
    }
}
