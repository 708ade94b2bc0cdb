//! Weights in fp8, as DeepSeek-V3 is published: a matrix of E4M3 numbers, and `NAME_scale_inv`, an f32 for each block of 128 × 128 of them, by
//! which they are multiplied. Blocks at the right and lower edge may be smaller. They are read as bf16, each product rounded once from f32.

use lockstep_ir::{F8, bf16};

/// Rows and columns of a block.
pub(super) const BLOCK: usize = 128;
/// What the name of the scales ends with.
pub(super) const SCALES: &str = "_scale_inv";

/// The shape of the scales of a matrix; none of what is no matrix.
pub(super) fn scales_of(shape: &[usize]) -> Option<[usize; 2]> {
    match shape {
        [rows, columns] => Some([rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)]),
        _ => None,
    }
}

/// Gives the elements of a matrix with this number of columns from `start` on as bf16. `scales` are those of the rows of blocks from `first` on.
pub(super) fn widen(numbers: &[u8], start: usize, columns: usize, (scales, first): (&[f32], usize), bytes: &mut [u8]) {
    let per_row = columns.div_ceil(BLOCK);
    let mut to = bytes.as_chunks_mut::<2>().0;
    let (mut from, mut at) = (numbers, start);
    while !from.is_empty() && !to.is_empty() {
        // Up to the end of a block's row.
        let (row, column) = (at / columns, at % columns);
        let run = (BLOCK - column % BLOCK).min(columns - column).min(from.len()).min(to.len());
        let scale = scales.get((row / BLOCK - first) * per_row + column / BLOCK).copied().unwrap_or(f32::NAN);
        for (to, number) in to[..run].iter_mut().zip(from) {
            *to = bf16::from_f32(F8::E4M3.to_f32(*number) * scale).to_le_bytes();
        }
        (from, to, at) = (&from[run..], &mut to[run..], at + run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_multiplied_by_the_scale_of_its_block_wherever_reading_begins() {
        let (rows, columns) = (130, 260);
        let numbers: Vec<u8> = (0..rows * columns).map(|i| (i * 7 % 127) as u8 | (i as u8 & 1) << 7).collect();
        assert_eq!(scales_of(&[rows, columns]), Some([2, 3]));
        let scales: Vec<f32> = (1..=6).map(|i| i as f32 * 0.3).collect();
        let expected = |i: usize| {
            let scale = scales[i / columns / 128 * 3 + i % columns / 128];
            bf16::from_f32(F8::E4M3.to_f32(numbers[i]) * scale)
        };
        for (start, count) in [(0, rows * columns), (127, 300), (128 * columns + 259, columns), (127 * columns, 1)] {
            let mut bytes = vec![0; 2 * count];
            let first = start / columns / BLOCK;
            widen(&numbers[start..start + count], start, columns, (&scales[3 * first..], first), &mut bytes);
            let found: Vec<u16> = bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
            assert_eq!(found, (start..start + count).map(expected).collect::<Vec<_>>(), "{start}");
        }
    }

    #[test]
    fn only_matrices_have_blocks() {
        assert_eq!((scales_of(&[576, 7168]), scales_of(&[1, 1])), (Some([5, 56]), Some([1, 1])));
        assert_eq!((scales_of(&[4]), scales_of(&[2, 3, 4])), (None, None));
    }
}
