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
        } else if source.column_stride == 1 && T::DTYPE == DType::F32 && simd.transposes_blocks() {
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
                    #[cfg(target_arch = "aarch64")]
                    (Simd::Neon, _) => {
                        let mut sums = [0.0f32; MR * NR];
                        // Few rows in few registers; more columns then keep the multipliers busy.
                        match rows {
                            0..=4 => neon::tile::<1, 4>(depth, a, b, &mut sums),
                            5..=8 => neon::tile::<2, 2>(depth, a, b, &mut sums),
                            _ => neon::tile::<3, 2>(depth, a, b, &mut sums),
                        }
                        store_tile(simd, sums.as_ptr(), rows, columns, c);
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

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::{MR, NR};
    use std::arch::aarch64::*;

    /// Floats of a register.
    const LANES: usize = 4;

    /// The first 4 `A` rows of an MR × NR tile, 4 `B` columns at a time: 4 A B registers of sums beside A + B of operands, of the 32
    /// that there are.
    ///
    /// # Safety
    /// The packed panels hold MR · depth and NR · depth floats.
    pub unsafe fn tile<const A: usize, const B: usize>(
        depth: usize,
        a: *const f32,
        b: *const f32,
        tile: &mut [f32; MR * NR],
    ) {
        const { assert!(A * LANES <= MR && NR.is_multiple_of(B * LANES)) };
        for first in (0..NR).step_by(B * LANES) {
            // SAFETY: the caller vouches for the panels; the tile has NR floats for each of MR rows. NEON is part of aarch64.
            unsafe {
                let mut sums = [[[vdupq_n_f32(0.0); B]; LANES]; A];
                for k in 0..depth {
                    let mut columns = [vdupq_n_f32(0.0); B];
                    for (j, column) in columns.iter_mut().enumerate() {
                        *column = vld1q_f32(b.add(k * NR + first + j * LANES));
                    }
                    for (i, [row_0, row_1, row_2, row_3]) in sums.iter_mut().enumerate() {
                        let rows = vld1q_f32(a.add(k * MR + i * LANES));
                        for (j, &column) in columns.iter().enumerate() {
                            row_0[j] = vfmaq_laneq_f32::<0>(row_0[j], column, rows);
                            row_1[j] = vfmaq_laneq_f32::<1>(row_1[j], column, rows);
                            row_2[j] = vfmaq_laneq_f32::<2>(row_2[j], column, rows);
                            row_3[j] = vfmaq_laneq_f32::<3>(row_3[j], column, rows);
                        }
                    }
                }
                for (row, sums) in sums.as_flattened().iter().enumerate() {
                    for (j, &sum) in sums.iter().enumerate() {
                        vst1q_f32(tile.as_mut_ptr().add(row * NR + first + j * LANES), sum);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::counter;

    #[test]
    fn paths_with_fused_multiply_add_give_the_same_bits() {
        let key = counter::key(1, "tiles");
        let random = |n: usize| (0..n).map(|i| counter::normal(key, i as u64)).collect::<Vec<f32>>();
        for (rows, columns, depth) in [(1, 32, 5), (4, 31, 130), (7, 32, 1), (8, 9, 200), (12, 32, 300), (12, 1, 33)] {
            let (a, b) = (random(MR * depth), random(NR * depth));
            let mut expected = [0.0; MR * NR];
            // SAFETY: the panels are as deep as they are said to be.
            unsafe { tile(Simd::Portable, depth, a.as_ptr(), b.as_ptr(), true, &mut expected) };
            for simd in Simd::ALL.into_iter().filter(|path| *path > Simd::Portable && *path <= Simd::current()) {
                let mut found = [0.0f32; MR * NR];
                let target = Target::F32 { ptr: found.as_mut_ptr(), stride: NR, add: false };
                // SAFETY: the panels are as deep as they are said to be, and the target has a whole tile.
                unsafe { multiply(simd, (rows, columns, depth), (a.as_ptr(), 0), (b.as_ptr(), 0), target) };
                for (row, (found, expected)) in found.chunks(NR).zip(expected.chunks(NR)).enumerate() {
                    let here = if row < rows { columns } else { 0 };
                    assert_eq!(found[..here], expected[..here], "{simd:?}: row {row} of {rows} × {columns} × {depth}");
                    assert!(found[here..].iter().all(|x| *x == 0.0), "{simd:?}: outside of {rows} × {columns}");
                }
            }
        }
    }
}
