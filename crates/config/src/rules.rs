//! Rules of `[optimizer]`, `[precision]` and `[telemetry]`: defaults that follow from the update rule and the schedule, and keys that do
//! not go with them.

use crate::conflict::{Conflict, Derived};
use crate::optimizers::{CONSTANTS, Constant, OptimizerName};
use crate::value::Value;
use crate::values::Values;
use crate::words::{Fp8Recipe, FrozenPrecision, LrSchedule, MasterPrecision, PrecisionPolicy};

fn optimizer(values: &Values) -> Option<OptimizerName> {
    values.word("optimizer.name")
}

fn schedule(values: &Values) -> Option<LrSchedule> {
    values.word("optimizer.schedule")
}

/// A default that the optimizer decides.
pub(crate) fn constant(values: &Values, usual: Constant) -> Derived {
    number(optimizer(values).and_then(|name| usual(&name.facts())))
}

fn number(x: Option<f64>) -> Derived {
    Ok(x.map(Value::Float))
}

/// 100 steps, or the whole of a shorter run.
pub(crate) fn default_warmup(values: &Values) -> Derived {
    const USUAL: u64 = 100;
    Ok(values.count("train.steps").map(|steps| Value::Count(if steps > 0 { steps.min(USUAL) } else { USUAL })))
}

pub(crate) fn default_min_lr_ratio(values: &Values) -> Derived {
    number((schedule(values) != Some(LrSchedule::Constant)).then_some(0.1))
}

/// A tenth of the run, or what warmup leaves of it.
pub(crate) fn default_decay_steps(values: &Values) -> Derived {
    let (Some(steps), Some(warmup)) = (values.count("train.steps"), values.count("optimizer.warmup_steps")) else {
        return Ok(None);
    };
    let tenth = steps.div_ceil(10).min(steps.saturating_sub(warmup));
    Ok((schedule(values) == Some(LrSchedule::Wsd)).then_some(Value::Count(tenth)))
}

fn is_fp16(values: &Values) -> bool {
    values.word("precision.policy") == Some(PrecisionPolicy::Fp16)
}

pub(crate) fn default_loss_scale(values: &Values) -> Derived {
    number(is_fp16(values).then_some(65536.0))
}

pub(crate) fn default_growth_interval(values: &Values) -> Derived {
    Ok(is_fp16(values).then_some(Value::Count(2000)))
}

pub(crate) fn loss_scales_are_of_fp16(values: &Values) -> Option<Conflict> {
    let key =
        ["precision.loss_scale", "precision.growth_interval"].into_iter().find(|key| values.get(key).is_some())?;
    let (value, policy) = (values.get(key)?, values.get("precision.policy")?);
    Conflict::when(
        !is_fp16(values),
        &[key, "precision.policy"],
        format!("{key} = {value} is given, and precision.policy = {policy} has no loss scale"),
        format!("remove {key}, or choose precision.policy = \"fp16\""),
    )
}

/// Scales of fp8 are those of a micro-batch, so its results depend on how a batch is cut.
pub(crate) fn fp8_goes_with_the_rest(values: &Values) -> Option<Conflict> {
    let policy = values.word::<PrecisionPolicy>("precision.policy")?;
    if policy != PrecisionPolicy::Fp8 {
        let counts = ["precision.fp8_skip_first", "precision.fp8_skip_last", "precision.shadow_every"];
        let counted = counts.into_iter().find(|key| values.count(key).is_some_and(|count| count > 0));
        let weights = values.get("precision.fp8_weights").map(|_| "precision.fp8_weights");
        let recipe = values.word::<Fp8Recipe>("precision.fp8_recipe").filter(|recipe| *recipe != Fp8Recipe::Current);
        let key = weights.or(counted).or(recipe.map(|_| "precision.fp8_recipe"))?;
        let value = values.get(key)?;
        // What a run was started with cannot be removed from it, but set to what needs no fp8.
        let change = match (counted == Some(key), recipe.is_some() && weights.is_none()) {
            (true, _) => format!(" (a run that goes on: --change {key}=0)"),
            (false, true) => format!(" (a run that goes on: --change {key}={})", Fp8Recipe::Current),
            (false, false) => String::new(),
        };
        return Some(Conflict::new(
            &[key, "precision.policy"],
            format!("{key} = {value} is given, and precision.policy = \"{policy}\" has no fp8"),
            format!("remove {key}{change}, or choose precision.policy = \"fp8\""),
        ));
    }
    let reproducible = values.word("train.reproducible") == Some(true);
    reproducible.then(|| {
        Conflict::new(
            &["train.reproducible", "precision.policy"],
            "train.reproducible = true asks for the same bits at any train.micro_batch, and the scales of fp8 are those \
             of a micro-batch"
                .to_owned(),
            "remove train.reproducible, or choose precision.policy = \"bf16\"",
        )
    })
}

/// Only weights in bf16 can be their own master weights.
pub(crate) fn masters_in_bf16_are_the_weights(values: &Values) -> Option<Conflict> {
    let policy = values.word::<PrecisionPolicy>("precision.policy")?;
    let own = values.word::<MasterPrecision>("precision.master")? == MasterPrecision::Bf16;
    let key = "precision.master";
    Conflict::when(
        own && !matches!(policy, PrecisionPolicy::Bf16 | PrecisionPolicy::Fp8),
        &[key, "precision.policy"],
        format!("{key} = \"bf16\" is given, and weights are not in bf16 with precision.policy = \"{policy}\""),
        format!("remove {key} (a run that goes on: --change {key}=fp32), or choose precision.policy = \"bf16\""),
    )
}

