//! The ends of many texts, scored over a cache of pages.
//!
//! Texts come in groups: the answers of a question. What the answers of a question have in common is read once; then each answer is read after it, over the
//! keys and values of the answer before. Questions that begin alike share whole pages of their beginnings. A call of the model takes runs of
//! tokens of as many questions as it has room for. How long texts are is known before, so a question comes in when there are pages for all of it,
//! and none ever has to give way.

use crate::feed::{TextScore, losses};
use crate::generate::loaded;
use crate::pages::{Free, Prefixes};
use crate::state::{self, Weights};
use crate::tasks::Request;
use crate::{InferError, Result};
use lockstep_compile::MISSES;
use lockstep_config::Config;
use lockstep_exec::Executor;
use lockstep_host::Devices;
use lockstep_ir::StepProgram;
use lockstep_ir::op::IGNORED_TARGET;
use lockstep_model::names;
use lockstep_plan::{PAGE, ScoringShape, Target, scoring_program, scoring_runs};

/// A model in memory that scores the ends of texts.
pub struct TextScorer {
    executor: Box<dyn Executor>,
    shape: ScoringShape,
    blocks: usize,
    /// The tables of pages that the program has: they are the same for all layers.
    tables: Vec<&'static str>,
    pages: Vec<u32>,
    free: Free,
    prefixes: Prefixes,
    slots: Vec<usize>,
    read: u64,
}

/// A question under way.
struct Question<'a> {
    /// The number of its first text.
    first: usize,
    texts: &'a [Request],
    /// Tokens that are read once for all texts.
    common: usize,
    /// The text that is read now, and how many tokens of it are.
    text: usize,
    read: usize,
    slot: usize,
    pages: Vec<u32>,
    /// Blocks at its beginning that other questions may read too.
    shared: Vec<usize>,
    loss: f64,
    greedy: bool,
}

/// New tokens of a text.
struct Run {
    question: usize,
    text: usize,
    start: usize,
    tokens: Vec<u32>,
    targets: Vec<u32>,
    /// Whether it is the last of its text.
    ends: bool,
}

impl TextScorer {
    /// Loads a program for these texts, which come in groups of this many. A text has at least two tokens, and of these at least one is read before
    /// those that are scored. `tp` tensor-parallel ranks share the model.
    pub fn new(
        devices: &Devices,
        config: &Config,
        weights: Weights,
        (texts, groups): (&[Request], &[usize]),
        tp: usize,
    ) -> Result<Self> {
        let device = devices.device(Target::of(devices, config))?;
        let longest = texts.iter().map(read_tokens).max().unwrap_or(1);
        let runs = scoring_runs(devices, config, texts.iter().map(read_tokens).sum());
        let slots = runs.0.min(groups.len()).max(1);
        let blocks: Vec<usize> = questions(texts, groups).map(|(_, texts)| blocks_of(texts)).collect();
        let pages = blocks.windows(slots).map(|some| some.iter().sum()).max().unwrap_or(1).max(1);
        let mut shape = ScoringShape { context: longest, slots, pages, runs, tp };
        let (mut program, mut threads) = scoring_program(devices, config, &shape)?;
        // Ranks that are threads share the memory.
        let sharers = if devices.processes().is_some() { 1 } else { tp as u64 };
        if let Some(free) = device.available_bytes()?.map(|free| free / sharers)
            && program.arena_bytes > free - free / 16
        {
            let page_bytes = (cache_bytes(&program) / pages as u64).max(1);
            let room = (free - free / 16).saturating_sub(program.arena_bytes - cache_bytes(&program));
            shape.pages = ((room / page_bytes) as usize).clamp(longest.div_ceil(PAGE), pages);
            (program, threads) = scoring_program(devices, config, &shape)?;
        }
        let here = |name: &&str| program.tensor(name).is_some();
        let tables = [names::PAGES, names::WINDOW_PAGES].into_iter().filter(here).collect();
        let mut executor = loaded(devices, config, &program, threads)?;
        state::load(&program.tensors, executor.as_mut(), weights, config.train.seed)?;
        let blocks = longest.div_ceil(PAGE);
        Ok(Self {
            executor,
            shape,
            blocks,
            tables,
            pages: vec![0; slots * blocks],
            free: Free::new(shape.pages),
            prefixes: Prefixes::default(),
            slots: (0..slots).rev().collect(),
            read: 0,
        })
    }

    /// Bytes allocated.
    pub fn arena_bytes(&self) -> u64 {
        self.executor.arena_bytes()
    }

    /// Tokens that were read.
    pub fn tokens_read(&self) -> u64 {
        self.read
    }

