//! What the search proposes where others have swept, beside what they measured.

use crate::style::heading;
use crate::table::{table, wrapped};
use lockstep_plan::published::{Proposal, ProposedCell, regret_of_search};
use serde_json::{Value, json};

pub(super) fn as_json(cells: &[ProposedCell]) -> Value {
    json!({ "regret": regret_of_search(cells), "cells": cells })
}

pub(super) fn as_text(cells: &[ProposedCell]) -> String {
    let title = format!("\n{}\n", heading("Layouts that the search proposes, beside the sweep"));
    let Some(regret) = regret_of_search(cells) else {
        return title + "no cell: --search needs five measured layouts of a model on as many GPUs, by nanotron\n";
    };
    let percent = |share: f64| format!("{:.1}%", 100.0 * share);
    let row = |cell: &ProposedCell| {
        let measured: Vec<&Proposal> = cell.proposals.iter().filter(|p| p.measured_s.is_some()).collect();
        let first = measured.first();
        let seconds = |s: Option<f64>| s.map_or("-".into(), |s| format!("{s:.3}"));
        vec![
            format!("{} on {} {}", cell.model, cell.gpus, cell.gpu),
            cell.measured.to_string(),
            format!("{} of {}", measured.len(), cell.proposals.len()),
            first.map_or("-".into(), |p| p.layout.clone()),
            seconds(first.and_then(|p| p.measured_s)),
            cell.fastest.0.clone(),
            seconds(Some(cell.fastest.1)),
            cell.regret.map_or("-".into(), percent),
            cell.regret_of_five.map_or("-".into(), percent),
        ]
    };
    let header = [
        "",
        "layouts measured",
        "proposed and measured",
        "the first of these",
        "measured, s",
        "fastest measured",
        "measured, s",
        "regret",
        "of five",
    ];
    let text = format!(
        "regret over {} cells: median {}, mean {}; of the best of the first five, mean {}. Proposals that were not measured are \
         passed over.",
        cells.len(),
        percent(regret.median),
        percent(regret.mean),
        percent(regret.of_five)
    );
    title + &table(&header, &cells.iter().map(row).collect::<Vec<_>>()) + &wrapped(&text, "  ")
}
