//! The op table: every operation, declared once.
//!
//! A row says what an op is called, what it reads and writes (each operand's dimensions by name, its element type),
//! which output may take over which input's memory, what its gradient may look at, what it costs, and its sample inputs. Shape
//! inference, the verifier, autodiff, lowering, the account of FLOPs and bytes and every executor read these rows. `list.rs` names
//! all ops; a file per family has their rows.
//!
//! Dimensions have names in their row, as many as it needs: `batch`, `seq` (positions), `features`, and so on. A name that stands in two
//! operands is the same dimension in both; `…` are any leading dimensions, `?` is one of any size. A dimension of the inputs that no
//! output has is summed over. Three names mean the same in all rows, since generic code asks for them: [`BATCH`], [`SEQ`] and [`ROWS`].

mod attention;
mod bytes;
mod collective;
mod context;
mod cost;
mod dims;
mod dispatch;
mod embedding;
mod expert_bias;
mod experts;
mod fine;
mod flops;
mod gradient;
mod head;
mod heads;
mod latent;
mod linear;
mod list;
mod memory;
pub mod newton_schulz;
mod norm;
mod optimizer;
mod pointwise;
mod position;
mod quantise;
mod quantised_experts;
mod row;
mod sample;
mod section;
mod sink;
#[cfg(test)]
mod tests;

pub use collective::Transfer;
pub use context::Ring;
pub use cost::{Call, Cost, Matmuls};
pub use dims::{ANY, BATCH, Dims, LEADING, ROUNDING, ROWS, SEQ, names};
pub use dispatch::{Blocks, NO_ROW};
pub use experts::{Routing, Score};
pub use fine::{BLOCK, Fine};
pub use flops::Flops;
pub use heads::{MOST_SECTIONS, position_in_ranks};
pub use list::{Op, OpKind};
pub use norm::Norm;
pub use quantise::Factor;
pub use row::{Elem, Operand, PartialSums, RunBy, Saved, Spec, Split, TypeVar};
pub use sample::{Draw, Sample, samples};

use crate::{Axes, DType, Dim, TensorType, rows8};

/// The attributes of an op, in its own row.
macro_rules! attributes {
    ($op:expr, $pattern:pat) => {
        let $pattern = *$op else { unreachable!("{} in the row of another op", $op.name()) };
    };
}
use attributes;

/// The target of a position whose loss does not count (a token of a prompt, say): it adds neither loss nor gradient.
pub const IGNORED_TARGET: u32 = u32::MAX;

/// Consecutive positions of a micro-batch, counted over its sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The first, on each rank that has tokens of its own.
    pub first: usize,
    /// How many, on each such rank.
    pub count: usize,
    /// Such ranks that the shapes speak of.
    pub ranks: usize,
}

impl Rows {
    /// The same where shapes speak of one rank.
    pub(crate) fn of_one_rank(self) -> Self {
        Self { ranks: 1, ..self }
    }
}

/// Why an op refuses its inputs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {reason}")]
pub struct TypeError {
    /// The op's name.
    pub op: &'static str,
    /// What does not fit.
    pub reason: String,
}

