//! What this process is, for the run directory.

use lockstep_rundir::{Build, StartedBy, TakenFromHub};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// Who starts a run with this config file, and with this of the hub.
pub fn started_by(config: &Path, hub: Vec<TakenFromHub>) -> StartedBy {
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let build = Build {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: some(env!("LOCKSTEP_COMMIT")),
        dirty: env!("LOCKSTEP_DIRTY").parse().ok(),
        profile: env!("LOCKSTEP_PROFILE").to_owned(),
        rustc: env!("LOCKSTEP_RUSTC").to_owned(),
    };
    StartedBy {
        build,
        // What cannot be read says nothing.
        binary_xxh3: std::env::current_exe().and_then(|path| checksum(&path)).ok(),
        command: std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect(),
        given: std::fs::read_to_string(config).ok(),
        hub,
    }
}

fn checksum(path: &Path) -> std::io::Result<String> {
    let (mut file, mut hash, mut chunk) = (File::open(path)?, Xxh3::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(format!("{:032x}", hash.digest128())),
            read => hash.update(&chunk[..read]),
        }
    }
}
