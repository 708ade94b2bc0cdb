//! The decoder that Llama and its relatives share: RMSNorm, RoPE, grouped-query attention (GQA) or latent attention (MLA), a gated MLP.
//!
//! What a model has of the parts that differ (places of norms, QK norm, windows, positions, activation) is in its
//! [`ModelConfig`]; the defaults of these keys, and what no key says, are in the [`Features`](lockstep_config::Features) of its
//! family.

use crate::form::{Form, FormInputs};
use crate::further::further_tokens;
use crate::latent::{Names, latent_qkv};
use crate::mixture::{ExpertNames, Gated, gate, mixture};
use crate::names as values;
use crate::parameters::{exact_zeros, matrix, norm_weight, zeros};
use lockstep_config::{LayerRope, ModelConfig, NormPlaces, QkNorm, RopeScalingConfig};
use lockstep_ir::graph::State;
use lockstep_ir::{Axis, DType, Dim, Graph, Init, Op, RopeScaling, Section, TensorType, TypeError, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// The forward graph of a model that has these parts.
pub(crate) fn build(m: &ModelConfig, form: Form) -> Result<Graph, TypeError> {
    build_named(m, form, &ExpertNames::APART)
}

/// The same where experts go by other names.
pub(crate) fn build_named(m: &ModelConfig, form: Form, names: &ExpertNames) -> Result<Graph, TypeError> {
    let mut g = Graph::new();
    let (batch, seq, context) = form.extents();
    let ids = TensorType::new(DType::U32, [Dim::new(Axis::Batch, batch), Dim::new(Axis::Seq, seq)]);
    let tokens = g.input(values::TOKENS, ids);
    let form_inputs = FormInputs::declare(&mut g, form);
    let decoder = Decoder {
        m,
        names,
        angles: rope_tables(&mut g, m, context),
        form_inputs,
        trains: matches!(form, Form::Loss { .. }),
        normal: Init::Normal { std: m.init_std as f32 },
        // Projections that write to the residual stream start smaller, so that its variance does not grow with depth.
        to_residual: Init::Normal { std: (m.init_std / (2.0 * m.layers as f64).sqrt()) as f32 },
    };

    let table_dims = [Dim::new(Axis::Vocab, m.vocab_size), decoder.embed()];
    let table = matrix(&mut g, "embed", table_dims.clone(), &decoder.normal, &["model.embed_tokens.weight"]);
    let mut x = decoder.embedded(&mut g, tokens, table, ("embedded", "x0"))?;
    for layer in 0..m.layers {
        x = decoder.layer(&mut g, x, layer)?;
    }
    g.enter_layer(None);
    let x = decoder.form_inputs.wanted(&mut g, x)?;
    let n = rms_norm(&mut g, m, x, ("final_norm", &["model.norm.weight"]), "n")?;
    let head = match m.tied_embeddings {
        true => table,
        false => matrix(&mut g, "head", table_dims, &decoder.normal, &["lm_head.weight"]),
    };
    let logits = g.op(Op::Linear, &[n, head], values::LOGITS)?[0];
    decoder.form_inputs.finish(&mut g, logits)?;
    further_tokens(&mut g, &decoder, n, (table, head))?;
    Ok(g)
}

/// What all layers of a model share.
pub(crate) struct Decoder<'a> {
    pub m: &'a ModelConfig,
    names: &'a ExpertNames,
    angles: BTreeMap<LayerRope, ValueId>,
    pub form_inputs: FormInputs,
    trains: bool,
    pub normal: Init,
    to_residual: Init,
}

