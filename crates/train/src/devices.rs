//! The devices of this machine: what planning must know of them, how a program gets there, what they tell of themselves.

use crate::TrainError;
use crate::error::exec_hint;
use crate::machine::{machine_profile, processor};
use crate::peak::{self, Peak};
use crate::processes::{Processes, Team};
use lockstep_compile::{Precision, fusable_matmuls};
use lockstep_config::{Config, DeviceChoice};
use lockstep_cuda::{CaptureTurn, CudaError, CudaExecutor, Gpu, LibraryName, NOT_FOUND, Neighbours, Telemetry};
use lockstep_exec::communication::connections;
use lockstep_exec::cpu::{self, CpuExecutor};
use lockstep_exec::{Alone, ExecError, Executor, ProcessWorld, ThreadWorld, World};
use lockstep_ir::{DType, DeviceProfile, Hint, StepProgram};
use lockstep_plan::{Machine, Plan, Rates, Room, Target, plan_measured};
use lockstep_sim::{Catalogue, Hardware};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The devices of this machine. A GPU is opened when it is first needed, and shared by all who were handed this.
#[derive(Default)]
pub struct Devices {
    gpu: Mutex<Option<Arc<Gpu>>>,
    /// Which GPU, where this process is alone.
    ordinal: usize,
    /// Where ranks are processes.
    processes: Option<Processes>,
}

impl Machine for Devices {
    fn cores(&self) -> usize {
        self.processes.as_ref().map_or_else(cpu::cores, Processes::cores)
    }

    fn has_gpus(&self, ranks: usize) -> bool {
        match &self.processes {
            Some(processes) => processes.gpu().is_some(),
            None => ranks == 1 && Gpu::check().is_ok(),
        }
    }

    fn profile(&self, device: Target, threads: usize, precision: Precision) -> DeviceProfile {
        match device {
            Target::Cpu => cpu::profile(threads, precision.compute, precision.gradients),
            Target::Cuda { deterministic } => {
                lockstep_cuda::profile("cuda", precision.compute, precision.gradients, deterministic)
            }
        }
    }
}

impl Devices {
    /// The first GPU, and the CPU. Opens nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Those that a config names.
    pub fn of(config: &Config) -> Self {
        Self { ordinal: config.train.gpu, ..Self::default() }
    }

    /// Those of all processes of a run: programs of as many ranks run on them, each of which is one.
    pub fn of_processes(processes: Processes) -> Self {
        Self { processes: Some(processes), ..Self::default() }
    }

    /// How many processes run together, where this is one of several.
    pub(crate) fn processes(&self) -> Option<usize> {
        self.processes.as_ref().map(Processes::ranks)
    }

    /// How many processes run together, where, and what they talk over.
    pub fn processes_summary(&self) -> Option<String> {
        let processes = self.processes.as_ref()?;
        let nccl = if processes.gpu().is_some() { ", collectives over NCCL" } else { "" };
        Some(processes.summary() + nccl)
    }

