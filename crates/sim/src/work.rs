//! What an instruction asks of the hardware.

use lockstep_ir::op::Transfer;
use lockstep_ir::program::{BufferId, Instr, Segment, StepProgram, Sum};
use lockstep_ir::{Axes, Collective, DType, MeshAxis, Op, OpKind, TypeError};
use std::collections::BTreeSet;

/// What an instruction asks of the hardware. Instructions that ask the same take the same time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Demand {
    /// Nothing: a view.
    Nothing,
    /// Matmuls of equal extents, one behind the other.
    Matmul {
        /// Rows of the output.
        rows: u64,
        /// Columns of the output.
        cols: u64,
        /// Terms of each sum.
        inner: u64,
        /// How many.
        calls: u64,
        /// Type of the operands.
        dtype: DType,
        /// Bytes of operands and results of all of them.
        bytes: u64,
        /// Weights whose gradient it adds to a sum.
        gradients: u64,
        /// Logits that it makes, or reads the gradients of.
        logits: u64,
    },
    /// Fused attention.
    Attention {
        /// FLOPs of what the mask leaves.
        flops: u64,
        /// Bytes of operands and results.
        bytes: u64,
        /// Elements of a head.
        head_dim: u64,
        /// Positions of a sequence.
        seq: u64,
        /// Type of the operands.
        dtype: DType,
        /// Whether it is the gradient.
        backward: bool,
    },
    /// Attention whose scores exist.
    Scores {
        /// FLOPs, of all scores.
        flops: u64,
        /// Bytes of operands and results.
        bytes: u64,
        /// Type of the operands.
        dtype: DType,
    },
    /// A kernel that does nothing but read and write.
    Elementwise {
        /// Bytes.
        bytes: u64,
    },
    /// An update of parameters.
    Optimizer {
        /// Bytes.
        bytes: u64,
    },
    /// A collective.
    Collective {
        /// What ranks do.
        pattern: Collective,
        /// Along which axes.
        over: Axes,
        /// How many neighbours share, where not all along the axes take part.
        sharers: Option<usize>,
        /// Bytes of the whole tensors.
        bytes: u64,
    },
    /// A message to another stage.
    Send {
        /// Which.
        stage: usize,
        /// Which stream of messages.
        tag: u32,
        /// Bytes.
        bytes: u64,
        /// Messages that may be under way.
        copies: usize,
    },
    /// A message from another stage.
    Receive {
        /// Which.
        stage: usize,
        /// Which stream of messages.
        tag: u32,
    },
}

/// Which kernel an instruction is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kernel {
    /// The op.
    pub op: OpKind,
    /// The type that it computes in.
    pub dtype: DType,
}

impl Kernel {
    /// That of an instruction.
    pub fn of(instr: &Instr) -> Self {
        let mut types = instr.inputs.iter().map(|a| a.ty.dtype);
        Self { op: instr.op.kind(), dtype: types.find(|t| t.is_float()).unwrap_or(DType::F32) }
    }
}

/// What time is spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TimeClass {
    /// Matmuls.
    Matmul,
    /// Attention.
    Attention,
    /// Kernels bound by memory.
    Elementwise,
    /// The update of parameters.
    Optimizer,
    /// Collectives along these axes.
    Collective(Axes),
    /// Messages between stages that were waited for, and other waits in a pipeline.
    Bubble,
    /// Waiting for the host.
    Host,
}

impl std::fmt::Display for TimeClass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TimeClass::Matmul => f.write_str("matmul"),
            TimeClass::Attention => f.write_str("attention"),
            TimeClass::Elementwise => f.write_str("memory-bound"),
            TimeClass::Optimizer => f.write_str("optimizer"),
            TimeClass::Collective(over) => write!(f, "collectives {over}"),
            TimeClass::Bubble => f.write_str("bubble"),
            TimeClass::Host => f.write_str("host"),
        }
    }
}

