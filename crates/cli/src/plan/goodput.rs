//! `--goodput`: the share of the time that counts, against failures, for as many GPUs as large runs have: what restarts cost, and what
//! elastic worlds, snapshots in memory and spare nodes save.

use crate::Format;
use crate::failure::Result;
use crate::table::{table, wrapped};
use lockstep_config::Config;
use lockstep_ir::units::{self, thousands};
use lockstep_ir::{Axes, MeshAxis};
use lockstep_plan::{FailureRate, Goodput, RankedLayout, RunUnderFailures, checkpoint_bytes};
use lockstep_sim::Hardware;
use serde_json::json;
use std::io::Write;

/// GPUs of large runs.
const GPUS: [usize; 6] = [512, 1024, 2048, 4096, 8192, 16_384];

/// Shows it for the fastest layout, whose data-parallel ranks are as many as there are GPUs for; steps take as long as the layout's.
pub(super) fn show(
    config: &Config,
    best: &RankedLayout,
    hardware: &Hardware,
    gpus: usize,
    format: Format,
) -> Result<()> {
    let rate = FailureRate::builtin();
    let (evaluated, mesh) = (&best.evaluated, &best.evaluated.layout.mesh);
    // Of an NVLink domain, trays of four fail by themselves.
    let each = hardware.gpu.domain.map_or(hardware.cluster.gpus_per_node, |_| 4);
    let copies = mesh.size(Axes::of(&[MeshAxis::DpReplicate, MeshAxis::DpShard]));
    let nodes_per_copy = (mesh.ranks() / copies).div_ceil(each);
    let bytes = checkpoint_bytes(config, evaluated.parameters);
    let to_host_bytes_per_s = hardware.gpu.host_bytes_per_s.unwrap_or(f64::INFINITY).min(rate.to_host_bytes_per_s);
    let step_s = evaluated.forecast.step_s;
    let of = |gpus: usize| {
        let nodes = gpus.div_ceil(each);
        let run = RunUnderFailures {
            nodes,
            nodes_per_copy,
            step_s,
            snapshot_every: config.cluster.snapshot_every,
            snapshot_s: bytes as f64 / gpus as f64 / to_host_bytes_per_s,
            save_s: rate.save_s(bytes, nodes),
        };
        (gpus, run, Goodput::new(&run, &rate))
    };
    let mut counts = GPUS.to_vec();
    counts.push(gpus);
    counts.retain(|gpus| gpus.div_ceil(each) >= nodes_per_copy);
    counts.sort_unstable();
    counts.dedup();
    let all: Vec<_> = counts.into_iter().map(of).collect();
    let mut out = std::io::stdout().lock();
    if let Format::Json = format {
        let rows: Vec<_> =
            all.iter().map(|(gpus, run, goodput)| json!({ "gpus": gpus, "run": run, "goodput": goodput })).collect();
        writeln!(out, "{:#}", json!({ "layout": evaluated.layout.to_string(), "failure_rate": rate, "rows": rows }))?;
        return Ok(());
    }
    let share = |share: f64| format!("{:.1}%", 100.0 * share);
    let rows: Vec<Vec<String>> = all
        .iter()
        .map(|(gpus, run, found)| {
            vec![
                thousands(*gpus as u64),
                thousands(run.nodes as u64),
                units::seconds(found.mtbf_s),
                share(found.restart),
                share(found.elastic),
                share(found.snapshots),
                share(found.spares),
                found.spare_nodes.to_string(),
            ]
        })
        .collect();
    let header = ["GPUs", "~nodes", "a failure every", "restart", "elastic", "in memory", "with spares", "spare nodes"];
    writeln!(out, "goodput of {} at {} a step\n\n{}", evaluated.layout, units::seconds(step_s), table(&header, &rows))?;
    let [node, restart, recovery, repair, step] =
        [rate.node_mtbf_s, rate.restart_s, rate.recovery_s, rate.repair_s, step_s].map(units::seconds);
    let text = format!(
        "The share of the work of all GPUs, spares included, that counts. A node fails every {node} ({}). restart: all start again from the last checkpoint, \
         {restart} after a failure, on a node that is there at once. elastic: the nodes that are left go on after {recovery}, from the last checkpoint, \
         and a failed node is back after {repair}. in memory: from snapshots every {} steps. with spares: as many as give most. Times of restart, \
         recovery and repair are assumed (crates/plan/data/failures.toml), and that a step takes {step} on any number of GPUs; a copy of the model \
         takes {}.",
        rate.source,
        config.cluster.snapshot_every,
        units::counted(nodes_per_copy, "node"),
    );
    write!(out, "{}", wrapped(&text, "  "))?;
    Ok(())
}
