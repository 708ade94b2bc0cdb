//! The speed of a training step on random tokens, and where its time goes.

use crate::compare::fill_all;
use crate::profile::{MeasuredPeaks, Profile, ProfiledStep, profile};
use crate::schedule::step_scalars;
use crate::{Result, Session, TrainError, observed_timeline};
use lockstep_config::{Config, PrecisionPolicy};
use lockstep_exec::ExecError;
use lockstep_host::{Devices, Prediction, predict};
use lockstep_ir::{Hint, StepProgram, StepScalars};
use lockstep_plan::{MemoryTimeline, Target, plan};
use serde::Serialize;
use std::time::Instant;

/// What is measured.
#[derive(Clone, Debug)]
pub struct BenchSpec {
    /// The run whose step is timed, on random tokens.
    pub config: Config,
    /// Timed steps.
    pub steps: usize,
    /// Take one more step and say where its time went.
    pub profile: bool,
    /// Watch the memory of the first two steps.
    pub timeline: bool,
}

/// The speed of a step.
#[derive(Clone, Debug, Serialize)]
pub struct BenchResult {
    /// What computed.
    pub device: &'static str,
    /// Sequences of a step.
    pub batch: usize,
    /// Sequences that a rank computes at once.
    pub micro_batch: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// `precision.policy`.
    pub precision: PrecisionPolicy,
    /// Median seconds of a step.
    pub step_s: f64,
    /// The lower quartile of them: other programs on the same cores disturb some steps.
    pub quartile_s: f64,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// Model FLOPs per second, in 10¹².
    pub tflops: f64,
    /// Model FLOPs per second as a share of `peak`.
    pub mfu: f64,
    /// What `mfu` is of, in 10¹² FLOP per second.
    pub peak_tflops: f64,
    /// What that is: `published peak of the GPU`, or `matmul peak of the CPU in bf16, measured 2026-11-16`.
    pub peak: String,
    /// What was predicted before the first step, where this machine has a profile or the catalogue its GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prediction: Option<Prediction>,
    /// Seconds until the first step was done: compilation, libraries, plans, weights and all.
    pub first_step_s: f64,
    /// Seconds until the third was.
    pub warm_up_s: f64,
    /// Arena in bytes.
    pub arena_bytes: u64,
    /// Bytes that wait in the memory of the host.
    pub host_bytes: u64,
    /// Those of them that activations have.
    pub host_activation_bytes: u64,
    /// Largest resident memory of the process on the host, in bytes.
    pub host_peak_bytes: u64,
    /// Memory besides the arena, on a GPU whose NVML tells.
    #[serde(flatten)]
    pub gpu_memory: Option<GpuMemory>,
    /// Arena in GiB.
    pub arena_gib: f64,
    /// Largest resident memory of the process in GiB.
    pub peak_gib: f64,
    /// Loss of the last step.
    pub loss: f64,
    /// Loss and norm of the gradient of every step, the first three included.
    #[serde(skip)]
    pub steps: Vec<(f64, f32)>,
    /// What the executor says of the program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Where the time of one step went, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
    /// Memory over the first two steps, if asked for.
    #[serde(skip)]
    pub timeline: Option<MemoryTimeline>,
}

/// The memory of a GPU: what was known before the first step against what NVML reports after the last. Both are of this process:
/// what was in use before it opened the device is not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct GpuMemory {
    /// Bytes of the context, kernels and libraries, measured before the arena was allocated.
    pub context_bytes: u64,
    /// Bytes that libraries loaded late and CUDA graphs had added after two steps, by the driver.
    pub libraries_and_graphs_bytes: u64,
    /// Bytes in use after the last step, by NVML.
    pub nvml_bytes: u64,
    /// `nvml_bytes` less arena and context.
    pub difference_bytes: i64,
    /// Whether the difference is at most 1% or 300 MiB, whichever is more.
    pub agrees: bool,
    /// The same of what is left of the difference once libraries and graphs are counted.
    pub agrees_with_libraries_and_graphs: bool,
}

