//! The share of a run's time that counts, against failures: restarts from the disk beside elastic worlds, with and without snapshots in memory and spare nodes.
//!
//! Failures come at a constant rate, and each costs what was done since the last state that is left, and the time to go on (`saves.rs` has the
//! formula). A job that restarts as a whole is given another node at once. An elastic run goes on with the nodes that it has until a failed one is back:
//! with N nodes, S spares and K away, it has ⌊(N + S − K) ÷ G⌋ copies of the model of G nodes each, at most N ÷ G; K is Poisson distributed with mean
//! (N + S) × repair time ÷ time between failures of a node. Spares cost as much as nodes that train.

use crate::saves::{FailureRate, lost};
use serde::Serialize;

/// A run, as far as failures concern it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RunUnderFailures {
    /// Nodes that its layout takes.
    pub nodes: usize,
    /// Nodes of one copy of the model: as many as must be there for any data-parallel rank.
    pub nodes_per_copy: usize,
    /// Seconds of a step.
    pub step_s: f64,
    /// Steps from one snapshot in memory to the next, and seconds that steps wait for one.
    pub snapshot_every: u64,
    /// As above.
    pub snapshot_s: f64,
    /// Seconds of a save to the disk, and of reading it again.
    pub save_s: f64,
}

/// The goodput of a run by what it does about failures: the share of the work of all its nodes, spares included, that counts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// Mean seconds between failures of the run.
    pub mtbf_s: f64,
    /// All is started again, from the last checkpoint.
    pub restart: f64,
    /// The nodes that are left go on, from the last checkpoint.
    pub elastic: f64,
    /// The nodes that are left go on, from snapshots in memory.
    pub snapshots: f64,
    /// The same, and spare nodes take the place of those that are away.
    pub spares: f64,
    /// How many spares: those with which that share is the largest.
    pub spare_nodes: usize,
}

impl Goodput {
    /// Of a run whose nodes fail at this rate.
    pub fn new(run: &RunUnderFailures, rate: &FailureRate) -> Self {
        let mtbf_s = rate.node_mtbf_s / run.nodes.max(1) as f64;
        let disk_s = rate.interval(run.nodes, run.save_s).best_s;
        let disk = |restart_s| 1.0 - lost(mtbf_s, run.save_s, restart_s, disk_s);
        let work_s = run.snapshot_every as f64 * run.step_s;
        let memory = 1.0 - lost(mtbf_s, run.snapshot_s, rate.recovery_s, work_s);
        let with =
            |spares: usize| memory * capacity(run, rate, spares) * run.nodes as f64 / (run.nodes + spares) as f64;
        // More than the mean and some of its deviations never pays.
        let away = away(run.nodes, rate);
        let most = (away + 6.0 * away.sqrt()).ceil() as usize + run.nodes_per_copy;
        let spare_nodes = (0..=most).max_by(|a, b| with(*a).total_cmp(&with(*b)).then(b.cmp(a))).unwrap_or(0);
        Self {
            mtbf_s,
            restart: disk(rate.restart_s),
            elastic: disk(rate.recovery_s + run.save_s) * capacity(run, rate, 0),
            snapshots: with(0),
            spares: with(spare_nodes),
            spare_nodes,
        }
    }
}

/// Nodes that are away in the mean, of `nodes`.
fn away(nodes: usize, rate: &FailureRate) -> f64 {
    nodes as f64 * rate.repair_s / rate.node_mtbf_s
}

/// The share of the copies of the model that there are nodes for, in the mean.
fn capacity(run: &RunUnderFailures, rate: &FailureRate, spares: usize) -> f64 {
    let (all, each) = (run.nodes + spares, run.nodes_per_copy.max(1));
    let copies = (run.nodes / each).max(1);
    let mean = away(all, rate);
    let (mut sum, mut logarithm) = (0.0, -mean);
    for away in 0..=all {
        if away > 0 {
            logarithm += (mean / away as f64).ln();
        }
        sum += logarithm.exp() * ((all - away) / each).min(copies) as f64;
    }
    sum / copies as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes that fail every 1000 h, each for 10 h; recovery takes 36 s, a restart an hour.
    fn rate() -> FailureRate {
        let hour = 3600.0;
        FailureRate {
            node_mtbf_s: 1000.0 * hour,
            restart_s: hour,
            recovery_s: 36.0,
            repair_s: 10.0 * hour,
            ..FailureRate::builtin()
        }
    }

    #[test]
    fn it_is_what_it_is_by_hand() {
        // 100 nodes: a failure every 10 h, one node away in the mean.
        let run = RunUnderFailures {
            nodes: 100,
            nodes_per_copy: 1,
            step_s: 6.0,
            snapshot_every: 6,
            snapshot_s: 0.0,
            save_s: 0.0,
        };
        let found = Goodput::new(&run, &rate());
        assert_eq!(found.mtbf_s, 36_000.0);
        // x = work ÷ M = recovery ÷ M = 0.001: the time is exp(x) (exp(x) − 1) ÷ x of the work. And 99 of 100 nodes are there.
        let by_hand = 0.001 / (0.001f64.exp() * 0.001f64.exp_m1()) * 0.99;
        assert!((found.snapshots - by_hand).abs() < 1e-9, "{found:?} {by_hand}");
        // Copies of 4 nodes: with P(0) = e⁻¹ all 25 are there, with 1 to 4 away 24, with 5 to 8 away 23.
        let four = RunUnderFailures { nodes_per_copy: 4, ..run };
        let p = |k: u32| (-1f64).exp() / (1..=k).map(f64::from).product::<f64>();
        let sum = |from: u32, to: u32| (from..=to).map(p).sum::<f64>();
        let by_hand = 1.0 - (sum(1, 4) + 2.0 * sum(5, 8)) / 25.0;
        assert!((capacity(&four, &rate(), 0) - by_hand).abs() < 1e-6, "{by_hand}");
        // A spare for the copy that one node away would cost pays.
        let spared = Goodput::new(&four, &rate());
        assert!(spared.spare_nodes >= 1 && spared.spares > spared.snapshots, "{spared:?}");
    }

    #[test]
    fn without_failures_nothing_is_lost_and_with_more_nodes_more_is() {
        let run = RunUnderFailures {
            nodes: 64,
            nodes_per_copy: 4,
            step_s: 10.0,
            snapshot_every: 10,
            snapshot_s: 0.1,
            save_s: 60.0,
        };
        let never = FailureRate { node_mtbf_s: 1e18, ..rate() };
        let found = Goodput::new(&RunUnderFailures { snapshot_s: 0.0, ..run }, &never);
        assert!([found.restart, found.elastic, found.snapshots, found.spares].iter().all(|share| *share > 0.999_999));
        assert_eq!(found.spare_nodes, 0);
        let mut before = Goodput { restart: 1.0, ..found };
        for nodes in [64, 128, 256, 512, 1024, 2048] {
            let found = Goodput::new(&RunUnderFailures { nodes, ..run }, &FailureRate::builtin());
            assert!(found.restart < before.restart && found.spares >= found.snapshots, "{nodes}: {found:?}");
            assert!(found.snapshots > found.restart, "{nodes}: {found:?}");
            before = found;
        }
    }
}
