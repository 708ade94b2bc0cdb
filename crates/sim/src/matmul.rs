//! How a matmul's output is cut into tiles, and how full the waves of tiles are.

/// Tiles that libraries choose from: rows, columns, and the rate beside the largest.
const TILES: [(u64, u64, f64); 5] =
    [(256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.96), (128, 64, 0.85), (64, 64, 0.7)];

/// Least depth of a part where the sum is cut into parts too, so that more tiles run at a time.
const LEAST_DEPTH: u64 = 1024;

/// The share of `units` processors that work on a `rows` × `cols` output of depth `inner`, with the tiles for which it is most.
pub fn filled(rows: u64, cols: u64, inner: u64, units: u64) -> f64 {
    let with = |(tile_rows, tile_cols, rate): (u64, u64, f64)| {
        let tiles = rows.div_ceil(tile_rows) * cols.div_ceil(tile_cols);
        let parts = (units / tiles.max(1)).clamp(1, (inner / LEAST_DEPTH).max(1));
        let waves = (tiles * parts).div_ceil(units);
        let work = (rows * cols) as f64 * parts as f64;
        rate * work / (waves * units * tile_rows * tile_cols) as f64
    };
    TILES.into_iter().map(with).fold(f64::MIN_POSITIVE, f64::max).min(1.0)
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
        assert!(filled(256 * 132, 128, 4096, 132) > 1.1 * filled(256 * 140, 128, 512, 132));
    }

    #[test]
    fn the_extent_that_fits_worst_counts() {
        assert_eq!(misaligned([4096, 128, 64]), 0.0);
        assert_eq!(misaligned([4096, 1000, 64]), 0.5);
        assert_eq!(misaligned([50257, 128, 64]), 1.0);
    }
}
