//! Kernels from source to machine code, kept on disk between runs.

use crate::CudaError;
use crate::cache;
use crate::library::{Name, functions};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

type Program = *mut c_void;

functions! {
    /// The compiler's functions.
    Nvrtc, Name::Nvrtc;
    version = c"nvrtcVersion" safe: fn(&mut c_int, &mut c_int) -> c_int;
    create = c"nvrtcCreateProgram": fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int;
    compile = c"nvrtcCompileProgram": fn(Program, c_int, *const *const c_char) -> c_int;
    code_size = c"nvrtcGetCUBINSize": fn(Program, *mut usize) -> c_int;
    code = c"nvrtcGetCUBIN": fn(Program, *mut c_char) -> c_int;
    log_size = c"nvrtcGetProgramLogSize": fn(Program, *mut usize) -> c_int;
    log = c"nvrtcGetProgramLog": fn(Program, *mut c_char) -> c_int;
    destroy = c"nvrtcDestroyProgram": fn(*mut Program) -> c_int;
    error = c"nvrtcGetErrorString": fn(c_int) -> *const c_char;
}

fn nvrtc() -> Result<&'static (Nvrtc, PathBuf), CudaError> {
    static NVRTC: OnceLock<Result<(Nvrtc, PathBuf), CudaError>> = OnceLock::new();
    NVRTC.get_or_init(Nvrtc::open).as_ref().map_err(Clone::clone)
}

/// The compiler's version and where it was found.
pub fn version() -> Result<((i32, i32), PathBuf), CudaError> {
    let (nvrtc, path) = nvrtc()?;
    let (mut major, mut minor) = (0, 0);
    (nvrtc.version)(&mut major, &mut minor);
    Ok(((major, minor), path.clone()))
}

/// Machine code of a source for a compute capability such as 90, from the cache if it is there.
pub fn cubin(name: &str, source: &str, capability: u32) -> Result<Vec<u8>, CudaError> {
    let ((major, minor), _) = version()?;
    let options = options(capability);
    let key = format!("nvrtc {major}.{minor}\n{}\n{source}", options.join(" "));
    cache::get_or_make(&format!("{name}-sm{capability}"), &key, || compile(name, source, &options))
}

fn options(capability: u32) -> Vec<String> {
    // Hopper's own instructions need the `a` variant of its architecture.
    let variant = if capability == 90 { "a" } else { "" };
    [
        &format!("--gpu-architecture=sm_{capability}{variant}"),
        "--std=c++17",
        "--fmad=true",
        "--extra-device-vectorization",
        "-default-device",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Compiles a source, whatever the cache holds.
pub fn compile(name: &str, source: &str, options: &[String]) -> Result<Vec<u8>, CudaError> {
    let (nvrtc, _) = nvrtc()?;
    let text = |s: &str| CString::new(s).map_err(|_| CudaError::Internal(format!("a zero byte in {name}")));
    let (source, file) = (text(source)?, text(&format!("{name}.cu"))?);
    let options = options.iter().map(|o| text(o)).collect::<Result<Vec<_>, _>>()?;
    let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    let check = |status: c_int, log: String| match status {
        0 => Ok(()),
        _ => {
            // SAFETY: the compiler gives the address of a constant.
            let text = unsafe { CStr::from_ptr((nvrtc.error)(status)) }.to_string_lossy();
            Err(CudaError::Compile { name: name.to_owned(), text: format!("{text}\n{log}") })
        }
    };
    let mut program = std::ptr::null_mut();
    // SAFETY: all texts end with a zero and outlive the calls; sizes come from the compiler; the program is destroyed once.
    unsafe {
        let none = std::ptr::null();
        check((nvrtc.create)(&mut program, source.as_ptr(), file.as_ptr(), 0, none, none), String::new())?;
        let status = (nvrtc.compile)(program, options.len() as c_int, options.as_ptr());
        let mut size = 0;
        (nvrtc.log_size)(program, &mut size);
        let mut log = vec![0u8; size.max(1)];
        (nvrtc.log)(program, log.as_mut_ptr().cast());
        let compiled = check(status, String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned());
        let code = compiled.and_then(|()| {
            let mut size = 0;
            check((nvrtc.code_size)(program, &mut size), String::new())?;
            let mut code = vec![0u8; size];
            check((nvrtc.code)(program, code.as_mut_ptr().cast()), String::new())?;
            Ok(code)
        });
        (nvrtc.destroy)(&mut program);
        code
    }
}
