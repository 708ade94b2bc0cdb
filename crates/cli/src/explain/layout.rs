//! What each rank role holds and communicates, and how a pipeline fills.

use super::memory;
use crate::table::{columns, table, wrapped};
use lockstep_ir::account::{self, Communication};
use lockstep_ir::blocks::{BLOCK, attention_blocks};
use lockstep_ir::graph::Phase;
use lockstep_ir::program::Instr;
use lockstep_ir::schedule::Timeline;
use lockstep_ir::{Axes, StepProgram, units};
use lockstep_plan::{Plan, pipeline_timeline};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A rank role: the ranks of one pipeline stage.
struct Role<'a> {
    program: &'a StepProgram,
    collectives: Vec<Communication>,
    padding: u64,
    /// Blocks of attention by index over cp.
    blocks: Vec<u64>,
}

fn roles(plan: &Plan) -> Vec<Role<'_>> {
    let role = |program| {
        let entry = StepProgram::entry(program, StepProgram::TRAIN);
        Role {
            program,
            collectives: entry.map(|e| account::communication(program, e)).unwrap_or_default(),
            padding: account::padding(program),
            blocks: entry.map(|e| attention_blocks(program, e)).unwrap_or_default(),
        }
    };
    plan.compiled.programs.iter().map(role).collect()
}

impl Role<'_> {
    /// First and last rank.
    fn ranks(&self) -> (usize, usize) {
        let size = self.program.mesh.size(Axes::STAGE);
        (self.program.stage * size, (self.program.stage + 1) * size - 1)
    }

    /// First and last layer of every chunk.
    fn layers(&self) -> Vec<(usize, usize)> {
        let mut chunks: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
        // What is no micro-batch's is of all chunks.
        let works = |i: &&Instr| !matches!(i.phase, Phase::Prepare | Phase::Update | Phase::Probe);
        for segment in &self.program.segments {
            for layer in segment.instrs.iter().filter(works).filter_map(|i| i.layer) {
                let (first, last) = chunks.entry(segment.chunk).or_insert((layer, layer));
                (*first, *last) = ((*first).min(layer), (*last).max(layer));
            }
        }
        chunks.into_values().collect()
    }
}

/// How the pipeline fills if transfers were free: stages weighed by their FLOPs.
pub(super) fn timeline(plan: &Plan) -> Option<Timeline> {
    pipeline_timeline(&plan.compiled.programs, &plan.layout)
}

pub(super) fn as_json(plan: &Plan) -> Value {
    let layout = &plan.layout;
    let roles: Vec<Value> = roles(plan)
        .iter()
        .zip(&plan.stages)
        .map(|(role, memory)| {
            json!({
                "stage": role.program.stage,
                "ranks": role.ranks(),
                "layers": role.layers().first().zip(role.layers().last()).map(|(first, last)| (first.0, last.1)),
                "chunks": role.layers(),
                "memory": memory,
                "padding_bytes_all_ranks": role.padding,
                "collectives": role.collectives,
                "attention_blocks": role.blocks,
                // The name that they had before.
                "exchanges": role.collectives,
            })
        })
        .collect();
    let timeline = timeline(plan);
    json!({
        "layout": layout.to_string(),
        "ranks": layout.mesh.ranks(),
        "mesh": layout.mesh,
        "zero": layout.zero,
        "reshard_after_forward": layout.reshard_after_forward,
        "sequence_parallel": layout.sequence_parallel,
        "context": layout.context.name(),
        "schedule": layout.schedule.name(),
        "virtual": layout.chunks,
        "bubble": timeline.as_ref().map_or(0.0, Timeline::bubble),
        "bubble_without_norm": timeline.as_ref().map_or(0.0, inside_the_window),
        "in_flight": timeline.as_ref().map(|_| layout.pipeline().in_flight()),
        "roles": roles,
    })
}

/// The bubble that would be left if no rank waited at the end of a step for the gradient norm of all.
fn inside_the_window(timeline: &Timeline) -> f64 {
    match timeline.total > 0.0 {
        true => 1.0 - (1.0 - timeline.bubble()) * timeline.total / timeline.longest_window(),
        false => 0.0,
    }
}

pub(super) fn as_text(plan: &Plan) -> String {
    let layout = &plan.layout;
    let mut text = wrapped(&format!("layout: {layout}, {} ranks", layout.mesh.ranks()), "  ");
    if let Some(timeline) = timeline(plan) {
        let (bubble, inside) = (100.0 * timeline.bubble(), 100.0 * inside_the_window(&timeline));
        text.push_str(&format!("pipeline: bubble {bubble:.1}% with free transfers;\n"));
        if bubble - inside >= 0.05 {
            text.push_str(&format!("{inside:.1}% if no rank waited for the gradient norm of all;\n"));
        }
        let picture = timeline.picture(columns() - 10);
        text.push_str(&format!("one line per rank, F forward, B backward, W weight gradients\n{picture}"));
    }
    for (role, breakdown) in roles(plan).iter().zip(&plan.stages) {
        let (first, last) = role.ranks();
        let chunk = |(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a} to {b}") };
        let chunks: Vec<String> = role.layers().iter().map(chunk).collect();
        let layers = if chunks.is_empty() { String::new() } else { format!(", layers {}", chunks.join(", ")) };
        let stage = format!("stage {}: ranks {first} to {last}{layers}", role.program.stage);
        text.push_str(&format!("\n{}\n{}", wrapped(&stage, "  "), memory(breakdown)));
        if role.padding > 0 {
            let padding = units::bytes(role.padding);
            text.push_str(&format!("  padding in states: {padding} on all ranks of the stage\n"));
        }
        let row = |e: &Communication| {
            vec![
                format!("{} {}", e.segment, e.op),
                format!("{} × {}", e.axis, e.ranks),
                e.calls.to_string(),
                units::bytes(e.bytes),
                units::bytes(e.sent_bytes),
            ]
        };
        let rows: Vec<Vec<String>> = role.collectives.iter().map(row).collect();
        let header = ["segment and op", "along", "calls", "~whole tensors", "sent by a rank"];
        text.push_str(&format!("\ncommunication of one step, in bytes (sent: in a ring)\n{}", table(&header, &rows)));
        text.push_str(&attention(&role.blocks));
    }
    text
}

/// How equal the work of attention is on context-parallel ranks.
fn attention(blocks: &[u64]) -> String {
    let (Some((least_rank, least)), Some((most_rank, most))) = (
        blocks.iter().enumerate().min_by_key(|(_, blocks)| **blocks),
        blocks.iter().enumerate().rev().max_by_key(|(_, blocks)| **blocks),
    ) else {
        return String::new();
    };
    let count = |blocks: u64| units::thousands(blocks);
    let text = match least == most {
        true => format!("{} on every rank", count(*most)),
        false => {
            let mean = blocks.iter().sum::<u64>() as f64 / blocks.len() as f64;
            format!(
                "{} at cp index {least_rank}, {} at {most_rank}, {:.1}% more than the mean",
                count(*least),
                count(*most),
                100.0 * (*most as f64 / mean - 1.0)
            )
        }
    };
    format!("\nattention over cp, in blocks of {BLOCK} × {BLOCK} positions in one step:\n  {text}\n")
}
