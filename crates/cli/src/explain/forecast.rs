//! How long a step takes on hardware that was named: what the simulator says of the plan's programs.

use crate::failure::Result;
use crate::hardware;
use crate::table::{beside, table, wrapped};
use crate::timeline::write_file;
use lockstep_config::Config;
use lockstep_host::{Devices, machine_profile};
use lockstep_ir::program::{Arg, Class, Instr, Segment, Stream};
use lockstep_ir::schedule::{PipeSlot, Timeline, Work};
use lockstep_ir::units::{self, thousands, trace_span};
use lockstep_ir::{Axes, StepProgram};
use lockstep_plan::published::{Interval, Residuals};
use lockstep_plan::{Plan, Rates, Stalls, TimedWork};
use lockstep_sim::{Demand, Forecast, Hardware, InstructionTime, Interval as Slot};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// A predicted step.
pub(crate) struct Predicted {
    pub hardware: Hardware,
    pub forecast: Forecast,
    /// By role and segment.
    instructions: Vec<Vec<Vec<InstructionTime>>>,
    /// What holds steps up besides; not known of this machine.
    stalls: Option<Stalls>,
    /// Where it is this machine: the profile that was used, and what that never measured.
    profile: Option<(String, Vec<String>)>,
    /// How sure the step time is; not known of this machine's profile.
    interval: Option<Interval>,
    /// Whether matmuls are in fp8.
    fp8: bool,
}

impl Predicted {
    pub(crate) fn new(config: &Config, plan: &Plan, hardware: &Hardware) -> Result<Self> {
        let predicted = Self::by(Rates::Catalogue(hardware), None, plan)?;
        let stalls = Stalls::new(config, plan, hardware, predicted.forecast.step_s);
        let interval =
            Residuals::builtin().of_lockstep(&hardware.gpu, plan.layout.mesh.ranks(), hardware::is_fp8(config));
        Ok(Self { stalls: Some(stalls), interval, fp8: hardware::is_fp8(config), ..predicted })
    }

    /// By the profile of this machine, where it has one.
    pub(crate) fn here(devices: &Devices, plan: &Plan) -> Result<Option<Self>> {
        let Some(profile) = machine_profile(devices, plan)? else { return Ok(None) };
        Self::by(Rates::Measured(&profile), Some(&profile.name), plan).map(Some)
    }

    fn by(rates: Rates, profile: Option<&str>, plan: &Plan) -> Result<Self> {
        let predict = |work: &TimedWork| {
            let profile = profile.map(|name| (name.to_owned(), work.unmeasured.clone()));
            let (forecast, instructions) = (work.forecast(&plan.asked())?, work.placed.instructions(&work.terms));
            Ok(Self {
                hardware: work.hardware.clone(),
                forecast,
                instructions,
                stalls: None,
                profile,
                interval: None,
                fp8: false,
            })
        };
        Ok(rates.timed(&plan.compiled.programs, plan.layout.mesh.ranks(), plan.threads, predict)?)
    }

    /// What it was predicted for.
    pub(crate) fn place(&self) -> String {
        if let Some((name, _)) = &self.profile {
            return format!("rank of this machine, profile {name}");
        }
        let Hardware { gpu, cluster } = &self.hardware;
        format!("{} in {}", gpu.label(), cluster.label)
    }

    pub(crate) fn as_json(&self) -> Value {
        let mut value = json!(self.forecast);
        value["gpu"] = json!(self.hardware.gpu.name);
        value["cluster"] = json!(self.hardware.cluster);
        value["unverified"] = json!(self.hardware.unverified());
        value["stalls"] = json!(self.stalls);
        value["interval"] = hardware::interval_json(self.interval.as_ref(), self.forecast.step_s);
        if let Some((name, unmeasured)) = &self.profile {
            value["profile"] = json!(name);
            value["unmeasured"] = json!(unmeasured);
        }
        value
    }

