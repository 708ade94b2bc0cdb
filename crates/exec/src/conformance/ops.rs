//! What is tried.

use lockstep_ir::Op;
use lockstep_ir::op::Rows;

/// Every op that a rank computes alone.
pub fn ops() -> Vec<Op> {
    let rows = Rows { first: 7, count: 23, ranks: 1 };
    let adamw = Op::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1, lr_scale: 0.5 };
    // All keys; one; less than a tile; across tiles; past the start.
    let windows = [None, Some(1), Some(7), Some(100), Some(1000)];
    let attention = windows.into_iter().flat_map(|window| {
        let of = |documents| [Op::Attention { documents, window }, Op::AttentionGrad { documents, window }];
        let scores = [false, true].map(|documents| Op::AttentionScores { documents, window });
        [of(false), of(true)].concat().into_iter().chain(scores).chain([Op::CachedAttention { window }])
    });
    let others = [
        Op::Embedding,
        Op::EmbeddingGrad { vocab: 50 },
        Op::Linear,
        Op::LinearGradInput,
        Op::LinearGradWeight,
        Op::AddBias,
        Op::BiasGrad,
        Op::RmsNorm { eps: 1e-5 },
        Op::AddRmsNorm { eps: 1e-5 },
        Op::RmsNormGrad,
        Op::AddRmsNormGrad,
        Op::RmsNormGradWeight,
        Op::QkNorm { eps: 1e-5 },
        Op::QkNormGrad,
        Op::QkNormGradWeight,
        Op::LayerNorm { eps: 1e-5 },
        Op::AddLayerNorm { eps: 1e-5 },
        Op::LayerNormGrad,
        Op::AddLayerNormGrad,
        Op::LayerNormGradWeight,
        Op::AddPositions { seq: 60, documents: false },
        Op::AddPositions { seq: 60, documents: true },
        Op::AddPositionsAt,
        Op::PositionsGrad { rows: 65, seq: 60, documents: false },
        Op::PositionsGrad { rows: 65, seq: 60, documents: true },
        Op::Rope { inverse: false, documents: false },
        Op::Rope { inverse: true, documents: false },
        Op::Rope { inverse: false, documents: true },
        Op::Rope { inverse: true, documents: true },
        Op::RopeAt,
        Op::AttentionScoresGrad { window: None },
        Op::AttentionMix { window: None },
        Op::AttentionMixGrad { window: None },
        Op::LastPosition,
        Op::SwiGlu,
        Op::SwiGluGrad,
        Op::Gelu,
        Op::GeluGrad,
        Op::Dropout { rate: 0.3, site: 0x1234_5678_9abc_def0, seq: 60 },
        Op::Add,
        Op::CrossEntropy,
        Op::CrossEntropyGrad { weight: 0.75 },
        Op::LinearCrossEntropy { rows: 23, scaled: false },
        Op::LinearCrossEntropy { rows: 23, scaled: true },
        Op::AddState,
        Op::Accumulate,
        Op::SquareSum { sharers: 2, tail: 77 },
        Op::MergeSums,
        Op::GradientNorm,
        adamw,
        Op::Lion { beta1: 0.9, beta2: 0.99, decay: 0.1, lr_scale: 0.5 },
        Op::Sgd { momentum: 0.9, decay: 0.1, lr_scale: 0.5 },
        Op::Momentum { momentum: 0.95 },
        Op::Orthogonalise,
        Op::Descend { decay: 0.1, lr_scale: 0.5 },
        Op::VocabLogits { rows, parts: 1 },
        Op::VocabLoss,
        Op::VocabGrad { rows, scaled: false },
        Op::VocabGrad { rows, scaled: true },
        Op::JoinRows,
    ];
    others.into_iter().chain(attention).collect()
}
