//! What tensors start as: drawn on the host, on all cores.

use crate::host::cores;
use crate::{ExecError, Executor};
use lockstep_ir::{DType, Init, bf16, f16, rows8};
use std::sync::Mutex;

/// The initial values of a tensor: those of its parts, one after the other.
pub struct Initial<'a> {
    /// How they are drawn.
    pub init: &'a Init,
    /// The run's seed.
    pub seed: u64,
    /// The parts, in storage order.
    pub parts: Vec<InitialPart<'a>>,
}

/// A part of a tensor that has a name of its own.
pub struct InitialPart<'a> {
    /// Its name: values are a function of it.
    pub name: &'a str,
    /// Elements of a row.
    pub columns: usize,
    /// All elements.
    pub elements: usize,
}

impl Initial<'_> {
    /// How many there are.
    pub fn elements(&self) -> usize {
        self.parts.iter().map(|part| part.elements).sum()
    }

    /// The values.
    pub fn draw(&self) -> Vec<f32> {
        let mut data = vec![0.0f32; self.elements()];
        let mut rest = &mut data[..];
        for InitialPart { name, columns, elements } in &self.parts {
            let (range, behind) = rest.split_at_mut(*elements);
            in_parts(range, *columns, |row, rows| self.init.fill_from(self.seed, name, *columns, row, rows));
            rest = behind;
        }
        data
    }

    /// Writes them to tensors of an executor, to each in its type.
    pub fn write<E: Executor + ?Sized>(&self, executor: &mut E, tensors: &[(&str, DType)]) -> Result<(), ExecError> {
        let data = self.draw();
        tensors.iter().try_for_each(|(name, dtype)| executor.write(name, 0, &encode(&data, *dtype)))
    }
}

/// Numbers as the bytes of a floating-point type.
pub fn encode(data: &[f32], dtype: DType) -> Vec<u8> {
    let mut bytes = vec![0u8; data.len() * dtype.bytes()];
    in_parts(&mut bytes, dtype.bytes(), |first, part| {
        let data = &data[first..];
        match dtype {
            DType::BF16 => put_numbers(part, data, |x| bf16::from_f32(x).to_le_bytes()),
            DType::F16 => put_numbers(part, data, |x| f16::from_f32(x).to_le_bytes()),
            DType::F32 => put_numbers(part, data, f32::to_le_bytes),
            DType::E4M3
            | DType::E5M2
            | DType::Int8
            | DType::F64
            | DType::U32
            | DType::Fixed64
            | DType::Signed8
            | DType::Unsigned8 => {
                unreachable!("no parameter is stored in {dtype}")
            }
        }
    });
    bytes
}

/// Rows of this many numbers as bytes, and the unit of each row ([`rows8`]).
pub fn encode_rows(data: &[f32], dtype: DType, columns: usize) -> (Vec<u8>, Vec<f32>) {
    let row = |row: usize| &data[row * columns..(row + 1) * columns];
    let mut units = vec![0.0f32; data.len() / columns.max(1)];
    in_parts(&mut units, 1, |first, part| {
        part.iter_mut().enumerate().for_each(|(i, unit)| *unit = rows8::unit_of(dtype, row(first + i)));
    });
    let mut bytes = vec![0u8; data.len()];
    in_parts(&mut bytes, columns, |first, part| {
        let rows = part.chunks_mut(columns.max(1)).enumerate();
        rows.for_each(|(i, bytes)| rows8::round(dtype, row(first + i), units[first + i], bytes));
    });
    (bytes, units)
}

/// Writes numbers as bytes, as many as there is room for.
fn put_numbers<const N: usize>(bytes: &mut [u8], data: &[f32], f: impl Fn(f32) -> [u8; N]) {
    bytes.as_chunks_mut().0.iter_mut().zip(data).for_each(|(to, x)| *to = f(*x));
}

/// Calls `f` for parts of `out` on all cores, each with the number of elements of `unit` before it. Parts are whole units.
fn in_parts<T: Send>(out: &mut [T], unit: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    const PART: usize = 1 << 20;
    let unit = unit.max(1);
    let units = (PART / unit).max(1);
    let count = out.len().div_ceil(units * unit);
    let parts = Mutex::new(out.chunks_mut(units * unit).enumerate());
    let next = || parts.lock().unwrap_or_else(|e| e.into_inner()).next();
    let work = || {
        while let Some((i, part)) = next() {
            f(i * units, part);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..cores().min(count) {
            // Where the system gives no more threads, those that are there do it all.
            if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
}
