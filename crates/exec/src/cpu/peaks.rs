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

/// The seconds of the best run of `f`, once runs have stopped becoming faster.
fn best_of(mut f: impl FnMut()) -> f64 {
    settled(|| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64()
    })
}

/// The least of the times that `run` gives, as soon as five in a row were no better by a hundredth than the best before them. On a
/// machine that others use too this may take a while: a second and a half in all is the most, and two runs the least.
fn settled(mut run: impl FnMut() -> f64) -> f64 {
    const CALM: usize = 5;
    const LONGEST: f64 = 1.5;
    let (mut best, mut calm, mut total) = (run(), 0, 0.0);
    while calm < CALM && total < LONGEST {
        let seconds = run();
        total += seconds;
        calm = if seconds < 0.99 * best { 0 } else { calm + 1 };
        best = best.min(seconds);
    }
    best
}

/// The speed of a large matmul on `threads` threads, operands in f32 or bf16, in FLOP per second.
pub fn matmul(threads: usize, operands: DType) -> Result<f64, ExecError> {
    match operands {
        DType::BF16 => matmul_of::<Bf16>(threads),
        // Other types are widened to f32.
        _ => matmul_of::<f32>(threads),
    }
}

fn matmul_of<T: Float>(threads: usize) -> Result<f64, ExecError> {
    const N: usize = 1024;
    let (pool, simd) = (start(threads)?, Simd::current());
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
    let (pool, simd) = (start(threads)?, Simd::current());
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found of runs that take so long, and how many of them were made.
    fn check(times: &[f64]) -> (f64, usize) {
        let mut made = 0;
        let found = settled(|| {
            made += 1;
            times[(made - 1).min(times.len() - 1)]
        });
        (found, made)
    }

    #[test]
    fn runs_go_on_while_they_become_faster() {
        assert_eq!(check(&[0.01]), (0.01, 6));
        // A busy machine that becomes idle.
        assert_eq!(check(&[0.09, 0.08, 0.09, 0.05, 0.05, 0.05, 0.05, 0.02, 0.02]), (0.02, 13));
        // Noise does not count as faster.
        assert_eq!(check(&[0.0100, 0.0101, 0.00999, 0.0101, 0.00998, 0.0103, 0.001]), (0.00998, 6));
    }

    #[test]
    fn a_slow_machine_is_not_kept_waiting() {
        assert_eq!(check(&[3.0, 2.0, 1.0]), (2.0, 2));
    }
}