    pub(crate) fn as_text(&self, plan: &Plan) -> String {
        let f = &self.forecast;
        let percent = |share: f64| format!("{:.1}%", 100.0 * share);
        let compute = self.hardware.gpu.multiplies_in(plan.precision.multiplies());
        let peak = self.hardware.gpu.peak(compute);
        let ranks = plan.layout.mesh.ranks() as u64;
        let title = format!("forecast of a step: {} × {}", thousands(ranks), self.place());
        let mut text = format!("\n{}\n", wrapped(&title, "  "));
        let mut line = |name: &str, value: String| text.push_str(&beside(&format!("  {name:<22}"), &value));
        let sure = self.interval.map_or(String::new(), |interval| format!(" {}", interval.as_text()));
        line("step time", exact(f.step_s) + &sure);
        line(
            "tokens/s",
            format!("{} ({} per GPU)", thousands(f.tokens_per_s as u64), thousands(f.tokens_per_s_per_gpu as u64)),
        );
        line("MFU", format!("{} of {}/s ({compute})", percent(f.mfu), units::flops(peak)));
        line("HFU", percent(f.hfu));
        let exposed = f.exposed_communication_s;
        line("exposed communication", format!("{}, {} of the step", exact(exposed), percent(exposed / f.step_s)));
        line("pipeline bubble", percent(f.bubble));
        line("memory", format!("{} on the rank that needs most", units::bytes(f.memory_bytes)));
        if let Some(energy) = &f.energy {
            line("energy", hardware::energy(energy, plan.asked().tokens));
        }
        if let Some(s) = &self.stalls {
            let data = match s.data_s > f.step_s {
                true => format!("{} more than a step", exact(s.data_s - f.step_s)),
                false => "while the step before computes".to_owned(),
            };
            line("reading data", format!("{} per node, {}, {data}", units::bytes(s.data_bytes), exact(s.data_s)));
            let often = match s.checkpoint_every {
                0 => "at the end".to_owned(),
                steps => {
                    let share = s.checkpoint_s / (s.checkpoint_s + steps as f64 * f.step_s);
                    format!("every {} steps, {:.2}% of the time", thousands(steps), 100.0 * share)
                }
            };
            line("checkpoint", format!("holds steps up for {} {often}", exact(s.checkpoint_s)));
        }
        text.push_str(&format!("\ntime of a step by class{}\n{}", self.which(), self.classes()));
        if let Some(interval) = &self.interval {
            text.push_str(&wrapped(
                &format!("  {}", hardware::interval(interval, &self.hardware, ranks, self.fp8)),
                "    ",
            ));
        }
        let unverified = self.hardware.unverified();
        if !unverified.is_empty() {
            let list = format!("unverified figures of the catalogue: {}", unverified.join(", "));
            text.push_str(&format!("  {}\n", wrapped(&list, "    ")));
        }
        if let Some((_, unmeasured)) = self.profile.as_ref().filter(|(_, unmeasured)| !unmeasured.is_empty()) {
            let list = format!("never measured, estimated from other ops: {}", unmeasured.join(", "));
            text.push_str(&format!("  {}\n", wrapped(&list, "    ")));
        }
        text
    }

    fn which(&self) -> &'static str {
        match self.forecast.roles.len() {
            1 => " (collectives that overlap count in full)",
            _ => ", on a rank of each stage in the mean and in the longest\n(collectives that overlap count in full)",
        }
    }

    fn classes(&self) -> String {
        let f = &self.forecast;
        let mut sums: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
        for (class, seconds) in f.roles.iter().flat_map(|role| &role.classes) {
            let (sum, most) = sums.entry(class).or_default();
            (*sum, *most) = (*sum + seconds, most.max(*seconds));
        }
        let n = f.roles.len() as f64;
        let mut rows: Vec<(&str, f64, f64)> = sums.into_iter().map(|(c, (sum, most))| (c, sum / n, most)).collect();
        rows.sort_by(|a, b| b.1.total_cmp(&a.1));
        let row = |&(class, mean, most): &(&str, f64, f64)| {
            vec![class.to_owned(), exact(mean), format!("{:.1}%", 100.0 * mean / f.step_s), exact(most)]
        };
        let rows: Vec<_> = rows.iter().filter(|(_, mean, _)| *mean > 0.0).map(row).collect();
        table(&["class", "time", "of the step", "~longest"], &rows)
    }

    /// When the stages of the pipeline compute what.
    pub(crate) fn pipeline(&self) -> Timeline {
        let slot = |i: &Slot| {
            let work = match i.segment {
                "forward" | "forward_last" => Work::Forward,
                "backward" | "backward_last" | Segment::BACKWARD_AND_UPDATE => Work::Backward,
                "input_grad" | "input_grad_last" => Work::InputGrad,
                "weight_grad" | "weight_grad_last" | Segment::WEIGHT_GRAD_AND_UPDATE => Work::WeightGrad,
                _ => return None,
            };
            Some((PipeSlot { chunk: i.chunk, work, micro_batch: i.micro_batch }, i.start_s, i.end_s))
        };
        let slots: Vec<Vec<_>> =
            self.forecast.roles.iter().map(|role| role.slots.iter().filter_map(slot).collect()).collect();
        let total = slots.iter().flatten().map(|(_, _, end)| *end).fold(0.0, f64::max);
        Timeline { slots, total }
    }

    /// Writes the step as a Chrome trace: a process per stage; a thread each for segments, kernels, and the streams of overlapping collectives.
    pub(crate) fn write_trace(&self, path: &Path, plan: &Plan) -> Result<()> {
        let what = "Chrome trace of the predicted step, for Perfetto or chrome://tracing";
        write_file(path, self.trace(plan).to_string(), what, "check the folder of --trace")
    }

    fn trace(&self, plan: &Plan) -> Value {
        let mut events = Vec::new();
        let shown = self.shown_in_detail();
        let stage_ranks = plan.layout.mesh.size(Axes::STAGE);
        for (r, role) in self.forecast.roles.iter().enumerate() {
            let (first, last) = (role.stage * stage_ranks, (role.stage + 1) * stage_ranks - 1);
            let name = format!("stage {}: ranks {first} to {last}", role.stage);
            events.push(json!({ "name": "process_name", "ph": "M", "pid": r, "args": { "name": name } }));
            events.push(json!({ "name": "process_sort_index", "ph": "M", "pid": r, "args": { "sort_index": r } }));
            let used = |on: &Stream| self.instructions[r].iter().flatten().any(|instr| instr.stream == *on);
            let streams = Stream::ALL.into_iter().filter(used).map(|on| (1 + on as usize, on.name()));
            for (thread, name) in [(0, "segments")].into_iter().chain(streams) {
                events.push(json!({
                    "name": "thread_name", "ph": "M", "pid": r, "tid": thread, "args": { "name": name },
                }));
            }
            let event = |name: String, category: &str, thread: usize, (start, end): (f64, f64), args: Value| {
                let (ts, dur) = trace_span(start * 1e6, end * 1e6);
                json!({
                    "name": name, "cat": category, "ph": "X", "pid": r, "tid": thread, "ts": ts, "dur": dur, "args": args,
                })
            };
            for slot in &role.slots {
                let name = format!("{} {}", slot.segment, slot.micro_batch);
                let args = json!({ "micro_batch": slot.micro_batch, "chunk": slot.chunk });
                events.push(event(name, "segment", 0, (slot.start_s, slot.end_s), args));
                if slot.micro_batch >= shown {
                    continue;
                }
                for instr in &self.instructions[r][slot.index] {
                    let times = (slot.start_s + instr.start_s, slot.start_s + instr.end_s);
                    let Some(class) = instr.demand.class() else { continue };
                    let thread = 1 + instr.stream as usize;
                    let program = &plan.compiled.programs[r];
                    let ran = &program.segments[slot.index].instrs[instr.instr];
                    let mut args = asked(&instr.demand);
                    args["segment"] = json!(slot.segment);
                    args["layer"] = json!(ran.layer);
                    args["tensor"] = json!(tensor(program, ran));
                    events.push(event(ran.op.name().to_owned(), &class.to_string(), thread, times, args));
                }
            }
        }
        json!({
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {
                "title": format!("predicted step, {}", plan.layout),
                "hardware": self.place(),
                "micro_batches_in_detail": shown,
                "step_s": self.forecast.step_s,
            },
        })
    }

    /// Of how many micro-batches instructions are shown, so that a viewer can open the file.
    fn shown_in_detail(&self) -> usize {
        const MOST_EVENTS: usize = 150_000;
        let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
        for (r, role) in self.forecast.roles.iter().enumerate() {
            for slot in &role.slots {
                *counts.entry(slot.micro_batch).or_default() += self.instructions[r][slot.index].len();
            }
        }
        let mut sum = 0;
        let fits = |(_, count): &(&usize, &usize)| {
            sum += **count;
            sum <= MOST_EVENTS
        };
        counts.iter().take_while(fits).last().map_or(1, |(micro_batch, _)| micro_batch + 1)
    }
}

