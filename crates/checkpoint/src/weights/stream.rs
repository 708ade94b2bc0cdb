//! A tensor in chunks, converted and transposed on the way.

use lockstep_ir::DType;

use super::convert::Float;
use super::{Interleaved, LowRank, TensorCopy, TensorSource};
use crate::error::{CheckpointError, Result};
use crate::tensor_file::CHUNK_BYTES;

/// The most of a transposed tensor that is in memory at a time: smaller ones are read in one go.
const BLOCK_BYTES: usize = 64 << 20;

impl TensorSource<'_> {
    /// Reads a tensor that [`check`](TensorSource::check) has passed and gives its elements, as `dtype`, in the order of the result,
    /// chunk by chunk.
    pub fn stream(&self, copy: &TensorCopy, dtype: DType, give: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        if let TensorSource::Sum { base, added } = self
            && let Some(product) = added.get(&copy.to)
        {
            return product.add_to(base, copy, dtype, give);
        }
        let Some((_, Some(float), _)) = self.find(&copy.from) else {
            return Err(CheckpointError::unfit(self.path(), format!("no tensor `{}`", copy.from), "check the folder"));
        };
        let width = float.bytes();
        let mut converted = Vec::new();
        let mut raw = Vec::new();
        if let (true, [rows, columns]) = (copy.transposed, copy.shape.as_slice()) {
            let (rows, columns) = (*rows, *columns);
            let block = (BLOCK_BYTES / (columns * width).max(1)).clamp(1, rows.max(1));
            let mut transposed = Vec::new();
            for first in (0..rows).step_by(block) {
                let count = block.min(rows - first);
                raw.resize(count * columns * width, 0);
                // All rows are one run of the source; some are a run in each of its rows.
                match count == rows {
                    true => self.read(&copy.from, 0, &mut raw)?,
                    false => {
                        for (column, run) in raw.chunks_mut(count * width).enumerate() {
                            self.read(&copy.from, column * rows + first, run)?;
                        }
                    }
                }
                transposed.resize(raw.len(), 0);
                match width {
                    4 => transpose::<4>(&raw, &mut transposed, columns, count),
                    _ => transpose::<2>(&raw, &mut transposed, columns, count),
                }
                for chunk in transposed.chunks(CHUNK_BYTES) {
                    float.convert(chunk, dtype, &mut converted);
                    give(&converted)?;
                }
            }
            return Ok(());
        }
        if let Some((entries, sizes)) = copy.matrices() {
            let elements = sizes[0] * sizes[1];
            raw.resize(elements * width, 0);
            for entry in 0..entries {
                self.read(&copy.from, entry * elements, &mut raw)?;
                match width {
                    4 => rearrange::<4>(&mut raw, sizes, copy),
                    _ => rearrange::<2>(&mut raw, sizes, copy),
                }
                for chunk in raw.chunks(CHUNK_BYTES) {
                    float.convert(chunk, dtype, &mut converted);
                    give(&converted)?;
                }
            }
            return Ok(());
        }
        let elements = copy.elements().unwrap_or(0);
        let step = CHUNK_BYTES / 4;
        for start in (0..elements).step_by(step) {
            raw.resize(step.min(elements - start) * width, 0);
            self.read(&copy.from, start, &mut raw)?;
            float.convert(&raw, dtype, &mut converted);
            give(&converted)?;
        }
        Ok(())
    }
}

impl LowRank {
    /// Gives the sum of a tensor and the product, rounded once.
    fn add_to(
        &self,
        base: &TensorSource,
        copy: &TensorCopy,
        dtype: DType,
        give: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let (mut row, mut column) = (0, 0);
        let mut product = vec![0.0; self.columns];
        let (mut sums, mut converted) = (Vec::new(), Vec::new());
        base.stream(copy, DType::F32, &mut |chunk| {
            sums.clear();
            for element in chunk.as_chunks().0 {
                if column == 0 {
                    self.row(row, &mut product);
                }
                let sum = f32::from_le_bytes(*element) + product[column];
                sums.extend_from_slice(&sum.to_le_bytes());
                column += 1;
                if column == self.columns {
                    (row, column) = (row + 1, 0);
                }
            }
            Float::F32.convert(&sums, dtype, &mut converted);
            give(&converted)
        })
    }

    /// A row of the product.
    fn row(&self, row: usize, product: &mut [f32]) {
        product.fill(0.0);
        let factors = &self.left[row * self.rank..(row + 1) * self.rank];
        for (factor, line) in factors.iter().zip(self.right.chunks(self.columns)) {
            product.iter_mut().zip(line).for_each(|(sum, x)| *sum += factor * x);
        }
    }
}

