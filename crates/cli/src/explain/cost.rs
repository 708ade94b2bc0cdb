//! `--tokens --gpu --mfu`: what a whole run costs.

use crate::failure::Failure;
use lockstep_config::{count, nearest};
use lockstep_ir::units::thousands;
use lockstep_ir::{DType, units};
use lockstep_plan::Plan;
use lockstep_sim::{Catalogue, GpuSpec};
use serde_json::{Value, json};

#[derive(clap::Args)]
pub struct CostArgs {
    /// Also estimate the cost of a whole run of so many tokens; K, M, B and T stand for powers of ten: 15T.
    #[arg(long, value_name = "COUNT")]
    tokens: Option<String>,
    /// The accelerator to plan for, one for each rank: say whether the step fits, and with --tokens the GPU-days. a100, h100, …
    /// (any wrong name lists them).
    #[arg(long, value_name = "NAME")]
    pub(super) gpu: Option<String>,
    /// The share of the accelerator's peak that model FLOPs reach: 0.4.
    #[arg(long, value_name = "SHARE", requires = "tokens", requires = "gpu")]
    mfu: Option<f64>,
    /// How many of them the run has: a multiple of the layout's ranks.
    #[arg(long, value_name = "COUNT", requires = "tokens", requires = "gpu")]
    gpus: Option<u64>,
}

/// The cost of a run.
pub(super) struct Cost {
    tokens: u64,
    flops: f64,
    time: Option<Time>,
}

/// The time it takes.
struct Time {
    gpu: GpuSpec,
    compute: DType,
    /// FLOP per second of matmuls in that type.
    peak: f64,
    mfu: f64,
    gpu_days: f64,
    shared: Option<Shared>,
}

/// Accelerators, days on all of them, and how many times the layout is on them.
struct Shared {
    gpus: u64,
    days: f64,
    copies: u64,
}

impl CostArgs {
    /// The catalogue's entry for the accelerator that was named.
    pub(super) fn find_gpu(&self) -> Result<Option<GpuSpec>, Failure> {
        let Some(name) = &self.gpu else { return Ok(None) };
        let catalogue = Catalogue::builtin();
        let known: Vec<&str> = catalogue.gpus.iter().map(|gpu| gpu.name.as_str()).collect();
        let unknown = || {
            let near = nearest(name, known.iter().copied());
            let guess = near.map_or(String::new(), |near| format!("did you mean {near}? "));
            let list = known.join(", ");
            Failure::request(format!("--gpu {name} is not in the catalogue\nhint: {guess}it has {list}"))
        };
        catalogue.gpu(name).cloned().map(Some).ok_or_else(unknown)
    }

    /// The cost of the run that was asked for.
    pub(super) fn cost(&self, plan: &Plan) -> Result<Option<Cost>, Failure> {
        let gpu = self.find_gpu()?;
        let Some(text) = &self.tokens else { return Ok(None) };
        let request = |what: String, hint: &str| Failure::request(format!("{what}\nhint: {hint}"));
        let tokens = count(text).filter(|n| *n > 0);
        let not_a_count = || request(format!("--tokens {text} is not a count"), "give a count such as 300B or 15T");
        let tokens = tokens.ok_or_else(not_a_count)?;
        let flops = plan.model_flops_per_token() * tokens as f64;
        let time = match (gpu, self.mfu) {
            (Some(gpu), Some(mfu)) if mfu > 0.0 && mfu <= 1.0 => {
                let peak = gpu.peak(plan.precision.compute);
                let gpu_days = flops / (peak * mfu) / 86_400.0;
                let ranks = plan.layout.mesh.ranks() as u64;
                match self.gpus {
                    Some(0) => return Err(request("--gpus 0 trains nothing".into(), "give a number from 1")),
                    Some(gpus) if !gpus.is_multiple_of(ranks) => {
                        let text = format!("--gpus {gpus}: the layout has {ranks} ranks ({})", plan.layout);
                        return Err(request(text, &format!("give a multiple of {ranks}, or change [parallel]")));
                    }
                    _ => {}
                }
                let shared = self.gpus.map(|gpus| Shared { gpus, days: gpu_days / gpus as f64, copies: gpus / ranks });
                Some(Time { gpu, compute: plan.precision.compute, peak, mfu, gpu_days, shared })
            }
            (Some(_), Some(mfu)) => {
                return Err(request(format!("--mfu {mfu} is no share"), "give a number above 0, up to 1, such as 0.4"));
            }
            (Some(_), None) => {
                return Err(request("--tokens on a --gpu needs --mfu".into(), "give --mfu 0.4, say"));
            }
            (None, _) => None,
        };
        Ok(Some(Cost { tokens, flops, time }))
    }
}

impl Cost {
    pub(super) fn as_json(&self) -> Value {
        let mut value = json!({ "tokens": self.tokens, "model_flops": self.flops });
        if let Some(time) = &self.time {
            value["gpu"] = json!(time.gpu);
            value["peak_flops_per_s"] = json!(time.peak);
            value["mfu"] = json!(time.mfu);
            value["gpu_days"] = json!(time.gpu_days);
            if let Some(Shared { gpus, days, copies }) = &time.shared {
                value["gpus"] = json!(gpus);
                value["days"] = json!(days);
                value["layout_copies"] = json!(copies);
            }
        }
        value
    }

    pub(super) fn as_text(&self) -> String {
        let mut text = format!("\na run of {} tokens: {:.2e} model FLOPs\n", units::count(self.tokens), self.flops);
        if let Some(Time { gpu, compute, peak, mfu, gpu_days, shared }) = &self.time {
            text.push_str(&format!(
                "  {} GPU-days on {} at MFU {mfu} of {}/s ({compute})\n",
                thousands(gpu_days.round() as u64),
                gpu.name,
                units::flops(*peak)
            ));
            if let Some(Shared { gpus, days, copies }) = shared {
                let of = match copies {
                    1 => String::new(),
                    _ => format!(", {} data-parallel copies of the layout", thousands(*copies)),
                };
                text.push_str(&format!("  {days:.1} days on {} of them{of}\n", thousands(*gpus)));
            }
        }
        text
    }
}
