//! `lockstep explain`: the program's memory breakdown, FLOPs and ops, without running it.

mod account;
pub(crate) mod compare;
mod cost;
pub(crate) mod forecast;
mod inference;
mod layout;
mod lengths;
mod phases;
mod schedule;

pub(crate) use forecast::exact;
pub(crate) use schedule::picture as pipeline_picture;

use crate::failure::{Failure, Result};
use crate::host_memory::in_host;
use crate::table::{beside, table, wrapped};
use crate::timeline::{TimelineFile, require_extension};
use crate::{ConfigArgs, Format, machine, style};
use lockstep_compile::{Effect, Stays};
use lockstep_config::{BatchStage, Config, MomentPrecision, PrecisionPolicy, RecomputePolicy};
use lockstep_host::{Devices, machine_profile};
use lockstep_ir::account::{MemoryBreakdown, OpCost, ops};
use lockstep_ir::graph::{Phase, State};
use lockstep_ir::program::{Class, Role};
use lockstep_ir::units::{counted, thousands};
use lockstep_ir::{DType, Dim, StepProgram, ValueId, units};
use lockstep_plan::{Plan, PlanError, Rates, Verdict, WaysToFit, account, plan, planned_timeline, ways_to_fit};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Also print the graph after every pass, and the placed program.
    #[arg(long)]
    verbose: bool,
    #[command(flatten)]
    cost: cost::CostArgs,
    #[command(flatten)]
    compare: compare::CompareArgs,
    /// Also draw the memory of the first two steps into this file: .svg, or .json for a Chrome trace. Of several stages, each
    /// gets a file of its own (-stage0, -stage1 …). Time counts in instructions, or with --gpu in seconds at its peak rates.
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
    /// Also draw the pipeline schedule into this .svg: ranks as rows; F, B and W with the numbers of their micro-batches, idle time
    /// and sends. Time is predicted where a GPU or cluster is named or this machine has a profile, else FLOPs.
    #[arg(long, value_name = "FILE")]
    schedule: Option<PathBuf>,
    /// Instead, of the directory of a run: what was predicted before it began beside what its steps took, by class of ops.
    #[arg(long)]
    analyze: bool,
    /// Also write the predicted step into this .json: a Chrome trace of all stages, for Perfetto. Needs --gpu,
    /// --cluster, or a profile of this machine.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(args: Args) -> Result<()> {
    if args.analyze {
        return machine::show_analysis(&args.config.config, args.format);
    }
    let timeline = args.timeline.as_deref().map(TimelineFile::new).transpose()?;
    let schedule =
        args.schedule.as_deref().map(|path| require_extension("--schedule", path, "schedule.svg")).transpose()?;
    let trace = args.trace.as_deref().map(|path| require_extension("--trace", path, "trace.json")).transpose()?;
    let hardware = args.cost.hardware()?;
    let gpu = hardware.as_ref().map(|hardware| &hardware.gpu);
    let config = args.cost.load(&args.config)?;
    let devices = Devices::of(&config);
    let (config, room) = compare::placed(&devices, config, hardware.as_ref())?;
    if let Some(shown) = args.compare.instead(&devices, &config, gpu, room.as_ref())? {
        return shown.print(args.format);
    }
    let plan = plan(&devices, &config)?;
    let verdict = room.as_ref().map(|room| room.verdict(&plan.stages, plan.layout.mesh.ranks()));
    let ways = match (&verdict, &room) {
        (Some(verdict), Some(room)) if !verdict.fits => {
            let profile = if hardware.is_none() { machine_profile(&devices, &plan)? } else { None };
            let rates = match (&hardware, &profile) {
                (Some(hardware), _) => Some(Rates::Catalogue(hardware)),
                (None, Some(profile)) => Some(Rates::Measured(profile)),
                (None, None) => None,
            };
            Some(ways_to_fit(&devices, &config, room, rates)?)
        }
        _ => None,
    };
    let ops = step_ops(&plan)?;
    let predicted = match &hardware {
        Some(hardware) => Some(forecast::Predicted::new(&config, &plan, hardware)?),
        None => forecast::Predicted::here(&devices, &plan)?,
    };
    if trace.is_some() && predicted.is_none() {
        return Err(Failure::request(
            "--trace writes a predicted step",
            "add --gpu h100, say, or --cluster leonardo; or measure this machine: lockstep bench --save NAME",
        ));
    }
    let cost = args.cost.cost(&plan, predicted.as_ref())?;
    let account = account(&devices, &config, &plan)?;
    let mut phases = Vec::new();
    if let Some(file) = &timeline {
        let several = plan.compiled.programs.len() > 1;
        for program in &plan.compiled.programs {
            let (suffix, of) = match several {
                true => (format!("-stage{}", program.stage), format!(", stage {}", program.stage)),
                false => (String::new(), String::new()),
            };
            let drawn = planned_timeline(program, 2, gpu.map(|gpu| (gpu, plan.precision.multiplies())))?;
            let name = units::count(plan.parameters);
            file.write(&suffix, &format!("planned memory of two steps, {name} parameters{of}"), &drawn)?;
            phases.push(phases::StagePhases::new(program.stage, several, &drawn));
        }
    }
    if let Some(path) = &schedule {
        schedule::write(path, &plan, predicted.as_ref())?;
    }
    if let (Some(path), Some(predicted)) = (&trace, &predicted) {
        predicted.write_trace(path, &plan)?;
    }
    let mut out = std::io::stdout().lock();
    match args.format {
        Format::Json => {
            let mut value = as_json(&config, &plan, &ops, args.verbose);
            value["recompute"] = json!({ "policies": account.policies });
            value["projections"] = json!(account.projections);
            value["phases"] = json!(timeline.is_some().then_some(&phases));
            value["scaling"] = json!(account.scaling);
            value["formulas"] = json!(account.formulas);
            // The names that these had before.
            value["growth"] = value["scaling"].clone();
            value["closed_forms"] = value["formulas"].clone();
            value["cost"] = json!(cost.map(|c| c.as_json()));
            value["forecast"] = json!(predicted.as_ref().map(forecast::Predicted::as_json));
            value["fits"] = json!(verdict);
            value["ways_to_fit"] = json!(ways);
            writeln!(out, "{value:#}")?;
        }
        Format::Text => {
            write!(out, "{}", as_text(&config, &plan, &ops, verdict.as_ref(), ways.as_ref()))?;
            write!(out, "{}", account::as_text(&account))?;
            write!(out, "{}", predicted.as_ref().map_or(String::new(), |p| p.as_text(&plan)))?;
            write!(out, "{}", phases::as_text(&phases))?;
            write!(out, "{}", cost.map_or(String::new(), |c| c.as_text()))?;
            if args.verbose {
                write!(out, "{}", passes(&plan))?;
            }
        }
    }
    Ok(())
}

