//! Whether the clocks of hosts agree, by the files that they write: a file has the time of the host that wrote it in its text, and that of the file system beside it.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How far apart clocks may be. Signatures of buckets, certificates and the times of events all take hosts to agree better than that.
const CLOCKS_MAY_DIFFER: Duration = Duration::from_secs(60);

/// Seconds since 1970 by the clock of this host.
pub(crate) fn now() -> f64 {
    since_1970(SystemTime::now())
}

fn since_1970(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// How far a clock was ahead of that of the file system when it wrote a file at this time of its own.
pub(crate) fn ahead_of_files(written: f64, path: &Path) -> Option<f64> {
    Some(written - since_1970(fs::metadata(path).ok()?.modified().ok()?))
}

/// The same of this host's clock now, by a file that it writes.
pub(crate) fn ahead_here(probe: &Path) -> Option<f64> {
    fs::write(probe, "").ok()?;
    let ahead = ahead_of_files(now(), probe);
    let _ = fs::remove_file(probe);
    ahead
}

/// By how much a clock differs from another, if that is more than it may: with a plus where it is ahead.
pub(crate) fn far_apart(ahead_s: f64) -> Option<String> {
    (ahead_s.abs() > CLOCKS_MAY_DIFFER.as_secs_f64()).then(|| format!("{ahead_s:+.0} s"))
}
