//! Matmuls: C = A·B or C += A·B, operands in f32, bf16 or f16 with any strides, sums in f32.
//!
//! Written by hand for two promises that general libraries do not give: an element of C is the same bits whatever the
//! number of rows and columns around it (its products are added in k order, in fixed blocks), and all scratch comes from
//! the caller.
//!
//! A block of B is packed once by all threads; then each thread takes rows of A and multiplies tiles: in vector registers
//! ([`vector`]), or for bf16 where the machine has them in tile registers ([`amx`]).

mod amx;
mod packed;
mod transpose;
mod vector;

pub use packed::{K_STEP, Packed, Unit, multiply, pack_a, pack_b, put_a_line, put_b_pair};
pub use transpose::transpose;

use super::call::Ptr;
use super::float::{Bf16, F16, Float};
use super::pool::Pool;
use super::simd::{Simd, vectorised};
use lockstep_ir::DType;

/// A matrix in memory: element (row, column) stands at `row · row_stride + column · column_stride`.
#[derive(Clone, Copy)]
pub struct Matrix<T> {
    pub ptr: *const T,
    pub row_stride: usize,
    pub column_stride: usize,
}

impl<T> Matrix<T> {
    /// Rows of `stride` elements, one after the other.
    pub fn rows(ptr: *const T, stride: usize) -> Self {
        Self { ptr, row_stride: stride, column_stride: 1 }
    }

    /// Rows and columns swapped.
    pub fn transposed(self) -> Self {
        Self { ptr: self.ptr, row_stride: self.column_stride, column_stride: self.row_stride }
    }

    /// The part that starts at (row, column).
    unsafe fn part(self, row: usize, column: usize) -> Self {
        // SAFETY: the caller stays inside the matrix.
        Self { ptr: unsafe { self.ptr.add(row * self.row_stride + column * self.column_stride) }, ..self }
    }

    /// The part that starts at a row.
    ///
    /// # Safety
    /// The matrix has that row.
    pub unsafe fn skip_rows(self, row: usize) -> Self {
        // SAFETY: the caller vouches.
        unsafe { self.part(row, 0) }
    }

    /// The same matrix, seen as another type of the same size.
    fn retype<U>(self) -> Matrix<U> {
        Matrix { ptr: self.ptr.cast(), row_stride: self.row_stride, column_stride: self.column_stride }
    }
}

/// Where the result goes: rows of `stride` elements.
#[derive(Clone, Copy)]
pub enum Target {
    /// In f32, added to what is there where `add` says so.
    F32 { ptr: *mut f32, stride: usize, add: bool },
    /// Added in f32 to what is there, each row of the result times its own factor.
    Scaled { ptr: *mut f32, stride: usize, factors: *const f32 },
    /// Rounded to bf16.
    Bf16 { ptr: *mut Bf16, stride: usize },
    /// Rounded to f16.
    F16 { ptr: *mut F16, stride: usize },
}

impl Target {
    /// A result in the operands' own type.
    pub fn new<T: Float>(ptr: *mut T, stride: usize) -> Self {
        match T::DTYPE {
            DType::BF16 => Target::Bf16 { ptr: ptr.cast(), stride },
            DType::F16 => Target::F16 { ptr: ptr.cast(), stride },
            DType::F32 => Target::F32 { ptr: ptr.cast(), stride, add: false },
            other => unreachable!("no matmul is in {other}"),
        }
    }

    /// The part that starts at (row, column), for the products of a k block that is the `first` or a later one.
    unsafe fn part(self, row: usize, column: usize, first: bool) -> Self {
        // SAFETY: the caller stays inside the target.
        unsafe {
            match self {
                Target::F32 { ptr, stride, add } => {
                    Target::F32 { ptr: ptr.add(row * stride + column), stride, add: add || !first }
                }
                Target::Scaled { ptr, stride, factors } => {
                    Target::Scaled { ptr: ptr.add(row * stride + column), stride, factors: factors.add(row) }
                }
                Target::Bf16 { ptr, stride } => Target::Bf16 { ptr: ptr.add(row * stride + column), stride },
                Target::F16 { ptr, stride } => Target::F16 { ptr: ptr.add(row * stride + column), stride },
            }
        }
    }
}

/// Columns of a tile, for both units.
pub const NR: usize = 32;
/// Most rows of A that a thread takes at a time.
const MOST_ROWS: usize = 192;
/// Bytes of packed B that are aimed at: what a second-level cache holds.
const B_BYTES: usize = 1 << 20;

/// Blocks of k for sums that are kept in f32 in memory: of about the same size, at most `MOST_DEPTH`.
const MOST_DEPTH: usize = 512;

fn k_block(unit: Unit, k: usize) -> usize {
    let most = match unit {
        Unit::Vector => 384,
        Unit::Amx => MOST_DEPTH,
    };
    k.div_ceil(k.div_ceil(most).max(1)).next_multiple_of(K_STEP)
}

/// Scratch of a matmul on `threads` threads as (bytes, bytes per element of k).
///
/// The second part counts for rounded results only: they are rounded once, so k is not cut into blocks.
pub const fn scratch_bytes(threads: usize) -> (usize, usize) {
    (B_BYTES + (NR + threads * MOST_ROWS) * (MOST_DEPTH + K_STEP) * 4, (NR + threads * MOST_ROWS) * 4)
}

