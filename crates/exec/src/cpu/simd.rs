//! Vector code without intrinsics: the same source, compiled for what the machine has.

/// What the machine's vector units can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Simd {
    /// 16 floats at a time, fused multiply-add.
    Avx512,
    /// 8 floats at a time, fused multiply-add.
    Avx2,
    /// Whatever the compiler may assume.
    Portable,
}

impl Simd {
    /// Asks the machine.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let has_512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw");
            if has_512 && is_x86_feature_detected!("fma") {
                return Simd::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Simd::Avx2;
            }
        }
        Simd::Portable
    }

    /// Runs `f`, compiled for these vector units as far as it is inlined here.
    #[inline(always)]
    pub fn run<R>(self, f: impl FnOnce() -> R) -> R {
        match self {
            // SAFETY: `detect` has seen these features.
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => unsafe { avx512(f) },
            // SAFETY: `detect` has seen these features.
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => unsafe { avx2(f) },
            _ => f(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
fn avx512<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// Lanes of sums and maxima: fixed, so that results do not depend on the vector units.
const LANES: usize = 16;

/// Sum of `f(i)` for `i < n`, in an order that depends on `n` only.
#[inline(always)]
pub fn sum(n: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = n / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        for (l, lane) in lanes.iter_mut().enumerate() {
            *lane += f(start + l);
        }
    }
    for i in whole..n {
        lanes[i - whole] += f(i);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Largest of `x`; −∞ if it is empty. NaN is passed on.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let pick = |a: f32, b: f32| if b > a || b.is_nan() { b } else { a };
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane = pick(*lane, v);
        }
    }
    rest.iter().chain(&lanes).copied().fold(f32::NEG_INFINITY, pick)
}

/// `eˣ` within 2 units in the last place, without a branch or a call. NaN is passed on; below −87.3 the result is 0.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts, so that n·ln 2 is exact to twice the precision.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and taking away 1.5·2²³ rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > 88.7 { 88.7 } else { x };
    let clamped = if clamped < -87.3 { -87.3 } else { clamped };
    let n = (clamped * LOG2_E + ROUND) - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4f32;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p * r + c;
    }
    let p = p * r * r + r + 1.0;
    // 2ⁿ in two halves, so that n = 128 does not overflow the exponent.
    let half = n * 0.5;
    let low = ((half + ROUND) - ROUND).clamp(-64.0, 64.0);
    let high = n - low;
    let power = |n: f32| f32::from_bits(((n as i32 + 127) << 23) as u32);
    let y = p * power(low) * power(high);
    if x < -87.3 { 0.0 } else { y }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_right_everywhere() {
        let mut worst = 0.0f64;
        for i in -87_000..88_600 {
            let x = i as f32 * 1e-3;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / exact - 1.0).abs());
        }
        assert!(worst < 2.5e-7, "{worst}");
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn max_passes_nan_on() {
        let mut x: Vec<f32> = (0..40).map(|i| i as f32).collect();
        assert_eq!(max(&x), 39.0);
        x[3] = f32::NAN;
        assert!(max(&x).is_nan());
        assert_eq!(max(&[]), f32::NEG_INFINITY);
    }

    #[test]
    fn sum_is_the_same_on_every_unit() {
        let x: Vec<f32> = (0..1003).map(|i| (i as f32).sin()).collect();
        let portable = sum(x.len(), |i| x[i] * x[i]);
        let vector = Simd::detect().run(|| sum(x.len(), |i| x[i] * x[i]));
        assert_eq!(portable.to_bits(), vector.to_bits());
    }
}
