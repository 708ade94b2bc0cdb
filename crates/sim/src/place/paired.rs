//! Micro-batches in pairs (DualPipe): the forward pass of one runs beside the backward pass of another, and all-to-alls of either are hidden by
//! kernels of both, as far as there are kernels. Some multiprocessors carry all-to-alls and compute nothing meanwhile.
//!
//! The first forward passes of a stage and its last backward passes have no partner: their all-to-alls are waited for.

use super::{Parts, Placed};
use crate::events::{Repetition, SegmentTime};
use crate::price::AtPeak;
use crate::workload::{RoleWork, Workload};
use crate::{Framework, Terms};
use std::ops::Range;

/// By role: the segments of its slots. Those that run beside another micro-batch are the same ones, counted on after all segments of the role.
pub(super) fn slots(work: &Workload, framework: &Framework) -> Vec<Vec<usize>> {
    let of = |(r, role): (usize, &RoleWork)| {
        let mut slots = role.slots.clone();
        if framework.kernels_beside_exchanges.is_some() {
            slots[with_partners(role, work.repetitions.get(r))].iter_mut().for_each(|at| *at += role.code.len());
        }
        slots
    };
    work.roles.iter().enumerate().map(of).collect()
}

/// From the first backward pass of a stage to its last forward pass, and all that repeats.
fn with_partners(role: &RoleWork, repetition: Option<&Repetition>) -> Range<usize> {
    let named = |names: &'static [&str]| {
        move |segment: &usize| names.iter().any(|name| role.code[*segment].name.starts_with(name))
    };
    let first = role.slots.iter().position(named(&["backward", "input_grad"]));
    let last = role.slots.iter().rposition(named(&["forward"]));
    match (first, last) {
        (Some(first), Some(last)) if first <= last => {
            let repeated = repetition.map_or(first..last, |r| r.start..r.start + r.count * r.period);
            first.min(repeated.start)..(last + 1).max(repeated.end)
        }
        _ => 0..0,
    }
}

impl Placed<'_> {
    /// By segment of a role: how long it takes beside another micro-batch, and what that is made of.
    pub(super) fn beside(&self, r: usize, demands: &[f64], terms: &Terms) -> (Vec<SegmentTime>, Vec<Parts>) {
        let (at_peak, slots, role) = (&self.roles[r], &self.slots[r], &self.work.roles[r]);
        let share = self.framework.kernels_beside_exchanges.unwrap_or(1.0);
        let exchanges = |demand: usize| matches!(&at_peak[demand], AtPeak::Collective(c) if c.is_dispatch());
        let kernels: Vec<f64> = demands
            .iter()
            .enumerate()
            .map(|(demand, seconds)| match at_peak[demand] {
                _ if exchanges(demand) => 0.0,
                AtPeak::Matmul { .. } | AtPeak::Attention { .. } => seconds / share,
                _ => *seconds,
            })
            .collect();
        let stretches: Vec<_> = role.runs.iter().map(|run| self.stretch(r, run, &kernels, terms)).collect();
        let mut runs = vec![0usize; role.code.len()];
        slots.iter().filter_map(|at| at.checked_sub(role.code.len())).for_each(|segment| runs[segment] += 1);
        let (mut times, mut parts) = (Vec::new(), Vec::new());
        let (mut computing, mut exchanging) = (0.0, 0.0);
        for (code, runs) in role.code.iter().zip(runs) {
            let (time, part) = match runs {
                0 => Default::default(),
                _ => self.segment(role, code, &kernels, &stretches, terms, None),
            };
            computing += runs as f64 * time.seconds;
            let steps = code.runs.iter().flat_map(|run| &role.runs[*run].steps);
            let sent: f64 = steps.filter(|step| exchanges(step.demand)).map(|step| demands[step.demand]).sum();
            exchanging += runs as f64 * sent;
            times.push(time);
            parts.push(part);
        }
        // What kernels do not hide is waited for, by all segments alike.
        let slower = if computing > 0.0 { (exchanging / computing).max(1.0) } else { 1.0 };
        for (time, part) in times.iter_mut().zip(&mut parts) {
            part.exposed += time.seconds * (slower - 1.0);
            time.seconds *= slower;
            time.points.iter_mut().for_each(|(at, _)| *at *= slower);
        }
        (times, parts)
    }
}
