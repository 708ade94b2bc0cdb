//! Tiles in AMX registers: bf16 operands, f32 sums, 32 × 32 results.
//!
//! A tile register holds 16 rows of 64 bytes. `tdpbf16ps` adds to a 16 × 16 result the products of 16 rows of 32 elements
//! of A with 32 rows of 16 elements of B, B's rows interleaved in pairs. Two registers of A times two of B keep four of C
//! busy.

use super::transpose::transpose_16;
use super::{Matrix, NR, Target, store_tile};
use crate::cpu::float::Bf16;
use crate::cpu::simd::Simd;

/// Rows of a tile.
pub const MR: usize = 32;
/// Elements of k that one instruction takes.
pub const K: usize = 32;
/// Words of 32 bits (pairs of k) in a packed panel per step of `K`.
const STEP: usize = NR * K / 2;

/// Packs `width` columns of B (at most `NR`), `depth` deep: for each step of `K` two registers, what is missing as zeros.
pub unsafe fn pack_b(b: Matrix<Bf16>, width: usize, depth: usize, to: *mut u32) {
    // SAFETY: the caller vouches for `depth` × `width` elements of B and a panel at `to`.
    unsafe {
        for (step, k) in (0..depth).step_by(K).enumerate() {
            let (from, to, deep) = (b.part(k, 0), to.add(step * STEP), K.min(depth - k));
            if b.row_stride == 1 && b.column_stride.is_multiple_of(2) && deep.is_multiple_of(2) {
                // Columns of B are contiguous: a pair of k is one word, words are transposed.
                for first in (0..NR).step_by(16) {
                    let lines = width.saturating_sub(first).min(16);
                    let words = from.ptr.wrapping_add(first * b.column_stride).cast();
                    transpose_words(words, b.column_stride / 2, lines, deep / 2, to.add(first * 16));
                }
            } else if b.column_stride == 1 {
                interleave(from.ptr, b.row_stride, width, deep, to);
            } else {
                gather(from, width, deep, to);
            }
        }
    }
}

/// Turns up to 16 lines of up to 16 words: a register of 16 × 16 words, what is missing as zeros.
unsafe fn transpose_words(from: *const u32, stride: usize, lines: usize, words: usize, to: *mut u32) {
    // SAFETY: the caller vouches for the lines and a register at `to`.
    unsafe {
        if lines < 16 {
            to.write_bytes(0, STEP / 2);
        }
        transpose_16(from, stride, lines, words, to, 16);
    }
}

/// Pairs of rows of B, interleaved: `deep` rows (at most `K`) of `width` contiguous elements, the rest as zeros.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn interleave(from: *const Bf16, stride: usize, width: usize, deep: usize, to: *mut u32) {
    use std::arch::x86_64::*;
    let mask = |first: usize| ((1u32 << width.saturating_sub(first).min(16)) - 1) as __mmask16;
    let masks = [mask(0), mask(16)];
    // SAFETY: masks and the count of rows keep the loads inside the source; the caller vouches for a step at `to`.
    unsafe {
        let row = |k: usize, half: usize| {
            let mask = if k < deep { masks[half] } else { 0 };
            let at = from.wrapping_add(k * stride + half * 16);
            _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at.cast()))
        };
        for pair in 0..K / 2 {
            for half in 0..2 {
                let odd = _mm512_slli_epi32::<16>(row(2 * pair + 1, half));
                let words = _mm512_or_si512(row(2 * pair, half), odd);
                _mm512_storeu_si512(to.add(half * STEP / 2 + pair * 16).cast(), words);
            }
        }
    }
}

/// Element by element: one step, `deep` rows of it.
unsafe fn gather(b: Matrix<Bf16>, width: usize, deep: usize, to: *mut u32) {
    // SAFETY: the caller vouches for the ranges.
    unsafe {
        to.write_bytes(0, STEP);
        let to: *mut u16 = to.cast();
        for k in 0..deep {
            for j in 0..width {
                let x = *b.ptr.add(k * b.row_stride + j * b.column_stride);
                *to.add((j / 16 * (STEP / 2) + k / 2 * 16 + j % 16) * 2 + k % 2) = x.0;
            }
        }
    }
}

/// Where row `k` (even) and the next of a panel of B stand: the words of its first 16 columns, and of the others.
pub const fn pair_of_b(k: usize) -> (usize, usize) {
    let at = k / K * STEP + k % K / 2 * 16;
    (at, at + STEP / 2)
}

/// Where the `K` elements of row `line` from `k` (a multiple of `K`) on stand in a panel of A, in words.
pub const fn line_of_a(line: usize, k: usize) -> usize {
    k / K * STEP + line * (K / 2)
}

/// C = packed A · packed B, tile by tile; each operand as its first panel and the words from one to the next.
pub unsafe fn multiply(
    (rows, columns, depth): (usize, usize, usize),
    (a, a_panel): (*const u32, usize),
    (b, b_panel): (*const u32, usize),
    c: Target,
) {
    let steps = depth.div_ceil(K);
    // SAFETY: the caller vouches for the ranges.
    unsafe {
        configure();
        let mut tile = [0.0f32; MR * NR];
        for j in (0..columns).step_by(NR) {
            for i in (0..rows).step_by(MR) {
                let (a, b, c) = (a.add(i / MR * a_panel), b.add(j / NR * b_panel), c.part(i, j, true));
                let (rows, columns) = (MR.min(rows - i), NR.min(columns - j));
                match c {
                    Target::F32 { ptr, stride, add } if rows == MR && columns == NR => {
                        tiles(a, b, steps, ptr, stride, add);
                    }
                    Target::F32 { ptr, stride, add: true } => {
                        // The same sums as in a whole tile: products are added to what is there.
                        copy_tile(ptr, stride, tile.as_mut_ptr(), NR, rows, columns);
                        tiles(a, b, steps, tile.as_mut_ptr(), NR, true);
                        copy_tile(tile.as_ptr(), NR, ptr, stride, rows, columns);
                    }
                    _ => {
                        tiles(a, b, steps, tile.as_mut_ptr(), NR, false);
                        store_tile(Simd::Avx512, tile.as_ptr(), rows, columns, c);
                    }
                }
            }
        }
        release();
    }
}

