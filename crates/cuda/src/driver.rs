//! The CUDA driver: one device, its context, memory, streams, events, modules and graphs.

mod pinned;

pub use pinned::Pinned;

use crate::CudaError;
use crate::library::{Name, functions};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// An address on the device.
pub type Address = u64;
/// Every buffer in the memory of a device starts at a multiple of this.
pub const ALIGNMENT: u64 = 256;

type Handle = *mut c_void;

functions! {
    /// The driver's functions.
    Driver, Name::Driver;
    init = c"cuInit": fn(c_uint) -> c_int;
    driver_version = c"cuDriverGetVersion": fn(*mut c_int) -> c_int;
    device_count = c"cuDeviceGetCount": fn(*mut c_int) -> c_int;
    device_get = c"cuDeviceGet": fn(*mut c_int, c_int) -> c_int;
    device_name = c"cuDeviceGetName": fn(*mut c_char, c_int, c_int) -> c_int;
    device_attribute = c"cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int) -> c_int;
    device_pci = c"cuDeviceGetPCIBusId": fn(*mut c_char, c_int, c_int) -> c_int;
    device_total = c"cuDeviceTotalMem_v2": fn(*mut usize, c_int) -> c_int;
    context_retain = c"cuDevicePrimaryCtxRetain": fn(*mut Handle, c_int) -> c_int;
    context_synchronize = c"cuCtxSynchronize": fn() -> c_int;
    context_set = c"cuCtxSetCurrent": fn(Handle) -> c_int;
    memory_info = c"cuMemGetInfo_v2": fn(*mut usize, *mut usize) -> c_int;
    memory_alloc = c"cuMemAlloc_v2": fn(*mut Address, usize) -> c_int;
    memory_free = c"cuMemFree_v2": fn(Address) -> c_int;
    host_alloc = c"cuMemHostAlloc": fn(*mut Handle, usize, c_uint) -> c_int;
    host_free = c"cuMemFreeHost": fn(Handle) -> c_int;
    copy_to_device = c"cuMemcpyHtoDAsync_v2": fn(Address, *const c_void, usize, Handle) -> c_int;
    copy_to_host = c"cuMemcpyDtoHAsync_v2": fn(*mut c_void, Address, usize, Handle) -> c_int;
    copy = c"cuMemcpyDtoDAsync_v2": fn(Address, Address, usize, Handle) -> c_int;
    set_bytes = c"cuMemsetD8Async": fn(Address, u8, usize, Handle) -> c_int;
    stream_create = c"cuStreamCreateWithPriority": fn(*mut Handle, c_uint, c_int) -> c_int;
    stream_destroy = c"cuStreamDestroy_v2": fn(Handle) -> c_int;
    stream_wait_event = c"cuStreamWaitEvent": fn(Handle, Handle, c_uint) -> c_int;
    stream_synchronize = c"cuStreamSynchronize": fn(Handle) -> c_int;
    event_create = c"cuEventCreate": fn(*mut Handle, c_uint) -> c_int;
    event_record = c"cuEventRecord": fn(Handle, Handle) -> c_int;
    event_query = c"cuEventQuery": fn(Handle) -> c_int;
    event_synchronize = c"cuEventSynchronize": fn(Handle) -> c_int;
    event_elapsed = c"cuEventElapsedTime": fn(*mut f32, Handle, Handle) -> c_int;
    event_destroy = c"cuEventDestroy_v2": fn(Handle) -> c_int;
    module_load = c"cuModuleLoadData": fn(*mut Handle, *const c_void) -> c_int;
    module_function = c"cuModuleGetFunction": fn(*mut Handle, Handle, *const c_char) -> c_int;
    function_attribute = c"cuFuncSetAttribute": fn(Handle, c_int, c_int) -> c_int;
    tensor_map = c"cuTensorMapEncodeTiled": fn(*mut u64, c_int, c_uint, Address, *const u64, *const u64, *const c_uint, *const c_uint, c_int, c_int, c_int, c_int) -> c_int;
    launch = c"cuLaunchKernel": fn(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void) -> c_int;
    capture_begin = c"cuStreamBeginCapture_v2": fn(Handle, c_uint) -> c_int;
    capture_end = c"cuStreamEndCapture": fn(Handle, *mut Handle) -> c_int;
    graph_instantiate = c"cuGraphInstantiateWithFlags": fn(*mut Handle, Handle, u64) -> c_int;
    graph_launch = c"cuGraphLaunch": fn(Handle, Handle) -> c_int;
    graph_destroy = c"cuGraphDestroy": fn(Handle) -> c_int;
    graph_exec_destroy = c"cuGraphExecDestroy": fn(Handle) -> c_int;
    error_name = c"cuGetErrorName": fn(c_int, *mut *const c_char) -> c_int;
    error_text = c"cuGetErrorString": fn(c_int, *mut *const c_char) -> c_int;
}

