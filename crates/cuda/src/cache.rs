//! What took time to find out, kept on disk: machine code of kernels, plans of matmuls and attention.
//!
//! Choices are timed once, before the arena takes the memory. For deterministic programs nothing is timed.

use crate::CudaError;
use std::path::PathBuf;
use xxhash_rust::xxh3::xxh3_128;

/// The folder, unless the environment names another: `LOCKSTEP_CACHE`, else `lockstep` in the user's cache folder.
pub fn folder() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("LOCKSTEP_CACHE") {
        return Some(PathBuf::from(folder));
    }
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    Some(named.or_else(home)?.join("lockstep"))
}

fn file(name: &str, key: &str) -> Option<PathBuf> {
    Some(folder()?.join(format!("{name}-{:032x}", xxh3_128(key.as_bytes()))))
}

/// What is kept under this key: a file is its content, then its hash.
pub fn get(name: &str, key: &str) -> Option<Vec<u8>> {
    let mut data = std::fs::read(file(name, key)?).ok()?;
    let hash = data.split_off(data.len().checked_sub(16)?);
    (xxh3_128(&data).to_le_bytes()[..] == hash[..]).then_some(data)
}

/// Keeps data under a key. A cache that cannot be written costs time, nothing else.
pub fn put(name: &str, key: &str, data: &[u8]) {
    let Some(path) = file(name, key) else { return };
    let write = || {
        std::fs::create_dir_all(path.parent()?).ok()?;
        // Others may write the same file: each writes its own, and the last to finish names it.
        let draft = path.with_extension(format!("{}", std::process::id()));
        let whole = [data, &xxh3_128(data).to_le_bytes()].concat();
        std::fs::write(&draft, whole).ok()?;
        std::fs::rename(&draft, &path).ok()
    };
    let _ = write();
}

/// What is kept under this key, or else what `make` gives, which is kept from now on.
pub fn get_or_make(
    name: &str,
    key: &str,
    make: impl FnOnce() -> Result<Vec<u8>, CudaError>,
) -> Result<Vec<u8>, CudaError> {
    if let Some(data) = get(name, key) {
        return Ok(data);
    }
    let data = make()?;
    put(name, key, &data);
    Ok(data)
}
