//! How a matmul's output is cut into tiles, and how full the waves of tiles are.

/// Tiles that libraries choose from: rows, columns, and the rate beside the largest.
const TILES: [(u64, u64, f64); 5] =
    [(256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.96), (128, 64, 0.85), (64, 64, 0.7)];

/// Least depth of a part where the sum is cut into parts too, so that more tiles run at a time.
const LEAST_DEPTH: u64 = 1024;

/// Most parts of a sum.
const MOST_PARTS: u64 = 16;

/// The share of `units` processors that work on a `rows` × `cols` output of depth `inner`, with the tiles for which it is most. Deep sums are
/// cut into any number of parts, also into more than fit at a time, so that the last wave is full: an H200 takes no longer for weight gradients
/// of 72 tiles over 16,384 positions than for those of 64.
pub fn filled(rows: u64, cols: u64, inner: u64, units: u64) -> f64 {
    let most = (inner / (2 * LEAST_DEPTH)).clamp(1, MOST_PARTS);
    let with = |tile| (1..=most).map(move |parts| waves(rows, cols, units, tile, parts));
    TILES.into_iter().flat_map(with).fold(f64::MIN_POSITIVE, f64::max).min(1.0)
}

fn tiles(rows: u64, cols: u64, (tile_rows, tile_cols, _): (u64, u64, f64)) -> u64 {
    rows.div_ceil(tile_rows) * cols.div_ceil(tile_cols)
}

/// The share of processors that work where each sum is cut into this many parts.
fn waves(rows: u64, cols: u64, units: u64, tile: (u64, u64, f64), parts: u64) -> f64 {
    let (tile_rows, tile_cols, rate) = tile;
    let waves = (tiles(rows, cols, tile) * parts).div_ceil(units);
    let work = (rows * cols) as f64 * parts as f64;
    rate * work / (waves * units * tile_rows * tile_cols) as f64
}

/// How badly extents of a matmul fit the hardware's vectors: 0 where all are multiples of 64, 1 where one is none of 8.
pub fn misaligned(extents: [u64; 3]) -> f64 {
    let one = |extent: u64| match extent {
        n if n % 64 == 0 => 0.0,
        n if n % 8 == 0 => 0.5,
        _ => 1.0,
    };
    extents.into_iter().map(one).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_outputs_fill_all_and_small_ones_few_processors() {
        assert!(filled(16384, 16384, 4096, 132) > 0.95);
        let small = filled(128, 128, 512, 132);
        assert!(small < 0.03, "{small}");
        // A deep sum is cut into parts.
        assert!(filled(512, 512, 65536, 132) > 2.0 * filled(512, 512, 1024, 132));
        // One tile more than a wave holds takes another wave.
        assert!(filled(256 * 132, 128, 1024, 132) > 1.1 * filled(256 * 140, 128, 512, 132));
    }

    #[test]
    fn deep_sums_in_any_number_of_parts_fill_the_last_wave() {
        // 72 tiles of 132 processors: seven parts are 3.8 waves.
        let of = |inner| filled(1536, 1536, inner, 132);
        assert!(of(16384) > 0.9 && of(1024) < 0.65, "{}, {}", of(16384), of(1024));
    }

    #[test]
    fn the_extent_that_fits_worst_counts() {
        assert_eq!(misaligned([4096, 128, 64]), 0.0);
        assert_eq!(misaligned([4096, 1000, 64]), 0.5);
        assert_eq!(misaligned([50257, 128, 64]), 1.0);
    }
}