impl Decoder<'_> {
    pub(crate) fn embed(&self) -> Dim {
        Dim::new(Axis::Embed, self.m.dim)
    }

    /// The embeddings of tokens: by the second name, where they are scaled after the first.
    pub(crate) fn embedded(
        &self,
        g: &mut Graph,
        tokens: ValueId,
        table: ValueId,
        (before, name): (&str, &str),
    ) -> Result<ValueId, TypeError> {
        if self.m.embedding_scale == 1.0 {
            return Ok(g.op(Op::Embedding, &[tokens, table], name)?[0]);
        }
        let x = g.op(Op::Embedding, &[tokens, table], before)?[0];
        Ok(g.op(Op::Scale { factor: self.m.embedding_scale as f32, rounded: true }, &[x], name)?[0])
    }

    /// A layer, which takes the residual stream `x` and gives it on.
    pub(crate) fn layer(&self, g: &mut Graph, x: ValueId, layer: usize) -> Result<ValueId, TypeError> {
        let Self { m, names, angles, form_inputs, normal, to_residual, .. } = self;
        g.enter_layer(Some(layer));
        let heads = |axis, count| Section { axis, count, unit: m.head_dim };
        let q = heads(Axis::Heads, m.heads);
        let kv = heads(Axis::KvHeads, m.kv_heads);
        let attended = Section { unit: m.value_dim(), ..q };
        let at = |name: &str| format!("layers.{layer}.{name}");
        let named = |name: &str, kind: &str| format!("model.layers.{layer}.{name}.{kind}");
        let hf = |name: &str| named(name, "weight");
        let parts = m.layer_parts(layer);
        let norms = LayerNorms::of(m.norms);
        // Applies the norm of this place, if the layer has one.
        let norm = |g: &mut Graph, x, place: Option<(&str, &str)>, to: &str| match place {
            Some((ours, theirs)) => rms_norm(g, m, x, (&at(ours), &[hf(theirs)]), &at(to)),
            None => Ok(x),
        };

        let n = norm(g, x, norms.before_attention, "n1")?;
        let (mut qkv, absorbed) = match m.latent() {
            Some(latent) => {
                let names = Names { at: &at, hf: &hf };
                latent_qkv(g, n, (m, latent, form_inputs.has_cache()), names, (normal, query_scale(m)))?
            }
            None => {
                let names_of = |kind| ["q", "k", "v"].map(|p| named(&format!("self_attn.{p}_proj"), kind));
                let packed = Dim::packed([q, kv, kv]);
                let w = matrix(g, &at("wqkv"), [packed.clone(), self.embed()], normal, &names_of("weight"));
                let mut qkv = g.op(Op::Linear, &[n, w], &at("qkv"))?[0];
                if m.architecture.features().qkv_bias {
                    let bias = zeros(g, &at("bqkv"), packed, &names_of("bias"));
                    qkv = g.op(Op::AddBias, &[qkv, bias], &at("qkv_biased"))?[0];
                }
                (qk_norm(g, m, qkv, &at, &hf)?, None)
            }
        };
        if let Some(kind) = parts.rope {
            qkv = form_inputs.rotate(g, qkv, angles[&kind], &at)?;
        }
        if m.latent().is_none() && query_scale(m) != 1.0 {
            qkv = scale_queries(g, m, qkv, &at)?;
        }
        let sinks = m.attention_sinks.then(|| {
            let parts = [format!("model.layers.{layer}.self_attn.sinks")];
            exact_zeros(g, &at("sinks"), Dim::new(Axis::Heads, m.heads), &parts)
        });
        let mut o = form_inputs.attend_with(g, qkv, (m.attention, parts.window), sinks, &at)?;
        if let Some(w) = absorbed {
            o = g.op(Op::LatentValues { value: m.value_dim() }, &[o, w], &at("o_values"))?[0];
        }
        let w = matrix(g, &at("wo"), [self.embed(), Dim::packed([attended])], to_residual, &[hf("self_attn.o_proj")]);
        let mut delta = g.op(Op::Linear, &[o, w], &at("attention_out"))?[0];
        if m.architecture.features().block_bias {
            let bias = zeros(g, &at("bo"), self.embed(), &[named("self_attn.o_proj", "bias")]);
            delta = g.op(Op::AddBias, &[delta, bias], &at("attention_out_biased"))?[0];
        }
        let delta = norm(g, delta, norms.after_attention, "attention_normed")?;
        let x = g.op(Op::Add, &[x, delta], &at("mid"))?[0];

        let n = norm(g, x, norms.before_ffn, "n2")?;
        let inits = [normal, to_residual];
        let delta = match m.experts.filter(|_| layer >= m.dense_layers) {
            Some(experts) => mixture(g, n, m, (experts, names), (layer, self.trains), inits)?,
            None => Gated { layer, ours: "", theirs: "mlp", ffn: m.ffn, gate: gate(m) }.build(g, n, inits)?,
        };
        let delta = norm(g, delta, norms.after_ffn, "ffn_normed")?;
        Ok(g.op(Op::Add, &[x, delta], &format!("x{}", layer + 1))?[0])
    }
}

/// The norms of a layer, each by our name and Hugging Face's, where there is one.
struct LayerNorms {
    before_attention: Option<(&'static str, &'static str)>,
    after_attention: Option<(&'static str, &'static str)>,
    before_ffn: Option<(&'static str, &'static str)>,
    after_ffn: Option<(&'static str, &'static str)>,
}

impl LayerNorms {
    /// In pre-norm families `post_attention_layernorm` is the norm before the MLP; elsewhere it follows attention.
    fn of(places: NormPlaces) -> Self {
        let after_attention = Some(("attention_post_norm", "post_attention_layernorm"));
        let after_ffn = Some(("ffn_post_norm", "post_feedforward_layernorm"));
        let before_attention = Some(("attention_norm", "input_layernorm"));
        match places {
            NormPlaces::Pre => Self {
                before_attention,
                after_attention: None,
                before_ffn: Some(("ffn_norm", "post_attention_layernorm")),
                after_ffn: None,
            },
            NormPlaces::Post => Self { before_attention: None, after_attention, before_ffn: None, after_ffn },
            NormPlaces::Sandwich => {
                let before_ffn = Some(("ffn_norm", "pre_feedforward_layernorm"));
                Self { before_attention, after_attention, before_ffn, after_ffn }
            }
        }
    }
}

