//! A rank among others that share the device: they communicate through the host.

use crate::CudaError;
use crate::driver::{Address, Stream};
use lockstep_exec::ExecError;
use lockstep_exec::comm::{Piece, ProgramPlace};
use lockstep_exec::communication::{CommunicationCalls, Link, Mirror, communication_calls};
use lockstep_ir::program::Slot;
use lockstep_ir::{Coordinates, StepProgram};

/// A rank's connection, and the host's view of what it communicates.
pub struct Linked {
    link: Link,
    communication_calls: CommunicationCalls,
    mirror: Mirror,
    pieces: Vec<Piece>,
}

// SAFETY: `pieces` holds addresses in the mirror while a communication call runs; nobody looks at them afterwards.
unsafe impl Send for Linked {}

impl Linked {
    /// Connects a rank that runs `program`.
    pub fn new(program: &StepProgram, link: Link) -> Self {
        let communication_calls = communication_calls(program, link.coordinates);
        Self { link, communication_calls, mirror: Mirror::new(program.arena_bytes), pieces: Vec::new() }
    }

    /// Where the rank stands.
    pub fn coordinates(&self) -> Coordinates {
        self.link.coordinates
    }

    /// Tells the others where this rank is.
    pub fn at(&self, op: &'static str, layer: Option<usize>, micro_batch: usize) {
        self.link.comm.at(ProgramPlace { op, layer, micro_batch });
    }

    /// Runs an instruction if ranks run it together, and says whether they do. Returns when its results are on the device.
    /// `failed` says what an error of the device means.
    ///
    /// # Safety
    /// `base` is the arena of the program, on the device that `stream` is of.
    pub unsafe fn run(
        &mut self,
        stream: &Stream,
        base: Address,
        (slot, instr): (Slot, usize),
        failed: impl Fn(CudaError) -> ExecError,
    ) -> Result<bool, ExecError> {
        let Some(call) = &self.communication_calls[slot.segment][instr] else { return Ok(false) };
        for range in call.reads(slot) {
            let from = base + range.start as u64;
            // SAFETY: the verifier has checked that operands lie in the arena; the copy is waited for below.
            unsafe { stream.to_host(self.mirror.range(range), from) }.map_err(&failed)?;
        }
        stream.wait().map_err(&failed)?;
        self.mirror.run(call, self.link.comm.as_ref(), slot, &mut self.pieces)?;
        for range in call.writes(slot) {
            let to = base + range.start as u64;
            // SAFETY: as above.
            unsafe { stream.to_device(to, self.mirror.range(range)) }.map_err(&failed)?;
        }
        stream.wait().map_err(&failed)?;
        Ok(true)
    }
}
