//! The element types that kernels compute with. Arithmetic is always in f32; bf16 and f16 are ways to store.

use lockstep_ir::{DType, bf16, f16};

/// A stored floating-point number.
pub trait Float: Copy + Send + Sync + 'static {
    /// Its name in the IR.
    const DTYPE: DType;
    /// What numbers of any size are stored in between two matmuls.
    type Kept: Float;
    /// Its value.
    fn to(self) -> f32;
    /// The nearest stored number.
    fn of(x: f32) -> Self;
}

impl Float for f32 {
    const DTYPE: DType = DType::F32;
    type Kept = f32;

    #[inline(always)]
    fn to(self) -> f32 {
        self
    }

    #[inline(always)]
    fn of(x: f32) -> Self {
        x
    }
}

/// The upper half of an f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

impl Float for Bf16 {
    const DTYPE: DType = DType::BF16;
    type Kept = Bf16;

    #[inline(always)]
    fn to(self) -> f32 {
        bf16::to_f32(self.0)
    }

    #[inline(always)]
    fn of(x: f32) -> Self {
        // `bf16::from_f32` without a comparison of floats, which keeps compilers from rounding many at a time.
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        let nan = bits | 0x40_0000;
        Bf16((if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded } >> 16) as u16)
    }
}

/// IEEE binary16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

impl Float for F16 {
    const DTYPE: DType = DType::F16;
    type Kept = f32;

    #[inline(always)]
    fn to(self) -> f32 {
        f16::to_f32(self.0)
    }

    #[inline(always)]
    fn of(x: f32) -> Self {
        F16(f16::from_f32(x))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_that_of_the_ir() {
        let edges = [0u32, 0x7f80_0000, 0x7f80_0001, 0x7fc0_0000, 0x7f7f_ffff, 0x3f80_8000, 0x3f81_8000, 0x3f80_8001];
        let spread = (0..=u32::MAX).step_by(65_521);
        for bits in spread.chain(edges).flat_map(|b| [b, b | 1 << 31]) {
            let x = f32::from_bits(bits);
            assert_eq!(Bf16::of(x).0, bf16::from_f32(x), "{bits:#x}");
        }
    }
}
