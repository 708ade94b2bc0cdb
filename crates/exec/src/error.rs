//! Why programs cannot be loaded or run.

use crate::comm::CommError;
use crate::numbers::NotFinite;

/// Why a program cannot be loaded or run.
#[derive(Debug, thiserror::Error, lockstep_ir::Hint)]
pub enum ExecError {
    /// The arena does not fit.
    #[error("cannot allocate the arena of {0}")]
    OutOfMemory(String),
    /// The system gives no more threads.
    #[error("cannot start {0} threads: {1}")]
    Threads(usize, std::io::Error),
    /// A rank of several has ended the run.
    #[error("{0}")]
    #[hint(_0.hint())]
    Rank(#[from] CommError),
    /// The device does not do what it should.
    #[error("{text}")]
    #[hint(hint.clone())]
    Device {
        /// What is wrong.
        text: String,
        /// What to do about it on the device.
        hint: Option<String>,
        /// What else may help.
        remedy: Option<Remedy>,
    },
    /// An instruction made a number that is not finite, where that was [looked for](crate::Executor::check_numbers).
    #[error("{0}")]
    NotFinite(Box<NotFinite>),
    /// The program asks for something that this executor was not told of.
    #[error("internal error: {0}")]
    #[hint("this is a bug in Lockstep, please report it with your config")]
    Internal(String),
}

/// What may help a program that cannot be loaded or run. How it is asked for, the callers know: executors have no settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// A program that needs less memory.
    LessMemory,
    /// Fewer threads.
    FewerThreads,
    /// More time for a rank that shows no sign of life.
    LongerTimeout,
    /// Another device.
    OtherDevice,
}

impl ExecError {
    /// What may help besides what the hint says.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            ExecError::OutOfMemory(_) => Some(Remedy::LessMemory),
            ExecError::Threads(..) => Some(Remedy::FewerThreads),
            ExecError::Rank(CommError::Stalled { .. }) => Some(Remedy::LongerTimeout),
            ExecError::Device { remedy, .. } => *remedy,
            ExecError::Rank(_) | ExecError::NotFinite(_) | ExecError::Internal(_) => None,
        }
    }
}
