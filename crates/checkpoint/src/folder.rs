//! The folder of checkpoints: its names, and how entries come and go.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{AtPath, Result};

const TEMPORARY: &str = ".tmp-";
const TRASH: &str = ".trash-";

/// How long a file system may take to show here what another host has made.
const SEEN_WITHIN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Waits until what another process has made is seen here: network file systems show it later. Where it never is, whoever uses it says so.
pub(crate) fn await_seen(path: &Path) {
    let until = Instant::now() + SEEN_WITHIN;
    while path.symlink_metadata().is_err_and(|e| e.kind() == ErrorKind::NotFound) && Instant::now() < until {
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The checkpoints in `dir` by ascending step, whole or not; empty where there is no `dir`.
pub fn list(dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    for name in entry_names(dir).at("list", dir)? {
        let path = dir.join(&name);
        if let Some(step) = parse_step_name(&name)
            && path.is_dir()
        {
            found.push((step, path));
        }
    }
    found.sort();
    Ok(found)
}

/// Moves the checkpoints in `dir` from `first` on into a folder `old-1`, `old-2` … inside, so that a run that goes on before them does
/// not find them. Gives their steps.
pub fn set_aside_from(dir: &Path, first: u64) -> Result<Vec<u64>> {
    let later: Vec<(u64, PathBuf)> = list(dir)?.into_iter().filter(|(saved, _)| *saved >= first).collect();
    if later.is_empty() {
        return Ok(Vec::new());
    }
    let mut n = 1;
    while dir.join(format!("old-{n}")).symlink_metadata().is_ok() {
        n += 1;
    }
    let aside = dir.join(format!("old-{n}"));
    fs::create_dir(&aside).at("create", &aside)?;
    for (saved, path) in &later {
        fs::rename(path, aside.join(step_name(*saved))).at("move", path)?;
    }
    sync(dir)?;
    Ok(later.into_iter().map(|(saved, _)| saved).collect())
}

/// The temporary folders in `dir`, with the step each was to become.
pub(crate) fn unfinished(dir: &Path) -> Result<Vec<(u64, String)>> {
    let mut found = Vec::new();
    for name in entry_names(dir).at("list", dir)? {
        let step = name.strip_prefix(TEMPORARY).and_then(|rest| rest.rsplit_once('-')).map(|(step, _pid)| step);
        if let Some(step) = step.and_then(parse_step_name) {
            found.push((step, name));
        }
    }
    found.sort();
    Ok(found)
}

/// `step-00000100`: eight digits, so that names sort as steps do, and more where a step needs them.
pub(crate) fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step of a name that [`step_name`] could have made.
pub(crate) fn parse_step_name(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

/// The folder in which the checkpoint of `step` is put together.
pub(crate) fn temporary_path(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("{TEMPORARY}{}-{}", step_name(step), std::process::id()))
}

/// Makes `dir` where it is missing, so that it survives a power failure.
pub(crate) fn create(dir: &Path) -> Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(dir).at("create", dir)?;
    match dir.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => sync(parent),
        _ => sync(Path::new(".")),
    }
}

/// Removes what killed writers left behind. What cannot be removed stays for the next time.
pub(crate) fn sweep(dir: &Path) -> Result<()> {
    for name in entry_names(dir).at("list", dir)? {
        let rest = name.strip_prefix(TEMPORARY).or_else(|| name.strip_prefix(TRASH));
        if rest.is_some_and(|rest| rest.starts_with("step-")) {
            discard(&dir.join(name));
        }
    }
    Ok(())
}

/// Takes the checkpoint of `step` out of sight by a rename, and returns its new path; `None` where there is none.
pub(crate) fn set_aside(dir: &Path, step: u64) -> Result<Option<PathBuf>> {
    let path = dir.join(step_name(step));
    if path.symlink_metadata().is_err() {
        return Ok(None);
    }
    let trash_path = |n: u64| dir.join(format!("{TRASH}{}-{}-{n}", step_name(step), std::process::id()));
    let mut n = 0;
    while trash_path(n).symlink_metadata().is_ok() {
        n += 1;
    }
    let trash = trash_path(n);
    fs::rename(&path, &trash).at("rename", &path)?;
    Ok(Some(trash))
}

/// Deletes a folder that no longer has a checkpoint's name. Failure costs disk space only: [`sweep`] tries again.
pub(crate) fn discard(path: &Path) {
    if fs::remove_dir_all(path).is_err() {
        let _ = fs::remove_file(path);
    }
}

/// Makes the entries of a folder durable.
pub(crate) fn sync(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|folder| folder.sync_all()).at("sync", dir)
}

/// The names in `dir`, in no order; none where there is no `dir`. Names that are not UTF-8 are not ours.
fn entry_names(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry?.file_name().into_string().ok());
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_names_read_back() {
        for step in [0, 100, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(parse_step_name(&step_name(step)), Some(step));
        }
        assert_eq!(step_name(100), "step-00000100");
    }

    #[test]
    fn other_names_are_not_steps() {
        for name in ["step-", "step-100", "step-000000100", "step-+0000100", "step-99999999999999999999", "best"] {
            assert_eq!(parse_step_name(name), None, "{name}");
        }
    }
}
