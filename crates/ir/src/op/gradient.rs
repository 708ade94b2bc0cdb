//! Sums of gradients, and their norm.

use super::row::{ANY_OPERAND, Spec, accumulator, f32, f64, fixed, row};
use super::sample::{Draw, Shapes, embed, ffn, floats, normal, sample, scalars};
use super::{Op, Sample};
use crate::{Axis, DType, Dim, StepLimits, TensorType, squares};

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
    row("square_sum", &[accumulator("grad", "*"), f32("scalars", "scalars")], &[fixed("sum", "limbs")], |batch| {
        let s = Shapes::new(batch);
        magnitudes(batch, |magnitude| {
            let grad = |ty| (ty, Draw::Scaled(magnitude));
            let inputs = [grad(floats([ffn(), embed()])), grad(s.act(embed())), scalars()];
            sample(Op::SquareSum { sharers: 2, tail: 77 }, inputs)
        })
    })
    .variadic()
    .shape(|_, _, dims| {
        dims.set("limbs", &Dim::new(Axis::Scalar, squares::LIMBS));
        Ok(())
    });

pub(super) static MERGE_SUMS: Spec = row("merge_sums", &[fixed("sum", "limbs")], &[fixed("total", "limbs")], |_| {
    let sum = (limbs(), Draw::Below(1000));
    vec![sample(Op::MergeSums, [sum.clone(), sum.clone(), sum])]
})
.variadic();

pub(super) static LOSS_SUM: Spec = row("loss_sum", &[f64("loss", "batch")], &[fixed("sum", "limbs")], |batch| {
    let losses = TensorType::new(DType::F64, [Dim::new(Axis::Batch, 7 * batch)]);
    vec![sample(Op::LossSum, [(losses, Draw::Positive)])]
})
.splits(&["batch"])
.shape(|_, _, dims| {
    dims.set("limbs", &Dim::new(Axis::Scalar, squares::LIMBS));
    Ok(())
});

pub(super) static GRADIENT_NORM: Spec = row(
    "gradient_norm",
    &[fixed("sum", "limbs"), f32("scalars", "scalars"), fixed("losses", "limbs"), f32("limits", "stats")],
    &[f32("stats", "stats")],
    |batch| {
        let norm = |magnitude| [(limbs(), Draw::Squares(3.51 * magnitude)), scalars()];
        // The square root of the sum of losses is drawn, and the scalars divide that sum by 8.
        let losses = |root| [(limbs(), Draw::Squares(root)), (StepLimits::ty(), Draw::Limits)];
        let limited = |(magnitude, root)| sample(Op::GradientNorm, [norm(magnitude), losses(root)].concat());
        let unlimited = sample(Op::GradientNorm, [&norm(1.0)[..], &losses(4.0)[..1]].concat());
        let plain = magnitudes(batch, |magnitude| sample(Op::GradientNorm, norm(magnitude)));
        // Within both, beyond the limit of the norm, beyond that of the loss.
        let cases: &[(f64, f64)] = if batch == 1 { &[(1.0, 4.0), (2.0, 4.0), (1.0, 6.0)] } else { &[] };
        let limited = cases.iter().copied().map(limited);
        plain[..1].iter().cloned().chain([unlimited]).chain(plain[1..].iter().cloned()).chain(limited).collect()
    },
)
.optional(2)
.shape(|_, _, dims| {
    dims.set("stats", &Dim::new(Axis::Scalar, 2));
    Ok(())
});
