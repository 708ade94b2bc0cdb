//! The passes over the graph, in order.

mod autodiff;
mod bytes;
mod context;
mod experts;
mod fp8;
mod fuse;
mod loads;
mod optimizer;
mod precision;
mod prepare;
mod recompute;
mod score;
mod shard;
mod state_format;
mod totals;
mod vocab;
mod watch;
mod whole_norm;
mod zero;

pub use autodiff::autodiff;
pub use bytes::in_bytes;
pub use experts::ROWS_BEYOND;
pub(crate) use fp8::history;
pub use fp8::{Stays, fp8_layers};
pub use fuse::fuse;
pub use loads::LOADS;
pub use optimizer::{FIRST_STATS, STATS};
pub(crate) use recompute::{Layers, Recomputation, recomputation};
pub use score::MISSES;
pub use totals::SEEN;

use crate::Context;
use lockstep_ir::{Graph, TypeError};

/// Whether a pass may change the bits of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The same bits before and after.
    BitPreserving,
    /// The same mathematics, rounded in another order.
    NumericsChanging,
}

/// A pure function from graph to graph.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Its name in `explain --verbose`.
    pub name: &'static str,
    /// What it does to the bits.
    pub effect: Effect,
    /// The function.
    pub run: fn(&Graph, &Context) -> Result<Graph, TypeError>,
}

const FUSE: Pass = Pass { name: "fuse", effect: Effect::NumericsChanging, run: fuse };
const PRECISION: Pass = Pass { name: "precision", effect: Effect::NumericsChanging, run: precision::precision };
const BYTES: Pass = Pass { name: "bytes", effect: Effect::NumericsChanging, run: bytes::bytes };
const FP8: Pass = Pass { name: "fp8", effect: Effect::NumericsChanging, run: fp8::fp8 };
const EXPERTS: Pass = Pass { name: "experts", effect: Effect::BitPreserving, run: experts::experts };
/// Where gradients have been added, and nothing is recomputed or sharded: stages are cut by what this costs.
pub(crate) const AUTODIFF: Pass = Pass { name: "autodiff", effect: Effect::BitPreserving, run: autodiff };
const RECOMPUTE: Pass = Pass { name: "recompute", effect: Effect::BitPreserving, run: recompute::recompute };
const WATCH: Pass = Pass { name: "watch", effect: Effect::BitPreserving, run: watch::watch };
const SCORE: Pass = Pass { name: "score", effect: Effect::BitPreserving, run: score::score };
const SHARD: Pass = Pass { name: "shard", effect: Effect::NumericsChanging, run: shard::shard };
const ZERO: Pass = Pass { name: "zero", effect: Effect::NumericsChanging, run: zero::zero };
const PREPARE: Pass = Pass { name: "prepare", effect: Effect::BitPreserving, run: prepare::prepare };
const OPTIMIZER: Pass = Pass { name: "optimizer", effect: Effect::NumericsChanging, run: optimizer::optimizer };

/// Every pass of a training step, in order.
pub const TRAINING_PASSES: [Pass; 12] =
    [FUSE, PRECISION, BYTES, EXPERTS, FP8, AUTODIFF, WATCH, RECOMPUTE, SHARD, ZERO, OPTIMIZER, PREPARE];

/// Every pass of a forward program, in order: those of training before gradients are added, so that both compute the same
/// bits.
pub const FORWARD_PASSES: [Pass; 5] = [FUSE, PRECISION, BYTES, EXPERTS, FP8];

/// Those that what runs forward only takes after [`FORWARD_PASSES`], without what nothing reads.
pub(crate) const EVALUATION_PASSES: [Pass; 3] = [SCORE, SHARD, ZERO];

