//! Llama with parallel blocks, as PaLM and GPT-J have them: `x + attention(norm(x)) + feed_forward(norm(x))`, one norm per layer.

use lockstep_config::ModelConfig;
use lockstep_ir::graph::State;
use lockstep_ir::{Axis, DType, Dim, Graph, Init, Op, Section, TensorType, TypeError};
use lockstep_model::parameters::{matrix, ones};
use lockstep_model::{Form, FormInputs, names};

pub fn build(m: &ModelConfig, form: Form) -> Result<Graph, TypeError> {
    let mut g = Graph::new();
    let (batch, seq, context) = form.extents();
    let embed = || Dim::new(Axis::Embed, m.dim);
    let heads = |axis, count| Section { axis, count, unit: m.head_dim };
    let (q, kv) = (heads(Axis::Heads, m.heads), heads(Axis::KvHeads, m.kv_heads));
    let ffn = Section { axis: Axis::Ffn, count: m.ffn, unit: 1 };
    let normal = Init::Normal { std: m.init_std as f32 };
    let eps = m.norm_eps as f32;

    let ids = TensorType::new(DType::U32, [Dim::new(Axis::Batch, batch), Dim::new(Axis::Seq, seq)]);
    let tokens = g.input(names::TOKENS, ids);
    let form_inputs = FormInputs::declare(&mut g, form);
    let angles = g.state(
        "rope_table",
        TensorType::new(DType::F32, [Dim::new(Axis::Seq, context), Dim::new(Axis::HeadDim, m.head_dim)]),
        State::Constant(Init::RopeTable { theta: m.rope_theta, scaling: None }),
    );
    let table_dims = [Dim::new(Axis::Vocab, m.vocab_size), embed()];
    let table = matrix(&mut g, "embed", table_dims.clone(), &normal, &["model.embed_tokens.weight"]);
    let mut x = g.op(Op::Embedding, &[tokens, table], "x0")?[0];
    for layer in 0..m.layers {
        g.enter_layer(Some(layer));
        let at = |name: &str| format!("layers.{layer}.{name}");
        let hf = |name: &str| format!("model.layers.{layer}.{name}.weight");

        let w = ones(&mut g, &at("norm"), embed(), &[hf("input_layernorm")]);
        let n = g.op(Op::rms_norm(eps), &[x, w], &at("n"))?[0];

        let parts = ["q", "k", "v"].map(|p| hf(&format!("self_attn.{p}_proj")));
        let w = matrix(&mut g, &at("wqkv"), [Dim::packed([q, kv, kv]), embed()], &normal, &parts);
        let qkv = g.op(Op::Linear, &[n, w], &at("qkv"))?[0];
        let qkv = form_inputs.rotate(&mut g, qkv, angles, &at)?;
        let o = form_inputs.attend(&mut g, qkv, (m.attention, m.layer_parts(layer).window), &at)?;
        let w = matrix(&mut g, &at("wo"), [embed(), Dim::packed([q])], &normal, &[hf("self_attn.o_proj")]);
        let attention = g.op(Op::Linear, &[o, w], &at("attention_out"))?[0];

        let parts = [hf("mlp.gate_proj"), hf("mlp.up_proj")];
        let w = matrix(&mut g, &at("wgate_up"), [Dim::packed([ffn, ffn]), embed()], &normal, &parts);
        let gate_up = g.op(Op::Linear, &[n, w], &at("gate_up"))?[0];
        let y = g.op(Op::SwiGlu, &[gate_up], &at("hidden"))?[0];
        let w = matrix(&mut g, &at("wdown"), [embed(), Dim::packed([ffn])], &normal, &[hf("mlp.down_proj")]);
        let feed_forward = g.op(Op::Linear, &[y, w], &at("ffn_out"))?[0];

        let both = g.op(Op::Add, &[attention, feed_forward], &at("both"))?[0];
        x = g.op(Op::Add, &[x, both], &format!("x{}", layer + 1))?[0];
    }
    g.enter_layer(None);
    let x = form_inputs.wanted(&mut g, x)?;
    let w = ones(&mut g, "final_norm", embed(), &["model.norm.weight"]);
    let n = g.op(Op::rms_norm(eps), &[x, w], "n")?[0];
    let head = match m.tied_embeddings {
        true => table,
        false => matrix(&mut g, "head", table_dims, &normal, &["lm_head.weight"]),
    };
    let logits = g.op(Op::Linear, &[n, head], names::LOGITS)?[0];
    form_inputs.finish(&mut g, logits)?;
    Ok(g)
}
