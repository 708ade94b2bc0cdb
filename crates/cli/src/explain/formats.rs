//! What of a step is in fewer bits than the rest, and why some of it is not.

use crate::table::wrapped;
use lockstep_compile::Stays;
use lockstep_config::{Config, MomentPrecision};
use lockstep_ir::graph::{Phase, State};
use lockstep_ir::program::Role;
use lockstep_ir::units::thousands;
use lockstep_ir::{DType, Dim, ValueId};
use lockstep_plan::Plan;
use std::collections::{BTreeMap, BTreeSet};

/// Which matmuls are in fp8, and why others are not.
pub(super) fn fp8_text(plan: &Plan) -> String {
    if plan.precision.fp8.is_none() {
        return String::new();
    }
    let in_fp8 = plan.fp8.iter().filter(|(_, stays)| stays.is_none()).count();
    let mut text = format!("fp8: the matmuls of {in_fp8} of {} linear layers", thousands(plan.fp8.len() as u64));
    // Of weights that every layer has, the name after the layer's number.
    let mut others: BTreeMap<(Stays, &str), usize> = BTreeMap::new();
    for (weight, stays) in &plan.fp8 {
        let kind = weight.splitn(3, '.').last().unwrap_or(weight);
        stays.iter().for_each(|stays| *others.entry((*stays, kind)).or_default() += 1);
    }
    for ((stays, kind), count) in others {
        let why = match stays {
            Stays::Edge => "of the first or last layers (precision.fp8_skip_first, precision.fp8_skip_last)".to_owned(),
            Stays::Small { weights, fewest } => {
                let [weights, fewest] = [weights, fewest].map(|n| thousands(n as u64));
                format!("{weights} weights on a rank, and fp8 is faster from {fewest} on (precision.fp8_weights)")
            }
            Stays::Odd { multiple } => format!("a size on a rank is no multiple of {multiple}"),
        };
        text += &format!("; {count} × {kind} in bf16: {why}");
    }
    wrapped(&(text + &weights_text(plan)), "  ")
}

/// How often weights are quantised.
fn weights_text(plan: &Plan) -> String {
    let nodes = plan.compiled.stages.last().into_iter().flat_map(|stage| &stage.graph.nodes);
    let phases: Vec<Phase> = nodes.filter(|n| n.op.quantises_weight()).map(|n| n.phase).collect();
    let count = |phase: Phase| phases.iter().filter(|p| **p == phase).count();
    let often = match count(Phase::Forward) {
        0 => String::new(),
        count => format!(
            "; {} in every micro-batch, as ZeRO 3 gathers them, they are frozen or their own master weights",
            thousands(count as u64)
        ),
    };
    match count(Phase::Prepare) {
        0 => often.replacen("; ", "; weights are quantised: ", 1),
        count => format!(
            "; weights are quantised: {} once per step, in the memory of the weights in bf16{}",
            thousands(count as u64),
            often.replacen("; ", ", ", 1)
        ),
    }
}

/// Which matrices keep their moments in bf16 where 8 bits were asked for, and why.
pub(super) fn moments_text(config: &Config, plan: &Plan) -> String {
    if config.precision.moments != MomentPrecision::Int8 {
        return String::new();
    }
    // Matrices by the length of their rows on a rank.
    let mut rows: BTreeMap<usize, BTreeSet<ValueId>> = BTreeMap::new();
    for tensor in plan.compiled.programs.iter().flat_map(|program| &program.tensors) {
        if let (Role::State(State::Moment { of, .. }), DType::BF16) = (&tensor.role, tensor.whole.dtype) {
            let row = tensor.sharding.uncut().local(&tensor.whole, &plan.layout.mesh).dims.last().map_or(0, Dim::size);
            rows.entry(row).or_default().insert(*of);
        }
    }
    let of = |(row, matrices): (&usize, &BTreeSet<ValueId>)| format!("{} with rows of {row}", matrices.len());
    let all: Vec<String> = rows.iter().map(of).collect();
    match all.is_empty() {
        true => String::new(),
        false => {
            let text = format!(
                "int8 moments: those of some matrices are in bf16, since rows or ranges on a rank are no whole blocks of 256: {}",
                all.join(", ")
            );
            wrapped(&text, "  ")
        }
    }
}
