//! A config made small, so that many layouts of it run in little time.

use lockstep_config::Config;
use lockstep_ir::{Axes, ContextParallel, Layout, MeshAxis};

/// A model and batch small enough to run many times, with what was made smaller: `model.layers 32 -> 4`. What fits these
/// layouts before fits them after; query heads per key head stay, and so does accumulation up to a bound.
pub fn shrink(config: &Config, layouts: &[Layout]) -> (Config, Vec<String>) {
    let most = |size: fn(&Layout) -> usize| layouts.iter().map(size).fold(1, |a, b| a / gcd(a, b) * b);
    let (tp, dp) = (most(|l| l.mesh.size(MeshAxis::Tp)), most(|l| l.mesh.size(Axes::SEQUENCES)));
    let stages = layouts.iter().map(Layout::stages).max().unwrap_or(1);
    // The least multiple of `step` that is at least `wanted`, where the size was a multiple of it and larger.
    let fit = |size: usize, wanted: usize, step: usize| match size.is_multiple_of(step) {
        true => size.min(wanted.next_multiple_of(step)),
        false => size,
    };
    let mut small = config.clone();
    let (m, t) = (&mut small.model, &mut small.train);
    let group = m.heads / m.kv_heads;
    // Ranks that have whole heads.
    let split = most(|l| match l.context {
        ContextParallel::Ring | ContextParallel::Gather | ContextParallel::Latent => l.mesh.size(MeshAxis::Tp),
        ContextParallel::AllToAll => l.mesh.size(Axes::of(&[MeshAxis::Tp, MeshAxis::Cp])),
    });
    m.kv_heads = if m.kv_heads.is_multiple_of(split) { fit(m.kv_heads, 4, split) } else { m.kv_heads };
    // Fewer heads per key head, if all layouts still divide them.
    let fewer = (1..=group.min(4)).rev().find(|g| group.is_multiple_of(*g) && (m.kv_heads * g).is_multiple_of(split));
    m.heads = m.kv_heads * fewer.unwrap_or(group);
    let plain = config.model.dim == config.model.heads * config.model.head_dim;
    m.head_dim = m.head_dim.min(16);
    if let Some(latent) = config.model.latent() {
        // Parts of heads and latents of sizes that differ, as they did.
        let sizes = [(&mut m.qk_nope_head_dim, latent.nope, 12), (&mut m.qk_rope_head_dim, latent.rope, 8)];
        sizes.into_iter().for_each(|(to, size, most)| *to = Some(size.min(most)));
        m.head_dim = m.latent().map_or(m.head_dim, |latent| latent.nope + latent.rope);
        m.v_head_dim = Some(latent.value.min(12));
        m.kv_lora_rank = Some(latent.kv_rank.min(32));
        m.q_lora_rank = latent.q_rank.map(|rank| rank.min(48));
    }
    if config.model.softmax_scale_dim == config.model.head_dim {
        m.softmax_scale_dim = m.head_dim;
    }
    m.dim = if plain { m.heads * m.head_dim } else { m.dim.min(128) };
    // All kinds of layers that there are.
    let patterns = m.layer_types.len().max(m.rope_layers.len());
    m.layers = m.layers.min(stages.max(4).max(patterns));
    if m.layers != config.model.layers {
        small.parallel.stages.clear();
    }
    m.vocab_size = m.vocab_size.min(509.max(tp * tp));
    // Families that have one width for both keep one.
    let same = m.expert_ffn == Some(m.ffn);
    m.ffn = fit(m.ffn, 192, tp);
    m.expert_ffn = m.expert_ffn.map(|ffn| if same { m.ffn } else { fit(ffn, 64, tp) });
    let top = m.experts_per_token.unwrap_or(1);
    let ep = most(|l| l.mesh.size(MeshAxis::Ep));
    // Groups of experts, where there are some, become two.
    let step = if m.expert_groups > 1 && !ep.is_multiple_of(2) { 2 * ep } else { ep };
    m.experts = m.experts.map(|experts| fit(experts, 8.max(2 * top), step));
    if m.experts != config.model.experts && m.expert_groups > 1 {
        (m.expert_groups, m.expert_top_groups) = (2, 1);
    }
    m.dense_layers = m.dense_layers.min(1);
    // Chunks of context-parallel ranks, in which sequence-parallel ranks have parts.
    let chunks = most(|l| if l.mesh.size(MeshAxis::Cp) == 1 { 1 } else { 2 * l.mesh.size(MeshAxis::Cp) });
    t.seq = fit(t.seq, 64, tp * chunks);
    // What was shorter than a sequence stays so.
    let share = |window: usize| (window * t.seq / config.train.seq).max(1);
    m.sliding_window = m.sliding_window.map(|w| if w < config.train.seq { share(w) } else { w });
    let rounds = config.train.global_batch / config.train.micro_batch;
    t.micro_batch = t.micro_batch.min(2);
    let least = fit(rounds, 8, dp).min(rounds);
    t.global_batch = t.micro_batch * least;
    let all = [
        ("model.layers", config.model.layers, small.model.layers),
        ("model.dim", config.model.dim, small.model.dim),
        ("model.heads", config.model.heads, small.model.heads),
        ("model.kv_heads", config.model.kv_heads, small.model.kv_heads),
        ("model.head_dim", config.model.head_dim, small.model.head_dim),
        ("model.kv_lora_rank", config.model.kv_lora_rank.unwrap_or(0), small.model.kv_lora_rank.unwrap_or(0)),
        ("model.q_lora_rank", config.model.q_lora_rank.unwrap_or(0), small.model.q_lora_rank.unwrap_or(0)),
        ("model.v_head_dim", config.model.v_head_dim.unwrap_or(0), small.model.v_head_dim.unwrap_or(0)),
        ("model.ffn", config.model.ffn, small.model.ffn),
        ("model.expert_ffn", config.model.expert_ffn.unwrap_or(0), small.model.expert_ffn.unwrap_or(0)),
        ("model.experts", config.model.experts.unwrap_or(0), small.model.experts.unwrap_or(0)),
        ("model.expert_groups", config.model.expert_groups, small.model.expert_groups),
        ("model.expert_top_groups", config.model.expert_top_groups, small.model.expert_top_groups),
        ("model.dense_layers", config.model.dense_layers, small.model.dense_layers),
        ("model.vocab_size", config.model.vocab_size, small.model.vocab_size),
        ("model.sliding_window", config.model.sliding_window.unwrap_or(0), small.model.sliding_window.unwrap_or(0)),
        ("train.seq", config.train.seq, small.train.seq),
        ("train.global_batch", config.train.global_batch, small.train.global_batch),
        ("train.micro_batch", config.train.micro_batch, small.train.micro_batch),
    ];
    let changed = all.iter().filter(|(_, from, to)| from != to);
    (small, changed.map(|(key, from, to)| format!("{key} {from} -> {to}")).collect())
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