/// Weights in bytes are not trained, and matmuls in fp8 have bytes of their own.
pub(crate) fn weights_in_bytes_are_frozen(values: &Values) -> Option<Conflict> {
    let (key, word) = ("precision.frozen", values.word::<FrozenPrecision>("precision.frozen")?);
    if word == FrozenPrecision::Policy {
        return None;
    }
    if values.get("lora.rank").is_none() {
        return Some(Conflict::new(
            &[key],
            format!("{key} = \"{word}\" is given, and all weights are trained"),
            format!(
                "remove {key}, or train adapters (lora.rank); `lockstep generate --weights {word}` reads any model so"
            ),
        ));
    }
    let policy = values.word::<PrecisionPolicy>("precision.policy")?;
    Conflict::when(
        policy == PrecisionPolicy::Fp8,
        &[key, "precision.policy"],
        format!(
            "{key} = \"{word}\" is given, and precision.policy = \"fp8\" makes bytes of weights in bf16 in every step"
        ),
        format!("remove {key}, or choose precision.policy = \"bf16\""),
    )
}

pub(crate) fn adapters_have_a_rank(values: &Values) -> Option<Conflict> {
    if values.get("lora.rank").is_some() {
        return None;
    }
    let key = ["lora.alpha", "lora.init_from", "lora.dropout", "lora.targets"].into_iter().find(|key| match values
        .get(key)
    {
        Some(Value::Float(dropout)) if *key == "lora.dropout" => *dropout > 0.0,
        Some(Value::Texts(targets)) => targets[..] != ["*"],
        value => value.is_some() && *key != "lora.dropout",
    })?;
    let text = format!("{key} is given, and without lora.rank there are no adapters");
    Some(Conflict::new(&[key, "lora.rank"], text, format!("set lora.rank, such as 16, or remove {key}")))
}

/// Lets a given warmup end with the run, and says so: a few steps of a long run are a smoke test, not a mistake.
pub(crate) fn shorten_warmup(values: &mut Values) -> Option<String> {
    let (steps, warmup) = (values.count("train.steps")?, values.count("optimizer.warmup_steps")?);
    (steps > 0 && warmup > steps).then(|| {
        values.set("optimizer.warmup_steps", Value::Count(steps));
        format!(
            "optimizer.warmup_steps = {warmup} is more than train.steps = {steps}: the warmup is shortened to {steps}"
        )
    })
}

/// The same for the decay of wsd, which has what warmup leaves of the run.
pub(crate) fn shorten_decay(values: &mut Values) -> Option<String> {
    let (steps, warmup) = (values.count("train.steps")?, values.count("optimizer.warmup_steps")?);
    let (decay, rest) = (values.count("optimizer.decay_steps")?, steps.saturating_sub(warmup));
    (steps > 0 && decay > rest).then(|| {
        values.set("optimizer.decay_steps", Value::Count(rest));
        format!(
            "optimizer.warmup_steps = {warmup} and optimizer.decay_steps = {decay} are more than train.steps = {steps}: \
             the decay is shortened to {rest}"
        )
    })
}

pub(crate) fn decay_steps_have_a_schedule(values: &Values) -> Option<Conflict> {
    let decay = values.count("optimizer.decay_steps")?;
    let given = values.get("optimizer.schedule")?;
    Conflict::when(
        schedule(values) != Some(LrSchedule::Wsd),
        &["optimizer.decay_steps", "optimizer.schedule"],
        format!("optimizer.decay_steps = {decay} is given, and optimizer.schedule = {given} does not read it"),
        "remove optimizer.decay_steps, or choose optimizer.schedule = \"wsd\"",
    )
}

pub(crate) fn constant_rates_do_not_fall(values: &Values) -> Option<Conflict> {
    let ratio = values.get("optimizer.min_lr_ratio")?;
    Conflict::when(
        schedule(values) == Some(LrSchedule::Constant),
        &["optimizer.min_lr_ratio", "optimizer.schedule"],
        format!("optimizer.min_lr_ratio = {ratio} is given, and optimizer.schedule = \"constant\" does not fall"),
        "remove optimizer.min_lr_ratio, or choose another optimizer.schedule",
    )
}

/// A constant that the optimizer does not read is a mistake.
pub(crate) fn constants_have_an_optimizer(values: &Values) -> Option<Conflict> {
    let facts = optimizer(values)?.facts();
    let unread = CONSTANTS.into_iter().filter(|(_, constant)| constant(&facts).is_none());
    let key = unread.map(|(key, _)| key).find(|key| values.get(key).is_some())?;
    let (value, name) = (values.get(key)?, values.get("optimizer.name")?);
    Some(Conflict::new(
        &[key, "optimizer.name"],
        format!("{key} = {value} is given, and optimizer.name = {name} does not read it"),
        format!("remove {key}, or choose another optimizer.name"),
    ))
}

/// Run directories and tracking servers show the config to others.
pub(crate) fn servers_hold_no_password(values: &Values) -> Option<Conflict> {
    let Value::Text(server) = values.get("telemetry.mlflow_uri")? else { return None };
    let (_, rest) = server.split_once("://")?;
    let host = rest.split(['/', '?', '#']).next()?;
    Conflict::when(
        host.contains('@'),
        &["telemetry.mlflow_uri"],
        "telemetry.mlflow_uri has a user name or a password in it, and everybody who sees the run would see them",
        "write the address without them, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
    )
}
