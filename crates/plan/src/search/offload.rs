//! Layouts with optimizer state in the memory of the host: those that need too much memory, and would be the fastest with as little state
//! there as lets them fit.
//!
//! The copies of a step take about as long as the missing bytes take over the link to the host. So what is tried is chosen by the time
//! without offload and those seconds; the programs that are compiled say how much of them the last backward pass hides.

use super::best_first::Search;
use super::whole::exact;
use super::{LayoutChoice, RankedLayout, SIMPLER};
use crate::offload::with_fitting_offload;
use crate::{PlanError, Rates, Result, Target};
use lockstep_config::OffloadSize;

/// Choices that are compiled with offload.
const MOST_COMPILED: usize = 4;

/// The least share of a step's copies that is expected to delay it.
const LEAST_EXPOSED: f64 = 0.5;

/// The key that says what waits in the memory of the host.
const OFFLOAD: &str = "offload.optimizer";

impl Search<'_> {
    /// Whether the search may decide it: the config does not, or asks for the least that fits. A CPU has no other memory.
    fn decides_offload(&self) -> bool {
        let (request, config) = (self.request, self.request.config);
        let given = request.fixed.contains(&OFFLOAD) || (!request.free && config.is_given(OFFLOAD));
        let is_gpu = matches!(Target::of(request.machine, config), Target::Cuda { .. });
        request.trainer.is_none() && is_gpu && (!given || config.offload.optimizer == OffloadSize::Auto)
    }

    /// Ranks what is faster with offload than the best that fits without it, or is all that fits.
    pub fn offloaded(&mut self, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<()> {
        if !self.decides_offload() {
            return Ok(());
        }
        let to_beat = self.best.first().map_or(f64::INFINITY, |l| l.evaluated.forecast.step_s * (1.0 - SIMPLER));
        self.nearest();
        let (room, gpus) = (self.request.room, self.request.gpus);
        let ranks = if room.shared { gpus as f64 } else { 1.0 };
        let rate = self.request.hardware.gpu.host_rate() * ranks;
        let policies = self.space.policies();
        let under = |choice: &LayoutChoice| {
            let choice = *choice;
            policies.iter().map(move |&recompute| LayoutChoice { recompute, ..choice })
        };
        let all: Vec<LayoutChoice> = self.tight.iter().flat_map(|(_, choice)| under(choice)).collect();
        let before = self.small_programs();
        let bounds = self.in_rounds(all.len(), progress, &|i| self.estimate(&all[i]))?;
        self.tally.counts.small += self.small_programs() - before;
        let mut promising: Vec<(f64, LayoutChoice)> = Vec::new();
        for (bound, choice) in bounds.into_iter().zip(all) {
            // An estimate may be a little off.
            let copies = ((bound.bytes - room.bytes as f64) / rate).max(0.0);
            if bound.seconds + LEAST_EXPOSED * copies < to_beat {
                promising.push((bound.seconds + copies, choice));
            }
        }
        promising.sort_by(|a, b| a.0.total_cmp(&b.0));
        promising.truncate(MOST_COMPILED);
        let compiled = |i: usize| match self.with_least_offload(&promising[i].1) {
            Err(PlanError::OverBudget { .. }) => Ok(None),
            found => found.map(Some),
        };
        for found in self.in_rounds(promising.len(), progress, &compiled)? {
            // What needs no offload has been looked at.
            let Some(layout) = found.filter(|l| l.choice.offload > 0) else { continue };
            self.tally.counts.legal += 1;
            self.tally.counts.compiled += 1;
            match room.verdict(&layout.evaluated.stages, gpus).fits {
                true => self.rank(layout),
                false => self.tally.counts.too_large += 1,
            }
        }
        Ok(())
    }

    fn with_least_offload(&self, choice: &LayoutChoice) -> Result<RankedLayout> {
        let mut config = choice.config(self.request.config);
        config.offload.optimizer = OffloadSize::Auto;
        // How many activations move is found for one layout, when it is known.
        if config.offload.activations == OffloadSize::Auto {
            config.offload.activations = OffloadSize::All(false);
        }
        let rates = Rates::Catalogue(self.request.hardware);
        let config = with_fitting_offload(self.request.machine, config, self.request.room, Some(rates))?;
        // A whole number of MiB, as a person would write it.
        let offload = config.offload.optimizer.most_bytes().next_multiple_of(1 << 20);
        let choice = LayoutChoice { offload, ..*choice };
        Ok(RankedLayout { choice, evaluated: exact(self.request, &choice)? })
    }
}
