//! OLMo 2: the shared decoder with norms after attention and MLP instead of before them, and norms over all of Q and all of K.

pub(crate) use crate::decoder::build;
