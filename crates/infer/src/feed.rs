//! Sequences into a program's inputs, losses out of it.

use crate::tasks::Request;
use crate::{InferError, Result};
use lockstep_bucket::is_address;
use lockstep_compile::{MISSES, ROWS_BEYOND};
use lockstep_config::Config;
use lockstep_data::{DataError, Sampler, TokenStream};
use lockstep_exec::Executor;
use lockstep_exec::comm::processes::ProcessCommunicator;
use lockstep_host::{ProcessGroup, busy};
use lockstep_ir::op::IGNORED_TARGET;
use lockstep_ir::program::Tensor;
use lockstep_ir::{StepProgram, counter};
use lockstep_model::names;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Where sequences come from, by their index.
pub trait Sequences {
    /// The tokens that a sequence is a part of, and where among them it begins.
    fn source(&self, index: u64) -> (&TokenStream, u64);
}

impl Sequences for Sampler {
    fn source(&self, index: u64) -> (&TokenStream, u64) {
        Sampler::source(self, index)
    }
}

/// The sequences of a text one after the other.
pub(crate) struct Stretch<'a> {
    pub tokens: &'a TokenStream,
    /// The first token of the first.
    pub from: u64,
    /// Tokens of a sequence.
    pub seq: usize,
}

impl Sequences for Stretch<'_> {
    fn source(&self, index: u64) -> (&TokenStream, u64) {
        (self.tokens, self.from + index * self.seq as u64)
    }
}

/// How many targets count in the loss.
pub(crate) fn counted(targets: &[u32]) -> u64 {
    targets.iter().filter(|target| **target != IGNORED_TARGET).count() as u64
}

/// Refuses tokens that the model has no embedding for: files that others made may have any.
fn require_known(ids: &[u32], vocab: u32, stream: &TokenStream, offset: u64) -> Result<(), DataError> {
    let Some(at) = ids.iter().position(|id| *id >= vocab && *id != IGNORED_TARGET) else { return Ok(()) };
    let (offset, id) = (offset + at as u64, ids[at]);
    Err(DataError::Source {
        path: stream.file_at(offset).to_owned(),
        problem: format!("token {offset} of its corpus is {id}, and model.vocab_size = {vocab}"),
        hint: "set data.tokenizer and model.vocab_size to those that the tokens were made for".into(),
    })
}

/// A text whose end was scored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TextScore {
    /// The sum of the losses of its end, in nats.
    pub loss: f64,
    /// Whether greedy decoding writes its end.
    pub greedy: bool,
}

/// A sequence that was evaluated.
pub struct Scored<'a> {
    /// Which.
    pub index: u64,
    /// The sum of its token losses.
    pub loss: f64,
    /// What was predicted, where this process has it.
    pub targets: &'a [u32],
    /// Where its tokens are from.
    pub source: (&'a TokenStream, u64),
}

/// The key of a sequence's dropout, as two words: a function of the run's seed and the sequence's place in the order of all.
pub fn dropout_key(seed: u64, sample: u64) -> [u32; 2] {
    let key = counter::bits(counter::key(seed, names::DROPOUT_KEYS), sample);
    [key as u32, (key >> 32) as u32]
}

/// What a module that predicts further tokens (MTP) reads and predicts: at every position the token `depth` further on in its sequence, and the target of
/// that one. What would be past the end of the sequence, or of the document, is no target.
pub fn further((tokens, targets): (&[u32], &[u32]), starts: Option<&[u32]>, seq: usize, depth: usize) -> [Vec<u32>; 2] {
    let ahead = |i: usize| i + depth;
    let inside = |i: usize| i % seq + depth < seq && starts.is_none_or(|starts| starts[i] == starts[ahead(i)]);
    let read = (0..tokens.len()).map(|i| tokens[ahead(i).min(i / seq * seq + seq - 1)]).collect();
    let wanted = (0..targets.len()).map(|i| if inside(i) { targets[ahead(i)] } else { IGNORED_TARGET }).collect();
    [read, wanted]
}

/// The loss of each sequence of a micro-batch, in order, from their bytes.
pub fn losses(bytes: &[u8]) -> impl Iterator<Item = f64> {
    bytes.as_chunks().0.iter().map(|loss| f64::from_le_bytes(*loss))
}

