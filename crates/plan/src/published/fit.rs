//! The fit of the constants: a search that anyone can repeat, with the same result every time.
//!
//! It minimises the mean of |log(predicted ÷ measured)| of step times over clean rows, and of memory where it was measured. An error beyond
//! [`CAP`] counts little more: rows that something else has slowed down do not pull. Sources count by the square root of their rows. Each constant moves inside its
//! range, one at a time, by steps that grow where they help and shrink where they do not.

use super::memory::{MemoryTerms, StageMemory};
use super::peer::Peer;
use super::predict::Case;
use super::residuals::LeftOut;
use crate::parallel::in_parallel;
use lockstep_sim::{Constant, Constants, Placed};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Errors beyond this count a fifth.
const CAP: f64 = 0.25;

/// What a fit may not look at.
#[derive(Clone, Debug, Default)]
pub enum Without {
    /// It looks at all rows.
    #[default]
    Nothing,
    /// A framework, a family of GPUs, a file or a part of a source; `MODEL@GPU` are the rows of one model on one GPU.
    Named(String),
    /// All that belongs to one of these.
    Groups(Vec<LeftOutGroup>),
}

/// What is left out together: rows of a framework, all of them or those on a family of GPUs, or of a model on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeftOutGroup {
    /// The framework.
    pub peer: Peer,
    /// The family, where one alone is left out.
    pub family: Option<String>,
    /// The GPU and the model, where these alone are left out.
    pub model: Option<(String, String)>,
}

impl LeftOutGroup {
    /// Whether a row belongs to it.
    fn has(&self, case: &Case) -> bool {
        let gpu = &case.hardware.gpu;
        self.peer == case.peer
            && self.family.as_ref().is_none_or(|family| *family == gpu.family)
            && self.model.as_ref().is_none_or(|(name, model)| *name == gpu.name && *model == case.row.model)
    }
}

impl Without {
    /// Whether a row of this file is left out.
    pub fn leaves_out(&self, case: &Case, file: &str) -> bool {
        match self {
            Without::Nothing => false,
            Without::Named(name) => {
                let gpu = &case.hardware.gpu;
                named(name, [case.peer.name(), &gpu.name, &gpu.family, &case.row.model, file, &case.row.source])
            }
            Without::Groups(groups) => groups.iter().any(|group| group.has(case)),
        }
    }

    fn is_of_groups(&self) -> bool {
        matches!(self, Without::Groups(_))
    }

    /// Whether rows whose residuals are known are left out by name.
    pub fn leaves_out_residuals(&self, rows: &LeftOut) -> bool {
        let LeftOut { framework, gpu, family, model, file, source, .. } = rows;
        let framework = framework.strip_suffix(" fp8").unwrap_or(framework);
        match self {
            Without::Named(name) => named(name, [framework, gpu, family, model, file, source]),
            Without::Nothing | Without::Groups(_) => false,
        }
    }
}

/// Whether a name means rows of this framework, GPU, family of GPUs, model, file and source.
fn named(name: &str, [framework, gpu, family, model, file, source]: [&str; 6]) -> bool {
    let name = name.to_lowercase();
    if let Some((wanted, on)) = name.split_once('@') {
        return model.to_lowercase().starts_with(wanted) && gpu == on;
    }
    let holds = |text: &str| text.to_lowercase().contains(&name);
    framework == name || holds(file) || holds(source) || family == name
}

/// One row of the fit.
struct Target<'a> {
    case: &'a Case,
    placed: Placed<'a>,
    step_s: f64,
    memory: Option<f64>,
    weight: f64,
}

fn rho(predicted: f64, measured: f64) -> f64 {
    let error = (predicted / measured).ln().abs();
    if error.is_nan() { 10.0 } else { error.min(CAP) + (error - CAP).clamp(0.0, 10.0) * 0.2 }
}

impl Target<'_> {
    fn loss(&self, constants: &Constants) -> f64 {
        let case = self.case;
        let terms = constants.terms(&case.framework, &case.hardware);
        let step = self.placed.price(&terms).map_or(10.0, |predicted| rho(predicted, self.step_s));
        let memory = self.memory.map_or(0.0, |measured| rho(case.predicted_memory(&terms).0, measured));
        self.weight * (step + 0.3 * memory)
    }
}