    /// The score of every text. Calls `done` whenever another one is known.
    pub fn score(&mut self, texts: &[Request], groups: &[usize], done: &mut dyn FnMut()) -> Result<Vec<TextScore>> {
        let mut scores = vec![TextScore { loss: 0.0, greedy: true }; texts.len()];
        let mut waiting = questions(texts, groups).peekable();
        let mut running: Vec<Question> = Vec::new();
        loop {
            let mut runs = Vec::new();
            let mut next = 0;
            while runs.len() < self.shape.runs.0 {
                if next == running.len() {
                    let admitted = waiting.peek().and_then(|(first, texts)| self.admit(*first, texts));
                    let Some(question) = admitted else { break };
                    waiting.next();
                    running.push(question);
                }
                self.schedule(&mut running[next], next, &mut runs);
                next += 1;
            }
            if runs.is_empty() {
                break;
            }
            for (run, (loss, hits)) in runs.iter().zip(self.call(&runs, &running)?) {
                let question = &mut running[run.question];
                // What all answers have in common is not scored.
                question.loss += loss;
                question.greedy &= hits;
                if run.ends {
                    let greedy = std::mem::replace(&mut question.greedy, true);
                    scores[question.first + run.text] =
                        TextScore { loss: std::mem::replace(&mut question.loss, 0.0), greedy };
                    done();
                }
            }
            for question in running.extract_if(.., |question| question.text == question.texts.len()) {
                self.release(question);
            }
        }
        if waiting.peek().is_some() {
            return Err(InferError::Unusable {
                problem: "the KV cache has no page for the only question".into(),
                hint: "this is a bug: please report it".into(),
            });
        }
        Ok(scores)
    }

    /// Takes a question up where there is a slot, and pages for its longest text.
    fn admit<'a>(&mut self, first: usize, texts: &'a [Request]) -> Option<Question<'a>> {
        let slot = *self.slots.last()?;
        let common = common(texts);
        let mut pages = Vec::new();
        let mut shared: Vec<usize> = Vec::new();
        let known = texts.first().map_or(&[][..], |text| &text.tokens[..common]);
        for block in known.chunks_exact(PAGE) {
            let Some((id, page)) = self.prefixes.join(shared.last().copied(), block) else { break };
            shared.push(id);
            pages.push(page);
        }
        let own = blocks_of(texts) - shared.len();
        if self.free.count() + self.prefixes.unread() < own {
            shared.into_iter().rev().for_each(|id| self.prefixes.leave(id));
            return None;
        }
        let read = shared.len() * PAGE;
        pages.extend((0..own).filter_map(|_| self.free.take().or_else(|| self.prefixes.forget())));
        self.pages[slot * self.blocks..][..pages.len()].copy_from_slice(&pages);
        self.slots.pop();
        Some(Question { first, texts, common, text: 0, read, slot, pages, shared, loss: 0.0, greedy: true })
    }

    /// Adds runs of a question to a call, as far as there is room: what its texts have in common, and one text.
    fn schedule(&mut self, question: &mut Question, number: usize, runs: &mut Vec<Run>) {
        let text = &question.texts[question.text];
        let end = read_tokens(text);
        while runs.len() < self.shape.runs.0 && question.read < end {
            let start = question.read;
            let until = if start < question.common { question.common } else { end };
            let stop = until.min(start + self.shape.runs.1);
            let target = |at: usize| if at + 1 < text.context { IGNORED_TARGET } else { text.tokens[at + 1] };
            runs.push(Run {
                question: number,
                text: question.text,
                start,
                tokens: text.tokens[start..stop].to_vec(),
                targets: (start..stop).map(target).collect(),
                ends: stop == end,
            });
            self.read += (stop - start) as u64;
            question.read = stop;
        }
        // Runs of a call see what the call writes, so others may read these blocks from here on.
        while (question.shared.len() + 1) * PAGE <= question.read.min(question.common) {
            let k = question.shared.len();
            let block = &text.tokens[k * PAGE..(k + 1) * PAGE];
            let Some(id) = self.prefixes.add(question.shared.last().copied(), block, question.pages[k]) else { break };
            question.shared.push(id);
        }
        if question.read == end {
            (question.text, question.read) = (question.text + 1, question.common);
        }
    }

    /// Takes the pages and the slot of a question back. Pages of shared blocks stay with them.
    fn release(&mut self, question: Question) {
        question.pages[question.shared.len()..].iter().for_each(|page| self.free.give(*page));
        question.shared.iter().rev().for_each(|id| self.prefixes.leave(*id));
        self.slots.push(question.slot);
    }

    /// Of every run its loss, and whether greedy decoding gives its targets.
    fn call(&mut self, runs: &[Run], running: &[Question]) -> Result<Vec<(f64, bool)>> {
        let write = |executor: &mut dyn Executor, name: &str, numbers: &[u32]| {
            let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
            executor.write(name, 0, &bytes)
        };
        for table in &self.tables {
            write(self.executor.as_mut(), table, &self.pages)?;
        }
        let (batch, positions) = self.shape.runs;
        // Runs without tokens, and what follows those of a run, are not looked at.
        let (mut tokens, mut targets) = (vec![0; batch * positions], vec![IGNORED_TARGET; batch * positions]);
        let mut numbers = [vec![0; batch], vec![0; batch], vec![0; batch]];
        for (b, run) in runs.iter().enumerate() {
            tokens[b * positions..][..run.tokens.len()].copy_from_slice(&run.tokens);
            targets[b * positions..][..run.tokens.len()].copy_from_slice(&run.targets);
            let of_run = [run.start, run.tokens.len(), running[run.question].slot];
            numbers.iter_mut().zip(of_run).for_each(|(to, number)| to[b] = number as u32);
        }
        let [start, count, slot] = &numbers;
        let inputs = [
            (names::TOKENS, &tokens),
            (names::TARGETS, &targets),
            (names::START, start),
            (names::COUNT, count),
            (names::SLOT, slot),
        ];
        let name = |name| StepProgram::name_in(StepProgram::SCORE, name);
        for (of, numbers) in inputs {
            write(self.executor.as_mut(), &name(of), numbers)?;
        }
        self.executor.run(StepProgram::SCORE)?;
        let (bytes, misses) = (self.executor.read(&name(names::LOSS), 0)?, self.executor.read(&name(MISSES), 0)?);
        let misses: &[[u8; 4]] = misses.as_chunks().0;
        let hits = misses.chunks(positions).map(|run| run.iter().all(|miss| f32::from_le_bytes(*miss) == 0.0));
        Ok(losses(&bytes).zip(hits).collect())
    }
}

