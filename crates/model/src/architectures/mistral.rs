//! Mistral: the shared decoder, whose attention sees a window (`model.sliding_window`).

pub(crate) use crate::decoder::build;
