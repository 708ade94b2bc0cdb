//! Layouts that the search proposes where others have swept: restricted to what their framework has, timed and weighed by its profile,
//! and held against what they measured.

use super::peer::{Described, Description, Peer, describe};
use super::predict::{self, Case, Work};
use super::program::{Built, PeerMachine, built};
use super::report::{LEAST_CELL, Regret, cell};
use super::row::{Row, Split};
use super::stats::quantile;
use crate::evaluate::evaluated;
use crate::search::{LayoutChoice, SearchRequest, Trainer, search};
use crate::{Evaluated, NoLayout, PlanError, Result, Room};
use lockstep_config::Config;
use lockstep_ir::{Layout, MeshAxis};
use lockstep_sim::{Constants, Framework, Hardware, Terms};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A layout that the search proposes.
#[derive(Clone, Debug, Serialize)]
pub struct Proposal {
    /// What it is.
    pub layout: String,
    /// Seconds of a step, by the cost model.
    pub predicted_s: f64,
    /// Seconds of a step as they were measured, where that layout was.
    pub measured_s: Option<f64>,
}

/// What the search proposes for a model on some GPUs that were swept.
#[derive(Clone, Debug, Serialize)]
pub struct ProposedCell {
    /// The model.
    pub model: String,
    /// The GPU, by its name in the catalogue.
    pub gpu: String,
    /// How many.
    pub gpus: usize,
    /// Layouts that were measured.
    pub measured: usize,
    /// The fastest of them, and its seconds.
    pub fastest: (String, f64),
    /// Up to the fifth that was measured, the best first.
    pub proposals: Vec<Proposal>,
    /// How much longer the first that was measured took than the fastest, as a fraction; none where none was measured.
    pub regret: Option<f64>,
    /// The same for the best of the first five that were measured.
    pub regret_of_five: Option<f64>,
}

/// How many proposals are asked for at first, and of how many that were measured the best counts.
const PROPOSALS: usize = 32;
const TRIES: usize = 5;

/// What the search proposes for every cell of clean rows whose framework's layouts are known. `progress` hears how many cells are done.
pub fn proposals(
    cases: &[Case],
    constants: &Constants,
    threads: usize,
    progress: &dyn Fn(usize, usize),
) -> Result<Vec<ProposedCell>> {
    let mut cells: BTreeMap<String, Vec<&Case>> = BTreeMap::new();
    let swept = |case: &&Case| case.is_clean() && case.peer.is_swept() && case.measured_s().is_some();
    for case in cases.iter().filter(swept) {
        cells.entry(cell(&case.row)).or_default().push(case);
    }
    cells.retain(|_, cases| cases.len() >= LEAST_CELL);
    let mut all = Vec::new();
    for (i, cases) in cells.values().enumerate() {
        progress(i, cells.len());
        all.push(proposed(cases, constants, threads)?);
    }
    all.sort_by(|a, b| (&a.model, a.gpus).cmp(&(&b.model, b.gpus)));
    Ok(all)
}

/// What choosing by the search costs, over cells.
pub fn regret_of_search(cells: &[ProposedCell]) -> Option<Regret> {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let first: Vec<f64> = cells.iter().filter_map(|cell| cell.regret).collect();
    let five: Vec<f64> = cells.iter().filter_map(|cell| cell.regret_of_five).collect();
    quantile(&first, 0.5).map(|median| Regret { median, mean: mean(&first), of_five: mean(&five) })
}

impl Case {
    fn measured_s(&self) -> Option<f64> {
        self.row.measured?.step_s
    }
}