impl Demand {
    /// What its time is counted as; none for what takes no time of its own.
    pub fn class(&self) -> Option<TimeClass> {
        match self {
            Demand::Nothing | Demand::Send { .. } | Demand::Receive { .. } => None,
            Demand::Matmul { .. } => Some(TimeClass::Matmul),
            Demand::Attention { .. } | Demand::Scores { .. } => Some(TimeClass::Attention),
            Demand::Elementwise { .. } => Some(TimeClass::Elementwise),
            Demand::Optimizer { .. } => Some(TimeClass::Optimizer),
            Demand::Collective { over, .. } => Some(TimeClass::Collective(*over)),
        }
    }

    /// What instruction `index` of a segment asks for; with `fused`, as part of its group.
    pub fn of(program: &StepProgram, segment: &Segment, index: usize, fused: bool) -> Result<Self, TypeError> {
        let instr = &segment.instrs[index];
        if let Some(transfer) = instr.op.transfer() {
            return Ok(transferred(program, instr, transfer));
        }
        let before = segment.group_of(index).filter(|_| fused).map_or(index..index, |g| g.instrs.start..index);
        let known: BTreeSet<BufferId> =
            segment.instrs[before].iter().flat_map(|i| i.operands().map(|a| a.buffer)).collect();
        let bytes = bytes(instr, &known);
        let types: Vec<_> = instr.inputs.iter().map(|a| &a.ty).collect();
        let dims = instr.op.bind(&types)?;
        let size = |letters: &str| dims.product(letters) as u64;
        let wanted: Vec<bool> = instr.outputs.iter().map(Option::is_some).collect();
        let flops = instr.op.flops(&types, &wanted)?;
        let dtype = Kernel::of(instr).dtype;
        let sums = instr.outputs.iter().flatten().any(|a| a.sum != Sum::No);
        let matmul = |rows: u64, cols: u64, inner: u64| Demand::Matmul {
            rows,
            cols,
            inner,
            calls: 1,
            dtype,
            bytes,
            gradients: 0,
            logits: 0,
        };
        // What the mask leaves of the FLOPs that the kernel has.
        let causal = || (flops.hardware * flops.causal / flops.model.max(1)) as u64;
        let attention = |seq: u64, backward| Demand::Attention {
            flops: causal(),
            bytes,
            head_dim: size("e"),
            seq,
            dtype,
            backward,
        };
        Ok(match instr.op {
            Op::Linear => matmul(size("…"), size("n"), size("k")),
            Op::LinearGradInput => matmul(size("…"), size("k"), size("n")),
            Op::LinearGradWeight => match matmul(size("n"), size("k"), size("…")) {
                Demand::Matmul { rows, cols, inner, calls, dtype, bytes, logits, .. } => {
                    let gradients = if sums { rows * cols } else { 0 };
                    Demand::Matmul { rows, cols, inner, calls, dtype, bytes, gradients, logits }
                }
                other => other,
            },
            Op::GroupedLinear | Op::GroupedLinearEach => matmul(size("…y"), size("n"), size("k")),
            Op::GroupedGradInput => matmul(size("…y"), size("k"), size("n")),
            Op::GroupedGradWeight { .. } | Op::GroupedGradWeightEach { .. } => {
                // As many matmuls as experts, each over its share of the rows.
                let (calls, rows, cols) = (size("j").max(1), size("n"), size("k"));
                let inner = size("…y").div_ceil(calls);
                let gradients = if sums { calls * rows * cols } else { 0 };
                Demand::Matmul { rows, cols, inner, calls, dtype, bytes, gradients, logits: 0 }
            }
            // Rows that tokens fill, if choices are even.
            Op::RowsLinear { blocks } => matmul(blocks.filled(size("ac")), size("n"), size("k")),
            Op::RowsGradInput { blocks } => matmul(blocks.filled(size("ac")), size("k"), size("n")),
            Op::RowsGradWeight { blocks, .. } => {
                let (calls, rows, cols) = (size("j").max(1), size("n"), size("k"));
                let inner = blocks.filled(size("ac")).div_ceil(calls);
                let gradients = if sums { calls * rows * cols } else { 0 };
                Demand::Matmul { rows, cols, inner, calls, dtype, bytes, gradients, logits: 0 }
            }
            Op::LinearCrossEntropy { rows } | Op::LinearScore { rows } => {
                let (tokens, vocab, inner) = (size("bs"), size("v"), size("k"));
                let gradients = instr.op.spec().gradient_reads.is_some();
                let matmuls = 1 + wanted.iter().skip(1).filter(|w| **w && gradients).count() as u64;
                // Every chunk reads the weights, and adds to their gradient; the last may have fewer rows.
                let chunks = tokens.div_ceil((rows as u64).clamp(1, tokens.max(1))).max(1);
                let rows = tokens.div_ceil(chunks);
                let each = vocab * inner * dtype.bytes() as u64;
                let (calls, bytes) = (matmuls * chunks, bytes + (chunks - 1) * matmuls * each);
                let (gradients, logits) = (if matmuls > 2 { vocab * inner } else { 0 }, tokens * vocab);
                Demand::Matmul { rows, cols: vocab, inner, calls, dtype, bytes, gradients, logits }
            }
            Op::VocabLogits { .. } => {
                let (rows, cols, inner) = (size("c"), size("v"), size("k"));
                Demand::Matmul { rows, cols, inner, calls: 1, dtype, bytes, gradients: 0, logits: rows * cols }
            }
            Op::VocabGrad { .. } => {
                let (rows, cols, inner) = (size("c"), size("v"), size("k"));
                let dtype = instr.inputs[3].ty.dtype;
                let calls = wanted.iter().filter(|w| **w).count() as u64;
                Demand::Matmul { rows, cols, inner, calls, dtype, bytes, gradients: cols * inner, logits: 0 }
            }
            Op::Orthogonalise => {
                let (rows, inner) = (size("n").min(size("k")), size("n").max(size("k")));
                let calls = (flops.hardware as u64).div_ceil((2 * rows * rows * inner).max(1));
                Demand::Matmul { rows, cols: rows, inner, calls, dtype, bytes: bytes * 5, gradients: 0, logits: 0 }
            }
            Op::Attention { .. } | Op::CachedAttention { .. } => attention(size("s"), false),
            Op::RingAttention { parts, .. } => attention(size("s") * parts as u64, false),
            Op::GatheredAttention { .. } => attention(size("o"), false),
            Op::AttentionGrad { .. } => attention(size("s"), true),
            Op::RingAttentionGrad { parts, .. } => attention(size("s") * parts as u64, true),
            Op::GatheredAttentionGrad { .. } => attention(size("o"), true),
            Op::AttentionScores { .. }
            | Op::AttentionScoresGrad { .. }
            | Op::AttentionMix { .. }
            | Op::AttentionMixGrad { .. } => Demand::Scores { flops: flops.hardware as u64, bytes, dtype },
            Op::AdamW { .. } | Op::Lion { .. } | Op::Sgd { .. } | Op::Momentum { .. } | Op::Descend { .. } => {
                Demand::Optimizer { bytes }
            }
            // Rows of the table that tokens choose, not all of it.
            Op::Embedding => Demand::Elementwise { bytes: 2 * written(instr) },
            Op::EmbeddingGrad { .. } => Demand::Elementwise { bytes: 3 * instr.inputs[0].ty.bytes() },
            Op::Shard { .. } => Demand::Nothing,
            Op::AddBias
            | Op::BiasGrad
            | Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::RmsNormGrad
            | Op::AddRmsNormGrad
            | Op::RmsNormGradWeight
            | Op::QkNorm { .. }
            | Op::QkNormGrad
            | Op::QkNormGradWeight
            | Op::LayerNorm { .. }
            | Op::AddLayerNorm { .. }
            | Op::LayerNormGrad
            | Op::AddLayerNormGrad
            | Op::LayerNormGradWeight
            | Op::AddPositions { .. }
            | Op::AddPositionsAt
            | Op::PositionsGrad { .. }
            | Op::Rope { .. }
            | Op::RopeAt
            | Op::AttentionMerge
            | Op::SplitHeads { .. }
            | Op::JoinHeads { .. }
            | Op::LastPosition
            | Op::Route { .. }
            | Op::RouteTo { .. }
            | Op::RouteGrad { .. }
            | Op::ExpertCounts { .. }
            | Op::RouterLoss { .. }
            | Op::RouterLossGrad { .. }
            | Op::ExpertSlots { .. }
            | Op::SendRows { .. }
            | Op::SendRowsEach { .. }
            | Op::TakeRows { .. }
            | Op::Combine
            | Op::SumChoices
            | Op::CombineGrad
            | Op::ExpertLoad { .. }
            | Op::StackLoads
            | Op::MoveBias { .. }
            | Op::SwiGlu
            | Op::SwiGluGrad
            | Op::Gelu
            | Op::GeluGrad
            | Op::Dropout { .. }
            | Op::Add
            | Op::Cast { .. }
            | Op::Slice { .. }
            | Op::Concat
            | Op::CrossEntropy
            | Op::CrossEntropyGrad { .. }
            | Op::AddState
            | Op::Accumulate
            | Op::SquareSum { .. }
            | Op::MergeSums
            | Op::LossSum
            | Op::GradientNorm
            | Op::VocabLoss
            | Op::VocabMisses { .. }
            | Op::JoinRows
            | Op::Part { .. }
            // With a transfer of their own, above.
            | Op::AllReduce { .. }
            | Op::SumShared { .. }
            | Op::ReduceScatter { .. }
            | Op::AllGather { .. }
            | Op::Shift { .. }
            | Op::AllToAll { .. }
            | Op::Send { .. }
            | Op::Receive { .. } => Demand::Elementwise { bytes },
        })
    }
}

