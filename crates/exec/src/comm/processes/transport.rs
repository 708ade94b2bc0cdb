//! What moves bytes between processes.

use super::inbox::Stream;

/// Moves frames between processes. What comes in goes to the inbox that it was made with.
pub(super) trait Transport: Send + Sync {
    /// Sends a frame, and returns when its bytes may be changed, or when `goes_on` says no. Frames of one stream to one rank
    /// arrive in order, and before one of [`Stream::LEFT`] that is sent after them. The error says why the rank cannot be reached.
    fn send(&self, to: usize, stream: Stream, frame: &[u8], goes_on: &dyn Fn() -> bool) -> Result<(), String>;

    /// Moves what can be moved, where that takes somebody to do it: says whether it does.
    fn progress(&self) -> bool {
        false
    }
}