/// What a process reads of every micro-batch: of sequences that ranks of other processes compute, nothing.
#[derive(Clone, Debug)]
pub struct Reading {
    /// The sequences that this process has anything of.
    rows: Vec<Row>,
    batch: usize,
    seq: usize,
    /// Whether the program asks where documents start.
    starts: bool,
    /// Tokens are below this.
    vocab: u32,
}

/// A sequence of a micro-batch, and what is read of it.
#[derive(Clone, Copy, Debug)]
struct Row {
    sequence: usize,
    tokens: bool,
    targets: bool,
    starts: bool,
}

/// What was read of a micro-batch, row after row.
#[derive(Debug, Default)]
pub struct MicroBatch {
    first: u64,
    tokens: Vec<u32>,
    targets: Vec<u32>,
    starts: Vec<u32>,
    /// Targets that count, of all sequences.
    counted: u64,
}

impl MicroBatch {
    /// Its first sample.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Bytes of its buffers.
    pub fn bytes(&self) -> u64 {
        4 * (self.tokens.len() + self.targets.len() + self.starts.len()) as u64
    }

    /// The tokens that were read.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
}

impl Reading {
    /// Tokens and targets of all sequences.
    pub fn all(batch: usize, seq: usize, vocab: u32) -> Self {
        let row = |sequence| Row { sequence, tokens: true, targets: true, starts: false };
        Self { rows: (0..batch).map(row).collect(), batch, seq, starts: false, vocab }
    }

    /// Sequences of a micro-batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Room for what is read of a micro-batch.
    pub fn buffers(&self) -> MicroBatch {
        let room = |any: bool| vec![0; if any { self.rows.len() * self.seq } else { 0 }];
        MicroBatch {
            first: 0,
            tokens: room(self.rows.iter().any(|row| row.tokens)),
            targets: room(self.rows.iter().any(|row| row.targets)),
            starts: room(self.starts),
            counted: 0,
        }
    }

    /// Reads the sequences from `first` on, and the `last` one again where there are no more. Does not allocate.
    pub fn read(&self, into: &mut MicroBatch, data: &dyn Sequences, first: u64, last: u64) -> Result<(), DataError> {
        (into.first, into.counted) = (first, 0);
        self.expect(data, first, last);
        for b in 0..self.batch {
            let (stream, offset) = data.source((first + b as u64).min(last));
            into.counted += stream.counted_targets(offset, self.seq);
            stream.require_read()?;
        }
        for (place, row) in self.rows.iter().enumerate() {
            let range = place * self.seq..(place + 1) * self.seq;
            let (stream, offset) = data.source((first + row.sequence as u64).min(last));
            if row.tokens {
                let to = &mut into.tokens[range.clone()];
                stream.copy(offset, to);
                stream.require_read()?;
                require_known(to, self.vocab, stream, offset)?;
            }
            if row.targets {
                let to = &mut into.targets[range.clone()];
                stream.copy_targets(offset, to);
                stream.require_read()?;
                require_known(to, self.vocab, stream, offset + 1)?;
            }
            if row.starts {
                stream.document_starts(offset, &mut into.starts[range]);
                stream.require_read()?;
            }
        }
        Ok(())
    }

    /// Says which sequences of this micro-batch and the next ones will be read: those in a bucket are fetched side by side.
    fn expect(&self, data: &dyn Sequences, first: u64, last: u64) {
        const SEQUENCES: usize = 64;
        if self.rows.is_empty() || !data.source(first.min(last)).0.is_remote() {
            return;
        }
        for micro_batch in 0..SEQUENCES.div_ceil(self.rows.len()) {
            for row in &self.rows {
                let (stream, offset) =
                    data.source((first + (micro_batch * self.batch + row.sequence) as u64).min(last));
                // The last target is the token after it.
                stream.expect(offset, self.seq as u64 + 1);
            }
        }
    }
}

