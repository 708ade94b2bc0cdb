use crate::{Sampling, TextBatch, TextRequest, Weights, Written};
use lockstep_config::Config;
use lockstep_exec::{ExecError, Executor, Taken, Ticket, Timing};
use lockstep_host::Devices;
use lockstep_plan::GenerationShape;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The CPU's executor as one that queues: what is read later is what stands there now. Counts the readings that wait at once.
struct Queueing {
    inner: Box<dyn Executor>,
    waiting: BTreeMap<u64, Vec<Vec<u8>>>,
    next: u64,
    most: Arc<AtomicUsize>,
}

impl Executor for Queueing {
    fn arena_bytes(&self) -> u64 {
        self.inner.arena_bytes()
    }

    fn host_bytes(&self) -> u64 {
        self.inner.host_bytes()
    }

    fn write(&mut self, tensor: &str, micro_batch: usize, data: &[u8]) -> Result<(), ExecError> {
        self.inner.write(tensor, micro_batch, data)
    }

    fn read(&self, tensor: &str, micro_batch: usize) -> Result<Cow<'_, [u8]>, ExecError> {
        self.inner.read(tensor, micro_batch)
    }

    fn run(&mut self, entry: &str) -> Result<(), ExecError> {
        self.inner.run(entry)
    }

    fn read_later(&mut self, tensors: &[(String, usize)]) -> Result<Option<Ticket>, ExecError> {
        let read = tensors.iter().map(|(name, _)| Ok(self.inner.read(name, 0)?.into_owned()));
        let read = read.collect::<Result<_, ExecError>>()?;
        self.next += 1;
        self.waiting.insert(self.next, read);
        self.most.fetch_max(self.waiting.len(), Ordering::Relaxed);
        Ok(Some(Ticket(self.next)))
    }

    fn take(&mut self, ticket: Ticket) -> Result<Taken, ExecError> {
        let gone = || ExecError::Internal(format!("{ticket:?} was taken"));
        Ok(Taken { tensors: self.waiting.remove(&ticket.0).ok_or_else(gone)?, time: None })
    }

    fn profile(&mut self, entry: &str) -> Result<Vec<Timing>, ExecError> {
        self.inner.profile(entry)
    }
}

/// What texts become, with all of them submitted at once, and how many readings waited at once at most.
fn written(requests: &[TextRequest], texts: usize, queues: bool) -> (Vec<Written>, usize) {
    let model = "vocab_size = 64\nlayers = 2\ndim = 32\nheads = 4\nkv_heads = 2\nffn = 64";
    let text = format!("[model]\n{model}\n[data]\npaths = [\".\"]\n[train]\nseq = 32\nseed = 5\n");
    let config = Config::parse(&text, "run.toml", &[]).unwrap();
    let shape = GenerationShape { texts, ..GenerationShape::one(300) };
    // Room for a part of the texts at their longest: some give their pages back.
    let all = lockstep_plan::cache_plan(&Devices::new(), &config, &shape).unwrap().bytes();
    let shape = GenerationShape { cache: Some(all / 2), ..shape };
    let mut batch = TextBatch::new(&Devices::new(), &config, shape, Weights::Initial).unwrap();
    let most = Arc::new(AtomicUsize::new(0));
    if queues {
        let stand_in: Box<dyn Executor> = Box::new(Nothing);
        let inner = std::mem::replace(&mut batch.executor, stand_in);
        batch.executor = Box::new(Queueing { inner, waiting: BTreeMap::new(), next: 0, most: most.clone() });
    }
    let mut found: Vec<Option<Written>> = vec![None; requests.len()];
    for (id, request) in requests.iter().enumerate() {
        batch.submit(id as u64, request.clone()).unwrap();
    }
    while !batch.is_done() {
        for (id, text) in batch.step(&mut |_, _| ControlFlow::Continue(())).unwrap() {
            found[id as usize] = Some(text.unwrap());
        }
    }
    assert!(batch.flight.is_none(), "nothing is under way when all texts have ended");
    (found.into_iter().map(Option::unwrap).collect(), most.load(Ordering::Relaxed))
}

/// What stands in an executor's place while it is moved.
struct Nothing;

impl Executor for Nothing {
    fn arena_bytes(&self) -> u64 {
        0
    }

    fn host_bytes(&self) -> u64 {
        0
    }

    fn write(&mut self, _: &str, _: usize, _: &[u8]) -> Result<(), ExecError> {
        Ok(())
    }

    fn read(&self, _: &str, _: usize) -> Result<Cow<'_, [u8]>, ExecError> {
        Ok(Cow::Borrowed(&[]))
    }

    fn run(&mut self, _: &str) -> Result<(), ExecError> {
        Ok(())
    }

    fn profile(&mut self, _: &str) -> Result<Vec<Timing>, ExecError> {
        Ok(Vec::new())
    }
}

#[test]
fn texts_of_steps_that_are_queued_ahead_are_those_of_one_step_after_the_other() {
    let request = |i: usize| TextRequest {
        prompt: (0..5 + 23 * i).map(|k| ((k * 7 + i * 13) % 64) as u32).collect(),
        max_tokens: [40, 1, 120, 17, 90, 64][i % 6],
        sampling: Sampling { temperature: 0.0, ..Sampling::default() },
        ends: Vec::new(),
        logprobs: false,
    };
    let mut requests: Vec<TextRequest> = (0..8).map(request).collect();
    let (plain, waited) = written(&requests, 4, false);
    assert_eq!(waited, 0);
    let (ahead, waited) = written(&requests, 4, true);
    assert_eq!((ahead, waited), (plain.clone(), 2), "one step is queued before the tokens of another are taken");
    // Texts that end at a token, which is found when the next step is under way already.
    for (request, plain) in requests.iter_mut().zip(&plain) {
        request.ends = plain.tokens.get(plain.tokens.len() / 2).copied().into_iter().collect();
    }
    // One whose tokens are wanted with their log-probabilities keeps its batch from being queued ahead.
    requests[6].logprobs = true;
    assert_eq!(written(&requests, 4, true).0, written(&requests, 4, false).0);
}
