//! Dropout: masks that are computed, never stored.
//!
//! A mask is a function of the sequence's key, the site, the position and the feature in the whole, so that every layout,
//! backward and recomputation draw the same. The gradient of the op is the op itself.

use super::call::{Call, Ptr};
use super::float::Float;
use super::simd::{self, vectorised};
use lockstep_ir::counter;

/// y `[b, s, d]` = x / (1 − rate), or 0 by a mask drawn from keys `[b, 2]`, in sequences of which this rank may have a part.
pub fn dropout<T: Float>(call: Call, rate: f32, site: u64) {
    let (here, d, places) = (call.size("seq"), call.size("features"), call.positions());
    let first = call.bound.counted_from() as u32;
    let (x, keys) = (Ptr(call.input::<T>(0)), Ptr(call.input::<u32>(1)));
    let Some(y) = call.output::<T>(0).map(Ptr) else { return };
    let (below, scale) = (counter::threshold(rate), 1.0 / (1.0 - rate));
    call.rows(call.size("batch") * here, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task; there is a key per sequence.
            unsafe {
                let key = keys.slice(row / here * 2, 2);
                let key = u64::from(key[0]) | u64::from(key[1]) << 32;
                let mask = counter::row(key, site, places.entry(row % here) as u64);
                dropout_row(call.simd, x.at(row * d), y.at(row * d), d, mask, first, below, scale);
            }
        }
    });
}

vectorised! {
    /// `y` may be the memory of `x`.
    unsafe fn dropout_row<T>(x: *const T, y: *mut T, d: usize, mask: u64, first: u32, below: u32, scale: f32) -> () {
        simd::map([x], [y], d, |[x], i| [if counter::row_bits(mask, first + i as u32) < below { 0.0 } else { x * scale }]);
    }
}
