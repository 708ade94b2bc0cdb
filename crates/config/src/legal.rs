//! Which layouts fit a model and a batch, as checks on plain numbers.

#[cfg(test)]
mod tests;

use lockstep_ir::{Axes, ContextParallel, Layout, MeshAxis, Schedule};
use serde::Serialize;

/// The sizes that a layout must split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Extents {
    /// Transformer layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Hidden units of the feed-forward layer.
    pub ffn: usize,
    /// The same of layers without experts, where others have some.
    pub dense_ffn: Option<usize>,
    /// Experts of a layer, where it has any.
    pub experts: Option<usize>,
    /// Vocabulary entries; padded where they do not divide.
    pub vocab: usize,
    /// Positions of a sequence.
    pub seq: usize,
    /// Sequences of a step.
    pub global_batch: usize,
    /// Sequences that a rank computes at once.
    pub micro_batch: usize,
    /// Elements of the matrix of a key head, where the optimizer gathers whole matrices.
    pub gathered_head: Option<usize>,
    /// Whether attention has the matrix of its weights.
    pub naive_attention: bool,
    /// Whether keys and values expand from a latent by one matmul: attention is latent, and has no adapters.
    pub latent: bool,
    /// Whether the gradient noise scale is measured, which expert-parallel ranks cannot do.
    pub noise_scale: bool,
}

impl Extents {
    /// Micro-batches of one rank in one step, among this many that share the batch; none where they do not come out even.
    pub fn micro_batches(&self, ranks: usize) -> Option<usize> {
        let per_rank = quotient(self.global_batch, ranks)?;
        quotient(per_rank, self.micro_batch)
    }
}

/// Why a layout does not fit, and the nearest values that do. Prints with the latter as a hint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, lockstep_ir::Hint)]
#[error("{reason}")]
#[hint("use {nearest}")]
pub struct Refusal {
    /// The key of the config that is most likely at fault: `parallel.tp`, say.
    pub key: &'static str,
    /// The other keys that take part.
    pub with: &'static [&'static str],
    /// What is wrong, with the values.
    pub reason: String,
    /// What would fit: `tp = 4 or 8`.
    pub nearest: String,
}

/// Every reason for which a layout does not fit. Its count of micro-batches is not looked at: it follows from the batch,
/// see [`Extents::micro_batches`].
pub fn check(layout: &Layout, extents: &Extents) -> Vec<Refusal> {
    let empty = empty_sizes(layout, extents);
    if !empty.is_empty() {
        return empty;
    }
    let mut refusals = tensor_parallel(layout, extents);
    refusals.extend(sequence_parallel(layout, extents));
    refusals.extend(context_parallel(layout, extents));
    refusals.extend(expert_parallel(layout, extents));
    refusals.extend(batch(layout, extents));
    refusals.extend(pipeline(layout, extents));
    refusals.extend(zero(layout));
    refusals.extend(reshard(layout));
    refusals
}

fn empty_sizes(layout: &Layout, extents: &Extents) -> Vec<Refusal> {
    let sizes = [
        ("parallel.dp_replicate", layout.mesh.size(MeshAxis::DpReplicate)),
        ("parallel.dp", layout.mesh.size(MeshAxis::DpShard)),
        ("parallel.cp", layout.mesh.size(MeshAxis::Cp)),
        ("parallel.ep", layout.mesh.size(MeshAxis::Ep)),
        ("parallel.tp", layout.mesh.size(MeshAxis::Tp)),
        ("parallel.pp", layout.mesh.size(MeshAxis::Pp)),
        ("parallel.virtual", layout.chunks),
        ("model.layers", extents.layers),
        ("model.heads", extents.heads),
        ("model.kv_heads", extents.kv_heads),
        ("model.ffn", extents.ffn),
        ("model.vocab_size", extents.vocab),
        ("train.seq", extents.seq),
        ("train.global_batch", extents.global_batch),
        ("train.micro_batch", extents.micro_batch),
    ];
    let refuse = |key: &'static str| {
        let name = key.split('.').next_back().unwrap_or(key);
        Refusal { key, with: &[], reason: format!("{key} = 0 leaves nothing"), nearest: format!("{name} = 1") }
    };
    sizes.into_iter().filter(|(_, size)| *size == 0).map(|(key, _)| refuse(key)).collect()
}

