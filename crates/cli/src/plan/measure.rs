//! `--measure`: micro-batches and recompute policies, run for a few steps each on this machine, beside what was predicted of them.
//!
//! Each runs in a process of its own, `lockstep bench train`, so that one that the system kills for its memory ends alone.

use crate::failure::{Failure, Result};
use crate::progress::Progress;
use crate::table::{table, wrapped};
use crate::{ConfigArgs, Format};
use lockstep_config::{Config, RecomputePolicy};
use lockstep_host::Devices;
use lockstep_ir::units::{self, thousands};
use lockstep_plan::{Room, plan, with_micro_batch};
use serde::Serialize;
use serde_json::{Value, json};
use std::process::{Command, Stdio};

/// Micro-batches that are tried, from 1.
const MOST_SIZES: usize = 5;
/// Timed steps of a candidate in each round.
const STEPS: usize = 3;
/// How often all are run: the best counts, so that a busy moment of the machine does not decide.
const ROUNDS: usize = 2;

/// A micro-batch under a policy, and what became of it.
#[derive(Clone, Debug, Serialize)]
struct Candidate {
    micro_batch: usize,
    policy: String,
    arena_bytes: u64,
    fits: bool,
    /// Tokens per second, where this machine has a profile.
    predicted: Option<f64>,
    /// Tokens per second.
    measured: Option<f64>,
    /// Why it could not be measured.
    failed: Option<String>,
}

/// Runs the candidates and prints both columns.
pub(super) fn show(
    args: &ConfigArgs,
    devices: &Devices,
    config: &Config,
    room: Option<&Room>,
    format: Format,
) -> Result<()> {
    let ranks = config.round() / config.train.micro_batch;
    let each = config.train.global_batch / ranks;
    let sizes: Vec<usize> = (0..MOST_SIZES).map(|i| 1 << i).filter(|size| each.is_multiple_of(*size)).collect();
    // All take the same batch: as little as the largest needs.
    let batch = ranks * sizes.last().copied().unwrap_or(1);
    let mut candidates = Vec::new();
    for policy in [RecomputePolicy::None, RecomputePolicy::Selective, RecomputePolicy::Full] {
        for &micro_batch in &sizes {
            let mut tried = with_micro_batch(config, micro_batch);
            (tried.train.global_batch, tried.recompute.policy) = (batch, policy);
            tried.train.batch_ramp.clear();
            let planned = plan(devices, &tried)?;
            let fits = room.is_none_or(|room| room.verdict(&planned.stages, planned.layout.mesh.ranks()).fits);
            let predicted = lockstep_host::predict(devices, &planned)?.map(|p| p.forecast.tokens_per_s);
            let (arena_bytes, policy) = (planned.memory.total_bytes, policy.to_string());
            let failed = (!fits).then(|| "does not fit".to_owned());
            candidates.push(Candidate { micro_batch, policy, arena_bytes, fits, predicted, measured: None, failed });
        }
    }
    let mut progress = Progress::new(0);
    let total = (ROUNDS * candidates.len()) as u64;
    for round in 0..ROUNDS {
        for (i, candidate) in candidates.iter_mut().enumerate() {
            progress.work("candidates run", (round * (total as usize / ROUNDS) + i) as u64, total, |n| n.to_string());
            if candidate.failed.is_some() {
                continue;
            }
            match run(args, candidate, batch) {
                Ok(speed) => candidate.measured = Some(candidate.measured.map_or(speed, |known| known.max(speed))),
                Err(why) => candidate.failed = Some(why),
            }
        }
    }
    progress.clear();
    let (best, foreseen) = (fastest(&candidates, |c| c.measured), fastest(&candidates, |c| c.predicted));
    let value = || {
        json!({
            "global_batch": batch, "seq": config.train.seq, "candidates": candidates,
            "best": best, "predicted_best": foreseen,
            "predicted_best_loses": behind(&candidates, best, foreseen),
        })
    };
    format.print(value, || as_text(&candidates, config, batch, best, foreseen))?;
    match best {
        Some(_) => Ok(()),
        None => Err(Failure::run("no candidate could be measured", "the last column says why of each")),
    }
}