fn proposed(cases: &[&Case], constants: &Constants, threads: usize) -> Result<ProposedCell> {
    let Case { row, peer, framework, hardware, .. } = cases[0];
    let terms = constants.terms(framework, hardware);
    let trainer = PeerTrainer { row, peer: *peer, framework, hardware, terms };
    let mut measured: BTreeMap<String, f64> = BTreeMap::new();
    for case in cases {
        let seconds = case.measured_s().unwrap_or(f64::INFINITY);
        let known = measured.entry(name(&case.row.split)).or_insert(seconds);
        *known = known.min(seconds);
    }
    let fastest = measured.iter().min_by(|a, b| a.1.total_cmp(b.1)).map(|(name, s)| (name.clone(), *s));
    let fastest = fastest.unwrap_or_default();
    let (config, room) = (trainer.config()?, predict::room(&hardware.gpu));
    let mut wanted = PROPOSALS;
    let found = loop {
        let found = search(&trainer.request(&config, &room, wanted, threads), &|_, _| {})?;
        let proposal = |choice: &LayoutChoice, predicted_s: f64| {
            let layout = name(&trainer.row_of(choice).split);
            Proposal { measured_s: measured.get(&layout).copied(), layout, predicted_s }
        };
        let all: Vec<Proposal> = found.best.iter().map(|l| proposal(&l.choice, l.evaluated.forecast.step_s)).collect();
        if all.len() < wanted || all.iter().filter(|p| p.measured_s.is_some()).count() >= TRIES {
            break all;
        }
        wanted *= 2;
    };
    let times = |tries: usize| found.iter().filter_map(|p| p.measured_s).take(tries).min_by(f64::total_cmp);
    let regret = |tries: usize| Some(times(tries)? / fastest.1 - 1.0);
    let last = found.iter().enumerate().filter(|(_, p)| p.measured_s.is_some()).nth(TRIES - 1);
    let shown = last.map_or(found.len(), |(i, _)| i + 1);
    Ok(ProposedCell {
        model: row.model.clone(),
        gpu: hardware.gpu.name.clone(),
        gpus: row.gpus,
        measured: measured.len(),
        regret: regret(1),
        regret_of_five: regret(TRIES),
        proposals: found[..shown].to_vec(),
        fastest,
    })
}

/// A layout of a sweep: `dp=8 tp=2 zero=1 mb=4`.
fn name(split: &Split) -> String {
    let sizes = [("dp", split.dp), ("tp", split.tp), ("pp", split.pp), ("cp", split.cp)];
    let mut words: Vec<String> = sizes.iter().filter(|(_, n)| *n > 1).map(|(name, n)| format!("{name}={n}")).collect();
    // Alone there is nothing to shard with.
    words.extend((split.zero > 0 && split.dp * split.cp > 1).then(|| format!("zero={}", split.zero)));
    words.extend(split.micro_batch.map(|n| format!("mb={n}")));
    words.join(" ")
}

/// A model that a framework cannot be given.
fn refused(reason: String) -> PlanError {
    let hint = "leave out --search, or the rows of this model".into();
    PlanError::NoLayout(Box::new(NoLayout { reason, hint, too_large: false, nearest: None }))
}

/// A framework with a model and a batch that it trains.
struct PeerTrainer<'a> {
    row: &'a Row,
    peer: Peer,
    framework: &'a Framework,
    hardware: &'a Hardware,
    terms: Terms,
}

impl PeerTrainer<'_> {
    /// The run on one GPU, from which layouts are searched.
    fn config(&self) -> Result<Config> {
        let alone = Split { tp: 1, pp: 1, dp: 1, cp: 1, zero: 0, micro_batch: Some(1), ..self.row.split };
        Ok(self.built(&Row { split: alone, ..self.row.clone() })?.0.config)
    }

    /// The search for its layouts, as many of the best as are wanted.
    fn request<'a>(&'a self, config: &'a Config, room: &'a Room, wanted: usize, threads: usize) -> SearchRequest<'a> {
        SearchRequest {
            machine: &PeerMachine,
            config,
            gpus: self.row.gpus,
            hardware: self.hardware,
            room,
            free: true,
            fixed: &["recompute.policy", "precision.gradients"],
            trainer: Some(self),
            wanted,
            threads,
        }
    }

    /// A choice as a row of the sweep.
    fn row_of(&self, choice: &LayoutChoice) -> Row {
        let size = |axis: MeshAxis| choice.layout.mesh.size(axis);
        let split = Split {
            tp: size(MeshAxis::Tp),
            pp: size(MeshAxis::Pp),
            dp: size(MeshAxis::DpShard),
            cp: size(MeshAxis::Cp),
            zero: choice.layout.zero,
            micro_batch: Some(choice.micro_batch),
            ..self.row.split
        };
        Row { split, ..self.row.clone() }
    }

    fn built(&self, row: &Row) -> Result<(Built, Described)> {
        match describe(row, Some(self.peer)).map_err(refused)? {
            Description::Crashes(_, reason) => Err(refused(reason)),
            Description::Config(described) => Ok((built(&described, "proposal").map_err(refused)?, *described)),
        }
    }
}

