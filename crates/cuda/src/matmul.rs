//! Matmuls by cuBLASLt. Plans are chosen once, by timing the library's first proposals on the device, and kept on disk.

mod epilogue;
mod shape;
mod trial;

pub use epilogue::{Beside, Epilogue};
pub use shape::{Gemm, MatmulShape, Units};
pub use trial::fill_random;

use crate::best::Best;
use crate::driver::{Address, Device, Stream};
use crate::library::{Name, functions};
use crate::{CudaError, cache};
use lockstep_ir::DType;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, RwLock};

type Handle = *mut c_void;

functions! {
    /// The library's functions.
    Lt, Name::CublasLt;
    version = c"cublasLtGetVersion" safe: fn() -> usize;
    create = c"cublasLtCreate" safe: fn(&mut Handle) -> c_int;
    destroy = c"cublasLtDestroy": fn(Handle) -> c_int;
    desc_create = c"cublasLtMatmulDescCreate" safe: fn(&mut Handle, c_int, c_int) -> c_int;
    desc_set = c"cublasLtMatmulDescSetAttribute": fn(Handle, c_int, *const c_void, usize) -> c_int;
    desc_destroy = c"cublasLtMatmulDescDestroy": fn(Handle) -> c_int;
    layout_create = c"cublasLtMatrixLayoutCreate" safe: fn(&mut Handle, c_int, u64, u64, i64) -> c_int;
    layout_destroy = c"cublasLtMatrixLayoutDestroy": fn(Handle) -> c_int;
    preference_create = c"cublasLtMatmulPreferenceCreate" safe: fn(&mut Handle) -> c_int;
    preference_set = c"cublasLtMatmulPreferenceSetAttribute": fn(Handle, c_int, *const c_void, usize) -> c_int;
    preference_destroy = c"cublasLtMatmulPreferenceDestroy": fn(Handle) -> c_int;
    heuristic = c"cublasLtMatmulAlgoGetHeuristic": fn(Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Proposal, *mut c_int) -> c_int;
    check = c"cublasLtMatmulAlgoCheck": fn(Handle, Handle, Handle, Handle, Handle, Handle, *const Algorithm, *mut Proposal) -> c_int;
    multiply = c"cublasLtMatmul": fn(Handle, Handle, *const f32, Address, Handle, Address, Handle, *const f32, Address, Handle, Address, Handle, *const Algorithm, Address, usize, Handle) -> c_int;
}

const INVALID_VALUE: c_int = 7;
const NOT_SUPPORTED: c_int = 15;
const COMPUTE_32F: c_int = 68;
const COMPUTE_32F_FAST_TF32: c_int = 77;
const DESC_TRANSA: c_int = 3;
const DESC_TRANSB: c_int = 4;
const DESC_FAST_ACCUMULATION: c_int = 25;
const DESC_SCALE_MODES: [c_int; 2] = [31, 32];
/// An address that nobody reads.
const SOME_UNITS: Address = 256;
const PREFERENCE_WORKSPACE: c_int = 1;
const PREFERENCE_ALIGNMENT: [c_int; 4] = [5, 6, 7, 8];

