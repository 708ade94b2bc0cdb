//! The device's measured peaks: matmul FLOP/s and memory bandwidth.

use crate::driver::{Memory, Stream};
use crate::matmul::{Gemm, MatmulShape, WORKSPACE, fill_random};
use crate::{CudaError, Gpu};
use lockstep_ir::MatmulType;

/// FLOP per second of a large matmul of random numbers, held for a third of a second: power, not the first burst, decides.
pub fn matmul(gpu: &Gpu, of: MatmulType) -> Result<f64, CudaError> {
    let dtype = of.stored();
    // Where others have most of the memory, a smaller matmul has to do.
    let free = gpu.device.free_bytes()?;
    let needed = |size: usize| 3 * (size * size * dtype.bytes()) as u64 + WORKSPACE;
    let size = [8192, 4096, 2048].into_iter().find(|size| needed(*size) <= free / 2).unwrap_or(1024);
    let (m, n, k) = (size, size, size);
    let plain = MatmulShape::new(Gemm::Forward, (m, n, k), dtype, dtype);
    let shape = MatmulShape { tf32: of == MatmulType::Tf32, ..plain };
    let gemms = gpu.matmul(false)?;
    gemms.prepare(shape)?;
    let bytes = (size * size * dtype.bytes()) as u64;
    let memory = Memory::new(&gpu.device, needed(size))?;
    let stream = Stream::new(&gpu.device)?;
    fill_random(&stream, memory.base, 2 * bytes)?;
    let (x, w, y) = (memory.base, memory.base + bytes, memory.base + 2 * bytes);
    // SAFETY: the matrices lie one after the other in the memory, the scratch after them.
    let once = || unsafe { gemms.multiply(&stream, &shape, (x, w), y, y, y + bytes) };
    let flops = 2.0 * (size as f64).powi(3);
    timed(&stream, 0.3, once).map(|seconds| flops / seconds)
}

/// Bytes per second of a large copy, read and written.
pub fn bandwidth(gpu: &Gpu) -> Result<f64, CudaError> {
    const BYTES: u64 = 1 << 30;
    let memory = Memory::new(&gpu.device, 2 * BYTES)?;
    let stream = Stream::new(&gpu.device)?;
    // SAFETY: the halves of the memory.
    let once = || unsafe { stream.copy(memory.base + BYTES, memory.base, BYTES as usize) };
    timed(&stream, 0.1, once).map(|seconds| 2.0 * BYTES as f64 / seconds)
}

/// Seconds of one call of `once`, over about this long.
fn timed(stream: &Stream, seconds: f64, once: impl Fn() -> Result<(), CudaError>) -> Result<f64, CudaError> {
    stream.seconds(1, &once)?;
    let first = stream.seconds(3, &once)?;
    stream.seconds(((seconds / first) as usize).clamp(3, 10_000), &once)
}