/// An RMS norm over the last dimension, its weight called by our name and Hugging Face's.
pub(crate) fn rms_norm<S: AsRef<str>>(
    g: &mut Graph,
    m: &ModelConfig,
    x: ValueId,
    (ours, theirs): (&str, &[S]),
    name: &str,
) -> Result<ValueId, TypeError> {
    let dim = g.ty(x).dims.last().cloned().unwrap_or(Dim::new(Axis::Embed, m.dim));
    let w = norm_weight(g, ours, dim, m.norm_plus_one, theirs);
    let eps = m.norm_eps as f32;
    let op = if m.norm_plus_one { Op::rms_norm_plus_one(eps) } else { Op::rms_norm(eps) };
    Ok(g.op(op, &[x, w], name)?[0])
}

/// The norms of Q and K of packed Q·K·V, if there are any.
fn qk_norm(
    g: &mut Graph,
    m: &ModelConfig,
    qkv: ValueId,
    at: &dyn Fn(&str) -> String,
    hf: &dyn Fn(&str) -> String,
) -> Result<ValueId, TypeError> {
    match m.qk_norm {
        QkNorm::None => Ok(qkv),
        QkNorm::Head => {
            let head = Section { axis: Axis::HeadDim, count: m.head_dim, unit: 1 };
            let parts = [hf("self_attn.q_norm"), hf("self_attn.k_norm")];
            let w = norm_weight(g, &at("qk_norm"), Dim::packed([head, head]), m.norm_plus_one, &parts);
            let op = Op::QkNorm { plus_one: m.norm_plus_one, eps: m.norm_eps as f32 };
            Ok(g.op(op, &[qkv, w], &at("qkv_normed"))?[0])
        }
        QkNorm::Whole => {
            let normed = |g: &mut Graph, section, ours: &str| -> Result<ValueId, TypeError> {
                let x = g.op(Op::Slice { first: section, count: 1 }, &[qkv], &at(ours))?[0];
                let names = (&*at(&format!("{ours}_norm")), &[hf(&format!("self_attn.{ours}_norm"))][..]);
                rms_norm(g, m, x, names, &at(&format!("{ours}_normed")))
            };
            let (queries, keys) = (normed(g, 0, "q")?, normed(g, 1, "k")?);
            let values = g.op(Op::Slice { first: 2, count: 1 }, &[qkv], &at("v"))?[0];
            Ok(g.op(Op::Concat, &[queries, keys, values], &at("qkv_normed"))?[0])
        }
    }
}

/// What queries are multiplied by so that scores are divided by √softmax_scale_dim, and are as large as YaRN wants them; attention itself
/// divides by √head_dim.
fn query_scale(m: &ModelConfig) -> f32 {
    let by_yarn = m.rope_scaling.as_ref().map_or(1.0, RopeScalingConfig::score_factor);
    ((m.head_dim as f64 / m.softmax_scale_dim as f64).sqrt() * by_yarn) as f32
}

/// Multiplies Q of packed Q·K·V by its scale.
fn scale_queries(
    g: &mut Graph,
    m: &ModelConfig,
    qkv: ValueId,
    at: &dyn Fn(&str) -> String,
) -> Result<ValueId, TypeError> {
    let factor = query_scale(m);
    let queries = g.op(Op::Slice { first: 0, count: 1 }, &[qkv], &at("queries"))?[0];
    let scaled = g.op(Op::Scale { factor, rounded: false }, &[queries], &at("queries_scaled"))?[0];
    let rest = g.op(Op::Slice { first: 1, count: 2 }, &[qkv], &at("keys_values"))?[0];
    Ok(g.op(Op::Concat, &[scaled, rest], &at("qkv_scaled"))?[0])
}

/// The tables of angles that some layer uses.
fn rope_tables(g: &mut Graph, m: &ModelConfig, context: usize) -> BTreeMap<LayerRope, ValueId> {
    let used: BTreeSet<LayerRope> = (0..m.layers).filter_map(|layer| m.layer_parts(layer).rope).collect();
    let table = |g: &mut Graph, kind: LayerRope| {
        let (name, init) = match kind {
            LayerRope::Global => {
                let scaling = m.rope_scaling.as_ref().map(rope_scaling);
                ("rope_table", Init::RopeTable { theta: m.rope_theta, scaling })
            }
            LayerRope::Local => {
                let theta = m.rope_local_theta.unwrap_or(m.rope_theta);
                ("rope_table_local", Init::RopeTable { theta, scaling: None })
            }
        };
        let dims = [Dim::new(Axis::Seq, context), Dim::new(Axis::HeadDim, m.rope_dim())];
        g.state(name, TensorType::new(DType::F32, dims), State::Constant(init))
    };
    used.into_iter().map(|kind| (kind, table(g, kind))).collect()
}

fn rope_scaling(scaling: &RopeScalingConfig) -> RopeScaling {
    match *scaling {
        RopeScalingConfig::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let original_context = original_context as f64;
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }
        }
        RopeScalingConfig::Linear { factor } => RopeScaling::Linear { factor },
        RopeScalingConfig::Yarn {
            factor, original_context, beta_fast, beta_slow, attention_factor, truncate, ..
        } => {
            let attention_factor = attention_factor.unwrap_or(0.1 * factor.ln() + 1.0);
            let original_context = original_context as f64;
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, attention_factor }
        }
    }
}
