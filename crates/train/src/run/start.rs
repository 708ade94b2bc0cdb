//! What comes before the first step: the checkpoint to go on from, data, weights, the executor.

use super::checkpoint::{self, Checkpoints};
use super::evaluate::Evaluations;
use super::input::RunInput;
use super::status::RunStatus;
use super::{Outcome, Pace, Profiling, Run, RunOptions};
use crate::cross_check::copies_of;
use crate::elastic::ElasticRun;
use crate::energy::{ENERGY_KWH, RunEnergy};
use crate::event::{Event, Show};
use crate::fp8::nothing_in_fp8;
use crate::session::Session;
use crate::slow_rank::SlowRanks;
use crate::{Result, TrainError, learning_rate, settled, spikes};
use lockstep_checkpoint::{LatestCheckpoint, Loaded, latest_of, list, open, open_found_by_another};
use lockstep_config::Config;
use lockstep_cuda::Gpu;
use lockstep_data::Sampler;
use lockstep_exec::Note;
use lockstep_exec::comm::processes::host;
use lockstep_host::{Devices, Peak, Prediction, ProcessGroup, Processes, StopSignal, predict};
use lockstep_infer::feed::Sequences;
use lockstep_infer::{InferError, InitialWeights, export_problem, way};
use lockstep_ir::blocks::document_blocks;
use lockstep_ir::{ContextParallel, MeshAxis, units};
use lockstep_plan::Plan;
use lockstep_rundir::{ResumePlan, RunDir, RunStart, StartCircumstances, largest_recorded, resume_plan};
use lockstep_telemetry::SinkNews;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

/// The checkpoint that a run goes on from, if there is one, and the config that it goes on with. Writes nothing.
pub(crate) fn resume(
    devices: &Devices,
    config: &Config,
    options: &RunOptions,
    in_memory: Option<Loaded>,
) -> Result<(LatestCheckpoint, ResumePlan)> {
    let places = checkpoint::folders(checkpoint::places(config, &options.dir));
    let found = match options.resume_from {
        // It was found to be newer than what is on the disk.
        _ if in_memory.is_some() => LatestCheckpoint { loaded: in_memory, warnings: Vec::new() },
        _ if options.fresh => LatestCheckpoint { loaded: None, warnings: Vec::new() },
        None => found_by_first(devices.group(), &places, || Ok(latest_of(&places)?))?,
        Some(step) => found_by_first(devices.group(), &places, || {
            let mut there = list(&places[0])?;
            if let Some(mirror) = places.get(1) {
                let known = there.clone();
                let more = list(mirror)?.into_iter().filter(|(saved, _)| !known.iter().any(|(step, _)| step == saved));
                there.extend(more);
                there.sort();
            }
            let Some((_, path)) = there.iter().find(|(saved, _)| *saved == step) else {
                let there = there.iter().map(|(saved, _)| *saved).collect();
                return Err(TrainError::NoSuchStep { dir: options.dir.clone(), step, there });
            };
            Ok(LatestCheckpoint { loaded: Some(open(path)?), warnings: Vec::new() })
        })?,
    };
    if let Some(loaded) = &found.loaded
        && !loaded.state["imported"].is_null()
    {
        return Err(TrainError::Imported { dir: options.dir.clone() });
    }
    let mut course =
        resume_plan(config, &options.dir, found.loaded.as_ref(), options.resume_from.is_some(), &options.change)?;
    if !course.changes.is_empty() {
        // What is found out about a config is not part of what it was read from.
        course.config = settled(devices, &course.config, Some(&options.dir), &mut |_, _| {})?;
    }
    Ok((found, course))
}

/// The checkpoint that the first process finds, opened by all: a network file system may show it to others later.
pub(super) fn found_by_first(
    group: ProcessGroup<'_>,
    places: &[PathBuf],
    find: impl FnOnce() -> Result<LatestCheckpoint>,
) -> Result<LatestCheckpoint> {
    let mut found = LatestCheckpoint { loaded: None, warnings: Vec::new() };
    // Its name in one of the places: processes may have other paths to these.
    let name = |loaded: &Loaded| {
        let place = places.iter().position(|place| loaded.path.parent() == Some(place))?;
        Some((place, loaded.path.file_name()?.to_str()?.to_owned()))
    };
    let told = group.told::<Option<(usize, String)>, TrainError>("find a checkpoint", || {
        found = find()?;
        Ok(found.loaded.as_ref().and_then(name))
    })?;
    if let Some((place, name)) = told.filter(|_| !group.is_first()) {
        found.loaded = Some(open_found_by_another(&places[place].join(name))?);
    }
    Ok(found)
}

