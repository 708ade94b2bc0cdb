//! The programs of all pipeline stages together: what one sends, another receives, in an order that can run.
//!
//! Ranks of one stage run the same program, so their collectives match by themselves. Between stages this check walks all
//! programs at once, one rank of each, with the send buffers that they have.

use crate::op::Transfer;
use crate::program::{Entry, Instr, Segment, Slot, StepProgram};
use crate::walk::{Event, Walk};
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

/// What moves between stages: elements and type of each tensor.
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

/// What a message is: the value, as its maker calls it, and the micro-batch.
fn message<'a>(event: &Event<'a>) -> (&'a str, usize) {
    let args = event.instr.inputs.first().or(event.instr.outputs.iter().flatten().next());
    let name = args.map_or("", |arg| event.walk.program.values[arg.value].as_str());
    (name.strip_suffix(".received").unwrap_or(name), event.slot.micro_batch)
}

/// The instructions of one stage that others take part in, in order.
fn steps<'a>(program: &'a StepProgram, entry: &'a Entry) -> Vec<Event<'a>> {
    let between = |op: &Op| op.over().contains(MeshAxis::Pp);
    let indices = |segment: &Segment| -> Vec<usize> {
        (0..segment.instrs.len()).filter(|i| between(&segment.instrs[*i].op)).collect()
    };
    let by_segment: Vec<Vec<usize>> = program.segments.iter().map(indices).collect();
    let walk = Walk::first(program);
    let events = |slot: &'a Slot| by_segment[slot.segment].iter().map(|index| walk.event(*slot, *index));
    entry.schedule.iter().flat_map(events).collect()
}

fn walk(programs: &[StepProgram], entries: &[&Entry]) -> Result<(), Mismatch> {
    let all: Vec<Vec<Event>> = programs.iter().zip(entries).map(|(p, e)| steps(p, e)).collect();
    let mut next = vec![0; programs.len()];
    let mut messages: BTreeMap<(usize, usize, u32), VecDeque<&Event>> = BTreeMap::new();
    let place = |step: &Event| format!("{}: {step}", entries[0].name);
    loop {
        let mut moved = false;
        for stage in 0..programs.len() {
            while let Some(step) = all[stage].get(next[stage]) {
                let here = payload(step.instr);
                let at = || place(step);
                let known = |other: usize| match other < programs.len() {
                    true => Ok(()),
                    false => Err(mismatch(at(), format!("there is no stage {other}"))),
                };
                match step.instr.op.transfer() {
                    Some(Transfer::Send { stage: to, tag }) => {
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
                        waiting.push_back(step);
                    }
                    Some(Transfer::Receive { stage: from, tag }) => {
                        known(from)?;
                        let Some(sent) = messages.entry((from, stage, tag)).or_default().pop_front() else { break };
                        let (meant, theirs) = (payload(sent.instr), message(sent));
                        if meant != here {
                            return Err(mismatch(at(), format!("expects {here}, stage {from} sends {meant}")));
                        }
                        if theirs != message(step) {
                            let ((ours, m), (name, k)) = (message(step), theirs);
                            let reason =
                                format!("expects `{ours}` of micro-batch {m}, stage {from} sends `{name}` of {k}");
                            return Err(mismatch(at(), reason));
                        }
                    }
                    // A sum over all stages: runs when all have come to theirs.
                    Some(_) | None => {
                        let others: Vec<Option<&Event>> = (0..programs.len()).map(|s| all[s].get(next[s])).collect();
                        let sums = |s: &Event| matches!(s.instr.op.transfer(), Some(Transfer::AllReduce { .. }));
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
    let stuck: Vec<&Event> = (0..programs.len()).filter_map(|s| all[s].get(next[s])).collect();
    if let Some(step) = stuck.first() {
        let waits: Vec<String> = stuck.iter().map(ToString::to_string).collect();
        return Err(mismatch(place(step), format!("can never run; waiting: {}", waits.join("; "))));
    }
    match messages.iter().find_map(|(key, waiting)| Some((key, waiting, waiting.front()?))) {
        Some(((from, to, _), waiting, oldest)) => {
            let reason = format!("{} messages of stage {from} are never received by stage {to}", waiting.len());
            Err(mismatch(place(oldest), reason))
        }
        None => Ok(()),
    }
}
