//! The passes over the graph, in order.

mod autodiff;
mod fuse;
mod optimizer;

pub use autodiff::autodiff;
pub use fuse::fuse;
pub use optimizer::{AdamW, STATS};

use crate::Context;
use lockstep_ir::{Graph, TypeError};

/// Whether a pass may change the bits of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The same bits before and after.
    BitPreserving,
    /// The same mathematics, rounded in another order.
    NumericsChanging,
}

/// A pure function from graph to graph.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Its name in `explain --verbose`.
    pub name: &'static str,
    /// What it does to the bits.
    pub effect: Effect,
    /// The function.
    pub run: fn(&Graph, &Context) -> Result<Graph, TypeError>,
}

/// Every pass of a training step, in order.
pub const TRAINING_PASSES: [Pass; 3] = [
    Pass { name: "fuse", effect: Effect::NumericsChanging, run: fuse },
    Pass { name: "autodiff", effect: Effect::BitPreserving, run: autodiff },
    Pass { name: "optimizer", effect: Effect::BitPreserving, run: optimizer::optimizer },
];
