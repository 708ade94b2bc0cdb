//! A kind of device, as this machine has it. Its executors run programs; this is the rest: memory, peaks, telemetry, how programs get there.

use crate::peak::{self, Peak};
use lockstep_cuda::{CaptureTurn, CudaExecutor, Gpu, Neighbours};
use lockstep_exec::comm::connections;
use lockstep_exec::comm::processes::ProcessCommunicator;
use lockstep_exec::cpu::{self, CpuExecutor, Simd};
use lockstep_exec::{ExecError, Executor, ProcessWorld, ThreadWorld};
use lockstep_ir::{MatmulType, StepProgram};
use lockstep_sim::Catalogue;
use std::sync::Arc;
use std::time::Duration;

/// What is asked of a device beside its executors.
pub trait HostDevice {
    /// What computes, as the system or the driver calls it.
    fn processor(&self) -> String;

    /// Where its memory is, for people.
    fn place(&self) -> &'static str;

    /// How many of them all processes have.
    fn count(&self) -> usize;

    /// Bytes that programs of all ranks may take, as far as the system tells. Other processes' devices have as much.
    fn available_bytes(&self) -> Result<Option<u64>, ExecError>;

    /// The most memory that this process has had.
    fn peak_bytes(&self) -> Result<u64, ExecError>;

    /// The GPU that it is, if it is one: it tells what else its memory holds, and what it does now.
    fn gpu(&self) -> Option<&Gpu> {
        None
    }

    /// Most programs that gain by running on it at the same time.
    fn at_once(&self) -> usize {
        1
    }

    /// FLOP per second of a large matmul, and bytes per second of a copy, both measured.
    fn peaks(&self, threads: usize, compute: MatmulType) -> Result<(f64, f64), ExecError>;

    /// What the MFU of one of them is a share of: the vendor's figure where it is known, else what was measured.
    fn peak(&self, compute: MatmulType) -> Result<Peak, ExecError>;

    /// Loads a program of one rank.
    fn load(&self, program: StepProgram, threads: usize) -> Result<Box<dyn Executor>, ExecError>;

    /// Loads the programs of all stages on ranks that are processes, of which this is one.
    fn load_process(
        &self,
        programs: Vec<StepProgram>,
        threads: usize,
        comm: Arc<ProcessCommunicator>,
    ) -> Result<ProcessWorld, ExecError>;

    /// Loads the programs of all stages on ranks that are threads.
    fn load_threads(
        &self,
        programs: Vec<StepProgram>,
        threads: usize,
        timeout: Duration,
    ) -> Result<ThreadWorld, ExecError>;
}

/// The CPU of a host; `nodes` is how many hosts all processes have.
pub(crate) struct CpuDevice {
    pub nodes: usize,
}

impl HostDevice for CpuDevice {
    fn processor(&self) -> String {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let path = Simd::current();
        let lowered = if path < Simd::detect() { format!(", {}", path.name()) } else { String::new() };
        format!("{}, {} cores{lowered}", cpu_model(&info), cpu::cores())
    }

    fn place(&self) -> &'static str {
        "free on this machine"
    }

    fn count(&self) -> usize {
        self.nodes
    }

    fn available_bytes(&self) -> Result<Option<u64>, ExecError> {
        Ok(cpu::available_bytes().map(|bytes| bytes * self.nodes as u64))
    }

    fn peak_bytes(&self) -> Result<u64, ExecError> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
        let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok());
        Ok(kib.unwrap_or(0) * 1024)
    }

    fn peaks(&self, threads: usize, compute: MatmulType) -> Result<(f64, f64), ExecError> {
        Ok((cpu::peaks::matmul(threads, compute.stored())?, cpu::peaks::bandwidth(threads)?))
    }

    fn peak(&self, compute: MatmulType) -> Result<Peak, ExecError> {
        peak::of_cpu(&self.processor(), compute.stored())
    }

    fn load(&self, program: StepProgram, threads: usize) -> Result<Box<dyn Executor>, ExecError> {
        Ok(Box::new(CpuExecutor::load(program, threads)?))
    }

    fn load_process(
        &self,
        programs: Vec<StepProgram>,
        threads: usize,
        comm: Arc<ProcessCommunicator>,
    ) -> Result<ProcessWorld, ExecError> {
        ProcessWorld::on_cpu(programs, threads, comm)
    }

    fn load_threads(
        &self,
        programs: Vec<StepProgram>,
        threads: usize,
        timeout: Duration,
    ) -> Result<ThreadWorld, ExecError> {
        ThreadWorld::on_cpu(programs, threads, timeout)
    }
}

/// An NVIDIA GPU, and how many all processes have.
pub(crate) struct CudaDevice {
    pub gpu: Arc<Gpu>,
    pub count: usize,
    pub deterministic: bool,
}

impl HostDevice for CudaDevice {
    fn processor(&self) -> String {
        self.gpu.device.name.clone()
    }

