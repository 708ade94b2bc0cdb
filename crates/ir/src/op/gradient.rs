//! Sums of gradients, and their norm.

use super::row::{ANY_OPERAND, Spec, accumulator, f32, fixed, row};
use super::sample::{Draw, Shapes, embed, ffn, floats, normal, sample, scalars};
use super::{Op, Sample};
use crate::{Axis, DType, Dim, TensorType, squares};

pub(super) static ADD_STATE: Spec =
    row("add_state", &[accumulator("a", "*"), accumulator("b", "*")], &[accumulator("sum", "*")], |_| {
        let state = normal([ffn(), embed()]);
        vec![sample(Op::AddState, [state.clone(), state])]
    })
    .in_place(ANY_OPERAND)
    .keeps_partial();

pub(super) static ACCUMULATE: Spec = row("accumulate", &[accumulator("x", "*")], &[accumulator("sum", "*")], |_| {
    vec![sample(Op::Accumulate, [normal([ffn(), embed()])])]
})
.sums(0)
.keeps_partial();

/// Of gradients: usual ones and, once, others.
fn magnitudes(batch: usize, of: impl Fn(f64) -> Sample) -> Vec<Sample> {
    let others: &[f64] = if batch == 1 { &[1e-18, 1e8, 1e18, 1e34] } else { &[] };
    [1.0].iter().chain(others).map(|magnitude| of(*magnitude)).collect()
}

fn limbs() -> TensorType {
    TensorType::new(DType::Fixed64, [Dim::new(Axis::Scalar, squares::LIMBS)])
}

pub(super) static SQUARE_SUM: Spec =
    row("square_sum", &[accumulator("grad", "*"), f32("scalars", "z")], &[fixed("sum", "m")], |batch| {
        let s = Shapes::new(batch);
        magnitudes(batch, |magnitude| {
            let grad = |ty| (ty, Draw::Scaled(magnitude));
            let inputs = [grad(floats([ffn(), embed()])), grad(s.act(embed())), scalars()];
            sample(Op::SquareSum { sharers: 2, tail: 77 }, inputs)
        })
    })
    .variadic()
    .shape(|_, _, dims| {
        dims.set('m', &Dim::new(Axis::Scalar, squares::LIMBS));
        Ok(())
    });

pub(super) static MERGE_SUMS: Spec = row("merge_sums", &[fixed("sum", "m")], &[fixed("total", "m")], |_| {
    let sum = (limbs(), Draw::Below(1000));
    vec![sample(Op::MergeSums, [sum.clone(), sum.clone(), sum])]
})
.variadic();

pub(super) static GRADIENT_NORM: Spec =
    row("gradient_norm", &[fixed("sum", "m"), f32("scalars", "z")], &[f32("stats", "y")], |batch| {
        magnitudes(batch, |magnitude| sample(Op::GradientNorm, [(limbs(), Draw::Squares(3.51 * magnitude)), scalars()]))
    })
    .shape(|_, _, dims| {
        dims.set('y', &Dim::new(Axis::Scalar, 2));
        Ok(())
    });
