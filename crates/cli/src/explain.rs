//! `lockstep explain`: the program's memory breakdown, FLOPs and ops, without running it.

mod account;
pub(crate) mod compare;
mod cost;
pub(crate) mod forecast;
mod formats;
mod inference;
mod layout;
mod lengths;
mod memory;
mod phases;
mod schedule;

pub(crate) use forecast::exact;
pub(crate) use memory::memory;
pub(crate) use schedule::picture as pipeline_picture;

use crate::failure::{Failure, Result};
use crate::table::{beside, table, wrapped};
use crate::timeline::{TimelineFile, require_extension};
use crate::{ConfigArgs, Format, machine, style};
use formats::{fp8_text, moments_text};
use lockstep_compile::Effect;
use lockstep_config::{BatchStage, Config, RecomputePolicy};
use lockstep_host::{Devices, machine_profile};
use lockstep_ir::account::{OpCost, ops};
use lockstep_ir::units::{counted, thousands};
use lockstep_ir::{StepProgram, units};
use lockstep_plan::{Plan, PlanError, Rates, Verdict, WaysToFit, account, plan, planned_timeline, ways_to_fit};
use memory::{cache_text, checkpoint_bytes, checkpoint_text};
use serde_json::json;
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
