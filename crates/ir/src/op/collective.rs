//! What ranks do together, and this rank's part of a whole.

use super::row::{Operand, RunBy, Samples, Spec, any, row};
use super::sample::{embed, ffn, normal, sample};
use super::{Op, Sample, attributes};
use crate::{MeshAxis, Placement, Sharding};

/// A row of an op that changes the sharding of tensors, several at once.
const fn collective(name: &'static str, reshards: fn(&Op, Sharding) -> Sharding, samples: Samples) -> Spec {
    const X: &[Operand] = &[any("x")];
    row(name, X, X, samples).variadic().run_by(RunBy::Collective).reshards(reshards).keeps_partial()
}

/// Two tensors at once.
fn two(op: Op) -> Sample {
    sample(op, [normal([ffn(), embed()]), normal([embed()])])
}

pub(super) static ALL_REDUCE: Spec = collective(
    "all_reduce",
    |op, before| {
        attributes!(op, Op::AllReduce { axis });
        before.with(axis, Placement::Replicated)
    },
    |_| vec![two(Op::AllReduce { axis: MeshAxis::Tp })],
)
.in_place(&[(0, 0)]);

pub(super) static SUM_SHARED: Spec =
    collective("sum_shared", |_, before| before, |_| vec![two(Op::SumShared { sharers: 2 })])
        .always_in_place(&[(0, 0)]);

pub(super) static REDUCE_SCATTER: Spec = collective(
    "reduce_scatter",
    |op, before| {
        attributes!(op, Op::ReduceScatter { axis, dim });
        before.with(axis, dim.map_or(Placement::Flat, Placement::Split))
    },
    |_| [None, Some(0)].map(|dim| two(Op::ReduceScatter { axis: MeshAxis::Dp, dim })).into(),
);

pub(super) static ALL_GATHER: Spec = collective(
    "all_gather",
    |op, before| {
        attributes!(op, Op::AllGather { axis, .. });
        before.with(axis, Placement::Replicated)
    },
    |_| [None, Some(0)].map(|dim| two(Op::AllGather { axis: MeshAxis::Dp, dim })).into(),
);

pub(super) static SHARD: Spec = row("shard", &[any("x")], &[any("part")], |_| {
    vec![sample(Op::Shard { axis: MeshAxis::Dp }, [normal([ffn(), embed()])])]
})
.run_by(RunBy::View)
.reshards(|op, before| {
    attributes!(op, Op::Shard { axis });
    before.with(axis, Placement::Flat)
});

pub(super) static SEND: Spec =
    row("send", &[any("x")], &[], |_| vec![sample(Op::Send { stage: 1, tag: 0 }, [normal([ffn(), embed()])])])
        .run_by(RunBy::Message)
        .keeps_partial();

pub(super) static RECEIVE: Spec =
    row("receive", &[], &[any("x")], |_| vec![sample(Op::Receive { stage: 1, tag: 0 }, [])]).run_by(RunBy::Message);
