//! Mixtures of experts (MoE): the router's choice, and matmuls whose weights are those of the experts that a token goes to.
//!
//! What experts compute stays with its token: `…` are tokens and `choices` the experts of each, the best first. Kernels sort rows by expert
//! for themselves, so that no shape depends on how many tokens an expert gets, and none of them needs a bound.

use super::cost::CostRule;
use super::row::{FlopsRule, Spec, accumulator, f32, f64, float, row, u32};
use super::sample::{Draw, Shapes, embed, ffn, floats, normal, sample, scalars};
use super::{Cost, Dims, Flops, Matmuls, Op, Saved::Input, Saved::Output, TypeError, attributes};
use crate::{Axis, DType, Dim, TensorType};

/// What the router makes of its logits before it chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    /// Softmax over all experts.
    Softmax,
    /// A sigmoid of each.
    Sigmoid,
}

/// How the router chooses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Experts of a token (top-k).
    pub choices: usize,
    /// What it chooses by.
    pub score: Score,
    /// Whether the scores of the chosen are divided by their sum.
    pub normalise: bool,
    /// Times this.
    pub scale: f32,
    /// Groups of experts, side by side, that are chosen first: with sigmoid scores those whose two best experts have the highest sum of
    /// scores (DeepSeek-V3), with softmax those with the best expert (DeepSeek-V2). One where experts are chosen freely.
    pub groups: usize,
    /// Groups that a token may use.
    pub top_groups: usize,
}

impl Routing {
    /// Top-k of softmax scores, normalised.
    pub const fn top(choices: usize) -> Self {
        Self { choices, score: Score::Softmax, normalise: true, scale: 1.0, groups: 1, top_groups: 1 }
    }

    /// Binds the experts of a token, or says why they cannot be chosen.
    fn bind(&self, op: &Op, dims: &mut Dims) -> Result<(), TypeError> {
        let experts = dims.size("experts");
        let &Self { choices, groups, top_groups, .. } = self;
        if groups == 0 || !experts.is_multiple_of(groups) || !(1..=groups).contains(&top_groups) {
            return Err(op.refuse(format!("{top_groups} of {groups} groups of {experts} experts")));
        }
        if groups > 1 && experts / groups < 2 {
            return Err(op.refuse(format!("{groups} groups of {experts} experts: a group has two at least")));
        }
        if choices == 0 || choices > experts / groups * top_groups {
            return Err(op.refuse(format!("{choices} of {} experts", experts / groups * top_groups)));
        }
        op.ask(dims, "choices", Dim::new(Axis::Choices, choices))
    }
}

const EXPERTS: usize = 12;

fn experts() -> Dim {
    Dim::new(Axis::Experts, EXPERTS)
}

fn choices() -> Dim {
    Dim::new(Axis::Choices, 3)
}

/// Ways to choose, as families have them.
fn ways() -> [Routing; 4] {
    let top = Routing::top(3);
    [
        top,
        Routing { normalise: false, ..top },
        Routing { score: Score::Sigmoid, scale: 2.5, groups: 4, top_groups: 2, ..top },
        Routing { normalise: false, scale: 2.5, groups: 4, top_groups: 2, ..top },
    ]
}

/// Of every expert of a token this many features.
fn each(s: &Shapes, features: Dim) -> (TensorType, Draw) {
    let mut ty = s.act(choices());
    ty.dims.push(features);
    (ty, Draw::Normal)
}

/// The experts of every token.
fn chosen(s: &Shapes) -> (TensorType, Draw) {
    (TensorType::new(DType::U32, s.act(choices()).dims), Draw::Below(EXPERTS as u32))
}

/// Tokens and weights of a grouped matmul: at odd sizes, and in blocks that tensor cores take, where two of three experts get all
/// tokens.
pub(super) struct Grouped {
    tokens: Shapes,
    pub embed: Dim,
    pub ffn: Dim,
    pub experts: usize,
    busy: u32,
}

impl Grouped {
    /// Such that matrix units take bytes, and some that they do not.
    pub(super) fn of_bytes(batch: usize) -> [Self; 2] {
        let of = |embed, ffn, experts, busy| {
            let (embed, ffn) = (Dim::new(Axis::Embed, embed), Dim::new(Axis::Ffn, ffn));
            Self { tokens: Shapes::new(batch), embed, ffn, experts, busy }
        };
        [of(80, 48, EXPERTS, EXPERTS as u32), of(384, 256, 3, 2)]
    }

