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
            let (Some(mask), Some(offsets)) = (Mask::of(&instr.op), &instr.offsets) else { continue };
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

/// Rows of a rank's queries, and how often they stand there: heads of all sequences.
fn size(instr: &Instr) -> (usize, u64) {
    let types: Vec<_> = instr.inputs.iter().map(|arg| &arg.ty).collect();
    instr.op.bind(&types).map_or((0, 0), |dims| (dims.size('s'), dims.product("bq") as u64))
}

/// Which keys queries see, and of which rank.
struct Mask {
    window: Option<usize>,
    /// How far the keys have come around the ring; `None` where they are all there.
    step: Option<usize>,
}

impl Mask {
    fn of(op: &Op) -> Option<Self> {
        if let Op::RingAttention { window, step, .. } | Op::RingAttentionGrad { window, step, .. } = *op {
            return Some(Self { window, step: Some(step) });
        }
        let (Op::GatheredAttention { window } | Op::GatheredAttentionGrad { window }) = *op else { return None };
        Some(Self { window, step: None })
    }

    /// Blocks of one head of a sequence on a rank.
    fn blocks(&self, offsets: &Offsets, index: usize, rows: usize) -> u64 {
        let n = offsets.parts.len();
        let chunks = |part: Span| part.runs(rows).into_iter().filter(|run| run.len > 0);
        let keys: Vec<Run> = match self.step {
            Some(step) => chunks(offsets.parts[(index + n - step % n) % n]).collect(),
            None => offsets.parts.iter().flat_map(|part| chunks(*part)).collect(),
        };
        let of_run = |queries: Run| keys.iter().map(|keys| self.between(queries, *keys)).sum::<u64>();
        chunks(offsets.parts[index]).map(of_run).sum()
    }

    /// Blocks between a run of queries and one of keys.
    fn between(&self, queries: Run, keys: Run) -> u64 {
        let row = |q: usize| {
            let (first, end) = (queries.whole + q, queries.whole + queries.len.min(q + BLOCK));
            let seen = (first + 1).saturating_sub(self.window.unwrap_or(usize::MAX).max(1));
            let (from, to) = (seen.saturating_sub(keys.whole) / BLOCK, end.saturating_sub(keys.whole).min(keys.len));
            to.div_ceil(BLOCK).saturating_sub(from) as u64
        };
        (0..queries.len).step_by(BLOCK).map(row).sum()
    }
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
        let of = |step: &Option<usize>, index| Mask { window, step: *step }.blocks(&offsets, index, seq / cp);
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
}