/// Whether a row may fix a constant: those of fp8 are fitted to rows in fp8, and all others to the rest. MXFP8 is predicted as if it had a
/// scale per tensor: what that lacks is not to be made up for by a constant.
fn concerns(constant: &Constant, case: &Case) -> bool {
    let of = constant.of.as_str();
    // What experts cost the host does not depend on the format.
    if constant.is_of_experts() {
        return case.row.split.ep > 1 && (of.is_empty() || of == case.framework.name);
    }
    if constant.is_of_fp8() != case.row.is_fp8() || (constant.is_of_fp8() && case.row.is_mxfp8()) {
        return false;
    }
    let (framework, family) = (case.framework.name.as_str(), case.hardware.gpu.family.as_str());
    let both = of.split_once('/').is_some_and(|parts| parts == (framework, family));
    of.is_empty() || both || [framework, family, &case.hardware.cluster.fabric].contains(&of)
}

/// What came of a fit.
pub struct Fitted {
    /// All constants.
    pub constants: Constants,
    /// The loss before and after.
    pub loss: (f64, f64),
    /// Rows that it looked at.
    pub rows: usize,
}

/// Fits the constants that have a range to the clean rows that are not left out. `progress` hears of rounds and of the loss.
pub fn fit(
    cases: &[Case],
    files: &[String],
    start: &Constants,
    without: &Without,
    rounds: usize,
    threads: usize,
    progress: &dyn Fn(usize, usize, f64),
) -> Fitted {
    let used = |case: &&Case| case.is_clean() && !without.leaves_out(case, &files[case.file]);
    let used: Vec<&Case> = cases.iter().filter(used).collect();
    let mut of_source: BTreeMap<(usize, String), usize> = BTreeMap::new();
    for case in &used {
        *of_source.entry((case.file, case.group())).or_default() += 1;
    }
    let total: f64 = of_source.values().map(|n| (*n as f64).sqrt()).sum();
    let mut targets: Vec<Target> = Vec::new();
    for &case in &used {
        let (Ok(work), Some(measured)) = (&case.work, case.row.measured) else { continue };
        let Some(step_s) = measured.step_s else { continue };
        let placed = work.workload.on(&case.hardware, &case.framework);
        let n = of_source[&(case.file, case.group())] as f64;
        let weight = 1.0 / (n.sqrt() * total);
        targets.push(Target { case, placed, step_s, memory: measured.memory_bytes, weight });
    }
    // Constants that groups which are left out do not concern stay as the fit to all rows has them.
    let out: Vec<&Case> = cases.iter().filter(|case| without.leaves_out(case, &files[case.file])).collect();
    let mut constants = start.clone();
    // We keep the loss of every row: a change of a constant then only evaluates the rows that depend on it.
    let mut losses = evaluate(&targets, &(0..targets.len()).collect::<Vec<_>>(), &constants, threads);
    let before = losses.iter().sum();
    let free: Vec<(String, String, [f64; 2])> = start
        .fitted()
        .filter(|c| targets.iter().any(|t| concerns(c, t.case)))
        .filter(|c| !without.is_of_groups() || out.iter().any(|case| concerns(c, case)))
        .filter_map(|c| Some((c.term.clone(), c.of.clone(), c.range?)))
        .collect();
    let concerned: Vec<Vec<usize>> = free
        .iter()
        .map(|(term, of, _)| {
            let constant = constants.all.iter().find(|c| c.term == *term && c.of == *of);
            (0..targets.len()).filter(|t| constant.is_some_and(|c| concerns(c, targets[*t].case))).collect()
        })
        .collect();
    let mut steps: Vec<f64> = vec![0.1; free.len()];
    for round in 0..rounds {
        for (i, (term, of, [least, most])) in free.iter().enumerate() {
            if steps[i] < 1e-3 {
                steps[i] = if round % 8 == 7 { 0.02 } else { steps[i] };
                if steps[i] < 1e-3 {
                    continue;
                }
            }
            let value = |constants: &Constants| {
                constants.all.iter().find(|c| c.term == *term && c.of == *of).map_or(0.0, |c| c.value)
            };
            let now = value(&constants);
            let here: f64 = concerned[i].iter().map(|t| losses[*t]).sum();
            let mut found = false;
            for sign in [1.0, -1.0] {
                // Relative inside of the range, absolute near zero.
                let moved = (now + sign * steps[i] * now.abs().max(0.05 * (most - least))).clamp(*least, *most);
                if moved == now {
                    continue;
                }
                let mut tried = constants.clone();
                tried.set(term, of, moved);
                let of_tried = evaluate(&targets, &concerned[i], &tried, threads);
                if of_tried.iter().sum::<f64>() < here * (1.0 - 1e-6) {
                    constants = tried;
                    concerned[i].iter().zip(of_tried).for_each(|(t, loss)| losses[*t] = loss);
                    found = true;
                    break;
                }
            }
            steps[i] *= if found { 1.5 } else { 0.5 };
        }
        progress(round + 1, rounds, losses.iter().sum());
    }
    Fitted { constants, loss: (before, losses.iter().sum()), rows: targets.len() }
}

