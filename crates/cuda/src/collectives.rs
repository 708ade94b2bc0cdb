//! Collectives of ranks that share the device, as kernels that see the memory of all of them.

use crate::CudaError;
use crate::kernels::{Block, Launcher, Value, args};
use lockstep_exec::comm::{Collective, Order, Piece};
use lockstep_ir::{DType, Movement};

/// Words that a kernel takes: of each tensor two sizes and two addresses per rank.
const WORDS: usize = 448;
const THREADS: usize = 256;
const BLOCK: Block = Block { threads: THREADS, shared: 0 };
/// Blocks that fill any device; more elements are taken in turns.
const BLOCKS: usize = 2048;

/// The name of a kernel for elements of a type.
type KernelOf = fn(DType) -> Result<&'static str, CudaError>;

/// Queues a collective of ranks whose pieces these are, in the order of the group.
///
/// # Safety
/// The pieces are as `HostCommunicator::collective` wants them, in the device's memory, and ready where the stream stands. All
/// ranks have pieces of the same sizes and types, and sums are of types that can be added.
pub unsafe fn queue(on: Launcher, kind: Collective, ranks: &[Vec<Piece>]) -> Result<(), CudaError> {
    let (n, first) = (ranks.len(), ranks.first().map_or(&[][..], |pieces| pieces));
    // The kernel, and the code by which it knows what it does.
    let (kernel, code): (KernelOf, i32) = match kind.movement() {
        Movement::SumsWhole => (adding, 0),
        Movement::SumsParts => (adding, 1),
        Movement::Gathers => (copying, 2),
        Movement::Copies(rule) => {
            for (to, from) in (0..n).flat_map(|to| (0..n).map(move |from| (to, from))) {
                let Some(part) = rule(n, from, to) else { continue };
                for (p, piece) in first.iter().enumerate() {
                    let (input, output) = (ranks[from][p].input as u64, ranks[to][p].output as u64);
                    let at = |start: u64, part: usize| start + (part * piece.bytes()) as u64;
                    // SAFETY: the caller vouches for the pieces, which are apart.
                    unsafe { on.stream.copy(at(output, part.output), at(input, part.input), piece.bytes())? };
                }
            }
            return Ok(());
        }
    };
    let at_a_time = WORDS / (2 + 2 * n);
    if at_a_time == 0 {
        return Err(CudaError::Internal(format!("{kind} of {n} ranks on one device")));
    }
    let indices: Vec<usize> = (0..first.len()).collect();
    let alike = |a: &Piece, b: &Piece| (a.dtype, a.order) == (b.dtype, b.order);
    for alike in indices.chunk_by(|a, b| alike(&first[*a], &first[*b])) {
        for batch in alike.chunks(at_a_time) {
            let words = batch.iter().flat_map(|&p| {
                let inputs = ranks.iter().map(move |pieces| pieces[p].input as u64);
                let outputs = ranks.iter().map(move |pieces| pieces[p].output as u64);
                [first[p].rows as u64, first[p].elements as u64].into_iter().chain(inputs).chain(outputs)
            });
            let [.., parts] = kind.parts(n);
            let largest = batch.iter().map(|&p| first[p].rows * first[p].elements * parts).max().unwrap_or(0);
            let name = kernel(first[batch[0]].dtype)?;
            let (members, zigzag) = (n as i32, i32::from(first[batch[0]].order == Order::ZigZag));
            let args: &[_] = if kind.sums() { args![code, members, zigzag] } else { args![members, zigzag] };
            // SAFETY: the caller vouches for the pieces; the words are the kernel's struct.
            unsafe { launch(on, name, words, largest, batch.len(), args)? };
        }
    }
    Ok(())
}

/// A tensor of a rank that has a device of its own, beside what others have sent of it.
#[derive(Clone, Copy)]
pub struct Sent {
    /// Rows of the tensor, and elements of a rank's part of a row.
    pub rows: usize,
    pub elements: usize,
    /// Where the first rank's part is, and how many bytes it is from part to part.
    pub parts: u64,
    pub stride: u64,
    pub order: Order,
    pub dtype: DType,
}

