//! The op table: every operation, declared once.
//!
//! A row says what an op is called, what it reads and writes (each operand's dimensions as letters, its element type),
//! which output may take over which input's memory, what its gradient may look at, what it costs, and what it is tried on. Shape
//! inference, the verifier, autodiff, lowering, the account of FLOPs and bytes and every executor read these rows. `list.rs` names
//! all ops; a file per family has their rows.
//!
//! Letters: `b` batch, `s` sequence, `d`/`k`/`n` features, `p` packed Q·K·V, `h` heads × head_dim, `q` query heads,
//! `u` key and value heads, `e` head_dim, `g` packed gate·up, `f` ffn, `v` vocabulary, `t` rows of a table, positions of a cache
//! or keys, `r` table columns, `a` the
//! shorter side of a matrix or parts of a vocabulary, of experts or of heads, `w` packed K·V of a cache or of a part, or what a part has of packed heads, `o` a whole sequence of which `s` may be a part, `x` query and key heads
//! together, `i` packed weights of their norms, `l` a single position, `c` rows of a chunk or of blocks, `z` step scalars or words of a key,
//! `m` statistics, `j` experts, `y` the experts of a token, `…` any leading dimensions. A letter that stands in two operands is the same dimension in both; a letter in the inputs that no output has
//! is summed over.

mod attention;
mod collective;
mod context;
mod cost;
mod dims;
mod dispatch;
mod embedding;
mod experts;
mod flops;
mod gradient;
mod head;
mod heads;
mod linear;
mod list;
pub mod newton_schulz;
mod norm;
mod optimizer;
mod pointwise;
mod position;
mod row;
mod sample;
mod section;
#[cfg(test)]
mod tests;

pub use collective::Transfer;
pub use cost::{Call, Cost, Matmuls};
pub use dims::{Dims, LEADING};
pub use dispatch::{Blocks, NO_ROW};
pub use experts::{Routing, Score};
pub use flops::Flops;
pub use heads::{MOST_SECTIONS, position_in_ranks};
pub use list::{Op, OpKind};
pub use row::{Elem, Operand, RunBy, Saved, Spec, Split, TypeVar};
pub use sample::{Draw, Sample, samples};

use crate::{Axes, DType, Dim, TensorType};

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
    /// The op's row in the table.
    pub fn spec(&self) -> &'static Spec {
        self.kind().spec()
    }

    /// The op's name.
    pub fn name(&self) -> &'static str {
        self.spec().name
    }

    /// Its attributes as printed programs show them: all that two ops of one name can differ in; empty where there are none.
    pub fn attributes(&self) -> String {
        let all = format!("{self:?}");
        all.find('{').map_or(String::new(), |at| format!(" {}", &all[at..]))
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

    /// The operand and dimension that have the letter which the op numbers: (whether it is an input, its index,
    /// the dimension). Inputs come first.
    pub fn numbered(&self, inputs: usize) -> Option<(bool, usize, usize)> {
        let spec = self.spec();
        let letter = spec.numbers?;
        let find = |dims: &str| dims.chars().position(|c| c == letter);
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
            let elem = match o.elem {
                Elem::Is(dtype) => dtype,
                Elem::Float(var) => dims.float(var),
                Elem::Rounded => DType::BF16,
                Elem::Accumulator | Elem::Any => match inputs.first() {
                    // Nothing is summed in f16.
                    Some(input) if o.elem == Elem::Accumulator && input.dtype == DType::F16 => DType::F32,
                    Some(input) => input.dtype,
                    None => return Err(self.refuse("has no input to take its type from".into())),
                },
            };
            let shape = match o.dims {
                "*" => Ok(inputs[0].dims.clone()),
                letters => {
                    let leading = if letters.starts_with(LEADING) { dims.leading.clone() } else { Vec::new() };
                    let others = letters.chars().filter(|c| *c != LEADING).map(|c| dims.get(c).cloned().ok_or(c));
                    leading.into_iter().map(Ok).chain(others).collect::<Result<Vec<Dim>, char>>()
                }
            };
            match shape {
                Ok(dims) => Ok(TensorType::new(elem, dims)),
                Err(c) => Err(self.refuse(format!("dimension `{c}` of output `{}` is unknown", o.name))),
            }
        };
        spec.outputs.iter().map(output).collect()
    }

    /// The dimension behind every letter for these inputs.
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
                Elem::Rounded => matches!(ty.dtype, DType::BF16 | DType::F16),
                Elem::Accumulator => ty.dtype.accumulates(),
                Elem::Any => true,
            };
            if !ok {
                return Err(self.refuse(format!("input `{}` has type {}", operand.name, ty.dtype)));
            }
            if operand.dims == "*" {
                continue;
            }
            let letters = operand.dims.trim_start_matches(LEADING);
            let leading = ty.dims.len().checked_sub(letters.chars().count());
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
            for (letter, dim) in letters.chars().zip(others) {
                if letter != '?'
                    && let Some(known) = dims.set(letter, dim)
                    && known != dim
                {
                    return Err(self.refuse(format!("input `{}` has {dim} where `{letter}` is {known}", operand.name)));
                }
            }
        }
        (spec.shape)(self, inputs, &mut dims)?;
        Ok(dims)
    }

    /// Binds a letter that follows from others; an operand may have said the same.
    fn ask(&self, dims: &mut Dims, letter: char, dim: Dim) -> Result<(), TypeError> {
        match dims.set(letter, &dim) {
            Some(known) if *known != dim => {
                Err(self.refuse(format!("`{letter}` is {known} where the heads ask for {dim}")))
            }
            Some(_) | None => Ok(()),
        }
    }

    fn refuse(&self, reason: String) -> TypeError {
        TypeError { op: self.name(), reason }
    }
}
