//! DeepSeek-V3: the shared decoder with latent attention, and a mixture of experts with sigmoid scores, a bias of the choice, groups and
//! shared experts after some layers with an MLP.

pub(crate) use crate::decoder::build;
