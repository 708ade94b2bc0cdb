//! What ranks do together, and this rank's part of a whole.
//!
//! A collective takes several tensors at once (`Spec::each`), so that the gradients of a layer are one call.

use super::row::{Operand, RunBy, Samples, ShardingRule, Spec, TransferOf, any, row};
use super::sample::{embed, ffn, normal, sample};
use super::{Cost, Op, Sample, attributes};
use crate::{Axes, MeshAxis, Placement, Sharding};

/// What ranks do together, as those see it who carry it out or count its bytes: every such op is one of these.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Transfer {
    /// [`Op::AllReduce`]
    AllReduce {
        /// Over the ranks along these axes.
        over: Axes,
    },
    /// [`Op::SumShared`]
    SumShared {
        /// Neighbours along these axes.
        over: Axes,
        /// How many share.
        sharers: usize,
    },
    /// [`Op::ReduceScatter`]
    ReduceScatter {
        /// Over the ranks along these axes.
        over: Axes,
        /// Parts of this dimension; flat ranges if `None`.
        dim: Option<usize>,
    },
    /// [`Op::AllGather`]
    AllGather {
        /// Over the ranks along these axes.
        over: Axes,
        /// Parts of this dimension; flat ranges if `None`.
        dim: Option<usize>,
    },
    /// [`Op::Shift`]
    Shift {
        /// Over the ranks along these axes.
        over: Axes,
    },
    /// [`Op::AllToAll`]
    AllToAll {
        /// Over the ranks along these axes.
        over: Axes,
        /// Of this dimension ranks had parts, and have it whole.
        from: usize,
        /// Of this one they had all, and have parts.
        to: usize,
    },
    /// [`Op::Send`]
    Send {
        /// The stage.
        stage: usize,
        /// Which stream of messages.
        tag: u32,
    },
    /// [`Op::Receive`]
    Receive {
        /// The stage.
        stage: usize,
        /// Which stream of messages.
        tag: u32,
    },
}

impl Transfer {
    /// The axes along which ranks work together.
    pub fn over(&self) -> Axes {
        match *self {
            Transfer::AllReduce { over }
            | Transfer::SumShared { over, .. }
            | Transfer::ReduceScatter { over, .. }
            | Transfer::AllGather { over, .. }
            | Transfer::Shift { over }
            | Transfer::AllToAll { over, .. } => over,
            Transfer::Send { .. } | Transfer::Receive { .. } => MeshAxis::Pp.into(),
        }
    }
}

/// A row of an op that changes the sharding of tensors, several at once.
const fn collective(name: &'static str, transfer: TransferOf, reshards: ShardingRule, samples: Samples) -> Spec {
    const X: &[Operand] = &[any("x")];
    row(name, X, X, samples).variadic().run_by(RunBy::Collective(transfer)).reshards(reshards).keeps_partial()
}

/// Two tensors at once.
fn two(op: Op) -> Sample {
    sample(op, [normal([ffn(), embed()]), normal([embed()])])
}

/// Whether it is placed so over all these axes.
pub(super) fn all(sharding: Sharding, over: Axes, placement: Placement) -> bool {
    over.without(sharding.axes(placement)).is_empty()
}

/// A part of this dimension, or a flat range.
fn part(dim: Option<usize>) -> Placement {
    dim.map_or(Placement::Flat, Placement::Split)
}

/// Ranges are cut and joined over all axes at once, parts of a dimension from the last axis on; those over cp, which are in an order of
/// their own, alone.
pub(super) fn last(sharding: Sharding, over: Axes, dim: Option<usize>) -> bool {
    let rest = sharding.axes(part(dim)).without(over);
    if dim.is_some() && over.contains(MeshAxis::Cp) && over != MeshAxis::Cp.into() {
        return false;
    }
    dim.map_or(rest.is_empty(), |_| rest.iter().all(|outer| over.iter().all(|inner| outer < inner)))
}

pub(super) static ALL_REDUCE: Spec = collective(
    "all_reduce",
    |op| {
        attributes!(op, Op::AllReduce { over });
        Transfer::AllReduce { over }
    },
    |op, before| {
        attributes!(op, Op::AllReduce { over });
        all(before, over, Placement::Partial).then(|| before.with(over, Placement::Replicated))
    },
    |_| vec![two(Op::AllReduce { over: MeshAxis::Tp.into() })],
)
.in_place(&[(0, 0)]);

