//! `--fit`, `--layouts` and `--sequence-lengths`: what else would fit, side by side; and the memory that all of it is held against.

use super::lengths;
use crate::failure::Failure;
use crate::table::{columns, table, wrapped};
use crate::{Format, verify};
use lockstep_config::{Config, bytes};
use lockstep_ir::program::Class;
use lockstep_ir::units::thousands;
use lockstep_ir::{Layout, units};
use lockstep_plan::{
    LargestMicroBatch, LayoutCost, LengthCost, PlanError, Room, Target, largest_micro_batches, layout_costs,
    with_fitting_micro_batch,
};
use lockstep_sim::GpuSpec;
use lockstep_train::Devices;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct CompareArgs {
    /// Instead, show the largest micro-batch that fits so much memory per rank, under every recompute policy: 80GB, 74GiB.
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["layouts", "verbose", "timeline", "schedule", "trace", "analyze", "tokens", "mfu"])]
    fit: Option<String>,
    /// Instead, show these layouts side by side: "dp=2;tp=2,pp=2". May be given several times.
    #[arg(long = "layouts", value_name = "LAYOUTS", conflicts_with_all = ["verbose", "timeline", "schedule", "trace", "analyze", "tokens", "mfu"])]
    layouts: Vec<String>,
    /// Instead, show the memory at these sequence lengths, in tokens: 2048,4096,8192.
    #[arg(long, value_name = "LENGTHS", value_delimiter = ',', conflicts_with_all = ["fit", "layouts", "verbose", "timeline", "schedule", "trace", "analyze", "tokens", "mfu"])]
    sequence_lengths: Vec<usize>,
    /// With --sequence-lengths: also draw that memory, stacked by class, into this .svg.
    #[arg(long, value_name = "FILE", requires = "sequence_lengths")]
    plot: Option<PathBuf>,
}

/// What is shown instead of the plan.
pub(super) enum Shown {
    Fit { bytes: u64, batch: usize, seq: usize, rows: Vec<LargestMicroBatch> },
    Layouts { tokens: u64, rows: Vec<LayoutCost> },
    Lengths { sequences: usize, rows: Vec<LengthCost> },
}

/// The memory that a plan is held against, and the config with a micro-batch that fits it where none was given: that of a GPU
/// that was named, for each rank, else what this machine has free.
pub(crate) fn placed(
    devices: &Devices,
    config: Config,
    gpu: Option<&GpuSpec>,
) -> Result<(Config, Option<Room>), PlanError> {
    if let Some(gpu) = gpu {
        let (config, room) = (Target::on_gpus(config), Room::of(gpu));
        return Ok((with_fitting_micro_batch(devices, &config, &room)?, Some(room)));
    }
    let room = devices.room(&config);
    let config = match &room {
        Some(room) => with_fitting_micro_batch(devices, &config, room)?,
        None => config,
    };
    Ok((config, room))
}

impl CompareArgs {
    /// What is to be shown instead of the plan, if anything is.
    pub(super) fn instead(
        &self,
        devices: &Devices,
        config: &Config,
        room: Option<&Room>,
    ) -> Result<Option<Shown>, Failure> {
        if let Some(text) = &self.fit {
            let size = bytes(text).filter(|n| *n > 0).ok_or_else(|| {
                Failure::request(format!(
                    "--fit {text} is not a size\nhint: give a number and its unit, such as 80GB or 74GiB"
                ))
            })?;
            let rows = largest_micro_batches(devices, config, size)?;
            let batch = config.train.micro_batch * config.accumulation_steps();
            return Ok(Some(Shown::Fit { bytes: size, batch, seq: config.train.seq, rows }));
        }
        if !self.sequence_lengths.is_empty() {
            let rows = lengths::costs(devices, config, &self.sequence_lengths, room)?;
            if let Some(path) = &self.plot {
                lengths::write(path, config, &rows)?;
            }
            return Ok(Some(Shown::Lengths { sequences: config.train.micro_batch, rows }));
        }
        if self.layouts.is_empty() {
            return Ok(None);
        }
        let config = verify::divided(config.clone(), &self.layouts)?;
        let layouts = verify::named(&self.layouts, &config)?;
        let rows = layout_costs(devices, &config, &layouts, room)?;
        let tokens = (config.batches().largest() * config.train.seq) as u64;
        Ok(Some(Shown::Layouts { tokens, rows }))
    }
}

