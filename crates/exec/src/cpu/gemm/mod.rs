//! Matrix products: C = A·B or C += A·B, operands in f32 or bf16 with any strides, sums in f32.
//!
//! Written by hand for two promises that general libraries do not give: an element of C is the same bits whatever the
//! number of rows and columns around it (its products are added in k order, in fixed blocks), and all scratch comes from
//! the caller.
//!
//! A block of B is packed once by all threads; then each thread takes rows of A and multiplies tiles: in vector registers
//! ([`vector`]), or for bf16 where the machine has them in tile registers ([`amx`]).

mod amx;
mod transpose;
mod vector;

use super::call::Ptr;
use super::float::{Bf16, Float};
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
    /// Rows of `stride` elements, one behind the other.
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
}

/// Where a product goes: rows of `stride` elements.
#[derive(Clone, Copy)]
pub enum Target {
    /// In f32, added to what is there where `add` says so.
    F32 { ptr: *mut f32, stride: usize, add: bool },
    /// Rounded to bf16.
    Bf16 { ptr: *mut Bf16, stride: usize },
}

impl Target {
    /// A product in the operands' own type.
    pub fn new<T: Float>(ptr: *mut T, stride: usize) -> Self {
        match T::DTYPE {
            DType::BF16 => Target::Bf16 { ptr: ptr.cast(), stride },
            _ => Target::F32 { ptr: ptr.cast(), stride, add: false },
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
                Target::Bf16 { ptr, stride } => Target::Bf16 { ptr: ptr.add(row * stride + column), stride },
            }
        }
    }
}

/// What multiplies tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Vector,
    Amx,
}

impl Unit {
    fn of<T: Float>(simd: Simd) -> Self {
        if T::DTYPE == DType::BF16 && simd == Simd::Avx512 && amx::available() { Unit::Amx } else { Unit::Vector }
    }

    /// Rows of a tile.
    const fn rows(self) -> usize {
        match self {
            Unit::Vector => vector::MR,
            Unit::Amx => amx::MR,
        }
    }

    /// The k block for sums that are kept in f32 in memory.
    const fn k_block(self) -> usize {
        match self {
            Unit::Vector => 256,
            Unit::Amx => 512,
        }
    }

    /// Bytes of `lines` packed lines of `kc` elements.
    const fn packed(self, lines: usize, kc: usize) -> usize {
        match self {
            Unit::Vector => lines * kc * 4,
            Unit::Amx => lines * kc.next_multiple_of(amx::K) * 2,
        }
    }
}

/// Columns of a tile, for both units.
const NR: usize = 32;
/// Most rows of A that a thread takes at a time.
const MOST_ROWS: usize = 192;
/// Bytes of packed B that are aimed at: what a second-level cache holds.
const B_BYTES: usize = 1 << 20;

/// Scratch of a product on `threads` threads as (bytes, bytes per element of k).
///
/// The second part counts for results in bf16 only: they are rounded once, so k is not cut into blocks.
pub const fn scratch_bytes(threads: usize) -> (usize, usize) {
    let block = Unit::Amx.k_block() + amx::K;
    (B_BYTES + (NR + threads * MOST_ROWS) * block * 4, (NR + threads * MOST_ROWS) * 4)
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
        Target::F32 { .. } => unit.k_block().min(k),
        Target::Bf16 { .. } => k,
    };
    let nc = (B_BYTES / unit.packed(1, kc).max(1) / NR * NR).max(NR);
    let row_block = m.div_ceil(4 * pool.threads()).clamp(1, MOST_ROWS).next_multiple_of(unit.rows()).min(MOST_ROWS);
    let shared = Ptr((a, b, c, scratch.cast::<u8>()));
    for n0 in (0..n).step_by(nc) {
        let columns = nc.min(n - n0);
        for k0 in (0..k).step_by(kc) {
            let depth = kc.min(k - k0);
            let panels = columns.div_ceil(NR);
            const PANELS: usize = 2;
            pool.run(panels.div_ceil(PANELS), |task, _| {
                let (_, b, _, scratch) = shared.get();
                for panel in task * PANELS..panels.min((task + 1) * PANELS) {
                    let width = NR.min(columns - panel * NR);
                    // SAFETY: inside B; each panel writes its own part of the scratch.
                    unsafe {
                        let to = scratch.add(unit.packed(panel * NR, depth));
                        pack_b(unit, simd, b.part(k0, n0 + panel * NR), width, depth, to);
                    }
                }
            });
            pool.run(m.div_ceil(row_block), |task, worker| {
                let (a, _, c, scratch) = shared.get();
                let m0 = task * row_block;
                let rows = row_block.min(m - m0);
                // SAFETY: these rows of C belong to this task; each worker packs A in its own place.
                unsafe {
                    let behind_b = unit.packed(nc.min(n).next_multiple_of(NR), kc).next_multiple_of(64);
                    let packed_a = scratch.add(behind_b + worker * unit.packed(MOST_ROWS, kc).next_multiple_of(64));
                    let c = c.part(m0, n0, k0 == 0);
                    multiply(unit, simd, (rows, columns, depth), a.part(m0, k0), packed_a, scratch, c);
                }
            });
        }
    }
}

