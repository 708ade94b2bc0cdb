//! fp8: the two formats of one byte, and the power of two that a tensor is multiplied by before it is rounded to one.
//!
//! Scales are powers of two: multiplying by one is exact, so that a tensor and its transpose, a rank's part and the whole, the host and every
//! device round to the same bytes. Against the exact quotient that costs at most one of the 17 binary orders of magnitude that E4M3 spans.

use crate::DType;

/// A format of one byte: sign, exponent, mantissa.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct F8 {
    mantissa_bits: u32,
    bias: u32,
    /// The largest finite number, as bits. Its mantissa is 1.75 in both formats.
    largest: u8,
    /// From these bits on, NaN.
    nan: u8,
}

impl F8 {
    /// Without infinities, up to 448.
    pub const E4M3: F8 = F8 { mantissa_bits: 3, bias: 7, largest: 0x7e, nan: 0x7f };
    /// With infinities, up to 57344.
    pub const E5M2: F8 = F8 { mantissa_bits: 2, bias: 15, largest: 0x7b, nan: 0x7d };

    /// The format of an element type.
    pub const fn of(dtype: DType) -> Option<F8> {
        match dtype {
            DType::E4M3 => Some(F8::E4M3),
            DType::E5M2 => Some(F8::E5M2),
            _ => None,
        }
    }

    /// The value of a number.
    #[inline(always)]
    pub fn to_f32(self, bits: u8) -> f32 {
        let (sign, rest) = (u32::from(bits & 0x80) << 24, bits & 0x7f);
        let magnitude = if rest >= self.nan {
            f32::NAN.to_bits()
        } else if rest > self.largest {
            f32::INFINITY.to_bits()
        } else if rest >> self.mantissa_bits == 0 {
            let unit = f32::from_bits((128 - self.bias - self.mantissa_bits) << 23);
            (f32::from(rest) * unit).to_bits()
        } else {
            (u32::from(rest) << (23 - self.mantissa_bits)) + ((127 - self.bias) << 23)
        };
        f32::from_bits(sign | magnitude)
    }

    /// The nearest number, ties to even; what is too large becomes the largest finite one, NaN stays NaN.
    #[inline(always)]
    pub fn from_f32(self, x: f32) -> u8 {
        let (sign, rest) = ((x.to_bits() >> 24 & 0x80) as u8, x.to_bits() & 0x7fff_ffff);
        // All three are computed, so that compilers round many at a time.
        let cut = 23 - self.mantissa_bits;
        let rebased = rest.wrapping_sub((127 - self.bias) << 23);
        let normal = rebased.wrapping_add((1 << (cut - 1)) - 1 + (rebased >> cut & 1)) >> cut;
        // Beside this number a unit of f32 is the smallest step of the format: the sum rounds.
        let beside = f32::from_bits((128 - self.bias - self.mantissa_bits + 23) << 23);
        let small = (f32::from_bits(rest) + beside).to_bits().wrapping_sub(beside.to_bits());
        let magnitude = if rest >= (128 - self.bias) << 23 { normal } else { small };
        let finite = sign | magnitude.min(u32::from(self.largest)) as u8;
        if rest > f32::INFINITY.to_bits() { 0x7f } else { finite }
    }

    /// Whether rounding `x / unit` loses a number: that it is too large for the format, or not 0 and becomes 0. NaN counts as too large.
    #[inline(always)]
    pub fn loses(self, x: f32, unit: f32) -> [bool; 2] {
        let (most, half) = (self.to_f32(self.largest), self.to_f32(1) / 2.0);
        let scaled = (x * (1.0 / unit)).abs();
        [scaled.is_nan() || scaled > most, x != 0.0 && scaled <= half]
    }

    /// What the bytes of a tensor stand for one of, where this is its largest magnitude: a power of two. NaN where the magnitude is none or infinite;
    /// 1 of zeros.
    #[inline(always)]
    pub fn unit(self, amax: f32) -> f32 {
        let bits = amax.to_bits() & 0x7fff_ffff;
        if bits >= f32::INFINITY.to_bits() {
            return f32::NAN;
        }
        if bits == 0 {
            return 1.0;
        }
        // Of 1.75 · 2ⁿ and less the exponent of the largest number is that of n.
        let above = u32::from(bits & 0x7f_ffff > 0x60_0000);
        let top = u32::from(self.largest >> self.mantissa_bits) - self.bias;
        let exponent = (bits >> 23).max(1) + above;
        // The smallest normal f32 at least: its reciprocal is a number too.
        f32::from_bits(exponent.saturating_sub(top).max(1) << 23)
    }
}

/// What rounding tensors to fp8 has lost, as numbers that may be added up over micro-batches and ranks: the elements that were looked at, those of them
/// that were too large, those that became 0; and then, where that is asked for, all parts of [`Seen::TILE`] × [`Seen::TILE`] elements by the class of their
/// largest magnitude. Elements of every [`Seen::EVERY`]th part are looked at, since looking at all of them
/// shows in the time of a step.
#[derive(Clone, Copy, Debug)]
pub struct Seen;

impl Seen {
    /// How many numbers.
    pub const COUNT: usize = 128;
    /// Where those of the parts begin.
    pub const CLASSES: usize = 3;
    /// Rows and columns of a part.
    pub const TILE: usize = 128;
    /// Of this many parts the elements of one count: a prime, so that those are of all columns.
    pub const EVERY: usize = 61;
    /// The exponent of the lowest class, as f32 has it: 2⁻⁹⁶ and below.
    const LOWEST: u32 = 31;

