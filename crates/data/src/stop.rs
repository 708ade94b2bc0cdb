//! Work that the caller may end.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{DataError, Result};

/// A stop flag that nobody sets: for work that runs to its end.
pub(crate) static NEVER: AtomicBool = AtomicBool::new(false);

/// An error once the caller asks to stop.
pub(crate) fn go_on(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) { Err(DataError::Interrupted) } else { Ok(()) }
}
