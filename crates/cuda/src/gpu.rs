//! A device with what programs on it share: kernels, plans of matmuls, cuDNN; and what it tells of itself.

use crate::attention::plans::SharedPlans;
use crate::driver::Device;
use crate::energy::Energy;
use crate::kernels::Kernels;
use crate::matmul::{self, Matmul};
use crate::ops::fused;
use crate::watchdog::Watchdog;
use crate::{CudaError, Nvml, Telemetry, nvml, nvrtc, sources};
use lockstep_ir::FusedMatmul;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// A device, ready to run programs.
pub struct Gpu {
    /// The device.
    pub device: Arc<Device>,
    pub(crate) kernels: Kernels,
    tune: bool,
    matmul: OnceLock<Result<Matmul, CudaError>>,
    first_matmul: OnceLock<Result<Matmul, CudaError>>,
    pub(crate) attention: SharedPlans,
    pub(crate) watchdog: Arc<Watchdog>,
    nvml: Option<Arc<Nvml>>,
    energy: Energy,
    /// Bytes of its memory that were in use before this process had a context.
    others_bytes: Option<u64>,
    bare: OnceLock<Bare>,
    last_sample: Mutex<Option<(Instant, Telemetry)>>,
}

/// The device before the first arena.
struct Bare {
    /// Bytes that the context, kernels and libraries take, by NVML.
    context_bytes: Option<u64>,
    /// Bytes that are free, by the driver.
    free_bytes: u64,
}

/// How long a sample of telemetry is good for.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);

impl Gpu {
    /// Opens device `ordinal`: compiles or loads kernels, opens cuBLASLt. `tune` says whether matmuls are timed to find the
    /// best way to compute them; else the library's first proposal is taken.
    pub fn open(ordinal: usize, tune: bool) -> Result<Arc<Self>, CudaError> {
        let (device, nvml, others_bytes) = std::thread::scope(|scope| {
            // Libraries take a while to start, each for itself.
            let (nvml, matmul) = (scope.spawn(nvml::start), scope.spawn(matmul::version));
            let pci = Device::bus_id(ordinal);
            // Training does without NVML.
            let started = nvml.join().unwrap_or(Err(CudaError::Internal("NVML stopped".into())));
            let nvml = started.and_then(|()| Nvml::open(&pci?)).ok().map(Arc::new);
            let others_bytes = nvml.as_ref().and_then(|nvml| nvml.used_bytes());
            let device = Device::open(ordinal)?;
            matmul.join().unwrap_or(Err(CudaError::Internal("cuBLASLt stopped".into())))?;
            Ok::<_, CudaError>((device, nvml, others_bytes))
        })?;
        let kernels = Kernels::load(&device, sources::compile_all(device.capability)?)?;
        let (matmul, first_matmul, bare) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        let (last_sample, attention, watchdog) = (Mutex::default(), SharedPlans::new(&device), Arc::default());
        Ok(Arc::new(Self {
            device,
            kernels,
            tune,
            matmul,
            first_matmul,
            attention,
            watchdog,
            energy: Energy::new(nvml.clone()),
            nvml,
            others_bytes,
            bare,
            last_sample,
        }))
    }

    /// Ends a wait for the device, which is then abandoned, in which it does not get on for this long, and names the op that it is in: of
    /// programs that are loaded from here on. Ranks of several processes are watched by each other.
    pub fn watch(&self, timeout: Duration) {
        self.watchdog.start(&self.device, timeout);
    }

    /// Matmuls: as the device was opened for, or deterministic, which is the library's first proposal whatever was timed.
    pub(crate) fn matmul(&self, deterministic: bool) -> Result<&Matmul, CudaError> {
        let (opened, tune) = match deterministic {
            false => (&self.matmul, self.tune),
            true => (&self.first_matmul, false),
        };
        opened.get_or_init(|| Matmul::open(&self.device, tune)).as_ref().map_err(Clone::clone)
    }

    /// Those of the matmuls that take less time with what they could fuse in their epilogue: timed once, and cached on disk. Before an
    /// arena takes the memory. None where choices are not timed.
    pub fn faster(&self, matmuls: &[FusedMatmul]) -> Result<Vec<FusedMatmul>, CudaError> {
        let mut faster = Vec::new();
        for matmul in matmuls {
            if let Some(shape) = fused::shape(matmul)?
                && self.matmul(false)?.worth(shape)?
            {
                faster.push(matmul.clone());
            }
        }
        Ok(faster)
    }

    /// Whether this machine has what [`Gpu::open`] needs: a device, a driver that is new enough, the libraries. Looked up once.
    pub fn check() -> Result<(), CudaError> {
        static CHECKED: OnceLock<Result<(), CudaError>> = OnceLock::new();
        let check = || {
            if Device::count()? == 0 {
                return Err(CudaError::NoDevice);
            }
            nvrtc::version()?;
            matmul::version().map(|_| ())
        };
        CHECKED.get_or_init(check).clone()
    }

    /// What it does now, or did less than a second ago; none without NVML. It takes less than a millisecond and does not wait
    /// for work on the device.
    pub fn telemetry(&self) -> Option<Telemetry> {
        let mut last = self.last_sample.lock().unwrap_or_else(PoisonError::into_inner);
        match *last {
            Some((at, sample)) if at.elapsed() < SAMPLE_EVERY => Some(sample),
            _ => {
                let sample = self.nvml.as_ref()?.read();
                *last = Some((Instant::now(), sample));
                Some(sample)
            }
        }
    }

    /// Joules that it has taken since some moment, by all programs; none where it does not tell. It takes less than a millisecond.
    pub fn energy_j(&self) -> Option<f64> {
        self.energy.joules()
    }

    /// Notes what is taken besides arenas, once: when the first program has its libraries and plans, and not yet its arena.
    pub(crate) fn note_context(&self) -> Result<(), CudaError> {
        if self.bare.get().is_none() {
            let bare = Bare { context_bytes: self.nvml_bytes(), free_bytes: self.device.free_bytes()? };
            self.bare.get_or_init(|| bare);
        }
        Ok(())
    }

    /// Bytes of device memory that this process took before its first arena: its context, kernels, libraries with their plans.
    /// None without NVML, or without a program.
    pub fn context_bytes(&self) -> Option<u64> {
        self.bare.get()?.context_bytes
    }

    /// Bytes of device memory that have come since the first arena besides arenas of this many bytes, by the driver: what
    /// libraries load late, and CUDA graphs. None without a program.
    pub fn late_bytes(&self, arena_bytes: u64) -> Result<Option<u64>, CudaError> {
        let Some(bare) = self.bare.get() else { return Ok(None) };
        Ok(Some(bare.free_bytes.saturating_sub(self.device.free_bytes()?).saturating_sub(arena_bytes)))
    }

    /// Bytes of device memory that have come since this process opened the device, by NVML. None without NVML.
    pub fn nvml_bytes(&self) -> Option<u64> {
        Some(self.nvml.as_ref()?.used_bytes()?.saturating_sub(self.others_bytes?))
    }
}
