//! What can go wrong on a device.

/// Why the device does not do what it should.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CudaError {
    /// A library is not there.
    #[error("{name} was not found\nhint: {hint}; `lockstep doctor` shows where libraries are looked for")]
    Library {
        /// The library.
        name: &'static str,
        /// How to get it.
        hint: &'static str,
    },
    /// A library is too old or too new.
    #[error("{path} has no function {symbol}\nhint: {hint}")]
    Symbol {
        /// The library.
        path: String,
        /// What it lacks.
        symbol: String,
        /// How to get another.
        hint: &'static str,
    },
    /// The driver is too old.
    #[error(
        "the NVIDIA driver speaks CUDA {}.{}, {}.{} is needed\nhint: install driver 580 or newer, or train with train.device = \"cpu\"",
        found / 1000, found % 1000 / 10, least / 1000, least % 1000 / 10
    )]
    OldDriver {
        /// What it speaks.
        found: i32,
        /// What is needed.
        least: i32,
    },
    /// The driver has no device.
    #[error(
        "no CUDA device was found\nhint: check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or train with train.device = \"cpu\""
    )]
    NoDevice,
    /// No memory is left.
    #[error(
        "the device has no memory left\nhint: end other programs on it (see `nvidia-smi`), lower train.micro_batch, or set recompute.policy = \"selective\""
    )]
    OutOfMemory,
    /// A call failed.
    #[error(
        "{call}: {text}\nhint: the device may have been lost: see `nvidia-smi` and the system log; the latest checkpoint is whole, and the same command goes on from it"
    )]
    Call {
        /// The function.
        call: &'static str,
        /// What it says.
        text: String,
    },
    /// A kernel does not compile.
    #[error(
        "kernel {name} does not compile: {text}\nhint: `lockstep doctor` shows which NVRTC is used; 13.0 is tested"
    )]
    Compile {
        /// The kernel.
        name: String,
        /// What the compiler says.
        text: String,
    },
    /// A library does not do it.
    #[error("{0}")]
    Unsupported(String),
    /// A bug.
    #[error("internal error: {0}\nhint: this is a bug in Lockstep, please report it with your config")]
    Internal(String),
}

impl From<CudaError> for lockstep_exec::ExecError {
    fn from(error: CudaError) -> Self {
        lockstep_exec::ExecError::Device(error.to_string())
    }
}
