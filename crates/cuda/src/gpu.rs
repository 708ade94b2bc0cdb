//! A device with what programs on it share: kernels, plans of products, cuDNN.

use crate::cudnn::Cudnn;
use crate::driver::Device;
use crate::kernels::Kernels;
use crate::matmul::{self, Matmul};
use crate::{CudaError, nvrtc};
use std::sync::{Arc, OnceLock};

/// A device, ready to run programs.
pub struct Gpu {
    /// The device.
    pub device: Arc<Device>,
    pub(crate) kernels: Kernels,
    pub(crate) matmul: Matmul,
    cudnn: OnceLock<Result<Cudnn, CudaError>>,
}

impl Gpu {
    /// Opens device `ordinal`: compiles or loads kernels, opens cuBLASLt. `tune` says whether products are timed to find the
    /// best way to compute them; else the library's first proposal is taken.
    pub fn open(ordinal: usize, tune: bool) -> Result<Arc<Self>, CudaError> {
        let device = Device::open(ordinal)?;
        let (kernels, matmul) = (Kernels::load(&device)?, Matmul::open(&device, tune)?);
        Ok(Arc::new(Self { device, kernels, matmul, cudnn: OnceLock::new() }))
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

    pub(crate) fn cudnn(&self) -> Result<&Cudnn, CudaError> {
        self.cudnn.get_or_init(|| Cudnn::open(&self.device)).as_ref().map_err(Clone::clone)
    }
}
