//! DeepSeek-V2: the shared decoder with latent attention, and a mixture of experts with softmax scores, a scale, groups and shared experts
//! after some layers with an MLP.

pub(crate) use crate::decoder::build;
