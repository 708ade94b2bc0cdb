//! Expert parallelism: rows of tokens in blocks, one for every part of the experts, and matmuls of blocks.
//!
//! Blocks are `parts rows`: the parts of the experts, one to a rank along ep, and rows from all ranks that have tokens, as many from
//! each. A rank fills its rows of every block; an all-to-all makes of them all rows of its block. Sizes are those of a bound, known
//! when a program is compiled: rows that no token fills are zeros, and no expert's.
//!
//! A row beyond the bound is counted, and is NaN when it comes back, which suppresses the update.

use super::cost::CostRule;
use super::row::{FlopsRule, ShapeRule, Spec, accumulator, f64, float, row, u32};
use super::sample::{Draw, Shapes, embed, ffn, normal, sample};
use super::{Cost, Dims, Flops, Matmuls, Op, Saved::Input, TypeError, attributes};
use crate::{Axis, DType, Dim, TensorType};

/// The place of a choice that has no row, and the expert of a row that no token fills.
pub const NO_ROW: u32 = u32::MAX;

/// Blocks of rows that go to experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Parts of the experts, as many of them in each.
    pub parts: usize,
    /// Rows of a block for what one rank sends to it.
    pub rows: usize,
    /// Rows that a rank sends to all blocks: choices of its tokens.
    pub choices: usize,
    /// Ranks that have tokens of their own, of which the shapes speak.
    pub ranks: usize,
}

impl Blocks {
    /// The same where shapes speak of one rank.
    fn of_one_rank(self) -> Self {
        Self { ranks: 1, ..self }
    }

    fn bind(self, op: &Op, dims: &mut Dims) -> Result<(), TypeError> {
        op.ask(dims, "parts", Dim::new(Axis::Parts, self.parts))?;
        op.ask(dims, "rows", Dim::new(Axis::Rows, self.rows * self.ranks))
    }

    /// Of this many rows of blocks, those that tokens fill.
    pub fn filled(self, rows: u64) -> u64 {
        (u128::from(rows) * self.choices as u128 / (self.parts * self.rows).max(1) as u128) as u64
    }
}

const SHAPE: ShapeRule = |op, _, dims| blocks(op).bind(op, dims);

pub(super) const MATMUL: FlopsRule =
    |op, dims, _| Flops::all(2 * u128::from(filled(op, dims)) * dims.product("outputs inputs"));

/// Rows that tokens fill, if choices are even.
pub(super) fn filled(op: &Op, dims: &Dims) -> u64 {
    blocks(op).filled(dims.product("parts rows") as u64)
}

/// The blocks that an op is about.
fn blocks(op: &Op) -> Blocks {
    let (Op::ExpertSlots { blocks, .. }
    | Op::SendRows { blocks, .. }
    | Op::TakeRows { blocks }
    | Op::RowsLinear { blocks }
    | Op::RowsGradInput { blocks }
    | Op::RowsGradWeight { blocks, .. }
    | Op::Fp8Rows { blocks, .. }
    | Op::Fp8RowsGradWeight { blocks, .. }) = *op
    else {
        unreachable!("{} in the row of another op", op.name())
    };
    blocks
}

impl Op {
    /// Refuses experts that do not come in equal parts.
    pub(super) fn even_parts(&self, dims: &Dims) -> Result<(), TypeError> {
        let (experts, parts) = (dims.size("experts"), dims.size("parts"));
        match parts > 0 && experts.is_multiple_of(parts) {
            true => Ok(()),
            false => Err(self.refuse(format!("{experts} experts in {parts} parts"))),
        }
    }
}

const PARTS: usize = 3;
const EACH: usize = 4;
/// No block of a sample is full.
const BLOCKS: Blocks = Blocks { parts: PARTS, rows: 600, choices: 180, ranks: 1 };
/// All of them are.
const FULL: Blocks = Blocks { rows: 8, ..BLOCKS };

fn choices() -> Dim {
    Dim::new(Axis::Choices, 3)
}

/// Blocks of one rank's rows of this many features.
fn rows(Blocks { parts, rows, .. }: Blocks, features: Dim) -> (TensorType, Draw) {
    normal([Dim::new(Axis::Parts, parts), Dim::new(Axis::Rows, rows), features])
}

/// The places of all choices.
fn places(batch: usize, draw: Draw) -> (TensorType, Draw) {
    (TensorType::new(DType::U32, Shapes::new(batch).act(choices()).dims), draw)
}

