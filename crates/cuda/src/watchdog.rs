//! Whether a device that this process waits for still gets on, and where it is if it does not.
//!
//! A graph runs without the host. So a program's stream writes to pinned memory which instruction it has come to. That takes a few microseconds,
//! so it is done before an instruction only if those since the last mark take a hundred times as long on any device.
//!
//! A wait in which the marks do not change ends with the name of the op, and the device is abandoned.

use crate::CudaError;
use crate::driver::{Device, Pinned};
use crate::kernels::{Launcher, Value, args};
use lockstep_ir::StepProgram;
use lockstep_ir::program::{Instr, Segment, Slot};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// The least seconds of work between two marks, at rates that no device reaches yet: FLOP and bytes per second.
const BETWEEN: f64 = 200e-6;
const FLOPS: f64 = 3e15;
const BYTES: f64 = 10e12;

/// Ops that are named each; of more, the first and the last.
const NAMED: usize = 5;

/// Bits of a mark that say the micro-batch, and those that say which of a segment's marks it is. 0 is no mark.
const MICRO_BATCH: u32 = 24;
const INDEX: u32 = 20;

/// The marks of a program: those of every segment, in order.
struct Marks(Vec<Vec<Mark>>);

#[derive(Debug, PartialEq)]
struct Mark {
    /// The instruction that it stands before.
    instr: usize,
    /// The work from here to the next.
    work: String,
}

impl Marks {
    fn new(program: &StepProgram) -> Self {
        Self(program.segments.iter().map(Self::of).collect())
    }

    fn of(segment: &Segment) -> Vec<Mark> {
        let mut firsts = Vec::new();
        let mut seconds = f64::INFINITY;
        for (i, instr) in segment.instrs.iter().enumerate() {
            // Those that are done as one are queued with the first.
            if seconds >= BETWEEN && segment.group_of(i).is_none_or(|group| group.instrs.start == i) {
                firsts.push(i);
                seconds = 0.0;
            }
            seconds += least_seconds(instr);
        }
        let ends = firsts.iter().skip(1).copied().chain([segment.instrs.len()]);
        let mark = |(first, end): (&usize, usize)| Mark { instr: *first, work: work(&segment.instrs[*first..end]) };
        firsts.iter().zip(ends).map(mark).collect()
    }

    /// What a mark is written as.
    fn word(&self, slot: Slot, instr: usize) -> Option<u64> {
        let index = self.0[slot.segment].binary_search_by_key(&instr, |mark| mark.instr).ok()?;
        let place = (slot.segment as u64) << INDEX | index as u64;
        Some((place << MICRO_BATCH | slot.micro_batch as u64) + 1)
    }

    /// What a mark says.
    fn said(&self, word: u64) -> Option<String> {
        let word = word.checked_sub(1)?;
        let (place, micro_batch) = (word >> MICRO_BATCH, word & ((1 << MICRO_BATCH) - 1));
        let (segment, index) = ((place >> INDEX) as usize, (place & ((1 << INDEX) - 1)) as usize);
        Some(format!("{}, micro-batch {micro_batch}", self.0.get(segment)?.get(index)?.work))
    }
}

/// Seconds that an instruction takes at least.
fn least_seconds(instr: &Instr) -> f64 {
    instr.cost().map_or(0.0, |cost| (cost.flops.causal as f64 / FLOPS).max(cost.bytes as f64 / BYTES))
}

/// Instructions as a message names them.
fn work(instrs: &[Instr]) -> String {
    let mut ops: Vec<&str> = instrs.iter().map(|instr| instr.op.name()).collect();
    let count = ops.len();
    ops.dedup();
    let named = match &ops[..] {
        [] => "nothing".to_owned(),
        [one] => (*one).to_owned(),
        [some @ .., last] if ops.len() <= NAMED => format!("{} or {last}", some.join(", ")),
        [first, .., last] => format!("one of the {count} ops from {first} to {last}"),
    };
    let layers = instrs.iter().filter_map(|instr| instr.layer);
    let layers = match layers.clone().min().zip(layers.max()) {
        None => String::new(),
        Some((one, other)) if one == other => format!(", layer {one}"),
        Some((from, to)) => format!(", layers {from} to {to}"),
    };
    let phase = instrs.first().map_or("", |instr| instr.phase.name());
    format!("{named}{layers}, {phase}")
}

/// Where the streams of a program write how far they have come.
pub struct Lane {
    /// A mark, or 0 where no entry runs.
    word: Mutex<Pinned>,
    marks: Marks,
}

impl Lane {
    fn word(&self) -> MutexGuard<'_, Pinned> {
        self.word.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last mark that the device has come to.
    fn read(&self) -> u64 {
        // SAFETY: eight bytes, aligned as the driver aligns allocations; the device may write them meanwhile, at once.
        unsafe { self.word().slice().as_ptr().cast::<u64>().read_volatile() }
    }

    /// Queues a mark before an instruction, if it has one.
    pub fn before(&self, on: Launcher, slot: Slot, instr: usize) -> Result<(), CudaError> {
        self.marks.word(slot, instr).map_or(Ok(()), |word| self.queue(on, word))
    }

    /// Queues the mark after an entry.
    pub fn ended(&self, on: Launcher) -> Result<(), CudaError> {
        self.queue(on, 0)
    }

    fn queue(&self, on: Launcher, word: u64) -> Result<(), CudaError> {
        let address = self.word().slice().as_ptr() as u64;
        // SAFETY: the memory is the device's to write as long as this lives, which is longer than the stream's work.
        unsafe { on.launch(("collectives", "passed"), [1; 3], 1, args![address, Value::Long(word)]) }
    }
}

