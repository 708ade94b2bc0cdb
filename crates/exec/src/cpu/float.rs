//! The element types that kernels compute with. Arithmetic is always in f32; bf16 is a way to store.

use lockstep_ir::{DType, bf16};

/// A stored floating-point number.
pub trait Float: Copy + Send + Sync + 'static {
    /// Its name in the IR.
    const DTYPE: DType;
    /// Its value.
    fn to(self) -> f32;
    /// The nearest stored number.
    fn of(x: f32) -> Self;
}

impl Float for f32 {
    const DTYPE: DType = DType::F32;

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

    #[inline(always)]
    fn to(self) -> f32 {
        bf16::to_f32(self.0)
    }

    #[inline(always)]
    fn of(x: f32) -> Self {
        Bf16(bf16::from_f32(x))
    }
}
