//! `lockstep bench`: this machine's measured peaks; `lockstep bench train`: the speed of a training step. `lockstep bench
//! collectives`, `generate` and `checkpoint` are beside it.

use crate::failure::{Failure, Result};
use crate::host_memory::in_host;
use crate::profile::{as_text as as_table, write_trace};
use crate::table::table;
use crate::timeline::TimelineFile;
use crate::{Format, bench_checkpoint, bench_collectives, bench_generate, machine, warn};
use lockstep_config::Config;
use lockstep_exec::cpu;
use lockstep_host::Devices;
use lockstep_ir::{DType, units};
use lockstep_train::bench::{BenchResult, BenchSpec, Determinism, GpuMemory, bench_deterministic, bench_train};
use lockstep_train::settled;
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    peaks: Peaks,
}

#[derive(clap::Subcommand)]
enum What {
    /// Time a training step of a config or a preset, on random tokens: forward, backward, clipping, the optimizer.
    Train(Box<Train>),
    /// Time collectives and messages between ranks: threads of this process, processes of this machine, or those that
    /// torchrun, srun or mpirun started. Results are checked.
    Collectives(bench_collectives::Args),
    /// Time generation of a config or a preset, on random tokens: reading prompts, and writing texts one token at a time.
    Generate(bench_generate::Args),
    /// Time checkpoints: how long steps wait for one in the background, beside a copy in memory and beside a synchronous one.
    Checkpoint(bench_checkpoint::Args),
}

#[derive(clap::Args)]
struct Peaks {
    /// Threads; 0 for all cores.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Measure this machine for predictions, for about a minute, and save that as a profile of this name. explain, train and bench
    /// train use it from then on when they run here.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["threads", "disk", "learn"])]
    save: Option<String>,
    /// With --save: what is measured, the CPU, a GPU, or a GPU where one is found.
    #[arg(long, value_parser = ["auto", "cpu", "cuda"], default_value = "auto", requires = "save")]
    device: String,
    /// With --save: numbers of ranks that share the CPU.
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_value = "1,2", requires = "save")]
    ranks: Vec<usize>,
    /// Add what a run on this machine measured to its profile.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["threads", "disk"])]
    learn: Option<PathBuf>,
    /// Folder whose disk is measured.
    #[arg(long, value_name = "DIR", default_value = ".")]
    disk: PathBuf,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(clap::Args)]