pub(super) static SUM_SHARED: Spec = collective(
    "sum_shared",
    |op| {
        attributes!(op, Op::SumShared { over, sharers });
        Transfer::SumShared { over, sharers }
    },
    |op, before| {
        attributes!(op, Op::SumShared { over, .. });
        all(before, over, Placement::Split(0)).then_some(before)
    },
    |_| vec![two(Op::SumShared { over: MeshAxis::Tp.into(), sharers: 2 })],
)
.always_in_place(&[(0, 0)]);

pub(super) static REDUCE_SCATTER: Spec = collective(
    "reduce_scatter",
    |op| {
        attributes!(op, Op::ReduceScatter { over, dim });
        Transfer::ReduceScatter { over, dim }
    },
    |op, before| {
        attributes!(op, Op::ReduceScatter { over, dim });
        let fits = all(before, over, Placement::Partial) && last(before, over, dim);
        fits.then(|| before.with(over, part(dim)))
    },
    |_| [None, Some(0)].map(|dim| two(Op::ReduceScatter { over: MeshAxis::DpShard.into(), dim })).into(),
);

pub(super) static ALL_GATHER: Spec = collective(
    "all_gather",
    |op| {
        attributes!(op, Op::AllGather { over, dim });
        Transfer::AllGather { over, dim }
    },
    |op, before| {
        attributes!(op, Op::AllGather { over, dim });
        let fits = all(before, over, part(dim)) && last(before, over, dim);
        fits.then(|| before.with(over, Placement::Replicated))
    },
    |_| [None, Some(0)].map(|dim| two(Op::AllGather { over: MeshAxis::DpShard.into(), dim })).into(),
);

pub(super) static SHIFT: Spec = collective(
    "shift",
    |op| {
        attributes!(op, Op::Shift { over });
        Transfer::Shift { over }
    },
    // The tensor is what it was; other context-parallel ranks have its parts.
    |op, before| {
        attributes!(op, Op::Shift { over });
        let parted = matches!(before.over(MeshAxis::Cp), Placement::Split(_));
        (over == MeshAxis::Cp.into() && parted).then_some(before)
    },
    |_| vec![two(Op::Shift { over: MeshAxis::Cp.into() })],
);

pub(super) static ALL_TO_ALL: Spec = collective(
    "all_to_all",
    |op| {
        attributes!(op, Op::AllToAll { over, from, to });
        Transfer::AllToAll { over, from, to }
    },
    |op, before| {
        attributes!(op, Op::AllToAll { over, from, to });
        let free = last(before, over, Some(from)) && last(before, over, Some(to));
        let fits = from != to && all(before, over, Placement::Split(from)) && free;
        fits.then(|| before.with(over, Placement::Split(to)))
    },
    |_| vec![two(Op::AllToAll { over: MeshAxis::Ep.into(), from: 0, to: 1 })],
);

pub(super) static SHARD: Spec = row("shard", &[any("x")], &[any("part")], |_| {
    vec![sample(Op::Shard { over: MeshAxis::DpShard.into() }, [normal([ffn(), embed()])])]
})
.run_by(RunBy::View)
.cost(|_, _, _| Cost::Nothing)
.reshards(|op, before| {
    attributes!(op, Op::Shard { over });
    let fits = all(before, over, Placement::Replicated) && last(before, over, None);
    fits.then(|| before.with(over, Placement::Flat))
});

pub(super) static SEND: Spec =
    row("send", &[any("x")], &[], |_| vec![sample(Op::Send { stage: 1, tag: 0 }, [normal([ffn(), embed()])])])
        .run_by(RunBy::Message(|op| {
            attributes!(op, Op::Send { stage, tag });
            Transfer::Send { stage, tag }
        }))
        .keeps_partial();

pub(super) static RECEIVE: Spec =
    row("receive", &[], &[any("x")], |_| vec![sample(Op::Receive { stage: 1, tag: 0 }, [])]).run_by(RunBy::Message(
        |op| {
            attributes!(op, Op::Receive { stage, tag });
            Transfer::Receive { stage, tag }
        },
    ));
