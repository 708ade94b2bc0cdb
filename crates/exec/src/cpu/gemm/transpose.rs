//! Turning a block of 16 × 16 words of 32 bits: how rows become columns when operands are packed.

use crate::cpu::simd::Simd;

/// `to[j · to_stride + i] = from[i · from_stride + j]` for `i < rows` and `j < columns` (both at most 16); zeros for the other
/// `j < 16`.
///
/// # Safety
/// The ranges lie in valid memory and do not overlap; the machine has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
pub unsafe fn transpose_16(
    from: *const u32,
    from_stride: usize,
    rows: usize,
    columns: usize,
    to: *mut u32,
    to_stride: usize,
) {
    use std::arch::x86_64::*;
    let mut r = [_mm512_setzero_si512(); 16];
    let present = ((1u32 << columns) - 1) as __mmask16;
    for (i, row) in r.iter_mut().enumerate().take(rows) {
        // SAFETY: the caller vouches for `columns` words after each of `rows` rows.
        *row = unsafe { _mm512_maskz_loadu_epi32(present, from.add(i * from_stride).cast()) };
    }
    let mut t = [_mm512_setzero_si512(); 16];
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for i in 0..4 {
        let at = 4 * i;
        r[at] = _mm512_unpacklo_epi64(t[at], t[at + 2]);
        r[at + 1] = _mm512_unpackhi_epi64(t[at], t[at + 2]);
        r[at + 2] = _mm512_unpacklo_epi64(t[at + 1], t[at + 3]);
        r[at + 3] = _mm512_unpackhi_epi64(t[at + 1], t[at + 3]);
    }
    // r[4 i + c] holds, in its lane l, column 4 l + c of rows 4 i .. 4 i + 4.
    for c in 0..4 {
        t[c] = _mm512_shuffle_i32x4::<0x88>(r[c], r[4 + c]);
        t[4 + c] = _mm512_shuffle_i32x4::<0xdd>(r[c], r[4 + c]);
        t[8 + c] = _mm512_shuffle_i32x4::<0x88>(r[8 + c], r[12 + c]);
        t[12 + c] = _mm512_shuffle_i32x4::<0xdd>(r[8 + c], r[12 + c]);
    }
    let mask = ((1u32 << rows) - 1) as __mmask16;
    let store = |column: usize, value: __m512i| {
        // SAFETY: the caller vouches for `rows` words after each of 16 columns.
        unsafe { _mm512_mask_storeu_epi32(to.add(column * to_stride).cast(), mask, value) }
    };
    for c in 0..4 {
        store(c, _mm512_shuffle_i32x4::<0x88>(t[c], t[8 + c]));
        store(8 + c, _mm512_shuffle_i32x4::<0xdd>(t[c], t[8 + c]));
        store(4 + c, _mm512_shuffle_i32x4::<0x88>(t[4 + c], t[12 + c]));
        store(12 + c, _mm512_shuffle_i32x4::<0xdd>(t[4 + c], t[12 + c]));
    }
}

/// The same in blocks of 4 × 4 words; those at the edges word by word.
///
/// # Safety
/// The ranges lie in valid memory and do not overlap.
#[cfg(target_arch = "aarch64")]
pub unsafe fn transpose_16(
    from: *const u32,
    from_stride: usize,
    rows: usize,
    columns: usize,
    to: *mut u32,
    to_stride: usize,
) {
    use std::arch::aarch64::*;
    let (whole_rows, whole_columns) = (rows / 4 * 4, columns / 4 * 4);
    // SAFETY: the caller vouches for `columns` words of each of `rows` rows, and for `rows` words of each of 16 columns. NEON is part
    // of aarch64.
    unsafe {
        for i in (0..whole_rows).step_by(4) {
            for j in (0..whole_columns).step_by(4) {
                let [a, b, c, d] = [0, 1, 2, 3].map(|row| vld1q_u32(from.add((i + row) * from_stride + j)));
                // Even and odd columns of two rows, then the halves of all four.
                let wide = |words| vreinterpretq_u64_u32(words);
                let (even_ab, odd_ab) = (wide(vtrn1q_u32(a, b)), wide(vtrn2q_u32(a, b)));
                let (even_cd, odd_cd) = (wide(vtrn1q_u32(c, d)), wide(vtrn2q_u32(c, d)));
                let columns = [
                    vtrn1q_u64(even_ab, even_cd),
                    vtrn1q_u64(odd_ab, odd_cd),
                    vtrn2q_u64(even_ab, even_cd),
                    vtrn2q_u64(odd_ab, odd_cd),
                ];
                for (column, words) in columns.into_iter().enumerate() {
                    vst1q_u32(to.add((j + column) * to_stride + i), vreinterpretq_u32_u64(words));
                }
            }
        }
        for j in 0..16 {
            let done = if j < whole_columns { whole_rows } else { 0 };
            for i in done..rows {
                *to.add(j * to_stride + i) = if j < columns { *from.add(i * from_stride + j) } else { 0 };
            }
        }
    }
}

/// Never called: elsewhere packing goes element by element.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub unsafe fn transpose_16(_: *const u32, _: usize, _: usize, _: usize, _: *mut u32, _: usize) {
    unreachable!("blocks are transposed by AVX-512 and NEON only");
}

/// A matrix of `rows` × `columns` floats transposed: `to[j · to_stride + i] = from[i · from_stride + j]`.
///
/// # Safety
/// The ranges lie in valid memory and do not overlap.
pub unsafe fn transpose(
    simd: Simd,
    (rows, columns): (usize, usize),
    from: *const f32,
    from_stride: usize,
    to: *mut f32,
    to_stride: usize,
) {
    let whole = if simd.transposes_blocks() { columns / 16 * 16 } else { 0 };
    // SAFETY: the caller vouches.
    unsafe {
        for i in (0..rows).step_by(16) {
            for j in (0..whole).step_by(16) {
                let (from, to) = (from.add(i * from_stride + j), to.add(j * to_stride + i));
                transpose_16(from.cast(), from_stride, 16.min(rows - i), 16, to.cast(), to_stride);
            }
        }
        for i in 0..rows {
            for j in whole..columns {
                *to.add(j * to_stride + i) = *from.add(i * from_stride + j);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_columns() {
        if !Simd::current().transposes_blocks() {
            return;
        }
        let from: Vec<u32> = (0..16 * 20).collect();
        for (rows, columns) in [(1, 16), (5, 3), (12, 16), (15, 14), (16, 8), (16, 16)] {
            let mut to = vec![u32::MAX; 16 * 18];
            // SAFETY: the vectors hold 16 rows of 20 and 16 columns of 18.
            unsafe { transpose_16(from.as_ptr(), 20, rows, columns, to.as_mut_ptr(), 18) };
            for j in 0..16 {
                for i in 0..18 {
                    let inside = if j < columns { from[i.min(15) * 20 + j] } else { 0 };
                    let expected = if i < rows { inside } else { u32::MAX };
                    assert_eq!(to[j * 18 + i], expected, "rows {rows}, column {j}, row {i}");
                }
            }
        }
    }
}
