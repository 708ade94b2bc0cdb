//! Which kind of device a config runs on, and what planning must know of the machine that has it.

use crate::{PlanError, Result};
use lockstep_compile::Precision;
use lockstep_config::{Config, DeviceChoice};
use lockstep_ir::DeviceProfile;

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU.
    Cuda {
        /// Whether the same program on the same data gives the same bits every time.
        deterministic: bool,
    },
}

/// Elements of the widest head that some kernel of GPUs takes: cuDNN's and those that keep a head in the registers of a warp.
const WIDEST_HEAD: usize = 256;

/// What planning must know of a machine.
pub trait Machine: Sync {
    /// Cores of its CPU, which ranks share.
    fn cores(&self) -> usize;
    /// Whether it has a GPU for each of this many ranks, and what training there needs.
    fn has_gpus(&self, ranks: usize) -> bool;
    /// What the compiler must know of a device that computes in these types, on this many threads of each rank.
    fn profile(&self, device: Target, threads: usize, precision: Precision) -> DeviceProfile;
}

impl Target {
    /// What a config asks for. `auto` takes GPUs where there is one for every rank.
    pub fn of(machine: &dyn Machine, config: &Config) -> Self {
        let cuda = Target::Cuda { deterministic: config.train.deterministic };
        let ranks = config.layout().mesh.ranks();
        match config.train.device {
            DeviceChoice::Cuda => cuda,
            DeviceChoice::Auto if cuda.check(config).is_ok() && machine.has_gpus(ranks) => cuda,
            DeviceChoice::Auto | DeviceChoice::Cpu => Target::Cpu,
        }
    }

    /// The config as it runs on GPUs that this machine need not have; what no GPU does yet stays as it is.
    pub fn on_gpus(mut config: Config) -> Config {
        let does_it = Target::Cuda { deterministic: false }.check(&config).is_ok();
        if config.train.device == DeviceChoice::Auto && does_it {
            config.train.device = DeviceChoice::Cuda;
        }
        config
    }

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Target::Cpu => "cpu",
            Target::Cuda { .. } => "cuda",
        }
    }

    /// Refuses what the device does not do.
    pub fn check(self, config: &Config) -> Result<()> {
        match self {
            Target::Cuda { .. } if config.train.reproducible => {
                Err(PlanError::NotOnDevice { what: "train.reproducible", device: self.name() })
            }
            Target::Cuda { .. } => {
                let m = &config.model;
                let widths = [("model.head_dim", m.head_dim), ("model.v_head_dim", m.value_dim())];
                match widths.into_iter().find(|(_, width)| *width > WIDEST_HEAD) {
                    Some((key, width)) => {
                        Err(PlanError::HeadTooWide { key, width, most: WIDEST_HEAD, device: self.name() })
                    }
                    None => Ok(()),
                }
            }
            Target::Cpu => Ok(()),
        }
    }
}

/// Threads of one rank: those that a config asks for, or all cores, are shared by its ranks.
pub(crate) fn threads(machine: &dyn Machine, config: &Config, ranks: usize) -> usize {
    let all = if config.train.threads == 0 { machine.cores() } else { config.train.threads };
    (all / ranks).max(1)
}
