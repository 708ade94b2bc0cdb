//! Weights and moments that updates change, read and written as f32 whatever they are kept in: f32 where it is, fewer bits through a block of
//! 256 numbers.

use super::call::{At, Block, Call, Ptr};
use super::float::Bf16;
use super::gradient::read;
use super::simd::{Simd, vectorised};
use lockstep_ir::dynamic8::{BLOCK, BLOCK_BYTES, Table};
use lockstep_ir::{DType, StepRounding};

/// Elements of a task, whole blocks.
pub const GRAIN: usize = 64 * BLOCK;

/// Gradients as their sums hold them; those of fixed-point sums are read into a block first.
#[derive(Clone, Copy)]
pub enum Grad {
    F32(*const f32),
    Bf16(*const Bf16),
}

impl Grad {
    /// Those from element `i` on.
    ///
    /// # Safety
    /// It lies in the gradient.
    unsafe fn at(self, i: usize) -> Self {
        // SAFETY: the caller vouches.
        unsafe {
            match self {
                Grad::F32(grad) => Grad::F32(grad.add(i)),
                Grad::Bf16(grad) => Grad::Bf16(grad.add(i)),
            }
        }
    }
}

/// Elements of an update.
#[derive(Clone, Copy)]
pub struct Range {
    /// The first.
    pub from: usize,
    /// How many.
    pub n: usize,
}

/// Calls `f(gradients, states, range)` for ranges that cover all elements of input `gradient`, on all threads: `states` are the outputs of these
/// numbers, as f32, and what `f` leaves there is kept.
pub fn update<const N: usize>(
    call: Call,
    gradient: usize,
    states: [usize; N],
    f: impl Fn(Grad, [*mut f32; N], Range) + Sync,
) {
    let At { elements, dtype, .. } = call.bound.inputs[gradient];
    let grad = Ptr(call.input::<u8>(gradient));
    let kept = states.map(|o| Kept::of(call, o));
    let random = Random::of(call).filter(|_| kept.iter().any(|state| state.dtype == DType::BF16));
    let one = |grad: Grad, range: Range| {
        if kept.iter().all(|state| state.dtype == DType::F32) {
            // SAFETY: the range lies in every state, and tasks have ranges of their own.
            return f(grad, kept.map(|state| unsafe { state.at.get().cast::<f32>().add(range.from) }), range);
        }
        for start in (0..range.n).step_by(BLOCK) {
            let (from, n) = (range.from + start, BLOCK.min(range.n - start));
            let mut numbers = [[0.0f32; BLOCK]; N];
            // SAFETY: as above; ranges start at whole blocks.
            unsafe {
                for (state, numbers) in kept.iter().zip(&mut numbers) {
                    state.load(call.simd, from, &mut numbers[..n]);
                }
                let mut addresses = [std::ptr::null_mut(); N];
                addresses.iter_mut().zip(&mut numbers).for_each(|(at, numbers)| *at = numbers.as_mut_ptr());
                f(grad.at(start), addresses, Range { from, n });
                let bits = random.as_ref().map(|random| random.bits(call.simd, from, n));
                for (i, (state, numbers)) in kept.iter().zip(&numbers).enumerate() {
                    state.store(call.simd, from, &numbers[..n], bits.as_ref().map(|bits| &bits[state.stream(i)]));
                }
            }
        }
    };
    call.ranges(elements, GRAIN, |from, to| match dtype {
        // SAFETY: from .. to lies in the gradient.
        DType::F32 => one(Grad::F32(unsafe { grad.get().cast::<f32>().add(from) }), Range { from, n: to - from }),
        // SAFETY: the same.
        DType::BF16 => one(Grad::Bf16(unsafe { grad.get().cast::<Bf16>().add(from) }), Range { from, n: to - from }),
        _ => {
            let mut block = [0.0f32; BLOCK];
            for from in (from..to).step_by(BLOCK) {
                let n = BLOCK.min(to - from);
                (0..n).for_each(|i| block[i] = read(dtype, grad, from + i));
                one(Grad::F32(block.as_ptr()), Range { from, n });
            }
        }
    });
}

/// A state that an op changes where it is.
#[derive(Clone, Copy)]
struct Kept {
    at: Ptr<*mut u8>,
    dtype: DType,
    /// Whether it is weights, which have random bits of their own.
    weights: bool,
}

