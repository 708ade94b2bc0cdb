//! A device with what programs on it share: kernels, plans of products, cuDNN.

use crate::cudnn::Cudnn;
use crate::driver::Device;
use crate::kernels::Kernels;
use crate::matmul::Matmul;
use crate::{CudaError, attention};
use std::sync::{Arc, OnceLock};

/// A device, ready to run programs.
pub struct Gpu {
    /// The device.
    pub device: Arc<Device>,
    pub(crate) kernels: Kernels,
    matmul: Matmul,
    first_matmul: OnceLock<Result<Matmul, CudaError>>,
    cudnn: OnceLock<Result<Cudnn, CudaError>>,
    pub(crate) attention: attention::Shared,
}

impl Gpu {
    /// Opens device `ordinal`: compiles or loads kernels, opens cuBLASLt. `tune` says whether products are timed to find the
    /// best way to compute them; else the library's first proposal is taken.
    pub fn open(ordinal: usize, tune: bool) -> Result<Arc<Self>, CudaError> {
        let device = Device::open(ordinal)?;
        let (kernels, matmul) = (Kernels::load(&device)?, Matmul::open(&device, tune)?);
        let (first_matmul, cudnn) = (OnceLock::new(), OnceLock::new());
        Ok(Arc::new(Self { device, kernels, matmul, first_matmul, cudnn, attention: attention::Shared::default() }))
    }

    /// Products: as the device was opened for, or deterministic, which is the library's first proposal whatever was timed.
    pub(crate) fn matmul(&self, deterministic: bool) -> Result<&Matmul, CudaError> {
        match deterministic {
            false => Ok(&self.matmul),
            true => {
                let open = || Matmul::open(&self.device, false);
                self.first_matmul.get_or_init(open).as_ref().map_err(Clone::clone)
            }
        }
    }

    pub(crate) fn cudnn(&self) -> Result<&Cudnn, CudaError> {
        self.cudnn.get_or_init(|| Cudnn::open(&self.device)).as_ref().map_err(Clone::clone)
    }
}
