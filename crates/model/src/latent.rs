//! Multi-head latent attention (MLA), as DeepSeek-V2 and V3 have it: keys and values of all heads expand from a narrow latent, and one key
//! with RoPE is shared by all heads.
//!
//! In training K and V exist as they expand, so attention is that of any model, whose heads of V are of another size than those of Q and K.
//! Generation keeps the latent and the shared key of every position, which are one key for all heads: queries absorb the weight of keys, and what
//! attention gives goes through that of values.

use crate::parameters::{matrix, ones};
use lockstep_config::{LatentAttention, ModelConfig};
use lockstep_ir::{Axis, Dim, Graph, Init, Op, Section, TypeError, ValueId};

/// What norms of latents add to the mean square, whatever `model.norm_eps` is.
const EPS: f32 = 1e-6;

/// Names of a layer's values, and Hugging Face's of its weights.
#[derive(Clone, Copy)]
pub(crate) struct Names<'a> {
    pub at: &'a dyn Fn(&str) -> String,
    pub hf: &'a dyn Fn(&str) -> String,
}

/// Packed Q·K·V of a layer whose attention is latent, with queries times `scale`, before RoPE. Where queries absorb the weight of keys, that
/// weight too: `LatentValues` turns what attention gives into values.
pub(crate) fn latent_qkv(
    g: &mut Graph,
    x: ValueId,
    (m, latent, absorbed): (&ModelConfig, LatentAttention, bool),
    names: Names,
    (normal, scale): (&Init, f32),
) -> Result<(ValueId, Option<ValueId>), TypeError> {
    let project =
        |g: &mut Graph, x: ValueId, (ours, theirs): (&str, &str), outputs: Dim| -> Result<ValueId, TypeError> {
            let inputs = g.ty(x).dims.last().cloned().unwrap_or(Dim::new(Axis::Embed, m.dim));
            let parts = [(names.hf)(&format!("self_attn.{theirs}"))];
            let w = matrix(g, &(names.at)(&format!("w{ours}")), [outputs, inputs], normal, &parts);
            Ok(g.op(Op::Linear, &[x, w], &(names.at)(ours))?[0])
        };
    let norm = |g: &mut Graph, x: ValueId, (ours, theirs): (&str, &str)| -> Result<ValueId, TypeError> {
        let width = g.ty(x).dims.last().cloned().unwrap_or(Dim::new(Axis::Latent, 1));
        let parts = [(names.hf)(&format!("self_attn.{theirs}"))];
        let w = ones(g, &(names.at)(&format!("{ours}_norm")), width, &parts);
        Ok(g.op(Op::rms_norm(EPS), &[x, w], &(names.at)(&format!("{ours}_normed")))?[0])
    };
    let heads = |axis, unit| Dim::grouped(axis, m.heads, unit);
    let queries = heads(Axis::Heads, latent.nope + latent.rope);
    let q = match latent.q_rank {
        None => project(g, x, ("q", "q_proj"), queries)?,
        Some(rank) => {
            let low = project(g, x, ("q_a", "q_a_proj"), Dim::new(Axis::Latent, rank))?;
            let low = norm(g, low, ("q_a", "q_a_layernorm"))?;
            project(g, low, ("q", "q_b_proj"), queries)?
        }
    };
    let section = |axis, count| Section { axis, count, unit: 1 };
    let low = Dim::packed([section(Axis::Latent, latent.kv_rank), section(Axis::HeadDim, latent.rope)]);
    let low = project(g, x, ("kv_a", "kv_a_proj_with_mqa"), low)?;
    let compressed = g.op(Op::Slice { first: 0, count: 1 }, &[low], &(names.at)("latent"))?[0];
    let shared = g.op(Op::Slice { first: 1, count: 1 }, &[low], &(names.at)("shared_key"))?[0];
    let compressed = norm(g, compressed, ("kv_a", "kv_a_layernorm"))?;
    let expanded = heads(Axis::KvHeads, latent.nope + latent.value);
    if absorbed {
        let inputs = Dim::new(Axis::Latent, latent.kv_rank);
        let w = matrix(g, &(names.at)("wkv"), [expanded, inputs], normal, &[(names.hf)("self_attn.kv_b_proj")]);
        // Attention divides by the root of the width of its keys, which is that of the latent here.
        let widths = (latent.kv_rank + latent.rope) as f64 / (latent.nope + latent.rope) as f64;
        let op = Op::LatentHeads { absorbed, scale: (f64::from(scale) * widths.sqrt()) as f32 };
        return Ok((g.op(op, &[q, w, compressed, shared], &(names.at)("qkv"))?[0], Some(w)));
    }
    let kv = project(g, compressed, ("kv", "kv_b_proj"), expanded)?;
    Ok((g.op(Op::LatentHeads { absorbed, scale }, &[q, kv, shared], &(names.at)("qkv"))?[0], None))
}
