//! How much of attention context-parallel ranks compute: tiles that a mask leaves something of.

use crate::program::{Entry, Instr, Offsets, StepProgram};
use crate::{Op, Run, Span};

/// Positions of a block, of queries and of keys. Blocks are counted from the start of every chunk.
pub const BLOCK: usize = 128;

/// Blocks of attention that each context-parallel rank computes in an entry, by index; none where no attention is split over ranks. Where documents
/// start is known on the device only: what they mask is counted.
pub fn attention_blocks(program: &StepProgram, entry: &Entry) -> Vec<u64> {
    let mut ranks: Vec<u64> = Vec::new();
    // Layers are alike.
    let mut known: Vec<(Op, &Offsets, usize, Vec<u64>)> = Vec::new();
    for (s, segment) in program.segments.iter().enumerate() {
        let runs = entry.schedule.iter().filter(|slot| slot.segment == s).count() as u64;
        for instr in segment.instrs.iter().filter(|_| runs > 0) {
            let (Some(mask), Some(offsets)) = (PartedAttention::of(&instr.op), &instr.offsets) else { continue };
            let (rows, heads) = size(instr);
            let same = |(op, o, r, _): &&(Op, &Offsets, usize, Vec<u64>)| (*op, *o, *r) == (instr.op, offsets, rows);
            let each = match known.iter().find(same) {
                Some((.., each)) => each.clone(),
                None => {
                    let each: Vec<u64> = (0..offsets.parts.len()).map(|i| mask.blocks(offsets, i, rows)).collect();
                    known.push((instr.op, offsets, rows, each.clone()));
                    each
                }
            };
            ranks.resize(each.len(), 0);
            ranks.iter_mut().zip(each).for_each(|(sum, blocks)| *sum += runs * heads * blocks);
        }
    }
    ranks
}

/// The same of one head and layer, for a sequence whose documents start where `starts` says for each position. Parts of the sequence are
/// in zig-zag order.
pub fn document_blocks(starts: &[u32], ranks: usize, window: Option<usize>) -> Vec<u64> {
    let len = starts.len() / (2 * ranks).max(1);
    let chunk = |i: usize| Run { whole: i * len, local: 0, len };
    // Documents stand in order: the first query of a block sees the first key.
    let seen = |query: usize| first_seen(query, window).max((starts[query] as usize).min(query));
    let of = |i: usize| (0..2 * ranks).map(|k| between(chunk(i), chunk(k), &seen)).sum::<u64>();
    (0..ranks).map(|i| of(i) + of(2 * ranks - 1 - i)).collect()
}

/// Rows of a rank's queries, and how often they stand there: heads of all sequences.
fn size(instr: &Instr) -> (usize, u64) {
    let types: Vec<_> = instr.inputs.iter().map(|arg| &arg.ty).collect();
    instr.op.bind(&types).map_or((0, 0), |dims| (dims.size("seq"), dims.product("batch heads") as u64))
}

/// What an op says of attention over parts of sequences: which keys queries see, and of which rank.
#[derive(Clone, Copy, Debug)]
pub struct PartedAttention {
    /// Sliding window.
    pub window: Option<usize>,
    /// How far the keys have come around the ring; `None` where they are all there.
    pub step: Option<usize>,
    /// Whether it is the gradient.
    pub backward: bool,
}

impl PartedAttention {
    /// None where the op is another.
    pub fn of(op: &Op) -> Option<Self> {
        let (Op::PartAttention { window, ring } | Op::PartAttentionGrad { window, ring }) = *op else { return None };
        let backward = matches!(op, Op::PartAttentionGrad { .. });
        Some(Self { window, step: ring.map(|ring| ring.step), backward })
    }

