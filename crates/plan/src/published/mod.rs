//! Published measurements: rows of other people's runs, each as a config of ours whose program does the same work.
//!
//! A row is read ([`read`]), described in keys of our own with the habits of its framework ([`describe`]), and compiled as any config is.

mod conventions;
mod csv;
mod fit;
mod hardware;
mod left_out;
mod memory;
mod peer;
mod possible;
mod predict;
mod program;
mod propose;
mod report;
mod residuals;
mod row;
mod shapes;
mod stats;

pub use fit::{Fitted, LeftOutGroup, Without, fit};
pub use hardware::hardware;
pub use left_out::left_out;
pub use memory::{MemoryTerms, StageMemory};
pub use peer::{Described, Description, Peer, describe};
pub use predict::{Case, Cases, File, Prediction, Work, predict};
pub use program::{PeerMachine, compile};
pub use propose::{Proposal, ProposedCell, proposals, regret_of_search};
pub use report::{Assumption, Oom, Regret, Report, RowReport, Summaries, Summary};
pub use residuals::{Distance, Interval, LeftOut, Residuals, spread};
pub use row::{FlopRate, Measured, PublishedShape, Refused, Row, Split, read};
pub use shapes::KnownModel;
pub use stats::{Errors, quantile, regret, spearman};
