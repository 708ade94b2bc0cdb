//! Several files as one run of tokens.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use lockstep_ir::op::IGNORED_TARGET;

use crate::token_file::check_range;
use crate::{Document, Result, Shard, TokenFile};

/// Files of tokens end to end. Where one ends and the next begins cannot be told from the tokens: a sequence may span both.
#[derive(Debug)]
pub struct TokenStream {
    shards: Vec<Arc<dyn TokenFile>>,
    /// Where each shard begins, and after the last the number of all tokens.
    starts: Vec<u64>,
    /// Whether any of them is in a bucket.
    remote: bool,
}

impl TokenStream {
    /// Joins shards, of which there is at least one.
    ///
    /// # Panics
    ///
    /// If there is none, or they hold more than 2⁶⁴ tokens.
    pub fn new(shards: Vec<Arc<dyn TokenFile>>) -> Self {
        assert!(!shards.is_empty(), "a stream has at least one shard");
        let mut starts = vec![0u64];
        for shard in &shards {
            let end = starts[starts.len() - 1].checked_add(shard.len());
            starts.push(end.expect("mapped files hold fewer than 2⁶⁴ tokens"));
        }
        let remote = shards.iter().any(|shard| shard.is_remote());
        TokenStream { shards, starts, remote }
    }

    /// Number of tokens.
    pub fn len(&self) -> u64 {
        self.starts[self.shards.len()]
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The files, in order.
    pub fn shards(&self) -> &[Arc<dyn TokenFile>] {
        &self.shards
    }

    /// The file of the first shard, to name the stream by.
    pub fn path(&self) -> &Path {
        self.shards[0].path()
    }

    /// Reads every shard and compares its hash with its header's, as [`TokenFile::verify_with`] does.
    pub fn verify_with(&self, stop: &AtomicBool, read: &mut dyn FnMut(u64)) -> Result<()> {
        self.shards.iter().try_for_each(|shard| shard.verify_with(stop, read))
    }

    /// Bytes that [`verify_with`](Self::verify_with) reads.
    pub fn payload_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.payload_bytes()).sum()
    }

    /// Copies the tokens from `offset` on until `tokens` is full. Does not allocate.
    ///
    /// # Panics
    ///
    /// If the range ends after the last token.
    pub fn copy(&self, mut offset: u64, mut tokens: &mut [u32]) {
        check_range(offset, tokens.len(), self.len());
        while !tokens.is_empty() {
            let shard = self.shard_at(offset);
            let left = self.starts[shard + 1] - offset;
            let here = tokens.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let (now, rest) = tokens.split_at_mut(here);
            self.shards[shard].copy(offset - self.starts[shard], now);
            offset += here as u64;
            tokens = rest;
        }
    }

    /// Whether any of it is in a bucket.
    pub fn is_remote(&self) -> bool {
        self.remote
    }

    /// Says that these tokens will be copied soon: what is in a bucket is fetched by then, if it can be.
    pub fn expect(&self, offset: u64, count: u64) {
        let end = offset.saturating_add(count).min(self.len());
        let first = self.starts.partition_point(|&start| start <= offset).saturating_sub(1);
        for (shard, &base) in self.shards.iter().zip(&self.starts).skip(first).take_while(|(_, base)| **base < end) {
            let (from, to) = (offset.max(base) - base, (end - base).min(shard.len()));
            if from < to {
                shard.expect(from, to - from);
            }
        }
    }

    /// Refuses what was read since the last call where some of it did not come, which only happens with what is in a bucket.
    pub fn require_read(&self) -> Result<()> {
        if !self.remote {
            return Ok(());
        }
        self.shards.iter().find_map(|shard| shard.failure()).map_or(Ok(()), Err)
    }

    /// Copies the token after each of those from `offset` on, what is to be predicted; tokens of prompts are
    /// [`IGNORED_TARGET`]. Does not allocate.
    ///
    /// # Panics
    ///
    /// If the range ends after the last token.
    pub fn copy_targets(&self, offset: u64, targets: &mut [u32]) {
        self.copy(offset + 1, targets);
        self.ignored_targets(offset, targets.len(), |range| targets[range].fill(IGNORED_TARGET));
    }

    /// How many of the `count` targets from `offset` on are to be predicted: all but those of prompts. Reads no token.
    ///
    /// # Panics
    ///
    /// If the range ends after the last token.
    pub fn counted_targets(&self, offset: u64, count: usize) -> u64 {
        let mut counted = count;
        self.ignored_targets(offset, count, |range| counted -= range.len());
        counted as u64
    }

    /// Calls `visit` with the ranges that prompts have of the `count` targets from `offset` on. They do not overlap.
    fn ignored_targets(&self, offset: u64, count: usize, mut visit: impl FnMut(Range<usize>)) {
        let (from, to) = (offset + 1, offset + 1 + count as u64);
        if count == 0 || !self.shards.iter().any(|shard| shard.has_prompts()) {
            return;
        }
        let mut ignore = |document: Document| {
            let end = document.start.saturating_add(document.prompt).clamp(from, to);
            visit((document.start.clamp(from, end) - from) as usize..(end - from) as usize);
        };
        ignore(self.document_at(from));
        self.entries_in(from + 1, to, ignore);
    }

    /// Calls `visit` with the place of the last token of each document that ends among the `count` tokens from `from` on, counted
    /// from `from`. It is an EOS token, but of a conversation whatever its template writes last.
    pub fn last_places(&self, from: u64, count: u64, mut visit: impl FnMut(u64)) {
        let to = from + count;
        self.documents_beginning_in(from + 1, to + 1, |document| visit(document.start - 1 - from));
        if count > 0 && to == self.len() {
            visit(count - 1);
        }
    }

    /// Calls `visit` with every document that begins in `from..to`, in order. Does not allocate.
    pub fn documents_beginning_in(&self, from: u64, to: u64, mut visit: impl FnMut(Document)) {
        self.entries_in(from, to, |document| {
            if !document.continued {
                visit(document);
            }
        });
    }

    /// The same with the places where a document goes on: with another prompt, or in another shard.
    fn entries_in(&self, from: u64, to: u64, mut visit: impl FnMut(Document)) {
        let first = self.starts.partition_point(|&start| start <= from).saturating_sub(1);
        for (shard, &base) in self.shards.iter().zip(&self.starts).skip(first) {
            if base >= to {
                break;
            }
            let mut index = shard.first_document_from(from.saturating_sub(base));
            while index < shard.documents() {
                let document = shard.document(index);
                let start = base.saturating_add(document.start);
                if start >= to {
                    break;
                }
                if !shard.is_empty_document(index) {
                    visit(Document { start, ..document });
                }
                index += 1;
            }
        }
    }

    /// Writes, for each of the tokens from `offset` on, where among them its document starts: 0 for the document that they
    /// begin with, wherever that one began. Does not allocate.
    pub fn document_starts(&self, offset: u64, starts: &mut [u32]) {
        starts.fill(0);
        self.documents_beginning_in(offset + 1, offset + starts.len() as u64, |document| {
            let start = (document.start - offset) as usize;
            starts[start..].fill(start as u32);
        });
    }

    /// The document that the token at `offset` belongs to; its start is at most `offset`, and where it is `continued`
    /// it began earlier still.
    ///
    /// # Panics
    ///
    /// If there is no such token.
    pub fn document_at(&self, offset: u64) -> Document {
        assert!(offset < self.len(), "token {offset} is outside a stream of {}", self.len());
        let shard = self.shard_at(offset);
        let base = self.starts[shard];
        let after = self.shards[shard].first_document_from(offset - base + 1);
        let document = self.shards[shard].document(after.saturating_sub(1));
        Document { start: base.saturating_add(document.start), ..document }
    }

    /// The file that holds the token at `offset`.
    ///
    /// # Panics
    ///
    /// If there is no such token.
    pub fn file_at(&self, offset: u64) -> &Path {
        self.shards[self.shard_at(offset)].path()
    }

    /// The shard that holds the token at `offset`.
    fn shard_at(&self, offset: u64) -> usize {
        self.starts.partition_point(|&start| start <= offset) - 1
    }
}

impl From<Shard> for TokenStream {
    fn from(shard: Shard) -> Self {
        TokenStream::new(vec![Arc::new(shard)])
    }
}
