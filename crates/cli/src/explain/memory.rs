//! Bytes: the memory breakdown of a rank, a checkpoint, a token in the cache of generation.

use crate::host_memory::in_host;
use crate::table::{table, wrapped};
use lockstep_config::{Config, PrecisionPolicy};
use lockstep_ir::account::MemoryBreakdown;
use lockstep_ir::program::Class;
use lockstep_ir::units;
use lockstep_ir::units::{counted, thousands};
use lockstep_plan::Plan;
use serde_json::json;
use std::collections::BTreeMap;

/// A rank's memory breakdown, by class and by layer.
pub(crate) fn memory(breakdown: &MemoryBreakdown) -> String {
    let share = |bytes: u64| format!("{:.1}%", 100.0 * bytes as f64 / breakdown.total_bytes.max(1) as f64);
    let class_row = |c: &Class| {
        let bytes = breakdown.classes[c.name()];
        vec![c.name().to_owned(), units::bytes(bytes), share(bytes), thousands(bytes)]
    };
    let mut classes: Vec<Vec<String>> = Class::ALL.iter().map(class_row).collect();
    classes.push(vec![
        "total".into(),
        units::bytes(breakdown.total_bytes),
        share(breakdown.total_bytes),
        thousands(breakdown.total_bytes),
    ]);
    let names: Vec<&str> = Class::ALL.iter().map(|c| c.name()).filter(|n| *n != "communication").collect();
    let rows: Vec<Vec<String>> = grouped_layers(breakdown)
        .into_iter()
        .map(|(label, classes)| {
            let cells = names.iter().map(|n| units::bytes(classes.get(n).copied().unwrap_or(0)));
            [label].into_iter().chain(cells).collect()
        })
        .collect();
    let header: Vec<&str> = ["layer"].into_iter().chain(names.iter().copied()).collect();
    let p = &breakdown.peak;
    let layer = p.layer.map_or(String::new(), |l| format!(" of layer {l}"));
    let (live, segment, m) = (units::bytes(p.live_bytes), p.segment, p.micro_batch);
    let peak = wrapped(&format!("  peak: {live} live in {segment}, micro-batch {m}, at {}{layer}", p.op), "    ");
    let classes = table(&["class", "size", "share", "~bytes"], &classes);
    let by_layer = format!("memory by layer (temporary buffers are shared by all)\n{}", table(&header, &rows));
    let host = match breakdown.host_bytes {
        0 => String::new(),
        bytes => wrapped(
            &format!(
                "  host memory: {} ({} bytes) of {}",
                units::bytes(bytes),
                thousands(bytes),
                in_host(bytes, breakdown.host_activation_bytes)
            ),
            "    ",
        ),
    };
    format!("memory breakdown: one arena\n{classes}{host}\n{peak}\n{by_layer}")
}

/// Layers with equal breakdowns as one row: `0 to 15 (each)`.
fn grouped_layers(breakdown: &MemoryBreakdown) -> Vec<(String, BTreeMap<&'static str, u64>)> {
    let mut rows: Vec<(Option<(usize, usize)>, _)> = Vec::new();
    for line in &breakdown.layers {
        match (rows.last_mut(), line.layer) {
            (Some((Some((_, last)), classes)), Some(layer)) if *classes == line.classes => *last = layer,
            _ => rows.push((line.layer.map(|l| (l, l)), line.classes.clone())),
        }
    }
    let label = |range: Option<(usize, usize)>| match range {
        None => "embedding, head, other".to_owned(),
        Some((a, b)) if a == b => a.to_string(),
        Some((a, b)) => format!("{a} to {b}, each"),
    };
    rows.into_iter().map(|(range, classes)| (label(range), classes)).collect()
}

/// Bytes of a checkpoint, and of the host memory in which it waits to be written.
pub(super) fn checkpoint_bytes(config: &Config, plan: &Plan) -> serde_json::Value {
    let bytes = plan.checkpoint_bytes();
    let elastic = config.cluster.elastic.is_some().then(|| plan.elastic_bytes());
    json!({ "bytes": bytes, "snapshot_bytes": config.checkpoint.asynchronous.then_some(bytes), "elastic_bytes": elastic })
}

pub(super) fn checkpoint_text(config: &Config, plan: &Plan) -> String {
    let (bytes, ranks) = (plan.checkpoint_bytes(), plan.layout.mesh.ranks());
    let over = if ranks == 1 { String::new() } else { format!(" over {ranks} ranks") };
    let snapshot = match config.checkpoint.asynchronous {
        true => format!("host memory for a snapshot of it: as much{over}"),
        false => "steps wait while one is written".to_owned(),
    };
    let elastic = match config.cluster.elastic.is_some() {
        true => {
            format!(
                "; snapshots of the elastic run: {} of host memory{over}, two and their copies",
                units::bytes(plan.elastic_bytes())
            )
        }
        false => String::new(),
    };
    let text = format!(
        "checkpoint: {} ({} bytes) of parameters and optimizer state; {snapshot}{elastic}",
        units::bytes(bytes),
        thousands(bytes)
    );
    format!("\n{}", wrapped(&text, "  "))
}

/// Bytes of a token in the cache of generation, where attention is latent.
pub(super) fn cache_text(config: &Config) -> String {
    let model = &config.model;
    let Some(latent) = model.latent() else { return String::new() };
    let element = match config.precision.policy {
        PrecisionPolicy::Fp32 | PrecisionPolicy::Tf32 => 4,
        PrecisionPolicy::Bf16 | PrecisionPolicy::Fp16 | PrecisionPolicy::Fp8 => 2,
    };
    let bytes = |numbers: usize| units::bytes((model.layers * numbers * element) as u64);
    wrapped(
        &format!(
            "KV cache in generation: {} per token, the latent and the shared key; K and V of {} would be {}",
            bytes(latent.kv_rank + latent.rope),
            counted(model.heads, "head"),
            bytes(model.heads * (model.head_dim + latent.value)),
        ),
        "  ",
    )
}
