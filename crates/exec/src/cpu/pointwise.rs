//! Ops that look at one position at a time: embedding, rope, activation functions, additions.

use super::call::{Call, Kernel, Kernels, Ptr};
use super::dropout::dropout;
use super::float::{Bf16, F16, Float};
use super::simd::{self, vectorised};
use crate::by_kind;
use lockstep_ir::DType;
use lockstep_ir::op::IGNORED_TARGET;

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        SwiGlu => swiglu::<T>(call),
        SwiGluGrad => swiglu_grad::<T>(call),
        GeGlu => geglu::<T>(call),
        GeGluGrad => geglu_grad::<T>(call),
        ClampedSwiGlu { limit } => clamped_swiglu::<T>(call, limit),
        ClampedSwiGluGrad { limit } => clamped_swiglu_grad::<T>(call, limit),
        Gelu => gelu::<T>(call),
        GeluGrad => gelu_grad::<T>(call),
        Dropout { rate, site, .. } => dropout::<T>(call, rate, site),
        Add => add::<T>(call),
        Scale { factor, rounded } => {
            let factor = if rounded { T::of(factor).to() } else { factor };
            map::<T>(call, |x| factor * x)
        },
        Cast { .. } => map::<T>(call, |x| x),
    }
}

/// y = f(x), element by element, in the type of y.
pub fn map<T: Float>(call: Call, f: impl Fn(f32) -> f32 + Sync) {
    match call.bound.outputs[0].map(|at| at.dtype) {
        Some(DType::F32) => map_into::<T, f32>(call, f),
        Some(DType::BF16) => map_into::<T, Bf16>(call, f),
        Some(DType::F16) => map_into::<T, F16>(call, f),
        Some(other) => unreachable!("the op table refuses {other}"),
        None => {}
    }
}

fn map_into<T: Float, U: Float>(call: Call, f: impl Fn(f32) -> f32 + Sync) {
    let x = Ptr(call.input::<T>(0));
    let Some(y) = call.output::<U>(0).map(Ptr) else { return };
    call.rows(call.bound.inputs[0].elements, |from, to| {
        // SAFETY: elements from .. to belong to this task.
        (from..to).for_each(|i| unsafe { *y.at(i) = U::of(f((*x.at(i)).to())) });
    });
}

/// A token as an index into a table of `vocab` rows.
#[inline(always)]
pub fn checked_token(token: u32, vocab: usize) -> usize {
    assert!((token as usize) < vocab, "token {token} is outside the vocabulary of {vocab}");
    token as usize
}

/// A target as an index into `vocab` logits; `None` where it is not counted.
#[inline(always)]
pub fn checked_target(target: u32, vocab: usize) -> Option<usize> {
    (target != IGNORED_TARGET).then(|| checked_token(target, vocab))
}

/// Rotates the first `q + u` heads of every row of qkv `[b, s, (q + 2u)·e]` by the angles of its position, which is given (below
/// the table's rows) as is their sign.
pub fn rotate<T: Float>(call: Call, sign: f32, position: impl Fn(usize) -> usize + Sync) {
    let (seq, e, turned) = (call.size("seq"), call.size("head_dim"), call.size("columns"));
    let (rotated, width) = (call.size("heads") + call.size("kv_heads"), call.size("qkv"));
    let (qkv, table) = (Ptr(call.input::<T>(0)), Ptr(call.input::<f32>(1)));
    let Some(out) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(call.size("batch") * seq, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task.
            unsafe {
                let (angles, at) = (table.at(position(row) * turned), row * width);
                rope_row(call.simd, qkv.at(at), angles, out.at(at), rotated, e, turned, width, sign);
            }
        }
    });
}

vectorised! {
    /// Of `rotated` heads of `e` elements, the first `turned` of each. `out` may be the memory of `qkv`.
    unsafe fn rope_row<T>(
        qkv: *const T, angles: *const f32, out: *mut T, rotated: usize, e: usize, turned: usize, width: usize,
        sign: f32,
    ) -> () {
        let half = turned / 2;
        for head in 0..rotated {
            let at = head * e;
            let halves = [qkv.add(at), qkv.add(at + half)];
            simd::map(halves, [out.add(at), out.add(at + half)], half, |[x, y], i| {
                let (cos, sin) = (*angles.add(i), *angles.add(half + i) * sign);
                [x * cos - y * sin, y * cos + x * sin]
            });
        }
        if !std::ptr::eq(qkv, out) {
            let rest = (0..rotated).flat_map(|head| head * e + turned..(head + 1) * e);
            for i in rest.chain(rotated * e..width) {
                *out.add(i) = *qkv.add(i);
            }
        }
    }
}

