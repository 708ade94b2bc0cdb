//! What a workload costs on some hardware, or on a machine that was measured.

mod paired;

use crate::events::{self, Channel, Outcome, Point, SegmentTime};
use crate::price::{AtPeak, Site};
use crate::work::{Demand, Kernel};
use crate::workload::{BESIDE, Code, Kind, RoleWork, Run, Wire, Workload};
use crate::{Framework, Hardware, MeasuredTimes, Result, Terms};
use lockstep_ir::program::Stream;
use std::collections::BTreeSet;

/// A workload on some hardware: what is left to price are the constants.
#[derive(Clone, Debug)]
pub struct Placed<'a> {
    work: &'a Workload,
    framework: Framework,
    roles: Vec<Vec<AtPeak>>,
    /// By role: the segments of its slots. Those that run beside another micro-batch count on after all segments of the role.
    slots: Vec<Vec<usize>>,
    /// Whether a pipeline goes over several nodes.
    crowded: bool,
}

/// What a segment's time is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Parts {
    /// Waiting for the host.
    pub host: f64,
    /// Collectives that kernels waited for.
    pub exposed: f64,
    /// What overlapping costs.
    pub overlap: f64,
}

/// When an instruction runs, in seconds from the start of its segment.
pub(crate) struct Mark {
    pub start: f64,
    pub end: f64,
    /// Its index in the segment.
    pub instr: usize,
    /// The index of its demand.
    pub demand: usize,
    pub stream: Stream,
}

/// The price list of a workload under some constants.
pub(crate) struct Priced {
    /// By role and demand.
    pub demands: Vec<Vec<f64>>,
    /// By role and segment.
    pub segments: Vec<Vec<SegmentTime>>,
    /// By role and segment.
    pub parts: Vec<Vec<Parts>>,
    pub channels: Vec<Channel>,
}

impl Workload {
    /// The work on some hardware.
    pub fn on(&self, hardware: &Hardware, framework: &Framework) -> Placed<'_> {
        let at_peak = |role: &RoleWork| {
            let site = Site { hardware, mesh: &self.mesh, stage: role.stage, framework };
            role.demands.iter().map(|demand| AtPeak::new(demand, site)).collect()
        };
        let crowded = self.roles.len() > 1 && self.ranks() > hardware.cluster.gpus_per_node;
        let roles = self.roles.iter().map(at_peak).collect();
        Placed { work: self, framework: framework.clone(), roles, slots: paired::slots(self, framework), crowded }
    }

    /// The work on a machine that was measured, and what had to be estimated from other ops because it was not.
    pub fn measured(&self, on: &MeasuredTimes<'_>, framework: &Framework) -> (Placed<'_>, BTreeSet<String>) {
        let mut unmeasured = BTreeSet::new();
        let mut of = |(demand, kernel): (&Demand, &Kernel)| {
            let seconds = on.setting.seconds(*kernel, demand, &self.mesh, &mut unmeasured);
            AtPeak::Measured { seconds: seconds * on.factor }
        };
        let mut role = |role: &RoleWork| role.demands.iter().zip(&role.kernels).map(&mut of).collect();
        let roles = self.roles.iter().map(&mut role).collect();
        let slots = paired::slots(self, framework);
        (Placed { work: self, framework: framework.clone(), roles, slots, crowded: false }, unmeasured)
    }
}

impl<'a> Placed<'a> {
    /// Seconds of a step under some constants, the host's time of a step included.
    pub fn price(&self, terms: &Terms) -> Result<f64> {
        let priced = self.priced(terms, None);
        let slots = self.slots();
        let Priced { segments, channels, .. } = &priced;
        Ok(events::run_repeating(&slots, segments, channels, &self.work.repetitions)?.total + terms.host_step)
    }

    /// By role: the names of its segments, and how long each takes where it waits for nobody, and the host for no other stages; 0 for
    /// those that the entry does not run.
    pub fn segments(&self, terms: &Terms) -> Vec<Vec<(&'static str, f64)>> {
        let priced = Placed { crowded: false, ..self.clone() }.priced(terms, None);
        let role = |(role, times): (&RoleWork, &Vec<SegmentTime>)| {
            role.code.iter().zip(times).map(|(code, time)| (code.name, time.seconds)).collect()
        };
        self.work.roles.iter().zip(&priced.segments).map(role).collect()
    }

