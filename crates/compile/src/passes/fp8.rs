//! fp8: the matmuls of linear layers and of experts take their operands in fp8.
//!
//! Each operand gets the unit of its largest magnitude, in this micro-batch (current scaling): all ranks that have parts of a tensor give theirs, and
//! each takes the largest. Or activations and gradients get that of the largest magnitudes of the last steps (delayed scaling), which is known before they
//! are. Backward reads the transposes of what forward has quantised, so those are saved, one byte an element, instead of the operands
//! themselves. A weight is quantised where it is used, and once more for backward; `prepare` makes that once per step, where it can.

use crate::Context;
use crate::settings::{Fp8, Fp8Scaling};
use lockstep_ir::graph::{Fp8Class, Node, Source, State};
use lockstep_ir::op::{BLOCK, Factor, Fine};
use lockstep_ir::{Axes, Axis, DType, Dim, Graph, Init, Layout, MeshAxis, Op, TensorType, TypeError, ValueId};
use std::collections::BTreeMap;

/// Sizes of matmuls are multiples of this many: the matrix units take 16 bytes at a time.
const MULTIPLE: usize = 16;
/// Those of experts of this many: what kernels take at a time.
const MULTIPLE_OF_EXPERTS: usize = 128;

pub(super) fn fp8(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let Some(settings) = context.precision.fp8 else { return Ok(graph.clone()) };
    let mut g = graph.clone();
    let layers = layers(&g);
    let (known, delayed) = (BTreeMap::new(), settings.scaling == Fp8Scaling::Delayed);
    let mut operands = Operands { known, layout: &context.layout, delayed };
    for mut node in std::mem::take(&mut g.nodes) {
        if stays(&g, &node, context, settings, layers) == Some(None) {
            let to = g.ty(node.inputs[0]).dtype;
            if let (Op::Linear, Some(by)) = (node.op, settings.fine()) {
                let x = operands.quantised_finely(&mut g, node.inputs[0], (by, false), &node)?;
                let w = operands.quantised_finely(&mut g, node.inputs[1], (by, true), &node)?;
                g.nodes.push(Node { op: Op::FineLinear { by, to }, inputs: [x, w].concat(), ..node });
                continue;
            }
            let (op, x, w) = match node.op {
                Op::GroupedLinear { each: false } => (Op::Fp8Grouped { each: false }, Factor::Tokens, Factor::Stack),
                Op::GroupedLinear { each: true } => (Op::Fp8Grouped { each: true }, Factor::Choices, Factor::Stack),
                Op::RowsLinear { blocks } => (Op::Fp8Rows { blocks }, Factor::Blocks, Factor::Stack),
                _ => (Op::Fp8Linear { to }, Factor::Tokens, Factor::Weight),
            };
            let chosen = node.inputs.get(2).copied();
            let x = operands.quantised(&mut g, node.inputs[0], x, &node)?;
            let w = operands.quantised(&mut g, node.inputs[1], w, &node)?;
            node.op = op;
            node.inputs = x.into_iter().chain(w).chain(chosen).collect();
        }
        g.nodes.push(node);
    }
    Ok(g)
}

/// Largest magnitudes of a tensor, at most: one of each rank that may have a part of it. Context-parallel ranks have two chunks each. Rows in
/// blocks go to the ranks of their experts, so all ranks that have tokens agree on a unit.
fn parts(layout: &Layout, of: Factor) -> usize {
    let size = |axis: MeshAxis| layout.mesh.size(axis);
    let chunks = if size(MeshAxis::Cp) > 1 { 2 } else { 1 };
    let tokens = if of == Factor::Blocks { layout.mesh.size(Axes::TOKENS) } else { size(MeshAxis::Cp) };
    chunks * tokens * size(MeshAxis::Tp)
}

/// Why a matmul of a layer stays in bf16 where others are in fp8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stays {
    /// It is of one of the first or last layers, and those were asked to stay.
    Edge,
    /// It has fewer weights on a rank than a device gains from.
    Small {
        /// This many.
        weights: usize,
        /// Where the gain begins.
        fewest: usize,
    },
    /// A size of it on a rank is no multiple of what matrix units take.
    Odd {
        /// That multiple.
        multiple: usize,
    },
}

