//! Tiles in vector registers, always in f32; bf16 operands are widened when they are packed.

use super::transpose::transpose_16;
use super::{Matrix, NR, Target, store_tile};
use crate::cpu::float::Float;
use crate::cpu::simd::{Simd, vectorised};
use lockstep_ir::DType;

/// Rows of a tile.
pub const MR: usize = 12;

/// Packs up to `W` rows of `source`, `depth` elements of each, side by side: `to[k · W + row]`, rows that are missing as
/// zeros.
pub unsafe fn pack<const W: usize, T: Float>(simd: Simd, source: Matrix<T>, lines: usize, depth: usize, to: *mut f32) {
    // SAFETY: the caller vouches for `lines` × `depth` elements at the source and W · depth at `to`.
    unsafe {
        if lines < W {
            to.write_bytes(0, W * depth);
        }
        if source.row_stride == 1 && lines == W && T::DTYPE == DType::F32 {
            let from: *const f32 = source.ptr.cast();
            for k in 0..depth {
                std::ptr::copy_nonoverlapping(from.add(k * source.column_stride), to.add(k * W), W);
            }
        } else if source.row_stride == 1 {
            widen_rows(simd, source.ptr, source.column_stride, lines, depth, to, W);
        } else if source.column_stride == 1 && T::DTYPE == DType::F32 && simd >= Simd::Avx512 {
            let whole = depth / 16 * 16;
            for first in (0..lines).step_by(16) {
                let here = 16.min(lines - first);
                let from = source.ptr.add(first * source.row_stride).cast::<u32>();
                for k in (0..whole).step_by(16) {
                    transpose_16(from.add(k), source.row_stride, here, 16, to.add(k * W + first).cast(), W);
                }
            }
            scatter(source, lines, whole, depth, to, W);
        } else {
            scatter(source, lines, 0, depth, to, W);
        }
    }
}

vectorised! {
    unsafe fn widen_rows<T>(from: *const T, stride: usize, lines: usize, depth: usize, to: *mut f32, width: usize) -> () {
        for k in 0..depth {
            for line in 0..lines {
                *to.add(k * width + line) = (*from.add(k * stride + line)).to();
            }
        }
    }
}

unsafe fn scatter<T: Float>(source: Matrix<T>, lines: usize, from: usize, depth: usize, to: *mut f32, width: usize) {
    for k in from..depth {
        for line in 0..lines {
            // SAFETY: the caller vouches for the ranges.
            unsafe {
                let x = *source.ptr.add(line * source.row_stride + k * source.column_stride);
                *to.add(k * width + line) = x.to();
            }
        }
    }
}

/// C = packed A · packed B, tile by tile; each operand as its first panel and the floats from one to the next.
pub unsafe fn multiply(
    simd: Simd,
    (m, n, depth): (usize, usize, usize),
    (a, a_panel): (*const f32, usize),
    (b, b_panel): (*const f32, usize),
    c: Target,
) {
    for j in (0..n).step_by(NR) {
        for i in (0..m).step_by(MR) {
            let (rows, columns) = (MR.min(m - i), NR.min(n - j));
            // SAFETY: packed panels hold MR · depth and NR · depth floats; C holds rows × columns here.
            unsafe {
                let (a, b, c) = (a.add(i / MR * a_panel), b.add(j / NR * b_panel), c.part(i, j, true));
                match (simd, c) {
                    #[cfg(target_arch = "x86_64")]
                    (Simd::Avx512 | Simd::Amx, Target::F32 { .. } | Target::Scaled { .. }) => {
                        // Few rows in few registers: the same sums without those of rows that are not there.
                        match rows {
                            0..=4 => avx512::tile::<4>(depth, a, b, c, rows, columns),
                            5..=8 => avx512::tile::<8>(depth, a, b, c, rows, columns),
                            _ => avx512::tile::<MR>(depth, a, b, c, rows, columns),
                        }
                    }
                    #[cfg(target_arch = "x86_64")]
                    (Simd::Avx512 | Simd::Amx, Target::Bf16 { .. } | Target::F16 { .. }) => {
                        let mut tile = [0.0f32; MR * NR];
                        let whole = Target::F32 { ptr: tile.as_mut_ptr(), stride: NR, add: false };
                        avx512::tile::<MR>(depth, a, b, whole, MR, NR);
                        store_tile(simd, tile.as_ptr(), rows, columns, c);
                    }
                    _ => {
                        let mut sums = [0.0f32; MR * NR];
                        tile(simd, depth, a, b, simd != Simd::Portable, &mut sums);
                        store_tile(simd, sums.as_ptr(), rows, columns, c);
                    }
                }
            }
        }
    }
}

