//! A machine: its devices and how programs are loaded on them, the processes that run together, peaks, and measured profiles.
//!
//! This crate owns what differs from machine to machine. It knows nothing of checkpoints, data or what a program is for.
#![forbid(unsafe_code)]

mod clock;
mod device;
mod devices;
mod elastic;
mod energy;
mod error;
mod gpus;
mod hardware;
mod peak;
mod prediction;
mod processes;

pub use device::HostDevice;
pub use devices::Devices;
pub use elastic::{Elastic, ElasticError, Membership, Rejoined, has_begun};
pub use energy::{EnergyMeter, Joules};
pub use error::{HostError, Result};
pub use gpus::SHARES as SHARES_GPUS;
pub use hardware::{catalogue, catalogue_folder, machines_folder, profile_of, write_machine, write_profile};
pub use peak::{Peak, date};
pub use prediction::{Prediction, machine_profile, predict, predict_by};
pub use processes::{ProcessGroup, Processes, StopSignal, busy};

/// Lets `?` turn errors of lower crates into one that holds them through another: `from_below!(Outer, Inner: A, B)`.
#[macro_export]
macro_rules! from_below {
    ($to:ty, $through:ty: $($from:ty),+) => {$(
        impl From<$from> for $to {
            fn from(error: $from) -> Self {
                <$through>::from(error).into()
            }
        }
    )+};
}
