//! What moments and master weights are kept in: f32, or fewer bits where the settings say so and the parameter is worth it.

use crate::settings::{Context, Moments};
use lockstep_ir::graph::{Source, State};
use lockstep_ir::{Axis, DType, Graph, Op, Sharding, StepRounding, TensorType, ValueId, dynamic8};

/// What the state of a parameter is kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StateFormat {
    moments: Moments,
    /// Whether its weights are their own master weights.
    pub own_master: bool,
}

impl StateFormat {
    /// Fewer bits are for matrices between features, of any size that is worth it, and not for tables that are looked up in.
    pub fn of(g: &Graph, context: &Context, w: ValueId, sharding: Sharding) -> Self {
        /// Fewer elements save nothing.
        const LEAST: usize = 4096;
        let ty = g.ty(w);
        let plain = Self { moments: Moments::F32, own_master: false };
        if context.precision.moments == Moments::F32 && !context.precision.own_master {
            return plain;
        }
        let exact = matches!(&g.get(w).source, Source::State(State::Parameter(p)) if p.exact);
        let positions = ty.dims.iter().flat_map(|d| &d.sections).any(|s| s.axis == Axis::Seq);
        // Biases of experts are vectors, one after the other.
        let biases = ty.dims.len() == 2 && ty.dims[0].sections[0].axis == Axis::Experts;
        if exact || positions || biases || ty.dims.len() < 2 || ty.elements() < LEAST || is_looked_up(g, w) {
            return plain;
        }
        let own_master = context.precision.own_master && ty.dtype == DType::BF16;
        // A rank's part of a row is whole blocks too, and its range of all.
        let local = |sharding: Sharding| sharding.local(ty, &context.layout.mesh);
        let range = local(sharding).elements();
        let whole = dynamic8::blocks(ty, DType::Signed8).is_some()
            && dynamic8::blocks(&local(sharding.uncut()), DType::Signed8).is_some()
            && range.is_multiple_of(dynamic8::BLOCK);
        let moments = match context.precision.moments {
            Moments::Blocks if !whole => Moments::Bf16,
            moments => moments,
        };
        Self { moments, own_master }
    }

    /// Whether updates round stochastically, or to blocks.
    pub fn rounds(self) -> bool {
        self.own_master || self.moments != Moments::F32
    }

    /// The type of a moment of a parameter, which has this type in f32.
    pub fn moment(self, ty: &TensorType, which: &str) -> TensorType {
        let of = |dtype| TensorType::new(dtype, ty.dims.clone());
        let blocks = if which == "v" { DType::Unsigned8 } else { DType::Signed8 };
        match self.moments {
            Moments::F32 => of(DType::F32),
            Moments::Bf16 => of(DType::BF16),
            Moments::Blocks => dynamic8::blocks(ty, blocks).unwrap_or_else(|| unreachable!("rows are whole blocks")),
        }
    }
}

/// Whether rows of a parameter are looked up, maybe after ranks have gathered it.
fn is_looked_up(g: &Graph, w: ValueId) -> bool {
    let tables = g.nodes.iter().filter(|n| n.op == Op::Embedding).map(|n| n.inputs[1]);
    tables.into_iter().any(|mut table| {
        while table != w {
            let made = g.nodes.iter().filter(|n| n.op.communicates());
            let from =
                made.filter_map(|n| n.outputs.iter().position(|v| *v == Some(table)).map(|at| n.inputs[at])).next();
            match from {
                Some(from) => table = from,
                None => return false,
            }
        }
        true
    })
}

