//! The schema of `run.toml`: keys, presets, `--set` overrides, origins and diagnostics.
//!
//! Every key is declared once, in `schema.rs`. The typed structs, the parser, the error messages, the listing of
//! `lockstep config` and the writer of the resolved file all read that declaration. The way of a file through the
//! crate:
//!
//! ```text
//! text ── document ──┐
//! --set ─ overrides ─┼─► layers ── resolve (defaults, derived keys) ── checks (between keys) ──► Config
//! preset ────────────┘
//! ```
//!
//! This crate reads one file, the config. It knows nothing of graphs, devices or data sets: whether a shape fits a
//! machine or a path exists is for others to say. Which layouts fit a model and a batch is in [`legal`].

#![forbid(unsafe_code)]

mod architecture;
mod batches;
mod checks;
mod config;
mod conflict;
mod declare;
mod defaults;
mod document;
mod error;
mod experts;
mod inherit;
mod kind;
mod latent;
mod layers;
pub mod legal;
mod lookup;
mod optimizers;
mod origin;
mod overrides;
mod pattern;
mod presets;
mod quantity;
mod resolve;
mod rules;
mod schema;
mod search;
mod source;
mod stages;
mod suggest;
mod value;
mod values;
mod words;
mod written;

pub use architecture::{Architecture, Features};
pub use batches::{Batch, BatchStage, Batches};
pub use config::PLANNED;
pub use declare::KeyDoc;
pub use error::ConfigError;
pub use inherit::{Inherited, Located, NamedFiles, NotInherited, Opener};
pub use latent::LatentAttention;
pub use layers::{LayerParts, LayerRope, shortest};
pub use optimizers::OptimizerName;
pub use pattern::{fits_pattern, names_without_numbers};
pub use presets::presets;
pub use quantity::{bytes, count};
pub use schema::{
    CheckpointConfig, ClusterConfig, Config, DataConfig, EvalConfig, LoraConfig, ModelConfig, OptimizerConfig,
    ParallelConfig, PrecisionConfig, RecomputeConfig, SpikesConfig, TelemetryConfig, TrainConfig,
};
pub use search::{FoundKey, MissingFeature, keys_at, schema, search};
pub use suggest::nearest;
pub use value::{
    Bytes, CorpusConfig, GroupConfig, OffloadSize, RampConfig, RopeScalingConfig, SaveEvery, WeightConfig,
};
pub use words::{
    Activation, AttentionMethod, DataFormat, DeviceChoice, Fp8Recipe, FrozenPrecision, GradientPrecision, LayerType,
    LayoutSource, LrSchedule, MasterPrecision, MomentPrecision, NormPlaces, PrecisionPolicy, QkNorm, RecomputePolicy,
    TrainOnTurns,
};
pub use written::{Change, Difference};
