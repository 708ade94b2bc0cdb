//! Whether what kernels have made is finite: a look on the device.
//!
//! A kernel looks at every output, and programs run without CUDA graphs meanwhile.

use crate::CudaError;
use crate::driver::{Address, Device, Memory, Pinned};
use crate::kernels::{Launcher, args};
use lockstep_exec::numbers;
use lockstep_ir::{DType, fixed};
use std::sync::Arc;

const THREADS: usize = 256;
const MOST_BLOCKS: usize = 1024;

/// Room for what is found.
pub struct Numbers {
    first: Memory,
    back: Pinned,
}

/// Numbers in the device's memory.
#[derive(Clone, Copy)]
pub struct Elements {
    pub at: Address,
    pub elements: usize,
    pub dtype: DType,
}

/// What a number that is not finite looks like: under the mask its bits are these, and as a whole they are not minus infinity's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pattern {
    mask: u64,
    bad: u64,
    minus_infinity: u64,
}

impl Pattern {
    /// None for types that have no such number.
    fn of(dtype: DType) -> Option<Self> {
        let float = |mask: u64, sign: u64| Some(Self { mask, bad: mask, minus_infinity: sign | mask });
        match dtype {
            DType::F32 => float(0x7f80_0000, 1 << 31),
            DType::F64 => float(0x7ff0 << 48, 1 << 63),
            DType::BF16 => float(0x7f80, 1 << 15),
            DType::F16 => float(0x7c00, 1 << 15),
            // It has no infinity: nothing is both `bad` and another number.
            DType::Fixed64 => Some(Self { mask: u64::MAX, bad: fixed::POISON as u64, minus_infinity: 0 }),
            _ => None,
        }
    }
}

impl Numbers {
    /// For a device.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Ok(Self { first: Memory::new(device, size_of::<u64>() as u64)?, back: Pinned::new(device, size_of::<u64>())? })
    }

    /// Waits for the stream, and gives the first of this many elements that is not finite. `may_see_nothing` lets minus infinity pass.
    ///
    /// # Safety
    /// The elements are in the device's memory.
    pub unsafe fn first(
        &mut self,
        on: Launcher,
        Elements { at, elements, dtype }: Elements,
        may_see_nothing: bool,
    ) -> Result<Option<(usize, f64)>, CudaError> {
        let Some(Pattern { mask, bad, minus_infinity }) = Pattern::of(dtype) else { return Ok(None) };
        let allowed = if may_see_nothing { minus_infinity } else { 0 };
        let (bytes, blocks) = (dtype.bytes(), elements.div_ceil(THREADS).min(MOST_BLOCKS));
        let name = format!("not_finite_{bytes}");
        let args = args![at, elements, mask as usize, bad as usize, allowed as usize, self.first.base];
        // SAFETY: the caller vouches for the elements; the rest is this one's own, and nothing of it is read before the stream is done.
        let element = unsafe {
            on.stream.fill(self.first.base, 0xff, size_of::<u64>())?;
            on.launch(("numbers", &name), [blocks, 1, 1], THREADS, args)?;
            on.stream.to_host(self.back.slice(), self.first.base)?;
            on.stream.wait()?;
            u64::from_le_bytes(self.back.as_chunks().0[0])
        };
        if element >= elements as u64 {
            return Ok(None);
        }
        let found = &mut self.back.slice()[..bytes];
        // SAFETY: as above; the element is one of them.
        unsafe { on.stream.to_host(found, at + element * bytes as u64)? };
        on.stream.wait()?;
        Ok(numbers::first(dtype, found, false).map(|(_, value)| (element as usize, value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_tell_what_is_not_finite() {
        let bad = |dtype: DType, bits: u64| {
            let Pattern { mask, bad, minus_infinity } = Pattern::of(dtype).unwrap();
            (bits & mask == bad, bits & mask == bad && bits != minus_infinity)
        };
        for x in [0.0f32, -0.0, 1.0, -f32::MAX, f32::MIN_POSITIVE, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let expected = (!x.is_finite(), !x.is_finite() && x != f32::NEG_INFINITY);
            assert_eq!(bad(DType::F32, x.to_bits().into()), expected, "{x}");
            assert_eq!(bad(DType::F64, f64::from(x).to_bits()), expected, "{x}");
            // The largest f32 is infinite in the narrower types.
            if x.abs() < 2.0 || !x.is_finite() {
                assert_eq!(bad(DType::BF16, lockstep_ir::bf16::from_f32(x).into()), expected, "{x}");
                assert_eq!(bad(DType::F16, lockstep_ir::f16::from_f32(x).into()), expected, "{x}");
            }
        }
        assert_eq!(
            [fixed::POISON, -1, 0, i64::MAX].map(|x| bad(DType::Fixed64, x as u64).1),
            [true, false, false, false]
        );
        assert_eq!(Pattern::of(DType::U32), None);
    }
}
