//! Sums of several ranks' tensors, in the order of the ranks.

use lockstep_ir::{DType, bf16, f16, fixed};

/// Whether tensors of this type can be added.
pub fn adds(dtype: DType) -> bool {
    match dtype {
        DType::F32 | DType::BF16 | DType::F16 | DType::F64 | DType::Fixed64 => true,
        DType::E4M3 | DType::E5M2 | DType::Int8 | DType::Signed8 | DType::Unsigned8 | DType::U32 => false,
    }
}

/// `output[e] = input(0)[e] + input(1)[e] + … + input(terms − 1)[e]` for `e < n`, in this order.
///
/// # Safety
/// Every pointer is good for `n` elements of the type and aligned to it. The output is exactly an input or apart from all
/// of them. The type `adds`.
pub unsafe fn sum(dtype: DType, terms: usize, input: impl Fn(usize) -> *const u8, output: *mut u8, n: usize) {
    let sum = Sum { terms, input, output, n };
    // SAFETY: the caller vouches.
    unsafe {
        match dtype {
            DType::F32 => sum.write(|x: f32| x, |a, b| a + b, |sum| sum),
            DType::F64 => sum.write(|x: f64| x, |a, b| a + b, |sum| sum),
            DType::BF16 => sum.write(bf16::to_f32, |a, b| a + b, bf16::from_f32),
            DType::F16 => sum.write(f16::to_f32, |a, b| a + b, f16::from_f32),
            DType::Fixed64 => sum.write(|x: i64| x, fixed::merge, |sum| sum),
            DType::E4M3 | DType::E5M2 | DType::Int8 | DType::Signed8 | DType::Unsigned8 | DType::U32 => {
                debug_assert!(false, "sums of {dtype} are refused before")
            }
        }
    }
}

struct Sum<I> {
    terms: usize,
    input: I,
    output: *mut u8,
    n: usize,
}

impl<I: Fn(usize) -> *const u8> Sum<I> {
    /// Of elements `E`, whose sums are kept as `S`.
    unsafe fn write<E: Copy, S: Copy + Default>(
        self,
        start: impl Fn(E) -> S,
        add: impl Fn(S, S) -> S,
        end: impl Fn(S) -> E,
    ) {
        #[cfg(target_arch = "x86_64")]
        if crate::cpu::Simd::current() >= crate::cpu::Simd::Avx2 {
            // SAFETY: the machine has the feature; the caller vouches for the ranges.
            return unsafe { self.avx2(start, add, end) };
        }
        // SAFETY: the caller vouches.
        unsafe { self.blocks(start, add, end) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn avx2<E: Copy, S: Copy + Default>(
        self,
        start: impl Fn(E) -> S,
        add: impl Fn(S, S) -> S,
        end: impl Fn(S) -> E,
    ) {
        // SAFETY: the caller vouches.
        unsafe { self.blocks(start, add, end) }
    }

    /// Goes through a local block, so that the output may be an input.
    #[inline(always)]
    unsafe fn blocks<E: Copy, S: Copy + Default>(
        self,
        start: impl Fn(E) -> S,
        add: impl Fn(S, S) -> S,
        end: impl Fn(S) -> E,
    ) {
        const BLOCK: usize = 256;
        let mut sums = [S::default(); BLOCK];
        for first in (0..self.n).step_by(BLOCK) {
            let sums = &mut sums[..BLOCK.min(self.n - first)];
            for term in 0..self.terms {
                // SAFETY: inside the input, which nobody writes meanwhile: the output is written below.
                let x = unsafe { std::slice::from_raw_parts((self.input)(term).cast::<E>().add(first), sums.len()) };
                if term == 0 {
                    sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum = start(x));
                } else {
                    sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum = add(*sum, start(x)));
                }
            }
            // SAFETY: inside the output; the slices of inputs are gone.
            let output = unsafe { std::slice::from_raw_parts_mut(self.output.cast::<E>().add(first), sums.len()) };
            output.iter_mut().zip(&*sums).for_each(|(output, &sum)| *output = end(sum));
        }
    }
}