    pub(super) fn all(batch: usize) -> Vec<Self> {
        let odd = |tokens| Self { tokens, embed: embed(), ffn: ffn(), experts: EXPERTS, busy: EXPERTS as u32 };
        let (wide, ffn) = (Dim::new(Axis::Embed, 320), Dim::new(Axis::Ffn, 192));
        let blocks = Self { tokens: Shapes::new(batch), embed: wide, ffn, experts: 3, busy: 2 };
        Shapes::any_leading(batch).map(odd).into_iter().chain([blocks]).collect()
    }

    /// Weights of every expert.
    pub(super) fn stack(&self) -> (TensorType, Draw) {
        normal([Dim::new(Axis::Experts, self.experts), self.ffn.clone(), self.embed.clone()])
    }

    /// One row of a token.
    pub(super) fn x(&self) -> (TensorType, Draw) {
        self.tokens.normal(self.embed.clone())
    }

    /// A row of each of a token's experts.
    pub(super) fn each(&self, features: &Dim) -> (TensorType, Draw) {
        each(&self.tokens, features.clone())
    }

    pub(super) fn chosen(&self) -> (TensorType, Draw) {
        (chosen(&self.tokens).0, Draw::Below(self.busy))
    }
}

/// One matmul for every expert of a token.
pub(super) const MATMUL: FlopsRule = |_, dims, _| Flops::all(2 * dims.product("… choices outputs inputs"));

/// As one matmul of all rows.
pub(super) const FORWARD: CostRule = |_, dims, _| Cost::Matmul(Matmuls::of(dims, "… choices", "outputs", "inputs"));

/// As many matmuls as experts, each over its share of the rows.
pub(super) const WEIGHTS: CostRule = |_, dims, call| {
    Cost::Matmul(Matmuls::of_weights(dims.size("experts") as u64, dims, dims.product("… choices") as u64, call))
};

pub(super) static ROUTE: Spec = row(
    "route",
    &[f32("logits", "… experts"), f32("bias", "experts")],
    &[f32("weights", "… choices"), u32("chosen", "… choices")],
    |batch| {
        let of = |(s, how): (Shapes, Routing)| sample(Op::Route { given: false, how }, [s.normal(experts())]);
        let biased =
            |how| sample(Op::Route { given: false, how }, [Shapes::new(batch).normal(experts()), normal([experts()])]);
        Shapes::any_leading(batch).into_iter().zip(ways()).map(of).chain(ways().map(biased)).collect()
    },
)
.optional(1)
.gradient(&[Input(0), Output(1)])
.splits(&["…"])
.shape(|op, _, dims| {
    attributes!(op, Op::Route { how, .. });
    how.bind(op, dims)
});

pub(super) static ROUTE_TO: Spec = row(
    "route_to",
    &[f32("logits", "… experts"), u32("given", "… choices")],
    &[f32("weights", "… choices"), u32("chosen", "… choices")],
    |batch| {
        let of =
            |(s, how): (Shapes, Routing)| sample(Op::Route { given: true, how }, [s.normal(experts()), chosen(&s)]);
        Shapes::any_leading(batch).into_iter().zip(ways()).map(of).collect()
    },
)
.gradient(&[Input(0), Output(1)])
.splits(&["…"])
.shape(|op, _, dims| {
    attributes!(op, Op::Route { how, .. });
    how.bind(op, dims)
});

pub(super) static ROUTE_GRAD: Spec = row(
    "route_grad",
    &[f32("dweights", "… choices"), f32("logits", "… experts"), u32("chosen", "… choices")],
    &[f32("dlogits", "… experts")],
    |batch| {
        let of = |(s, how): (Shapes, Routing)| {
            let chosen = (
                TensorType::new(DType::U32, s.act(choices()).dims),
                Draw::Of(Op::Route { given: false, how }, 1, &[1]),
            );
            sample(Op::RouteGrad { how }, [s.normal(choices()), s.normal(experts()), chosen])
        };
        Shapes::any_leading(batch).into_iter().zip(ways()).map(of).collect()
    },
)
.splits(&["…"])
.shape(|op, _, dims| {
    attributes!(op, Op::RouteGrad { how });
    how.bind(op, dims)
});

