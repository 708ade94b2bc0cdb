//! What ops are tried on: shapes at awkward sizes, and numbers to fill them.

use super::evaluate;
use super::single::{decode, encode};
use crate::reference;
use lockstep_ir::op::{Elem, IGNORED_TARGET};
use lockstep_ir::{Axis, DType, Dim, Op, Section, StepScalars, TensorType, counter, squares};

/// Sizes that differ from case to case.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub(super) batch: usize,
    pub(super) seq: usize,
    pub(super) head_dim: usize,
    /// Of gradients whose norm is taken.
    pub(super) magnitude: f64,
}

/// Positions of the size that libraries take too.
const LIBRARY_SEQ: usize = 192;

/// Sizes to try an op at: tiled kernels get sequences of several tiles and heads wider than a tile.
pub(super) fn sizes(op: &Op) -> Vec<Size> {
    let size = |batch, seq, head_dim| Size { batch, seq, head_dim, magnitude: 1.0 };
    let mut sizes = vec![size(1, 60, 20), size(3, 60, 20)];
    if matches!(op, Op::Attention { .. } | Op::AttentionGrad { .. }) {
        // The last is one that libraries take too.
        sizes.extend([size(1, 300, 20), size(1, 140, 150), size(2, LIBRARY_SEQ, 64)]);
    }
    if matches!(op, Op::SquareSum { .. } | Op::GradientNorm) {
        sizes.extend([1e-18, 1e8, 1e18, 1e34].map(|magnitude| Size { magnitude, ..size(1, 60, 20) }));
    }
    sizes
}

