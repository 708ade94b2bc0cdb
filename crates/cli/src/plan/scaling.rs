//! `--scaling`: throughput and memory against GPUs, micro-batch and sequence length, strong and weak; time against cost. Every point is
//! what the recipe comes to there.

use super::charts::{Chart, Series, page};
use crate::failure::Result;
use crate::progress::Progress;
use crate::table::{table, wrapped};
use crate::timeline::write_file;
use crate::{Format, hardware};
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_ir::units::{self, thousands};
use lockstep_plan::{PlanError, Recipe, Room, recipe};
use lockstep_sim::Hardware;
use serde::Serialize;
use serde_json::json;
use std::path::Path;

/// What is planned for.
pub(super) struct Asked<'a> {
    pub devices: &'a Devices,
    pub config: &'a Config,
    pub hardware: &'a Hardware,
    pub room: &'a Room,
    pub gpus: usize,
    pub tokens: Option<u64>,
    pub price: Option<f64>,
}

/// One point of a curve.
#[derive(Clone, Debug, Serialize)]
struct Point {
    gpus: usize,
    seq: usize,
    global_batch: usize,
    micro_batch: usize,
    policy: String,
    layout: String,
    memory_bytes: u64,
    step_s: f64,
    tokens_per_s: f64,
    tokens_per_s_per_gpu: f64,
    mfu: f64,
    /// Of the tokens that were asked for.
    days: f64,
    gpu_hours: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
}

/// Where nothing runs, and why.
#[derive(Clone, Debug, Serialize)]
struct Gap {
    gpus: usize,
    seq: usize,
    global_batch: usize,
    why: String,
}

#[derive(Default, Serialize)]
struct Curve {
    points: Vec<Point>,
    gaps: Vec<Gap>,
}

/// Tokens that time and cost are of where none are given.
const USUAL_TOKENS: u64 = 1_000_000_000;