/// y `[rows, f]` = silu(gate) · up, of gate_up `[rows, 2f]`.
pub fn swiglu<T: Float>(call: Call) {
    gated::<T>(call, |gate_up, y, f| {
        // SAFETY: these are whole rows.
        unsafe { swiglu_row(call.simd, gate_up, y, f) };
    });
}

/// y `[rows, f]` = gelu(gate) · up, of gate_up `[rows, 2f]`.
pub fn geglu<T: Float>(call: Call) {
    gated::<T>(call, |gate_up, y, f| {
        // SAFETY: these are whole rows.
        unsafe { geglu_row(call.simd, gate_up, y, f) };
    });
}

/// y `[rows, f]` = (up + 1) · gate · σ(1.702 · gate) of clamped gate and up, of gate_up `[rows, 2f]`.
pub fn clamped_swiglu<T: Float>(call: Call, limit: f32) {
    gated::<T>(call, |gate_up, y, f| {
        // SAFETY: these are whole rows.
        unsafe { clamped_swiglu_row(call.simd, gate_up, y, f, limit) };
    });
}

/// Calls `of_row` with every row of gate_up and of y, and f.
fn gated<T: Float>(call: Call, of_row: impl Fn(*const T, *mut T, usize) + Sync) {
    let (rows, f) = (call.size("batch") * call.size("seq"), call.size("ffn"));
    let gate_up = Ptr(call.input::<T>(0));
    let Some(y) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task.
            let (gate_up, y) = unsafe { (gate_up.at(row * 2 * f), y.at(row * f)) };
            of_row(gate_up, y, f);
        }
    });
}

vectorised! {
    unsafe fn swiglu_row<T>(gate_up: *const T, y: *mut T, f: usize) -> () {
        simd::map([gate_up, gate_up.add(f)], [y], f, |[g, u], _| [g * sigmoid(g) * u]);
    }
}

vectorised! {
    unsafe fn geglu_row<T>(gate_up: *const T, y: *mut T, f: usize) -> () {
        simd::map([gate_up, gate_up.add(f)], [y], f, |[g, u], _| [g * gelu_share(g) * u]);
    }
}

/// What the gate is multiplied by in the sigmoid of a clamped SwiGLU.
const QUICK: f32 = 1.702;

vectorised! {
    unsafe fn clamped_swiglu_row<T>(gate_up: *const T, y: *mut T, f: usize, limit: f32) -> () {
        simd::map([gate_up, gate_up.add(f)], [y], f, |[g, u], _| {
            let (g, u) = (at_most(g, limit), -at_most(-at_most(u, limit), limit));
            [(u + 1.0) * g * sigmoid(QUICK * g)]
        });
    }
}

/// The smaller of two; what is no number stays so.
#[inline(always)]
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// dgate_up `[rows, 2f]` from dy `[rows, f]` and gate_up.
pub fn swiglu_grad<T: Float>(call: Call) {
    gated_grad::<T>(call, |dy, gate_up, out, f| {
        // SAFETY: these are whole rows.
        unsafe { swiglu_grad_row(call.simd, dy, gate_up, out, f) };
    });
}

/// The same of gelu(gate) · up.
pub fn geglu_grad<T: Float>(call: Call) {
    gated_grad::<T>(call, |dy, gate_up, out, f| {
        // SAFETY: these are whole rows.
        unsafe { geglu_grad_row(call.simd, dy, gate_up, out, f) };
    });
}

/// The same of clamped gate and up: zero in what is clamped.
pub fn clamped_swiglu_grad<T: Float>(call: Call, limit: f32) {
    gated_grad::<T>(call, |dy, gate_up, out, f| {
        // SAFETY: these are whole rows.
        unsafe { clamped_swiglu_grad_row(call.simd, dy, gate_up, out, f, limit) };
    });
}

/// Calls `of_row` with every row of dy, of gate_up and of its gradient, and f.
fn gated_grad<T: Float>(call: Call, of_row: impl Fn(*const T, *const T, *mut T, usize) + Sync) {
    let (rows, f) = (call.size("batch") * call.size("seq"), call.size("ffn"));
    let (dy, gate_up) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)));
    let Some(out) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task.
            let (dy, gate_up, out) = unsafe { (dy.at(row * f), gate_up.at(row * 2 * f), out.at(row * 2 * f)) };
            of_row(dy, gate_up, out, f);
        }
    });
}

vectorised! {
    /// `out` may be the memory of `gate_up`.
    unsafe fn swiglu_grad_row<T>(dy: *const T, gate_up: *const T, out: *mut T, f: usize) -> () {
        simd::map([gate_up, gate_up.add(f), dy], [out, out.add(f)], f, |[g, u, dy], _| {
            let s = sigmoid(g);
            [dy * u * s * (1.0 + g * (1.0 - s)), dy * g * s]
        });
    }
}

