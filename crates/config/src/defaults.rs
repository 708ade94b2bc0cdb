//! Defaults that follow from other keys, and batches given in tokens as sequences.

use crate::checks::{data_parallel_ranks, features, near_divisors};
use crate::conflict::{Conflict, Derived};
use crate::declare::Key;
use crate::kind::MAX_BATCH;
use crate::latent;
use crate::layers;
use crate::value::{Field, Value};
use crate::values::Values;
use crate::words::{Activation, DataFormat, LayerType, TrainOnTurns};
use lockstep_ir::units::thousands;

/// As many key and value heads as query heads.
pub(crate) fn kv_heads(values: &Values) -> Derived {
    Ok(values.count("model.heads").map(Value::Count))
}

/// Twice the rank of adapters.
pub(crate) fn lora_alpha(values: &Values) -> Derived {
    Ok(values.count("lora.rank").map(|rank| Value::Float(2.0 * rank as f64)))
}

/// The width divided among the heads; of latent attention, its two parts.
pub(crate) fn head_dim(values: &Values) -> Derived {
    if let Some(latent) = latent::head_dim(values) {
        return Ok(Some(Value::Count(latent)));
    }
    let (Some(dim), Some(heads)) = (values.count("model.dim"), values.count("model.heads")) else {
        return Ok(None);
    };
    if dim % heads == 0 {
        return Ok(Some(Value::Count(dim / heads)));
    }
    Err(Conflict::new(
        &["model.heads", "model.dim"],
        format!("model.heads = {heads} does not divide model.dim = {dim}"),
        format!("{} heads divide it; or set model.head_dim", near_divisors(dim, heads)),
    ))
}

/// Four times the width, as GPT-2 has it; other families have no usual one.
pub(crate) fn ffn(values: &Values) -> Derived {
    Ok(values.count("model.dim").filter(|_| features(values).gpt2_block).map(|dim| Value::Count(4 * dim)))
}

fn is_chat(values: &Values) -> bool {
    values.word("data.format") == Some(DataFormat::Chat)
}

/// The field that datasets of its kind have.
pub(crate) fn text_field(values: &Values) -> Derived {
    Ok(Some(Value::Text(if is_chat(values) { "messages" } else { "text" }.to_owned())))
}

/// The turns of the assistant, where there are turns.
pub(crate) fn train_on(values: &Values) -> Derived {
    Ok(is_chat(values).then(|| Value::Text(TrainOnTurns::Assistant.word().to_owned())))
}

/// A conversation has nothing to do with the one before it.
pub(crate) fn document_mask(values: &Values) -> Derived {
    Ok(Some(Value::Bool(is_chat(values))))
}

/// As Mixtral has it.
pub(crate) fn top_k(values: &Values) -> Derived {
    Ok(values.count("model.experts").map(|experts| Value::Count(experts.min(2))))
}

/// One, where there are shared experts.
pub(crate) fn shared_experts(values: &Values) -> Derived {
    Ok(features(values).shared_experts.then_some(Value::Count(1)))
}

/// An expert is as wide as the block that it takes the place of.
pub(crate) fn expert_ffn(values: &Values) -> Derived {
    Ok(values.count("model.ffn").filter(|_| values.count("model.experts").is_some()).map(Value::Count))
}

/// As many as GPT-2 has, where positions are learned.
pub(crate) fn positions(values: &Values) -> Derived {
    Ok(features(values).learned_positions.then_some(Value::Count(1024)))
}

pub(crate) fn norm_topk(values: &Values) -> Derived {
    Ok(Some(Value::Bool(features(values).norm_topk)))
}

pub(crate) fn tied(values: &Values) -> Derived {
    Ok(Some(Value::Bool(features(values).tied)))
}

pub(crate) fn activation(values: &Values) -> Derived {
    Ok(features(values).activation.to_value())
}

/// As gpt-oss has it, where there is anything to clamp.
pub(crate) fn swiglu_limit(values: &Values) -> Derived {
    let clamps = values.word("model.activation") == Some(Activation::ClampedSwiGlu);
    Ok(clamps.then_some(Value::Float(7.0)))
}

pub(crate) fn attention_sinks(values: &Values) -> Derived {
    Ok(Some(Value::Bool(features(values).sinks)))
}

pub(crate) fn norms(values: &Values) -> Derived {
    Ok(features(values).norms.to_value())
}

pub(crate) fn norm_plus_one(values: &Values) -> Derived {
    Ok(Some(Value::Bool(features(values).norm_plus_one)))
}

pub(crate) fn qk_norm(values: &Values) -> Derived {
    Ok(features(values).qk_norm.to_value())
}

/// As many of the pattern as there are layers.
pub(crate) fn rope_layers(values: &Values) -> Derived {
    let Some(layers) = values.count("model.layers") else { return Ok(None) };
    let pattern = features(values).rope_layers.iter().copied();
    Ok(pattern.take(usize::try_from(layers).unwrap_or(usize::MAX)).collect::<Vec<_>>().to_value())
}

/// As many of the pattern as there are layers.
pub(crate) fn layer_types(values: &Values) -> Derived {
    let Some(layers) = values.count("model.layers") else { return Ok(None) };
    let sliding = values.count("model.sliding_window").is_some();
    let pattern = features(values).layer_types.iter().filter(|_| sliding);
    let pattern: Vec<LayerType> = pattern.copied().take(usize::try_from(layers).unwrap_or(usize::MAX)).collect();
    Ok(pattern.to_value())
}