/// Sizes of a matmul of blocks: odd ones, and such that tensor cores take.
pub(super) struct Grouped {
    pub blocks: Blocks,
    pub experts: usize,
    pub embed: Dim,
    pub ffn: Dim,
}

impl Grouped {
    /// Such that matrix units take bytes.
    pub(super) fn of_bytes() -> Self {
        let blocks = Blocks { parts: 1, rows: 400, choices: 300, ranks: 1 };
        Self { blocks, experts: EACH, embed: Dim::new(Axis::Embed, 256), ffn: Dim::new(Axis::Ffn, 384) }
    }

    pub(super) fn all() -> [Self; 2] {
        let odd = Blocks { rows: 40, choices: 90, ..BLOCKS };
        let one = Blocks { parts: 1, rows: 400, choices: 300, ranks: 1 };
        let (wide, narrow) = (Dim::new(Axis::Embed, 320), Dim::new(Axis::Ffn, 192));
        [
            Self { blocks: odd, experts: PARTS * EACH, embed: embed(), ffn: ffn() },
            Self { blocks: one, experts: EACH, embed: wide, ffn: narrow },
        ]
    }

    pub(super) fn stack(&self) -> (TensorType, Draw) {
        normal([Dim::new(Axis::Experts, self.experts), self.ffn.clone(), self.embed.clone()])
    }

    pub(super) fn rows(&self, features: &Dim) -> (TensorType, Draw) {
        rows(self.blocks, features.clone())
    }

    /// The experts of rows; every fifth row has none.
    pub(super) fn owners(&self) -> (TensorType, Draw) {
        let (ty, _) = rows(self.blocks, Dim::new(Axis::Scalar, 1));
        (TensorType::new(DType::U32, &ty.dims[..2]), Draw::Below(EACH as u32 + 1))
    }
}

pub(super) static EXPERT_SLOTS: Spec = row(
    "expert_slots",
    &[u32("chosen", "batch seq choices")],
    &[u32("slots", "batch seq choices"), u32("owners", "parts rows"), f64("beyond", "batch")],
    |batch| {
        let of = |blocks| {
            let op = Op::ExpertSlots { experts: PARTS * EACH, blocks };
            sample(op, [places(batch, Draw::Below((PARTS * EACH) as u32))])
        };
        [BLOCKS, FULL].map(of).into()
    },
)
.always_made(&[0])
.gradient(&[])
.splits(&["batch rows", "seq rows"])
.same_over_tp(&["seq rows"])
.shape(|op, _, dims| {
    attributes!(op, Op::ExpertSlots { experts, blocks });
    blocks.bind(op, dims)?;
    op.ask(dims, "experts", Dim::new(Axis::Experts, experts))?;
    op.even_parts(dims)
})
.local(|op, _| {
    attributes!(op, Op::ExpertSlots { experts, blocks });
    Op::ExpertSlots { experts, blocks: blocks.of_one_rank() }
});

pub(super) static SEND_ROWS: Spec = row(
    "send_rows",
    &[float("x", "batch seq features"), u32("slots", "batch seq choices")],
    &[float("rows", "parts rows features")],
    |batch| {
        let places = places(batch, Draw::Places((PARTS * BLOCKS.rows) as u32));
        vec![sample(Op::SendRows { each: false, blocks: BLOCKS }, [Shapes::new(batch).normal(embed()), places])]
    },
)
.gradient(&[Input(1)])
.splits(&["batch rows", "seq rows", "features"])
.same_over_tp(&["seq rows"])
.shape(SHAPE)
.local(|op, _| Op::SendRows { each: false, blocks: blocks(op).of_one_rank() });

pub(super) static SEND_ROWS_EACH: Spec = row(
    "send_rows_each",
    &[float("x", "batch seq choices features"), u32("slots", "batch seq choices")],
    &[float("rows", "parts rows features")],
    |batch| {
        let places = places(batch, Draw::Places((PARTS * BLOCKS.rows) as u32));
        let mut each = Shapes::new(batch).act(choices());
        each.dims.push(embed());
        vec![sample(Op::SendRows { each: true, blocks: BLOCKS }, [(each, Draw::Normal), places])]
    },
)
.splits(&["batch rows", "seq rows", "features"])
.same_over_tp(&["seq rows"])
.shape(SHAPE)
.local(|op, _| Op::SendRows { each: true, blocks: blocks(op).of_one_rank() });