pub(super) static EXPERT_COUNTS: Spec =
    row("expert_counts", &[u32("chosen", "batch seq choices")], &[f32("counts", "batch experts")], |batch| {
        vec![sample(Op::ExpertCounts { experts: EXPERTS }, [chosen(&Shapes::new(batch))])]
    })
    .gradient(&[])
    .splits(&["batch", "seq"])
    .shape(|op, _, dims| {
        attributes!(op, Op::ExpertCounts { experts });
        op.ask(dims, "experts", Dim::new(Axis::Experts, experts))
    });

/// How many tokens of each sequence every expert gets.
fn counts(s: &Shapes) -> (TensorType, Draw) {
    (floats([s.b(), experts()]), Draw::Positive)
}

pub(super) static ROUTER_LOSS: Spec = row(
    "router_loss",
    &[f32("logits", "batch seq experts"), f32("counts", "batch experts")],
    &[f64("loss", "batch")],
    |batch| {
        let s = Shapes::new(batch);
        vec![sample(Op::RouterLoss { balance: 0.5, z: 0.25 }, [s.normal(experts()), counts(&s)])]
    },
)
.gradient(&[Input(0), Input(1)])
.splits(&["batch", "seq"]);

pub(super) static ROUTER_LOSS_GRAD: Spec = row(
    "router_loss_grad",
    &[f32("logits", "batch seq experts"), f32("counts", "batch experts"), f32("scalars", "scalars")],
    &[f32("dlogits", "batch seq experts")],
    |batch| {
        let s = Shapes::new(batch);
        let op = Op::RouterLossGrad { balance: 0.5, z: 0.25 };
        let scaled = sample(op, [s.normal(experts()), counts(&s), scalars()]);
        vec![sample(op, [s.normal(experts()), counts(&s)]), scaled]
    },
)
.optional(1)
.splits(&["batch", "seq"]);

pub(super) static GROUPED_LINEAR: Spec = row(
    "grouped_linear",
    &[float("x", "… inputs"), float("w", "experts outputs inputs"), u32("chosen", "… choices")],
    &[float("y", "… choices outputs")],
    |batch| {
        let of = |g: &Grouped| sample(Op::GroupedLinear { each: false }, [g.x(), g.stack(), g.chosen()]);
        Grouped::all(batch).iter().map(of).collect()
    },
)
.gradient(&[Input(0), Input(1), Input(2)])
.splits(&["…", "outputs", "inputs"])
.flops(MATMUL)
.multiplies(&[0, 1], FORWARD);

pub(super) static GROUPED_LINEAR_EACH: Spec = row(
    "grouped_linear_each",
    &[float("x", "… choices inputs"), float("w", "experts outputs inputs"), u32("chosen", "… choices")],
    &[float("y", "… choices outputs")],
    |batch| {
        let of = |g: &Grouped| sample(Op::GroupedLinear { each: true }, [g.each(&g.embed), g.stack(), g.chosen()]);
        Grouped::all(batch).iter().map(of).collect()
    },
)
.gradient(&[Input(0), Input(1), Input(2)])
.splits(&["…", "outputs", "inputs"])
.flops(MATMUL)
.multiplies(&[0, 1], FORWARD);

pub(super) static GROUPED_GRAD_INPUT: Spec = row(
    "grouped_grad_input",
    &[float("dy", "… choices outputs"), float("w", "experts outputs inputs"), u32("chosen", "… choices")],
    &[float("dx", "… choices inputs")],
    |batch| {
        let of = |g: &Grouped| sample(Op::GroupedGradInput, [g.each(&g.ffn), g.stack(), g.chosen()]);
        Grouped::all(batch).iter().map(of).collect()
    },
)
.splits(&["…", "outputs", "inputs"])
.flops(MATMUL)
.multiplies(&[0, 1], |_, dims, _| Cost::Matmul(Matmuls::of(dims, "… choices", "inputs", "outputs")));

pub(super) static GROUPED_GRAD_WEIGHT: Spec = row(
    "grouped_grad_weight",
    &[float("dy", "… choices outputs"), float("x", "… inputs"), u32("chosen", "… choices")],
    &[accumulator("dw", "experts outputs inputs")],
    |batch| {
        let op = |g: &Grouped| Op::GroupedGradWeight { each: false, experts: g.experts };
        Grouped::all(batch).iter().map(|g| sample(op(g), [g.each(&g.ffn), g.x(), g.chosen()])).collect()
    },
)
.sums(0)
.splits(&["…", "outputs", "inputs"])
.shape(|op, _, dims| {
    attributes!(op, Op::GroupedGradWeight { experts, .. });
    op.ask(dims, "experts", Dim::new(Axis::Experts, experts))
})
.flops(MATMUL)
.multiplies(&[0, 1], WEIGHTS);

