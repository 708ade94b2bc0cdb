//! Operands packed for tiles, and matmuls of them. A caller that multiplies the same operand more than once packs it once.

use super::{Matrix, NR, Target, amx, vector};
use crate::cpu::float::{Bf16, Float};
use crate::cpu::simd::Simd;
use lockstep_ir::DType;

/// What multiplies tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Vector registers, in f32.
    Vector,
    /// Tile registers, in bf16.
    Amx,
}

/// Depths of packed operands are cut at multiples of this only.
pub const K_STEP: usize = amx::K;

impl Unit {
    /// What multiplies numbers of this type.
    pub fn of<T: Float>(simd: Simd) -> Self {
        Self::for_dtype(T::DTYPE, simd)
    }

    /// The same, by the name of the type.
    pub fn for_dtype(dtype: DType, simd: Simd) -> Self {
        if dtype == DType::BF16 && simd == Simd::Amx { Unit::Amx } else { Unit::Vector }
    }

    /// Rows of a tile.
    pub const fn rows(self) -> usize {
        match self {
            Unit::Vector => vector::MR,
            Unit::Amx => amx::MR,
        }
    }

    /// Bytes of a packed element.
    pub const fn element(self) -> usize {
        match self {
            Unit::Vector => 4,
            Unit::Amx => 2,
        }
    }

    /// Bytes of `lines` packed lines, `depth` deep; whole panels.
    pub const fn bytes(self, lines: usize, depth: usize) -> usize {
        match self {
            Unit::Vector => lines * depth * 4,
            Unit::Amx => lines * depth.next_multiple_of(amx::K) * 2,
        }
    }
}

/// A packed operand: panels of `Unit::rows` rows of A or [`NR`] columns of B.
#[derive(Clone, Copy)]
pub struct Packed {
    ptr: *mut u8,
    /// Bytes from one panel to the next.
    panel: usize,
}

impl Packed {
    /// A left operand whose panels are `depth` deep, aligned to 64 bytes.
    pub fn a(unit: Unit, ptr: *mut u8, depth: usize) -> Self {
        Self { ptr, panel: unit.bytes(unit.rows(), depth) }
    }

    /// A right operand whose panels are `depth` deep, aligned to 64 bytes.
    pub fn b(unit: Unit, ptr: *mut u8, depth: usize) -> Self {
        Self { ptr, panel: unit.bytes(NR, depth) }
    }

    /// From row `line` of a left operand on, a multiple of a tile's rows.
    pub unsafe fn rows_from(self, unit: Unit, line: usize) -> Self {
        debug_assert!(line.is_multiple_of(unit.rows()));
        // SAFETY: the caller stays inside the operand.
        Self { ptr: unsafe { self.ptr.add(line / unit.rows() * self.panel) }, ..self }
    }

    /// From column `line` of a right operand on, a multiple of [`NR`].
    pub unsafe fn columns_from(self, line: usize) -> Self {
        debug_assert!(line.is_multiple_of(NR));
        // SAFETY: the caller stays inside the operand.
        Self { ptr: unsafe { self.ptr.add(line / NR * self.panel) }, ..self }
    }

    /// From depth `k` of a left operand on, a multiple of [`K_STEP`].
    pub unsafe fn rows_deep(self, unit: Unit, k: usize) -> Self {
        debug_assert!(k.is_multiple_of(K_STEP));
        // SAFETY: the caller stays inside the operand.
        Self { ptr: unsafe { self.ptr.add(k * unit.rows() * unit.element()) }, ..self }
    }

    /// From depth `k` of a right operand on, a multiple of [`K_STEP`].
    pub unsafe fn columns_deep(self, unit: Unit, k: usize) -> Self {
        debug_assert!(k.is_multiple_of(K_STEP));
        // SAFETY: the caller stays inside the operand.
        Self { ptr: unsafe { self.ptr.add(k * NR * unit.element()) }, ..self }
    }
}

