//! Pinned memory between host and device: a ring of two buffers for what goes there, slots for results on their way back.

use crate::CudaError;
use crate::driver::{Address, Device, Event, Pinned, Stream};
use crate::kernels::Launcher;
use lockstep_exec::{DeviceTime, Taken, copy};
use std::ops::Range;
use std::sync::Arc;

/// Copies start at multiples of this many bytes.
pub const ALIGNMENT: usize = 64;

/// What goes to the device, and what is read at once.
pub struct Staging {
    buffers: [Buffer; 2],
    ring: Ring,
}

struct Buffer {
    memory: Pinned,
    /// After the last copy that used it.
    used: Event,
}

impl Buffer {
    fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { memory: Pinned::new(device, bytes)?, used: Event::new(device)? })
    }
}

impl Staging {
    /// Two buffers of this size each. The inputs of a step fit into one, so that those of the next can be queued while it runs.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        let buffers = [Buffer::new(device, bytes)?, Buffer::new(device, bytes)?];
        Ok(Self { buffers, ring: Ring::new(bytes) })
    }

    /// Queues a copy to the device. It waits only where a buffer comes round again whose copies are not done.
    ///
    /// # Safety
    /// `to` has room for the data.
    pub unsafe fn send(&mut self, on: Launcher, mut to: Address, data: &[u8]) -> Result<(), CudaError> {
        for part in data.chunks(self.ring.bytes) {
            let place = self.ring.place(part.len());
            if let Some(left) = place.left {
                self.buffers[left].used.record(on.stream)?;
                self.buffers[place.buffer].used.wait()?;
            }
            let memory = &mut self.buffers[place.buffer].memory.slice()[place.offset..place.offset + part.len()];
            copy(memory, part);
            // SAFETY: the caller vouches for `to`; these bytes are used again only after an event after this copy.
            unsafe { on.copy(to, memory.as_ptr() as Address, memory.len())? };
            to += part.len() as u64;
        }
        Ok(())
    }

    /// Waits for the stream and copies ranges to the host. `take` gets pieces, each with its range's index and where in that it
    /// starts; the next are under way meanwhile.
    ///
    /// # Safety
    /// The ranges are in the device's memory.
    pub unsafe fn fetch(
        &mut self,
        stream: &Stream,
        ranges: &[(Address, usize)],
        take: &mut dyn FnMut(usize, usize, &[u8]),
    ) -> Result<(), CudaError> {
        // Copies to the device are done then, and both buffers free.
        stream.wait()?;
        let size = self.ring.bytes;
        let pieces = |(i, &(_, bytes)): (usize, &(Address, usize))| {
            (0..bytes).step_by(size).map(move |first| (i, first, size.min(bytes - first)))
        };
        let mut pieces = ranges.iter().enumerate().flat_map(pieces).peekable();
        let mut under_way: Vec<(usize, usize, Range<usize>)> = Vec::new();
        let mut buffer = 0;
        loop {
            let (mut placed, mut end) = (Vec::new(), 0);
            while let Some((i, first, len)) = pieces.next_if(|(_, _, len)| end + len <= size) {
                let to = &mut self.buffers[buffer].memory.slice()[end..end + len];
                // SAFETY: the caller vouches for the range; the memory is read only after the event.
                unsafe { stream.to_host(to, ranges[i].0 + first as u64)? };
                placed.push((i, first, end..end + len));
                end = (end + len).next_multiple_of(ALIGNMENT);
            }
            self.buffers[buffer].used.record(stream)?;
            let last = &mut self.buffers[1 - buffer];
            if !under_way.is_empty() {
                last.used.wait()?;
            }
            let memory = last.memory.slice();
            under_way.drain(..).for_each(|(i, first, at)| take(i, first, &memory[at]));
            if placed.is_empty() {
                return Ok(());
            }
            (under_way, buffer) = (placed, 1 - buffer);
        }
    }
}

/// Where in two buffers the next bytes go.
struct Ring {
    bytes: usize,
    buffer: usize,
    offset: usize,
}

#[derive(Debug, PartialEq)]
struct RingPlace {
    buffer: usize,
    offset: usize,
    /// The buffer that was left for this one, if it was: who goes on waits for what used this one before.
    left: Option<usize>,
}

impl Ring {
    fn new(bytes: usize) -> Self {
        Self { bytes, buffer: 0, offset: 0 }
    }

    /// Places of one buffer follow each other and never overlap.
    fn place(&mut self, bytes: usize) -> RingPlace {
        let full = self.offset + bytes > self.bytes;
        let left = full.then_some(self.buffer);
        if full {
            (self.buffer, self.offset) = (1 - self.buffer, 0);
        }
        let place = RingPlace { buffer: self.buffer, offset: self.offset, left };
        self.offset = (self.offset + bytes).next_multiple_of(ALIGNMENT);
        place
    }
}

