//! Which device runs a program: what the compiler must know of it, and how a program gets there.

use crate::TrainError;
use lockstep_compile::Precision;
use lockstep_config::Config;
use lockstep_cuda::{CudaError, CudaExecutor, Gpu, LibraryName, NOT_FOUND, Telemetry};
use lockstep_exec::cpu::{self, CpuExecutor};
use lockstep_exec::{Alone, ExecError, Executor, ThreadWorld, World};
use lockstep_ir::hardware;
use lockstep_ir::{DType, DeviceProfile, StepProgram};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU.
    Cuda {
        /// Whether the same program on the same data gives the same bits every time.
        deterministic: bool,
    },
}

impl Device {
    /// What a config asks for. `auto` takes a GPU where there is one and the run has one rank: several would share it.
    pub fn of(config: &Config) -> Self {
        let cuda = Device::Cuda { deterministic: config.train.deterministic };
        match config.train.device.as_str() {
            "cuda" => cuda,
            "auto" if config.layout().mesh.ranks() > 1 => Device::Cpu,
            "auto" if cuda.check(config).is_ok() && Gpu::check().is_ok() => cuda,
            _ => Device::Cpu,
        }
    }

    /// Why `auto` takes the CPU for one rank on a machine that has, or had, a GPU. One line.
    pub(crate) fn not_taken(config: &Config) -> Option<String> {
        if config.train.device != "auto" || config.layout().mesh.ranks() > 1 {
            return None;
        }
        let (problem, hint) = match Gpu::check() {
            // Most machines have no GPU: that is nothing to tell.
            Err(CudaError::Library { library: LibraryName::Driver, problem }) if problem == NOT_FOUND => return None,
            Err(error) => error.lines(),
            Ok(()) => {
                let cuda = Device::Cuda { deterministic: config.train.deterministic };
                let error = cuda.check(config).err()?.to_string();
                error.split_once("\nhint: ").map(|(problem, hint)| (problem.to_owned(), hint.to_owned()))?
            }
        };
        Some(format!("training on the CPU: {problem} ({hint})"))
    }

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Cuda { .. } => "cuda",
        }
    }

    /// What the compiler must know of it.
    pub(crate) fn profile(self, threads: usize, precision: Precision) -> DeviceProfile {
        match self {
            Device::Cpu => cpu::profile(threads, precision.compute, precision.gradients),
            Device::Cuda { deterministic } => {
                lockstep_cuda::profile("cuda", precision.compute, precision.gradients, deterministic)
            }
        }
    }

    /// FLOP per second of a large matmul, and bytes per second of a copy, both measured.
    pub(crate) fn peaks(self, threads: usize, compute: DType) -> Result<(f64, f64), TrainError> {
        match self {
            Device::Cpu => Ok((cpu::peaks::matmul(threads, compute)?, cpu::peaks::bandwidth(threads)?)),
            Device::Cuda { .. } => {
                let gpu = gpu()?;
                let cuda = |r: Result<f64, CudaError>| r.map_err(ExecError::from);
                let matmul = cuda(lockstep_cuda::peaks::matmul(&gpu, compute))?;
                Ok((matmul, cuda(lockstep_cuda::peaks::bandwidth(&gpu))?))
            }
        }
    }

    /// What MFU is measured against: the vendor's figure where it is known, else what is measured now.
    pub(crate) fn peak(self, threads: usize, compute: DType) -> Result<f64, TrainError> {
        match (self.vendor_peak(compute)?, self) {
            (Some(peak), _) => Ok(peak),
            (None, Device::Cpu) => Ok(cpu::peaks::matmul(threads, compute)?),
            (None, Device::Cuda { .. }) => {
                Ok(lockstep_cuda::peaks::matmul(&*gpu()?, compute).map_err(ExecError::from)?)
            }
        }
    }

    /// The vendor's figure for dense matmuls, where it is known.
    pub(crate) fn vendor_peak(self, compute: DType) -> Result<Option<f64>, TrainError> {
        match self {
            Device::Cpu => Ok(None),
            Device::Cuda { .. } => Ok(hardware::Gpu::of_device(&gpu()?.device.name).map(|g| g.peak(compute))),
        }
    }

    /// Refuses what the device does not do.
    pub(crate) fn check(self, config: &Config) -> Result<(), TrainError> {
        let what = match self {
            Device::Cpu => return Ok(()),
            Device::Cuda { .. } if config.precision.policy == "fp16" => "precision.policy = \"fp16\"",
            Device::Cuda { .. } if config.train.reproducible => "train.reproducible",
            Device::Cuda { .. } => return Ok(()),
        };
        Err(TrainError::NotOnDevice { what, device: self.name() })
    }

    /// The most memory that this process has had.
    pub(crate) fn peak_bytes(self) -> Result<u64, TrainError> {
        match self {
            Device::Cpu => Ok(peak_resident_bytes()),
            Device::Cuda { .. } => {
                let gpu = gpu()?;
                Ok(gpu.device.memory - gpu.device.free_bytes().map_err(ExecError::from)?)
            }
        }
    }

    /// What a GPU does now, or did less than a second ago.
    pub(crate) fn telemetry(self) -> Result<Option<Telemetry>, TrainError> {
        match self {
            Device::Cpu => Ok(None),
            Device::Cuda { .. } => Ok(gpu()?.telemetry()),
        }
    }

    /// Bytes of a GPU's memory that this process takes besides the arena: its context, kernels and libraries.
    pub(crate) fn context_bytes(self) -> Result<Option<u64>, TrainError> {
        match self {
            Device::Cpu => Ok(None),
            Device::Cuda { .. } => Ok(gpu()?.context_bytes()),
        }
    }

    /// Bytes that a program may take, as far as the system tells.
    pub(crate) fn available_bytes(self) -> Result<Option<u64>, TrainError> {
        match self {
            Device::Cpu => Ok(cpu::available_bytes()),
            Device::Cuda { .. } => Ok(Some(gpu()?.device.free_bytes().map_err(ExecError::from)?)),
        }
    }

    /// Loads a program of one rank.
    pub(crate) fn load(self, program: StepProgram, threads: usize) -> Result<Box<dyn Executor>, TrainError> {
        match self {
            Device::Cpu => Ok(Box::new(CpuExecutor::load(program, threads)?)),
            Device::Cuda { deterministic } => Ok(Box::new(CudaExecutor::load(&gpu()?, program, deterministic)?)),
        }
    }

    /// Loads the programs of all stages on as many ranks as they were compiled for.
    pub(crate) fn load_all(
        self,
        programs: Vec<StepProgram>,
        threads: usize,
        timeout: Duration,
    ) -> Result<Box<dyn World>, TrainError> {
        match (self, programs.first().map_or(0, |p| p.mesh.ranks())) {
            (_, 1) => Ok(Box::new(Alone::new(self.load(programs[0].clone(), threads)?, programs[0].clone()))),
            (Device::Cpu, _) => Ok(Box::new(ThreadWorld::on_cpu(programs, threads, timeout)?)),
            (Device::Cuda { deterministic }, _) => {
                let gpu = gpu()?;
                let load = |program, link| {
                    Ok(Box::new(CudaExecutor::load_rank(&gpu, program, deterministic, Some(link))?) as _)
                };
                Ok(Box::new(ThreadWorld::load(programs, timeout, load)?))
            }
        }
    }
}

/// The GPU of this process, opened once.
pub(crate) fn gpu() -> Result<Arc<Gpu>, TrainError> {
    static GPU: Mutex<Option<Arc<Gpu>>> = Mutex::new(None);
    let mut gpu = GPU.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(gpu) = gpu.as_ref() {
        return Ok(gpu.clone());
    }
    let opened = Gpu::open(0, true).map_err(|e: CudaError| ExecError::from(e))?;
    Ok(gpu.insert(opened).clone())
}

/// The largest resident memory so far, as the system counts it.
fn peak_resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
