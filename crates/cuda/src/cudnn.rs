//! cuDNN by its backend descriptors, and the plans of its graphs.

mod builder;

pub use builder::{Builder, TensorId};

use crate::CudaError;
use crate::driver::{Address, Device, Stream};
use crate::library::{Name, functions};
use lockstep_ir::DType;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

type Handle = *mut c_void;

functions! {
    /// The library's functions.
    Functions, Name::Cudnn;
    version = c"cudnnGetVersion" safe: fn() -> usize;
    create = c"cudnnCreate" safe: fn(&mut Handle) -> c_int;
    destroy = c"cudnnDestroy": fn(Handle) -> c_int;
    set_stream = c"cudnnSetStream": fn(Handle, Handle) -> c_int;
    error = c"cudnnGetErrorString": fn(c_int) -> *const c_char;
    make = c"cudnnBackendCreateDescriptor" safe: fn(c_int, &mut Handle) -> c_int;
    unmake = c"cudnnBackendDestroyDescriptor": fn(Handle) -> c_int;
    finalize = c"cudnnBackendFinalize": fn(Handle) -> c_int;
    set = c"cudnnBackendSetAttribute": fn(Handle, c_int, c_int, i64, *const c_void) -> c_int;
    get = c"cudnnBackendGetAttribute": fn(Handle, c_int, c_int, i64, *mut i64, *mut c_void) -> c_int;
    execute = c"cudnnBackendExecute": fn(Handle, Handle, Handle) -> c_int;
}

/// Types of attributes.
mod kind {
    use std::ffi::c_int;
    pub const HANDLE: c_int = 0;
    pub const DATA_TYPE: c_int = 1;
    pub const BOOLEAN: c_int = 2;
    pub const INT64: c_int = 3;
    pub const DOUBLE: c_int = 5;
    pub const VOID_PTR: c_int = 6;
    pub const HEUR_MODE: c_int = 8;
    pub const POINTWISE_MODE: c_int = 14;
    pub const DESCRIPTOR: c_int = 15;
    pub const REDUCTION: c_int = 18;
    pub const CHAR: c_int = 24;
}

/// Kinds of descriptors.
mod descriptor {
    use std::ffi::c_int;
    pub const POINTWISE: c_int = 0;
    pub const ENGINE_CONFIG: c_int = 3;
    pub const HEURISTIC: c_int = 4;
    pub const PLAN: c_int = 5;
    pub const OPERATION_POINTWISE: c_int = 13;
    pub const GRAPH: c_int = 15;
    pub const VARIANT_PACK: c_int = 16;
    pub const TENSOR: c_int = 17;
    pub const MATMUL: c_int = 18;
    pub const OPERATION_MATMUL: c_int = 19;
    pub const REDUCTION: c_int = 21;
    pub const OPERATION_REDUCTION: c_int = 22;
    pub const OPERATION_RESHAPE: c_int = 31;
}

/// What elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    Float = 0,
    Half = 2,
    Int32 = 4,
    Bf16 = 9,
    Int64 = 10,
    Boolean = 11,
}

impl Data {
    /// That of a type whose attention the library has fused kernels for: two bytes an element.
    pub fn fused(dtype: DType) -> Option<Self> {
        match dtype {
            DType::BF16 => Some(Data::Bf16),
            DType::F16 => Some(Data::Half),
            _ => None,
        }
    }
}

/// What is done to each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pointwise {
    Add = 0,
    Mul = 1,
    Div = 6,
    Sub = 9,
    Exp = 13,
    Log = 15,
    Identity = 21,
    Greater = 302,
    GreaterEqual = 303,
    Less = 304,
    And = 400,
    Index = 501,
    Select = 601,
}

/// How elements become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    Add = 0,
    Max = 3,
}

/// Where a tensor of a graph lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// In memory, under this number.
    Memory(i64),
    /// Nowhere: between two operations.
    Virtual,
    /// A number of the host, under this number.
    Value(i64),
}

