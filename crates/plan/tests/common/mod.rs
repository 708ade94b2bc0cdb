//! What tests of the search share.

use lockstep_compile::Precision;
use lockstep_config::Config;
use lockstep_ir::DeviceProfile;
use lockstep_plan::{Machine, Target};
use std::collections::BTreeMap;

/// A machine of GPUs, as the catalogue has them.
pub struct Gpus;

impl Machine for Gpus {
    fn cores(&self) -> usize {
        2
    }

    fn has_gpus(&self, _ranks: usize) -> bool {
        true
    }

    fn profile(&self, device: Target, _threads: usize, _precision: Precision) -> DeviceProfile {
        DeviceProfile {
            name: device.name().into(),
            alignment: 256,
            cross_entropy_logits: 1 << 20,
            cross_entropy_rows: 1 << 10,
            workspaces: BTreeMap::new(),
            workspaces_with_optional: BTreeMap::new(),
            fusions: Vec::new(),
            faster: Vec::new(),
            fp8_weights: 0,
        }
    }
}

/// A config for GPUs.
pub fn config(text: &str) -> Config {
    let config = Config::parse(text, "run.toml", &[]).unwrap_or_else(|error| panic!("{error}"));
    Target::on_gpus(config)
}
