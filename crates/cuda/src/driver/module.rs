//! Machine code and its kernels.

use super::stream::Stream;
use super::{Device, Handle, LaunchAttribute, LaunchConfig};
use crate::CudaError;
use std::ffi::{CString, c_int, c_uint, c_void};

/// Loaded machine code. It stays loaded as long as the process lives.
#[derive(Clone, Copy)]
pub struct Module(Code);

/// A kernel.
#[derive(Clone, Copy)]
pub struct Function(Code);

/// A handle of code, which never changes.
#[derive(Clone, Copy)]
struct Code(Handle);

// SAFETY: the driver takes handles of any thread, and nobody changes the code.
unsafe impl Send for Code {}
// SAFETY: reading a handle changes nothing.
unsafe impl Sync for Code {}

impl Module {
    /// Loads machine code.
    pub fn load(device: &Device, code: &[u8]) -> Result<Self, CudaError> {
        device.enter()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the code is a whole cubin.
        let status = unsafe { (device.driver.module_load)(&mut module, code.as_ptr().cast()) };
        device.driver.check("cuModuleLoadData", status)?;
        Ok(Self(Code(module)))
    }

    /// The kernel of this name.
    pub fn function(&self, device: &Device, name: &str) -> Result<Function, CudaError> {
        let text = CString::new(name).map_err(|_| CudaError::Internal(format!("kernel name {name:?}")))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded; the text ends with a zero.
        let status = unsafe { (device.driver.module_function)(&mut function, self.0.0, text.as_ptr()) };
        device
            .driver
            .check("cuModuleGetFunction", status)
            .map_err(|e| if e.lost() { e } else { CudaError::Internal(format!("kernel {name}: {e}")) })?;
        Ok(Function(Code(function)))
    }
}

impl Function {
    /// Queues a launch with this many bytes of shared memory besides what the kernel declares. One that is `early` begins while what was queued before it still
    /// runs, and waits for that itself.
    ///
    /// # Safety
    /// `args` are addresses of values of the types of its parameters, and what they point at is theirs.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        threads: u32,
        shared: usize,
        early: bool,
        args: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        const MOST_DYNAMIC_SHARED: c_int = 8;
        const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;
        let driver = stream.device.driver;
        let [x, y, z] = grid;
        if shared > 0 {
            // SAFETY: the function is loaded.
            let status = unsafe { (driver.function_attribute)(self.0.0, MOST_DYNAMIC_SHARED, shared as c_int) };
            driver.check("cuFuncSetAttribute", status)?;
        }
        if early {
            let attribute = LaunchAttribute { id: PROGRAMMATIC_STREAM_SERIALIZATION, value: [1, 0, 0, 0, 0, 0, 0, 0] };
            let (block, shared) = ([threads, 1, 1], shared as c_uint);
            let config =
                LaunchConfig { grid, block, shared, stream: stream.handle, attributes: &raw const attribute, count: 1 };
            // SAFETY: as below; the config outlives the call.
            let status =
                unsafe { (driver.launch_with)(&raw const config, self.0.0, args.as_mut_ptr(), std::ptr::null_mut()) };
            return driver.check("cuLaunchKernelEx", status);
        }
        // SAFETY: the function is loaded and the stream open; the arguments are its own by the caller's word.
        let status = unsafe {
            (driver.launch)(
                self.0.0,
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