    /// Blocks of one head of a sequence on a rank.
    fn blocks(&self, offsets: &Offsets, index: usize, rows: usize) -> u64 {
        let n = offsets.parts.len();
        let chunks = |part: Span| part.runs(rows).into_iter().filter(|run| run.len > 0);
        let keys: Vec<Run> = match self.step {
            Some(step) => chunks(offsets.parts[(index + n - step % n) % n]).collect(),
            None => offsets.parts.iter().flat_map(|part| chunks(*part)).collect(),
        };
        let seen = |query| first_seen(query, self.window);
        let of_run = |queries: Run| keys.iter().map(|keys| between(queries, *keys, &seen)).sum::<u64>();
        chunks(offsets.parts[index]).map(of_run).sum()
    }
}

/// The first position that the query at this one sees.
fn first_seen(query: usize, window: Option<usize>) -> usize {
    (query + 1).saturating_sub(window.unwrap_or(usize::MAX).max(1))
}

/// Blocks between a run of queries and one of keys; `seen` gives the first position that a query sees.
fn between(queries: Run, keys: Run, seen: &dyn Fn(usize) -> usize) -> u64 {
    let row = |q: usize| {
        let (first, end) = (queries.whole + q, queries.whole + queries.len.min(q + BLOCK));
        let from = seen(first).saturating_sub(keys.whole) / BLOCK;
        let to = end.saturating_sub(keys.whole).min(keys.len);
        to.div_ceil(BLOCK).saturating_sub(from) as u64
    };
    (0..queries.len).step_by(BLOCK).map(row).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Axis, DType, Dim, Mesh, MeshAxis, Placement, Sharding, TensorType};

    /// Blocks of every rank, over all steps of a ring or over all keys.
    fn blocks(seq: usize, cp: usize, window: Option<usize>, ring: bool) -> Vec<u64> {
        let mesh = Mesh::ONE.with(MeshAxis::Cp, cp);
        let ty = TensorType::new(DType::F32, [Dim::new(Axis::Seq, seq)]);
        let split = Sharding::REPLICATED.with(MeshAxis::Cp, Placement::Split(0));
        let offsets = Offsets::new(&ty, &split, 0, &mesh).unwrap();
        let steps = if ring { (0..cp).map(Some).collect() } else { vec![None] };
        let of = |step: &Option<usize>, index| {
            PartedAttention { window, step: *step, backward: false }.blocks(&offsets, index, seq / cp)
        };
        (0..cp).map(|index| steps.iter().map(|step| of(step, index)).sum()).collect()
    }

    #[test]
    fn causal_attention_is_the_same_work_on_every_rank() {
        for (seq, cp) in [(1024, 2), (32768, 4), (1000, 5), (1536, 3), (8192, 8)] {
            let ring = blocks(seq, cp, None, true);
            assert!(ring.iter().all(|n| *n == ring[0]), "{seq} over {cp}: {ring:?}");
            assert_eq!(blocks(seq, cp, None, false), ring, "gathered");
        }
        // Half of 256 × 256 blocks, with the diagonal whole, in four.
        assert_eq!(blocks(32768, 4, None, true), [256 * 257 / 2 / 4; 4]);
    }

    #[test]
    fn a_window_leaves_ranks_unequal_work() {
        let windowed = blocks(4096, 2, Some(600), true);
        assert_ne!(windowed[0], windowed[1]);
        assert!(windowed.iter().sum::<u64>() < blocks(4096, 2, None, true).iter().sum());
        // Keys of a window that is one rank's own, and where chunks meet.
        assert_eq!(blocks(1024, 2, Some(1), true), [4, 4]);
    }

    #[test]
    fn documents_leave_ranks_unequal_work() {
        let one = vec![0; 4096];
        assert_eq!(document_blocks(&one, 2, None), blocks(4096, 2, None, true));
        assert_eq!(document_blocks(&one, 4, Some(600)), blocks(4096, 4, Some(600), true));
        // A long document first: the rank that has its end has most of it.
        let starts: Vec<u32> = (0..4096).map(|p| if p < 2048 { 0 } else { p / 128 * 128 }).collect();
        // Chunks of 1,024: the first has 36 blocks, the second 100, the last two 8 each.
        assert_eq!(document_blocks(&starts, 2, None), [36 + 8, 100 + 8]);
    }
}
