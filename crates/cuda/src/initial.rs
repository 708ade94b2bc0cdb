//! Initial values, drawn on the device with the bits that the host would draw.

use crate::CudaError;
use crate::call::{THREADS, suffix};
use crate::driver::Address;
use crate::kernels::{Launcher, Value, args};
use lockstep_exec::initial::{Initial, InitialPart};
use lockstep_ir::{DType, Init, counter};

/// Whether the device can draw such values: those that integers and one multiplication of floats make.
pub fn drawn_here(init: &Init) -> bool {
    match init {
        Init::Normal { .. } | Init::Ones | Init::Zeros | Init::All(_) => true,
        Init::RopeTable { .. } => false,
    }
}

/// Queues the drawing of a tensor's initial values, f32, bf16 or f16.
///
/// # Safety
/// There is room for all of them.
pub unsafe fn draw(on: Launcher, mut to: Address, dtype: DType, values: &Initial) -> Result<(), CudaError> {
    for InitialPart { name, elements, .. } in &values.parts {
        let (drawn, scale) = match values.init {
            Init::Normal { std } => (true, *std),
            Init::Ones => (false, 1.0),
            Init::Zeros => (false, 0.0),
            Init::All(value) => (false, *value),
            Init::RopeTable { .. } => return Err(CudaError::Internal("a table of angles is drawn on the host".into())),
        };
        let args = args![to, Value::Long(counter::key(values.seed, name)), scale, drawn, *elements];
        let kernel = format!("initial_{}", suffix(dtype));
        // SAFETY: the part is among the elements that there is room for.
        unsafe { on.launch(("elements", &kernel), [elements.div_ceil(THREADS), 1, 1], THREADS, args)? };
        to += (elements * dtype.bytes()) as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{Device, Memory, Stream};
    use crate::gpu::Gpu;
    use lockstep_exec::initial::encode;

    #[test]
    fn the_device_draws_the_bits_that_the_host_draws() {
        if !Device::count().is_ok_and(|n| n > 0) {
            println!("skipped: no CUDA device");
            return;
        }
        let gpu = Gpu::open(0, false).unwrap();
        let stream = Stream::new(&gpu.device).unwrap();
        for init in [
            Init::Normal { std: 0.02 },
            Init::Normal { std: 0.02 / 9.797_959 },
            Init::Ones,
            Init::Zeros,
            Init::All(-64.0),
        ] {
            // Parts that start at odd places, and one whose counters need more than 21 bits.
            let part = |name, columns, rows| InitialPart { name, columns, elements: columns * rows };
            let parts = vec![part("q.weight", 7, 33), part("k.weight", 7, 5), part("v.weight", 1600, 3000)];
            let values = Initial { init: &init, seed: 17, parts };
            let host = values.draw();
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let expected = encode(&host, dtype);
                let memory = Memory::new(&gpu.device, expected.len() as u64).unwrap();
                let mut found = vec![0u8; expected.len()];
                // SAFETY: the memory has room for all; the copy is done before it is looked at.
                unsafe {
                    draw(gpu.kernels.on(&stream), memory.base, dtype, &values).unwrap();
                    stream.to_host(&mut found, memory.base).unwrap();
                }
                stream.wait().unwrap();
                assert!(found == expected, "{init:?} in {dtype}");
            }
        }
    }
}
