use crate::{DType, Dim};

/// The dimensions behind an op's letters.
#[derive(Clone, Debug, Default)]
pub struct Dims {
    known: Vec<(char, Dim)>,
    /// Type of the floating-point operands.
    pub(super) float: Option<DType>,
}

impl Dims {
    /// The dimension behind a letter.
    pub fn get(&self, letter: char) -> Option<&Dim> {
        self.known.iter().find(|(c, _)| *c == letter).map(|(_, d)| d)
    }

    /// Its size; 1 where the op has no such letter.
    pub fn size(&self, letter: char) -> usize {
        self.get(letter).map_or(1, Dim::size)
    }

    /// The type of the floating-point operands.
    pub fn float(&self) -> DType {
        self.float.unwrap_or(DType::F32)
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
}