/// The rules that a tp must keep: whether it does, the other keys that take part, and what is wrong if not.
fn tensor_rules(tp: usize, layout: &Layout, extents: &Extents) -> [(bool, &'static [&'static str], String); 7] {
    let Extents { heads, kv_heads, ffn, seq, vocab, .. } = *extents;
    let dense_ffn = extents.dense_ffn.unwrap_or(0);
    let cp = layout.mesh.size(MeshAxis::Cp);
    let chunks = if cp == 1 { 1 } else { 2 * cp };
    [
        (
            heads.is_multiple_of(tp),
            &["model.heads"],
            format!("parallel.tp = {tp} does not divide model.heads = {heads}"),
        ),
        (
            kv_heads.is_multiple_of(tp) || tp.is_multiple_of(kv_heads),
            &["model.kv_heads", "model.heads"],
            format!("parallel.tp = {tp} does not divide model.kv_heads = {kv_heads} and is no multiple of it"),
        ),
        // Every rank has a part of the vocabulary, the last with padding.
        (
            vocab.div_ceil(tp) * (tp - 1) < vocab,
            &["model.vocab_size"],
            format!("parallel.tp = {tp} leaves ranks without a part of model.vocab_size = {vocab}"),
        ),
        (ffn.is_multiple_of(tp), &["model.ffn"], format!("parallel.tp = {tp} does not divide model.ffn = {ffn}")),
        (
            dense_ffn.is_multiple_of(tp),
            &["model.ffn", "model.dense_layers"],
            format!("parallel.tp = {tp} does not divide model.ffn = {dense_ffn} of model.dense_layers"),
        ),
        (
            !layout.sequence_parallel || !seq.is_multiple_of(chunks) || (seq / cp).is_multiple_of(tp),
            &["parallel.sequence_parallel", "train.seq"],
            match cp {
                1 => format!("parallel.tp = {tp} does not divide train.seq = {seq}, which sequence_parallel splits"),
                _ => format!(
                    "parallel.tp = {tp} does not divide train.seq / parallel.cp = {seq} / {cp}, which sequence_parallel splits"
                ),
            },
        ),
        (
            extents.gathered_head.is_none_or(|elements| elements.is_multiple_of((tp / kv_heads).max(1))),
            &["optimizer.name", "model.kv_heads"],
            format!(
                "parallel.tp = {tp} shares each of model.kv_heads = {kv_heads} among ranks that do not divide its elements, and \
                 the optimizer of optimizer.name gathers it from them"
            ),
        ),
    ]
}

/// Every tp that splits the model, in ascending order; 1 is one of them.
fn tensor_sizes(layout: &Layout, extents: &Extents) -> Vec<usize> {
    let fits = |tp: &usize| tensor_rules(*tp, layout, extents).iter().all(|(kept, ..)| *kept);
    divisors(extents.heads).into_iter().filter(fits).collect()
}

fn tensor_parallel(layout: &Layout, extents: &Extents) -> Vec<Refusal> {
    let tp = layout.mesh.size(MeshAxis::Tp);
    let broken = tensor_rules(tp, layout, extents).into_iter().filter(|(kept, ..)| !kept);
    let nearest = || near(MeshAxis::Tp.name(), &tensor_sizes(layout, extents), tp);
    broken.map(|(_, with, reason)| Refusal { key: "parallel.tp", with, reason, nearest: nearest() }).collect()
}

fn sequence_parallel(layout: &Layout, extents: &Extents) -> Option<Refusal> {
    (layout.sequence_parallel && layout.mesh.size(MeshAxis::Tp) == 1).then(|| {
        let other = tensor_sizes(layout, extents).into_iter().find(|&tp| tp > 1);
        let other = other.map(|tp| format!(", or tp = {tp}")).unwrap_or_default();
        Refusal {
            key: "parallel.sequence_parallel",
            with: &["parallel.tp"],
            reason: "parallel.sequence_parallel = true splits sequences among tp ranks, and parallel.tp = 1".into(),
            nearest: format!("sequence_parallel = false{other}"),
        }
    })
}

