//! The update: sums of gradients, their norm, AdamW.

use crate::CudaError;
use crate::call::{Call, THREADS, suffix, sum_kind};
use crate::kernels::{Block, Value, args};
use lockstep_ir::squares::LIMBS;
use lockstep_ir::{DType, Op};

fn each(n: usize) -> [usize; 3] {
    [n.div_ceil(THREADS), 1, 1]
}

pub unsafe fn add_state(call: Call) -> Result<(), CudaError> {
    let Some(sum) = call.output(0) else { return Ok(()) };
    let at = call.bound.inputs[0];
    let args = args![call.input(0), call.input(1), sum, sum_kind(at.dtype), at.elements];
    // SAFETY: the operands have as many elements.
    unsafe { call.plain(("sums", "add_state"), each(at.elements), THREADS, args) }
}

pub unsafe fn accumulate(call: Call) -> Result<(), CudaError> {
    let Some(sum) = call.output(0) else { return Ok(()) };
    let at = call.bound.inputs[0];
    let args = args![call.input(0), sum, sum_kind(at.dtype), call.adds(0), at.elements];
    // SAFETY: the operands have as many elements.
    unsafe { call.plain(("sums", "accumulate"), each(at.elements), THREADS, args) }
}

/// Adds `n` numbers to an accumulator, or puts them there.
///
/// # Safety
/// Both have as many elements.
pub unsafe fn add_f32(call: Call, x: u64, sum: u64, dtype: DType, adds: bool, n: usize) -> Result<(), CudaError> {
    // SAFETY: the caller vouches.
    unsafe { call.plain(("sums", "sum_f32"), each(n), THREADS, args![x, sum, sum_kind(dtype), adds, n]) }
}

/// Tensors of one launch.
const MOST_TENSORS: usize = 64;

/// The first parameter of kernels that take several tensors: how many, the first block of each, and `WORDS` words of each.
struct Many<const WORDS: usize> {
    blocks: usize,
    first: Vec<u32>,
    entries: Vec<[u64; WORDS]>,
}

impl<const WORDS: usize> Many<WORDS> {
    fn new() -> Self {
        Self { blocks: 0, first: Vec::new(), entries: Vec::new() }
    }

    fn push(&mut self, blocks: usize, entry: [u64; WORDS]) {
        self.first.push(self.blocks as u32);
        self.entries.push(entry);
        self.blocks += blocks;
    }

    fn is_full(&self) -> bool {
        self.entries.len() == MOST_TENSORS
    }

    /// As the kernels' struct: a count, then `MOST_TENSORS` numbers of 32 bits, padding, then the entries.
    fn words(&self) -> Vec<u64> {
        let mut numbers = vec![0u32; (1 + MOST_TENSORS).next_multiple_of(2)];
        numbers[0] = self.entries.len() as u32;
        numbers[1..].iter_mut().zip(&self.first).for_each(|(to, first)| *to = *first);
        let pairs = numbers.as_chunks::<2>().0.iter().map(|[low, high]| u64::from(*low) | u64::from(*high) << 32);
        let mut words: Vec<u64> = pairs.chain(self.entries.iter().flatten().copied()).collect();
        words.resize(numbers.len() / 2 + MOST_TENSORS * WORDS, 0);
        words
    }

    /// Queues a kernel of `optimizer.cu` for them.
    ///
    /// # Safety
    /// The entries are those of the kernel's struct.
    unsafe fn launch(&mut self, call: Call, name: &str, args: &[Value]) -> Result<(), CudaError> {
        let grid = [self.blocks, 1, 1];
        // SAFETY: the caller vouches.
        unsafe {
            let block = Block { threads: THREADS, shared: 0 };
            call.on().launch_with(("optimizer", name), grid, block, Some(&self.words()), args)?;
        }
        *self = Self::new();
        Ok(())
    }
}

/// Scratch: the limbs of the sum, and a mark.
pub unsafe fn square_sum(call: Call, sharers: usize, tail: usize) -> Result<(), CudaError> {
    /// Elements of a block of threads.
    const CHUNK: usize = THREADS * 4 * 8;
    let Some(out) = call.output(0) else { return Ok(()) };
    let (totals, last) = (call.scratch()?, call.bound.inputs.len() - 1);
    let args = args![call.input(last), totals, 1.0 / sharers as f64];
    let gradients = &call.bound.inputs[..last];
    // SAFETY: the operands have as many elements; the scratch has as many numbers.
    unsafe { call.stream.fill(totals, 0, (LIMBS + 1) * 8)? };
    for dtype in [DType::F32, DType::BF16, DType::Fixed64] {
        let name = format!("square_sum_{}", suffix(dtype));
        let mut many = Many::<3>::new();
        for (i, at) in gradients.iter().enumerate().filter(|(_, at)| at.dtype == dtype) {
            let tail = tail.saturating_sub(at.cut_at).min(at.elements);
            many.push(at.elements.div_ceil(CHUNK), [call.input(i), at.elements as u64, tail as u64]);
            if many.is_full() {
                // SAFETY: address, elements and tail, as the kernel's struct has them.
                unsafe { many.launch(call, &name, args)? };
            }
        }
        // SAFETY: as above.
        unsafe { many.launch(call, &name, args)? };
    }
    // SAFETY: the scratch has the limbs and a mark, the output the limbs.
    unsafe { call.plain(("optimizer", "square_sum_end"), [1, 1, 1], 1, args![totals, out]) }
}

