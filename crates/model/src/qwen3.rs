//! Qwen 3: the shared decoder with norms over the heads of Q and K.

use crate::decoder::Decoder;

pub(crate) const QWEN3: Decoder = Decoder { qkv_bias: false, qk_norm: true };