pub(super) static TAKE_ROWS: Spec = row(
    "take_rows",
    &[float("rows", "parts rows features"), u32("slots", "batch seq choices")],
    &[float("y", "batch seq choices features")],
    |batch| {
        let places = places(batch, Draw::Below((PARTS * BLOCKS.rows) as u32));
        vec![sample(Op::TakeRows { blocks: BLOCKS }, [rows(BLOCKS, embed()), places])]
    },
)
.gradient(&[Input(1)])
.splits(&["batch rows", "seq rows", "features"])
.same_over_tp(&["seq rows"])
.keeps_partial()
.shape(SHAPE)
.local(|op, _| Op::TakeRows { blocks: blocks(op).of_one_rank() });

pub(super) static ROWS_LINEAR: Spec = row(
    "rows_linear",
    &[float("x", "parts rows inputs"), float("w", "experts outputs inputs"), u32("owners", "parts rows")],
    &[float("y", "parts rows outputs")],
    |_| {
        let of = |g: &Grouped| sample(Op::RowsLinear { blocks: g.blocks }, [g.rows(&g.embed), g.stack(), g.owners()]);
        Grouped::all().iter().map(of).collect()
    },
)
.gradient(&[Input(0), Input(1), Input(2)])
.product()
.splits(&["rows", "parts experts", "outputs", "inputs"])
.shape(|op, _, dims| op.even_parts(dims))
.chunks()
.flops(MATMUL)
.multiplies(&[0, 1], FORWARD);

/// As one matmul of all filled rows.
pub(super) const FORWARD: CostRule =
    |op, dims, _| Cost::Matmul(Matmuls::one(filled(op, dims), dims.size("outputs") as u64, dims.size("inputs") as u64));

pub(super) static ROWS_GRAD_INPUT: Spec = row(
    "rows_grad_input",
    &[float("dy", "parts rows outputs"), float("w", "experts outputs inputs"), u32("owners", "parts rows")],
    &[float("dx", "parts rows inputs")],
    |_| {
        let of = |g: &Grouped| sample(Op::RowsGradInput { blocks: g.blocks }, [g.rows(&g.ffn), g.stack(), g.owners()]);
        Grouped::all().iter().map(of).collect()
    },
)
.product()
.splits(&["rows", "parts experts", "outputs", "inputs"])
.shape(|op, _, dims| op.even_parts(dims))
.chunks()
.flops(MATMUL)
.multiplies(&[0, 1], |op, dims, _| {
    Cost::Matmul(Matmuls::one(filled(op, dims), dims.size("inputs") as u64, dims.size("outputs") as u64))
});

pub(super) static ROWS_GRAD_WEIGHT: Spec = row(
    "rows_grad_weight",
    &[float("dy", "parts rows outputs"), float("x", "parts rows inputs"), u32("owners", "parts rows")],
    &[accumulator("dw", "experts outputs inputs")],
    |_| {
        let of = |g: &Grouped| {
            let op = Op::RowsGradWeight { experts: g.experts, blocks: g.blocks };
            sample(op, [g.rows(&g.ffn), g.rows(&g.embed), g.owners()])
        };
        Grouped::all().iter().map(of).collect()
    },
)
.sums(0)
.product()
.splits(&["rows", "parts experts", "outputs", "inputs"])
.shape(|op, _, dims| {
    attributes!(op, Op::RowsGradWeight { experts, .. });
    op.ask(dims, "experts", Dim::new(Axis::Experts, experts))?;
    op.even_parts(dims)
})
.local(|op, outputs| {
    attributes!(op, Op::RowsGradWeight { blocks, .. });
    Op::RowsGradWeight { experts: first_size(outputs), blocks }
})
.flops(MATMUL)
.multiplies(&[0, 1], WEIGHTS);

/// The size of the first output's first dimension.
pub(super) fn first_size(outputs: &[Option<TensorType>]) -> usize {
    outputs.first().and_then(|dw| dw.as_ref()).map_or(0, |dw| dw.dims[0].size())
}

/// As many matmuls as experts, each over its share of the filled rows.
pub(super) const WEIGHTS: CostRule =
    |op, dims, call| Cost::Matmul(Matmuls::of_weights(dims.size("experts") as u64, dims, filled(op, dims), call));
