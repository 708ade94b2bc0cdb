//! NVIDIA's shared libraries, found and opened while the program runs.

use crate::CudaError;
use lockstep_exec::library::Library;
use std::path::{Path, PathBuf};

/// A library that Lockstep may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// The driver.
    Driver,
    /// The compiler of kernels.
    Nvrtc,
    /// Matmuls.
    CublasLt,
    /// Fused attention.
    Cudnn,
    /// Power, clocks and memory of the device.
    Nvml,
    /// Collectives between devices.
    Nccl,
}

/// The folder that is searched first, if set: where a Python environment keeps its `nvidia` packages, say.
pub const FOLDER_VARIABLE: &str = "LOCKSTEP_CUDA_LIBRARIES";

/// What is wrong with a library that is nowhere.
pub const NOT_FOUND: &str = "was not found";

impl Name {
    /// All of them.
    pub const ALL: [Name; 6] = [Name::Driver, Name::Nvrtc, Name::CublasLt, Name::Cudnn, Name::Nvml, Name::Nccl];

    /// File names to try, best first.
    fn files(self) -> &'static [&'static str] {
        match self {
            Name::Driver => &["libcuda.so.1"],
            Name::Nvrtc => &["libnvrtc.so.13"],
            Name::CublasLt => &["libcublasLt.so.13"],
            Name::Cudnn => &["libcudnn.so.9"],
            Name::Nvml => &["libnvidia-ml.so.1"],
            Name::Nccl => &["libnccl.so.2"],
        }
    }

    /// What it is for and how to get it.
    pub fn hint(self) -> &'static str {
        match self {
            Name::Driver => "install the NVIDIA driver, version 580 or newer",
            Name::Nvrtc => "install CUDA 13.0, or `pip install nvidia-cuda-nvrtc==13.0.88`",
            Name::CublasLt => "install CUDA 13.0, or `pip install nvidia-cublas`",
            Name::Cudnn => {
                "install cuDNN 9.14 or newer, or `pip install nvidia-cudnn-cu13`; without it attention runs on a slower kernel"
            }
            Name::Nvml => "it comes with the NVIDIA driver; without it there is no telemetry",
            Name::Nccl => {
                "install NCCL 2.17 or newer, or `pip install nvidia-nccl-cu13`; without it a run uses one GPU"
            }
        }
    }

    /// Whether nothing runs on the device without it.
    pub fn needed(self) -> bool {
        matches!(self, Name::Driver | Name::Nvrtc | Name::CublasLt)
    }

    /// The name for people.
    pub fn name(self) -> &'static str {
        match self {
            Name::Driver => "NVIDIA driver",
            Name::Nvrtc => "NVRTC",
            Name::CublasLt => "cuBLASLt",
            Name::Cudnn => "cuDNN",
            Name::Nvml => "NVML",
            Name::Nccl => "NCCL",
        }
    }
}

/// Opens a library: from the folder that the environment names, from where the system looks, from a CUDA installation, or
/// from the packages of the Python environment that this program is in, or of the active one.
pub fn open(name: Name) -> Result<Library, CudaError> {
    let files = name.files();
    let failed = |problem: String| CudaError::Library { library: name, problem };
    let named = folder_in(FOLDER_VARIABLE);
    let first: Vec<PathBuf> = named.iter().flat_map(|folder| in_folder(folder, files)).collect();
    let only_first = !first.is_empty();
    let system = files.iter().map(PathBuf::from).filter(|_| !only_first);
    let others = folders().into_iter().flat_map(|f| in_folder(&f, files)).filter(|_| !only_first);
    let mut why = None;
    // What the named folder holds is used, or is an error.
    for path in first.into_iter().chain(system).chain(others) {
        match open_path(&path) {
            Ok(library) => return Ok(library),
            // A name that the system does not know says nothing; a file that is there and does not open does.
            Err(text) if !absent(&path, &text) => why = why.or(Some(text)),
            Err(_) => {}
        }
    }
    Err(failed(why.map_or(NOT_FOUND.to_owned(), |text| format!("cannot be opened: {text}"))))
}

fn open_path(path: &Path) -> Result<Library, String> {
    companions(path).iter().for_each(|part| drop(open_path(part)));
    Library::open(path)
}

/// Whether the system's text only says that it knows no file of this name.
fn absent(path: &Path, text: &str) -> bool {
    !path.is_absolute() && text.starts_with(&format!("{}: ", path.display())) && text.contains("No such file")
}

