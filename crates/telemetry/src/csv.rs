//! Metrics as comma-separated values.

use crate::each_scalar;
use crate::{MetricColumns, sink::Sink};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Writes columns as CSV: a header of keys, a line per row, nothing between commas where there is no number.
pub fn csv(out: &mut dyn Write, columns: &[(&str, &[f64])]) -> io::Result<()> {
    let names: Vec<String> = columns.iter().map(|(name, _)| quoted(name)).collect();
    writeln!(out, "{}", names.join(","))?;
    let rows = columns.iter().map(|(_, values)| values.len()).max().unwrap_or(0);
    let mut line = String::new();
    for row in 0..rows {
        line.clear();
        for (index, (_, values)) in columns.iter().enumerate() {
            if index > 0 {
                line.push(',');
            }
            push_number(&mut line, values.get(row).copied().unwrap_or(f64::NAN));
        }
        line.push('\n');
        out.write_all(line.as_bytes())?;
    }
    Ok(())
}

/// The shortest text that reads as the same number.
fn push_number(line: &mut String, value: f64) {
    let large = value.abs() >= 1e16 || (value != 0.0 && value.abs() < 1e-5);
    // Writing to a string does not fail.
    let _ = match value.is_finite() {
        false => Ok(()),
        true if large => fmt_write(line, format_args!("{value:e}")),
        true => fmt_write(line, format_args!("{value}")),
    };
}

fn fmt_write(line: &mut String, text: std::fmt::Arguments<'_>) -> std::fmt::Result {
    std::fmt::Write::write_fmt(line, text)
}

/// A name as a field: in quotes where it has a comma, a quote or a line break.
fn quoted(name: &str) -> String {
    if name.contains([',', '"', '\n', '\r']) { format!("\"{}\"", name.replace('"', "\"\"")) } else { name.to_owned() }
}

/// A file of CSV that grows with `metrics.jsonl`. A key that comes later than others is a new last column, for which the file is
/// written anew.
pub(crate) struct CsvFile {
    path: PathBuf,
    metrics: PathBuf,
    keys: Vec<String>,
    file: Option<File>,
    line: String,
    cells: Vec<f64>,
}

impl CsvFile {
    /// The file at `path`, with all that `metrics` has.
    pub(crate) fn open(path: PathBuf, metrics: PathBuf) -> io::Result<Self> {
        let mut file = Self { path, metrics, keys: Vec::new(), file: None, line: String::new(), cells: Vec::new() };
        file.rewrite()?;
        Ok(file)
    }

    /// Writes the whole file, so that it is either the old or the new one.
    fn rewrite(&mut self) -> io::Result<()> {
        let columns = match MetricColumns::open(&self.metrics) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => MetricColumns::default(),
            columns => columns?,
        };
        self.keys = columns.keys().map(str::to_owned).collect();
        self.file = None;
        if self.keys.is_empty() {
            return remove(&self.path);
        }
        let all: Vec<_> = columns.keys().filter_map(|key| Some((key, columns.get(key)?))).collect();
        let temporary = self.path.with_extension("csv.new");
        let mut out = BufWriter::new(File::create(&temporary)?);
        csv(&mut out, &all)?;
        out.flush()?;
        fs::rename(&temporary, &self.path)?;
        self.file = Some(OpenOptions::new().append(true).open(&self.path)?);
        Ok(())
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Sink for CsvFile {
    fn write(&mut self, line: &str) -> io::Result<()> {
        let Self { keys, cells, .. } = self;
        cells.clear();
        cells.resize(keys.len(), f64::NAN);
        let mut new = false;
        each_scalar(line, &mut |key, value| match keys.iter().position(|name| name == key) {
            Some(at) => cells[at] = value,
            None => new = true,
        })?;
        if new {
            return self.rewrite();
        }
        self.line.clear();
        for (index, cell) in self.cells.iter().enumerate() {
            if index > 0 {
                self.line.push(',');
            }
            push_number(&mut self.line, *cell);
        }
        self.line.push('\n');
        self.file.as_mut().map_or(Ok(()), |file| file.write_all(self.line.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_reads_as_what_it_was() {
        let values = [0.0, -0.0, 3.0, 0.1, 1e-7, 1.0000000000000002e-4, 5e300, 9007199254740993.0, -2.5, f64::NAN];
        let mut text = Vec::new();
        csv(&mut text, &[("a,b", &values), ("short", &[1.0])]).unwrap();
        let text = String::from_utf8(text).unwrap();
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some("\"a,b\",short"));
        for (line, value) in lines.zip(values) {
            let cell = line.split(',').next().unwrap();
            match value.is_nan() {
                true => assert_eq!(cell, ""),
                false => assert_eq!(cell.parse::<f64>().unwrap().to_bits(), value.to_bits(), "{cell}"),
            }
            assert!(cell.len() < 25, "{cell}");
        }
    }
}