/// Every rank has two chunks of a sequence, which are as long as any other, attention that can be computed part by part, and, by
/// all-to-all, whole heads for as long as that takes.
fn context_parallel(layout: &Layout, extents: &Extents) -> Vec<Refusal> {
    let (cp, seq) = (layout.mesh.size(MeshAxis::Cp), extents.seq);
    let tp = layout.mesh.size(MeshAxis::Tp);
    let inner = if layout.sequence_parallel { tp } else { 1 };
    // Key heads divide query heads.
    let whole_heads = |cp: usize| match layout.context {
        ContextParallel::Ring | ContextParallel::Gather | ContextParallel::Latent => true,
        ContextParallel::AllToAll => extents.kv_heads.is_multiple_of(tp * cp),
    };
    let fits =
        |cp: &usize| *cp == 1 || (seq.is_multiple_of(2 * cp) && (seq / cp).is_multiple_of(inner) && whole_heads(*cp));
    let sizes = || divisors(seq).into_iter().filter(fits).collect::<Vec<usize>>();
    let mut refusals = Vec::new();
    if cp > 1 && !whole_heads(cp) {
        let kv_heads = extents.kv_heads;
        let (ranks, of) = match tp {
            1 => ("parallel.cp".to_owned(), format!("{cp}")),
            _ => ("parallel.tp × parallel.cp".to_owned(), format!("{tp} × {cp}")),
        };
        refusals.push(Refusal {
            key: "parallel.context",
            with: &["parallel.cp", "parallel.tp", "model.kv_heads"],
            reason: format!(
                "parallel.context = \"a2a\" gives ranks whole heads, and {ranks} = {of} does not divide model.kv_heads = {kv_heads}"
            ),
            nearest: format!("context = \"ring\", or {}", near(MeshAxis::Cp.name(), &sizes(), cp)),
        });
    }
    if cp > 1 && layout.context == ContextParallel::Latent && !extents.latent {
        refusals.push(Refusal {
            key: "parallel.context",
            with: &["model.kv_lora_rank", "lora.rank"],
            reason: "parallel.context = \"latent\" sends what keys and values expand from by one matmul: it needs model.kv_lora_rank, and no \
                     lora.rank"
                .into(),
            nearest: "context = \"ring\"".into(),
        });
    }
    if cp > 1 && !seq.is_multiple_of(2 * cp) {
        let longer = seq.next_multiple_of(2 * cp * inner);
        refusals.push(Refusal {
            key: "parallel.cp",
            with: &["train.seq"],
            reason: format!(
                "parallel.cp = {cp} cuts sequences into {} chunks, which do not divide train.seq = {seq}",
                2 * cp
            ),
            nearest: format!("{}, or seq = {longer}", near(MeshAxis::Cp.name(), &sizes(), cp)),
        });
    }
    if cp > 1 && extents.naive_attention {
        refusals.push(Refusal {
            key: "parallel.cp",
            with: &["model.attention"],
            reason: format!(
                "parallel.cp = {cp} computes attention part by part, which model.attention = \"naive\" does not"
            ),
            nearest: "attention = \"flash\", or cp = 1".into(),
        });
    }
    refusals
}

/// Every rank has as many experts.
fn expert_parallel(layout: &Layout, extents: &Extents) -> Option<Refusal> {
    let ep = layout.mesh.size(MeshAxis::Ep);
    let Some(experts) = extents.experts else {
        if layout.expert_bound.is_some() {
            return Some(Refusal {
                key: "parallel.ep_bound",
                with: &["model.experts"],
                reason: "parallel.ep_bound is of rows that go to experts, and the model has none".into(),
                nearest: "no ep_bound".into(),
            });
        }
        return (ep > 1).then(|| Refusal {
            key: "parallel.ep",
            with: &["model.experts", "parallel.dp"],
            reason: format!("parallel.ep = {ep} splits experts among ranks, and the model has none"),
            nearest: "ep = 1; dp has ranks with sequences of their own".into(),
        });
    };
    (!experts.is_multiple_of(ep)).then(|| Refusal {
        key: "parallel.ep",
        with: &["model.experts"],
        reason: format!("parallel.ep = {ep} does not divide model.experts = {experts}"),
        nearest: near(MeshAxis::Ep.name(), &expert_sizes(layout, extents, experts), ep),
    })
}

