//! Instructions that ranks run together, and the thread that runs those which overlap with kernels.

use super::call::{At, Ptr};
use crate::comm::{Collective, CommError, Communicator, Group, Piece, Place};
use lockstep_ir::program::{Instr, Slot, StepProgram, Stream};
use lockstep_ir::{Coordinates, MeshAxis, Op, TensorType};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// An instruction of several ranks, ready to run on one of them.
pub struct Exchange {
    what: What,
    place: Place,
    /// Bytes of a tensor's buffer behind the tensor, which are to be zero.
    padding: Vec<(At, usize, usize)>,
    pieces: Vec<PieceAt>,
}

enum What {
    Together(Collective, Group),
    Send { to: usize, tag: u32, outbox: At, copies: usize },
    Receive { from: usize, tag: u32 },
}

struct PieceAt {
    input: Option<(At, usize)>,
    output: Option<(At, usize)>,
    elements: usize,
    dtype: lockstep_ir::DType,
}

impl Exchange {
    /// Resolves an instruction for the rank at `here`; `None` if a rank runs it alone.
    pub fn new(program: &StepProgram, instr: &Instr, here: Coordinates) -> Option<Self> {
        let mesh = &program.mesh;
        let channel = u32::from(instr.stream == Stream::Communication);
        let along = |axis: MeshAxis| Group { ranks: mesh.group(here, axis), channel };
        let peer = |stage: usize| mesh.rank(Coordinates { pp: stage, ..here });
        let what = match instr.op {
            Op::AllReduce { axis } => What::Together(Collective::AllReduce, along(axis)),
            Op::SumShared { sharers } => {
                let first = here.tp / sharers * sharers;
                let ranks = (first..first + sharers).map(|tp| mesh.rank(Coordinates { tp, ..here })).collect();
                What::Together(Collective::AllReduce, Group { ranks, channel })
            }
            Op::ReduceScatter { axis, .. } => What::Together(Collective::ReduceScatter, along(axis)),
            Op::AllGather { axis, .. } => What::Together(Collective::AllGather, along(axis)),
            Op::Send { stage, tag } => {
                let outbox = At::buffer(program, instr.workspace?);
                let message: u64 = instr.inputs.iter().map(|a| a.ty.bytes()).sum();
                let copies = (program.buffers[instr.workspace?.0].bytes / message.max(1)) as usize;
                What::Send { to: peer(stage), tag, outbox, copies }
            }
            Op::Receive { stage, tag } => What::Receive { from: peer(stage), tag },
            _ => return None,
        };
        let at = |arg| At::arg(program, arg, here);
        let (mut pieces, mut padding) = (Vec::new(), Vec::new());
        let count = instr.inputs.len().max(instr.outputs.len());
        for i in 0..count {
            let (x, y) = (instr.inputs.get(i), instr.outputs.get(i).and_then(Option::as_ref));
            let (input, output) = (x.map(at), y.map(at));
            let part = match instr.op {
                Op::ReduceScatter { .. } | Op::Receive { .. } => &y?.ty,
                _ => &x?.ty,
            };
            let ranks = match &what {
                What::Together(_, group) => group.ranks.len(),
                What::Send { .. } | What::Receive { .. } => 1,
            };
            let (rows, from) = rows(&instr.op, part);
            let elements = (part.elements() - from) / rows;
            let bytes = elements * part.dtype.bytes();
            if let (Op::ReduceScatter { dim: None, .. }, Some(input), Some(x)) = (instr.op, input, x) {
                padding.push((input, x.ty.bytes() as usize, bytes * ranks));
            }
            let (of_input, of_output) = match instr.op {
                Op::ReduceScatter { .. } => (ranks, 1),
                Op::AllGather { .. } => (1, ranks),
                _ => (1, 1),
            };
            let start = from * part.dtype.bytes();
            for row in 0..rows {
                let input = input.map(|at| (at, start + row * bytes * of_input));
                let output = output.map(|at| (at, start + row * bytes * of_output));
                pieces.push(PieceAt { input, output, elements, dtype: part.dtype });
            }
        }
        let place = Place { op: instr.op.name(), layer: instr.layer, micro_batch: 0 };
        Some(Self { what, place, padding, pieces })
    }

