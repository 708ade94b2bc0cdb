//! The programs of all pipeline stages together: what one sends, another receives, in an order that can run.
//!
//! Ranks of one stage run the same program, so their collectives match by themselves. Between stages this check walks all
//! programs at once, one rank of each, with the send buffers that they have.

use crate::program::{Entry, Instr, Slot, StepProgram};
use crate::{DType, MeshAxis, Op};
use std::collections::{BTreeMap, VecDeque};

/// Why programs do not go together. Always a bug of a pass, never of a user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {reason}")]
pub struct Mismatch {
    /// Which stage, entry and instruction.
    pub at: String,
    /// What is wrong.
    pub reason: String,
}

fn mismatch(at: impl Into<String>, reason: impl Into<String>) -> Mismatch {
    Mismatch { at: at.into(), reason: reason.into() }
}

/// Checks that the programs are those of the stages of one mesh, and that every entry runs to its end on all of them.
pub fn check(programs: &[StepProgram]) -> Result<(), Mismatch> {
    let Some(first) = programs.first() else { return Err(mismatch("run", "has no programs")) };
    let stages = programs.iter().enumerate().all(|(s, p)| p.stage == s && p.mesh == first.mesh);
    if !stages || programs.len() != first.mesh.size(MeshAxis::Pp) {
        return Err(mismatch("run", "the programs are not those of the stages of one mesh"));
    }
    for entry in &first.entries {
        let entries: Option<Vec<&Entry>> = programs.iter().map(|p| p.entry(&entry.name)).collect();
        let missing = || mismatch(format!("entry {}", entry.name), "is not on every stage");
        walk(programs, &entries.ok_or_else(missing)?)?;
    }
    Ok(())
}

/// What moves between stages: operation, elements of each tensor, types.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Payload(Vec<(usize, DType)>);

impl std::fmt::Display for Payload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<String> = self.0.iter().map(|(n, dtype)| format!("{n} {dtype}")).collect();
        f.write_str(&parts.join(" + "))
    }
}

fn payload(instr: &Instr) -> Payload {
    let args = if instr.inputs.is_empty() {
        instr.outputs.iter().flatten().collect()
    } else {
        instr.inputs.iter().collect::<Vec<_>>()
    };
    Payload(args.iter().map(|a| (a.ty.elements(), a.ty.dtype)).collect())
}

/// An instruction of one stage that another takes part in.
struct Step<'a> {
    slot: Slot,
    index: usize,
    instr: &'a Instr,
}

/// The steps of one stage, in order.
fn steps<'a>(program: &'a StepProgram, entry: &'a Entry) -> Vec<Step<'a>> {
    let between = |op: &Op| op.over().contains(MeshAxis::Pp);
    let all = entry.schedule.iter().flat_map(|slot| {
        let instrs = program.segments[slot.segment].instrs.iter().enumerate();
        instrs.map(|(index, instr)| Step { slot: *slot, index, instr })
    });
    all.filter(|step| between(&step.instr.op)).collect()
}

fn walk(programs: &[StepProgram], entries: &[&Entry]) -> Result<(), Mismatch> {
    let all: Vec<Vec<Step>> = programs.iter().zip(entries).map(|(p, e)| steps(p, e)).collect();
    let mut next = vec![0; programs.len()];
    let mut messages: BTreeMap<(usize, usize, u32), VecDeque<Payload>> = BTreeMap::new();
    let place = |stage: usize, step: &Step| {
        let segment = programs[stage].segments[step.slot.segment].name;
        let (entry, op, m) = (&entries[stage].name, step.instr.op.name(), step.slot.micro_batch);
        format!("{entry}, stage {stage}, {segment} of micro-batch {m}, instruction {} ({op})", step.index)
    };
    loop {
        let mut moved = false;
        for stage in 0..programs.len() {
            while let Some(step) = all[stage].get(next[stage]) {
                let here = payload(step.instr);
                let at = || place(stage, step);
                let known = |other: usize| match other < programs.len() && other != stage {
                    true => Ok(()),
                    false => Err(mismatch(at(), format!("there is no other stage {other}"))),
                };
                match step.instr.op {
                    Op::Send { stage: to, tag } => {
                        known(to)?;
                        let message: u64 = step.instr.inputs.iter().map(|a| a.ty.bytes()).sum();
                        let send_buffer = step.instr.workspace.map_or(0, |w| programs[stage].buffers[w.0].bytes);
                        let waiting = messages.entry((stage, to, tag)).or_default();
                        if send_buffer < message {
                            return Err(mismatch(at(), format!("a send buffer of {send_buffer} bytes for {message}")));
                        }
                        if waiting.len() as u64 >= send_buffer / message.max(1) {
                            break;
                        }
                        waiting.push_back(here);
                    }
                    Op::Receive { stage: from, tag } => {
                        known(from)?;
                        let Some(sent) = messages.entry((from, stage, tag)).or_default().pop_front() else { break };
                        if sent != here {
                            return Err(mismatch(at(), format!("expects {here}, stage {from} sends {sent}")));
                        }
                    }
                    // A sum over all stages: runs when all have come to theirs.
                    _ => {
                        let others: Vec<Option<&Step>> = (0..programs.len()).map(|s| all[s].get(next[s])).collect();
                        let sums = |s: &Step| matches!(s.instr.op, Op::AllReduce { .. });
                        if let Some(gone) = others.iter().position(Option::is_none) {
                            return Err(mismatch(at(), format!("stage {gone} has ended without taking part")));
                        }
                        if !others.iter().flatten().all(|s| sums(s)) {
                            break;
                        }
                        for (s, other) in others.iter().enumerate().filter_map(|(s, o)| Some((s, (*o)?))) {
                            if payload(other.instr) != here {
                                let theirs = payload(other.instr);
                                return Err(mismatch(at(), format!("adds {here}, stage {s} adds {theirs}")));
                            }
                        }
                        next.iter_mut().for_each(|n| *n += 1);
                        moved = true;
                        continue;
                    }
                }
                next[stage] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let stuck = (0..programs.len()).find_map(|s| Some((s, all[s].get(next[s])?)));
    if let Some((stage, step)) = stuck {
        let waits: Vec<String> =
            (0..programs.len()).filter_map(|s| all[s].get(next[s]).map(|step| place(s, step))).collect();
        return Err(mismatch(place(stage, step), format!("can never run; waiting: {}", waits.join("; "))));
    }
    match messages.iter().find(|(_, waiting)| !waiting.is_empty()) {
        Some(((from, to, _), waiting)) => {
            let reason = format!("{} messages of stage {from} are never received", waiting.len());
            Err(mismatch(format!("{}, stage {to}", entries[*to].name), reason))
        }
        None => Ok(()),
    }
}
