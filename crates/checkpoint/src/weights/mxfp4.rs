//! Weights in mxfp4, as gpt-oss is published: blocks of 32 numbers of 4 bits (E2M1) with a power of two each, in two tensors of bytes,
//! `NAME_blocks` and `NAME_scales`. They are read as bf16, which has every number that they stand for.

use lockstep_ir::bf16;

/// Numbers of a block.
pub(super) const BLOCK: usize = 32;
/// Bytes of its numbers.
pub(super) const BLOCK_BYTES: usize = BLOCK / 2;

/// What the names of the two tensors end with.
pub(super) const BLOCKS: &str = "_blocks";
pub(super) const SCALES: &str = "_scales";

/// What 3 bits stand for; the fourth is the sign.
const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// The exponent of a scale of 0.
const BIAS: i32 = 127;

/// The shape of the numbers, where two tensors of these shapes are blocks and scales of a matrix.
pub(super) fn shape(blocks: &[usize], scales: &[usize]) -> Option<Vec<usize>> {
    let (bytes, outer) = blocks.split_last()?;
    let (count, rows) = outer.split_last()?;
    let fits = *bytes == BLOCK_BYTES && outer == scales && !rows.is_empty();
    let columns = count.checked_mul(BLOCK).filter(|_| fits)?;
    Some([rows, &[columns]].concat())
}

/// Gives the numbers of whole blocks as bf16: two in every byte, the first in its low half.
pub(super) fn widen(blocks: &[u8], scales: &[u8], mut give: impl FnMut(u16)) {
    for (bytes, scale) in blocks.chunks(BLOCK_BYTES).zip(scales) {
        // In f64, since the smallest scale of a float is no normal one.
        let scale = 2f64.powi(i32::from(*scale) - BIAS);
        let numbers: [u16; 16] = std::array::from_fn(|half| {
            let number = f64::from(MAGNITUDES[half % 8]) * if half < 8 { scale } else { -scale };
            bf16::from_f32(number as f32)
        });
        for byte in bytes {
            give(numbers[usize::from(byte & 15)]);
            give(numbers[usize::from(byte >> 4)]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_four_bits_are_what_they_stand_for() {
        // Both halves of every byte from 0x10 on, by one and by an eighth.
        let bytes: Vec<u8> = (0..16).map(|low: u8| low | (15 - low) << 4).collect();
        let mut found = Vec::new();
        widen(&[&bytes[..], &bytes].concat(), &[127, 124], |bits| found.push(bf16::to_f32(bits)));
        let value = |half: usize| MAGNITUDES[half % 8] * if half < 8 { 1.0 } else { -1.0 };
        let expected: Vec<f32> = (0..16).flat_map(|low| [value(low), value(15 - low)]).collect();
        assert_eq!(found[..32], expected);
        assert_eq!(found[32..], expected.iter().map(|x| x / 8.0).collect::<Vec<_>>());
        assert_eq!(&found[..6], [0.0, -6.0, 0.5, -4.0, 1.0, -3.0]);
    }

    #[test]
    fn two_tensors_that_are_no_blocks_and_scales_are_no_matrix() {
        assert_eq!(shape(&[4, 6, 3, 16], &[4, 6, 3]), Some(vec![4, 6, 96]));
        for (blocks, scales) in
            [(&[4, 6, 3, 8][..], &[4, 6, 3][..]), (&[4, 6, 3, 16], &[4, 6]), (&[3, 16], &[3]), (&[16], &[]), (&[], &[])]
        {
            assert_eq!(shape(blocks, scales), None, "{blocks:?} {scales:?}");
        }
    }
}
