//! Sums of several ranks' tensors, in the order of the ranks.

use lockstep_ir::{DType, bf16, f16, fixed};

/// An element that can be added.
trait Number: Copy {
    /// What sums are kept in.
    type Sum: Copy + Default;
    fn start(self) -> Self::Sum;
    fn add(sum: Self::Sum, x: Self) -> Self::Sum;
    fn end(sum: Self::Sum) -> Self;
}

impl Number for f32 {
    type Sum = f32;
    #[inline(always)]
    fn start(self) -> f32 {
        self
    }
    #[inline(always)]
    fn add(sum: f32, x: f32) -> f32 {
        sum + x
    }
    #[inline(always)]
    fn end(sum: f32) -> f32 {
        sum
    }
}

impl Number for f64 {
    type Sum = f64;
    #[inline(always)]
    fn start(self) -> f64 {
        self
    }
    #[inline(always)]
    fn add(sum: f64, x: f64) -> f64 {
        sum + x
    }
    #[inline(always)]
    fn end(sum: f64) -> f64 {
        sum
    }
}

/// The bits of a bf16.
impl Number for u16 {
    type Sum = f32;
    #[inline(always)]
    fn start(self) -> f32 {
        bf16::to_f32(self)
    }
    #[inline(always)]
    fn add(sum: f32, x: u16) -> f32 {
        sum + bf16::to_f32(x)
    }
    #[inline(always)]
    fn end(sum: f32) -> u16 {
        bf16::from_f32(sum)
    }
}

/// The bits of an f16.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct F16(u16);

impl Number for F16 {
    type Sum = f32;
    #[inline(always)]
    fn start(self) -> f32 {
        f16::to_f32(self.0)
    }
    #[inline(always)]
    fn add(sum: f32, x: F16) -> f32 {
        sum + f16::to_f32(x.0)
    }
    #[inline(always)]
    fn end(sum: f32) -> F16 {
        F16(f16::from_f32(sum))
    }
}

/// The integer of a fixed-point real.
impl Number for i64 {
    type Sum = i64;
    #[inline(always)]
    fn start(self) -> i64 {
        self
    }
    #[inline(always)]
    fn add(sum: i64, x: i64) -> i64 {
        fixed::merge(sum, x)
    }
    #[inline(always)]
    fn end(sum: i64) -> i64 {
        sum
    }
}

/// Whether tensors of this type can be added.
pub fn adds(dtype: DType) -> bool {
    match dtype {
        DType::F32 | DType::BF16 | DType::F16 | DType::F64 | DType::Fixed64 => true,
        DType::U32 => false,
    }
}

/// `output[e] = input(0)[e] + input(1)[e] + … + input(terms − 1)[e]` for `e < n`, in this order.
///
/// # Safety
/// Every pointer is good for `n` elements of the type and aligned to it. The output is exactly an input or apart from all
/// of them. The type `adds`.
pub unsafe fn sum(dtype: DType, terms: usize, input: impl Fn(usize) -> *const u8, output: *mut u8, n: usize) {
    // SAFETY: the caller vouches.
    unsafe {
        match dtype {
            DType::F32 => dispatch::<f32>(terms, input, output, n),
            DType::BF16 => dispatch::<u16>(terms, input, output, n),
            DType::F16 => dispatch::<F16>(terms, input, output, n),
            DType::F64 => dispatch::<f64>(terms, input, output, n),
            DType::Fixed64 => dispatch::<i64>(terms, input, output, n),
            DType::U32 => debug_assert!(false, "sums of u32 are refused before"),
        }
    }
}

unsafe fn dispatch<N: Number>(terms: usize, input: impl Fn(usize) -> *const u8, output: *mut u8, n: usize) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn avx2<N: Number>(terms: usize, input: impl Fn(usize) -> *const u8, output: *mut u8, n: usize) {
        // SAFETY: the caller vouches.
        unsafe { blocks::<N>(terms, input, output, n) }
    }
    #[cfg(target_arch = "x86_64")]
    if crate::cpu::Simd::current() >= crate::cpu::Simd::Avx2 {
        // SAFETY: the machine has the feature; the caller vouches for the ranges.
        return unsafe { avx2::<N>(terms, input, output, n) };
    }
    // SAFETY: the caller vouches.
    unsafe { blocks::<N>(terms, input, output, n) }
}

/// Goes through a local block, so that the output may be an input.
#[inline(always)]
unsafe fn blocks<N: Number>(terms: usize, input: impl Fn(usize) -> *const u8, output: *mut u8, n: usize) {
    const BLOCK: usize = 256;
    let mut sums = [N::Sum::default(); BLOCK];
    for start in (0..n).step_by(BLOCK) {
        let sums = &mut sums[..BLOCK.min(n - start)];
        for term in 0..terms {
            // SAFETY: inside the input, which nobody writes meanwhile: the output is written below.
            let x = unsafe { std::slice::from_raw_parts(input(term).cast::<N>().add(start), sums.len()) };
            if term == 0 {
                sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum = x.start());
            } else {
                sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum = N::add(*sum, x));
            }
        }
        // SAFETY: inside the output; the slices of inputs are gone.
        let output = unsafe { std::slice::from_raw_parts_mut(output.cast::<N>().add(start), sums.len()) };
        output.iter_mut().zip(&*sums).for_each(|(output, &sum)| *output = N::end(sum));
    }
}
