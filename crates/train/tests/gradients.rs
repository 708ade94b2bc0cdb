//! Every op's gradient against finite differences, in f64: the gradient comes from autodiff, both sides are evaluated by
//! the reference.

use lockstep_compile::{
    AdamW, Context, Fp8, Fp8Scaling, Offload, Optimizer, Precision, Recompute, Steps, TRAINING_PASSES, autodiff,
};
use lockstep_exec::{cpu, reference};
use lockstep_ir::graph::{Loss, Parameter, Source, State};
use lockstep_ir::op::{Blocks, Fine, Norm, Routing, samples};
use lockstep_ir::{Axis, DType, Dim, Graph, Init, Layout, Op, Section, TensorType, ValueId, counter, verify};

const BATCH: usize = 2;
const SEQ: usize = 5;
const VOCAB: usize = 7;

fn context() -> Context {
    let optimizer = Optimizer::adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, 0.1);
    Context {
        device: cpu::profile(1, DType::F32, DType::F32),
        layout: Layout::single(1),
        optimizer,
        precision: Precision::FP32,
        recompute: Recompute::None,
        stages: vec![],
        steps: Steps::default(),
        offload: Offload::default(),
    }
}

struct Build {
    g: Graph,
}

impl Build {
    fn ids(&mut self, name: &str) -> ValueId {
        self.g.input(name, TensorType::new(DType::U32, [Dim::new(Axis::Batch, BATCH), Dim::new(Axis::Seq, SEQ)]))
    }

    fn parameter(&mut self, name: &str, dims: &[Dim]) -> ValueId {
        let parameter = Parameter { decay: false, ..Parameter::new(Init::Ones, vec![name.to_owned()]) };
        self.g.state(name, TensorType::new(DType::F32, dims.to_vec()), State::Parameter(parameter))
    }

    fn op(&mut self, op: Op, inputs: &[ValueId], name: &str) -> Vec<ValueId> {
        self.g.op(op, inputs, name).unwrap()
    }

    /// A fresh activation that depends on parameters, with features `dim`.
    fn activation(&mut self, name: &str, dim: Dim) -> ValueId {
        let tokens = self.ids(&format!("{name}.tokens"));
        let table = self.parameter(&format!("{name}.table"), &[Dim::new(Axis::Vocab, VOCAB), dim]);
        self.op(Op::Embedding, &[tokens, table], name)[0]
    }

    fn loss(mut self, x: ValueId) -> Graph {
        let targets = self.ids("targets");
        let loss = self.op(Op::CrossEntropy, &[x, targets], "loss")[0];
        self.g.outputs.push(loss);
        self.g.losses.push(Loss { value: loss, weight: 1.0 });
        self.g
    }
}

