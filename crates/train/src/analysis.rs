//! Predicted beside measured: what a run said before it began against what its steps took, and what a profile learns from it.

use crate::{Result, StepMetrics, TrainError, Unmeasured};
use lockstep_exec::Timing;
use lockstep_host::{Devices, Prediction, profile_of, write_profile};
use lockstep_plan::{Plan, Target};
use lockstep_rundir::{MEASURED, RunDirError, lines};
use lockstep_sim::machine::{Sample, Table, observe};
use lockstep_sim::{MachineProfile, Setting, SimError};
use lockstep_telemetry::read_file;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// One step of a run whose instructions were timed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MeasuredStep {
    /// Which.
    step: u64,
    /// Seconds of the first rank's kernels, by what they were spent on.
    classes: BTreeMap<String, f64>,
    /// The times by op and size, in the form of a machine's profile.
    points: String,
}

impl MeasuredStep {
    /// What the timed instructions of a step say.
    pub fn new(devices: &Devices, plan: &Plan, step: u64, timings: Vec<Timing>) -> Result<Self> {
        let processor = devices.processor(plan.target)?;
        let (ranks, threads) = shared_by(plan);
        let known = profile_of(&processor)?.and_then(|(_, p)| Some(p.measured(ranks, threads)?.setting.clone()));
        let nominal = Setting { ranks, threads, ..Setting::nominal() };
        let mut setting = Setting { ranks, threads, tables: Vec::new(), ..known.unwrap_or(nominal) };
        let (tables, classes) = observed(plan, &setting, &[timings])?;
        setting.add(tables);
        let name = "run".to_owned();
        let points = MachineProfile { name, processor, saved_unix_s: 0, settings: vec![setting] }.to_toml();
        Ok(Self { step, classes, points })
    }
}

/// Ranks and threads of a plan, as a profile counts them.
pub(crate) fn shared_by(plan: &Plan) -> (usize, usize) {
    (plan.layout.mesh.ranks(), if plan.target == Target::Cpu { plan.threads } else { 0 })
}

/// What timed steps of a plan say of the machine: points by op, and the mean seconds of a step
/// by what they were spent on.
pub(crate) fn observed(
    plan: &Plan,
    setting: &Setting,
    steps: &[Vec<Timing>],
) -> Result<(Vec<Table>, BTreeMap<String, f64>)> {
    let sample = |t: &Timing| Sample { segment: t.slot.segment, instr: t.instr, seconds: t.seconds };
    let samples: Vec<Sample> = steps.iter().flatten().map(sample).collect();
    let (tables, mut classes) = observe(plan.program(), setting, &samples)?;
    classes.values_mut().for_each(|seconds| *seconds /= steps.len().max(1) as f64);
    Ok((tables, classes))
}

/// Time of one class of ops in a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassTime {
    /// The class.
    pub class: String,
    /// Seconds as predicted; none where that was not.
    pub predicted_s: Option<f64>,
    /// Seconds as measured, of one step; none where that was not.
    pub measured_s: Option<f64>,
}

/// Predicted beside measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Analysis {
    /// What the prediction rests on.
    pub by: String,
    /// Seconds of a step as predicted.
    pub predicted_step_s: f64,
    /// Median seconds of the steps that were taken.
    pub measured_step_s: f64,
    /// How many they are.
    pub steps: usize,
    /// The step whose instructions were timed.
    pub profiled_step: Option<u64>,
    /// By class of ops, on a rank of the first stage.
    pub classes: Vec<ClassTime>,
    /// Seconds by which the kernels of the timed step sum to more than a step: nothing is left for the rest of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernels_over_step_s: Option<f64>,
    /// Ops that the prediction had to estimate from others.
    pub unmeasured: Vec<String>,
}

/// What is left of a step beside its kernels.
const REST: &str = "communication, waits, host";

impl Analysis {
    /// The class in which they part most, and by how many seconds it took longer than predicted.
    pub fn parts_most(&self) -> Option<(&str, f64)> {
        let apart = |c: &ClassTime| Some((c.measured_s? - c.predicted_s.unwrap_or(0.0)).abs());
        let most = self.classes.iter().max_by(|a, b| apart(a).unwrap_or(0.0).total_cmp(&apart(b).unwrap_or(0.0)))?;
        Some((&most.class, most.measured_s? - most.predicted_s.unwrap_or(0.0)))
    }
}

fn unusable(file: &Path, reason: &str, hint: &str) -> TrainError {
    SimError::File { file: file.display().to_string(), reason: reason.to_owned(), hint: hint.to_owned() }.into()
}

fn unmeasured(file: &Path, what: Unmeasured) -> TrainError {
    TrainError::Unmeasured { file: file.to_owned(), what }
}

