//! Matrix product in f32: C = A·B or C += A·B, any strides.
//!
//! Written by hand for two promises that general libraries do not give: an element of C is the same bits whatever the
//! number of rows and columns around it (its products are added in k order, in blocks of `KC`), and all scratch comes
//! from the caller.
//!
//! A block of B (`KC` × `NC`) is packed once by all threads; then each thread packs `MC` rows of A and multiplies
//! `MR` × `NR` tiles in registers.

use super::call::Ptr;
use super::pool::Pool;
use super::simd::Simd;

const MR: usize = 12;
const NR: usize = 32;
const KC: usize = 256;
const NC: usize = 2048;
const MC: usize = 96;

/// A matrix in memory: element (row, column) stands at `row · row_stride + column · column_stride`.
#[derive(Clone, Copy)]
pub struct Matrix<P> {
    pub ptr: P,
    pub row_stride: usize,
    pub column_stride: usize,
}

impl<P> Matrix<P> {
    /// Rows of `columns` elements, one behind the other.
    pub fn rows(ptr: P, columns: usize) -> Self {
        Self { ptr, row_stride: columns, column_stride: 1 }
    }

    /// Rows and columns swapped.
    pub fn transposed(self) -> Self {
        Self { ptr: self.ptr, row_stride: self.column_stride, column_stride: self.row_stride }
    }
}

/// Scratch bytes of a product on `threads` threads.
pub const fn scratch_bytes(threads: usize) -> usize {
    (KC * NC + threads * MC * KC) * 4
}

/// C (m × n) = A (m × k) · B (k × n), added to C where `add` says so.
///
/// # Safety
/// The matrices lie in valid memory of the sizes given, C overlaps neither A nor B, and `scratch` holds
/// `scratch_bytes(pool.threads())` bytes, aligned to 64.
#[allow(clippy::too_many_arguments)]
pub unsafe fn gemm(
    pool: &Pool,
    simd: Simd,
    (m, n, k): (usize, usize, usize),
    a: Matrix<*const f32>,
    b: Matrix<*const f32>,
    c: *mut f32,
    c_stride: usize,
    add: bool,
    scratch: *mut f32,
) {
    let shared = Ptr((a, b, c, scratch));
    for n0 in (0..n).step_by(NC) {
        let nc = NC.min(n - n0);
        for k0 in (0..k).step_by(KC) {
            let kc = KC.min(k - k0);
            let panels = nc.div_ceil(NR);
            const PANELS: usize = 4;
            pool.run(panels.div_ceil(PANELS), |task, _| {
                let (_, b, _, scratch) = shared.get();
                for panel in task * PANELS..panels.min((task + 1) * PANELS) {
                    let columns = NR.min(nc - panel * NR);
                    // SAFETY: inside B; each panel writes its own part of the scratch.
                    unsafe {
                        let from = b.ptr.add(k0 * b.row_stride + (n0 + panel * NR) * b.column_stride);
                        let to = scratch.add(panel * NR * kc);
                        simd.run(|| pack::<NR>(from, b.column_stride, b.row_stride, columns, kc, to));
                    }
                }
            });
            pool.run(m.div_ceil(MC), |task, worker| {
                let (a, _, c, scratch) = shared.get();
                let m0 = task * MC;
                let mc = MC.min(m - m0);
                // SAFETY: rows m0 .. m0 + mc of C belong to this task; each worker has its own packed A.
                unsafe {
                    let packed_a = scratch.add(KC * NC + worker * MC * KC);
                    simd.run(|| {
                        for i in (0..mc).step_by(MR) {
                            let from = a.ptr.add((m0 + i) * a.row_stride + k0 * a.column_stride);
                            let to = packed_a.add(i * kc);
                            pack::<MR>(from, a.row_stride, a.column_stride, MR.min(mc - i), kc, to);
                        }
                    });
                    let c = c.add(m0 * c_stride + n0);
                    multiply(simd, (mc, nc, kc), packed_a, scratch, c, c_stride, add || k0 > 0);
                }
            });
        }
    }
}

/// Floats of scratch that `gemm_small` needs for products up to these sizes.
pub const fn small_scratch(m: usize, n: usize, k: usize) -> usize {
    let kc = if k < KC { k } else { KC };
    (m.next_multiple_of(MR) + n.next_multiple_of(NR)) * kc
}