impl Op {
    /// The op's name.
    pub fn name(&self) -> &'static str {
        self.spec().name
    }

    /// The table row of output `index`.
    pub fn output(&self, index: usize) -> &'static Operand {
        let spec = self.spec();
        &spec.outputs[if spec.each() { 0 } else { index }]
    }

    /// The axes along which ranks work together in it; none where a rank works alone.
    pub fn over(&self) -> Axes {
        self.transfer().map_or(Axes::NONE, |transfer| transfer.over())
    }

    /// Whether all it does is to change the shardings of tensors, each for itself.
    pub fn reshards(&self) -> bool {
        self.spec().reshards.is_some()
    }

    /// Whether ranks work together in it.
    pub fn communicates(&self) -> bool {
        self.transfer().is_some()
    }

    /// What ranks do together in it.
    pub fn transfer(&self) -> Option<Transfer> {
        match self.spec().run_by {
            RunBy::Collective(transfer) | RunBy::Message(transfer) => Some(transfer(self)),
            RunBy::Kernel | RunBy::View => None,
        }
    }

    /// How a router chooses experts in it, or chose them in the forward pass.
    pub fn routing(&self) -> Option<Routing> {
        let (Op::Route { how, .. } | Op::RouteGrad { how }) = self else { return None };
        Some(*how)
    }

    /// The operand and dimension whose entries the op numbers: (whether it is an input, its index,
    /// the dimension). Inputs come first.
    pub fn numbered(&self, inputs: usize) -> Option<(bool, usize, usize)> {
        self.operand_with(inputs, self.spec().numbers?)
    }

    /// The same of the second dimension whose entries it numbers.
    pub fn counted(&self, inputs: usize) -> Option<(bool, usize, usize)> {
        self.operand_with(inputs, self.spec().counts?)
    }

    fn operand_with(&self, inputs: usize, dim: &str) -> Option<(bool, usize, usize)> {
        let spec = self.spec();
        let find = |dims: &'static str| names(dims).position(|name| name == dim);
        let input = (0..inputs).find_map(|i| Some((true, i, find(self.input(i, inputs).dims)?)));
        input.or_else(|| (0..spec.outputs.len()).find_map(|o| Some((false, o, find(spec.outputs[o].dims)?))))
    }

    /// The table row of input `index` when the op is called with `count` inputs.
    pub fn input(&self, index: usize, count: usize) -> &'static Operand {
        let spec = self.spec();
        if !spec.variadic {
            return &spec.inputs[index];
        }
        let repeated = count + 1 - spec.inputs.len();
        &spec.inputs[if index < repeated { 0 } else { index + 1 - repeated }]
    }

    /// Output types for these input types, or why they do not fit.
    pub fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, TypeError> {
        let spec = self.spec();
        let dims = self.bind(inputs)?;
        if spec.each() {
            return Ok(inputs.iter().map(|ty| (*ty).clone()).collect());
        }
        let output = |o: &Operand| {
            if matches!(o.elem, Elem::Weight | Elem::Moment) {
                let changed = spec.inputs.iter().position(|input| input.name == o.name);
                let changed = changed.and_then(|input| inputs.get(input)).map(|ty| (*ty).clone());
                return changed.ok_or_else(|| self.refuse(format!("has no input `{}` to change", o.name)));
            }
            let elem = match o.elem {
                Elem::Is(dtype) => dtype,
                Elem::Float(var) => dims.float(var),
                Elem::Rounded => DType::BF16,
                Elem::Fp8 => dims.float(TypeVar::U),
                Elem::Accumulator | Elem::Byte | Elem::Weight | Elem::Moment | Elem::Any => match inputs.first() {
                    // Nothing is summed in f16 or fp8.
                    Some(input) if o.elem == Elem::Accumulator && !input.dtype.accumulates() => DType::F32,
                    Some(input) => input.dtype,
                    None => return Err(self.refuse("has no input to take its type from".into())),
                },
            };
            let shape = match o.dims {
                "*" => Ok(inputs[0].dims.clone()),
                of => {
                    let leading = if of.starts_with(LEADING) { dims.leading.clone() } else { Vec::new() };
                    let others = names(of).filter(|name| *name != LEADING);
                    let others = others.map(|name| dims.get(name).cloned().ok_or(name));
                    leading.into_iter().map(Ok).chain(others).collect::<Result<Vec<Dim>, &str>>()
                }
            };
            match shape {
                Ok(dims) => Ok(TensorType::new(elem, dims)),
                Err(name) => Err(self.refuse(format!("dimension `{name}` of output `{}` is unknown", o.name))),
            }
        };
        spec.outputs.iter().map(output).collect()
    }

    /// The dimension of every name for these inputs.
    pub fn bind(&self, inputs: &[&TensorType]) -> Result<Dims, TypeError> {
        let spec = self.spec();
        let (least, most, given) = (spec.inputs.len() - spec.optional, spec.inputs.len(), inputs.len());
        if given < least || (given > most && !spec.variadic) {
            let takes = if spec.optional > 0 { format!("{least} to {most}") } else { most.to_string() };
            return Err(self.refuse(format!("takes {takes} inputs, got {given}")));
        }
        let mut dims = Dims::default();
        for (i, ty) in inputs.iter().enumerate() {
            let operand = self.input(i, inputs.len());
            let ok = match operand.elem {
                Elem::Is(dtype) => ty.dtype == dtype,
                Elem::Float(var) => ty.dtype.is_float() && dims.set_float(var, ty.dtype) == ty.dtype,
                Elem::Rounded => ty.dtype.is_rounded(),
                Elem::Fp8 => ty.dtype.is_fp8(),
                Elem::Byte => rows8::is_format(ty.dtype),
                Elem::Accumulator => ty.dtype.accumulates(),
                Elem::Weight => matches!(ty.dtype, DType::F32 | DType::BF16),
                Elem::Moment => matches!(ty.dtype, DType::F32 | DType::BF16) || ty.dtype.is_block(),
                Elem::Any => true,
            };
            if !ok {
                return Err(self.refuse(format!("input `{}` has type {}", operand.name, ty.dtype)));
            }
            if operand.dims == "*" {
                continue;
            }
            let own = names(operand.dims).filter(|name| *name != LEADING);
            let leading = ty.dims.len().checked_sub(own.clone().count());
            let Some(leading) = leading.filter(|n| (*n > 0) == operand.dims.starts_with(LEADING)) else {
                return Err(self.refuse(format!("input `{}` must be [{}], is {ty}", operand.name, operand.dims)));
            };
            let (leading, others) = ty.dims.split_at(leading);
            if dims.leading.is_empty() {
                dims.leading = leading.to_vec();
            }
            if !leading.is_empty() && dims.leading != leading {
                return Err(self.refuse(format!("input `{}` is {ty}, of other leading dimensions", operand.name)));
            }
            for (name, dim) in own.zip(others) {
                if name != ANY
                    && let Some(known) = dims.set(name, dim)
                    && known != dim
                {
                    return Err(self.refuse(format!("input `{}` has {dim} where `{name}` is {known}", operand.name)));
                }
            }
        }
        (spec.shape)(self, inputs, &mut dims)?;
        Ok(dims)
    }

    /// Binds a dimension that follows from others; an operand may have said the same.
    fn ask(&self, dims: &mut Dims, name: &'static str, dim: Dim) -> Result<(), TypeError> {
        match dims.set(name, &dim) {
            Some(known) if *known != dim => {
                Err(self.refuse(format!("`{name}` is {known} where the heads ask for {dim}")))
            }
            Some(_) | None => Ok(()),
        }
    }

    fn refuse(&self, reason: String) -> TypeError {
        TypeError { op: self.name(), reason }
    }
}