struct Inner {
    functions: Functions,
    handle: Handle,
    device: Arc<Device>,
    /// Whoever uses the handle holds this: it has one stream at a time.
    alone: Mutex<()>,
}

// SAFETY: the handle may be used from any thread, one at a time: see `Inner::alone`.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Inner {
    /// The handle, for nobody else as long as the guard lives, with the device's context in this thread.
    fn alone(&self) -> Result<(Handle, MutexGuard<'_, ()>), CudaError> {
        self.device.enter()?;
        Ok((self.handle, self.alone.lock().unwrap_or_else(|e| e.into_inner())))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: created once, destroyed once.
            unsafe { (self.functions.destroy)(self.handle) };
        }
    }
}

/// The open library.
#[derive(Clone)]
pub struct Cudnn(Arc<Inner>);

/// The oldest version that has the graphs of attention.
const LEAST_VERSION: usize = 91400;

impl Functions {
    /// Opens the library, if it is new enough; with its version.
    fn new_enough() -> Result<(Self, usize, PathBuf), CudaError> {
        let (functions, path) = Functions::open()?;
        let version = (functions.version)();
        if version < LEAST_VERSION {
            let (major, minor, patch) = (version / 10000, version / 100 % 100, version % 100);
            let problem = format!("{major}.{minor}.{patch} is too old: {}", path.display());
            return Err(CudaError::Library { library: Name::Cudnn, problem });
        }
        Ok((functions, version, path))
    }
}

/// The library's version, as 10000 × major + 100 × minor + patch, and where it was found.
pub fn version() -> Result<(usize, PathBuf), CudaError> {
    Functions::new_enough().map(|(_, version, path)| (version, path))
}

/// A descriptor.
pub struct Descriptor {
    cudnn: Cudnn,
    handle: Handle,
}

// SAFETY: the library's functions may be called from any thread.
unsafe impl Send for Descriptor {}
// SAFETY: a descriptor is not changed once it is finished; what reads it with the handle is alone with that.
unsafe impl Sync for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // A plan has code on the device.
        if self.cudnn.0.device.enter().is_ok() {
            // SAFETY: created once, destroyed once.
            unsafe { (self.cudnn.0.functions.unmake)(self.handle) };
        }
    }
}

impl Cudnn {
    /// Opens the library for a device.
    pub fn open(device: &Arc<Device>) -> Result<Self, CudaError> {
        device.enter()?;
        let (functions, ..) = Functions::new_enough()?;
        let mut handle = std::ptr::null_mut();
        let status = (functions.create)(&mut handle);
        let cudnn = Cudnn(Arc::new(Inner { functions, handle, device: device.clone(), alone: Mutex::new(()) }));
        cudnn.check("cudnnCreate", status)?;
        Ok(cudnn)
    }

    /// Its version.
    pub fn version(&self) -> usize {
        (self.0.functions.version)()
    }

    fn check(&self, call: &'static str, status: c_int) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library gives the address of a constant.
        let text = unsafe { CStr::from_ptr((self.0.functions.error)(status)) }.to_string_lossy().into_owned();
        Err(CudaError::of_cudnn(call, status, text))
    }

    fn make(&self, what: c_int) -> Result<Descriptor, CudaError> {
        let mut handle = std::ptr::null_mut();
        self.check("cudnnBackendCreateDescriptor", (self.0.functions.make)(what, &mut handle))?;
        Ok(Descriptor { cudnn: self.clone(), handle })
    }
}

impl Descriptor {
    fn set<T>(&self, attribute: c_int, kind: c_int, values: &[T]) -> Result<&Self, CudaError> {
        // SAFETY: the values are of the attribute's type; the library copies them.
        let status = unsafe {
            (self.cudnn.0.functions.set)(self.handle, attribute, kind, values.len() as i64, values.as_ptr().cast())
        };
        self.cudnn.check("cudnnBackendSetAttribute", status)?;
        Ok(self)
    }

    fn set_descriptor(&self, attribute: c_int, value: &Descriptor) -> Result<&Self, CudaError> {
        self.set(attribute, kind::DESCRIPTOR, &[value.handle])
    }

