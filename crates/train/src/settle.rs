//! The keys of a config that are found out when a run begins.

use crate::automatic::{hardware, with_layout};
use crate::{Result, TrainError};
use lockstep_config::{Config, OffloadSize, legal};
use lockstep_host::Devices;
use lockstep_ir::units;
use lockstep_plan::{Rates, Target, with_fitting_micro_batch, with_fitting_offload, with_micro_batch};
use std::path::Path;

/// The config that a run in `dir` has: with the layout and the default micro-batch that it began with, or for a new run with those that
/// are found now. `planning` hears how many small and how many whole programs a search for the layout has compiled.
pub fn settled(
    devices: &Devices,
    config: &Config,
    dir: Option<&Path>,
    planning: &mut dyn FnMut(u64, u64),
) -> Result<Config> {
    let config = &with_layout(devices, config, dir, planning)?;
    with_offload(devices, with_micro_batch_found(devices, config, dir)?)
}

/// The config with the offload that fits at the least cost, where it is to be found.
fn with_offload(devices: &Devices, config: Config) -> Result<Config> {
    let [state, saved] = [config.offload.optimizer, config.offload.activations].map(|size| size == OffloadSize::Auto);
    if !state && !saved {
        return Ok(config);
    }
    // What fits is the first process's to find out: others may have other memory.
    let (bytes, how) = devices.group().told::<_, TrainError>("settle", || {
        let Some(room) = devices.room(&config) else { return Ok(([0, 0], "the memory is not known".to_owned())) };
        let ranks = config.layout().mesh.ranks();
        let hardware = hardware(devices, Target::of(devices, &config), ranks)?;
        let found = with_fitting_offload(devices, config.clone(), &room, Some(Rates::Catalogue(&hardware)))?;
        let bytes = [found.offload.optimizer, found.offload.activations].map(OffloadSize::most_bytes);
        Ok((bytes, format!("what fits {} {} at the least cost", units::bytes(room.bytes), room.place)))
    })?;
    let config = if state { config.with_optimizer_offload(bytes[0], &how) } else { config };
    Ok(if saved { config.with_activation_offload(bytes[1], &how) } else { config })
}

fn with_micro_batch_found(devices: &Devices, config: &Config, dir: Option<&Path>) -> Result<Config> {
    if !config.micro_batch_is_default() {
        return Ok(config.clone());
    }
    // What fits is the first process's to find out: others may have other memory.
    let (sequences, how) = devices.group().told::<_, TrainError>("settle", || {
        let found = settled_here(devices, config, dir)?;
        Ok((found.train.micro_batch, found.micro_batch_found().map(str::to_owned)))
    })?;
    Ok(how.map_or_else(|| config.clone(), |how| config.with_default_micro_batch(sequences, &how)))
}

fn settled_here(devices: &Devices, config: &Config, dir: Option<&Path>) -> Result<Config> {
    let begun = dir.map(|dir| dir.join("run.toml")).filter(|path| path.is_file());
    if let Some(before) = begun.and_then(|path| Config::load(&path, &[]).ok()) {
        let sequences = before.train.micro_batch;
        if sequences == config.train.micro_batch {
            return Ok(config.clone());
        }
        // Another layout may have to divide the batch in another way.
        if legal::check(&config.layout(), &with_micro_batch(config, sequences).extents()).is_empty() {
            return Ok(config.with_default_micro_batch(sequences, "as the run began"));
        }
    }
    match devices.room(config) {
        Some(room) => Ok(with_fitting_micro_batch(devices, config, &room)?),
        None => Ok(config.clone()),
    }
}
