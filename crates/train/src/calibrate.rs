//! `bench --save`: measures this machine by running the steps of small models, whose every instruction is timed.
//!
//! Kernels are timed where they stand in a step: with the caches that their neighbours leave, at the clock that the step runs at, beside
//! the other ranks. Sizes are spread so that most models lie between them.

use crate::analysis::{observed, shared_by};
use crate::compare::fill_all;
use crate::schedule::step_scalars;
use crate::{Result, Session};
use lockstep_config::Config;
use lockstep_exec::comm::{Collective, rates};
use lockstep_exec::{ExecError, Timing, cpu};
use lockstep_host::Devices;
use lockstep_ir::{DType, StepProgram, StepScalars};
use lockstep_plan::{Plan, Target, plan};
use lockstep_sim::machine::{Family, Point, Table};
use lockstep_sim::{Framework, MachineProfile, MeasuredTimes, Setting, Workload};
use std::collections::BTreeMap;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// What is measured.
#[derive(Clone, Debug)]
pub struct CalibrationSpec {
    /// The name of the profile.
    pub name: String,
    /// `train.device`.
    pub device: String,
    /// Numbers of ranks that share the CPU.
    pub ranks: Vec<usize>,
}

/// A small model whose step is timed.
struct CalibrationModel {
    architecture: &'static str,
    layers: usize,
    dim: usize,
    heads: usize,
    kv_heads: usize,
    ffn: usize,
    vocab: usize,
    seq: usize,
    batch: usize,
    /// More keys of `[model]`.
    model: &'static str,
    /// The keys of `[precision]`; none where it is measured in every type that the device is measured in.
    precision: Option<&'static str>,
}

#[rustfmt::skip]
const fn shape(
    architecture: &'static str, layers: usize, dim: usize, [heads, kv_heads]: [usize; 2], ffn: usize, vocab: usize, [batch, seq]: [usize; 2],
) -> CalibrationModel {
    CalibrationModel { architecture, layers, dim, heads, kv_heads, ffn, vocab, seq, batch, model: "", precision: None }
}

/// On a CPU.
const SMALL: [CalibrationModel; 6] = [
    shape("llama", 2, 128, [4, 4], 384, 2048, [4, 128]),
    shape("llama", 2, 256, [4, 2], 768, 8192, [4, 256]),
    shape("llama", 1, 384, [8, 8], 1024, 16384, [2, 512]),
    shape("llama", 1, 640, [10, 5], 1792, 4096, [4, 256]),
    shape("gpt2", 2, 320, [5, 5], 1280, 4096, [4, 192]),
    shape("llama", 1, 1024, [8, 8], 2816, 4096, [1, 512]),
];

/// On a GPU. Layers and vocabularies are in proportion as in models that are trained: a GPU at its power limit lowers its clock the more
/// of a step is in matmuls, and all kernels of the step feel it. Long sequences have most of their step in attention, as in models that are
/// trained at such lengths.
const LARGE: [CalibrationModel; 20] = [
    shape("llama", 8, 768, [12, 12], 2048, 50304, [1, 1024]),
    shape("gpt2", 4, 1024, [16, 16], 4096, 50304, [2, 1024]),
    shape("llama", 10, 640, [10, 10], 1792, 50304, [32, 1024]),
    shape("llama", 8, 512, [8, 8], 1536, 32000, [32, 1024]),
    shape("gpt2", 8, 1024, [16, 16], 4096, 50304, [16, 1024]),
    shape("llama", 12, 1152, [18, 6], 3072, 32000, [12, 2048]),
    shape("llama", 10, 1536, [12, 4], 4096, 32000, [8, 2048]),
    shape("llama", 8, 2560, [40, 8], 6912, 64000, [4, 4096]),
    shape("gpt2", 10, 2048, [16, 16], 8192, 50304, [8, 1024]),
    shape("llama", 6, 3072, [24, 8], 8192, 128256, [2, 4096]),
    shape("llama", 4, 4096, [32, 8], 11008, 64000, [1, 4096]),
    shape("llama", 3, 5120, [40, 8], 16384, 32000, [2, 4096]),
    shape("llama", 6, 1024, [16, 2], 4096, 50304, [3, 8192]),
    shape("llama", 3, 2048, [16, 4], 8192, 32000, [1, 16384])
        .with("tied_embeddings = true")
        .in_precision("policy = \"bf16\"\ngradients = \"bf16\""),
    shape("llama", 4, 1536, [24, 6], 6144, 32000, [1, 32768]),
    shape("llama", 6, 1536, [12, 12], 4096, 32000, [4, 4096])
        .with("kv_lora_rank = 384\nqk_nope_head_dim = 128\nqk_rope_head_dim = 64\nv_head_dim = 128"),
    shape("mixtral", 6, 1536, [12, 4], 768, 32000, [4, 4096]).with("experts = 16\nexperts_per_token = 4"),
    shape("llama", 8, 1536, [12, 4], 6144, 50304, [12, 1024]).in_precision(FP8),
    shape("llama", 6, 1792, [28, 4], 7168, 50304, [6, 4096]).in_precision(FP8),
    shape("llama", 3, 4096, [32, 8], 11008, 64000, [2, 4096]).in_precision(FP8),
];

