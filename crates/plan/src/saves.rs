//! How often to save a checkpoint: where failures come at a constant rate, the interval that loses the least time.
//!
//! A run of many nodes fails every M = (mean time between failures of a node) ÷ nodes. It works for τ, saves for δ, and goes back
//! to the last checkpoint after a failure, which takes a restart of R. The time of all work is that work times
//! M·exp(R/M)·(exp((τ + δ)/M) − 1) ÷ τ (Daly 2006, equation 20): failures while saving and restarting are counted. Its least is
//! found numerically; Young's and Daly's formulas stand beside it.

use crate::Plan;
use crate::formulas::fewer_bytes;
use crate::plan::optimizer;
use lockstep_config::{Config, SaveEvery};
use lockstep_ir::{Coordinates, MeshAxis};
use lockstep_sim::Hardware;
use serde::{Deserialize, Serialize};

/// What is known of failures and of saving, where nobody has measured it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FailureRate {
    /// Mean seconds between failures of one node.
    pub node_mtbf_s: f64,
    /// Where that figure comes from.
    pub source: String,
    /// Seconds from a failure to the first new step.
    pub restart_s: f64,
    /// Seconds from a failure to the first new step where the nodes that are left go on.
    pub recovery_s: f64,
    /// Seconds until a failed node is back.
    pub repair_s: f64,
    /// Bytes per second that one node writes.
    pub node_bytes_per_s: f64,
    /// Bytes per second that all nodes write together.
    pub bytes_per_s: f64,
    /// Bytes per second that a GPU copies to the memory of its host, where its link is not slower.
    pub to_host_bytes_per_s: f64,
}

#[derive(Deserialize)]
struct FailuresFile {
    nodes: NodesEntry,
    restart: RestartEntry,
    recovery: RecoveryEntry,
    repair: RepairEntry,
    storage: StorageEntry,
}

#[derive(Deserialize)]
struct NodesEntry {
    mtbf_hours: f64,
    source: String,
}

#[derive(Deserialize)]
struct RestartEntry {
    minutes: f64,
}

#[derive(Deserialize)]
struct RecoveryEntry {
    seconds: f64,
}

#[derive(Deserialize)]
struct RepairEntry {
    hours: f64,
}

#[derive(Deserialize)]
struct StorageEntry {
    gb_per_s_per_node: f64,
    gb_per_s: f64,
    gb_per_s_per_gpu_to_host: f64,
}

impl FailureRate {
    /// The published figure, and what is assumed beside it (`data/failures.toml`).
    pub fn builtin() -> Self {
        let text = include_str!("../data/failures.toml");
        let file: FailuresFile = toml::from_str(text).unwrap_or_else(|error| unreachable!("failures.toml: {error}"));
        Self {
            node_mtbf_s: file.nodes.mtbf_hours * 3600.0,
            source: file.nodes.source,
            restart_s: file.restart.minutes * 60.0,
            recovery_s: file.recovery.seconds,
            repair_s: file.repair.hours * 3600.0,
            node_bytes_per_s: file.storage.gb_per_s_per_node * 1e9,
            bytes_per_s: file.storage.gb_per_s * 1e9,
            to_host_bytes_per_s: file.storage.gb_per_s_per_gpu_to_host * 1e9,
        }
    }

    /// Seconds of a save of this many bytes by this many nodes.
    pub fn save_s(&self, bytes: u64, nodes: usize) -> f64 {
        bytes as f64 / (self.node_bytes_per_s * nodes as f64).min(self.bytes_per_s)
    }

    /// The best interval of a run on this many nodes, whose saves take so long.
    pub fn interval(&self, nodes: usize, save_s: f64) -> SaveInterval {
        SaveInterval::new(self.node_mtbf_s / nodes.max(1) as f64, save_s, self.restart_s)
    }
}

/// What holds steps up that is no part of them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Stalls {
    /// Bytes of tokens that a node reads for a step, and the seconds that it takes: steps wait for what takes longer than they do.
    pub data_bytes: u64,
    /// As above.
    pub data_s: f64,
    /// Bytes that a checkpoint takes of the rank that gives most, and seconds that steps wait for one.
    pub checkpoint_bytes: u64,
    /// As above.
    pub checkpoint_s: f64,
    /// Steps from one checkpoint to the next; 0 for none.
    pub checkpoint_every: u64,
    /// Seconds that a step waits for both, in the mean.
    pub step_s: f64,
}

