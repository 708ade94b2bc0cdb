//! `--gpu`, `--cluster`, `--gpus`: hardware of the catalogue, by name.

use crate::failure::{Failure, Result};
use crate::table::wrapped;
use lockstep_config::{count, nearest};
use lockstep_ir::units::{counted, thousands};
use lockstep_sim::Hardware;

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