/// The sizes of `ep` that no rule refuses: divisors of the experts that divide the batch, if possible into whole micro-batches. Where
/// none does, the fault is another key's, and all divisors are named.
fn expert_sizes(layout: &Layout, extents: &Extents, experts: usize) -> Vec<usize> {
    let others = layout.mesh.size(MeshAxis::DpShard) * layout.mesh.size(MeshAxis::DpReplicate);
    let mut sizes = if extents.noise_scale { vec![1] } else { divisors(experts) };
    let rules: [&dyn Fn(usize) -> bool; 2] =
        [&|ranks| extents.global_batch.is_multiple_of(ranks), &|ranks| extents.micro_batches(ranks).is_some()];
    for fits in rules {
        let fitting: Vec<usize> = sizes.iter().copied().filter(|ep| fits(others * ep)).collect();
        if !fitting.is_empty() {
            sizes = fitting;
        }
    }
    sizes
}

/// The axes along which ranks have sequences of their own, with the keys that give their sizes.
const DATA_PARALLEL: [(&str, MeshAxis); 3] = [
    ("parallel.dp", MeshAxis::DpShard),
    ("parallel.dp_replicate", MeshAxis::DpReplicate),
    ("parallel.ep", MeshAxis::Ep),
];

/// What all ranks compute at once, with the keys that it follows from: `parallel.dp × train.micro_batch = 2 × 4`.
pub(crate) fn round(layout: &Layout, extents: &Extents) -> String {
    let ranks = DATA_PARALLEL.map(|(key, axis)| (key, layout.mesh.size(axis)));
    let ranks = ranks.into_iter().filter(|(_, size)| *size > 1);
    let (keys, sizes): (Vec<&str>, Vec<String>) =
        ranks.chain([("train.micro_batch", extents.micro_batch)]).map(|(key, size)| (key, size.to_string())).unzip();
    format!("{} = {}", keys.join(" × "), sizes.join(" × "))
}

fn batch(layout: &Layout, extents: &Extents) -> Option<Refusal> {
    let (global, micro) = (extents.global_batch, extents.micro_batch);
    // Sequences that are left to the ranks along the other axes.
    let (mut left, mut keys, mut sizes) = (global, "train.global_batch".to_owned(), global.to_string());
    for (key, axis) in DATA_PARALLEL.into_iter().rev() {
        let size = layout.mesh.size(axis);
        let Some(rest) = quotient(left, size) else {
            // A size that leaves the micro-batch as it is, where there is one.
            let fitting = match (axis, extents.experts) {
                (MeshAxis::Ep, Some(experts)) => expert_sizes(layout, extents, experts),
                _ => divisors(quotient(left, micro).unwrap_or(left)),
            };
            return Some(Refusal {
                key,
                with: &["train.global_batch", "parallel.dp_replicate", "parallel.ep"],
                reason: format!("{key} = {size} does not divide {keys} = {sizes}"),
                nearest: near(axis.name(), &fitting, size),
            });
        };
        if size > 1 {
            (keys, sizes) = (format!("{keys} / {key}"), format!("{sizes} / {size}"));
        }
        left = rest;
    }
    if left.is_multiple_of(micro) {
        return None;
    }
    Some(Refusal {
        key: "train.micro_batch",
        with: &["parallel.dp", "parallel.dp_replicate", "parallel.ep", "train.global_batch"],
        reason: format!("{} does not divide train.global_batch = {global}", round(layout, extents)),
        nearest: near("micro_batch", &divisors(left), micro),
    })
}

