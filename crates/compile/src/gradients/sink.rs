//! Gradients of attention with sinks.

use super::{At, Rules, Stop, attributes};
use lockstep_ir::graph::Node;
use lockstep_ir::{Op, OpKind, TypeError};

pub(super) const RULES: Rules = &[(OpKind::AttentionSink, attention_sink)];

/// The weights of attention with sinks are e^(score − lse), where lse has the sink in it, and the mean that the gradient of a softmax takes away
/// is do · o of the output with sinks. So the gradient of attention itself, given these two, is that of both ops: no gradient goes to the
/// output without sinks, and the rule of attention has nothing to add.
fn attention_sink(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::AttentionSink { each });
    let (dout, sink, o, lse) = (at.dy(0)?, at.input(2), at.output(0), at.output(1));
    if at.is_trained(sink) {
        let name = format!("{}.each", at.name(sink));
        let rows = at.append(Op::AttentionSinkGrad { each }, &[dout, o, lse, sink], &name)?[0];
        at.weight(Op::BiasGrad, &[rows], 2)?;
    }
    let Some(Node { op: Op::Attention { window }, inputs, .. }) = at.made(0) else {
        let reason = "sinks are of attention, and this is the output of another op".to_owned();
        return Err(TypeError { op: at.node.op.name(), reason }.into());
    };
    let reads: Vec<_> = [dout, inputs[0], o, lse].into_iter().chain(inputs.get(1).copied()).collect();
    let name = at.name(inputs[0]);
    let grad = at.append(Op::AttentionGrad { window }, &reads, &name)?[0];
    Ok(at.add_to(inputs[0], grad)?)
}
