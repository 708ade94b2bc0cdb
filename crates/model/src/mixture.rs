//! What follows attention in a layer: a gated MLP, or a mixture of experts.

use crate::parameters::{bias_of_choice, exact_matrix, exact_zeros, expert_biases, matrix, stack};
use lockstep_config::{Activation, ModelConfig};
use lockstep_ir::graph::Loss;
use lockstep_ir::op::{Routing, Score};
use lockstep_ir::{Axis, DType, Dim, Graph, Init, Op, Section, TypeError, ValueId};

/// What Hugging Face calls the parts of a mixture of experts.
pub(crate) struct ExpertNames {
    /// The block of a layer.
    pub block: &'static str,
    /// The router.
    pub router: &'static str,
    /// The matrices of an expert: gate, up and down.
    pub matrices: [&'static str; 3],
    /// Where the matrices of all experts are one tensor: gate and up, and down. Their biases are others, with `_bias` after the name.
    pub together: Option<[&'static str; 2]>,
}

impl ExpertNames {
    /// Those of most families, where every expert has tensors of its own.
    pub(crate) const APART: Self =
        Self { block: "mlp", router: "gate", matrices: ["gate_proj", "up_proj", "down_proj"], together: None };
}

/// This many hidden units.
fn hidden(ffn: usize) -> Section {
    Section { axis: Axis::Ffn, count: ffn, unit: 1 }
}

/// What makes hidden units of packed gate·up.
pub(crate) fn gate(m: &ModelConfig) -> Op {
    match m.activation {
        Activation::Silu => Op::SwiGlu,
        Activation::Gelu => Op::GeGlu,
        Activation::ClampedSwiGlu => Op::ClampedSwiGlu { limit: m.swiglu_limit.unwrap_or(f64::INFINITY) as f32 },
    }
}

/// A gated MLP (SwiGLU, GeGLU) of a layer. The names of its values begin with `ours`, and Hugging Face has it in the block `theirs`.
#[derive(Clone, Copy)]
pub(crate) struct Gated<'a> {
    pub layer: usize,
    pub ours: &'a str,
    pub theirs: &'a str,
    pub ffn: usize,
    pub gate: Op,
}

impl Gated<'_> {
    fn at(&self, name: &str) -> String {
        format!("layers.{}.{}{name}", self.layer, self.ours)
    }

    fn hf(&self, name: &str) -> String {
        format!("model.layers.{}.{}.{name}_proj.weight", self.layer, self.theirs)
    }

    /// The whole of it.
    pub(crate) fn build(
        &self,
        g: &mut Graph,
        x: ValueId,
        [normal, to_residual]: [&Init; 2],
    ) -> Result<ValueId, TypeError> {
        let y = self.hidden(g, x, normal)?;
        self.down(g, y, x, to_residual)
    }

    /// Its hidden units.
    fn hidden(&self, g: &mut Graph, x: ValueId, normal: &Init) -> Result<ValueId, TypeError> {
        let embed = g.ty(x).dims[2].clone();
        let packed = Dim::packed([hidden(self.ffn), hidden(self.ffn)]);
        let w = matrix(g, &self.at("wgate_up"), [packed, embed], normal, &[self.hf("gate"), self.hf("up")]);
        let gate_up = g.op(Op::Linear, &[x, w], &self.at("gate_up"))?[0];
        Ok(g.op(self.gate, &[gate_up], &self.at("hidden"))?[0])
    }

    /// What they give, as wide as x.
    fn down(&self, g: &mut Graph, y: ValueId, x: ValueId, to_residual: &Init) -> Result<ValueId, TypeError> {
        let embed = g.ty(x).dims[2].clone();
        let w = matrix(g, &self.at("wdown"), [embed, Dim::packed([hidden(self.ffn)])], to_residual, &[self.hf("down")]);
        Ok(g.op(Op::Linear, &[y, w], &self.at("ffn_out"))?[0])
    }
}

