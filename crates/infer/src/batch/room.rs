//! Pages of the cache: those that texts take as they grow, share and give back.

use super::{Table, Text, TextBatch};
use crate::{InferError, Result};
use lockstep_plan::{CachePlan, PAGE};

impl TextBatch {
    /// Lets a text begin with the blocks that others have left, before anything of it is read. Layers with a sliding window have given theirs back.
    pub(super) fn share(&mut self, i: usize) {
        let text = &mut self.running[i];
        if std::mem::replace(&mut text.looked, true) || text.cached > 0 || self.cache.window.is_some() {
            return;
        }
        // The last token is read in any case: its logits are wanted.
        for block in text.tokens[..text.tokens.len() - 1].chunks_exact(PAGE) {
            let Some((id, page)) = self.prefixes.join(text.shared.last().copied(), block) else { break };
            set(&mut self.tables, &self.cache, 0, (text.slot, text.shared.len()), page);
            text.shared.push(id);
            text.pages[0].push(Some(page));
            text.cached += PAGE;
            self.counts.shared += PAGE as u64;
        }
    }

    /// Leaves the whole blocks of a prompt to others.
    pub(super) fn keep_beginning(&mut self, i: usize) {
        let text = &mut self.running[i];
        if self.cache.window.is_some() {
            return;
        }
        let whole = text.cached.min(text.request.prompt.len()) / PAGE;
        while text.shared.len() < whole {
            let k = text.shared.len();
            let Some(page) = text.pages[0][k] else { return };
            // Where another text was faster, this one keeps its own pages.
            let added = self.prefixes.add(text.shared.last().copied(), &text.tokens[k * PAGE..(k + 1) * PAGE], page);
            let Some(id) = added else { return };
            text.shared.push(id);
        }
    }

    /// Pages for the next tokens of a text. Where none is left, the youngest texts give way, this one included: then it is not among those that run, and this is
    /// false.
    pub(super) fn make_room(&mut self, i: usize, count: usize) -> Result<bool> {
        loop {
            if self.grow(i, count) {
                return Ok(true);
            }
            let Some(mut last) = self.running.pop() else { return Ok(false) };
            if self.running.is_empty() {
                return Err(InferError::Unusable {
                    problem: "the KV cache has no page for the only text".into(),
                    hint: "this is a bug: please report it".into(),
                });
            }
            self.counts.recomputed += 1;
            self.release(&mut last);
            self.waiting.push_front(last);
            if i == self.running.len() {
                return Ok(false);
            }
        }
    }

    /// Gives a text pages for its next tokens, and takes back those that no window reaches.
    pub(super) fn grow(&mut self, i: usize, count: usize) -> bool {
        let text = &mut self.running[i];
        let end = (text.cached + count).div_ceil(PAGE);
        for (kind, _) in &self.tables {
            let kind = *kind;
            let window = self.cache.window.filter(|_| kind == 1);
            let first = window.map_or(0, |w| (text.cached + 1).saturating_sub(w) / PAGE);
            for page in text.pages[kind].iter_mut().take(first) {
                page.take().into_iter().for_each(|page| self.free[kind].give(page));
            }
            for block in first..end {
                while text.pages[kind].len() <= block {
                    text.pages[kind].push(None);
                }
                if text.pages[kind][block].is_none() {
                    let page = match (self.free[kind].take(), kind) {
                        (None, 0) => self.prefixes.forget(),
                        (page, _) => page,
                    };
                    let Some(page) = page else { return false };
                    text.pages[kind][block] = Some(page);
                }
            }
        }
        for (kind, table) in &mut self.tables {
            for (block, page) in text.pages[*kind].iter().enumerate() {
                let at = text.slot * self.cache.shape.blocks + block;
                if let Some(page) = page.filter(|page| table.pages[at] != *page) {
                    table.pages[at] = page;
                    table.changed = true;
                }
            }
        }
        true
    }

    /// Takes the pages and the slot of a text back.
    pub(super) fn release(&mut self, text: &mut Text) {
        for (kind, pages) in text.pages.iter_mut().enumerate() {
            // Those of shared blocks stay with them.
            let own = if kind == 0 { text.shared.len() } else { 0 };
            pages.drain(..).skip(own).flatten().for_each(|page| self.free[kind].give(page));
        }
        text.shared.drain(..).rev().for_each(|id| self.prefixes.leave(id));
        self.slots.push(std::mem::replace(&mut text.slot, usize::MAX));
        (text.cached, text.looked) = (0, false);
    }
}

pub(super) fn set(
    tables: &mut [(usize, Table)],
    cache: &CachePlan,
    kind: usize,
    (slot, block): (usize, usize),
    page: u32,
) {
    for (_, table) in tables.iter_mut().filter(|(of, _)| *of == kind) {
        table.pages[slot * cache.shape.blocks + block] = page;
        table.changed = true;
    }
}
