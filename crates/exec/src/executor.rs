//! What every executor does, and what it tells.
//!
//! A device may be one step ahead of the host: `read_later` promises results, and the next step is queued before
//! they are taken.

use crate::copy::{HostBytes, copy, copy_pieces};
use crate::error::ExecError;
use crate::initial::Initial;
use lockstep_ir::DType;
use lockstep_ir::program::Slot;
use std::borrow::Cow;
use std::ops::Range;

/// A loaded program with its memory.
pub trait Executor: Send {
    /// Bytes allocated for the arena.
    fn arena_bytes(&self) -> u64;

    /// Bytes allocated in the memory of the host, for what waits there.
    fn host_bytes(&self) -> u64;

    /// Writes a tensor that the program knows by name; `micro_batch` counts for inputs only.
    fn write(&mut self, tensor: &str, micro_batch: usize, data: &[u8]) -> Result<(), ExecError>;

    /// Writes initial values to tensors that the program knows by name, the same to all of them, to each in its type. An executor
    /// that draws them itself gives the bits that are drawn on the host.
    fn fill(&mut self, tensors: &[(&str, DType)], values: &Initial) -> Result<(), ExecError> {
        values.write(self, tensors)
    }

    /// The bytes of a tensor that the program knows by name; `micro_batch` counts for outputs and inputs only.
    fn read(&self, tensor: &str, micro_batch: usize) -> Result<Cow<'_, [u8]>, ExecError>;

    /// The bytes of tensors in few pieces: `take` gets each with the tensor's index among those named and where in the tensor it
    /// starts. What lies on a device comes over in large copies, however small the tensors are.
    fn read_all(&self, tensors: &[&str], take: &mut dyn FnMut(usize, usize, &[u8])) -> Result<(), ExecError> {
        tensors.iter().enumerate().try_for_each(|(i, name)| {
            take(i, 0, &self.read(name, 0)?);
            Ok(())
        })
    }

    /// A range of those bytes. What lies on a device comes over in this part only.
    fn read_range(&self, tensor: &str, micro_batch: usize, range: Range<usize>) -> Result<Cow<'_, [u8]>, ExecError> {
        let outside = || ExecError::Internal(format!("`{tensor}` has no bytes {range:?}"));
        match self.read(tensor, micro_batch)? {
            Cow::Borrowed(bytes) => Ok(Cow::Borrowed(bytes.get(range.clone()).ok_or_else(outside)?)),
            Cow::Owned(bytes) => Ok(Cow::Owned(bytes.get(range.clone()).ok_or_else(outside)?.to_vec())),
        }
    }

    /// This many bytes of the host's memory, all of them touched, that [`copy_out`](Self::copy_out) fills fast; `None` if there are not
    /// as many.
    fn host_memory(&self, bytes: usize) -> Option<HostBytes> {
        let mut memory: Vec<u8> = Vec::new();
        memory.try_reserve_exact(bytes).ok()?;
        memory.resize(bytes, 0);
        Some(Box::new(memory))
    }

    /// Copies ranges of tensors to memory of the host, one after the other, by this many threads where the host copies.
    fn copy_out(&self, ranges: &[(&str, Range<usize>)], mut to: &mut [u8], threads: usize) -> Result<(), ExecError> {
        let mut pieces = Vec::new();
        for (name, range) in ranges {
            let part = to.split_off_mut(..range.len());
            let part = part.ok_or_else(|| ExecError::Internal(format!("no room for bytes {range:?} of `{name}`")))?;
            match self.read_range(name, 0, range.clone())? {
                Cow::Borrowed(bytes) => pieces.push((part, bytes)),
                Cow::Owned(bytes) => copy(part, &bytes),
            }
        }
        copy_pieces(pieces, threads);
        Ok(())
    }

    /// Runs one of the program's entries: to its end, or queues it, so that whoever reads waits for it.
    fn run(&mut self, entry: &str) -> Result<(), ExecError>;

    /// Queues the reading of tensors, each of this many micro-batches, as they are after what runs now. An executor whose `run`
    /// ends with the entry queues nothing: `read` gives them at once.
    fn read_later(&mut self, _tensors: &[(String, usize)]) -> Result<Option<Ticket>, ExecError> {
        Ok(None)
    }

    /// Waits for what `read_later` queued, and gives it in its order, micro-batch by micro-batch.
    fn take(&mut self, ticket: Ticket) -> Result<Taken, ExecError> {
        Err(ExecError::Internal(format!("nothing was queued as {ticket:?}")))
    }

    /// Copies a tensor to another of as many bytes, after what was queued.
    fn pass(&mut self, from: &str, to: &str) -> Result<(), ExecError> {
        let bytes = self.read(from, 0)?.into_owned();
        self.write(to, 0, &bytes)
    }

    /// As `run`, and tells when each instruction ran.
    fn profile(&mut self, entry: &str) -> Result<Vec<Timing>, ExecError>;

    /// Looks, from here on, at all that instructions make: the first number that is not finite ends an entry. Gives whether the
    /// executor can.
    fn check_numbers(&mut self) -> bool {
        false
    }

    /// Bytes of the arena up to the last that has ever been written with anything but zero, where the executor can tell.
    fn touched_bytes(&self) -> Option<u64> {
        None
    }

    /// Seconds that the entry that ran last took, without those in which it waited for other ranks, where the executor can tell.
    fn busy_s(&self) -> Option<f64> {
        None
    }

    /// What whoever waits for it should know.
    fn notes(&self) -> &[Note] {
        &[]
    }
}

/// What an executor says of a program that it has loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// Something runs slower than it could.
    Warning(String),
    /// What something costs that was asked for.
    Cost(String),
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Note::Warning(text) => write!(f, "warning: {text}"),
            Note::Cost(text) => f.write_str(text),
        }
    }
}

/// A reading that was queued.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket(pub u64);

/// A reading that has come.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Taken {
    /// The bytes of its tensors, in the order in which they were asked for.
    pub tensors: Vec<Vec<u8>>,
    /// When it was ready, where the device has a clock of its own: the host may have looked late.
    pub time: Option<DeviceTime>,
}

/// Times of a reading by the device's clock, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceTime {
    /// Since the device began the entry that the reading is of.
    pub since_begin: f64,
    /// Since the reading before it was ready; none for the first.
    pub since_last: Option<f64>,
}

/// When one instruction ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// The run of a segment that it belongs to.
    pub slot: Slot,
    /// Its index in the segment.
    pub instr: usize,
    /// Seconds from the start of the entry.
    pub start_s: f64,
    /// Seconds that it took.
    pub seconds: f64,
}