/// The tensor that an instruction is about: the parameter or gradient that it reads or writes, else its first result.
fn tensor<'a>(program: &'a StepProgram, instr: &Instr) -> Option<&'a str> {
    let args = || instr.inputs.iter().chain(instr.outputs.iter().flatten());
    let state = |arg: &&Arg| {
        matches!(program.buffers[arg.buffer.0].class, Class::Parameters | Class::Gradients | Class::Optimizer)
    };
    let result = instr.outputs.iter().flatten().next();
    let about = args().find(state).or(result).or(instr.inputs.first())?;
    Some(&program.values[about.value])
}

/// What an instruction asks of the hardware, for people.
fn asked(demand: &Demand) -> Value {
    match demand {
        Demand::Matmul { rows, cols, inner, calls, dtype, bytes, .. } => {
            json!({ "shape": format!("{rows} × {cols} × {inner}"), "calls": calls, "type": dtype.name(), "bytes": bytes })
        }
        Demand::Attention { flops, bytes, seq, .. } => json!({ "flops": flops, "bytes": bytes, "seq": seq }),
        Demand::Scores { flops, bytes, .. } => json!({ "flops": flops, "bytes": bytes }),
        Demand::Elementwise { bytes }
        | Demand::Quantise { bytes }
        | Demand::Optimizer { bytes }
        | Demand::HostCopy { bytes } => json!({ "bytes": bytes }),
        Demand::Collective { pattern, over, bytes, .. } => {
            json!({ "collective": format!("{pattern:?}"), "over": over.to_string(), "bytes": bytes })
        }
        Demand::Send { bytes, .. } => json!({ "bytes": bytes }),
        Demand::Nothing | Demand::Receive { .. } => json!({}),
    }
}

/// Three digits: `1.23 s`, `45.6 ms`.
pub(crate) fn exact(seconds: f64) -> String {
    match seconds {
        s if s >= 100.0 => format!("{s:.0} s"),
        s if s >= 10.0 => format!("{s:.1} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 0.1 => format!("{:.0} ms", s * 1e3),
        s if s >= 0.01 => format!("{:.1} ms", s * 1e3),
        s => format!("{:.2} ms", s * 1e3),
    }
}
