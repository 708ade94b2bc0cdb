//! Executors: they run step programs and decide nothing.
//!
//! This crate owns the [`Executor`] trait, the CPU executor with its kernels, and the f64 reference that every kernel
//! is held against. It knows nothing of models, passes or training. `unsafe` stands only in `cpu`, `comm`, `copy` and
//! `library`.

pub mod bound;
pub mod comm;
pub mod conformance;
mod copy;
pub mod cpu;
mod error;
mod executor;
mod families;
mod host;
pub mod initial;
pub mod library;
pub mod numbers;
pub mod reference;
mod sync;
mod world;

pub use copy::{HostBytes, copy, copy_pieces};
pub use error::{ExecError, Remedy};
pub use executor::{DeviceTime, Executor, Note, Taken, Ticket, Timing};
pub use numbers::NotFinite;
pub use world::{Alone, ProcessWorld, Rank, ThreadWorld, World};

#[cfg(test)]
mod tests {
    #[test]
    fn a_copy_in_parts_is_a_copy() {
        for len in [0, 1, (1 << 20) - 1, (1 << 20) + 1, (9 << 20) + 3] {
            let from: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let mut to = vec![0; len];
            super::copy(&mut to, &from);
            assert!(to == from, "{len} bytes");
        }
    }
}