/// The oldest driver interface that the kernels and libraries are made for: CUDA 13.0.
const LEAST_VERSION: c_int = 13000;

impl Driver {
    /// The driver of this process, started once.
    pub fn get() -> Result<&'static Driver, CudaError> {
        static DRIVER: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
        let open = || {
            let (driver, _) = Driver::open()?;
            // SAFETY: the function has this type.
            driver.check("cuInit", unsafe { (driver.init)(0) })?;
            Ok(driver)
        };
        DRIVER.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// The CUDA version that it speaks, as 1000 × major + 10 × minor.
    pub fn version(&self) -> i32 {
        let mut version = 0;
        // SAFETY: the address is valid for the call.
        unsafe { (self.driver_version)(&mut version) };
        version
    }

    /// Turns a status into a result.
    pub fn check(&self, call: &'static str, status: c_int) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        let text = |f: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut text = std::ptr::null();
            // SAFETY: the driver gives the address of a constant, or nothing.
            unsafe {
                f(status, &mut text);
                if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
            }
        };
        let text = match (text(self.error_text), text(self.error_name)) {
            (_, name) if name.is_empty() => format!("status {status}"),
            (said, name) => format!("{said} ({name}, {status})"),
        };
        Err(CudaError::of_status(call, status, text))
    }
}

/// A device with a context.
pub struct Device {
    driver: &'static Driver,
    ordinal: c_int,
    context: Handle,
    /// Its name.
    pub name: String,
    /// Compute capability, as 10 × major + minor.
    pub capability: u32,
    /// Multiprocessors.
    pub processors: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Its place on the bus, by which other libraries know it.
    pub pci: String,
    /// Pinned memory that nobody uses now: to pin as much again takes milliseconds.
    spare: Mutex<Vec<(Handle, usize)>>,
    watch: RwLock<Option<Watch>>,
    abandoned: AtomicBool,
}

/// Looks whether there is hope in waiting for the device, after so long; what it waits for may be another process.
pub type Watch = Arc<dyn Fn(Duration) -> Result<(), CudaError> + Send + Sync>;

static ABANDONED: AtomicBool = AtomicBool::new(false);

/// Ends the process at once with this exit code where a device was abandoned: what libraries do at the end of a process may wait for
/// it for ever. Else it returns.
pub fn end_if_abandoned(code: u8) {
    if ABANDONED.load(Ordering::Acquire) {
        // SAFETY: ends the process; nothing of it is needed any more.
        unsafe { libc::_exit(i32::from(code)) };
    }
}

/// Looks at an event before the host sleeps between them, and how long.
const LOOKS: usize = 500;
const LOOK_EVERY: Duration = Duration::from_micros(20);

// SAFETY: contexts may be used from any thread; every use makes it current first.
unsafe impl Send for Device {}
// SAFETY: as above; the driver is thread-safe.
unsafe impl Sync for Device {}

