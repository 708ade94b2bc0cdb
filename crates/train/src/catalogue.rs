//! The hardware catalogue with what the user has added to it.

use lockstep_sim::{Catalogue, SimError};
use std::path::PathBuf;

/// The folder of the user's own hardware files: `LOCKSTEP_HARDWARE`, else `lockstep/hardware` in the user's config folder.
pub fn catalogue_folder() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("LOCKSTEP_HARDWARE") {
        return Some(PathBuf::from(folder));
    }
    let named = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
    Some(named.or_else(home)?.join("lockstep/hardware"))
}

/// What every build knows, and the user's own files over it, in the order of their names.
pub fn catalogue() -> Result<Catalogue, SimError> {
    let mut catalogue = Catalogue::builtin();
    let Some(folder) = catalogue_folder() else { return Ok(catalogue) };
    // A folder that is not there has no files.
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(catalogue) };
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "toml"));
    files.sort();
    for path in files {
        let text = std::fs::read_to_string(&path).map_err(|error| SimError::File {
            file: path.display().to_string(),
            reason: error.to_string(),
            hint: "make it readable, or move it out of the folder".into(),
        })?;
        catalogue.add(&path.display().to_string(), &text)?;
    }
    Ok(catalogue)
}
