//! Instructions of a schedule, each queued on its stream after what it waits for.

use super::{CudaExecutor, Profiled};
use crate::call::Call;
use crate::driver::{Event, Stream};
use crate::linked::Linked;
use crate::numbers::Elements;
use crate::ops::fused;
use crate::progress::Progress;
use crate::{CudaError, ops};
use lockstep_exec::bound::At;
use lockstep_exec::{ExecError, numbers};
use lockstep_ir::program::{self, Slot};

impl CudaExecutor {
    /// Queues a kernel, or several that are done as one.
    fn kernels(&self, slot: Slot, instr: usize, stream: &Stream) -> Result<(), CudaError> {
        let matmul = self.gpu.matmul(self.deterministic)?;
        let call = |instr: usize| Call {
            bound: &self.segments[slot.segment][instr],
            kernels: &self.gpu.kernels,
            matmul,
            attention: &self.attention,
            stream,
            base: self.arena.base,
            host: self.host_base(),
            slot,
        };
        let _turn = self.turn.take(self.capturing);
        // SAFETY: the arena is this program's.
        unsafe {
            match self.program.segments[slot.segment].group_of(instr) {
                None => ops::issue(call(instr)),
                Some(group) if group.instrs.start == instr => {
                    fused::issue(group, &group.instrs.clone().map(call).collect::<Vec<_>>())
                }
                // Done with the first of its group.
                Some(_) => Ok(()),
            }
        }
    }

    /// Looks at what a kernel, or several that are done as one, make, where that is asked for. What communication and copies bring was
    /// looked at where it was made.
    fn look(&self, slot: Slot, instr: usize, stream: &Stream) -> Result<(), ExecError> {
        let Some(looks) = &self.numbers else { return Ok(()) };
        if self.program.segments[slot.segment].instrs[instr].stream.copies() {
            return Ok(());
        }
        let (together, first) = match self.program.segments[slot.segment].group_of(instr) {
            None => (instr..instr + 1, instr),
            Some(group) if group.instrs.start == instr => (group.instrs.clone(), fused::first_written(group)),
            Some(_) => return Ok(()),
        };
        let find = |at: &At, may_see_nothing| {
            let range = Elements { at: self.arena.base + at.offset(slot), elements: at.elements, dtype: at.dtype };
            // SAFETY: the operand lies in the arena.
            self.behind(unsafe { looks.borrow_mut().first(self.gpu.kernels.on(stream), range, may_see_nothing) })
        };
        numbers::look(&self.program, &self.segments[slot.segment], (slot, together, first), find)
    }

    /// Queues an instruction on its stream, after what it waits for.
    fn issue(&mut self, slot: Slot, index: usize) -> Result<(), ExecError> {
        let instrs = &self.program.segments[slot.segment].instrs;
        let instr = &instrs[index];
        let (op, layer, on) = (instr.op.name(), instr.layer, instr.stream);
        if let Some(linked) = &self.linked {
            linked.at(op, layer, slot.micro_batch);
        }
        let beside = |on: program::Stream| on.beside().and_then(|at| self.beside[at].as_ref());
        let marks = instr.waits.iter().filter_map(|last| beside(instrs[*last].stream)?.marks[*last].as_ref());
        let stream = match beside(on) {
            Some(own) => {
                // It starts after all kernels that were queued before it.
                let _turn = self.turn.take(self.capturing);
                self.behind(Event::mark(&self.stream).and_then(|mark| own.stream.wait_for(&mark)))?;
                self.behind(marks.into_iter().try_for_each(|mark| own.stream.wait_for(mark)))?;
                own.stream.clone()
            }
            None => {
                self.behind(marks.into_iter().try_for_each(|mark| self.wait_for(mark)))?;
                self.stream.clone()
            }
        };
        if let (Some(lane), program::Stream::Compute) = (&self.lane, on) {
            let _turn = self.turn.take(self.capturing);
            self.behind(lane.before(self.gpu.kernels.on(&stream), slot, index))?;
        }
        let start = self.profiled.is_some().then(|| self.clocked(&stream)).transpose()?;
        let together = match &mut self.linked {
            // SAFETY: the arena is this program's.
            Some(linked) => unsafe { linked.enqueue(self.arena.base, slot, index, on)? },
            None => false,
        };
        if !together {
            self.behind(self.kernels(slot, index, &stream))?;
            self.look(slot, index, &stream)?;
        }
        if let Some(start) = start {
            let end = self.clocked(&stream)?;
            self.profiled.get_or_insert_default().push(Profiled { slot, instr: index, start, end });
        }
        if let Some(at) = on.beside() {
            let mark = {
                let _turn = self.turn.take(self.capturing);
                self.behind(Event::mark(&stream))?
            };
            if let Some(own) = &mut self.beside[at] {
                own.marks[index] = Some(mark.clone());
                (own.last, own.used) = (Some(mark), true);
            }
        }
        Ok(())
    }

    /// A mark with a clock.
    pub(super) fn clocked(&self, stream: &Stream) -> Result<Event, ExecError> {
        self.behind(Event::new(&self.gpu.device).and_then(|event| event.record(stream).map(|()| event)))
    }

    /// Lets kernels wait for what ranks do together beside them.
    fn wait_for(&self, mark: &Event) -> Result<(), CudaError> {
        let _turn = self.turn.take(self.capturing);
        match self.progress() {
            Some(progress) => progress.held(self.gpu.kernels.on(&self.stream), || self.stream.wait_for(mark)),
            None => self.stream.wait_for(mark),
        }
    }

    pub(super) fn progress(&self) -> Option<&Progress> {
        self.linked.as_ref().and_then(Linked::progress)
    }

    /// A segment ends when all streams have.
    fn join(&mut self) -> Result<(), ExecError> {
        let last = self.beside.each_mut().map(|beside| beside.as_mut().and_then(|own| own.last.take()));
        self.behind(last.iter().flatten().try_for_each(|mark| self.wait_for(mark)))
    }

    pub(super) fn issue_all(&mut self, schedule: &[Slot]) -> Result<(), ExecError> {
        self.beside.iter_mut().flatten().for_each(|own| own.used = false);
        for slot in schedule {
            (0..self.segments[slot.segment].len()).try_for_each(|instr| self.issue(*slot, instr))?;
            self.join()?;
        }
        if let Some(linked) = &mut self.linked {
            linked.settle()?;
        }
        let _turn = self.turn.take(self.capturing);
        for own in self.beside.iter().flatten().filter(|own| own.used) {
            self.behind(Event::mark(&own.stream).and_then(|mark| self.stream.wait_for(&mark)))?;
        }
        self.behind(self.lane.as_ref().map_or(Ok(()), |lane| lane.ended(self.gpu.kernels.on(&self.stream))))
    }
}