/// The key of a step's random bits, which a graph has once.
pub(super) fn rounding(g: &mut Graph) -> ValueId {
    let known = g.values.iter().position(|v| v.name == StepRounding::NAME).map(ValueId);
    known.unwrap_or_else(|| g.state(StepRounding::NAME, StepRounding::ty(), State::Scalars))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Precision;
    use crate::passes::TRAINING_PASSES;
    use crate::passes::tests::small_model_of;
    use lockstep_ir::graph::Parameter;
    use lockstep_ir::{Dim, Init, TensorType};

    /// The formats of moments and of master weights after all passes: of a table, a norm, two matrices between `row` and 256 features, and a small
    /// head.
    fn formats(layout: &str, row: usize) -> Vec<String> {
        let layout: lockstep_ir::Layout = layout.parse().unwrap();
        let (_, context) = small_model_of(4, 4);
        let precision =
            Precision { moments: Moments::Blocks, own_master: true, ..Precision::of(DType::BF16, DType::F32) };
        let context = Context { layout, precision, ..context };
        let mut g = Graph::new();
        let dim = |axis, size| Dim::new(axis, size);
        let ids = TensorType::new(DType::U32, [dim(Axis::Batch, 4), dim(Axis::Seq, 4)]);
        let [tokens, targets] = ["tokens", "targets"].map(|name| g.input(name, ids.clone()));
        let mut parameter = |name: &str, dims: Vec<Dim>, exact| {
            let parts = vec![name.to_owned()];
            let of = Parameter { exact, ..Parameter::new(Init::Ones, parts) };
            g.state(name, TensorType::new(DType::F32, dims), State::Parameter(of))
        };
        let table = parameter("table", vec![dim(Axis::Vocab, 64), dim(Axis::Embed, row)], false);
        let norm = parameter("norm", vec![dim(Axis::Embed, row)], false);
        let up = parameter("up", vec![dim(Axis::Ffn, 256), dim(Axis::Embed, row)], false);
        let down = parameter("down", vec![dim(Axis::Embed, row), dim(Axis::Ffn, 256)], false);
        let head = parameter("head", vec![dim(Axis::Vocab, 8), dim(Axis::Embed, row)], false);
        let mut op = |op, inputs: &[_], name| g.op(op, inputs, name).unwrap()[0];
        let x = op(Op::Embedding, &[tokens, table], "x");
        let n = op(Op::rms_norm(1e-5), &[x, norm], "n");
        let hidden = op(Op::Linear, &[n, up], "hidden");
        let y = op(Op::Linear, &[hidden, down], "y");
        let logits = op(Op::Linear, &[y, head], "logits");
        let loss = op(Op::CrossEntropy, &[logits, targets], "loss");
        g.outputs.push(loss);
        g.losses.push(lockstep_ir::graph::Loss { value: loss, weight: 1.0 });
        let g = TRAINING_PASSES.iter().fold(g, |g, pass| (pass.run)(&g, &context).unwrap());
        let state = |name: &str| g.values.iter().find(|v| v.name == name).map(|v| v.ty.dtype);
        let of = |name: &str| {
            let [m, v] = ["m", "v"].map(|which| state(&format!("{which}.{name}")).unwrap());
            let master = if state(&format!("master.{name}")).is_some() { "master" } else { "own" };
            format!("{name} {m} {v} {master}")
        };
        ["table", "norm", "up", "down", "head"].map(of).to_vec()
    }

    #[test]
    fn matrices_are_in_blocks_where_rows_and_ranges_are_whole_and_tables_norms_and_small_ones_stay() {
        let one = [
            "table f32 f32 master",
            "norm f32 f32 master",
            "up signed8 unsigned8 own",
            "down signed8 unsigned8 own",
            "head f32 f32 master",
        ];
        assert_eq!(formats("dp=1", 256), one);
        // Looked up through a gather, and in ranges of whole blocks.
        assert_eq!(formats("dp=2,zero=3", 256), one);
        // Half of a row of 256 is no block; rows of others are whole.
        let halves = [
            "table f32 f32 master",
            "norm f32 f32 master",
            "up signed8 unsigned8 own",
            "down bf16 bf16 own",
            "head f32 f32 master",
        ];
        assert_eq!(formats("tp=2", 256), halves);
        // Rows of 128 are none either.
        let odd = [
            "table f32 f32 master",
            "norm f32 f32 master",
            "up bf16 bf16 own",
            "down signed8 unsigned8 own",
            "head f32 f32 master",
        ];
        assert_eq!(formats("dp=1", 128), odd);
    }
}
