//! The training loop: data → program → metrics → checkpoint.
//!
//! This crate owns the order of a run: what is prepared, planned, loaded, stepped, measured and saved, and what a run
//! directory holds. It computes nothing itself (executors do) and prints nothing (it reports [`Event`]s).
#![forbid(unsafe_code)]

mod analysis;
mod automatic;
pub mod bench;
mod bench_generate;
mod calibrate;
mod checkpoint;
mod compare;
mod cross_check;
mod dry_run;
mod elastic;
mod energy;
mod error;
mod event;
mod fp8;
mod loads;
mod loss_scale;
mod metrics;
mod noise;
mod profile;
mod read_ahead;
mod rehearse;
mod run;
mod sample;
mod schedule;
mod session;
mod settle;
mod slow_rank;
mod spikes;
mod timeline;
mod worlds;

pub use analysis::{Analysis, ClassTime, Learned, analyze, learn};
pub use bench_generate::{GenerationResult, GenerationSpec, bench_generate};
pub use calibrate::{CalibrationSpec, measure_machine};
pub use checkpoint::{CheckpointBench, SaveEnd, SaveFailure, SaveRequest, bench_checkpoint};
pub use compare::{Comparison, Criterion, OwnChoices, Promise, compare, shrink};
pub use dry_run::{DryData, DryRun, dry_run};
pub use elastic::{RecoveryParts, WorldChange};
pub use energy::EnergyMetrics;
pub use error::{Result, TrainError, Unmeasured};
pub use event::{Event, Show};
pub use fp8::Fp8Metrics;
pub use loads::{ExpertMetrics, LayerLoad};
pub use metrics::{GpuMetrics, ShadowMetrics, StepMetrics};
pub use noise::Measured;
pub use profile::{OpTime, Profile};
pub use rehearse::{RehearsalData, check_beginnings, check_places, check_tokenizer, other_layout};
pub use run::{Outcome, RunOptions, run};
pub use sample::Sample;
pub use schedule::learning_rate;
pub use session::{QueuedStep, Session, StepResult};
pub use settle::settled;
pub use spikes::{RollBack, SkippedStep, left_out};
pub use timeline::observed_timeline;
pub use worlds::{ElasticStart, run_elastic};
