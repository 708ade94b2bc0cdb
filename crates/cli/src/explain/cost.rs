//! `--gpu`, `--cluster`, `--gpus`: what a step is planned for; `--tokens`: what a whole run costs.

use super::forecast::Predicted;
use crate::failure::{Failure, Result};
use crate::{ConfigArgs, hardware};
use lockstep_config::Config;
use lockstep_ir::units::{counted, thousands};
use lockstep_ir::{MatmulType, units};
use lockstep_plan::Plan;
use lockstep_sim::{GpuSpec, Hardware};
use serde_json::{Value, json};

#[derive(clap::Args)]
pub struct CostArgs {
    /// Also estimate the cost of a whole run of this many tokens; K, M, B and T stand for powers of ten: 15T.
    #[arg(long, value_name = "COUNT")]
    tokens: Option<String>,
    /// The accelerator to plan for, one for each rank: whether the step fits, how long it takes, and with --tokens the GPU-days.
    /// a100, h100, … (any wrong name lists them).
    #[arg(long, value_name = "NAME", conflicts_with = "cluster")]
    pub(super) gpu: Option<String>,
    /// The cluster to plan for: the same with its GPUs, nodes and network. leonardo, lumi, … (any wrong name lists them).
    #[arg(long, value_name = "NAME")]
    cluster: Option<String>,
    /// The share of the accelerator's peak that model FLOPs reach: 0.4. Without it, the predicted one.
    #[arg(long, value_name = "SHARE", requires = "tokens")]
    mfu: Option<f64>,
    /// How many GPUs the run has: a multiple of the layout's ranks; parallel.dp becomes as many times as large. With --mfu, the
    /// layout stays as it is.
    #[arg(long, value_name = "COUNT")]
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
    compute: MatmulType,
    /// FLOP per second of matmuls in that type.
    peak: f64,
    mfu: f64,
    predicted: bool,
    gpu_days: f64,
    /// Kilowatt-hours of the GPUs, of a predicted step.
    kwh: Option<f64>,
    shared: Option<Shared>,
}

/// Accelerators, days on all of them, and how many times the layout is on them.
struct Shared {
    gpus: u64,
    days: f64,
    copies: u64,
}

impl CostArgs {
    /// What was named to plan for.
    pub(super) fn hardware(&self) -> Result<Option<Hardware>> {
        match hardware::named(self.gpu.as_deref(), self.cluster.as_deref(), self.gpus)? {
            None if self.gpus.is_some() || self.mfu.is_some() => {
                let option = if self.gpus.is_some() { "--gpus" } else { "--mfu" };
                let hint = "add --gpu h100, say, or --cluster leonardo";
                Err(Failure::request(format!("{option} needs to know which"), hint))
            }
            found => Ok(found),
        }
    }

    /// The config, on as many GPUs as were asked for.
    pub(super) fn load(&self, args: &ConfigArgs) -> Result<Config> {
        let config = args.load_description()?;
        let ranks = config.layout().mesh.ranks() as u64;
        match self.gpus {
            Some(0) => Err(Failure::request("--gpus 0 trains nothing", "give a number from 1")),
            Some(gpus) if !gpus.is_multiple_of(ranks) => {
                let text =
                    format!("--gpus {gpus}: the layout has {} ({})", counted(ranks as usize, "rank"), config.layout());
                let hint = format!("give a multiple of {ranks}, or change [parallel]");
                Err(Failure::request(text, hint))
            }
            Some(gpus) if gpus > ranks && self.mfu.is_none() => {
                let dp = config.parallel.dp as u64 * (gpus / ranks);
                let more = [args.set.clone(), vec![format!("parallel.dp={dp}")]].concat();
                Ok(ConfigArgs { config: args.config.clone(), set: more }.load_description_quietly()?)
            }
            _ => Ok(config),
        }
    }

    /// The cost of the run that was asked for.
    pub(super) fn cost(&self, plan: &Plan, predicted: Option<&Predicted>) -> Result<Option<Cost>> {
        let Some(text) = &self.tokens else { return Ok(None) };
        let tokens = crate::hardware::tokens(text)?;
        let flops = plan.model_flops_per_token() * tokens as f64;
        let mfu = self.mfu.map(crate::hardware::mfu).transpose()?;
        let ranks = plan.layout.mesh.ranks() as u64;
        let time = predicted.map(|p| {
            let gpu = p.hardware.gpu.clone();
            let peak = gpu.peak(plan.precision.multiplies());
            let used = mfu.unwrap_or(p.forecast.mfu);
            let gpu_days = flops / (peak * used) / 86_400.0;
            let shared = |gpus: u64| Shared { gpus, days: gpu_days / gpus as f64, copies: gpus / ranks };
            // A prediction is for as many as the layout has.
            let gpus = self.gpus.or((mfu.is_none() && ranks > 1).then_some(ranks));
            let compute = gpu.multiplies_in(plan.precision.multiplies());
            let predicted = mfu.is_none();
            let energy = p.forecast.energy.filter(|_| predicted);
            let kwh = energy.map(|energy| energy.kwh(tokens, plan.asked().tokens as f64));
            Time { gpu, compute, peak, mfu: used, predicted, gpu_days, kwh, shared: gpus.map(shared) }
        });
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
            value["mfu_predicted"] = json!(time.predicted);
            value["gpu_days"] = json!(time.gpu_days);
            value["gpu_kwh"] = json!(time.kwh);
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
        if let Some(Time { gpu, compute, peak, mfu, predicted, gpu_days, kwh, shared }) = &self.time {
            let mfu = if *predicted { format!("the predicted MFU of {mfu:.3}") } else { format!("MFU {mfu}") };
            text.push_str(&format!(
                "  {} GPU-days on {} at {mfu} of {}/s ({compute})\n",
                hardware::gpu_days(*gpu_days),
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
            if let Some(kwh) = kwh {
                let kwh = units::kilowatt_hours(*kwh);
                text.push_str(&format!("  {kwh} of the GPUs, without their hosts, cooling and network\n"));
            }
        }
        text
    }
}
