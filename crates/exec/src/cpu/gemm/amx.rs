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

/// Whether this machine has AMX for bf16 and the system lets us use it.
#[cfg(target_arch = "x86_64")]
pub fn available() -> bool {
    use std::sync::OnceLock;
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        let leaf = std::arch::x86_64::__cpuid_count(7, 0);
        let (tile, bf16) = (leaf.edx >> 24 & 1 == 1, leaf.edx >> 22 & 1 == 1);
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_ulong = 18;
        // SAFETY: asks the kernel for the use of tile registers by this process; touches no memory.
        tile && bf16 && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
    })
}

/// Other machines have no AMX.
#[cfg(not(target_arch = "x86_64"))]
pub fn available() -> bool {
    false
}

/// Packs `width` columns of B (at most `NR`), `depth` deep: for each step of `K` two registers, what is missing as zeros.
pub unsafe fn pack_b(b: Matrix<Bf16>, width: usize, depth: usize, to: *mut u32) {
    // SAFETY: the caller vouches for `depth` × `width` elements of B and a panel behind `to`.
    unsafe {
        let steps = depth.div_ceil(K);
        if width < NR || !depth.is_multiple_of(K) {
            to.write_bytes(0, steps * STEP);
        }
        let whole = depth / K;
        if b.row_stride == 1 && b.column_stride.is_multiple_of(2) {
            // Columns of B are contiguous: a pair of k is one word, words turn.
            for step in 0..whole {
                for first in (0..width).step_by(16) {
                    let from = b.ptr.add(first * b.column_stride + step * K).cast::<u32>();
                    let here = 16.min(width - first);
                    transpose_16(from, b.column_stride / 2, here, to.add(step * STEP + first * 16), 16);
                }
            }
            gather(b, width, whole * K, depth, to);
        } else if b.column_stride == 1 && width == NR {
            for step in 0..whole {
                interleave(b.ptr.add(step * K * b.row_stride), b.row_stride, to.add(step * STEP));
            }
            gather(b, width, whole * K, depth, to);
        } else {
            gather(b, width, 0, depth, to);
        }
    }
}

/// Pairs of rows of B, interleaved: 32 rows of `NR` contiguous elements.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn interleave(from: *const Bf16, stride: usize, to: *mut u32) {
    for pair in 0..K / 2 {
        for half in 0..2 {
            // SAFETY: the caller vouches for 32 rows of NR elements and a step behind `to`.
            unsafe {
                let even = std::slice::from_raw_parts(from.add(2 * pair * stride + half * 16), 16);
                let odd = std::slice::from_raw_parts(from.add((2 * pair + 1) * stride + half * 16), 16);
                let to = std::slice::from_raw_parts_mut(to.add(half * STEP / 2 + pair * 16), 16);
                for i in 0..16 {
                    to[i] = u32::from(even[i].0) | u32::from(odd[i].0) << 16;
                }
            }
        }
    }
}

/// Element by element, for rows `from .. depth`.
unsafe fn gather(b: Matrix<Bf16>, width: usize, from: usize, depth: usize, to: *mut u32) {
    let to: *mut u16 = to.cast();
    for k in from..depth {
        for j in 0..width {
            // SAFETY: the caller vouches for the ranges.
            unsafe {
                let x = *b.ptr.add(k * b.row_stride + j * b.column_stride);
                let (step, pair, odd) = (k / K, k % K / 2, k % 2);
                *to.add((step * STEP + j / 16 * (STEP / 2) + pair * 16 + j % 16) * 2 + odd) = x.0;
            }
        }
    }
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
                    Target::F32 { ptr, stride, add: false } if rows == MR && columns == NR => {
                        tiles(a, b, steps, ptr, stride);
                    }
                    _ => {
                        tiles(a, b, steps, tile.as_mut_ptr(), NR);
                        store_tile(Simd::Avx512, tile.as_ptr(), rows, columns, c);
                    }
                }
            }
        }
        release();
    }
}

/// Packs up to `MR` rows of A, `depth` deep: for each step of `K` two registers of 16 rows, what is missing as zeros. Rows that
/// follow each other in memory at a power of two would fight for the same cache lines; packed they do not.
pub unsafe fn pack_a(a: Matrix<Bf16>, rows: usize, depth: usize, to: *mut u32) {
    // SAFETY: the caller vouches for `rows` × `depth` elements and a panel behind `to`.
    unsafe {
        let whole = depth / K;
        if rows < MR || !depth.is_multiple_of(K) {
            to.write_bytes(0, depth.div_ceil(K) * STEP);
        }
        let mut done = 0;
        if a.column_stride == 1 {
            for row in 0..rows {
                let from = a.ptr.add(row * a.row_stride);
                for step in 0..whole {
                    let to = to.add(step * STEP + row * (K / 2)).cast::<Bf16>();
                    std::ptr::copy_nonoverlapping(from.add(step * K), to, K);
                }
            }
            done = whole * K;
        } else if a.row_stride == 1 && rows == MR {
            for step in 0..whole {
                // Pairs of k become words, then words turn: two blocks of 16 rows.
                let mut words = [0u32; STEP];
                interleave(a.ptr.add(step * K * a.column_stride), a.column_stride, words.as_mut_ptr());
                for half in 0..2 {
                    let at = half * STEP / 2;
                    transpose_16(words.as_ptr().add(at), 16, 16, to.add(step * STEP + at), 16);
                }
            }
            done = whole * K;
        }
        let to: *mut Bf16 = to.cast();
        for row in 0..rows {
            for k in done..depth {
                let x = *a.ptr.add(row * a.row_stride + k * a.column_stride);
                *to.add((k / K * STEP + row * (K / 2)) * 2 + k % K) = x;
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
    // SAFETY: reads 64 bytes; `available` has seen AMX.
    unsafe { std::arch::asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(nostack, readonly)) };
}

/// Gives the tile registers back, so that the system need not save them.
#[cfg(target_arch = "x86_64")]
fn release() {
    // SAFETY: touches tile registers only; `available` has seen AMX.
    unsafe { std::arch::asm!("tilerelease", options(nostack, nomem)) };
}

/// One 32 × 32 result of `steps` steps of two packed panels, to rows of `stride` floats.
#[cfg(target_arch = "x86_64")]
unsafe fn tiles(a: *const u32, b: *const u32, steps: usize, c: *mut f32, stride: usize) {
    // SAFETY: the caller vouches for the ranges; the tile registers are configured.
    unsafe {
        std::arch::asm!(
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
unsafe fn tiles(_: *const u32, _: *const u32, _: usize, _: *mut f32, _: usize) {
    unreachable!("this machine has no AMX");
}