/// Bytes of a token where it is stored.
const TOKEN: u64 = 4;

impl Stalls {
    /// Of a run on this hardware whose steps take so long.
    pub fn new(config: &Config, plan: &Plan, hardware: &Hardware, step_s: f64) -> Self {
        let rate = FailureRate::builtin();
        let nodes = plan.layout.mesh.ranks().div_ceil(hardware.cluster.gpus_per_node);
        let to_host_bytes_per_s = hardware.gpu.host_bytes_per_s.unwrap_or(f64::INFINITY).min(rate.to_host_bytes_per_s);
        let data_bytes = (TOKEN * plan.tokens_per_step).div_ceil(nodes.max(1) as u64);
        let data_s = data_bytes as f64 / rate.node_bytes_per_s.min(rate.bytes_per_s / nodes.max(1) as f64);
        let mesh = &plan.layout.mesh;
        // Of the ranks of a stage the first gives most: what several have, it writes.
        let first = |stage: usize| mesh.rank(Coordinates::default().with(MeshAxis::Pp, stage));
        let stages = 0..plan.compiled.programs.len();
        let checkpoint_bytes = stages.map(|stage| plan.snapshot_bytes(first(stage))).max().unwrap_or(0);
        let save_s = rate.save_s(plan.checkpoint_bytes(), nodes);
        let checkpoint_s = match config.checkpoint.asynchronous {
            true => checkpoint_bytes as f64 / to_host_bytes_per_s,
            false => save_s,
        };
        let checkpoint_every = match config.checkpoint.every {
            SaveEvery::Steps(steps) => steps,
            SaveEvery::Auto => rate.interval(nodes, checkpoint_s).steps(step_s).0,
        };
        let per_step = if checkpoint_every == 0 { 0.0 } else { checkpoint_s / checkpoint_every as f64 };
        let stalls = Self { data_bytes, data_s, checkpoint_bytes, checkpoint_s, checkpoint_every, step_s: 0.0 };
        Self { step_s: (data_s - step_s).max(0.0) + per_step, ..stalls }
    }
}

/// How long to work from one checkpoint to the next.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SaveInterval {
    /// Mean seconds between failures of the run.
    pub mtbf_s: f64,
    /// Seconds of a save.
    pub save_s: f64,
    /// Seconds of a restart.
    pub restart_s: f64,
    /// Seconds of work between two saves that lose the least time.
    pub best_s: f64,
    /// By Young 1974: √(2δM).
    pub young_s: f64,
    /// By Daly 2006, of higher order.
    pub daly_s: f64,
    /// The share of the time that saving, lost work and restarts take at the best interval.
    pub lost: f64,
}

impl SaveInterval {
    /// From the mean time between failures of the run, the time of a save and that of a restart.
    pub fn new(mtbf_s: f64, save_s: f64, restart_s: f64) -> Self {
        let best_s = exact(mtbf_s, save_s);
        let (young_s, daly_s) = (young(mtbf_s, save_s), daly(mtbf_s, save_s));
        let lost = lost(mtbf_s, save_s, restart_s, best_s);
        Self { mtbf_s, save_s, restart_s, best_s, young_s, daly_s, lost }
    }

    /// The interval in steps of this many seconds, at least one, and the share of time that it loses.
    pub fn steps(&self, step_s: f64) -> (u64, f64) {
        let steps = (self.best_s / step_s).round().max(1.0);
        (steps as u64, lost(self.mtbf_s, self.save_s, self.restart_s, steps * step_s))
    }
}

/// Bytes of a checkpoint of a run of this many parameters: master weights, or weights that are their own, and moments.
pub fn checkpoint_bytes(config: &Config, parameters: u64) -> u64 {
    let moments = optimizer(config).rule.most_moments() as f64;
    (4.0 * (1.0 + moments) * parameters as f64 - fewer_bytes(config, moments, 2.0)) as u64
}

