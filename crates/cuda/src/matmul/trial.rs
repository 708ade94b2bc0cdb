//! Matmuls timed on random numbers: zeros would draw less power than real data do.

use super::epilogue::Beside;
use super::{Algorithm, Described, Gemm, Matmul, MatmulShape, Units, WORKSPACE};
use crate::CudaError;
use crate::driver::{Address, Memory, Stream};
use lockstep_ir::DType;

/// Room for the operands of a matmul.
pub(super) struct Trial<'a> {
    matmul: &'a Matmul,
    operands: (Address, Address, Address),
    /// As large as the result.
    beside: Address,
    result_bytes: usize,
    /// Units of many rows and blocks, where factors have any.
    units: Address,
    scratch: Address,
    stream: Stream,
    _memory: Memory,
}

impl Matmul {
    /// Room to try a matmul in; none where there is too little beside what is already there.
    pub(super) fn trial(&self, shape: &MatmulShape) -> Result<Option<Trial<'_>>, CudaError> {
        match self.room(shape) {
            // What is counted as free cannot always be had.
            Err(CudaError::OutOfMemory) => Ok(None),
            room => room,
        }
    }

    fn room(&self, shape: &MatmulShape) -> Result<Option<Trial<'_>>, CudaError> {
        let bytes = |rows: usize, columns: usize, dtype: DType| (rows * columns * dtype.bytes()) as u64;
        let MatmulShape { gemm, m, n, k, input, second, output, y_stride, epilogue, .. } = *shape;
        let (x, w, y) = ((m, k), (n, k), (m, y_stride));
        let (a, b, c) = match gemm {
            Gemm::Forward => (w, x, y),
            Gemm::Input => (w, y, x),
            Gemm::Weight | Gemm::WeightOfTransposes => (x, y, w),
        };
        let result = bytes(c.0, c.1, output);
        let beside = if epilogue.has_matrix() { result } else { 0 };
        // A unit for 32 elements is more than any have.
        let units = if shape.units == Units::One { 0 } else { (m * k).max(n * k).max(m * n) as u64 / 8 };
        let sizes = [bytes(a.0, a.1, second), bytes(b.0, b.1, input), result, beside, units, WORKSPACE];
        let total: u64 = sizes.iter().map(|s| s.next_multiple_of(256)).sum();
        if self.device.free_bytes()? < total + (256 << 20) {
            return Ok(None);
        }
        let (memory, stream) = (Memory::new(&self.device, total)?, Stream::new(&self.device)?);
        let mut at = memory.base;
        let [a, b, c, beside, units, scratch] = sizes.map(|s| {
            let here = at;
            at += s.next_multiple_of(256);
            here
        });
        for (address, size) in [a, b, c, beside, units].into_iter().zip(sizes).filter(|(_, size)| *size > 0) {
            fill_random(&stream, address, size)?;
        }
        let (operands, result_bytes) = ((a, b, c), result as usize);
        Ok(Some(Trial { matmul: self, operands, beside, result_bytes, units, scratch, stream, _memory: memory }))
    }
}

impl Trial<'_> {
    /// Seconds of a matmul and as many copies of its result, having run it before: the first call loads code. The shape has the
    /// sizes of the trial's.
    pub(super) fn seconds(
        &self,
        shape: &MatmulShape,
        d: &Described,
        algorithm: &Algorithm,
        copies: usize,
    ) -> Result<f64, CudaError> {
        let (a, b, c) = self.operands;
        let beta = if shape.adds { 1.0 } else { 0.0 };
        // Any operand does as a bias.
        self.matmul.place(d, shape.epilogue, Beside { bias: a, matrix: self.beside })?;
        if shape.units != Units::One {
            self.matmul.place_units(d.desc, (self.units, self.units))?;
        }
        let once = || {
            // SAFETY: the matrices are as large as the shape says.
            unsafe { self.matmul.call(d, algorithm, &self.stream, (a, b, c), c, beta, self.scratch)? };
            // SAFETY: both are as large as the result.
            (0..copies).try_for_each(|_| unsafe { self.stream.copy(self.beside, c, self.result_bytes) })
        };
        once()?;
        let times = ((2e-3 / self.stream.seconds(1, once)?.max(1e-6)) as usize).clamp(2, 50);
        self.stream.seconds(times, once)
    }
}

/// Fills memory with bits that are sound numbers of moderate size in bf16, in f16, in f32 and in fp8.
pub fn fill_random(stream: &Stream, at: Address, bytes: u64) -> Result<(), CudaError> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Sign and mantissa at random, the exponent near one.
        (0x3f00 | ((state >> 33) as u16 & 0x80ff)).to_le_bytes()
    };
    let block: Vec<u8> = (0..(1 << 18)).flat_map(|_| next()).collect();
    let mut done = bytes.min(block.len() as u64);
    // SAFETY: all ranges lie in the memory and do not overlap; the first copy is done before the block goes.
    unsafe {
        stream.to_device(at, &block[..done as usize])?;
        while done < bytes {
            let here = done.min(bytes - done);
            stream.copy(at + done, at, here as usize)?;
            done += here;
        }
    }
    stream.wait()
}
