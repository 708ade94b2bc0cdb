//! Which layouts fit a model and a batch, as checks on plain numbers.

use lockstep_ir::{Axes, Layout, MeshAxis, Schedule};
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
    /// Whether norms go over all of Q and all of K.
    pub whole_qk_norm: bool,
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
}

impl Extents {
    /// Micro-batches of one rank in one step, among so many that share the batch; none where they do not come out even.
    pub fn micro_batches(&self, ranks: usize) -> Option<usize> {
        let per_rank = quotient(self.global_batch, ranks)?;
        quotient(per_rank, self.micro_batch)
    }
}

/// Why a layout does not fit, and the nearest values that do. Prints with the latter as a hint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}\nhint: use {nearest}")]
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
fn tensor_rules(tp: usize, layout: &Layout, extents: &Extents) -> [(bool, &'static [&'static str], String); 8] {
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
            !extents.whole_qk_norm || tp == 1,
            &["model.architecture"],
            format!("parallel.tp = {tp} would split the norms over all of Q and K that this model.architecture has"),
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
                 optimizer.name = \"muon\" gathers it from them"
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

/// Every rank has two chunks of a sequence, which are as long as any other, and attention that can be computed part by part.
fn context_parallel(layout: &Layout, extents: &Extents) -> Vec<Refusal> {
    let (cp, seq) = (layout.mesh.size(MeshAxis::Cp), extents.seq);
    let mut refusals = Vec::new();
    if cp > 1 && !seq.is_multiple_of(2 * cp) {
        let inner = if layout.sequence_parallel { layout.mesh.size(MeshAxis::Tp) } else { 1 };
        let fits = |cp: &usize| *cp == 1 || (seq.is_multiple_of(2 * cp) && (seq / cp).is_multiple_of(inner));
        let sizes: Vec<usize> = divisors(seq).into_iter().filter(fits).collect();
        let longer = seq.next_multiple_of(2 * cp * inner);
        refusals.push(Refusal {
            key: "parallel.cp",
            with: &["train.seq"],
            reason: format!(
                "parallel.cp = {cp} cuts sequences into {} chunks, which do not divide train.seq = {seq}",
                2 * cp
            ),
            nearest: format!("{}, or seq = {longer}", near(MeshAxis::Cp.name(), &sizes, cp)),
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
        nearest: near(MeshAxis::Ep.name(), &divisors(experts), ep),
    })
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
            let fitting = divisors(quotient(left, micro).unwrap_or(left));
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
fn divisors(n: usize) -> Vec<usize> {
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

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: Extents = Extents {
        layers: 32,
        heads: 32,
        kv_heads: 8,
        ffn: 14336,
        dense_ffn: None,
        whole_qk_norm: false,
        experts: None,
        vocab: 128_256,
        seq: 8192,
        global_batch: 1024,
        micro_batch: 2,
        gathered_head: None,
        naive_attention: false,
    };

    fn layout(text: &str) -> Layout {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    /// The keys at fault, with the nearest values.
    fn refused(text: &str, shape: Extents) -> Vec<(&'static str, String)> {
        check(&layout(text), &shape).into_iter().map(|refusal| (refusal.key, refusal.nearest)).collect()
    }

    fn one(key: &'static str, nearest: &str) -> Vec<(&'static str, String)> {
        vec![(key, nearest.to_owned())]
    }

    #[test]
    fn a_batch_of_1024_in_micro_batches_of_2_on_128_ranks_accumulates_4_times() {
        assert_eq!(LLAMA.micro_batches(128), Some(4));
        assert_eq!(check(&layout("dp=128"), &LLAMA), []);
        assert_eq!(LLAMA.micro_batches(1), Some(512));
        assert_eq!(LLAMA.micro_batches(512), Some(1));
        assert_eq!(LLAMA.micro_batches(1024), None);
        assert_eq!(LLAMA.micro_batches(3), None);
        assert_eq!(LLAMA.micro_batches(0), None);
    }

    #[test]
    fn usual_layouts_fit() {
        let odd_vocabulary = Extents { vocab: 50_257, ..LLAMA };
        for text in ["dp=1", "dp=64,zero=3", "tp=8,sp", "dp=8,zero=1,tp=8,sp,pp=4", "pp=32,gpipe", "tp=16", "tp=32"] {
            assert_eq!(check(&layout(text), &LLAMA), [], "{text}");
            assert_eq!(check(&layout(text), &odd_vocabulary), [], "{text}");
        }
        let single = Extents {
            layers: 1,
            heads: 1,
            kv_heads: 1,
            ffn: 1,
            dense_ffn: None,
            whole_qk_norm: false,
            experts: Some(1),
            vocab: 1,
            seq: 1,
            global_batch: 1,
            micro_batch: 1,
            gathered_head: Some(1),
            naive_attention: false,
        };
        assert_eq!(check(&Layout::single(1), &single), []);
    }

    #[test]
    fn tp_divides_the_heads_and_the_hidden_units() {
        let ffn = Extents { ffn: 14, ..LLAMA };
        assert_eq!(refused("tp=5", LLAMA)[0], ("parallel.tp", "tp = 4 or 8".to_owned()));
        assert_eq!(refused("tp=64", LLAMA)[0], ("parallel.tp", "tp = 32".to_owned()));
        assert_eq!(refused("tp=4", ffn), one("parallel.tp", "tp = 2"));
        let [refusal] = &check(&layout("tp=4"), &ffn)[..] else { panic!("one rule is broken") };
        assert_eq!(refusal.to_string(), "parallel.tp = 4 does not divide model.ffn = 14\nhint: use tp = 2");
        assert_eq!(refusal.with, ["model.ffn"]);
    }

    #[test]
    fn every_tp_rank_has_a_part_of_the_vocabulary() {
        let shape = |vocab| Extents { heads: 8, kv_heads: 8, ffn: 8, vocab, ..LLAMA };
        assert_eq!(check(&layout("tp=4"), &shape(4)), []);
        assert_eq!(refused("tp=4", shape(3)), one("parallel.tp", "tp = 2"));
        // Parts of two leave the fourth rank nothing.
        assert_eq!(refused("tp=4", shape(5)), one("parallel.tp", "tp = 2"));
    }

    #[test]
    fn tp_divides_the_key_value_heads_or_is_a_multiple_of_them() {
        let shape = Extents { heads: 24, kv_heads: 6, ffn: 24, ..LLAMA };
        for fits in ["tp=2", "tp=3", "tp=6", "tp=12", "tp=24"] {
            assert_eq!(check(&layout(fits), &shape), [], "{fits}");
        }
        assert_eq!(refused("tp=4", shape), one("parallel.tp", "tp = 3 or 6"));
        assert_eq!(refused("tp=8", shape), one("parallel.tp", "tp = 6 or 12"));
    }

    #[test]
    fn ranks_that_share_a_key_head_divide_it_where_matrices_are_gathered() {
        let muon = Extents { gathered_head: Some(128 * 4096), ..LLAMA };
        for fits in ["tp=2", "tp=8,sp", "tp=32", "dp=8,zero=3,tp=2", "dp=8,zero=1,pp=4"] {
            assert_eq!(check(&layout(fits), &muon), [], "{fits}");
        }
        let odd = Extents { gathered_head: Some(2 * 33), ..LLAMA };
        assert_eq!(check(&layout("tp=16"), &odd), []);
        assert_eq!(refused("tp=32", odd), one("parallel.tp", "tp = 16"));
    }

    #[test]
    fn sequence_parallelism_needs_tp_and_a_sequence_that_it_divides() {
        assert_eq!(refused("sp", LLAMA), one("parallel.sequence_parallel", "sequence_parallel = false, or tp = 2"));
        let odd = Extents { seq: 1021, ..LLAMA };
        assert_eq!(refused("sp", odd), one("parallel.sequence_parallel", "sequence_parallel = false"));
        let seq = Extents { seq: 1028, ..LLAMA };
        assert_eq!(refused("tp=8,sp", seq), one("parallel.tp", "tp = 4"));
        assert_eq!(check(&layout("tp=8"), &seq), []);
    }

    #[test]
    fn context_parallelism_cuts_sequences_into_two_chunks_for_every_rank() {
        for fits in ["cp=2", "cp=4,context=gather,dp=8,zero=3", "cp=16,tp=8,sp,pp=2", "cp=4096", "cp=2,zero=1"] {
            assert_eq!(check(&layout(fits), &LLAMA), [], "{fits}");
        }
        assert_eq!(refused("cp=3", LLAMA), one("parallel.cp", "cp = 2 or 4, or seq = 8196"));
        assert_eq!(refused("cp=8192", LLAMA), one("parallel.cp", "cp = 4096, or seq = 16384"));
        let odd = Extents { seq: 1022, ..LLAMA };
        assert_eq!(refused("cp=2", odd), one("parallel.cp", "cp = 1 or 7, or seq = 1024"));
        assert_eq!(refused("cp=73,tp=2,sp", odd), []);
        let seq = Extents { seq: 48, ..LLAMA };
        assert_eq!(refused("cp=8,tp=4,sp", seq), one("parallel.tp", "tp = 2"));
        assert_eq!(refused("cp=16,tp=4,sp", seq), one("parallel.cp", "cp = 12, or seq = 128"));
        let naive = Extents { naive_attention: true, ..LLAMA };
        assert_eq!(refused("cp=2", naive), one("parallel.cp", "attention = \"flash\", or cp = 1"));
    }

    #[test]
    fn dp_and_the_micro_batch_divide_the_batch() {
        assert_eq!(refused("dp=3", LLAMA), one("parallel.dp", "dp = 2 or 4"));
        assert_eq!(refused("dp=2000", LLAMA), one("parallel.dp", "dp = 512"));
        assert_eq!(refused("dp=1024", LLAMA), one("train.micro_batch", "micro_batch = 1"));
        let thirds = Extents { micro_batch: 3, ..LLAMA };
        assert_eq!(refused("dp=1", thirds), one("train.micro_batch", "micro_batch = 2 or 4"));
        let reasons: Vec<_> =
            ["dp=1", "dp=4"].iter().map(|text| check(&layout(text), &thirds)[0].reason.clone()).collect();
        assert_eq!(
            reasons,
            [
                "train.micro_batch = 3 does not divide train.global_batch = 1024",
                "parallel.dp × train.micro_batch = 4 × 3 does not divide train.global_batch = 1024"
            ]
        );
    }

    #[test]
    fn replicas_share_the_batch_too() {
        assert_eq!(check(&layout("dp_replicate=2,dp=64,zero=3"), &LLAMA), []);
        assert_eq!(check(&layout("dp_replicate=8"), &LLAMA), []);
        assert_eq!(refused("dp_replicate=3", LLAMA), one("parallel.dp_replicate", "dp_replicate = 2 or 4"));
        assert_eq!(refused("dp_replicate=4,dp=256", LLAMA), one("train.micro_batch", "micro_batch = 1"));
        assert_eq!(refused("dp_replicate=4,dp=300", LLAMA), one("parallel.dp", "dp = 128"));
        assert_eq!(refused("dp_replicate=2,zero=1", LLAMA), one("parallel.zero", "zero = 0, or dp = 2 or more"));
        let thirds = Extents { micro_batch: 3, ..LLAMA };
        let reasons = ["dp_replicate=2,dp=4", "dp_replicate=2", "dp_replicate=4,dp=3"];
        assert_eq!(
            reasons.map(|text| check(&layout(text), &thirds)[0].reason.clone()),
            [
                "parallel.dp × parallel.dp_replicate × train.micro_batch = 4 × 2 × 3 does not divide train.global_batch = 1024",
                "parallel.dp_replicate × train.micro_batch = 2 × 3 does not divide train.global_batch = 1024",
                "parallel.dp = 3 does not divide train.global_batch / parallel.dp_replicate = 1024 / 4",
            ]
        );
    }

    #[test]
    fn ep_divides_the_experts_and_shares_the_batch() {
        let experts = Extents { experts: Some(12), ..LLAMA };
        for fits in ["ep=4", "dp=2,ep=2,zero=3", "ep=2,zero=1", "dp_replicate=2,ep=4,tp=2,sp,pp=2", "cp=2,ep=2"] {
            assert_eq!(check(&layout(fits), &experts), [], "{fits}");
        }
        assert_eq!(check(&layout("ep=2,bound=1.5"), &experts), []);
        assert_eq!(refused("dp=2,bound=1.5", LLAMA), one("parallel.ep_bound", "no ep_bound"));
        assert_eq!(refused("ep=8", experts), one("parallel.ep", "ep = 6 or 12"));
        let none = one("parallel.ep", "ep = 1; dp has ranks with sequences of their own");
        assert_eq!(refused("ep=2", LLAMA), none);
        assert_eq!(refused("ep=3", experts), one("parallel.ep", "ep = 2 or 4"));
        assert_eq!(refused("dp=256,ep=4", experts), one("train.micro_batch", "micro_batch = 1"));
        assert_eq!(
            check(&layout("dp=256,ep=4"), &experts)[0].reason,
            "parallel.dp × parallel.ep × train.micro_batch = 256 × 4 × 2 does not divide train.global_batch = 1024"
        );
    }

    #[test]
    fn every_stage_has_a_layer() {
        assert_eq!(check(&layout("pp=32"), &LLAMA), []);
        assert_eq!(refused("pp=33", LLAMA), one("parallel.pp", "pp = 32"));
    }

    #[test]
    fn every_virtual_stage_has_a_layer_and_a_schedule_as_many_chunks_as_it_can_have() {
        for fits in
            ["pp=8,interleaved", "pp=8,interleaved,virtual=4", "pp=16,zb-v", "pp=32,zb-h1", "pp=2,zb-v,virtual=2"]
        {
            assert_eq!(check(&layout(fits), &LLAMA), [], "{fits}");
        }
        let other = |nearest: &str| one("parallel.virtual", nearest);
        assert_eq!(refused("pp=8,virtual=2", LLAMA), other("virtual = 1, or schedule = \"interleaved\" or \"zb-v\""));
        assert_eq!(refused("pp=8,zb-h1,virtual=3", LLAMA), other("virtual = 1, or schedule = \"interleaved\""));
        assert_eq!(refused("pp=8,zb-v,virtual=3", LLAMA), other("virtual = 2, or schedule = \"interleaved\""));
        let ones = "virtual = 2, or schedule = \"1f1b\" or \"gpipe\" or \"zb-h1\"";
        assert_eq!(refused("pp=8,interleaved,virtual=1", LLAMA), other(ones));
        assert_eq!(refused("pp=8,interleaved,virtual=5", LLAMA), other("virtual = 4"));
        assert_eq!(refused("pp=20,interleaved", LLAMA), other("pp = 16"));
        assert_eq!(refused("pp=20,zb-v", LLAMA), other("pp = 16"));
        assert_eq!(refused("pp=40,zb-v", LLAMA), one("parallel.pp", "pp = 16"));
        let two = Extents { layers: 2, ..LLAMA };
        assert_eq!(refused("pp=2,zb-v", two), other("schedule = \"1f1b\" with virtual = 1"));
        let needs_pp = |nearest: &str| one("parallel.schedule", nearest);
        for schedule in ["gpipe", "interleaved", "zb-h1", "zb-v"] {
            assert_eq!(refused(schedule, LLAMA), needs_pp("schedule = \"1f1b\", or pp = 2 or more"));
        }
        assert_eq!(refused("zb-v", two), needs_pp("schedule = \"1f1b\""));
    }

    #[test]
    fn zero_needs_dp() {
        assert_eq!(refused("zero=1", LLAMA), one("parallel.zero", "zero = 0, or dp = 2 or more"));
        for text in ["dp=2,zero=1,pp=2", "dp=2,zero=2,pp=2", "dp=2,zero=3,pp=2", "dp=2,zero=3,no-reshard"] {
            assert_eq!(check(&layout(text), &LLAMA), [], "{text}");
        }
        let nearest = "reshard_after_forward = true, or zero = 3";
        assert_eq!(refused("dp=2,zero=2,no-reshard", LLAMA), one("parallel.reshard_after_forward", nearest));
        let four = Layout { zero: 4, ..layout("dp=2") };
        assert_eq!(check(&four, &LLAMA)[0].nearest, "zero = 3");
    }

    #[test]
    fn sizes_of_nothing_are_refused_before_anything_is_divided_by_them() {
        let sizes = MeshAxis::ALL;
        let mesh = sizes.into_iter().fold(lockstep_ir::Mesh::ONE, |mesh, axis| mesh.with(axis, 0));
        let none = Extents {
            layers: 0,
            heads: 0,
            kv_heads: 0,
            ffn: 0,
            dense_ffn: None,
            whole_qk_norm: false,
            experts: None,
            vocab: 0,
            seq: 0,
            global_batch: 0,
            micro_batch: 0,
            gathered_head: None,
            naive_attention: false,
        };
        assert_eq!(check(&Layout { mesh, ..Layout::single(1) }, &none).len(), 14);
        assert_eq!(refused("tp=2", Extents { kv_heads: 0, ..LLAMA }), one("model.kv_heads", "kv_heads = 1"));
    }

    #[test]
    fn several_faults_are_all_named() {
        let keys: Vec<_> = refused("dp=3,tp=3,pp=64,zero=2", LLAMA).into_iter().map(|(key, _)| key).collect();
        assert_eq!(keys, ["parallel.tp", "parallel.tp", "parallel.tp", "parallel.dp", "parallel.pp"]);
    }

    #[test]
    fn what_a_refusal_calls_nearest_fits() {
        for tp in 1..=40 {
            let shape = Extents { heads: 36, kv_heads: 12, ffn: 72, ..LLAMA };
            let wanted = layout(&format!("tp={tp}"));
            for refusal in check(&wanted, &shape) {
                let sizes = refusal.nearest.trim_start_matches("tp = ").split(" or ");
                for size in sizes.filter_map(|size| size.parse().ok()) {
                    let fits = Layout { mesh: wanted.mesh.with(MeshAxis::Tp, size), ..wanted };
                    assert_eq!(check(&fits, &shape), [], "{refusal}");
                }
            }
        }
    }

    #[test]
    fn batches_of_any_size_are_checked_at_once() {
        let large = Extents { global_batch: 1 << 32, micro_batch: (1 << 32) - 1, ..LLAMA };
        assert_eq!(refused("dp=65536", large), one("train.micro_batch", "micro_batch = 65536"));
    }
}
