//! What of CUDA is on this machine.

use crate::driver::{Device, Driver};
use crate::library::{self, FOLDER_VARIABLE, Name};
use crate::{CudaError, Nvml, cache, cudnn, matmul, nccl, nvrtc, sources};
use lockstep_ir::Hint;

/// One thing that was looked for.
#[derive(Clone, Debug)]
pub struct Finding {
    /// What.
    pub what: String,
    /// What was found, or why nothing was.
    pub found: Result<String, String>,
    /// What to do where it is missing.
    pub hint: String,
    /// Whether nothing runs on a GPU without it.
    pub needed: bool,
}

/// Looks for libraries.
pub fn survey_libraries() -> Vec<Finding> {
    Name::ALL.into_iter().map(look_for).collect()
}

/// The name, memory and place on the bus of a device, if it can be opened.
pub fn device_name(ordinal: usize) -> Option<String> {
    let device = Device::open(ordinal).ok()?;
    let gib = device.memory as f64 / (1u64 << 30) as f64;
    Some(format!("{}, {gib:.1} GiB, {}", device.name, device.pci))
}

/// How many devices there are.
pub fn device_count() -> usize {
    Device::count().unwrap_or(0)
}

/// Looks for libraries and devices, and compiles the kernels where that is possible.
pub fn survey() -> Vec<Finding> {
    let mut findings = survey_libraries();
    let devices = Device::count().and_then(|n| (0..n).map(Device::open).collect::<Result<Vec<_>, _>>());
    match devices {
        Ok(devices) if !devices.is_empty() => findings.extend(devices.iter().map(|d| device(d))),
        Ok(_) => findings.push(no_device(CudaError::NoDevice)),
        Err(error) => findings.push(no_device(error)),
    }
    let capability = Device::open(0).map_or(90, |d| d.capability);
    let compiled = sources::compile_all(capability).map(|code| {
        let bytes: usize = code.iter().map(|(_, c)| c.len()).sum();
        format!("{} sources compiled for sm_{capability}, {} KiB of machine code", code.len(), bytes / 1024)
    });
    let hint = "see NVRTC above".to_owned();
    findings.push(Finding { what: "kernels".into(), found: compiled.map_err(|e| e.to_string()), hint, needed: true });
    let folder = cache::folder().map(|f| f.display().to_string()).ok_or_else(|| "no home folder".to_owned());
    let hint = "set LOCKSTEP_CACHE to a folder".to_owned();
    findings.push(Finding { what: "cache".into(), found: folder, hint, needed: false });
    findings
}

/// The environment variable that names a folder of libraries.
pub const LIBRARIES: &str = FOLDER_VARIABLE;

fn device(d: &Device) -> Finding {
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64);
    let (major, minor) = (d.capability / 10, d.capability % 10);
    let free = d.free_bytes().map_or("unknown".to_owned(), gib);
    let mut text = format!(
        "{}, compute capability {major}.{minor}, {} multiprocessors, {}, {free} free",
        d.name,
        d.processors,
        gib(d.memory)
    );
    if let Ok(nvml) = Nvml::open(&d.pci) {
        text += &format!(", {}", nvml.read());
    }
    Finding { what: format!("device {}", d.ordinal()), found: Ok(text), hint: String::new(), needed: true }
}

fn no_device(error: CudaError) -> Finding {
    let hint = error.hint().unwrap_or_default();
    Finding { what: "device".into(), found: Err(error.to_string()), hint, needed: true }
}

fn look_for(name: Name) -> Finding {
    let at = |version: String, path: std::path::PathBuf| format!("{version}, {}", path.display());
    let dotted = |v: usize| format!("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
    let found = match name {
        Name::Driver => Driver::open().map(|(driver, path)| {
            let version = driver.version();
            at(format!("speaks CUDA {}.{}", version / 1000, version % 1000 / 10), path)
        }),
        Name::Nvrtc => nvrtc::version().map(|((major, minor), path)| at(format!("{major}.{minor}"), path)),
        Name::CublasLt => matmul::version().map(|(v, path)| at(dotted(v), path)),
        Name::Cudnn => cudnn::version().map(|(v, path)| at(dotted(v), path)),
        Name::Nccl => nccl::version().map(|(v, path)| at(dotted(v), path)),
        Name::Nvml => library::open(name).map(|l| l.path.display().to_string()),
    };
    let found = found.map_err(|e| e.to_string());
    Finding { what: name.name().to_owned(), found, hint: name.hint().to_owned(), needed: name.needed() }
}
