//! What an instruction asks of the hardware.

use lockstep_ir::op::{Call, Cost, Matmuls, Saved, Transfer};
use lockstep_ir::program::{BufferId, Instr, Segment, StepProgram, Sum};
use lockstep_ir::{Axes, Collective, DType, MatmulType, MeshAxis, TypeError};
use std::collections::BTreeSet;

/// What an instruction asks of the hardware. Instructions that ask the same take the same time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Demand {
    /// Nothing: a view.
    Nothing,
    /// Matmuls of equal extents, one after the other.
    Matmul {
        /// Rows of the output.
        rows: u64,
        /// Columns of the output.
        cols: u64,
        /// Terms of each sum.
        inner: u64,
        /// How many.
        calls: u64,
        /// What it multiplies in.
        dtype: MatmulType,
        /// Bytes of operands and results of all of them.
        bytes: u64,
        /// Bytes of sums that it reads to add to them, which are among those.
        sums: u64,
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
    /// A kernel that reads a tensor for its scale in fp8, or rounds it to fp8.
    Quantise {
        /// Bytes.
        bytes: u64,
    },
    /// An update of parameters.
    Optimizer {
        /// Bytes.
        bytes: u64,
    },
    /// A copy between the device's memory and the host's.
    HostCopy {
        /// Bytes that cross the link.
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
        /// How the rows were chosen that go to experts or come back; none of other collectives.
        routed: Option<Routed>,
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

/// To how many experts a row goes, and which they can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Routed {
    /// Experts of a row.
    pub choices: usize,
    /// Groups of experts, side by side.
    pub groups: usize,
    /// Groups that the experts of a row are in, at most.
    pub top_groups: usize,
}

impl Routed {
    /// On how many of these nodes the experts of a row are, in the mean, where each has as many of them and choices are even.
    pub fn nodes(self, nodes: usize) -> f64 {
        let all = nodes as f64;
        let reached = match self.groups {
            groups if groups <= nodes => all * self.top_groups as f64 / groups as f64,
            groups => {
                // A node is missed where none of its groups is among those of the row.
                let here = groups / nodes;
                let missed = (0..self.top_groups)
                    .map(|taken| (groups - here).saturating_sub(taken) as f64 / (groups - taken) as f64)
                    .product::<f64>();
                all * (1.0 - missed)
            }
        };
        let reached = reached.max(1.0);
        reached * (1.0 - (1.0 - 1.0 / reached).powf(self.choices as f64))
    }
}

/// Which kernel an instruction is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kernel {
    /// The op's row, by name.
    pub op: &'static str,
    /// The type that it computes in.
    pub dtype: DType,
}

