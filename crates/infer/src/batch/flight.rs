//! Steps of greedy decoding that are queued ahead.
//!
//! Where an executor queues what it runs, a step is queued before the tokens of the one before it are known: they go from output to input on the device,
//! and the host looks at them while the next step runs. A text that is found to have ended then has a row too much under way, which nobody reads.

use super::{Ended, TextBatch};
use crate::Result;
use lockstep_exec::Ticket;
use lockstep_ir::StepProgram;
use lockstep_model::names;
use std::ops::ControlFlow;

/// A step of decoding that was queued: its texts by number, in the order of its rows.
pub(super) struct Flight {
    texts: Vec<u64>,
    entry: &'static str,
    ticket: Ticket,
}

impl TextBatch {
    /// Queues the reading of what a step gives, where the executor queues what it runs.
    pub(super) fn taken_off(&mut self, texts: Vec<u64>, entry: &'static str) -> Result<Option<Flight>> {
        let ticket = self.executor.read_later(&[(StepProgram::name_in(entry, names::NEXT), 1)])?;
        Ok(ticket.map(|ticket| Flight { texts, entry, ticket }))
    }

    /// Queues the step after one that is under way, with the tokens that it will give, where all of its texts go on as far as is known, each has a page for one more
    /// token, and no other text waits for its turn.
    fn go_on(&mut self, flight: &Flight) -> Result<Option<Flight>> {
        let others = self.running.iter().any(|text| !flight.texts.contains(&text.id));
        if others || (!self.waiting.is_empty() && !self.slots.is_empty()) {
            return Ok(None);
        }
        let mut starts = Vec::new();
        for id in &flight.texts {
            // A text that ended while this was under way leaves a row to nobody.
            let Some(i) = self.running.iter().position(|text| text.id == *id) else { return Ok(None) };
            let text = &self.running[i];
            let known = text.tokens.len() + 1;
            if known - text.request.prompt.len() >= text.request.max_tokens || known >= self.context {
                return Ok(None);
            }
            starts.push(text.cached + 1);
            if !self.grow(i, 2) {
                return Ok(None);
            }
        }
        let from = StepProgram::name_in(flight.entry, names::NEXT);
        self.executor.pass(&from, &StepProgram::name_in(flight.entry, names::TOKENS))?;
        self.write_tables()?;
        let starts = self.padded(flight.entry, starts.into_iter());
        self.executor.write(&StepProgram::name_in(flight.entry, names::START), 0, &starts)?;
        self.executor.run(flight.entry)?;
        self.taken_off(flight.texts.clone(), flight.entry)
    }

    /// Queues the step after the one that is under way, where it may be, and takes the tokens of that.
    pub(super) fn fly_on(
        &mut self,
        flight: Flight,
        listen: &mut dyn FnMut(u64, u32) -> ControlFlow<()>,
        ended: &mut Vec<Ended>,
    ) -> Result<()> {
        self.flight = self.go_on(&flight)?;
        self.land(flight, listen, ended)?;
        // Of texts that have all ended nothing is left to look at.
        if self.running.is_empty() { self.let_go() } else { Ok(()) }
    }

    /// Waits for what is under way, and forgets it.
    pub(super) fn let_go(&mut self) -> Result<()> {
        if let Some(flight) = self.flight.take() {
            self.executor.take(flight.ticket)?;
        }
        Ok(())
    }

    /// Takes the tokens of a step that was queued.
    fn land(
        &mut self,
        flight: Flight,
        listen: &mut dyn FnMut(u64, u32) -> ControlFlow<()>,
        ended: &mut Vec<Ended>,
    ) -> Result<()> {
        let taken = self.executor.take(flight.ticket)?.tensors;
        let best: Vec<u32> = taken.iter().flat_map(|t| t.as_chunks().0).map(|b| u32::from_le_bytes(*b)).collect();
        for (id, best) in flight.texts.into_iter().zip(best) {
            let Some(i) = self.running.iter().position(|text| text.id == id) else { continue };
            self.running[i].cached += 1;
            self.take_token(i, (best, &[]), listen, ended);
        }
        self.leave_ended();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
