//! The training loop: data → program → metrics → checkpoint; and what a trained model is for: text and its loss.
//!
//! This crate owns the order of a run: what is prepared, planned, loaded, stepped, measured and saved, and what a run
//! directory holds. It computes nothing itself (executors do) and prints nothing (it reports [`Event`]s).
#![forbid(unsafe_code)]

mod analysis;
pub mod bench;
mod calibrate;
mod catalogue;
mod changes;
mod checkpoints;
mod compare;
mod data;
mod devices;
mod dry_run;
mod error;
mod evaluate;
mod event;
mod feed;
mod generate;
mod gpus;
mod hf;
mod inherited;
mod initial;
mod loss_scale;
mod machine;
mod noise;
mod processes;
mod profile;
mod rank_parts;
mod run;
mod run_dir;
mod sample;
mod sampling;
mod saves;
mod schedule;
mod session;
mod settle;
mod shell;
mod slow_rank;
mod state;
mod text;
mod timeline;
mod trained;

pub use analysis::{Analysis, ClassTime, Learned, analyze, learn};
pub use calibrate::{SaveSpec, measure_machine};
pub use catalogue::{catalogue, catalogue_folder};
pub use changes::Changed;
pub use checkpoints::{CheckpointSummary, checkpoints};
pub use compare::{Comparison, Criterion, Promise, compare, shrink};
pub use data::{Existing, RunCorpus, RunData, data_folder, prepare_data};
pub use devices::Devices;
pub use dry_run::{DryData, DryRun, dry_run};
pub use error::TrainError;
pub use evaluate::{CorpusEvaluation, EvaluateProgress, Evaluation, Score, Text, evaluate};
pub use event::{Event, GpuMetrics, StepMetrics};
pub use generate::{Generated, Generator, Stop, generate};
pub use gpus::SHARES as SHARES_GPUS;
pub use hf::{ExportOptions, Exported, Imported, export, import};
pub use inherited::inherited;
pub use machine::{Prediction, machine_profile, machines_folder, predict, processor, save_machine};
pub use noise::Measured;
pub use processes::Processes;
pub use profile::{OpTime, Profile};
pub use run::{Outcome, RunOptions, run};
pub use run_dir::RunDir;
pub use sample::Sample;
pub use sampling::Sampling;
pub use schedule::learning_rate;
pub use session::{QueuedStep, Session, StepResult};
pub use settle::settled;
pub use shell::shell_quoted;
pub use state::{Part, Weights, parts};
pub use text::{RunTokenizer, TextStream};
pub use timeline::observed_timeline;
pub use trained::Trained;
