//! Choices without a search: all of them, and those of one layout.

use super::bound::parts;
use super::space::Space;
use super::{LayoutChoice, RankedLayout, SearchRequest};
use crate::parallel::all_in_parallel;
use crate::{Evaluated, Rates, Result, evaluate};
use lockstep_ir::Layout;

/// Every choice that divides, in no order that means anything: what a search without bounds would look at.
pub fn every_choice(request: &SearchRequest) -> Vec<LayoutChoice> {
    let space = Space::new(request);
    let mut all = Vec::new();
    for split in space.splits() {
        for pipe in space.pipes(request.gpus / (split.tp * split.cp)) {
            let ranks = request.gpus / (split.tp * split.cp * pipe.pp);
            for micro_batch in space.micro_batches(ranks) {
                for data in space.data(ranks, split) {
                    for recompute in space.policies() {
                        for gradients in space.gradients() {
                            all.push(space.choice(split, pipe, data, micro_batch, recompute, gradients));
                        }
                    }
                }
            }
        }
    }
    all
}

/// The fastest that a layout is with any micro-batch, recompute policy and type of gradients that the config leaves open; where
/// none fits, the one that needs least. None where it does not divide the batch.
pub fn at_layout(request: &SearchRequest, layout: &Layout) -> Result<Option<RankedLayout>> {
    let space = Space::new(request);
    let (split, _, data) = parts(&LayoutChoice { layout: *layout, ..LayoutChoice::of(request.config) });
    let ranks = data.replicate * data.shard * split.ep;
    let mut all = Vec::new();
    for micro_batch in space.micro_batches(ranks) {
        for recompute in space.policies() {
            for gradients in space.gradients() {
                let layout = Layout { micro_batches: space.accumulation(ranks, micro_batch), ..*layout };
                all.push(LayoutChoice {
                    layout,
                    micro_batch,
                    recompute,
                    gradients,
                    ..LayoutChoice::of(request.config)
                });
            }
        }
    }
    let one = |i: usize| exact(request, &all[i]);
    let found = all_in_parallel(all.len(), request.threads, &one, &|_| {});
    let mut best: Option<((bool, f64), RankedLayout)> = None;
    for (choice, evaluated) in all.into_iter().zip(found) {
        let evaluated = evaluated?;
        let verdict = request.room.verdict(&evaluated.stages, request.gpus);
        let rank = if verdict.fits { (false, evaluated.forecast.step_s) } else { (true, verdict.planned_bytes as f64) };
        if best.as_ref().is_none_or(|(known, _)| rank < *known) {
            best = Some((rank, RankedLayout { choice, evaluated }));
        }
    }
    Ok(best.map(|(_, layout)| layout))
}

/// A choice compiled whole, and simulated.
pub(super) fn exact(request: &SearchRequest, choice: &LayoutChoice) -> Result<Evaluated> {
    match request.trainer {
        Some(trainer) => trainer.evaluate(choice),
        None => {
            let config = choice.config(request.config);
            evaluate(request.machine, &config, Rates::Catalogue(request.hardware))
        }
    }
}
