//! What a queue has on the disk: its lines, and what was sent of them.

use crate::files::MOST_LINE_BYTES;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// The file of lines, and that of what was sent.
pub(crate) const QUEUE: &str = "queue.jsonl";
pub(crate) const STATE: &str = "state.json";

/// Bytes of lines that are sent together, and how many at most.
pub(crate) const BATCH_BYTES: usize = 256 << 10;
pub(crate) const BATCH_LINES: usize = 1000;

/// A line of the queue.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    /// When it came, in milliseconds since 1970.
    pub(crate) unix_ms: u64,
    #[serde(flatten)]
    pub(crate) what: What,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum What {
    /// The run starts, as `starts.jsonl` says.
    Start(Value),
    Metrics(Value),
    Event(Value),
    /// It ends: the word says how.
    End(String),
}

impl Record {
    /// Whether it ends the run.
    pub(crate) fn is_end(&self) -> bool {
        matches!(self.what, What::End(_))
    }
}

/// What a queue remembers.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Kept {
    pub(crate) sent: u64,
    pub(crate) state: Value,
}

/// Replaces what a queue remembers.
pub(crate) fn write_state(folder: &Path, sent: u64, state: &Value) -> io::Result<()> {
    let temporary = folder.join(".state.json.new");
    fs::write(&temporary, json!(Kept { sent, state: state.clone() }).to_string())?;
    fs::rename(&temporary, folder.join(STATE))
}

/// The next lines of a file, `most` of them, and how many bytes they take.
pub(crate) fn read(path: &Path, (from, to): (u64, u64), most: usize) -> io::Result<(Vec<Record>, u64)> {
    let mut bytes = Vec::new();
    match File::open(path) {
        Ok(mut file) => {
            file.seek(SeekFrom::Start(from))?;
            // No line is longer than this.
            file.take((to - from).min((BATCH_BYTES + MOST_LINE_BYTES) as u64)).read_to_end(&mut bytes)?;
        }
        // A file that somebody has removed has nothing to send.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let (mut records, mut taken) = (Vec::new(), 0);
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        if !line.ends_with(b"\n") || records.len() == most || (taken > BATCH_BYTES && !records.is_empty()) {
            break;
        }
        taken += line.len();
        // One that somebody has damaged is left out.
        records.extend(serde_json::from_slice::<Record>(line).ok());
    }
    // Nor has one that somebody has cut.
    Ok((records, if taken == 0 { to - from } else { taken as u64 }))
}

/// The length of a file up to its last line break.
pub(crate) fn whole_lines(file: &mut File) -> io::Result<u64> {
    let length = file.metadata()?.len();
    let from = length.saturating_sub(2 * MOST_LINE_BYTES as u64);
    file.seek(SeekFrom::Start(from))?;
    let mut end = Vec::new();
    file.take(length - from).read_to_end(&mut end)?;
    Ok(end.iter().rposition(|byte| *byte == b'\n').map_or(from, |at| from + at as u64 + 1))
}

/// Lines of a part of a file.
pub(crate) fn lines(path: &Path, from: u64, to: u64) -> io::Result<usize> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        file => file?,
    };
    file.seek(SeekFrom::Start(from))?;
    let (mut rest, mut chunk, mut count) = (file.take(to - from), vec![0; 1 << 16], 0);
    loop {
        match rest.read(&mut chunk)? {
            0 => return Ok(count),
            bytes => count += chunk[..bytes].iter().filter(|byte| **byte == b'\n').count(),
        }
    }
}
