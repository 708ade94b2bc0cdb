//! Leaves rows out of the fit, by model, by GPU and by framework, and predicts them without it: what residuals are from.

use super::fit::{LeftOutGroup, Without, fit};
use super::predict::{Case, predict};
use super::residuals::{Distance, LeftOut, Residuals};
use lockstep_sim::Constants;
use std::collections::{BTreeMap, BTreeSet};

/// Parts that models are left out in, one after the other.
const PARTS: usize = 4;

/// Predicts every clean row by constants that were fitted without it, at every distance. Constants that only rows which are left out could fix are
/// guessed. `progress` hears how many fits there are, and how many are done.
pub fn left_out(
    cases: &[Case],
    files: &[String],
    start: &Constants,
    rounds: usize,
    threads: usize,
    progress: &dyn Fn(usize, usize),
) -> Residuals {
    let all = parts(cases);
    let mut rows: BTreeMap<usize, Vec<(Distance, f64)>> = BTreeMap::new();
    let mut as_others: BTreeMap<usize, BTreeMap<String, f64>> = BTreeMap::new();
    for (done, (distance, groups)) in all.iter().enumerate() {
        progress(done, all.len());
        let without = Without::Groups(groups.clone());
        let fitted = fit(cases, files, start, &without, rounds, threads, &|_, _, _| {}).constants;
        let constants = without.guess(&fitted, cases, files);
        let tested: Vec<usize> = (0..cases.len())
            .filter(|i| cases[*i].is_clean() && without.leaves_out(&cases[*i], &files[cases[*i].file]))
            .collect();
        let kept: Vec<Case> = tested.iter().map(|i| cases[*i].clone()).collect();
        for (i, prediction) in tested.into_iter().zip(predict(&kept, &constants, threads)) {
            let measured = cases[i].row.measured.and_then(|measured| measured.step_s);
            if let (Some(measured), Some(predicted)) = (measured, prediction.step_s) {
                rows.entry(i).or_default().push((*distance, (measured / predicted).ln()));
                if *distance == Distance::Framework {
                    as_others.insert(i, cases[i].as_others(&constants));
                }
            }
        }
    }
    progress(all.len(), all.len());
    let mut groups: Vec<LeftOut> = Vec::new();
    for distance in Distance::ALL {
        let mut index: BTreeMap<(String, [&str; 3], usize), usize> = BTreeMap::new();
        for (i, found) in &rows {
            let case = &cases[*i];
            let gpu = &case.hardware.gpu;
            let key = (case.group(), [gpu.name.as_str(), &case.row.model, &case.row.source], case.file);
            for (_, residual) in found.iter().filter(|(at, _)| *at == distance) {
                let at = *index.entry(key.clone()).or_insert_with(|| {
                    groups.push(LeftOut {
                        as_others: BTreeMap::new(),
                        distance,
                        framework: case.group(),
                        gpu: gpu.name.clone(),
                        family: gpu.family.clone(),
                        model: case.row.model.clone(),
                        file: files[case.file].clone(),
                        source: case.row.source.clone(),
                        residuals: Vec::new(),
                    });
                    groups.len() - 1
                });
                groups[at].residuals.push(*residual);
                for (of, ratio) in as_others.get(i).filter(|_| distance == Distance::Framework).into_iter().flatten() {
                    groups[at].as_others.entry(of.clone()).or_default().push(*ratio);
                }
            }
        }
    }
    Residuals { left_out: groups }
}

/// What is left out together, one after the other.
fn parts(cases: &[Case]) -> Vec<(Distance, Vec<LeftOutGroup>)> {
    let clean = || cases.iter().filter(|case| case.is_clean());
    let whole = |case: &Case| LeftOutGroup { peer: case.peer, family: None, model: None };
    let models: BTreeSet<LeftOutGroup> = clean()
        .map(|case| {
            let model = (case.hardware.gpu.name.clone(), case.row.model.clone());
            LeftOutGroup { model: Some(model), ..whole(case) }
        })
        .collect();
    let mut all: Vec<(Distance, Vec<LeftOutGroup>)> =
        (0..PARTS).map(|part| (Distance::Model, models.iter().skip(part).step_by(PARTS).cloned().collect())).collect();
    let on: BTreeSet<LeftOutGroup> =
        clean().map(|case| LeftOutGroup { family: Some(case.hardware.gpu.family.clone()), ..whole(case) }).collect();
    // A framework that ran on one family alone is not known without it.
    let several = |group: &&LeftOutGroup| on.iter().filter(|other| other.peer == group.peer).count() > 1;
    let families: BTreeSet<&String> = on.iter().filter_map(|group| group.family.as_ref()).collect();
    for family in families {
        let of = |group: &&LeftOutGroup| group.family.as_ref() == Some(family);
        let groups: Vec<LeftOutGroup> = on.iter().filter(several).filter(of).cloned().collect();
        all.extend((!groups.is_empty()).then_some((Distance::Gpu, groups)));
    }
    // torchtitan with and without torch.compile are one.
    let mut frameworks: BTreeMap<&str, BTreeSet<LeftOutGroup>> = BTreeMap::new();
    for case in clean() {
        frameworks.entry(case.peer.kin()).or_default().insert(whole(case));
    }
    all.extend(frameworks.into_values().map(|groups| (Distance::Framework, groups.into_iter().collect())));
    all
}

#[cfg(test)]
mod tests {
    use super::super::predict::{Cases, File};
    use super::*;
    use lockstep_sim::Catalogue;

    #[test]
    fn every_row_is_left_out_with_its_model_its_gpu_and_its_framework() {
        let header = "source,model,layers,hidden,heads,kv_heads,ffn,vocab,seq,gpus,gpu,tp,pp,dp,zero,microbatch,global_batch,\
                      recompute,precision,notes,step_time_s,flag\n";
        let row = |source: &str, model: &str, gpu: &str, flag: &str| {
            format!("{source},{model},4,1024,8,8,4096,32768,1024,8,{gpu},1,1,8,3,2,16,none,bf16,,0.05,{flag}\n")
        };
        let text = [
            row("llm-foundry", "llama-a", "H100", ""),
            row("llm-foundry", "llama-b", "A100", ""),
            row("nanotron", "llama-a", "H100", ""),
            row("nanotron", "llama-a", "H100", "stalled"),
        ];
        let files = [File { name: "rows.csv".into(), text: format!("{header}{}", text.concat()) }];
        let Cases { cases, refused } = Cases::new(&Catalogue::builtin(), &files, None, 2, &|_, _| {});
        assert!(refused.is_empty(), "{refused:?}");
        let found = left_out(&cases, &["rows".to_owned()], &Constants::builtin(), 1, 2, &|_, _| {});
        let at = |distance: Distance| {
            let groups = found.left_out.iter().filter(|group| group.distance == distance);
            groups.map(|g| (g.framework.as_str(), g.gpu.as_str(), g.residuals.len())).collect::<Vec<_>>()
        };
        let all = [("llm-foundry", "h100", 1), ("llm-foundry", "a100", 1), ("nanotron", "h100", 1)];
        assert_eq!((at(Distance::Model), at(Distance::Framework)), (all.to_vec(), all.to_vec()));
        // nanotron ran on one family alone.
        assert_eq!(at(Distance::Gpu), all[..2]);
    }
}