/// The tokens and targets of a micro-batch, where documents start and keys of dropout if the program asks, on their way to an
/// executor.
pub struct Feed {
    names: [String; 6],
    /// The inputs of modules that predict further tokens: tokens and targets of each.
    further: Vec<[String; 2]>,
    /// Whether this process has any of these, of the tokens and of the targets.
    has: [bool; 3],
    beyond: Vec<String>,
    bound: f64,
    reading: Reading,
    /// What was read last, where none is read ahead.
    read: MicroBatch,
    tokens: Vec<u32>,
    targets: Vec<u32>,
    starts: Option<Vec<u32>>,
    keys: Option<Vec<u32>>,
    seed: u64,
    bytes: Vec<u8>,
    awaits: DataWait,
}

/// How data that may be long in coming are waited for: where several processes train, the others see meanwhile that this one lives.
#[derive(Clone, Default)]
pub struct DataWait(Option<Arc<ProcessCommunicator>>);

impl DataWait {
    /// For the data of a config: those in a bucket may be long in coming.
    pub fn of(config: &Config, group: ProcessGroup<'_>) -> Self {
        let remote = config.prepared_dir().is_some_and(|dir| is_address(&dir));
        Self(group.0.filter(|_| remote).map(|processes| processes.comm().clone()))
    }

    /// Waits for data by `wait`.
    pub fn by<T>(&self, wait: impl FnOnce() -> T) -> T {
        match &self.0 {
            Some(comm) => busy(comm, "wait for data", wait),
            None => wait(),
        }
    }
}

impl Feed {
    /// For micro-batches of `batch` sequences of `seq` tokens; `entry` where the program has inputs of its own for it. `has` says
    /// whether the executor has any of these elements of a tensor.
    pub fn new(
        tensors: &[Tensor],
        entry: Option<&str>,
        (batch, seq): (usize, usize),
        (seed, vocab): (u64, usize),
        has: &dyn Fn(&str, Range<usize>) -> bool,
    ) -> Self {
        let name = |n: &str| entry.map_or(n.to_owned(), |entry| StepProgram::name_in(entry, n));
        let positions = batch * seq;
        let inputs = [names::TOKENS, names::TARGETS, names::DOCUMENT_STARTS, names::DROPOUT_KEYS];
        let [tokens, targets, starts, keys] = inputs.map(name);
        let names = [tokens, targets, starts, keys, name(names::LOSS), name(MISSES)];
        let asked = |name: &str, numbers| tensors.iter().any(|t| t.name == name).then(|| vec![0; numbers]);
        let (starts, keys) = (asked(&names[2], positions), asked(&names[3], 2 * batch));
        let further: Vec<[String; 2]> = (1..)
            .map(|depth| [names::TOKENS, names::TARGETS].map(|n| name(&names::further(n, depth))))
            .take_while(|both| tensors.iter().any(|t| t.name == both[0]))
            .collect();
        let has_in = |name: &String, sequence: usize| has(name, sequence * seq..(sequence + 1) * seq);
        let further_in = |sequence: usize| further.iter().flatten().any(|name| has_in(name, sequence));
        let any = |i: usize| (0..batch).any(|sequence| has_in(&names[i], sequence));
        let has_any = [(0..batch).any(further_in), any(0), any(1)];
        let row = |sequence: usize| {
            // Of what is further on in the same sequence.
            let all = further_in(sequence);
            let wanted = |i: usize| all || has_in(&names[i], sequence);
            Row { sequence, tokens: wanted(0), targets: wanted(1), starts: starts.is_some() && wanted(2) }
        };
        let rows = (0..batch).map(row).filter(|row| row.tokens || row.targets || row.starts).collect();
        let vocab = u32::try_from(vocab).unwrap_or(u32::MAX);
        let beyond = tensors.iter().map(|t| &t.name).filter(|name| name.starts_with(ROWS_BEYOND)).cloned().collect();
        let reading = Reading { rows, batch, seq, starts: starts.is_some(), vocab };
        Self {
            read: reading.buffers(),
            reading,
            starts,
            keys,
            seed,
            names,
            further,
            has: has_any,
            beyond,
            bound: 1.0,
            tokens: vec![0; positions],
            targets: vec![0; positions],
            bytes: Vec::with_capacity(positions * 4),
            awaits: DataWait::default(),
        }
    }

