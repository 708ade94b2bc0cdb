//! The machine's measured peaks, which kernels are compared with: matmul FLOP/s and memory bandwidth.

use super::call::Ptr;
use super::float::{Bf16, Float};
use super::gemm::{self, Matrix, Target};
use super::pool::Pool;
use super::simd::{Simd, vectorised};
use crate::ExecError;
use lockstep_ir::DType;
use std::time::Instant;

fn start(threads: usize) -> Result<Pool, ExecError> {
    Pool::new(threads).map_err(|e| ExecError::Threads(threads, e))
}

/// The best of up to twelve runs of `f` within a fifth of a second, in seconds.
fn best_of(mut f: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    for run in 0..12 {
        let start = Instant::now();
        f();
        best = best.min(start.elapsed().as_secs_f64());
        if run > 0 && begin.elapsed().as_secs_f64() > 0.2 {
            break;
        }
    }
    best
}

/// The speed of a large matmul on `threads` threads, operands in f32 or bf16, in FLOP per second.
pub fn matmul(threads: usize, operands: DType) -> Result<f64, ExecError> {
    match operands {
        DType::BF16 => matmul_of::<Bf16>(threads),
        _ => matmul_of::<f32>(threads),
    }
}

fn matmul_of<T: Float>(threads: usize) -> Result<f64, ExecError> {
    const N: usize = 1024;
    let (pool, simd) = (start(threads)?, Simd::detect());
    let (a, b) = (vec![T::of(1.0); N * N], vec![T::of(1.0); N * N]);
    let mut c = vec![0.0f32; N * N];
    let mut scratch = vec![0.0f32; gemm::scratch_bytes(threads).0 / 4];
    let seconds = best_of(|| {
        let (a, b) = (Matrix::rows(a.as_ptr(), N), Matrix::rows(b.as_ptr(), N));
        let c = Target::F32 { ptr: c.as_mut_ptr(), stride: N, add: false };
        // SAFETY: the vectors have these sizes.
        unsafe { gemm::gemm(&pool, simd, (N, N, N), a, b, c, scratch.as_mut_ptr()) };
    });
    Ok(2.0 * (N as f64).powi(3) / seconds)
}

/// The speed of copying memory that is larger than the caches' share of a thread, in bytes read and written per second.
pub fn bandwidth(threads: usize) -> Result<f64, ExecError> {
    const N: usize = 32 << 20;
    let (pool, simd) = (start(threads)?, Simd::detect());
    let from = vec![1.0f32; N];
    let mut to = vec![0.0f32; N];
    let (a, b) = (Ptr(from.as_ptr()), Ptr(to.as_mut_ptr()));
    let grain = N / 64;
    let seconds = best_of(|| {
        pool.run(64, |task, _| {
            // SAFETY: tasks copy disjoint ranges.
            unsafe { copy(simd, a.at(task * grain), b.at(task * grain), grain) };
        });
    });
    Ok((2 * N * 4) as f64 / seconds)
}

vectorised! {
    unsafe fn copy<T>(from: *const T, to: *mut T, n: usize) -> () {
        for i in 0..n {
            *to.add(i) = *from.add(i);
        }
    }
}
