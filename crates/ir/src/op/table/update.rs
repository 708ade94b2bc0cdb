//! The rows of ops on gradients and parameters: sums, their norm, updates.

use super::{ANY_OPERAND, Operand, Spec, accumulator, f32, fixed, rounded, row};

pub(super) static ADD_STATE: Spec =
    row("add_state", &[accumulator("a", "*"), accumulator("b", "*")], &[accumulator("sum", "*")], ANY_OPERAND, None);
pub(super) static ACCUMULATE: Spec = row("accumulate", &[accumulator("x", "*")], &[accumulator("sum", "*")], &[], None);
pub(super) static SQUARE_SUM: Spec = Spec {
    variadic: true,
    ..row("square_sum", &[accumulator("grad", "*"), f32("scalars", "z")], &[fixed("sum", "m")], &[], None)
};
pub(super) static MERGE_SUMS: Spec =
    Spec { variadic: true, ..row("merge_sums", &[fixed("sum", "m")], &[fixed("total", "m")], &[], None) };
pub(super) static GRADIENT_NORM: Spec =
    row("gradient_norm", &[fixed("sum", "m"), f32("scalars", "z")], &[f32("stats", "y")], &[], None);
pub(super) static ADAMW: Spec = Spec {
    always_in_place: true,
    ..row(
        "adamw",
        &[
            f32("w", "*"),
            accumulator("grad", "*"),
            f32("m", "*"),
            f32("v", "*"),
            f32("scalars", "z"),
            f32("stats", "y"),
        ],
        &[f32("w", "*"), f32("m", "*"), f32("v", "*"), rounded("copy", "*")],
        &[(0, 0), (2, 1), (3, 2)],
        None,
    )
};

/// An update by one moment.
const fn by_moment(name: &'static str) -> Spec {
    const INPUTS: &[Operand] =
        &[f32("w", "*"), accumulator("grad", "*"), f32("m", "*"), f32("scalars", "z"), f32("stats", "y")];
    const OUTPUTS: &[Operand] = &[f32("w", "*"), f32("m", "*"), rounded("copy", "*")];
    Spec { always_in_place: true, ..row(name, INPUTS, OUTPUTS, &[(0, 0), (2, 1)], None) }
}
pub(super) static LION: Spec = by_moment("lion");
pub(super) static SGD: Spec = by_moment("sgd");
pub(super) static MOMENTUM: Spec = Spec {
    always_in_place: true,
    ..row(
        "momentum",
        &[accumulator("grad", "*"), f32("m", "*"), f32("stats", "y")],
        &[f32("m", "*"), f32("update", "*")],
        &[(1, 0)],
        None,
    )
};
pub(super) static ORTHOGONALISE: Spec =
    row("orthogonalise", &[f32("update", "nk")], &[f32("orthogonal", "nk")], &[(0, 0)], None);
pub(super) static DESCEND: Spec = Spec {
    always_in_place: true,
    ..row(
        "descend",
        &[f32("w", "*"), f32("update", "*"), f32("scalars", "z"), f32("stats", "y")],
        &[f32("w", "*"), rounded("copy", "*")],
        &[(0, 0)],
        None,
    )
};