/// Packs `rows` rows of A, `depth` deep; what is missing in the last panel as zeros.
///
/// # Safety
/// The source has these sizes, and there is room for them rounded up to whole panels at `to`.
pub unsafe fn pack_a<T: Float>(simd: Simd, a: Matrix<T>, rows: usize, depth: usize, to: Packed) {
    let unit = Unit::of::<T>(simd);
    for i in (0..rows).step_by(unit.rows()) {
        let lines = unit.rows().min(rows - i);
        // SAFETY: the caller vouches for the ranges.
        unsafe {
            let (a, to) = (a.part(i, 0), to.rows_from(unit, i).ptr);
            match unit {
                Unit::Vector => vector::pack::<{ vector::MR }, T>(simd, a, lines, depth, to.cast()),
                Unit::Amx => amx::pack_a(a.retype(), lines, depth, to.cast()),
            }
        }
    }
}

/// Packs `columns` columns of B, `depth` deep; what is missing in the last panel as zeros.
///
/// # Safety
/// As `pack_a`.
pub unsafe fn pack_b<T: Float>(simd: Simd, b: Matrix<T>, columns: usize, depth: usize, to: Packed) {
    let unit = Unit::of::<T>(simd);
    for j in (0..columns).step_by(NR) {
        let width = NR.min(columns - j);
        // SAFETY: the caller vouches for the ranges.
        unsafe {
            let (b, to) = (b.part(0, j), to.columns_from(j).ptr);
            match unit {
                Unit::Vector => vector::pack::<NR, T>(simd, b.transposed(), width, depth, to.cast()),
                Unit::Amx => amx::pack_b(b.retype(), width, depth, to.cast()),
            }
        }
    }
}

/// C = A · B of operands packed for numbers of type `T`, `depth` deep.
///
/// # Safety
/// The operands have these sizes; C overlaps neither.
pub unsafe fn multiply<T: Float>(
    simd: Simd,
    (rows, columns, depth): (usize, usize, usize),
    a: Packed,
    b: Packed,
    c: Target,
) {
    // SAFETY: the caller vouches for the ranges.
    unsafe {
        match Unit::of::<T>(simd) {
            Unit::Vector => {
                let (a, b) = ((a.ptr.cast_const().cast(), a.panel / 4), (b.ptr.cast_const().cast(), b.panel / 4));
                vector::multiply(simd, (rows, columns, depth), a, b, c);
            }
            Unit::Amx => {
                let (a, b) = ((a.ptr.cast_const().cast(), a.panel / 4), (b.ptr.cast_const().cast(), b.panel / 4));
                amx::multiply((rows, columns, depth), a, b, c);
            }
        }
    }
}

/// Writes rows `k` (even) and `k + 1` of a right operand of one panel.
///
/// # Safety
/// The panel at `to` is that deep.
#[inline(always)]
pub unsafe fn put_b_pair<T: Float>(unit: Unit, to: *mut u8, k: usize, rows: &[[f32; NR]; 2]) {
    // SAFETY: the caller vouches.
    unsafe {
        // Plain loops: closures over arrays would not be compiled for the caller's vector unit.
        match unit {
            Unit::Vector => {
                for (row, from) in rows.iter().enumerate() {
                    let to = &mut *to.cast::<[f32; NR]>().add(k + row);
                    for l in 0..NR {
                        to[l] = T::of(from[l]).to();
                    }
                }
            }
            Unit::Amx => {
                let (low, high) = amx::pair_of_b(k);
                for (half, at) in [low, high].into_iter().enumerate() {
                    let to = &mut *to.cast::<u32>().add(at).cast::<[u32; 16]>();
                    for l in 0..16 {
                        let (even, odd) = (rows[0][half * 16 + l], rows[1][half * 16 + l]);
                        to[l] = u32::from(Bf16::of(even).0) | u32::from(Bf16::of(odd).0) << 16;
                    }
                }
            }
        }
    }
}

/// Writes `K_STEP` elements of row `line` of a left operand, from `k` on (a multiple of `K_STEP`); for tile registers only.
///
/// # Safety
/// The operand has that row and depth.
#[inline(always)]
pub unsafe fn put_a_line(to: Packed, line: usize, k: usize, row: &[f32; K_STEP]) {
    // SAFETY: the caller vouches.
    unsafe {
        let panel = to.rows_from(Unit::Amx, line / amx::MR * amx::MR).ptr.cast::<u32>();
        let to = &mut *panel.add(amx::line_of_a(line % amx::MR, k)).cast::<[u16; K_STEP]>();
        for l in 0..K_STEP {
            to[l] = Bf16::of(row[l]).0;
        }
    }
}
