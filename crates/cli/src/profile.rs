//! Where the time of steps went: a table, and a Chrome trace in a file.

use crate::failure::Result;
use crate::table::table;
use crate::timeline::write_file;
use lockstep_train::{OpTime, Profile};
use std::path::Path;

/// Time per op of a step, beside its roofline bound.
pub fn as_text(profile: &Profile) -> String {
    let row = |o: &OpTime| {
        let ms = |seconds: f64| format!("{:.2} ms", seconds * 1e3);
        let (bound, ratio) = match o.roofline_s {
            Some(bound) => (ms(bound), format!("{:.1}×", o.seconds / bound)),
            None => ("-".to_owned(), "-".to_owned()),
        };
        vec![o.op.to_owned(), o.calls.to_string(), ms(o.seconds), bound, ratio]
    };
    let rows: Vec<_> = profile.ops.iter().map(row).collect();
    table(&["op", "calls", "time", "roofline bound", "time / bound"], &rows)
}

/// Writes the trace, and says so.
pub fn write_trace(profile: &Profile, path: &Path) -> Result<()> {
    let what = "Chrome trace, for Perfetto or chrome://tracing";
    write_file(path, profile.trace.to_string(), what, "check the folder")
}
