//! Conversions between `f32` and IEEE binary16.

/// The value of an f16.
#[inline(always)]
pub fn to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let rest = u32::from(bits & 0x7fff);
    // Where the exponent is all ones it is so in f32 too; where it is 0, a product of f32 finds the leading bit.
    let magnitude = match rest {
        0x7c00.. => 0x7f80_0000 | (rest & 0x3ff) << 13,
        0x400.. => (rest << 13) + (112 << 23),
        _ => (rest as f32 * (1.0 / (1u32 << 24) as f32)).to_bits(),
    };
    f32::from_bits(sign | magnitude)
}

/// The nearest f16, ties to even; what is too large becomes infinite, NaN stays NaN.
#[inline(always)]
pub fn from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let (sign, rest) = ((bits >> 16 & 0x8000) as u16, bits & 0x7fff_ffff);
    let magnitude = match rest {
        0x7f80_0001.. => 0x7e00,
        // From 65520 on.
        0x477f_f000.. => 0x7c00,
        // From 2⁻¹⁴ on: the upper bits, rounded.
        0x3880_0000.. => {
            let rounded = rest - (112 << 23) + 0xfff + (rest >> 13 & 1);
            (rounded >> 13) as u16
        }
        // In units of 2⁻²⁴: adding and taking away 1.5 · 2²³ rounds to an integer.
        _ => {
            const ROUND: f32 = 12_582_912.0;
            let units = f32::from_bits(rest) * (1u32 << 24) as f32 + ROUND - ROUND;
            units as u16
        }
    };
    sign | magnitude
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_survives_the_way_to_f32_and_back() {
        for bits in 0..=u16::MAX {
            let x = to_f32(bits);
            if x.is_nan() {
                assert!(to_f32(from_f32(x)).is_nan());
            } else {
                assert_eq!(from_f32(x), bits, "{x}");
            }
        }
        assert_eq!([to_f32(0x3c00), to_f32(0x7bff), to_f32(1)], [1.0, 65504.0, 2f32.powi(-24)]);
        assert_eq!(to_f32(0xfc00), f32::NEG_INFINITY);
    }

    /// But for NaN, which is one value here: `half` keeps some of its bits, and asks the CPU for its instruction in every call.
    #[test]
    fn every_number_is_that_of_half() {
        for bits in 0..=u16::MAX {
            let theirs = half::f16::from_bits(bits).to_f32();
            assert!(
                to_f32(bits).to_bits() == theirs.to_bits() || theirs.is_nan() && to_f32(bits).is_nan(),
                "{bits:#x}"
            );
        }
        for n in 0..1u64 << 20 {
            let x = f32::from_bits(crate::counter::bits(7, n) as u32);
            let theirs = half::f16::from_f32(x);
            assert!(from_f32(x) == theirs.to_bits() || x.is_nan() && theirs.is_nan(), "{x:e}");
        }
    }

    #[test]
    fn rounds_to_the_nearest_and_ties_to_even() {
        // Between every two neighbours: the middle goes to the even one, what is next to it to its own side.
        for bits in 0..0x7bffu16 {
            let (low, high) = (f64::from(to_f32(bits)), f64::from(to_f32(bits + 1)));
            let middle = ((low + high) / 2.0) as f32;
            assert_eq!(from_f32(middle), bits + (bits & 1), "{middle}");
            assert_eq!(from_f32(f32::from_bits(middle.to_bits() - 1)), bits);
            assert_eq!(from_f32(-f32::from_bits(middle.to_bits() + 1)), 0x8000 | (bits + 1));
        }
        assert_eq!([from_f32(65519.9), from_f32(65520.0)], [0x7bff, 0x7c00]);
        assert_eq!([from_f32(f32::INFINITY), from_f32(-1e30)], [0x7c00, 0xfc00]);
    }
}