/// The matmuls of layers and experts of a graph whose parameters and activations have their types: the weight of each, and why it stays in bf16 where
/// it does.
pub fn fp8_layers(graph: &Graph, context: &Context) -> Vec<(String, Option<Stays>)> {
    let Some(settings) = context.precision.fp8 else { return Vec::new() };
    let all = layers(graph);
    let of =
        |node: &Node| Some((graph.get(*node.inputs.get(1)?).name.clone(), stays(graph, node, context, settings, all)?));
    graph.nodes.iter().filter_map(of).collect()
}

/// How many layers there are.
fn layers(g: &Graph) -> usize {
    g.nodes.iter().filter_map(|node| node.layer).max().map_or(0, |last| last + 1)
}

/// Of a matmul of the model's layers, why it stays in bf16, if it does. None of other nodes.
fn stays(g: &Graph, node: &Node, context: &Context, settings: Fp8, layers: usize) -> Option<Option<Stays>> {
    let of_experts = matches!(node.op, Op::GroupedLinear { .. } | Op::RowsLinear { .. });
    let layer = node.layer.filter(|_| node.op == Op::Linear || of_experts)?;
    let fewest = settings.weights.unwrap_or(context.device.fp8_weights);
    let (x, w) = (g.ty(node.inputs[0]), g.get(node.inputs[1]));
    let trained = matches!(&w.source, Source::State(State::Parameter(parameter)) if !parameter.exact);
    // Those of adapters of experts are thin.
    let thin = of_experts && w.ty.dims.iter().any(|d| d.sections[0].axis == Axis::LowRank);
    if !trained || thin || x.dtype != DType::BF16 {
        return None;
    }
    let tp = context.layout.mesh.size(MeshAxis::Tp);
    let multiple = match (of_experts, settings.fine()) {
        (true, _) => MULTIPLE_OF_EXPERTS,
        (false, Some(Fine::Blocks)) => BLOCK,
        (false, _) => MULTIPLE,
    };
    let rows = if of_experts { 0 } else { rows(x, &context.layout, settings.fine())? };
    let dims = &w.ty.dims[w.ty.dims.len() - 2..];
    let whole = dims.iter().all(|d| d.size().is_multiple_of(multiple * tp)) && rows.is_multiple_of(multiple);
    let weights = dims.iter().map(Dim::size).product::<usize>() / tp;
    if layer < settings.skip_first || layer + settings.skip_last >= layers {
        return Some(Some(Stays::Edge));
    }
    Some(match (weights >= fewest, whole) {
        (false, _) => Some(Stays::Small { weights, fewest }),
        (true, false) => Some(Stays::Odd { multiple }),
        (true, true) => None,
    })
}

/// Rows of tokens that a rank multiplies; of blocks those that follow each other in a sequence.
fn rows(x: &TensorType, layout: &Layout, fine: Option<Fine>) -> Option<usize> {
    let axes: Vec<Axis> = x.dims.iter().map(|d| d.sections[0].axis).collect();
    let [Axis::Batch, Axis::Seq, _] = axes[..] else { return None };
    let size = |axis: MeshAxis| layout.mesh.size(axis);
    let positions = size(MeshAxis::Cp) * if layout.sequence_parallel { size(MeshAxis::Tp) } else { 1 };
    let positions = x.dims[1].size() / positions;
    if fine == Some(Fine::Blocks) {
        return Some(if size(MeshAxis::Cp) > 1 { positions / 2 } else { positions });
    }
    Some(x.dims[0].size() / layout.mesh.size(Axes::SEQUENCES) * positions)
}

/// Steps whose largest magnitudes count.
const STEPS: usize = 16;

/// The largest magnitudes, in the last steps, of what a matmul with this weight reads in forward or in backward. Before the first step there is a
/// guess, by which nothing usual is too large: all of it is below 0.
pub(crate) fn history(g: &mut Graph, weight: ValueId, class: Fp8Class) -> ValueId {
    let (what, guess) = match class {
        Fp8Class::Weights | Fp8Class::Activations => ("x", 64.0),
        Fp8Class::Gradients => ("dy", 16.0),
    };
    let name = format!("history.{what}.{}", g.get(weight).name);
    // A weight that several layers share has one for each.
    let is_taken =
        |name: &str| g.values.iter().any(|v| matches!(v.source, Source::State(State::History(_))) && v.name == name);
    let mut names = std::iter::once(name.clone()).chain((2..).map(|use_| format!("{name}.{use_}")));
    let name = names.find(|name| !is_taken(name)).unwrap_or(name);
    let ty = TensorType::new(DType::F32, [Dim::new(Axis::Scalar, STEPS)]);
    g.state(name, ty, State::History(Init::All(-guess)))
}

