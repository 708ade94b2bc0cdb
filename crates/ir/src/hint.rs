//! Errors say what is wrong; what a user can do about it is a field of its own.
//!
//! `#[hint]` stands beside `#[error]`, and `Hint::with_hint` alone puts it on a line of its own. Crates that do not
//! know the config name no key of it, and only `cli` names flags of the command line.

pub use lockstep_hint::Hint;
use std::fmt::Display;

/// An error that may know what a user can do about it.
pub trait Hint: Display {
    /// What to do, where something can be told. The message does not repeat it.
    fn hint(&self) -> Option<String>;

    /// The message and, on a line of its own, the hint: as a user sees them.
    fn with_hint(&self) -> String {
        match self.hint() {
            Some(hint) => format!("{self}\nhint: {hint}"),
            None => self.to_string(),
        }
    }
}