    /// The place of a part with this largest magnitude. Magnitudes of a class have the same unit, but for the lowest and the highest, where infinity
    /// and NaN are. None of zeros.
    #[inline(always)]
    pub fn place(amax: f32) -> Option<usize> {
        let bits = amax.to_bits() & 0x7fff_ffff;
        let exponent = (bits >> 23) + u32::from(bits & 0x7f_ffff > 0x60_0000);
        let class = (exponent.saturating_sub(Self::LOWEST) as usize).min(Self::COUNT - 1 - Self::CLASSES);
        (bits != 0).then_some(Self::CLASSES + class)
    }

    /// A magnitude with the unit of all that was seen. None where that were zeros, or numbers without bounds.
    pub fn largest(seen: &[f64]) -> Option<f32> {
        let place = seen.iter().rposition(|count| *count > 0.0).filter(|place| *place >= Self::CLASSES)?;
        let exponent = (place - Self::CLASSES) as u32 + Self::LOWEST;
        (place + 1 < Self::COUNT).then(|| f32::from_bits(exponent << 23))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_rounding_loses_is_what_bytes_show() {
        for format in BOTH {
            for unit in [1.0, 2f32.powi(-20)] {
                for bits in (0..0x7f80_0000u32).step_by(0x1_2345) {
                    let x = f32::from_bits(bits);
                    let byte = format.from_f32(x / unit);
                    let large = x / unit > format.to_f32(format.largest);
                    assert_eq!(format.loses(x, unit), [large, x != 0.0 && byte == 0], "{x} of {unit}");
                }
                assert_eq!(format.loses(f32::INFINITY, unit), [true, false]);
                assert_eq!(format.loses(f32::NAN, unit), [true, false]);
            }
        }
    }

    #[test]
    fn magnitudes_of_a_class_have_its_unit() {
        for exponent in -95..27 {
            for mantissa in [1.0, 1.3, 1.75, 1.750_001, 1.999] {
                let (amax, mut seen) = (mantissa * 2f32.powi(exponent), [0.0; Seen::COUNT]);
                seen[..Seen::CLASSES].fill(5.0);
                seen[Seen::place(amax).unwrap()] = 3.0;
                seen[Seen::CLASSES] = 1.0;
                let largest = Seen::largest(&seen).unwrap();
                BOTH.iter().for_each(|format| assert_eq!(format.unit(largest), format.unit(amax), "{amax}"));
            }
        }
        assert_eq!(Seen::place(0.0), None);
        assert_eq!(Seen::largest(&[1.0; Seen::CLASSES]), None);
        for endless in [f32::INFINITY, f32::NAN, f32::MAX] {
            assert_eq!(Seen::place(endless), Some(Seen::COUNT - 1));
        }
        assert_eq!(Seen::largest(&[1.0; Seen::COUNT]), None);
    }

    const BOTH: [F8; 2] = [F8::E4M3, F8::E5M2];

    #[test]
    fn every_number_survives_the_way_to_f32_and_back() {
        for format in BOTH {
            for bits in 0..=u8::MAX {
                let x = format.to_f32(bits);
                match x.is_finite() {
                    true => assert_eq!(format.from_f32(x), bits, "{x}"),
                    false if x.is_nan() => assert!(format.to_f32(format.from_f32(x)).is_nan()),
                    false => assert_eq!(format.to_f32(format.from_f32(x)), 57344f32.copysign(x)),
                }
            }
        }
        assert_eq!([0x7e, 0x08, 0x01].map(|bits| F8::E4M3.to_f32(bits)), [448.0, 2f32.powi(-6), 2f32.powi(-9)]);
        assert_eq!([0x7b, 0x04, 0x01].map(|bits| F8::E5M2.to_f32(bits)), [57344.0, 2f32.powi(-14), 2f32.powi(-16)]);
    }

    #[test]
    fn what_lies_between_two_numbers_goes_to_the_nearer_and_halves_to_the_even_one() {
        for format in BOTH {
            for bits in 0..format.largest {
                let (low, high) = (format.to_f32(bits), format.to_f32(bits + 1));
                let half = (low + high) / 2.0;
                let even = bits + (bits & 1);
                let below = f32::from_bits(half.to_bits() - 1);
                let above = f32::from_bits(half.to_bits() + 1);
                assert_eq!([below, half, above].map(|x| format.from_f32(x)), [bits, even, bits + 1], "{half}");
                assert_eq!(format.from_f32(-half), 0x80 | even);
            }
            let most = format.to_f32(format.largest);
            assert_eq!([most * 1.5, f32::INFINITY].map(|x| format.from_f32(x)), [format.largest; 2]);
        }
    }

    #[test]
    fn the_unit_is_the_smallest_power_of_two_with_which_the_largest_fits() {
        for format in BOTH {
            let most = format.to_f32(format.largest);
            for exponent in -100..100 {
                for mantissa in [1.0, 1.3, 1.75, 1.750_001, 1.999] {
                    let amax = mantissa * 2f32.powi(exponent);
                    let unit = format.unit(amax);
                    assert!(amax / unit <= most && amax / (unit / 2.0) > most, "{amax}: {unit}");
                    assert_eq!(unit.to_bits() & 0x7f_ffff, 0);
                }
            }
            assert_eq!(format.unit(0.0), 1.0);
            assert!(format.unit(f32::INFINITY).is_nan() && format.unit(f32::NAN).is_nan());
            // Of the smallest numbers all are zero, and of the largest none overflows.
            assert_eq!(format.unit(f32::from_bits(1)), f32::MIN_POSITIVE);
            assert!(f32::MAX / format.unit(f32::MAX) <= most);
        }
    }
}
