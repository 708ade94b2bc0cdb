//! Attention sinks. Shapes: o `[b, s, q·v]`, lse `[b, q, s]`, sinks `[q]`, or `[b, s, q]` where every position has them.

use super::call::{Call, Kernel, Kernels, Ptr};
use super::float::Float;
use crate::by_kind;

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        AttentionSink { each } => with_sinks::<T>(call, each),
        AttentionSinkGrad { each } => grad::<T>(call, each),
        ExpandSinks => expand(call),
    }
}

/// Calls `f(element, statistic, sink)` for every head of every position: where the head starts in o, where its log-sum-exp stands, and
/// where its sink.
fn heads(call: Call, each: bool, f: impl Fn(usize, usize, usize) + Sync) {
    let (seq, heads) = (call.size("seq"), call.size("heads"));
    let v = call.size("attended") / heads;
    call.rows(call.size("batch") * seq, |from, end| {
        for (row, h) in (from..end).flat_map(|row| (0..heads).map(move |h| (row, h))) {
            let at = row * heads + h;
            f(at * v, (row / seq * heads + h) * seq + row % seq, if each { at } else { h });
        }
    });
}

/// What is left to the keys of a softmax beside a sink, σ(lse − sink), and the log-sum-exp with it.
pub(super) fn with_sink(lse: f32, sink: f32) -> (f32, f32) {
    let top = lse.max(sink);
    let weight = (lse - top).exp();
    let sum = weight + (sink - top).exp();
    (weight / sum, top + sum.ln())
}

/// o · σ(lse − sink), and the log-sum-exp with the sink; either may be in place of its input.
fn with_sinks<T: Float>(call: Call, each: bool) {
    let v = call.size("attended") / call.size("heads");
    let (o, lse, sinks) = (Ptr(call.input::<T>(0)), Ptr(call.input::<f32>(1)), Ptr(call.input::<f32>(2)));
    let (to, to_lse) = (call.output::<T>(0).map(Ptr), call.output::<f32>(1).map(Ptr));
    heads(call, each, |first, statistic, sink| {
        // SAFETY: a row belongs to one task.
        unsafe {
            let (share, sum) = with_sink(*lse.at(statistic), *sinks.at(sink));
            if let Some(to) = to {
                (first..first + v).for_each(|i| *to.at(i) = T::of((*o.at(i)).to() * share));
            }
            if let Some(to_lse) = to_lse {
                *to_lse.at(statistic) = sum;
            }
        }
    });
}

/// −e^(sink − lse) · (do · o) of every head.
fn grad<T: Float>(call: Call, each: bool) {
    let v = call.size("attended") / call.size("heads");
    let (dout, o) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)));
    let (lse, sinks) = (Ptr(call.input::<f32>(2)), Ptr(call.input::<f32>(3)));
    let Some(to) = call.output::<f32>(0).map(Ptr) else { return };
    heads(call, each, |first, statistic, sink| {
        // SAFETY: a row belongs to one task.
        unsafe {
            let dot: f32 = (first..first + v).map(|i| (*dout.at(i)).to() * (*o.at(i)).to()).sum();
            *to.at(first / v) = -(*sinks.at(sink) - *lse.at(statistic)).exp() * dot;
        }
    });
}

/// The sinks of all heads at every position.
fn expand(call: Call) {
    let heads = call.size("heads");
    let sinks = Ptr(call.input::<f32>(1));
    let Some(to) = call.output::<f32>(0).map(Ptr) else { return };
    call.rows(call.size("batch") * call.size("seq"), |from, end| {
        // SAFETY: rows from .. end belong to this task.
        (from..end).for_each(|row| unsafe { to.slice(row * heads, heads).copy_from_slice(sinks.slice(0, heads)) });
    });
}
