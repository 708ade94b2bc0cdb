//! Gemma 3, without its vision: the shared decoder with norms before and after attention and MLP, by 1 + their weights, norms over the
//! heads of Q and K, GeGLU, a scaled embedding, and a sliding window with a RoPE of its own in five of six layers.

pub(crate) use crate::decoder::build;
