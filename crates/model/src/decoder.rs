//! The decoder that Llama and its relatives share: RMSNorm, RoPE, grouped-query attention (GQA), SwiGLU.
//!
//! What a family has besides is in its [`Features`](lockstep_config::Features).

use crate::form::{Form, Side};
use crate::names as values;
use crate::parameters::{exact_matrix, matrix, ones, stack, zeros};
use lockstep_config::ModelConfig;
use lockstep_ir::graph::{Loss, State};
use lockstep_ir::op::Routing;
use lockstep_ir::{Axis, DType, Dim, Graph, Init, Op, RopeScaling, Section, TensorType, TypeError, ValueId};

/// What Hugging Face calls the parts of a mixture of experts.
pub(crate) struct ExpertNames {
    /// The block of a layer.
    pub block: &'static str,
    /// The matrices of an expert: gate, up and down.
    pub matrices: [&'static str; 3],
}

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
    let ffn = Section { axis: Axis::Ffn, count: m.ffn, unit: 1 };
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
        let n = g.op(Op::RmsNorm { eps }, &[x, w], &at("n1"))?[0];
        let parts = |kind| ["q", "k", "v"].map(|p| named(&format!("self_attn.{p}_proj"), kind));
        let packed = Dim::packed([q, kv, kv]);
        let w = matrix(&mut g, &at("wqkv"), [packed.clone(), embed()], &normal, &parts("weight"));
        let mut qkv = g.op(Op::Linear, &[n, w], &at("qkv"))?[0];
        if features.qkv_bias {
            let bias = zeros(&mut g, &at("bqkv"), packed, &parts("bias"));
            qkv = g.op(Op::AddBias, &[qkv, bias], &at("qkv_biased"))?[0];
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
        let n = g.op(Op::RmsNorm { eps }, &[x, w], &at("n2"))?[0];
        let delta = match m.experts {
            Some(experts) => mixture(&mut g, n, m, (experts, names), (layer, trains), [&normal, &to_residual])?,
            None => {
                let parts = [hf("mlp.gate_proj"), hf("mlp.up_proj")];
                let w = matrix(&mut g, &at("wgate_up"), [Dim::packed([ffn, ffn]), embed()], &normal, &parts);
                let gate_up = g.op(Op::Linear, &[n, w], &at("gate_up"))?[0];
                let y = g.op(Op::SwiGlu, &[gate_up], &at("hidden"))?[0];
                let dims = [embed(), Dim::packed([ffn])];
                let w = matrix(&mut g, &at("wdown"), dims, &to_residual, &[hf("mlp.down_proj")]);
                g.op(Op::Linear, &[y, w], &at("ffn_out"))?[0]
            }
        };
        x = g.op(Op::Add, &[x, delta], &format!("x{}", layer + 1))?[0];
    }
    g.enter_layer(None);
    let x = side.wanted(&mut g, x)?;
    let w = ones(&mut g, "final_norm", embed(), &["model.norm.weight"]);
    let n = g.op(Op::RmsNorm { eps }, &[x, w], "n")?[0];
    let head = match m.tied_embeddings {
        true => table,
        false => matrix(&mut g, "head", table_dims, &normal, &["lm_head.weight"]),
    };
    let logits = g.op(Op::Linear, &[n, head], values::LOGITS)?[0];
    side.finish(&mut g, logits)?;
    Ok(g)
}

/// A mixture of experts: a router in f32 that chooses some of them for every token, and the weighted sum of what these give.
fn mixture(
    g: &mut Graph,
    x: ValueId,
    m: &ModelConfig,
    (experts, names): (usize, &ExpertNames),
    (layer, trains): (usize, bool),
    [normal, to_residual]: [&Init; 2],
) -> Result<ValueId, TypeError> {
    let at = |name: &str| format!("layers.{layer}.{name}");
    let embed = || Dim::new(Axis::Embed, m.dim);
    let each = || Dim::new(Axis::Experts, experts);
    let ffn = Section { axis: Axis::Ffn, count: m.expert_ffn.unwrap_or(m.ffn), unit: 1 };
    let &ExpertNames { block, matrices: [gate, up, down] } = names;
    let hf = |name: &str| format!("model.layers.{layer}.{block}.{name}.weight");
    let of_each = |names: &[&str]| -> Vec<String> {
        (0..experts).flat_map(|e| names.iter().map(move |name| hf(&format!("experts.{e}.{name}")))).collect()
    };

    let exact = g.op(Op::Cast { to: DType::F32 }, &[x], &at("router_input"))?[0];
    let w = exact_matrix(g, &at("router"), [each(), embed()], normal, &[hf("gate")]);
    let logits = g.op(Op::Linear, &[exact, w], &at("router_logits"))?[0];
    let how = Routing { normalise: m.norm_topk, ..Routing::top(m.experts_per_token.unwrap_or(1)) };
    let routed = g.op(Op::Route { how }, &[logits], &at("routed"))?;
    let (weights, chosen) = (routed[0], routed[1]);
    let (balance, z) = (m.balance_loss as f32, m.z_loss as f32);
    if trains && balance + z > 0.0 {
        let counts = g.op(Op::ExpertCounts { experts }, &[chosen], &at("expert_counts"))?[0];
        let value = g.op(Op::RouterLoss { balance, z }, &[logits, counts], &at("router_loss"))?[0];
        g.losses.push(Loss { value, weight: 1.0 });
    }
    let w = stack(g, &at("wgate_up"), [each(), Dim::packed([ffn, ffn]), embed()], normal, &of_each(&[gate, up]));
    let gate_up = g.op(Op::GroupedLinear, &[x, w, chosen], &at("gate_up"))?[0];
    let y = g.op(Op::SwiGlu, &[gate_up], &at("hidden"))?[0];
    let w = stack(g, &at("wdown"), [each(), embed(), Dim::packed([ffn])], to_residual, &of_each(&[down]));
    let y = g.op(Op::GroupedLinearEach, &[y, w, chosen], &at("expert_out"))?[0];
    Ok(g.op(Op::Combine, &[y, weights], &at("ffn_out"))?[0])
}
