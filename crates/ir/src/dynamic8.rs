//! Moments in 8 bits: blocks of 256 numbers, each a byte that stands for an entry of a table, times the block's largest magnitude.
//!
//! The tables are those of dynamic quantisation (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization"): seven decades below 1,
//! each with twice as many entries as the one below it, so that large numbers are told apart finely and small ones do not vanish.

use crate::{DType, Dim, Section, TensorType};
use std::sync::LazyLock;

/// Numbers of a block.
pub const BLOCK: usize = 256;

/// Bytes of a block: its scale as f32, then a byte for every number.
pub const BLOCK_BYTES: usize = 4 + BLOCK;

/// What the bytes of a block stand for.
#[derive(Debug)]
pub struct Table {
    /// The numbers of the bytes, in order, from −1 or 0 to 1.
    pub values: [f32; 256],
    /// The byte of 0.
    pub zero: u8,
    /// Halfway from each magnitude to the next, counted from 0: up to there a number is nearer to the lower one. Infinite after the last.
    pub borders: [f32; 257],
    /// By the upper half of a magnitude's bits, from those of [`LEAST`] on: how many borders lie below all such magnitudes. At most two more lie
    /// between them.
    pub first: [u8; FIRST],
}

/// The upper ends of the decades.
const POWERS: [f64; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];

/// Magnitudes below it are nearer to 0 than to any other number: 2⁻²³.
pub const LEAST: u32 = (127 - 23) << 23;
/// Upper halves of the bits of magnitudes from [`LEAST`] to 1.
pub const FIRST: usize = 23 * 128 + 1;

/// Numbers of any sign: first moments.
static SIGNED: LazyLock<Table> = LazyLock::new(|| Table::new(true));
/// Numbers from 0 on: second moments.
static UNSIGNED: LazyLock<Table> = LazyLock::new(|| Table::new(false));

impl Table {
    fn new(signed: bool) -> Self {
        let mut magnitudes = vec![0.0];
        for (decade, power) in POWERS.iter().enumerate() {
            let cells = if signed { 1 << decade } else { 2 << decade };
            let within = |cell: i32| 0.1 + 0.9 * (f64::from(cell) + 0.5) / f64::from(cells);
            magnitudes.extend((0..cells).map(|cell| (within(cell) * power) as f32));
        }
        magnitudes.push(1.0);
        let negative = magnitudes[1..magnitudes.len() - 1].iter().rev().map(|x| -x).filter(|_| signed);
        let values: Vec<f32> = negative.chain(magnitudes.iter().copied()).collect();
        let between = |i: usize| ((f64::from(magnitudes[i]) + f64::from(magnitudes[i + 1])) / 2.0) as f32;
        let border = |i: usize| if i + 1 < magnitudes.len() { between(i) } else { f32::INFINITY };
        let borders: [f32; 257] = std::array::from_fn(border);
        let lowest = |i: usize| f32::from_bits(LEAST + ((i as u32) << 16));
        let first = std::array::from_fn(|i| borders.iter().filter(|border| **border < lowest(i)).count() as u8);
        let zero = if signed { 127 } else { 0 };
        Self { values: std::array::from_fn(|i| values[i]), zero, borders, first }
    }

    /// The table of an element type.
    pub fn of(dtype: DType) -> Option<&'static Table> {
        match dtype {
            DType::Signed8 => Some(&SIGNED),
            DType::Unsigned8 => Some(&UNSIGNED),
            _ => None,
        }
    }

    /// The byte of a number from −1 to 1: the nearest, and of two the one nearer to 0. A second moment above 0 stays above 0, since an update
    /// divides by its root.
    #[inline(always)]
    pub fn byte(&self, x: f32) -> u8 {
        let magnitude = x.abs();
        let upper = magnitude.to_bits().saturating_sub(LEAST) >> 16;
        // NaN is none of them: the scale of its block is NaN.
        let first = usize::from(self.first[(upper as usize).min(FIRST - 1)]);
        let at =
            first + usize::from(magnitude > self.borders[first]) + usize::from(magnitude > self.borders[first + 1]);
        match (self.zero, x < 0.0) {
            (0, _) => at.max(usize::from(x > 0.0)) as u8,
            (zero, false) => zero + at as u8,
            (zero, true) => zero - at.min(usize::from(zero)) as u8,
        }
    }

    /// Rounds the numbers of a block.
    #[inline(always)]
    pub fn store(&self, numbers: &[f32; BLOCK], block: &mut [u8; BLOCK_BYTES]) {
        // Of magnitudes as bits NaN is the largest.
        let most = numbers.iter().fold(0, |most: u32, x| most.max(x.to_bits() & 0x7fff_ffff));
        let scale = f32::from_bits(most);
        block[..4].copy_from_slice(&scale.to_le_bytes());
        for (byte, x) in block[4..].iter_mut().zip(numbers) {
            *byte = self.byte(if scale > 0.0 { x / scale } else { 0.0 });
        }
    }

    /// The numbers of a block.
    #[inline(always)]
    pub fn load(&self, block: &[u8; BLOCK_BYTES], numbers: &mut [f32; BLOCK]) {
        let scale = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
        for (x, byte) in numbers.iter_mut().zip(&block[4..]) {
            *x = self.values[usize::from(*byte)] * scale;
        }
    }

    /// The blocks of this many numbers, a multiple of 256.
    pub fn round(&self, numbers: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; numbers.len() / BLOCK * BLOCK_BYTES];
        for (block, numbers) in bytes.as_chunks_mut().0.iter_mut().zip(numbers.as_chunks().0) {
            self.store(numbers, block);
        }
        bytes
    }

    /// The numbers of blocks.
    pub fn expand(&self, bytes: &[u8]) -> Vec<f32> {
        let mut numbers = vec![0.0; bytes.len() / BLOCK_BYTES * BLOCK];
        for (block, numbers) in bytes.as_chunks().0.iter().zip(numbers.as_chunks_mut().0) {
            self.load(block, numbers);
        }
        numbers
    }
}