    /// The processes that run together.
    pub(crate) fn team(&self) -> Team<'_> {
        Team(self.processes.as_ref())
    }

    /// The GPU of this process.
    pub(crate) fn gpu(&self) -> Result<Arc<Gpu>, TrainError> {
        let mut gpu = self.gpu.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = gpu.as_ref() {
            return Ok(gpu.clone());
        }
        let ordinal = self.processes.as_ref().and_then(Processes::gpu).map_or(self.ordinal, |gpu| gpu.ordinal);
        let opened = Gpu::open(ordinal, true).map_err(|e: CudaError| ExecError::from(e))?;
        Ok(gpu.insert(opened).clone())
    }

    /// The plan as the device runs it fastest: compiled again where some matmuls are measured to be faster with what they can fuse
    /// into their epilogue. Timed once and cached, before an arena takes the memory; where nothing is timed the plan stays as it is.
    pub(crate) fn tuned(&self, config: &Config, plan: Plan) -> Result<Plan, TrainError> {
        let matmuls = fusable_matmuls(&plan.compiled.programs);
        let faster = match plan.target {
            // Of several processes the first times them: all run one program.
            Target::Cuda { deterministic: false } if !matmuls.is_empty() => {
                let found = self.team().told("tune", || {
                    let faster = self.gpu()?.faster(&matmuls).map_err(ExecError::from)?;
                    Ok(matmuls.iter().map(|matmul| u8::from(faster.contains(matmul))).collect())
                })?;
                matmuls.into_iter().zip(found).filter(|(_, faster)| *faster == 1).map(|(matmul, _)| matmul).collect()
            }
            Target::Cpu | Target::Cuda { .. } => Vec::new(),
        };
        if faster.is_empty() { Ok(plan) } else { Ok(plan_measured(self, config, faster)?) }
    }

    /// What is free on the device that a config runs on, as far as that can be told.
    pub fn room(&self, config: &Config) -> Option<Room> {
        let device = Target::of(self, config);
        let place = match device {
            Target::Cpu => "free on this machine".to_owned(),
            Target::Cuda { .. } => "free on this GPU".to_owned(),
        };
        let bytes = self.available_bytes(device).ok()??;
        Some(Room { bytes, shared: true, place })
    }

    /// What the MFU of a plan is a share of: the peaks of all GPUs, or of the CPUs of all hosts.
    pub(crate) fn matmul_peak(&self, plan: &Plan) -> Result<Peak, TrainError> {
        let peak = self.peak(plan.target, plan.precision.compute)?;
        let times = match plan.target {
            Target::Cpu => self.nodes(),
            Target::Cuda { .. } => self.gpus(),
        };
        Ok(Peak { flops_per_s: peak.flops_per_s * times as f64, ..peak })
    }

    /// Hosts of all processes.
    pub(crate) fn nodes(&self) -> usize {
        self.processes.as_ref().map_or(1, |processes| (processes.ranks() / processes.local_ranks()).max(1))
    }

    /// GPUs of all processes.
    fn gpus(&self) -> usize {
        self.processes.as_ref().and_then(Processes::gpu).map_or(1, |gpu| gpu.of_all)
    }

    /// Bytes of the arenas of all ranks, which must be free.
    pub(crate) fn require_memory(&self, config: &Config, plan: &Plan) -> Result<u64, TrainError> {
        let available = self.available_bytes(plan.target)?;
        // A profile or a GPU that cannot be told leaves FLOPs to go by.
        let profile = machine_profile(self, plan).ok().flatten();
        let device = processor(self, plan.target).ok();
        let gpu = device.and_then(|name| Catalogue::builtin().of_device(&name).map(Hardware::assumed));
        let rates = match (&profile, &gpu, plan.target) {
            (Some(profile), ..) => Some(Rates::Measured(profile)),
            (None, Some(hardware), Target::Cuda { .. }) => Some(Rates::Catalogue(hardware)),
            (None, ..) => None,
        };
        Ok(plan.require_memory(self, config, available, rates)?)
    }

    /// Whether host memory has room for snapshots of all ranks, beside their arenas where those are there too. All processes find the
    /// same.
    pub(crate) fn room_for_snapshot(&self, plan: &Plan) -> Result<bool, TrainError> {
        let arenas = match plan.target {
            Target::Cpu => plan.arena_bytes(),
            Target::Cuda { .. } => 0,
        };
        let free = self.available_bytes(Target::Cpu)?;
        self.team().all("snapshot", free.is_none_or(|free| arenas + plan.checkpoint_bytes() <= free))
    }

    /// Why `auto` takes the CPU on a machine that has, or had, a GPU. One line.
    pub(crate) fn not_taken(&self, config: &Config) -> Option<String> {
        if config.train.device != DeviceChoice::Auto {
            return None;
        }
        if let Some(processes) = &self.processes {
            return processes.no_gpus().map(|why| format!("training on the CPU: {why}"));
        }
        if config.layout().mesh.ranks() > 1 {
            return None;
        }
        let (problem, hint) = match Gpu::check() {
            // Most machines have no GPU: that is nothing to tell.
            Err(CudaError::Library { library: LibraryName::Driver, problem }) if problem == NOT_FOUND => return None,
            Err(error) => (error.to_string(), exec_hint(&error.into())?),
            Ok(()) => {
                let cuda = Target::Cuda { deterministic: config.train.deterministic };
                let error = cuda.check(config).err()?;
                (error.to_string(), error.hint()?)
            }
        };
        Some(format!("training on the CPU: {problem} ({hint})"))
    }

    /// FLOP per second of a large matmul, and bytes per second of a copy, both measured.
    pub(crate) fn peaks(&self, device: Target, threads: usize, compute: DType) -> Result<(f64, f64), TrainError> {
        match device {
            Target::Cpu => Ok((cpu::peaks::matmul(threads, compute)?, cpu::peaks::bandwidth(threads)?)),
            Target::Cuda { .. } => {
                let gpu = self.gpu()?;
                let cuda = |r: Result<f64, CudaError>| r.map_err(ExecError::from);
                let matmul = cuda(lockstep_cuda::peaks::matmul(&gpu, compute))?;
                Ok((matmul, cuda(lockstep_cuda::peaks::bandwidth(&gpu))?))
            }
        }
    }

    /// What the MFU of one device is a share of: the vendor's figure where it is known, else what was measured.
    pub(crate) fn peak(&self, device: Target, compute: DType) -> Result<Peak, TrainError> {
        if device == Target::Cpu {
            return peak::of_cpu(self, compute);
        }
        let (flops_per_s, what) = match self.vendor_peak(device, compute)? {
            Some(published) => (published, "published peak"),
            None => {
                let gpu = self.gpu()?;
                (lockstep_cuda::peaks::matmul(&gpu, compute).map_err(ExecError::from)?, "measured matmul peak")
            }
        };
        let (name, of) = (format!("{what} of the GPU"), format!("{}, {compute}", processor(self, device)?));
        Ok(Peak { flops_per_s, name, of })
    }

    /// The vendor's figure for dense matmuls, where it is known.
    pub(crate) fn vendor_peak(&self, device: Target, compute: DType) -> Result<Option<f64>, TrainError> {
        match device {
            Target::Cpu => Ok(None),
            Target::Cuda { .. } => {
                let device = &self.gpu()?.device.name;
                Ok(Catalogue::builtin().of_device(device).map(|gpu| gpu.peak(compute)))
            }
        }
    }

    /// The most memory that this process has had.
    pub(crate) fn peak_bytes(&self, device: Target) -> Result<u64, TrainError> {
        match device {
            Target::Cpu => Ok(peak_resident_bytes()),
            Target::Cuda { .. } => {
                let gpu = self.gpu()?;
                Ok(gpu.device.memory - gpu.device.free_bytes().map_err(ExecError::from)?)
            }
        }
    }

    /// What a GPU does now, or did less than a second ago.
    pub(crate) fn telemetry(&self, device: Target) -> Result<Option<Telemetry>, TrainError> {
        match device {
            Target::Cpu => Ok(None),
            Target::Cuda { .. } => Ok(self.gpu()?.telemetry()),
        }
    }

    /// Bytes of a GPU's memory that this process takes besides the arena: its context, kernels and libraries.
    pub(crate) fn context_bytes(&self, device: Target) -> Result<Option<u64>, TrainError> {
        match device {
            Target::Cpu => Ok(None),
            Target::Cuda { .. } => Ok(self.gpu()?.context_bytes()),
        }
    }

    /// Bytes that a program may take, as far as the system tells.
    pub(crate) fn available_bytes(&self, device: Target) -> Result<Option<u64>, TrainError> {
        match device {
            // Ranks of other hosts find as much there.
            Target::Cpu => Ok(cpu::available_bytes().map(|bytes| match &self.processes {
                Some(processes) => bytes * (processes.ranks() / processes.local_ranks()).max(1) as u64,
                None => bytes,
            })),
            // Other processes' GPUs have as much.
            Target::Cuda { .. } => {
                Ok(Some(self.gpu()?.device.free_bytes().map_err(ExecError::from)? * self.gpus() as u64))
            }
        }
    }

    /// Loads a program of one rank.
    pub(crate) fn load(
        &self,
        device: Target,
        program: StepProgram,
        threads: usize,
    ) -> Result<Box<dyn Executor>, TrainError> {
        match device {
            Target::Cpu => Ok(Box::new(CpuExecutor::load(program, threads)?)),
            Target::Cuda { deterministic } => Ok(Box::new(CudaExecutor::load(&self.gpu()?, program, deterministic)?)),
        }
    }

    /// Loads the programs of all stages on as many ranks as they were compiled for. Those of one rank run in this process alone.
    pub(crate) fn load_all(
        &self,
        device: Target,
        programs: Vec<StepProgram>,
        threads: usize,
        timeout: Duration,
    ) -> Result<Box<dyn World>, TrainError> {
        let ranks = programs.first().map_or(0, |p| p.mesh.ranks());
        if let Some(processes) = self.processes.as_ref().filter(|_| ranks > 1) {
            let comm = processes.comm().clone();
            return Ok(Box::new(match device {
                Target::Cpu => ProcessWorld::on_cpu(programs, threads, comm)?,
                Target::Cuda { deterministic } => {
                    let (gpu, all) = (self.gpu()?, connections(&programs));
                    ProcessWorld::load(programs, comm, |program, link| {
                        let neighbours = Some(Neighbours::Processes(link, all));
                        Ok(Box::new(CudaExecutor::load_rank(&gpu, program, deterministic, neighbours)?))
                    })?
                }
            }));
        }
        if let Target::Cuda { .. } = device {
            self.gpu()?.watch(timeout);
        }
        match (device, ranks) {
            (_, 1) => Ok(Box::new(Alone::new(self.load(device, programs[0].clone(), threads)?, programs[0].clone()))),
            (Target::Cpu, _) => Ok(Box::new(ThreadWorld::on_cpu(programs, threads, timeout)?)),
            (Target::Cuda { deterministic }, _) => {
                let gpu = self.gpu()?;
                let turn = CaptureTurn::default();
                let load = |program, link| {
                    let neighbours = Some(Neighbours::Threads(link, turn.clone()));
                    Ok(Box::new(CudaExecutor::load_rank(&gpu, program, deterministic, neighbours)?) as _)
                };
                Ok(Box::new(ThreadWorld::load(programs, timeout, load)?))
            }
        }
    }
}

/// The largest resident memory so far, as the system counts it.
fn peak_resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
