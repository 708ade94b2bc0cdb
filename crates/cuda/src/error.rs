//! What can go wrong on a device.

use crate::library::{FOLDER_VARIABLE, Name};
use lockstep_exec::comm::{CommError, Communicator};
use lockstep_exec::{ExecError, Remedy};
use lockstep_ir::Hint;

const MEMORY_HINT: &str = "end other programs on it (see `nvidia-smi`)";
const RESUME: &str =
    "no checkpoint that was written is harmed: the same command again goes on from the latest, if there is one";

/// Why the device does not do what it should.
#[derive(Clone, Debug, thiserror::Error, lockstep_ir::Hint)]
pub enum CudaError {
    /// A library is not there, or not whole.
    #[error("{} {problem}", library.name())]
    #[hint("{}; where it is installed elsewhere, name its folder in {FOLDER_VARIABLE}", library.hint())]
    Library {
        /// The library.
        library: Name,
        /// What is wrong with it.
        problem: String,
    },
    /// A library is too old or too new.
    #[error("{path} has no function {symbol}: it is of another version")]
    #[hint("{hint}")]
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
        "the NVIDIA driver speaks CUDA {}.{}, {}.{} is needed",
        found / 1000, found % 1000 / 10, least / 1000, least % 1000 / 10
    )]
    #[hint("install driver 580 or newer")]
    OldDriver {
        /// What it speaks.
        found: i32,
        /// What is needed.
        least: i32,
    },
    /// The driver has no device.
    #[error("no CUDA device was found")]
    #[hint("check `nvidia-smi` and CUDA_VISIBLE_DEVICES")]
    NoDevice,
    /// The driver has fewer devices.
    #[error("there is no GPU {ordinal}: {count} {} found, counted from 0", if *.count == 1 { "was" } else { "were" })]
    #[hint("take one of those; CUDA_VISIBLE_DEVICES may hide others")]
    NoSuchDevice {
        /// Which was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The run of several ranks has ended.
    #[error(transparent)]
    #[hint(_0.hint())]
    Ranks(#[from] CommError),
    /// The driver does not start, or the device cannot be opened.
    #[error("{what}: {text}")]
    #[hint("{hint}")]
    Start {
        /// Which of the two.
        what: &'static str,
        /// What it says.
        text: String,
        /// What to do.
        hint: &'static str,
    },
    /// The device is older than fp8.
    #[error(
        "{name} has no matmuls in fp8: its compute capability is {}.{}, and 8.9 (Ada, Hopper) is the first that has",
        capability / 10, capability % 10
    )]
    #[hint("train in bf16, or on another GPU")]
    NoFp8 {
        /// The device.
        name: String,
        /// Its compute capability, as 10 × major + minor.
        capability: u32,
    },
    /// The matmul library has no matmuls in fp8 with such scales.
    #[error(
        "cuBLASLt {}.{} has no matmul in fp8 with a scale for each {each} on this GPU: those are for compute capability 9.0, from \
         cuBLASLt 12.9 on",
        version / 10_000, version / 100 % 100
    )]
    #[hint("choose the recipe with a scale for each tensor (current), or train in bf16")]
    NoRecipe {
        /// Its version, as 10000 × major + 100 × minor + patch.
        version: usize,
        /// What has a scale.
        each: &'static str,
    },
    /// No memory is left.
    #[error("the device has no memory left")]
    #[hint("{MEMORY_HINT}")]
    OutOfMemory,
    /// There is no room for the arena.
    #[error("the device has no room for the arena of {arena}: {free} of {memory} are free")]
    #[hint("{MEMORY_HINT}")]
    Arena {
        /// What was asked for.
        arena: String,
        /// What is free.
        free: String,
        /// What the device has.
        memory: String,
    },
    /// The host does not give as much memory that the device can copy from and to.
    #[error("{bytes} of the host's memory cannot be pinned: {cause}")]
    #[hint(
        "keep less in the host's memory, end other programs, or allow more locked memory (`ulimit -l`, the memory limit of the job or container)"
    )]
    Pinned {
        /// What was asked for.
        bytes: String,
        /// What the driver says.
        cause: String,
    },
    /// The device has stopped: nothing more can be done on it by this process.
    #[error("the device was lost: {call} says {text}")]
    #[hint("{hint}; {RESUME}")]
    Lost {
        /// The function that told.
        call: &'static str,
        /// What it says.
        text: String,
        /// What to look at.
        hint: &'static str,
    },
    /// The device does not get on.
    #[error("the GPU has done nothing for {seconds:.1} s: it is in {at}")]
    #[hint("{LOOK}; {RESUME}")]
    Stalled {
        /// How long.
        seconds: f64,
        /// Where.
        at: String,
    },
    /// A call failed.
    #[error("{call} failed: {text}")]
    #[hint("see `nvidia-smi` and `lockstep doctor`; {RESUME}")]
    Call {
        /// The function.
        call: &'static str,
        /// What it says.
        text: String,
    },
    /// A kernel does not compile.
    #[error("kernel {name} does not compile: {text}")]
    #[hint("`lockstep doctor` shows which NVRTC is used; 13.0 is tested")]
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
    #[error("internal error: {0}")]
    #[hint("this is a bug in Lockstep, please report it with your config")]
    Internal(String),
}

