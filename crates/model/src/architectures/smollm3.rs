//! SmolLM3: the shared decoder, where every fourth layer has no RoPE (`model.rope_layers`).

pub(crate) use crate::decoder::build;