/// How an input is drawn.
#[derive(Clone, Copy)]
pub(super) enum Draw {
    /// Normal.
    Normal,
    /// Normal, a quarter as large: weights whose matmuls give logits as models have them.
    Quarter,
    /// Normal, this many times as large.
    Scaled(f64),
    /// Normal, made positive: second moments, reciprocal deviations.
    Positive,
    /// Token ids below this bound.
    Below(u32),
    /// The same as targets, a quarter of them ignored.
    Targets(u32),
    /// Whole numbers from the first to the second.
    Between(u32, u32),
    /// Where the document of each position starts: documents of one position up to most of the sequence, one that starts
    /// at the last position, and here and there a start after its position.
    Starts,
    /// Scalars of a step.
    Scalars,
    /// Statistics of a step.
    Stats,
    /// A sum of squares, in parts: that of a norm.
    Squares(f64),
    /// Filled in from another op's outputs, which this op's gradient needs to be consistent: output `.1` of op `.0` on
    /// inputs `.2`.
    Of(Op, usize, &'static [usize]),
}

pub(super) type Input = (TensorType, Draw);

/// Inputs for an op at awkward sizes.
pub(super) fn case(op: Op, size: Size, compute: DType) -> (Op, Vec<Input>) {
    let (op, mut inputs) = case_f32(op, size);
    let count = inputs.len();
    for (i, (ty, _)) in inputs.iter_mut().enumerate() {
        if op.input(i, count).elem == Elem::Float {
            ty.dtype = compute;
        }
    }
    (op, inputs)
}

fn case_f32(op: Op, size: Size) -> (Op, Vec<Input>) {
    let Size { batch, seq, head_dim, magnitude } = size;
    let t = |dims: &[Dim]| TensorType::new(DType::F32, dims.to_vec());
    let (b, s) = (Dim::new(Axis::Batch, batch), Dim::new(Axis::Seq, seq));
    let act = |d: Dim| t(&[b.clone(), s.clone(), d]);
    let row = || t(&[b.clone(), s.clone()]);
    let ids = || TensorType::new(DType::U32, [b.clone(), s.clone()]);
    let (d, n, v) = (Dim::new(Axis::Embed, 71), Dim::new(Axis::Ffn, 37), Dim::new(Axis::Vocab, 50));
    let head = |axis, count| Section { axis, count, unit: head_dim };
    let (q, kv) = (head(Axis::Heads, 6), head(Axis::KvHeads, 2));
    let qkv = || act(Dim::packed([q, kv, kv]));
    let heads = || act(Dim::packed([q]));
    let pairs = || t(&[b.clone(), Dim::new(Axis::Heads, 6), s.clone(), s.clone()]);
    let of_head = Section { axis: Axis::HeadDim, count: head_dim, unit: 1 };
    let norms = || t(&[Dim::packed([of_head, of_head])]);
    let of_heads = || act(Dim::packed([Section { unit: 1, ..q }, Section { unit: 1, ..kv }]));
    let table = || t(&[s.clone(), Dim::new(Axis::HeadDim, head_dim)]);
    let vector = || t(std::slice::from_ref(&d));
    let positions = || t(&[Dim::new(Axis::Seq, 65), d.clone()]);
    let normed = |inputs: &[Input]| [inputs, &[(row(), Normal), (row(), Positive)]].concat();
    let ffn = Section { axis: Axis::Ffn, count: 37, unit: 1 };
    let gate_up = || act(Dim::packed([ffn, ffn]));
    let state = || t(&[n.clone(), d.clone()]);
    let stats = || t(&[Dim::new(Axis::Scalar, 2)]);
    let number = || TensorType::new(DType::U32, [b.clone()]);
    let sum = || TensorType::new(DType::Fixed64, [Dim::new(Axis::Scalar, squares::LIMBS)]);
    let statistics = |rows| t(&[Dim::new(Axis::Parts, 1), Dim::new(Axis::Seq, rows), Dim::new(Axis::Scalar, 3)]);
    use Draw::{Below, Between, Normal, Of, Positive, Quarter, Scalars, Scaled, Squares, Starts, Stats, Targets};
    let inputs = match op {
        Op::Embedding => vec![(ids(), Below(50)), (t(&[v, d]), Normal)],
        Op::EmbeddingGrad { .. } => vec![(act(d), Normal), (ids(), Below(50))],
        Op::Linear => vec![(act(d.clone()), Normal), (t(&[n, d]), Normal)],
        Op::LinearGradInput => vec![(act(n.clone()), Normal), (t(&[n, d]), Normal)],
        Op::LinearGradWeight => vec![(act(n), Normal), (act(d), Normal)],
        Op::AddBias => vec![(qkv(), Normal), (t(&[Dim::packed([q, kv, kv])]), Normal)],
        Op::BiasGrad => vec![(qkv(), Normal)],
        Op::RmsNorm { .. } => vec![(act(d.clone()), Normal), (t(&[d]), Normal)],
        Op::AddRmsNorm { .. } => vec![(act(d.clone()), Normal), (act(d.clone()), Normal), (t(&[d]), Normal)],
        Op::RmsNormGrad => {
            vec![(act(d.clone()), Normal), (act(d.clone()), Normal), (t(&[d]), Normal), (row(), Positive)]
        }
        Op::AddRmsNormGrad => vec![
            (act(d.clone()), Normal),
            (act(d.clone()), Normal),
            (t(std::slice::from_ref(&d)), Normal),
            (row(), Positive),
            (act(d), Normal),
        ],
        Op::RmsNormGradWeight => vec![(act(d.clone()), Normal), (act(d), Normal), (row(), Positive)],
        Op::QkNorm { .. } => vec![(qkv(), Normal), (norms(), Normal)],
        Op::QkNormGrad => vec![(qkv(), Normal), (qkv(), Normal), (norms(), Normal), (of_heads(), Positive)],
        Op::QkNormGradWeight => vec![(qkv(), Normal), (qkv(), Normal), (of_heads(), Positive)],
        Op::LayerNorm { .. } => vec![(act(d.clone()), Normal), (vector(), Normal), (vector(), Normal)],
        Op::AddLayerNorm { .. } => {
            vec![(act(d.clone()), Normal), (act(d.clone()), Normal), (vector(), Normal), (vector(), Normal)]
        }
        Op::LayerNormGrad => normed(&[(act(d.clone()), Normal), (act(d.clone()), Normal), (vector(), Normal)]),
        Op::AddLayerNormGrad => {
            let before = normed(&[(act(d.clone()), Normal), (act(d.clone()), Normal), (vector(), Normal)]);
            [before, vec![(act(d), Normal)]].concat()
        }
        Op::LayerNormGradWeight => normed(&[(act(d.clone()), Normal), (act(d), Normal)]),
        Op::AddPositions { documents: false, .. } => vec![(act(d.clone()), Normal), (positions(), Normal)],
        Op::AddPositions { documents: true, .. } => {
            vec![(act(d.clone()), Normal), (positions(), Normal), (ids(), Starts)]
        }
        // Some positions leave the table.
        Op::AddPositionsAt => vec![(act(d.clone()), Normal), (positions(), Normal), (number(), Between(0, 20))],
        Op::PositionsGrad { documents: false, .. } => vec![(act(d), Normal)],
        Op::PositionsGrad { documents: true, .. } => vec![(act(d), Normal), (ids(), Starts)],
        Op::Rope { documents: false, .. } => vec![(qkv(), Normal), (table(), Normal)],
        Op::Rope { documents: true, .. } => vec![(qkv(), Normal), (table(), Normal), (ids(), Starts)],
        // Some positions leave the table.
        Op::RopeAt => vec![(qkv(), Normal), (table(), Normal), (number(), Between(0, 20))],
        Op::Attention { documents: false, .. } => vec![(qkv(), Normal)],
        Op::Attention { documents: true, .. } => vec![(qkv(), Normal), (ids(), Starts)],
        // New positions on both sides of a border between tiles, and fewer than there is room for.
        Op::CachedAttention { .. } => vec![
            (qkv(), Normal),
            (t(&[b.clone(), Dim::new(Axis::Seq, 170), Dim::packed([kv, kv])]), Normal),
            (number(), Between(70, 110)),
            (number(), Between(49, 60)),
        ],
        Op::LastPosition => vec![(act(d), Normal), (number(), Between(1, 60))],
        Op::AttentionGrad { documents: false, window } => vec![
            (heads(), Normal),
            (qkv(), Normal),
            (heads(), Of(Op::Attention { documents: false, window }, 0, &[1])),
            (t(&[b, Dim::new(Axis::Heads, 6), s]), Of(Op::Attention { documents: false, window }, 1, &[1])),
        ],
        Op::AttentionGrad { documents: true, window } => vec![
            (heads(), Normal),
            (qkv(), Normal),
            (heads(), Of(Op::Attention { documents: true, window }, 0, &[1, 4])),
            (
                t(&[b.clone(), Dim::new(Axis::Heads, 6), s.clone()]),
                Of(Op::Attention { documents: true, window }, 1, &[1, 4]),
            ),
            (ids(), Starts),
        ],
        Op::AttentionScores { documents: false, .. } => vec![(qkv(), Normal)],
        Op::AttentionScores { documents: true, .. } => vec![(qkv(), Normal), (ids(), Starts)],
        Op::AttentionScoresGrad { window } => {
            vec![
                (pairs(), Normal),
                (pairs(), Of(Op::AttentionScores { documents: false, window }, 0, &[2])),
                (qkv(), Normal),
            ]
        }
        Op::AttentionMix { window } => {
            vec![(pairs(), Of(Op::AttentionScores { documents: false, window }, 0, &[1])), (qkv(), Normal)]
        }
        Op::AttentionMixGrad { window } => {
            vec![
                (heads(), Normal),
                (pairs(), Of(Op::AttentionScores { documents: false, window }, 0, &[2])),
                (qkv(), Normal),
            ]
        }
        Op::SwiGlu => vec![(gate_up(), Normal)],
        Op::SwiGluGrad => vec![(act(Dim::packed([ffn])), Normal), (gate_up(), Normal)],
        Op::Gelu => vec![(act(n), Normal)],
        Op::GeluGrad => vec![(act(n.clone()), Normal), (act(n), Normal)],
        Op::Dropout { .. } => {
            let keys = TensorType::new(DType::U32, [b.clone(), Dim::new(Axis::Scalar, 2)]);
            vec![(act(d.clone()), Normal), (keys, Below(u32::MAX))]
        }
        Op::Add => vec![(act(d.clone()), Normal), (act(d), Normal)],
        Op::CrossEntropy => vec![(act(v), Normal), (ids(), Targets(50))],
        Op::CrossEntropyGrad { .. } => {
            vec![(act(v), Normal), (ids(), Targets(50)), (row(), Of(Op::CrossEntropy, 1, &[0, 1]))]
        }
        Op::LinearCrossEntropy { scaled, .. } => {
            // Enough columns for several blocks of a kernel that cuts the vocabulary.
            let table = t(&[Dim::new(Axis::Vocab, 400), d.clone()]);
            let inputs = [(act(d), Normal), (table, Quarter), (ids(), Targets(400))];
            inputs.into_iter().chain(scaled.then(|| (StepScalars::ty(), Scalars))).collect()
        }
        Op::AddState => vec![(state(), Normal), (state(), Normal)],
        Op::Accumulate => vec![(state(), Normal)],
        Op::SquareSum { .. } => {
            vec![(state(), Scaled(magnitude)), (act(d), Scaled(magnitude)), (StepScalars::ty(), Scalars)]
        }
        Op::MergeSums => vec![(sum(), Below(1000)), (sum(), Below(1000)), (sum(), Below(1000))],
        Op::GradientNorm => vec![(sum(), Squares(3.51 * magnitude)), (StepScalars::ty(), Scalars)],
        Op::VocabLogits { .. } => vec![(act(d.clone()), Normal), (t(&[v, d]), Normal), (ids(), Below(50))],
        Op::VocabLoss => {
            vec![(statistics(23), Positive), (statistics(batch * seq - 23), Positive), (ids(), Targets(50))]
        }
        Op::VocabGrad { rows, scaled } => {
            let logits = Op::VocabLogits { rows, parts: 1 };
            let inputs = [
                (t(&[Dim::new(Axis::Seq, 23), v.clone()]), Of(logits, 0, &[2, 3, 4])),
                (statistics(23), Of(logits, 1, &[2, 3, 4])),
                (act(d.clone()), Normal),
                (t(&[v, d]), Normal),
                (ids(), Targets(50)),
            ];
            inputs.into_iter().chain(scaled.then(|| (StepScalars::ty(), Scalars))).collect()
        }
        Op::JoinRows => {
            let chunk = |rows| t(&[Dim::new(Axis::Seq, rows), d.clone()]);
            vec![(chunk(23), Normal), (chunk(batch * seq - 23), Normal), (ids(), Below(50))]
        }
        Op::AllReduce { .. }
        | Op::SumShared { .. }
        | Op::ReduceScatter { .. }
        | Op::AllGather { .. }
        | Op::Shard { .. }
        | Op::Send { .. }
        | Op::Receive { .. } => Vec::new(),
        Op::AdamW { .. } => vec![
            (state(), Normal),
            (state(), Normal),
            (state(), Normal),
            (state(), Positive),
            (StepScalars::ty(), Scalars),
            (stats(), Stats),
        ],
        Op::Lion { .. } | Op::Sgd { .. } => vec![
            (state(), Normal),
            (state(), Normal),
            (state(), Normal),
            (StepScalars::ty(), Scalars),
            (stats(), Stats),
        ],
        Op::Momentum { .. } => vec![(state(), Normal), (state(), Normal), (stats(), Stats)],
        // A section with more rows than columns, and one with fewer.
        Op::Orthogonalise => vec![(t(&[Dim::packed([q, ffn]), d]), Normal)],
        Op::Descend { .. } => {
            vec![(state(), Normal), (state(), Normal), (StepScalars::ty(), Scalars), (stats(), Stats)]
        }
    };
    (op, inputs)
}

pub(super) fn draw(op: &Op, inputs: &[Input], seed: u64) -> Vec<Vec<f64>> {
    let mut drawn: Vec<Vec<f64>> = vec![Vec::new(); inputs.len()];
    // What is made from other inputs comes last.
    let made = |how: &Draw| matches!(how, Draw::Of(..));
    let order = inputs.iter().enumerate().filter(|(_, (_, how))| !made(how));
    for (i, (ty, how)) in order.chain(inputs.iter().enumerate().filter(|(_, (_, how))| made(how))) {
        let key = counter::key(seed, &format!("{}/{i}", op.name()));
        let normal = |j: usize| f64::from(counter::normal(key, j as u64));
        let data = match how {
            Draw::Normal => (0..ty.elements()).map(normal).collect(),
            Draw::Quarter => (0..ty.elements()).map(|j| 0.25 * normal(j)).collect(),
            Draw::Scaled(by) => (0..ty.elements()).map(|j| by * normal(j)).collect(),
            Draw::Positive => (0..ty.elements()).map(|j| f64::from((normal(j).abs() + 0.1) as f32)).collect(),
            Draw::Below(bound) => {
                (0..ty.elements()).map(|j| (counter::bits(key, j as u64) % u64::from(*bound)) as f64).collect()
            }
            Draw::Targets(bound) => {
                let target =
                    |bits: u64| if bits >> 62 == 0 { u64::from(IGNORED_TARGET) } else { bits % u64::from(*bound) };
                (0..ty.elements()).map(|j| target(counter::bits(key, j as u64)) as f64).collect()
            }
            Draw::Between(low, high) => {
                let range = u64::from(high - low + 1);
                (0..ty.elements()).map(|j| (counter::bits(key, j as u64) % range + u64::from(*low)) as f64).collect()
            }
            Draw::Starts => starts(ty, key),
            Draw::Scalars => {
                let s = StepScalars {
                    lr: 0.01,
                    inverse_count: 0.125,
                    clip: 0.5,
                    bias1: 0.19,
                    bias2: 0.0975,
                    loss_scale: 4.0,
                };
                s.to_array().map(f64::from).to_vec()
            }
            Draw::Stats => vec![2.0, 0.03125],
            Draw::Squares(norm) => reference::limbs(norm * norm),
            Draw::Of(source, output, from) => {
                let types = from.iter().map(|&f| inputs[f].0.clone()).collect::<Vec<_>>();
                let feeds = from.iter().map(|&f| drawn[f].clone()).collect::<Vec<_>>();
                evaluate(*source, &types, &feeds).swap_remove(*output)
            }
        };
        // What the device will hold, so that both sides start from the same numbers.
        drawn[i] = decode(ty.dtype, &encode(ty.dtype, &data));
    }
    drawn
}

/// Documents of one position, of some, and one over the border between tiles of 128 positions.
fn starts(ty: &TensorType, key: u64) -> Vec<f64> {
    let seq = ty.dims[1].size();
    let mut start = 0;
    let at = |row: usize| {
        let (position, bits) = (row % seq, counter::bits(key, row as u64));
        let long = (100..190).contains(&position);
        if position == 0 || position + 1 == seq || (!long && bits.is_multiple_of(20)) || position == 18 {
            start = position;
        }
        // Libraries take documents that are apart: at the length that they take, there is no such start.
        if bits % 50 == 7 && seq != LIBRARY_SEQ { f64::from(u32::MAX) } else { start as f64 }
    };
    (0..ty.elements()).map(at).collect()
}