/// fp8, which not every GPU has.
const FP8: &str = "policy = \"fp8\"";

/// Seconds that a model's steps are timed for, and that come before on a GPU, whose clock falls as it heats.
const WINDOW: f64 = 0.7;
const WARM: f64 = 0.7;

/// The gap after a kernel, which is below 0 where clocks around kernels were timed with them.
const LEAST_GAP: f64 = -1e-5;
const MOST_GAP: f64 = 1e-5;

/// Fewest steps that are timed, and as many are profiled: of two, the median would be the slower.
const LEAST: usize = 3;

/// Bytes of the collectives that are timed.
const SIZES: [usize; 5] = [1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26];

impl CalibrationModel {
    const fn with(self, model: &'static str) -> Self {
        Self { model, ..self }
    }

    const fn in_precision(self, precision: &'static str) -> Self {
        Self { precision: Some(precision), ..self }
    }

    fn config(&self, device: &str, policy: &str, ranks: usize, threads: usize) -> Result<Config> {
        let CalibrationModel { architecture, layers, dim, heads, kv_heads, ffn, vocab, seq, batch, model, .. } = self;
        let precision = self.precision.map_or(format!("policy = \"{policy}\""), str::to_owned);
        let text = format!(
            "[model]\narchitecture = \"{architecture}\"\nlayers = {layers}\ndim = {dim}\nheads = {heads}\nkv_heads = {kv_heads}\nffn = {ffn}\nvocab_size = {vocab}\n{model}\n\
             [train]\nseq = {seq}\nglobal_batch = {}\nmicro_batch = {batch}\ndevice = \"{device}\"\nthreads = {}\n\
             [precision]\n{precision}\n[parallel]\ndp = {ranks}\n",
            batch * ranks,
            threads * ranks,
        );
        Ok(Config::parse(&text, "calibration", &[])?)
    }
}

/// What the steps of one model took.
struct Steps {
    plan: Plan,
    step_s: f64,
    /// The instructions of some.
    profiled: Vec<Vec<Timing>>,
}

impl Steps {
    /// What its kernels took, by size.
    fn points(&self, setting: &Setting) -> Result<Vec<Table>> {
        Ok(observed(&self.plan, setting, &self.profiled)?.0)
    }
}

/// Measures this machine. `show` hears what is done, and how many of how many parts are.
pub fn measure_machine(
    devices: &Devices,
    spec: &CalibrationSpec,
    show: &mut dyn FnMut(&str, usize, usize),
) -> Result<MachineProfile> {
    let first = LARGE[0].config(&spec.device, "bf16", 1, cpu::cores())?;
    let target = Target::of(devices, &first);
    let saved = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let mut profile = MachineProfile {
        name: spec.name.clone(),
        processor: devices.processor(target)?,
        saved_unix_s: saved,
        settings: Vec::new(),
    };
    let (shapes, precisions, ranks): (&[CalibrationModel], &[(&str, DType)], Vec<usize>) = match target {
        Target::Cpu => {
            let ranks = spec.ranks.iter().copied().filter(|n| *n <= cpu::cores());
            (&SMALL, &[("fp32", DType::F32), ("bf16", DType::BF16)], ranks.collect())
        }
        Target::Cuda { .. } => (&LARGE, &[("bf16", DType::BF16)], vec![1]),
    };
    let has_fp8 = devices.device(target)?.gpu().is_some_and(|gpu| gpu.device.has_fp8());
    let shapes: Vec<&CalibrationModel> =
        shapes.iter().filter(|shape| shape.precision != Some(FP8) || has_fp8).collect();
    let (mut done, all) = (0, ranks.len() * precisions.len() * shapes.len());
    for ranks in ranks {
        let threads = (cpu::cores() / ranks).max(1);
        let mut setting = blank(devices, target, ranks, threads, precisions)?;
        let mut measured = Vec::new();
        for (precision, _) in precisions {
            for shape in &shapes {
                let of = if ranks > 1 { format!(", {ranks} ranks") } else { String::new() };
                let within = if shape.precision == Some(FP8) { "fp8" } else { precision };
                show(&format!("steps of a model of dim {}, {within}{of}", shape.dim), done, all);
                let config = shape.config(target.name(), precision, ranks, threads)?;
                measured.push(time(devices, &config)?);
                done += 1;
            }
        }
        if ranks > 1 {
            setting.add(collectives(ranks)?);
        }
        settle(&mut setting, target, &measured)?;
        profile.settings.push(setting);
    }
    Ok(profile)
}