/// Queues the sums of parts that others have sent and this rank's `own`, in the order of the group, into outputs.
///
/// # Safety
/// Parts, `own` and outputs are of the device's memory, and ready where the stream stands. `own` may be the output.
pub unsafe fn add_sent(on: Launcher, me: usize, ranks: usize, tensors: &[(Sent, u64, u64)]) -> Result<(), CudaError> {
    for alike in tensors.chunk_by(|a, b| a.0.dtype == b.0.dtype) {
        for batch in alike.chunks(WORDS / 5) {
            let words = batch.iter().flat_map(|(sent, own, output)| {
                [(sent.rows * sent.elements) as u64, sent.parts, sent.stride, *own, *output]
            });
            let largest = batch.iter().map(|(sent, ..)| sent.rows * sent.elements).max().unwrap_or(0);
            let name = adding(batch[0].0.dtype)?.replace("add_", "add_sent_");
            let args = args![ranks as i32, me as i32];
            // SAFETY: the caller vouches for the memory; the words are the kernel's struct.
            unsafe { launch(on, &name, words, largest, batch.len(), args)? };
        }
    }
    Ok(())
}

/// Queues the cut of whole tensors into parts, or makes whole tensors of parts.
///
/// # Safety
/// Parts and wholes are apart, of the device's memory, and ready where the stream stands.
pub unsafe fn parts(on: Launcher, ranks: usize, cut: bool, tensors: &[(Sent, u64)]) -> Result<(), CudaError> {
    let alike = |a: &Sent, b: &Sent| (a.dtype, a.order) == (b.dtype, b.order);
    for alike in tensors.chunk_by(|a, b| alike(&a.0, &b.0)) {
        for batch in alike.chunks(WORDS / 5) {
            let words = batch
                .iter()
                .flat_map(|(sent, whole)| [sent.rows as u64, sent.elements as u64, sent.parts, sent.stride, *whole]);
            let largest = batch.iter().map(|(sent, _)| sent.rows * sent.elements * ranks).max().unwrap_or(0);
            let name = copying(batch[0].0.dtype)?.replace("gather_", "parts_");
            let args = args![ranks as i32, i32::from(batch[0].0.order == Order::ZigZag), cut];
            // SAFETY: as above.
            unsafe { launch(on, &name, words, largest, batch.len(), args)? };
        }
    }
    Ok(())
}

/// Queues a kernel over tensors of this many elements at most.
///
/// # Safety
/// As for [`Launcher::launch_with`].
unsafe fn launch(
    on: Launcher,
    name: &str,
    words: impl Iterator<Item = u64>,
    largest: usize,
    tensors: usize,
    args: &[Value],
) -> Result<(), CudaError> {
    let mut words: Vec<u64> = words.collect();
    words.resize(WORDS, 0);
    let grid = [largest.div_ceil(THREADS).min(BLOCKS), tensors, 1];
    // SAFETY: the words fill the struct of the kernel, and the contract is that of the launch.
    unsafe { on.launch_with(("collectives", name), grid, BLOCK, Some(&words), args) }
}

fn adding(dtype: DType) -> Result<&'static str, CudaError> {
    match dtype {
        DType::F32 => Ok("add_f32"),
        DType::F64 => Ok("add_f64"),
        DType::BF16 => Ok("add_bf16"),
        DType::F16 => Ok("add_f16"),
        DType::Fixed64 => Ok("add_fixed64"),
        other => Err(CudaError::Internal(format!("a sum of {other}"))),
    }
}

fn copying(dtype: DType) -> Result<&'static str, CudaError> {
    match dtype.bytes() {
        1 => Ok("gather_1"),
        2 => Ok("gather_2"),
        4 => Ok("gather_4"),
        8 => Ok("gather_8"),
        _ => Err(CudaError::Internal(format!("a copy of {dtype}"))),
    }
}
