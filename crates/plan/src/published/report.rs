//! Predictions beside measurements, row by row and in sum.

use super::predict::{Case, Prediction};
use super::residuals::Interval;
use super::row::Row;
use super::stats::{Errors, quantile, regret, spearman};
use serde::Serialize;
use std::collections::BTreeMap;

/// A row's prediction beside its measurement.
#[derive(Clone, Debug, Serialize)]
pub struct RowReport {
    /// Its file.
    pub file: String,
    /// Its line.
    pub line: usize,
    /// Who published it.
    pub source: String,
    /// The framework, and whether matmuls were in fp8.
    pub framework: String,
    /// The model.
    pub model: String,
    /// The GPU, by its name in the catalogue.
    pub gpu: String,
    /// How many.
    pub gpus: usize,
    /// On how many nodes they are.
    pub nodes: usize,
    /// How the work was split.
    pub layout: String,
    /// Whether nothing is known against the row.
    pub clean: bool,
    /// Whether the run failed.
    pub failed: bool,
    /// Whether it was predicted to run.
    pub runs: bool,
    /// Measured seconds of a step.
    pub measured_s: Option<f64>,
    /// Predicted seconds of a step.
    pub predicted_s: Option<f64>,
    /// |predicted ÷ measured − 1| of them.
    pub error: Option<f64>,
    /// How sure the predicted time is; none where nothing is known of that.
    pub interval: Option<Interval>,
    /// Whether the measured time lies in the interval.
    pub inside: Option<bool>,
    /// Measured tokens per second and GPU.
    pub measured_tokens_per_s_per_gpu: Option<f64>,
    /// Predicted tokens per second and GPU.
    pub predicted_tokens_per_s_per_gpu: Option<f64>,
    /// Measured bytes of memory.
    pub measured_memory_bytes: Option<f64>,
    /// Predicted bytes of memory.
    pub predicted_memory_bytes: f64,
    /// |predicted ÷ measured − 1| of them.
    pub memory_error: Option<f64>,
    /// The factor that measured rows gave, where some did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibrated: Option<f64>,
    /// What the row does not say.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub assumed: Vec<String>,
    /// What it says and its config does not have.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_modelled: Vec<&'static str>,
    #[serde(skip)]
    cell: String,
}

/// Whether runs fit the memory.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Oom {
    /// Rows that say whether they ran.
    pub rows: usize,
    /// Share of them that were predicted right; none where there are none.
    pub right: Option<f64>,
    /// Share of those that ran.
    pub ran_right: Option<f64>,
    /// Share of those that failed.
    pub failed_right: Option<f64>,
}

/// How much longer the best by prediction took than the best measured, over cells.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Regret {
    /// In the middle cell.
    pub median: f64,
    /// In the mean of all cells.
    pub mean: f64,
    /// In the mean of all cells, of the best five.
    pub of_five: f64,
}

/// Rows in sum. Errors are fractions.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// How many rows.
    pub rows: usize,
    /// Errors of step time.
    pub step_time: Option<Errors>,
    /// The share of measured step times that lie in their interval of 90%.
    pub inside: Option<f64>,
    /// Errors of memory.
    pub memory: Option<Errors>,
    /// Whether runs fit.
    pub oom: Oom,
    /// Runs of the same model, batch and GPUs in different layouts: how many such cells there are.
    pub cells: usize,
    /// Spearman's rank correlation of predicted and measured times, in the middle cell.
    pub spearman: Option<f64>,
    /// What choosing by prediction costs.
    pub regret: Option<Regret>,
}

/// What rows do not say, and what is taken for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Assumption {
    /// What is taken.
    pub what: String,
    /// Of how many rows.
    pub rows: usize,
    /// The first of them.
    pub first: String,
}

/// Everything that is reported.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// In sum.
    pub summary: Summaries,
    /// What is assumed, once for each reason, and what is said and not modelled.
    pub assumed: Vec<Assumption>,
    /// By row.
    pub rows: Vec<RowReport>,
}