/// Looks, while somebody waits for a device, whether it gets on.
#[derive(Default)]
pub struct Watchdog {
    state: Mutex<Option<Watched>>,
}

struct Watched {
    timeout: Duration,
    lanes: Vec<Weak<Lane>>,
    /// What they said last, and when that changed.
    seen: Vec<u64>,
    changed: Instant,
}

impl Watchdog {
    fn state(&self) -> MutexGuard<'_, Option<Watched>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends waits in which the device does not get on for this long. Programs that are loaded from here on tell how far they are.
    pub fn start(self: &Arc<Self>, device: &Arc<Device>, timeout: Duration) {
        let mut state = self.state();
        match &mut *state {
            Some(watched) => watched.timeout = timeout,
            None => {
                let (lanes, seen, changed) = (Vec::new(), Vec::new(), Instant::now());
                *state = Some(Watched { timeout, lanes, seen, changed });
                let (watchdog, watched) = (Arc::downgrade(self), Arc::downgrade(device));
                let look = move |waited| match (watchdog.upgrade(), watched.upgrade()) {
                    (Some(watchdog), Some(device)) => watchdog.look(waited).inspect_err(|_| device.abandon()),
                    _ => Ok(()),
                };
                device.watch_with(Some(Arc::new(look)));
            }
        }
    }

    /// A lane of a program, where the device is watched.
    pub fn lane(&self, device: &Arc<Device>, program: &StepProgram) -> Result<Option<Arc<Lane>>, CudaError> {
        let mut state = self.state();
        let Some(watched) = &mut *state else { return Ok(None) };
        let mut word = Pinned::new(device, size_of::<u64>())?;
        word.slice().fill(0);
        let lane = Arc::new(Lane { word: Mutex::new(word), marks: Marks::new(program) });
        watched.lanes.retain(|lane| lane.strong_count() > 0);
        watched.lanes.push(Arc::downgrade(&lane));
        Ok(Some(lane))
    }

    /// Whether there is hope in waiting on, after so long in one wait.
    fn look(&self, waited: Duration) -> Result<(), CudaError> {
        let mut state = self.state();
        let Some(watched) = &mut *state else { return Ok(()) };
        let lanes: Vec<Arc<Lane>> = watched.lanes.iter().filter_map(Weak::upgrade).collect();
        let words: Vec<u64> = lanes.iter().map(|lane| lane.read()).collect();
        if words != watched.seen {
            (watched.seen, watched.changed) = (words, Instant::now());
            return Ok(());
        }
        let still = waited.min(watched.changed.elapsed());
        if still < watched.timeout {
            return Ok(());
        }
        let at = lanes.iter().zip(&words).find_map(|(lane, word)| lane.marks.said(*word));
        let at = at.unwrap_or_else(|| "a copy, or what comes before the first op".to_owned());
        Err(CudaError::Stalled { seconds: still.as_secs_f64(), at })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_compile::{AdamW, Context, Offload, Optimizer, Precision, Recompute, Steps, compile};
    use lockstep_config::Config;
    use lockstep_ir::{DType, Layout};

    fn program(dim: usize, batch: usize) -> StepProgram {
        let model = format!(
            "[model]\nvocab_size = 64\nlayers = 2\ndim = {dim}\nheads = 4\nffn = {dim}\n[data]\npaths = [\".\"]\n"
        );
        let config = Config::parse(&model, "run.toml", &[]).unwrap();
        let context = Context {
            device: crate::profile("cuda", DType::BF16, DType::F32, false),
            layout: Layout::single(2),
            optimizer: Optimizer::adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, 0.1),
            precision: Precision::of(DType::BF16, DType::F32),
            recompute: Recompute::default(),
            stages: vec![],
            steps: Steps::default(),
            offload: Offload::default(),
        };
        let graph = lockstep_model::build(&config.model, batch, 2048).unwrap();
        compile(&graph, &context).unwrap().programs.remove(0)
    }

    #[test]
    fn marks_are_as_far_apart_as_their_cost_asks_for_and_say_where_they_are() {
        let small = program(64, 1);
        let marks = Marks::new(&small);
        assert!(marks.0.iter().all(|marks| marks.len() == 1 && marks[0].instr == 0));
        let large = program(4096, 16);
        let marks = Marks::new(&large);
        let forward = large.segments.iter().position(|s| s.name == "forward").unwrap();
        let works: Vec<&str> = marks.0[forward].iter().map(|mark| mark.work.as_str()).collect();
        // A matmul of a model as large as this stands alone.
        assert!(works.contains(&"linear, layer 1, forward"), "{works:?}");
        for (segment, marks_of) in marks.0.iter().enumerate() {
            for mark in marks_of {
                let slot = Slot::new(segment, 1);
                let word = marks.word(slot, mark.instr).unwrap();
                assert_eq!(marks.said(word), Some(format!("{}, micro-batch 1", mark.work)));
                let behind = marks.word(slot, mark.instr + 1);
                assert_eq!(behind.is_some(), marks_of.iter().any(|other| other.instr == mark.instr + 1));
            }
        }
        assert_eq!((marks.said(0), marks.said(u64::MAX)), (None, None));
    }

    #[test]
    fn many_ops_are_named_by_the_first_and_the_last() {
        let program = program(64, 1);
        let instrs = &program.segments.iter().find(|s| s.name == "forward").unwrap().instrs;
        assert_eq!(work(&instrs[..1]), "embedding, forward");
        let all = work(instrs);
        assert!(all.starts_with(&format!("one of the {} ops from embedding to ", instrs.len())), "{all}");
        assert!(all.ends_with(", layers 0 to 1, forward"), "{all}");
    }
}
