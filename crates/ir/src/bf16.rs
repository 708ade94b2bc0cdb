//! Conversions between `f32` and `bf16`, its upper half.

/// The value of a bf16.
#[inline(always)]
pub fn to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bf16, ties to even; NaN stays NaN.
#[inline(always)]
pub fn from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let nan = ((bits >> 16) | 0x40) as u16;
    if x.is_nan() { nan } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `half` gives a NaN its quiet bit on the way to f32, and asks for it of every number: the bits here go over as they are.
    #[test]
    fn every_number_is_that_of_half() {
        for bits in 0..=u16::MAX {
            let theirs = half::bf16::from_bits(bits).to_f32();
            match theirs.is_nan() {
                true => assert_eq!(to_f32(bits).to_bits() | 0x40_0000, theirs.to_bits(), "{bits:#x}"),
                false => assert_eq!(to_f32(bits).to_bits(), theirs.to_bits(), "{bits:#x}"),
            }
        }
        for n in 0..1u64 << 20 {
            let x = f32::from_bits(crate::counter::bits(7, n) as u32);
            assert_eq!(from_f32(x), half::bf16::from_f32(x).to_bits(), "{x:e}");
        }
    }

    #[test]
    fn rounds_to_nearest_even() {
        let round = |x: f32| to_f32(from_f32(x));
        assert_eq!(round(1.0), 1.0);
        assert_eq!(round(1.0 + 1.0 / 256.0), 1.0);
        assert_eq!(round(1.0 + 3.0 / 256.0), 1.0 + 4.0 / 256.0);
        assert_eq!(round(f32::MAX), f32::INFINITY);
        assert_eq!(round(f32::NEG_INFINITY), f32::NEG_INFINITY);
        assert!(round(f32::NAN).is_nan());
        assert!(round(f32::from_bits(0x7f80_0001)).is_nan());
    }
}