/// How the library computes a matmul; its bytes may be kept and used again with the same version.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Algorithm([u64; 8]);

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Proposal {
    algorithm: Algorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

const NO_PROPOSAL: Proposal =
    Proposal { algorithm: Algorithm([0; 8]), workspace: 0, state: 0, waves: 0.0, reserved: [0; 4] };

/// Scratch that plans may use, in bytes: what the library asks for on Hopper.
pub const WORKSPACE: u64 = 32 << 20;
/// Proposals that are timed.
const TRIED: usize = 8;

/// Matrices and which of them are transposed, as the library sees them: column by column.
struct Described {
    desc: Handle,
    a: Handle,
    b: Handle,
    c: Handle,
}

// SAFETY: descriptions are not changed once they are made, but for addresses of an epilogue's operands, in one
// that nobody else has.
unsafe impl Send for Described {}
// SAFETY: as above.
unsafe impl Sync for Described {}

struct Plan {
    described: Described,
    algorithm: Algorithm,
}

/// The library with its plans.
pub struct Matmul {
    lt: Lt,
    handle: Handle,
    device: Arc<Device>,
    plans: RwLock<HashMap<MatmulShape, Arc<Plan>>>,
    /// Held while a plan is made: two at once would time each other.
    making: Mutex<()>,
    /// Whether matmuls are worth their epilogues, as far as that was asked: one answer for as long as the process lives.
    worth: Mutex<HashMap<MatmulShape, bool>>,
    /// Whether proposals are timed: else the first is taken.
    tune: bool,
}

// SAFETY: the library's handle may be used from several threads.
unsafe impl Send for Matmul {}
// SAFETY: as above; plans are not changed once they are made.
unsafe impl Sync for Matmul {}

/// The library's version, as 10000 × major + 100 × minor + patch, and where it was found.
pub fn version() -> Result<(usize, PathBuf), CudaError> {
    let (lt, path) = Lt::open()?;
    Ok(((lt.version)(), path))
}

fn check(call: &'static str, status: c_int) -> Result<(), CudaError> {
    match status {
        0 => Ok(()),
        _ => Err(CudaError::of_cublas(call, status)),
    }
}

fn code(dtype: DType) -> c_int {
    match dtype {
        DType::F32 => 0,
        DType::F64 => 1,
        DType::F16 => 2,
        DType::BF16 => 14,
        DType::E4M3 => 28,
        DType::E5M2 => 29,
        _ => unreachable!("no matmul is in {dtype}"),
    }
}

impl Matmul {
    /// Opens the library for a device.
    pub fn open(device: &Arc<Device>, tune: bool) -> Result<Self, CudaError> {
        device.enter()?;
        let (lt, _) = Lt::open()?;
        let mut handle = std::ptr::null_mut();
        check("cublasLtCreate", (lt.create)(&mut handle))?;
        let (device, plans, making, worth) = (device.clone(), RwLock::default(), Mutex::new(()), Mutex::default());
        Ok(Self { lt, handle, device, plans, making, worth, tune })
    }

    fn describe(&self, shape: &MatmulShape) -> Result<Described, CudaError> {
        let MatmulShape { gemm, m, n, k, input, second, output, y_stride, .. } = *shape;
        // Row by row is column by column of the transpose: x is [k, m], w is [k, n], y is [n, m].
        let (x, w, y) = ((k, m, k), (k, n, k), (n, m, y_stride));
        let (a, b, c, transpose_a, transpose_b) = match gemm {
            Gemm::Forward => (w, x, y, 1, 0),
            Gemm::Input => (w, y, x, 0, 0),
            Gemm::Weight => (x, y, w, 0, 1),
            Gemm::WeightOfTransposes => ((m, k, m), (m, n, m), w, 1, 0),
        };
        let layout = |(rows, columns, stride): (usize, usize, usize), dtype| {
            let mut layout = std::ptr::null_mut();
            let status = (self.lt.layout_create)(&mut layout, code(dtype), rows as u64, columns as u64, stride as i64);
            check("cublasLtMatrixLayoutCreate", status).map(|()| layout)
        };
        let mut desc = std::ptr::null_mut();
        // SAFETY: addresses and sizes are those of the values.
        unsafe {
            let compute = shape.compute(self.device.capability);
            check("cublasLtMatmulDescCreate", (self.lt.desc_create)(&mut desc, compute, code(DType::F32)))?;
            for (which, transpose) in [(DESC_TRANSA, transpose_a), (DESC_TRANSB, transpose_b)] {
                let transpose: c_int = transpose;
                let status = (self.lt.desc_set)(desc, which, (&raw const transpose).cast(), size_of::<c_int>());
                check("cublasLtMatmulDescSetAttribute", status)?;
            }
        }
        if shape.fast() {
            self.set(desc, DESC_FAST_ACCUMULATION, 1i8)?;
        }
        if shape.units != Units::One {
            for which in DESC_SCALE_MODES {
                self.set(desc, which, shape.units.mode())?;
            }
            // The library proposes nothing where there are none; each call says where they are.
            self.place_units(desc, (SOME_UNITS, SOME_UNITS))?;
        }
        self.describe_epilogue(desc, shape)?;
        Ok(Described { desc, a: layout(a, second)?, b: layout(b, input)?, c: layout(c, output)? })
    }

    /// The library's first proposals; none where it does not have the matmul.
    fn proposals(&self, d: &Described, alignment: u32) -> Result<Vec<Proposal>, CudaError> {
        let mut preference = std::ptr::null_mut();
        let mut found = [NO_PROPOSAL; TRIED];
        let mut count = 0;
        // SAFETY: addresses and sizes are those of the values; the preference is destroyed once.
        unsafe {
            check("cublasLtMatmulPreferenceCreate", (self.lt.preference_create)(&mut preference))?;
            let bytes = WORKSPACE;
            let status =
                (self.lt.preference_set)(preference, PREFERENCE_WORKSPACE, (&raw const bytes).cast(), size_of::<u64>());
            check("cublasLtMatmulPreferenceSetAttribute", status)?;
            for which in PREFERENCE_ALIGNMENT {
                let at = (&raw const alignment).cast();
                check(
                    "cublasLtMatmulPreferenceSetAttribute",
                    (self.lt.preference_set)(preference, which, at, size_of::<u32>()),
                )?;
            }
            let tried = if self.tune { TRIED } else { 1 };
            let (a, b, c) = (d.a, d.b, d.c);
            let most = tried as c_int;
            let status =
                (self.lt.heuristic)(self.handle, d.desc, a, b, c, c, preference, most, found.as_mut_ptr(), &mut count);
            (self.lt.preference_destroy)(preference);
            if matches!(status, INVALID_VALUE | NOT_SUPPORTED) {
                return Ok(Vec::new());
            }
            check("cublasLtMatmulAlgoGetHeuristic", status)?;
        }
        Ok(found[..count as usize]
            .iter()
            .filter(|p| p.state == 0 && p.workspace as u64 <= WORKSPACE)
            .copied()
            .collect())
    }

    fn plan(&self, shape: &MatmulShape) -> Option<Arc<Plan>> {
        self.plans.read().unwrap_or_else(|e| e.into_inner()).get(shape).cloned()
    }

    /// The plan of a matmul that is about to run; none where it has no elements.
    fn to_run(&self, shape: &MatmulShape) -> Result<Option<Arc<Plan>>, CudaError> {
        if shape.m * shape.n * shape.k == 0 {
            return Ok(None);
        }
        let missing = || CudaError::Internal(format!("{shape:?} was not prepared"));
        self.plan(shape).ok_or_else(missing).map(Some)
    }

    /// Makes the plan of a matmul, if it is not made yet.
    pub fn prepare(&self, shape: MatmulShape) -> Result<(), CudaError> {
        match self.prepared(shape)? {
            true => Ok(()),
            false => Err(match shape.units {
                Units::One => CudaError::Internal(format!("cuBLASLt proposes nothing for {shape:?}")),
                Units::Rows => CudaError::NoRecipe { version: (self.lt.version)(), each: "row" },
                Units::Blocks => CudaError::NoRecipe { version: (self.lt.version)(), each: "block" },
            }),
        }
    }

    /// The same; false where the library does not have the matmul.
    fn prepared(&self, shape: MatmulShape) -> Result<bool, CudaError> {
        let _making = self.making.lock().unwrap_or_else(|e| e.into_inner());
        if self.plan(&shape).is_some() || shape.m * shape.n * shape.k == 0 {
            return Ok(true);
        }
        self.device.enter()?;
        let alignment = shape.alignment();
        let described = self.describe(&shape)?;
        let version = (self.lt.version)();
        let key =
            format!("{} {} {version} {shape:?} {alignment} {WORKSPACE}", self.device.name, self.device.processors);
        let kept = cache::get("matmul", &key).filter(|_| self.tune);
        let algorithm = match kept.and_then(|data| self.kept(&described, &data)) {
            Some(algorithm) => algorithm,
            None => {
                let (best, all_timed) = match &self.proposals(&described, alignment)?[..] {
                    [] => {
                        // SAFETY: made above.
                        unsafe { self.forget(&described) };
                        return Ok(false);
                    }
                    [only] => (only.algorithm, true),
                    several => self.fastest(&shape, &described, several)?,
                };
                if self.tune && all_timed {
                    let bytes: Vec<u8> = best.0.iter().flat_map(|x| x.to_le_bytes()).collect();
                    cache::put("matmul", &key, &bytes);
                }
                best
            }
        };
        let plan = Arc::new(Plan { described, algorithm });
        self.plans.write().unwrap_or_else(|e| e.into_inner()).insert(shape, plan);
        Ok(true)
    }

    /// An algorithm from the cache, if the library still takes it.
    fn kept(&self, d: &Described, data: &[u8]) -> Option<Algorithm> {
        let (words, []) = data.as_chunks::<8>() else { return None };
        let algorithm = Algorithm(words.iter().map(|w| u64::from_le_bytes(*w)).collect::<Vec<_>>().try_into().ok()?);
        let mut proposal = NO_PROPOSAL;
        // SAFETY: all handles are open; the addresses are valid for the call.
        let status = unsafe { (self.lt.check)(self.handle, d.desc, d.a, d.b, d.c, d.c, &algorithm, &mut proposal) };
        (status == 0 && proposal.workspace as u64 <= WORKSPACE).then_some(algorithm)
    }

    /// The fastest of several proposals, and whether all were timed. Where there is no room to try them, the library's own choice
    /// has to do.
    fn fastest(
        &self,
        shape: &MatmulShape,
        d: &Described,
        proposals: &[Proposal],
    ) -> Result<(Algorithm, bool), CudaError> {
        let Some(trial) = self.trial(shape)? else { return Ok((proposals[0].algorithm, false)) };
        let (mut best, mut failed) = (Best::new(), None);
        for p in proposals {
            match trial.seconds(shape, d, &p.algorithm, 0) {
                Ok(seconds) => best.add(Some(seconds), p.algorithm),
                Err(CudaError::OutOfMemory) => best.add(None, p.algorithm),
                // A proposal that fails is none.
                Err(error) => failed = Some(error),
            }
        }
        let none = || failed.unwrap_or_else(|| CudaError::Internal(format!("no proposal for {shape:?}")));
        best.take().ok_or_else(none)
    }

    /// Destroys descriptions.
    ///
    /// # Safety
    /// They are not used any more.
    unsafe fn forget(&self, d: &Described) {
        // SAFETY: each handle was made by the library, and is destroyed once by the caller's word.
        unsafe {
            (self.lt.desc_destroy)(d.desc);
            for layout in [d.a, d.b, d.c] {
                (self.lt.layout_destroy)(layout);
            }
        }
    }

    /// Queues a matmul: `to` = factors, plus `plus` if the shape says that it adds. Factors stand in the order of the matmul's
    /// definition: (x, w), (y, w) or (y, x).
    ///
    /// # Safety
    /// The matrices are as large as the shape says, the scratch as large as [`WORKSPACE`].
    pub unsafe fn multiply(
        &self,
        stream: &Stream,
        shape: &MatmulShape,
        (first, second): (Address, Address),
        plus: Address,
        to: Address,
        scratch: Address,
    ) -> Result<(), CudaError> {
        let Some(plan) = self.to_run(shape)? else { return Ok(()) };
        let (a, b) = (second, first);
        let beta = if shape.adds { 1.0 } else { 0.0 };
        // SAFETY: the plan is of this shape, whose matrices these are by the caller's word.
        unsafe { self.call(&plan.described, &plan.algorithm, stream, (a, b, plus), to, beta, scratch) }
    }

    #[allow(clippy::too_many_arguments, reason = "a matmul has that many operands")]
    unsafe fn call(
        &self,
        d: &Described,
        algorithm: &Algorithm,
        stream: &Stream,
        (a, b, c): (Address, Address, Address),
        to: Address,
        beta: f32,
        scratch: Address,
    ) -> Result<(), CudaError> {
        let alpha = 1.0f32;
        let (lt, s) = (&self.lt, stream.handle());
        // SAFETY: handles and stream are open; the matrices are as the description says by the caller's word.
        let status = unsafe {
            (lt.multiply)(
                self.handle,
                d.desc,
                &alpha,
                a,
                d.a,
                b,
                d.b,
                &beta,
                c,
                d.c,
                to,
                d.c,
                algorithm,
                scratch,
                WORKSPACE as usize,
                s,
            )
        };
        check("cublasLtMatmul", status)
    }
}

impl Drop for Matmul {
    fn drop(&mut self) {
        if self.device.enter().is_err() {
            return;
        }
        let plans = std::mem::take(self.plans.get_mut().unwrap_or_else(|e| e.into_inner()));
        // SAFETY: all were created by this library and are destroyed once.
        unsafe {
            plans.values().for_each(|plan| self.forget(&plan.described));
            (self.lt.destroy)(self.handle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Memory;
    use crate::gpu::Gpu;
    use lockstep_exec::initial::encode;
    use lockstep_ir::counter;

    #[test]
    fn tf32_is_for_matmuls_of_f32_on_gpus_that_have_it() {
        let shape = |input, tf32| MatmulShape { tf32, ..MatmulShape::new(Gemm::Forward, (16, 16, 16), input, input) };
        let of = |input, tf32, capability| shape(input, tf32).compute(capability);
        assert_eq!((of(DType::F32, true, 90), of(DType::F32, true, 80)), (77, 77));
        assert_eq!([of(DType::F32, false, 90), of(DType::F32, true, 75), of(DType::BF16, true, 90)], [68; 3]);
        // Plans of both are kept apart.
        assert_ne!(shape(DType::F32, true), shape(DType::F32, false));
    }

    /// Differences from f64, as a share of the largest result.
    #[test]
    fn tf32_rounds_operands_to_ten_bits_and_fp32_does_not() {
        const SIZE: usize = 256;
        if !Device::count().is_ok_and(|n| n > 0) {
            println!("skipped: no CUDA device");
            return;
        }
        let gpu = Gpu::open(0, false).unwrap();
        if gpu.device.capability < 80 {
            println!("skipped: no TF32");
            return;
        }
        let stream = Stream::new(&gpu.device).unwrap();
        let bytes = (4 * SIZE * SIZE) as u64;
        let memory = Memory::new(&gpu.device, 3 * bytes + WORKSPACE).unwrap();
        let draw = |name: &str| -> Vec<f32> {
            let key = counter::key(5, name);
            (0..(SIZE * SIZE) as u64).map(|i| counter::normal(key, i)).collect()
        };
        let (x, w) = (draw("x"), draw("w"));
        let [at_x, at_w, at_y] = [0, 1, 2].map(|i| memory.base + i * bytes);
        // SAFETY: each part of the memory is as large as its matrix; the copies are done before the bytes go.
        unsafe {
            for (at, data) in [(at_x, &x), (at_w, &w)] {
                stream.to_device(at, &encode(data, DType::F32)).unwrap();
                stream.wait().unwrap();
            }
        }
        let expected: Vec<f64> = (0..SIZE * SIZE)
            .map(|i| {
                let (row, column) = (i / SIZE, i % SIZE);
                let term = |k: usize| f64::from(x[row * SIZE + k]) * f64::from(w[column * SIZE + k]);
                (0..SIZE).map(term).sum()
            })
            .collect();
        let most = expected.iter().fold(0.0f64, |m, y| m.max(y.abs()));
        let error = |tf32: bool| {
            let plain = MatmulShape::new(Gemm::Forward, (SIZE, SIZE, SIZE), DType::F32, DType::F32);
            let (shape, matmul) = (MatmulShape { tf32, ..plain }, gpu.matmul(false).unwrap());
            matmul.prepare(shape).unwrap();
            let mut found = vec![0u8; bytes as usize];
            // SAFETY: the matrices lie one after the other in the memory, the scratch after them.
            unsafe {
                matmul.multiply(&stream, &shape, (at_x, at_w), at_y, at_y, at_y + bytes).unwrap();
                stream.to_host(&mut found, at_y).unwrap();
            }
            stream.wait().unwrap();
            let found = found.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b)));
            found.zip(&expected).fold(0.0f64, |m, (a, b)| m.max((a - b).abs())) / most
        };
        let (tf32, fp32) = (error(true), error(false));
        println!("tf32 {tf32:.1e}, fp32 {fp32:.1e} of the largest result");
        assert!(fp32 < 2e-6, "{fp32}");
        assert!(tf32 < 2e-3 && tf32 > 1e-5, "{tf32}");
    }
}
