//! Qwen 2 and 2.5: the shared decoder with a bias on Q, K and V.

pub(crate) use crate::decoder::build;