impl Kernel {
    /// That of an instruction.
    pub fn of(instr: &Instr) -> Self {
        let mut types = instr.inputs.iter().map(|a| a.ty.dtype);
        Self { op: instr.op.name(), dtype: types.find(|t| t.is_float()).unwrap_or(DType::F32) }
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
    /// Copies between the device's memory and the host's.
    HostCopy,
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
            TimeClass::HostCopy => f.write_str("host copies"),
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
            Demand::Elementwise { .. } | Demand::Quantise { .. } => Some(TimeClass::Elementwise),
            Demand::Optimizer { .. } => Some(TimeClass::Optimizer),
            Demand::HostCopy { .. } => Some(TimeClass::HostCopy),
            Demand::Collective { over, .. } => Some(TimeClass::Collective(*over)),
        }
    }

    /// What instruction `index` of a segment asks for; with `fused`, as part of its group.
    pub fn of(program: &StepProgram, segment: &Segment, index: usize, fused: bool) -> Result<Self, TypeError> {
        let instr = &segment.instrs[index];
        if let Some(transfer) = instr.op.transfer() {
            return Ok(transferred(program, segment, instr, transfer));
        }
        let before = segment.group_of(index).filter(|_| fused).map_or(index..index, |g| g.instrs.start..index);
        let known: BTreeSet<BufferId> =
            segment.instrs[before].iter().flat_map(|i| i.operands().map(|a| a.buffer)).collect();
        let bytes = bytes(instr, &known);
        let types: Vec<_> = instr.inputs.iter().map(|a| &a.ty).collect();
        let wanted: Vec<bool> = instr.outputs.iter().map(Option::is_some).collect();
        let sums = instr.outputs.iter().flatten().any(|a| a.sum != Sum::No);
        let (cost, flops) = instr.op.cost(&types, &Call { wanted: &wanted, sums })?;
        let dtype = instr.op.spec().multiplies.first().map_or(Kernel::of(instr).dtype, |input| types[*input].dtype);
        Ok(match cost {
            Cost::Nothing => Demand::Nothing,
            Cost::Matmul(Matmuls { rows, cols, inner, calls, gradients, logits, passes, reread }) => {
                let bytes = bytes * passes + reread * dtype.bytes() as u64;
                let dtype = if instr.tf32 { MatmulType::Tf32 } else { dtype.into() };
                let summed = instr.outputs.iter().flatten().filter(|a| a.sum != Sum::No);
                let sums = summed.map(|a| a.ty.bytes()).sum::<u64>().min(bytes);
                Demand::Matmul { rows, cols, inner, calls, dtype, bytes, sums, gradients, logits }
            }
            Cost::Attention { head_dim, seq, backward } => {
                // What the mask leaves of the FLOPs that the kernel has.
                let flops = (flops.hardware * flops.causal / flops.model.max(1)) as u64;
                Demand::Attention { flops, bytes, head_dim, seq, dtype, backward }
            }
            Cost::Scores => Demand::Scores { flops: flops.hardware as u64, bytes, dtype },
            Cost::Elementwise => Demand::Elementwise { bytes },
            Cost::Rows { of: Saved::Input(i), times } => Demand::Elementwise { bytes: times * types[i].bytes() },
            Cost::Rows { of: Saved::Output(o), times } => {
                let bytes = instr.outputs[o].as_ref().map_or(0, |a| a.ty.bytes());
                Demand::Elementwise { bytes: times * bytes }
            }
            Cost::Quantise => Demand::Quantise { bytes },
            Cost::Optimizer => Demand::Optimizer { bytes },
            Cost::HostCopy => Demand::HostCopy { bytes: bytes / 2 },
        })
    }
}

/// Bytes that a call moves besides buffers that are at hand: operands read once, results written once, sums read and written.
fn bytes(instr: &Instr, at_hand: &BTreeSet<BufferId>) -> u64 {
    let read = instr.inputs.iter().filter(|a| !at_hand.contains(&a.buffer)).map(|a| a.ty.bytes());
    let written = instr.outputs.iter().flatten().filter(|a| !at_hand.contains(&a.buffer));
    read.sum::<u64>() + written.map(|a| a.ty.bytes() * if a.sum == Sum::No { 1 } else { 2 }).sum::<u64>()
}

fn transferred(program: &StepProgram, segment: &Segment, instr: &Instr, transfer: Transfer) -> Demand {
    let (over, sharers) = (transfer.over(), transfer.sharers());
    let (bytes, _) = transfer.bytes(instr, program.mesh.size(over) as u64);
    match (transfer, transfer.collective()) {
        (_, Some(pattern)) => {
            let rows = pattern == Collective::AllToAll && over == MeshAxis::Ep.into();
            let routed = rows.then(|| segment.instrs.iter().find_map(|instr| instr.op.routing())).flatten();
            let routed =
                routed.map(|how| Routed { choices: how.choices, groups: how.groups, top_groups: how.top_groups });
            Demand::Collective { pattern, over, sharers, bytes, routed }
        }
        (Transfer::Receive { stage, tag }, None) => Demand::Receive { stage, tag },
        (Transfer::Send { stage, tag }, None) => {
            let held = instr.workspace.map_or(0, |w| program.buffers[w.0].bytes);
            Demand::Send { stage, tag, bytes, copies: (held / bytes.max(1)).max(1) as usize }
        }
        (transfer, None) => unreachable!("{transfer:?} is a collective"),
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
        | Demand::Quantise { .. }
        | Demand::Optimizer { .. }
        | Demand::HostCopy { .. }
        | Demand::Send { .. }
        | Demand::Receive { .. } => false,
    }
}
