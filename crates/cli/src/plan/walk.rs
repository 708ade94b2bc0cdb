//! `--recipe`: the recipe of the lectures as text, step by step.

use crate::failure::Result;
use crate::progress::Progress;
use crate::table::{table, wrapped};
use crate::{Format, hardware};
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_ir::units::{self, thousands};
use lockstep_plan::published::Residuals;
use lockstep_plan::{Recipe, RecipeSize, Room, recipe};
use lockstep_sim::Hardware;
use serde_json::json;
use std::sync::{Mutex, PoisonError};

/// Walks the recipe and prints it.
pub(super) fn show(
    devices: &Devices,
    config: &Config,
    hardware: &Hardware,
    room: &Room,
    gpus: usize,
    tokens: Option<u64>,
    format: Format,
) -> Result<()> {
    let progress = Mutex::new(Progress::new(0));
    let walked = recipe(devices, config, gpus, hardware, room, &|done, total| {
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.work("micro-batches compiled", done as u64, total as u64, |n| n.to_string());
    });
    progress.lock().unwrap_or_else(PoisonError::into_inner).clear();
    let walked = walked?;
    let value = || {
        let mut value = json!(walked);
        value["gpu"] = json!(hardware.gpu.name);
        value["cluster"] = json!(hardware.cluster);
        value["unverified"] = json!(hardware.unverified());
        let interval = Residuals::builtin().of_lockstep(&hardware.gpu, gpus, crate::hardware::is_fp8(config));
        value["interval"] = crate::hardware::interval_json(interval.as_ref(), walked.sizes[walked.chosen].step_s);
        value["days"] = json!(tokens.map(|tokens| days(&walked, tokens)));
        value
    };
    format.print(value, || as_text(&walked, config, hardware, room, tokens))
}

/// The MFU that the recipe of a config comes to on this many GPUs, or as many as its layout has ranks.
pub(super) fn mfu(config: &Config, hardware: &Hardware, gpus: Option<u64>) -> Result<f64> {
    let gpus = gpus.map_or(config.layout().mesh.ranks(), |gpus| gpus as usize);
    let walked = recipe(&Devices::of(config), config, gpus, hardware, &Room::of(&hardware.gpu), &|_, _| {})?;
    Ok(walked.sizes[walked.chosen].mfu)
}

fn days(recipe: &Recipe, tokens: u64) -> f64 {
    let each = recipe.sizes.get(recipe.chosen).map_or(f64::NAN, |size| size.tokens_per_s_per_gpu);
    tokens as f64 / (each * recipe.gpus as f64) / 86_400.0
}