/// Young's interval: to first order.
fn young(mtbf: f64, save: f64) -> f64 {
    (2.0 * save * mtbf).sqrt()
}

/// Daly's: to higher order.
fn daly(mtbf: f64, save: f64) -> f64 {
    let ratio = save / (2.0 * mtbf);
    if ratio < 1.0 { young(mtbf, save) * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - save } else { mtbf }
}

/// Where the derivative of the whole time is zero: 1 − τ/M = exp(−(τ + δ)/M), whose left side falls faster than its right.
fn exact(mtbf: f64, save: f64) -> f64 {
    let save = save / mtbf;
    let (mut low, mut high) = (0.0f64, 1.0f64);
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        // 1 − exp(−x) without the loss of digits.
        if -(-(middle + save)).exp_m1() > middle { low = middle } else { high = middle }
    }
    0.5 * (low + high) * mtbf
}

/// The share of the time that is not work.
pub(crate) fn lost(mtbf: f64, save: f64, restart: f64, work: f64) -> f64 {
    let whole = mtbf * (restart / mtbf).exp() * ((work + save) / mtbf).exp_m1();
    1.0 - work / whole
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::counter;

    #[test]
    fn the_formulas_agree_where_saves_are_short_and_part_where_they_are_not() {
        for mtbf in [600.0, 86_400.0, 3e7] {
            for share in [1e-6, 1e-4, 1e-2, 0.1, 0.5] {
                let i = SaveInterval::new(mtbf, share * mtbf, 0.0);
                // Daly's error is of a higher power of δ/M than Young's.
                let [young, daly] = [i.young_s, i.daly_s].map(|s| (s / i.best_s - 1.0).abs());
                assert!(young <= 1.2 * share.sqrt() + 1e-9, "{mtbf} {share}: {young}");
                assert!(daly <= 0.3 * share.powf(1.5) + 1e-7, "{mtbf} {share}: {daly}");
                // It is the least: neighbours lose more.
                let at = |work: f64| lost(mtbf, share * mtbf, 0.0, work);
                for near in [0.5, 0.9, 1.1, 2.0] {
                    assert!(at(near * i.best_s) > i.lost, "{mtbf} {share} {near}");
                }
            }
        }
    }

    #[test]
    fn a_run_with_random_failures_loses_what_was_expected() {
        let (mtbf, save, restart) = (1000.0, 30.0, 60.0);
        let interval = SaveInterval::new(mtbf, save, restart);
        let key = counter::key(7, "failures");
        let mut draws = 0;
        let mut failure = || {
            draws += 1;
            let uniform = (counter::bits(key, draws) >> 11) as f64 / (1u64 << 53) as f64;
            -mtbf * (1.0 - uniform).ln()
        };
        for work in [interval.best_s, 0.4 * interval.best_s, 3.0 * interval.best_s] {
            let (mut time, mut done) = (0.0, 0.0);
            while done < 2e7 {
                match failure() {
                    after if after >= work + save => (time, done) = (time + work + save, done + work),
                    after => {
                        time += after;
                        // A restart may fail as well.
                        loop {
                            match failure() {
                                after if after >= restart => break time += restart,
                                after => time += after,
                            }
                        }
                    }
                }
            }
            let (seen, expected) = (1.0 - done / time, lost(mtbf, save, restart, work));
            assert!((seen / expected - 1.0).abs() < 0.02, "{work}: {seen} {expected}");
        }
    }

    #[test]
    fn the_published_rate_is_that_of_a_run_of_2048_nodes() {
        let rate = FailureRate::builtin();
        let interval = rate.interval(2048, 60.0);
        // 419 in 54 days: one in 3.1 hours.
        assert!((interval.mtbf_s / 3600.0 - 54.0 * 24.0 / 419.0).abs() < 0.01, "{interval:?}");
        let (steps, lost) = interval.steps(10.0);
        assert!((100..=130).contains(&steps) && (0.1..0.2).contains(&lost), "{steps} {lost}");
        assert_eq!(rate.interval(1, 1e-3).steps(1e9).0, 1);
        assert!((rate.save_s(8_000_000_000, 2) - 2.0).abs() < 1e-9 && rate.save_s(1 << 40, 1000) > 10.0);
    }
}