    /// The buffers of tokens and targets that the last micro-batch was given from.
    pub fn ids(&mut self) -> [&mut [u32]; 2] {
        [&mut self.tokens, &mut self.targets]
    }

    /// What is read of a micro-batch.
    pub fn reading(&self) -> &Reading {
        &self.reading
    }

    /// Sequences of a micro-batch.
    pub fn batch(&self) -> usize {
        self.reading.batch
    }

    /// Tokens of a sequence.
    pub fn seq(&self) -> usize {
        self.reading.seq
    }

    /// The tensor of a micro-batch's losses.
    pub fn loss(&self) -> &str {
        &self.names[4]
    }

    /// The tensors of the losses of modules that predict further tokens.
    pub fn further_losses(&self) -> impl Iterator<Item = String> {
        (1..=self.further.len()).map(|depth| names::further(names::LOSS, depth))
    }

    /// Outputs that count rows which found no place with their experts, where these have room for some only.
    pub fn beyond(&self) -> &[String] {
        &self.beyond
    }

    /// With what the config says of that room, for messages.
    pub fn bounded(self, bound: Option<f64>) -> Self {
        Self { bound: bound.unwrap_or(1.0), ..self }
    }

    /// With how its data are waited for.
    pub fn awaiting(self, awaits: DataWait) -> Self {
        Self { awaits, ..self }
    }

    /// How its data are waited for.
    pub fn awaits(&self) -> &DataWait {
        &self.awaits
    }

    /// Refuses losses of the first micro-batch that are not finite because rows found no place with their experts.
    pub fn require_room(&self, executor: &dyn Executor, bytes: &[u8]) -> Result<()> {
        if self.beyond.is_empty() || losses(bytes).all(f64::is_finite) {
            return Ok(());
        }
        let mut rows = 0.0;
        for name in &self.beyond {
            rows += losses(&executor.read(name, 0)?).sum::<f64>();
        }
        if rows > 0.0 { Err(InferError::EvaluationBound { rows: rows as u64, bound: self.bound }) } else { Ok(()) }
    }

    /// Reads a micro-batch and gives it to an executor: the sequences from `first` on, and the `last` one again where there are no
    /// more. Gives how many of its targets count.
    pub fn load(
        &mut self,
        executor: &mut dyn Executor,
        micro_batch: usize,
        data: &dyn Sequences,
        first: u64,
        last: u64,
    ) -> Result<u64> {
        let mut read = std::mem::take(&mut self.read);
        let result = self.awaits.by(|| self.reading.read(&mut read, data, first, last));
        let given = result.map_err(InferError::from).and_then(|()| self.give(executor, micro_batch, &read, last));
        self.read = read;
        given
    }

    /// Gives what was read to an executor, and says how many targets count.
    pub fn give(
        &mut self,
        executor: &mut dyn Executor,
        micro_batch: usize,
        read: &MicroBatch,
        last: u64,
    ) -> Result<u64> {
        let seq = self.seq();
        for (place, row) in self.reading.rows.iter().enumerate() {
            let (from, to) = (place * seq..(place + 1) * seq, row.sequence * seq..(row.sequence + 1) * seq);
            if row.tokens {
                self.tokens[to.clone()].copy_from_slice(&read.tokens[from.clone()]);
            }
            if row.targets {
                self.targets[to.clone()].copy_from_slice(&read.targets[from.clone()]);
            }
            if let (Some(starts), true) = (&mut self.starts, row.starts) {
                starts[to].copy_from_slice(&read.starts[from]);
            }
        }
        if let Some(keys) = &mut self.keys {
            for (b, key) in keys.chunks_mut(2).enumerate() {
                key.copy_from_slice(&dropout_key(self.seed, (read.first + b as u64).min(last)));
            }
        }
        self.send(executor, micro_batch)?;
        Ok(read.counted)
    }