/// A graph whose loss depends on every differentiable input and output of `op`, called with its optional inputs or without; `None`
/// for ops without a gradient.
fn graph_through(op: Op, optional: bool) -> Option<Graph> {
    let mut b = Build { g: Graph::new() };
    let embed = || Dim::new(Axis::Embed, 6);
    let head = |axis, count| Section { axis, count, unit: 4 };
    // Heads of V are narrower than those of Q and K.
    let values = Section { axis: Axis::KvHeads, count: 2, unit: 3 };
    let qkv = || Dim::packed([head(Axis::Heads, 4), head(Axis::KvHeads, 2), values]);
    let graph = match op {
        Op::Embedding => {
            let x = b.activation("x", embed());
            b.loss(x)
        }
        Op::Linear => {
            let x = b.activation("x", embed());
            let w = b.parameter("w", &[Dim::new(Axis::Ffn, 9), embed()]);
            let y = b.op(op, &[x, w], "y")[0];
            b.loss(y)
        }
        Op::AddBias => {
            let x = b.activation("x", qkv());
            let bias = b.parameter("bias", &[qkv()]);
            let y = b.op(op, &[x, bias], "y")[0];
            b.loss(y)
        }
        Op::Norm { norm, residual, .. } => {
            let x = b.activation("x", embed());
            let delta = residual.then(|| b.activation("delta", embed()));
            let w = b.parameter("w", &[embed()]);
            let bias = (norm == Norm::Layer).then(|| b.parameter("bias", &[embed()]));
            let inputs: Vec<ValueId> = [x].into_iter().chain(delta).chain([w]).chain(bias).collect();
            let out = b.op(op, &inputs, "y");
            // A second use of what is normed, as the residual stream has.
            let both = if residual { [out[0], out[1]] } else { [x, out[0]] };
            let sum = b.op(Op::Add, &both, "sum")[0];
            b.loss(sum)
        }
        Op::QkNorm { .. } => {
            let x =
                b.activation("x", Dim::packed([head(Axis::Heads, 4), head(Axis::KvHeads, 2), head(Axis::KvHeads, 2)]));
            let of_head = Section { axis: Axis::HeadDim, count: 4, unit: 1 };
            let w = b.parameter("w", &[Dim::packed([of_head, of_head])]);
            let y = b.op(op, &[x, w], "y")[0];
            b.loss(y)
        }
        Op::LatentHeads { absorbed: false, .. } => {
            // Heads of 4 elements, 2 of them with RoPE, and of 3 in V.
            let q = b.activation("q", Dim::packed([head(Axis::Heads, 4)]));
            let kv = b.activation("kv", Dim::grouped(Axis::KvHeads, 4, 5));
            let shared = b.activation("shared", Dim::new(Axis::HeadDim, 2));
            let y = b.op(op, &[q, kv, shared], "y")[0];
            b.loss(y)
        }
        Op::AddPositions { .. } => {
            let x = b.activation("x", embed());
            let table = b.parameter("table", &[Dim::new(Axis::Seq, SEQ + 2), embed()]);
            let starts = optional.then(|| b.ids("starts"));
            let inputs: Vec<ValueId> = [x, table].into_iter().chain(starts).collect();
            let y = b.op(Op::AddPositions { seq: SEQ }, &inputs, "y")[0];
            b.loss(y)
        }
        Op::Rope { .. } => {
            let x = b.activation("x", qkv());
            let table = TensorType::new(DType::F32, [Dim::new(Axis::Seq, SEQ), Dim::new(Axis::HeadDim, 2)]);
            let init = Init::RopeTable { theta: 100.0, scaling: None };
            let table = b.g.state("table", table, State::Constant(init));
            let starts = optional.then(|| b.ids("starts"));
            let inputs: Vec<ValueId> = [x, table].into_iter().chain(starts).collect();
            let y = b.op(op, &inputs, "y")[0];
            b.loss(y)
        }
        Op::Attention { .. } => {
            let x = b.activation("x", qkv());
            let starts = optional.then(|| b.ids("starts"));
            let inputs: Vec<ValueId> = [x].into_iter().chain(starts).collect();
            let o = b.op(op, &inputs, "o")[0];
            b.loss(o)
        }
        // Weights reach the loss by way of the values.
        Op::AttentionScores { window } => {
            let x = b.activation("x", qkv());
            let starts = optional.then(|| b.ids("starts"));
            let inputs: Vec<ValueId> = [x].into_iter().chain(starts).collect();
            let p = b.op(op, &inputs, "p")[0];
            let o = b.op(Op::AttentionMix { window }, &[p, x], "o")[0];
            b.loss(o)
        }
        Op::AttentionMix { window } => return graph_through(Op::AttentionScores { window }, false),
        // Sinks are of the attention before them, with documents and a window.
        Op::AttentionSink { each: false } => {
            let (x, starts) = (b.activation("x", qkv()), b.ids("starts"));
            let sink = b.parameter("sink", &[Dim::new(Axis::Heads, 4)]);
            let made = b.op(Op::Attention { window: Some(3) }, &[x, starts], "attended");
            let o = b.op(op, &[made[0], made[1], sink], "o")[0];
            b.loss(o)
        }
        Op::SwiGlu | Op::GeGlu | Op::ClampedSwiGlu { .. } => {
            let ffn = Section { axis: Axis::Ffn, count: 6, unit: 1 };
            let x = b.activation("x", Dim::packed([ffn, ffn]));
            let y = b.op(op, &[x], "y")[0];
            b.loss(y)
        }
        Op::Scale { .. } => {
            let x = b.activation("x", embed());
            let y = b.op(op, &[x], "y")[0];
            b.loss(y)
        }
        // Tokens go to experts, and what these give comes back by weights that depend on the token too.
        Op::Route { given: false, how } => {
            let (experts, ffn) = (Dim::new(Axis::Experts, 12), Dim::new(Axis::Ffn, 5));
            let (x, logits) = (b.activation("x", embed()), b.activation("logits", experts.clone()));
            let bias = TensorType::new(DType::F32, [experts.clone()]);
            let bias = optional.then(|| b.g.state("bias", bias, State::Constant(Init::Normal { std: 1.0 })));
            let inputs: Vec<ValueId> = [logits].into_iter().chain(bias).collect();
            let routed = b.op(Op::Route { given: false, how }, &inputs, "routed");
            let w = b.parameter("w", &[experts.clone(), ffn.clone(), embed()]);
            let hidden = b.op(Op::GroupedLinear { each: false }, &[x, w, routed[1]], "hidden")[0];
            let bias = b.parameter("bias", &[experts.clone(), ffn.clone()]);
            let hidden = b.op(Op::GroupedBias { rows: false }, &[hidden, bias, routed[1]], "biased")[0];
            let w = b.parameter("back", &[experts, embed(), ffn]);
            let y = b.op(Op::GroupedLinear { each: true }, &[hidden, w, routed[1]], "y")[0];
            let out = b.op(Op::Combine { weighted: true }, &[y, routed[0]], "out")[0];
            b.loss(out)
        }
        // Some experts are given twice for a token.
        Op::Route { given: true, how } => {
            let experts = Dim::new(Axis::Experts, 12);
            let logits = b.activation("logits", experts.clone());
            let x = b.activation("x", embed());
            let tokens = [Dim::new(Axis::Batch, BATCH), Dim::new(Axis::Seq, SEQ), Dim::new(Axis::Choices, how.choices)];
            let given = b.g.input("given", TensorType::new(DType::U32, tokens));
            let routed = b.op(Op::Route { given: true, how }, &[logits, given], "routed");
            let w = b.parameter("w", &[experts, embed(), embed()]);
            let y = b.op(Op::GroupedLinear { each: false }, &[x, w, routed[1]], "y")[0];
            let out = b.op(Op::Combine { weighted: true }, &[y, routed[0]], "out")[0];
            b.loss(out)
        }
        // A second loss, on what the router looks at.
        Op::RouterLoss { .. } => {
            let logits = b.activation("logits", Dim::new(Axis::Experts, 6));
            let routed = b.op(Op::Route { given: false, how: Routing::top(2) }, &[logits], "routed")[1];
            let counts = b.op(Op::ExpertCounts { experts: 6 }, &[routed], "counts")[0];
            let loss = b.op(op, &[logits, counts], "loss")[0];
            b.g.outputs.push(loss);
            b.g.losses.push(Loss { value: loss, weight: 1.0 });
            b.g
        }
        Op::ExpertCounts { .. } => return graph_through(Op::RouterLoss { balance: 0.5, z: 0.25 }, false),
        // The same by way of blocks of rows, in two parts.
        Op::RowsLinear { .. } => {
            let (experts, ffn) = (Dim::new(Axis::Experts, 4), Dim::new(Axis::Ffn, 5));
            let (x, logits) = (b.activation("x", embed()), b.activation("logits", experts.clone()));
            let routed = b.op(Op::Route { given: false, how: Routing::top(2) }, &[logits], "routed");
            let blocks = Blocks { parts: 2, rows: 2 * BATCH * SEQ, choices: 2 * BATCH * SEQ, ranks: 1 };
            let slots = b.op(Op::ExpertSlots { experts: 4, blocks }, &[routed[1]], "slots");
            let rows = b.op(Op::SendRows { each: false, blocks }, &[x, slots[0]], "rows")[0];
            let w = b.parameter("w", &[experts.clone(), ffn.clone(), embed()]);
            let hidden = b.op(Op::RowsLinear { blocks }, &[rows, w, slots[1]], "hidden")[0];
            let bias = b.parameter("bias", &[experts.clone(), ffn.clone()]);
            let hidden = b.op(Op::GroupedBias { rows: true }, &[hidden, bias, slots[1]], "biased")[0];
            let w = b.parameter("back", &[experts, embed(), ffn]);
            let rows = b.op(Op::RowsLinear { blocks }, &[hidden, w, slots[1]], "rows_out")[0];
            let y = b.op(Op::TakeRows { blocks }, &[rows, slots[0]], "y")[0];
            let out = b.op(Op::Combine { weighted: true }, &[y, routed[0]], "out")[0];
            b.loss(out)
        }
        Op::ExpertSlots { blocks, .. } | Op::SendRows { each: false, blocks } | Op::TakeRows { blocks } => {
            return graph_through(Op::RowsLinear { blocks }, false);
        }
        Op::GroupedBias { rows: true } => {
            let blocks = Blocks { parts: 2, rows: 2 * BATCH * SEQ, choices: 2 * BATCH * SEQ, ranks: 1 };
            return graph_through(Op::RowsLinear { blocks }, false);
        }
        Op::GroupedLinear { .. } | Op::GroupedBias { rows: false } | Op::Combine { weighted: true } => {
            return graph_through(Op::Route { given: false, how: Routing::top(3) }, false);
        }
        Op::Dropout { rate, site, .. } => {
            let x = b.activation("x", embed());
            let ty = TensorType::new(DType::U32, [Dim::new(Axis::Batch, BATCH), Dim::new(Axis::Scalar, 2)]);
            let keys = b.g.input("keys", ty);
            let y = b.op(Op::Dropout { rate, site, seq: SEQ }, &[x, keys], "y")[0];
            b.loss(y)
        }
        Op::Add => {
            let (x, y) = (b.activation("x", embed()), b.activation("y", embed()));
            let sum = b.op(op, &[x, y], "sum")[0];
            b.loss(sum)
        }
        // Slices that read every section, one of them twice, and are put together in another order.
        Op::Slice { .. } | Op::Concat => {
            let x = b.activation("x", qkv());
            let mut slice = |first, count, name| b.op(Op::Slice { first, count }, &[x], name)[0];
            let parts = [slice(1, 2, "kv"), slice(0, 1, "q"), slice(0, 1, "again")];
            let y = b.op(Op::Concat, &parts, "y")[0];
            b.loss(y)
        }
        Op::CrossEntropy => {
            let x = b.activation("x", embed());
            b.loss(x)
        }
        Op::LinearCrossEntropy { score: false, .. } => {
            let x = b.activation("x", embed());
            let w = b.parameter("w", &[Dim::new(Axis::Vocab, VOCAB), embed()]);
            let targets = b.ids("targets");
            let loss = b.op(Op::LinearCrossEntropy { score: false, rows: SEQ }, &[x, w, targets], "loss")[0];
            b.g.outputs.push(loss);
            b.g.losses.push(Loss { value: loss, weight: 1.0 });
            b.g
        }
        Op::ByteLinear => {
            let x = b.activation("x", embed());
            let outputs = Dim::new(Axis::Vocab, VOCAB);
            let w = b.g.input("w", TensorType::new(DType::Int8, [outputs.clone(), embed()]));
            let unit = b.g.input("unit", TensorType::new(DType::F32, [outputs]));
            let y = b.op(op, &[x, w, unit], "y")[0];
            b.loss(y)
        }
        _ if op.spec().gradient_reads.is_none() => return None,
        // Rounding is no function with a gradient: what takes its place is tried below.
        Op::Quantise { .. } | Op::QuantiseFine { .. } => return None,
        Op::Fp8Linear { .. } | Op::FineLinear { .. } | Op::Fp8Grouped { .. } | Op::Fp8Rows { .. } => return None,
        // Ops of one tensor, each element on its own.
        _ => {
            assert_eq!(op.spec().inputs.len(), 1, "{} needs a graph of its own here", op.name());
            let x = b.activation("x", embed());
            let y = b.op(op, &[x], "y")[0];
            b.loss(y)
        }
    };
    Some(graph)
}