/// Rows in sum, by what is known of them.
#[derive(Clone, Debug, Serialize)]
pub struct Summaries {
    /// Rows against which nothing is known.
    pub clean: Summary,
    /// All rows.
    pub all: Summary,
    /// Clean rows by framework.
    pub by_framework: BTreeMap<String, Summary>,
    /// Clean rows by file.
    pub by_file: BTreeMap<String, Summary>,
    /// Clean rows on one node or several.
    pub by_nodes: BTreeMap<String, Summary>,
}

/// Cells of fewer rows have no order to speak of.
pub(super) const LEAST_CELL: usize = 5;

/// Rows of one cell differ in their layout alone.
pub(super) fn cell(row: &Row) -> String {
    let (batch, seq) = (row.split.global_batch, row.shape.seq);
    format!("{} {} {} {} {seq} {batch} {}", row.source, row.model, row.gpu, row.gpus, row.precision)
}

impl RowReport {
    /// Its file; rows in fp8 are apart.
    pub fn of_file(&self) -> String {
        let fp8 = if self.framework.ends_with(" fp8") { " fp8" } else { "" };
        format!("{}{fp8}", self.file)
    }

    /// Of a case; `factor` is what measured rows taught, and `interval` how sure the time is with it.
    pub fn new(
        case: &Case,
        file: &str,
        prediction: &Prediction,
        factor: Option<f64>,
        interval: Option<Interval>,
    ) -> Self {
        let row = &case.row;
        let measured = row.measured.unwrap_or_default();
        let tokens = (row.split.global_batch * row.shape.seq) as f64 / row.gpus as f64;
        let predicted_s = prediction.step_s.map(|s| s * factor.unwrap_or(1.0));
        let error = |predicted: Option<f64>, measured: Option<f64>| Some((predicted? / measured? - 1.0).abs());
        let memory = Some(prediction.memory_bytes).filter(|bytes| *bytes > 0.0);
        let split = &row.split;
        let sizes = [("tp", split.tp), ("pp", split.pp), ("dp", split.dp), ("cp", split.cp), ("ep", split.ep)];
        let mut layout: Vec<String> =
            sizes.iter().filter(|(_, n)| *n > 1).map(|(name, n)| format!("{name}={n}")).collect();
        layout.extend((split.zero > 0).then(|| format!("zero={}", split.zero)));
        layout.extend(split.micro_batch.map(|n| format!("mb={n}")));
        Self {
            file: file.to_owned(),
            line: row.line,
            source: row.source.clone(),
            framework: case.group(),
            model: row.model.clone(),
            gpu: case.hardware.gpu.name.clone(),
            gpus: row.gpus,
            nodes: row.gpus.div_ceil(case.hardware.cluster.gpus_per_node),
            layout: layout.join(" "),
            clean: case.is_clean(),
            failed: row.measured.is_none(),
            runs: prediction.runs,
            measured_s: measured.step_s,
            predicted_s,
            error: error(predicted_s, measured.step_s),
            interval: interval.filter(|_| predicted_s.is_some()),
            inside: interval.and_then(|interval| Some(interval.holds(predicted_s?, measured.step_s?))),
            measured_tokens_per_s_per_gpu: measured.step_s.map(|s| tokens / s),
            predicted_tokens_per_s_per_gpu: predicted_s.map(|s| tokens / s),
            measured_memory_bytes: measured.memory_bytes,
            predicted_memory_bytes: prediction.memory_bytes,
            memory_error: error(memory, measured.memory_bytes),
            calibrated: factor,
            assumed: case.assumed.clone(),
            not_modelled: row.not_modelled(),
            cell: cell(row),
        }
    }
}