    /// Runs every slot, and says when each ended.
    pub(crate) fn run(&self, priced: &Priced) -> Result<Outcome> {
        events::run(&self.slots(), &priced.segments, &priced.channels, true)
    }

    fn slots(&self) -> Vec<&[usize]> {
        self.slots.iter().map(Vec::as_slice).collect()
    }

    /// By slot of a role: the index of its time and parts, and that of its segment.
    pub(crate) fn timed(&self, role: usize) -> impl Iterator<Item = (usize, usize)> {
        let segments = self.work.roles[role].code.len();
        self.slots[role].iter().map(move |at| (*at, at % segments))
    }

    pub(crate) fn work(&self) -> &'a Workload {
        self.work
    }

    pub(crate) fn demand(&self, role: usize, demand: usize) -> &'a Demand {
        &self.work.roles[role].demands[demand]
    }

    /// Prices everything; with `marks`, says by role and segment when instructions run.
    pub(crate) fn priced(&self, terms: &Terms, mut marks: Option<&mut Vec<Vec<Vec<Mark>>>>) -> Priced {
        let demands: Vec<Vec<f64>> =
            self.roles.iter().map(|role| role.iter().map(|at_peak| at_peak.seconds(terms)).collect()).collect();
        let (mut segments, mut parts) = (Vec::new(), Vec::new());
        for (r, role) in self.work.roles.iter().enumerate() {
            let mut used = vec![false; role.code.len()];
            role.slots.iter().for_each(|segment| used[*segment] = true);
            let stretches: Vec<Stretch> =
                role.runs.iter().map(|run| self.stretch(r, run, &demands[r], terms)).collect();
            let (mut times, mut of) = (Vec::new(), Vec::new());
            let mut shown = Vec::new();
            for (code, used) in role.code.iter().zip(used) {
                let mut mark = marks.is_some().then(Vec::new);
                let (time, part) = match used {
                    true => self.segment(role, code, &demands[r], &stretches, terms, mark.as_mut()),
                    false => Default::default(),
                };
                times.push(time);
                of.push(part);
                shown.extend(mark);
            }
            if self.framework.kernels_beside_exchanges.is_some() {
                let (more, more_parts) = self.beside(r, &demands[r], terms);
                times.extend(more);
                of.extend(more_parts);
            }
            segments.push(times);
            parts.push(of);
            if let Some(marks) = &mut marks {
                marks.push(shown);
            }
        }
        let channel = |wire: &Wire| Channel { copies: wire.copies, seconds: demands[wire.from][wire.demand] };
        let channels = self.work.wires.iter().map(channel).collect();
        Priced { demands, segments, parts, channels }
    }

    /// Whether an overlapping collective overlaps in this framework.
    fn overlaps(&self, kind: Kind) -> bool {
        match kind {
            Kind::Fetch | Kind::Offload => true,
            Kind::Gather | Kind::Exchange => self.framework.overlaps_gathers,
            Kind::Reduce => self.framework.overlaps_reductions,
            Kind::Kernel | Kind::Part | Kind::Blocking | Kind::Receive(_) | Kind::Send(_) | Kind::Meet => false,
        }
    }

    /// How much longer a run takes because the host launches it.
    fn stretch(&self, role: usize, run: &Run, demands: &[f64], terms: &Terms) -> Stretch {
        let (mut gpu, mut host, mut plain) = (0.0, 0.0, true);
        for step in &run.steps {
            match step.kind {
                Kind::Kernel => {
                    gpu += with_gap(demands[step.demand], terms);
                    host += terms.host_op;
                }
                Kind::Part => gpu += demands[step.demand],
                Kind::Blocking => {
                    gpu += demands[step.demand];
                    host += terms.host_collective;
                    // Beside messages between nodes, the host waits for all ranks of a collective.
                    if let AtPeak::Collective(collective) = &self.roles[role][step.demand] {
                        host += if self.crowded { terms.host_crowd * collective.crowd() } else { 0.0 };
                    }
                }
                Kind::Gather | Kind::Reduce | Kind::Exchange => {
                    plain = false;
                    host += terms.host_collective;
                    if let AtPeak::Collective(collective) = &self.roles[role][step.demand] {
                        host += if collective.is_dispatch() { terms.host_dispatch } else { 0.0 };
                    }
                }
                Kind::Fetch | Kind::Offload => {
                    plain = false;
                    host += terms.host_op;
                }
                Kind::Receive(_) | Kind::Send(_) => {
                    plain = false;
                    host += terms.host_message;
                }
                Kind::Meet => plain = false,
            }
            plain &= step.waits == [0; BESIDE];
        }
        let sharp = terms.host_sharpness;
        let both = match gpu > 0.0 && host > 0.0 {
            // The norm of both, with the larger one factored out.
            true => {
                let (more, less) = (f64::max(gpu, host), f64::min(gpu, host));
                more * (1.0 + (less / more).powf(sharp)).powf(1.0 / sharp)
            }
            false => gpu + host,
        };
        Stretch {
            factor: if gpu > 0.0 { both / gpu } else { 1.0 },
            alone: if gpu > 0.0 { 0.0 } else { both },
            gpu,
            plain,
        }
    }

    fn segment(
        &self,
        role: &RoleWork,
        code: &Code,
        demands: &[f64],
        stretches: &[Stretch],
        terms: &Terms,
        mut marks: Option<&mut Vec<Mark>>,
    ) -> (SegmentTime, Parts) {
        let mut now = 0.0f64;
        let mut beside: [Ends; BESIDE] = Default::default();
        let (mut overlapping, mut parts) = (0.0, Parts::default());
        let mut deferred: Vec<(usize, usize, f64)> = Vec::new();
        let mut points = Vec::new();
        // Runs have all instructions of the segment, in order; the count holds where marks are wanted.
        let mut next = 0;
        for &r in &code.runs {
            let stretch = stretches[r];
            now += stretch.alone;
            parts.host += stretch.alone + stretch.gpu * (stretch.factor - 1.0);
            if stretch.plain && marks.is_none() {
                now += stretch.gpu * stretch.factor;
                continue;
            }
            for step in &role.runs[r].steps {
                let (seconds, instr) = (demands[step.demand], next);
                next += 1;
                for (ends, back) in beside.iter().zip(step.waits).filter(|(_, back)| *back > 0) {
                    let until = ends.all.len().checked_sub(back).map_or(0.0, |at| ends.all[at].0);
                    parts.exposed += (until - now).max(0.0);
                    now = now.max(until);
                }
                match step.kind {
                    Kind::Kernel | Kind::Part | Kind::Blocking => {
                        let seconds = if step.kind == Kind::Kernel { with_gap(seconds, terms) } else { seconds };
                        let end = now + seconds * stretch.factor;
                        if let Some(marks) = &mut marks {
                            marks.push(Mark { start: now, end, instr, demand: step.demand, stream: Stream::Compute });
                        }
                        now = end;
                    }
                    // Sums that do not overlap wait until the segment has sent what others wait for.
                    Kind::Reduce if !self.framework.overlaps_reductions => {
                        deferred.push((instr, step.demand, seconds));
                        beside[0].all.push((now, None));
                    }
                    Kind::Gather | Kind::Reduce | Kind::Exchange => {
                        let own = usize::from(step.kind == Kind::Exchange);
                        let start = beside[own].last().max(now);
                        let shared = beside[1 - own].share(start, seconds, marks.as_deref_mut());
                        let end = start + seconds + shared;
                        let mark = marks.as_mut().map(|marks| {
                            marks.push(Mark { start, end, instr, demand: step.demand, stream: step.kind.stream() });
                            marks.len() - 1
                        });
                        beside[own].all.push((end, mark));
                        overlapping += seconds;
                        if !self.overlaps(step.kind) {
                            parts.exposed += (end - now).max(0.0);
                            now = now.max(end);
                        }
                    }
                    Kind::Fetch | Kind::Offload => {
                        let stream = step.kind.stream();
                        let own = &mut beside[stream.beside().unwrap_or(0)];
                        let start = own.last().max(now);
                        let end = start + seconds;
                        own.all.push((end, None));
                        if let Some(marks) = &mut marks {
                            marks.push(Mark { start, end, instr, demand: step.demand, stream });
                        }
                    }
                    Kind::Receive(channel) => points.push((now, Point::Receive(channel))),
                    Kind::Send(channel) => points.push((now, Point::Send(channel))),
                    Kind::Meet => points.push((now, Point::Meet(seconds))),
                }
            }
        }
        let last = beside.iter().map(Ends::last).fold(0.0, f64::max);
        parts.exposed += (last - now).max(0.0);
        now = now.max(last);
        for (instr, demand, seconds) in deferred {
            if let Some(marks) = &mut marks {
                marks.push(Mark { start: now, end: now + seconds, instr, demand, stream: Stream::Communication });
            }
            parts.exposed += seconds;
            now += seconds;
        }
        // What ran beside kernels made both slower.
        parts.overlap = terms.overlap_cost * (overlapping - parts.exposed).max(0.0);
        let slower = if now > 0.0 { 1.0 + parts.overlap / now } else { 1.0 };
        points.iter_mut().for_each(|(at, _)| *at *= slower);
        if let Some(marks) = marks {
            for mark in marks {
                (mark.start, mark.end) = (mark.start * slower, mark.end * slower);
            }
        }
        (SegmentTime { seconds: now * slower, points }, parts)
    }

    /// Seconds of blocking collectives, and by demand how often it is asked for, in a segment of a role.
    pub(crate) fn counts(&self, role: usize, segment: usize) -> (Vec<usize>, f64, f64) {
        let role = &self.work.roles[role];
        let mut counts = vec![0; role.demands.len()];
        let (mut kernels, mut blocking) = (0.0, Vec::new());
        for step in role.code[segment].runs.iter().flat_map(|run| &role.runs[*run].steps) {
            counts[step.demand] += 1;
            kernels += f64::from(step.kind == Kind::Kernel);
            if step.kind == Kind::Blocking {
                blocking.push(step.demand);
            }
        }
        (counts, kernels, blocking.len() as f64)
    }

    /// The demands of the collectives of a segment that the next instruction waits for.
    pub(crate) fn blocking(&self, role: usize, segment: usize) -> Vec<usize> {
        let role = &self.work.roles[role];
        let steps = role.code[segment].runs.iter().flat_map(|run| &role.runs[*run].steps);
        steps.filter(|step| matches!(step.kind, Kind::Blocking | Kind::Meet)).map(|step| step.demand).collect()
    }
}

