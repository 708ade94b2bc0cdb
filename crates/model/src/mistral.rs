//! Mistral: the shared decoder, whose attention sees a window (`model.window`).

use crate::decoder::Decoder;

pub(crate) const MISTRAL: Decoder = Decoder { qk_norm: false };
