//! What a group of ranks does together, whoever carries it out, counts it or times it.

use crate::op::Transfer;
use crate::program::{Arg, Instr};
use std::fmt;

/// What ranks send each other in a collective.
#[derive(Clone, Copy)]
pub enum Movement {
    /// The sum of whole tensors, to all.
    SumsWhole,
    /// Each rank's part of the sum.
    SumsParts,
    /// Parts become the whole, in the order of the ranks or in zig-zag.
    Gathers,
    /// Copies of parts, by this rule: the part of the output of `to` that a part of the input of `from` becomes, in a group
    /// of `n`.
    Copies(fn(n: usize, from: usize, to: usize) -> Option<CopiedPart>),
}

/// A part that goes from one rank to another, or stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopiedPart {
    /// Which of the parts of the sender's input.
    pub input: usize,
    /// Which of the parts of the receiver's output.
    pub output: usize,
}

/// The only part of an input becomes the only part of an output.
const ONLY: Option<CopiedPart> = Some(CopiedPart { input: 0, output: 0 });

/// How much of a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// All of it.
    Whole,
    /// As much as one of the ranks has of it.
    Part,
}
use Extent::{Part, Whole};

/// What of a collective its readers ask for.
#[derive(Clone, Copy)]
struct Facts {
    movement: Movement,
    /// What a rank gives, what it gets, and what a [piece](Collective::parts) of it is.
    extents: [Extent; 3],
    /// Bytes that each rank's link carries for every byte of the larger of input and output, by the number of ranks.
    bus_factor: fn(f64) -> f64,
}

/// Every collective, a line each: its meaning, its name in messages and tables, and its facts.
macro_rules! collectives {
    ($($(#[$doc:meta])+ $Variant:ident = $name:literal, $movement:expr, $extents:expr, $bus_factor:expr;)+) => {
        /// What a group of ranks does together.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Collective {
            $($(#[$doc])+ $Variant,)+
        }

        impl Collective {
            /// All of them.
            pub const ALL: [Collective; [$($name),+].len()] = [$(Collective::$Variant),+];

            /// The name in messages and tables.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Collective::$Variant => $name,)+
                }
            }

            const fn facts(self) -> Facts {
                match self {
                    $(Collective::$Variant => {
                        Facts { movement: $movement, extents: $extents, bus_factor: $bus_factor }
                    })+
                }
            }
        }
    };
}

collectives! {
    /// Every rank gets the sum of all tensors.
    AllReduce = "all_reduce", Movement::SumsWhole, [Whole, Whole, Whole], |n| 2.0 * (n - 1.0) / n;
    /// The i-th rank of the group gets the i-th part of the sum.
    ReduceScatter = "reduce_scatter", Movement::SumsParts, [Whole, Part, Part], |n| (n - 1.0) / n;
    /// Every rank gets all tensors, in the order of the group.
    AllGather = "all_gather", Movement::Gathers, [Part, Whole, Part], |n| (n - 1.0) / n;
    /// Every rank gets the tensor of the rank before it in the group, the first that of the last.
    Shift = "shift", Movement::Copies(|n, from, to| ONLY.filter(|_| (from + 1) % n == to)), [Part, Part, Part], |_| 1.0;
    /// The i-th part of every rank's tensor goes to the i-th rank of the group, which has them in the order of the group.
    AllToAll = "all_to_all", Movement::Copies(|_, from, to| Some(CopiedPart { input: to, output: from })),
        [Whole, Whole, Part], |n| (n - 1.0) / n;
}

impl Collective {
    /// What ranks send each other.
    pub const fn movement(self) -> Movement {
        self.facts().movement
    }

    /// Whether it adds.
    pub const fn sums(self) -> bool {
        matches!(self.movement(), Movement::SumsWhole | Movement::SumsParts)
    }

    /// How many pieces the input and the output of a rank have in a group of `n`, and the whole tensor: 1 or `n` each.
    pub fn parts(self, n: usize) -> [usize; 3] {
        let [input, output, piece] = self.facts().extents;
        [input, output, Whole].map(|extent| if extent == piece { 1 } else { n })
    }

    /// The bytes that each rank's link carries for every byte of the larger of its input and output.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        (self.facts().bus_factor)(ranks as f64)
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
                let shared = instr.inputs.iter().map(|a| a.ty.bytes() - a.ty.unshared_bytes()).sum::<u64>();
                (shared, shared * 2 * (n - 1) / n)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_go_where_the_definitions_say() {
        let moved = |kind: Collective| {
            let Movement::Copies(rule) = kind.movement() else { panic!("{kind} does not copy") };
            let pairs = (0..3).flat_map(|from| (0..3).map(move |to| (from, to)));
            let copied =
                pairs.filter_map(|(from, to)| rule(3, from, to).map(|part| (from, part.input, to, part.output)));
            copied.collect::<Vec<_>>()
        };
        // Sender and part of its input, receiver and part of its output.
        assert_eq!(moved(Collective::Shift), [(0, 0, 1, 0), (1, 0, 2, 0), (2, 0, 0, 0)]);
        let all: Vec<_> = (0..3).flat_map(|from| (0..3).map(move |to| (from, to, to, from))).collect();
        assert_eq!(moved(Collective::AllToAll), all);
    }
}