fn as_text(recipe: &Recipe, config: &Config, hardware: &Hardware, room: &Room, tokens: Option<u64>) -> String {
    let n = |x: usize| thousands(x as u64);
    let mut text = wrapped(&format!("{} × {}", n(recipe.gpus), hardware::label(hardware)), "  ");
    let step = |text: &mut String, number: usize, title: String| {
        text.push('\n');
        text.push_str(&wrapped(&format!("{number}. {title}"), "   "));
    };
    let batch = recipe.sequences * recipe.seq;
    step(
        &mut text,
        1,
        format!("the global batch: {} tokens = {} sequences of {}", n(batch), n(recipe.sequences), n(recipe.seq)),
    );
    let first = recipe.rungs.first().is_some_and(|rung| rung.fits);
    step(
        &mut text,
        2,
        match first {
            true => "does one sequence with full recomputation fit a GPU? yes: nothing needs to be sharded".to_owned(),
            false => format!(
                "does one sequence with full recomputation fit a GPU of {}? shard, in this order, until it does",
                units::bytes(room.bytes)
            ),
        },
    );
    for rung in &recipe.rungs {
        let fits = if rung.fits { "fits" } else { "does not fit" };
        text.push_str(&wrapped(&format!("   {}: {}, {fits}", rung.layout, units::bytes(rung.memory_bytes)), "     "));
        text.push_str(&wrapped(&format!("     {}", rung.why), "     "));
    }
    step(&mut text, 3, "the largest micro-batch by powers of two, and what each gives".into());
    let percent = |share: f64| format!("{:.1}%", 100.0 * share);
    let row = |(i, size): (usize, &RecipeSize)| {
        let mark = if i == recipe.chosen { "chosen" } else { "" };
        vec![
            size.policy.clone(),
            n(size.micro_batch),
            units::bytes(size.memory_bytes),
            if size.fits { "yes" } else { "NO" }.to_owned(),
            if size.fits { thousands(size.tokens_per_s_per_gpu as u64) } else { "-".into() },
            if size.fits { percent(size.mfu) } else { "-".into() },
            mark.to_owned(),
        ]
    };
    let header = ["recompute.policy", "micro-batch", "memory", "fits", "tokens/s per GPU", "MFU", ""];
    text.push_str(&table(&header, &recipe.sizes.iter().enumerate().map(row).collect::<Vec<_>>()));
    let Some(chosen) = recipe.sizes.get(recipe.chosen) else { return text };
    step(&mut text, 4, recompute(recipe, chosen));
    let split = recipe.gpus / recipe.data_parallel;
    step(
        &mut text,
        5,
        match split {
            1 => format!("data-parallel ranks: {}", units::counted(recipe.gpus, "GPU")),
            _ => format!("data-parallel ranks: {} GPUs / {} = {}", n(recipe.gpus), n(split), n(recipe.data_parallel)),
        },
    );
    step(
        &mut text,
        6,
        format!(
            "accumulation: {} = {} · {} · {} (sequences = micro-batch · data-parallel ranks · accumulation steps)",
            n(recipe.sequences),
            n(chosen.micro_batch),
            n(recipe.data_parallel),
            n(recipe.accumulation)
        ),
    );
    step(&mut text, 7, beyond(recipe, config));
    text.push_str("\nkeys to set\n");
    text.push_str(&wrapped(&format!("  {}", recipe.keys.join(", ")), "  "));
    let all = chosen.tokens_per_s_per_gpu * recipe.gpus as f64;
    let interval = Residuals::builtin().of_lockstep(&hardware.gpu, recipe.gpus, crate::hardware::is_fp8(config));
    let sure = interval.map_or(String::new(), |interval| format!(" {}", interval.as_text()));
    let speed = format!(
        "predicted: {}{sure} a step, {} tokens/s, MFU {}",
        crate::explain::exact(chosen.step_s),
        thousands(all as u64),
        percent(chosen.mfu)
    );
    text.push_str(&wrapped(&speed, "  "));
    if let Some(interval) = &interval {
        text.push_str(&wrapped(
            &crate::hardware::interval(interval, hardware, recipe.gpus as u64, crate::hardware::is_fp8(config)),
            "  ",
        ));
    }
    if let Some(tokens) = tokens {
        let days = days(recipe, tokens);
        let gpu_days = hardware::gpu_days(days * recipe.gpus as f64);
        text.push_str(&format!("{} tokens: {days:.1} days, {gpu_days} GPU-days\n", units::count(tokens)));
    }
    text + &crate::hardware::unverified(&hardware.unverified())
}

/// Recompute or not: the best of the chosen policy against the best of the others.
fn recompute(recipe: &Recipe, chosen: &RecipeSize) -> String {
    let mut best: Vec<&RecipeSize> = Vec::new();
    for size in recipe.sizes.iter().filter(|size| size.fits && size.policy != chosen.policy) {
        match best.iter_mut().find(|known| known.policy == size.policy) {
            Some(known) if known.tokens_per_s_per_gpu >= size.tokens_per_s_per_gpu => {}
            Some(known) => *known = size,
            None => best.push(size),
        }
    }
    let against = |size: &&RecipeSize| {
        let slower = 100.0 * (1.0 - size.tokens_per_s_per_gpu / chosen.tokens_per_s_per_gpu);
        format!("{} at micro-batch {}: {slower:.1}% slower", size.policy, size.micro_batch)
    };
    let others: Vec<String> = best.iter().map(against).collect();
    let none = recipe.sizes.iter().all(|size| size.policy != "none" || !size.fits);
    let why = if none { " (without recomputation not even one sequence fits)" } else { "" };
    let others = if others.is_empty() { "nothing else fits".to_owned() } else { others.join("; ") };
    format!("recompute or not: {} at micro-batch {}{why}; {others}", chosen.policy, chosen.micro_batch)
}

/// When tp, pp and cp would be needed.
fn beyond(recipe: &Recipe, config: &Config) -> String {
    let Some(last) = recipe.rungs.last() else { return String::new() };
    let used = |name: &str| last.layout.contains(name);
    match (used("tp="), used("pp="), used("cp=")) {
        (false, false, false) => format!(
            "tp, then pp, then cp: not needed here. tp when sharding over data-parallel ranks is not enough, or when there are more \
             GPUs than sequences ({}); pp when tp fills a node; cp when one sequence of {} tokens does not fit",
            thousands(config.train.global_batch as u64),
            thousands(config.train.seq as u64)
        ),
        (_, _, true) => "tp, then pp, then cp: all that could be split was not enough for the activations of one sequence".into(),
        (_, true, false) => "tp, then pp: a node of tensor-parallel ranks was not enough; cp is not needed".into(),
        (true, false, false) => {
            "tp: sharding over data-parallel ranks was not enough, or there are more GPUs than sequences; pp and cp are not needed".into()
        }
    }
}