    fn finish(self) -> Result<Self, CudaError> {
        // SAFETY: the descriptor is open.
        self.cudnn.check("cudnnBackendFinalize", unsafe { (self.cudnn.0.functions.finalize)(self.handle) })?;
        Ok(self)
    }
}

/// A graph that can run.
pub struct Plan {
    plan: Descriptor,
    /// Bytes of scratch.
    pub workspace: u64,
}

impl Plan {
    fn new(cudnn: &Cudnn, plan: Descriptor) -> Result<Self, CudaError> {
        let (mut workspace, mut count) = (0i64, 0);
        // SAFETY: the addresses are valid for the call.
        let status = unsafe {
            (cudnn.0.functions.get)(plan.handle, 402, kind::INT64, 1, &mut count, (&raw mut workspace).cast())
        };
        cudnn.check("cudnnBackendGetAttribute", status)?;
        Ok(Self { plan, workspace: workspace.max(0) as u64 })
    }

    /// A plan as text, which the same version of the library takes again.
    fn text(&self) -> Option<Vec<u8>> {
        let functions = &self.plan.cudnn.0.functions;
        let mut count = 0i64;
        // SAFETY: the first call asks for the size, the second has room for that much.
        unsafe {
            let none = std::ptr::null_mut();
            if (functions.get)(self.plan.handle, 405, kind::CHAR, 0, &mut count, none) != 0 || count <= 0 {
                return None;
            }
            let mut text = vec![0u8; count as usize];
            let to = text.as_mut_ptr().cast();
            ((functions.get)(self.plan.handle, 405, kind::CHAR, count, &mut count, to) == 0).then_some(text)
        }
    }

    fn kept(cudnn: &Cudnn, text: &[u8]) -> Result<Self, CudaError> {
        let (handle, _alone) = cudnn.0.alone()?;
        let plan = cudnn.make(descriptor::PLAN)?;
        plan.set(400, kind::HANDLE, &[handle])?.set(405, kind::CHAR, text)?;
        Plan::new(cudnn, plan.finish()?)
    }

    /// The plan of a proposal, compiled.
    fn of(cudnn: &Cudnn, config: &Descriptor) -> Result<Self, CudaError> {
        let (handle, _alone) = cudnn.0.alone()?;
        let plan = cudnn.make(descriptor::PLAN)?;
        plan.set(400, kind::HANDLE, &[handle])?.set_descriptor(401, config)?;
        Plan::new(cudnn, plan.finish()?)
    }

    /// Queues it. `operands` are numbers of tensors and where they are; `values` are numbers of the host.
    ///
    /// # Safety
    /// The operands are as large as the graph says, the scratch as large as `workspace`.
    pub unsafe fn execute(
        &self,
        stream: &Stream,
        operands: &[(i64, Address)],
        values: &[(i64, f32)],
        scratch: Address,
    ) -> Result<(), CudaError> {
        let cudnn = &self.plan.cudnn;
        let ids: Vec<i64> = operands.iter().map(|o| o.0).chain(values.iter().map(|v| v.0)).collect();
        let host = values.iter().map(|v| std::ptr::from_ref(&v.1) as Address);
        let addresses: Vec<Address> = operands.iter().map(|o| o.1).chain(host).collect();
        let pack = cudnn.make(descriptor::VARIANT_PACK)?;
        pack.set(1000, kind::INT64, &ids)?.set(1001, kind::VOID_PTR, &addresses)?.set(
            1003,
            kind::VOID_PTR,
            &[scratch],
        )?;
        let pack = pack.finish()?;
        let (handle, _alone) = cudnn.0.alone()?;
        // SAFETY: the stream is open.
        cudnn.check("cudnnSetStream", unsafe { (cudnn.0.functions.set_stream)(handle, stream.handle()) })?;
        // SAFETY: the caller vouches; the values outlive the call, which reads them.
        let status = unsafe { (cudnn.0.functions.execute)(handle, self.plan.handle, pack.handle) };
        cudnn.check("cudnnBackendExecute", status)
    }
}