    /// How many pieces it has.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Runs it.
    ///
    /// # Safety
    /// `base` is the arena of the program that this was made for, nobody else touches the operands meanwhile.
    pub unsafe fn run(
        &self,
        comm: &dyn Communicator,
        base: *mut u8,
        slot: Slot,
        scratch: &mut Vec<Piece>,
    ) -> Result<(), CommError> {
        let place = Place { micro_batch: slot.micro_batch, ..self.place };
        comm.at(place);
        let address = |(at, offset): (At, usize)| at.address(base, slot).wrapping_add(offset);
        let none = std::ptr::null_mut();
        scratch.clear();
        scratch.extend(self.pieces.iter().map(|p| Piece {
            input: p.input.map_or(none, address).cast_const(),
            output: p.output.map_or(none, address),
            elements: p.elements,
            dtype: p.dtype,
        }));
        // SAFETY: the verifier has checked that operands lie in the arena and overlap only in place.
        unsafe {
            for (at, from, to) in &self.padding {
                at.address(base, slot).add(*from).write_bytes(0, to.saturating_sub(*from));
            }
            match &self.what {
                What::Together(kind, group) => comm.collective(*kind, group, scratch, place),
                What::Send { to, tag, outbox, copies } => {
                    let outbox = outbox.address(base, slot);
                    scratch.iter().try_for_each(|p| comm.send(*to, *tag, p.input, p.bytes(), outbox, *copies, place))
                }
                What::Receive { from, tag } => {
                    scratch.iter().try_for_each(|p| comm.receive(*from, *tag, p.output, p.bytes(), place))
                }
            }
        }
    }
}

/// A tensor as pieces that ranks exchange: how many rows, and the first element that counts.
fn rows(op: &Op, part: &TensorType) -> (usize, usize) {
    let before = |dim: usize| part.dims[..dim].iter().map(|d| d.size()).product();
    match op {
        Op::AllGather { dim: Some(dim), .. } | Op::ReduceScatter { dim: Some(dim), .. } => (before(*dim), 0),
        Op::SumShared { .. } => (1, part.first_section_bytes() as usize / part.dtype.bytes()),
        _ => (1, 0),
    }
}

/// A rank's connection to the others.
#[derive(Clone)]
pub struct Link {
    /// Its communicator.
    pub comm: Arc<dyn Communicator>,
    /// Where it stands.
    pub coordinates: Coordinates,
}

/// Every instruction of several ranks, by segment and index.
pub type Exchanges = Vec<Vec<Option<Exchange>>>;

/// A thread that runs collectives while kernels go on, in the order in which they are handed over.
pub struct Courier {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<(usize, Slot)>,
    handed: u64,
    done: u64,
    failed: Option<CommError>,
    ends: bool,
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Courier {
    /// Starts the thread.
    ///
    /// # Safety
    /// `base` stays valid until the courier is dropped.
    pub unsafe fn start(
        exchanges: Arc<Exchanges>,
        comm: Arc<dyn Communicator>,
        base: *mut u8,
    ) -> std::io::Result<Self> {
        let most = exchanges.iter().map(Vec::len).max().unwrap_or(0);
        let state = State { jobs: VecDeque::with_capacity(most), ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let room = exchanges.iter().flatten().flatten().map(Exchange::pieces).max().unwrap_or(0);
        let (theirs, base) = (shared.clone(), Ptr(base));
        let name = format!("lockstep-comm-{}", comm.rank());
        let work = move || {
            let mut pieces = Vec::with_capacity(room);
            loop {
                let mut state = lock(&theirs);
                while state.jobs.is_empty() && !state.ends {
                    state = theirs.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                let Some((instr, slot)) = state.jobs.pop_front() else { return };
                drop(state);
                let work = AssertUnwindSafe(|| match &exchanges[slot.segment][instr] {
                    // SAFETY: the caller of `start` vouches for the arena, the verifier for what overlaps.
                    Some(exchange) => unsafe { exchange.run(comm.as_ref(), base.get(), slot, &mut pieces) },
                    None => Ok(()),
                });
                let result = catch_unwind(work).unwrap_or_else(|_| {
                    comm.fail("panicked");
                    comm.failure().map_or(Ok(()), Err)
                });
                let mut state = lock(&theirs);
                state.done += 1;
                state.failed = state.failed.take().or(result.err());
                drop(state);
                theirs.changed.notify_all();
            }
        };
        let thread = std::thread::Builder::new().name(name).spawn(work)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Hands over an instruction and returns its number.
    pub fn hand(&self, instr: usize, slot: Slot) -> u64 {
        let mut state = lock(&self.shared);
        state.jobs.push_back((instr, slot));
        state.handed += 1;
        let number = state.handed;
        drop(state);
        self.shared.changed.notify_all();
        number
    }

    /// Instructions handed over so far.
    pub fn handed(&self) -> u64 {
        lock(&self.shared).handed
    }

    /// Waits until the instruction with this number, and all before it, have ended.
    pub fn wait(&self, number: u64) -> Result<(), CommError> {
        let mut state = lock(&self.shared);
        while state.done < number {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.failed.clone().map_or(Ok(()), Err)
    }
}

impl Drop for Courier {
    fn drop(&mut self) {
        lock(&self.shared).ends = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // Panics there end the run like other failures.
            let _ = thread.join();
        }
    }
}
