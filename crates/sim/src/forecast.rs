//! The forecast of a step: how long it takes, and on what the time is spent.

use crate::energy::Energy;
use crate::place::{Mark, Placed};
use crate::work::{Demand, TimeClass};
use crate::workload::Workload;
use crate::{Constants, Framework, Hardware, Result, Terms};
use lockstep_ir::StepProgram;
use lockstep_ir::program::Stream;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a step is to achieve: the program does not know.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Asked {
    /// Tokens of a step, of all ranks.
    pub tokens: u64,
    /// Model FLOPs of a step, of all ranks.
    pub model_flops: f64,
    /// FLOPs that the hardware is asked for in a step, of all ranks.
    pub hardware_flops: f64,
    /// The type that matmuls compute in, for the peak.
    pub compute: lockstep_ir::MatmulType,
}

/// How long a step takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// Seconds of a step.
    pub step_s: f64,
    /// Tokens per second of all ranks.
    pub tokens_per_s: f64,
    /// Tokens per second of one GPU.
    pub tokens_per_s_per_gpu: f64,
    /// Model FLOPs utilization: of the peak of all GPUs.
    pub mfu: f64,
    /// Hardware FLOPs utilization: recomputation counts.
    pub hfu: f64,
    /// Seconds that kernels wait for collectives, in the mean of the roles.
    pub exposed_communication_s: f64,
    /// Pipeline bubble: the share of all roles' time in which they wait for others.
    pub bubble: f64,
    /// Bytes of the arena of the rank that needs most.
    pub memory_bytes: u64,
    /// Seconds of the host that are part of every step and of no role.
    pub host_step_s: f64,
    /// What the GPUs draw; none where their limit is not known.
    #[serde(default)]
    pub energy: Option<Energy>,
    /// By role.
    pub roles: Vec<RoleForecast>,
}

/// A role's part of the forecast.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoleForecast {
    /// The pipeline stage.
    pub stage: usize,
    /// Seconds by what they are spent on. Collectives that overlap count in full, so the sum may be more than the step.
    pub classes: BTreeMap<String, f64>,
    /// Seconds that kernels wait for collectives.
    pub exposed_communication_s: f64,
    /// Seconds that it waits for other roles.
    pub waited_s: f64,
    /// Bytes of its arena.
    pub memory_bytes: u64,
    /// When its slots run.
    #[serde(skip)]
    pub slots: Vec<Interval>,
}

/// A run of a segment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Name of the segment.
    pub segment: &'static str,
    /// Index of the segment in its program.
    pub index: usize,
    /// Which of the rank's chunks.
    pub chunk: usize,
    /// The micro-batch.
    pub micro_batch: usize,
    /// Seconds since the start of the step: as long before its end as it takes where it waits for nobody.
    pub start_s: f64,
    /// Seconds since the start of the step.
    pub end_s: f64,
}

/// Simulates an entry of the programs of all stages.
pub fn simulate(
    programs: &[StepProgram],
    entry: &str,
    asked: &Asked,
    hardware: &Hardware,
    framework: &Framework,
    constants: &Constants,
) -> Result<Forecast> {
    let work = Workload::new(programs, entry, framework)?;
    work.on(hardware, framework).forecast(asked, hardware, &constants.terms(framework, hardware))
}

