//! Where the time of steps goes: by op against its roofline bound, and every instruction as a Chrome trace.

use crate::Result;
use lockstep_exec::Timing;
use lockstep_host::HostDevice;
use lockstep_ir::program::{Instr, Stream};
use lockstep_ir::units::trace_span;
use lockstep_ir::{DType, MatmulType, StepProgram};
use lockstep_plan::{Plan, PlanError};
use serde::Serialize;
use serde_json::{Value, json};

/// Where the time of some steps went, on the first rank.
#[derive(Clone, Debug, Serialize)]
pub struct Profile {
    /// Steps that were profiled.
    pub steps: usize,
    /// By op, longest first, in the mean of these steps.
    pub ops: Vec<OpTime>,
    /// Every instruction, as a Chrome trace (an array of events).
    #[serde(skip)]
    pub trace: Value,
}

/// Time of all calls of one op in a step.
#[derive(Clone, Debug, Serialize)]
pub struct OpTime {
    /// The op.
    pub op: &'static str,
    /// Calls.
    pub calls: u64,
    /// Seconds.
    pub seconds: f64,
    /// Roofline bound, the least it could take: FLOPs ÷ measured matmul peak, or bytes ÷ measured bandwidth if that is more.
    /// None for collectives, which wait for others.
    pub roofline_s: Option<f64>,
}

/// When the instructions of one step ran.
pub(crate) struct ProfiledStep {
    /// Its number, from 1 on.
    pub step: u64,
    pub timings: Vec<Timing>,
}

/// What a device was measured to do at most.
pub(crate) struct MeasuredPeaks {
    /// FLOP per second of linear layers' matmuls.
    linear: f64,
    /// FLOP per second of all other matmuls: less with TF32, which is for linear layers alone.
    other: f64,
    /// Bytes per second.
    bandwidth: f64,
}

impl MeasuredPeaks {
    /// Measures the device that a plan is for.
    pub(crate) fn of(device: &dyn HostDevice, plan: &Plan) -> Result<Self> {
        Self::measured(device, plan.threads, plan.precision.multiplies())
    }

    /// Measures a device that multiplies this type.
    pub(crate) fn measured(device: &dyn HostDevice, threads: usize, compute: MatmulType) -> Result<Self> {
        let (linear, bandwidth) = device.peaks(threads, compute)?;
        let other = match compute {
            MatmulType::Tf32 => device.peaks(threads, DType::F32.into())?.0,
            MatmulType::Stored(_) => linear,
        };
        Ok(Self { linear, other, bandwidth })
    }

    /// FLOP per second of matmuls, and bytes per second.
    pub(crate) fn rates(&self) -> (f64, f64) {
        (self.linear, self.bandwidth)
    }

    /// The least seconds that an instruction could take.
    fn roofline(&self, instr: &Instr) -> Result<f64> {
        let cost = instr.cost().map_err(PlanError::from)?;
        let matmul = if instr.tf32 { self.linear } else { self.other };
        // Matrix units multiply bytes at twice the rate.
        let bytes = instr.op.spec().multiplies.iter().any(|input| instr.inputs[*input].ty.dtype.is_fp8());
        let matmul = if bytes { 2.0 * matmul } else { matmul };
        Ok((cost.flops.causal as f64 / matmul).max(cost.bytes as f64 / self.bandwidth))
    }
}

/// Sums up steps, beside the measured peaks.
pub(crate) fn profile(program: &StepProgram, steps: &[ProfiledStep], peaks: &MeasuredPeaks) -> Result<Profile> {
    let mut ops: Vec<OpTime> = Vec::new();
    let streams = Stream::ALL.into_iter().filter(|stream| program.uses(*stream));
    let mut trace: Vec<Value> = streams
        .map(|stream| {
            let name = stream.name();
            json!({ "name": "thread_name", "ph": "M", "pid": 0, "tid": stream as u8, "args": { "name": name } })
        })
        .collect();
    let mut begin = 0.0;
    for ProfiledStep { step, timings } in steps {
        for t in timings {
            let segment = &program.segments[t.slot.segment];
            let instr = &segment.instrs[t.instr];
            let group = segment.group_of(t.instr);
            let op = group.map_or(instr.op.name(), |group| group.fusion.name());
            let at = ops.iter().position(|o| o.op == op).unwrap_or_else(|| {
                ops.push(OpTime { op, calls: 0, seconds: 0.0, roofline_s: (!instr.op.communicates()).then_some(0.0) });
                ops.len() - 1
            });
            ops[at].calls += u64::from(group.is_none_or(|group| group.instrs.start == t.instr));
            ops[at].seconds += t.seconds;
            if let Some(sum) = &mut ops[at].roofline_s {
                *sum += peaks.roofline(instr)?;
            }
            let start_us = (begin + t.start_s) * 1e6;
            let (ts, dur) = trace_span(start_us, start_us + t.seconds * 1e6);
            trace.push(json!({
                "name": op, "cat": program.segments[t.slot.segment].name, "ph": "X", "pid": 0, "tid": instr.stream as u8,
                "ts": ts, "dur": dur,
                "args": { "layer": instr.layer, "micro_batch": t.slot.micro_batch, "step": step },
            }));
        }
        begin += timings.iter().map(|t| t.start_s + t.seconds).fold(0.0, f64::max);
    }
    let count = steps.len().max(1);
    for op in &mut ops {
        op.calls /= count as u64;
        op.seconds /= count as f64;
        op.roofline_s = op.roofline_s.map(|seconds| seconds / count as f64);
    }
    ops.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    Ok(Profile { steps: steps.len(), ops, trace: Value::Array(trace) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_config::Config;
    use lockstep_host::Devices;
    use lockstep_plan::plan;

    #[test]
    fn with_tf32_attention_and_experts_are_held_against_the_peak_of_fp32() {
        let text = "[model]\narchitecture = \"mixtral\"\nexperts = 4\nvocab_size = 256\nlayers = 1\ndim = 64\nheads = 4\nffn = 64\n\
                    [train]\nseq = 16\nglobal_batch = 4\n[precision]\npolicy = \"tf32\"\n";
        let plan = plan(&Devices::new(), &Config::parse(text, "run.toml", &[]).unwrap()).unwrap();
        let peaks = MeasuredPeaks { linear: 100.0, other: 10.0, bandwidth: f64::INFINITY };
        let instrs = plan.program().segments.iter().flat_map(|segment| &segment.instrs);
        let mut slow = std::collections::BTreeSet::new();
        for instr in instrs.filter(|instr| instr.cost().is_ok_and(|cost| cost.flops.causal > 0)) {
            let flops = instr.cost().unwrap().flops.causal as f64;
            let rate = flops / peaks.roofline(instr).unwrap();
            assert!((rate - if instr.tf32 { 100.0 } else { 10.0 }).abs() < 1e-6, "{}: {rate}", instr.op.name());
            if !instr.tf32 {
                slow.insert(instr.op.name());
            }
        }
        assert!(slow.contains("attention") && slow.contains("grouped_linear"), "{slow:?}");
    }
}