impl Trainer for PeerTrainer<'_> {
    fn framework(&self) -> &Framework {
        self.framework
    }

    fn terms(&self) -> Terms {
        self.terms
    }

    fn has(&self, layout: &Layout) -> bool {
        self.peer.has(layout) && self.peer.cut(self.row, layout.mesh.size(MeshAxis::Pp)).is_ok()
    }

    fn stages(&self, pp: usize) -> Option<Vec<usize>> {
        self.peer.cut(self.row, pp).ok().flatten()
    }

    fn evaluate(&self, choice: &LayoutChoice) -> Result<Evaluated> {
        let row = self.row_of(choice);
        let (built, described) = self.built(&row)?;
        let work = Arc::new(Work::new(&built.programs, &described).map_err(refused)?);
        let placed = work.workload.on(self.hardware, self.framework);
        let mut found =
            evaluated(&built.config, &built.forward, &built.context, &built.estimator, &built.programs, |asked| {
                placed.forecast(asked, self.hardware, &self.terms)
            })?;
        let case = Case {
            file: 0,
            row,
            peer: self.peer,
            framework: self.framework.clone(),
            hardware: self.hardware.clone(),
            assumed: Vec::new(),
            work: Ok(work.clone()),
        };
        for (stage, bytes) in found.stages.iter_mut().zip(case.stage_bytes(&self.terms)) {
            stage.total_bytes = bytes as u64;
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::{Cases, File};
    use crate::search::every_choice;
    use lockstep_sim::Catalogue;

    /// The bounds hold for a framework that overlaps nothing, too.
    #[test]
    fn what_is_proposed_is_the_best_of_all_that_the_framework_has() {
        let text = "source,model,layers,hidden,heads,kv_heads,ffn,vocab,seq,gpus,gpu,tp,pp,dp,zero,microbatch,global_batch,recompute,\
                    precision,step_time_s\n\
                    Ultra-Scale Playbook,llama-tiny,4,1024,8,8,4096,32768,4096,16,H100 (EFA),1,1,16,1,1,64,none,bf16,1.0\n";
        let files = [File { name: "rows.csv".into(), text: text.into() }];
        let Cases { cases, refused } = Cases::new(&Catalogue::builtin(), &files, None, 2, &|_, _| {});
        assert!(refused.is_empty(), "{refused:?}");
        let Case { row, peer, framework, hardware, .. } = &cases[0];
        let terms = Constants::builtin().terms(framework, hardware);
        let trainer = PeerTrainer { row, peer: *peer, framework, hardware, terms };
        let (config, room) = (trainer.config().unwrap(), predict::room(&hardware.gpu));
        let request = trainer.request(&config, &room, 5, 2);
        let found = search(&request, &|_, _| {}).unwrap();
        let all = every_choice(&request);
        assert!(all.len() > 50 && found.counts.legal == all.len() as u64, "{}", all.len());
        assert!(found.counts.compiled < all.len() as u64 / 2, "{:?} of {}", found.counts, all.len());
        let mut times: Vec<f64> = all.iter().map(|c| trainer.evaluate(c).unwrap().forecast.step_s).collect();
        times.sort_by(f64::total_cmp);
        let mut ours: Vec<f64> = found.best.iter().map(|l| l.evaluated.forecast.step_s).collect();
        ours.sort_by(f64::total_cmp);
        assert_eq!(ours, times[..5]);
    }
}
