//! The list of all ops: attributes, and where the row of each is.

use super::row::Spec;
use super::{
    Blocks, Factor, Fine, Norm, Ring, Routing, Rows, attention, bytes, collective, context, dispatch, embedding,
    expert_bias, experts, fine, gradient, head, heads, latent, linear, memory, norm, optimizer, pointwise, position,
    quantise, quantised_experts, section, sink,
};
use crate::DType;
use crate::mesh::Axes;

/// From `Name { @[selector: Type] attribute: Type } = family::ROW | family::ROW => index` for every op: [`Op`], [`OpKind`], the way from one to
/// the other and to its row. Ops whose rows differ in operands alone are one with several rows, and selectors say which of them it is: they
/// show in the row's name, attributes beside it.
macro_rules! ops {
    ($(
        $(#[$doc:meta])*
        $name:ident $({
            $(@[$($(#[$selector_doc:meta])* $selector:ident: $selector_ty:ty),*])?
            $($(#[$field_doc:meta])* $field:ident: $ty:ty,)*
        })? = $($row:path)|+ $(=> $index:expr)?,
    )*) => {
        /// An operation with its attributes.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum Op {
            $($(#[$doc])* $name $({
                $($($(#[$selector_doc])* $selector: $selector_ty,)*)?
                $($(#[$field_doc])* $field: $ty,)*
            })?,)*
        }

        /// An operation whatever its attributes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum OpKind {
            $(#[doc = concat!("[`Op::", stringify!($name), "`]")] $name,)*
        }

        impl OpKind {
            /// All of them.
            pub const ALL: &[OpKind] = &[$(OpKind::$name,)*];

            /// The op's rows in the table: one, or one for each of what its selectors say.
            pub fn rows(self) -> &'static [&'static Spec] {
                match self {
                    $(OpKind::$name => {
                        static ROWS: &[&Spec] = &[$(&$row,)+];
                        ROWS
                    })*
                }
            }
        }

        impl Op {
            /// Which op it is.
            pub fn kind(&self) -> OpKind {
                match self {
                    $(Op::$name { .. } => OpKind::$name,)*
                }
            }

            /// The op's row in the table.
            #[allow(unused_variables, reason = "of the attributes it is selectors alone that say which row it is")]
            pub fn spec(&self) -> &'static Spec {
                match *self {
                    $(Op::$name { $($($($selector,)*)? $($field,)*)? } => self.kind().rows()[0 $(+ $index)?],)*
                }
            }

            /// Its attributes as printed programs show them: all that two ops of one name can differ in; empty where there are none.
            #[allow(unused_variables, reason = "selectors show in the name")]
            pub fn attributes(&self) -> String {
                let all: Vec<String> = match self {
                    $(Op::$name { $($($($selector,)*)? $($field,)*)? } => {
                        vec![$($(format!("{}: {:?}", stringify!($field), $field),)*)?]
                    })*
                };
                if all.is_empty() { String::new() } else { format!(" {{ {} }}", all.join(", ")) }
            }
        }
    };
}

ops! {
    /// Rows of a table, chosen by token id.
    Embedding = embedding::EMBEDDING,
    /// Adds each position's gradient to its token's row.
    EmbeddingGrad {
        /// Rows of the table.
        vocab: usize,
    } = embedding::EMBEDDING_GRAD,
    /// `y = x · wᵀ`.
    Linear = linear::LINEAR,
    /// `dx = dy · w`.
    LinearGradInput = linear::LINEAR_GRAD_INPUT,
    /// `dw = dyᵀ · x`, summed over all positions.
    LinearGradWeight = linear::LINEAR_GRAD_WEIGHT,
    /// `y = x · wᵀ` of a weight that is not trained, in bytes, each row in a unit of its own ([`rows8`](crate::rows8)).
    ByteLinear = bytes::BYTE_LINEAR,
    /// `dx = dy · w` of such a weight.
    ByteLinearGradInput = bytes::BYTE_LINEAR_GRAD_INPUT,
    /// The largest magnitude of a tensor. Each rank gives that of its part; `parts` has as many entries as ranks may have parts, and a rank's
    /// own are all the same.
    Amax {
        @[
            /// Of what.
            of: Factor
        ]
        /// As many as ranks may have parts.
        parts: usize,
    } = quantise::AMAX | quantise::CHOICES_AMAX | quantise::BLOCKS_AMAX | quantise::WEIGHT_AMAX | quantise::STACK_AMAX => of as usize,
    /// A tensor in fp8, and its transpose: multiples of a unit, the power of two that follows from its largest magnitude ([`F8::unit`](crate::F8::unit)), or
    /// from the magnitudes of earlier steps; and what rounding lost ([`Seen`](crate::Seen)).
    Quantise {
        @[
            /// What.
            of: Factor
        ]
        /// In which format.
        to: DType,
        /// Whether its own largest magnitude counts too among what is seen, for later steps.
        measures: bool,
    } = quantise::QUANTISE | quantise::QUANTISE_CHOICES | quantise::QUANTISE_BLOCKS | quantise::QUANTISE_WEIGHT | quantise::QUANTISE_STACK
        => of as usize,
    /// `y = x · wᵀ` of operands in fp8. The input gradient is one too, of `dy` and the transpose of `w`.
    Fp8Linear {
        /// In which type the result is stored.
        to: DType,
    } = quantise::FP8_LINEAR,
    /// `dw = dyᵀ · x`, of transposes in fp8.
    Fp8GradWeight = quantise::FP8_GRAD_WEIGHT,
    /// A tensor and its transpose in fp8, with many units each: that of a row, or of a block of 128 elements.
    QuantiseFine {
        @[
            /// What has a unit.
            by: Fine,
            /// Whether it is a weight.
            weight: bool
        ]
        /// In which format.
        to: DType,
    } = fine::QUANTISE_ROWWISE | fine::QUANTISE_ROWWISE_WEIGHT | fine::QUANTISE_BLOCKWISE | fine::QUANTISE_BLOCKWISE_WEIGHT
        => 2 * by as usize + usize::from(weight),
    /// `Fp8Linear` of operands with many units.
    FineLinear {
        @[
            /// What has a unit.
            by: Fine
        ]
        /// In which type the result is stored.
        to: DType,
    } = fine::ROWWISE_LINEAR | fine::BLOCKWISE_LINEAR => by as usize,
    /// `Fp8GradWeight` of operands with many units.
    FineGradWeight {
        @[
            /// What has a unit.
            by: Fine
        ]
    } = fine::ROWWISE_GRAD_WEIGHT | fine::BLOCKWISE_GRAD_WEIGHT => by as usize,
    /// The largest magnitudes of a tensor in the last steps, the newest first, with that of this step, of what was seen of tensors in this row. What is
    /// below 0 is a guess, which counts until something was seen. Changes nothing where the factor is NaN or nothing bounded was seen.
    Remember {
        /// Which of the tensors.
        row: usize,
    } = quantise::REMEMBER,
    /// `GroupedLinear` of operands in fp8. The input gradient is one too, of `dy` and the transposes of the weights.
    Fp8Grouped {
        @[
            /// Whether each expert of a token has an input of its own.
            each: bool
        ]
    } = quantised_experts::FP8_GROUPED | quantised_experts::FP8_GROUPED_EACH => usize::from(each),
    /// `GroupedGradWeight` of operands in fp8.
    Fp8GroupedGradWeight {
        @[
            /// Whether each expert of a token has an input of its own.
            each: bool
        ]
        /// How many experts there are.
        experts: usize,
    } = quantised_experts::FP8_GROUPED_GRAD_WEIGHT | quantised_experts::FP8_GROUPED_GRAD_WEIGHT_EACH => usize::from(each),
    /// `RowsLinear` of operands in fp8, and its input gradient.
    Fp8Rows {
        /// The blocks.
        blocks: Blocks,
    } = quantised_experts::FP8_ROWS,
    /// `RowsGradWeight` of operands in fp8.
    Fp8RowsGradWeight {
        /// How many experts there are.
        experts: usize,
        /// The blocks.
        blocks: Blocks,
    } = quantised_experts::FP8_ROWS_GRAD_WEIGHT,
    /// `y = x + b`, the same vector at every position.
    AddBias = linear::ADD_BIAS,
    /// `db = dy`, summed over all positions.
    BiasGrad = linear::BIAS_GRAD,
    /// `y = x / rms(x) · w`, or by `1 + w`, or of a layer norm `y = (x − mean(x)) / deviation(x) · w + b`. With a residual,
    /// `sum = x + delta` is normed.
    Norm {
        @[
            /// Which norm.
            norm: Norm,
            /// Whether it adds first.
            residual: bool
        ]
        /// Added to the mean square, or to the variance.
        eps: f32,
    } = norm::RMS_NORM | norm::ADD_RMS_NORM | norm::LAYER_NORM | norm::ADD_LAYER_NORM | norm::RMS_NORM_PLUS_ONE
        | norm::ADD_RMS_NORM_PLUS_ONE => norm.row(residual),
    /// Input gradient of `Norm`; with a residual plus the gradient that reaches the normed value on another path.
    NormGrad {
        @[
            /// Which norm.
            norm: Norm,
            /// Whether it adds.
            residual: bool
        ]
    } = norm::RMS_NORM_GRAD | norm::ADD_RMS_NORM_GRAD | norm::LAYER_NORM_GRAD | norm::ADD_LAYER_NORM_GRAD
        | norm::RMS_NORM_PLUS_ONE_GRAD | norm::ADD_RMS_NORM_PLUS_ONE_GRAD => norm.row(residual),
    /// Weight gradient of `Norm`; that of a layer norm's bias is `BiasGrad`.
    NormGradWeight {
        @[
            /// Which norm.
            norm: Norm
        ]
    } = norm::RMS_NORM_GRAD_WEIGHT | norm::LAYER_NORM_GRAD_WEIGHT => norm.of_weight() as usize,
    /// The sum of `a · b`, or of `a · b · w`, over the features of every position. Of parts of the features, a partial sum.
    RowDot {
        /// Whether it multiplies by `1 + w`.
        plus_one: bool,
    } = norm::ROW_DOT,
    /// RMS norm of a part of the features of positions whose sum of squares over all features is known.
    NormBy {
        /// Whether it multiplies by `1 + w`.
        plus_one: bool,
        /// Added to the mean square.
        eps: f32,
        /// How many features the sum is of.
        width: usize,
    } = norm::RMS_NORM_BY,
    /// Input gradient of `NormBy`, by the sum of `dy · w · x` over all features.
    NormByGrad {
        /// As in `NormBy`.
        plus_one: bool,
        /// As in `NormBy`.
        width: usize,
    } = norm::RMS_NORM_BY_GRAD,
    /// Normalises every head of the Q and K sections of packed Q·K·V: `y = x / rms(x) · w`, or by `1 + w`. The weight holds that of all Q
    /// heads, then that of all K heads; V stays as it is.
    QkNorm {
        @[
            /// Whether it multiplies by `1 + w`.
            plus_one: bool
        ]
        /// Added to the mean square.
        eps: f32,
    } = norm::QK_NORM | norm::QK_NORM_PLUS_ONE => usize::from(plus_one),
    /// Input gradient of `QkNorm`.
    QkNormGrad {
        @[
            /// As in `QkNorm`.
            plus_one: bool
        ]
    } = norm::QK_NORM_GRAD | norm::QK_NORM_PLUS_ONE_GRAD => usize::from(plus_one),
    /// Weight gradient of `QkNorm`.
    QkNormGradWeight = norm::QK_NORM_GRAD_WEIGHT,
    /// Adds to each position its row of a table. With `starts`, a number on the device for every position of the whole sequence,
    /// positions count from the start of each document; a start after its position counts as that position.
    AddPositions {
        /// Positions of a whole sequence, of which a rank may have a part.
        seq: usize,
    } = position::ADD_POSITIONS,
    /// As `AddPositions`, from position `start` of each sequence on, a number on the device. Positions past the table take its
    /// last row.
    AddPositionsAt = position::ADD_POSITIONS_AT,
    /// Adds each position's gradient to its row of the table.
    PositionsGrad {
        /// Rows of the table.
        rows: usize,
        /// As in `AddPositions`.
        seq: usize,
    } = position::POSITIONS_GRAD,
    /// RoPE: rotates the Q and K sections of packed Q·K·V by position (rotate-half convention), of every head as many of the first elements as
    /// the table has columns. With `starts`, as in `AddPositions`.
    Rope {
        /// Rotate backwards: the gradient.
        inverse: bool,
    } = position::ROPE,
    /// As `Rope`, from position `start` of each sequence on, a number on the device. Positions past the table take its last
    /// row.
    RopeAt = position::ROPE_AT,
    /// Causal scaled-dot-product attention over packed Q·K·V, with the log-sum-exp of each row of scores. With `starts`, a query sees
    /// the keys from the start of its document on; as in `AddPositions`.
    Attention {
        /// Sliding window: a query sees at most this many keys, its own the last of them; all before it if `None`. None at all counts as one.
        window: Option<usize>,
    } = attention::ATTENTION,
    /// Gradient of `Attention`; recomputes the scores tile by tile.
    AttentionGrad {
        /// As in `Attention`.
        window: Option<usize>,
    } = attention::ATTENTION_GRAD,
    /// The weights of `Attention`, as a matrix that exists: softmax of scaled scores, zero for keys that a query does not see.
    AttentionScores {
        /// As in `Attention`.
        window: Option<usize>,
    } = attention::ATTENTION_SCORES,
    /// Gradient of `AttentionScores`, in the Q and K sections; zero in V.
    AttentionScoresGrad {
        /// As in `Attention`.
        window: Option<usize>,
    } = attention::ATTENTION_SCORES_GRAD,
    /// The values of packed Q·K·V, summed with such weights.
    AttentionMix {
        /// As in `Attention`: keys before it weigh nothing.
        window: Option<usize>,
    } = attention::ATTENTION_MIX,
    /// Gradients of `AttentionMix`: of the weights, and of the V section; zero in Q and K.
    AttentionMixGrad {
        /// As in `AttentionMix`.
        window: Option<usize>,
    } = attention::ATTENTION_MIX_GRAD,
    /// Attention of `count` new positions over themselves and all before them: their keys and values are written into the
    /// cache from position `start` on, in place. The cache is pages of positions; row `slot` of the table says which page each block of a text
    /// is. Rows past `count` give zeros and leave the cache as it is. Sinks count in the softmax of their head as in `AttentionSink`, where they
    /// are given.
    CachedAttention {
        @[
            /// Whether K and V of packed Q·K·V are one key that all heads share, and V its values: latent attention (MLA).
            latent: bool
        ]
        /// As in `Attention`.
        window: Option<usize>,
        /// Whether no two sequences of a call are of one text, so that none reads what another writes.
        apart: bool,
    } = attention::CACHED_ATTENTION | attention::CACHED_LATENT_ATTENTION => usize::from(latent),
    /// `Attention` of the queries of a context-parallel part of the sequence over keys and values that are not this part's alone. Of a
    /// ring: a rank's row of packed K·V has come `step` ranks far, queries of part i see keys of part (i − step) mod `parts`, as far as the
    /// mask lets them. Else packed K·V is that of the whole sequence. A query that sees no key has zeros and a log-sum-exp of −∞.
    PartAttention {
        /// As in `Attention`.
        window: Option<usize>,
        /// Where keys and values are in a ring; `None` where they are all there.
        ring: Option<Ring>,
    } = context::GATHERED_ATTENTION | context::RING_ATTENTION => usize::from(ring.is_some()),
    /// Gradient of `PartAttention`: what these keys and values add to dQ, and what these queries add to dK·dV. Output and log-sum-exp are those
    /// of all keys.
    PartAttentionGrad {
        /// As in `Attention`.
        window: Option<usize>,
        /// As in `PartAttention`.
        ring: Option<Ring>,
    } = context::GATHERED_ATTENTION_GRAD | context::RING_ATTENTION_GRAD => usize::from(ring.is_some()),
    /// Of attention over two sets of keys: that over both, by their log-sum-exps.
    AttentionMerge = context::ATTENTION_MERGE,
    /// Sections of heads in parts, one part after the other: of part `a` all positions of all sequences, sequences inside positions. What an
    /// all-to-all takes to make parts of the heads of parts of the sequence (Ulysses), and gives where it does the reverse.
    SplitHeads {
        /// Parts of the heads.
        parts: usize,
        /// Of the sequence that is there, in how many ranks' parts its positions come out: those of each rank one after the other, in zig-zag
        /// order. 1 leaves them in their order.
        ranks: usize,
    } = heads::SPLIT_HEADS,
    /// The reverse of `SplitHeads`.
    JoinHeads {
        /// As in `SplitHeads`: how positions come in.
        ranks: usize,
    } = heads::JOIN_HEADS,
    /// Packed Q·K·V of latent attention (MLA), from queries, from what the latent expands to, and from the key that all heads share: the part of
    /// Q and K with RoPE in front, its pairs as halves. Absorbed, from queries, from the weight by which keys and values of heads expand from the
    /// latent, from the latent and from the key that all heads share: the part of Q without position goes through its head's rows of the weight,
    /// so that the latent is the rest of the one key that all heads have, and its value.
    LatentHeads {
        @[
            /// Whether queries take the way of keys into the latent: what generation does.
            absorbed: bool
        ]
        /// What queries are multiplied by.
        scale: f32,
    } = latent::LATENT_HEADS | latent::ABSORBED_LATENT_HEADS => usize::from(absorbed),
    /// Gradients of `LatentHeads`; that of the shared key is summed over heads.
    LatentHeadsGrad {
        /// Elements of a head with RoPE.
        rope: usize,
        /// As in `LatentHeads`.
        scale: f32,
    } = latent::LATENT_HEADS_GRAD,
    /// The key that all heads of latent attention share, as it stands in packed Q·K·V: its pairs as halves, rotated where there is a table,
    /// by positions in documents where their starts are given. It is what context-parallel ranks send each other.
    SharedKey {
        /// Backwards, which is its gradient: rotated by the opposite angles, its halves as pairs.
        inverse: bool,
    } = latent::SHARED_KEY,
    /// Packed K·V of latent attention, from what the latent expands to and from [`SharedKey`](Op::SharedKey): those that another rank has sent.
    LatentKeys {
        /// Elements of a head of V.
        value: usize,
    } = latent::LATENT_KEYS,
    /// Gradients of `LatentKeys`; that of the shared key is summed over heads.
    LatentKeysGrad {
        /// Elements of a head with RoPE.
        rope: usize,
    } = latent::LATENT_KEYS_GRAD,
    /// Values of heads from latents that attention has summed for each: through the head's rows of the weight by which keys and values expand.
    LatentValues {
        /// Elements of a head of V: the last rows of a head.
        value: usize,
    } = latent::LATENT_VALUES,
    /// The output of attention with a sink in the softmax of every head: a logit in the denominator that has no value. `o · σ(lse − sink)`, and
    /// the log-sum-exp with the sink, by which `AttentionGrad` gives the gradients of attention with sinks.
    AttentionSink {
        @[
            /// Whether the sinks of every position are given.
            each: bool
        ]
    } = sink::ATTENTION_SINK | sink::ATTENTION_SINK_EACH => usize::from(each),
    /// What every position adds to the gradient of the sink of each head, from the output and the log-sum-exp with sinks.
    AttentionSinkGrad {
        @[
            /// As in `AttentionSink`.
            each: bool
        ]
    } = sink::ATTENTION_SINK_GRAD | sink::ATTENTION_SINK_EACH_GRAD => usize::from(each),
    /// The sinks of all heads at every position that packed Q·K·V has: what an all-to-all takes to make parts of the heads of them.
    ExpandSinks = sink::EXPAND_SINKS,
    /// Of each sequence, the last of `count` positions.
    LastPosition = attention::LAST_POSITION,
    /// The first of the largest logits of each row, among those of the first tokens of a vocabulary: greedy decoding. Where one of them is not a number, or
    /// positive infinity, or none is finite, [`NO_ROW`](super::NO_ROW).
    Argmax {
        /// Tokens that may be taken.
        known: usize,
    } = attention::ARGMAX,
    /// `y = silu(gate) · up` over packed gate·up.
    SwiGlu = pointwise::SWIGLU,
    /// Gradient of `SwiGlu`.
    SwiGluGrad = pointwise::SWIGLU_GRAD,
    /// `y = gelu(gate) · up` over packed gate·up, with the tanh approximation of GELU.
    GeGlu = pointwise::GEGLU,
    /// Gradient of `GeGlu`.
    GeGluGrad = pointwise::GEGLU_GRAD,
    /// `y = (up + 1) · gate · σ(1.702 · gate)` over packed gate·up, with gate at most `limit` and up from −limit to limit: the SwiGLU of gpt-oss.
    ClampedSwiGlu {
        /// Where they are clamped.
        limit: f32,
    } = pointwise::CLAMPED_SWIGLU,
    /// Gradient of `ClampedSwiGlu`: zero in what is clamped.
    ClampedSwiGluGrad {
        /// As in `ClampedSwiGlu`.
        limit: f32,
    } = pointwise::CLAMPED_SWIGLU_GRAD,
    /// The experts of each token, the best first, and how much each counts, from the router's logits. A bias changes the choice, and not
    /// the weights. An expert whose score is no number is chosen last. Or, of experts that are given, how much each would count.
    Route {
        @[
            /// Whether the experts of each token are given.
            given: bool
        ]
        /// How it chooses.
        how: Routing,
    } = experts::ROUTE | experts::ROUTE_TO => usize::from(given),
    /// Gradient of `Route`, by the weights.
    RouteGrad {
        /// As in `Route`.
        how: Routing,
    } = experts::ROUTE_GRAD,
    /// Of each sequence, how many tokens every expert gets.
    ExpertCounts {
        /// How many experts there are.
        experts: usize,
    } = experts::EXPERT_COUNTS,
    /// Losses of the router, of every sequence for itself and times its tokens. Balance: experts ÷ choices · Σ share of an expert's
    /// tokens · its mean softmax score, which is 1 where all get as much. z: the mean square of the log-sum-exp of the logits.
    RouterLoss {
        /// How much balance counts.
        balance: f32,
        /// How much z counts.
        z: f32,
    } = experts::ROUTER_LOSS,
    /// Gradient of `RouterLoss`. With `scalars`, it starts with the step's loss scale instead of 1.
    RouterLossGrad {
        /// As in `RouterLoss`.
        balance: f32,
        /// As in `RouterLoss`.
        z: f32,
    } = experts::ROUTER_LOSS_GRAD,
    /// `y = x · wᵀ` by the weights of each of the token's experts.
    GroupedLinear {
        @[
            /// Whether each expert of a token has an input of its own.
            each: bool
        ]
    } = experts::GROUPED_LINEAR | experts::GROUPED_LINEAR_EACH => usize::from(each),
    /// `dx = dy · w`, of each expert of a token.
    GroupedGradInput = experts::GROUPED_GRAD_INPUT,
    /// `dw = dyᵀ · x` of every expert, summed over the tokens that go to it.
    GroupedGradWeight {
        @[
            /// Whether each expert of a token has an input of its own.
            each: bool
        ]
        /// How many experts there are.
        experts: usize,
    } = experts::GROUPED_GRAD_WEIGHT | experts::GROUPED_GRAD_WEIGHT_EACH => usize::from(each),
    /// `y = x + b`, with the bias of the expert that a row is of: rows of every expert of a token, or of blocks.
    GroupedBias {
        @[
            /// Whether rows are those of blocks.
            rows: bool
        ]
    } = expert_bias::GROUPED_BIAS | expert_bias::ROWS_BIAS => usize::from(rows),
    /// `db = dy` of every expert, summed over its rows.
    GroupedBiasGrad {
        @[
            /// As in `GroupedBias`.
            rows: bool
        ]
        /// How many experts there are.
        experts: usize,
    } = expert_bias::GROUPED_BIAS_GRAD | expert_bias::ROWS_BIAS_GRAD => usize::from(rows),
    /// Where the rows of a rank's tokens go, by the part of the experts that each goes to: of every choice its place in the
    /// [blocks of rows](Blocks), counted over all of them, and of every place the expert of its row, counted inside the part. Rows are in
    /// the order of tokens. [`NO_ROW`](super::NO_ROW) for a choice whose block is full, and for a place without a row. And of every sequence
    /// how many choices found no place.
    ExpertSlots {
        /// How many experts there are.
        experts: usize,
        /// The blocks.
        blocks: Blocks,
    } = dispatch::EXPERT_SLOTS,
    /// A token's row, for each of its choices, at the choice's place in blocks of rows; zeros elsewhere.
    SendRows {
        @[
            /// Whether each choice of a token has a row of its own.
            each: bool
        ]
        /// The blocks.
        blocks: Blocks,
    } = dispatch::SEND_ROWS | dispatch::SEND_ROWS_EACH => usize::from(each),
    /// The row of every choice, from its place in blocks of rows; NaN where it has none.
    TakeRows {
        /// The blocks.
        blocks: Blocks,
    } = dispatch::TAKE_ROWS,
    /// `y = x · wᵀ` by the weights of each row's expert; zeros where there is no row.
    RowsLinear {
        /// The blocks.
        blocks: Blocks,
    } = dispatch::ROWS_LINEAR,
    /// `dx = dy · w` by the weights of each row's expert; zeros where there is no row.
    RowsGradInput {
        /// The blocks.
        blocks: Blocks,
    } = dispatch::ROWS_GRAD_INPUT,
    /// `dw = dyᵀ · x` of every expert, summed over its rows.
    RowsGradWeight {
        /// How many experts there are.
        experts: usize,
        /// The blocks.
        blocks: Blocks,
    } = dispatch::ROWS_GRAD_WEIGHT,
    /// What the experts of a token give, added up by their weights, or as it is: an input gradient that has come by several experts.
    Combine {
        @[
            /// Whether there are weights.
            weighted: bool
        ]
    } = experts::SUM_CHOICES | experts::COMBINE => usize::from(weighted),
    /// Gradients of `Combine`.
    CombineGrad = experts::COMBINE_GRAD,
    /// How many tokens every expert gets, of all sequences: whole numbers, so that it does not matter who adds what.
    ExpertLoad {
        /// How many experts there are.
        experts: usize,
    } = experts::EXPERT_LOAD,
    /// Sums over micro-batches, one below the other.
    StackTotals = experts::STACK_TOTALS,
    /// Moves the bias of the router's choice against the loads of a step, which are in this row: up where an expert has got less than
    /// the mean, down where it has got more. Does nothing where the factor is NaN.
    MoveBias {
        /// Which of the loads.
        row: usize,
        /// How far.
        rate: f32,
    } = experts::MOVE_BIAS,
    /// `y = gelu(x)`, in the form with a hyperbolic tangent.
    Gelu = pointwise::GELU,
    /// Gradient of `Gelu`.
    GeluGrad = pointwise::GELU_GRAD,
    /// Each element either 0 or scaled by 1 / (1 − rate), by a mask that is a function of the sequence's key, the site,
    /// position and feature (`counter::row_bits`): any rank of any layout draws the same. Its gradient is the same op.
    Dropout {
        /// The fraction of elements that become 0.
        rate: f32,
        /// The place in the model.
        site: u64,
        /// Positions of a whole sequence, of which a rank may have a part.
        seq: usize,
    } = pointwise::DROPOUT,
    /// Elementwise sum.
    Add = pointwise::ADD,
    /// `y = factor · x`.
    Scale {
        /// By what.
        factor: f32,
        /// Whether the factor is rounded to the type of `x` first.
        rounded: bool,
    } = pointwise::SCALE,
    /// `y = x`, in another floating-point type.
    Cast {
        /// Which.
        to: DType,
    } = pointwise::CAST,
    /// Sections of the last dimension that stand side by side, as a tensor of their own.
    Slice {
        /// The first of them.
        first: usize,
        /// How many.
        count: usize,
    } = section::SLICE,
    /// Tensors side by side: the sections of the last dimension of all.
    Concat = section::CONCAT,
    /// Sum of token losses per sequence, with the log-sum-exp of each row of logits. A position whose target is
    /// [`IGNORED_TARGET`](super::IGNORED_TARGET) has no loss, here and in the other ops of the output head.
    CrossEntropy = head::CROSS_ENTROPY,
    /// Gradient of the weighted sum of token losses.
    CrossEntropyGrad {
        /// How much the loss counts.
        weight: f32,
    } = head::CROSS_ENTROPY_GRAD,
    /// `CrossEntropy(Linear(x, w))`, chunk by chunk, so that the logits never exist whole. For training with its gradients: where these are
    /// summed in fixed point, a chunk never crosses two sequences, since a sequence's share does not depend on its neighbours, and with
    /// `scalars` they start with the step's loss scale instead of 1. For tasks with misses, of every position whether greedy decoding misses
    /// its target: 1 where the logit of another token is larger, or as large and the token comes first; 0 elsewhere, and where the target
    /// does not count.
    LinearCrossEntropy {
        @[
            /// Whether it gives misses, and no gradients.
            score: bool
        ]
        /// Most positions of a chunk.
        rows: usize,
    } = head::LINEAR_CROSS_ENTROPY | head::LINEAR_SCORE => usize::from(score),
    /// Adds one gradient accumulator to another: the second use of a tied parameter.
    AddState = gradient::ADD_STATE,
    /// Adds a value to its sum over micro-batches.
    Accumulate = gradient::ACCUMULATE,
    /// The sum of the squares of mean gradients, as a wide integer in parts ([`crate::squares`]): exact over the range of f32,
    /// so that it does not depend on who adds what to what. Elements from `tail` on stand on `sharers` ranks and count in
    /// shares.
    SquareSum {
        /// Ranks that hold the elements from `tail` on.
        sharers: usize,
        /// First shared element of each gradient, counted before flat cuts.
        tail: usize,
    } = gradient::SQUARE_SUM,
    /// Adds such sums.
    MergeSums = gradient::MERGE_SUMS,
    /// The sum of the losses of a micro-batch, as `SquareSum` gives sums: one number whoever adds what.
    LossSum = gradient::LOSS_SUM,
    /// From the sum of squares to the norm of the mean gradient, and the factor that scales and clips gradients (NaN where one
    /// is not finite). With the sum of all losses and [`StepLimits`](crate::StepLimits), it is NaN beyond those too.
    GradientNorm = gradient::GRADIENT_NORM,
    /// One AdamW update with decoupled decay, and the new weights in bf16 where asked for; does nothing where the factor is
    /// NaN.
    AdamW {
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Added to the root of the second moment.
        eps: f32,
        /// Decoupled weight decay, multiplied by the learning rate.
        decay: f32,
        /// Times the step's learning rate.
        lr_scale: f32,
    } = optimizer::ADAMW,
    /// One Lion update: the sign of a mixture of moment and gradient, with decoupled decay; otherwise as `AdamW`.
    Lion {
        /// Share of the moment in the update.
        beta1: f32,
        /// Decay of the moment.
        beta2: f32,
        /// As in `AdamW`.
        decay: f32,
        /// As in `AdamW`.
        lr_scale: f32,
    } = optimizer::LION,
    /// One update by gradient and momentum, with decoupled decay; otherwise as `AdamW`.
    Sgd {
        /// Decay of the momentum.
        momentum: f32,
        /// As in `AdamW`.
        decay: f32,
        /// As in `AdamW`.
        lr_scale: f32,
    } = optimizer::SGD,
    /// The momentum of gradients, and the mixture of both that looks one step ahead (Nesterov); zeros, and the momentum as it
    /// was, where the factor is NaN.
    Momentum {
        /// Decay of the momentum.
        momentum: f32,
    } = optimizer::MOMENTUM,
    /// Of every section of the rows on its own: the nearest matrix with orthogonal rows or columns, about, by five
    /// Newton–Schulz iterations, times 0.2·√(its longer side), which gives it the size of an AdamW update.
    Orthogonalise = optimizer::ORTHOGONALISE,
    /// `w = w − lr · (decay · w + update)`, and the new weights in bf16 where asked for; does nothing where the factor is NaN.
    Descend {
        /// As in `AdamW`.
        decay: f32,
        /// As in `AdamW`.
        lr_scale: f32,
    } = optimizer::DESCEND,
    /// Logits of some positions over a part of the vocabulary, and of each position what the loss needs to know of this part:
    /// largest logit, sum of exponentials below it, the target's logit (−∞ where the target is elsewhere).
    VocabLogits {
        /// Which positions.
        rows: Rows,
        /// Parts of the vocabulary.
        parts: usize,
    } = head::VOCAB_LOGITS,
    /// Sum of token losses per sequence, from the statistics of all parts of the vocabulary, chunk by chunk.
    VocabLoss = head::VOCAB_LOSS,
    /// Of some positions, how many parts of the vocabulary have a token that greedy decoding takes before the target, as in
    /// `LinearCrossEntropy`.
    VocabMisses {
        /// Which positions.
        rows: Rows,
    } = head::VOCAB_MISSES,
    /// Gradients of the sum of token losses of some positions: this part's share of dx, and dw. `scalars` as in `LinearCrossEntropy`.
    VocabGrad {
        /// Which positions.
        rows: Rows,
    } = head::VOCAB_GRAD,
    /// Chunks of positions, one after the other.
    JoinRows = head::JOIN_ROWS,
    /// Partial sums become whole on every rank.
    AllReduce {
        /// Over the ranks along these axes.
        over: Axes,
    } = collective::ALL_REDUCE,
    /// Adds up, between neighbours, the rows that they share: all sections of the outermost dimension but the first, or the only one.
    SumShared {
        /// Neighbours along these axes.
        over: Axes,
        /// How many share.
        sharers: usize,
    } = collective::SUM_SHARED,
    /// Partial sums become whole parts.
    ReduceScatter {
        /// Over the ranks along these axes.
        over: Axes,
        /// Parts of this dimension; flat ranges if `None`.
        dim: Option<usize>,
    } = collective::REDUCE_SCATTER,
    /// Parts become whole on every rank.
    AllGather {
        /// Over the ranks along these axes.
        over: Axes,
        /// Parts of this dimension; flat ranges if `None`.
        dim: Option<usize>,
    } = collective::ALL_GATHER,
    /// Parts go to the next rank and come from the one before, around a ring.
    Shift {
        /// Over the ranks along these axes.
        over: Axes,
    } = collective::SHIFT,
    /// Parts of one dimension become parts of another: every rank sends a part to each, and receives one of each.
    AllToAll {
        /// Over the ranks along these axes.
        over: Axes,
        /// Of this dimension ranks had parts, and have it whole.
        from: usize,
        /// Of this one they had all, and have parts.
        to: usize,
    } = collective::ALL_TO_ALL,
    /// This rank's flat range of a whole: a view, no work.
    Shard {
        /// Over the ranks along these axes.
        over: Axes,
    } = collective::SHARD,
    /// This rank's part of a whole matrix: a copy.
    Part {
        /// Over the ranks along these axes.
        over: Axes,
        /// Parts of this dimension.
        dim: usize,
    } = section::PART,
    /// A copy on the device of a state, or of an activation, that is kept in the host's memory.
    Fetch = memory::FETCH,
    /// Back to the host's memory.
    Offload = memory::OFFLOAD,
    /// To the same rank of another pipeline stage.
    Send {
        /// The stage.
        stage: usize,
        /// Which stream of messages.
        tag: u32,
    } = collective::SEND,
    /// From the same rank of another pipeline stage.
    Receive {
        /// The stage.
        stage: usize,
        /// Which stream of messages.
        tag: u32,
    } = collective::RECEIVE,
}
