//! One choice of a search.

use lockstep_config::{Bytes, Config, GradientPrecision, OffloadSize, RecomputePolicy};
use lockstep_ir::{Layout, units};

/// One choice of everything that a search decides. Prints as `dp=64 zero=1 tp=8 sp, micro-batch 2, recompute full`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayoutChoice {
    /// How the work is split.
    pub layout: Layout,
    /// Sequences that a rank computes at once.
    pub micro_batch: usize,
    /// What backward recomputes.
    pub recompute: RecomputePolicy,
    /// Bytes that the arena of a rank may have, under the budget policy.
    pub budget: Option<u64>,
    /// What gradients are accumulated in.
    pub gradients: GradientPrecision,
    /// Most bytes of a rank's optimizer state that wait in the memory of the host.
    pub offload: u64,
}

impl LayoutChoice {
    /// The choice that a config has made.
    pub fn of(config: &Config) -> Self {
        Self {
            layout: config.layout(),
            micro_batch: config.train.micro_batch,
            recompute: config.recompute.policy,
            budget: config.recompute.budget.map(|Bytes(bytes)| bytes),
            gradients: config.precision.gradients,
            offload: config.offload.optimizer.most_bytes(),
        }
    }

    /// The run that a config describes, by this choice.
    pub fn config(&self, config: &Config) -> Config {
        let mut config = config.at(&self.layout);
        config.train.micro_batch = self.micro_batch;
        (config.recompute.policy, config.recompute.budget) = (self.recompute, self.budget.map(Bytes));
        config.precision.gradients = self.gradients;
        if self.offload != config.offload.optimizer.most_bytes() {
            config.offload.optimizer = OffloadSize::Most(Bytes(self.offload));
        }
        config
    }
}

impl std::fmt::Display for LayoutChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, micro-batch {}, recompute {}", self.layout, self.micro_batch, self.recompute)?;
        if let Some(bytes) = self.budget {
            write!(f, " of {}", units::bytes(bytes))?;
        }
        match self.gradients {
            GradientPrecision::Fp32 => {}
            GradientPrecision::Bf16 => f.write_str(", bf16 gradients")?,
        }
        match self.offload {
            0 => Ok(()),
            u64::MAX => f.write_str(", all optimizer state offloaded"),
            bytes => write!(f, ", {} of optimizer state offloaded", units::bytes(bytes)),
        }
    }
}