impl GpuMemory {
    /// Compares an arena and what was measured beside it with what NVML reports.
    pub fn new(arena_bytes: u64, context_bytes: u64, libraries_and_graphs_bytes: u64, nvml_bytes: u64) -> Self {
        let difference_bytes = nvml_bytes as i64 - (arena_bytes + context_bytes) as i64;
        let within = |difference: i64| difference.unsigned_abs() <= (nvml_bytes / 100).max(300 << 20);
        Self {
            context_bytes,
            libraries_and_graphs_bytes,
            nvml_bytes,
            difference_bytes,
            agrees: within(difference_bytes),
            agrees_with_libraries_and_graphs: within(difference_bytes - libraries_and_graphs_bytes as i64),
        }
    }
}

/// Measures a step.
pub fn bench_train(devices: &Devices, spec: &BenchSpec, show: &mut dyn FnMut(&str)) -> Result<BenchResult> {
    let mut start = Instant::now();
    let config = &spec.config;
    let plan = devices.tuned(config, plan(devices, config)?)?;
    // Before the arena takes the memory.
    let begun = Instant::now();
    let peak = devices.matmul_peak(&plan)?;
    start += begun.elapsed();
    let mut session = Session::new(devices, config, &plan)?;
    let mut notes: Vec<String> = session.notes().iter().map(ToString::to_string).collect();
    let prediction = predict(devices, &plan).unwrap_or_else(|error| {
        notes.push(format!("warning: no prediction: {}", error.with_hint()));
        None
    });
    fill_all(&mut session, config, &plan)?;
    let mut next = 0;
    let mut scalars = || {
        let scalars = step_scalars(config, next, next, plan.tokens_per_step);
        next += 1;
        StepScalars { lr: 1e-4, ..scalars }
    };
    let mut steps = Vec::new();
    let mut watched = Vec::new();
    let device = devices.device(plan.target)?;
    let arena_bytes = session.arena_bytes();
    let (mut late_bytes, mut first_step_s) = (None, 0.0);
    for i in 0..3 {
        show(&format!("warm-up step {} of 3", i + 1));
        steps.push(match spec.timeline && i < 2 {
            true => {
                let (result, timings) = session.profile_step(scalars())?;
                watched.push(timings);
                result
            }
            false => session.run_step(scalars())?,
        });
        if i == 0 {
            first_step_s = start.elapsed().as_secs_f64();
        }
        // The first step loads what libraries load late, the second records a graph.
        if let (Some(gpu), 1) = (device.gpu(), i) {
            late_bytes = gpu.late_bytes(arena_bytes).map_err(ExecError::from)?;
        }
    }
    let warm_up_s = start.elapsed().as_secs_f64();
    let mut times = Vec::new();
    let (count, mut ahead, mut begun) = (spec.steps.max(1), None, Instant::now());
    for i in 0..count {
        show(&format!("step {} of {count}", i + 1));
        // As in training: the next step is queued before the result of this one is taken, and counts from then on.
        let current = match ahead.take() {
            Some(queued) => queued,
            None => {
                begun = Instant::now();
                session.queue_run(scalars())?
            }
        };
        if !current.is_done() && i + 1 < count {
            ahead = Some(session.queue_run(scalars())?);
        }
        steps.push(session.finish(current)?);
        let now = Instant::now();
        times.push((now - begun).as_secs_f64());
        begun = now;
    }
    let gpu_memory = device.gpu().and_then(|gpu| {
        let (context, nvml) = (gpu.context_bytes()?, gpu.nvml_bytes()?);
        Some(GpuMemory::new(arena_bytes, context, late_bytes?, nvml))
    });
    times.sort_by(f64::total_cmp);
    let (step_s, quartile_s) = (times[times.len() / 2], times[times.len() / 4]);
    let step = steps.len() as u64 + 1;
    let timings = if spec.profile { Some(session.executor().profile(StepProgram::TRAIN)?) } else { None };
    let touched = session.executor().touched_bytes();
    let timeline = spec.timeline.then(|| observed_timeline(plan.program(), &watched, touched));
    let peak_gib = device.peak_bytes()? as f64 / (1u64 << 30) as f64;
    let host_peak_bytes = devices.device(Target::Cpu)?.peak_bytes()?;
    drop(session);
    let tokens_per_s = plan.tokens_per_step as f64 / step_s;
    let flops = plan.model_flops_per_token() * tokens_per_s;
    let profile = match timings {
        Some(timings) => {
            show("measuring the peaks of matmuls and memory");
            let peaks = MeasuredPeaks::of(device.as_ref(), &plan)?;
            Some(profile(plan.program(), &[ProfiledStep { step, timings }], &peaks)?)
        }
        None => None,
    };
    Ok(BenchResult {
        device: plan.target.name(),
        batch: config.batches().largest(),
        micro_batch: config.train.micro_batch,
        seq: config.train.seq,
        precision: config.precision.policy,
        step_s,
        quartile_s,
        tokens_per_s,
        tflops: flops / 1e12,
        mfu: flops / peak.flops_per_s,
        peak_tflops: peak.flops_per_s / 1e12,
        peak: peak.name,
        prediction,
        first_step_s,
        warm_up_s,
        arena_bytes,
        host_bytes: plan.host_bytes(),
        host_activation_bytes: plan.host_activation_bytes(),
        host_peak_bytes,
        gpu_memory,
        arena_gib: plan.memory.total_bytes as f64 / (1u64 << 30) as f64,
        peak_gib,
        loss: steps.last().map_or(f64::NAN, |s| s.loss),
        steps: steps.iter().map(|s| (s.loss, s.grad_norm)).collect(),
        notes,
        timeline,
        profile,
    })
}

