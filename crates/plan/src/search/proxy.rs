//! What a layer, the embedding and the output head cost under a choice: read off a small program of five layers on four stages, which
//! takes a few milliseconds to compile. Stages of any number of layers are composed of it.

use super::LayoutChoice;
use crate::plan::{prepare, settle_policy};
use crate::{Result, SearchRequest};
use lockstep_compile::Estimator;
use lockstep_config::{Config, RecomputePolicy};
use lockstep_ir::Schedule;
use lockstep_ir::program::{Class, Lifetime, Saved, Segment, StepProgram};
use lockstep_sim::{Framework, Terms, Workload};

/// Layers of the stages of a small program: with the embedding, alone, twice as many, with the head.
const STAGES: [usize; 4] = [1, 1, 2, 1];

/// Classes of what is held throughout and grows with the parameters.
const STATE: [Class; 3] = [Class::Parameters, Class::Gradients, Class::Optimizer];

/// A figure of a stage as a function of its layers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Linear {
    /// Of every chunk of layers.
    pub base: f64,
    /// Of every layer.
    pub each: f64,
    /// Of the embedding.
    pub first: f64,
    /// Of the output head.
    pub last: f64,
    /// Of the embedding and the output head together, less than of each: where they are one table.
    pub shared: f64,
}

impl Linear {
    /// Through those of the stages of a small program. What a stage has less than one in the middle, such as what that receives, is
    /// negative.
    fn through([first, one, two, last]: [f64; 4]) -> Self {
        Self { base: 2.0 * one - two, each: two - one, first: first - one, last: last - one, shared: 0.0 }
    }

    /// The same where nothing is less than in the middle: times, of which some are too short to tell.
    fn rising([first, one, two, last]: [f64; 4]) -> Self {
        let each = (two - one).max(0.0);
        let (first, last) = ((first - one).max(0.0), (last - one).max(0.0));
        Self { base: (one - each).max(0.0), each, first, last, shared: 0.0 }
    }

    /// The same where embedding and output head are one table, which is all that the embedding has.
    fn tied(self, tied: bool) -> Self {
        Self { shared: if tied { self.first.min(self.last).max(0.0) } else { 0.0 }, ..self }
    }

    /// The same where embedding and output head send each other what one table needs, and nothing where they are on one stage.
    fn sent_if_tied(self, tied: bool) -> Self {
        Self { shared: if tied { self.first.max(0.0) + self.last.max(0.0) } else { 0.0 }, ..self }
    }

    pub fn scaled(&self, by: f64) -> Self {
        let Self { base, each, first, last, shared } = *self;
        Self { base: base * by, each: each * by, first: first * by, last: last * by, shared: shared * by }
    }

    pub fn plus(&self, other: &Self) -> Self {
        Self {
            base: self.base + other.base,
            each: self.each + other.each,
            first: self.first + other.first,
            last: self.last + other.last,
            shared: self.shared + other.shared,
        }
    }
}

/// Seconds and bytes of a rank under a choice.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LayerCosts {
    pub forward: Linear,
    /// Input and weight gradients.
    pub backward: Linear,
    /// Weight gradients alone, where the schedule separates them.
    pub weight_grad: Linear,
    /// What the last micro-batch's takes more.
    pub last: Linear,
    pub update: Linear,
    /// Bytes of the parameters that a rank has.
    pub parameters: Linear,
    pub gradients: Linear,
    pub optimizer: Linear,
    /// Bytes of a micro-batch's saved activations, by how long they are saved (see [`Saved::ALL`]).
    pub saved: [Linear; 3],
    /// Bytes that are held throughout besides: send buffers, scalars.
    pub held: Linear,
    /// Bytes of a micro-batch's inputs and losses.
    pub inputs: Linear,
    /// Bytes of temporaries, by stage of the small program.
    pub frames: [f64; 4],
    /// FLOPs of a layer, and of the last with the output head, by which stages are cut.
    pub flops: [f64; 2],
}

impl LayerCosts {
    /// The same kernels on this many times the tokens, at least: larger kernels are a little faster.
    pub fn on_tokens(&self, times: f64) -> Self {
        let by = if times > 1.0 { 0.97 * times } else { times };
        Self {
            forward: self.forward.scaled(by),
            backward: self.backward.scaled(by),
            saved: self.saved.map(|saved| saved.scaled(times)),
            ..*self
        }
    }
}

