//! `--fit`, `--layouts` and `--sequence-lengths`: what else would fit, side by side; and the memory that all of it is held against.

use super::{inference, lengths};
use crate::failure::{Failure, Result};
use crate::options::keep_weights;
use crate::table::{columns, table, wrapped};
use crate::{Format, slurm, verify};
use lockstep_config::{Config, FrozenPrecision, bytes};
use lockstep_host::Devices;
use lockstep_ir::program::Class;
use lockstep_ir::units::thousands;
use lockstep_ir::{Layout, units};
use lockstep_plan::{
    InferenceAccount, LargestMicroBatch, LayoutCost, LengthCost, PlanError, Rates, Room, Target, inference_account,
    largest_micro_batches, layout_costs, with_fitting_micro_batch, with_fitting_offload,
};
use lockstep_sim::{Catalogue, GpuSpec, Hardware};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct CompareArgs {
    /// Instead, show the largest micro-batch that fits so much memory per rank, under every recompute policy: 80GB (10⁹ bytes each),
    /// 74GiB.
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["layouts", "verbose", "timeline", "schedule", "trace", "analyze", "tokens", "mfu"])]
    fit: Option<String>,
    /// Instead, show these layouts side by side: "dp=2;tp=2,pp=2". May be given several times.
    #[arg(long = "layouts", value_name = "LAYOUTS", conflicts_with_all = ["verbose", "timeline", "schedule", "trace", "analyze", "tokens", "mfu"])]
    layouts: Vec<String>,
    /// Instead, show the memory at these sequence lengths, in tokens: 2048,4096,8192.
    #[arg(long, value_name = "LENGTHS", value_delimiter = ',', conflicts_with_all = ["fit", "layouts", "verbose", "timeline", "schedule", "trace", "analyze", "tokens", "mfu"])]
    sequence_lengths: Vec<usize>,
    /// Instead, show what generation takes: bytes of the KV cache by kind of attention, and with --gpu how many texts fit and what bounds reading prompts and
    /// decoding. Texts have train.seq tokens.
    #[arg(long, conflicts_with_all = ["fit", "layouts", "sequence_lengths", "verbose", "timeline", "schedule", "trace", "analyze", "tokens", "mfu"])]
    inference: bool,
    /// With --inference: what the weights of layers are kept in, as `lockstep generate --weights` takes it.
    #[arg(long, value_name = "FORMAT", requires = "inference", value_parser = FrozenPrecision::WORDS.to_vec())]
    weights: Option<String>,
    /// With --sequence-lengths: also draw that memory, stacked by class, into this .svg.
    #[arg(long, value_name = "FILE", requires = "sequence_lengths")]
    plot: Option<PathBuf>,
}

/// What is shown instead of the plan.
pub(super) enum Shown {
    Fit { bytes: u64, batch: usize, seq: usize, rows: Vec<LargestMicroBatch>, notes: Vec<String> },
    Layouts { tokens: u64, rows: Vec<LayoutCost> },
    Lengths { sequences: usize, rows: Vec<LengthCost> },
    Inference(Box<InferenceAccount>),
}

/// The memory that a plan is held against, and the config with a micro-batch that fits it where none was given.
pub(crate) fn placed(
    devices: &Devices,
    config: Config,
    hardware: Option<&Hardware>,
) -> Result<(Config, Option<Room>), PlanError> {
    let gpu = hardware.map(|hardware| &hardware.gpu);
    let config = if gpu.is_some() { Target::on_gpus(config) } else { config };
    let room = memory(devices, &config, gpu);
    let config = match &room {
        Some(room) => {
            let sized = with_fitting_micro_batch(devices, &config, room)?;
            with_fitting_offload(devices, sized, room, hardware.map(Rates::Catalogue))?
        }
        None => config,
    };
    Ok((config, room))
}

/// The memory of a GPU that was named, for each rank; else what this machine has free, for all ranks together. Ranks on the CPUs of
/// several nodes, by the config's `[cluster]`, find as much on each: so train judges them there.
fn memory(devices: &Devices, config: &Config, gpu: Option<&GpuSpec>) -> Option<Room> {
    if let Some(gpu) = gpu {
        return Some(Room::of(gpu));
    }
    let room = devices.room(config)?;
    match (nodes(config), Target::of(devices, config)) {
        (1, _) | (_, Target::Cuda { .. }) => Some(room),
        (nodes, Target::Cpu) => {
            let place = format!("free on {nodes} nodes such as this machine");
            Some(Room { bytes: room.bytes.saturating_mul(nodes as u64), place, ..room })
        }
    }
}

/// Nodes that a config's ranks run on, by its `[cluster]`.
fn nodes(config: &Config) -> usize {
    let ranks = config.layout().mesh.ranks();
    slurm::nodes(&config.cluster, ranks).min(ranks)
}