/// Seconds of a kernel with the gap after it, which is below 0 where clocks around kernels were measured with them.
fn with_gap(seconds: f64, terms: &Terms) -> f64 {
    (seconds + terms.kernel_gap).max(0.25 * seconds)
}

/// When the collectives of a stream beside kernels end, and where each is marked.
#[derive(Default)]
struct Ends {
    all: Vec<(f64, Option<usize>)>,
}

impl Ends {
    /// When the last ends.
    fn last(&self) -> f64 {
        self.all.last().map_or(0.0, |(end, _)| *end)
    }

    /// Another stream's collective starts, of this many seconds by itself: while both run each has half of the links, so that both end later by
    /// what they share. Says how much that is.
    fn share(&mut self, start: f64, seconds: f64, mut marks: Option<&mut Vec<Mark>>) -> f64 {
        let shared = seconds.min(self.last() - start).max(0.0);
        for (end, mark) in self.all.iter_mut().rev().take_while(|(end, _)| *end > start) {
            *end += shared.min(*end - start);
            if let (Some(marks), Some(mark)) = (&mut marks, mark) {
                marks[*mark].end = *end;
            }
        }
        shared
    }
}

#[derive(Clone, Copy)]
struct Stretch {
    /// How many times as long its kernels take.
    factor: f64,
    /// Seconds of the host where it has no kernels.
    alone: f64,
    /// Seconds of its kernels.
    gpu: f64,
    /// Whether nothing in it overlaps, waits or meets.
    plain: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectives_of_two_streams_share_the_links_and_end_as_late_together_as_one_after_the_other() {
        let of = |ends: &[f64]| Ends { all: ends.iter().map(|end| (*end, None)).collect() };
        let after = |ends: &[f64], start: f64, seconds: f64| {
            let mut ends = of(ends);
            let shared = ends.share(start, seconds, None);
            (shared, ends.all.iter().map(|(end, _)| *end).collect::<Vec<_>>())
        };
        // A short one beside a backlog of six seconds takes twice as long, and the backlog ends that much later.
        assert_eq!(after(&[2.0, 4.0, 10.0], 4.0, 1.0), (1.0, vec![2.0, 4.0, 11.0]));
        // A long one shares until the backlog is done.
        assert_eq!(after(&[2.0, 6.0], 4.0, 5.0), (2.0, vec![2.0, 8.0]));
        // Nothing else runs.
        assert_eq!(after(&[2.0], 4.0, 5.0), (0.0, vec![2.0]));
        assert_eq!(after(&[], 0.0, 5.0), (0.0, vec![]));
    }
}
