//! OLMoE: the shared decoder with norms over all of Q and all of K, and a mixture of experts in place of its MLP.

pub(crate) use crate::decoder::build;
