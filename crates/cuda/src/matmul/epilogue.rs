//! What a matmul does with its result before it is stored.

use super::{Described, Handle, Matmul, MatmulShape, check};
use crate::driver::{Address, Stream};
use crate::{CudaError, cache};
use lockstep_ir::DType;
use std::ffi::{c_int, c_void};

const DESC_EPILOGUE: c_int = 7;
const DESC_BIAS_POINTER: c_int = 8;
const DESC_BESIDE_POINTER: c_int = 11;
const DESC_BESIDE_STRIDE: c_int = 12;
const DESC_A_SCALE: c_int = 17;
const DESC_B_SCALE: c_int = 18;
/// Where a matrix beside the result is said to stand until it is known: proposals depend on how it is aligned.
const ALIGNED: Address = 256;

/// What happens to a result on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// Each row gets a bias.
    Bias,
    /// Each row gets a bias and is saved in a matrix beside the result, which is GELU of it.
    BiasGelu,
    /// It is multiplied by the derivative of GELU at a matrix beside it.
    GeluDerivative,
}

/// Where the operands of an epilogue stand; 0 where it has none.
#[derive(Clone, Copy)]
pub struct Beside {
    /// The bias.
    pub bias: Address,
    /// The matrix beside the result.
    pub matrix: Address,
}

impl Epilogue {
    /// The library's number.
    fn code(self) -> c_int {
        match self {
            Epilogue::None => 1,
            Epilogue::Bias => 4,
            Epilogue::BiasGelu => 164,
            Epilogue::GeluDerivative => 192,
        }
    }

    fn has_bias(self) -> bool {
        matches!(self, Epilogue::Bias | Epilogue::BiasGelu)
    }

    /// Whether a matrix as large as the result stands beside it.
    pub(super) fn has_matrix(self) -> bool {
        matches!(self, Epilogue::BiasGelu | Epilogue::GeluDerivative)
    }

    /// What is left of it where another kernel computes GELU, or its derivative.
    fn without_gelu(self) -> Self {
        match self {
            Epilogue::Bias | Epilogue::BiasGelu => Epilogue::Bias,
            Epilogue::None | Epilogue::GeluDerivative => Epilogue::None,
        }
    }
}

impl Matmul {
    pub(super) fn set<T>(&self, d: *mut c_void, attribute: c_int, value: T) -> Result<(), CudaError> {
        // SAFETY: the address and size are those of the value.
        let status = unsafe { (self.lt.desc_set)(d, attribute, (&raw const value).cast(), size_of::<T>()) };
        check("cublasLtMatmulDescSetAttribute", status)
    }

    /// Adds a shape's epilogue to the description of its matmul.
    pub(super) fn describe_epilogue(&self, desc: *mut c_void, shape: &MatmulShape) -> Result<(), CudaError> {
        if shape.epilogue == Epilogue::None {
            return Ok(());
        }
        self.set(desc, DESC_EPILOGUE, shape.epilogue.code())?;
        if shape.epilogue.has_matrix() {
            self.set(desc, DESC_BESIDE_STRIDE, shape.result_row() as i64)?;
            self.set(desc, DESC_BESIDE_POINTER, ALIGNED)?;
        }
        Ok(())
    }

    /// Says where the operands of an epilogue stand, in a description that nobody else has.
    pub(super) fn place(&self, d: &Described, epilogue: Epilogue, beside: Beside) -> Result<(), CudaError> {
        if epilogue.has_bias() {
            self.set(d.desc, DESC_BIAS_POINTER, beside.bias)?;
        }
        if epilogue.has_matrix() {
            self.set(d.desc, DESC_BESIDE_POINTER, beside.matrix)?;
        }
        Ok(())
    }

    /// As [`Matmul::multiply`] with an epilogue.
    ///
    /// # Safety
    /// As there; a bias has as many elements as a row, a matrix beside the result as many as it, and both are aligned as buffers are.
    pub unsafe fn multiply_with(
        &self,
        stream: &Stream,
        shape: &MatmulShape,
        (first, second): (Address, Address),
        beside: Beside,
        to: Address,
        scratch: Address,
    ) -> Result<(), CudaError> {
        let Some(plan) = self.to_run(shape)? else { return Ok(()) };
        // Where operands stand is part of the description: one of its own, since others may use the plan's.
        let described = self.describe(shape)?;
        let placed = self.place(&described, shape.epilogue, beside);
        let called = placed.and_then(|()| {
            let operands = (second, first, to);
            // SAFETY: the plan is of this shape, whose matrices these are by the caller's word.
            unsafe { self.call(&described, &plan.algorithm, stream, operands, to, 0.0, scratch) }
        });
        // SAFETY: made above.
        unsafe { self.forget(&described) };
        called
    }

