//! `lockstep bench generate`: how fast prompts are read, and texts written.

use crate::Format;
use crate::failure::{Failure, Result};
use crate::options::WeightArgs;
use crate::profile::{as_text as as_table, write_trace};
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_ir::units;
use lockstep_train::{GenerationResult, GenerationSpec, bench_generate};
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// Config file of a run, whose model is timed in random weights.
    #[arg(value_name = "RUN.TOML", conflicts_with = "preset", required_unless_present = "preset")]
    config: Option<PathBuf>,
    /// A preset instead of a config: llama-124m, llama-3.2-1b, … (`lockstep config` lists them).
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// Override a key: --set train.threads=1.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Texts at once.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Tokens of each prompt.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    prompt: u32,
    /// Tokens to write for each.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    tokens: u32,
    /// What numbers are stored and multiplied in: precision.policy.
    #[arg(long, value_parser = ["fp32", "tf32", "bf16", "fp16"])]
    precision: Option<String>,
    #[command(flatten)]
    weights: WeightArgs,
    /// What computes: the CPU, a GPU, or a GPU where one is found: train.device.
    #[arg(long, value_parser = ["auto", "cpu", "cuda"])]
    device: Option<String>,
    /// Say where the time of a step of decoding goes, and write it to this file as a Chrome trace.
    #[arg(long, value_name = "TRACE.JSON")]
    profile: Option<PathBuf>,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(args: &Args) -> Result<()> {
    let mut overrides = args.set.clone();
    let named = [("train.device", &args.device), ("precision.policy", &args.precision)];
    overrides.extend(named.into_iter().filter_map(|(key, value)| Some(format!("{key}=\"{}\"", value.as_ref()?))));
    let (name, config) = match (&args.config, &args.preset) {
        (Some(path), _) => {
            let name = path.file_stem().map_or("run".into(), |stem| stem.to_string_lossy().into_owned());
            (name, Config::load(path, &overrides)?)
        }
        (None, Some(preset)) => {
            (preset.clone(), Config::parse(&format!("[model]\npreset = \"{preset}\"\n"), "--preset", &overrides)?)
        }
        (None, None) => return Err(Failure::request("nothing to time", "name a config file, or a --preset")),
    };
    crate::warn(config.warnings());
    let mut config = config;
    args.weights.apply(&mut config);
    let [texts, prompt, tokens] = [args.batch, args.prompt, args.tokens].map(|n| n as usize);
    let spec = GenerationSpec { config, texts, prompt, tokens, profile: args.profile.is_some() };
    let terminal = std::io::stderr().is_terminal();
    let result = bench_generate(&Devices::new(), &spec, &mut |text| {
        if terminal {
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    })?;
    if let (Some(path), Some(profile)) = (&args.profile, &result.profile) {
        write_trace(profile, path)?;
    }
    args.format.print(|| json!(result), || as_text(&name, &result))
}

fn as_text(name: &str, r: &GenerationResult) -> String {
    let GenerationResult { device, texts, prompt, tokens, .. } = r;
    let [median, most, all] = r.latency_s.map(|s| s * 1e3);
    let rate = |n: f64| units::count(n as u64);
    let mut text = format!(
        "{name} on {device}, {}, prompts of {prompt} tokens, {tokens} tokens written for each\n\
         prefill: {} tokens/s, {:.1} TFLOP/s, {:.0}% of the measured peak of matmuls\n\
         decode:  {} tokens/s, {median:.3} ms a token (90%: {most:.3} ms, 99%: {all:.3} ms)\n\
         bound:   {:.3} ms a token ({:.0}%): {} of weights, {} of keys and values at {:.0} GB/s\n\
         memory:  arena {}, KV cache {} of it\n",
        units::counted(*texts, "text"),
        rate(r.prefill_tokens_per_s),
        r.prefill_tflops,
        100.0 * r.prefill_share,
        rate(r.tokens_per_s),
        r.bound_s * 1e3,
        100.0 * r.share,
        units::bytes(r.weight_bytes),
        units::bytes(r.cache_read_bytes),
        r.bandwidth / 1e9,
        units::bytes(r.arena_bytes),
        units::bytes(r.cache_bytes),
    );
    if let Some(profile) = &r.profile {
        text.push_str(&as_table(profile));
    }
    text
}
