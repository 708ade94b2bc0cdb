use super::TypeVar;
use crate::{DType, Dim};

/// What stands for any number of leading dimensions, at least one, in an operand's letters.
pub const LEADING: char = '…';

/// The dimensions behind an op's letters, and the types behind its type variables.
#[derive(Clone, Debug, Default)]
pub struct Dims {
    known: Vec<(char, Dim)>,
    /// Behind [`LEADING`]; none where no operand has it.
    pub(super) leading: Vec<Dim>,
    floats: [Option<DType>; TypeVar::COUNT],
}

impl Dims {
    /// The dimension behind a letter.
    pub fn get(&self, letter: char) -> Option<&Dim> {
        self.known.iter().find(|(c, _)| *c == letter).map(|(_, d)| d)
    }

    /// Its size; 1 where the op has no such letter. Of leading dimensions, `b` is the outermost where there are several, and `s` all
    /// others: however many there are, `b` × `s` are the rows.
    pub fn size(&self, letter: char) -> usize {
        let product = |dims: &[Dim]| dims.iter().map(Dim::size).product::<usize>();
        match (letter, &self.leading[..]) {
            (LEADING, all) | ('s', all @ [_]) => product(all),
            ('b', [outermost, _, ..]) => outermost.size(),
            ('s', [_, others @ .., last]) => product(others) * last.size(),
            _ => self.get(letter).map_or(1, Dim::size),
        }
    }

    /// The type behind a type variable.
    pub fn float(&self, var: TypeVar) -> DType {
        self.floats[var as usize].unwrap_or(DType::F32)
    }

    /// The product of the sizes of these letters.
    pub fn product(&self, letters: &str) -> u128 {
        letters.chars().map(|c| self.size(c) as u128).product()
    }

    /// Binds a letter, or returns the dimension that it is bound to already.
    pub(super) fn set(&mut self, letter: char, dim: &Dim) -> Option<&Dim> {
        match self.known.iter().position(|(c, _)| *c == letter) {
            Some(i) => Some(&self.known[i].1),
            None => {
                self.known.push((letter, dim.clone()));
                None
            }
        }
    }

    /// Binds a type variable, and returns the type that it is bound to now.
    pub(super) fn set_float(&mut self, var: TypeVar, dtype: DType) -> DType {
        *self.floats[var as usize].get_or_insert(dtype)
    }
}
