//! Qwen 3 MoE: the shared decoder with norms over the heads of Q and K, and a mixture of experts in place of its MLP.

pub(crate) use crate::decoder::build;
