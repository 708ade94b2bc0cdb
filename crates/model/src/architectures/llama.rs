//! Llama: the shared decoder as it is.

pub(crate) use crate::decoder::build;
