//! DeepSeek-MoE: the shared decoder with a mixture of experts in place of its MLP, after some layers that keep theirs. Some experts
//! are shared: every token goes to them.

pub(crate) use crate::decoder::build;