    /// As [`Matmul::multiply`] of factors in fp8, whose units are numbers on the device, in the order of the factors. A shape that adds adds to `to`.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn multiply_in_units(
        &self,
        stream: &Stream,
        shape: &MatmulShape,
        (first, second): (Address, Address),
        (first_unit, second_unit): (Address, Address),
        to: Address,
        scratch: Address,
    ) -> Result<(), CudaError> {
        let Some(plan) = self.to_run(shape)? else { return Ok(()) };
        // As with an epilogue: where units stand is part of the description.
        let described = self.describe(shape)?;
        let placed = self.place_units(described.desc, (first_unit, second_unit));
        let beta = if shape.adds { 1.0 } else { 0.0 };
        let called = placed.and_then(|()| {
            // SAFETY: the plan is of this shape, whose matrices these are by the caller's word.
            unsafe { self.call(&described, &plan.algorithm, stream, (second, first, to), to, beta, scratch) }
        });
        // SAFETY: made above.
        unsafe { self.forget(&described) };
        called
    }

    /// Says where the units of the factors are.
    pub(super) fn place_units(&self, desc: Handle, (first, second): (Address, Address)) -> Result<(), CudaError> {
        self.set(desc, DESC_A_SCALE, second)?;
        self.set(desc, DESC_B_SCALE, first)
    }

    /// Whether a matmul fuses GELU, or its derivative, into its epilogue in less time than it takes without and a copy of the result, which is what a
    /// kernel of its own would cost. Never where choices are not timed: such programs compute the same wherever they run. An answer
    /// holds as long as the process lives; what could not be found out is a no until then.
    pub fn worth(&self, shape: MatmulShape) -> Result<bool, CudaError> {
        // The library wants rows of whole packs beside the result.
        let fits = shape.input == DType::BF16 && shape.output == DType::BF16 && shape.result_row().is_multiple_of(8);
        if !self.tune || !fits || shape.m * shape.n * shape.k == 0 {
            return Ok(false);
        }
        let mut known = self.worth.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(worth) = known.get(&shape) {
            return Ok(*worth);
        }
        self.device.enter()?;
        let version = (self.lt.version)();
        let key = format!("{} {} {version} {shape:?}", self.device.name, self.device.processors);
        let worth = match cache::get("epilogue", &key) {
            Some(kept) => possible(if kept == [1] { self.prepared(shape) } else { Ok(false) })?.unwrap_or(false),
            None => {
                let measured = possible(self.measure(shape))?.flatten();
                if let Some(worth) = measured {
                    cache::put("epilogue", &key, &[u8::from(worth)]);
                }
                measured.unwrap_or(false)
            }
        };
        known.insert(shape, worth);
        Ok(worth)
    }

    /// What [`Matmul::worth`] asks, timed; none where there is no room for that. A matmul that the library does not have is an
    /// answer too.
    fn measure(&self, shape: MatmulShape) -> Result<Option<bool>, CudaError> {
        if !self.prepared(shape)? {
            return Ok(Some(false));
        }
        let plain = MatmulShape { epilogue: shape.epilogue.without_gelu(), ..shape };
        self.prepare(plain)?;
        // Plans that are made meanwhile would be timed beside it.
        let _making = self.making.lock().unwrap_or_else(|e| e.into_inner());
        let Some(trial) = self.trial(&shape)? else { return Ok(None) };
        let seconds = |shape: &MatmulShape, copies| -> Result<f64, CudaError> {
            let plan = self.plan(shape).ok_or_else(|| CudaError::Internal(format!("{shape:?} has no plan")))?;
            let described = self.describe(shape)?;
            let seconds = trial.seconds(shape, &described, &plan.algorithm, copies);
            // SAFETY: made above; the trial has waited for what used it.
            unsafe { self.forget(&described) };
            seconds
        };
        Ok(Some(seconds(&shape, 0)? < seconds(&plain, 1)?))
    }
}

