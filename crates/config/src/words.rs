//! Keys whose value is one of a few words: an enum for each, whose words are those that the schema accepts.
//!
//! Matches over such an enum have no `_`.

use crate::value::{Field, Value};
use lockstep_ir::{ContextParallel, Schedule};

/// Declares enums whose variants are the words of a key.
macro_rules! words {
    ($($(#[$about:meta])+ $Name:ident { $($(#[$doc:meta])+ $Variant:ident = $word:literal,)+ })+) => {$(
        $(#[$about])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $Name {
            $($(#[$doc])+ $Variant,)+
        }

        impl $Name {
            /// Every one, in the order of the schema.
            pub const ALL: &'static [Self] = &[$(Self::$Variant),+];
            /// The word of each, in the same order.
            pub const WORDS: &'static [&'static str] = &[$($word),+];

            /// The word in `run.toml`.
            pub const fn word(self) -> &'static str {
                match self {
                    $(Self::$Variant => $word,)+
                }
            }
        }

        impl std::fmt::Display for $Name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.word())
            }
        }

        impl serde::Serialize for $Name {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(self.word())
            }
        }

        impl Field for $Name {
            fn from_value(value: Option<Value>) -> Option<Self> {
                let Some(Value::Text(word)) = value else { return None };
                Self::ALL.iter().copied().find(|one| one.word() == word)
            }

            fn to_value(&self) -> Option<Value> {
                Some(Value::Text(self.word().to_owned()))
            }
        }
    )+};
}
pub(crate) use words;

words! {
    /// How attention is computed in training.
    AttentionMethod {
        /// Tile by tile.
        Flash = "flash",
        /// With the matrix of its weights.
        Naive = "naive",
    }

    /// Where norms stand in a layer.
    NormPlaces {
        /// Before attention and before the feed-forward block.
        Pre = "pre",
        /// After each of them, before its result is added to the residual stream.
        Post = "post",
        /// Before and after each.
        Sandwich = "sandwich",
    }

    /// What of Q and K is normed.
    QkNorm {
        /// Nothing.
        None = "none",
        /// Every head.
        Head = "head",
        /// All of Q at once, and all of K.
        Whole = "whole",
    }

    /// The activation function of the feed-forward block.
    Activation {
        /// SiLU (swish).
        Silu = "silu",
        /// GELU, by its tanh approximation.
        Gelu = "gelu",
        /// `(up + 1) · gate · sigmoid(1.702 · gate)` of clamped gate and up.
        ClampedSwiGlu = "clamped_swiglu",
    }

    /// What the attention of a layer sees.
    LayerType {
        /// The last `model.sliding_window` tokens.
        Sliding = "sliding",
        /// All tokens before.
        Full = "full",
    }

    /// Which device computes.
    DeviceChoice {
        /// A GPU where one is found.
        Auto = "auto",
        /// The CPU.
        Cpu = "cpu",
        /// An NVIDIA GPU.
        Cuda = "cuda",
    }

    /// What the records of the data hold.
    DataFormat {
        /// Text.
        Text = "text",
        /// Conversations.
        Chat = "chat",
    }

    /// What of a conversation counts in the loss.
    TrainOnTurns {
        /// Every turn of the assistant.
        Assistant = "assistant",
        /// The last turn of the assistant.
        Last = "last",
        /// Everything.
        All = "all",
    }

    /// The types of parameters and activations.
    PrecisionPolicy {
        /// fp32 alone.
        Fp32 = "fp32",
        /// fp32, with matmuls that may round to TF32.
        Tf32 = "tf32",
        /// Mixed precision in bf16.
        Bf16 = "bf16",
        /// Mixed precision in fp16, with a loss scale.
        Fp16 = "fp16",
        /// Mixed precision in bf16, with the matmuls of layers in fp8.
        Fp8 = "fp8",
    }

    /// What has a scale of its own in fp8.
    Fp8Recipe {
        /// A tensor, by its largest element in this micro-batch.
        Current = "current",
        /// A tensor, by its largest elements in the last steps.
        Delayed = "delayed",
        /// A row of a matmul's operand.
        Rowwise = "rowwise",
        /// 128 elements of a row; of a weight 128 × 128.
        Block = "block",
    }

    /// What gradients are accumulated in.
    GradientPrecision {
        /// fp32.
        Fp32 = "fp32",
        /// bf16.
        Bf16 = "bf16",
    }

    /// What the optimizer's moments are kept in.
    MomentPrecision {
        /// fp32.
        Fp32 = "fp32",
        /// bf16.
        Bf16 = "bf16",
        /// 8 bits, in blocks of 256 with a scale each.
        Int8 = "int8",
    }

    /// What master weights are kept in.
    MasterPrecision {
        /// fp32.
        Fp32 = "fp32",
        /// bf16: weights are their own.
        Bf16 = "bf16",
    }

    /// What weights that are not trained are kept in.
    FrozenPrecision {
        /// As the policy says.
        Policy = "policy",
        /// fp8 (E4M3).
        Fp8 = "fp8",
        /// Signed bytes.
        Int8 = "int8",
    }

    /// Where the layout comes from.
    LayoutSource {
        /// The keys of `parallel`.
        Given = "given",
        /// A search when the run starts.
        Auto = "auto",
    }

    /// What backward recomputes.
    RecomputePolicy {
        /// Nothing.
        None = "none",
        /// Norms, activation functions, the weights of naive attention.
        Selective = "selective",
        /// All of a layer.
        Full = "full",
        /// All of `recompute.every` layers.
        EveryK = "every-k",
        /// The same with the square root of the number of layers.
        Sqrt = "sqrt",
        /// The outputs of `recompute.ops`.
        List = "list",
        /// As little as lets the arena fit `recompute.budget`.
        Budget = "budget",
    }

    /// The learning rate after warmup.
    LrSchedule {
        /// Cosine decay.
        Cosine = "cosine",
        /// Linear decay.
        Linear = "linear",
        /// Constant, then linear decay.
        Wsd = "wsd",
        /// No decay.
        Constant = "constant",
    }
}

/// The words of pipeline schedules are those of `ir`.
impl Field for Schedule {
    fn from_value(value: Option<Value>) -> Option<Self> {
        let Some(Value::Text(word)) = value else { return None };
        word.parse().ok()
    }

    fn to_value(&self) -> Option<Value> {
        Some(Value::Text(self.name().to_owned()))
    }
}

/// The words of context parallelism are those of `ir`.
impl Field for ContextParallel {
    fn from_value(value: Option<Value>) -> Option<Self> {
        let Some(Value::Text(word)) = value else { return None };
        Self::named(&word)
    }

    fn to_value(&self) -> Option<Value> {
        Some(Value::Text(self.name().to_owned()))
    }
}
