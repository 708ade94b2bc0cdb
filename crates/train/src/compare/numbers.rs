//! Tensors as devices have them, and passes over their numbers on all cores.

use lockstep_exec::cpu;
use lockstep_ir::dynamic8::Table;
use lockstep_ir::graph::State;
use lockstep_ir::{DType, F8, ValueId, bf16, counter, f16, fixed};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// A tensor as a device has it.
#[derive(Clone)]
pub(super) struct Stored {
    pub name: String,
    pub value: ValueId,
    pub state: State,
    pub dtype: DType,
    pub bytes: Vec<u8>,
}

/// Numbers that are turned to f64 at a time.
const BLOCK: usize = 1 << 10;
/// Numbers that a thread takes at a time.
const PART: usize = 1 << 15;

impl Stored {
    /// How many numbers it has.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.bytes() * self.dtype.numbers()
    }

    /// The bytes of some of them, of whole blocks where it is in blocks.
    pub fn range(&self, range: &Range<usize>) -> &[u8] {
        let (bytes, numbers) = (self.dtype.bytes(), self.dtype.numbers());
        &self.bytes[range.start / numbers * bytes..range.end.div_ceil(numbers) * bytes]
    }

    /// Those from `first` on, as many as there is room for.
    fn numbers(&self, first: usize, to: &mut [f64]) {
        fn convert<const N: usize>(bytes: &[u8], to: &mut [f64], f: impl Fn([u8; N]) -> f64) {
            bytes.as_chunks().0.iter().zip(to).for_each(|(b, x)| *x = f(*b));
        }
        let bytes = self.range(&(first..first + to.len()));
        match self.dtype {
            DType::F32 => convert(bytes, to, |b| f64::from(f32::from_le_bytes(b))),
            DType::BF16 => convert(bytes, to, |b| f64::from(bf16::to_f32(u16::from_le_bytes(b)))),
            DType::F16 => convert(bytes, to, |b| f64::from(f16::to_f32(u16::from_le_bytes(b)))),
            DType::E4M3 => convert(bytes, to, |[b]| f64::from(F8::E4M3.to_f32(b))),
            DType::Int8 => convert(bytes, to, |[b]| f64::from(b as i8)),
            DType::E5M2 => convert(bytes, to, |[b]| f64::from(F8::E5M2.to_f32(b))),
            DType::F64 => convert(bytes, to, f64::from_le_bytes),
            DType::U32 => convert(bytes, to, |b| f64::from(u32::from_le_bytes(b))),
            DType::Fixed64 => convert(bytes, to, |b| f64::from(fixed::to_f32(i64::from_le_bytes(b)))),
            DType::Signed8 | DType::Unsigned8 => {
                let numbers = Table::of(self.dtype).map(|table| table.expand(bytes));
                numbers.iter().flatten().zip(to).for_each(|(x, to)| *to = f64::from(*x));
            }
        }
    }

    /// The same tensor with other bytes.
    fn with(&self, bytes: Vec<u8>) -> Self {
        Self { name: self.name.clone(), value: self.value, state: self.state.clone(), dtype: self.dtype, bytes }
    }

    /// Moves every number of a parameter by about one unit in its last place, up or down: what forward and backward read.
    fn disturb(&mut self) {
        if !matches!(self.state, State::Parameter(_)) {
            return;
        }
        let key = counter::key(0, &self.name);
        let up = |i: usize| counter::bits(key, i as u64).is_multiple_of(2);
        match self.dtype {
            DType::F32 => {
                for (i, b) in self.bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let x = f32::from_le_bytes(*b);
                    *b = (x * if up(i) { 1.0 + f32::EPSILON } else { 1.0 - f32::EPSILON }).to_le_bytes();
                }
            }
            DType::BF16 | DType::F16 => {
                for (i, b) in self.bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    // The bits of neighbours are neighbours; zero and what is not finite stay.
                    let bits = u16::from_le_bytes(*b);
                    let mask = if self.dtype == DType::BF16 { 0x7f80 } else { 0x7c00 };
                    if bits & 0x7fff != 0 && bits & mask != mask {
                        *b = (if up(i) { bits ^ 1 } else { bits }).to_le_bytes();
                    }
                }
            }
            DType::E4M3 | DType::E5M2 | DType::Int8 | DType::F64 | DType::U32 | DType::Fixed64 => {}
            DType::Signed8 | DType::Unsigned8 => {}
        }
    }
}

/// The same tensors, with weights that differ in their last bit.
pub(super) fn disturbed(tensors: &[Stored], spare: &mut Spare) -> Vec<Stored> {
    let room: Vec<Mutex<Vec<u8>>> = tensors.iter().map(|t| Mutex::new(spare.take(t.bytes.len()))).collect();
    each(tensors.len(), tensors.iter().map(Stored::len).sum::<usize>() / PART, |i| {
        let mut bytes = std::mem::take(&mut *room[i].lock().unwrap_or_else(PoisonError::into_inner));
        bytes.copy_from_slice(&tensors[i].bytes);
        let mut moved = tensors[i].with(bytes);
        moved.disturb();
        moved
    })
}

