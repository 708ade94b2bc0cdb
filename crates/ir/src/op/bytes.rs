//! Matmuls of weights that are not trained and kept in bytes, each row in a unit of its own ([`rows8`](crate::rows8)).

use super::row::{FlopsRule, Operand, Spec, byte, f32, float, row};
use super::sample::{Draw, Shapes, embed, ffn, sample};
use super::{Cost, Flops, Matmuls, Op, Sample, Saved::Input};
use crate::{Axis, DType, Dim, TensorType};

/// One matmul.
const MATMUL: FlopsRule = |_, dims, _| Flops::all(2 * dims.product("… outputs inputs"));

const W: Operand = byte("w", "outputs inputs");
const UNIT: Operand = f32("unit", "outputs");

/// Samples of rows that are multiplied with weights of these sizes, in both formats.
fn calls(op: Op, [outputs, inputs]: [Dim; 2], x: (TensorType, Draw)) -> Vec<Sample> {
    let of = |(dtype, by)| {
        let w = (TensorType::new(dtype, [outputs.clone(), inputs.clone()]), Draw::Scaled(by));
        let unit = (TensorType::new(DType::F32, [outputs.clone()]), Draw::Powers);
        sample(op, [x.clone(), w, unit])
    };
    [(DType::E4M3, 8.0), (DType::Int8, 40.0)].into_iter().map(of).collect()
}

pub(super) static BYTE_LINEAR: Spec =
    row("byte_linear", &[float("x", "… inputs"), W, UNIT], &[float("y", "… outputs")], |batch| {
        let any = Shapes::any_leading(batch)
            .into_iter()
            .flat_map(|s| calls(Op::ByteLinear, [ffn(), embed()], s.normal(embed())));
        // As few rows as decoding has, of weights that kernels for few rows take, and of one that they do not.
        let few =
            [(1, 256, 48), (1, 128, 16400), (4, 4224, 32), (9, 1152, 48), (9, 128, 16384), (20, 384, 48), (2, 192, 48)];
        let few = few.into_iter().flat_map(|(rows, inputs, outputs)| {
            let (inputs, outputs) = (Dim::new(Axis::Embed, inputs), Dim::new(Axis::Ffn, outputs));
            calls(Op::ByteLinear, [outputs, inputs.clone()], Shapes::sized(batch, rows, 20).normal(inputs))
        });
        any.chain(few).collect()
    })
    .gradient(&[Input(1), Input(2)])
    .splits(&["…", "outputs", "inputs"])
    .flops(MATMUL)
    .multiplies(&[0], |_, dims, _| Cost::Matmul(Matmuls::of(dims, "…", "outputs", "inputs")));

pub(super) static BYTE_LINEAR_GRAD_INPUT: Spec =
    row("byte_linear_grad_input", &[float("dy", "… outputs"), W, UNIT], &[float("dx", "… inputs")], |batch| {
        let of = |s: Shapes| calls(Op::ByteLinearGradInput, [ffn(), embed()], s.normal(ffn()));
        Shapes::any_leading(batch).into_iter().flat_map(of).collect()
    })
    .splits(&["…", "outputs", "inputs"])
    .flops(MATMUL)
    .multiplies(&[0], |_, dims, _| Cost::Matmul(Matmuls::of(dims, "…", "inputs", "outputs")));