impl CompareArgs {
    /// What is to be shown instead of the plan, if anything is.
    pub(super) fn instead(
        &self,
        devices: &Devices,
        config: &Config,
        gpu: Option<&GpuSpec>,
        room: Option<&Room>,
    ) -> Result<Option<Shown>> {
        if let Some(text) = &self.fit {
            let size = bytes(text).filter(|n| *n > 0).ok_or_else(|| {
                Failure::request(
                    format!("--fit {text} is not a size"),
                    "give a number and its unit, such as 80GB or 74GiB",
                )
            })?;
            let rows = largest_micro_batches(devices, config, size)?;
            let catalogue = lockstep_host::catalogue()?;
            let ranks = config.layout().mesh.ranks();
            let notes = [nominal_size(text, size, gpu, &catalogue), room.and_then(|room| shared_by(room, ranks))];
            return Ok(Some(Shown::Fit {
                bytes: size,
                batch: config.train.micro_batch * config.accumulation_steps(),
                seq: config.train.seq,
                rows,
                notes: notes.into_iter().flatten().collect(),
            }));
        }
        if !self.sequence_lengths.is_empty() {
            let rows = lengths::costs(devices, config, &self.sequence_lengths, room)?;
            if let Some(path) = &self.plot {
                lengths::write(path, config, &rows)?;
            }
            return Ok(Some(Shown::Lengths { sequences: config.train.micro_batch, rows }));
        }
        if self.inference {
            let mut config = config.clone();
            keep_weights(&mut config, self.weights.as_deref());
            let account = inference_account(devices, &config, config.train.seq, gpu)?;
            return Ok(Some(Shown::Inference(Box::new(account))));
        }
        if self.layouts.is_empty() {
            return Ok(None);
        }
        let config = verify::divided(config.clone(), &self.layouts)?;
        let layouts = verify::named(&self.layouts, &config)?;
        let mut rows = Vec::new();
        for layout in &layouts {
            // Of one number of nodes, all are held against what was free once.
            let at = config.at(layout);
            let of_its_nodes = if nodes(&at) == nodes(&config) { None } else { memory(devices, &at, gpu) };
            let room = of_its_nodes.as_ref().or(room);
            rows.extend(layout_costs(devices, &config, std::slice::from_ref(layout), room)?);
        }
        let tokens = (config.batches().largest() * config.train.seq) as u64;
        Ok(Some(Shown::Layouts { tokens, rows }))
    }
}

impl Shown {
    pub(super) fn print(&self, format: Format) -> Result<()> {
        let text = match (self, format) {
            (Shown::Fit { bytes, rows, .. }, Format::Json) => {
                format!("{:#}\n", json!({ "fit": { "memory_bytes": bytes, "policies": rows } }))
            }
            (Shown::Layouts { rows, .. }, Format::Json) => format!("{:#}\n", json!({ "layouts": rows })),
            (Shown::Lengths { rows, .. }, Format::Json) => format!("{:#}\n", json!({ "sequence_lengths": rows })),
            (Shown::Inference(account), Format::Json) => format!("{:#}\n", json!({ "inference": account })),
            (Shown::Inference(account), Format::Text) => inference::as_text(account),
            (Shown::Fit { bytes, batch, seq, rows, notes }, Format::Text) => {
                fit_text(*bytes, *batch, *seq, rows, notes)
            }
            (Shown::Layouts { tokens, rows }, Format::Text) => layouts_text(*tokens, rows),
            (Shown::Lengths { sequences, rows }, Format::Text) => lengths::as_text(*sequences, rows),
        };
        Ok(write!(std::io::stdout(), "{text}")?)
    }
}

/// A hint where a size is what a GPU is called by: it has more, or less, than that many 10⁹ bytes. Of several, the one with least.
fn nominal_size(text: &str, bytes: u64, named: Option<&GpuSpec>, catalogue: &Catalogue) -> Option<String> {
    let so_called = |gpu: &&GpuSpec| gpu.nominal_memory_bytes == bytes && gpu.memory_bytes != bytes;
    let of_catalogue = || catalogue.gpus.iter().filter(so_called).min_by_key(|gpu| gpu.memory_bytes);
    let gpu = named.filter(so_called).or_else(of_catalogue)?;
    let [typed, has] = [bytes, gpu.memory_bytes].map(units::bytes);
    let (article, label) = (Room::article(gpu), gpu.label());
    // Rounded down, to fit.
    let tenths = (gpu.memory_bytes * 10) >> 30;
    let fit = format!("--fit {}.{}GiB", tenths / 10, tenths % 10);
    let instead = if named.is_some() { String::new() } else { format!(", or --gpu {}", gpu.name) };
    Some(format!(
        "hint: {text} is {typed}; {article} {label} has {has} by its driver, less what a context takes: {fit}{instead}"
    ))
}

/// What each rank has of a memory that all share.
fn shared_by(room: &Room, ranks: usize) -> Option<String> {
    let [all, each] = [room.bytes, room.bytes / ranks as u64].map(units::bytes);
    let place = &room.place;
    (room.shared && ranks > 1).then(|| format!("{all} {place}, for all {ranks} ranks together: {each} for each"))
}

fn fit_text(bytes: u64, batch: usize, seq: usize, rows: &[LargestMicroBatch], notes: &[String]) -> String {
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
    let notes: String = notes.iter().map(|note| wrapped(note, "  ")).collect();
    [title, table(&header, &rows), wrapped(&what, "    "), notes].concat()
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
    let mut places: Vec<&str> = Vec::new();
    for verdict in rows.iter().filter_map(|r| r.verdict.as_ref()) {
        if !places.contains(&verdict.place.as_str()) {
            let whose = if verdict.shared { "all ranks of a layout together" } else { "each rank" };
            let memory = format!("memory: {} {}, for {whose}", units::bytes(verdict.memory_bytes), verdict.place);
            text.push_str(if places.is_empty() { "\n" } else { "" });
            text.push_str(&wrapped(&memory, "  "));
            places.push(&verdict.place);
        }
    }
    text
}

/// The layouts of one argument: `dp=2;tp=2,pp=2`.
pub(crate) fn split(arguments: &[String]) -> Vec<String> {
    let parts = arguments.iter().flat_map(|text| text.split(';'));
    parts.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()).collect()
}

/// A layout from its text, or why not.
pub(crate) fn parse(text: &str) -> Result<Layout> {
    text.parse().map_err(|e| Failure::refused(&e).about(format!("--layouts {text}")))
}