/// What `train.deterministic` costs, and whether it holds.
#[derive(Clone, Debug, Serialize)]
pub struct Determinism {
    /// The usual way.
    pub usual: BenchResult,
    /// The deterministic one.
    pub deterministic: BenchResult,
    /// Tokens per second of the latter as a share of the former.
    pub ratio: f64,
    /// Whether all steps gave the same losses and norms, bit for bit, when they were taken again from the same start.
    pub same_bits: bool,
}

/// Measures a step the usual way, then deterministic, that one twice.
pub fn bench_deterministic(devices: &Devices, spec: &BenchSpec, show: &mut dyn FnMut(&str)) -> Result<Determinism> {
    let [usual, deterministic] = [false, true].map(|deterministic| {
        let mut spec = spec.clone();
        spec.config.train.deterministic = deterministic;
        spec
    });
    if Target::of(devices, &deterministic.config) == Target::Cpu {
        return Err(TrainError::AlwaysDeterministic);
    }
    let usual = bench_train(devices, &usual, &mut |text| show(&format!("usual: {text}")))?;
    let mut run = |which: &str| bench_train(devices, &deterministic, &mut |text| show(&format!("{which}: {text}")));
    let (first, again) = (run("deterministic")?, run("deterministic again")?);
    let bits =
        |r: &BenchResult| r.steps.iter().map(|(loss, norm)| (loss.to_bits(), norm.to_bits())).collect::<Vec<_>>();
    Ok(Determinism {
        ratio: first.tokens_per_s / usual.tokens_per_s,
        same_bits: bits(&first) == bits(&again),
        usual,
        deterministic: first,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_agrees_within_a_hundredth_or_300_mib() {
        const GIB: u64 = 1 << 30;
        let agree = |late, nvml| {
            let memory = GpuMemory::new(48 * GIB, GIB / 2, late, nvml);
            (memory.difference_bytes, memory.agrees, memory.agrees_with_libraries_and_graphs)
        };
        let known = 48 * GIB + GIB / 2;
        assert_eq!(agree(0, known), (0, true, true));
        assert_eq!(agree(0, known - GIB / 4), (-(GIB as i64) / 4, true, true));
        assert_eq!(agree(0, known + GIB), (GIB as i64, false, false));
        assert_eq!(agree(GIB, known + GIB), (GIB as i64, false, true));
        let small = |nvml| GpuMemory::new(GIB, 0, 0, nvml).agrees;
        assert!(small(GIB + (300 << 20)) && !small(GIB + (301 << 20)));
    }
}