unsafe fn copy_tile(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize, rows: usize, columns: usize) {
    for i in 0..rows {
        // SAFETY: the caller vouches for the ranges.
        unsafe { std::ptr::copy_nonoverlapping(from.add(i * from_stride), to.add(i * to_stride), columns) };
    }
}

/// Packs up to `MR` rows of A, `depth` deep: for each step of `K` two registers of 16 rows, what is missing as zeros. Rows that
/// follow each other in memory at a power of two would fight for the same cache lines; packed they do not.
pub unsafe fn pack_a(a: Matrix<Bf16>, rows: usize, depth: usize, to: *mut u32) {
    // SAFETY: the caller vouches for `rows` × `depth` elements and a panel at `to`.
    unsafe {
        if a.column_stride == 1 {
            copy_rows(a.ptr, a.row_stride, rows, depth, to);
            return;
        }
        for (step, k) in (0..depth).step_by(K).enumerate() {
            let (from, to, deep) = (a.part(0, k), to.add(step * STEP), K.min(depth - k));
            let mut words = [0u32; STEP];
            if a.row_stride == 1 {
                // Pairs of k become words, then words are transposed: two blocks of 16 rows.
                interleave(from.ptr, a.column_stride, rows, deep, words.as_mut_ptr());
            } else {
                gather(from.transposed(), rows, deep, words.as_mut_ptr());
            }
            for half in 0..2 {
                let at = half * STEP / 2;
                transpose_16(words.as_ptr().add(at), 16, 16, 16, to.add(at), 16);
            }
        }
    }
}

/// Contiguous rows of A, `K` elements at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn copy_rows(from: *const Bf16, stride: usize, rows: usize, depth: usize, to: *mut u32) {
    use std::arch::x86_64::*;
    for row in 0..MR {
        for k in (0..depth).step_by(K) {
            let deep = if row < rows { K.min(depth - k) } else { 0 };
            let mask = ((1u64 << deep) - 1) as __mmask32;
            // SAFETY: the mask keeps the load inside the source; the caller vouches for a panel at `to`.
            unsafe {
                let line = _mm512_maskz_loadu_epi16(mask, from.wrapping_add(row * stride + k).cast());
                _mm512_storeu_si512(to.add(line_of_a(row, k)).cast(), line);
            }
        }
    }
}

/// Shapes all eight tile registers as 16 rows of 64 bytes.
#[cfg(target_arch = "x86_64")]
fn configure() {
    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }
    const CONFIG: Config = {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        let mut i = 0;
        while i < 8 {
            (row_bytes[i], rows[i]) = (64, 16);
            i += 1;
        }
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    };
    // SAFETY: reads 64 bytes; `Simd::detect` has seen AMX.
    unsafe { std::arch::asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(nostack, readonly)) };
}

/// Gives the tile registers back, so that the system need not save them.
#[cfg(target_arch = "x86_64")]
fn release() {
    // SAFETY: touches tile registers only; `Simd::detect` has seen AMX.
    unsafe { std::arch::asm!("tilerelease", options(nostack, nomem)) };
}

/// One 32 × 32 result of `steps` steps of two packed panels, to rows of `stride` floats, on top of what is there where `add`
/// says so.
#[cfg(target_arch = "x86_64")]
unsafe fn tiles(a: *const u32, b: *const u32, steps: usize, c: *mut f32, stride: usize, add: bool) {
    // SAFETY: the caller vouches for the ranges; the tile registers are configured.
    unsafe {
        std::arch::asm!(
            "test {add:e}, {add:e}",
            "jz 3f",
            "tileloadd tmm0, [{c} + {stride}]",
            "tileloadd tmm1, [{c} + {stride} + 64]",
            "tileloadd tmm2, [{half} + {stride}]",
            "tileloadd tmm3, [{half} + {stride} + 64]",
            "jmp 2f",
            "3:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{a} + {line}]",
            "tileloadd tmm6, [{b} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {line} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {line} + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 2048",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c} + {stride}], tmm0",
            "tilestored [{c} + {stride} + 64], tmm1",
            "tilestored [{half} + {stride}], tmm2",
            "tilestored [{half} + {stride} + 64], tmm3",
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            steps = inout(reg) steps => _,
            add = in(reg) u32::from(add),
            line = in(reg) 64usize,
            stride = in(reg) stride * 4,
            c = in(reg) c,
            half = in(reg) c.add(16 * stride),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn configure() {}

#[cfg(not(target_arch = "x86_64"))]
fn release() {}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn interleave(_: *const Bf16, _: usize, _: usize, _: usize, _: *mut u32) {
    unreachable!("this machine has no AMX");
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_rows(_: *const Bf16, _: usize, _: usize, _: usize, _: *mut u32) {
    unreachable!("this machine has no AMX");
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn tiles(_: *const u32, _: *const u32, _: usize, _: *mut f32, _: usize, _: bool) {
    unreachable!("this machine has no AMX");
}