/// The same product on the calling thread alone, for tiles whose packed sides fit the caches.
///
/// # Safety
/// As `gemm`, with `small_scratch(m, n, k)` floats of scratch.
#[allow(clippy::too_many_arguments)]
#[inline]
pub unsafe fn gemm_small(
    simd: Simd,
    (m, n, k): (usize, usize, usize),
    a: Matrix<*const f32>,
    b: Matrix<*const f32>,
    c: *mut f32,
    c_stride: usize,
    add: bool,
    scratch: *mut f32,
) {
    for k0 in (0..k).step_by(KC) {
        let kc = KC.min(k - k0);
        // SAFETY: the caller vouches for the ranges.
        unsafe {
            let packed_b = scratch.add(m.next_multiple_of(MR) * kc);
            simd.run(|| {
                for i in (0..m).step_by(MR) {
                    let from = a.ptr.add(i * a.row_stride + k0 * a.column_stride);
                    pack::<MR>(from, a.row_stride, a.column_stride, MR.min(m - i), kc, scratch.add(i * kc));
                }
                for j in (0..n).step_by(NR) {
                    let from = b.ptr.add(k0 * b.row_stride + j * b.column_stride);
                    pack::<NR>(from, b.column_stride, b.row_stride, NR.min(n - j), kc, packed_b.add(j * kc));
                }
            });
            multiply(simd, (m, n, kc), scratch, packed_b, c, c_stride, add || k0 > 0);
        }
    }
}

/// Packs up to `W` lines of `kc` elements side by side: `to[k · W + line]`, lines that are missing as zeros.
#[inline(always)]
unsafe fn pack<const W: usize>(
    from: *const f32,
    line_stride: usize,
    k_stride: usize,
    lines: usize,
    kc: usize,
    to: *mut f32,
) {
    // SAFETY: the caller vouches for `lines` × `kc` elements behind `from` and W · kc behind `to`.
    unsafe {
        if lines < W {
            to.write_bytes(0, W * kc);
        }
        if line_stride == 1 && lines == W {
            for k in 0..kc {
                std::ptr::copy_nonoverlapping(from.add(k * k_stride), to.add(k * W), W);
            }
        } else if k_stride == 1 {
            // Eight k at a time: whole cache lines are read, and the writes stay close.
            let whole = kc / 8 * 8;
            for k0 in (0..whole).step_by(8) {
                for line in 0..lines {
                    let source = from.add(line * line_stride + k0);
                    for k in 0..8 {
                        *to.add((k0 + k) * W + line) = *source.add(k);
                    }
                }
            }
            for k in whole..kc {
                for line in 0..lines {
                    *to.add(k * W + line) = *from.add(line * line_stride + k);
                }
            }
        } else {
            for k in 0..kc {
                for line in 0..lines {
                    *to.add(k * W + line) = *from.add(line * line_stride + k * k_stride);
                }
            }
        }
    }
}

/// C += packed A · packed B (or =), tile by tile.
unsafe fn multiply(
    simd: Simd,
    (m, n, kc): (usize, usize, usize),
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    c_stride: usize,
    add: bool,
) {
    for j in (0..n).step_by(NR) {
        for i in (0..m).step_by(MR) {
            let (rows, columns) = (MR.min(m - i), NR.min(n - j));
            // SAFETY: packed panels hold MR · kc and NR · kc floats; C holds rows × columns here.
            unsafe {
                let (a, b, c) = (a.add(i * kc), b.add(j * kc), c.add(i * c_stride + j));
                match simd {
                    #[cfg(target_arch = "x86_64")]
                    Simd::Avx512 => avx512::tile(kc, a, b, c, c_stride, rows, columns, add),
                    Simd::Avx2 => simd.run(|| portable_tile::<true>(kc, a, b, c, c_stride, rows, columns, add)),
                    _ => portable_tile::<false>(kc, a, b, c, c_stride, rows, columns, add),
                }
            }
        }
    }
}