/// The peak rates, and no points yet.
fn blank(
    devices: &Devices,
    target: Target,
    ranks: usize,
    threads: usize,
    precisions: &[(&str, DType)],
) -> Result<Setting> {
    let device = devices.device(target)?;
    let (mut flops_per_s, mut bytes_per_s) = (BTreeMap::new(), 0.0);
    for (_, dtype) in precisions {
        let (flops, bytes) = device.peaks(threads, (*dtype).into())?;
        flops_per_s.insert(*dtype, flops);
        bytes_per_s = bytes;
    }
    let (threads, units, overlap_cost) = match device.gpu() {
        None => (threads, 0, 1.0),
        Some(gpu) => (0, gpu.device.processors as usize, 0.0),
    };
    Ok(Setting { ranks, threads, units, bytes_per_s, flops_per_s, overlap_cost, ..Setting::nominal() })
}

/// Times the steps of a config, and their instructions.
fn time(devices: &Devices, config: &Config) -> Result<Steps> {
    let plan = devices.tuned(config, plan(devices, config)?)?;
    let mut session = Session::new(devices, config, &plan)?;
    fill_all(&mut session, config, &plan)?;
    let scalars = || step_scalars(config, 0, 0, plan.tokens_per_step);
    // The first step touches new memory and loads what libraries load late, the second captures a graph.
    let begun = Instant::now();
    for i in 0.. {
        session.run_step(scalars())?;
        let warm = plan.target == Target::Cpu || begun.elapsed().as_secs_f64() > WARM;
        if i >= 1 && warm {
            break;
        }
    }
    let (mut times, mut profiled) = (Vec::new(), Vec::new());
    let on_cpu = plan.target == Target::Cpu;
    let begun = Instant::now();
    let since = |begun: Instant| begun.elapsed().as_secs_f64();
    while times.len() < LEAST || since(begun) < WINDOW {
        times.push(step_seconds(&mut session, &scalars)?);
        // Other programs disturb both alike.
        if on_cpu {
            profiled.push(session.profile_step(scalars())?.1);
        }
    }
    // A GPU rests between kernels that the host launches one by one: its clock would rise before the next steps in a row.
    let begun = Instant::now();
    while !on_cpu && (profiled.len() < LEAST || since(begun) < WINDOW / 2.0) {
        profiled.push(session.profile_step(scalars())?.1);
    }
    drop(session);
    times.sort_by(f64::total_cmp);
    // As of kernels: on a CPU other programs disturb some.
    let at = if on_cpu { times.len() / 4 } else { times.len() / 2 };
    Ok(Steps { step_s: times[at], plan, profiled })
}

/// Seconds of a step. A GPU has the next one queued when this one ends, as in training.
fn step_seconds(session: &mut Session, scalars: &dyn Fn() -> StepScalars) -> Result<f64> {
    const QUEUED: usize = 4;
    let begun = Instant::now();
    let mut current = session.queue_run(scalars())?;
    if current.is_done() {
        session.finish(current)?;
        return Ok(begun.elapsed().as_secs_f64());
    }
    let mut ends = Vec::new();
    for _ in 0..QUEUED {
        let next = session.queue_run(scalars())?;
        session.finish(current)?;
        ends.push(Instant::now());
        current = next;
    }
    session.finish(current)?;
    Ok(ends[0].elapsed().as_secs_f64() / QUEUED as f64)
}