/// Calls `f` with blocks of the numbers of several tensors side by side.
pub(super) fn blocks<const N: usize>(tensors: [&Stored; N], range: Range<usize>, mut f: impl FnMut([&[f64]; N])) {
    let mut numbers = [[0.0; BLOCK]; N];
    for first in range.clone().step_by(BLOCK) {
        let len = BLOCK.min(range.end - first);
        tensors.iter().zip(&mut numbers).for_each(|(tensor, to)| tensor.numbers(first, &mut to[..len]));
        f(std::array::from_fn(|i| &numbers[i][..len]));
    }
}

/// What `f` gives for parts of tensors of these sizes, by tensor, on as many cores as that is worth. Parts are always the same.
pub(super) fn parts<R: Send>(sizes: &[usize], f: impl Fn(usize, Range<usize>) -> R + Sync) -> Vec<Vec<R>> {
    let of = |(i, size): (usize, &usize)| {
        let size = *size;
        (0..size).step_by(PART).map(move |first| (i, first..size.min(first + PART)))
    };
    let all: Vec<(usize, Range<usize>)> = sizes.iter().enumerate().flat_map(of).collect();
    let threads = sizes.iter().sum::<usize>() / PART;
    let done = each(all.len(), threads, |k| f(all[k].0, all[k].1.clone()));
    let mut result: Vec<Vec<R>> = sizes.iter().map(|_| Vec::new()).collect();
    all.iter().zip(done).for_each(|((i, _), one)| result[*i].push(one));
    result
}

/// What `f` gives for each of this many, in their order, on at most this many threads and all cores.
fn each<R: Send>(count: usize, threads: usize, f: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(count)));
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                break;
            }
            let result = f(i);
            done.lock().unwrap_or_else(PoisonError::into_inner).push((i, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..cpu::cores().min(threads).min(count) {
            // Where the system gives no more threads, those that are there do it all.
            if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Buffers of tensors that are not needed any more, for others of the same size: new memory costs more than what is done with it.
#[derive(Default)]
pub(super) struct Spare(BTreeMap<usize, Vec<Vec<u8>>>);

impl Spare {
    /// This many bytes, whatever they are.
    pub fn take(&mut self, bytes: usize) -> Vec<u8> {
        self.0.get_mut(&bytes).and_then(Vec::pop).unwrap_or_else(|| vec![0; bytes])
    }

    /// Keeps the buffers of these tensors.
    pub fn keep(&mut self, tensors: Vec<Stored>) {
        tensors.into_iter().for_each(|t| self.0.entry(t.bytes.len()).or_default().push(t.bytes));
    }
}

/// A number beside none is infinitely far from it.
pub(super) fn apart(a: f64, b: f64) -> f64 {
    match (a.is_nan(), b.is_nan()) {
        (true, true) => 0.0,
        (false, false) if a == b => 0.0,
        (false, false) => Some((a - b).abs()).filter(|x| x.is_finite()).unwrap_or(f64::INFINITY),
        _ => f64::INFINITY,
    }
}

/// The largest number of a range, without its sign.
pub(super) fn largest(x: &Stored, range: Range<usize>) -> f64 {
    let mut most = 0.0;
    let mut sizes = [0.0; BLOCK];
    blocks([x], range, |[x]| {
        sizes.iter_mut().zip(x).for_each(|(to, x)| *to = x.abs());
        most = lanes(&sizes[..x.len()], most);
    });
    most
}

/// The largest difference of two tensors in a range.
pub(super) fn most_apart(x: &Stored, y: &Stored, range: Range<usize>) -> f64 {
    if x.dtype == y.dtype && x.range(&range) == y.range(&range) {
        return 0.0;
    }
    let (mut most, mut distances) = (0.0, [0.0; BLOCK]);
    blocks([x, y], range, |[x, y]| {
        distances.iter_mut().zip(x.iter().zip(y)).for_each(|(to, (a, b))| *to = (a - b).abs());
        let distances = &mut distances[..x.len()];
        // What is not finite is looked at one by one; it is not finite in the sum.
        if !distances.iter().sum::<f64>().is_finite() {
            distances.iter_mut().zip(x.iter().zip(y)).for_each(|(to, (a, b))| *to = apart(*a, *b));
        }
        most = lanes(distances, most);
    });
    most
}

/// The largest number, where what is none does not count: without a chain of comparisons.
fn lanes(numbers: &[f64], least: f64) -> f64 {
    let mut most = [least; 8];
    let (eights, rest) = numbers.as_chunks::<8>();
    for eight in eights {
        most.iter_mut().zip(eight).for_each(|(most, x)| *most = if *x > *most { *x } else { *most });
    }
    most.iter().chain(rest).copied().fold(least, f64::max)
}
