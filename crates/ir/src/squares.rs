//! Sums of squares as wide integers: exact over the whole range of f32 gradients, and the same in every order.

use crate::fixed;

/// Parts of a stored sum: `Op::SquareSum` gives this many integers of 64 bits, each of 32 bits plus carries.
pub const LIMBS: usize = 21;

/// The unit is 2 to this power. The square of the least f32 is 2⁻²⁹⁸; what is left holds the fractions of 2⁵⁰ blocks.
const LOWEST: i32 = -352;

/// Bits of a limb that belong to it; the rest of its 64 are carries.
const BITS: u32 = 32;

/// A sum of non-negative numbers below 2³⁰⁰, in units of 2⁻³⁵²: what is smaller than a unit is cut off number by number, all
/// else is exact. The largest f32 squared is 2²⁵⁶. 2³² numbers fit before carries are propagated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Squares {
    limbs: [u64; LIMBS],
    sound: bool,
}

impl Squares {
    /// The sum of nothing.
    pub const ZERO: Self = Self { limbs: [0; LIMBS], sound: true };

    /// Adds a number. One that is infinite or NaN makes the sum so.
    #[inline(always)]
    pub fn add(&mut self, x: f64) {
        const MANTISSA: u32 = 52;
        // Zero has no sign here.
        let bits = (x + 0.0).to_bits();
        let exponent = (bits >> MANTISSA) as i32;
        // Numbers below 2⁻¹⁰²², zero among them, are far below the unit.
        let mantissa = bits & ((1 << MANTISSA) - 1) | u64::from(exponent > 0) << MANTISSA;
        // Of the mantissa's last bit, counted from the unit's.
        let place = exponent - (1023 + MANTISSA as i32) - LOWEST;
        let (mantissa, place) = match place {
            0.. => (mantissa, place as usize),
            _ => (mantissa.checked_shr(place.unsigned_abs()).unwrap_or(0), 0),
        };
        let first = place / BITS as usize;
        let Some([low, middle, high]) = self.limbs.get_mut(first..first + 3) else {
            // Too large, infinite, NaN, or negative.
            self.sound = false;
            return;
        };
        let wide = u128::from(mantissa) << (place % BITS as usize);
        *low += u64::from(wide as u32);
        *middle += u64::from((wide >> BITS) as u32);
        *high += (wide >> (2 * BITS)) as u64;
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &Self) {
        self.limbs.iter_mut().zip(&other.carried().limbs).for_each(|(a, b)| *a += b);
        self.sound &= other.sound;
    }

    /// The same sum with every limb but the last below 2³².
    fn carried(&self) -> Self {
        let (mut limbs, mut carry) = (self.limbs, 0);
        for limb in &mut limbs[..LIMBS - 1] {
            let sum = *limb + carry;
            (*limb, carry) = (sum & u64::from(u32::MAX), sum >> BITS);
        }
        limbs[LIMBS - 1] += carry;
        Self { limbs, sound: self.sound }
    }

    /// As it is stored: such integers are added limb by limb, over ranks too, and none overflows.
    pub fn stored(&self) -> [i64; LIMBS] {
        match self.sound {
            true => self.carried().limbs.map(|limb| limb as i64),
            false => [fixed::POISON; LIMBS],
        }
    }

    /// A stored sum, or a sum of several.
    pub fn from_stored(stored: &[i64; LIMBS]) -> Self {
        Self { limbs: stored.map(|limb| limb as u64), sound: !stored.contains(&fixed::POISON) }
    }

    /// The number; NaN where something that was added was not finite.
    pub fn value(&self) -> f64 {
        if !self.sound {
            return f64::NAN;
        }
        // Carried first, so that every way to the same integer gives the same bits.
        let shrunk = self.carried().limbs.iter().fold(0.0, |sum, limb| sum * 2f64.powi(-(BITS as i32)) + *limb as f64);
        shrunk * 2f64.powi(LOWEST + (BITS as usize * (LIMBS - 1)) as i32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(xs: &[f64]) -> Squares {
        let mut sum = Squares::ZERO;
        xs.iter().for_each(|x| sum.add(*x));
        sum
    }

    #[test]
    fn squares_of_every_f32_are_exact() {
        let least = f64::from(f32::from_bits(1));
        for x in [least, 1e-40, f64::from(f32::MIN_POSITIVE), 7.32e-10, 1.0, 1.0f64.next_up(), 5_916_713.0, 1e30] {
            assert_eq!(sum(&[x * x]).value(), x * x, "{x:e}");
        }
        let most = f64::from(f32::MAX).powi(2);
        assert_eq!(sum(&[most; 4]).value(), 4.0 * most);
        assert_eq!(sum(&[0.0, -0.0]).stored(), [0; LIMBS]);
    }

    #[test]
    fn the_order_and_the_grouping_do_not_matter() {
        let xs: Vec<f64> = (0..400).map(|i| 1.7f64.powi(i - 200) * (1.0 + f64::from(i) / 7.0)).collect();
        let forward = sum(&xs);
        let backward = sum(&xs.iter().rev().copied().collect::<Vec<_>>());
        let mut parts = Squares::ZERO;
        xs.chunks(7).for_each(|xs| parts.merge(&sum(xs)));
        assert_eq!(forward.stored(), backward.stored());
        assert_eq!(forward.stored(), parts.stored());
        // Ranks add what is stored limb by limb.
        let mut stored = [0; LIMBS];
        xs.chunks(50)
            .for_each(|xs| stored.iter_mut().zip(sum(xs).stored()).for_each(|(a, b)| *a = fixed::merge(*a, b)));
        assert_eq!(Squares::from_stored(&stored).value().to_bits(), forward.value().to_bits());
        // From the smallest on, f64 loses nothing that counts.
        assert!((forward.value() / xs.iter().sum::<f64>() - 1.0).abs() < 1e-12);
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        for x in [f64::INFINITY, f64::NAN, -1.0, f64::MAX] {
            let stored = sum(&[1.0, x, 2.0]).stored();
            assert!(stored.iter().all(|limb| *limb == fixed::POISON));
            assert!(Squares::from_stored(&stored).value().is_nan());
        }
    }

    #[test]
    fn many_numbers_carry() {
        let mut ones = Squares::ZERO;
        ones.limbs.fill(u64::from(u32::MAX) << 20);
        assert_eq!(ones.carried().value().to_bits(), ones.value().to_bits());
        let mut twice = ones;
        twice.merge(&ones);
        assert_eq!(twice.value(), 2.0 * ones.value());
    }
}
