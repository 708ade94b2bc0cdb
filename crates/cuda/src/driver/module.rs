//! Machine code and its kernels.

use super::stream::Stream;
use super::{Device, Handle};
use crate::CudaError;
use std::ffi::{CString, c_int, c_uint, c_void};

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