impl CudaError {
    /// The device tells of errors late, at whatever is called next: they are of the entry that was queued last.
    pub(crate) fn behind(self, entry: Option<&str>) -> Self {
        let more = |text: String| match entry {
            Some(entry) => format!("{text}, in `{entry}` or what was queued after it"),
            None => text,
        };
        match self {
            CudaError::Call { call, text } => CudaError::Call { call, text: more(text) },
            CudaError::Lost { call, text, hint } => CudaError::Lost { call, text: more(text), hint },
            other => other,
        }
    }

    /// What ends the run for all ranks where a queue meets this error; one of the run is the others' already.
    pub(crate) fn told(self, comm: &dyn Communicator, entry: Option<&str>) -> CommError {
        let error = match self {
            CudaError::Ranks(error) => return error,
            error => error.behind(entry),
        };
        comm.fail_with(&error.to_string(), error.hint());
        let (rank, reason) = (comm.rank(), "the device failed".to_owned());
        comm.failure().unwrap_or(CommError::Failed { rank, host: None, place: None, reason, hint: None })
    }

    /// What a status of the driver means. `text` is what the driver says of it.
    pub(crate) fn of_status(call: &'static str, status: i32, text: String) -> Self {
        // What fails at the start was never there to be lost.
        let what = match call {
            "cuInit" => Some("the NVIDIA driver does not start"),
            "cuDevicePrimaryCtxRetain" => Some("the device cannot be opened"),
            _ => None,
        };
        match (status, what, start_hint(status), lost_hint(status)) {
            (2, ..) => CudaError::OutOfMemory,
            (100, ..) => CudaError::NoDevice,
            (46, Some(what), ..) => CudaError::Start { what, text, hint: HELD },
            (_, what, Some(hint), _) => {
                CudaError::Start { what: what.unwrap_or("the NVIDIA driver does not start"), text, hint }
            }
            (_, Some(what), None, hint) => CudaError::Start { what, text, hint: hint.unwrap_or(LOOK) },
            (_, None, None, Some(hint)) => CudaError::Lost { call, text, hint },
            (_, None, None, None) => CudaError::Call { call, text },
        }
    }

    /// The same for a status of cuDNN. `text` is what the library says of it.
    pub(crate) fn of_cudnn(call: &'static str, status: i32, text: String) -> Self {
        let text = format!("{text} (cuDNN status {status})");
        match status {
            4004 => CudaError::OutOfMemory,
            // An execution that failed, by which library it may be.
            5000..=5999 => CudaError::Lost { call, text, hint: LOOK },
            _ => CudaError::Call { call, text },
        }
    }

    /// Whether nothing more can be done on the device by this process.
    pub(crate) fn lost(&self) -> bool {
        matches!(self, CudaError::Lost { .. })
    }

    /// The same for a status of NCCL. `text` is what the library says of it.
    pub(crate) fn of_nccl(call: &'static str, status: i32, text: String) -> Self {
        CudaError::Call { call, text: format!("{text} (NCCL status {status})") }
    }

    /// The same for a status of cuBLASLt.
    pub(crate) fn of_cublas(call: &'static str, status: i32) -> Self {
        let text = match status {
            1 => "not initialised",
            3 => return CudaError::OutOfMemory,
            7 => "invalid value",
            8 => "not made for this device",
            13 => "execution failed",
            14 => "internal error",
            15 => "not supported",
            _ => "unknown",
        };
        let text = format!("{text} (cuBLAS status {status})");
        match status {
            13 | 14 => CudaError::Lost { call, text, hint: LOOK },
            _ => CudaError::Call { call, text },
        }
    }
}