/// Other parts of a library that lie beside it. It looks for them where the system looks, and may find those of another version
/// there, unless they are open already. Each comes after those that it needs.
fn companions(path: &Path) -> Vec<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let Some(folder) = path.parent().filter(|f| f.is_absolute()) else { return Vec::new() };
    if name.starts_with("libnvrtc.so") {
        let other_half = |p: &PathBuf| p.to_string_lossy().contains("libnvrtc-builtins.so");
        return entries(folder).into_iter().filter(other_half).collect();
    }
    let parts: &[&str] = match name.strip_prefix("libcudnn.so") {
        Some(_) => &["graph", "ops", "heuristic", "engines_precompiled", "engines_runtime_compiled"],
        None => &[],
    };
    let part = |part: &&str| folder.join(name.replace("libcudnn.so", &format!("libcudnn_{part}.so")));
    parts.iter().map(part).filter(|p| p.exists()).collect()
}

fn in_folder(folder: &Path, files: &[&str]) -> Vec<PathBuf> {
    files.iter().map(|file| folder.join(file)).filter(|path| path.exists()).collect()
}

/// The folder that a variable names, absolute: the parts of a library are looked for beside it.
fn folder_in(variable: &str) -> Option<PathBuf> {
    let folder = std::env::var_os(variable).filter(|folder| !folder.is_empty())?;
    Some(std::path::absolute(&folder).unwrap_or_else(|_| folder.into()))
}

/// Other folders where such libraries are kept.
fn folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for home in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(folder_in) {
        folders.push(home.join("lib64"));
    }
    folders.push(PathBuf::from("/usr/local/cuda/lib64"));
    // A program in the `bin` of a Python environment need not have it active.
    let own = std::env::current_exe().ok().and_then(|path| Some(path.parent()?.parent()?.to_owned()));
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(folder_in);
    folders.extend(own.into_iter().chain(active).flat_map(|home| packages(&home)));
    folders
}

/// Where NVIDIA's packages of a Python environment have their libraries: `site-packages/nvidia/*/lib`.
fn packages(home: &Path) -> Vec<PathBuf> {
    let pythons = entries(&home.join("lib")).into_iter();
    pythons
        .flat_map(|python| entries(&python.join("site-packages/nvidia")))
        .map(|package| package.join("lib"))
        .collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().filter_map(|e| Some(e.ok()?.path())).collect();
    found.sort();
    found
}

/// Declares functions of a library ([`lockstep_exec::functions`]), all looked up when it is opened.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident, $library:expr; $($functions:tt)*) => {
        lockstep_exec::functions! { $(#[$doc])* $table; $($functions)* }

        impl $table {
            /// Opens the library and finds its functions.
            pub fn open() -> Result<(Self, std::path::PathBuf), crate::CudaError> {
                let name = $library;
                let library = crate::library::open(name)?;
                let table = Self::find(&library, |symbol| crate::CudaError::Symbol {
                    path: library.path.display().to_string(),
                    symbol: symbol.to_string_lossy().into_owned(),
                    hint: name.hint(),
                })?;
                Ok((table, library.path))
            }
        }
    };
}
pub(crate) use functions;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_a_python_environment_are_found() {
        let home = std::env::temp_dir().join(format!("lockstep-packages-{}", std::process::id()));
        let nvidia = home.join("lib/python3.12/site-packages/nvidia");
        ["cudnn", "cu13"].iter().for_each(|name| std::fs::create_dir_all(nvidia.join(name).join("lib")).unwrap());
        let found = packages(&home);
        std::fs::remove_dir_all(&home).unwrap();
        assert_eq!(found, ["cu13/lib", "cudnn/lib"].map(|folder| nvidia.join(folder)));
        assert!(packages(&home).is_empty());
    }

    #[test]
    fn parts_of_a_library_come_from_its_own_folder() {
        let folder = std::env::temp_dir().join(format!("lockstep-library-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let files = ["libcudnn.so.9", "libcudnn_ops.so.9", "libcudnn_graph.so.9", "libnvrtc.so.13"];
        files.iter().chain(&["libnvrtc-builtins.so.13.0"]).for_each(|f| std::fs::write(folder.join(f), "").unwrap());
        let of = |name: &str| companions(&folder.join(name));
        let (cudnn, nvrtc, ops) = (of("libcudnn.so.9"), of("libnvrtc.so.13"), of("libcudnn_ops.so.9"));
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(cudnn, ["libcudnn_graph.so.9", "libcudnn_ops.so.9"].map(|f| folder.join(f)));
        assert_eq!(nvrtc, [folder.join("libnvrtc-builtins.so.13.0")]);
        assert!(ops.is_empty());
        // Where the system looks, it looks for all of them.
        assert!(companions(Path::new("libcudnn.so.9")).is_empty());
    }
}
