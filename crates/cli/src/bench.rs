//! `lockstep bench`: this machine's ceilings; `lockstep bench train`: the speed of a training step.

use crate::Format;
use crate::failure::Failure;
use crate::table::table;
use crate::timeline::TimelineFile;
use lockstep_exec::cpu;
use lockstep_ir::{DType, units};
use lockstep_train::bench::{BenchResult, BenchSpec, Determinism, GpuMemory, bench_deterministic, bench_train};
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    ceilings: Ceilings,
}

#[derive(clap::Subcommand)]
enum What {
    /// Time a training step of a public shape on random tokens: forward, backward, clipping, AdamW.
    Train(Train),
}

#[derive(clap::Args)]
struct Ceilings {
    /// Threads; 0 for all cores.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Folder whose disk is measured.
    #[arg(long, value_name = "DIR", default_value = ".")]
    disk: PathBuf,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(clap::Args)]
struct Train {
    /// 15m, 29m, 124m, 1b, gpt2-xl or 8b.
    #[arg(long, value_name = "NAME")]
    shape: Shape,
    /// Sequences of a step [default: the shape's].
    #[arg(long)]
    batch: Option<usize>,
    /// Tokens of a sequence [default: the shape's].
    #[arg(long)]
    seq: Option<usize>,
    /// Types: fp32, or bf16 with fp32 originals and sums.
    #[arg(long, value_enum, default_value = "fp32")]
    precision: Precision,
    /// What computes: the processor, a GPU, or a GPU where one is found.
    #[arg(long, value_parser = ["auto", "cpu", "cuda"], default_value = "auto")]
    device: String,
    /// Type of gradient sums.
    #[arg(long, value_enum, default_value = "fp32")]
    gradients: Precision,
    /// What is computed again in backward: a value of recompute.policy, or as little as fits: budget=40GiB.
    #[arg(long, value_name = "POLICY", default_value = "none")]
    recompute: String,
    /// Sequences computed at once [default: all of a step].
    #[arg(long, default_value_t = 0)]
    micro_batch: usize,
    /// Timed steps; the median counts.
    #[arg(long, default_value_t = 8)]
    steps: usize,
    /// Threads; 0 for all cores.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Also with train.deterministic, on a GPU: say what it costs, and whether two such runs give the same bits.
    #[arg(long, conflicts_with_all = ["profile", "timeline"])]
    deterministic: bool,
    /// Say where the time of a step goes, and write it to this file as a Chrome trace.
    #[arg(long, value_name = "TRACE.JSON")]
    profile: Option<PathBuf>,
    /// Draw the memory of the first two steps into this file: .svg, or .json for a Chrome trace.
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Precision {
    Fp32,
    Bf16,
}

impl Precision {
    fn name(self) -> &'static str {
        match self {
            Precision::Fp32 => "fp32",
            Precision::Bf16 => "bf16",
        }
    }
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Shape {
    #[value(name = "15m")]
    M15,
    #[value(name = "29m")]
    M29,
    #[value(name = "124m")]
    M124,
    #[value(name = "1b")]
    B1,
    #[value(name = "gpt2-xl")]
    Gpt2Xl,
    #[value(name = "8b")]
    B8,
}

impl Shape {
    /// Name, preset, sequence, batch.
    fn row(self) -> (&'static str, &'static str, usize, usize) {
        match self {
            Shape::M15 => ("15m", "llama-15m", 256, 16),
            Shape::M29 => ("29m", "llama-29m", 512, 8),
            Shape::M124 => ("124m", "llama-124m", 1024, 64),
            Shape::B1 => ("1b", "llama-3.2-1b", 4096, 8),
            Shape::Gpt2Xl => ("gpt2-xl", "gpt2-xl", 1024, 16),
            Shape::B8 => ("8b", "llama-3-8b", 4096, 1),
        }
    }
}

pub fn run(args: Args) -> Result<(), Failure> {
    match args.what {
        Some(What::Train(train)) => run_train(train),
        None => run_ceilings(args.ceilings),
    }
}

fn run_ceilings(args: Ceilings) -> Result<(), Failure> {
    let threads = if args.threads == 0 { cpu::cores() } else { args.threads };
    let matmul = cpu::peaks::matmul(threads, DType::F32)?;
    let matmul_bf16 = cpu::peaks::matmul(threads, DType::BF16)?;
    let bandwidth = cpu::peaks::bandwidth(threads)?;
    let disk = disk(&args.disk)?;
    let mut out = std::io::stdout().lock();
    if args.format == Format::Json {
        let value = json!({
            "threads": threads, "matmul_fp32_flops": matmul, "matmul_bf16_flops": matmul_bf16,
            "memory_bytes_per_s": bandwidth, "disk_write_bytes_per_s": disk,
        });
        writeln!(out, "{value:#}")?;
        return Ok(());
    }
    let rate = |bytes: f64| format!("{:.1} GB/s", bytes / 1e9);
    let rows = [
        vec!["matmul fp32".to_owned(), format!("{}/s", units::flops(matmul))],
        vec!["matmul bf16".to_owned(), format!("{}/s", units::flops(matmul_bf16))],
        vec!["memory (copy, read + write)".to_owned(), rate(bandwidth)],
        vec![format!("disk write and sync ({})", args.disk.display()), rate(disk)],
    ];
    write!(out, "{}", table(&[&format!("ceiling, {threads} threads"), "best"], &rows))?;
    Ok(())
}

/// Bytes per second of writing a file of 256 MiB and syncing it.
fn disk(folder: &Path) -> Result<f64, std::io::Error> {
    let path = folder.join(format!(".lockstep-bench-{}", std::process::id()));
    let block = vec![0x5au8; 1 << 20];
    let write = || {
        let mut file = std::fs::File::create(&path)?;
        let start = Instant::now();
        for _ in 0..256 {
            file.write_all(&block)?;
        }
        file.sync_all()?;
        Ok((256u64 << 20) as f64 / start.elapsed().as_secs_f64())
    };
    let result = write();
    // The file is ours alone; one that cannot be removed does no harm.
    let _ = std::fs::remove_file(&path);
    result
}

fn run_train(args: Train) -> Result<(), Failure> {
    let timeline = args.timeline.as_deref().map(TimelineFile::new).transpose()?;
    let (shape, preset, seq, batch) = args.shape.row();
    let spec = BenchSpec {
        preset: preset.to_owned(),
        batch: args.batch.unwrap_or(batch),
        seq: args.seq.unwrap_or(seq),
        steps: args.steps,
        threads: args.threads,
        precision: args.precision.name().to_owned(),
        device: args.device,
        gradients: args.gradients.name().to_owned(),
        recompute: args.recompute,
        micro_batch: args.micro_batch,
        profile: args.profile.is_some(),
        timeline: args.timeline.is_some(),
        deterministic: false,
    };
    let terminal = std::io::stderr().is_terminal();
    let mut last = Instant::now();
    let mut show = |text: &str| {
        if terminal || last.elapsed().as_secs() >= 10 {
            let _ = writeln!(std::io::stderr(), "{text}");
            last = Instant::now();
        }
    };
    if args.deterministic {
        let result = bench_deterministic(&spec, &mut show)?;
        return report_determinism(shape, args.precision, args.format, &result);
    }
    let result = bench_train(&spec, &mut show)?;
    if let (Some(path), Some(profile)) = (&args.profile, &result.profile) {
        std::fs::write(path, profile.trace.to_string())?;
    }
    if let (Some(file), Some(timeline)) = (&timeline, &result.timeline) {
        let title = format!("memory of the first two steps, {shape} at batch {}, seq {}", result.batch, result.seq);
        file.write("", &title, timeline)?;
    }
    let mut out = std::io::stdout().lock();
    match args.format {
        Format::Json => writeln!(out, "{}", as_json(shape, args.precision, &result))?,
        Format::Text => write!(out, "{}", as_text(shape, args.precision, &result))?,
    }
    Ok(())
}

fn report_determinism(shape: &str, precision: Precision, format: Format, r: &Determinism) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match format {
        Format::Json => {
            let [usual, deterministic] = [&r.usual, &r.deterministic].map(|result| as_json(shape, precision, result));
            let value = json!({
                "usual": usual, "deterministic": deterministic, "ratio": r.ratio, "same_bits": r.same_bits,
            });
            writeln!(out, "{value}")?;
        }
        Format::Text => write!(
            out,
            "usual\n{}deterministic\n{}{:.0} tokens/s deterministic, {:.0} usual: {:.1}%\n{}",
            as_text(shape, precision, &r.usual),
            as_text(shape, precision, &r.deterministic),
            r.deterministic.tokens_per_s,
            r.usual.tokens_per_s,
            100.0 * r.ratio,
            if r.same_bits {
                "two deterministic runs gave the same losses and gradient norms, bit for bit\n"
            } else {
                ""
            }
        )?,
    }
    match r.same_bits {
        true => Ok(()),
        false => Err(Failure::run(
            "two deterministic runs gave different bits\nhint: this is a bug in Lockstep or a library it uses; please report it with the output of `lockstep doctor`".into(),
        )),
    }
}

