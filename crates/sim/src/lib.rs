//! How long a step takes, before it runs: a hardware catalogue, a cost model, and an event simulation over the programs of
//! all pipeline stages.
//!
//! The fourth reader of a program, beside executors, verifier and `explain`. It prices instructions, and knows nothing of where
//! programs come from. Another framework is a [`Framework`], data only: the cost of the same programs is estimated with it.
//! It does no I/O, reads no clock and no environment; data files that a user adds come as text.
//!
//! Preparing a program ([`Workload::new`]) is separate from pricing it ([`Placed::price`]), which takes
//! microseconds: a fit calls that millions of times.
#![forbid(unsafe_code)]

pub mod collective;
pub mod constants;
pub mod energy;
pub mod events;
pub mod forecast;
pub mod framework;
pub mod hardware;
pub mod machine;
mod matmul;
mod place;
mod price;
mod work;
mod workload;

pub use constants::{Constant, Constants, Terms};
pub use energy::Energy;
pub use forecast::{Asked, Forecast, InstructionTime, Interval, RoleForecast, simulate};
pub use framework::Framework;
pub use hardware::{Catalogue, ClusterSpec, GpuSpec, Hardware};
pub use machine::{MachineProfile, MeasuredTimes, Setting};
pub use place::Placed;
pub use work::{Demand, Kernel, Routed, TimeClass};
pub use workload::Workload;

use lockstep_ir::TypeError;

/// What a prediction gives, or why it does not.
pub type Result<T, E = SimError> = std::result::Result<T, E>;

impl SimError {
    /// What is wrong with a data file, and what to do.
    pub fn file(file: impl Into<String>, reason: impl Into<String>, hint: impl Into<String>) -> Self {
        SimError::File { file: file.into(), reason: reason.into(), hint: hint.into() }
    }
}

/// Why programs cannot be simulated.
#[derive(Clone, Debug, PartialEq, thiserror::Error, lockstep_ir::Hint)]
pub enum SimError {
    /// An instruction that no op table row describes: a bug of a pass.
    #[error(transparent)]
    Type(#[from] TypeError),
    /// The programs have no such entry.
    #[error("the programs have no entry `{0}`")]
    NoEntry(String),
    /// The stages wait for each other for ever: a bug of a schedule.
    #[error("the stages wait for each other: {0}")]
    Deadlock(String),
    /// A data file.
    #[error("{file}: {reason}")]
    #[hint("{hint}")]
    File {
        /// Which.
        file: String,
        /// What is wrong with it.
        reason: String,
        /// What to do.
        hint: String,
    },
}