impl Device {
    /// How many devices there are that this driver is new enough for.
    pub fn count() -> Result<usize, CudaError> {
        let driver = Driver::get()?;
        let version = driver.version();
        if version < LEAST_VERSION {
            return Err(CudaError::OldDriver { found: version, least: LEAST_VERSION });
        }
        let mut count = 0;
        // SAFETY: the address is valid for the call.
        driver.check("cuDeviceGetCount", unsafe { (driver.device_count)(&mut count) })?;
        Ok(count as usize)
    }

    /// A device's place on the bus. It needs no context.
    pub fn bus_id(ordinal: usize) -> Result<String, CudaError> {
        let driver = Driver::get()?;
        let (mut device, mut pci) = (0, [0 as c_char; 64]);
        // SAFETY: addresses and lengths are valid for the calls; the driver ends the text with a zero.
        unsafe {
            driver.check("cuDeviceGet", (driver.device_get)(&mut device, ordinal as c_int))?;
            driver.check("cuDeviceGetPCIBusId", (driver.device_pci)(pci.as_mut_ptr(), 63, device))?;
            Ok(CStr::from_ptr(pci.as_ptr()).to_string_lossy().into_owned())
        }
    }

    /// Opens device `ordinal`.
    pub fn open(ordinal: usize) -> Result<Arc<Device>, CudaError> {
        let driver = Driver::get()?;
        match Self::count()? {
            0 => return Err(CudaError::NoDevice),
            count if ordinal >= count => return Err(CudaError::NoSuchDevice { ordinal, count }),
            _ => {}
        }
        let (mut device, mut total, mut context) = (0, 0usize, std::ptr::null_mut());
        let mut name = [0 as c_char; 256];
        // SAFETY: addresses and lengths are valid for the calls.
        unsafe {
            driver.check("cuDeviceGet", (driver.device_get)(&mut device, ordinal as c_int))?;
            driver.check("cuDeviceGetName", (driver.device_name)(name.as_mut_ptr(), 255, device))?;
            driver.check("cuDeviceTotalMem", (driver.device_total)(&mut total, device))?;
            driver.check("cuDevicePrimaryCtxRetain", (driver.context_retain)(&mut context, device))?;
        }
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the address is valid for the call.
            unsafe { (driver.device_attribute)(&mut value, which, device) };
            value as u32
        };
        let device = Device {
            driver,
            ordinal: device,
            context,
            // SAFETY: the driver ends the text with a zero.
            name: unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned(),
            capability: attribute(75) * 10 + attribute(76),
            processors: attribute(16),
            memory: total as u64,
            pci: Self::bus_id(ordinal)?,
            spare: Mutex::default(),
            watch: RwLock::default(),
            abandoned: AtomicBool::new(false),
        };
        device.enter()?;
        Ok(Arc::new(device))
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.ordinal as usize
    }

    /// Lets whoever waits for it look now and then whether that has sense, instead of waiting blindly.
    pub fn watch_with(&self, watch: Option<Watch>) {
        *self.watch.write().unwrap_or_else(PoisonError::into_inner) = watch;
    }

    fn watch(&self) -> Option<Watch> {
        self.watch.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Abandons it: what runs there may never end, so nothing of it is freed any more. The process is about to end.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
        ABANDONED.store(true, Ordering::Release);
    }

    /// Makes its context this thread's.
    pub fn enter(&self) -> Result<(), CudaError> {
        if self.abandoned.load(Ordering::Acquire) {
            return Err(CudaError::Internal("an abandoned device is used".into()));
        }
        // SAFETY: the context is retained as long as the process lives.
        self.driver.check("cuCtxSetCurrent", unsafe { (self.driver.context_set)(self.context) })
    }

    /// Waits until it does nothing more for this process.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the function has this type.
        self.driver.check("cuCtxSynchronize", unsafe { (self.driver.context_synchronize)() })
    }

    /// Bytes of memory that are free.
    pub fn free_bytes(&self) -> Result<u64, CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: the addresses are valid for the call.
        self.driver.check("cuMemGetInfo", unsafe { (self.driver.memory_info)(&mut free, &mut total) })?;
        Ok(free as u64)
    }
}