fn as_json(shape: &str, precision: Precision, result: &BenchResult) -> Value {
    let mut value = json!(result);
    for (key, field) in [("peer", json!("lockstep")), ("shape", json!(shape)), ("precision", json!(precision.name()))] {
        value[key] = field;
    }
    value
}

fn as_text(shape: &str, precision: Precision, r: &BenchResult) -> String {
    let mut text = format!(
        "{shape} on {}, batch {}, seq {}, {}: {:.0} tokens/s, {:.1} ms a step, {:.3} TFLOP/s = {:.0}% of the {} \
         ({:.3} TFLOP/s)\narena {:.2} GiB, peak {:.2} GiB, first step done {:.1} s after the start, loss {:.4} nats\n",
        r.device,
        r.batch,
        r.seq,
        precision.name(),
        r.tokens_per_s,
        r.step_s * 1e3,
        r.tflops,
        100.0 * r.mfu,
        r.peak,
        r.peak_tflops,
        r.arena_gib,
        r.peak_gib,
        r.first_step_s,
        r.loss
    );
    if let Some(memory) = &r.gpu_memory {
        text.push_str(&memory_text(r.arena_bytes, memory));
    }
    r.notes.iter().for_each(|note| text.push_str(&format!("{note}\n")));
    if let Some(profile) = &r.profile {
        let rows: Vec<Vec<String>> = profile
            .ops
            .iter()
            .map(|o| {
                let [ms, floor] = [o.seconds, o.floor_s].map(|s| format!("{:.2} ms", s * 1e3));
                vec![o.op.to_owned(), o.calls.to_string(), ms, floor, format!("{:.1}×", o.seconds / o.floor_s)]
            })
            .collect();
        text.push_str(&table(&["op", "calls", "time", "floor", "of floor"], &rows));
    }
    text
}

fn memory_text(arena_bytes: u64, m: &GpuMemory) -> String {
    let known = [arena_bytes, m.context_bytes, arena_bytes + m.context_bytes].map(units::gib);
    let more = if m.difference_bytes < 0 { "less" } else { "more" };
    let verdict = match (m.agrees, m.agrees_with_libraries_and_graphs) {
        (true, _) => "they agree within 1% or 300 MiB",
        (false, true) => "with libraries and graphs they agree within 1% or 300 MiB",
        (false, false) => "they do NOT agree within 1% or 300 MiB; does another program use the device?",
    };
    format!(
        "GPU memory: arena {} + context {} = {}; NVML reports {}, {} {more}: {verdict}\n\
         libraries that load late and recorded graphs had added {} after two steps\n",
        known[0],
        known[1],
        known[2],
        units::gib(m.nvml_bytes),
        units::gib(m.difference_bytes.unsigned_abs()),
        units::gib(m.libraries_and_graphs_bytes)
    )
}
