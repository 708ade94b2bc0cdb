//! Files that show memory over time: a picture (`.svg`) or a Chrome trace (`.json`).

mod svg;

pub use svg::draw as memory_picture;

use crate::failure::{Failure, Result};
use lockstep_ir::program::Class;
use lockstep_ir::units::trace_span;
use lockstep_plan::{Clock, Mark, MemoryTimeline};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Where a timeline goes.
pub struct TimelineFile {
    path: PathBuf,
    picture: bool,
}

impl TimelineFile {
    /// Refuses names that do not say which kind of file is wanted.
    pub fn new(path: &Path) -> Result<Self> {
        let picture = match path.extension().and_then(|e| e.to_str()) {
            Some("svg") => true,
            Some("json") => false,
            _ => {
                let text = format!("--timeline {} is neither .svg nor .json", path.display());
                return Err(Failure::request(text, "name it memory.svg, or memory.json for a trace"));
            }
        };
        Ok(Self { path: path.to_owned(), picture })
    }

    /// Writes a timeline; `suffix` is appended to the file's name.
    pub fn write(&self, suffix: &str, title: &str, timeline: &MemoryTimeline) -> Result<()> {
        let stem = self.path.file_stem().unwrap_or_default().to_string_lossy();
        let extension = if self.picture { "svg" } else { "json" };
        let path = self.path.with_file_name(format!("{stem}{suffix}.{extension}"));
        let text = if self.picture { svg::draw(title, timeline) } else { trace(title, timeline).to_string() };
        write_file(&path, text, "memory over time", "check the folder of --timeline")
    }
}

/// Refuses a file of another kind for an option; `usual` is a name that it could have.
pub fn require_extension<'a>(option: &str, path: &'a Path, usual: &str) -> Result<&'a Path> {
    let wanted = Path::new(usual).extension().unwrap_or_default();
    if path.extension() == Some(wanted) {
        return Ok(path);
    }
    let (path, wanted) = (path.display(), wanted.display());
    let article = if usual.ends_with("svg") { "an" } else { "a" };
    Err(Failure::request(format!("{option} {path} is not {article} .{wanted}"), format!("name it {usual}")))
}

/// Writes a file, and says what it has.
pub fn write_file(path: &Path, text: String, what: &str, hint: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|e| Failure::run(format!("cannot write {}: {e}", path.display()), hint))?;
    wrote(what, path);
    Ok(())
}

/// Says on stderr which file has what; the result of the command is on stdout.
pub fn wrote(what: &str, path: &Path) {
    // Where nobody listens, the file still is there.
    let _ = writeln!(std::io::stderr(), "wrote {}: {what}", path.display());
}

/// The phases of steps, on a thread of their own: an event from where one begins to where another one goes on.
fn phase_events(timeline: &MemoryTimeline, scale: f64) -> Vec<Value> {
    let thread = |id: usize, name: &str| json!({ "name": "thread_name", "ph": "M", "pid": 0, "tid": id, "args": { "name": name } });
    let mut events = vec![thread(0, "instructions"), thread(1, "phases")];
    let same = |a: &Mark, b: &Mark| (a.step, a.phase, a.micro_batch) == (b.step, b.phase, b.micro_batch);
    for run in timeline.marks.chunk_by(same) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
        let (ts, dur) = trace_span(first.start * scale, last.end * scale);
        events.push(json!({
            "name": first.phase.name(), "cat": "phase", "ph": "X", "pid": 0, "tid": 1, "ts": ts, "dur": dur,
            "args": { "step": first.step, "micro_batch": first.micro_batch },
        }));
    }
    events
}

/// A counter of bytes by class and the instructions beside it, in the format of Chrome's trace viewer.
fn trace(title: &str, timeline: &MemoryTimeline) -> Value {
    // One instruction is drawn as a microsecond where there is no clock.
    let scale = if timeline.clock == Clock::Instructions { 1.0 } else { 1e6 };
    let mut events = Vec::new();
    let mut before = None;
    for mark in &timeline.marks {
        if before.replace(mark.bytes) != Some(mark.bytes) {
            let bytes: serde_json::Map<String, Value> =
                Class::ALL.iter().zip(mark.bytes).map(|(c, bytes)| (c.name().to_owned(), json!(bytes))).collect();
            events.push(json!({ "name": "memory", "ph": "C", "pid": 0, "ts": mark.start * scale, "args": bytes }));
        }
        let (ts, dur) = trace_span(mark.start * scale, mark.end * scale);
        events.push(json!({
            "name": mark.op, "cat": mark.segment, "ph": "X", "pid": 0, "tid": 0, "ts": ts, "dur": dur,
            "args": {
                "layer": mark.layer, "micro_batch": mark.micro_batch, "step": mark.step, "bytes": mark.moved_bytes,
            },
        }));
    }
    events.extend(phase_events(timeline, scale));
    json!({
        "traceEvents": events,
        "otherData": {
            "title": title,
            "phases": timeline.phases(),
            "clock": match &timeline.clock {
                Clock::Instructions => "instructions".to_owned(),
                Clock::PeakRates(gpu) => format!("seconds at the peak rates of {gpu}, collectives not timed"),
                Clock::Measured => "seconds".to_owned(),
            },
            "arena_bytes": timeline.arena_bytes,
            "peak_bytes": timeline.peak().map(|m| m.total()),
            "touched_bytes": timeline.touched_bytes,
            "micro_batches_left_out": timeline.left_out,
        },
    })
}