/// Bytes of scratch that `gemm_small` needs for products up to these sizes.
pub const fn small_scratch(m: usize, n: usize, k: usize) -> usize {
    let kc = if k < 512 { k } else { 512 }.next_multiple_of(amx::K);
    (m.next_multiple_of(96) + n.next_multiple_of(NR)) * kc * 4 + 128
}

/// The same product on the calling thread alone, for tiles whose packed sides fit the caches; into f32.
///
/// # Safety
/// As `gemm`, with `small_scratch(m, n, k)` bytes of scratch.
pub unsafe fn gemm_small<T: Float>(
    simd: Simd,
    (m, n, k): (usize, usize, usize),
    a: Matrix<T>,
    b: Matrix<T>,
    c: Target,
    scratch: *mut u8,
) {
    let unit = Unit::of::<T>(simd);
    let kc = unit.k_block().min(k);
    for k0 in (0..k).step_by(kc) {
        let depth = kc.min(k - k0);
        // SAFETY: the caller vouches for the ranges.
        unsafe {
            for panel in 0..n.div_ceil(NR) {
                let to = scratch.add(unit.packed(panel * NR, depth));
                pack_b(unit, simd, b.part(k0, panel * NR), NR.min(n - panel * NR), depth, to);
            }
            let packed_a = scratch.add(unit.packed(n.next_multiple_of(NR), depth).next_multiple_of(64));
            multiply(unit, simd, (m, n, depth), a.part(0, k0), packed_a, scratch, c.part(0, 0, k0 == 0));
        }
    }
}

/// Packs `width` columns of B, `depth` deep.
unsafe fn pack_b<T: Float>(unit: Unit, simd: Simd, b: Matrix<T>, width: usize, depth: usize, to: *mut u8) {
    // SAFETY: the caller vouches for the ranges.
    unsafe {
        match unit {
            Unit::Vector => vector::pack::<NR, T>(simd, b.transposed(), width, depth, to.cast()),
            Unit::Amx => amx::pack_b(retype(b), width, depth, to.cast()),
        }
    }
}

/// The same matrix, seen as another type of the same size.
fn retype<T, U>(m: Matrix<T>) -> Matrix<U> {
    Matrix { ptr: m.ptr.cast(), row_stride: m.row_stride, column_stride: m.column_stride }
}

/// `rows` rows of A times packed B.
unsafe fn multiply<T: Float>(
    unit: Unit,
    simd: Simd,
    (rows, columns, depth): (usize, usize, usize),
    a: Matrix<T>,
    packed_a: *mut u8,
    packed_b: *const u8,
    c: Target,
) {
    // SAFETY: the caller vouches for the ranges.
    unsafe {
        match unit {
            Unit::Vector => {
                let packed_a: *mut f32 = packed_a.cast();
                for i in (0..rows).step_by(vector::MR) {
                    let lines = vector::MR.min(rows - i);
                    vector::pack::<{ vector::MR }, T>(simd, a.part(i, 0), lines, depth, packed_a.add(i * depth));
                }
                vector::multiply(simd, (rows, columns, depth), packed_a, packed_b.cast(), c);
            }
            Unit::Amx => amx::multiply((rows, columns, depth), retype(a), packed_a.cast(), packed_b.cast(), c),
        }
    }
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
                Target::Bf16 { ptr, stride } => {
                    let to = ptr.add(i * stride);
                    (0..columns).for_each(|j| *to.add(j) = Bf16::of((*from.add(j)).to()));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