/// What has been quantised so far: an operand that several matmuls read is quantised once.
struct Operands<'a> {
    /// Bytes and unit or units, by value and whether it has many: a shared expert reads what experts read, which have one unit in every recipe.
    known: BTreeMap<(ValueId, bool), [ValueId; 2]>,
    layout: &'a Layout,
    /// Whether activations have units of earlier steps.
    delayed: bool,
}

impl Operands<'_> {
    fn quantised(&mut self, g: &mut Graph, v: ValueId, of: Factor, reader: &Node) -> Result<[ValueId; 2], TypeError> {
        if let Some(known) = self.known.get(&(v, false)) {
            return Ok(*known);
        }
        let (name, phase, layer) = (g.get(v).name.clone(), reader.phase, reader.layer);
        let measures = self.delayed && !of.is_weight();
        let amax = match measures {
            true => history(g, reader.inputs[1], Fp8Class::Activations),
            false => {
                let op = Op::Amax { of, parts: parts(self.layout, of) };
                g.node(op, &[v], &format!("{name}.amax"), phase, layer)?[0]
            }
        };
        let op = Op::Quantise { of, to: DType::E4M3, measures };
        let made = g.node(op, &[v, amax], &format!("{name}.fp8"), phase, layer)?;
        let operand = [made[0], made[of.unit()]];
        self.known.insert((v, false), operand);
        Ok(operand)
    }

    /// The same with many units.
    fn quantised_finely(
        &mut self,
        g: &mut Graph,
        v: ValueId,
        (by, weight): (Fine, bool),
        reader: &Node,
    ) -> Result<[ValueId; 2], TypeError> {
        if let Some(known) = self.known.get(&(v, true)) {
            return Ok(*known);
        }
        let (name, op) = (format!("{}.fp8", g.get(v).name), Op::QuantiseFine { by, weight, to: DType::E4M3 });
        let made = g.node(op, &[v], &name, reader.phase, reader.layer)?;
        let operand = [made[0], made[1]];
        self.known.insert((v, true), operand);
        Ok(operand)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::{Stays, fp8_layers};
    use crate::Context;
    use crate::passes::tests::{lines, small_model_of};
    use crate::passes::{FP8, PRECISION, autodiff};
    use crate::settings::{Fp8, Precision};
    use lockstep_ir::graph::{Loss, Parameter, State};
    use lockstep_ir::{Axis, DType, Dim, Graph, Init, Op, TensorType};

    /// Two matmuls of one layer that read the same, with 512 weights each.
    pub fn graph(rows: usize, layout: &str) -> (Graph, Context) {
        let (_, mut context) = small_model_of(1, rows);
        context.layout = layout.parse().unwrap();
        context.precision = Precision::of(DType::BF16, DType::F32);
        let mut g = Graph::new();
        let dim = Dim::new;
        let ids = TensorType::new(DType::U32, [dim(Axis::Batch, 1), dim(Axis::Seq, rows)]);
        let [tokens, targets] = ["tokens", "targets"].map(|name| g.input(name, ids.clone()));
        let [table, up, other] = ["table", "up", "other"].map(|name| {
            let parts = vec![name.to_owned()];
            let of = Parameter::new(Init::Ones, parts);
            let ty = TensorType::new(DType::F32, [dim(Axis::Vocab, 32), dim(Axis::Embed, 16)]);
            g.state(name, ty, State::Parameter(of))
        });
        let x = g.op(Op::Embedding, &[tokens, table], "x").unwrap()[0];
        g.enter_layer(Some(0));
        let a = g.op(Op::Linear, &[x, up], "a").unwrap()[0];
        let b = g.op(Op::Linear, &[x, other], "b").unwrap()[0];
        g.enter_layer(None);
        let sum = g.op(Op::Add, &[a, b], "sum").unwrap()[0];
        let loss = g.op(Op::CrossEntropy, &[sum, targets], "loss").unwrap()[0];
        g.outputs.push(loss);
        g.losses.push(Loss { value: loss, weight: 1.0 });
        (g, context)
    }

    /// The same after autodiff, with layers of this many weights in fp8.
    fn behind_fp8(fewest: usize, rows: usize) -> Graph {
        let (g, mut context) = graph(rows, "dp=1");
        context.precision.fp8 = Some(Fp8 { weights: Some(fewest), ..Fp8::default() });
        let stored = (PRECISION.run)(&g, &context).unwrap();
        autodiff(&(FP8.run)(&stored, &context).unwrap(), &context).unwrap()
    }

    #[test]
    fn what_two_matmuls_read_is_quantised_once_and_backward_reads_transposes() {
        let g = behind_fp8(512, 32);
        assert_eq!(
            lines(&g, &["quantise", "fp8_"], true),
            "\
F x.fp8: e4m3[batch:1, seq:32, embed:16], x.fp8.transposed: e4m3[embed:16, batch:1, seq:32], x.fp8.unit: f32[scalar:1], _ = quantise(x, x.amax) { to: E4M3, measures: false }
F up.fp8: e4m3[vocab:32, embed:16], _, up.fp8.unit: f32[scalar:1], _ = quantise_weight(up, up.amax) { to: E4M3, measures: false }
F a: bf16[batch:1, seq:32, vocab:32] = fp8_linear(x.fp8, x.fp8.unit, up.fp8, up.fp8.unit) { to: BF16 }
F other.fp8: e4m3[vocab:32, embed:16], _, other.fp8.unit: f32[scalar:1], _ = quantise_weight(other, other.amax) { to: E4M3, measures: false }
F b: bf16[batch:1, seq:32, vocab:32] = fp8_linear(x.fp8, x.fp8.unit, other.fp8, other.fp8.unit) { to: BF16 }
B d.sum.fp8: e5m2[batch:1, seq:32, vocab:32], d.sum.fp8.transposed: e5m2[vocab:32, batch:1, seq:32], d.sum.fp8.unit: f32[scalar:1], _ = quantise(d.sum, d.sum.amax) { to: E5M2, measures: false }
B _, other.fp8.again.transposed: e4m3[embed:16, vocab:32], _, _ = quantise_weight(other, other.amax) { to: E4M3, measures: false }
B d.x.fp8: bf16[batch:1, seq:32, embed:16] = fp8_linear(d.sum.fp8, d.sum.fp8.unit, other.fp8.again.transposed, other.fp8.unit) { to: BF16 }
W dw.other: f32[vocab:32, embed:16] += grad.other = fp8_grad_weight(d.sum.fp8.transposed, d.sum.fp8.unit, x.fp8.transposed, x.fp8.unit)
B d.sum.fp8: e5m2[batch:1, seq:32, vocab:32], d.sum.fp8.transposed: e5m2[vocab:32, batch:1, seq:32], d.sum.fp8.unit: f32[scalar:1], _ = quantise(d.sum, d.sum.amax) { to: E5M2, measures: false }
B _, up.fp8.again.transposed: e4m3[embed:16, vocab:32], _, _ = quantise_weight(up, up.amax) { to: E4M3, measures: false }
B d.x.fp8: bf16[batch:1, seq:32, embed:16] = fp8_linear(d.sum.fp8, d.sum.fp8.unit, up.fp8.again.transposed, up.fp8.unit) { to: BF16 }
W dw.up: f32[vocab:32, embed:16] += grad.up = fp8_grad_weight(d.sum.fp8.transposed, d.sum.fp8.unit, x.fp8.transposed, x.fp8.unit)
"
        );
    }

    #[test]
    fn layers_at_the_ends_stay_where_asked() {
        let (g, mut context) = graph(32, "dp=1");
        let stored = (PRECISION.run)(&g, &context).unwrap();
        for (skip_first, skip_last) in [(1, 0), (0, 1)] {
            context.precision.fp8 = Some(Fp8 { weights: Some(0), skip_first, skip_last, ..Fp8::default() });
            assert_eq!((FP8.run)(&stored, &context).unwrap(), stored);
            let layers = fp8_layers(&stored, &context);
            assert!(layers.len() == 2 && layers.iter().all(|(_, stays)| *stays == Some(Stays::Edge)), "{layers:?}");
        }
    }

    #[test]
    fn small_layers_and_odd_sizes_stay_as_they_are() {
        for (fewest, rows) in [(513, 32), (512, 24)] {
            assert_eq!(lines(&behind_fp8(fewest, rows), &["fp8"], false), "");
        }
    }
}
