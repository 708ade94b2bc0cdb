//! The CUDA driver: one device, its context, memory, streams, events, modules and graphs.

mod module;
mod pinned;
mod stream;

pub use module::{Function, Module};
pub use pinned::Pinned;
pub use stream::{Event, Graph, Priority, Stream};

use crate::CudaError;
use crate::library::{Name, functions};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Duration;

/// An address on the device.
pub type Address = u64;
/// Every buffer in the memory of a device starts at a multiple of this.
pub const ALIGNMENT: u64 = 256;

type Handle = *mut c_void;

/// How a kernel is launched, as the driver takes it.
#[repr(C)]
pub struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: Handle,
    attributes: *const LaunchAttribute,
    count: c_uint,
}

/// Something more about a launch.
#[repr(C)]
struct LaunchAttribute {
    id: c_uint,
    value: [u64; 8],
}

functions! {
    /// The driver's functions.
    Driver, Name::Driver;
    init = c"cuInit" safe: fn(c_uint) -> c_int;
    driver_version = c"cuDriverGetVersion" safe: fn(&mut c_int) -> c_int;
    device_count = c"cuDeviceGetCount" safe: fn(&mut c_int) -> c_int;
    device_get = c"cuDeviceGet": fn(*mut c_int, c_int) -> c_int;
    device_name = c"cuDeviceGetName": fn(*mut c_char, c_int, c_int) -> c_int;
    device_attribute = c"cuDeviceGetAttribute" safe: fn(&mut c_int, c_int, c_int) -> c_int;
    device_pci = c"cuDeviceGetPCIBusId": fn(*mut c_char, c_int, c_int) -> c_int;
    device_total = c"cuDeviceTotalMem_v2": fn(*mut usize, c_int) -> c_int;
    context_retain = c"cuDevicePrimaryCtxRetain": fn(*mut Handle, c_int) -> c_int;
    context_synchronize = c"cuCtxSynchronize" safe: fn() -> c_int;
    context_set = c"cuCtxSetCurrent": fn(Handle) -> c_int;
    memory_info = c"cuMemGetInfo_v2" safe: fn(&mut usize, &mut usize) -> c_int;
    memory_alloc = c"cuMemAlloc_v2" safe: fn(&mut Address, usize) -> c_int;
    memory_free = c"cuMemFree_v2": fn(Address) -> c_int;
    host_alloc = c"cuMemHostAlloc" safe: fn(&mut Handle, usize, c_uint) -> c_int;
    host_free = c"cuMemFreeHost": fn(Handle) -> c_int;
    copy = c"cuMemcpyAsync": fn(Address, Address, usize, Handle) -> c_int;
    set_bytes = c"cuMemsetD8Async": fn(Address, u8, usize, Handle) -> c_int;
    stream_create = c"cuStreamCreateWithPriority" safe: fn(&mut Handle, c_uint, c_int) -> c_int;
    stream_destroy = c"cuStreamDestroy_v2": fn(Handle) -> c_int;
    stream_wait_event = c"cuStreamWaitEvent": fn(Handle, Handle, c_uint) -> c_int;
    stream_synchronize = c"cuStreamSynchronize": fn(Handle) -> c_int;
    event_create = c"cuEventCreate" safe: fn(&mut Handle, c_uint) -> c_int;
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
    launch_with = c"cuLaunchKernelEx": fn(*const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void) -> c_int;
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
            driver.check("cuInit", (driver.init)(0))?;
            Ok(driver)
        };
        DRIVER.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// The CUDA version that it speaks, as 1000 × major + 10 × minor.
    pub fn version(&self) -> i32 {
        let mut version = 0;
        (self.driver_version)(&mut version);
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

// SAFETY: contexts may be used from any thread; every use makes it current first.
unsafe impl Send for Device {}
// SAFETY: as above; the driver is thread-safe.
unsafe impl Sync for Device {}

impl Device {
    /// Whether it has matmuls in fp8.
    pub fn has_fp8(&self) -> bool {
        self.capability >= 89
    }

    /// How many devices there are that this driver is new enough for.
    pub fn count() -> Result<usize, CudaError> {
        let driver = Driver::get()?;
        let version = driver.version();
        if version < LEAST_VERSION {
            return Err(CudaError::OldDriver { found: version, least: LEAST_VERSION });
        }
        let mut count = 0;
        driver.check("cuDeviceGetCount", (driver.device_count)(&mut count))?;
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
            (driver.device_attribute)(&mut value, which, device);
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
        self.driver.check("cuCtxSynchronize", (self.driver.context_synchronize)())
    }

    /// Bytes of memory that are free.
    pub fn free_bytes(&self) -> Result<u64, CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        self.driver.check("cuMemGetInfo", (self.driver.memory_info)(&mut free, &mut total))?;
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
        let status = (device.driver.memory_alloc)(&mut base, bytes.max(1) as usize);
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