/// Everything before the first step, in stages that each give what the next needs.
pub(super) fn start<'a>(
    course: &'a ResumePlan,
    (plan, devices): (&'a Plan, &'a Devices),
    mut dir: RunDir,
    found: LatestCheckpoint,
    (options, elastic): (&RunOptions, Option<&'a ElasticRun<'a>>),
    stop: &StopSignal<'_>,
    show: Show,
) -> Result<Run<'a>> {
    let (config, group) = (&course.config, devices.group());
    announce(course, (plan, devices), &found, options, show);
    let initial = initial_weights(config, &found, show)?;
    // Those that adapters stand beside, which checkpoints do not hold.
    let base = found.loaded.as_ref().map_or(Ok(None), |loaded| InitialWeights::beside(config, loaded))?;
    let input = RunInput::open(config, group, dir.path(), (&found, initial.as_ref()), stop, show)?;
    let loaded = found.loaded.as_ref();
    let mut program = LoadedProgram::load(config, (plan, loaded.is_some()), devices, &input.train, show)?;
    if let Some(loaded) = loaded {
        if loaded.state["data"] != json!(format!("{:016x}", input.data.fingerprint())) {
            return Err(InferError::DataChanged { dir: input.folder }.into());
        }
        if let Some(base) = &base {
            program.session.start_from(base.source())?;
        }
        let converted = program.session.restore(loaded)?;
        elastic.map_or(Ok(()), ElasticRun::require_read)?;
        converted.iter().for_each(|kind| show(Event::Converted(kind)));
    }
    let step = loaded.map_or(0, |loaded| loaded.step);
    let roll_backs = spikes::read(dir.path(), loaded.map(|l| &l.state), step)?;
    let status = RunStatus::of(loaded, config, roll_backs);
    if loaded.is_none() {
        program.session.begin_from(config, initial.as_ref())?;
    }
    if let Some(weights) = &initial {
        show(Event::Initialised { from: weights.path() });
        if config.is_inherited("precision.policy") {
            show(Event::PrecisionInherited(config.precision.policy.word()));
        }
    }
    let frozen = base.as_ref().or(initial.as_ref()).filter(|_| config.lora.rank.is_some());
    let beside_adapters = frozen.map(InitialWeights::fingerprint).transpose()?;
    let read_ahead = program.session.read_ahead(&input.train, config.batches().at(step).first_sample)?;
    let places = checkpoint::places(config, &options.dir);
    if group.is_first() && step < config.train.steps {
        checkpoint::look_at_disk(&places, plan.checkpoint_bytes(), config, show)?;
    }
    // Copies in a bucket take their time.
    group.told::<_, TrainError>("set the mirror aside", || match places.get(1) {
        Some(mirror) => Ok(checkpoint::set_mirror_aside(mirror, options)?),
        None => Ok(()),
    })?;
    // Before metrics are cut back: what was done in vain took energy too.
    let energy_before = largest_recorded(dir.path(), ENERGY_KWH).filter(|_| group.is_first());
    let begin = RecordedStart { course, plan, devices, options, step, status: &status, input: &input };
    let prediction = begin.write(&mut dir, show)?;
    let (peak, snapshot) = (&program.peak, program.snapshot_bytes);
    show(Event::Started {
        plan,
        peak,
        processes: group.0.map(Processes::summary),
        arena_bytes: program.session.arena_bytes(),
        snapshot_bytes: snapshot,
        context_bytes: devices.device(plan.target)?.gpu().and_then(Gpu::context_bytes),
        train_tokens: input.data.train_tokens(),
        steps: config.train.steps,
        from_step: step,
        dir: dir.path(),
    });
    let begun = json!({
        "step": step,
        "device": plan.device,
        "peak_flops": peak.flops_per_s,
        "peak": peak.name,
        "peak_of": peak.of,
        // The name that it had before.
        "ceiling_flops": peak.flops_per_s,
        "init_from": initial.as_ref().map(|weights| weights.path()),
        // Of the most loaded rank over the mean, where documents are kept apart.
        "context_imbalance": program.context_imbalance,
        // Of all ranks, in host memory; null where checkpoints are written while steps wait.
        "snapshot_bytes": snapshot,
        // Before this start; null where nothing was known of it.
        ENERGY_KWH: energy_before,
        // Of this process, in host memory: samples of the next step.
        "read_ahead_bytes": read_ahead,
    });
    dir.event("start", begun)?;

    let from_memory = found.loaded.as_ref().is_some_and(Loaded::is_in_memory);
    if let Some(change) = elastic.and_then(|elastic| elastic.take_change(step, from_memory)) {
        dir.event("world", json!(change))?;
        show(Event::WorldChanged(&change));
    }
    let keeper = match (elastic, group.0) {
        (Some(elastic), Some(_)) => {
            let world = program.session.world();
            let keeper = elastic.memory.keeper(&elastic.comm, elastic.epoch(), (world, program.session.tensors()))?;
            Some((elastic, keeper))
        }
        _ => None,
    };
    let most = config.train.validation_sequences as u64;
    let samples = match most {
        0 => None,
        _ => input.data.validation_samples(config.train.seq, &mut |text| show(Event::Warning(text))),
    };
    let samples = samples.map(|(samples, _)| {
        let count = samples.samples_before_repeat().min(most);
        (samples, count)
    });
    let outcome = Outcome {
        step,
        finished: step >= config.train.steps,
        steps: config.train.steps,
        // What is in memory is no path; the last that is on the disk is one.
        checkpoint: match found.loaded.filter(|loaded| !loaded.is_in_memory()) {
            Some(loaded) => Some(loaded.path),
            None if from_memory => list(&places[0]).unwrap_or_default().pop().map(|(_, path)| path),
            None => None,
        },
        ..Outcome::default()
    };
    let mesh = plan.layout.mesh;
    let stages = (0..mesh.ranks()).map(|rank| mesh.coordinates(rank).get(MeshAxis::Pp)).collect();
    Ok(Run {
        devices,
        config,
        plan,
        batches: config.batches(),
        status,
        pace: Pace { last_result: None, peak: program.peak, beyond_peak: 0, slow_ranks: SlowRanks::new(stages) },
        energy: RunEnergy::new(devices.energy_meter(plan.target)?, energy_before.unwrap_or(0.0)),
        session: program.session,
        dir,
        train: input.train,
        evaluations: Evaluations { samples, tasks: input.tasks, requests: input.requests },
        checkpoints: Checkpoints {
            places,
            again: false,
            last: Instant::now(),
            timed: None,
            validated: None,
            data: input.data.fingerprint(),
            prepared: config.prepared_dir().and_then(|folder| way(&options.dir, &folder)),
            kept: input.kept.to_json(),
            base: beside_adapters,
        },
        tokenizer: input.tokenizer,
        sample_tokens: options.sample_tokens,
        outcome,
        profiling: Profiling {
            asked: options.profile_steps.clone(),
            taken: Vec::new(),
            // Not the first, which touches new memory, nor the second, which captures a CUDA graph.
            observed: prediction.filter(|_| group.0.is_none()).map(|_| step + 3),
        },
        debug_nans: options.debug_nans,
        elastic: keeper,
        is_saved: !from_memory,
        warned_of_prompts: false,
    })
}

