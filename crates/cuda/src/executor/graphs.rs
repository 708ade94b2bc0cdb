//! Entries: the first run queues instructions, the second captures a CUDA graph, later ones replay it.
//!
//! Ranks that share the GPU capture one graph. The first of them replays it once the streams of the others have
//! what was written to them.

use super::CudaExecutor;
use crate::driver::{Event, Graph};
use crate::linked::{Linked, Ready};
use lockstep_exec::ExecError;
use lockstep_ir::program::Slot;

impl CudaExecutor {
    /// Whether this rank, or the only one, has the CUDA graphs.
    fn leads(&self) -> bool {
        self.linked.as_ref().is_none_or(Linked::leads)
    }

    /// Records an entry. Ranks that share the device record theirs together: their streams fork from the first rank's and join it
    /// again, so that one graph, which the first rank has, is of all of them.
    fn capture(&mut self, schedule: &[Slot]) -> Result<Option<Graph>, ExecError> {
        if !self.leads() {
            return self.record(schedule, false).map(|()| None);
        }
        let capture = self.behind(self.stream.begin_capture())?;
        let recorded = self.record(schedule, true);
        // Where a rank has failed, others may not have noticed yet.
        let _turn = self.turn.take(self.linked.is_some());
        match recorded {
            Ok(()) => self.behind(capture.end()).map(Some),
            Err(error) => {
                drop(capture);
                Err(error)
            }
        }
    }

    fn record(&mut self, schedule: &[Slot], leads: bool) -> Result<(), ExecError> {
        // Ranks wait for the marks of the others: those that follow at the begin, the first at the end.
        let meet = |this: &Self, shows: bool| {
            let Some(linked) = &this.linked else { return Ok(()) };
            let mark = || {
                let _turn = this.turn.take(true);
                Event::mark(&this.stream)
            };
            let mark = if shows { Some(this.behind(mark())?) } else { None };
            let marks = linked.share(mark)?;
            let _turn = this.turn.take(true);
            let waited = marks.iter().filter(|_| !shows).try_for_each(|mark| this.stream.wait_for(mark));
            this.behind(waited)
        };
        meet(self, leads)?;
        self.capturing = self.linked.is_some();
        let issued = self.issue_all(schedule);
        self.capturing = false;
        issued?;
        meet(self, !leads)
    }

    /// Makes plans for the documents that the host wrote, where those that there are do not take as many, and says whether it did.
    fn fit_documents(&mut self) -> Result<bool, ExecError> {
        let most = self.documents.most();
        if self.attention.fits(most) {
            return Ok(false);
        }
        self.behind(self.stream.wait())?;
        self.attention.fit(&self.gpu.attention, self.segments.iter().flatten(), most);
        Ok(true)
    }

    /// What can be done with an entry, by all ranks together. Where plans have changed, graphs are captured anew; where numbers are looked at,
    /// none is.
    pub(super) fn prepare(&mut self, entry: &str) -> Result<Ready, ExecError> {
        let changed = self.fit_documents()?;
        if !self.leads() {
            // The first rank replays the graph of all ranks on its own stream: what was written on this one is there before.
            self.behind(self.stream.wait())?;
        }
        let ran = self.numbers.is_none() && self.ran.contains(entry);
        let captured = ran && self.graphs.contains_key(entry);
        let mine = Ready { ran, captured, changed };
        let ready = match &self.linked {
            Some(linked) => linked.agree(mine, self.documents.any())?,
            None => Ready::together(&[mine]),
        };
        if ready.changed {
            self.graphs.clear();
            self.ran.clear();
        }
        Ok(ready)
    }

    /// Ranks that share the device run to the end: others are told of what fails here. One that follows another's graph has nothing
    /// to wait for. Processes go on.
    fn ran_together(&self, graph: bool) -> Result<(), ExecError> {
        match &self.linked {
            Some(linked) if linked.shares_the_device() && (linked.leads() || !graph) => self.behind(self.stream.wait()),
            _ => Ok(()),
        }
    }

    /// As [`Executor::run`].
    pub(super) fn run_entry(&mut self, entry: &str) -> Result<(), ExecError> {
        self.enter()?;
        let begun = self.results.begin(&self.gpu.device, &self.stream);
        self.behind(begun)?;
        self.behind(self.progress().map_or(Ok(()), |progress| progress.reset_clock(&self.stream)))?;
        let ready = self.prepare(entry)?;
        if ready.captured {
            if let Some((name, graph)) = self.graphs.get_key_value(entry) {
                self.queued = Some(name.clone());
                self.behind(self.stream.replay(graph))?;
            }
            return self.ran_together(true);
        }
        let (name, schedule) = self.entry(entry)?;
        self.queued = Some(name.clone());
        if let Some(linked) = &mut self.linked {
            linked.begin(&name, ready.ran);
        }
        if !ready.ran {
            // The first run loads what libraries load late.
            self.issue_all(&schedule)?;
            self.ran.insert(name);
        } else if let Some(graph) = self.capture(&schedule)? {
            self.behind(self.stream.replay(&graph))?;
            self.graphs.insert(name, graph);
        }
        self.ran_together(ready.ran)
    }
}
