//! Llama: the shared decoder as it is.

use crate::decoder::Decoder;

pub(crate) const LLAMA: Decoder = Decoder { qkv_bias: false, qk_norm: false };
