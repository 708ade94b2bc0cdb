//! Heads in parts, as an all-to-all of context-parallel ranks takes and gives them, and back.

use super::call::{Call, Kernel, Kernels, Ptr};
use super::float::Float;
use crate::by_kind;
use lockstep_ir::op::position_in_ranks;

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        SplitHeads { ranks, .. } => split::<T>(call, ranks),
        JoinHeads { ranks } => join::<T>(call, ranks),
    }
}

/// blocks `[a, c, b, w]` of x `[b, s, p]`.
pub fn split<T: Float>(call: Call, ranks: usize) {
    let (x, Some(blocks)) = (Ptr(call.input::<T>(0)), call.output::<T>(0).map(Ptr)) else { return };
    // SAFETY: the piece lies in both, and is one task's.
    runs(call, ranks, |whole, part, n| unsafe { blocks.slice(part, n).copy_from_slice(x.slice(whole, n)) });
}

/// x `[b, s, p]` of blocks `[a, c, b, w]`.
pub fn join<T: Float>(call: Call, ranks: usize) {
    let (blocks, Some(x)) = (Ptr(call.input::<T>(0)), call.output::<T>(0).map(Ptr)) else { return };
    // SAFETY: as above.
    runs(call, ranks, |whole, part, n| unsafe { x.slice(whole, n).copy_from_slice(blocks.slice(part, n)) });
}

/// Where every piece stands in x and in blocks, and how many elements it has: what a part has of a section, at one position.
fn runs(call: Call, ranks: usize, copy: impl Fn(usize, usize, usize) + Sync) {
    let [parts, rows, batch, p, w] = ["parts", "rows", "batch", "packed", "part"].map(|name| call.size(name));
    // Sections are those of the input.
    let of_input: usize = call.bound.columns.iter().sum();
    call.rows(rows * batch, |first, last| {
        for (c, b) in (first..last).map(|row| (row / batch, row % batch)) {
            let x = (b * rows + position_in_ranks(c, rows, ranks)) * p;
            for a in 0..parts {
                let mut at = 0;
                for n in call.bound.columns.iter().map(|n| n * w / of_input) {
                    copy(x + at * parts + a * n, ((a * rows + c) * batch + b) * w + at, n);
                    at += n;
                }
            }
        }
    });
}
