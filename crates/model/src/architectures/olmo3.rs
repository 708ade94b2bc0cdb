//! OLMo 3: OLMo 2 with a sliding window in three of four layers, whose RoPE is not scaled.

pub(crate) use crate::decoder::build;