/// Where layers differ, that of the family; OLMo 3 scales the RoPE of the others alone.
pub(crate) fn rope_local_theta(values: &Values) -> Derived {
    let features = features(values);
    let theta = features.rope_local_theta.map(Value::Float).or_else(|| values.get("model.rope_theta").cloned());
    Ok(theta.filter(|_| features.local_rope && layers::some_slide(values)))
}

pub(crate) fn softmax_scale_dim(values: &Values) -> Derived {
    Ok(values.count("model.head_dim").map(Value::Count))
}

/// The root of the width, as Gemma has it.
pub(crate) fn embedding_scale(values: &Values) -> Derived {
    if !features(values).scaled_embedding {
        return Ok(Some(Value::Float(1.0)));
    }
    Ok(values.count("model.dim").map(|dim| Value::Float((dim as f64).sqrt())))
}

/// No accumulation. Where data-parallel ranks do not divide the batch, [`layout_conflicts`] says so.
pub(crate) fn micro_batch(values: &Values) -> Derived {
    let (Some(global), Some(ranks)) = (values.count("train.global_batch"), data_parallel_ranks(values)) else {
        return Ok(None);
    };
    Ok(Some(Value::Count(if global % ranks == 0 { global / ranks } else { 1 })))
}

/// 64 sequences; in a short run a quarter of what is trained on between two validations. The same for every layout.
pub(crate) fn validation_sequences(values: &Values) -> Derived {
    const USUAL: u64 = 64;
    let count = |path: &str| values.count(path);
    let sequences = || {
        let (steps, every) = (count("train.steps")?, count("train.validate_every")?);
        let between = if every == 0 { steps } else { every.min(steps) };
        Some((between.saturating_mul(count("train.global_batch")?) / 4).clamp(1, USUAL))
    };
    Ok(Some(Value::Count(sequences().unwrap_or(USUAL))))
}

/// The most that a batch given in tokens may be moved to become whole sequences.
const MOST_ROUNDING: f64 = 0.05;

/// A batch given in tokens, as sequences; and what to say where these are not that many tokens. "4M tokens" of sequences of 8192 are
/// 512 of them: the power of two that people mean, else the nearest multiple.
pub(crate) fn sequences(key: &Key, tokens: u64, values: &Values) -> Result<(Value, Option<String>), Conflict> {
    let seq = values.count("train.seq").unwrap_or(1);
    let conflict = |text: String, hint: String| Conflict::new(&[key.path, "train.seq"], text, hint);
    let (below, rest) = (tokens / seq, tokens % seq);
    let binary =
        [(1_000_000, 1 << 20), (1000, 1 << 10)].into_iter().find(|(decimal, _)| tokens.is_multiple_of(*decimal));
    let binary = binary.and_then(|(decimal, binary)| (tokens / decimal).checked_mul(binary));
    let nearest = below + u64::from(rest >= seq - rest);
    let count = match binary.filter(|tokens| tokens.is_multiple_of(seq)) {
        _ if rest == 0 => below,
        Some(tokens) => tokens / seq,
        None => nearest,
    };
    let taken = count.saturating_mul(seq);
    if count == 0 || taken.abs_diff(tokens) as f64 > MOST_ROUNDING * tokens as f64 {
        let near = [below, below.saturating_add(1)].into_iter().filter(|&n| n > 0);
        let near: Vec<_> =
            near.filter_map(|n| Some(format!("\"{} tokens\" ({n} × {seq})", n.checked_mul(seq)?))).collect();
        return Err(conflict(
            format!("{} = {tokens} tokens is not a whole number of sequences of train.seq = {seq}", key.path),
            format!("use {}", near.join(" or ")),
        ));
    }
    if count > MAX_BATCH {
        return Err(conflict(
            format!("{} = {tokens} tokens is {count} sequences, which is out of range", key.path),
            format!("give at most {MAX_BATCH} sequences"),
        ));
    }
    let note = (taken != tokens).then(|| {
        let [asked, taken] = [tokens, taken].map(thousands);
        format!("{} = {asked} tokens: {taken} are taken, {count} sequences of train.seq = {seq}", key.path)
    });
    Ok((Value::Count(count), note))
}

/// A ramp with all its batches as sequences, each larger than the one before; and what to say of them.
pub(crate) fn ramp(key: &Key, stages: &[(u64, Value)], values: &Values) -> Result<(Value, Vec<String>), Conflict> {
    let mut before = values.count("train.global_batch");
    let (mut counted, mut notes) = (Vec::new(), Vec::new());
    for (tokens, batch) in stages {
        let batch = match batch {
            Value::Tokens(tokens) => {
                let (batch, note) = sequences(key, *tokens, values)?;
                notes.extend(note);
                batch
            }
            batch => batch.clone(),
        };
        if let (Some(last), Value::Count(count)) = (before, &batch) {
            if *count <= last {
                return Err(Conflict::new(
                    &[key.path, "train.global_batch"],
                    format!(
                        "{}: {count} sequences from {tokens} tokens on are not more than the {last} before",
                        key.path
                    ),
                    "let every size be larger than the one before; the first is train.global_batch",
                ));
            }
            before = Some(*count);
        }
        counted.push((*tokens, batch));
    }
    Ok((Value::Ramp(counted), notes))
}
