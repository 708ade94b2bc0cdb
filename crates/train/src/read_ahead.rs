//! Samples of the steps to come, read by a thread of their own: a step finds its tokens in memory and does not wait for the disk.
//!
//! The thread fills a ring of micro-batches that is made once. What is read depends on the sample's index alone, so
//! no bit depends on the thread.

use lockstep_data::{DataError, Sampler};
use lockstep_exec::ExecError;
use lockstep_infer::InferError;
use lockstep_infer::feed::{MicroBatch, Reading};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A thread that reads micro-batch after micro-batch into buffers that were made with it, as far ahead as there are buffers.
///
/// What is read depends on the index of a sample alone, so reading ahead changes no bit. Where the next micro-batch is not the one
/// after the last (a run that goes back), it begins anew there.
pub(crate) struct ReadAhead {
    shared: Arc<Shared>,
    data: Arc<Sampler>,
    thread: Option<JoinHandle<()>>,
    bytes: u64,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Buffers to read into.
    free: Vec<MicroBatch>,
    /// What was read and not taken yet, in order.
    ready: VecDeque<MicroBatch>,
    /// The first sample of the next micro-batch to read.
    next: u64,
    /// How often it has begun anew: what was read for an earlier beginning is not wanted any more.
    beginning: u64,
    /// Why nothing more is read.
    error: Option<DataError>,
    /// Whether the thread is to end, or has.
    ended: bool,
}

impl Shared {
    /// A thread that panics says so when it is joined, not here.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells who waits that a thread has ended, however it did.
struct Ending(Arc<Shared>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.changed.notify_all();
    }
}

impl ReadAhead {
    /// Begins with the sample `first`, and reads up to `ahead` micro-batches ahead.
    pub(crate) fn start(reading: Reading, data: &Arc<Sampler>, first: u64, ahead: usize) -> Result<Self, InferError> {
        let free: Vec<_> = (0..ahead.max(1)).map(|_| reading.buffers()).collect();
        let bytes = free.iter().map(MicroBatch::bytes).sum();
        let ready = VecDeque::with_capacity(free.len());
        let state = State { free, ready, next: first, beginning: 0, error: None, ended: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let (ending, samples) = (Ending(shared.clone()), data.clone());
        let thread = std::thread::Builder::new()
            .name("read-ahead".into())
            .spawn(move || read(&ending.0, &reading, &samples))
            .map_err(|cause| ExecError::Internal(format!("no thread to read samples: {cause}")))?;
        Ok(Self { shared, data: data.clone(), thread: Some(thread), bytes })
    }

    /// Bytes of its buffers.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether these are the samples that it reads.
    pub(crate) fn reads(&self, data: &Sampler) -> bool {
        std::ptr::eq(self.data.as_ref(), data)
    }

    /// Calls `give` with the micro-batch that begins with the sample `first`, and says how long it was waited for.
    pub(crate) fn take<T>(
        &mut self,
        first: u64,
        give: impl FnOnce(&MicroBatch) -> Result<T, InferError>,
    ) -> Result<(T, Duration), InferError> {
        let start = Instant::now();
        let mut state = self.shared.lock();
        let coming = state.ready.front().map_or(state.next, MicroBatch::first);
        if coming != first {
            let State { free, ready, next, beginning, error, .. } = &mut *state;
            free.extend(ready.drain(..));
            (*next, *beginning, *error) = (first, *beginning + 1, None);
            self.shared.changed.notify_all();
        }
        let micro_batch = loop {
            if let Some(micro_batch) = state.ready.pop_front() {
                break micro_batch;
            }
            if let Some(error) = state.error.take() {
                return Err(error.into());
            }
            if state.ended {
                return Err(ExecError::Internal("the thread that reads samples has ended".into()).into());
            }
            state = self.shared.wait(state);
        };
        drop(state);
        let waited = start.elapsed();
        let given = give(&micro_batch);
        self.shared.lock().free.push(micro_batch);
        self.shared.changed.notify_all();
        Ok((given?, waited))
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // What it panicked with was printed.
            let _ = thread.join();
        }
    }
}

fn read(shared: &Shared, reading: &Reading, data: &Sampler) {
    let mut state = shared.lock();
    while !state.ended {
        let next = if state.error.is_none() { state.free.pop() } else { None };
        let Some(mut micro_batch) = next else {
            state = shared.wait(state);
            continue;
        };
        let (first, beginning) = (state.next, state.beginning);
        drop(state);
        let read = reading.read(&mut micro_batch, data, first, u64::MAX);
        state = shared.lock();
        match read {
            _ if state.beginning != beginning => state.free.push(micro_batch),
            Ok(()) => {
                state.next = first + reading.batch() as u64;
                state.ready.push_back(micro_batch);
            }
            Err(error) => {
                state.free.push(micro_batch);
                state.error = Some(error);
            }
        }
        shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_data::{PrepareSpec, prepare};
    use lockstep_ir::Hint;

    fn samples(folder: &std::path::Path) -> Arc<Sampler> {
        let text: String = (0..400).map(|i| format!("{i} squared is {}. ", i * i)).collect();
        std::fs::write(folder.join("a.txt"), text).unwrap();
        let spec = PrepareSpec { paths: vec![folder.join("a.txt")], ..PrepareSpec::default() };
        let data = prepare(&spec, &folder.join("out"), &mut |_| ()).unwrap();
        Arc::new(Sampler::new(data.train().clone(), 8, 1).unwrap())
    }

    /// Tokens and targets of two samples.
    fn expected(data: &Sampler, first: u64) -> [Vec<u32>; 2] {
        let (mut tokens, mut targets) = (vec![0; 16], vec![0; 16]);
        for b in 0..2 {
            let range = 8 * b..8 * (b + 1);
            data.fill(first + b as u64, &mut tokens[range.clone()], &mut targets[range]);
        }
        [tokens, targets]
    }

    #[test]
    fn micro_batches_come_in_order_and_from_wherever_they_are_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let data = samples(folder.path());
        let mut ahead = ReadAhead::start(Reading::all(2, 8, 256), &data, 0, 3).unwrap();
        assert_eq!(ahead.bytes(), 3 * 2 * 2 * 8 * 4);
        for first in [0, 2, 4, 6, 8, 100, 102, 4, 6, 7, 9, 0] {
            let (tokens, _) = ahead.take(first, |read| Ok(read.tokens().to_vec())).unwrap();
            assert_eq!(tokens, expected(&data, first)[0], "from {first}");
        }
        assert!(ahead.reads(&data));
    }

    #[test]
    fn a_token_that_cannot_be_is_an_error_where_it_is_used_and_not_before() {
        let folder = tempfile::tempdir().unwrap();
        let data = samples(folder.path());
        // Bytes of text from this one on are none.
        let vocab = u32::from(b'u');
        let bad = |first| expected(&data, first).iter().flatten().any(|token| *token >= vocab);
        let first = (0..).step_by(2).find(|first| bad(*first)).unwrap();
        let mut ahead = ReadAhead::start(Reading::all(2, 8, vocab), &data, 0, 4).unwrap();
        for good in (0..first).step_by(2) {
            ahead.take(good, |_| Ok(())).unwrap();
        }
        let error = ahead.take(first, |_| Ok(())).unwrap_err().with_hint();
        assert!(error.contains("train.shard: token") && error.contains("model.vocab_size = 117"), "{error}");
    }
}
