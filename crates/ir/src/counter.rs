//! Counter-based random numbers: pure functions of a key and a counter.
//!
//! Everything random in a run (initial weights, data order, dropout) is keyed by *logical* coordinates (a tensor's
//! name and element index, a global sample index), never by rank, and uses integer and IEEE basic operations only, so
//! that every layout and every device draws the same numbers.

/// A key for one stream of random numbers, from a seed and a name.
pub fn key(seed: u64, name: &str) -> u64 {
    // FNV-1a over the name, then mixed with the seed.
    let mut h = 0xcbf2_9ce4_8422_2325_u64;
    for b in name.bytes() {
        h = (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    mix(h ^ mix(seed))
}

/// 64 random bits at position `counter` of the stream `key` (SplitMix64).
pub fn bits(key: u64, counter: u64) -> u64 {
    mix(key.wrapping_add(counter.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// A sample at position `counter` that is normal for every practical purpose: mean 0, variance 1, bounded by ±6.
///
/// It is the centred sum of twelve 21-bit uniforms, exact in integers, so every device gets the same bits.
pub fn normal(key: u64, counter: u64) -> f32 {
    const MASK: u64 = (1 << 21) - 1;
    let mut sum = 0u64;
    for i in 0..4 {
        let b = bits(key, counter.wrapping_mul(4).wrapping_add(i));
        sum += (b & MASK) + ((b >> 21) & MASK) + ((b >> 42) & MASK);
    }
    // Twelve uniforms on {0 … 2²¹−1} have mean 6·(2²¹−1) and variance (2⁴²−1).
    let centred = sum as i64 - 6 * MASK as i64;
    centred as f32 * (1.0 / (1u64 << 21) as f32)
}

/// The stream of one row of a mask: of a sample (by its key), a place in the model and a position.
pub fn row(sample: u64, site: u64, position: u64) -> u64 {
    bits(bits(sample, site), position)
}

/// 32 random bits at `i` of a row's stream: cheaper than [`bits`], for many numbers of one row.
#[inline(always)]
pub fn row_bits(row: u64, i: u32) -> u32 {
    let z = mix_small((row as u32).wrapping_add(i.wrapping_mul(0x9e37_79b9)));
    // Rows whose first halves are near each other do not share a sequence: the second half goes between the rounds.
    mix_small(z ^ (row >> 32) as u32)
}

/// How many of the 2³² values of [`row_bits`] stand for a share of all, counted from 0.
pub fn threshold(share: f32) -> u32 {
    (f64::from(share) * (1u64 << 32) as f64).round().clamp(0.0, f64::from(u32::MAX)) as u32
}

/// Where `index` goes in a pseudo-random permutation of `0..n` chosen by `key`.
///
/// A balanced Feistel network with cycle walking: a bijection without a table, so the order of any size of data set
/// can be asked for at any index.
pub fn permute(key: u64, index: u64, n: u64) -> u64 {
    assert!(index < n, "index {index} is outside a permutation of {n}");
    let half = (64 - (n - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half) - 1;
    let mut x = index;
    loop {
        let (mut left, mut right) = (x >> half, x & mask);
        for round in 0..6 {
            let f = bits(key ^ (round << 56), right) & mask;
            (left, right) = (right, left ^ f);
        }
        x = (left << half) | right;
        if x < n {
            return x;
        }
    }
}

/// Mixes 32 bits: every one of them depends on all.
#[inline(always)]
pub fn mix_small(mut z: u32) -> u32 {
    z = (z ^ (z >> 16)).wrapping_mul(0x7feb_352d);
    z = (z ^ (z >> 15)).wrapping_mul(0x846c_a68b);
    z ^ (z >> 16)
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_has_mean_0_and_variance_1() {
        let k = key(1, "weights");
        let n = 100_000;
        let xs: Vec<f64> = (0..n).map(|i| f64::from(normal(k, i))).collect();
        let mean = xs.iter().sum::<f64>() / n as f64;
        let variance = xs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.02, "{mean}");
        assert!((variance - 1.0).abs() < 0.02, "{variance}");
    }

    #[test]
    fn row_bits_are_uniform_and_independent_between_elements_rows_and_sites() {
        let (site, other, below) = (key(0, "a"), key(0, "b"), threshold(0.3));
        let (rows, width) = (400u64, 256u32);
        let drops = |site: u64, r: u64, i: u32| row_bits(row(bits(key(3, "dropout"), r / 20), site, r % 20), i) < below;
        let all: Vec<(u64, u32)> = (0..rows).flat_map(|r| (0..width).map(move |i| (r, i))).collect();
        let share = |what: &dyn Fn(u64, u32) -> bool| {
            all.iter().filter(|(r, i)| what(*r, *i)).count() as f64 / all.len() as f64
        };
        // Four standard deviations of a mean over 102,400 draws.
        let near = |found: f64, expected: f64| {
            let bound = 4.0 * (expected * (1.0 - expected) / all.len() as f64).sqrt();
            assert!((found - expected).abs() < bound, "{found} and {expected} ± {bound}");
        };
        near(share(&|r, i| drops(site, r, i)), 0.3);
        for (dr, di) in [(1, 0), (0, 1), (20, 0), (1, 1), (0, 2)] {
            near(share(&|r, i| drops(site, r, i) && drops(site, r + dr, i + di)), 0.09);
        }
        near(share(&|r, i| drops(site, r, i) && drops(other, r, i)), 0.09);
        assert_eq!((threshold(0.0), threshold(0.5), threshold(1.0)), (0, 1 << 31, u32::MAX));
    }

    #[test]
    fn streams_with_different_names_or_seeds_differ() {
        assert_ne!(key(1, "a"), key(1, "b"));
        assert_ne!(key(1, "a"), key(2, "a"));
    }

    #[test]
    fn permute_is_a_bijection_at_every_size() {
        for n in [1, 2, 3, 7, 64, 65, 1000] {
            let mut seen = vec![false; n as usize];
            for i in 0..n {
                let j = permute(9, i, n) as usize;
                assert!(!std::mem::replace(&mut seen[j], true));
            }
        }
    }
}