/// The type of a tensor's numbers in blocks along its last dimension: an element is a block. `None` where rows are no multiples of a block.
pub fn blocks(ty: &TensorType, dtype: DType) -> Option<TensorType> {
    let (last, outer) = ty.dims.split_last()?;
    let section = |s: &Section| {
        s.size().is_multiple_of(BLOCK).then_some(Section { axis: s.axis, count: s.size() / BLOCK, unit: 1 })
    };
    let sections: Option<Vec<Section>> = last.sections.iter().map(section).collect();
    let dims: Vec<Dim> = outer.iter().cloned().chain([Dim::packed(sections?)]).collect();
    Some(TensorType::new(dtype, dims))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_those_of_dynamic_quantisation() {
        assert!(SIGNED.values.is_sorted() && UNSIGNED.values.is_sorted());
        assert_eq!((SIGNED.values[255], UNSIGNED.values[255], UNSIGNED.values[0]), (1.0, 1.0, 0.0));
        // The smallest magnitudes, and the largest below 1.
        let near = |found: f32, expected: f64| {
            assert!((f64::from(found) / expected - 1.0).abs() < 1e-5, "{found} and {expected}")
        };
        near(SIGNED.values[128], 5.5e-7);
        near(UNSIGNED.values[1], 3.25e-7);
        near(SIGNED.values[254], 0.99296875);
        near(SIGNED.values[0], -0.99296875);
        assert_eq!(SIGNED.values[127], 0.0);
    }

    #[test]
    fn every_entry_is_its_own_nearest_and_borders_lie_halfway() {
        for table in [&*SIGNED, &*UNSIGNED] {
            for (i, x) in table.values.iter().enumerate() {
                assert_eq!(usize::from(table.byte(*x)), i, "{x}");
            }
            for pair in table.values.windows(2) {
                let border = (f64::from(pair[0]) + f64::from(pair[1])) / 2.0;
                for x in [border * (1.0 - 1e-6), border * (1.0 + 1e-6)] {
                    let nearer =
                        if (x - f64::from(pair[0])).abs() < (x - f64::from(pair[1])).abs() { pair[0] } else { pair[1] };
                    // A second moment does not become 0.
                    let expected = if table.zero == 0 && nearer == 0.0 { pair[1] } else { nearer };
                    assert_eq!(table.values[usize::from(table.byte(x as f32))], expected, "{x} between {pair:?}");
                }
            }
        }
    }

    #[test]
    fn no_more_than_two_borders_lie_among_magnitudes_of_the_same_upper_half() {
        for table in [&*SIGNED, &*UNSIGNED] {
            let counts = table.first.windows(2).map(|pair| pair[1] - pair[0]).max();
            assert!(counts.is_some_and(|most| most <= 2), "{counts:?}");
        }
    }

    #[test]
    fn a_second_moment_above_0_stays_above_0() {
        let mut numbers = [0.0; BLOCK];
        (numbers[0], numbers[1]) = (1.0, 1e-12);
        let expanded = UNSIGNED.expand(&UNSIGNED.round(&numbers));
        assert_eq!((expanded[0], expanded[2]), (1.0, 0.0));
        assert!(expanded[1] > 0.0);
        assert_eq!(SIGNED.expand(&SIGNED.round(&numbers))[1], 0.0);
        // Blocks of zeros stay so, and one that is not finite shows it.
        assert_eq!(UNSIGNED.expand(&UNSIGNED.round(&[0.0; BLOCK])), [0.0; BLOCK]);
        numbers[7] = f32::NAN;
        assert!(SIGNED.expand(&SIGNED.round(&numbers)).iter().all(|x| x.is_nan()));
    }

    #[test]
    fn only_whole_rows_become_blocks() {
        use crate::Axis;
        let ty =
            |columns| TensorType::new(DType::F32, [Dim::new(Axis::Ffn, 3), Dim::grouped(Axis::Heads, columns, 128)]);
        let found = blocks(&ty(4), DType::Signed8).unwrap();
        assert_eq!((found.to_string(), found.bytes()), ("signed8[ffn:3, heads:2]".to_owned(), 3 * 2 * 260));
        assert_eq!(blocks(&ty(3), DType::Signed8), None);
    }
}
