//! Rules of models with experts, beyond how many there are.

use crate::architecture::{Architecture, Features};
use crate::conflict::Conflict;
use crate::value::Value;
use crate::values::Values;

/// Shared experts, dense first layers and the routers of DeepSeek-V2 and V3 belong to the families that have them.
pub(crate) fn parts_are_of_their_architectures(values: &Values) -> Option<Conflict> {
    let architecture: Architecture = values.word("model.architecture")?;
    let features = architecture.features();
    let count = |key, usual| values.count(key).filter(|n| *n != usual).map(|n| n.to_string());
    let number = |key, usual: f64| match values.get(key) {
        Some(Value::Float(x)) if *x != usual => Some(format!("{x:?}")),
        _ => None,
    };
    let shared: fn(Features) -> bool = |features| features.shared_experts;
    let router: fn(Features) -> bool = |features| features.scaled_router;
    let bias: fn(Features) -> bool = |features| features.sigmoid_router;
    let keys = [
        ("model.shared_experts", values.count("model.shared_experts").map(|n| n.to_string()), shared),
        ("model.dense_layers", count("model.dense_layers", 0), shared),
        ("model.router_scale", number("model.router_scale", 1.0), router),
        ("model.expert_groups", count("model.expert_groups", 1), router),
        ("model.expert_top_groups", count("model.expert_top_groups", 1), router),
        ("model.balance_bias", number("model.balance_bias", 0.0), bias),
    ];
    let (key, given, has) = keys.into_iter().find(|(_, given, has)| given.is_some() && !has(features))?;
    let families = Architecture::listed(has);
    let instead = if key == "model.balance_bias" { ", or model.balance_loss," } else { "" };
    Some(Conflict::new(
        &[key, "model.architecture"],
        format!("{key} = {} is given, and model.architecture = \"{architecture}\" does not have it", given?),
        format!("use model.architecture = {families}{instead} or remove {key}"),
    ))
}

pub(crate) fn some_layers_have_experts(values: &Values) -> Option<Conflict> {
    let (layers, dense) = (values.count("model.layers")?, values.count("model.dense_layers")?);
    Conflict::when(
        dense >= layers,
        &["model.dense_layers", "model.layers"],
        format!("model.dense_layers = {dense} leaves none of model.layers = {layers} with experts"),
        format!("choose at most {}", layers - 1),
    )
}

pub(crate) fn groups_hold_the_chosen(values: &Values) -> Option<Conflict> {
    let keys = ["model.experts", "model.expert_groups", "model.expert_top_groups", "model.experts_per_token"];
    let [experts, groups, top_groups, top] = keys.map(|key| values.count(key));
    let (experts, groups, top_groups, top) = (experts?, groups?, top_groups?, top?);
    let conflict = |keys: &[&'static str], text, hint: String| Some(Conflict::new(keys, text, hint));
    if experts % groups != 0 || (groups > 1 && experts / groups < 2) {
        let fits = |n: &u64| experts % n == 0 && experts / n >= 2;
        let near = (1..groups).rev().find(fits).unwrap_or(1);
        let text =
            format!("model.expert_groups = {groups} does not make groups of two or more of model.experts = {experts}");
        return conflict(&["model.expert_groups", "model.experts"], text, format!("{near} groups do"));
    }
    if top_groups > groups {
        let text = format!("model.expert_top_groups = {top_groups} is more than model.expert_groups = {groups}");
        return conflict(&["model.expert_top_groups", "model.expert_groups"], text, format!("choose at most {groups}"));
    }
    let open = experts / groups * top_groups;
    if top > open && top <= experts {
        let text = format!(
            "model.experts_per_token = {top} is more than the {open} experts of model.expert_top_groups = {top_groups}"
        );
        let hint = format!("choose at most {open}, or {} groups", top.div_ceil(experts / groups));
        return conflict(&["model.experts_per_token", "model.expert_top_groups"], text, hint);
    }
    None
}
