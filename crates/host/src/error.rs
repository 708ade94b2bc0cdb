use crate::elastic::ElasticError;
use lockstep_exec::comm::processes::JoinError;
use lockstep_exec::{ExecError, Remedy};
use lockstep_ir::Hint;
use lockstep_plan::PlanError;
use lockstep_rundir::RunDirError;
use lockstep_sim::SimError;

/// What a machine gives, or why it does not.
pub type Result<T, E = HostError> = std::result::Result<T, E>;

/// Why a machine cannot do what it is asked for, or its processes cannot do it together.
#[derive(Debug, thiserror::Error, lockstep_ir::Hint)]
pub enum HostError {
    /// The run directory cannot be used as it is asked for.
    #[error("{0}")]
    #[hint(_0.hint())]
    Dir(#[from] RunDirError),
    /// The config has no program, or one that does not fit.
    #[error("{0}")]
    #[hint(_0.hint())]
    Plan(#[from] PlanError),
    /// A data file of hardware, or what it says of a program.
    #[error("{0}")]
    #[hint(_0.hint())]
    Hardware(#[from] SimError),
    /// The executor cannot load or run the program.
    #[error("{0}")]
    #[hint(exec_hint(_0))]
    Exec(Box<ExecError>),
    /// The processes of a run do not find each other.
    #[error("{0}")]
    #[hint(_0.hint())]
    Join(#[from] JoinError),
    /// Processes that have lost some of their number cannot go on together.
    #[error("{0}")]
    #[hint(_0.hint())]
    Elastic(#[from] ElasticError),
    /// There are more or fewer processes than ranks.
    #[error(
        "the config has {ranks} rank{} ({layout}), and {processes} processes were started",
        if *.ranks == 1 { "" } else { "s" }
    )]
    OtherRanks {
        /// The layout of the config.
        layout: String,
        /// Its ranks.
        ranks: usize,
        /// Processes that there are.
        processes: usize,
    },
    /// A host has more ranks than GPUs.
    #[error(
        "host {host} has {} for {ranks} ranks",
        if *.gpus == 1 { "1 GPU".to_owned() } else { format!("{gpus} GPUs") }
    )]
    FewGpus {
        /// The host.
        host: String,
        /// Ranks there.
        ranks: usize,
        /// GPUs there.
        gpus: usize,
    },
    /// A process has no GPU that it can use.
    #[error("rank {rank} on host {host} cannot use a GPU: {problem}")]
    #[hint("{hint}, or train with train.device = \"cpu\"")]
    NoGpu {
        /// The rank.
        rank: usize,
        /// Its host.
        host: String,
        /// Why not.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// Processes have other things in hand.
    #[error(
        "rank 0 on host {} and rank {rank} on host {} do not have the same {what}: {first} against {other}",
        .hosts[0], .hosts[1]
    )]
    #[hint("start all ranks with the same binary, config file, options and data")]
    Disagree {
        /// What differs.
        what: &'static str,
        /// The rank that has something else than the first.
        rank: usize,
        /// The hosts of both.
        hosts: Box<[String; 2]>,
        /// What the first has.
        first: String,
        /// What the other has.
        other: String,
    },
    /// The run directory of one host is not that of another.
    #[error(
        "the run directory of rank {rank}, {} on host {}, is not that of rank 0, {} on host {}",
        .dirs[1], .hosts[1], .dirs[0], .hosts[0]
    )]
    NotShared {
        /// The rank that does not find it.
        rank: usize,
        /// The hosts of rank 0 and of that rank.
        hosts: Box<[String; 2]>,
        /// Their run directories.
        dirs: Box<[String; 2]>,
    },
    /// Processes were started with other configs, options or variables.
    #[error(
        "rank 0 on host {} and rank {rank} on host {} were told different things:{}",
        .hosts[0], .hosts[1], differences.iter().map(|text| format!("\n  {text}")).collect::<String>()
    )]
    #[hint("start all ranks with the same config file, options and variables")]
    ToldOtherwise {
        /// The rank that was told something else than the first.
        rank: usize,
        /// The hosts of both.
        hosts: Box<[String; 2]>,
        /// What differs, with both values.
        differences: Vec<String>,
    },
    /// Hosts do not have the same time.
    #[error("the clock of rank {rank} on host {} differs from that of rank 0 on host {} by {apart}", .hosts[1], .hosts[0])]
    #[hint("set the clocks of all hosts by NTP or chrony: signatures, certificates and the times of events need them")]
    OtherClock {
        /// The rank whose clock differs from that of the first.
        rank: usize,
        /// The hosts of both.
        hosts: Box<[String; 2]>,
        /// By how much: with a plus where it is ahead.
        apart: String,
    },
}

