//! How far a rank's device has come in what it does together with others.
//!
//! A graph runs without the host. So every instruction of several ranks writes its number to pinned memory when the stream comes to
//! it, and when it is done, and the host knows where the rank is, whom it waits for, and whether it gets on. The time that the
//! program's stream waits is added up on the device.

use crate::CudaError;
use crate::driver::{Address, Device, Memory, Pinned, Stream};
use crate::kernels::{Launcher, args};
use lockstep_exec::comm::processes::ProcessCommunicator;
use lockstep_exec::comm::{Communicator, ProgramPlace};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Streams that are told apart.
const LANES: usize = 1024;
/// How often the host looks.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// What the host knows of a rank's device.
pub struct Progress {
    comm: Arc<ProcessCommunicator>,
    board: Mutex<Board>,
    /// Nanoseconds: since when the program's stream waits, and how long it has waited since this was zero.
    clock: Memory,
}

/// Bytes of a clock.
const CLOCK: usize = 16;

struct Board {
    memory: Pinned,
    /// What streams are given, in order, with the rank that each waits for. Those of a graph keep their numbers.
    lanes: Vec<Vec<(ProgramPlace, usize)>>,
    seen: Vec<u32>,
    looked: Instant,
    place: ProgramPlace,
}

impl Board {
    /// The last that each stream has told of.
    fn numbers(&mut self) -> Vec<u32> {
        let words = self.memory.slice().as_ptr().cast::<u32>();
        // SAFETY: as many words, aligned; the device may write them meanwhile, each at once.
        (0..self.lanes.len()).map(|lane| unsafe { words.add(lane).read_volatile() }).collect()
    }

    fn spot(&self, lane: usize, number: u32) -> Option<(ProgramPlace, usize)> {
        self.lanes[lane].get((number as usize).checked_sub(1)? / 2).copied()
    }
}

/// The first stream that waits for another rank: those of the program come before those of messages.
fn inside(numbers: &[u32]) -> Option<usize> {
    numbers.iter().position(|number| number % 2 == 1)
}

/// One of a rank's streams.
#[derive(Clone, Copy)]
pub struct Lane {
    index: usize,
    /// Whether kernels wait when it does.
    holds_kernels: bool,
}

impl Progress {
    /// Of the rank whose communicator this is.
    pub fn new(device: &Arc<Device>, comm: &Arc<ProcessCommunicator>) -> Result<Self, CudaError> {
        let mut memory = Pinned::new(device, 4 * LANES)?;
        memory.slice().fill(0);
        let place = ProgramPlace { op: "the start of a run", layer: None, micro_batch: 0 };
        let board = Board { memory, lanes: Vec::new(), seen: Vec::new(), looked: Instant::now(), place };
        Ok(Self { comm: comm.clone(), board: Mutex::new(board), clock: Memory::new(device, CLOCK as u64)? })
    }

    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new one; `holds_kernels` if it is that of the program's kernels.
    pub fn lane(&self, holds_kernels: bool) -> Result<Lane, CudaError> {
        let mut board = self.board();
        if board.lanes.len() == LANES {
            return Err(CudaError::Internal(format!("more than {LANES} streams of communication")));
        }
        board.lanes.push(Vec::new());
        board.seen.push(0);
        Ok(Lane { index: board.lanes.len() - 1, holds_kernels })
    }

    /// Queues `work`, in which the rank waits for `other`, with a note before and after it.
    pub fn around<T>(
        &self,
        on: Launcher,
        Lane { index: lane, holds_kernels }: Lane,
        place: ProgramPlace,
        other: usize,
        work: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let (address, number) = {
            let mut board = self.board();
            board.lanes[lane].push((place, other));
            (board.memory.slice()[4 * lane..].as_ptr() as u64, board.lanes[lane].len() as u32)
        };
        let clock = if holds_kernels { self.clock.base } else { 0 };
        // SAFETY: the memory is the device's to write as long as this lives, which is longer than the stream's work.
        let reached =
            |number: u32| unsafe { on.launch(("collectives", "reached"), [1; 3], 1, args![address, number, clock]) };
        reached(2 * number - 1)?;
        let done = work()?;
        reached(2 * number)?;
        Ok(done)
    }

    /// Lets the stream of the program's kernels wait for others by `wait`, and adds up for how long.
    pub fn held(&self, on: Launcher, wait: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
        let clock = self.clock.base;
        // SAFETY: the clock lives as long as this, which is longer than the stream's work.
        let note = |ends: u32| unsafe { on.launch(("collectives", "waits"), [1; 3], 1, args![clock, ends]) };
        note(0)?;
        wait()?;
        note(1)
    }

    /// Nothing has been waited for yet in what the stream does next.
    pub fn reset_clock(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: all of the clock.
        unsafe { stream.fill(self.clock.base, 0, CLOCK) }
    }

    /// Where the nanoseconds are that were waited: a number of 8 bytes.
    pub fn waited(&self) -> Address {
        self.clock.base + 8
    }

    /// Where the device waits for another rank, if it does.
    pub fn waits_in(&self) -> Option<ProgramPlace> {
        let mut board = self.board();
        let numbers = board.numbers();
        let lane = inside(&numbers)?;
        Some(board.spot(lane, numbers[lane])?.0)
    }

    /// Tells the others where this rank is and whom it waits for. The error is what ended the run.
    pub fn look(&self) -> Result<(), CudaError> {
        let mut board = self.board();
        if self.comm.failure().is_none() && board.looked.elapsed() < LOOK_EVERY {
            return Ok(());
        }
        board.looked = Instant::now();
        let numbers = board.numbers();
        let moved = (0..numbers.len()).find(|&lane| numbers[lane] != board.seen[lane]);
        let inside = inside(&numbers);
        let at = inside.or(moved).and_then(|lane| board.spot(lane, numbers[lane]));
        board.seen.copy_from_slice(&numbers);
        if let Some((place, _)) = at {
            board.place = place;
        }
        let last = board.place;
        drop(board);
        match (moved, inside, at) {
            (Some(_), _, Some((place, _))) => {
                self.comm.awaits(None);
                self.comm.at(place);
            }
            (None, Some(_), Some((place, other))) => self.comm.awaits(Some((other, place))),
            _ => {}
        }
        self.comm.failure_at(last).map_or(Ok(()), |error| Err(CudaError::Ranks(error)))
    }
}
