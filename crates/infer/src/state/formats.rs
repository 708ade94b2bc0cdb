//! Numbers of a checkpoint in the types that runs keep them in.

use lockstep_ir::dynamic8::Table;
use lockstep_ir::{DType, bf16, f16};

/// Tensors that a program keeps in another type than the checkpoint that it was restored from.
#[derive(Clone, Debug, PartialEq)]
pub struct Converted {
    /// The group of the checkpoint.
    pub group: &'static str,
    /// Their type there.
    pub from: DType,
    /// Their type now.
    pub to: DType,
    /// How many tensors.
    pub tensors: usize,
    /// Sum of the squares of their numbers.
    squares: f64,
    /// Of what they lost.
    lost: f64,
}

impl Converted {
    /// What was lost, as a share of the numbers: the root of the mean squares of both.
    pub fn lost(&self) -> f64 {
        if self.squares == 0.0 { 0.0 } else { (self.lost / self.squares).sqrt() }
    }
}

/// Adds a tensor to what was converted, a part at a time.
pub(super) fn count(all: &mut Vec<Converted>, (group, from, to): (&'static str, DType, DType), bytes: &[u8]) {
    /// Numbers of a part: whole blocks.
    const PART: usize = 1 << 16;
    let (mut squares, mut lost) = (0.0, 0.0);
    for part in bytes.chunks(PART / from.numbers() * from.bytes()) {
        let before = expand(from, part);
        let after = expand(to, &converted(part, from, to));
        squares += before.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        lost += before.iter().zip(&after).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2)).sum::<f64>();
    }
    match all.iter_mut().find(|c| (c.group, c.from, c.to) == (group, from, to)) {
        Some(known) => {
            known.tensors += 1;
            known.squares += squares;
            known.lost += lost;
        }
        None => all.push(Converted { group, from, to, tensors: 1, squares, lost }),
    }
}

/// Bytes of one type as those of another.
pub fn converted(bytes: &[u8], from: DType, to: DType) -> Vec<u8> {
    let mut data = expand(from, bytes).iter().flat_map(|x| x.to_le_bytes()).collect();
    round(&mut data, to);
    data
}

/// Sizes of the dimensions of a tensor, counted in numbers.
pub(super) fn numbers(dtype: DType, shape: &[usize]) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if let Some(last) = shape.last_mut() {
        *last *= dtype.numbers();
    }
    shape
}

/// The numbers that these bytes encode.
pub(super) fn expand(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let halves = || bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b));
    match (dtype, Table::of(dtype)) {
        (_, Some(table)) => table.expand(bytes),
        (DType::BF16, _) => halves().map(bf16::to_f32).collect(),
        (DType::F16, _) => halves().map(f16::to_f32).collect(),
        _ => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    }
}

/// Turns f32 values into another type, in place where that is as short.
pub(super) fn round(data: &mut Vec<u8>, dtype: DType) {
    if let Some(table) = Table::of(dtype) {
        *data = table.round(&expand(DType::F32, data));
        return;
    }
    let bits: fn(f32) -> u16 = match dtype {
        DType::BF16 => bf16::from_f32,
        DType::F16 => f16::from_f32,
        _ => return,
    };
    for i in 0..data.len() / 4 {
        let value = f32::from_le_bytes([data[4 * i], data[4 * i + 1], data[4 * i + 2], data[4 * i + 3]]);
        data[2 * i..2 * i + 2].copy_from_slice(&bits(value).to_le_bytes());
    }
    data.truncate(data.len() / 2);
}
