//! The decoder that Llama and its relatives share: RMSNorm, RoPE, grouped-query attention (GQA), SwiGLU.
//!
//! What a family has besides is in its [`Features`](lockstep_config::Features).

use crate::form::{Form, Side};
use crate::mixture::{ExpertNames, Gated, mixture};
use crate::names as values;
use crate::parameters::{matrix, ones, zeros};
use lockstep_config::ModelConfig;
use lockstep_ir::graph::State;
use lockstep_ir::{Axis, DType, Dim, Graph, Init, Op, RopeScaling, Section, TensorType, TypeError, ValueId};

/// The forward graph of a model that has these parts.
pub(crate) fn build(m: &ModelConfig, form: Form) -> Result<Graph, TypeError> {
    build_named(m, form, &ExpertNames { block: "mlp", matrices: ["gate_proj", "up_proj", "down_proj"] })
}

/// The same where experts go by other names.
pub(crate) fn build_named(m: &ModelConfig, form: Form, names: &ExpertNames) -> Result<Graph, TypeError> {
    let mut g = Graph::new();
    let features = m.architecture.features();
    let (batch, seq, context) = form.extents();
    let trains = matches!(form, Form::Loss { .. });
    let embed = || Dim::new(Axis::Embed, m.dim);
    let heads = |axis, count| Section { axis, count, unit: m.head_dim };
    let q = heads(Axis::Heads, m.heads);
    let kv = heads(Axis::KvHeads, m.kv_heads);
    let head = Section { axis: Axis::HeadDim, count: m.head_dim, unit: 1 };
    let normal = Init::Normal { std: m.init_std as f32 };
    // Projections that write to the residual stream start smaller, so that its variance does not grow with depth.
    let to_residual = Init::Normal { std: (m.init_std / (2.0 * m.layers as f64).sqrt()) as f32 };
    let eps = m.norm_eps as f32;

    let ids = TensorType::new(DType::U32, [Dim::new(Axis::Batch, batch), Dim::new(Axis::Seq, seq)]);
    let tokens = g.input(values::TOKENS, ids);
    let side = Side::declare(&mut g, form);
    let scaling = m.rope_scaling.as_ref().map(|s| RopeScaling {
        factor: s.factor,
        low_freq_factor: s.low_freq_factor,
        high_freq_factor: s.high_freq_factor,
        original_context: s.original_context as f64,
    });
    let angles = g.state(
        "rope_table",
        TensorType::new(DType::F32, [Dim::new(Axis::Seq, context), Dim::new(Axis::HeadDim, m.head_dim)]),
        State::Constant(Init::RopeTable { theta: m.rope_theta, scaling }),
    );

    let table_dims = [Dim::new(Axis::Vocab, m.vocab_size), embed()];
    let table = matrix(&mut g, "embed", table_dims.clone(), &normal, &["model.embed_tokens.weight"]);
    let mut x = g.op(Op::Embedding, &[tokens, table], "x0")?[0];
    for layer in 0..m.layers {
        g.enter_layer(Some(layer));
        let at = |name: &str| format!("layers.{layer}.{name}");
        let named = |name: &str, kind: &str| format!("model.layers.{layer}.{name}.{kind}");
        let hf = |name: &str| named(name, "weight");

        let w = ones(&mut g, &at("attention_norm"), embed(), &[hf("input_layernorm")]);
        let n = g.op(Op::rms_norm(eps), &[x, w], &at("n1"))?[0];
        let parts = |kind| ["q", "k", "v"].map(|p| named(&format!("self_attn.{p}_proj"), kind));
        let packed = Dim::packed([q, kv, kv]);
        let w = matrix(&mut g, &at("wqkv"), [packed.clone(), embed()], &normal, &parts("weight"));
        let mut qkv = g.op(Op::Linear, &[n, w], &at("qkv"))?[0];
        if features.qkv_bias {
            let bias = zeros(&mut g, &at("bqkv"), packed, &parts("bias"));
            qkv = g.op(Op::AddBias, &[qkv, bias], &at("qkv_biased"))?[0];
        }
        if features.whole_qk_norm {
            let normed = |g: &mut Graph, section, (ours, theirs): (&str, &str), dim| -> Result<ValueId, TypeError> {
                let x = g.op(Op::Slice { first: section, count: 1 }, &[qkv], &at(ours))?[0];
                let w = ones(g, &at(&format!("{ours}_norm")), Dim::packed([dim]), &[hf(theirs)]);
                Ok(g.op(Op::rms_norm(eps), &[x, w], &at(&format!("{ours}_normed")))?[0])
            };
            let queries = normed(&mut g, 0, ("q", "self_attn.q_norm"), q)?;
            let keys = normed(&mut g, 1, ("k", "self_attn.k_norm"), kv)?;
            let values = g.op(Op::Slice { first: 2, count: 1 }, &[qkv], &at("v"))?[0];
            qkv = g.op(Op::Concat, &[queries, keys, values], &at("qkv_normed"))?[0];
        }
        if features.qk_norm {
            let parts = [hf("self_attn.q_norm"), hf("self_attn.k_norm")];
            let w = ones(&mut g, &at("qk_norm"), Dim::packed([head, head]), &parts);
            qkv = g.op(Op::QkNorm { eps }, &[qkv, w], &at("qkv_normed"))?[0];
        }
        let qkv = side.rotate(&mut g, qkv, angles, &at)?;
        let o = side.attend(&mut g, qkv, kv, m, &at)?;
        let w = matrix(&mut g, &at("wo"), [embed(), Dim::packed([q])], &to_residual, &[hf("self_attn.o_proj")]);
        let delta = g.op(Op::Linear, &[o, w], &at("attention_out"))?[0];
        x = g.op(Op::Add, &[x, delta], &at("mid"))?[0];

        let w = ones(&mut g, &at("ffn_norm"), embed(), &[hf("post_attention_layernorm")]);
        let n = g.op(Op::rms_norm(eps), &[x, w], &at("n2"))?[0];
        let inits = [&normal, &to_residual];
        let delta = match m.experts.filter(|_| layer >= m.dense_layers) {
            Some(experts) => mixture(&mut g, n, m, (experts, names), (layer, trains), inits)?,
            None => Gated { layer, ours: "", theirs: "mlp", ffn: m.ffn }.build(&mut g, n, inits)?,
        };
        x = g.op(Op::Add, &[x, delta], &format!("x{}", layer + 1))?[0];
    }
    g.enter_layer(None);
    let x = side.wanted(&mut g, x)?;
    let w = ones(&mut g, "final_norm", embed(), &["model.norm.weight"]);
    let n = g.op(Op::rms_norm(eps), &[x, w], "n")?[0];
    let head = if m.tied_embeddings { table } else { matrix(&mut g, "head", table_dims, &normal, &["lm_head.weight"]) };
    let logits = g.op(Op::Linear, &[n, head], values::LOGITS)?[0];
    side.finish(&mut g, logits)?;
    Ok(g)
}
