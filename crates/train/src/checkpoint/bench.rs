//! What a checkpoint costs: how long steps wait for one in the background, beside a copy of as many bytes and beside one that they
//! wait for.

use super::background::{SaveEnd, SaveRequest};
use crate::schedule::step_scalars;
use crate::{Result, Session};
use lockstep_checkpoint::Keep;
use lockstep_config::Config;
use lockstep_exec::copy;
use lockstep_host::Devices;
use lockstep_plan::plan;
use lockstep_rundir::RunDirError;
use serde::Serialize;
use serde_json::json;
use std::path::Path;
use std::time::Instant;

/// What was measured, each the best of all rounds.
#[derive(Clone, Debug, Serialize)]
pub struct CheckpointBench {
    /// Bytes of parameters and optimizer state.
    pub bytes: u64,
    /// Bytes of host memory that the snapshot takes.
    pub snapshot_bytes: u64,
    /// Ranks, as threads.
    pub ranks: usize,
    /// Seconds of a copy of as many bytes in memory.
    pub copy_s: f64,
    /// Seconds that steps wait for a checkpoint in the background.
    pub stall_s: f64,
    /// `stall_s` over `copy_s`.
    pub stall_over_copy: f64,
    /// Seconds until such a checkpoint is on the disk.
    pub background_s: f64,
    /// Seconds that steps wait for a checkpoint that is not written in the background.
    pub synchronous_s: f64,
    /// Seconds of a step beside which nothing is written.
    pub step_s: f64,
    /// Seconds of the step after the snapshot, while it is written.
    pub step_while_saving_s: f64,
}

/// Saves the state of a config again and again in a folder `dir`, which is made for it.
pub fn bench_checkpoint(
    devices: &Devices,
    config: &Config,
    dir: &Path,
    rounds: usize,
    show: &mut dyn FnMut(&str),
) -> Result<CheckpointBench> {
    let plan = plan(devices, config)?;
    let mut session = Session::new(devices, config, &plan)?;
    let bytes = plan.checkpoint_bytes();
    let mut result = CheckpointBench {
        bytes,
        snapshot_bytes: session.reserve_snapshot()?,
        ranks: plan.layout.mesh.ranks(),
        copy_s: f64::INFINITY,
        stall_s: f64::INFINITY,
        stall_over_copy: 0.0,
        background_s: f64::INFINITY,
        synchronous_s: f64::INFINITY,
        step_s: f64::INFINITY,
        step_while_saving_s: f64::INFINITY,
    };
    let (from, mut to) = (vec![1u8; bytes as usize], vec![2u8; bytes as usize]);
    let least = |of: &mut f64, since: Instant| *of = of.min(since.elapsed().as_secs_f64());
    let scalars = step_scalars(config, 0, 0, plan.tokens_per_step);
    session.run_step(scalars)?;
    for round in 0..rounds as u64 {
        show(&format!("round {} of {rounds}", round + 1));
        let begun = Instant::now();
        session.run_step(scalars)?;
        least(&mut result.step_s, begun);
        let begun = Instant::now();
        copy(&mut to, &from);
        least(&mut result.copy_s, begun);
        let request = |step| {
            let (dir, keep) = (dir.to_owned(), Keep::from(1));
            SaveRequest { dir, step, state: json!({}), attachments: vec![], keep, mirror: None }
        };
        let begun = Instant::now();
        session.begin_save(request(2 * round))?;
        least(&mut result.stall_s, begun);
        let begun = Instant::now();
        session.run_step(scalars)?;
        least(&mut result.step_while_saving_s, begun);
        match session.wait_save(&mut |_, _| {})? {
            Some(SaveEnd::Saved { save_s, .. }) => result.background_s = result.background_s.min(save_s),
            end => Err(RunDirError::io("write", dir, std::io::Error::other(format!("{end:?}"))))?,
        }
        let begun = Instant::now();
        session.save(dir, 2 * round + 1, &json!({}), 1, &mut |_, _| {})?;
        least(&mut result.synchronous_s, begun);
    }
    result.stall_over_copy = result.stall_s / result.copy_s;
    Ok(result)
}