fn feed(graph: &Graph, v: ValueId, nudge: Option<(ValueId, usize, f64)>) -> Option<Vec<f64>> {
    let value = graph.get(v);
    let n = value.ty.elements();
    let key = counter::key(3, &value.name);
    let mut data: Vec<f64> = match &value.source {
        // The first sequence has documents of two, one and two positions, the second is one.
        Source::Input if value.name == "starts" => [0, 0, 2, 3, 3, 0, 0, 0, 0, 0].map(f64::from).to_vec(),
        Source::Input => (0..n).map(|i| (counter::bits(key, i as u64) % 6) as f64).collect(),
        Source::State(State::Parameter(_)) => (0..n).map(|i| f64::from(counter::normal(key, i as u64))).collect(),
        Source::State(State::Constant(init)) => {
            let mut table = vec![0.0f32; n];
            init.fill(0, &value.name, value.ty.dims.last()?.size(), &mut table);
            table.into_iter().map(f64::from).collect()
        }
        _ => return None,
    };
    if let Some((_, i, by)) = nudge.filter(|(at, _, _)| *at == v) {
        data[i] += by;
    }
    Some(data)
}

#[test]
fn gradients_agree_with_finite_differences() {
    // The windows of the suite are one key, or more than these sequences have.
    let window = Some(3);
    let windows = [Op::Attention { window }, Op::AttentionScores { window }];
    let windows = windows.into_iter().flat_map(|op| [(op, false), (op, true)]);
    let mut calls: Vec<(Op, bool)> = Vec::new();
    for sample in samples(1) {
        // The same op on other shapes, which are those of this test here.
        let call = (sample.op, sample.inputs.len() == sample.op.spec().inputs.len());
        if !calls.contains(&call) {
            calls.push(call);
        }
    }
    for (op, optional) in calls.into_iter().chain(windows) {
        let Some(forward) = graph_through(op, optional) else {
            let rounds = ["quantise", "fp8_", "rowwise", "blockwise"].iter().any(|of| op.name().starts_with(of));
            assert!(rounds || op.spec().gradient_reads.is_none(), "{}", op.name());
            continue;
        };
        let graph = autodiff(&forward, &context()).unwrap();
        verify::graph(&graph).unwrap();
        let values = reference::evaluate(&graph, |v| feed(&graph, v, None));
        let loss = |nudge| -> f64 {
            let values = reference::evaluate(&forward, |v| feed(&forward, v, Some(nudge)));
            values[forward.outputs[0].0].as_ref().unwrap().iter().sum()
        };
        let mut checked = 0;
        for (w, value, _) in forward.parameters() {
            let state = graph.values.iter().position(|v| v.name == format!("grad.{}", value.name)).unwrap();
            let grad = values[state].as_ref().unwrap();
            let largest = grad.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            for (i, analytic) in grad.iter().enumerate() {
                let step = 1e-5;
                let numeric = (loss((w, i, step)) - loss((w, i, -step))) / (2.0 * step);
                let error = (analytic - numeric).abs() / largest.max(1e-3);
                assert!(error < 1e-7, "{}: {}[{i}] is {analytic}, numerically {numeric}", op.name(), value.name);
                checked += 1;
            }
        }
        assert!(checked > 0, "{}", op.name());
    }
}

