//! dots.llm1: the shared decoder with norms over the heads of Q and K, and DeepSeek-V3's mixture of experts: sigmoid scores, a bias of
//! the choice, shared experts, dense first layers.

pub(crate) use crate::decoder::build;