    fn place(&self) -> &'static str {
        "free on this GPU"
    }

    fn count(&self) -> usize {
        self.count
    }

    fn available_bytes(&self) -> Result<Option<u64>, ExecError> {
        Ok(Some(self.gpu.device.free_bytes()? * self.count as u64))
    }

    fn peak_bytes(&self) -> Result<u64, ExecError> {
        Ok(self.gpu.device.memory - self.gpu.device.free_bytes()?)
    }

    fn gpu(&self) -> Option<&Gpu> {
        Some(&self.gpu)
    }

    /// It waits less for the host then.
    fn at_once(&self) -> usize {
        4
    }

    fn peaks(&self, _threads: usize, compute: MatmulType) -> Result<(f64, f64), ExecError> {
        Ok((lockstep_cuda::peaks::matmul(&self.gpu, compute)?, lockstep_cuda::peaks::bandwidth(&self.gpu)?))
    }

    fn peak(&self, compute: MatmulType) -> Result<Peak, ExecError> {
        let published = Catalogue::builtin().of_device(&self.gpu.device.name).cloned();
        let (flops_per_s, what, compute) = match published {
            Some(gpu) => (gpu.peak(compute), "published peak", gpu.multiplies_in(compute)),
            None => (lockstep_cuda::peaks::matmul(&self.gpu, compute)?, "measured matmul peak", compute),
        };
        let (name, of) = (format!("{what} of the GPU"), format!("{}, {compute}", self.gpu.device.name));
        Ok(Peak { flops_per_s, name, of })
    }

    fn load(&self, program: StepProgram, _threads: usize) -> Result<Box<dyn Executor>, ExecError> {
        Ok(Box::new(CudaExecutor::load(&self.gpu, program, self.deterministic)?))
    }

    fn load_process(
        &self,
        programs: Vec<StepProgram>,
        _threads: usize,
        comm: Arc<ProcessCommunicator>,
    ) -> Result<ProcessWorld, ExecError> {
        let all = connections(&programs);
        ProcessWorld::load(programs, comm, |program, link| {
            let neighbours = Some(Neighbours::Processes(link, all));
            Ok(Box::new(CudaExecutor::load_rank(&self.gpu, program, self.deterministic, neighbours)?))
        })
    }

    fn load_threads(
        &self,
        programs: Vec<StepProgram>,
        _threads: usize,
        timeout: Duration,
    ) -> Result<ThreadWorld, ExecError> {
        let turn = CaptureTurn::default();
        ThreadWorld::load(programs, timeout, |program, link| {
            let neighbours = Some(Neighbours::Threads(link, turn.clone()));
            Ok(Box::new(CudaExecutor::load_rank(&self.gpu, program, self.deterministic, neighbours)?) as _)
        })
    }
}

/// Cores of ARM CPUs, by the numbers of who designed them and of the part.
const ARM_CORES: [((&str, &str), &str); 6] = [
    (("0x41", "0xd0c"), "Neoverse N1"),
    (("0x41", "0xd40"), "Neoverse V1"),
    (("0x41", "0xd49"), "Neoverse N2"),
    // Grace, Graviton 4.
    (("0x41", "0xd4f"), "Neoverse V2"),
    (("0x41", "0xd84"), "Neoverse V3"),
    (("0x46", "0x001"), "A64FX"),
];

/// The model of the CPU that `/proc/cpuinfo` has. On ARM that has numbers instead of a name; what is measured of one model must not be
/// taken for that of another.
fn cpu_model(info: &str) -> String {
    let of = |key: &str| {
        let mut pairs = info.lines().filter_map(|line| line.split_once(':'));
        pairs.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim())
    };
    if let Some(name) = of("model name") {
        return name.to_owned();
    }
    match (of("CPU implementer"), of("CPU part")) {
        (Some(implementer), Some(part)) => match ARM_CORES.iter().find(|(core, _)| *core == (implementer, part)) {
            Some((_, name)) => (*name).to_owned(),
            None => format!("{}, implementer {implementer}, part {part}", std::env::consts::ARCH),
        },
        _ => std::env::consts::ARCH.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_is_known_by_its_name_or_by_its_numbers() {
        let arm =
            |part: &str| format!("processor\t: 0\nBogoMIPS\t: 2000.00\nCPU implementer\t: 0x41\nCPU part\t: {part}\n");
        assert_eq!(cpu_model("processor\t: 0\nmodel\t\t: 143\nmodel name\t: Xeon 8480: a\n"), "Xeon 8480: a");
        assert_eq!(cpu_model(&arm("0xd4f")), "Neoverse V2");
        let unknown = format!("{}, implementer 0x41, part 0xfff", std::env::consts::ARCH);
        assert_eq!((cpu_model(&arm("0xfff")), cpu_model("")), (unknown, std::env::consts::ARCH.to_owned()));
    }
}
