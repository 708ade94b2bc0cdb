//! Weights that are not trained in one byte each, and a unit for each row: `e4m3` or `int8`.
//!
//! Units are powers of two, as those of [`F8`] are: a byte times its unit is a bf16 exactly, so what a matmul multiplies is the same whether it reads
//! bytes or has them widened first, on every device and in every layout. Against the exact quotient by the row's largest magnitude that
//! costs `int8` at most one of its 7 bits, half of one on average.

use crate::{DType, F8};

/// Whether rows of weights may be kept in this type.
pub const fn is_format(dtype: DType) -> bool {
    matches!(dtype, DType::E4M3 | DType::Int8)
}

/// What the bytes of a row stand for one of, where this is its largest magnitude. NaN where the magnitude is none or infinite; 1 of zeros.
fn unit(dtype: DType, amax: f32) -> f32 {
    match F8::of(dtype) {
        Some(format) => format.unit(amax),
        None => int8_unit(amax),
    }
}

/// The smallest power of two of which 127 are at least the magnitude.
fn int8_unit(amax: f32) -> f32 {
    let bits = amax.to_bits() & 0x7fff_ffff;
    if bits >= f32::INFINITY.to_bits() {
        return f32::NAN;
    }
    if bits == 0 {
        return 1.0;
    }
    // 127 is 1.984375 · 2⁶.
    let above = u32::from(bits & 0x7f_ffff > 0x7e_0000);
    f32::from_bits(((bits >> 23).max(1) + above).saturating_sub(6).max(1) << 23)
}

/// The number that a byte stands for, in units.
#[inline(always)]
pub fn to_f32(dtype: DType, byte: u8) -> f32 {
    match F8::of(dtype) {
        Some(format) => format.to_f32(byte),
        None => f32::from(byte as i8),
    }
}

/// The nearest byte, ties to even.
#[inline(always)]
fn from_f32(dtype: DType, x: f32) -> u8 {
    match F8::of(dtype) {
        Some(format) => format.from_f32(x),
        None => x.round_ties_even().clamp(-127.0, 127.0) as i8 as u8,
    }
}

/// The unit of a row.
pub fn unit_of(dtype: DType, row: &[f32]) -> f32 {
    // As bits, magnitudes have the order of numbers, and NaN is above all.
    let most = row.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7fff_ffff));
    unit(dtype, f32::from_bits(most))
}

/// A row as bytes of its unit.
pub fn round(dtype: DType, row: &[f32], unit: f32, bytes: &mut [u8]) {
    let scale = 1.0 / unit;
    row.iter().zip(bytes).for_each(|(x, byte)| *byte = from_f32(dtype, x * scale));
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [DType; 2] = [DType::E4M3, DType::Int8];

    fn rounded(dtype: DType, row: &[f32]) -> (Vec<u8>, f32) {
        let (unit, mut bytes) = (unit_of(dtype, row), vec![0; row.len()]);
        round(dtype, row, unit, &mut bytes);
        (bytes, unit)
    }

    #[test]
    fn a_row_comes_back_within_half_a_step_and_the_largest_uses_the_upper_half_of_the_bytes() {
        for dtype in FORMATS {
            let row: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.7).sin() * 0.0371).collect();
            let (bytes, unit) = rounded(dtype, &row);
            let back = |i: usize| to_f32(dtype, bytes[i]) * unit;
            for (i, x) in row.iter().enumerate() {
                let step = if dtype == DType::Int8 { unit } else { (x.abs() / 8.0).max(unit / 512.0) };
                assert!((back(i) - x).abs() <= step / 2.0, "{dtype}: {x} came back as {}", back(i));
            }
            let most = bytes.iter().map(|b| to_f32(dtype, *b).abs()).fold(0.0, f32::max);
            let largest = if dtype == DType::Int8 { 127.0 } else { 448.0 };
            assert!(most > largest / 2.0 - 1.0 && most <= largest, "{dtype}: {most}");
        }
    }

    #[test]
    fn units_are_the_smallest_powers_of_two_that_hold_the_largest() {
        assert_eq!([127.0, 127.5, 63.5, 1.0].map(|amax| unit(DType::Int8, amax)), [1.0, 2.0, 0.5, 1.0 / 64.0]);
        for dtype in FORMATS {
            assert_eq!(unit(dtype, 0.0), 1.0);
            assert!(unit(dtype, f32::NAN).is_nan() && unit(dtype, f32::INFINITY).is_nan());
            assert!((1.0 / unit(dtype, f32::MIN_POSITIVE / 8.0)).is_finite());
            // A row of zeros stays one.
            assert_eq!(rounded(dtype, &[0.0; 4]), (vec![0; 4], 1.0));
        }
    }

    #[test]
    fn a_byte_in_its_unit_is_a_bf16() {
        for dtype in FORMATS {
            for byte in 0..=255u8 {
                let x = to_f32(dtype, byte) * 2f32.powi(-11);
                assert!(x.is_nan() || crate::bf16::to_f32(crate::bf16::from_f32(x)) == x, "{dtype}: {byte}");
            }
        }
    }
}
