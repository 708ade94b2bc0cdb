//! Pinned memory of the host.

use super::{Address, Device, Handle};
use crate::CudaError;
use lockstep_ir::units;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError};

/// Most bytes of pinned memory that are kept while nobody uses them.
const MOST_SPARE: usize = 256 << 20;

/// Pinned host memory, which the device copies from and to by itself. Who drops it has waited for the device's copies.
pub struct Pinned {
    device: Arc<Device>,
    data: *mut u8,
    bytes: usize,
    /// What was allocated.
    room: usize,
}

// SAFETY: it owns its memory.
unsafe impl Send for Pinned {}
// SAFETY: who shares it can only read.
unsafe impl Sync for Pinned {}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: it owns that many bytes.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.slice()
    }
}

impl Pinned {
    /// Takes this many bytes.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        let of = |data: Handle, room| Self { device: device.clone(), data: data.cast(), bytes, room };
        {
            let mut spare = device.spare.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = |(_, room): &(Handle, usize)| (bytes..=2 * bytes).contains(room);
            if let Some(found) = spare.iter().position(fits) {
                let (data, room) = spare.swap_remove(found);
                return Ok(of(data, room));
            }
        }
        device.enter()?;
        let mut data = std::ptr::null_mut();
        let room = bytes.max(1);
        device.driver.check("cuMemHostAlloc", (device.driver.host_alloc)(&mut data, room, 0))?;
        Ok(of(data, room))
    }

    /// Takes this many bytes for a run, all of them 0.
    pub fn zeroed(device: &Arc<Device>, bytes: u64) -> Result<Self, CudaError> {
        let failed = |error: CudaError| {
            // The driver has one status for both memories.
            let cause = match error {
                CudaError::OutOfMemory => "the host does not have, or does not lock, as much".to_owned(),
                other => other.to_string(),
            };
            CudaError::Pinned { bytes: units::bytes(bytes), cause }
        };
        let mut pinned = Self::new(device, bytes as usize).map_err(failed)?;
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
        let piece = pinned.bytes.div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for part in pinned.slice().chunks_mut(piece) {
                scope.spawn(|| part.fill(0));
            }
        });
        Ok(pinned)
    }

    /// Where it starts, as the device knows it.
    pub fn address(&self) -> Address {
        self.data as Address
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its bytes.
    pub fn slice(&mut self) -> &mut [u8] {
        // SAFETY: it owns that many bytes.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut spare = self.device.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.iter().map(|(_, room)| room).sum::<usize>() + self.room <= MOST_SPARE {
            spare.push((self.data.cast(), self.room));
        } else if self.device.enter().is_ok() {
            // SAFETY: allocated in `new`, freed once.
            unsafe { (self.device.driver.host_free)(self.data.cast()) };
        }
    }
}