/// The gradients of these parameters and how many matmuls are in fp8, with a layout's passes before recomputation. Weights are
/// drawn a third as large, so that GELUs are neither all open nor all shut.
fn gradients_in(g: &Graph, of: [ValueId; 3], precision: Precision, layout: &str) -> (usize, [Vec<f64>; 3]) {
    let context = Context { precision, layout: layout.parse().unwrap(), ..context() };
    let passes = TRAINING_PASSES.iter().take_while(|pass| pass.name != "recompute");
    let graph = passes.fold(g.clone(), |g, pass| (pass.run)(&g, &context).unwrap());
    verify::graph(&graph).unwrap();
    let smaller = |v: ValueId, x: f64| if graph.ty(v).dtype == DType::U32 { x } else { 0.3 * x };
    let data = |v: ValueId| Some(feed(&graph, v, None)?.into_iter().map(|x| smaller(v, x)).collect());
    let values = reference::evaluate(&graph, data);
    let gradient = |w: ValueId| values[graph.gradients_of(w)[0].0].clone().unwrap();
    let in_fp8 = graph.nodes.iter().filter(|node| {
        !node.op.spec().multiplies.is_empty() && node.inputs.iter().any(|v| graph.ty(*v).dtype.is_fp8())
    });
    (in_fp8.count(), of.map(gradient))
}