impl HostError {
    /// Whether all processes find it out by themselves.
    pub fn is_known_to_all(&self) -> bool {
        use HostError::{Disagree, FewGpus, NoGpu, NotShared, OtherClock, ToldOtherwise};
        matches!(
            self,
            OtherClock { .. }
                | ToldOtherwise { .. }
                | Disagree { .. }
                | NotShared { .. }
                | FewGpus { .. }
                | NoGpu { .. }
        )
    }

    /// Whether the same command again would end the same way: what it computes has failed, not what it runs on.
    pub fn recurs(&self) -> bool {
        match self {
            HostError::Plan(_) => true,
            HostError::Exec(error) => matches!(**error, ExecError::OutOfMemory(_) | ExecError::Internal(_)),
            HostError::Join(error) => {
                matches!(error, JoinError::OtherSize { .. } | JoinError::OtherBuild { .. } | JoinError::Twice { .. })
            }
            _ => false,
        }
    }

    /// Whether the request was wrong, rather than the run.
    pub fn is_request(&self) -> bool {
        match self {
            HostError::Plan(error) => error.is_request(),
            HostError::Dir(error) => error.is_request(),
            HostError::Hardware(error) => matches!(error, SimError::File { .. }),
            HostError::Exec(_) | HostError::Join(_) | HostError::NoGpu { .. } | HostError::Elastic(_) => false,
            HostError::OtherClock { .. } => false,
            HostError::OtherRanks { .. } | HostError::FewGpus { .. } | HostError::Disagree { .. } => true,
            HostError::NotShared { .. } | HostError::ToldOtherwise { .. } => true,
        }
    }
}

impl From<ExecError> for HostError {
    fn from(error: ExecError) -> Self {
        HostError::Exec(Box::new(error))
    }
}

/// What an executor says to do, with the keys of the config that may help.
pub(crate) fn exec_hint(error: &ExecError) -> Option<String> {
    let (behind_a_hint, keys) = match error.remedy() {
        None => return error.hint(),
        Some(Remedy::LessMemory) => {
            (", ", "lower train.micro_batch, or set recompute.policy = \"selective\" or precision.policy = \"bf16\"")
        }
        Some(Remedy::FewerThreads) => ("; ", "lower train.threads; 0 uses one thread per core"),
        Some(Remedy::LongerTimeout) => ("; ", "raise parallel.timeout if an op legitimately takes that long"),
        Some(Remedy::OtherDevice) => (", or ", "train with train.device = \"cpu\""),
    };
    Some(error.hint().map_or_else(|| keys.to_owned(), |hint| hint + behind_a_hint + keys))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_exec::comm::CommError;

    #[test]
    fn what_an_executor_says_ends_with_the_keys_that_may_help() {
        let shown = |error: ExecError| HostError::from(error).with_hint();
        let memory = "lower train.micro_batch, or set recompute.policy = \"selective\" or precision.policy = \"bf16\"";
        assert_eq!(
            shown(ExecError::OutOfMemory("3 GiB".into())),
            format!("cannot allocate the arena of 3 GiB\nhint: {memory}")
        );
        let device = |text: &str, hint: &str, remedy| {
            shown(ExecError::Device { text: text.to_owned(), hint: Some(hint.to_owned()), remedy: Some(remedy) })
        };
        assert_eq!(device("full", "end others", Remedy::LessMemory), format!("full\nhint: end others, {memory}"));
        assert_eq!(
            device("none", "check", Remedy::OtherDevice),
            "none\nhint: check, or train with train.device = \"cpu\""
        );
        let threads = shown(ExecError::Threads(9, std::io::Error::other("no")));
        assert!(threads.ends_with("threads: no\nhint: lower train.threads; 0 uses one thread per core"), "{threads}");
        let left = CommError::Failed { rank: 1, host: None, place: None, reason: "it is gone".into(), hint: None };
        assert_eq!(shown(ExecError::Rank(left)), "rank 1 failed before its first op: it is gone");
    }
}