/// One tile, a few rows and columns at a time so that the sums stay in registers of any machine.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn portable_tile<const FMA: bool>(
    kc: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    c_stride: usize,
    rows: usize,
    columns: usize,
    add: bool,
) {
    const R: usize = 4;
    const C: usize = 16;
    for i0 in (0..rows).step_by(R) {
        for j0 in (0..columns).step_by(C) {
            let mut sums = [[0.0f32; C]; R];
            for k in 0..kc {
                for (i, row) in sums.iter_mut().enumerate() {
                    for (j, sum) in row.iter_mut().enumerate() {
                        // SAFETY: the packed panels are padded to MR and NR, multiples of R and C.
                        let (x, y) = unsafe { (*a.add(k * MR + i0 + i), *b.add(k * NR + j0 + j)) };
                        *sum = if FMA { x.mul_add(y, *sum) } else { x * y + *sum };
                    }
                }
            }
            for (i, row) in sums.iter().enumerate().take(rows - i0) {
                for (j, sum) in row.iter().enumerate().take(columns - j0) {
                    // SAFETY: inside the rows × columns of C.
                    unsafe {
                        let c = c.add((i0 + i) * c_stride + j0 + j);
                        *c = if add { *c + sum } else { *sum };
                    }
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{MR, NR};
    use std::arch::x86_64::*;

    /// One MR × NR tile in 24 registers.
    #[allow(clippy::too_many_arguments)]
    #[target_feature(enable = "avx512f")]
    pub unsafe fn tile(
        kc: usize,
        a: *const f32,
        b: *const f32,
        c: *mut f32,
        c_stride: usize,
        rows: usize,
        columns: usize,
        add: bool,
    ) {
        let mut sums = [[_mm512_setzero_ps(); 2]; MR];
        // SAFETY: the packed panels hold MR · kc and NR · kc floats.
        unsafe {
            for k in 0..kc {
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
            for (half, &s) in sum.iter().enumerate() {
                // SAFETY: the masks keep loads and stores inside the rows × columns of C.
                unsafe {
                    let at = c.add(i * c_stride + half * 16);
                    let s = if add { _mm512_add_ps(_mm512_maskz_loadu_ps(masks[half], at), s) } else { s };
                    _mm512_mask_storeu_ps(at, masks[half], s);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::counter;

    fn random(n: usize, name: &str) -> Vec<f32> {
        let key = counter::key(1, name);
        (0..n).map(|i| counter::normal(key, i as u64)).collect()
    }

    fn product(simd: Simd, threads: usize, (m, n, k): (usize, usize, usize), a: &[f32], b: &[f32]) -> Vec<f32> {
        let pool = Pool::new(threads);
        let mut scratch = vec![0.0; scratch_bytes(threads) / 4];
        let mut c = vec![f32::NAN; m * n];
        let (a, b) = (Matrix::rows(a.as_ptr(), k), Matrix::rows(b.as_ptr(), n));
        // SAFETY: the vectors have the sizes given.
        unsafe { gemm(&pool, simd, (m, n, k), a, b, c.as_mut_ptr(), n, false, scratch.as_mut_ptr()) };
        c
    }

    #[test]
    fn products_agree_with_f64_on_every_unit_at_awkward_sizes() {
        let mut units = vec![Simd::Portable];
        let best = Simd::detect();
        if best != Simd::Portable {
            units.extend([best, Simd::Avx2]);
        }
        for (m, n, k) in [(1, 1, 1), (13, 33, 7), (97, 65, 300), (12, 2100, 5), (100, 31, 513)] {
            let (a, b) = (random(m * k, "a"), random(k * n, "b"));
            for &simd in &units {
                let c = product(simd, 2, (m, n, k), &a, &b);
                for i in 0..m {
                    for j in 0..n {
                        let exact: f64 = (0..k).map(|l| f64::from(a[i * k + l]) * f64::from(b[l * n + j])).sum();
                        assert!((f64::from(c[i * n + j]) - exact).abs() < 1e-5 * (k as f64), "{simd:?} {m} {n} {k}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_the_rows_around_it_nor_on_threads() {
        let (n, k) = (70, 600);
        let (a, b) = (random(200 * k, "a"), random(k * n, "b"));
        let many = product(Simd::detect(), 2, (200, n, k), &a, &b);
        for row in [0, 5, 96, 199] {
            let one = product(Simd::detect(), 1, (1, n, k), &a[row * k..(row + 1) * k], &b);
            assert_eq!(one, many[row * n..(row + 1) * n]);
        }
    }
}