/// What a call of the host takes where no other row says it: it is launched as a kernel is.
const LAUNCHED: [&str; 2] = ["host.collective", "host.message"];

impl Without {
    /// Constants that only rows which are left out could fix take the mean of what their term has elsewhere; what the host takes for a collective
    /// or a message, where that was fitted nowhere else, is what it takes for a kernel. Those of a framework on one family of GPUs are the
    /// framework's own, where these do not come from rows.
    pub fn guess(&self, constants: &Constants, cases: &[Case], files: &[String]) -> Constants {
        let kept = |case: &&Case| case.is_clean() && !self.leaves_out(case, &files[case.file]);
        let kept: Vec<&Case> = cases.iter().filter(kept).collect();
        let fixed = |c: &Constant| kept.iter().any(|case| concerns(c, case));
        let mut guessed = constants.clone();
        let elsewhere = |term: &str| {
            let same = |c: &&Constant| c.term == term && fixed(c);
            let others: Vec<f64> = constants.fitted().filter(same).map(|c| c.value).collect();
            (!others.is_empty()).then(|| others.iter().sum::<f64>() / others.len() as f64)
        };
        for constant in constants.fitted().filter(|c| !fixed(c)) {
            let term = constant.term.as_str();
            let launched = || elsewhere("host.op").filter(|_| LAUNCHED.contains(&term));
            // What a framework's libraries reach on other GPUs was measured outside of the rows.
            let own = || {
                let (framework, _) = constant.of.split_once('/')?;
                let own = constants.all.iter().find(|c| c.term == term && c.of == framework)?;
                own.range.is_none().then_some(own.value)
            };
            let value =
                own().or_else(|| elsewhere(term)).or_else(launched).unwrap_or_else(|| constants.value(term, &[]));
            guessed.set(term, &constant.of, value);
        }
        guessed
    }
}

fn evaluate(targets: &[Target], which: &[usize], constants: &Constants, threads: usize) -> Vec<f64> {
    const CHUNK: usize = 16;
    let losses: Vec<Mutex<Vec<f64>>> = which.chunks(CHUNK).map(|_| Mutex::new(Vec::new())).collect();
    let one = |i: usize| {
        let chunk = which.chunks(CHUNK).nth(i).unwrap_or_default();
        let made = chunk.iter().map(|t| targets[*t].loss(constants)).collect();
        *losses[i].lock().unwrap_or_else(PoisonError::into_inner) = made;
    };
    in_parallel(losses.len(), threads, &one, &|_| {});
    losses.into_iter().flat_map(|l| l.into_inner().unwrap_or_else(PoisonError::into_inner)).collect()
}

impl Case {
    /// Bytes of a device of every stage.
    pub(super) fn stage_bytes(&self, terms: &lockstep_sim::Terms) -> Vec<f64> {
        let Ok(work) = &self.work else { return Vec::new() };
        let factors = MemoryTerms {
            parameters: terms.memory_parameters,
            saved: terms.memory_saved,
            logits: terms.memory_logits,
            fixed: terms.memory_fixed,
            update: if self.row.split.zero > 0 { terms.memory_update } else { 0.0 },
        };
        let bytes =
            |stage: &StageMemory| stage.bytes(&factors, self.peer.keeps_gathers(stage.in_flight, self.row.split.pp));
        work.memory.iter().map(bytes).collect()
    }

    /// Bytes of the device that the source looked at, and of the one that needs most.
    pub(super) fn predicted_memory(&self, terms: &lockstep_sim::Terms) -> (f64, f64) {
        let stages = self.stage_bytes(terms);
        let largest = stages.iter().copied().fold(0.0, f64::max);
        let first = stages.first().copied().unwrap_or(0.0);
        (if self.peer.measures_first_stage() { first } else { largest }, largest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_rows_a_framework_has_what_its_libraries_reach_elsewhere_and_others_take_the_value_for_all() {
        let constants = Constants::builtin();
        let guessed = Without::Nothing.guess(&constants, &[], &[]);
        let of = |constants: &Constants, term: &str, of: &str| constants.value(term, &[of]);
        let library = of(&constants, "attention.efficiency", "megatron-core");
        assert!(library != of(&constants, "attention.efficiency", "megatron-core/h100"));
        assert_eq!(of(&guessed, "attention.efficiency", "megatron-core/h100"), library);
        assert_eq!(of(&guessed, "attention.efficiency", "h100"), of(&constants, "attention.efficiency", ""));
        assert_eq!(of(&guessed, "host.op", "nanotron"), of(&constants, "host.op", ""));
        // What is counted in its code is known without rows.
        assert_eq!(of(&guessed, "logits.bytes", "nanotron"), 52.0);
    }
}
