//! Qwen 2 and 2.5: the shared decoder with a bias on Q, K and V.

use crate::decoder::Decoder;

pub(crate) const QWEN2: Decoder = Decoder { qkv_bias: true, qk_norm: false };
