//! How the device's copy engine sees a tensor.

use crate::CudaError;
use crate::driver::{Address, Driver};
use lockstep_ir::DType;

/// A tensor in boxes of swizzled rows of 128 bytes, as kernels take it: their first parameter.
#[repr(C, align(64))]
#[derive(Default)]
pub struct TensorMap {
    /// What the driver makes of it.
    pub words: [u64; 16],
}

impl TensorMap {
    /// Of a tensor without gaps and the boxes that are copied at a time; sizes stand from the last dimension to the first. What a box has outside
    /// of the tensor is zero, and is not written.
    pub fn new(at: Address, dtype: DType, sizes: &[u64], boxes: &[u32]) -> Result<Self, CudaError> {
        const SWIZZLE_128: i32 = 3;
        const PROMOTE_256: i32 = 3;
        let code = match dtype {
            // Bytes.
            DType::E4M3 | DType::E5M2 => 0,
            DType::F16 => 6,
            DType::F32 => 7,
            DType::F64 => 8,
            DType::BF16 => 9,
            other => return Err(CudaError::Internal(format!("a tensor map of {other}"))),
        };
        let row = |i: usize| sizes[..i].iter().product::<u64>() * dtype.bytes() as u64;
        let strides: Vec<u64> = (1..sizes.len()).map(row).collect();
        let (rank, steps, mut map) = (sizes.len() as u32, vec![1u32; sizes.len()], Self::default());
        let driver = Driver::get()?;
        // SAFETY: addresses are valid for the call, and as long as the rank says.
        let status = unsafe {
            (driver.tensor_map)(
                map.words.as_mut_ptr(),
                code,
                rank,
                at,
                sizes.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                0,
                SWIZZLE_128,
                PROMOTE_256,
                0,
            )
        };
        driver.check("cuTensorMapEncodeTiled", status).map(|()| map)
    }
}