/// A few rows and columns at a time, so that the sums stay in registers of any machine.
const R: usize = 4;
const C: usize = 16;

vectorised! {
    /// One tile; `fused` says whether the machine multiplies and adds in one step.
    unsafe fn tile<T>(depth: usize, a: *const T, b: *const T, fused: bool, tile: &mut [f32; MR * NR]) -> () {
        for i0 in (0..MR).step_by(R) {
            for j0 in (0..NR).step_by(C) {
                let mut sums = [[0.0f32; C]; R];
                for k in 0..depth {
                    for (i, row) in sums.iter_mut().enumerate() {
                        let x = (*a.add(k * MR + i0 + i)).to();
                        for (j, sum) in row.iter_mut().enumerate() {
                            let y = (*b.add(k * NR + j0 + j)).to();
                            *sum = if fused { x.mul_add(y, *sum) } else { *sum + x * y };
                        }
                    }
                }
                for (i, row) in sums.iter().enumerate() {
                    tile[(i0 + i) * NR + j0..][..C].copy_from_slice(row);
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{MR, NR, Target};
    use std::arch::x86_64::*;

    /// The first `R` rows of an MR × NR tile in 2 R registers, for targets in f32.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn tile<const R: usize>(
        depth: usize,
        a: *const f32,
        b: *const f32,
        c: Target,
        rows: usize,
        columns: usize,
    ) {
        let (c, stride, add, factors) = match c {
            Target::F32 { ptr, stride, add } => (ptr, stride, add, std::ptr::null()),
            Target::Scaled { ptr, stride, factors } => (ptr, stride, true, factors),
            Target::Bf16 { .. } | Target::F16 { .. } => unreachable!("tiles in vector registers are stored in f32"),
        };
        let mut sums = [[_mm512_setzero_ps(); 2]; R];
        // SAFETY: prefetching reads nothing; the packed panels hold MR · depth and NR · depth floats.
        unsafe {
            // What the sums are stored to is on its way while they are made. Small matmuls have it at hand.
            for i in 0..if depth < 128 { 0 } else { rows } {
                let line = c.wrapping_add(i * stride).cast();
                _mm_prefetch::<_MM_HINT_T0>(line);
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(64));
            }
            for k in 0..depth {
                let b0 = _mm512_loadu_ps(b.add(k * NR));
                let b1 = _mm512_loadu_ps(b.add(k * NR + 16));
                for (i, sum) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*a.add(k * MR + i));
                    sum[0] = _mm512_fmadd_ps(x, b0, sum[0]);
                    sum[1] = _mm512_fmadd_ps(x, b1, sum[1]);
                }
            }
        }
        let mask = |from: usize| -> __mmask16 { ((1u32 << columns.saturating_sub(from).min(16)) - 1) as __mmask16 };
        let masks = [mask(0), mask(16)];
        for (i, sum) in sums.iter().enumerate().take(rows) {
            // SAFETY: the masks keep loads and stores inside the rows × columns of C; there is a factor for every row.
            unsafe {
                let factor = _mm512_set1_ps(if factors.is_null() { 1.0 } else { *factors.add(i) });
                for (half, &s) in sum.iter().enumerate() {
                    let at = c.add(i * stride + half * 16);
                    // A factor of 1 changes no bit.
                    let s = if add {
                        let before = _mm512_maskz_loadu_ps(masks[half], at);
                        _mm512_add_ps(before, _mm512_mul_ps(factor, s))
                    } else {
                        s
                    };
                    _mm512_mask_storeu_ps(at, masks[half], s);
                }
            }
        }
    }
}