/// The texts of each question, with the number of the first.
fn questions<'a>(texts: &'a [Request], groups: &[usize]) -> impl Iterator<Item = (usize, &'a [Request])> {
    let firsts = groups.iter().scan(0, |next, count| {
        *next += count;
        Some((*next - count, *count))
    });
    firsts.map(|(first, count)| (first, &texts[first..first + count]))
}

/// Tokens of a text that are read: its last is predicted only.
fn read_tokens(text: &Request) -> usize {
    text.tokens.len() - 1
}

/// Pages that the longest of some texts has.
fn blocks_of(texts: &[Request]) -> usize {
    texts.iter().map(read_tokens).max().unwrap_or(0).div_ceil(PAGE)
}

/// Tokens that are read once for all texts of a question: those before the last that they have in common and that is not scored. The last itself
/// is read for every text, for what follows it differs.
fn common(texts: &[Request]) -> usize {
    let Some(first) = texts.first() else { return 0 };
    let alike = |text: &Request| text.tokens.iter().zip(&first.tokens).take_while(|(a, b)| a == b).count();
    texts.iter().map(|text| text.context.min(alike(text))).min().unwrap_or(0).saturating_sub(1)
}

/// Bytes of the keys and values of a program.
fn cache_bytes(program: &StepProgram) -> u64 {
    let caches = program.tensors.iter().filter(|tensor| tensor.name.ends_with("kv_cache"));
    caches.map(|tensor| tensor.ty.bytes()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(tokens: &[u32], context: usize) -> Request {
        Request { tokens: tokens.to_vec(), context }
    }

    #[test]
    fn what_texts_have_in_common_ends_before_the_last_token_of_the_question() {
        assert_eq!(common(&[text(&[1, 2, 3, 4], 3), text(&[1, 2, 3, 5], 3)]), 2);
        // Answers that begin alike are scored each.
        assert_eq!(common(&[text(&[1, 2, 9, 4], 2), text(&[1, 2, 9, 5], 2)]), 1);
        // Texts that were cut differently have nothing in common.
        assert_eq!(common(&[text(&[2, 3, 4, 4], 3), text(&[1, 2, 3, 5], 3)]), 0);
        assert_eq!(common(&[text(&[1, 2, 3, 4], 3), text(&[1, 2, 7, 5], 3)]), 1);
        assert_eq!(common(&[text(&[1, 2, 3, 4], 3)]), 2);
        assert_eq!(common(&[text(&[1, 2], 1)]), 0);
    }
}