vectorised! {
    /// `out` may be the memory of `gate_up`.
    unsafe fn geglu_grad_row<T>(dy: *const T, gate_up: *const T, out: *mut T, f: usize) -> () {
        simd::map([gate_up, gate_up.add(f), dy], [out, out.add(f)], f, |[g, u, dy], _| {
            let s = gelu_share(g);
            [dy * u * s * (1.0 + g * (1.0 - s) * gelu_slope(g)), dy * g * s]
        });
    }
}

vectorised! {
    /// `out` may be the memory of `gate_up`.
    unsafe fn clamped_swiglu_grad_row<T>(dy: *const T, gate_up: *const T, out: *mut T, f: usize, limit: f32) -> () {
        simd::map([gate_up, gate_up.add(f), dy], [out, out.add(f)], f, |[gate, up, dy], _| {
            let (g, u) = (at_most(gate, limit), -at_most(-at_most(up, limit), limit));
            let s = sigmoid(QUICK * g);
            let dgate = dy * (u + 1.0) * s * (1.0 + QUICK * g * (1.0 - s));
            let dup = dy * g * s;
            [if gate > limit { 0.0 } else { dgate }, if up > limit || up < -limit { 0.0 } else { dup }]
        });
    }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + simd::exp(-x))
}

/// y = gelu(x), elementwise.
pub fn gelu<T: Float>(call: Call) {
    let n = call.size("batch") * call.size("seq") * call.size("ffn");
    let x = Ptr(call.input::<T>(0));
    let Some(y) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(n, |from, to| {
        // SAFETY: elements from .. to belong to this task.
        unsafe { gelu_range(call.simd, x.at(from), y.at(from), to - from) };
    });
}

/// √(2/π) and the weight of the cube, of `½ x (1 + tanh u) = x · sigmoid(2u)` with `u = √(2/π) (x + 0.044715 x³)`.
const ROOT: f32 = 0.797_884_6;
const CUBE: f32 = 0.044_715;

/// What GELU multiplies x by.
#[inline(always)]
fn gelu_share(x: f32) -> f32 {
    sigmoid(2.0 * ROOT * (x + CUBE * x * x * x))
}

/// The derivative of 2u.
#[inline(always)]
fn gelu_slope(x: f32) -> f32 {
    2.0 * ROOT * (1.0 + 3.0 * CUBE * x * x)
}

vectorised! {
    /// `y` may be the memory of `x`.
    unsafe fn gelu_range<T>(x: *const T, y: *mut T, n: usize) -> () {
        simd::map([x], [y], n, |[x], _| [x * gelu_share(x)]);
    }
}

/// dx from dy and x, elementwise.
pub fn gelu_grad<T: Float>(call: Call) {
    let n = call.size("batch") * call.size("seq") * call.size("ffn");
    let (dy, x) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)));
    let Some(dx) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(n, |from, to| {
        // SAFETY: elements from .. to belong to this task.
        unsafe { gelu_grad_range(call.simd, dy.at(from), x.at(from), dx.at(from), to - from) };
    });
}

vectorised! {
    /// `dx` may be the memory of `dy` or `x`.
    unsafe fn gelu_grad_range<T>(dy: *const T, x: *const T, dx: *mut T, n: usize) -> () {
        simd::map([dy, x], [dx], n, |[dy, x], _| {
            let s = gelu_share(x);
            [dy * s * (1.0 + x * (1.0 - s) * gelu_slope(x))]
        });
    }
}

/// y `[rows, d]` = x + bias `[d]`.
pub fn add_bias<T: Float>(call: Call) {
    add_table::<T>(call, |_| 0);
}

/// y `[rows, d]` = x + table `[.., d]`, whose row for each row of x is given.
pub fn add_table<T: Float>(call: Call, entry: impl Fn(usize) -> usize + Sync) {
    let (rows, d) = (call.size("batch") * call.size("seq"), call.size("features"));
    let (x, table) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)));
    let Some(y) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task; the caller vouches for the table's.
            unsafe { add_range(call.simd, x.at(row * d), table.at(entry(row) * d), y.at(row * d), d) };
        }
    });
}

/// sum = a + b.
pub fn add<T: Float>(call: Call) {
    let n = call.size("batch") * call.size("seq") * call.size("features");
    let (a, b) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)));
    let Some(sum) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(n, |from, to| {
        // SAFETY: elements from .. to belong to this task.
        unsafe { add_range(call.simd, a.at(from), b.at(from), sum.at(from), to - from) };
    });
}

vectorised! {
    /// `sum` may be the memory of `a` or `b`.
    unsafe fn add_range<T>(a: *const T, b: *const T, sum: *mut T, n: usize) -> () {
        simd::map([a, b], [sum], n, |[a, b], _| [a + b]);
    }
}
