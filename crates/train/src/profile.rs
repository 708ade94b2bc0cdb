//! Where the time of steps goes: by op against its roofline bound, and every instruction as a Chrome trace.

use crate::Result;
use lockstep_exec::Timing;
use lockstep_ir::program::{Instr, Stream};
use lockstep_ir::units::trace_span;
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

/// Sums up steps, beside the measured peaks of matmul (FLOP per second) and memory (bytes per second).
pub(crate) fn profile(plan: &Plan, steps: &[ProfiledStep], (matmul, bandwidth): (f64, f64)) -> Result<Profile> {
    let program = plan.program();
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
            let instr = &program.segments[t.slot.segment].instrs[t.instr];
            let op = instr.op.name();
            let at = ops.iter().position(|o| o.op == op).unwrap_or_else(|| {
                ops.push(OpTime { op, calls: 0, seconds: 0.0, roofline_s: (!instr.op.communicates()).then_some(0.0) });
                ops.len() - 1
            });
            ops[at].calls += 1;
            ops[at].seconds += t.seconds;
            if let Some(sum) = &mut ops[at].roofline_s {
                *sum += roofline(instr, matmul, bandwidth)?;
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

fn roofline(instr: &Instr, matmul: f64, bandwidth: f64) -> Result<f64> {
    let cost = instr.cost().map_err(PlanError::from)?;
    // Matrix units multiply bytes at twice the rate.
    let bytes = instr.op.spec().multiplies.iter().any(|input| instr.inputs[*input].ty.dtype.is_fp8());
    let matmul = if bytes { 2.0 * matmul } else { matmul };
    Ok((cost.flops.causal as f64 / matmul).max(cost.bytes as f64 / bandwidth))
}