fn pipeline(layout: &Layout, extents: &Extents) -> Option<Refusal> {
    let (pp, chunks, layers, schedule) =
        (layout.mesh.size(MeshAxis::Pp), layout.chunks, extents.layers, layout.schedule);
    let accepts = schedule.chunks();
    if !accepts.contains(&chunks) {
        return Some(chunks_of(schedule, chunks));
    }
    if pp == 1 && schedule != Schedule::USUAL {
        let usual = Schedule::USUAL;
        let other = if layers >= 2 * chunks { ", or pp = 2 or more" } else { "" };
        return Some(Refusal {
            key: "parallel.schedule",
            with: &["parallel.pp"],
            reason: format!("parallel.schedule = \"{schedule}\" orders the stages of a pipeline, and parallel.pp = 1"),
            nearest: format!("schedule = \"{usual}\"{other}"),
        });
    }
    if pp > layers {
        return Some(Refusal {
            key: "parallel.pp",
            with: &["model.layers"],
            reason: format!("parallel.pp = {pp} is more than model.layers = {layers}, and every stage needs a layer"),
            nearest: format!("pp = {}", (layers / accepts.start()).max(1)),
        });
    }
    (pp.saturating_mul(chunks) > layers).then(|| Refusal {
        key: "parallel.virtual",
        with: &["parallel.pp", "model.layers"],
        reason: format!(
            "parallel.pp × parallel.virtual = {pp} × {chunks} are more than model.layers = {layers}, and every virtual stage \
             needs a layer"
        ),
        nearest: match layers / pp {
            fewer if accepts.contains(&fewer) => format!("virtual = {fewer}"),
            _ if layers / chunks > 1 => format!("pp = {}", layers / chunks),
            _ => format!("schedule = \"{}\" with virtual = 1", Schedule::USUAL),
        },
    })
}

/// A number of chunks that the schedule does not have.
fn chunks_of(schedule: Schedule, chunks: usize) -> Refusal {
    let (least, most) = schedule.chunks().into_inner();
    let nearest = chunks.clamp(least, most);
    let others: Vec<String> = Schedule::ALL
        .iter()
        .filter(|other| other.chunks().contains(&chunks))
        .map(|other| format!("\"{other}\""))
        .collect();
    let has = match (least, most) {
        (1, 1) => "has one chunk of layers per rank".to_owned(),
        (least, most) if least == most => format!("has {least} chunks of layers per rank"),
        _ => format!("has {least} chunks of layers per rank or more"),
    };
    Refusal {
        key: "parallel.virtual",
        with: &["parallel.schedule"],
        reason: format!("parallel.virtual = {chunks}, and parallel.schedule = \"{schedule}\" {has}"),
        nearest: format!("virtual = {nearest}, or schedule = {}", others.join(" or ")),
    }
}

fn zero(layout: &Layout) -> Option<Refusal> {
    let (zero, shards) = (layout.zero, layout.mesh.size(Axes::ZERO));
    let refuse = |with, reason, nearest: &str| Refusal { key: "parallel.zero", with, reason, nearest: nearest.into() };
    match zero {
        0 => None,
        4.. => Some(refuse(&[], format!("parallel.zero = {zero} is no stage of ZeRO"), "zero = 3")),
        _ if shards == 1 => Some(refuse(
            &["parallel.dp"],
            format!("parallel.zero = {zero} shards state over dp ranks, and parallel.dp = 1"),
            "zero = 0, or dp = 2 or more",
        )),
        _ => None,
    }
}

fn reshard(layout: &Layout) -> Option<Refusal> {
    (!layout.reshard_after_forward && layout.zero != 3).then(|| Refusal {
        key: "parallel.reshard_after_forward",
        with: &["parallel.zero"],
        reason: format!(
            "parallel.reshard_after_forward = false keeps gathered parameters, and parallel.zero = {} gathers none",
            layout.zero
        ),
        nearest: "reshard_after_forward = true, or zero = 3".into(),
    })
}

/// `n / d` where it comes out even.
fn quotient(n: usize, d: usize) -> Option<usize> {
    (d != 0 && n.is_multiple_of(d)).then(|| n / d)
}

/// The divisors of `n`, in ascending order.
pub fn divisors(n: usize) -> Vec<usize> {
    let small = (1..).take_while(|d| *d <= n / d).filter(|d| n.is_multiple_of(*d));
    let mut divisors: Vec<usize> = small.flat_map(|d| [d, n / d]).collect();
    divisors.sort_unstable();
    divisors.dedup();
    divisors
}

/// The sizes on either side of `wanted`, as text: `tp = 4 or 8`.
fn near(name: &str, sizes: &[usize], wanted: usize) -> String {
    let above = sizes.partition_point(|&size| size < wanted);
    let near = sizes[above.saturating_sub(1)..].iter().take(if above == 0 { 1 } else { 2 });
    format!("{name} = {}", near.map(usize::to_string).collect::<Vec<_>>().join(" or "))
}