fn json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Option<T>> {
    match read_file(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(RunDirError::io("read", path, e).into()),
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .map_err(|e| unusable(path, &e.to_string(), "the run must have written it: train again")),
    }
}

/// Reads what a run predicted and what it measured.
pub fn analyze(run: &Path) -> Result<Analysis> {
    let plan = run.join("plan.json");
    let written: Value = json(&plan)?.ok_or_else(|| {
        unusable(&plan, "there is no such file", "name the directory of a run that train has written")
    })?;
    let prediction: Prediction =
        serde_json::from_value(written["prediction"].clone()).map_err(|_| unmeasured(&plan, Unmeasured::Prediction))?;
    let steps: Vec<StepMetrics> = lines(&run.join("metrics.jsonl"))?;
    let profiled: Option<MeasuredStep> = json(&run.join(MEASURED))?;
    // The first step touches new memory; the profiled one is slower on a GPU.
    let counts = |s: &&StepMetrics| s.step > 1 && profiled.as_ref().is_none_or(|p| p.step != s.step);
    let mut times: Vec<f64> = steps.iter().filter(counts).map(|s| s.step_s).collect();
    if times.is_empty() {
        times = steps.iter().map(|s| s.step_s).collect();
    }
    times.sort_by(f64::total_cmp);
    let measured_step_s = *times.get(times.len() / 2).ok_or_else(|| {
        unusable(&run.join("metrics.jsonl"), "the run has taken no step", "let it take some steps first")
    })?;
    let Some(role) = prediction.forecast.roles.first() else {
        return Err(unusable(&plan, "the prediction has no roles", "train again"));
    };
    let kernel = |class: &str| ["matmul", "attention", "memory-bound", "optimizer"].contains(&class);
    let names: BTreeSet<&str> = role.classes.keys().map(String::as_str).filter(|class| kernel(class)).collect();
    let mut classes: Vec<ClassTime> = names
        .into_iter()
        .map(|class| ClassTime {
            class: class.to_owned(),
            predicted_s: role.classes.get(class).copied(),
            measured_s: profiled.as_ref().map(|p| p.classes.get(class).copied().unwrap_or(0.0)),
        })
        .collect();
    // Ops are timed one by one, in a step of their own: together they may take longer than a step does.
    let rest = |step_s: f64, kernels: f64| (step_s - kernels).max(0.0);
    let predicted: f64 = classes.iter().filter_map(|c| c.predicted_s).sum();
    let measured: Option<f64> = classes.iter().map(|c| c.measured_s).sum();
    classes.push(ClassTime {
        class: REST.into(),
        predicted_s: Some(rest(prediction.forecast.step_s, predicted)),
        measured_s: measured.map(|measured| rest(measured_step_s, measured)),
    });
    Ok(Analysis {
        by: prediction.by,
        predicted_step_s: prediction.forecast.step_s,
        measured_step_s,
        steps: times.len(),
        profiled_step: profiled.map(|p| p.step),
        classes,
        kernels_over_step_s: measured.map(|kernels| kernels - measured_step_s).filter(|over| *over > 0.0),
        unmeasured: prediction.unmeasured,
    })
}

/// What a profile learned.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Learned {
    /// The profile's file.
    pub file: PathBuf,
    /// Times that were added, or replaced those of the same size.
    pub points: usize,
}

/// Adds what a run measured to the profile of the machine that it ran on, which is this one.
pub fn learn(devices: &Devices, run: &Path) -> Result<Learned> {
    let path = run.join(MEASURED);
    let measured: MeasuredStep = json(&path)?.ok_or_else(|| unmeasured(&path, Unmeasured::Times))?;
    let found = MachineProfile::parse(&path.display().to_string(), &measured.points)?;
    let mut here = vec![devices.processor(Target::Cpu)?];
    here.extend(devices.processor(Target::Cuda { deterministic: false }));
    if !here.contains(&found.processor) {
        let reason = format!("the run was on {}, and this is {}", found.processor, here.join(" and "));
        return Err(unusable(&path, &reason, "learn on the machine that it ran on"));
    }
    let Some((file, mut profile)) = profile_of(&found.processor)? else {
        return Err(unmeasured(&path, Unmeasured::Machine(found.processor)));
    };
    let mut points = 0;
    for setting in found.settings {
        points += setting.tables.iter().map(|t| t.points.len()).sum::<usize>();
        match profile.setting_mut(setting.ranks, setting.threads) {
            Some(known) => known.add(setting.tables),
            None => profile.settings.push(setting),
        }
    }
    write_profile(&file, &profile)?;
    Ok(Learned { file, points })
}
