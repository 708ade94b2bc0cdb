//! The extents of a model, as formulas name them.

use lockstep_config::{LatentAttention, ModelConfig};

/// The extents of a model, as formulas name them.
pub(super) struct Sizes {
    /// Width of the residual stream.
    pub(super) d: f64,
    /// Widths of all queries, of all keys, of all values, and of what attention gives.
    pub(super) q: f64,
    pub(super) k: f64,
    pub(super) v: f64,
    pub(super) o: f64,
    /// The sizes of latent attention, where it is.
    pub(super) latent: Option<LatentAttention>,
    pub(super) ffn: f64,
    pub(super) layers: f64,
    pub(super) heads: f64,
    pub(super) kv_heads: f64,
    /// Matrices of an MLP: three where it is gated.
    pub(super) products: f64,
    /// Experts of a layer, none where it has an MLP, those of a token, and those of all tokens.
    pub(super) experts: f64,
    pub(super) top: f64,
    pub(super) shared: f64,
    /// First layers without experts where others have some, and their hidden units.
    pub(super) dense: f64,
    pub(super) wide: f64,
}

impl Sizes {
    pub(super) fn of(m: &ModelConfig) -> Self {
        let ffn = m.expert_ffn.unwrap_or(m.ffn);
        let [d, ffn, layers, heads, kv_heads] = [m.dim, ffn, m.layers, m.heads, m.kv_heads].map(|n| n as f64);
        let [experts, top] = [m.experts.unwrap_or(0), m.experts_per_token.unwrap_or(1)].map(|n| n as f64);
        let [q, k] = [m.heads, m.kv_heads].map(|n| (n * m.head_dim) as f64);
        let [o, v] = [m.heads, m.kv_heads].map(|n| (n * m.value_dim()) as f64);
        let latent = m.latent();
        let products = if m.architecture.features().gpt2_block { 2.0 } else { 3.0 };
        let [shared, dense, wide] = [m.shared_experts.unwrap_or(0), m.dense_layers, m.ffn].map(|n| n as f64);
        Self { d, q, k, v, o, latent, ffn, layers, heads, kv_heads, products, experts, top, shared, dense, wide }
    }

    /// Elements of the matrices of an attention, by the length of their rows: into it, and out of it.
    pub(super) fn attention(&self) -> Vec<(f64, f64)> {
        let &Self { d, q, k, v, o, heads, .. } = self;
        let into = match self.latent {
            None => vec![(d * (q + k + v), d)],
            Some(LatentAttention { q_rank, kv_rank, nope, rope, value }) => {
                let [rank, shared, expanded] = [kv_rank, rope, nope + value].map(|n| n as f64);
                let queries = match q_rank.map(|rank| rank as f64) {
                    None => vec![(d * q, d)],
                    Some(rank) => vec![(d * rank, d), (rank * q, rank)],
                };
                queries.into_iter().chain([(d * (rank + shared), d), (rank * heads * expanded, rank)]).collect()
            }
        };
        into.into_iter().chain([(o * d, o)]).collect()
    }

    pub(super) fn attention_matrices(&self) -> f64 {
        self.attention().iter().map(|(elements, _)| elements).sum()
    }

    /// Widths of the latents, each of which has a norm, and how many there are.
    pub(super) fn latents(&self) -> (f64, f64) {
        let ranks = self
            .latent
            .map(|latent| (latent.q_rank.unwrap_or(0) + latent.kv_rank, 1 + u8::from(latent.q_rank.is_some())));
        ranks.map_or((0.0, 0.0), |(width, norms)| (width as f64, f64::from(norms)))
    }
}

/// Elements of the matrices of latent attention: R is the width of a latent, H the heads, N, P and V the elements of a head without
/// position, with RoPE, and of values.
pub(super) fn latent_matrices(latent: Option<LatentAttention>) -> &'static str {
    match latent.is_some_and(|latent| latent.q_rank.is_some()) {
        true => "D · (R_q + R_kv + P + O) + R_q · Q + R_kv · H · (N + V)",
        false => "D · (Q + R_kv + P + O) + R_kv · H · (N + V)",
    }
}