impl Kept {
    fn of(call: Call, output: usize) -> Self {
        let at = Ptr(call.output::<u8>(output).unwrap_or(std::ptr::null_mut()));
        let dtype = call.bound.outputs[output].map_or(DType::F32, |at| at.dtype);
        Self { at, dtype, weights: call.op().output(output).name == "w" }
    }

    /// Which random bits its numbers have: of those of the first of several states, moments count on from the second.
    fn stream(&self, index: usize) -> usize {
        if self.weights { 0 } else { index.max(1) }
    }

    /// # Safety
    /// The elements from `from` on lie in it, and `from` is at a whole block.
    unsafe fn load(&self, simd: Simd, from: usize, to: &mut [f32]) {
        // SAFETY: the caller vouches.
        unsafe {
            match (self.dtype, Table::of(self.dtype)) {
                (_, Some(table)) => {
                    let block = self.at.get().add(from / BLOCK * BLOCK_BYTES).cast::<[u8; BLOCK_BYTES]>();
                    table.load(&*block, to.try_into().unwrap_or_else(|_| unreachable!("blocks are whole")));
                }
                (DType::BF16, _) => expand(simd, self.at.get().cast::<Bf16>().add(from), to.as_mut_ptr(), to.len()),
                _ => expand(simd, self.at.get().cast::<f32>().add(from), to.as_mut_ptr(), to.len()),
            }
        }
    }

    /// # Safety
    /// As `load`, and nobody else touches them meanwhile.
    unsafe fn store(&self, simd: Simd, from: usize, numbers: &[f32], random: Option<&[u16; BLOCK]>) {
        // SAFETY: the caller vouches.
        unsafe {
            match (self.dtype, Table::of(self.dtype), random) {
                (_, Some(table), _) => {
                    let block = self.at.get().add(from / BLOCK * BLOCK_BYTES).cast::<[u8; BLOCK_BYTES]>();
                    let numbers = numbers.try_into().unwrap_or_else(|_| unreachable!("blocks are whole"));
                    table.store(numbers, &mut *block);
                }
                (DType::BF16, _, Some(random)) => {
                    let to = self.at.get().cast::<Bf16>().add(from);
                    round(simd, numbers.as_ptr(), random.as_ptr(), to, numbers.len());
                }
                (DType::BF16, ..) => unreachable!("bf16 is rounded by random bits"),
                _ => expand(simd, numbers.as_ptr(), self.at.get().cast::<f32>().add(from), numbers.len()),
            }
        }
    }
}

vectorised! {
    unsafe fn expand<T>(from: *const T, to: *mut f32, n: usize) -> () {
        for i in 0..n {
            *to.add(i) = (*from.add(i)).to();
        }
    }
}

vectorised! {
    unsafe fn round<T>(from: *const f32, random: *const u16, to: *mut T, n: usize) -> () {
        let to = to.cast::<u16>();
        for i in 0..n {
            *to.add(i) = StepRounding::round(*from.add(i), u32::from(*random.add(i)));
        }
    }
}

/// The random bits of a call's elements.
struct Random<'a> {
    stream: u64,
    places: &'a [Block],
}

impl<'a> Random<'a> {
    /// Those that the call's operands speak of.
    fn of(call: Call<'a>) -> Option<Self> {
        let rounding = call.bound.rounding.as_ref()?;
        // SAFETY: the op table says that the input is two words.
        let words = unsafe { *call.input::<[u32; 2]>(rounding.input) };
        let stream = StepRounding::from_array(words).stream(rounding.site);
        Some(Self { stream, places: &rounding.places })
    }

    /// Of elements from `from` on, those of weights, first moments and second ones.
    fn bits(&self, simd: Simd, from: usize, n: usize) -> [[u16; BLOCK]; 3] {
        let mut elements = [0u32; BLOCK];
        place(self.places, from, &mut elements[..n]);
        let mut bits = [[0; BLOCK]; 3];
        // SAFETY: all are blocks.
        unsafe { draw::<f32>(simd, self.stream, elements.as_ptr(), bits.as_mut_ptr()) };
        bits
    }
}

vectorised! {
    unsafe fn draw<T>(stream: u64, elements: *const u32, bits: *mut [u16; BLOCK]) -> () {
        let [w, m, v] = [0, 1, 2].map(|of| bits.add(of).cast::<u16>());
        for i in 0..BLOCK {
            let of = StepRounding::bits(stream, *elements.add(i));
            (*w.add(i), *m.add(i), *v.add(i)) = (of[0] as u16, of[1] as u16, of[2] as u16);
        }
    }
}

