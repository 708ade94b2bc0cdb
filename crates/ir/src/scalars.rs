//! Numbers that the host gives a program with every step: learning rate, loss scale, limits; and gradients in fixed
//! point.

use crate::{Axis, DType, Dim, TensorType, bf16, counter};

/// The numbers that change from step to step, written to the device before each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepScalars {
    /// Learning rate.
    pub lr: f32,
    /// 1 ÷ counted targets of the global batch: turns sums over tokens into means.
    pub inverse_count: f32,
    /// Largest norm of the mean gradient; infinite where clipping is off.
    pub clip: f32,
    /// 1 − β₁ᵗ.
    pub bias1: f32,
    /// 1 − β₂ᵗ.
    pub bias2: f32,
    /// What gradients start with instead of 1, a power of 2: large where small ones would vanish in f16, small where large ones
    /// would leave the range of fixed-point sums. 1 elsewhere.
    pub loss_scale: f32,
}

impl StepScalars {
    /// Name of the state that holds them.
    pub const NAME: &'static str = "step_scalars";

    /// How many there are.
    pub const COUNT: usize = 6;

    /// As the vector that ops read.
    pub fn to_array(self) -> [f32; Self::COUNT] {
        [self.lr, self.inverse_count, self.clip, self.bias1, self.bias2, self.loss_scale]
    }

    /// From the vector that ops read.
    pub fn from_slice(x: &[f32]) -> Self {
        Self { lr: x[0], inverse_count: x[1], clip: x[2], bias1: x[3], bias2: x[4], loss_scale: x[5] }
    }

    /// What turns sums of gradients into the mean gradient.
    pub fn inverse(&self) -> f32 {
        self.inverse_count / self.loss_scale
    }

    /// Type of that vector.
    pub fn ty() -> TensorType {
        TensorType::new(DType::F32, [Dim::new(Axis::Scalar, Self::COUNT)])
    }
}

/// The largest loss and gradient norm with which a step's update is applied, written to the device before each step of a program
/// that asks for them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLimits {
    /// Of the mean loss per target.
    pub loss: f32,
    /// Of the norm of the mean gradient.
    pub grad_norm: f32,
}

impl StepLimits {
    /// Name of the state that holds them.
    pub const NAME: &'static str = "step_limits";

    /// How many there are.
    pub const COUNT: usize = 2;

    /// Every finite loss and norm is within them.
    pub const NONE: Self = Self { loss: f32::INFINITY, grad_norm: f32::INFINITY };

    /// As the vector that the device reads.
    pub fn to_array(self) -> [f32; Self::COUNT] {
        [self.loss, self.grad_norm]
    }

    /// From the vector that the device reads.
    pub fn from_slice(x: &[f32]) -> Self {
        Self { loss: x[0], grad_norm: x[1] }
    }

    /// Whether a step with this mean loss and norm is within them; one with NaN is not.
    pub fn admit(&self, loss: f64, grad_norm: f32) -> bool {
        loss <= f64::from(self.loss) && grad_norm <= self.grad_norm
    }

    /// Type of that vector.
    pub fn ty() -> TensorType {
        TensorType::new(DType::F32, [Dim::new(Axis::Scalar, Self::COUNT)])
    }
}

/// Where the random bits of a step come from by which updates round weights and moments to bf16, written to the device before each step of a
/// program that rounds so.
///
/// A number is rounded up or down by 16 random bits, so that it is right on average: to the nearest, an update of less than a 512th of a weight would
/// be lost. The bits are those of (seed, step, tensor, element), so that every layout and every device rounds in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRounding {
    key: u64,
}

impl StepRounding {
    /// Name of the state that holds it.
    pub const NAME: &'static str = "step_rounding";

    /// That of a step of a run.
    pub fn new(seed: u64, step: u64) -> Self {
        Self { key: counter::bits(counter::key(seed, Self::NAME), step) }
    }

    /// As the vector that the device reads.
    pub fn to_array(self) -> [u32; 2] {
        [self.key as u32, (self.key >> 32) as u32]
    }

