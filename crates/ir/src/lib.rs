//! What every part of Lockstep speaks: ops, graphs, step programs, and the facts that hold for them.
//!
//! This crate owns the op table, the two levels of intermediate representation ([`Graph`] and [`StepProgram`]), their
//! printed forms, the static verifier and the account of bytes and FLOPs. It does no I/O, reads no clock and no
//! environment, and knows nothing of how graphs are built, compiled or executed.
#![forbid(unsafe_code)]

// What is derived here names the crate as others do.
extern crate self as lockstep_ir;

pub mod account;
pub mod bf16;
pub mod blocks;
mod collective;
pub mod counter;
mod dtype;
pub mod dynamic8;
pub mod f16;
mod f8;
mod fusion;
pub mod graph;
mod hint;
mod init;
mod layout;
mod mesh;
pub mod op;
mod placements;
mod profile;
pub mod program;
pub mod roles;
pub mod rows8;
mod scalars;
pub mod schedule;
mod shape;
mod sharding;
pub mod squares;
pub mod timeline;
pub mod units;
pub mod verify;
pub mod walk;

pub use collective::{Collective, CopiedPart, Movement};
pub use dtype::{DType, MatmulType};
pub use f8::{F8, Seen};
pub use fusion::{FEW_ROWS, FusedGroup, FusedMatmul, Fusion};
pub use graph::{Graph, ValueId};
pub use hint::Hint;
pub use init::{Init, RopeScaling};
pub use layout::{ContextParallel, Layout, LayoutError};
pub use mesh::{Axes, Coordinates, Mesh, MeshAxis};
pub use op::{Op, OpKind, TypeError};
pub use profile::{DeviceProfile, FP8_WEIGHTS, Workspace};
pub use program::StepProgram;
pub use scalars::{StepLimits, StepRounding, StepScalars, fixed};
pub use schedule::Schedule;
pub use shape::{Axis, Dim, Section, TensorType};
pub use sharding::{FLAT_BLOCK, Gathered, Placement, Run, Sharding, Span, gathered};
