//! The CUDA executor: the same step program on an NVIDIA GPU.
//!
//! Nothing of CUDA is needed to build this crate, or to start a program that uses it: driver, compiler and libraries are looked
//! for when a device is asked for. `unsafe` is confined to calls of these libraries.

mod attention;
mod best;
mod cache;
mod call;
mod collectives;
mod cudnn;
mod device_queue;
mod driver;
mod energy;
mod error;
mod executor;
mod gpu;
mod initial;
mod kernels;
#[cfg(test)]
mod launches;
mod library;
mod linked;
mod matmul;
mod nccl;
mod nccl_queue;
mod nccl_world;
mod numbers;
mod nvml;
mod nvrtc;
mod ops;
pub mod peaks;
mod progress;
mod send_buffer;
mod sources;
mod staging;
mod subjects;
mod survey;
mod tensor_map;
mod watchdog;

pub use device_queue::CaptureTurn;
pub use driver::{Device, end_if_abandoned};
pub use error::CudaError;
pub use executor::CudaExecutor;
pub use gpu::Gpu;
pub use library::{NOT_FOUND, Name as LibraryName};
pub use linked::{Neighbours, check_nccl};
pub use nvml::{Nvml, Telemetry};
pub use ops::profile;
pub use sources::compile_all;
pub use subjects::{process_subject, subjects};
pub use survey::{Finding, LIBRARIES, device_count, device_name, survey, survey_libraries};
