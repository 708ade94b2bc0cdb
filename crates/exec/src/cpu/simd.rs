//! Vector paths of kernels, and vector code without intrinsics: the same source, compiled for every kind of vector unit.
//!
//! Sums have a fixed number of lanes, so that every vector path adds in the same order.

use super::float::Float;
use std::cmp::Ordering;
use std::sync::OnceLock;

/// The vector path of the kernels. They are in partial order: a path has all that the ones below it have, and paths of different
/// architectures cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Simd {
    /// Whatever the compiler may assume; multiplies and adds in two steps.
    Portable,
    /// 8 floats at a time, fused multiply-add.
    Avx2,
    /// 16 floats at a time, fused multiply-add.
    Avx512,
    /// The same, and tile registers for matmuls in bf16.
    Amx,
    /// aarch64: 4 floats at a time, fused multiply-add.
    Neon,
}

impl PartialOrd for Simd {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        match (self, other) {
            _ if self == other => Some(Ordering::Equal),
            (Simd::Portable, _) => Some(Ordering::Less),
            (_, Simd::Portable) => Some(Ordering::Greater),
            (Simd::Neon, _) | (_, Simd::Neon) => None,
            // Those of x86-64 are declared from the lowest to the highest.
            _ => (*self as u8).partial_cmp(&(*other as u8)),
        }
    }
}

impl Simd {
    /// All paths.
    pub const ALL: [Simd; 5] = [Simd::Portable, Simd::Avx2, Simd::Avx512, Simd::Amx, Simd::Neon];

    /// The environment variable that lowers the path.
    pub const SWITCH: &str = "LOCKSTEP_CPU";

    /// The word for it in [`Simd::SWITCH`].
    pub fn name(self) -> &'static str {
        match self {
            Simd::Portable => "portable",
            Simd::Avx2 => "avx2",
            Simd::Avx512 => "avx512",
            Simd::Amx => "amx",
            Simd::Neon => "neon",
        }
    }

    /// Whether blocks of words are transposed in vector registers.
    pub fn transposes_blocks(self) -> bool {
        self >= Simd::Avx512 || self == Simd::Neon
    }

    /// The path that [`Simd::SWITCH`] asks for, or else the highest one of this machine. The environment is read once.
    pub fn chosen() -> Result<Self, &'static UnusablePath> {
        static CHOSEN: OnceLock<Result<Simd, UnusablePath>> = OnceLock::new();
        CHOSEN
            .get_or_init(|| {
                let asked = std::env::var_os(Self::SWITCH);
                choose(asked.as_ref().map(|word| word.to_string_lossy()).as_deref(), Self::detect())
            })
            .as_ref()
            .copied()
    }

    /// The path that kernels take.
    ///
    /// # Panics
    /// Where the environment asks for a path that this machine does not have: who starts a program asks [`Simd::chosen`] first.
    pub fn current() -> Self {
        Self::chosen().unwrap_or_else(|unusable| panic!("{unusable}"))
    }

    /// The highest path that this machine has.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let has_512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw");
            if has_512 && is_x86_feature_detected!("fma") {
                return if has_amx() { Simd::Amx } else { Simd::Avx512 };
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Simd::Avx2;
            }
        }
        // Part of every aarch64 CPU that runs Linux, but targets without it can be built for.
        if cfg!(all(target_arch = "aarch64", target_feature = "neon")) { Simd::Neon } else { Simd::Portable }
    }
}

/// Whether this machine has AMX for bf16 and the system lets us use it.
#[cfg(target_arch = "x86_64")]
fn has_amx() -> bool {
    use std::sync::OnceLock;
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        let leaf = std::arch::x86_64::__cpuid_count(7, 0);
        let (tile, bf16) = (leaf.edx >> 24 & 1 == 1, leaf.edx >> 22 & 1 == 1);
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_ulong = 18;
        // SAFETY: asks the kernel for the use of tile registers by this process; touches no memory.
        tile && bf16 && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
    })
}

/// The environment asks for a vector path that cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, lockstep_ir::Hint)]
#[error("{} = {word:?} {problem}", Simd::SWITCH)]
#[hint("{hint}")]
pub struct UnusablePath {
    word: String,
    problem: String,
    hint: String,
}