pub(super) static GROUPED_GRAD_WEIGHT_EACH: Spec = row(
    "grouped_grad_weight_each",
    &[float("dy", "… choices outputs"), float("x", "… choices inputs"), u32("chosen", "… choices")],
    &[accumulator("dw", "experts outputs inputs")],
    |batch| {
        let op = |g: &Grouped| Op::GroupedGradWeight { each: true, experts: g.experts };
        Grouped::all(batch).iter().map(|g| sample(op(g), [g.each(&g.ffn), g.each(&g.embed), g.chosen()])).collect()
    },
)
.sums(0)
.splits(&["…", "outputs", "inputs"])
.shape(|op, _, dims| {
    attributes!(op, Op::GroupedGradWeight { experts, .. });
    op.ask(dims, "experts", Dim::new(Axis::Experts, experts))
})
.flops(MATMUL)
.multiplies(&[0, 1], WEIGHTS);

pub(super) static COMBINE: Spec = row(
    "combine",
    &[float("y", "… choices features"), f32("weights", "… choices")],
    &[float("out", "… features")],
    |batch| {
        Shapes::any_leading(batch)
            .map(|s| sample(Op::Combine { weighted: true }, [each(&s, embed()), s.normal(choices())]))
            .into()
    },
)
.gradient(&[Input(0), Input(1)])
.splits(&["…", "features"]);

pub(super) static SUM_CHOICES: Spec =
    row("sum_choices", &[float("y", "… choices features")], &[float("sum", "… features")], |batch| {
        Shapes::any_leading(batch).map(|s| sample(Op::Combine { weighted: false }, [each(&s, embed())])).into()
    })
    .splits(&["…", "features"]);

pub(super) static COMBINE_GRAD: Spec = row(
    "combine_grad",
    &[float("dout", "… features"), float("y", "… choices features"), f32("weights", "… choices")],
    &[float("dy", "… choices features"), f32("dweights", "… choices")],
    |batch| {
        let of = |s: Shapes| sample(Op::CombineGrad, [s.normal(embed()), each(&s, embed()), s.normal(choices())]);
        Shapes::any_leading(batch).map(of).into()
    },
)
.in_place(&[(1, 0)])
.splits(&["…", "features"]);

pub(super) static EXPERT_LOAD: Spec =
    row("expert_load", &[u32("chosen", "… choices")], &[f64("load", "experts")], |batch| {
        Shapes::any_leading(batch).map(|s| sample(Op::ExpertLoad { experts: EXPERTS }, [chosen(&s)])).into()
    })
    .sums(0)
    .splits(&["…"])
    .shape(|op, _, dims| {
        attributes!(op, Op::ExpertLoad { experts });
        op.ask(dims, "experts", Dim::new(Axis::Experts, experts))
    });

/// Tokens of every expert, of this many layers.
fn loads(layers: Option<usize>) -> (TensorType, Draw) {
    let rows = layers.map(|layers| Dim::new(Axis::Scalar, layers));
    (TensorType::new(DType::F64, rows.into_iter().chain([experts()]).collect::<Vec<_>>()), Draw::Below(5))
}

pub(super) static STACK_TOTALS: Spec =
    row("stack_totals", &[f64("total", "entries")], &[f64("totals", "rows entries")], |_| {
        vec![sample(Op::StackTotals, [loads(None), loads(None), loads(None)])]
    })
    .variadic()
    .keeps_partial()
    .shape(|_, inputs, dims| {
        dims.set("rows", &Dim::new(Axis::Scalar, inputs.len()));
        Ok(())
    });

pub(super) static MOVE_BIAS: Spec = row(
    "move_bias",
    &[f32("bias", "experts"), f64("loads", "layers experts"), f32("stats", "stats")],
    &[f32("next", "experts")],
    |_| {
        let stats = (floats([Dim::new(Axis::Scalar, 2)]), Draw::Stats);
        vec![sample(Op::MoveBias { row: 1, rate: 0.125 }, [normal([experts()]), loads(Some(3)), stats])]
    },
)
.in_place(&[(0, 0)])
.shape(|op, _, dims| {
    attributes!(op, Op::MoveBias { row, rate: _ });
    match row < dims.size("layers") {
        true => Ok(()),
        false => Err(op.refuse(format!("row {row} of {}", dims.size("layers")))),
    }
});