    /// From the vector that the device reads.
    pub fn from_array([low, high]: [u32; 2]) -> Self {
        Self { key: u64::from(high) << 32 | u64::from(low) }
    }

    /// Type of that vector.
    pub fn ty() -> TensorType {
        TensorType::new(DType::U32, [Dim::new(Axis::Scalar, 2)])
    }

    /// The stream of a tensor's random bits, where `site` is a number of its name.
    pub fn stream(self, site: u64) -> u64 {
        counter::bits(self.key, site)
    }

    /// Random bits of an element: for its weight (the low 16), its first moment (the high 16) and its second.
    #[inline(always)]
    pub fn bits(stream: u64, element: u32) -> [u32; 3] {
        let bits = counter::row_bits(stream, element);
        let more = counter::mix_small(bits ^ 0x9e37_79b9);
        [bits & 0xffff, bits >> 16, more >> 16]
    }

    /// Rounds to bf16, up or down by 16 random bits. What is not finite stays so.
    #[inline(always)]
    pub fn round(x: f32, random: u32) -> u16 {
        let bits = x.to_bits();
        match x.is_finite() {
            // Beyond the largest finite number it is infinite, as rounding to the nearest would have it.
            true => (bits.wrapping_add(random & 0xffff) >> 16) as u16,
            false => bf16::from_f32(x),
        }
    }
}

/// Fixed-point reals for order-independent sums (`DType::Fixed64`).
///
/// A real `x` is stored as the integer `x · 2³⁶`, so sums resolve 1.5e-11 everywhere and reach ±6.7e7. What does not fit,
/// and what is not finite, becomes [`fixed::POISON`], which stays and reads back as NaN. A partial sum that leaves the range
/// counts even where the whole one would come back: only inside the range does the order not matter.
pub mod fixed {
    /// The mark of a sum that has left the range.
    pub const POISON: i64 = i64::MIN;
    const SCALE: f32 = (1u64 << 36) as f32;
    const LIMIT: i64 = 1 << 62;

    /// `sum + x`.
    #[inline(always)]
    pub fn add(sum: i64, x: f32) -> i64 {
        let scaled = x * SCALE;
        // Comparisons with NaN are false, so NaN takes the first branch too.
        let fits = scaled.abs() < LIMIT as f32;
        // Rounding to the nearest integer: exact in f64, which holds every f32.
        let next = sum.wrapping_add((f64::from(scaled)).round_ties_even() as i64);
        if !fits || sum == POISON || next.unsigned_abs() > LIMIT as u64 { POISON } else { next }
    }

    /// The sum of two sums.
    #[inline(always)]
    pub fn merge(a: i64, b: i64) -> i64 {
        let next = a.wrapping_add(b);
        if a == POISON || b == POISON || next.unsigned_abs() > LIMIT as u64 { POISON } else { next }
    }

    /// The real number of a sum.
    #[inline(always)]
    pub fn to_f32(sum: i64) -> f32 {
        if sum == POISON { f32::NAN } else { sum as f32 * (1.0 / SCALE) }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn sums_do_not_depend_on_their_order() {
            let xs = [1.0e-3f32, -7.25, 3.0e4, 1.0e-9, -2.5e4];
            let forward = xs.iter().fold(0, |s, &x| add(s, x));
            let backward = xs.iter().rev().fold(0, |s, &x| add(s, x));
            assert_eq!(forward, backward);
            let exact: f64 = xs.iter().map(|&x| f64::from(x)).sum();
            assert!((f64::from(to_f32(forward)) - exact).abs() < 1e-3);
        }

        #[test]
        fn what_does_not_fit_reads_back_as_nan() {
            for x in [f32::NAN, f32::INFINITY, -1e9] {
                assert!(to_f32(add(add(0, x), 1.0)).is_nan());
                assert!(to_f32(merge(add(0, x), 5)).is_nan());
            }
        }
    }
}
