//! What a rank leaves with another one, beside everything else that they do: copies of its state.

use super::ProcessCommunicator;
use super::inbox::Stream;
use super::secret::JobSecret;
use crate::comm::{CommError, ProgramPlace};

/// Bytes of a frame: what is after it in a queue does not wait for long.
const CHUNK: usize = 4 << 20;

impl ProcessCommunicator {
    /// Sends bytes to one rank, and gives those that another sends here. All ranks do this at the same time, each with the others that the
    /// same rule gives it, on a thread that does nothing else: steps go on meanwhile.
    pub fn pass_on(&self, place: ProgramPlace, mine: &[u8], to: usize, from: usize) -> Result<Vec<u8>, CommError> {
        self.call(place, || {
            self.post(to, Stream::COPY, &(mine.len() as u64).to_le_bytes(), place)?;
            for chunk in mine.chunks(CHUNK) {
                self.post(to, Stream::COPY, chunk, place)?;
            }
            let first = self.next_copy(place, from)?;
            let bytes = first.as_slice().try_into().map(u64::from_le_bytes);
            let Ok(bytes) = bytes else { return Err(self.refuse(place, "a copy without a length")) };
            let mut theirs = Vec::new();
            if theirs.try_reserve_exact(bytes as usize).is_err() {
                return Err(self.refuse(place, format!("no memory for {bytes} bytes of rank {from}")));
            }
            while (theirs.len() as u64) < bytes {
                theirs.extend(self.next_copy(place, from)?);
            }
            Ok(theirs)
        })
    }

    fn next_copy(&self, place: ProgramPlace, from: usize) -> Result<Vec<u8>, CommError> {
        let mut state = self.wait_for(place, std::iter::once(from), Stream::COPY)?;
        let frame = state.pop(from, Stream::COPY);
        drop(state);
        let Some(frame) = frame else { return Err(self.refuse(place, "a copy that another thread took")) };
        let bytes = frame.bytes().to_vec();
        self.inbox.recycle(frame);
        Ok(bytes)
    }

    /// The secret by which the processes of the job know each other, for those that join it later.
    pub fn secret(&self) -> &JobSecret {
        &self.secret
    }
}