/// What came of a trial; none where it failed, unless the device was lost by it.
fn possible<T>(tried: Result<T, CudaError>) -> Result<Option<T>, CudaError> {
    match tried {
        Ok(tried) => Ok(Some(tried)),
        Err(error) if error.lost() => Err(error),
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{Device, Memory};
    use crate::gpu::Gpu;
    use crate::matmul::{Gemm, WORKSPACE};
    use lockstep_exec::initial::encode;
    use lockstep_ir::{bf16, counter};

    const M: usize = 192;
    const N: usize = 512;
    const K: usize = 256;

    /// Random numbers as bf16 holds them.
    fn draw(name: &str, count: usize, scale: f32) -> Vec<f32> {
        let key = counter::key(5, name);
        (0..count as u64).map(|i| bf16::to_f32(bf16::from_f32(counter::normal(key, i) * scale))).collect()
    }

    /// GELU and its derivative.
    fn gelu(x: f64) -> (f64, f64) {
        let root = (2.0 / std::f64::consts::PI).sqrt();
        let (u, du) = (root * (x + 0.044715 * x * x * x), root * (1.0 + 0.134145 * x * x));
        let t = u.tanh();
        (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * du)
    }

    struct Bench {
        gpu: std::sync::Arc<Gpu>,
        stream: Stream,
        memory: Memory,
        used: u64,
    }

    impl Bench {
        fn put(&mut self, data: &[f32]) -> Address {
            let (at, bytes) = (self.memory.base + self.used, encode(data, DType::BF16));
            self.used += (bytes.len() as u64).next_multiple_of(256);
            // SAFETY: the memory is large enough for all that these tests put there; the copy is done before the bytes go.
            unsafe { self.stream.to_device(at, &bytes).unwrap() };
            self.stream.wait().unwrap();
            at
        }

        fn get(&self, at: Address, count: usize) -> Vec<f64> {
            let mut bytes = vec![0u8; 2 * count];
            // SAFETY: as many were put there; the copy is done before they are looked at.
            unsafe { self.stream.to_host(&mut bytes, at).unwrap() };
            self.stream.wait().unwrap();
            bytes.as_chunks::<2>().0.iter().map(|b| f64::from(bf16::to_f32(u16::from_le_bytes(*b)))).collect()
        }

        /// Runs a matmul with an epilogue; false where the library has none.
        fn run(
            &self,
            gemm: Gemm,
            epilogue: Epilogue,
            factors: (Address, Address),
            beside: Beside,
            to: Address,
        ) -> bool {
            let plain = MatmulShape::new(gemm, (M, N, K), DType::BF16, DType::BF16);
            let shape = MatmulShape { epilogue, ..plain };
            let matmul = self.gpu.matmul(false).unwrap();
            if let Err(error) = matmul.prepare(shape) {
                println!("skipped: {error}");
                return false;
            }
            let scratch = self.memory.base + self.used;
            // SAFETY: the operands have these sizes; the scratch lies after them.
            unsafe { matmul.multiply_with(&self.stream, &shape, factors, beside, to, scratch).unwrap() };
            self.stream.wait().unwrap();
            true
        }
    }

    fn close(what: &str, found: &[f64], expected: &[f64]) {
        let most = expected.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let error = found.iter().zip(expected).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
        assert!(error <= 8e-3 * most, "{what}: {error} of {most}");
    }

    #[test]
    fn matmuls_fuse_gelu_and_its_derivative() {
        if !Device::count().is_ok_and(|n| n > 0) {
            println!("skipped: no CUDA device");
            return;
        }
        let gpu = Gpu::open(0, false).unwrap();
        let (stream, memory) =
            (Stream::new(&gpu.device).unwrap(), Memory::new(&gpu.device, WORKSPACE + (8 << 20)).unwrap());
        let mut bench = Bench { gpu, stream, memory, used: 0 };
        let (x, w, bias) = (draw("x", M * K, 1.0), draw("w", N * K, 0.08), draw("bias", N, 0.5));
        let (dy, kept) = (draw("dy", M * N, 1.0), draw("kept", M * K, 1.5));
        let [at_x, at_w, at_bias, at_dy, at_kept] = [&x, &w, &bias, &dy, &kept].map(|data| bench.put(data));
        let [to, beside] = [(); 2].map(|()| bench.put(&vec![f32::NAN; M * N]));

        if bench.run(Gemm::Forward, Epilogue::BiasGelu, (at_x, at_w), Beside { bias: at_bias, matrix: beside }, to) {
            let sum = |i: usize| {
                let (row, column) = (i / N, i % N);
                (0..K).map(|k| f64::from(x[row * K + k]) * f64::from(w[column * K + k])).sum::<f64>()
                    + f64::from(bias[column])
            };
            let sums: Vec<f64> = (0..M * N).map(sum).collect();
            close("what is kept", &bench.get(beside, M * N), &sums);
            close("GELU", &bench.get(to, M * N), &sums.iter().map(|x| gelu(*x).0).collect::<Vec<_>>());
        }
        if bench.run(Gemm::Input, Epilogue::GeluDerivative, (at_dy, at_w), Beside { bias: 0, matrix: at_kept }, to) {
            let of = |i: usize| {
                let (row, column) = (i / K, i % K);
                let sum = (0..N).map(|n| f64::from(dy[row * N + n]) * f64::from(w[n * K + column])).sum::<f64>();
                sum * gelu(f64::from(kept[i])).1
            };
            close("derivative", &bench.get(to, M * K), &(0..M * K).map(of).collect::<Vec<_>>());
        }
    }
}