impl Asked<'_> {
    pub(super) fn show(&self, html: Option<&Path>, format: Format) -> Result<()> {
        let mut progress = Progress::new(0);
        let counts: Vec<usize> = powers(self.gpus);
        let seq = self.config.train.seq;
        let mut lengths = vec![seq / 4, seq / 2, seq, 2 * seq, 4 * seq];
        lengths.retain(|length| *length > 0);
        let total = (2 * counts.len() + lengths.len()) as u64;
        let mut done = 0;
        let mut strong = Curve::default();
        let mut weak = Curve::default();
        let mut sequence = Curve::default();
        let mut here = None;
        let mut count = |progress: &mut Progress| {
            done += 1;
            progress.work("points planned", done, total, |n| n.to_string());
        };
        let batch = self.config.train.global_batch;
        for &gpus in &counts {
            let walked = self.point(&mut strong, gpus, self.config.train.seq, batch)?;
            if gpus == self.gpus {
                here = walked;
            }
            count(&mut progress);
            // As many sequences for each GPU as on all of them.
            self.point(&mut weak, gpus, self.config.train.seq, (batch * gpus / self.gpus).max(1))?;
            count(&mut progress);
        }
        for &seq in &lengths {
            // As many tokens in a step.
            self.point(&mut sequence, self.gpus, seq, (batch * self.config.train.seq / seq.max(1)).max(1))?;
            count(&mut progress);
        }
        progress.clear();
        if let Some(path) = html {
            let text = self.html(&strong, &weak, &sequence, here.as_ref());
            write_file(path, text, "plots of scaling", "check the folder of --html")?;
        }
        let value = || {
            json!({
                "gpu": self.hardware.gpu.name, "cluster": self.hardware.cluster, "unverified": self.hardware.unverified(),
                "tokens": self.tokens(), "strong": strong, "weak": weak, "sequence": sequence,
                "micro_batch": here.as_ref().map(|walked| &walked.sizes),
            })
        };
        format.print(value, || self.text(&strong, &weak, &sequence, here.as_ref()))
    }

    fn tokens(&self) -> u64 {
        self.tokens.unwrap_or(USUAL_TOKENS)
    }

    /// What the recipe comes to at a point; where it comes to nothing, that is a gap.
    fn point(&self, curve: &mut Curve, gpus: usize, seq: usize, batch: usize) -> Result<Option<Recipe>> {
        let mut config = self.config.clone();
        (config.train.seq, config.train.global_batch) = (seq, batch);
        if let Some(positions) = &mut config.model.positions {
            *positions = (*positions).max(seq);
        }
        match recipe(self.devices, &config, gpus, self.hardware, self.room, &|_, _| {}) {
            Ok(walked) => {
                let Some(size) = walked.sizes.get(walked.chosen) else { return Ok(None) };
                let tokens_per_s = size.tokens_per_s_per_gpu * gpus as f64;
                let days = self.tokens() as f64 / tokens_per_s / 86_400.0;
                let gpu_hours = 24.0 * days * gpus as f64;
                curve.points.push(Point {
                    gpus,
                    seq,
                    global_batch: batch,
                    micro_batch: size.micro_batch,
                    policy: size.policy.clone(),
                    layout: walked.rungs.last().map_or(String::new(), |rung| rung.layout.clone()),
                    memory_bytes: size.memory_bytes,
                    step_s: size.step_s,
                    tokens_per_s,
                    tokens_per_s_per_gpu: size.tokens_per_s_per_gpu,
                    mfu: size.mfu,
                    days,
                    gpu_hours,
                    cost: self.price.map(|price| price * gpu_hours),
                });
                Ok(Some(walked))
            }
            Err(PlanError::NoLayout(none)) => {
                curve.gaps.push(Gap { gpus, seq, global_batch: batch, why: none.reason.clone() });
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn text(&self, strong: &Curve, weak: &Curve, sequence: &Curve, here: Option<&Recipe>) -> String {
        let n = |x: usize| thousands(x as u64);
        let gpus = |n: usize| units::counted(n, "GPU");
        let mut text = wrapped(&format!("up to {} × {}", n(self.gpus), hardware::label(self.hardware)), "  ");
        let tokens = units::count(self.tokens());
        let sections = [
            (
                format!(
                    "strong scaling: {} a step; time of {tokens} tokens",
                    units::counted(self.config.train.global_batch, "sequence")
                ),
                strong,
                false,
            ),
            ("weak scaling: as many sequences for every GPU".to_owned(), weak, false),
            (format!("sequence length, {}, the same number of tokens per step", gpus(self.gpus)), sequence, true),
        ];
        for (title, curve, by_length) in sections {
            text.push('\n');
            text.push_str(&wrapped(&title, "  "));
            let row = |p: &Point| {
                let mut row = vec![
                    match by_length {
                        true => format!("sequence {}, {}", n(p.seq), p.layout),
                        false => format!("{}, {}", gpus(p.gpus), p.layout),
                    },
                    n(p.micro_batch),
                    p.policy.clone(),
                    units::bytes(p.memory_bytes),
                    thousands(p.tokens_per_s as u64),
                    thousands(p.tokens_per_s_per_gpu as u64),
                    format!("{:.1}", p.days),
                    thousands(p.gpu_hours as u64),
                ];
                row.extend(p.cost.map(|cost| thousands(cost as u64)));
                row
            };
            let mut header =
                vec!["", "micro-batch", "~recompute", "memory", "tokens/s", "per GPU", "days", "~GPU-hours"];
            header.extend(self.price.map(|_| "cost"));
            text.push_str(&table(&header, &curve.points.iter().map(row).collect::<Vec<_>>()));
            for gap in &curve.gaps {
                text.push_str(&wrapped(&format!("  {}, seq {}: {}", gpus(gap.gpus), n(gap.seq), gap.why), "    "));
            }
        }
        if let Some(walked) = here {
            text.push_str(&format!("\nmicro-batch, {}\n", gpus(self.gpus)));
            let row = |size: &lockstep_plan::RecipeSize| {
                vec![
                    size.policy.clone(),
                    n(size.micro_batch),
                    units::bytes(size.memory_bytes),
                    if size.fits { "yes" } else { "NO" }.to_owned(),
                    if size.fits { thousands(size.tokens_per_s_per_gpu as u64) } else { "-".into() },
                ]
            };
            let header = ["recompute.policy", "micro-batch", "memory", "fits", "tokens/s per GPU"];
            text.push_str(&table(&header, &walked.sizes.iter().map(row).collect::<Vec<_>>()));
        }
        text + &hardware::unverified(&self.hardware.unverified())
    }

    fn html(&self, strong: &Curve, weak: &Curve, sequence: &Curve, here: Option<&Recipe>) -> String {
        const GIB: f64 = (1u64 << 30) as f64;
        let of = |curve: &Curve, x: fn(&Point) -> f64, y: fn(&Point) -> f64| -> Vec<(f64, f64)> {
            curve.points.iter().map(|p| (x(p), y(p))).collect()
        };
        let gpus: fn(&Point) -> f64 = |p| p.gpus as f64;
        let memory: fn(&Point) -> f64 = |p| p.memory_bytes as f64 / GIB;
        let both = |y: fn(&Point) -> f64| {
            vec![Series::new("strong", of(strong, gpus, y)), Series::new("weak", of(weak, gpus, y))]
        };
        let mut speeds = both(|p| p.tokens_per_s);
        let best = strong.points.iter().map(|p| p.tokens_per_s_per_gpu).fold(0.0, f64::max);
        let ideal = strong.points.iter().map(|p| (p.gpus as f64, best * p.gpus as f64)).collect();
        speeds.push(Series::new("ideal", ideal).dashed());
        let room = self.room.bytes as f64 / GIB;
        let mut charts = vec![
            Chart::new("throughput", "GPUs", "tokens/s", speeds),
            Chart::new("throughput of a GPU", "GPUs", "tokens/s per GPU", both(|p| p.tokens_per_s_per_gpu)).linear(),
            Chart::new("memory of the rank that needs most", "GPUs", "GiB", both(memory)).linear().limit(room),
        ];
        if let Some(walked) = here {
            let mut policies: Vec<&str> = walked.sizes.iter().map(|size| size.policy.as_str()).collect();
            policies.dedup();
            let by = |y: &dyn Fn(&lockstep_plan::RecipeSize) -> Option<f64>| -> Vec<Series> {
                let series = |policy: &&str| {
                    let of = walked.sizes.iter().filter(|size| size.policy == **policy);
                    Series::new(policy, of.filter_map(|size| Some((size.micro_batch as f64, y(size)?))).collect())
                };
                policies.iter().map(series).collect()
            };
            let speed = by(&|size| size.fits.then_some(size.tokens_per_s_per_gpu));
            let bytes = by(&|size| Some(size.memory_bytes as f64 / GIB));
            charts.push(
                Chart::new("micro-batch: throughput", "micro-batch (sequences)", "tokens/s per GPU", speed).linear(),
            );
            charts
                .push(Chart::new("micro-batch: memory", "micro-batch (sequences)", "GiB", bytes).linear().limit(room));
        }
        let seq: fn(&Point) -> f64 = |p| p.seq as f64;
        let long =
            vec![Series::new("the same number of tokens per step", of(sequence, seq, |p| p.tokens_per_s_per_gpu))];
        charts.push(Chart::new("sequence: throughput", "sequence (tokens)", "tokens/s per GPU", long).linear());
        let long = vec![Series::new("the same number of tokens per step", of(sequence, seq, memory))];
        charts.push(Chart::new("sequence: memory", "sequence (tokens)", "GiB", long).linear().limit(room));
        let cost: (fn(&Point) -> f64, &str) = match self.price {
            Some(_) => (|p| p.cost.unwrap_or(0.0), "cost"),
            None => (|p| p.gpu_hours, "GPU-hours"),
        };
        let days = vec![Series::new("strong", of(strong, |p| p.days, cost.0))];
        let title = format!("time against cost, {} tokens", units::count(self.tokens()));
        charts.push(Chart::new(&title, "days", cost.1, days).linear());
        let title = format!("scaling on up to {} × {}", thousands(self.gpus as u64), hardware::label(self.hardware));
        page(&title, &charts)
    }
}

/// Powers of two, and the number itself.
fn powers(most: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..).map(|i| 1 << i).take_while(|n| *n < most).collect();
    all.push(most);
    // A decade of doublings says how it scales.
    let from = all.len().saturating_sub(8);
    all.split_off(from)
}
