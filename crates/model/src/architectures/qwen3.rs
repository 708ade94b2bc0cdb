//! Qwen 3: the shared decoder with norms over the heads of Q and K.

pub(crate) use crate::decoder::build;