struct Train {
    /// Config file of the run whose step is timed; its data are not read.
    #[arg(value_name = "RUN.TOML", conflicts_with_all = ["preset", "shape"], required_unless_present_any = ["preset", "shape"])]
    config: Option<PathBuf>,
    /// A preset instead of a config: llama-124m, llama-3.2-1b, … (`lockstep config` lists them).
    #[arg(long, value_name = "NAME", conflicts_with = "shape")]
    preset: Option<String>,
    /// Old name of --preset: 15m, 29m, 124m, 1b, gpt2-xl or 8b, in fp32 unless --precision is given.
    #[arg(long, value_name = "NAME", hide = true, value_parser = OLD_SHAPES.map(|(name, ..)| name))]
    shape: Option<String>,
    /// Override a key: --set train.seq=2048.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Sequences of a step: train.global_batch.
    #[arg(long)]
    batch: Option<usize>,
    /// Tokens of a sequence: train.seq.
    #[arg(long)]
    seq: Option<usize>,
    /// What numbers are stored and multiplied in: precision.policy, which `lockstep config precision.policy` explains.
    #[arg(long, value_parser = ["fp32", "tf32", "bf16", "fp16", "fp8"])]
    precision: Option<String>,
    /// What computes: the CPU, a GPU, or a GPU where one is found: train.device.
    #[arg(long, value_parser = ["auto", "cpu", "cuda"])]
    device: Option<String>,
    /// Type of gradient sums: precision.gradients.
    #[arg(long, value_parser = ["fp32", "bf16"])]
    gradients: Option<String>,
    /// What is recomputed in backward: a value of recompute.policy, or as little as fits: budget=40GiB.
    #[arg(long, value_name = "POLICY")]
    recompute: Option<String>,
    /// Sequences computed at once: train.micro_batch.
    #[arg(long)]
    micro_batch: Option<usize>,
    /// Timed steps; the median counts.
    #[arg(long, default_value_t = 8)]
    steps: usize,
    /// Threads; 0 for all cores: train.threads.
    #[arg(long)]
    threads: Option<usize>,
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

/// Values of --shape: name, preset, sequence, batch.
const OLD_SHAPES: [(&str, &str, usize, usize); 6] = [
    ("15m", "llama-15m", 256, 16),
    ("29m", "llama-29m", 512, 8),
    ("124m", "llama-124m", 1024, 64),
    ("1b", "llama-3.2-1b", 4096, 8),
    ("gpt2-xl", "gpt2-xl", 1024, 16),
    ("8b", "llama-3-8b", 4096, 1),
];

impl Train {
    /// The config of the step, and what it is called.
    fn config(&self, devices: &Devices) -> Result<(String, Config)> {
        let mut overrides = self.set.clone();
        let mut set = |key: &str, value: Option<String>| overrides.extend(value.map(|value| format!("{key}={value}")));
        let quoted = |text: &String| format!("\"{text}\"");
        set("train.global_batch", self.batch.map(|n| n.to_string()));
        set("train.seq", self.seq.map(|n| n.to_string()));
        set("train.micro_batch", self.micro_batch.map(|n| n.to_string()));
        set("train.threads", self.threads.map(|n| n.to_string()));
        set("train.device", self.device.as_ref().map(quoted));
        set("precision.policy", self.precision.as_ref().map(quoted));
        set("precision.gradients", self.gradients.as_ref().map(quoted));
        match self.recompute.as_ref().map(|policy| (policy, policy.strip_prefix("budget="))) {
            Some((_, Some(budget))) => {
                set("recompute.policy", Some("budget".into()));
                set("recompute.budget", Some(format!("\"{budget}\"")));
            }
            Some((policy, None)) => set("recompute.policy", Some(quoted(policy))),
            None => {}
        }
        let preset = |name: &str, more: &str| {
            let text = format!(
                "[model]\npreset = \"{name}\"\n[optimizer]\nlr = 1e-4\nweight_decay = 0.01\nbeta2 = 0.999\n{more}"
            );
            Config::parse(&text, "--preset", &overrides)
        };
        let old = self.shape.as_ref().and_then(|name| OLD_SHAPES.into_iter().find(|(old, ..)| old == name));
        let (name, config) = match (&self.config, &self.preset, old) {
            (Some(path), ..) => {
                let name = path.file_stem().map_or("run".into(), |stem| stem.to_string_lossy().into_owned());
                (name, Config::load(path, &overrides)?)
            }
            (None, Some(name), _) => (name.clone(), preset(name, "")?),
            (None, None, Some((name, known, seq, batch))) => {
                warn(&[format!("--shape {name} is now called --preset {known}")]);
                let usual = format!("[train]\nseq = {seq}\nglobal_batch = {batch}\n[precision]\npolicy = \"fp32\"\n");
                (name.to_owned(), preset(known, &usual)?)
            }
            (None, None, None) => {
                return Err(Failure::request("nothing to time", "name a config file, or a --preset"));
            }
        };
        warn(config.warnings());
        Ok((name, settled(devices, &config, None, &mut |_, _| {})?))
    }
}

pub fn run(args: Args) -> Result<ExitCode> {
    match args.what {
        Some(What::Train(train)) => run_train(*train)?,
        Some(What::Collectives(collectives)) => return bench_collectives::run(&collectives),
        Some(What::Generate(generate)) => bench_generate::run(&generate)?,
        Some(What::Checkpoint(checkpoint)) => bench_checkpoint::run(&checkpoint)?,
        None => match (&args.peaks.save, &args.peaks.learn) {
            (Some(name), _) => machine::save(name, &args.peaks.device, &args.peaks.ranks)?,
            (None, Some(run)) => machine::learn(run)?,
            (None, None) => run_peaks(args.peaks)?,
        },
    }
    Ok(ExitCode::SUCCESS)
}

fn run_peaks(args: Peaks) -> Result<()> {
    let threads = if args.threads == 0 { cpu::cores() } else { args.threads };
    // Those of all cores are what MFU is a share of from now on.
    let devices = Devices::new();
    let all = threads == cpu::cores();
    let peak = |dtype: DType| -> Result<f64> {
        if all { Ok(devices.renew_cpu_peak(dtype)?.flops_per_s) } else { Ok(cpu::peaks::matmul(threads, dtype)?) }
    };
    let (matmul, matmul_bf16) = (peak(DType::F32)?, peak(DType::BF16)?);
    let bandwidth = cpu::peaks::bandwidth(threads)?;
    let disk = disk(&args.disk)?;
    let value = json!({
        "threads": threads, "matmul_fp32_flops": matmul, "matmul_bf16_flops": matmul_bf16,
        "memory_bytes_per_s": bandwidth, "disk_write_bytes_per_s": disk,
    });
    let rate = |bytes: f64| format!("{:.1} GB/s", bytes / 1e9);
    let rows = [
        vec!["matmul fp32".to_owned(), format!("{}/s", units::flops(matmul))],
        vec!["matmul bf16".to_owned(), format!("{}/s", units::flops(matmul_bf16))],
        vec!["memory (copy, read + write)".to_owned(), rate(bandwidth)],
        vec![format!("disk write and sync ({})", args.disk.display()), rate(disk)],
    ];
    let header = format!("measured peak, {}", units::counted(threads, "thread"));
    let of_mfu = if all { "runs on this CPU have these matmul peaks as the denominator of MFU\n" } else { "" };
    args.format.print(|| value, || table(&[&header, "best"], &rows) + of_mfu)
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

fn run_train(args: Train) -> Result<()> {
    let timeline = args.timeline.as_deref().map(TimelineFile::new).transpose()?;
    let devices = Devices::new();
    let (name, config) = args.config(&devices)?;
    let spec =
        BenchSpec { config, steps: args.steps, profile: args.profile.is_some(), timeline: args.timeline.is_some() };
    let terminal = std::io::stderr().is_terminal();
    let mut last = Instant::now();
    let mut show = |text: &str| {
        if terminal || last.elapsed().as_secs() >= 10 {
            let _ = writeln!(std::io::stderr(), "{text}");
            last = Instant::now();
        }
    };
    if args.deterministic {
        let result = bench_deterministic(&devices, &spec, &mut show)?;
        return report_determinism(&name, args.format, &result);
    }
    let result = bench_train(&devices, &spec, &mut show)?;
    if let (Some(path), Some(profile)) = (&args.profile, &result.profile) {
        write_trace(profile, path)?;
    }
    if let (Some(file), Some(timeline)) = (&timeline, &result.timeline) {
        let title = format!("memory of the first two steps, {name} at batch {}, seq {}", result.batch, result.seq);
        file.write("", &title, timeline)?;
    }
    let mut out = std::io::stdout().lock();
    match args.format {
        Format::Json => writeln!(out, "{}", as_json(&name, &result))?,
        Format::Text => write!(out, "{}", as_text(&name, &result))?,
    }
    Ok(())
}

fn report_determinism(name: &str, format: Format, r: &Determinism) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match format {
        Format::Json => {
            let [usual, deterministic] = [&r.usual, &r.deterministic].map(|result| as_json(name, result));
            let value = json!({
                "usual": usual, "deterministic": deterministic, "ratio": r.ratio, "same_bits": r.same_bits,
            });
            writeln!(out, "{value}")?;
        }
        Format::Text => {
            let [usual, deterministic] = [&r.usual, &r.deterministic].map(|result| as_text(name, result));
            let [slower, faster] = [&r.deterministic, &r.usual].map(|result| format!("{:.0}", result.tokens_per_s));
            write!(out, "usual\n{usual}deterministic\n{deterministic}")?;
            writeln!(out, "{slower} tokens/s deterministic, {faster} usual: {:.1}%", 100.0 * r.ratio)?;
            if r.same_bits {
                writeln!(out, "two deterministic runs gave the same losses and gradient norms, bit for bit")?;
            }
        }
    }
    match r.same_bits {
        true => Ok(()),
        false => Err(Failure::run(
            "two deterministic runs gave different bits",
            "this is a bug in Lockstep or a library it uses; please report it with the output of `lockstep doctor`",
        )),
    }
}

fn as_json(name: &str, result: &BenchResult) -> Value {
    let mut value = json!(result);
    for (key, field) in [("peer", "lockstep"), ("name", name), ("shape", name)] {
        value[key] = json!(field);
    }
    value
}

fn as_text(name: &str, r: &BenchResult) -> String {
    let micro_batch = if r.micro_batch == r.batch { String::new() } else { format!(" ({} at once)", r.micro_batch) };
    let BenchResult { device, batch, seq, precision, tokens_per_s, tflops, peak_tflops, peak, .. } = r;
    let BenchResult { arena_gib, peak_gib, loss, first_step_s, .. } = r;
    let (step_ms, mfu) = (r.step_s * 1e3, 100.0 * r.mfu);
    let mut text = format!(
        "{name} on {device}, batch {batch}{micro_batch}, seq {seq}, {precision}\n\
         {tokens_per_s:.0} tokens/s, {step_ms:.1} ms a step, {tflops:.3} TFLOP/s\n\
         MFU {mfu:.0}% of {peak_tflops:.3} TFLOP/s: {peak}\n\
         arena {arena_gib:.2} GiB, peak {peak_gib:.2} GiB, loss {loss:.4} nats\n\
         first step done {first_step_s:.1} s after the start\n"
    );
    if let Some(prediction) = &r.prediction {
        text.push_str(&machine::beside(prediction, r.step_s));
    }
    if r.host_bytes > 0 {
        let [planned, peak] = [r.host_bytes, r.host_peak_bytes].map(units::gib);
        let what = in_host(r.host_bytes, r.host_activation_bytes);
        text.push_str(&format!("host memory: {planned} of {what}, {peak} of the whole process at its peak\n"));
    }
    if let Some(memory) = &r.gpu_memory {
        text.push_str(&memory_text(r.arena_bytes, memory));
    }
    r.notes.iter().for_each(|note| text.push_str(&format!("{note}\n")));
    if let Some(profile) = &r.profile {
        text.push_str(&as_table(profile));
    }
    text
}

fn memory_text(arena_bytes: u64, m: &GpuMemory) -> String {
    let [arena, context, both] = [arena_bytes, m.context_bytes, arena_bytes + m.context_bytes].map(units::gib);
    let [nvml, apart, late] =
        [m.nvml_bytes, m.difference_bytes.unsigned_abs(), m.libraries_and_graphs_bytes].map(units::gib);
    let more = if m.difference_bytes < 0 { "less" } else { "more" };
    let verdict = match (m.agrees, m.agrees_with_libraries_and_graphs) {
        (true, _) => "they agree within 1% or 300 MiB",
        (false, true) => "with libraries and graphs they agree within 1% or 300 MiB",
        (false, false) => "they do NOT agree within 1% or 300 MiB; does another program use the device?",
    };
    format!(
        "GPU memory: arena {arena} + context {context} = {both}; NVML reports {nvml}, {apart} {more}: {verdict}\n\
         libraries that load late and CUDA graphs had added {late} after two steps\n"
    )
}
