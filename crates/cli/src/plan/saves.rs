//! How often the run would best save a checkpoint: `plan`'s last line.

use lockstep_config::Config;
use lockstep_ir::units::{self, thousands};
use lockstep_plan::{Evaluated, FailureRate, SaveInterval, checkpoint_bytes};
use lockstep_sim::Hardware;
use serde_json::{Value, json};

/// The interval of a run, and what it rests on.
pub(super) struct Saves {
    rate: FailureRate,
    interval: SaveInterval,
    nodes: usize,
    bytes: u64,
    steps: u64,
    seconds: f64,
    lost: f64,
}

impl Saves {
    /// Of a run of a config whose steps were evaluated.
    pub(super) fn new(config: &Config, evaluated: &Evaluated, hardware: &Hardware, gpus: usize) -> Self {
        let rate = FailureRate::builtin();
        // Of an NVLink domain, trays of four fail by themselves.
        let each = hardware.gpu.domain.map_or(hardware.cluster.gpus_per_node, |_| 4);
        let nodes = gpus.div_ceil(each);
        let bytes = checkpoint_bytes(config, evaluated.parameters);
        let interval = rate.interval(nodes, rate.save_s(bytes, nodes));
        let step_s = evaluated.forecast.step_s;
        let (steps, lost) = interval.steps(step_s);
        Self { rate, interval, nodes, bytes, steps, seconds: steps as f64 * step_s, lost }
    }

    /// Steps from one checkpoint to the next.
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    pub(super) fn as_json(&self) -> Value {
        json!({
            "every_steps": self.steps,
            "every_s": self.seconds,
            "lost": self.lost,
            "nodes": self.nodes,
            "bytes": self.bytes,
            "interval": self.interval,
            "failure_rate": self.rate,
        })
    }

    pub(super) fn as_text(&self) -> String {
        let i = &self.interval;
        let [work, mtbf, save, young, daly, exact] =
            [self.seconds, i.mtbf_s, i.save_s, i.young_s, i.daly_s, i.best_s].map(units::seconds);
        let (steps, lost, bytes) = (thousands(self.steps), 100.0 * self.lost, units::bytes(self.bytes));
        let fail = format!("{} fail{}", units::counted(self.nodes, "node"), if self.nodes == 1 { "s" } else { "" });
        let [each, all] = [self.rate.node_bytes_per_s, self.rate.bytes_per_s].map(|rate| rate / 1e9);
        format!(
            "checkpoint.every = {steps}: every {work} of work, {lost:.2}% of the time lost. {fail} every {mtbf} (Llama 3's rate); \
             a save of {bytes} takes {save} (assumed {each} GB/s per node, {all} GB/s in all); Young {young}, Daly {daly}, exact \
             {exact}"
        )
    }
}
