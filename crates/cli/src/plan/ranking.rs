//! The best layouts as tables, and the keys of the first.

use crate::explain::exact;
use crate::hardware;
use crate::table::{table, wrapped};
use lockstep_config::Config;
use lockstep_ir::program::Class;
use lockstep_ir::units::{self, thousands};
use lockstep_plan::published::{Interval, Residuals};
use lockstep_plan::{Evaluated, RankedLayout, SearchResult};
use lockstep_sim::Hardware;
use serde_json::{Value, json};

const STOPPED: &str = "The search ended early, with the best so far: bounds cannot tell the rest apart. Keys that the config gives make it smaller; \
                       --rejected says what is left.";

/// What is shown of a search.
pub(super) struct Ranking {
    result: SearchResult,
    hardware: Hardware,
    gpus: usize,
    tokens: Option<u64>,
    /// Of a GPU-hour.
    price: Option<f64>,
    /// How sure step times are.
    interval: Option<Interval>,
    /// Whether matmuls are in fp8.
    fp8: bool,
}

/// What a whole run takes.
struct Run {
    days: f64,
    gpu_hours: f64,
    /// Kilowatt-hours of the GPUs.
    kwh: Option<f64>,
    cost: Option<f64>,
}

impl Ranking {
    pub(super) fn new(
        result: SearchResult,
        config: &Config,
        hardware: &Hardware,
        gpus: usize,
        tokens: Option<u64>,
        price: Option<f64>,
    ) -> Self {
        let fp8 = hardware::is_fp8(config);
        let interval = Residuals::builtin().of_lockstep(&hardware.gpu, gpus, fp8);
        Self { result, hardware: hardware.clone(), gpus, tokens, price, interval, fp8 }
    }

    fn run(&self, layout: &RankedLayout) -> Option<Run> {
        let seconds = self.tokens? as f64 / layout.evaluated.forecast.tokens_per_s;
        let gpu_hours = seconds * self.gpus as f64 / 3600.0;
        let Evaluated { forecast, tokens_per_step, .. } = &layout.evaluated;
        let kwh = forecast.energy.map(|energy| energy.kwh(self.tokens.unwrap_or(0), *tokens_per_step as f64));
        Some(Run { days: seconds / 86_400.0, gpu_hours, kwh, cost: self.price.map(|price| price * gpu_hours) })
    }

    /// The first.
    pub(super) fn best(&self) -> Option<&RankedLayout> {
        self.result.best.first()
    }

    /// What was left out, by reason.
    pub(super) fn rejected(&self) -> String {
        let mut text = "\nleft out\n".to_owned();
        for rejection in &self.result.rejected {
            let line = format!("  {}: {}", thousands(rejection.layouts), rejection.reason);
            text.push_str(&wrapped(&line, "      "));
            if let Some(nearest) = &rejection.nearest {
                text.push_str(&wrapped(&format!("      nearest: {nearest}"), "        "));
            }
        }
        text
    }

    pub(super) fn as_json(&self) -> Value {
        let layouts: Vec<Value> = self.result.best.iter().map(|layout| self.layout_json(layout)).collect();
        json!({
            "gpus": self.gpus,
            "gpu": self.hardware.gpu.name,
            "cluster": self.hardware.cluster,
            "unverified": self.hardware.unverified(),
            "fixed_by_the_config": self.result.fixed,
            "counts": self.result.counts,
            "rejected": self.result.rejected,
            "layouts": layouts,
        })
    }

    pub(super) fn layout_json(&self, layout: &RankedLayout) -> Value {
        let RankedLayout { choice, evaluated } = layout;
        let keys: serde_json::Map<String, Value> = keys(layout).into_iter().map(|(k, v)| (k.into(), v)).collect();
        json!({
            "layout": choice.layout.to_string(),
            "micro_batch": choice.micro_batch,
            "micro_batches": choice.layout.micro_batches,
            "recompute": choice.recompute,
            "gradients": choice.gradients,
            "keys": keys,
            "memory": evaluated.memory(),
            "forecast": evaluated.forecast,
            "interval": hardware::interval_json(self.interval.as_ref(), evaluated.forecast.step_s),
            "run": self.run(layout).map(|run| json!({
                "tokens": self.tokens, "days": run.days, "gpu_hours": run.gpu_hours, "gpu_kwh": run.kwh, "cost": run.cost,
            })),
        })
    }

    pub(super) fn as_text(&self) -> String {
        let mut text = wrapped(&format!("{} × {}", thousands(self.gpus as u64), hardware::label(&self.hardware)), "  ");
        let counts = self.result.counts;
        let [legal, too_large, too_slow, small, compiled] =
            [counts.legal, counts.too_large, counts.too_slow, counts.small, counts.compiled].map(thousands);
        text.push_str(&wrapped(
            &format!(
                "{legal} layouts divide model, batch and GPUs; {too_large} do not fit, {too_slow} are too slow by a bound ({small} small \
                 programs compiled), {compiled} were compiled whole and simulated"
            ),
            "  ",
        ));
        if counts.stopped {
            text.push_str(&wrapped(STOPPED, "  "));
        }
        if !self.result.fixed.is_empty() {
            text.push_str(&wrapped(&format!("kept as in the config: {}", self.result.fixed.join(", ")), "  "));
        }
        text.push_str("\nthe fastest layouts\n");
        for (i, layout) in self.result.best.iter().enumerate() {
            text.push_str(&wrapped(&format!("  {:>2}  {}", i + 1, layout.choice), "      "));
        }
        text.push('\n');
        text.push_str(&self.figures());
        if let Some(interval) = &self.interval {
            text.push_str(&wrapped(&hardware::interval(interval, &self.hardware, self.gpus as u64, self.fp8), "  "));
        }
        if let Some(best) = self.result.best.first() {
            text.push_str(&self.energy(best));
            text.push_str(&self.memory_and_keys(best));
        }
        text + &hardware::unverified(&self.hardware.unverified())
    }

