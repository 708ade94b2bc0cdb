//! Pages of a KV cache: who has them, and which hold the beginning of a text that another text shares.
//!
//! A page is one text's, or holds a whole block of tokens at the beginning of prompts: then any text that begins with the same tokens may read it. Such
//! blocks form a tree by what stands before them, and are compared token by token. A block that no text reads stays until its page is
//! wanted.

use std::collections::HashMap;

/// Pages of one kind of layers that are free.
#[derive(Clone, Debug)]
pub(crate) struct Free {
    pages: Vec<u32>,
}

impl Free {
    pub fn new(pages: usize) -> Self {
        // The first is taken first.
        Self { pages: (0..pages as u32).rev().collect() }
    }

    pub fn count(&self) -> usize {
        self.pages.len()
    }

    pub fn take(&mut self) -> Option<u32> {
        self.pages.pop()
    }

    pub fn give(&mut self, page: u32) {
        self.pages.push(page);
    }
}

/// A block of tokens that texts share.
#[derive(Debug)]
struct Shared {
    before: Option<usize>,
    tokens: Box<[u32]>,
    page: u32,
    /// Texts that read it, and blocks that follow it.
    readers: usize,
    behind: usize,
    /// When it was read last.
    read: u64,
}

/// Blocks at the beginning of texts, by what stands before them.
#[derive(Debug, Default)]
pub(crate) struct Prefixes {
    blocks: Vec<Option<Shared>>,
    known: HashMap<(Option<usize>, Box<[u32]>), usize>,
    reads: u64,
}

impl Prefixes {
    /// The block that a text has after another, if it is known, for one more reader; and its page.
    pub fn join(&mut self, before: Option<usize>, tokens: &[u32]) -> Option<(usize, u32)> {
        let &id = self.known.get(&(before, tokens.into()))?;
        self.reads += 1;
        let block = self.blocks[id].as_mut()?;
        block.readers += 1;
        block.read = self.reads;
        Some((id, block.page))
    }

    /// Makes a block of a text known, whose page is the tree's from here on, with that text as its reader; none where it is known already.
    pub fn add(&mut self, before: Option<usize>, tokens: &[u32], page: u32) -> Option<usize> {
        let key = (before, Box::from(tokens));
        if self.known.contains_key(&key) {
            return None;
        }
        self.reads += 1;
        let block = Shared { before, tokens: key.1.clone(), page, readers: 1, behind: 0, read: self.reads };
        let id = self.blocks.iter().position(Option::is_none).unwrap_or_else(|| {
            self.blocks.push(None);
            self.blocks.len() - 1
        });
        self.blocks[id] = Some(block);
        self.known.insert(key, id);
        if let Some(before) = before.and_then(|b| self.blocks[b].as_mut()) {
            before.behind += 1;
        }
        Some(id)
    }

    /// A text that reads a block does so no more.
    pub fn leave(&mut self, id: usize) {
        if let Some(block) = self.blocks[id].as_mut() {
            block.readers -= 1;
        }
    }

    /// Blocks that no text reads: their pages can be had.
    pub fn unread(&self) -> usize {
        self.blocks.iter().flatten().filter(|b| b.readers == 0).count()
    }

    /// Forgets the block that was not read for longest, of those that nothing needs, and gives its page.
    pub fn forget(&mut self) -> Option<u32> {
        let unused = |(id, block): (usize, &Option<Shared>)| {
            let block = block.as_ref().filter(|b| b.readers == 0 && b.behind == 0)?;
            Some((block.read, id))
        };
        let (_, id) = self.blocks.iter().enumerate().filter_map(unused).min()?;
        let Shared { before, tokens, page, .. } = self.blocks[id].take()?;
        self.known.remove(&(before, tokens));
        if let Some(before) = before.and_then(|b| self.blocks[b].as_mut()) {
            before.behind -= 1;
        }
        Some(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_beginnings_share_their_blocks_and_others_do_not() {
        let mut prefixes = Prefixes::default();
        let first = prefixes.add(None, &[1, 2], 5).unwrap();
        let second = prefixes.add(Some(first), &[3, 4], 6).unwrap();
        assert_eq!(prefixes.add(None, &[1, 2], 7), None);
        assert_eq!(prefixes.join(None, &[1, 2]), Some((first, 5)));
        assert_eq!(prefixes.join(Some(first), &[3, 4]), Some((second, 6)));
        // The same tokens after others are another block.
        assert_eq!(prefixes.join(None, &[3, 4]), None);
        assert_eq!(prefixes.join(Some(first), &[3, 5]), None);
    }

    #[test]
    fn a_block_is_forgotten_once_nothing_reads_it_or_stands_behind_it() {
        let mut prefixes = Prefixes::default();
        let first = prefixes.add(None, &[1], 5).unwrap();
        let second = prefixes.add(Some(first), &[2], 6).unwrap();
        let other = prefixes.add(None, &[9], 7).unwrap();
        assert_eq!(prefixes.forget(), None);
        prefixes.leave(first);
        assert_eq!((prefixes.unread(), prefixes.forget()), (1, None));
        prefixes.leave(other);
        prefixes.leave(second);
        prefixes.join(None, &[9]);
        prefixes.leave(other);
        // The one that was read last stays longest.
        assert_eq!([prefixes.forget(), prefixes.forget(), prefixes.forget()], [Some(6), Some(5), Some(7)]);
        assert_eq!(prefixes.join(None, &[1]), None);
    }
}