/// The path that a word asks for, on a machine whose highest one is `highest`. No word, or an empty one, leaves it.
fn choose(word: Option<&str>, highest: Simd) -> Result<Simd, UnusablePath> {
    let Some(word) = word.filter(|word| !word.is_empty()) else { return Ok(highest) };
    let usable: Vec<&str> = Simd::ALL.iter().filter(|path| **path <= highest).map(|path| path.name()).collect();
    let problem = match Simd::ALL.into_iter().find(|path| path.name() == word) {
        Some(path) if path <= highest => return Ok(path),
        Some(_) => format!("is a vector path that this CPU does not have: its highest is {}", highest.name()),
        None => "is no vector path".to_owned(),
    };
    let hint = format!("unset it, or lower the path to one of: {}", usable.join(", "));
    Err(UnusablePath { word: word.to_owned(), problem, hint })
}

/// Declares a function that is compiled once for every kind of vector unit and picks one at run time by its first
/// argument, a [`Simd`]. On aarch64 the compiler may assume NEON everywhere: there, the portable code is vector code too.
///
/// The body may use raw pointers: the function is unsafe, and its caller vouches for the ranges.
macro_rules! vectorised {
    ($(#[$meta:meta])* $vis:vis unsafe fn $name:ident<$T:ident>($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty { $($body:tt)* }) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name<$T: $crate::cpu::float::Float>(simd: $crate::cpu::simd::Simd, $($arg: $ty),*) -> $ret {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            unsafe fn body<$T: $crate::cpu::float::Float>($($arg: $ty),*) -> $ret {
                // SAFETY: the caller vouches for the ranges.
                unsafe { $($body)* }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx512<$T: $crate::cpu::float::Float>($($arg: $ty),*) -> $ret {
                // SAFETY: the caller vouches for the ranges.
                unsafe { body::<$T>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx2<$T: $crate::cpu::float::Float>($($arg: $ty),*) -> $ret {
                // SAFETY: the caller vouches for the ranges.
                unsafe { body::<$T>($($arg),*) }
            }
            // SAFETY: `Simd::detect` has seen the features; the caller vouches for the ranges.
            unsafe {
                match simd {
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::simd::Simd::Avx512 | $crate::cpu::simd::Simd::Amx => avx512::<$T>($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::simd::Simd::Avx2 => avx2::<$T>($($arg),*),
                    _ => body::<$T>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use vectorised;

/// `outputs[o][i] = f(inputs at i, i)[o]` for `i < n`, through local blocks, so that vector code works where outputs are the
/// memory of inputs.
///
/// # Safety
/// Every pointer is good for `n` elements; an output is exactly an input or apart from all of them.
#[inline(always)]
pub unsafe fn map<T: Float, const I: usize, const O: usize>(
    inputs: [*const T; I],
    outputs: [*mut T; O],
    n: usize,
    f: impl Fn([f32; I], usize) -> [f32; O],
) {
    // Large blocks, then small ones: rows of a few dozen elements are mostly small blocks.
    // SAFETY: the caller vouches for n elements.
    unsafe {
        let done = map_blocks::<T, I, O, 64>(inputs, outputs, 0, n, &f);
        let done = map_blocks::<T, I, O, 8>(inputs, outputs, done, n, &f);
        map_blocks::<T, I, O, 1>(inputs, outputs, done, n, &f);
    }
}

/// `map` in whole blocks of `B` elements from `from` on; returns where they end.
#[inline(always)]
unsafe fn map_blocks<T: Float, const I: usize, const O: usize, const B: usize>(
    inputs: [*const T; I],
    outputs: [*mut T; O],
    from: usize,
    n: usize,
    f: &impl Fn([f32; I], usize) -> [f32; O],
) -> usize {
    let mut x = [[0.0f32; B]; I];
    let mut y = [[0.0f32; B]; O];
    let end = from + (n - from) / B * B;
    for start in (from..end).step_by(B) {
        for (x, from) in x.iter_mut().zip(inputs) {
            for (j, x) in x.iter_mut().enumerate() {
                // SAFETY: the caller vouches.
                *x = unsafe { *from.add(start + j) }.to();
            }
        }
        for j in 0..B {
            let out = f(std::array::from_fn(|i| x[i][j]), start + j);
            for (y, out) in y.iter_mut().zip(out) {
                y[j] = out;
            }
        }
        for (y, to) in y.iter().zip(outputs) {
            for (j, y) in y.iter().enumerate() {
                // SAFETY: the caller vouches.
                unsafe { *to.add(start + j) = T::of(*y) };
            }
        }
    }
    end
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

/// Largest of `x`; −∞ if it is empty. NaN may be passed on or not: sums of exponentials find it.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let pick = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane = pick(*lane, v);
        }
    }
    rest.iter().chain(&lanes).copied().fold(f32::NEG_INFINITY, pick)
}

/// `eˣ` within 2 units in the last place, without a branch or a call. NaN is passed on; below −87.3 the result is 0, above
/// 88.3 it is e⁸⁸·³.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts, so that n·ln 2 is exact to twice the precision.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and taking away 1.5·2²³ rounds to an integer, which before it is taken away stands in the lowest bits. (A conversion
    // to an integer would be done number by number: it has to look for NaN.)
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > 88.3 { 88.3 } else { x };
    let clamped = if clamped < -87.3 { -87.3 } else { clamped };
    let shifted = clamped * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4f32;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p * r + c;
    }
    let p = p * r * r + r + 1.0;
    let y = p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < -87.3 { 0.0 } else { y }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::Hint;

    #[test]
    fn exp_is_right_everywhere() {
        let mut worst = 0.0f64;
        for i in -87_000..88_300 {
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
    fn a_word_lowers_the_path_and_never_raises_it() {
        for (highest, word, expected) in [
            (Simd::Amx, None, Ok(Simd::Amx)),
            (Simd::Amx, Some(""), Ok(Simd::Amx)),
            (Simd::Amx, Some("amx"), Ok(Simd::Amx)),
            (Simd::Amx, Some("portable"), Ok(Simd::Portable)),
            (Simd::Avx512, Some("avx2"), Ok(Simd::Avx2)),
            (Simd::Avx2, None, Ok(Simd::Avx2)),
            (Simd::Neon, None, Ok(Simd::Neon)),
            (Simd::Neon, Some("neon"), Ok(Simd::Neon)),
            (Simd::Neon, Some("portable"), Ok(Simd::Portable)),
            (
                Simd::Avx2,
                Some("avx512"),
                Err("LOCKSTEP_CPU = \"avx512\" is a vector path that this CPU does not have: its highest is avx2\n\
                     hint: unset it, or lower the path to one of: portable, avx2"),
            ),
            (
                Simd::Amx,
                Some("neon"),
                Err("LOCKSTEP_CPU = \"neon\" is a vector path that this CPU does not have: its highest is amx\n\
                     hint: unset it, or lower the path to one of: portable, avx2, avx512, amx"),
            ),
            (
                Simd::Neon,
                Some("avx2"),
                Err("LOCKSTEP_CPU = \"avx2\" is a vector path that this CPU does not have: its highest is neon\n\
                     hint: unset it, or lower the path to one of: portable, neon"),
            ),
            (
                Simd::Portable,
                Some("AVX2"),
                Err("LOCKSTEP_CPU = \"AVX2\" is no vector path\nhint: unset it, or lower the path to one of: portable"),
            ),
        ] {
            assert_eq!(choose(word, highest).map_err(|e| e.with_hint()), expected.map_err(str::to_owned), "{word:?}");
        }
    }

    #[test]
    fn a_path_is_above_those_whose_instructions_it_has() {
        let ordered = [Simd::Portable, Simd::Avx2, Simd::Avx512, Simd::Amx];
        assert!(ordered.is_sorted_by(|a, b| a < b));
        let (below, above) = (Simd::Portable.partial_cmp(&Simd::Neon), Simd::Neon.partial_cmp(&Simd::Portable));
        assert_eq!((below, above), (Some(Ordering::Less), Some(Ordering::Greater)));
        for x86 in [Simd::Avx2, Simd::Avx512, Simd::Amx] {
            assert_eq!((x86.partial_cmp(&Simd::Neon), Simd::Neon.partial_cmp(&x86)), (None, None));
        }
    }

    #[test]
    fn max_is_the_largest() {
        let x: Vec<f32> = (0..40).map(|i| ((i * 7) % 40) as f32).collect();
        assert_eq!(max(&x), 39.0);
        assert_eq!(max(&[]), f32::NEG_INFINITY);
    }

    #[test]
    fn sum_is_the_same_on_every_unit() {
        let x: Vec<f32> = (0..1003).map(|i| (i as f32).sin()).collect();
        let portable = sum(x.len(), |i| x[i] * x[i]);
        vectorised! {
            unsafe fn squares<T>(x: *const T, n: usize) -> f32 { sum(n, |i| (*x.add(i)).to() * (*x.add(i)).to()) }
        }
        // SAFETY: inside the vector.
        let vector = unsafe { squares(Simd::current(), x.as_ptr(), x.len()) };
        assert_eq!(portable.to_bits(), vector.to_bits());
    }
}
