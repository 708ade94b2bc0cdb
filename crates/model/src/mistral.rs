//! Mistral: the shared decoder, whose attention sees a window (`model.sliding_window`).

use crate::decoder::Decoder;

pub(crate) const MISTRAL: Decoder = Decoder { qkv_bias: false, qk_norm: false };
