//! What a checkpoint holds, counted: the bytes of a save, and of the host memory in which a snapshot of it waits to be written.

use crate::Plan;
use lockstep_ir::graph::State;
use lockstep_ir::program::{Role, Tensor};
use lockstep_ir::{Coordinates, MeshAxis, StepProgram};
use std::collections::BTreeSet;

/// What an elastic run keeps of each part of a checkpoint in host memory: two snapshots, each with a copy at another rank, and the buffer that they are
/// taken in.
const ELASTIC_COPIES: u64 = 5;

impl Plan {
    /// Bytes of host memory that the snapshots of an elastic run take on all ranks together.
    pub fn elastic_bytes(&self) -> u64 {
        ELASTIC_COPIES * self.checkpoint_bytes()
    }

    /// Bytes of the tensors of a checkpoint: every parameter and every moment once, as they are kept. The snapshots of all ranks make them up.
    pub fn checkpoint_bytes(&self) -> u64 {
        let mut names = BTreeSet::new();
        let stored = self.compiled.programs.iter().flat_map(stored);
        stored.filter(|t| names.insert(&t.name)).map(|t| t.whole.bytes()).sum()
    }

    /// Bytes of host memory that the snapshot of a rank takes: what it writes of a checkpoint.
    pub fn snapshot_bytes(&self, rank: usize) -> u64 {
        let mesh = &self.layout.mesh;
        let at: Coordinates = mesh.coordinates(rank);
        let (before, own) = self.compiled.programs.split_at(at.get(MeshAxis::Pp));
        // Of stages that have the same tensor, the first writes it.
        let first = |t: &&Tensor| !before.iter().any(|program| program.tensor(&t.name).is_some());
        let elements =
            |t: &Tensor| t.sharding.first_runs(&t.whole, mesh, at).iter().map(|run| run.len as u64).sum::<u64>();
        own.first().into_iter().flat_map(stored).filter(first).map(|t| elements(t) * t.whole.dtype.bytes() as u64).sum()
    }
}

/// The tensors of a program that checkpoints hold: of a parameter in bf16 or fp16 the f32 master weights, and moments.
fn stored(program: &StepProgram) -> impl Iterator<Item = &Tensor> {
    let has_master = |parameter: &Tensor| {
        program.tensors.iter().any(|t| matches!(t.role, Role::State(State::Master { of }) if of == parameter.value))
    };
    program.tensors.iter().filter(move |tensor| match &tensor.role {
        Role::State(State::Parameter(parameter)) => !parameter.frozen && !has_master(tensor),
        Role::State(State::Master { .. } | State::Moment { .. } | State::History(_)) => true,
        Role::State(
            State::Unit { .. }
            | State::Gradient { .. }
            | State::Total(_)
            | State::Constant(_)
            | State::Scalars
            | State::Cache,
        )
        | Role::Input
        | Role::Output
        | Role::StepOutput => false,
    })
}