fn collectives(ranks: usize) -> Result<Vec<Table>> {
    let table = |kind: Collective| {
        let point = |bytes: usize| {
            let seconds = rates::seconds(ranks, kind, bytes).map_err(ExecError::from)?;
            Ok(Point { size: vec![ranks as f64, bytes as f64], seconds })
        };
        let points = SIZES.into_iter().map(point).collect::<Result<_>>()?;
        Ok(Table { op: kind.name().to_owned(), dtype: DType::F32, family: Family::Together, points })
    };
    Collective::ALL.into_iter().map(table).collect()
}

/// Adds the points of kernels, and finds how steps differ from their sum, each timed by itself. On a CPU it is a factor. On a GPU:
///
/// - Between kernels there is a gap, or less than the clock around each adds to it: that much is taken off every timed kernel.
/// - A GPU that is kept busy lowers its clock, which kernels that compute feel more than those that read and write. The step whose
///   instructions are timed runs at another clock than steps in a row, and that of another model at yet another: kernels of a model that
///   compute are scaled so that together they take what its steps in a row do.
fn settle(setting: &mut Setting, target: Target, measured: &[Steps]) -> Result<()> {
    let price = |setting: &Setting, plan: &Plan| {
        let work = Workload::new(&plan.compiled.programs, StepProgram::TRAIN, &Framework::lockstep())?;
        let on = MeasuredTimes { name: "", setting, factor: 1.0, exact: true };
        work.measured(&on, &Framework::lockstep()).0.price(&setting.terms())
    };
    // By kernels that compute, and by others, over the time of a step.
    let split = |setting: &Setting, Steps { plan, step_s, .. }: &Steps| -> Result<[f64; 2]> {
        const MORE: f64 = 1.01;
        let kernels = price(setting, plan)?;
        let computing = (price(&setting.computing_scaled(MORE), plan)? - kernels) / (MORE - 1.0);
        Ok([computing, kernels - computing].map(|part| part / step_s))
    };
    for steps in measured {
        debug_assert_eq!(shared_by(&steps.plan), (setting.ranks, setting.threads));
        setting.add(steps.points(setting)?);
    }
    match target {
        Target::Cpu => {
            let ratio = |Steps { plan, step_s, .. }: &Steps| Ok(step_s / price(setting, plan)?);
            let mut ratios = measured.iter().map(ratio).collect::<Result<Vec<f64>>>()?;
            ratios.sort_by(f64::total_cmp);
            setting.slowdown = ratios[ratios.len() / 2];
        }
        Target::Cuda { .. } => {
            const GAP: f64 = 1e-6;
            let with_gap = Setting { kernel_gap_s: GAP, ..setting.clone() };
            let parts = |steps: &Steps| {
                let [computing, rest] = split(setting, steps)?;
                let more = price(&with_gap, &steps.plan)? - price(setting, &steps.plan)?;
                Ok([computing, rest, more / GAP / steps.step_s])
            };
            let (computing, gap) = fitted(&measured.iter().map(parts).collect::<Result<Vec<_>>>()?);
            let gap = gap.clamp(LEAST_GAP, MOST_GAP);
            (setting.kernel_gap_s, setting.clock_s) = (gap.max(0.0), (-gap).max(0.0));
            setting.tables.clear();
            for steps in measured {
                let own = Setting { tables: steps.points(setting)?, ..setting.clone() };
                let times = own_factor(split(&own, steps)?, computing);
                setting.add(own.computing_scaled(times).tables);
            }
        }
    }
    Ok(())
}

/// By what a model's kernels that compute take longer in its steps in a row, as those say whose parts these are. A model of which little is in
/// such kernels says little of them: it is held to what all say.
fn own_factor([computing, rest]: [f64; 2], of_all: f64) -> f64 {
    const HELD: f64 = 0.02;
    // Clocks differ by less.
    const MOST: f64 = 1.25;
    let own = (computing * (1.0 - rest) + HELD * of_all) / (computing * computing + HELD);
    own.clamp(of_all / MOST, of_all * MOST)
}