/// Memory on the device.
pub struct Memory {
    device: Arc<Device>,
    /// Where it starts.
    pub base: Address,
    /// Its size.
    pub bytes: u64,
}

impl Memory {
    /// Takes this many bytes.
    pub fn new(device: &Arc<Device>, bytes: u64) -> Result<Self, CudaError> {
        device.enter()?;
        let mut base = 0;
        // SAFETY: the address is valid for the call.
        let status = unsafe { (device.driver.memory_alloc)(&mut base, bytes.max(1) as usize) };
        device.driver.check("cuMemAlloc", status)?;
        Ok(Self { device: device.clone(), base, bytes })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // An error here has been seen by whoever used the memory.
        if self.device.enter().is_ok() {
            // SAFETY: allocated in `new`, freed once.
            unsafe { (self.device.driver.memory_free)(self.base) };
        }
    }
}

/// A queue of work.
pub struct Stream {
    device: Arc<Device>,
    handle: Handle,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above, and from several: the driver is thread-safe.
unsafe impl Sync for Stream {}

/// What a stream is for. Communication comes first: it starts when its inputs are there, though kernels fill the device.
#[derive(Clone, Copy)]
pub enum Priority {
    /// Kernels.
    Kernels = 0,
    /// Collectives beside kernels.
    Collectives = -1,
    /// Messages, which wait for their receivers and hold up nothing else.
    Messages = -2,
}

impl Stream {
    /// A new one for kernels, independent of the default stream.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Self::with_priority(device, Priority::Kernels)
    }

    /// A new one.
    pub fn with_priority(device: &Arc<Device>, priority: Priority) -> Result<Self, CudaError> {
        const NON_BLOCKING: c_uint = 1;
        device.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the address is valid for the call.
        let status = unsafe { (device.driver.stream_create)(&mut handle, NON_BLOCKING, priority as c_int) };
        device.driver.check("cuStreamCreate", status)?;
        Ok(Self { device: device.clone(), handle })
    }

    /// The handle that libraries take.
    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    /// Waits until all of its work is done.
    pub fn wait(&self) -> Result<(), CudaError> {
        if self.device.watch().is_some() {
            return Event::mark(self)?.wait();
        }
        // SAFETY: the stream is open.
        self.device.driver.check("cuStreamSynchronize", unsafe { (self.device.driver.stream_synchronize)(self.handle) })
    }

    /// What is queued from here on waits for the event.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both are open.
        let status = unsafe { (self.device.driver.stream_wait_event)(self.handle, event.handle, 0) };
        self.device.driver.check("cuStreamWaitEvent", status)
    }

    /// Copies to the device.
    ///
    /// # Safety
    /// `to` has room for the data; pinned data stay as they are until the copy is done.
    pub unsafe fn to_device(&self, to: Address, data: &[u8]) -> Result<(), CudaError> {
        // SAFETY: the caller vouches.
        let status = unsafe { (self.device.driver.copy_to_device)(to, data.as_ptr().cast(), data.len(), self.handle) };
        self.device.driver.check("cuMemcpyHtoDAsync", status)
    }

    /// Copies to the host.
    ///
    /// # Safety
    /// `from` has as many bytes as `data`, which is not touched until the copy is done.
    pub unsafe fn to_host(&self, data: &mut [u8], from: Address) -> Result<(), CudaError> {
        // SAFETY: the caller vouches.
        let status =
            unsafe { (self.device.driver.copy_to_host)(data.as_mut_ptr().cast(), from, data.len(), self.handle) };
        self.device.driver.check("cuMemcpyDtoHAsync", status)
    }

    /// Copies on the device.
    ///
    /// # Safety
    /// Both ranges exist and do not overlap.
    pub unsafe fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller vouches.
        self.device
            .driver
            .check("cuMemcpyDtoDAsync", unsafe { (self.device.driver.copy)(to, from, bytes, self.handle) })
    }

    /// Sets every byte of a range.
    ///
    /// # Safety
    /// The range exists.
    pub unsafe fn fill(&self, at: Address, byte: u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller vouches.
        self.device
            .driver
            .check("cuMemsetD8Async", unsafe { (self.device.driver.set_bytes)(at, byte, bytes, self.handle) })
    }

    /// Seconds that each of so many calls takes which `queue` puts here, one behind the other.
    pub fn seconds(&self, times: usize, queue: impl Fn() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        let (start, end) = (Event::new(&self.device)?, Event::new(&self.device)?);
        start.record(self)?;
        (0..times).try_for_each(|_| queue())?;
        end.record(self)?;
        end.wait()?;
        Ok(end.since(&start)? / times as f64)
    }

    /// Records what is queued here from now on, and on streams that wait for it, instead of doing it.
    pub fn begin_capture(self: &Arc<Self>) -> Result<Capture, CudaError> {
        const RELAXED: c_uint = 2;
        let driver = self.device.driver;
        // SAFETY: the stream is open and nothing of it is being captured.
        driver.check("cuStreamBeginCapture", unsafe { (driver.capture_begin)(self.handle, RELAXED) })?;
        Ok(Capture { stream: self.clone(), ended: false })
    }

    /// Launches the CUDA graph.
    pub fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        // SAFETY: both are open.
        self.device.driver.check("cuGraphLaunch", unsafe { (self.device.driver.graph_launch)(graph.exec, self.handle) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: created in `new`, destroyed once.
            unsafe { (self.device.driver.stream_destroy)(self.handle) };
        }
    }
}