/// C (m × n) = A (m × k) · B (k × n).
///
/// # Safety
/// The matrices lie in valid memory of the sizes given, C overlaps neither A nor B, and `scratch` holds what
/// `scratch_bytes` says, aligned to 64.
pub unsafe fn gemm<T: Float>(
    pool: &Pool,
    simd: Simd,
    (m, n, k): (usize, usize, usize),
    a: Matrix<T>,
    b: Matrix<T>,
    c: Target,
    scratch: *mut f32,
) {
    let unit = Unit::of::<T>(simd);
    let kc = match c {
        Target::F32 { .. } | Target::Scaled { .. } => k_block(unit, k).min(k),
        Target::Bf16 { .. } | Target::F16 { .. } => k,
    };
    if m <= unit.rows() && unit.bytes(unit.rows(), k.next_multiple_of(K_STEP)) <= B_BYTES {
        // SAFETY: as promised to this function.
        return unsafe { few_rows(pool, simd, (m, n, k), kc, a, b, c, scratch.cast()) };
    }
    let nc = (B_BYTES / unit.bytes(1, kc).max(1) / NR * NR).max(NR);
    let row_block = m.div_ceil(4 * pool.threads()).clamp(1, MOST_ROWS).next_multiple_of(unit.rows()).min(MOST_ROWS);
    let shared = Ptr((a, b, c, scratch.cast::<u8>()));
    for n0 in (0..n).step_by(nc) {
        let columns = nc.min(n - n0);
        for k0 in (0..k).step_by(kc) {
            let depth = kc.min(k - k0);
            const PANELS: usize = 2;
            pool.run(columns.div_ceil(PANELS * NR), |task, _| {
                let (_, b, _, scratch) = shared.get();
                let first = task * PANELS * NR;
                // SAFETY: inside B; each task writes its own panels of the scratch.
                unsafe {
                    let to = Packed::b(unit, scratch, depth).columns_from(first);
                    pack_b(simd, b.part(k0, n0 + first), (PANELS * NR).min(columns - first), depth, to);
                }
            });
            pool.run(m.div_ceil(row_block), |task, worker| {
                let (a, _, c, scratch) = shared.get();
                let m0 = task * row_block;
                let rows = row_block.min(m - m0);
                // SAFETY: these rows of C belong to this task; each worker packs A in its own place.
                unsafe {
                    let behind_b = unit.bytes(nc.min(n).next_multiple_of(NR), kc).next_multiple_of(64);
                    let own = scratch.add(behind_b + worker * unit.bytes(MOST_ROWS, kc).next_multiple_of(64));
                    let (packed_a, packed_b) = (Packed::a(unit, own, depth), Packed::b(unit, scratch, depth));
                    pack_a(simd, a.part(m0, k0), rows, depth, packed_a);
                    multiply::<T>(simd, (rows, columns, depth), packed_a, packed_b, c.part(m0, n0, k0 == 0));
                }
            });
        }
    }
}

/// The same matmul of one panel of rows: every thread packs a panel of B where it needs it and goes on to the next.
#[allow(clippy::too_many_arguments)]
unsafe fn few_rows<T: Float>(
    pool: &Pool,
    simd: Simd,
    (m, n, k): (usize, usize, usize),
    kc: usize,
    a: Matrix<T>,
    b: Matrix<T>,
    c: Target,
    scratch: *mut u8,
) {
    let unit = Unit::of::<T>(simd);
    let packed_a = Packed::a(unit, scratch, k);
    // SAFETY: the caller vouches for the ranges; the rows packed take at most B_BYTES of scratch.
    unsafe { pack_a(simd, a, m, k, packed_a) };
    let shared = Ptr((packed_a, b, c, scratch.wrapping_add(B_BYTES)));
    pool.run(n.div_ceil(NR), |panel, worker| {
        let (packed_a, b, c, own) = shared.get();
        let (n0, columns) = (panel * NR, NR.min(n - panel * NR));
        // SAFETY: these columns of C belong to this task; each worker packs B in its own place.
        unsafe {
            let packed_b = Packed::b(unit, own.add(worker * unit.bytes(NR, kc).next_multiple_of(64)), kc);
            for k0 in (0..k).step_by(kc) {
                let depth = kc.min(k - k0);
                pack_b(simd, b.part(k0, n0), columns, depth, packed_b);
                let a = packed_a.rows_deep(unit, k0);
                multiply::<T>(simd, (m, columns, depth), a, packed_b, c.part(0, n0, k0 == 0));
            }
        }
    });
}

vectorised! {
    /// Writes a finished tile (rows of `NR` floats) to its target.
    unsafe fn store_tile<T>(tile: *const T, rows: usize, columns: usize, c: Target) -> () {
        for i in 0..rows {
            let from = tile.add(i * NR);
            match c {
                Target::F32 { ptr, stride, add: false } => {
                    let to = ptr.add(i * stride);
                    (0..columns).for_each(|j| *to.add(j) = (*from.add(j)).to());
                }
                Target::F32 { ptr, stride, add: true } => {
                    let to = ptr.add(i * stride);
                    (0..columns).for_each(|j| *to.add(j) += (*from.add(j)).to());
                }
                Target::Scaled { ptr, stride, factors } => {
                    let (to, factor) = (ptr.add(i * stride), *factors.add(i));
                    (0..columns).for_each(|j| *to.add(j) += factor * (*from.add(j)).to());
                }
                Target::Bf16 { ptr, stride } => {
                    let to = ptr.add(i * stride);
                    (0..columns).for_each(|j| *to.add(j) = Bf16::of((*from.add(j)).to()));
                }
                Target::F16 { ptr, stride } => {
                    let to = ptr.add(i * stride);
                    (0..columns).for_each(|j| *to.add(j) = F16::of((*from.add(j)).to()));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