impl Shown {
    pub(super) fn print(&self, format: Format) -> Result<(), Failure> {
        let text = match (self, format) {
            (Shown::Fit { bytes, rows, .. }, Format::Json) => {
                format!("{:#}\n", json!({ "fit": { "memory_bytes": bytes, "policies": rows } }))
            }
            (Shown::Layouts { rows, .. }, Format::Json) => format!("{:#}\n", json!({ "layouts": rows })),
            (Shown::Lengths { rows, .. }, Format::Json) => format!("{:#}\n", json!({ "sequence_lengths": rows })),
            (Shown::Fit { bytes, batch, seq, rows }, Format::Text) => fit_text(*bytes, *batch, *seq, rows),
            (Shown::Layouts { tokens, rows }, Format::Text) => layouts_text(*tokens, rows),
            (Shown::Lengths { sequences, rows }, Format::Text) => lengths::as_text(*sequences, rows),
        };
        Ok(write!(std::io::stdout(), "{text}")?)
    }
}

fn fit_text(bytes: u64, batch: usize, seq: usize, rows: &[LargestMicroBatch]) -> String {
    let count = |n: Option<usize>| n.map_or("-".to_owned(), |n| thousands(n as u64));
    let row = |r: &LargestMicroBatch| {
        let size = if r.micro_batch.is_some() { count(r.dividing_micro_batch) } else { "does not fit".to_owned() };
        let added = format!("{:+.1}%", 100.0 * (r.hardware_flops - 1.0));
        vec![
            r.policy.clone(),
            size,
            count(r.micro_batch),
            count(r.global_batch),
            count(r.micro_batch.map(|n| n * seq)),
            units::bytes(r.arena_bytes),
            added,
        ]
    };
    let header =
        ["recompute.policy", "micro-batch", "at most", "global batch", "~tokens at once", "arena", "FLOPs added"];
    let rows: Vec<_> = rows.iter().map(row).collect();
    let what = format!(
        "  micro-batch: divides a rank's batch of {}; at most: the largest that fits, with the train.global_batch that goes \
         with it, its tokens, arena and FLOPs",
        units::counted(batch, "sequence")
    );
    let title = format!("largest train.micro_batch in {} per rank\n", units::bytes(bytes));
    [title, table(&header, &rows), wrapped(&what, "    ")].concat()
}

/// A column for each layout, as many beside each other as the screen has room for.
fn layouts_text(tokens: u64, rows: &[LayoutCost]) -> String {
    const FIRST: usize = 18;
    const EACH: usize = 12;
    let together = ((columns().saturating_sub(FIRST)) / EACH).max(1);
    let mut text = format!("one step of {} tokens; bytes of the rank that needs most\n", thousands(tokens));
    for part in rows.chunks(together) {
        let line = |name: &str, cell: &dyn Fn(&LayoutCost) -> String| -> Vec<String> {
            [name.to_owned()].into_iter().chain(part.iter().map(cell)).collect()
        };
        let mut lines = vec![
            line("ranks", &|r| thousands(r.ranks as u64)),
            line("micro-batch", &|r| thousands(r.micro_batch as u64)),
        ];
        lines.extend(Class::ALL.iter().map(|c| line(c.name(), &|r| units::bytes(r.memory.classes[c.name()]))));
        lines.push(line("total", &|r| units::bytes(r.memory.total_bytes)));
        // Ranks of one machine share its memory.
        let together =
            |r: &LayoutCost| r.verdict.as_ref().map(|v| v.planned_bytes).filter(|b| *b != r.memory.total_bytes);
        if part.iter().any(|r| together(r).is_some()) {
            lines.push(line("of all ranks", &|r| units::bytes(together(r).unwrap_or(r.memory.total_bytes))));
        }
        lines.push(line("sent by a rank", &|r| units::bytes(r.sent_bytes)));
        if part.iter().any(|r| r.bubble > 0.0) {
            lines.push(line("in flight", &|r| format!("{:.1}", r.in_flight)));
            lines.push(line("pipeline bubble", &|r| format!("{:.1}%", 100.0 * r.bubble)));
        }
        if part.iter().any(|r| r.verdict.is_some()) {
            let fits =
                |r: &LayoutCost| r.verdict.as_ref().map_or("-", |v| if v.fits { "yes" } else { "NO" }).to_owned();
            lines.push(line("fits", &fits));
        }
        let header: Vec<&str> = ["layout"].into_iter().chain(part.iter().map(|r| r.layout.as_str())).collect();
        text.push('\n');
        text.push_str(&table(&header, &lines));
    }
    if let Some(verdict) = rows.iter().find_map(|r| r.verdict.as_ref()) {
        text.push_str(&format!("\nmemory: {} {}\n", units::bytes(verdict.memory_bytes), verdict.place));
    }
    text
}

/// The layouts of one argument: `dp=2;tp=2,pp=2`.
pub(crate) fn split(arguments: &[String]) -> Vec<String> {
    let parts = arguments.iter().flat_map(|text| text.split(';'));
    parts.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()).collect()
}

/// A layout from its text, or why not.
pub(crate) fn parse(text: &str) -> Result<Layout, Failure> {
    text.parse().map_err(|e| Failure::request(format!("--layouts {text}: {e}")))
}
