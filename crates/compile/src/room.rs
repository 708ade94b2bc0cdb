//! Room between blocks of memory.

/// The lowest offset at which `bytes` stand apart from all blocks.
pub(crate) fn lowest(blocks: &mut [(u64, u64)], bytes: u64) -> u64 {
    blocks.sort_unstable();
    let mut at = 0;
    for &mut (start, stop) in blocks {
        if start >= at + bytes {
            break;
        }
        at = at.max(stop);
    }
    at
}