impl Placed<'_> {
    /// The whole forecast under some constants.
    pub fn forecast(&self, asked: &Asked, hardware: &Hardware, terms: &Terms) -> Result<Forecast> {
        let priced = self.priced(terms, None);
        let outcome = self.run(&priced)?;
        let step_s = outcome.total + terms.host_step;
        let mut roles = Vec::new();
        for (r, role) in self.work().roles.iter().enumerate() {
            let mut runs = vec![0usize; priced.segments[r].len()];
            self.timed(r).for_each(|(at, _)| runs[at] += 1);
            let mut classes: BTreeMap<TimeClass, f64> = BTreeMap::new();
            let mut exposed = 0.0;
            for (s, &times) in runs.iter().enumerate().filter(|(_, times)| **times > 0) {
                let times = times as f64;
                let segment = s % role.code.len();
                let (counts, kernels, _) = self.counts(r, segment);
                for (demand, count) in counts.into_iter().enumerate().filter(|(_, count)| *count > 0) {
                    if let Some(class) = self.demand(r, demand).class() {
                        *classes.entry(class).or_default() += times * count as f64 * priced.demands[r][demand];
                    }
                }
                let parts = priced.parts[r][s];
                let blocking: f64 = self.blocking(r, segment).into_iter().map(|demand| priced.demands[r][demand]).sum();
                exposed += times * (parts.exposed + blocking + parts.overlap);
                *classes.entry(TimeClass::Host).or_default() += times * (parts.host + kernels * terms.kernel_gap);
            }
            *classes.entry(TimeClass::Bubble).or_default() += outcome.waited[r];
            let slots = outcome.ends[r].iter().zip(self.timed(r)).enumerate().map(|(i, (&end_s, (at, index)))| {
                let (segment, chunk) = role.name(index);
                let start_s = end_s - priced.segments[r][at].seconds;
                Interval { segment, index, chunk, micro_batch: role.micro_batches[i], start_s, end_s }
            });
            roles.push(RoleForecast {
                stage: role.stage,
                classes: classes.into_iter().map(|(class, seconds)| (class.to_string(), seconds)).collect(),
                exposed_communication_s: exposed,
                waited_s: outcome.waited[r],
                memory_bytes: role.memory_bytes,
                slots: slots.collect(),
            });
        }
        let n = roles.len() as f64;
        let gpus = self.work().ranks() as f64;
        let peak = hardware.gpu.peak(asked.compute) * gpus;
        let energy = hardware.gpu.power_w.map(|limit| Energy::new(&roles, step_s, gpus, limit, terms));
        Ok(Forecast {
            step_s,
            tokens_per_s: asked.tokens as f64 / step_s,
            tokens_per_s_per_gpu: asked.tokens as f64 / step_s / gpus,
            mfu: asked.model_flops / (peak * step_s),
            hfu: asked.hardware_flops / (peak * step_s),
            exposed_communication_s: roles.iter().map(|r| r.exposed_communication_s).sum::<f64>() / n,
            bubble: roles.iter().map(|r| r.waited_s).sum::<f64>() / (n * step_s),
            memory_bytes: roles.iter().map(|r| r.memory_bytes).max().unwrap_or(0),
            host_step_s: terms.host_step,
            energy,
            roles,
        })
    }

    /// By role and segment: when its instructions run, from the start of the segment: start, end, what is asked, and on which stream.
    pub fn instructions(&self, terms: &Terms) -> Vec<Vec<Vec<InstructionTime>>> {
        let mut marks: Vec<Vec<Vec<Mark>>> = Vec::new();
        self.priced(terms, Some(&mut marks));
        let role = |(r, role): (usize, &Vec<Vec<Mark>>)| {
            let segment = |marks: &Vec<Mark>| {
                let mark = |&Mark { start, end, instr, demand, stream }: &Mark| {
                    let demand = self.demand(r, demand).clone();
                    InstructionTime { start_s: start, end_s: end, instr, demand, stream }
                };
                marks.iter().map(mark).collect()
            };
            role.iter().map(segment).collect()
        };
        marks.iter().enumerate().map(role).collect()
    }
}

/// An instruction in the time of its segment.
#[derive(Clone, Debug, PartialEq)]
pub struct InstructionTime {
    /// Seconds since the start of the segment.
    pub start_s: f64,
    /// Seconds since the start of the segment.
    pub end_s: f64,
    /// Its index in the segment.
    pub instr: usize,
    /// What it asks of the hardware.
    pub demand: Demand,
    /// Where it runs.
    pub stream: Stream,
}