/// A stream whose work is recorded. Where it is dropped before its end, what was recorded is forgotten.
pub struct Capture {
    stream: Arc<Stream>,
    ended: bool,
}

impl Capture {
    /// The CUDA graph of what was recorded.
    pub fn end(mut self) -> Result<Graph, CudaError> {
        let (driver, template) = (self.stream.device.driver, self.stop()?);
        let mut exec = std::ptr::null_mut();
        // SAFETY: the address is valid for the calls; the template is destroyed once.
        let made = unsafe {
            let status = (driver.graph_instantiate)(&mut exec, template, 0);
            (driver.graph_destroy)(template);
            driver.check("cuGraphInstantiate", status)
        };
        made.map(|()| Graph { device: self.stream.device.clone(), exec })
    }

    fn stop(&mut self) -> Result<Handle, CudaError> {
        self.ended = true;
        let (driver, mut template) = (self.stream.device.driver, std::ptr::null_mut());
        // SAFETY: the capture was begun; the address is valid for the call.
        let status = unsafe { (driver.capture_end)(self.stream.handle, &mut template) };
        driver.check("cuStreamEndCapture", status).map(|()| template)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // Whoever drops it has an error to tell.
        if self.ended {
            return;
        }
        if let Ok(template) = self.stop() {
            // SAFETY: the template is destroyed once.
            unsafe { (self.stream.device.driver.graph_destroy)(template) };
        }
    }
}

/// A CUDA graph.
pub struct Graph {
    device: Arc<Device>,
    exec: Handle,
}

// SAFETY: graphs may be used from any thread, one at a time.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: instantiated in `end`, destroyed once.
            unsafe { (self.device.driver.graph_exec_destroy)(self.exec) };
        }
    }
}

/// A moment in a stream's work.
pub struct Event {
    device: Arc<Device>,
    handle: Handle,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above, and from several: the driver is thread-safe.
unsafe impl Sync for Event {}

impl Event {
    /// A new one, with a clock.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Self::with_flags(device, 0)
    }

    /// Marks the end of what the stream has been given so far, for other streams. It has no clock.
    pub fn mark(stream: &Stream) -> Result<Arc<Self>, CudaError> {
        const DISABLE_TIMING: c_uint = 2;
        let event = Self::with_flags(&stream.device, DISABLE_TIMING)?;
        event.record(stream)?;
        Ok(Arc::new(event))
    }