/// Six matmuls in fp8, whose gradients are near those in bf16, and not the same.
fn check_near(g: &Graph, of: [ValueId; 3], fp8: Fp8, layout: &str) {
    let bf16 = Precision::of(DType::BF16, DType::F32);
    let (none, exact) = gradients_in(g, of, bf16, layout);
    let fp8 = Fp8 { weights: Some(0), ..fp8 };
    let (matmuls, found) = gradients_in(g, of, Precision { fp8: Some(fp8), ..bf16 }, layout);
    assert_eq!((none, matmuls), (0, 6), "{fp8:?} {layout}");
    for (exact, found) in exact.iter().zip(&found) {
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let apart = norm(&mut exact.iter().zip(found).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied());
        assert!((1e-4..0.1).contains(&apart), "{fp8:?} {layout}: {apart}");
    }
}

/// Tokens and targets of 128 positions, and what the table has for each.
fn embedded(b: &mut Build, wide: &Dim) -> (ValueId, ValueId, ValueId) {
    let ids = TensorType::new(DType::U32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 128)]);
    let [tokens, targets] = ["tokens", "targets"].map(|name| b.g.input(name, ids.clone()));
    let table = b.parameter("table", &[Dim::new(Axis::Vocab, 6), wide.clone()]);
    (b.op(Op::Embedding, &[tokens, table], "x")[0], table, targets)
}