/// A mixture of experts: a router in f32 that chooses some of them for every token, and the weighted sum of what these give. What
/// shared experts give, which are one MLP, is added to it; they work while rows are on their way to the ranks of their experts and
/// back, so their parts come after the choice and after what experts give.
pub(crate) fn mixture(
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
    let width = m.expert_ffn.unwrap_or(m.ffn);
    let &ExpertNames { block, router, matrices: [gate_name, up, down], together } = names;
    let of_block = |name: &str| format!("model.layers.{layer}.{block}.{name}");
    let hf = |name: &str| of_block(&format!("{name}.weight"));
    let of_each = |names: &[&str], together: Option<&str>| -> Vec<String> {
        if let Some(name) = together {
            return vec![of_block(&format!("experts.{name}"))];
        }
        (0..experts).flat_map(|e| names.iter().map(move |name| hf(&format!("experts.{e}.{name}")))).collect()
    };
    let biased = m.architecture.features().block_bias;
    // The bias of what experts make, if there is one.
    let bias_of = |g: &mut Graph, y: ValueId, chosen: ValueId, (ours, theirs, to): (&str, Option<&str>, &str)| {
        let Some(theirs) = theirs.filter(|_| biased) else { return Ok(y) };
        let outputs = g.ty(y).dims.last().cloned().unwrap_or(embed());
        let parts = [of_block(&format!("experts.{theirs}_bias"))];
        let bias = expert_biases(g, &at(ours), [each(), outputs], &parts);
        Ok::<_, TypeError>(g.op(Op::GroupedBias { rows: false }, &[y, bias, chosen], &at(to))?[0])
    };

    let exact = g.op(Op::Cast { to: DType::F32 }, &[x], &at("router_input"))?[0];
    let w = exact_matrix(g, &at("router"), [each(), embed()], normal, &[hf(router)]);
    let mut logits = g.op(Op::Linear, &[exact, w], &at("router_logits"))?[0];
    if biased {
        let bias = exact_zeros(g, &at("router_logits_bias"), each(), &[of_block(&format!("{router}.bias"))]);
        logits = g.op(Op::AddBias, &[logits, bias], &at("router_logits_biased"))?[0];
    }
    let sigmoid = m.architecture.features().sigmoid_router;
    let how = Routing {
        choices: m.experts_per_token.unwrap_or(1),
        score: if sigmoid { Score::Sigmoid } else { Score::Softmax },
        normalise: m.norm_topk,
        scale: m.router_scale as f32,
        groups: m.expert_groups,
        top_groups: m.expert_top_groups,
    };
    let mut reads = vec![logits];
    if sigmoid {
        let names = [of_block("gate.e_score_correction_bias")];
        reads.push(bias_of_choice(g, &at("router_bias"), each(), m.balance_bias as f32, &names));
    }
    let routed = g.op(Op::Route { given: false, how }, &reads, &at("routed"))?;
    let (weights, chosen) = (routed[0], routed[1]);
    let (balance, z) = (m.balance_loss as f32, m.z_loss as f32);
    if trains && balance + z > 0.0 {
        let counts = g.op(Op::ExpertCounts { experts }, &[chosen], &at("expert_counts"))?[0];
        let value = g.op(Op::RouterLoss { balance, z }, &[logits, counts], &at("router_loss"))?[0];
        g.losses.push(Loss { value, weight: 1.0 });
    }
    let block = format!("{block}.shared_experts");
    let shared =
        m.shared_experts.map(|n| Gated { layer, ours: "shared_", theirs: &block, ffn: n * width, gate: gate(m) });
    let always = shared.map(|shared| shared.hidden(g, x, normal)).transpose()?;
    let packed = Dim::packed([hidden(width), hidden(width)]);
    let w = stack(
        g,
        &at("wgate_up"),
        [each(), packed, embed()],
        normal,
        &of_each(&[gate_name, up], together.map(|names| names[0])),
    );
    let gate_up = g.op(Op::GroupedLinear { each: false }, &[x, w, chosen], &at("gate_up"))?[0];
    let gate_up = bias_of(g, gate_up, chosen, ("bgate_up", together.map(|names| names[0]), "gate_up_biased"))?;
    let y = g.op(gate(m), &[gate_up], &at("hidden"))?[0];
    let dims = [each(), embed(), Dim::packed([hidden(width)])];
    let w = stack(g, &at("wdown"), dims, to_residual, &of_each(&[down], together.map(|names| names[1])));
    let y = g.op(Op::GroupedLinear { each: true }, &[y, w, chosen], &at("expert_out"))?[0];
    let y = bias_of(g, y, chosen, ("bdown", together.map(|names| names[1]), "expert_out_biased"))?;
    let (Some(shared), Some(always)) = (shared, always) else {
        return Ok(g.op(Op::Combine { weighted: true }, &[y, weights], &at("ffn_out"))?[0]);
    };
    let always = shared.down(g, always, x, to_residual)?;
    let routed = g.op(Op::Combine { weighted: true }, &[y, weights], &at("routed_out"))?[0];
    Ok(g.op(Op::Add, &[routed, always], &at("ffn_out"))?[0])
}
