//! Gradients through fp8: rounding counts as the identity, and gradients enter their two matmuls in fp8 too.

use super::{At, Rules, Stop, attributes};
use crate::passes::history;
use lockstep_ir::graph::{Fp8Class, Node};
use lockstep_ir::op::Factor;
use lockstep_ir::{DType, Op, OpKind, TypeError, ValueId};

pub(super) const RULES: Rules = &[
    (OpKind::Quantise, quantise),
    (OpKind::QuantiseFine, quantise),
    (OpKind::FineLinear, fine_linear),
    (OpKind::Fp8Linear, fp8_linear),
    (OpKind::Fp8Grouped, fp8_grouped),
    (OpKind::Fp8Rows, fp8_rows),
];

fn quantise(at: &mut At) -> Result<(), Stop> {
    let dq = at.dy(0)?;
    at.add(0, dq)
}

/// What forward has quantised an operand from: the op, its inputs, the outputs.
struct Quantised {
    op: Op,
    inputs: Vec<ValueId>,
    outputs: Vec<Option<ValueId>>,
}

impl Quantised {
    fn of(at: &At, input: usize) -> Result<Self, Stop> {
        match at.made(input) {
            Some(Node { op: op @ (Op::Quantise { .. } | Op::QuantiseFine { .. }), inputs, outputs, .. }) => {
                Ok(Self { op, inputs, outputs })
            }
            _ => Err(refuse("an operand was not quantised in forward")),
        }
    }

    fn unit(&self) -> Result<ValueId, Stop> {
        let Op::Quantise { of, .. } = self.op else { return Err(refuse("an operand has many units")) };
        self.outputs[of.unit()].ok_or_else(|| refuse("the unit of an operand is not there"))
    }

    /// Quantises what it was made from once more.
    fn again(&self, at: &mut At) -> Result<Vec<ValueId>, Stop> {
        let name = format!("{}.fp8.again", at.g.get(self.inputs[0]).name);
        Ok(at.append(self.op, &self.inputs, &name)?)
    }

    /// Outputs of forward. What is saved as it is, for another op, is quantised once more instead.
    fn saved<const N: usize>(&self, at: &mut At, outputs: [usize; N]) -> Result<[ValueId; N], Stop> {
        let made: Vec<Option<ValueId>> = match at.is_saved_anyway(self.inputs[0]) {
            true => self.again(at)?.into_iter().map(Some).collect(),
            false => self.outputs.clone(),
        };
        let all: Option<Vec<ValueId>> = outputs.iter().map(|output| made[*output]).collect();
        all.and_then(|all| all.try_into().ok()).ok_or_else(|| refuse("bytes of an operand are not there"))
    }
}

fn refuse(reason: &str) -> Stop {
    Stop::Refused(TypeError { op: "fp8", reason: reason.to_owned() })
}

/// Quantises the gradient of a matmul of these, with as many parts as an operand of forward had, or in the unit of earlier steps where that has one.
fn quantised(at: &mut At, dy: ValueId, of: Factor, [x, w]: [&Quantised; 2]) -> Result<Vec<ValueId>, Stop> {
    let parts = at.g.ty(x.inputs[1]).dims[0].size();
    let name = at.g.get(dy).name.clone();
    let measures = matches!(x.op, Op::Quantise { measures: true, .. });
    let amax = match measures {
        true => history(at.g, w.inputs[0], Fp8Class::Gradients),
        false => at.append(Op::Amax { of, parts }, &[dy], &format!("{name}.amax"))?[0],
    };
    Ok(at.append(Op::Quantise { of, to: DType::E5M2, measures }, &[dy, amax], &format!("{name}.fp8"))?)
}

/// dx = dy · w of the transpose of w, and dw = dyᵀ · x of both transposes. That of w is made once more from w: it is there only while
/// it is read, or made with w's bytes at the start of the step (the pass `prepare`).
fn fp8_linear(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::Fp8Linear { to });
    let dy = at.dy(0)?;
    let (x, w) = (Quantised::of(at, 0)?, Quantised::of(at, 2)?);
    let [x_transposed] = x.saved(at, [1])?;
    let [dy, dy_transposed, dy_unit, _] = quantised(at, dy, Factor::Tokens, [&x, &w])?[..] else {
        return Err(refuse("dy has no transpose"));
    };
    let w_transposed = w.again(at)?[1];
    let dx = at.make(Op::Fp8Linear { to }, &[dy, dy_unit, w_transposed, w.unit()?], 0)?;
    at.weight_of(Op::Fp8GradWeight, &[dy_transposed, dy_unit, x_transposed, x.unit()?], w.inputs[0])?;
    at.add(0, dx)
}

/// The same with many units.
fn fine_linear(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::FineLinear { by, to });
    let dy = at.dy(0)?;
    let (x, w) = (Quantised::of(at, 0)?, Quantised::of(at, 2)?);
    let (name, op) = (format!("{}.fp8", at.g.get(dy).name), Op::QuantiseFine { by, weight: false, to: DType::E5M2 });
    let dy = at.append(op, &[dy], &name)?;
    let of_w = w.again(at)?;
    let [x, x_units] = x.saved(at, [2, 3])?;
    let dx = at.make(Op::FineLinear { by, to }, &[dy[0], dy[1], of_w[2], of_w[3]], 0)?;
    at.weight_of(Op::FineGradWeight { by }, &[dy[2], dy[3], x, x_units], w.inputs[0])?;
    at.add(0, dx)
}

/// What backward of a matmul of experts reads: the gradient's bytes and their unit, those of the input, the weights' transposes and their units.
struct OfExperts {
    dy: [ValueId; 2],
    x: [ValueId; 2],
    w: [ValueId; 2],
    parameter: ValueId,
}

impl OfExperts {
    fn of(at: &mut At, factor: Factor) -> Result<Self, Stop> {
        let dy = at.dy(0)?;
        let (x, w) = (Quantised::of(at, 0)?, Quantised::of(at, 2)?);
        let [dy, dy_unit, _] = quantised(at, dy, factor, [&x, &w])?[..] else { return Err(refuse("dy has no unit")) };
        let [x_bytes] = x.saved(at, [0])?;
        let w_transposed = w.again(at)?[1];
        Ok(Self { dy: [dy, dy_unit], x: [x_bytes, x.unit()?], w: [w_transposed, w.unit()?], parameter: w.inputs[0] })
    }
}

fn fp8_grouped(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::Fp8Grouped { each });
    let OfExperts { dy, x, w, parameter } = OfExperts::of(at, Factor::Choices)?;
    let (chosen, experts) = (at.input(4), at.first_dim(2));
    let (op, reads) = (Op::Fp8Grouped { each: true }, [dy[0], dy[1], w[0], w[1], chosen]);
    let dx = if each { at.make(op, &reads, 0)? } else { at.each(op, &reads)? };
    at.weight_of(Op::Fp8GroupedGradWeight { each, experts }, &[dy[0], dy[1], x[0], x[1], chosen], parameter)?;
    if each { at.add(0, dx) } else { at.pass(Op::Combine { weighted: false }, &[dx], &[0]) }
}

fn fp8_rows(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::Fp8Rows { blocks });
    let OfExperts { dy, x, w, parameter } = OfExperts::of(at, Factor::Blocks)?;
    let (owners, experts) = (at.input(4), at.first_dim(2));
    let dx = at.make(Op::Fp8Rows { blocks }, &[dy[0], dy[1], w[0], w[1], owners], 0)?;
    at.weight_of(Op::Fp8RowsGradWeight { experts, blocks }, &[dy[0], dy[1], x[0], x[1], owners], parameter)?;
    at.add(0, dx)
}