/// The graph with a loss on the sum of what a layer gives and its input.
fn with_loss(mut b: Build, y: ValueId, x: ValueId, targets: ValueId) -> Graph {
    let sum = b.op(Op::Add, &[y, x], "sum")[0];
    b.g.enter_layer(None);
    let loss = b.op(Op::CrossEntropy, &[sum, targets], "loss")[0];
    b.g.outputs.push(loss);
    b.g.losses.push(Loss { value: loss, weight: 1.0 });
    b.g
}

#[test]
fn gradients_through_fp8_are_those_without_as_far_as_bytes_go() {
    let (wide, ffn) = (Dim::new(Axis::Embed, 128), Dim::new(Axis::Ffn, 256));
    let mut b = Build { g: Graph::new() };
    let (x, table, targets) = embedded(&mut b, &wide);
    let up = b.parameter("up", &[ffn.clone(), wide.clone()]);
    let down = b.parameter("down", &[wide, ffn]);
    b.g.enter_layer(Some(0));
    let hidden = b.op(Op::Linear, &[x, up], "hidden")[0];
    let active = b.op(Op::Gelu, &[hidden], "active")[0];
    let y = b.op(Op::Linear, &[active, down], "y")[0];
    let g = with_loss(b, y, x, targets);
    for scaling in [Fp8Scaling::Current, Fp8Scaling::Fine(Fine::Rows), Fp8Scaling::Fine(Fine::Blocks)] {
        check_near(&g, [table, up, down], Fp8 { scaling, ..Fp8::default() }, "dp=1");
    }
}