/// Says what is known before anything is opened.
fn announce(
    course: &ResumePlan,
    (plan, devices): (&Plan, &Devices),
    found: &LatestCheckpoint,
    options: &RunOptions,
    show: Show,
) {
    found.warnings.iter().for_each(|w| show(Event::Warning(w)));
    if let Some(why) = devices.not_taken(&course.config) {
        show(Event::Warning(&why));
    }
    course.warnings.iter().for_each(|w| show(Event::Warning(w)));
    if course.config.cluster.cross_check > 0 && copies_of(&plan.layout.mesh) == 1 {
        let text =
            "cluster.cross_check compares no losses: there is one copy of the model, and nobody else has its weights";
        show(Event::Warning(text));
    }
    if let Some(text) = nothing_in_fp8(&course.config, plan) {
        show(Event::Warning(&text));
    }
    course.overruled.iter().for_each(|overruled| show(Event::Overruled(overruled)));
    for change in &course.undone {
        show(Event::Undone { change, goes_back: options.resume_from == Some(change.step) });
    }
}

/// The weights that a new run begins with, where the config names some. A run that goes on has weights of its own.
fn initial_weights(config: &Config, found: &LatestCheckpoint, show: Show) -> Result<Option<InitialWeights>> {
    if found.loaded.is_some() {
        return Ok(None);
    }
    let initial = InitialWeights::open(config)?;
    if let Some(weights) = &initial {
        weights.warnings.iter().for_each(|w| show(Event::Warning(w)));
    }
    if config.lora.rank.is_some() && initial.is_none() {
        let text = "the weights beside the adapters are random: train.init_from names none";
        show(Event::Warning(text));
    }
    // Before days of training, not after them.
    if let Some(why) = export_problem(config) {
        show(Event::Warning(&format!("what this run trains cannot be exported as a Hugging Face model: {why}")));
    }
    Ok(initial)
}

