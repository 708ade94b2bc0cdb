//! `lockstep bench checkpoint`: how long steps wait for a checkpoint.

use crate::Format;
use crate::failure::Result;
use crate::table::table;
use lockstep_config::{Config, bytes};
use lockstep_host::Devices;
use lockstep_ir::units;
use lockstep_train::{CheckpointBench, bench_checkpoint, settled};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// Config file of the run whose checkpoint is timed, on its device; its data are not read. Without one, a model of --size on the CPU.
    #[arg(value_name = "RUN.TOML", conflicts_with_all = ["size", "ranks"])]
    config: Option<PathBuf>,
    /// Override a key: --set train.device=cuda.
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "config")]
    set: Vec<String>,
    /// Parameters and optimizer state, about: from 1MB to 1TB.
    #[arg(long, value_name = "SIZE", default_value = "1GB", value_parser = size)]
    size: u64,
    /// Ranks that write it, as threads.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    ranks: u64,
    /// How often it is saved; the best counts.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    rounds: u64,
    /// Folder in which checkpoints are written, and removed.
    #[arg(long, value_name = "DIR", default_value = ".")]
    disk: PathBuf,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

fn size(text: &str) -> Result<u64, String> {
    let range = 1_000_000..=1_000_000_000_000;
    bytes(text)
        .filter(|bytes| range.contains(bytes))
        .ok_or_else(|| "give a size from 1MB to 1TB, such as 1GB".to_owned())
}

/// A model whose checkpoint has about this many bytes: parameters and two moments, in f32.
fn of_size(size: u64, ranks: u64) -> Result<Config> {
    let dim: u64 = if size < 1_000_000_000 { 128 } else { 1024 };
    let layers = size.div_ceil(12 * dim * dim * 12);
    let (ffn, zero) = (dim * 8 / 3 / 8 * 8, u8::from(ranks > 1));
    let text = format!(
        "[model]\nvocab_size = 256\nlayers = {layers}\ndim = {dim}\nheads = 8\nffn = {ffn}\n[train]\nseq = 16\nglobal_batch = \
         {ranks}\nmicro_batch = 1\ndevice = \"cpu\"\n[parallel]\ndp = {ranks}\nzero = {zero}\n"
    );
    Ok(Config::parse(&text, "--size", &[])?)
}

pub fn run(args: &Args) -> Result<()> {
    let devices = Devices::new();
    let config = match &args.config {
        Some(path) => settled(&devices, &Config::load(path, &args.set)?, None, &mut |_, _| {})?,
        None => of_size(args.size, args.ranks)?,
    };
    let dir = args.disk.join(format!(".lockstep-bench-{}", std::process::id()));
    let mut show = |text: &str| {
        if std::io::stderr().is_terminal() {
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    };
    let result = bench_checkpoint(&devices, &config, &dir, args.rounds as usize, &mut show);
    // The folder is ours alone; one that cannot be removed does no harm.
    let _ = std::fs::remove_dir_all(&dir);
    let result = result?;
    args.format.print(|| serde_json::json!(result), || as_text(&result))
}

fn as_text(b: &CheckpointBench) -> String {
    let row = |what: &str, seconds: f64| {
        let rate = format!("{:.2} GB/s", b.bytes as f64 / seconds / 1e9);
        vec![what.to_owned(), units::seconds(seconds), rate, format!("{:.2}", seconds / b.copy_s)]
    };
    let rows = [
        row("copy in memory", b.copy_s),
        row("steps wait, in the background", b.stall_s),
        row("steps wait, synchronous", b.synchronous_s),
        row("on the disk, in the background", b.background_s),
    ];
    let ranks = if b.ranks == 1 { String::new() } else { format!(" of {} ranks", b.ranks) };
    let ([whole, snapshot], exact) = ([b.bytes, b.snapshot_bytes].map(units::bytes), b.snapshot_bytes);
    let [step, beside] = [b.step_s, b.step_while_saving_s].map(units::seconds);
    let table = table(&["", "best", "rate", "of a copy"], &rows);
    format!(
        "checkpoint of {whole}{ranks}, snapshot {snapshot} ({exact} bytes)\n{table}a step takes {step}, {beside} beside a write\n"
    )
}