/// The small program of a choice, with its cost.
pub(super) fn layer_costs(
    request: &SearchRequest,
    choice: &LayoutChoice,
    terms: &Terms,
    framework: &Framework,
) -> Result<LayerCosts> {
    let config = small(request.config, choice);
    let (forward, mut context, _) = prepare(request.machine, &config, lockstep_model::build_form)?;
    settle_policy(&config, &forward, &mut context)?;
    let estimator = Estimator::new(&forward, &context)?;
    let programs = estimator.programs(context.recompute.clone())?;
    let work = Workload::new(&programs, StepProgram::TRAIN, framework)?;
    let segments = work.on(request.hardware, framework).segments(terms);
    let seconds = |names: &[&str]| {
        let of = |role: &Vec<(&'static str, f64)>| -> f64 {
            role.iter().filter(|(name, _)| names.contains(name)).map(|(_, seconds)| seconds).sum()
        };
        Linear::rising([0, 1, 2, 3].map(|stage| of(&segments[stage])))
    };
    // Where state comes from the host beside the last backward pass, what that and the update take more than the pass alone.
    let update = Linear::rising([0, 1, 2, 3].map(|stage| {
        let of = |wanted: &str| segments[stage].iter().filter(|(name, _)| *name == wanted).map(|(_, s)| s).sum::<f64>();
        let behind = |whole: &str, work: &str| (of(whole) - of(work)).max(0.0);
        let backward = behind(Segment::BACKWARD_AND_UPDATE, "backward");
        of("prepare") + of("update") + backward + behind(Segment::WEIGHT_GRAD_AND_UPDATE, "weight_grad")
    }));
    let bytes = |of: &dyn Fn(&StepProgram) -> u64| Linear::through([0, 1, 2, 3].map(|s| of(&programs[s]) as f64));
    let state = |program: &StepProgram, class: Class| -> u64 {
        let held = program.buffers.iter().filter(|b| b.class == class);
        held.filter(|b| program.regions[b.region].lifetime == Lifetime::Run).map(|b| b.bytes).sum()
    };
    let of_lifetime = |p: &StepProgram, lifetime: Lifetime| -> u64 {
        p.regions.iter().filter(|r| r.lifetime == lifetime).map(|r| r.slot_bytes).sum()
    };
    let flops = estimator.layer_flops()?;
    let tied = config.model.tied_embeddings;
    let backward = seconds(&["backward", "input_grad", "weight_grad"]);
    let last = seconds(&["backward_last", "input_grad_last", "weight_grad_last"]);
    let more = |last: f64, usual: f64| (last - usual).max(0.0);
    Ok(LayerCosts {
        forward: seconds(&["forward"]),
        backward,
        weight_grad: seconds(&["weight_grad"]),
        last: Linear {
            base: more(last.base, backward.base),
            each: more(last.each, backward.each),
            first: more(last.first, backward.first),
            last: more(last.last, backward.last),
            shared: 0.0,
        }
        .tied(tied),
        update: update.tied(tied),
        parameters: bytes(&|p| state(p, Class::Parameters)).tied(tied),
        gradients: bytes(&|p| state(p, Class::Gradients)).tied(tied),
        optimizer: bytes(&|p| state(p, Class::Optimizer)).tied(tied),
        saved: Saved::ALL.map(|lifetime| bytes(&|p| of_lifetime(p, Lifetime::Saved(lifetime)))),
        held: bytes(&|p| of_lifetime(p, Lifetime::Run) - STATE.iter().map(|class| state(p, *class)).sum::<u64>())
            .sent_if_tied(tied),
        inputs: bytes(&|p| of_lifetime(p, Lifetime::MicroBatch)),
        frames: [0, 1, 2, 3].map(|s| of_lifetime(&programs[s], Lifetime::Frame) as f64),
        flops: [flops[1], flops[flops.len() - 1]],
    })
}

/// The config of the small program: the same ranks beside each other, four stages, two micro-batches.
fn small(config: &Config, choice: &LayoutChoice) -> Config {
    let mut config = choice.config(config);
    config.model.layers = STAGES.iter().sum();
    let p = &mut config.parallel;
    let apart = choice.layout.schedule.separates_weight_grads();
    let mut alike =
        Schedule::ALL.into_iter().filter(|s| s.separates_weight_grads() == apart && s.chunks().contains(&1));
    (p.pp, p.stages, p.schedule, p.r#virtual) =
        (STAGES.len(), STAGES.to_vec(), alike.next().unwrap_or(Schedule::USUAL), 1);
    config.recompute.policy = small_policy(choice.recompute);
    config.train.batch_ramp.clear();
    config.train.global_batch = 2 * config.round();
    config
}

/// What small programs recompute: of policies that need many layers to tell, nothing, which takes no longer.
pub(super) fn small_policy(policy: RecomputePolicy) -> RecomputePolicy {
    match policy {
        RecomputePolicy::None | RecomputePolicy::Selective | RecomputePolicy::Full | RecomputePolicy::List => policy,
        RecomputePolicy::EveryK | RecomputePolicy::Sqrt | RecomputePolicy::Budget => RecomputePolicy::None,
    }
}
