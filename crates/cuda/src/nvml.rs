//! Power, clocks and memory of a device, by NVML.

use crate::CudaError;
use crate::library::{Name, functions};
use lockstep_ir::units;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};

type Handle = *mut c_void;

functions! {
    /// The library's functions.
    Functions, Name::Nvml;
    init = c"nvmlInit_v2" safe: fn() -> c_int;
    device = c"nvmlDeviceGetHandleByPciBusId_v2": fn(*const c_char, *mut Handle) -> c_int;
    memory = c"nvmlDeviceGetMemoryInfo": fn(Handle, *mut Memory) -> c_int;
    power = c"nvmlDeviceGetPowerUsage": fn(Handle, *mut c_uint) -> c_int;
    energy = c"nvmlDeviceGetTotalEnergyConsumption": fn(Handle, *mut u64) -> c_int;
    temperature = c"nvmlDeviceGetTemperature": fn(Handle, c_int, *mut c_uint) -> c_int;
    utilisation = c"nvmlDeviceGetUtilizationRates": fn(Handle, *mut Utilisation) -> c_int;
    clock = c"nvmlDeviceGetClockInfo": fn(Handle, c_int, *mut c_uint) -> c_int;
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct Utilisation {
    gpu: c_uint,
    memory: c_uint,
}

/// A device as NVML knows it.
pub struct Nvml {
    functions: Functions,
    handle: Handle,
}

// SAFETY: NVML may be used from any thread.
unsafe impl Send for Nvml {}
// SAFETY: as above.
unsafe impl Sync for Nvml {}

/// What a device does at a moment, as far as it tells.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Telemetry {
    /// Bytes of memory in use, by all programs and the driver.
    pub used_bytes: Option<u64>,
    /// Watts.
    pub power_w: Option<f64>,
    /// Degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Clock of the multiprocessors, in MHz.
    pub clock_mhz: Option<u32>,
    /// Share of the last moments in which a kernel ran, in percent.
    pub utilisation_percent: Option<u32>,
}

/// Starts the library, which takes a while. It is started once and counts who asks.
pub(crate) fn start() -> Result<(), CudaError> {
    let (functions, _) = Functions::open()?;
    check("nvmlInit", (functions.init)())
}

impl Nvml {
    /// Opens the library for the device at this place on the bus.
    pub fn open(pci: &str) -> Result<Self, CudaError> {
        let (functions, _) = Functions::open()?;
        let pci = CString::new(pci).map_err(|_| CudaError::Internal("a zero byte".into()))?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the text ends with a zero; the address is valid for the call.
        unsafe {
            check("nvmlInit", (functions.init)())?;
            check("nvmlDeviceGetHandleByPciBusId", (functions.device)(pci.as_ptr(), &mut handle))?;
        }
        Ok(Self { functions, handle })
    }

    /// Bytes of memory in use, by all programs and the driver.
    pub fn used_bytes(&self) -> Option<u64> {
        let mut memory = Memory::default();
        // SAFETY: the address is valid for the call.
        (unsafe { (self.functions.memory)(self.handle, &mut memory) } == 0).then_some(memory.used)
    }

    /// Watts.
    pub(crate) fn power_w(&self) -> Option<f64> {
        let mut power = 0;
        // SAFETY: the address is valid for the call.
        (unsafe { (self.functions.power)(self.handle, &mut power) } == 0).then_some(f64::from(power) * 1e-3)
    }

    /// Joules since the driver was loaded, by the counter that GPUs have since Volta.
    pub(crate) fn energy_j(&self) -> Option<f64> {
        let mut millijoules = 0;
        // SAFETY: the address is valid for the call.
        (unsafe { (self.functions.energy)(self.handle, &mut millijoules) } == 0).then_some(millijoules as f64 * 1e-3)
    }

    /// Reads it all.
    pub fn read(&self) -> Telemetry {
        const GPU_SENSOR: c_int = 0;
        const SM_CLOCK: c_int = 1;
        let [mut temperature, mut clock] = [0, 0];
        let mut utilisation = Utilisation::default();
        let f = &self.functions;
        // SAFETY: the addresses are valid for the calls.
        let [has_temperature, has_clock, has_utilisation] = unsafe {
            [
                (f.temperature)(self.handle, GPU_SENSOR, &mut temperature),
                (f.clock)(self.handle, SM_CLOCK, &mut clock),
                (f.utilisation)(self.handle, &mut utilisation),
            ]
        }
        .map(|status| status == 0);
        Telemetry {
            used_bytes: self.used_bytes(),
            power_w: self.power_w(),
            temperature_c: has_temperature.then_some(temperature),
            clock_mhz: has_clock.then_some(clock),
            utilisation_percent: has_utilisation.then_some(utilisation.gpu),
        }
    }
}

impl std::fmt::Display for Telemetry {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let parts = [
            self.used_bytes.map(|bytes| format!("{} in use", units::bytes(bytes))),
            self.power_w.map(|power| format!("{power:.0} W")),
            self.clock_mhz.map(|clock| format!("{clock} MHz")),
            self.temperature_c.map(|temperature| format!("{temperature} °C")),
            self.utilisation_percent.map(|share| format!("{share}% busy")),
        ];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}

fn check(call: &'static str, status: c_int) -> Result<(), CudaError> {
    match status {
        0 => Ok(()),
        _ => Err(CudaError::Call { call, text: format!("status {status}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_does_not_tell_is_left_out() {
        let told = Telemetry { used_bytes: Some(3 << 29), power_w: Some(412.6), ..Telemetry::default() };
        assert_eq!(told.to_string(), "1.50 GiB in use, 413 W");
        let more = Telemetry { clock_mhz: Some(1980), temperature_c: Some(61), utilisation_percent: Some(99), ..told };
        assert_eq!(more.to_string(), "1.50 GiB in use, 413 W, 1980 MHz, 61 °C, 99% busy");
    }
}
