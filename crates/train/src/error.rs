use crate::spikes::{RollBack, SkippedStep, rolled_back, spike_report};
use lockstep_checkpoint::CheckpointError;
use lockstep_config::ConfigError;
use lockstep_data::DataError;
use lockstep_exec::ExecError;
use lockstep_exec::comm::CommError;
use lockstep_exec::comm::processes::JoinError;
use lockstep_host::{ElasticError, HostError, from_below};
use lockstep_infer::InferError;
use lockstep_ir::units;
use lockstep_plan::PlanError;
use lockstep_rundir::RunDirError;
use lockstep_sim::SimError;
use std::path::PathBuf;

/// What training gives, or why it does not.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;

/// Why a run did not start or did not finish. Nothing that was saved is lost by any of these.
#[derive(Debug, thiserror::Error, lockstep_ir::Hint)]
pub enum TrainError {
    /// The machine cannot do it, or its processes not together.
    #[error("{0}")]
    #[hint(_0.hint())]
    Host(#[from] HostError),
    /// The model, its data or a checkpoint cannot be used.
    #[error("{0}")]
    #[hint(_0.hint())]
    Infer(InferError),
    /// A checkpoint could not be written, not in a second attempt either.
    #[error("step {step} was not saved: {cause}")]
    #[hint(hint.clone())]
    NotSaved {
        /// Its step.
        step: u64,
        /// Why.
        cause: String,
        /// What to do.
        hint: Option<String>,
    },
    /// There is no memory for a snapshot.
    #[error("cannot take {} of host memory for snapshots of checkpoints", lockstep_ir::units::bytes(*bytes))]
    #[hint("set checkpoint.asynchronous = false: steps then wait while a checkpoint is written")]
    NoSnapshot {
        /// How much it takes.
        bytes: u64,
    },
    /// What a measurement of this machine would tell is not known.
    #[error("{}: {what}", file.display())]
    Unmeasured {
        /// The file that would have it.
        file: PathBuf,
        /// What.
        what: Unmeasured,
    },
    /// There is no checkpoint of a step.
    #[error("{} has no checkpoint of step {step}", dir.display())]
    #[hint((!there.is_empty()).then(|| format!("there are those of {}", steps(there))))]
    NoSuchStep {
        /// The run directory.
        dir: PathBuf,
        /// The step that was asked for.
        step: u64,
        /// Steps that have one.
        there: Vec<u64>,
    },
    /// What went wrong while all numbers were looked at.
    #[error("step {step}: {error}")]
    #[hint(error.hint())]
    InStep {
        /// The step; in a validation, the one before it.
        step: u64,
        /// What.
        error: Box<TrainError>,
    },
    /// The spike policy has rolled back as often as it may.
    #[error(
        "step {step}: {} updates were skipped in a row, and spikes.roll_backs = {} allows no further roll-back{}",
        skipped.len(), rolled_back(roll_backs), spike_report(roll_backs, skipped)
    )]
    Spikes {
        /// The last step.
        step: u64,
        /// What has been done.
        roll_backs: Vec<RollBack>,
        /// What would have led to one more.
        skipped: Vec<SkippedStep>,
    },
    /// Losses or gradients are not finite.
    #[error(
        "{what} not finite for {steps} steps in a row (last at step {step}: loss {loss}, gradient norm {grad_norm})",
        what = if loss.is_finite() { "the gradient is" } else { "the loss is" }
    )]
    Diverged {
        /// Consecutive bad steps.
        steps: u64,
        /// The last of them.
        step: u64,
        /// Its loss.
        loss: f64,
        /// Its gradient norm.
        grad_norm: f32,
    },
    /// Tokens that went to experts whose rank has no room for them.
    #[error(
        "step {step} sends experts {} rows more than parallel.ep_bound = {bound} times an even share has room for",
        units::thousands(*.rows)
    )]
    ExpertBound {
        /// The step.
        step: u64,
        /// Rows that found no place, in all layers.
        rows: u64,
        /// The config's.
        bound: f64,
    },
    /// The world of an elastic run ends, for another one.
    #[error("the ranks of the run change")]
    WorldChanges,
    /// MPI ends all processes together.
    #[error("cluster.elastic does not go with MPI: mpirun ends the whole job when a rank is lost")]
    #[hint(
        "start the ranks with `lockstep launch` or srun, or set LOCKSTEP_MPI_LIBRARY=none and have mpirun keep the job"
    )]
    ElasticMpi,
    /// A process cannot join a run whose secret it does not know.
    #[error("a process that joins a run later needs the secret of the job")]
    #[hint("set LOCKSTEP_JOB_SECRET to what the other ranks have")]
    NoJobSecret,
    /// No layout fits those that are there.
    #[error("no layout fits {ranks} ranks with the batch of this run, and cluster.elastic asks for {least} at least")]
    #[hint("choose a train.global_batch that more numbers of ranks divide, or a lower cluster.elastic")]
    NoLayout {
        /// Ranks that are there.
        ranks: usize,
        /// The fewest that may train.
        least: usize,
    },
    /// What determinism costs was asked for where it costs nothing.
    #[error("runs on the CPU always give the same bits: there is nothing to compare")]
    AlwaysDeterministic,
    /// A run directory holds imported weights.
    #[error("{} holds imported weights, not a run", dir.display())]
    Imported {
        /// The run directory.
        dir: PathBuf,
    },
    /// What a run only warns of, and a rehearsal refuses.
    #[error("{problem}")]
    #[hint("{hint}")]
    Rehearsal {
        /// What.
        problem: String,
        /// What to do.
        hint: String,
    },
}

