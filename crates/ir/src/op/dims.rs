use super::TypeVar;
use crate::{DType, Dim};

/// What stands for any number of leading dimensions, at least one, among an operand's dimensions.
pub const LEADING: &str = "…";
/// What stands for one dimension of any size.
pub const ANY: &str = "?";
/// Sequences, in every row that has them.
pub const BATCH: &str = "batch";
/// Positions of sequences, in every row that has them.
pub const SEQ: &str = "seq";
/// Rows of a chunk or of blocks, each of a token, in every row that has them.
pub const ROWS: &str = "rows";
/// The operand with a step's key of random bits, in every row that rounds by them ([`StepRounding`](crate::StepRounding)).
pub const ROUNDING: &str = "rounding";

/// The names in an operand's dimensions, in a group that is split together or in a product.
pub fn names(dims: &'static str) -> impl Iterator<Item = &'static str> + Clone {
    dims.split_ascii_whitespace()
}

/// The dimensions of an op's names, and the types of its type variables.
#[derive(Clone, Debug, Default)]
pub struct Dims {
    known: Vec<(&'static str, Dim)>,
    /// After [`LEADING`]; none where no operand has it.
    pub(super) leading: Vec<Dim>,
    floats: [Option<DType>; TypeVar::COUNT],
}

impl Dims {
    /// The dimension of a name.
    pub fn get(&self, name: &str) -> Option<&Dim> {
        self.known.iter().find(|(known, _)| *known == name).map(|(_, d)| d)
    }

    /// Its size; 1 where the op has no such dimension. Of leading dimensions, [`BATCH`] is the outermost where there are several, and
    /// [`SEQ`] all others: however many there are, their product is the number of rows.
    pub fn size(&self, name: &str) -> usize {
        let product = |dims: &[Dim]| dims.iter().map(Dim::size).product::<usize>();
        match (name, &self.leading[..]) {
            (LEADING, all) | (SEQ, all @ [_]) => product(all),
            (BATCH, [outermost, _, ..]) => outermost.size(),
            (SEQ, [_, others @ .., last]) => product(others) * last.size(),
            _ => self.get(name).map_or(1, Dim::size),
        }
    }

    /// The type of a type variable.
    pub fn float(&self, var: TypeVar) -> DType {
        self.floats[var as usize].unwrap_or(DType::F32)
    }

    /// The product of the sizes of these names.
    pub fn product(&self, of: &'static str) -> u128 {
        names(of).map(|name| self.size(name) as u128).product()
    }

    /// Binds a name, or returns the dimension that it is bound to already.
    pub(super) fn set(&mut self, name: &'static str, dim: &Dim) -> Option<&Dim> {
        match self.known.iter().position(|(known, _)| *known == name) {
            Some(i) => Some(&self.known[i].1),
            None => {
                self.known.push((name, dim.clone()));
                None
            }
        }
    }

    /// Binds a type variable, and returns the type that it is bound to now.
    pub(super) fn set_float(&mut self, var: TypeVar, dtype: DType) -> DType {
        *self.floats[var as usize].get_or_insert(dtype)
    }
}
