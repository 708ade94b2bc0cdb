//! `lockstep doctor`: what this machine has, what is missing and how to get it; whether kernels are right.

mod world;

use crate::Format;
use crate::failure::{Failure, Result};
use crate::style;
use crate::table::wrapped;
use lockstep_cuda::{CudaExecutor, Finding, Gpu, LIBRARIES, survey};
use lockstep_exec::comm::{self, Subject};
use lockstep_exec::conformance::{self, CaseOutcome};
use lockstep_exec::cpu::{self, CpuExecutor, Simd};
use lockstep_exec::{ExecError, Executor};
use lockstep_ir::{DType, OpKind, StepProgram, units};
use serde_json::{Value, json};
use std::io::Write;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    /// Check every kernel against its definition in f64, on pseudo-random numbers; with --world, the communication between
    /// processes.
    #[arg(long)]
    conformance: bool,
    /// Look at the processes that were started together with this one, by mpirun, srun or torchrun.
    #[arg(long)]
    world: bool,
    /// Draws the numbers: the same ones wherever it is the same.
    #[arg(long, value_name = "N", default_value_t = conformance::SEED, requires = "conformance")]
    seed: u64,
    /// Whose kernels, or communication, are checked.
    #[arg(long, value_parser = ["cpu", "cuda"], default_value = "cpu", requires = "conformance")]
    device: String,
    /// Check the kernels of this op alone, such as linear; may be given several times.
    #[arg(long = "op", value_name = "NAME", requires = "conformance", conflicts_with = "world")]
    ops: Vec<String>,
    /// How to print what this machine has.
    #[arg(long, value_enum, default_value = "text", conflicts_with = "conformance")]
    format: Format,
}

pub fn run(args: Args) -> Result<()> {
    if args.world {
        return world::run(args.conformance.then_some(args.device.as_str()), args.format);
    }
    if args.conformance {
        return check(&args.device, args.seed, &args.ops);
    }
    let mut out = std::io::stdout().lock();
    if args.format == Format::Json {
        writeln!(out, "{:#}", as_json(&survey()))?;
        return Ok(());
    }
    let memory = cpu::available_bytes().map_or("unknown".to_owned(), units::bytes);
    let (cores, path) = (units::counted(cpu::cores(), "core"), vector_path());
    writeln!(out, "cpu: {cores}, {memory} free, vector path {path}\n")?;
    let findings = survey();
    let width = findings.iter().map(|f| f.what.chars().count()).max().unwrap_or(0);
    writeln!(out, "CUDA")?;
    for f in &findings {
        let (state, text) = match &f.found {
            Ok(text) => (style::verdict(true, "found  "), text),
            Err(text) if f.needed => (style::verdict(false, "missing"), text),
            Err(text) => ("missing".to_owned(), text),
        };
        writeln!(out, "  {:<width$}  {state}  {text}", f.what)?;
    }
    for f in findings.iter().filter(|f| f.found.is_err() && !f.hint.is_empty()) {
        write!(out, "{}", wrapped(&format!("{}: {}", f.what, f.hint), "  "))?;
    }
    match ready(&findings) {
        true => writeln!(out, "\nready to train on the GPU: train.device = \"cuda\"")?,
        false => {
            let text = format!(
                "ready to train on the CPU; a GPU needs what is missing ({LIBRARIES} names a folder to look in first)"
            );
            write!(out, "\n{}", wrapped(&text, "  "))?;
        }
    }
    Ok(())
}

/// The vector path of kernels, and who lowered it.
fn vector_path() -> String {
    match (Simd::current(), Simd::detect()) {
        (path, highest) if path == highest => path.name().to_owned(),
        (path, highest) => format!("{} (by {}; the CPU has {})", path.name(), Simd::SWITCH, highest.name()),
    }
}

fn as_json(findings: &[Finding]) -> Value {
    let finding = |f: &Finding| {
        let (found, text) = match &f.found {
            Ok(text) => (true, text),
            Err(text) => (false, text),
        };
        json!({ "what": f.what, "found": found, "detail": text, "hint": f.hint, "needed": f.needed })
    };
    json!({
        "cpu": { "cores": cpu::cores(), "free_bytes": cpu::available_bytes(), "vector_path": Simd::current().name() },
        "cuda": findings.iter().map(finding).collect::<Vec<_>>(),
        "gpu_ready": ready(findings),
    })
}

/// Whether all is there that training on a GPU needs.
fn ready(findings: &[Finding]) -> bool {
    findings.iter().all(|f| f.found.is_ok() || !f.needed)
}