/// The executor with the run's program.
struct LoadedProgram {
    session: Session,
    /// What MFU is a share of.
    peak: Peak,
    /// Bytes of host memory, of all ranks, for snapshots of checkpoints; none where steps wait for them.
    snapshot_bytes: Option<u64>,
    /// How much more attention the most loaded context-parallel rank has than the mean, where documents make them unequal.
    context_imbalance: Option<f64>,
}

impl LoadedProgram {
    fn load(
        config: &Config,
        (plan, goes_on): (&Plan, bool),
        devices: &Devices,
        train: &Sampler,
        show: Show,
    ) -> Result<Self> {
        let group = devices.group();
        // The arena may leave no memory to measure in.
        let peak = group.told("measure", || devices.matmul_peak(plan))?;
        let snapshot = config.checkpoint.asynchronous && devices.room_for_snapshot(plan)?;
        let mut session = match goes_on {
            true => Session::to_restore(devices, config, plan)?,
            false => Session::new(devices, config, plan)?,
        };
        let planned = plan.checkpoint_bytes();
        if snapshot {
            let bytes = session.reserve_snapshot()?;
            // One program, many readers here too.
            let expected = group.0.map_or(planned, |processes| plan.snapshot_bytes(processes.rank()));
            assert_eq!(bytes, expected, "the snapshot is not what the plan says");
        } else if config.checkpoint.asynchronous {
            let bytes = units::bytes(planned);
            show(Event::Warning(&format!(
                "checkpoints are written while steps wait: there is no room in host memory for a snapshot of {bytes}"
            )));
        }
        session.notes().iter().for_each(|note| show(Event::Note(note)));
        let context_imbalance = context_imbalance(config, train);
        if let Some(share) = context_imbalance {
            let cp = config.parallel.cp;
            let text = format!(
                "document masks leave the most loaded of {cp} cp ranks {:.1}% more attention than the mean (blocks of the first {LOOKED_AT} sequences)",
                100.0 * share
            );
            show(Event::Note(&Note::Cost(text)));
        }
        Ok(Self { session, peak, snapshot_bytes: snapshot.then_some(planned), context_imbalance })
    }
}

/// What the run directory is told of a start.
struct RecordedStart<'a> {
    course: &'a ResumePlan,
    plan: &'a Plan,
    devices: &'a Devices,
    options: &'a RunOptions,
    step: u64,
    status: &'a RunStatus,
    input: &'a RunInput,
}