#[test]
fn gradients_of_experts_through_fp8_are_those_without_as_far_as_bytes_go() {
    let (wide, ffn, experts) = (Dim::new(Axis::Embed, 128), Dim::new(Axis::Ffn, 128), Dim::new(Axis::Experts, 6));
    let mut b = Build { g: Graph::new() };
    let (x, table, targets) = embedded(&mut b, &wide);
    let up = b.parameter("up", &[experts.clone(), ffn.clone(), wide.clone()]);
    let down = b.parameter("down", &[experts.clone(), wide.clone(), ffn]);
    let router = b.parameter("router", &[experts, wide]);
    b.g.enter_layer(Some(0));
    // Six experts are no multiple of 16: these logits stay as they are, and so does the choice.
    let logits = b.op(Op::Linear, &[x, router], "logits")[0];
    let logits = b.op(Op::Cast { to: DType::F32 }, &[logits], "exact")[0];
    let routed = b.op(Op::Route { given: false, how: Routing::top(2) }, &[logits], "routed");
    let chosen = routed[1];
    let hidden = b.op(Op::GroupedLinear { each: false }, &[x, up, chosen], "hidden")[0];
    let active = b.op(Op::Gelu, &[hidden], "active")[0];
    let each = b.op(Op::GroupedLinear { each: true }, &[active, down, chosen], "each")[0];
    let y = b.op(Op::Combine { weighted: true }, &[each, routed[0]], "y")[0];
    let g = with_loss(b, y, x, targets);
    for layout in ["dp=1", "ep=2"] {
        check_near(&g, [table, up, down], Fp8::default(), layout);
    }
}

#[test]
fn losses_of_different_weights_give_the_weighted_sum_of_their_gradients() {
    let mut b = Build { g: Graph::new() };
    let x = b.activation("x", Dim::new(Axis::Embed, 6));
    let w = b.parameter("w", &[Dim::new(Axis::Vocab, VOCAB), Dim::new(Axis::Embed, 6)]);
    let logits = b.op(Op::Linear, &[x, w], "logits")[0];
    // One on the logits, one on what they are made from.
    for (name, of, weight) in [("first", logits, 0.25f32), ("second", x, 2.0)] {
        let targets = b.ids(&format!("{name}.targets"));
        let value = b.op(Op::CrossEntropy, &[of, targets], name)[0];
        b.g.outputs.push(value);
        b.g.losses.push(Loss { value, weight });
    }
    // Fused heads read the weights of their losses from scalars: `further.rs` holds those.
    let forward = b.g;
    let graph = autodiff(&forward, &context()).unwrap();
    verify::graph(&graph).unwrap();
    let values = reference::evaluate(&graph, |v| feed(&graph, v, None));
    let sum = |nudge| -> f64 {
        let values = reference::evaluate(&forward, |v| feed(&forward, v, Some(nudge)));
        let loss = |l: &Loss| f64::from(l.weight) * values[l.value.0].as_ref().unwrap().iter().sum::<f64>();
        forward.losses.iter().map(loss).sum()
    };
    for (w, value, _) in forward.parameters() {
        let grad = values[graph.gradients_of(w)[0].0].as_ref().unwrap();
        let largest = grad.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        for (i, analytic) in grad.iter().enumerate() {
            let step = 1e-5;
            let numeric = (sum((w, i, step)) - sum((w, i, -step))) / (2.0 * step);
            let error = (analytic - numeric).abs() / largest.max(1e-3);
            assert!(error < 1e-7, "{}[{i}] is {analytic}, numerically {numeric}", value.name);
        }
    }
    // What is no loss has no gradient.
    let mut fewer = forward.clone();
    fewer.losses.remove(0);
    let without = autodiff(&fewer, &context()).unwrap();
    assert!(without.gradients_of(w).is_empty());
}