    /// Gives the buffers to an executor.
    fn send(&mut self, executor: &mut dyn Executor, micro_batch: usize) -> Result<()> {
        let any = |wanted: fn(&Row) -> bool| self.reading.rows.iter().any(wanted);
        let numbers = [
            Some(&self.tokens).filter(|_| self.has[1]),
            Some(&self.targets).filter(|_| self.has[2]),
            self.starts.as_ref().filter(|_| any(|row| row.starts)),
            self.keys.as_ref(),
        ];
        for (name, ids) in self.names.iter().zip(numbers) {
            let Some(ids) = ids else { continue };
            self.bytes.clear();
            self.bytes.extend(ids.iter().flat_map(|x| x.to_le_bytes()));
            executor.write(name, micro_batch, &self.bytes)?;
        }
        for (i, both) in self.further.iter().enumerate().filter(|_| self.has[0]) {
            let ids = further((&self.tokens, &self.targets), self.starts.as_deref(), self.reading.seq, i + 1);
            for (name, ids) in both.iter().zip(ids) {
                self.bytes.clear();
                self.bytes.extend(ids.iter().flat_map(|x| x.to_le_bytes()));
                executor.write(name, micro_batch, &self.bytes)?;
            }
        }
        Ok(())
    }

    /// Calls `scored` with every text, in order; false if `stop` came before the last. What follows a text in its sequence is
    /// not counted, and not seen by what stands before it. The program is one that gives misses.
    pub fn score(
        &mut self,
        executor: &mut dyn Executor,
        entry: &str,
        texts: &[Request],
        stop: &AtomicBool,
        scored: &mut dyn FnMut(TextScore),
    ) -> Result<bool> {
        for texts in texts.chunks(self.batch()) {
            if stop.load(Ordering::SeqCst) {
                return Ok(false);
            }
            self.targets.fill(IGNORED_TARGET);
            if let Some(starts) = &mut self.starts {
                starts.fill(0);
            }
            if let Some(keys) = &mut self.keys {
                keys.fill(0);
            }
            // After a text it stands again: tokens that are all the same would all go to the same experts.
            let seq = self.seq();
            for (tokens, text) in self.tokens.chunks_mut(seq).zip(texts.iter().cycle()) {
                let read = &text.tokens[..text.tokens.len() - 1];
                tokens.iter_mut().zip(read.iter().cycle()).for_each(|(to, token)| *to = *token);
            }
            for (b, text) in texts.iter().enumerate() {
                let range = b * seq..b * seq + text.tokens.len() - 1;
                let first = text.context - 1;
                self.targets[range][first..].copy_from_slice(&text.tokens[first + 1..]);
            }
            self.send(executor, 0)?;
            executor.run(entry)?;
            let bytes = executor.read(self.loss(), 0)?;
            self.require_room(executor, &bytes)?;
            let misses = executor.read(&self.names[5], 0)?;
            let positions: &[[u8; 4]] = misses.as_chunks().0;
            let greedy = |misses: &[[u8; 4]]| misses.iter().all(|miss| f32::from_le_bytes(*miss) == 0.0);
            let each = losses(&bytes).zip(positions.chunks(self.seq())).take(texts.len());
            each.for_each(|(loss, misses)| scored(TextScore { loss, greedy: greedy(misses) }));
        }
        Ok(true)
    }

    /// Calls `scored` with every one of the first `sequences` sequences, in order; false if `stop` came before the last.
    pub fn evaluate(
        &mut self,
        executor: &mut dyn Executor,
        entry: &str,
        sequences: u64,
        data: &dyn Sequences,
        stop: &AtomicBool,
        scored: &mut dyn FnMut(Scored<'_>),
    ) -> Result<bool> {
        let mut first = 0;
        while first < sequences {
            if stop.load(Ordering::SeqCst) {
                return Ok(false);
            }
            // The last micro-batch is filled up with copies of the last sequence, whose losses are not counted.
            self.load(executor, 0, data, first, sequences - 1)?;
            executor.run(entry)?;
            let count = (sequences - first).min(self.batch() as u64);
            let bytes = executor.read(self.loss(), 0)?;
            self.require_room(executor, &bytes)?;
            for (b, loss) in losses(&bytes).enumerate().take(count as usize) {
                let targets = &self.targets[b * self.seq()..(b + 1) * self.seq()];
                let index = first + b as u64;
                scored(Scored { index, loss, targets, source: data.source(index) });
            }
            first += count;
        }
        Ok(true)
    }
}
