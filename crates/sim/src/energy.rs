//! The energy of a step: what GPUs draw while they compute, move memory, wait and idle.
//!
//! A GPU that computes draws as much as its board allows: it lowers its clock so as not to draw more. What kernels of a step draw in the mean is
//! held against the limit; what waits for other ranks draws less. It is the GPUs alone: no CPUs, fans, power supplies or network.

use crate::work::TimeClass;
use crate::{RoleForecast, Terms};
use serde::{Deserialize, Serialize};

/// What the GPUs of a step draw.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Energy {
    /// Joules of a step, of all GPUs.
    pub step_j: f64,
    /// Watts of a GPU in the mean.
    pub power_w: f64,
    /// Watts that it may draw.
    pub limit_w: f64,
    /// The share of the step in matmuls and attention.
    pub compute: f64,
}

/// Joules of a kilowatt-hour.
const KWH: f64 = 3.6e6;

impl Energy {
    /// Of a step of these roles, on this many GPUs that may draw so much each.
    pub(crate) fn new(roles: &[RoleForecast], step_s: f64, gpus: f64, limit_w: f64, terms: &Terms) -> Self {
        let (mut power, mut compute_share) = (0.0, 0.0);
        for role in roles {
            let of = |classes: &[TimeClass]| -> f64 {
                classes.iter().filter_map(|class| role.classes.get(&class.to_string())).sum::<f64>()
            };
            let compute = of(&[TimeClass::Matmul, TimeClass::Attention]);
            let memory = of(&[TimeClass::Elementwise, TimeClass::Optimizer]);
            let kernels = compute + memory;
            // Where the step is shorter than its parts, they overlap.
            let kernel_share = (kernels / step_s).min(1.0);
            let waiting = (role.exposed_communication_s / step_s).min(1.0 - kernel_share);
            let idle = 1.0 - kernel_share - waiting;
            let drawn = terms.power_compute * compute + terms.power_memory * memory;
            let busy = if kernels > 0.0 { (drawn / kernels).min(1.0) } else { 0.0 };
            power += kernel_share * busy + waiting * terms.power_waiting + idle * terms.power_idle;
            compute_share += (compute / step_s).min(1.0);
        }
        let n = roles.len().max(1) as f64;
        let power_w = limit_w * power / n;
        Self { step_j: power_w * gpus * step_s, power_w, limit_w, compute: compute_share / n }
    }

    /// Kilowatt-hours of this many tokens, of which a step has `tokens_per_step`.
    pub fn kwh(&self, tokens: u64, tokens_per_step: f64) -> f64 {
        self.step_j * tokens as f64 / tokens_per_step / KWH
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Catalogue, Constants, Framework};

    fn energy(matmul: f64, memory: f64, exposed: f64) -> Energy {
        let all = Catalogue::builtin();
        let hardware = all.hardware("meta-24k").unwrap();
        let terms = Constants::builtin().terms(&Framework::lockstep(), &hardware);
        let classes = [("matmul", matmul), ("memory-bound", memory)].map(|(class, s)| (class.to_owned(), s));
        let role = RoleForecast {
            stage: 0,
            classes: classes.into(),
            exposed_communication_s: exposed,
            waited_s: 0.0,
            memory_bytes: 0,
            slots: Vec::new(),
        };
        Energy::new(&[role], 1.0, 8.0, hardware.gpu.power_w.unwrap(), &terms)
    }

    #[test]
    fn a_gpu_that_computes_draws_its_limit_and_one_that_waits_less() {
        // Two thirds of a step in matmuls, as on an H200.
        let computes = energy(0.67, 0.33, 0.0);
        assert_eq!((computes.power_w, computes.step_j, computes.limit_w), (700.0, 8.0 * 700.0, 700.0));
        // As OLMo 2 on H100s (arXiv 2503.05804): over 600 W while it trains.
        let trains = energy(0.6, 0.25, 0.15);
        assert!((600.0..680.0).contains(&trains.power_w), "{trains:?}");
        let idles = energy(0.0, 0.0, 0.0);
        assert!((idles.power_w - 105.0).abs() < 1e-9, "{idles:?}");
        assert!(idles.power_w < energy(0.0, 0.0, 1.0).power_w && energy(0.0, 1.0, 0.0).power_w < 700.0);
    }

    #[test]
    fn kilowatt_hours_are_those_of_all_steps() {
        // 5.6 kW for an hour of steps of a second.
        let kwh = energy(0.67, 0.33, 0.0).kwh(3600 * 1000, 1000.0);
        assert!((kwh - 5.6).abs() < 1e-9, "{kwh}");
    }
}
