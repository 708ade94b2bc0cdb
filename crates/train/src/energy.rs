//! The energy of a run: what its steps take, and all that it has taken over all starts.
//!
//! Every rank reads what it answers for, and all add up the same. A reading covers steps of a second or more together, as counters do not
//! move more often than every tenth of one; the first rank says how many. Where one rank cannot read its part, the sum is not known.

use crate::Result;
use lockstep_exec::World;
use lockstep_host::{EnergyMeter, Joules};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// What the steps since the last reading took, of all GPUs and all hosts, as far as they tell; nothing in a line without a reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EnergyMetrics {
    /// Joules of a step that GPUs took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_energy_j: Option<f64>,
    /// Joules of a step that CPUs and their memory took, where RAPL can be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_energy_j: Option<f64>,
    /// Joules per token of both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy_per_token_j: Option<f64>,
    /// Watts of both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_w: Option<f64>,
    /// Kilowatt-hours of both since the run was begun, over all of its starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy_kwh: Option<f64>,
}

/// The key of what a run has taken so far, in lines of metrics and in events.
pub(crate) const ENERGY_KWH: &str = "energy_kwh";

/// Joules in a kilowatt-hour.
const KWH: f64 = 3.6e6;

/// Seconds that a reading covers at least.
const READ_EVERY_S: f64 = 1.0;

/// Adds up what a run takes.
pub(crate) struct RunEnergy {
    meter: EnergyMeter,
    /// All that the run has taken, in joules.
    total: f64,
    /// The last reading.
    last: Option<(Instant, Joules)>,
    /// Steps and tokens since.
    since: (u64, u64),
    /// Steps until the next.
    left: u64,
}

impl RunEnergy {
    /// Of a run that has taken this many kilowatt-hours before.
    pub(crate) fn new(meter: EnergyMeter, before_kwh: f64) -> Self {
        Self { meter, total: before_kwh * KWH, last: None, since: (0, 0), left: 0 }
    }

    /// Begins to read, or counts what has been taken since the last step. All ranks do so at the same point of the program.
    pub(crate) fn begin(&mut self, world: &dyn World) -> Result<()> {
        (self.since, self.left) = ((0, 0), 0);
        self.read(world, f64::INFINITY, true).map(|_| ())
    }

    /// After a step of this many tokens and seconds, the last of the run or not: what the steps since the last reading took, where they
    /// are read.
    pub(crate) fn stepped(&mut self, world: &dyn World, tokens: u64, step_s: f64, last: bool) -> Result<EnergyMetrics> {
        let (steps, all) = self.since;
        self.since = (steps + 1, all + tokens);
        self.left = self.left.saturating_sub(1);
        match self.left == 0 || last {
            true => self.read(world, step_s, last),
            false => Ok(EnergyMetrics::default()),
        }
    }

    /// What the run has taken so far, in kilowatt-hours, where anything tells.
    pub(crate) fn total_kwh(&self) -> Option<f64> {
        (self.total > 0.0).then_some(self.total / KWH)
    }

    /// `whole` takes a reading of less time too: no other follows.
    fn read(&mut self, world: &dyn World, step_s: f64, whole: bool) -> Result<EnergyMetrics> {
        if self.last.is_some_and(|(_, joules)| joules.gpu.is_nan() && joules.cpu.is_nan()) {
            // Nothing tells, on no rank.
            return Ok(EnergyMetrics::default());
        }
        let (mine, now) = (self.meter.read(), Instant::now());
        let steps = (READ_EVERY_S / step_s).clamp(1.0, 1000.0);
        let bytes = [mine.gpu, mine.cpu, steps].map(f64::to_le_bytes);
        let all = world.exchange("energy", bytes.as_flattened())?;
        let (sum, steps) = added(&all);
        self.left = steps;
        let Some((at, before)) = self.last else {
            self.last = Some((now, sum));
            return Ok(EnergyMetrics::default());
        };
        let taken = |now: f64, before: f64| Some(now - before).filter(|joules| *joules >= 0.0);
        let (gpu, cpu) = (taken(sum.gpu, before.gpu), taken(sum.cpu, before.cpu));
        let (both, seconds) = (gpu.unwrap_or(0.0) + cpu.unwrap_or(0.0), (now - at).as_secs_f64());
        if both <= 0.0 || (seconds < READ_EVERY_S / 2.0 && !whole) {
            // Counters have hardly moved: the next reading covers these steps too.
            return Ok(EnergyMetrics::default());
        }
        self.last = Some((now, sum));
        self.total += both;
        let (steps, tokens) = std::mem::take(&mut self.since);
        if steps == 0 {
            return Ok(EnergyMetrics::default());
        }
        let [gpu_energy_j, cpu_energy_j] =
            [gpu, cpu].map(|joules| joules.filter(|joules| *joules > 0.0).map(|joules| digits(joules / steps as f64)));
        Ok(EnergyMetrics {
            gpu_energy_j,
            cpu_energy_j,
            energy_per_token_j: Some(digits(both / tokens as f64)),
            power_w: Some(digits(both / seconds)),
            energy_kwh: self.total_kwh(),
        })
    }
}

/// Six digits: no counter has more.
fn digits(value: f64) -> f64 {
    let scale = 10f64.powi(5 - value.abs().log10().floor() as i32);
    let rounded = (value * scale).round() / scale;
    if rounded.is_finite() { rounded } else { value }
}

/// The sum of what ranks have read, and the number of steps to the next reading, as the first rank says.
fn added(all: &[Vec<u8>]) -> (Joules, u64) {
    let number = |bytes: &[u8], at: usize| {
        bytes.get(8 * at..8 * at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(f64::NAN, f64::from_le_bytes)
    };
    let sum = |at: usize| all.iter().map(|bytes| number(bytes, at)).sum::<f64>();
    let steps = all.first().map_or(1.0, |bytes| number(bytes, 2));
    (Joules { gpu: sum(0), cpu: sum(1) }, steps.max(1.0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(gpu: f64, cpu: f64, steps: f64) -> Vec<u8> {
        [gpu, cpu, steps].map(f64::to_le_bytes).as_flattened().to_vec()
    }

    #[test]
    fn ranks_are_added_and_one_that_does_not_tell_leaves_nothing_known() {
        let (sum, steps) = added(&[told(100.0, 5.0, 7.0), told(50.0, 0.0, 9.0)]);
        assert_eq!((sum, steps), (Joules { gpu: 150.0, cpu: 5.0 }, 7));
        let (sum, _) = added(&[told(100.0, 5.0, 1.0), told(f64::NAN, 0.0, 1.0)]);
        assert!(sum.gpu.is_nan() && sum.cpu == 5.0);
        let (sum, steps) = added(&[vec![1, 2]]);
        assert!(sum.gpu.is_nan() && steps == 1);
    }

    #[test]
    fn numbers_keep_six_digits() {
        for (value, text) in
            [(123.456789, "123.457"), (0.00123456789, "0.00123457"), (7.0, "7"), (1234567.0, "1234570")]
        {
            assert_eq!(digits(value).to_string(), text);
        }
    }
}