/// The passes of a training step after this one.
pub(crate) fn passes_after(pass: &Pass) -> impl Iterator<Item = Pass> {
    TRAINING_PASSES.into_iter().skip_while(|p| p.name != pass.name).skip(1)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{AdamW, Offload, Optimizer, Precision, Recompute, Steps};
    use lockstep_ir::graph::{Loss, Parameter, State};
    use lockstep_ir::{Axes, Axis, DType, DeviceProfile, Dim, Init, Layout, Op, TensorType, verify};
    use std::collections::BTreeMap;

    /// Embedding, two norms with residual additions in one layer, a tied head.
    pub fn small_model() -> (Graph, Context) {
        small_model_of(1, 4)
    }

    /// The same for a batch, and sequences, of another size.
    pub fn small_model_of(batch: usize, seq: usize) -> (Graph, Context) {
        let mut g = Graph::new();
        let (vocab, embed) = (Dim::new(Axis::Vocab, 8), Dim::new(Axis::Embed, 2));
        let ids = TensorType::new(DType::U32, [Dim::new(Axis::Batch, batch), Dim::new(Axis::Seq, seq)]);
        let tokens = g.input("tokens", ids.clone());
        let targets = g.input("targets", ids);
        let mut parameter = |name: &str, dims: Vec<Dim>| {
            let parameter = Parameter::new(Init::Ones, vec![name.to_owned()]);
            g.state(name, TensorType::new(DType::F32, dims), State::Parameter(parameter))
        };
        let table = parameter("table", vec![vocab, embed.clone()]);
        let [w1, w2] = ["w1", "w2"].map(|name| parameter(name, vec![embed.clone()]));
        let mut op = |op, inputs: &[_], name| g.op(op, inputs, name).unwrap()[0];
        let x = op(Op::Embedding, &[tokens, table], "x");
        let n1 = op(Op::rms_norm(1e-5), &[x, w1], "n1");
        let mid = op(Op::Add, &[x, n1], "mid");
        let n2 = op(Op::rms_norm(1e-5), &[mid, w2], "n2");
        let y = op(Op::Add, &[mid, n2], "y");
        let logits = op(Op::Linear, &[y, table], "logits");
        let loss = op(Op::CrossEntropy, &[logits, targets], "loss");
        g.outputs.push(loss);
        g.losses.push(Loss { value: loss, weight: 1.0 });
        let device = DeviceProfile {
            name: "test".into(),
            alignment: 64,
            cross_entropy_logits: 1 << 20,
            cross_entropy_rows: 1024,
            workspaces: BTreeMap::new(),
            workspaces_with_optional: BTreeMap::new(),
            fusions: Vec::new(),
            faster: Vec::new(),
            fp8_weights: 0,
        };
        let optimizer = Optimizer::adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, 0.1);
        (
            g,
            Context {
                device,
                layout: Layout::single(2),
                optimizer,
                precision: Precision::FP32,
                recompute: Recompute::None,
                stages: vec![],
                steps: Steps::default(),
                offload: Offload::default(),
            },
        )
    }

    /// The small model after the first passes, for two sequences of `seq` to each rank that has its own, and its context in a layout.
    pub fn derived(layout: Layout, seq: usize) -> (Graph, Context) {
        let (g, context) = small_model_of(2 * layout.mesh.size(Axes::SEQUENCES), seq);
        let context = Context { layout, ..context };
        let before = TRAINING_PASSES.iter().take_while(|pass| pass.name != "shard");
        (before.fold(g, |g, pass| (pass.run)(&g, &context).unwrap()), context)
    }

    /// The lines of a graph that have one of these words; types left out where `types` is not set.
    pub fn lines(graph: &Graph, words: &[&str], types: bool) -> String {
        verify::graph(graph).unwrap();
        let text = graph.to_string();
        let wanted = text.lines().filter(|line| words.iter().any(|word| line.contains(word)));
        let short = |line: &str| match types {
            true => line.to_owned(),
            false => line.split(": f32[").map(|piece| piece.split_once(']').map_or(piece, |(_, rest)| rest)).collect(),
        };
        wanted.map(|line| short(line) + "\n").collect()
    }

    /// The small model in two layers, after all passes, and its context in a layout.
    pub fn two_layers(layout: Layout) -> (Graph, Context) {
        let (mut g, context) = small_model();
        [(1, 0), (2, 0), (3, 1), (4, 1)].into_iter().for_each(|(n, layer)| g.nodes[n].layer = Some(layer));
        let context = Context { layout, ..context };
        (TRAINING_PASSES.iter().fold(g, |g, pass| (pass.run)(&g, &context).unwrap()), context)
    }

    /// The same with a third use of the table: a second lookup, added to what reaches the head.
    pub fn used_thrice() -> (Graph, Context) {
        let (mut g, context) = small_model();
        let find = |g: &Graph, name: &str| lockstep_ir::ValueId(g.values.iter().position(|v| v.name == name).unwrap());
        let (y, table, tokens) = (find(&g, "y"), find(&g, "table"), find(&g, "tokens"));
        let again = g.op(Op::Embedding, &[tokens, table], "again").unwrap()[0];
        let both = g.op(Op::Add, &[y, again], "both").unwrap()[0];
        let late = g.nodes.split_off(g.nodes.len() - 2);
        let head = g.nodes.iter().position(|n| n.op == Op::Linear).unwrap();
        g.nodes[head].inputs[0] = both;
        late.into_iter().rev().for_each(|node| g.nodes.insert(head, node));
        (g, context)
    }

    /// A sound graph that prints as expected (ends of lines do not count).
    pub fn check(graph: &Graph, expected: &str) {
        verify::graph(graph).unwrap();
        let trim = |text: &str| text.lines().map(|l| l.replace(", =", " =") + "\n").collect::<String>();
        assert_eq!(trim(&graph.to_string()), trim(expected));
    }

    #[test]
    fn the_optimizer_adds_tied_gradients_once_and_updates_in_place() {
        let (g, context) = small_model();
        let g = TRAINING_PASSES.iter().fold(g, |g, pass| (pass.run)(&g, &context).unwrap());
        let update: String = g
            .to_string()
            .lines()
            .filter(|l| l.starts_with(['U', 'u']))
            .map(|l| l.split(": ").next().unwrap().to_owned() + " = " + l.rsplit(" = ").next().unwrap() + "\n")
            .collect();
        assert_eq!(
            update,
            "\
U grad.table.sum = add_state(grad.table, grad.table.2)
U squares = square_sum(grad.table.sum, grad.w1, grad.w2, step_scalars) { sharers: 1, tail: 0 }
U gradient_stats = gradient_norm(squares, step_scalars)
U table.next = adamw(table, grad.table.sum, m.table, v.table, step_scalars, gradient_stats) { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1, lr_scale: 1.0 }
U w1.next = adamw(w1, grad.w1, m.w1, v.w1, step_scalars, gradient_stats) { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1, lr_scale: 1.0 }
U w2.next = adamw(w2, grad.w2, m.w2, v.w2, step_scalars, gradient_stats) { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1, lr_scale: 1.0 }
update    grad.table <- grad.table.sum = update    grad.table <- grad.table.sum
update    m.table <- table.next.m = update    m.table <- table.next.m
update    v.table <- table.next.v = update    v.table <- table.next.v
update    table <- table.next = update    table <- table.next
update    m.w1 <- w1.next.m = update    m.w1 <- w1.next.m
update    v.w1 <- w1.next.v = update    v.w1 <- w1.next.v
update    w1 <- w1.next = update    w1 <- w1.next
update    m.w2 <- w2.next.m = update    m.w2 <- w2.next.m
update    v.w2 <- w2.next.v = update    v.w2 <- w2.next.v
update    w2 <- w2.next = update    w2 <- w2.next
"
        );
    }
}
