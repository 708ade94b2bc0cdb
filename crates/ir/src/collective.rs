//! What a group of ranks does together, whoever carries it out, counts it or times it.

use crate::op::Transfer;
use crate::program::{Arg, Instr};
use std::fmt;

/// What a group of ranks does together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Collective {
    /// Every rank gets the sum of all tensors.
    AllReduce,
    /// The i-th rank of the group gets the i-th part of the sum.
    ReduceScatter,
    /// Every rank gets all tensors, in the order of the group.
    AllGather,
    /// Every rank gets the tensor of the rank before it in the group, the first that of the last.
    Shift,
    /// The i-th part of every rank's tensor goes to the i-th rank of the group, which has them in the order of the group.
    AllToAll,
}

impl Collective {
    /// All of them.
    pub const ALL: [Collective; 5] = [
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::Shift,
        Collective::AllToAll,
    ];

    /// The name in messages and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllGather => "all_gather",
            Collective::Shift => "shift",
            Collective::AllToAll => "all_to_all",
        }
    }

    /// Whether it adds.
    pub const fn sums(self) -> bool {
        matches!(self, Collective::AllReduce | Collective::ReduceScatter)
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Transfer {
    /// What its ranks do together; `None` for a message between two.
    pub const fn collective(&self) -> Option<Collective> {
        match self {
            Transfer::AllReduce { .. } | Transfer::SumShared { .. } => Some(Collective::AllReduce),
            Transfer::ReduceScatter { .. } => Some(Collective::ReduceScatter),
            Transfer::AllGather { .. } => Some(Collective::AllGather),
            Transfer::Shift { .. } => Some(Collective::Shift),
            Transfer::AllToAll { .. } => Some(Collective::AllToAll),
            Transfer::Send { .. } | Transfer::Receive { .. } => None,
        }
    }

    /// How many neighbours share, of those along its axes; `None` where all of them take part.
    pub const fn sharers(&self) -> Option<usize> {
        match self {
            Transfer::SumShared { sharers, .. } => Some(*sharers),
            _ => None,
        }
    }

    /// The bytes of an instruction's whole tensors, and those of them that each of `n` ranks sends.
    pub fn bytes(&self, instr: &Instr, n: u64) -> (u64, u64) {
        let total = |args: &mut dyn Iterator<Item = &Arg>| args.map(|a| a.ty.bytes()).sum::<u64>();
        let input = total(&mut instr.inputs.iter());
        let output = total(&mut instr.outputs.iter().flatten());
        // A ring passes a part on n − 1 times, twice for an all-reduce.
        match self {
            Transfer::AllReduce { .. } => (input, input * 2 * (n - 1) / n),
            // Neighbours that share a part of a dimension give a share of it each.
            Transfer::AllGather { dim: Some(_), .. } => (output, output / n * (n - 1)),
            Transfer::AllGather { dim: None, .. } => (input * n, input * (n - 1)),
            Transfer::ReduceScatter { .. } => (output * n, output * (n - 1)),
            Transfer::Shift { .. } => (input * n, input),
            // A rank keeps its own part.
            Transfer::AllToAll { .. } => (input, input / n * (n - 1)),
            Transfer::Send { .. } => (input, input),
            Transfer::Receive { .. } => (output, 0),
            Transfer::SumShared { .. } => {
                let shared = instr.inputs.iter().map(|a| a.ty.bytes() - a.ty.first_section_bytes()).sum::<u64>();
                (shared, shared * 2 * (n - 1) / n)
            }
        }
    }
}