    fn figures(&self) -> String {
        let percent = |share: f64| format!("{:.1}%", 100.0 * share);
        let sure = self.interval.map_or(String::new(), |interval| format!(" {}", interval.as_text()));
        let row = |(i, layout): (usize, &RankedLayout)| {
            let f = &layout.evaluated.forecast;
            let mut row = vec![
                (i + 1).to_string(),
                units::bytes(f.memory_bytes),
                exact(f.step_s) + &sure,
                thousands(f.tokens_per_s as u64),
                percent(f.mfu),
                percent(f.exposed_communication_s / f.step_s),
                percent(f.bubble),
            ];
            if let Some(run) = self.run(layout) {
                row.extend([format!("{:.1}", run.days), thousands(run.gpu_hours as u64)]);
                row.extend(run.cost.map(|cost| thousands(cost as u64)));
            }
            row
        };
        let mut header = vec!["", "memory", "step", "tokens/s", "MFU", "~exposed", "bubble"];
        if self.tokens.is_some() {
            header.extend(["days", "GPU-hours"]);
            header.extend(self.price.map(|_| "cost"));
        }
        table(&header, &self.result.best.iter().enumerate().map(row).collect::<Vec<_>>())
    }

    /// Energy of the best, per step and of a run.
    fn energy(&self, layout: &RankedLayout) -> String {
        let Evaluated { forecast, tokens_per_step, .. } = &layout.evaluated;
        let Some(energy) = &forecast.energy else { return String::new() };
        let run = self.run(layout).and_then(|run| run.kwh).map_or(String::new(), |kwh| {
            format!("; the run {}, without hosts, cooling and network", units::kilowatt_hours(kwh))
        });
        wrapped(&format!("energy of the first: {}{run}", hardware::energy(energy, *tokens_per_step)), "  ")
    }

    /// Memory of the best, and its keys.
    fn memory_and_keys(&self, layout: &RankedLayout) -> String {
        let memory = layout.evaluated.memory();
        let row = |c: &Class| vec![c.name().to_owned(), units::bytes(memory.classes[c.name()])];
        let mut rows: Vec<Vec<String>> = Class::ALL.iter().map(row).collect();
        rows.push(vec!["total".into(), units::bytes(memory.total_bytes)]);
        let mut text =
            format!("\nmemory of the first, on the rank that needs most\n{}", table(&["class", "size"], &rows));
        text.push_str("\nits keys in run.toml\n");
        let mut table = "";
        for (key, value) in keys(layout) {
            let (of, name) = key.split_once('.').unwrap_or(("", key));
            if of != table {
                text.push_str(&format!("  [{of}]\n"));
                table = of;
            }
            text.push_str(&format!("  {name} = {value}\n"));
        }
        text
    }
}

/// The keys that make a config this layout, with their values.
pub(super) fn keys(layout: &RankedLayout) -> Vec<(&'static str, Value)> {
    use lockstep_ir::MeshAxis;
    let choice = &layout.choice;
    let size = |axis: MeshAxis| json!(choice.layout.mesh.size(axis));
    let l = &choice.layout;
    let mut keys = vec![
        ("train.micro_batch", json!(choice.micro_batch)),
        ("precision.gradients", json!(choice.gradients)),
        ("parallel.dp", size(MeshAxis::DpShard)),
        ("parallel.dp_replicate", size(MeshAxis::DpReplicate)),
        ("parallel.cp", size(MeshAxis::Cp)),
        ("parallel.context", json!(l.context.name())),
        ("parallel.ep", size(MeshAxis::Ep)),
        ("parallel.tp", size(MeshAxis::Tp)),
        ("parallel.pp", size(MeshAxis::Pp)),
        ("parallel.zero", json!(l.zero)),
        ("parallel.reshard_after_forward", json!(l.reshard_after_forward)),
        ("parallel.sequence_parallel", json!(l.sequence_parallel)),
        ("parallel.schedule", json!(l.schedule.name())),
        ("parallel.virtual", json!(l.chunks)),
        ("recompute.policy", json!(choice.recompute)),
    ];
    keys.extend(choice.budget.map(|bytes| ("recompute.budget", json!(format!("{} MiB", bytes >> 20)))));
    let offload = match choice.offload {
        0 => None,
        u64::MAX => Some(json!(true)),
        bytes => Some(json!(format!("{} MiB", bytes >> 20))),
    };
    keys.extend(offload.map(|size| ("offload.optimizer", size)));
    keys
}
