//! What this machine can do at best: the floors that kernels are measured against.

use super::call::Ptr;
use super::gemm::{self, Matrix};
use super::pool::Pool;
use super::simd::Simd;
use std::time::Instant;

/// The best of a few short runs of `f`, in seconds.
fn best_of(runs: usize, mut f: impl FnMut()) -> f64 {
    (0..runs).fold(f64::INFINITY, |best, _| {
        let start = Instant::now();
        f();
        best.min(start.elapsed().as_secs_f64())
    })
}

/// The speed of large f32 matrix products on `threads` threads, in FLOP per second.
pub fn matmul(threads: usize) -> f64 {
    const N: usize = 768;
    let (pool, simd) = (Pool::new(threads), Simd::detect());
    let (a, b) = (vec![1.0f32; N * N], vec![1.0f32; N * N]);
    let mut c = vec![0.0f32; N * N];
    let mut scratch = vec![0.0f32; gemm::scratch_bytes(threads) / 4];
    let seconds = best_of(12, || {
        let (a, b) = (Matrix::rows(a.as_ptr(), N), Matrix::rows(b.as_ptr(), N));
        // SAFETY: the vectors have these sizes.
        unsafe { gemm::gemm(&pool, simd, (N, N, N), a, b, c.as_mut_ptr(), N, false, scratch.as_mut_ptr()) };
    });
    2.0 * (N as f64).powi(3) / seconds
}

/// The speed of copying memory that is larger than the caches' share of a thread, in bytes read and written per second.
pub fn bandwidth(threads: usize) -> f64 {
    const N: usize = 32 << 20;
    let (pool, simd) = (Pool::new(threads), Simd::detect());
    let from = vec![1.0f32; N];
    let mut to = vec![0.0f32; N];
    let (a, b) = (Ptr(from.as_ptr()), Ptr(to.as_mut_ptr()));
    let grain = N / 64;
    let seconds = best_of(6, || {
        pool.run(64, |task, _| {
            // SAFETY: tasks copy disjoint ranges.
            simd.run(|| unsafe { b.slice(task * grain, grain).copy_from_slice(a.slice(task * grain, grain)) });
        });
    });
    (2 * N * 4) as f64 / seconds
}
