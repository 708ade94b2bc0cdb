//! `--gpu`, `--cluster`, `--gpus`: hardware of the catalogue, by name.

use crate::failure::{Failure, Result};
use crate::table::wrapped;
use lockstep_config::{Config, PrecisionPolicy, count, nearest};
use lockstep_ir::units::{self, counted, thousands};
use lockstep_plan::published::{Distance, Interval};
use lockstep_sim::{Energy, Hardware};
use serde_json::{Value, json};

/// What was named; none where nothing was. A GPU alone is on nodes of which nothing is known.
pub fn named(gpu: Option<&str>, cluster: Option<&str>, gpus: Option<u64>) -> Result<Option<Hardware>> {
    let catalogue = lockstep_host::catalogue()?;
    let unknown = |option: &str, name: &str, known: Vec<&str>| {
        let near = nearest(name, known.iter().copied());
        let guess = near.map_or(String::new(), |near| format!("did you mean {near}? "));
        let list = known.join(", ");
        Failure::request(format!("{option} {name} is not in the catalogue"), format!("{guess}it has {list}"))
    };
    if let Some(name) = gpu {
        let known = || catalogue.gpus.iter().map(|gpu| gpu.name.as_str()).collect();
        let gpu = catalogue.gpu(name).ok_or_else(|| unknown("--gpu", name, known()))?;
        return Ok(Some(Hardware::assumed(gpu)));
    }
    let Some(name) = cluster else { return Ok(None) };
    let known = || catalogue.clusters.iter().map(|cluster| cluster.name.as_str()).collect();
    let found = catalogue.hardware(name).ok_or_else(|| unknown("--cluster", name, known()))?;
    let all = found.cluster.nodes.map(|nodes| nodes * found.cluster.gpus_per_node);
    match (gpus, all) {
        (Some(gpus), Some(all)) if gpus > all as u64 => {
            let text = format!("--gpus {gpus}: {name} has {}", counted(all, "GPU"));
            Err(Failure::request(text, format!("give at most {all}")))
        }
        _ => Ok(Some(found)),
    }
}

/// Tokens of a run, as a user gives them.
pub fn tokens(text: &str) -> Result<u64> {
    let wrong = || Failure::request(format!("--tokens {text} is not a count"), "give a count such as 300B or 15T");
    count(text).filter(|n| *n > 0).ok_or_else(wrong)
}

/// GPU-days, to a tenth where there are few.
pub fn gpu_days(days: f64) -> String {
    if days < 9.95 { format!("{days:.1}") } else { thousands(days.round() as u64) }
}

/// A share of the peak that a user gives.
pub fn mfu(share: f64) -> Result<f64> {
    match share > 0.0 && share <= 1.0 {
        true => Ok(share),
        false => {
            Err(Failure::request(format!("--mfu {share} is no share"), "give a number above 0, up to 1, such as 0.4"))
        }
    }
}

/// Says which figures of the catalogue nobody has verified; nothing where all are.
pub fn unverified(figures: &[String]) -> String {
    match figures {
        [] => String::new(),
        _ => wrapped(&format!("unverified figures of the catalogue: {}", figures.join(", ")), "  "),
    }
}

/// As people write it: `H100 80GB in JUPITER Booster`.
pub fn label(hardware: &Hardware) -> String {
    format!("{} in {}", hardware.gpu.label(), hardware.cluster.label)
}

/// Whether matmuls of a run are in fp8.
pub fn is_fp8(config: &Config) -> bool {
    config.precision.policy == PrecisionPolicy::Fp8
}

/// What the interval of predicted times rests on.
pub fn interval(interval: &Interval, hardware: &Hardware, gpus: u64, fp8: bool) -> String {
    let from = match interval.distance {
        Distance::Model if gpus == 1 => {
            format!(
                "from {} that Lockstep was timed in on such a GPU and others elsewhere",
                counted(interval.rows, "step")
            )
        }
        Distance::Model | Distance::Gpu | Distance::Framework => {
            let what = match gpus {
                1 if fp8 => "in fp8".to_owned(),
                1 => format!("on a {}", hardware.gpu.label()),
                _ => "on several GPUs".to_owned(),
            };
            format!(
                "Lockstep was not timed {what}, so it is from runs of other frameworks whose GPUs were left out of the fit"
            )
        }
    };
    format!("{} holds nine of ten measured step times: {from}", interval.as_text())
}

/// The interval of a predicted step time.
pub fn interval_json(interval: Option<&Interval>, step_s: f64) -> Value {
    let Some(interval) = interval else { return Value::Null };
    let [least_s, most_s] = interval.around(step_s);
    let mut value = json!(interval);
    value["least_s"] = json!(least_s);
    value["most_s"] = json!(most_s);
    value
}

/// The energy of a step of this many tokens, and the power of a GPU.
pub fn energy(energy: &Energy, tokens: u64) -> String {
    let Energy { step_j, power_w, limit_w, compute } = energy;
    format!(
        "{} per step, {} per token; {power_w:.0} of {limit_w:.0} W per GPU, {:.0}% of the step in matmuls and attention",
        units::joules(*step_j),
        small_joules(step_j / tokens as f64),
        100.0 * compute
    )
}

/// `0.65 J`, `12 mJ`.
fn small_joules(joules: f64) -> String {
    if joules < 0.1 { format!("{:.1} mJ", 1e3 * joules) } else { units::joules(joules) }
}
