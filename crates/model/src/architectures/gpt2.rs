//! GPT-2: layer norms, learned positions, multi-head attention, a GELU between two projections, biases everywhere.

use crate::form::{Form, FormInputs};
use crate::names;
use crate::parameters::{matrix, ones, zeros};
use lockstep_config::ModelConfig;
use lockstep_ir::{Axis, DType, Dim, Graph, Init, Op, Section, TensorType, TypeError, ValueId};

pub(crate) fn build(m: &ModelConfig, form: Form) -> Result<Graph, TypeError> {
    let mut g = Graph::new();
    let (batch, seq, context) = form.extents();
    let embed = || Dim::new(Axis::Embed, m.dim);
    let heads = |axis| Section { axis, count: m.heads, unit: m.head_dim };
    let (q, kv) = (heads(Axis::Heads), heads(Axis::KvHeads));
    let ffn = || Dim::new(Axis::Ffn, m.ffn);
    let normal = Init::Normal { std: m.init_std as f32 };
    // Projections that write to the residual stream start smaller, so that its variance does not grow with depth.
    let to_residual = Init::Normal { std: (m.init_std / (2.0 * m.layers as f64).sqrt()) as f32 };
    let eps = m.norm_eps as f32;

    let ids = TensorType::new(DType::U32, [Dim::new(Axis::Batch, batch), Dim::new(Axis::Seq, seq)]);
    let tokens = g.input(names::TOKENS, ids);
    let form_inputs = FormInputs::declare(&mut g, form).dropping(&mut g, m.dropout);
    let table_dims = [Dim::new(Axis::Vocab, m.vocab_size), embed()];
    let table = matrix(&mut g, "embed", table_dims.clone(), &normal, &["transformer.wte.weight"]);
    let position_dims = [Dim::new(Axis::Seq, m.positions.unwrap_or(context)), embed()];
    let positions = matrix(&mut g, "positions", position_dims, &normal, &["transformer.wpe.weight"]);
    let x = g.op(Op::Embedding, &[tokens, table], "embedded")?[0];
    let x = form_inputs.place(&mut g, x, positions, "placed")?;
    let mut x = form_inputs.drop(&mut g, x, "x0")?;
    for layer in 0..m.layers {
        g.enter_layer(Some(layer));
        let at = |name: &str| format!("layers.{layer}.{name}");
        let hf = |name: &str| format!("transformer.h.{layer}.{name}");

        let n = norm(&mut g, x, eps, (&at("attention_norm"), &hf("ln_1")), &at("n1"))?;
        let dims = [Dim::packed([q, kv, kv]), embed()];
        let qkv = project(&mut g, n, dims, &normal, (&at("qkv"), &hf("attn.c_attn")))?;
        let o = form_inputs.attend(&mut g, qkv, (m.attention, None), &at)?;
        let dims = [embed(), Dim::packed([q])];
        let delta = project(&mut g, o, dims, &to_residual, (&at("attention_out"), &hf("attn.c_proj")))?;
        let delta = form_inputs.drop(&mut g, delta, &at("attention_dropped"))?;
        x = g.op(Op::Add, &[x, delta], &at("mid"))?[0];

        let n = norm(&mut g, x, eps, (&at("ffn_norm"), &hf("ln_2")), &at("n2"))?;
        let up = project(&mut g, n, [ffn(), embed()], &normal, (&at("up"), &hf("mlp.c_fc")))?;
        let y = g.op(Op::Gelu, &[up], &at("hidden"))?[0];
        let delta = project(&mut g, y, [embed(), ffn()], &to_residual, (&at("ffn_out"), &hf("mlp.c_proj")))?;
        let delta = form_inputs.drop(&mut g, delta, &at("ffn_dropped"))?;
        x = g.op(Op::Add, &[x, delta], &format!("x{}", layer + 1))?[0];
    }
    g.enter_layer(None);
    let x = form_inputs.wanted(&mut g, x)?;
    let n = norm(&mut g, x, eps, ("final_norm", "transformer.ln_f"), "n")?;
    let head = if m.tied_embeddings { table } else { matrix(&mut g, "head", table_dims, &normal, &["lm_head.weight"]) };
    let logits = g.op(Op::Linear, &[n, head], names::LOGITS)?[0];
    form_inputs.finish(&mut g, logits)?;
    Ok(g)
}

/// `x · wᵀ + b`, called by our name and Hugging Face's. One tensor of theirs holds all sections of a packed dimension.
fn project(
    g: &mut Graph,
    x: ValueId,
    dims: [Dim; 2],
    init: &Init,
    (ours, theirs): (&str, &str),
) -> Result<ValueId, TypeError> {
    let bias = zeros(g, &format!("{ours}.bias"), dims[0].clone(), &[format!("{theirs}.bias")]);
    let w = matrix(g, &format!("{ours}.weight"), dims, init, &[format!("{theirs}.weight")]);
    let y = g.op(Op::Linear, &[x, w], &format!("{ours}.matmul"))?[0];
    Ok(g.op(Op::AddBias, &[y, bias], ours)?[0])
}

/// A layer norm, its parameters called by our name and Hugging Face's.
fn norm(g: &mut Graph, x: ValueId, eps: f32, (ours, theirs): (&str, &str), name: &str) -> Result<ValueId, TypeError> {
    let dim = g.ty(x).dims[2].clone();
    let w = ones(g, &format!("{ours}.weight"), dim.clone(), &[format!("{theirs}.weight")]);
    let bias = zeros(g, &format!("{ours}.bias"), dim, &[format!("{theirs}.bias")]);
    Ok(g.op(Op::layer_norm(eps), &[x, w, bias], name)?[0])
}
