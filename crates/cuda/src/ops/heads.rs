//! Heads in parts, as an all-to-all of context-parallel ranks takes and gives them, and back.

use super::launch::{Launches, launches};
use crate::CudaError;
use crate::call::{Call, THREADS};
use crate::kernels::args;
use lockstep_ir::op::MOST_SECTIONS;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        SplitHeads { ranks, .. } => heads(call, ranks, false),
        JoinHeads { ranks } => heads(call, ranks, true),
    }
}

/// Heads in parts, blocks `[a, c, b, w]` of x `[b, s, p]`, or x of blocks.
unsafe fn heads(call: Call, ranks: usize, join: bool) -> Result<(), CudaError> {
    let Some(to) = call.output(0) else { return Ok(()) };
    let [parts, rows, batch] = ["parts", "rows", "batch"].map(|name| call.size(name));
    // What a part has of the sections.
    let of_part = |n: &usize| if join { *n } else { n / parts };
    let all_wide = call.bound.columns.iter().all(|n| call.wide(of_part(n)));
    let (name, pack) = match (all_wide, call.float().bytes()) {
        (true, _) => ("heads_16", call.pack()),
        (false, 4) => ("heads_4", 1),
        (false, _) => ("heads_2", 1),
    };
    let mut n = [0; MOST_SECTIONS];
    n.iter_mut().zip(&call.bound.columns).for_each(|(n, section)| *n = of_part(section) / pack);
    let threads = n.iter().sum::<usize>().next_multiple_of(32).clamp(32, THREADS);
    let args = args![call.input(0), to, rows, batch, parts, ranks, n[0], n[1], n[2], join];
    // SAFETY: every element of the one has its place in the other.
    unsafe { call.plain(("sections", name), [rows, parts, batch], threads, args) }
}