impl RecordedStart<'_> {
    /// Writes it, and says what changes. Gives what is predicted of a step.
    fn write(&self, dir: &mut RunDir, show: Show) -> Result<Option<Prediction>> {
        let Self { course, plan, devices, options, step, status, input } = *self;
        let (config, group) = (&course.config, devices.group());
        let (later, aside) = match options.resume_from {
            Some(step) => dir.set_later_aside(step)?,
            None => (Vec::new(), None),
        };
        let prediction = predict(devices, plan).unwrap_or_else(|error| {
            show(Event::Trouble { what: "no prediction: ", error: &error.into() });
            None
        });
        if let Some(Prediction { by, forecast, .. }) = &prediction {
            let (step, tokens) = (units::seconds(forecast.step_s), units::count(forecast.tokens_per_s as u64));
            show(Event::Note(&Note::Cost(format!("predicted: {step} a step, {tokens} tokens/s ({by})"))));
        }
        // From how the last call left the directory.
        let begun_by = RunStart::new(
            dir.path(),
            &options.started_by,
            StartCircumstances {
                step,
                taken_back: options.resume_from.is_some(),
                fresh: options.fresh,
                changed: &course.new,
                hosts: group.0.map_or_else(|| vec![host()], Processes::hosts),
                device: &plan.device,
                world: group.0.map(Processes::summary),
                data: input.data.fingerprint(),
                data_check: if input.read_in_full { "full" } else { "sampled" },
                program: plan.program().fingerprint(),
            },
        );
        let written = step - u64::from(status.pending.is_some());
        let summary = plan_summary(plan, prediction.as_ref());
        for (from, to) in dir.begin(&config.resolved_toml(), &course.changes, &summary, step, written)? {
            let which = if from == to { format!("step {from}") } else { format!("steps {from} to {to}") };
            show(Event::Warning(&format!("metrics.jsonl has lost the lines of {which}; events.jsonl says so")));
        }
        let roll_backs = &status.spikes.roll_backs;
        dir.roll_backs(!roll_backs.is_empty(), &spikes::written(roll_backs))?;
        dir.started(&begun_by, options.started_by.given.as_deref())?;
        let failed = dir.open_sinks(config, written);
        warn_of_sinks(dir, failed, step, show)?;
        if let Some(to) = &aside {
            show(Event::SetAside { step, later: &later, to });
            dir.event("set_aside", json!({ "step": step, "checkpoints": later, "folder": to }))?;
        }
        for changed in &course.new {
            show(Event::Changed { step, changed });
            let mut fields = json!(changed);
            fields["step"] = json!(step);
            dir.event("change", fields)?;
        }
        if let Some(before) = &course.before {
            let [before, now] = [before, config].map(|config| learning_rate(config, step));
            if before != now {
                show(Event::RateChanged { before, now });
            }
        }
        Ok(prediction)
    }
}

/// The contents of `plan.json`.
fn plan_summary(plan: &Plan, prediction: Option<&Prediction>) -> Value {
    json!({
        "lockstep": env!("CARGO_PKG_VERSION"),
        "program": format!("{:016x}", plan.program().fingerprint()),
        "device": plan.device,
        "layout": plan.layout.to_string(),
        "micro_batches": plan.layout.micro_batches,
        "parameters": plan.parameters,
        "tokens_per_step": plan.tokens_per_step,
        "model_flops_per_token": plan.model_flops_per_token(),
        "memory": plan.memory,
        "prediction": prediction,
    })
}

/// Says which sinks get nothing more, and why, and what others want to be known; the run needs none of them.
pub(super) fn warn_of_sinks(dir: &mut RunDir, news: Vec<SinkNews>, step: u64, show: Show) -> Result<()> {
    for news in news {
        match news {
            SinkNews::Failed { name, error } => {
                let path = dir.path().join(name);
                show(Event::Warning(&format!(
                    "{} is not written any more: {error}; the run goes on, and metrics.jsonl has everything",
                    path.display()
                )));
                dir.event("sink_failed", json!({ "step": step, "sink": name, "error": error.to_string() }))?;
            }
            SinkNews::Note(text) => show(Event::Warning(&text)),
        }
    }
    Ok(())
}

/// Sequences whose documents are looked at for how equal the work of context-parallel ranks is.
const LOOKED_AT: u64 = 64;

/// How much more attention the most loaded context-parallel rank has than the mean, as a share, where document masks make them unequal.
fn context_imbalance(config: &Config, data: &dyn Sequences) -> Option<f64> {
    let cp = config.parallel.cp;
    let by_positions = match config.parallel.context {
        ContextParallel::Ring | ContextParallel::Gather | ContextParallel::Latent => cp > 1,
        // Every rank has the same documents, and as many heads.
        ContextParallel::AllToAll => false,
    };
    if !by_positions || !config.data.document_mask {
        return None;
    }
    // Layers by their window.
    let mut windows: BTreeMap<Option<usize>, u64> = BTreeMap::new();
    for layer in 0..config.model.layers {
        *windows.entry(config.model.layer_parts(layer).window).or_default() += 1;
    }
    let mut starts = vec![0; config.train.seq];
    let mut sums = vec![0; cp];
    for index in 0..LOOKED_AT {
        let (stream, offset) = data.source(index);
        stream.document_starts(offset, &mut starts);
        for (window, layers) in &windows {
            let blocks = document_blocks(&starts, cp, *window);
            sums.iter_mut().zip(blocks).for_each(|(sum, blocks)| *sum += layers * blocks);
        }
    }
    let (most, all) = (sums.iter().max().copied()?, sums.iter().sum::<u64>());
    Some(most as f64 * cp as f64 / all as f64 - 1.0)
}
