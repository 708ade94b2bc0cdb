//! The devices of this machine: what planning must know of them, how a program gets there, what they tell of themselves.

use crate::device::{CpuDevice, CudaDevice, HostDevice};
use crate::error::exec_hint;
use crate::hardware::profile_of;
use crate::peak::{self, Peak};
use crate::processes::{ProcessGroup, Processes};
use crate::{HostError, Result};
use lockstep_compile::{Precision, fusable_matmuls};
use lockstep_config::{Config, DeviceChoice};
use lockstep_cuda::{CudaError, Gpu, LibraryName, NOT_FOUND};
use lockstep_exec::cpu;
use lockstep_exec::{Alone, ExecError, World};
use lockstep_ir::{DType, DeviceProfile, Hint, StepProgram};
use lockstep_plan::{Machine, Plan, PlanError, Rates, Room, Target, plan_measured};
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
    pub fn processes(&self) -> Option<usize> {
        self.processes.as_ref().map(Processes::ranks)
    }

    /// How many processes run together, where, and what they talk over.
    pub fn processes_summary(&self) -> Option<String> {
        let processes = self.processes.as_ref()?;
        let nccl = if processes.gpu().is_some() { ", collectives over NCCL" } else { "" };
        Some(processes.summary() + nccl)
    }

    /// The processes that run together.
    pub fn group(&self) -> ProcessGroup<'_> {
        ProcessGroup(self.processes.as_ref())
    }

    /// The GPU of this process.
    pub(crate) fn gpu(&self) -> Result<Arc<Gpu>> {
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
    pub fn tuned(&self, config: &Config, plan: Plan) -> Result<Plan> {
        let matmuls = fusable_matmuls(&plan.compiled.programs);
        let faster = match plan.target {
            // Of several processes the first times them: all run one program.
            Target::Cuda { deterministic: false } if !matmuls.is_empty() => {
                let found: Vec<bool> = self.group().told::<_, HostError>("tune", || {
                    let faster = self.gpu()?.faster(&matmuls).map_err(ExecError::from)?;
                    Ok(matmuls.iter().map(|matmul| faster.contains(matmul)).collect())
                })?;
                matmuls.into_iter().zip(found).filter(|(_, faster)| *faster).map(|(matmul, _)| matmul).collect()
            }
            Target::Cpu | Target::Cuda { .. } => Vec::new(),
        };
        if faster.is_empty() { Ok(plan) } else { Ok(plan_measured(self, config, faster)?) }
    }

    /// What a kind of device is here. Opens a GPU.
    pub fn device(&self, target: Target) -> Result<Box<dyn HostDevice>> {
        Ok(match target {
            Target::Cpu => Box::new(CpuDevice { nodes: self.nodes() }),
            Target::Cuda { deterministic } => {
                // As many GPUs as all processes have.
                let count = self.processes.as_ref().and_then(Processes::gpu).map_or(1, |gpu| gpu.of_all);
                Box::new(CudaDevice { gpu: self.gpu()?, count, deterministic })
            }
        })
    }

    /// What computes, as the system or the driver calls it.
    pub fn processor(&self, target: Target) -> Result<String> {
        Ok(self.device(target)?.processor())
    }

    /// Measures the peak of the CPU again, for all runs from now on.
    pub fn renew_cpu_peak(&self, compute: DType) -> Result<Peak> {
        Ok(peak::renew_cpu(&self.processor(Target::Cpu)?, compute)?)
    }

    /// What is free on the device that a config runs on, as far as that can be told.
    pub fn room(&self, config: &Config) -> Option<Room> {
        let device = self.device(Target::of(self, config)).ok()?;
        Some(Room { bytes: device.available_bytes().ok()??, shared: true, place: device.place().to_owned() })
    }

    /// What the MFU of a plan is a share of: the peaks of all GPUs, or of the CPUs of all hosts.
    pub fn matmul_peak(&self, plan: &Plan) -> Result<Peak> {
        let device = self.device(plan.target)?;
        let peak = device.peak(plan.precision.multiplies())?;
        Ok(Peak { flops_per_s: peak.flops_per_s * device.count() as f64, ..peak })
    }

    /// Hosts of all processes.
    pub fn nodes(&self) -> usize {
        self.processes.as_ref().map_or(1, |processes| (processes.ranks() / processes.local_ranks()).max(1))
    }

    /// Bytes of the arenas of all ranks, which must be free.
    pub fn require_memory(&self, config: &Config, plan: &Plan) -> Result<u64> {
        let available = self.device(plan.target)?.available_bytes()?;
        // A profile or a GPU that cannot be told leaves FLOPs to go by.
        let processor = self.processor(plan.target).unwrap_or_default();
        let profile = profile_of(&processor).ok().flatten().map(|(_, profile)| profile);
        let gpu = Catalogue::builtin().of_device(&processor).map(Hardware::assumed);
        let rates = profile.as_ref().map(Rates::Measured).or(gpu.as_ref().map(Rates::Catalogue));
        let arenas = plan.require_memory(self, config, available, rates)?;
        self.require_host_memory(plan)?;
        Ok(arenas)
    }

    /// What waits in the memory of hosts must be free there, beside arenas where those are there too: what is not would be swapped, or end
    /// in a kill by the kernel.
    fn require_host_memory(&self, plan: &Plan) -> Result<()> {
        let (needed, ranks) = (plan.host_bytes(), plan.layout.mesh.ranks());
        let arenas = if self.device(plan.target)?.gpu().is_some() { 0 } else { plan.arena_bytes() };
        match self.device(Target::Cpu)?.available_bytes()? {
            Some(free) if needed > 0 && needed > free.saturating_sub(arenas) => {
                let activations = plan.host_activation_bytes();
                Err(PlanError::HostMemory { needed, activations, available: free.saturating_sub(arenas), ranks }.into())
            }
            _ => Ok(()),
        }
    }

    /// Host memory must have room for the snapshots of an elastic run, beside arenas where those are there too and what else waits there. All processes
    /// call this, and find the same.
    pub fn require_elastic_memory(&self, plan: &Plan) -> Result<()> {
        let arenas = if self.device(plan.target)?.gpu().is_some() { 0 } else { plan.arena_bytes() };
        let needed = plan.elastic_bytes();
        let free = self.device(Target::Cpu)?.available_bytes()?;
        let available = free.map_or(u64::MAX, |free| free.saturating_sub(arenas + plan.host_bytes()));
        match self.group().all("snapshot", needed <= available)? {
            true => Ok(()),
            false => Err(PlanError::ElasticMemory { needed, available }.into()),
        }
    }

    /// Whether host memory has room for snapshots of all ranks, beside their arenas where those are there too. All processes find the
    /// same.
    pub fn room_for_snapshot(&self, plan: &Plan) -> Result<bool> {
        let arenas = if self.device(plan.target)?.gpu().is_some() { 0 } else { plan.arena_bytes() };
        let free = self.device(Target::Cpu)?.available_bytes()?;
        self.group()
            .all("snapshot", free.is_none_or(|free| arenas + plan.host_bytes() + plan.checkpoint_bytes() <= free))
    }

    /// Why `auto` takes the CPU on a machine that has, or had, a GPU. One line.
    pub fn not_taken(&self, config: &Config) -> Option<String> {
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

    /// Loads the programs of all stages on as many ranks as they were compiled for. Those of one rank run in this process alone.
    pub fn load_all(
        &self,
        device: Target,
        programs: Vec<StepProgram>,
        threads: usize,
        timeout: Duration,
    ) -> Result<Box<dyn World>> {
        let ranks = programs.first().map_or(0, |p| p.mesh.ranks());
        if let Some(processes) = self.processes.as_ref().filter(|_| ranks > 1) {
            let comm = processes.comm().clone();
            return Ok(Box::new(self.device(device)?.load_process(programs, threads, comm)?));
        }
        let device = self.device(device)?;
        if let Some(gpu) = device.gpu() {
            gpu.watch(timeout);
        }
        match ranks {
            1 => Ok(Box::new(Alone::new(device.load(programs[0].clone(), threads)?, programs[0].clone()))),
            _ => Ok(Box::new(device.load_threads(programs, threads, timeout)?)),
        }
    }
}