/// Results that the device copies to the host after the work that makes them.
#[derive(Default)]
pub struct Results {
    /// One more than may be under way: the last that was taken still says when it was ready.
    slots: [Option<Slot>; 3],
    /// Where the device began the entry that the next reading is of.
    begun: Option<Event>,
    /// Readings queued so far, and those that were taken.
    queued: u64,
    taken: u64,
}

struct Slot {
    memory: Pinned,
    sizes: Vec<usize>,
    /// Before the entry.
    begun: Option<Event>,
    /// After the last copy.
    done: Event,
}

impl Results {
    /// Readings that may be under way.
    const UNDER_WAY: u64 = 2;

    /// Marks the begin of an entry.
    pub fn begin(&mut self, device: &Arc<Device>, stream: &Stream) -> Result<(), CudaError> {
        let event = match self.begun.take() {
            Some(event) => event,
            None => Event::new(device)?,
        };
        event.record(stream)?;
        self.begun = Some(event);
        Ok(())
    }

    /// Queues copies of these ranges and gives the number of the reading, from 0 on. Two may be under way.
    ///
    /// # Safety
    /// The ranges are in the device's memory.
    pub unsafe fn queue(
        &mut self,
        device: &Arc<Device>,
        on: Launcher,
        ranges: &[(Address, usize)],
    ) -> Result<u64, CudaError> {
        let number = self.queued;
        if number - self.taken == Self::UNDER_WAY {
            return Err(CudaError::Internal("a third reading was queued before the first was taken".into()));
        }
        let bytes = ranges.iter().map(|(_, bytes)| bytes).sum();
        let index = (number % self.slots.len() as u64) as usize;
        let slot = match self.slots[index].take().filter(|slot| slot.memory.bytes() >= bytes) {
            Some(slot) => slot,
            None => {
                let (memory, done) = (Pinned::new(device, bytes)?, Event::new(device)?);
                Slot { memory, sizes: Vec::new(), begun: None, done }
            }
        };
        let slot = self.slots[index].insert(slot);
        slot.sizes.clear();
        // The event that this slot had begins a later entry.
        std::mem::swap(&mut slot.begun, &mut self.begun);
        let mut at = 0;
        for (from, bytes) in ranges {
            // SAFETY: the caller vouches for the ranges; the memory is read only after the event.
            unsafe { on.copy(slot.memory.address() + at as u64, *from, *bytes)? };
            slot.sizes.push(*bytes);
            at += bytes;
        }
        slot.done.record(on.stream)?;
        self.queued += 1;
        Ok(number)
    }

    /// Waits for the oldest reading, which is the one of this number, and gives its ranges.
    pub fn take(&mut self, number: u64) -> Result<Taken, CudaError> {
        let count = self.slots.len() as u64;
        let index = |number: u64| (number % count) as usize;
        let last = number.checked_sub(1).and_then(|last| self.slots[index(last)].take());
        let slot = self.slots[index(number)].as_mut();
        let (Some(slot), true, true) = (slot, number == self.taken, number < self.queued) else {
            return Err(CudaError::Internal(format!("reading {number} is not the next one")));
        };
        slot.done.wait()?;
        self.taken += 1;
        let since_last = last.as_ref().map(|last| slot.done.since(&last.done)).transpose()?;
        let since_begin = slot.begun.as_ref().map(|begun| slot.done.since(begun)).transpose()?;
        let mut rest = &*slot.memory.slice();
        let tensors = slot.sizes.iter().map(|bytes| rest.split_off(..*bytes).unwrap_or_default().to_vec()).collect();
        if let Some(last) = last {
            self.slots[index(number - 1)] = Some(last);
        }
        Ok(Taken { tensors, time: since_begin.map(|since_begin| DeviceTime { since_begin, since_last }) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_fills_one_buffer_and_then_the_other() {
        let mut ring = Ring::new(256);
        let place = |buffer, offset, left| RingPlace { buffer, offset, left };
        assert_eq!(ring.place(100), place(0, 0, None));
        assert_eq!(ring.place(128), place(0, 128, None));
        assert_eq!(ring.place(1), place(1, 0, Some(0)));
        assert_eq!(ring.place(192), place(1, 64, None));
        assert_eq!(ring.place(256), place(0, 0, Some(1)));
        assert_eq!(ring.place(256), place(1, 0, Some(0)));
        assert_eq!(ring.place(0), place(1, 256, None));
    }

    /// What is placed while a step runs never lands on what was placed for that step: nothing waits for a step to end.
    #[test]
    fn inputs_of_the_next_step_find_room_while_a_step_runs() {
        for inputs in [[64, 64, 24], [300, 300, 24], [700, 200, 100], [1, 1000, 1]] {
            let mut ring = Ring::new(1024 + 3 * 64);
            // The last step whose inputs each buffer holds.
            let mut held = [None; 2];
            for step in 0..100 {
                for bytes in inputs {
                    let place = ring.place(bytes);
                    if place.left.is_some() {
                        assert!(held[place.buffer].is_none_or(|last| last < step), "{inputs:?}: step {step} waits");
                    }
                    held[place.buffer] = Some(step);
                }
            }
        }
    }
}