/// Puts a matrix of the source into the order of the result. Rows of outputs are those of the matrix that is not turned: of the result where
/// only the source is interleaved, else of the source.
fn rearrange<const W: usize>(matrix: &mut Vec<u8>, [rows, columns]: [usize; 2], copy: &TensorCopy) {
    let mut other = vec![0; matrix.len()];
    let mut turn = |matrix: &mut Vec<u8>| {
        if copy.transposed {
            transpose::<W>(matrix, &mut other, rows, columns);
            std::mem::swap(matrix, &mut other);
        }
    };
    let half = |rows: usize| rows / 2;
    match copy.interleaved {
        Interleaved::Alike => turn(matrix),
        Interleaved::InSource => {
            turn(matrix);
            let (rows, columns) = if copy.transposed { (columns, rows) } else { (rows, columns) };
            permute(matrix, columns * W, rows, |row| 2 * (row % half(rows)) + row / half(rows));
        }
        Interleaved::InResult => {
            permute(matrix, columns * W, rows, |row| row / 2 + row % 2 * half(rows));
            turn(matrix);
        }
    }
}

/// Rows of this many bytes in another order: each is the one that `of` says. An odd number of rows has no halves, and stays.
fn permute(matrix: &mut Vec<u8>, bytes: usize, rows: usize, of: impl Fn(usize) -> usize) {
    if !rows.is_multiple_of(2) || rows == 0 {
        return;
    }
    *matrix = (0..rows).flat_map(|row| &matrix[of(row) * bytes..][..bytes]).copied().collect();
}

/// Writes a matrix of `rows` × `columns` elements of `W` bytes the other way round, square by square, so that both sides
/// stay in the cache.
fn transpose<const W: usize>(from: &[u8], to: &mut [u8], rows: usize, columns: usize) {
    const SQUARE: usize = 32;
    let (from, to) = (from.as_chunks::<W>().0, to.as_chunks_mut::<W>().0);
    for row in (0..rows).step_by(SQUARE) {
        for column in (0..columns).step_by(SQUARE) {
            for r in row..(row + SQUARE).min(rows) {
                for c in column..(column + SQUARE).min(columns) {
                    to[c * rows + r] = from[r * columns + c];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_and_up_of_a_file_that_mixes_them_come_apart_and_back() {
        // Two inputs by three pairs of gate and up, as files have it, and six outputs by two inputs.
        let file: Vec<u8> = [10.0f32, 20.0, 11.0, 21.0, 12.0, 22.0, 30.0, 40.0, 31.0, 41.0, 32.0, 42.0]
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect();
        let ours = [10.0f32, 30.0, 11.0, 31.0, 12.0, 32.0, 20.0, 40.0, 21.0, 41.0, 22.0, 42.0];
        let plain = TensorCopy::plain("x".into(), "x".into(), vec![1, 6, 2]);
        let mut matrix = file.clone();
        let copy = TensorCopy { transposed: true, interleaved: Interleaved::InSource, ..plain.clone() };
        rearrange::<4>(&mut matrix, copy.matrices().unwrap().1, &copy);
        let found: Vec<f32> = matrix.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
        assert_eq!(found, ours);
        let interleaved = Interleaved::InResult;
        let copy = TensorCopy { transposed: true, interleaved, shape: vec![1, 2, 6], ..plain.clone() };
        rearrange::<4>(&mut matrix, copy.matrices().unwrap().1, &copy);
        assert_eq!(matrix, file);
        // A bias is a column.
        let copy = TensorCopy { interleaved: Interleaved::InSource, shape: vec![1, 6], ..plain };
        let mut bias: Vec<u8> = (0..6u16).flat_map(u16::to_le_bytes).collect();
        rearrange::<2>(&mut bias, copy.matrices().unwrap().1, &copy);
        assert_eq!(bias, [0u16, 2, 4, 1, 3, 5].into_iter().flat_map(u16::to_le_bytes).collect::<Vec<u8>>());
    }

    #[test]
    fn a_matrix_is_turned_round() {
        for (rows, columns) in [(1, 1), (1, 70), (70, 1), (33, 65), (64, 32)] {
            let from: Vec<u8> = (0..(rows * columns) as u32).flat_map(u32::to_le_bytes).collect();
            let mut to = vec![0; from.len()];
            transpose::<4>(&from, &mut to, rows, columns);
            for (i, element) in to.as_chunks().0.iter().enumerate() {
                let (r, c) = (i % rows, i / rows);
                assert_eq!(u32::from_le_bytes(*element), (r * columns + c) as u32, "{rows} × {columns}");
            }
            let mut back = vec![0; from.len()];
            transpose::<4>(&to, &mut back, columns, rows);
            assert_eq!(back, from);
        }
    }
}