/// Where the elements from `from` on stand in the whole tensor. Of padding, anywhere.
fn place(places: &[Block], from: usize, elements: &mut [u32]) {
    let mut i = 0;
    while i < elements.len() {
        let at = from + i;
        let before = places.partition_point(|block| block.part <= at);
        let block = before.checked_sub(1).map(|b| places[b]).filter(|b| at < b.part + b.part_stride * b.rows);
        let Some(block) = block else {
            i += 1;
            continue;
        };
        let (row, column) = ((at - block.part) / block.part_stride, (at - block.part) % block.part_stride);
        if column >= block.len {
            i += 1;
            continue;
        }
        let count = (block.len - column).min(elements.len() - i);
        let whole = block.whole + row * block.whole_stride + column;
        elements[i..i + count].iter_mut().enumerate().for_each(|(j, to)| *to = (whole + j) as u32);
        i += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_placed_in_the_whole() {
        // Columns 2 and 3 of rows of 4, then a row alone.
        let columns = Block { whole: 2, part: 0, len: 2, rows: 3, whole_stride: 4, part_stride: 2 };
        let row = Block { whole: 40, part: 8, len: 3, rows: 1, whole_stride: 3, part_stride: 3 };
        let mut elements = [9; 10];
        place(&[columns, row], 1, &mut elements);
        assert_eq!(elements, [3, 6, 7, 10, 11, 9, 9, 40, 41, 42]);
    }

    #[test]
    fn ranks_place_their_elements_where_they_stand_in_the_whole() {
        use lockstep_ir::{Axis, Dim, Mesh, MeshAxis, Placement, Section, Sharding, TensorType};
        let (dp, tp) = (MeshAxis::DpShard, MeshAxis::Tp);
        let mesh = Mesh::ONE.with(dp, 3).with(tp, 2);
        let heads = |axis, count| Section { axis, count, unit: 6 };
        let rows = Dim::packed([heads(Axis::Heads, 4), heads(Axis::KvHeads, 2), heads(Axis::KvHeads, 2)]);
        let ty = TensorType::new(DType::F32, [rows, Dim::new(Axis::Embed, 26)]);
        let whole = Sharding::REPLICATED;
        for split in [whole, whole.with(tp, Placement::Split(0)), whole.with(tp, Placement::Split(1))] {
            for sharding in [split, split.with(dp, Placement::Flat)] {
                for at in (0..mesh.ranks()).map(|rank| mesh.coordinates(rank)) {
                    let runs = sharding.runs(&ty, &mesh, at);
                    let mut elements = vec![u32::MAX; sharding.local(&ty, &mesh).elements()];
                    place(&Block::of(&runs), 0, &mut elements);
                    for run in runs {
                        let expected: Vec<u32> = (run.whole..run.whole + run.len).map(|i| i as u32).collect();
                        assert_eq!(elements[run.local..run.local + run.len], expected, "{sharding}");
                    }
                }
            }
        }
    }

    #[test]
    fn rounding_by_random_bits_is_right_on_average_and_leaves_what_fits() {
        let (stream, n) = (StepRounding::new(3, 5).stream(7), 100_000u32);
        for x in [1.0f32 + 1.0 / 512.0, -3.000_3, 1e-30, 7.0e-41] {
            let rounded =
                |i: u32| f64::from(lockstep_ir::bf16::to_f32(StepRounding::round(x, StepRounding::bits(stream, i)[0])));
            let mean = (0..n).map(rounded).sum::<f64>() / f64::from(n);
            // Five standard deviations of the mean of a choice between two neighbours.
            let below = (x.to_bits() >> 16) as u16;
            let step = f64::from(lockstep_ir::bf16::to_f32(below + 1) - lockstep_ir::bf16::to_f32(below)).abs();
            let bound = 5.0 * 0.5 * step / f64::from(n).sqrt();
            assert!((mean - f64::from(x)).abs() < bound, "{mean:e} of {x:e}, {bound:e} are allowed");
        }
        let whole = lockstep_ir::bf16::from_f32(1.5);
        assert!((0..n).all(|i| StepRounding::round(1.5, StepRounding::bits(stream, i)[2]) == whole));
        assert!(lockstep_ir::bf16::to_f32(StepRounding::round(f32::NAN, 0xffff)).is_nan());
        assert_eq!(lockstep_ir::bf16::to_f32(StepRounding::round(f32::NEG_INFINITY, 0xffff)), f32::NEG_INFINITY);
    }
}