/// Bytes that a call moves besides buffers that are at hand: operands read once, results written once, sums read and written.
fn bytes(instr: &Instr, at_hand: &BTreeSet<BufferId>) -> u64 {
    let read = instr.inputs.iter().filter(|a| !at_hand.contains(&a.buffer)).map(|a| a.ty.bytes());
    let written = instr.outputs.iter().flatten().filter(|a| !at_hand.contains(&a.buffer));
    read.sum::<u64>() + written.map(|a| a.ty.bytes() * if a.sum == Sum::No { 1 } else { 2 }).sum::<u64>()
}

fn written(instr: &Instr) -> u64 {
    instr.outputs.iter().flatten().map(|a| a.ty.bytes()).sum()
}

fn transferred(program: &StepProgram, instr: &Instr, transfer: Transfer) -> Demand {
    let input: u64 = instr.inputs.iter().map(|a| a.ty.bytes()).sum();
    let output = written(instr);
    let n = program.mesh.size(transfer.over()) as u64;
    let collective = |pattern, over, bytes| Demand::Collective { pattern, over, sharers: None, bytes };
    match transfer {
        Transfer::AllReduce { over } => collective(Collective::AllReduce, over, input),
        Transfer::ReduceScatter { over, .. } => collective(Collective::ReduceScatter, over, output * n),
        Transfer::AllGather { over, dim: Some(_) } => collective(Collective::AllGather, over, output),
        Transfer::AllGather { over, dim: None } => collective(Collective::AllGather, over, input * n),
        Transfer::Shift { over } => collective(Collective::Shift, over, input * n),
        Transfer::AllToAll { over, .. } => collective(Collective::AllToAll, over, input),
        Transfer::SumShared { over, sharers } => {
            let bytes = instr.inputs.iter().map(|a| a.ty.bytes() - a.ty.first_section_bytes()).sum();
            Demand::Collective { pattern: Collective::AllReduce, over, sharers: Some(sharers), bytes }
        }
        Transfer::Send { stage, tag } => {
            let held = instr.workspace.map_or(0, |w| program.buffers[w.0].bytes);
            Demand::Send { stage, tag, bytes: input, copies: (held / input.max(1)).max(1) as usize }
        }
        Transfer::Receive { stage, tag } => Demand::Receive { stage, tag },
    }
}

/// Whether all stages take part in it.
pub fn meets(demand: &Demand) -> bool {
    match demand {
        Demand::Collective { over, .. } => over.contains(MeshAxis::Pp),
        Demand::Nothing
        | Demand::Matmul { .. }
        | Demand::Attention { .. }
        | Demand::Scores { .. }
        | Demand::Elementwise { .. }
        | Demand::Optimizer { .. }
        | Demand::Send { .. }
        | Demand::Receive { .. } => false,
    }
}