impl Summary {
    /// Of these rows. Only frameworks whose memory was measured tell whether runs fit.
    pub fn of<'a>(rows: impl Iterator<Item = &'a RowReport> + Clone) -> Self {
        let errors = |error: &dyn Fn(&RowReport) -> Option<f64>| {
            Errors::of(&rows.clone().filter_map(error).collect::<Vec<f64>>())
        };
        let mut cells: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
        for row in rows.clone() {
            if let (Some(predicted), Some(measured)) = (row.predicted_s, row.measured_s) {
                cells.entry(&row.cell).or_default().push((predicted, measured));
            }
        }
        cells.retain(|_, pairs| pairs.len() >= LEAST_CELL);
        let pairs: Vec<&[(f64, f64)]> = cells.values().map(Vec::as_slice).collect();
        let orders: Vec<f64> = pairs.iter().filter_map(|pairs| spearman(pairs)).collect();
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let first: Vec<f64> = pairs.iter().filter_map(|pairs| regret(pairs, 1)).collect();
        let five: Vec<f64> = pairs.iter().filter_map(|pairs| regret(pairs, 5)).collect();
        let known = rows.clone().filter_map(|row| row.inside);
        let (inside, all) = known.fold((0usize, 0usize), |(inside, all), is| (inside + usize::from(is), all + 1));
        Self {
            rows: rows.clone().count(),
            step_time: errors(&|row| row.error),
            inside: (all > 0).then(|| inside as f64 / all as f64),
            memory: errors(&|row| row.memory_error),
            oom: oom(rows.clone()),
            cells: cells.len(),
            spearman: quantile(&orders, 0.5),
            regret: quantile(&first, 0.5).map(|median| Regret { median, mean: mean(&first), of_five: mean(&five) }),
        }
    }
}

/// Of rows whose source says of others what memory they took, or that they failed.
fn oom<'a>(rows: impl Iterator<Item = &'a RowReport> + Clone) -> Oom {
    let tells = |row: &&RowReport| row.failed || row.measured_memory_bytes.is_some();
    let told: Vec<&RowReport> = rows.filter(tells).collect();
    let share = |wanted: &dyn Fn(&RowReport) -> bool| {
        let chosen: Vec<_> = told.iter().filter(|row| wanted(row)).collect();
        let right = chosen.iter().filter(|row| row.runs != row.failed).count();
        (!chosen.is_empty()).then(|| right as f64 / chosen.len() as f64)
    };
    Oom {
        rows: told.len(),
        right: share(&|_| true),
        ran_right: share(&|row| !row.failed),
        failed_right: share(&|row| row.failed),
    }
}

impl Report {
    /// Of these rows.
    pub fn new(rows: Vec<RowReport>) -> Self {
        let clean = || rows.iter().filter(|row| row.clean);
        let by = |key: &dyn Fn(&RowReport) -> String| {
            let keys: std::collections::BTreeSet<String> = clean().map(key).collect();
            let of = |k: String| {
                let summary = Summary::of(clean().filter(|row| key(row) == k));
                (k, summary)
            };
            keys.into_iter().map(of).collect()
        };
        let summary = Summaries {
            clean: Summary::of(clean()),
            all: Summary::of(rows.iter()),
            by_framework: by(&|row| row.framework.clone()),
            by_file: by(&RowReport::of_file),
            by_nodes: by(&|row| if row.nodes > 1 { "several nodes".into() } else { "one node".into() }),
        };
        let assumed = assumptions(&rows);
        Self { summary, assumed, rows }
    }
}

/// What is assumed of rows, or is not in their programs, by how many there are.
fn assumptions(rows: &[RowReport]) -> Vec<Assumption> {
    let mut all: BTreeMap<&str, Assumption> = BTreeMap::new();
    for row in rows {
        for what in row.assumed.iter().map(String::as_str).chain(row.not_modelled.iter().copied()) {
            let first = format!("{}.csv:{}", row.file, row.line);
            let of = all.entry(what).or_insert_with(|| Assumption { what: what.to_owned(), rows: 0, first });
            of.rows += 1;
        }
    }
    let mut all: Vec<Assumption> = all.into_values().collect();
    all.sort_by(|a, b| b.rows.cmp(&a.rows).then_with(|| a.what.cmp(&b.what)));
    all
}
