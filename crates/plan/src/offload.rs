//! `offload.optimizer = "auto"` and `offload.activations = "auto"`: how much waits in the memory of the host.
//!
//! Optimizer state goes there only where a step does not fit, and then the least that lets it fit: its copies are never free. What backward reads may
//! be saved on the device, recomputed, or moved to the host and back, and the cheapest of the three depends on the others: copies cost nothing
//! while kernels run beside them, and what is moved need not be recomputed. So several amounts are compiled, each with what the recompute policy then
//! saves (under a budget the cheapest set that fits) and with the state that still has to go, and the one with the shortest predicted step is taken.

use crate::device::threads;
use crate::fit::{Estimate, Room};
use crate::parallel::in_parallel;
use crate::{Machine, PlanError, Rates, Result, Target};
use lockstep_config::{Config, OffloadSize, RecomputePolicy};
use lockstep_ir::units;
use std::sync::{Mutex, PoisonError};

/// Bytes of a GPU's memory that are left free: 0.13 GiB were in use beyond arena and context on an H200.
const LATE_BYTES: u64 = 1 << 29;

/// Offloaded bytes are multiples of this many: less than a matrix of a layer has.
const STEP: u64 = 1 << 20;

/// Amounts of activations that are tried, as parts of all that can move.
const PARTS: u64 = 8;

/// The config with what `"auto"` finds for optimizer state and activations, where that is asked for. Without rates the least that fits is taken.
pub fn with_fitting_offload(
    machine: &dyn Machine,
    config: Config,
    room: &Room,
    rates: Option<Rates<'_>>,
) -> Result<Config> {
    if config.offload.activations == OffloadSize::Auto {
        return shortest(machine, &config, room, rates);
    }
    match config.offload.optimizer {
        OffloadSize::Auto => Ok(with_least_state(machine, config, room)?.0),
        OffloadSize::All(_) | OffloadSize::Most(_) => Ok(config),
    }
}

/// The memory that programs may have: the search goes to the last byte, and libraries that load late and CUDA graphs need some.
fn most(machine: &dyn Machine, config: &Config, room: &Room) -> u64 {
    let late = if matches!(Target::of(machine, config), Target::Cuda { .. }) { LATE_BYTES } else { 0 };
    room.bytes.saturating_sub(late * if room.shared { config.layout().mesh.ranks() as u64 } else { 1 })
}

/// The config with the least optimizer state in the memory of the host with which it fits, where that is to be found, and what it needs.
fn with_least_state(machine: &dyn Machine, config: Config, room: &Room) -> Result<(Config, Estimate)> {
    if config.offload.optimizer != OffloadSize::Auto {
        let needs = Estimate::of(machine, &config)?;
        return Ok((config, needs));
    }
    let (bytes, needs) = least_state(machine, &config, room)?;
    let how = format!("the least that fits {} {}", units::bytes(room.bytes), room.place);
    Ok((config.with_optimizer_offload(bytes, &how), needs))
}

/// The least bytes of optimizer state of a rank, and what the config needs with them there. Where no amount fits, all of it.
fn least_state(machine: &dyn Machine, config: &Config, room: &Room) -> Result<(u64, Estimate)> {
    let ranks = config.layout().mesh.ranks();
    let most = most(machine, config, room);
    let needs = |bytes: u64| -> Result<(u64, Estimate)> {
        let found = Estimate::of(machine, &config.with_optimizer_offload(bytes, ""))?;
        Ok((room.needs(&found.stages, ranks), found))
    };
    let (needed, found) = needs(0)?;
    let mut over = needed.saturating_sub(most);
    if over == 0 {
        return Ok((0, found));
    }
    let (needed, found) = needs(u64::MAX)?;
    let all = found.stages.iter().map(|stage| stage.host_bytes - stage.host_activation_bytes).max().unwrap_or(0);
    if needed > most {
        return Ok((all, found));
    }
    // Each round compiles: steps are as much as is missing, and no fewer bytes than let a few dozen of them come to all.
    let (mut bytes, step) = (0, (all / 64).max(STEP));
    loop {
        let each = if room.shared { over.div_ceil(ranks as u64) } else { over };
        bytes = (bytes + each.max(step)).next_multiple_of(STEP);
        let (needed, found) = needs(bytes)?;
        over = needed.saturating_sub(most);
        if over == 0 || bytes >= all {
            return Ok((bytes, found));
        }
    }
}

/// One amount of activations.
struct Amount {
    config: Config,
    /// Whether it fits.
    fits: bool,
    /// Seconds of a step; without rates none.
    step: Option<f64>,
    /// Bytes in the memory of the host.
    moved: u64,
}

/// The amount of activations with which the predicted step is the shortest of those that fit. Where none fits, all that can move.
fn shortest(machine: &dyn Machine, config: &Config, room: &Room, rates: Option<Rates<'_>>) -> Result<Config> {
    let how = format!("the shortest predicted step in {} {}", units::bytes(room.bytes), room.place);
    let moving = |bytes: u64| config.with_activation_offload(bytes, &how);
    let (whole, found) = with_least_state(machine, moving(u64::MAX), room)?;
    let all = found.stages.iter().map(|stage| stage.host_activation_bytes).max().unwrap_or(0);
    let ranks = config.layout().mesh.ranks();
    let most = most(machine, config, room);
    let tried = |part: u64| -> Result<Amount> {
        let bytes = (all * part / PARTS).next_multiple_of(STEP);
        let (config, found) = with_least_state(machine, moving(bytes), room)?;
        let threads = threads(machine, &config, ranks);
        let step = rates.map(|rates| rates.step_s(&found.programs, ranks, threads)).transpose()?;
        let moved = found.stages.iter().map(|stage| stage.host_bytes).max().unwrap_or(0);
        Ok(Amount { fits: room.needs(&found.stages, ranks) <= most, config, step, moved })
    };
    // What fits with nothing moved has copies to lose by, and no recomputation to gain unless a budget asks for some.
    if config.recompute.policy != RecomputePolicy::Budget {
        let nothing = tried(0)?;
        if nothing.fits && nothing.moved == 0 {
            return Ok(nothing.config);
        }
    }
    // The last is all of it.
    let parts: Vec<Mutex<Option<Result<Amount>>>> = (0..=PARTS).map(|_| Mutex::default()).collect();
    let one = |i: usize| {
        *parts[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(tried(i as u64));
    };
    in_parallel(parts.len(), machine.cores().min(parts.len()), &one, &|_| {});
    let mut amounts = Vec::new();
    for part in parts {
        match part.into_inner().unwrap_or_else(PoisonError::into_inner) {
            // Less than this has to move under a budget.
            Some(Err(PlanError::OverBudget { .. })) | None => {}
            Some(found) => amounts.push(found?),
        }
    }
    let fitting = || amounts.iter().filter(|amount| amount.fits);
    let shortest = fitting().filter_map(|amount| amount.step).min_by(f64::total_cmp);
    // A tenth of a percent is no difference: fewer bytes are better then.
    let as_short = |amount: &&Amount| shortest.zip(amount.step).is_none_or(|(least, step)| step <= 1.001 * least);
    let best = fitting().filter(as_short).min_by_key(|amount| amount.moved);
    Ok(best.map_or(whole, |best| best.config.clone()))
}