/// What a machine without a profile lacks.
#[derive(Debug, thiserror::Error)]
pub enum Unmeasured {
    /// The forecast of a run.
    #[error("the run has no prediction: the machine had no profile when it began")]
    Prediction,
    /// The times of a run's ops.
    #[error("there is no such file")]
    Times,
    /// The profile of this processor.
    #[error("there is no profile of {0}")]
    Machine(String),
}

impl TrainError {
    /// Whether nothing is wrong: the run was asked to stop, and the same command goes on.
    pub fn is_interrupt(&self) -> bool {
        matches!(
            self,
            TrainError::Infer(InferError::Data(DataError::Interrupted))
                | TrainError::Host(HostError::Join(JoinError::Stopped) | HostError::Elastic(ElasticError::Stopped))
        )
    }

    /// Whether the process waited to join a run that has ended meanwhile.
    pub fn has_ended_meanwhile(&self) -> bool {
        matches!(self, TrainError::Host(HostError::Elastic(ElasticError::Ended)))
    }

    /// Whether the same command again would end the same way, from the last checkpoint too: what it computes has failed, not what it
    /// runs on.
    pub fn recurs(&self) -> bool {
        match self {
            TrainError::Host(error) => error.recurs() || error.is_request(),
            TrainError::NotSaved { .. } | TrainError::Rehearsal { .. } | TrainError::WorldChanges => false,
            TrainError::Infer(InferError::EvaluationBound { .. }) => true,
            TrainError::Infer(error) => error.is_request(),
            _ => true,
        }
    }

    /// Whether ranks that are left can go on without those that are gone.
    pub(crate) fn is_loss(&self) -> bool {
        let TrainError::Host(error) = self else { return false };
        match error {
            HostError::Exec(error) => match &**error {
                ExecError::Rank(
                    CommError::Lost { .. } | CommError::Cut { .. } | CommError::Stalled { .. } | CommError::Left { .. },
                ) => true,
                // Of another rank, which has ended.
                ExecError::Rank(CommError::Failed { host, .. }) => host.is_some(),
                _ => false,
            },
            // Somebody was lost while the ranks met.
            HostError::Join(error) => {
                use JoinError::{Abandoned, Early, Missing, NoAnswer, Refused, Unconnected};
                matches!(
                    error,
                    Abandoned { .. }
                        | Early { .. }
                        | Missing { .. }
                        | NoAnswer { .. }
                        | Refused(_)
                        | Unconnected { .. }
                )
            }
            _ => false,
        }
    }

    /// Whether the request was wrong, rather than the run.
    pub fn is_request(&self) -> bool {
        match self {
            TrainError::Host(error) => error.is_request(),
            TrainError::Infer(error) => error.is_request(),
            TrainError::Unmeasured { .. } | TrainError::NoSuchStep { .. } => true,
            TrainError::AlwaysDeterministic | TrainError::Imported { .. } => true,
            TrainError::ElasticMpi | TrainError::NoJobSecret => true,
            _ => false,
        }
    }
}

from_below!(TrainError, HostError: ExecError, JoinError, PlanError, RunDirError, SimError);
from_below!(TrainError, InferError: CheckpointError, ConfigError, DataError);

impl From<InferError> for TrainError {
    fn from(error: InferError) -> Self {
        match error {
            InferError::Host(error) => TrainError::Host(*error),
            error => TrainError::Infer(error),
        }
    }
}

/// `5, 10 and 15`.
fn steps(steps: &[u64]) -> String {
    let text: Vec<String> = steps.iter().map(u64::to_string).collect();
    match &text[..] {
        [] => String::new(),
        [only] => format!("step {only}"),
        [first @ .., last] => format!("steps {} and {last}", first.join(", ")),
    }
}
