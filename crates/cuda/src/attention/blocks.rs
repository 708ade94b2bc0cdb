//! Blocks of queries and keys: what cuDNN computes of attention over parts of sequences.
//!
//! Context-parallel ranks have queries and keys of two runs of positions each. Where nothing but the causal mask cuts them, a query sees
//! all keys of a run, those up to its own place in it, or none.

use lockstep_exec::bound::Bound;
use lockstep_ir::Span;
use lockstep_ir::blocks::PartedAttention;

/// Queries over keys: rows of both parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The first query.
    pub query: usize,
    /// How many.
    pub queries: usize,
    /// The first key.
    pub key: usize,
    /// How many.
    pub keys: usize,
    /// Whether a query sees the keys up to its own place, rather than all.
    pub causal: bool,
}

impl Block {
    /// The same block with another after it, where they are one.
    fn joined(&self, next: &Block) -> Option<Block> {
        let (rows, columns) = ((self.query, self.queries), (self.key, self.keys));
        let (more_rows, more_columns) = ((next.query, next.queries), (next.key, next.keys));
        if self.causal || next.causal {
            return None;
        }
        if columns == more_columns && rows.0 + rows.1 == more_rows.0 {
            return Some(Block { queries: rows.1 + more_rows.1, ..*self });
        }
        let follows = rows == more_rows && columns.0 + columns.1 == more_columns.0;
        follows.then(|| Block { keys: columns.1 + more_columns.1, ..*self })
    }
}

/// The positions of an instruction's keys, and how many a sequence has.
pub fn keys(parted: PartedAttention, bound: &Bound) -> (Span, usize) {
    (parted.step.map_or(Span::ALL, |step| bound.positions_before(step)), bound.size("keys"))
}

/// The blocks of an instruction; none where something cuts them besides the causal mask.
pub fn of(bound: &Bound, parted: PartedAttention) -> Option<Vec<Block>> {
    let documents = bound.inputs.len() == bound.op.spec().inputs.len();
    let uncut = parted.window.is_none() && !documents;
    uncut.then(|| blocks((bound.positions(), bound.size("seq")), keys(parted, bound))).flatten()
}

/// The blocks of queries and keys at these positions, in ascending order of queries.
fn blocks((positions, queries): (Span, usize), (key_positions, keys): (Span, usize)) -> Option<Vec<Block>> {
    if positions == key_positions && queries == keys {
        // Places are in the order of positions.
        return Some(vec![Block { query: 0, queries, key: 0, keys, causal: true }]);
    }
    let mut found: Vec<Block> = Vec::new();
    let mut add = |block: Block| match found.last_mut() {
        Some(last) if last.joined(&block).is_some() => *last = last.joined(&block).unwrap_or(block),
        _ => found.push(block),
    };
    for q in positions.runs(queries).into_iter().filter(|run| run.len > 0) {
        for k in key_positions.runs(keys).into_iter().filter(|run| run.len > 0) {
            // Keys before the first query are seen by all.
            let before = q.whole.saturating_sub(k.whole).min(k.len);
            if before > 0 {
                add(Block { query: q.local, queries: q.len, key: k.local, keys: before, causal: false });
            }
            let (first, rest) = (k.whole + before, k.len - before);
            if rest > 0 && first < q.whole + q.len {
                if first != q.whole || rest < q.len {
                    return None;
                }
                add(Block { query: q.local, queries: q.len, key: k.local + before, keys: q.len, causal: true });
            }
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rank `index` of `ranks` has two chunks of `chunk` positions, in zig-zag order.
    fn part(index: usize, ranks: usize, chunk: usize) -> Span {
        Span { first: index * chunk, count: chunk, then: (2 * ranks - 1 - index) * chunk }
    }

    fn print(blocks: &[Block]) -> Vec<String> {
        let one = |b: &Block| {
            let causal = if b.causal { " causal" } else { "" };
            format!("{}+{} over {}+{}{causal}", b.query, b.queries, b.key, b.keys)
        };
        blocks.iter().map(one).collect()
    }

    #[test]
    fn a_step_of_the_ring_is_one_block() {
        let step = |index, from| print(&blocks((part(index, 4, 8), 16), (part(from, 4, 8), 16)).unwrap());
        assert_eq!(step(1, 1), ["0+16 over 0+16 causal"]);
        assert_eq!(step(2, 1), ["0+16 over 0+8"]);
        assert_eq!(step(1, 2), ["8+8 over 0+16"]);
    }

    #[test]
    fn over_gathered_keys_every_run_has_those_before_it_and_its_own() {
        let gathered = |index| print(&blocks((part(index, 2, 8), 16), (Span::ALL, 32)).unwrap());
        assert_eq!(gathered(0), ["0+8 over 0+8 causal", "8+8 over 0+24", "8+8 over 24+8 causal"]);
        assert_eq!(gathered(1), ["0+8 over 0+8", "0+8 over 8+8 causal", "8+8 over 0+16", "8+8 over 16+8 causal"]);
    }

    #[test]
    fn blocks_have_every_query_and_key_that_the_mask_leaves_once() {
        for (ranks, chunk) in [(2, 3), (3, 2), (4, 1)] {
            for index in 0..ranks {
                let keys = (0..ranks).map(|from| (part(from, ranks, chunk), 2 * chunk));
                for (key_positions, keys) in keys.chain([(Span::ALL, 2 * ranks * chunk)]) {
                    let queries = part(index, ranks, chunk);
                    let found = blocks((queries, 2 * chunk), (key_positions, keys)).unwrap();
                    for (s, t) in (0..2 * chunk).flat_map(|s| (0..keys).map(move |t| (s, t))) {
                        let has = |b: &&Block| {
                            let inside =
                                (b.query..b.query + b.queries).contains(&s) && (b.key..b.key + b.keys).contains(&t);
                            inside && (!b.causal || t - b.key <= s - b.query)
                        };
                        let sees = key_positions.entry(t) <= queries.entry(s);
                        assert_eq!(found.iter().filter(has).count(), usize::from(sees), "{s} {t}: {found:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn runs_that_overlap_otherwise_are_left_to_our_own_kernels() {
        let at = |first| Span { first, count: 8, then: 32 };
        assert_eq!(blocks((at(0), 16), (at(4), 16)), None);
    }
}
