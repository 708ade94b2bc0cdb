//! A call of an op as its definition sees it, and arithmetic that families share.

use lockstep_ir::op::Dims;
use lockstep_ir::{Op, OpKind, StepScalars, TensorType};

/// What an op makes of its inputs.
pub type Definition = fn(&At) -> Vec<Vec<f64>>;
/// The definitions of a family.
pub type Definitions = Vec<(OpKind, Definition)>;

/// A call of an op.
pub struct At<'a> {
    pub op: Op,
    pub types: &'a [&'a TensorType],
    pub dims: Dims,
    /// Its inputs.
    pub x: &'a [&'a [f64]],
}

impl<'a> At<'a> {
    pub fn op(&self) -> Op {
        self.op
    }

    /// Size of a dimension of the op's row.
    pub fn size(&self, name: &str) -> usize {
        self.dims.size(name)
    }

    /// Positions of all sequences.
    pub fn rows(&self) -> usize {
        self.size("batch") * self.size("seq")
    }

    /// An optional input.
    pub fn given(&self, i: usize) -> Option<&'a [f64]> {
        self.x.get(i).copied()
    }

    /// What gradients start with: 1, or where input `i` is given the loss scale among its scalars.
    pub fn seed(&self, i: usize) -> f64 {
        self.given(i).map_or(1.0, |s| f64::from(scalars(s).loss_scale))
    }

    /// Choices of a token that share a row of it; one where each has its own.
    pub fn sharers(&self, each: bool) -> usize {
        if each { 1 } else { self.size("choices") }
    }
}

pub fn scalars(x: &[f64]) -> StepScalars {
    let x: Vec<f32> = x.iter().map(|x| *x as f32).collect();
    StepScalars::from_slice(&x)
}

pub fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// Sums of `term(i)` over the rows of `d` elements that `of` has, by column.
pub fn column_sums(of: &[f64], d: usize, term: impl Fn(usize) -> f64) -> Vec<f64> {
    (0..d).map(|column| (column..of.len()).step_by(d).map(&term).sum()).collect()
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// a (m × k, or its transpose in memory) · b (k × n, or its transpose in memory).
pub fn matmul(
    (m, n, k): (usize, usize, usize),
    a: &[f64],
    a_transposed: bool,
    b: &[f64],
    b_transposed: bool,
) -> Vec<f64> {
    let a_at = |i: usize, l: usize| if a_transposed { a[l * m + i] } else { a[i * k + l] };
    let b_at = |l: usize, j: usize| if b_transposed { b[j * k + l] } else { b[l * n + j] };
    let element = |at: usize| (0..k).map(|l| a_at(at / n, l) * b_at(l, at % n)).sum();
    (0..m * n).map(element).collect()
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `to` += `by` · `x`.
pub fn add_scaled(to: &mut [f64], by: f64, x: &[f64]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += by * x);
}

pub fn log_sum_exp(x: &[f64]) -> f64 {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}
