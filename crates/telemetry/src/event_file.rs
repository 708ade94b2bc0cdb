//! TensorBoard event files: TFRecords of `tensorflow.Event` messages.
//!
//! A record is the length of its data (8 bytes, little endian), a masked CRC-32C of these, the data, and a masked CRC-32C of the
//! data. Of the message (`tensorboard/compat/proto/event.proto`, `summary.proto`) only what scalars need is written.

use crate::each_scalar;
use crate::sink::Sink;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// A file that grows by one event per line of metrics. Tags are the keys of `metrics.jsonl`.
pub(crate) struct EventFile {
    file: File,
    summary: Vec<u8>,
    event: Vec<u8>,
    record: Vec<u8>,
}

/// How names of event files begin; TensorBoard looks for it, and reads the files of a folder in the order of their names.
const PREFIX: &str = "events.out.tfevents.";

// Fields of Event.
const WALL_TIME: u32 = 1;
const STEP: u32 = 2;
const FILE_VERSION: u32 = 3;
const SUMMARY: u32 = 5;
const SESSION_LOG: u32 = 7;
// Of Summary, and of Summary.Value.
const VALUE: u32 = 1;
const TAG: u32 = 1;
const SIMPLE_VALUE: u32 = 2;
/// Of SessionLog: `status`, and `START`.
const STATUS: u32 = 1;
const START: u64 = 1;

impl EventFile {
    /// A new file in a folder. Where the folder has others and the run goes on after `step`, readers drop what these say of later
    /// steps.
    pub(crate) fn create(folder: &Path, step: u64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let mut others: Vec<String> = Vec::new();
        for entry in fs::read_dir(folder)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            others.extend(name.strip_prefix(PREFIX).map(str::to_owned));
        }
        let last = others.iter().filter_map(|name| name.split('.').next()?.parse::<u64>().ok()).max();
        // After all others, even if the clock was set back.
        let second = (wall_time() as u64).max(last.unwrap_or(0));
        let path = folder.join(format!("{PREFIX}{second:010}.lockstep.{:06}", others.len()));
        let file = File::options().append(true).create_new(true).open(path)?;
        let mut new = Self { file, summary: Vec::new(), event: Vec::new(), record: Vec::new() };
        new.begin(0);
        bytes_field(&mut new.event, FILE_VERSION, b"brain.Event:2");
        new.end()?;
        if !others.is_empty() {
            new.begin(step + 1);
            let mut log = Vec::new();
            varint_field(&mut log, STATUS, START);
            bytes_field(&mut new.event, SESSION_LOG, &log);
            new.end()?;
        }
        Ok(new)
    }

    /// Starts an event.
    fn begin(&mut self, step: u64) {
        self.event.clear();
        varint(&mut self.event, u64::from(WALL_TIME << 3 | 1));
        self.event.extend_from_slice(&wall_time().to_le_bytes());
        varint_field(&mut self.event, STEP, step);
    }

    /// Writes it.
    fn end(&mut self) -> io::Result<()> {
        self.record.clear();
        frame(&mut self.record, &self.event);
        self.file.write_all(&self.record)
    }
}

impl Sink for EventFile {
    fn write(&mut self, line: &str) -> io::Result<()> {
        let Self { summary, record: value, .. } = self;
        summary.clear();
        let mut step = 0.0;
        each_scalar(line, &mut |key, number| {
            if key == "step" {
                step = number;
                return;
            }
            value.clear();
            bytes_field(value, TAG, key.as_bytes());
            varint(value, u64::from(SIMPLE_VALUE << 3 | 5));
            value.extend_from_slice(&(number as f32).to_le_bytes());
            bytes_field(summary, VALUE, value);
        })?;
        self.begin(step as u64);
        bytes_field(&mut self.event, SUMMARY, &self.summary);
        self.end()
    }
}

fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

fn varint(to: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        to.push(value as u8 | 0x80);
        value >>= 7;
    }
    to.push(value as u8);
}

fn varint_field(to: &mut Vec<u8>, field: u32, value: u64) {
    varint(to, u64::from(field << 3));
    varint(to, value);
}

fn bytes_field(to: &mut Vec<u8>, field: u32, bytes: &[u8]) {
    varint(to, u64::from(field << 3 | 2));
    varint(to, bytes.len() as u64);
    to.extend_from_slice(bytes);
}

/// Adds data as a record.
fn frame(to: &mut Vec<u8>, data: &[u8]) {
    let length = (data.len() as u64).to_le_bytes();
    to.extend_from_slice(&length);
    to.extend_from_slice(&masked(crc32c(&length)).to_le_bytes());
    to.extend_from_slice(data);
    to.extend_from_slice(&masked(crc32c(data)).to_le_bytes());
}

/// A checksum of data that may hold checksums.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0, |crc, byte| TABLE[usize::from(crc as u8 ^ byte)] ^ (crc >> 8))
}

/// CRC-32C (Castagnoli) of every byte.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, appendix B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    /// `tests/golden/events.bin` is what TensorBoard's own writer makes of this event: `tests/golden/events.py`.
    #[test]
    fn an_event_is_written_as_tensorboard_writes_it() {
        let golden = include_bytes!("../tests/golden/events.bin");
        let mut value = Vec::new();
        let mut summary = Vec::new();
        for (tag, number) in [("loss", 5.5f32), ("rank_busy_s/3", 1e-3), ("grad_norm", f32::NAN)] {
            value.clear();
            bytes_field(&mut value, TAG, tag.as_bytes());
            varint(&mut value, u64::from(SIMPLE_VALUE << 3 | 5));
            value.extend_from_slice(&number.to_le_bytes());
            bytes_field(&mut summary, VALUE, &value);
        }
        let event = |step: u64| {
            let mut event = Vec::new();
            varint(&mut event, u64::from(WALL_TIME << 3 | 1));
            event.extend_from_slice(&1_700_000_000.25f64.to_le_bytes());
            if step > 0 {
                varint_field(&mut event, STEP, step);
            }
            event
        };
        let mut all = Vec::new();
        let mut version = event(0);
        bytes_field(&mut version, FILE_VERSION, b"brain.Event:2");
        frame(&mut all, &version);
        let mut restart = event(301);
        bytes_field(&mut restart, SESSION_LOG, &[8, 1]);
        frame(&mut all, &restart);
        let mut scalars = event(1 << 40);
        bytes_field(&mut scalars, SUMMARY, &summary);
        frame(&mut all, &scalars);
        assert_eq!(all, golden);
    }
}