/// By what kernels that compute take longer in steps, and the gap after each kernel, as steps say whose parts these are: kernels that
/// compute, others, and the number of kernels over the time of the step. Both are held back where steps say little.
fn fitted(parts: &[[f64; 3]]) -> (f64, f64) {
    // A gap is told in units of 10 µs; a factor that is off by 1, or a gap of one unit, counts as 0.1% of every step, squared.
    const UNIT: f64 = 1e-5;
    const HELD: f64 = 0.001;
    let sum = |f: &dyn Fn(&[f64; 3]) -> f64| parts.iter().map(f).sum::<f64>();
    let held = HELD * parts.len() as f64;
    let rest = |p: &[f64; 3]| 1.0 - p[0] - p[1];
    let (aa, ab, bb) =
        (sum(&|p| p[0] * p[0]) + held, sum(&|p| p[0] * p[2] * UNIT), sum(&|p| (p[2] * UNIT).powi(2)) + held);
    let (a, b) = (sum(&|p| p[0] * rest(p)), sum(&|p| p[2] * UNIT * rest(p)));
    let determinant = aa * bb - ab * ab;
    (1.0 + (a * bb - b * ab) / determinant, UNIT * (aa * b - ab * a) / determinant)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_of_the_parts_of_steps_are_found() {
        // Kernels that compute take 6% longer, and every kernel 1 µs less than its clock says.
        let steps =
            [[0.9, 0.1, 200.0], [0.7, 0.3, 900.0], [0.5, 0.5, 3000.0], [0.8, 0.3, 20_000.0], [0.3, 0.8, 9000.0]];
        let shares = |step: [f64; 3]| step.map(|part| part / (1.06 * step[0] + step[1] - 1e-6 * step[2]));
        let (computing, gap) = fitted(&steps.map(shares));
        assert!((computing - 1.06).abs() < 0.01 && (gap + 1e-6).abs() < 3e-7, "{computing}, {gap}");
    }

    #[test]
    fn a_model_of_which_much_is_computed_says_by_itself_how_much_longer_that_takes() {
        assert!((own_factor([0.8, 0.12], 1.0) - 1.1).abs() < 0.005);
        assert!((own_factor([0.01, 0.5], 1.02) - 1.02).abs() < 0.3);
        assert!((own_factor([0.0, 1.5], 1.02) - 1.02).abs() < 1e-9);
        assert!(
            own_factor([0.4, 1.2], 1.0) == 0.8,
            "what others take of a step leaves nothing, and yet kernels take time"
        );
    }

    #[test]
    fn models_that_are_timed_on_a_gpu_are_configs() {
        for shape in LARGE {
            let config = shape.config("cuda", "bf16", 1, 1).unwrap();
            assert_eq!(config.train.global_batch, shape.batch);
        }
    }

    #[test]
    fn steps_of_a_measured_model_take_about_what_they_are_priced_at() {
        let devices = Devices::new();
        let mut setting = blank(&devices, Target::Cpu, 1, 1, &[("fp32", DType::F32)]).unwrap();
        let config = shape("llama", 2, 64, [4, 2], 128, 256, [2, 64]).config("cpu", "fp32", 1, 1).unwrap();
        let measured = [time(&devices, &config).unwrap()];
        let clocked = Setting { clock_s: 1e-6, ..setting.clone() };
        let of = |setting: &Setting| measured[0].points(setting).unwrap().into_iter().flat_map(|table| table.points);
        for (whole, rest) in of(&setting).zip(of(&clocked)) {
            assert!(
                rest.seconds <= whole.seconds && rest.seconds > 0.2 * whole.seconds.max(1e-9),
                "{whole:?} {rest:?}"
            );
        }
        settle(&mut setting, Target::Cpu, &measured).unwrap();
        for op in
            ["linear", "linear_grad_weight", "linear_cross_entropy", "attention", "attention_grad", "rms_norm", "adamw"]
        {
            assert!(setting.tables.iter().any(|t| t.op == op), "{op}");
        }
        let profile =
            MachineProfile { name: "test".into(), processor: String::new(), saved_unix_s: 0, settings: vec![setting] };
        let read = MachineProfile::parse("test.toml", &profile.to_toml()).unwrap();
        let found = lockstep_host::predict_by(&read, &measured[0].plan).unwrap();
        let ratio = found.forecast.step_s / measured[0].step_s;
        assert!(ratio > 0.9 && ratio < 1.1, "{ratio}");
        assert!(found.measured_as_run && found.unmeasured.is_empty(), "{:?}", found.unmeasured);
    }
}
