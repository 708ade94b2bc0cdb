//! The CPU executor: all kernels in f32, on all cores, in one arena, without allocating while a step runs.

pub(crate) mod arena;
mod attention;
mod call;
mod columns;
mod dispatch;
mod dropout;
mod experts;
mod float;
mod gemm;
mod head;
mod head_norm;
mod heads;
mod linear;
mod loss;
mod norm;
mod optimizer;
mod orthogonal;
pub mod peaks;
mod pointwise;
mod pool;
mod positions;
mod router;
mod rules;
mod sections;
mod simd;
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
use call::{Bound, Call};
use float::{Bf16, F16, Float};
use lockstep_ir::program::{Instr, Slot, Stream, Tensor};
use lockstep_ir::{Coordinates, DType, DeviceProfile, Op, OpKind, StepProgram, Workspace, units};
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
        DType::F32 | DType::F64 | DType::U32 | DType::Fixed64 => fixed(gemm),
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
    let workspaces = BTreeMap::from([
        (OpKind::Linear, rounded("inputs")),
        (OpKind::LinearGradInput, rounded("outputs")),
        (OpKind::LinearGradWeight, Workspace { fixed: gemm, terms: share("outputs inputs") }),
        (OpKind::Route, of(router::route_scratch(threads))),
        (OpKind::RouteTo, of(router::route_to_scratch(threads))),
        (OpKind::RouterLoss, of(router::router_loss_scratch(threads))),
        (OpKind::RouterLossGrad, of(router::router_loss_scratch(threads))),
        (OpKind::GroupedLinear, of(experts::scratch(gemm, Some((rounds, "inputs")), None))),
        (OpKind::GroupedLinearEach, of(experts::scratch(gemm, Some((rounds, "inputs")), None))),
        (OpKind::GroupedGradInput, of(experts::scratch(gemm, Some((rounds, "outputs")), None))),
        (OpKind::GroupedGradWeight, of(experts::scratch(gemm, None, share("outputs inputs").pop()))),
        (OpKind::GroupedGradWeightEach, of(experts::scratch(gemm, None, share("outputs inputs").pop()))),
        (OpKind::RowsLinear, of(experts::scratch(gemm, Some((rounds, "inputs")), None))),
        (OpKind::RowsGradInput, of(experts::scratch(gemm, Some((rounds, "outputs")), None))),
        (OpKind::RowsGradWeight, of(experts::scratch(gemm, None, share("outputs inputs").pop()))),
        (OpKind::LinearCrossEntropy, loss_head),
        (OpKind::LinearScore, Workspace { fixed: head, terms: per_letters }),
        (OpKind::Attention, of(attention.terms("seq", "seq head_dim"))),
        (OpKind::CachedAttention, of(attention.terms("cache", "cache head_dim"))),
        (OpKind::AttentionGrad, of(backward.terms("seq", "seq head_dim"))),
        (OpKind::RingAttention, of(in_runs.terms("keys", "keys head_dim"))),
        (OpKind::RingAttentionGrad, of(backward_in_runs.terms("keys", "keys head_dim"))),
        (OpKind::GatheredAttention, of(in_runs.terms("whole_seq", "whole_seq head_dim"))),
        (OpKind::GatheredAttentionGrad, of(backward_in_runs.terms("whole_seq", "whole_seq head_dim"))),
        (OpKind::AttentionScores, naive(&[(4, "seq keys")])),
        (OpKind::AttentionScoresGrad, naive(&[(rounds, "keys"), (4, "seq keys"), (4, "keys head_dim")])),
        (OpKind::AttentionMix, naive(&[(rounds, "keys")])),
        (OpKind::AttentionMixGrad, naive(&[(rounds, "head_dim"), (4, "keys head_dim")])),
        (OpKind::VocabLogits, fixed(gemm)),
        (OpKind::VocabGrad, vocab_grad),
        (OpKind::SquareSum, fixed(optimizer::NORM_SCRATCH as u64)),
        (OpKind::Orthogonalise, of(orthogonal::scratch(gemm))),
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
        let too_large = || ExecError::OutOfMemory(units::bytes(program.arena_bytes));
        let arena = Arena::new(program.arena_bytes).ok_or_else(too_large)?;
        let pool = Pool::new(threads).map_err(|e| ExecError::Threads(threads, e))?;
        let mut communication = Stream::BESIDE.map(|_| None);
        for (thread, stream) in communication.iter_mut().zip(Stream::BESIDE) {
            if let Some(link) = link.as_ref().filter(|_| program.uses(stream)) {
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
        // SAFETY: the arena is this program's and is dropped behind the queues; the verifier has checked what runs at the same
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
        match bound.float {
            DType::BF16 => run_kernel::<Bf16>(call),
            DType::F16 => run_kernel::<F16>(call),
            DType::F32 | DType::F64 | DType::U32 | DType::Fixed64 => run_kernel::<f32>(call),
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

fn run_kernel<T: Float>(call: Call) {
    match call.bound.op {
        Op::Embedding => pointwise::embedding::<T>(call),
        Op::EmbeddingGrad { .. } => pointwise::embedding_grad::<T>(call),
        Op::Linear => linear::forward::<T>(call),
        Op::LinearGradInput => linear::grad_input::<T>(call),
        Op::LinearGradWeight => linear::grad_weight::<T>(call),
        Op::AddBias => pointwise::add_bias::<T>(call),
        Op::BiasGrad => columns::bias_grad::<T>(call),
        Op::RmsNorm { eps } => norm::forward::<T>(call, eps, false, false),
        Op::AddRmsNorm { eps } => norm::forward::<T>(call, eps, true, false),
        Op::RmsNormGrad => norm::grad::<T>(call, false, false),
        Op::AddRmsNormGrad => norm::grad::<T>(call, true, false),
        Op::RmsNormGradWeight => columns::norm_grad_weight::<T>(call, false),
        Op::LayerNorm { eps } => norm::forward::<T>(call, eps, false, true),
        Op::AddLayerNorm { eps } => norm::forward::<T>(call, eps, true, true),
        Op::LayerNormGrad => norm::grad::<T>(call, false, true),
        Op::AddLayerNormGrad => norm::grad::<T>(call, true, true),
        Op::LayerNormGradWeight => columns::norm_grad_weight::<T>(call, true),
        Op::QkNorm { eps } => head_norm::forward::<T>(call, eps),
        Op::QkNormGrad => head_norm::grad::<T>(call),
        Op::QkNormGradWeight => head_norm::grad_weight::<T>(call),
        Op::AddPositions { seq } => positions::add::<T>(call, seq),
        Op::AddPositionsAt => positions::add_at::<T>(call),
        Op::PositionsGrad { seq, .. } => positions::grad::<T>(call, seq),
        Op::Rope { inverse } => positions::rope::<T>(call, inverse),
        Op::RopeAt => positions::rope_at::<T>(call),
        Op::CachedAttention { window } => attention::cached::<T>(call, window),
        Op::LastPosition => positions::last_position::<T>(call),
        Op::Attention { window } => attention::forward::<T>(call, window),
        Op::AttentionGrad { window } => attention::grad::<T>(call, window),
        Op::RingAttention { window, step, .. } => attention::ring::<T>(call, window, step),
        Op::RingAttentionGrad { window, step, .. } => attention::ring_grad::<T>(call, window, step),
        Op::AttentionMerge => attention::merge(call),
        Op::GatheredAttention { window } => attention::gathered::<T>(call, window),
        Op::GatheredAttentionGrad { window } => attention::gathered_grad::<T>(call, window),
        Op::SplitHeads { ranks, .. } => heads::split::<T>(call, ranks),
        Op::JoinHeads { ranks } => heads::join::<T>(call, ranks),
        Op::AttentionScores { window } => attention::naive::scores::<T>(call, window),
        Op::AttentionScoresGrad { .. } => attention::naive::scores_grad::<T>(call),
        Op::AttentionMix { .. } => attention::naive::mix::<T>(call),
        Op::AttentionMixGrad { .. } => attention::naive::mix_grad::<T>(call),
        Op::Route { how } => router::route(call, &how),
        Op::RouteTo { how } => router::route_to(call, &how),
        Op::RouteGrad { how } => router::route_grad(call, &how),
        Op::ExpertCounts { .. } => router::counts(call),
        Op::RouterLoss { balance, z } => router::router_loss(call, balance, z),
        Op::RouterLossGrad { balance, z } => router::router_loss_grad(call, call.seed(2) * balance, call.seed(2) * z),
        Op::GroupedLinear => experts::linear::<T>(call, call.size("choices")),
        Op::GroupedLinearEach => experts::linear::<T>(call, 1),
        Op::GroupedGradInput => experts::grad_input::<T>(call),
        Op::GroupedGradWeight { .. } => experts::grad_weight::<T>(call, call.size("choices")),
        Op::GroupedGradWeightEach { .. } => experts::grad_weight::<T>(call, 1),
        Op::ExpertSlots { blocks, .. } => dispatch::slots(call, blocks),
        Op::SendRows { .. } => dispatch::send_rows::<T>(call, call.size("choices")),
        Op::SendRowsEach { .. } => dispatch::send_rows::<T>(call, 1),
        Op::TakeRows { .. } => dispatch::take_rows::<T>(call),
        Op::RowsLinear { .. } => experts::linear::<T>(call, 1),
        Op::RowsGradInput { .. } => experts::grad_input::<T>(call),
        Op::RowsGradWeight { .. } => experts::grad_weight::<T>(call, 1),
        Op::Combine => experts::combine::<T>(call, true),
        Op::SumChoices => experts::combine::<T>(call, false),
        Op::CombineGrad => experts::combine_grad::<T>(call),
        Op::ExpertLoad { .. } => router::load(call),
        Op::StackLoads => router::stack_loads(call),
        Op::MoveBias { row, rate } => router::move_bias(call, row, rate),
        Op::SwiGlu => pointwise::swiglu::<T>(call),
        Op::SwiGluGrad => pointwise::swiglu_grad::<T>(call),
        Op::Gelu => pointwise::gelu::<T>(call),
        Op::GeluGrad => pointwise::gelu_grad::<T>(call),
        Op::Dropout { rate, site, .. } => dropout::dropout::<T>(call, rate, site),
        Op::Add => pointwise::add::<T>(call),
        Op::Cast { .. } => pointwise::map::<T>(call, |x| x),
        Op::Slice { first, .. } => sections::slice::<T>(call, first),
        Op::Concat => sections::concat::<T>(call),
        Op::CrossEntropy => loss::cross_entropy::<T>(call),
        Op::CrossEntropyGrad { weight } => loss::cross_entropy_grad::<T>(call, weight),
        Op::LinearCrossEntropy { rows } => head::linear_cross_entropy::<T>(call, rows),
        Op::LinearScore { rows } => head::linear_score::<T>(call, rows),
        Op::AddState => optimizer::add_state(call),
        Op::Accumulate => optimizer::accumulate(call),
        Op::SquareSum { sharers, tail } => optimizer::square_sum(call, sharers, tail),
        Op::MergeSums => optimizer::merge_sums(call),
        Op::LossSum => optimizer::loss_sum(call),
        Op::GradientNorm => optimizer::gradient_norm(call),
        Op::AdamW { beta1, beta2, eps, decay, lr_scale } => rules::adamw(call, [beta1, beta2, eps], decay, lr_scale),
        Op::Lion { beta1, beta2, decay, lr_scale } => rules::lion(call, [beta1, beta2], decay, lr_scale),
        Op::Sgd { momentum, decay, lr_scale } => rules::sgd(call, momentum, decay, lr_scale),
        Op::Momentum { momentum } => rules::momentum(call, momentum),
        Op::Orthogonalise => orthogonal::orthogonalise(call),
        Op::Descend { decay, lr_scale } => rules::descend(call, decay, lr_scale),
        Op::VocabLogits { rows, .. } => vocab::logits::<T>(call, rows),
        Op::VocabLoss => vocab::loss(call),
        Op::VocabMisses { rows } => vocab::misses(call, rows),
        Op::VocabGrad { rows } => vocab::grad::<T>(call, rows),
        Op::JoinRows => vocab::join_rows::<T>(call),
        Op::Part { .. } => sections::part(call),
        Op::AllReduce { .. }
        | Op::SumShared { .. }
        | Op::ReduceScatter { .. }
        | Op::AllGather { .. }
        | Op::Shift { .. }
        | Op::AllToAll { .. }
        | Op::Shard { .. }
        | Op::Send { .. }
        | Op::Receive { .. } => unreachable!("{} is no kernel", call.bound.op.name()),
    }
}

impl Executor for CpuExecutor {
    fn arena_bytes(&self) -> u64 {
        self.arena.bytes()
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