    fn with_flags(device: &Arc<Device>, flags: c_uint) -> Result<Self, CudaError> {
        device.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the address is valid for the call.
        device.driver.check("cuEventCreate", unsafe { (device.driver.event_create)(&mut handle, flags) })?;
        Ok(Self { device: device.clone(), handle })
    }

    /// Marks the end of what the stream has been given so far.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both are open.
        self.device
            .driver
            .check("cuEventRecord", unsafe { (self.device.driver.event_record)(self.handle, stream.handle) })
    }

    /// Whether it has come.
    pub fn has_come(&self) -> Result<bool, CudaError> {
        const NOT_READY: c_int = 600;
        // SAFETY: the event is open.
        match unsafe { (self.device.driver.event_query)(self.handle) } {
            NOT_READY => Ok(false),
            status => self.device.driver.check("cuEventQuery", status).map(|()| true),
        }
    }

    /// Waits until it has come.
    pub fn wait(&self) -> Result<(), CudaError> {
        if let Some(watch) = self.device.watch() {
            let (mut looks, begin) = (0, Instant::now());
            while !self.has_come()? {
                watch(begin.elapsed())?;
                looks += 1;
                if looks < LOOKS { std::hint::spin_loop() } else { std::thread::sleep(LOOK_EVERY) }
            }
            return Ok(());
        }
        // SAFETY: the event is open.
        self.device.driver.check("cuEventSynchronize", unsafe { (self.device.driver.event_synchronize)(self.handle) })
    }

    /// Seconds from another event to this one; both have come.
    pub fn since(&self, earlier: &Event) -> Result<f64, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: both are open; the address is valid for the call.
        let status = unsafe { (self.device.driver.event_elapsed)(&mut milliseconds, earlier.handle, self.handle) };
        self.device.driver.check("cuEventElapsedTime", status)?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: created in `new`, destroyed once.
            unsafe { (self.device.driver.event_destroy)(self.handle) };
        }
    }
}

/// Loaded machine code. It stays loaded as long as the process lives.
#[derive(Clone, Copy)]
pub struct Module(Handle);

/// A kernel.
#[derive(Clone, Copy)]
pub struct Function(Handle);

// SAFETY: handles of code, which never changes.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}
// SAFETY: as above.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads machine code.
    pub fn load(device: &Device, code: &[u8]) -> Result<Self, CudaError> {
        device.enter()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the code is a whole cubin.
        let status = unsafe { (device.driver.module_load)(&mut module, code.as_ptr().cast()) };
        device.driver.check("cuModuleLoadData", status)?;
        Ok(Self(module))
    }

    /// The kernel of this name.
    pub fn function(&self, device: &Device, name: &str) -> Result<Function, CudaError> {
        let text = CString::new(name).map_err(|_| CudaError::Internal(format!("kernel name {name:?}")))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded; the text ends with a zero.
        let status = unsafe { (device.driver.module_function)(&mut function, self.0, text.as_ptr()) };
        device
            .driver
            .check("cuModuleGetFunction", status)
            .map_err(|e| if e.lost() { e } else { CudaError::Internal(format!("kernel {name}: {e}")) })?;
        Ok(Function(function))
    }
}

impl Function {
    /// Queues a launch with so many bytes of shared memory besides what the kernel declares.
    ///
    /// # Safety
    /// `args` are addresses of values of the types of its parameters, and what they point at is theirs.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        threads: u32,
        shared: usize,
        args: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        const MOST_DYNAMIC_SHARED: c_int = 8;
        let driver = stream.device.driver;
        let [x, y, z] = grid;
        if shared > 0 {
            // SAFETY: the function is loaded.
            let status = unsafe { (driver.function_attribute)(self.0, MOST_DYNAMIC_SHARED, shared as c_int) };
            driver.check("cuFuncSetAttribute", status)?;
        }
        // SAFETY: the caller vouches.
        let status = unsafe {
            (driver.launch)(
                self.0,
                x,
                y,
                z,
                threads,
                1,
                1,
                shared as c_uint,
                stream.handle,
                args.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        driver.check("cuLaunchKernel", status)
    }
}
