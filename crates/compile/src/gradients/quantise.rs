//! Gradients through fp8: rounding counts as the identity, and gradients enter their two matmuls in fp8 too.

use super::{At, Rules, Stop, attributes};
use lockstep_ir::graph::Node;
use lockstep_ir::{DType, Op, OpKind, TypeError, ValueId};

pub(super) const RULES: Rules = &[(OpKind::Quantise, quantise), (OpKind::Fp8Linear, fp8_linear)];

fn quantise(at: &mut At) -> Result<(), Stop> {
    let dq = at.dy(0)?;
    at.add(0, dq)
}

/// What forward has quantised an operand from: the op, its inputs, the transpose and the unit.
struct Quantised {
    op: Op,
    inputs: Vec<ValueId>,
    transposed: ValueId,
    unit: ValueId,
}

impl Quantised {
    fn of(at: &At, input: usize) -> Result<Self, Stop> {
        match at.made(input) {
            Some(Node { op: op @ Op::Quantise { .. }, inputs, outputs, .. }) => {
                if let [_, Some(transposed), Some(unit)] = outputs[..] {
                    return Ok(Self { op, inputs, transposed, unit });
                }
                Err(refuse("the transpose of an operand is not there"))
            }
            _ => Err(refuse("an operand was not quantised in forward")),
        }
    }
}

fn refuse(reason: &str) -> Stop {
    Stop::Refused(TypeError { op: "fp8_linear", reason: reason.to_owned() })
}

/// dx = dy · w of the transpose of w, and dw = dyᵀ · x of both transposes. That of w is made once more from w: it is there only while it is read. So is
/// that of an activation which is saved as it is, for another op.
fn fp8_linear(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::Fp8Linear { to });
    let dy = at.dy(0)?;
    let (x, w) = (Quantised::of(at, 0)?, Quantised::of(at, 2)?);
    let parts = at.g.ty(x.inputs[1]).dims[0].size();
    let name = at.g.get(dy).name.clone();
    let x_transposed = match at.is_saved_anyway(x.inputs[0]) {
        true => {
            let name = format!("{}.fp8.again", at.g.get(x.inputs[0]).name);
            at.append(x.op, &x.inputs, &name)?[1]
        }
        false => x.transposed,
    };
    let amax = at.append(Op::Amax { weight: false, parts }, &[dy], &format!("{name}.amax"))?[0];
    let quantised = at.append(Op::Quantise { weight: false, to: DType::E5M2 }, &[dy, amax], &format!("{name}.fp8"))?;
    let [dy, dy_transposed, dy_unit] = quantised[..] else { return Err(refuse("dy has no transpose")) };
    let name = format!("{}.fp8.again", at.g.get(w.inputs[0]).name);
    let w_transposed = at.append(w.op, &w.inputs, &name)?[1];
    let dx = at.make(Op::Fp8Linear { to }, &[dy, dy_unit, w_transposed, w.unit], 0)?;
    at.weight_of(Op::Fp8GradWeight, &[dy_transposed, dy_unit, x_transposed, x.unit], w.inputs[0])?;
    at.add(0, dx)
}
