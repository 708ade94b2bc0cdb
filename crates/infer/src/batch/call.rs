//! A call of the model: numbers in, tokens and logits out.

use super::{TextBatch, as_f32, is_greedy};
use crate::Result;
use lockstep_ir::StepProgram;
use lockstep_model::names;

impl TextBatch {
    /// The entry of `decode` that has this many rows.
    pub(super) fn entry(&self, rows: usize) -> &'static str {
        let enough = self.sizes.iter().find(|(size, _)| *size >= rows);
        enough.unwrap_or(&self.sizes[self.sizes.len() - 1]).1
    }

    pub(super) fn call_rows(&mut self, rows: &[Row]) -> Result<()> {
        let tokens: Vec<([u32; 1], usize, usize)> = rows.iter().map(|r| ([r.token], r.start, r.slot)).collect();
        let texts: Vec<(&[u32], usize, usize)> =
            tokens.iter().map(|(t, start, slot)| (&t[..], *start, *slot)).collect();
        self.call(self.entry(rows.len()), &texts, 1)
    }

    pub(super) fn write_tables(&mut self) -> Result<()> {
        for (_, table) in self.tables.iter_mut().filter(|(_, table)| table.changed) {
            let bytes: Vec<u8> = table.pages.iter().flat_map(|page| page.to_le_bytes()).collect();
            self.executor.write(table.name, 0, &bytes)?;
            table.changed = false;
        }
        Ok(())
    }

    /// Numbers of the rows of an entry, those without a text zero, as bytes.
    pub(super) fn padded(&self, entry: &str, numbers: impl Iterator<Item = usize>) -> Vec<u8> {
        let rows = self.sizes.iter().find(|(_, name)| *name == entry).map_or(1, |(rows, _)| *rows);
        let padded = numbers.chain(std::iter::repeat(0)).take(rows);
        padded.flat_map(|number| (number as u32).to_le_bytes()).collect()
    }

    /// Runs an entry on the new tokens of some texts, each with where they start and its slot. A text has room for this many.
    pub(super) fn call(&mut self, entry: &'static str, texts: &[(&[u32], usize, usize)], room: usize) -> Result<()> {
        self.write_tables()?;
        let rows = self.sizes.iter().find(|(_, name)| *name == entry).map_or(1, |(rows, _)| *rows);
        // What follows the tokens of a text, and rows without one, are not looked at.
        let mut tokens = vec![0u32; rows * room];
        let mut numbers = [vec![0u32; rows], vec![0u32; rows], vec![0u32; rows]];
        for (row, (new, start, slot)) in texts.iter().enumerate() {
            tokens[row * room..][..new.len()].copy_from_slice(new);
            for (to, number) in numbers.iter_mut().zip([*start, new.len(), *slot]) {
                to[row] = number as u32;
            }
        }
        let named = [names::START, names::COUNT, names::SLOT].into_iter().zip(&numbers);
        for (name, numbers) in named.chain([(names::TOKENS, &tokens)]) {
            let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
            self.executor.write(&StepProgram::name_in(entry, name), 0, &bytes)?;
        }
        Ok(self.executor.run(entry)?)
    }

    /// What an entry gave for these texts. Where all of them are greedy, logits stay on the device.
    pub(super) fn given(&self, entry: &str, texts: &[usize]) -> Result<Given> {
        let read = |name| self.executor.read(&StepProgram::name_in(entry, name), 0);
        let best = read(names::NEXT)?.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let logits = match texts.iter().all(|i| is_greedy(&self.running[*i].request)) {
            true => Vec::new(),
            false => as_f32(&read(names::LOGITS)?, self.compute),
        };
        Ok(Given { best, logits, vocabulary: self.vocabulary, known: self.known })
    }
}

/// What the model gives for the rows of a call: the most probable token of each, and logits where they are needed.
pub(super) struct Given {
    pub(super) best: Vec<u32>,
    logits: Vec<f32>,
    vocabulary: usize,
    known: usize,
}

impl Given {
    pub(super) fn row(&self, row: usize) -> (u32, &[f32]) {
        let logits = self.logits.get(row * self.vocabulary..).and_then(|rest| rest.get(..self.known));
        (self.best[row], logits.unwrap_or_default())
    }
}

/// A token of a text, where it stands, and the text's slot.
pub(super) struct Row {
    pub(super) token: u32,
    pub(super) start: usize,
    pub(super) slot: usize,
}
