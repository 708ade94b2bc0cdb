//! cuDNN's graphs, by its backend descriptors: tensors, operations, plans.

use crate::best::Best;
use crate::driver::{Address, Device, Stream};
use crate::library::{Name, functions};
use crate::{CudaError, cache};
use lockstep_ir::units;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

type Handle = *mut c_void;

functions! {
    /// The library's functions.
    Functions, Name::Cudnn;
    version = c"cudnnGetVersion": fn() -> usize;
    create = c"cudnnCreate": fn(*mut Handle) -> c_int;
    destroy = c"cudnnDestroy": fn(Handle) -> c_int;
    set_stream = c"cudnnSetStream": fn(Handle, Handle) -> c_int;
    error = c"cudnnGetErrorString": fn(c_int) -> *const c_char;
    make = c"cudnnBackendCreateDescriptor": fn(c_int, *mut Handle) -> c_int;
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
    Int32 = 4,
    Bf16 = 9,
    Int64 = 10,
    Boolean = 11,
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
        // SAFETY: it takes nothing.
        let version = unsafe { (functions.version)() };
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
        // SAFETY: the address is valid for the call.
        let status = unsafe { (functions.create)(&mut handle) };
        let cudnn = Cudnn(Arc::new(Inner { functions, handle, device: device.clone(), alone: Mutex::new(()) }));
        cudnn.check("cudnnCreate", status)?;
        Ok(cudnn)
    }

    /// Its version.
    pub fn version(&self) -> usize {
        // SAFETY: it takes nothing.
        unsafe { (self.0.functions.version)() }
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
        // SAFETY: the address is valid for the call.
        self.check("cudnnBackendCreateDescriptor", unsafe { (self.0.functions.make)(what, &mut handle) })?;
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

/// A tensor of a graph under construction.
#[derive(Clone, Copy)]
pub struct TensorId(usize);

/// A graph under construction.
pub struct Builder {
    cudnn: Cudnn,
    tensors: Vec<(Descriptor, [i64; 4])>,
    operations: Vec<Descriptor>,
    parts: Vec<Descriptor>,
    next: i64,
}

/// The first number of tensors that live nowhere.
const VIRTUAL_IDS: i64 = 1000;

impl Builder {
    /// An empty one.
    pub fn new(cudnn: &Cudnn) -> Self {
        Self { cudnn: cudnn.clone(), tensors: vec![], operations: vec![], parts: vec![], next: VIRTUAL_IDS }
    }

    /// Declares a tensor.
    pub fn tensor(
        &mut self,
        dims: [i64; 4],
        strides: [i64; 4],
        data: Data,
        place: Storage,
    ) -> Result<TensorId, CudaError> {
        self.ragged((dims, strides), data, place, None)
    }

    /// Declares a tensor whose batch entries start at `offsets`, in elements, where those are given.
    pub fn ragged(
        &mut self,
        (dims, strides): ([i64; 4], [i64; 4]),
        data: Data,
        place: Storage,
        offsets: Option<TensorId>,
    ) -> Result<TensorId, CudaError> {
        let t = self.cudnn.make(descriptor::TENSOR)?;
        let id = match place {
            Storage::Memory(id) | Storage::Value(id) => id,
            Storage::Virtual => {
                self.next += 1;
                self.next
            }
        };
        t.set(901, kind::DATA_TYPE, &[data as c_int])?
            .set(902, kind::INT64, &dims)?
            .set(903, kind::INT64, &strides)?
            .set(906, kind::INT64, &[id])?
            .set(900, kind::INT64, &[16i64])?;
        match place {
            Storage::Memory(_) => {}
            Storage::Virtual => {
                t.set(907, kind::BOOLEAN, &[true])?;
            }
            Storage::Value(_) => {
                t.set(908, kind::BOOLEAN, &[true])?;
            }
        }
        if let Some(offsets) = offsets {
            t.set_descriptor(913, self.handle(offsets))?;
        }
        self.tensors.push((t.finish()?, dims));
        Ok(TensorId(self.tensors.len() - 1))
    }

    /// A number of the host.
    pub fn value(&mut self, id: i64) -> Result<TensorId, CudaError> {
        self.tensor([1; 4], [1; 4], Data::Float, Storage::Value(id))
    }

    /// A tensor between operations, its elements one behind the other.
    pub fn between(&mut self, dims: [i64; 4], data: Data) -> Result<TensorId, CudaError> {
        let [_, b, c, d] = dims;
        self.tensor(dims, [b * c * d, c * d, d, 1], data, Storage::Virtual)
    }

    fn handle(&self, t: TensorId) -> &Descriptor {
        &self.tensors[t.0].0
    }

    /// c = a · b; `sizes` are the rows of a, the columns of b and what is between in each batch entry, where they are fewer than
    /// the tensors say.
    pub fn matmul(
        &mut self,
        (a, b): (TensorId, TensorId),
        c: TensorId,
        sizes: [Option<TensorId>; 3],
    ) -> Result<(), CudaError> {
        let what = self.cudnn.make(descriptor::MATMUL)?;
        what.set(1500, kind::DATA_TYPE, &[Data::Float as c_int])?;
        if sizes.iter().any(Option::is_some) {
            what.set(1503, kind::DOUBLE, &[0f64])?;
        }
        let what = what.finish()?;
        let op = self.cudnn.make(descriptor::OPERATION_MATMUL)?;
        op.set_descriptor(1520, self.handle(a))?
            .set_descriptor(1521, self.handle(b))?
            .set_descriptor(1522, self.handle(c))?
            .set_descriptor(1523, &what)?;
        for (attribute, size) in (1525..).zip(sizes) {
            if let Some(size) = size {
                op.set_descriptor(attribute, self.handle(size))?;
            }
        }
        self.parts.push(what);
        self.operations.push(op.finish()?);
        Ok(())
    }

    /// y = mode(x, b, t), elementwise.
    pub fn pointwise(
        &mut self,
        mode: Pointwise,
        operands: (TensorId, Option<TensorId>, Option<TensorId>),
        y: TensorId,
    ) -> Result<(), CudaError> {
        let precision = match mode {
            Pointwise::Greater | Pointwise::GreaterEqual | Pointwise::Less | Pointwise::And => Data::Boolean,
            Pointwise::Add
            | Pointwise::Mul
            | Pointwise::Div
            | Pointwise::Sub
            | Pointwise::Exp
            | Pointwise::Log
            | Pointwise::Identity
            | Pointwise::Index
            | Pointwise::Select => Data::Float,
        };
        self.elementwise((mode, precision, None), operands, y)
    }

    /// y = each element's index along a dimension of x, computed in `precision`.
    pub fn index(&mut self, x: TensorId, y: TensorId, axis: i64, precision: Data) -> Result<(), CudaError> {
        self.elementwise((Pointwise::Index, precision, Some(axis)), (x, None, None), y)
    }

    fn elementwise(
        &mut self,
        (mode, precision, axis): (Pointwise, Data, Option<i64>),
        (x, b, t): (TensorId, Option<TensorId>, Option<TensorId>),
        y: TensorId,
    ) -> Result<(), CudaError> {
        let what = self.cudnn.make(descriptor::POINTWISE)?;
        what.set(0, kind::POINTWISE_MODE, &[mode as c_int])?.set(1, kind::DATA_TYPE, &[precision as c_int])?;
        if let Some(axis) = axis {
            what.set(9, kind::INT64, &[axis])?;
        }
        let what = what.finish()?;
        let op = self.cudnn.make(descriptor::OPERATION_POINTWISE)?;
        op.set_descriptor(750, &what)?.set_descriptor(751, self.handle(x))?.set_descriptor(753, self.handle(y))?;
        for (attribute, operand) in [(752, b), (758, t)] {
            if let Some(operand) = operand {
                op.set_descriptor(attribute, self.handle(operand))?;
            }
        }
        self.parts.push(what);
        self.operations.push(op.finish()?);
        Ok(())
    }

    /// y = x with dimensions of `y` that are one reduced.
    pub fn reduce(&mut self, how: Reduction, x: TensorId, y: TensorId) -> Result<(), CudaError> {
        let what = self.cudnn.make(descriptor::REDUCTION)?;
        what.set(1600, kind::REDUCTION, &[how as c_int])?.set(1601, kind::DATA_TYPE, &[Data::Float as c_int])?;
        let what = what.finish()?;
        let op = self.cudnn.make(descriptor::OPERATION_REDUCTION)?;
        op.set_descriptor(1612, &what)?.set_descriptor(1610, self.handle(x))?.set_descriptor(1611, self.handle(y))?;
        self.parts.push(what);
        self.operations.push(op.finish()?);
        Ok(())
    }

    /// y = x, seen with other strides.
    pub fn reshape(&mut self, x: TensorId, y: TensorId) -> Result<(), CudaError> {
        let op = self.cudnn.make(descriptor::OPERATION_RESHAPE)?;
        op.set_descriptor(2200, self.handle(x))?.set_descriptor(2201, self.handle(y))?;
        self.operations.push(op.finish()?);
        Ok(())
    }

    /// A plan for the graph with at most `most` bytes of scratch: the fastest of the library's first by `time`, which runs one and
    /// says how long it took, or without that the first; `key` says what the graph is, so that its plan can be kept on disk, unless
    /// there was no room to time them all.
    pub fn plan(self, key: &str, most: u64, time: Option<Timer>) -> Result<Plan, CudaError> {
        let cudnn = self.cudnn.clone();
        let device = &cudnn.0.device;
        let key = format!("{} {} {} {key}", device.name, device.processors, cudnn.version());
        if let Some(plan) = cache::get("cudnn", &key).and_then(|text| Plan::kept(&cudnn, &text).ok())
            && plan.workspace <= most
        {
            return Ok(plan);
        }
        let mut last = CudaError::Unsupported("cuDNN proposes no plan".into());
        let mut best = Best::new();
        for config in self.proposals()? {
            match Plan::of(&cudnn, &config) {
                Ok(plan) if plan.workspace > most => {
                    let [needs, has] = [plan.workspace, most].map(units::bytes);
                    last =
                        CudaError::Unsupported(format!("a plan of cuDNN needs {needs} of scratch, {has} are planned"));
                }
                // The first does.
                Ok(plan) if time.is_none() => {
                    best.add(Some(0.0), plan);
                    break;
                }
                Ok(plan) => match time.map_or(Ok(None), |time| time(&plan)) {
                    Ok(seconds) => best.add(seconds, plan),
                    Err(error) => last = error,
                },
                Err(error) => last = error,
            }
        }
        let (plan, all_timed) = best.take().ok_or(last)?;
        if let Some(text) = plan.text().filter(|_| all_timed) {
            cache::put("cudnn", &key, &text);
        }
        Ok(plan)
    }

    /// The library's first proposals, best first.
    fn proposals(&self) -> Result<Vec<Descriptor>, CudaError> {
        const ASKED: usize = 3;
        const HEURISTIC_A: c_int = 3;
        let cudnn = &self.cudnn;
        let (handle, _alone) = cudnn.0.alone()?;
        let operations: Vec<Handle> = self.operations.iter().map(|o| o.handle).collect();
        let graph = cudnn.make(descriptor::GRAPH)?;
        graph.set(801, kind::DESCRIPTOR, &operations)?.set(800, kind::HANDLE, &[handle])?;
        let graph = graph.finish()?;
        let heuristic = cudnn.make(descriptor::HEURISTIC)?;
        heuristic.set_descriptor(201, &graph)?.set(200, kind::HEUR_MODE, &[HEURISTIC_A])?;
        let heuristic = heuristic.finish()?;
        let mut configs = (0..ASKED).map(|_| cudnn.make(descriptor::ENGINE_CONFIG)).collect::<Result<Vec<_>, _>>()?;
        let mut handles: Vec<Handle> = configs.iter().map(|c| c.handle).collect();
        let mut count = 0;
        // SAFETY: the addresses are valid for the call.
        let status = unsafe {
            let (to, most) = (handles.as_mut_ptr().cast(), ASKED as i64);
            (cudnn.0.functions.get)(heuristic.handle, 202, kind::DESCRIPTOR, most, &mut count, to)
        };
        cudnn.check("cudnnBackendGetAttribute", status)?;
        configs.truncate(count.max(0) as usize);
        Ok(configs)
    }
}

/// Runs a plan and gives the seconds that it took; none where there was no room for it.
pub type Timer<'a> = &'a dyn Fn(&Plan) -> Result<Option<f64>, CudaError>;

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
