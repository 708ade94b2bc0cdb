//! Copies between the memory of a device and that of its host, which are the same here.

use super::call::{Call, Kernel, Kernels};
use crate::by_kind;

/// The kernels of this family.
pub fn kernels() -> Kernels {
    by_kind! { call: Call => Kernel;
        Fetch => copy(call),
        Offload => copy(call),
    }
}

fn copy(call: Call) {
    let at = &call.bound.inputs[0];
    let (from, to) = (call.input::<u8>(0), call.output::<u8>(0));
    let Some(to) = to else { return };
    // SAFETY: both operands have as many bytes, in buffers that the verifier has kept apart.
    unsafe { std::ptr::copy_nonoverlapping(from, to, at.elements * at.dtype.bytes()) };
}
