//! Copies between the memory of the device and that of its host.

use super::launch::{Launches, launches};
use crate::CudaError;
use crate::call::Call;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        Fetch => copy(call),
        Offload => copy(call),
    }
}

pub unsafe fn copy(call: Call) -> Result<(), CudaError> {
    let Some(to) = call.output(0) else { return Ok(()) };
    let at = &call.bound.inputs[0];
    // SAFETY: both operands have as many bytes, in buffers that the verifier has kept apart.
    unsafe { call.stream.copy(to, call.input(0), at.elements * at.dtype.bytes()) }
}
