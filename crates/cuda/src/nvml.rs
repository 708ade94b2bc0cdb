//! Power, clocks and memory of a device, by NVML.

use crate::CudaError;
use crate::driver::Device;
use crate::library::{Name, functions};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};

type Handle = *mut c_void;

functions! {
    /// The library's functions.
    Functions, Name::Nvml;
    init = c"nvmlInit_v2": fn() -> c_int;
    device = c"nvmlDeviceGetHandleByPciBusId_v2": fn(*const c_char, *mut Handle) -> c_int;
    memory = c"nvmlDeviceGetMemoryInfo": fn(Handle, *mut Memory) -> c_int;
    power = c"nvmlDeviceGetPowerUsage": fn(Handle, *mut c_uint) -> c_int;
    temperature = c"nvmlDeviceGetTemperature": fn(Handle, c_int, *mut c_uint) -> c_int;
    clock = c"nvmlDeviceGetClockInfo": fn(Handle, c_int, *mut c_uint) -> c_int;
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// A device as NVML knows it.
pub struct Nvml {
    functions: Functions,
    handle: Handle,
}

// SAFETY: NVML may be used from any thread.
unsafe impl Send for Nvml {}

/// What a device does at a moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Telemetry {
    /// Bytes of memory in use, by all programs and the driver.
    pub used_bytes: u64,
    /// Watts.
    pub power_w: f64,
    /// Degrees Celsius.
    pub temperature_c: u32,
    /// Clock of the multiprocessors, in MHz.
    pub clock_mhz: u32,
}

impl Nvml {
    /// Opens the library for a device.
    pub fn open(device: &Device) -> Result<Self, CudaError> {
        let (functions, _) = Functions::open()?;
        let pci = CString::new(device.pci.as_str()).map_err(|_| CudaError::Internal("a zero byte".into()))?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the text ends with a zero; the address is valid for the call.
        unsafe {
            check("nvmlInit", (functions.init)())?;
            check("nvmlDeviceGetHandleByPciBusId", (functions.device)(pci.as_ptr(), &mut handle))?;
        }
        Ok(Self { functions, handle })
    }

    /// Reads it all; what the device does not tell is zero.
    pub fn read(&self) -> Telemetry {
        const GPU_SENSOR: c_int = 0;
        const SM_CLOCK: c_int = 1;
        let mut memory = Memory::default();
        let [mut power, mut temperature, mut clock] = [0, 0, 0];
        // SAFETY: the addresses are valid for the calls.
        unsafe {
            (self.functions.memory)(self.handle, &mut memory);
            (self.functions.power)(self.handle, &mut power);
            (self.functions.temperature)(self.handle, GPU_SENSOR, &mut temperature);
            (self.functions.clock)(self.handle, SM_CLOCK, &mut clock);
        }
        Telemetry {
            used_bytes: memory.used,
            power_w: f64::from(power) * 1e-3,
            temperature_c: temperature,
            clock_mhz: clock,
        }
    }
}

fn check(call: &'static str, status: c_int) -> Result<(), CudaError> {
    match status {
        0 => Ok(()),
        _ => Err(CudaError::Call { call, text: format!("status {status}") }),
    }
}
