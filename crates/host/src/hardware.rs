//! The user's hardware files: entries added to the catalogue, and profiles of machines that were measured.

use crate::Result;
use lockstep_rundir::RunDirError;
use lockstep_sim::{Catalogue, MachineProfile, SimError};
use std::fs;
use std::path::{Path, PathBuf};

/// The folder of the user's own hardware files: `LOCKSTEP_HARDWARE`, else `lockstep/hardware` in the user's config folder.
pub fn catalogue_folder() -> Option<PathBuf> {
    folder("LOCKSTEP_HARDWARE", "lockstep/hardware")
}

/// The folder of machine profiles: `LOCKSTEP_MACHINES`, else `lockstep/machines` in the user's config folder.
pub fn machines_folder() -> Option<PathBuf> {
    folder("LOCKSTEP_MACHINES", "lockstep/machines")
}

fn folder(variable: &str, name: &str) -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os(variable) {
        return Some(PathBuf::from(folder));
    }
    let named = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
    Some(named.or_else(home)?.join(name))
}

/// The TOML files of a folder, in the order of their names. A folder that is not there has none.
fn files(folder: Option<PathBuf>) -> Vec<PathBuf> {
    let entries = folder.and_then(|folder| fs::read_dir(folder).ok());
    let mut files: Vec<PathBuf> = entries.into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "toml"));
    files.sort();
    files
}

/// What every build knows, and the user's own files over it, in the order of their names.
pub fn catalogue() -> Result<Catalogue, SimError> {
    let mut catalogue = Catalogue::builtin();
    for path in files(catalogue_folder()) {
        let (name, hint) = (path.display().to_string(), "make it readable, or move it out of the folder");
        let text = fs::read_to_string(&path).map_err(|error| SimError::file(&name, error.to_string(), hint))?;
        catalogue.add(&name, &text)?;
    }
    Ok(catalogue)
}

/// The profile that was last saved for what computes here, and its file.
pub fn profile_of(processor: &str) -> Result<Option<(PathBuf, MachineProfile)>> {
    let mut latest: Option<(PathBuf, MachineProfile)> = None;
    for path in files(machines_folder()) {
        let text = fs::read_to_string(&path).map_err(|e| RunDirError::io("read", &path, e))?;
        let found = MachineProfile::parse(&path.display().to_string(), &text)?;
        let later = latest.as_ref().is_none_or(|(_, known)| known.saved_unix_s <= found.saved_unix_s);
        if found.processor == processor && later {
            latest = Some((path, found));
        }
    }
    Ok(latest)
}

/// Writes a profile into the folder of profiles, and says where.
pub fn write_machine(profile: &MachineProfile) -> Result<PathBuf> {
    let (file, hint) = (format!("{}.toml", profile.name), "set LOCKSTEP_MACHINES to a folder");
    let homeless = || SimError::file(&file, "there is no home folder to save it in", hint);
    let folder = machines_folder().ok_or_else(homeless)?;
    fs::create_dir_all(&folder).map_err(|e| RunDirError::io("create", &folder, e))?;
    let path = folder.join(file);
    write_profile(&path, profile)?;
    Ok(path)
}

/// Writes a profile so that its file is either the old or the new one.
pub fn write_profile(path: &Path, profile: &MachineProfile) -> Result<(), RunDirError> {
    let temporary = path.with_extension("new");
    let written = fs::write(&temporary, profile.to_toml()).and_then(|()| fs::rename(&temporary, path));
    written.map_err(|e| RunDirError::io("write", path, e))
}
