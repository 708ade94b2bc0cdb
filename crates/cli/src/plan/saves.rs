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
        let nodes = gpus.div_ceil(hardware.cluster.gpus_per_node);
        let bytes = checkpoint_bytes(config, evaluated.parameters);
        let interval = rate.interval(nodes, rate.save_s(bytes, nodes));
        let step_s = evaluated.forecast.step_s;
        let (steps, lost) = interval.steps(step_s);
        Self { rate, interval, nodes, bytes, steps, seconds: steps as f64 * step_s, lost }
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
        format!(
            "checkpoint.every = {}: every {} of work, {:.2}% of the time lost. {} every {} (Llama 3's rate); a save of {} \
             takes {} (assumed {} GB/s per node, {} GB/s in all); Young {}, Daly {}, exact {}",
            thousands(self.steps),
            units::seconds(self.seconds),
            100.0 * self.lost,
            if self.nodes == 1 {
                "1 node fails".to_owned()
            } else {
                format!("{} nodes fail", thousands(self.nodes as u64))
            },
            units::seconds(i.mtbf_s),
            units::bytes(self.bytes),
            units::seconds(i.save_s),
            self.rate.node_bytes_per_s / 1e9,
            self.rate.bytes_per_s / 1e9,
            units::seconds(i.young_s),
            units::seconds(i.daly_s),
            units::seconds(i.best_s),
        )
    }
}