pub unsafe fn merge_sums(call: Call) -> Result<(), CudaError> {
    let Some(total) = call.output(0) else { return Ok(()) };
    (0..call.bound.inputs.len()).try_for_each(|i| {
        // SAFETY: all have as many parts, fewer than 32.
        unsafe { call.plain(("optimizer", "merge_sum"), [1, 1, 1], 32, args![call.input(i), total, i > 0]) }
    })
}

pub unsafe fn loss_sum(call: Call) -> Result<(), CudaError> {
    let Some(sum) = call.output(0) else { return Ok(()) };
    let args = args![call.input(0), call.bound.inputs[0].elements, sum];
    // SAFETY: there are as many losses, and the limbs of a sum.
    unsafe { call.plain(("optimizer", "loss_sum"), [1, 1, 1], 1, args) }
}

pub unsafe fn gradient_norm(call: Call) -> Result<(), CudaError> {
    let Some(stats) = call.output(0) else { return Ok(()) };
    let args = args![call.input(0), call.input(1), call.given(2), call.given(3), stats];
    // SAFETY: the operands have the sizes that the kernel knows.
    unsafe { call.plain(("optimizer", "gradient_norm"), [1, 1, 1], 1, args) }
}

/// AdamW of one tensor.
pub unsafe fn adamw(call: Call) -> Result<(), CudaError> {
    // SAFETY: the caller vouches.
    unsafe { adamw_many(&[call]) }
}

/// AdamW of several tensors that have constants, types, scalars and statistics in common.
pub unsafe fn adamw_many(calls: &[Call]) -> Result<(), CudaError> {
    let Some(first) = calls.first() else { return Ok(()) };
    let Op::AdamW { beta1, beta2, eps, .. } = first.bound.op else { return Ok(()) };
    let name = format!("adamw_{}", suffix(first.bound.inputs[1].dtype));
    let args = args![first.input(4), first.input(5), beta1, beta2, eps];
    let mut many = Many::<7>::new();
    for call in calls {
        let (Some(w), Some(m), Some(v)) = (call.output(0), call.output(1), call.output(2)) else { continue };
        let Op::AdamW { decay, lr_scale, .. } = call.bound.op else { continue };
        let n = call.bound.inputs[0].elements;
        let numbers = u64::from(decay.to_bits()) | u64::from(lr_scale.to_bits()) << 32;
        let entry = [call.input(1), w, m, v, call.output(3).unwrap_or(0), n as u64, numbers];
        many.push(n.div_ceil(4 * THREADS), entry);
        if many.is_full() {
            // SAFETY: as the kernel's struct has them; the operands have as many elements.
            unsafe { many.launch(*first, &name, args)? };
        }
    }
    // SAFETY: as above.
    unsafe { many.launch(*first, &name, args) }
}

/// Lion or SGD: a rule with one moment.
pub unsafe fn by_moment(call: Call, rule: &str, [a, b, decay, lr_scale]: [f32; 4]) -> Result<(), CudaError> {
    let (Some(w), Some(m)) = (call.output(0), call.output(1)) else { return Ok(()) };
    let n = call.bound.inputs[0].elements;
    let name = format!("{rule}_{}", suffix(call.bound.inputs[1].dtype));
    let (grad, scalars, stats) = (call.input(1), call.input(3), call.input(4));
    let args = args![grad, scalars, stats, w, m, call.output(2), n, a, b, decay, lr_scale];
    // SAFETY: the operands have as many elements.
    unsafe { call.plain(("optimizer", &name), each(n), THREADS, args) }
}

pub unsafe fn momentum(call: Call, beta: f32) -> Result<(), CudaError> {
    let Some(m) = call.output(0) else { return Ok(()) };
    let at = call.bound.inputs[0];
    let name = format!("momentum_{}", suffix(at.dtype));
    let args = args![call.input(0), call.input(2), m, call.output(1), at.elements, beta];
    // SAFETY: the operands have as many elements.
    unsafe { call.plain(("optimizer", &name), each(at.elements), THREADS, args) }
}

pub unsafe fn descend(call: Call, decay: f32, lr_scale: f32) -> Result<(), CudaError> {
    let Some(w) = call.output(0) else { return Ok(()) };
    let n = call.bound.inputs[0].elements;
    let args = args![call.input(1), call.input(2), call.input(3), w, call.output(1), n, decay, lr_scale];
    // SAFETY: the operands have as many elements.
    unsafe { call.plain(("optimizer", "descend"), each(n), THREADS, args) }
}