fn check(device: &str, seed: u64, ops: &[String]) -> Result<()> {
    if let Some(unknown) =
        ops.iter().find(|name| !OpKind::ALL.iter().flat_map(|kind| kind.rows()).any(|row| row.name == **name))
    {
        return Err(Failure::request(
            format!("no op is called {unknown}"),
            "`lockstep explain RUN.TOML --verbose` shows the ops of a program",
        ));
    }
    let gpu = if device == "cuda" { Some(Gpu::open(0, false).map_err(ExecError::from)?) } else { None };
    let threads = cpu::cores();
    let mut out = std::io::stdout().lock();
    let mut failed = 0;
    let timeout = Duration::from_secs(10);
    let ranks = |count: usize| match &gpu {
        None => comm::threads(count, timeout).into_iter().map(|rank| Subject::inline(rank)).collect(),
        // Too few are told of.
        Some(gpu) => lockstep_cuda::subjects(gpu, count, timeout).unwrap_or_default(),
    };
    let communication = if ops.is_empty() { comm::conformance::check(&ranks) } else { Ok(()) };
    match communication {
        Ok(()) if !ops.is_empty() => {}
        Ok(()) => writeln!(out, "{device}, collectives and messages of up to 8 ranks hold")?,
        Err(problem) => {
            writeln!(out, "failed: {device}, {problem}")?;
            failed += 1;
        }
    }
    // The CPU is always deterministic.
    let narrow = [DType::BF16, DType::F16].map(|compute| [(compute, false), (compute, true)]);
    let ways = [(DType::F32, false)].into_iter().chain(narrow.into_iter().flatten());
    for (compute, deterministic) in ways.filter(|(_, d)| gpu.is_some() || !d) {
        let outcomes = match &gpu {
            None => {
                let profile = cpu::profile(threads, compute, DType::Fixed64);
                let load = |p: StepProgram| Ok(Box::new(CpuExecutor::load(p, threads)?) as Box<dyn Executor>);
                conformance::run(&profile, compute, true, seed, ops, &mut { load })?
            }
            Some(gpu) => {
                let profile = lockstep_cuda::profile("cuda", compute, DType::Fixed64, deterministic);
                let load =
                    |p: StepProgram| Ok(Box::new(CudaExecutor::load(gpu, p, deterministic)?) as Box<dyn Executor>);
                conformance::run(&profile, compute, false, seed, ops, &mut { load })?
            }
        };
        let bad: Vec<&CaseOutcome> = outcomes.iter().filter(|o| o.failure.is_some()).collect();
        for outcome in &bad {
            writeln!(out, "failed: {}: {}", outcome.case, outcome.failure.as_deref().unwrap_or_default())?;
        }
        let count = outcomes.len();
        let passed = count - bad.len();
        let how = if deterministic { ", deterministic" } else { "" };
        writeln!(out, "{device}, {compute}{how}, seed {seed}: {passed} of {count} cases hold")?;
        if let Some(o) = closest(&outcomes) {
            let (error, limit, share) = (o.error, o.limit, 100.0 * o.error / o.limit);
            writeln!(
                out,
                "  closest to its limit, at {share:.0}%: an error of {error:.1e} of the largest element, {limit:.1e} accepted, in {}",
                o.case
            )?;
        }
        failed += bad.len();
    }
    match failed {
        0 => Ok(()),
        _ => Err(Failure::run(
            format!("{failed} cases failed"),
            "please report this with the output of `lockstep doctor`",
        )),
    }
}

/// Of the cases that hold the one whose error is closest to its limit: each case has a limit of its own.
fn closest(outcomes: &[CaseOutcome]) -> Option<&CaseOutcome> {
    let holding = outcomes.iter().filter(|o| o.failure.is_none() && o.limit > 0.0);
    holding.max_by(|a, b| (a.error / a.limit).total_cmp(&(b.error / b.limit)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_counts_beside_its_own_limit() {
        let case = |name: &str, error, limit| CaseOutcome { case: name.to_owned(), error, limit, failure: None };
        let bits = case("one sequence at a time", 0.0, 0.0);
        let failed = CaseOutcome { failure: Some("differs".into()), ..case("wrong", 1.0, 2e-5) };
        let outcomes = [bits, case("in bf16", 8.4e-3, 1.2e-2), case("in f32", 1.9e-5, 2e-5), failed];
        assert_eq!(closest(&outcomes).map(|o| o.case.as_str()), Some("in f32"));
        assert!(closest(&outcomes[..1]).is_none());
    }
}