/// What explain prints of a plan.
pub fn account_text(devices: &Devices, config: &Config, plan: &Plan) -> Result<String> {
    let account = account(devices, config, plan)?;
    Ok(as_text(config, plan, &step_ops(plan)?, None, None) + &account::as_text(&account))
}

/// The ops of a training step, with their costs.
fn step_ops(plan: &Plan) -> Result<Vec<OpCost>, PlanError> {
    let program = plan.program();
    program.entry(StepProgram::TRAIN).map_or(Ok(Vec::new()), |entry| Ok(ops(program, entry)?))
}

fn as_json(config: &Config, plan: &Plan, ops: &[OpCost], verbose: bool) -> serde_json::Value {
    let per_token = |flops: u128| flops as f64 / plan.tokens_per_step as f64;
    let passes: Vec<_> = plan
        .compiled
        .stages
        .iter()
        .map(|s| {
            let bit_preserving = s.pass.effect == Effect::BitPreserving;
            let graph = verbose.then(|| s.graph.to_string());
            json!({ "name": s.pass.name, "changed": s.changed, "bit_preserving": bit_preserving, "graph": graph })
        })
        .collect();
    json!({
        "model": { "architecture": config.model.architecture, "parameters": plan.parameters, "active_parameters": plan.active_parameters, "trained_parameters": plan.trained_parameters },
        "step": {
            "tokens": plan.tokens_per_step,
            "seq": config.train.seq,
            "global_batch": config.batches().largest(),
            "batch_ramp": batch_ramp(config),
            "micro_batch": config.train.micro_batch,
            "accumulation_steps": config.accumulation_steps(),
        },
        "device": plan.device,
        "flops": {
            "model_per_token": per_token(plan.step_flops.model),
            "model_causal_per_token": per_token(plan.step_flops.causal),
            "hardware_per_token": per_token(plan.step_flops.hardware),
        },
        "layout": layout::as_json(plan),
        "memory": plan.memory,
        "checkpoint": checkpoint_bytes(config, plan),
        "ops": ops,
        "passes": passes,
        "program": verbose.then(|| plan.compiled.programs.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")),
    })
}

fn as_text(
    config: &Config,
    plan: &Plan,
    ops: &[OpCost],
    verdict: Option<&Verdict>,
    ways: Option<&WaysToFit>,
) -> String {
    let (model, train) = (&config.model, &config.train);
    let per_token = |flops: u128| units::flops(flops as f64 / plan.tokens_per_step as f64);
    let flops = plan.step_flops;
    let line = |name: &str, flops: u128, text: &str| beside(&format!("  {name:<10} {:<12} ", per_token(flops)), text);
    let several = plan.layout.mesh.ranks() > 1;
    let preset = |path: &str| config.preset_of(path).map_or(String::new(), |name| format!(" (preset {name})"));
    let (exact, rounded) = (thousands(plan.parameters), units::count(plan.parameters));
    let active = match plan.active_parameters == plan.parameters {
        true => String::new(),
        false => format!(", {} of them active for a token", units::count(plan.active_parameters)),
    };
    let trained = match plan.trained_parameters == plan.parameters {
        true => String::new(),
        false => format!(
            ", {} trained in adapters of rank {}",
            units::count(plan.trained_parameters),
            config.lora.rank.unwrap_or(0)
        ),
    };
    let layers = counted(model.layers, "layer");
    let (heads, kv_heads) = (counted(model.heads, "head"), counted(model.kv_heads, "kv head"));
    let [sequences, micro] = [config.batches().largest(), train.micro_batch].map(|n| counted(n, "sequence"));
    let (tokens, steps) = (thousands(plan.tokens_per_step), config.accumulation_steps());
    let plural = if steps == 1 { "" } else { "es" };
    let found = config.micro_batch_found().map_or(String::new(), |how| format!(" ({how})"));
    let policy = format!("{}{}", config.precision.policy, preset("precision.policy"));
    [
        wrapped(
            &format!(
                "{}: {exact} parameters ({rounded}{active}{trained}), {layers}, dim {}, {heads}, {kv_heads}",
                model.architecture, model.dim,
            ),
            "  ",
        ),
        wrapped(
            &format!(
                "step: {sequences} × {} tokens{} = {tokens} tokens, in {steps} micro-batch{plural} of {micro}{found}; {policy}; {}",
                train.seq,
                preset("train.seq"),
                plan.device,
            ),
            "  ",
        ),
        cache_text(config),
        fp8_text(plan),
        moments_text(config, plan),
        verdict.map_or(String::new(), |v| wrapped(&style::verdict(v.fits, &v.to_string()), "  ")),
        ways.map_or(String::new(), |ways| ways.to_string().lines().map(|line| wrapped(line, "    ")).collect()),
        format!("{}\n", ramp_text(config)),
        match plan.layout.mesh.ranks() {
            1 => memory(&plan.memory),
            _ => layout::as_text(plan),
        },
        checkpoint_text(config, plan),
        "\nFLOPs per token (matmuls)\n".to_owned(),
        line(
            "model",
            flops.model,
            &format!(
                "{} + {}",
                match (plan.trained_parameters == plan.parameters, plan.active_parameters == plan.parameters) {
                    (true, true) => "6 × matmul parameters",
                    (true, false) => "6 × active matmul parameters",
                    (false, _) => "4 × frozen and 6 × trained matmul parameters",
                },
                match model.latent() {
                    None => "12 × layers × seq × heads × head_dim",
                    Some(_) => "6 × layers × seq × heads × (head_dim + v_head_dim)",
                }
            ),
        ),
        line("causal", flops.causal, "the same without the masked half of attention"),
        line(
            "hardware",
            flops.hardware,
            match config.recompute.policy {
                RecomputePolicy::None => "the same: nothing is recomputed",
                _ => "with recomputation",
            },
        ),
        format!("\nops of one step{}\n{}", if several { ", on a rank of the first stage" } else { "" }, op_table(ops)),
    ]
    .concat()
}

/// Bytes of a token in the cache of generation, where attention is latent.
fn cache_text(config: &Config) -> String {
    let model = &config.model;
    let Some(latent) = model.latent() else { return String::new() };
    let element = match config.precision.policy {
        PrecisionPolicy::Fp32 | PrecisionPolicy::Tf32 => 4,
        PrecisionPolicy::Bf16 | PrecisionPolicy::Fp16 | PrecisionPolicy::Fp8 => 2,
    };
    let bytes = |numbers: usize| units::bytes((model.layers * numbers * element) as u64);
    wrapped(
        &format!(
            "KV cache in generation: {} per token, the latent and the shared key; K and V of {} would be {}",
            bytes(latent.kv_rank + latent.rope),
            counted(model.heads, "head"),
            bytes(model.heads * (model.head_dim + latent.value)),
        ),
        "  ",
    )
}

/// Which matmuls are in fp8, and why others are not.
fn fp8_text(plan: &Plan) -> String {
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
fn moments_text(config: &Config, plan: &Plan) -> String {
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

/// Bytes of a checkpoint, and of the host memory in which it waits to be written.
fn checkpoint_bytes(config: &Config, plan: &Plan) -> serde_json::Value {
    let bytes = plan.checkpoint_bytes();
    let elastic = config.cluster.elastic.is_some().then(|| plan.elastic_bytes());
    json!({ "bytes": bytes, "snapshot_bytes": config.checkpoint.asynchronous.then_some(bytes), "elastic_bytes": elastic })
}

fn checkpoint_text(config: &Config, plan: &Plan) -> String {
    let (bytes, ranks) = (plan.checkpoint_bytes(), plan.layout.mesh.ranks());
    let over = if ranks == 1 { String::new() } else { format!(" over {ranks} ranks") };
    let snapshot = match config.checkpoint.asynchronous {
        true => format!("host memory for a snapshot of it: as much{over}"),
        false => "steps wait while one is written".to_owned(),
    };
    let elastic = match config.cluster.elastic.is_some() {
        true => {
            format!(
                "; snapshots of the elastic run: {} of host memory{over}, two and their copies",
                units::bytes(plan.elastic_bytes())
            )
        }
        false => String::new(),
    };
    let text = format!(
        "checkpoint: {} ({} bytes) of parameters and optimizer state; {snapshot}{elastic}",
        units::bytes(bytes),
        thousands(bytes)
    );
    format!("\n{}", wrapped(&text, "  "))
}

/// The sizes of steps, in the order in which the run has them; none where all are alike.
fn batch_ramp(config: &Config) -> Vec<serde_json::Value> {
    let (batches, seq) = (config.batches(), config.train.seq as u64);
    if batches.stages().len() == 1 {
        return Vec::new();
    }
    let stage = |s: &BatchStage| {
        let tokens = s.sequences as u64 * seq;
        json!({ "first_step": s.first_step + 1, "from_tokens": s.first_sample * seq, "sequences": s.sequences, "tokens": tokens })
    };
    batches.stages().iter().map(stage).collect()
}

/// The same for people: a line for each size.
fn ramp_text(config: &Config) -> String {
    let (batches, seq) = (config.batches(), config.train.seq as u64);
    if batches.stages().len() == 1 {
        return String::new();
    }
    let row = |s: &BatchStage| {
        let reached = if s.first_step < config.train.steps { "" } else { " (after the last)" };
        vec![
            format!("{}{reached}", thousands(s.first_step + 1)),
            units::count(s.first_sample * seq),
            thousands(s.sequences as u64),
            units::count(s.sequences as u64 * seq),
        ]
    };
    let rows: Vec<Vec<String>> = batches.stages().iter().map(row).collect();
    let header = ["from step", "tokens seen", "sequences a step", "tokens a step"];
    format!("batch ramp, the step above being the largest:\n{}", table(&header, &rows))
}

/// A rank's memory breakdown, by class and by layer.
pub(crate) fn memory(breakdown: &MemoryBreakdown) -> String {
    let share = |bytes: u64| format!("{:.1}%", 100.0 * bytes as f64 / breakdown.total_bytes.max(1) as f64);
    let class_row = |c: &Class| {
        let bytes = breakdown.classes[c.name()];
        vec![c.name().to_owned(), units::bytes(bytes), share(bytes), thousands(bytes)]
    };
    let mut classes: Vec<Vec<String>> = Class::ALL.iter().map(class_row).collect();
    classes.push(vec![
        "total".into(),
        units::bytes(breakdown.total_bytes),
        share(breakdown.total_bytes),
        thousands(breakdown.total_bytes),
    ]);
    let names: Vec<&str> = Class::ALL.iter().map(|c| c.name()).filter(|n| *n != "communication").collect();
    let rows: Vec<Vec<String>> = grouped_layers(breakdown)
        .into_iter()
        .map(|(label, classes)| {
            let cells = names.iter().map(|n| units::bytes(classes.get(n).copied().unwrap_or(0)));
            [label].into_iter().chain(cells).collect()
        })
        .collect();
    let header: Vec<&str> = ["layer"].into_iter().chain(names.iter().copied()).collect();
    let p = &breakdown.peak;
    let layer = p.layer.map_or(String::new(), |l| format!(" of layer {l}"));
    let (live, segment, m) = (units::bytes(p.live_bytes), p.segment, p.micro_batch);
    let peak = wrapped(&format!("  peak: {live} live in {segment}, micro-batch {m}, at {}{layer}", p.op), "    ");
    let classes = table(&["class", "size", "share", "~bytes"], &classes);
    let by_layer = format!("memory by layer (temporary buffers are shared by all)\n{}", table(&header, &rows));
    let host = match breakdown.host_bytes {
        0 => String::new(),
        bytes => wrapped(
            &format!(
                "  host memory: {} ({} bytes) of {}",
                units::bytes(bytes),
                thousands(bytes),
                in_host(bytes, breakdown.host_activation_bytes)
            ),
            "    ",
        ),
    };
    format!("memory breakdown: one arena\n{classes}{host}\n{peak}\n{by_layer}")
}

/// Layers with equal breakdowns as one row: `0 to 15 (each)`.
fn grouped_layers(breakdown: &MemoryBreakdown) -> Vec<(String, std::collections::BTreeMap<&'static str, u64>)> {
    let mut rows: Vec<(Option<(usize, usize)>, _)> = Vec::new();
    for line in &breakdown.layers {
        match (rows.last_mut(), line.layer) {
            (Some((Some((_, last)), classes)), Some(layer)) if *classes == line.classes => *last = layer,
            _ => rows.push((line.layer.map(|l| (l, l)), line.classes.clone())),
        }
    }
    let label = |range: Option<(usize, usize)>| match range {
        None => "embedding, head, other".to_owned(),
        Some((a, b)) if a == b => a.to_string(),
        Some((a, b)) => format!("{a} to {b}, each"),
    };
    rows.into_iter().map(|(range, classes)| (label(range), classes)).collect()
}

fn op_table(ops: &[OpCost]) -> String {
    let row = |o: &OpCost| {
        let flops = if o.flops == 0.0 { "-".to_owned() } else { units::flops(o.flops) };
        vec![format!("{} {}", o.segment, o.op), o.calls.to_string(), flops, units::bytes(o.bytes)]
    };
    table(&["segment and op", "calls", "matmul FLOPs", "bytes moved"], &ops.iter().map(row).collect::<Vec<_>>())
}

fn passes(plan: &Plan) -> String {
    let mut text = format!("\n== forward graph ==\n{}", plan.forward);
    for stage in &plan.compiled.stages {
        let effect = match stage.pass.effect {
            Effect::BitPreserving => "bit-preserving",
            Effect::NumericsChanging => "numerics-changing",
        };
        text.push_str(&format!("\n== after {} ({effect}) ==\n", stage.pass.name));
        if stage.changed { text.push_str(&stage.graph.to_string()) } else { text.push_str("changed nothing\n") }
    }
    for program in &plan.compiled.programs {
        text.push_str(&format!("\n== program ==\n{program}"));
    }
    text
}