/// Tokens per second of a candidate, or one line that says why not.
fn run(args: &ConfigArgs, candidate: &Candidate, batch: usize) -> Result<f64, String> {
    let binary = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new(binary);
    command.args(["bench", "train"]).arg(&args.config).args(["--format", "json", "--steps", &STEPS.to_string()]);
    args.set.iter().for_each(|set| {
        command.args(["--set", set]);
    });
    for set in [
        format!("train.global_batch={batch}"),
        format!("train.micro_batch={}", candidate.micro_batch),
        format!("recompute.policy={}", candidate.policy),
        "train.batch_ramp=[]".to_owned(),
    ] {
        command.args(["--set", &set]);
    }
    let output = command.stdin(Stdio::null()).output().map_err(|e| e.to_string())?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let first = said.lines().find_map(|line| line.strip_prefix("error: ")).map(str::to_owned);
        return Err(first.unwrap_or_else(|| format!("ended with {}", output.status)));
    }
    let value: Value = serde_json::from_slice(&output.stdout).map_err(|e| e.to_string())?;
    value["tokens_per_s"].as_f64().ok_or_else(|| "told no speed".to_owned())
}

/// The fastest that fits, by its index.
fn fastest(candidates: &[Candidate], by: fn(&Candidate) -> Option<f64>) -> Option<usize> {
    let all = candidates.iter().enumerate().filter(|(_, c)| c.fits).filter_map(|(i, c)| Some((i, by(c)?)));
    all.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0))).map(|(i, _)| i)
}

/// How much slower than the measured best the predicted best was measured to be.
fn behind(candidates: &[Candidate], best: Option<usize>, foreseen: Option<usize>) -> Option<f64> {
    let measured = |i: Option<usize>| candidates.get(i?)?.measured;
    Some(1.0 - measured(foreseen)? / measured(best)?)
}

fn as_text(
    candidates: &[Candidate],
    config: &Config,
    batch: usize,
    best: Option<usize>,
    foreseen: Option<usize>,
) -> String {
    let speed = |x: Option<f64>| x.map_or("-".to_owned(), |x| thousands(x as u64));
    let row = |(i, c): (usize, &Candidate)| {
        let off =
            c.predicted.zip(c.measured).map_or("-".to_owned(), |(p, m)| format!("{:+.1}%", 100.0 * (p / m - 1.0)));
        let mut note = c.failed.clone().unwrap_or_default();
        if Some(i) == best {
            note = "measured best".into();
        }
        if Some(i) == foreseen {
            note = if note.is_empty() { "predicted best".into() } else { format!("{note}, predicted best") };
        }
        vec![
            c.policy.clone(),
            thousands(c.micro_batch as u64),
            units::bytes(c.arena_bytes),
            speed(c.predicted),
            speed(c.measured),
            off,
            note,
        ]
    };
    let rows: Vec<_> = candidates.iter().enumerate().map(row).collect();
    let header = ["recompute.policy", "micro-batch", "arena", "predicted", "measured", "~error", ""];
    let mut text = wrapped(
        &format!(
            "steps of {} sequences × {} tokens on this machine, in tokens/s: the best of {ROUNDS} rounds of {STEPS} steps",
            thousands(batch as u64),
            thousands(config.train.seq as u64)
        ),
        "  ",
    );
    text.push_str(&table(&header, &rows));
    if let Some(best) = best.and_then(|i| candidates.get(i)) {
        let keys = format!("train.micro_batch = {}, recompute.policy = \"{}\"", best.micro_batch, best.policy);
        text.push_str(&wrapped(&format!("measured best: {keys}"), "  "));
    }
    match (behind(candidates, best, foreseen), foreseen.and_then(|i| candidates.get(i))) {
        (Some(share), _) if share <= 0.0 => text.push_str("it is the predicted best\n"),
        (Some(share), Some(c)) => {
            let line = format!(
                "the predicted best (micro-batch {}, {}) was measured {:.1}% slower than it",
                c.micro_batch,
                c.policy,
                100.0 * share
            );
            text.push_str(&wrapped(&line, "  "));
        }
        _ => text
            .push_str(&wrapped("nothing was predicted: measure this machine first, lockstep bench --save NAME", "  ")),
    }
    text
}