const HELD: &str = "another program holds it alone, or its compute mode lets nobody in: see `nvidia-smi`; `nvidia-smi --compute-mode=DEFAULT` lets several in";
const LOOK: &str = "see `nvidia-smi` and, for lines with Xid, `dmesg`";

/// What to do about a driver that does not start.
fn start_hint(status: i32) -> Option<&'static str> {
    match status {
        34 => Some("libcuda.so.1 is a stub for building programs: take its folder out of LD_LIBRARY_PATH"),
        802 => Some("the machine's NVSwitch is not up: start the service nvidia-fabricmanager"),
        803 => {
            Some("libcuda.so.1 is not of the version of the loaded kernel module: restart the machine after an update")
        }
        804 => Some("libcuda.so.1 of a folder cuda/compat does not run on this device: take it out of LD_LIBRARY_PATH"),
        _ => None,
    }
}

/// What to look at after a device has stopped with this status; nothing where it has not stopped.
fn lost_hint(status: i32) -> Option<&'static str> {
    match status {
        46 => Some("another program may hold it alone, or it has fallen off the bus: see `nvidia-smi`"),
        214 | 220 | 226 => Some(
            "its memory or links are faulty: see `nvidia-smi -q`, reset it with `nvidia-smi --gpu-reset`, or use another",
        ),
        702 => Some("a kernel ran into the time limit of a device with a display: train on one without"),
        700 | 710 | 714..=719 => Some(
            "see `nvidia-smi` and, for lines with Xid, `dmesg`; where it happens again at the same step, please report it with your config",
        ),
        709 | 999 => Some(LOOK),
        _ => None,
    }
}

impl From<CudaError> for ExecError {
    fn from(error: CudaError) -> Self {
        let remedy = match &error {
            CudaError::Ranks(error) => return ExecError::Rank(error.clone()),
            CudaError::OutOfMemory | CudaError::Arena { .. } | CudaError::Pinned { .. } => Some(Remedy::LessMemory),
            CudaError::OldDriver { .. } | CudaError::NoDevice | CudaError::NoFp8 { .. } => Some(Remedy::OtherDevice),
            CudaError::Stalled { .. } => Some(Remedy::LongerTimeout),
            CudaError::Library { .. }
            | CudaError::Symbol { .. }
            | CudaError::NoSuchDevice { .. }
            | CudaError::Start { .. }
            | CudaError::Lost { .. }
            | CudaError::Call { .. }
            | CudaError::Compile { .. }
            | CudaError::NoRecipe { .. }
            | CudaError::Unsupported(_)
            | CudaError::Internal(_) => None,
        };
        ExecError::Device { text: error.to_string(), hint: error.hint(), remedy }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_means_what_the_driver_says_and_where() {
        let start = ["cuInit", "cuDevicePrimaryCtxRetain"];
        let of = |call, status| CudaError::of_status(call, status, "text".into());
        for call in start {
            for status in [34, 46, 214, 802, 803, 804, 999, 1] {
                assert!(matches!(of(call, status), CudaError::Start { .. }), "{call} {status}");
            }
            assert!(matches!(of(call, 2), CudaError::OutOfMemory) && matches!(of(call, 100), CudaError::NoDevice));
        }
        assert!(of("cuDevicePrimaryCtxRetain", 46).with_hint().contains("`nvidia-smi --compute-mode=DEFAULT`"));
        assert!(of("cuInit", 804).with_hint().contains("take it out of LD_LIBRARY_PATH"));
        // While it runs.
        for status in [46, 214, 220, 226, 700, 702, 709, 710, 714, 719, 999] {
            assert!(of("cuStreamSynchronize", status).lost(), "{status}");
        }
        for status in [1, 400, 701] {
            assert!(matches!(of("cuLaunchKernel", status), CudaError::Call { .. }), "{status}");
        }
    }

    #[test]
    fn a_status_of_a_library_means_what_it_says() {
        let cublas = |status| CudaError::of_cublas("cublasLtMatmul", status);
        assert!(cublas(13).lost() && cublas(14).lost() && matches!(cublas(3), CudaError::OutOfMemory));
        assert!(matches!(cublas(15), CudaError::Call { .. }));
        let cudnn = |status| CudaError::of_cudnn("cudnnBackendExecute", status, "text".into());
        assert!(cudnn(5000).lost() && cudnn(5003).lost() && matches!(cudnn(4004), CudaError::OutOfMemory));
        assert!(matches!(cudnn(3000), CudaError::Call { .. }) && cudnn(4000).to_string().contains("4000"));
    }
}
