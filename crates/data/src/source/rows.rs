//! Parquet files.

use std::collections::VecDeque;
use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};

use parquet::basic::Type as Physical;
use parquet::column::reader::ColumnReader;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::pages::Pages;
use super::{Content, Cursor, MAX_RECORD_BYTES, Unit, record};
use crate::DataError;
use crate::guard::caught;
use crate::holdout::HoldOut;
use crate::prepare::go_on;
use crate::scan::SourceFile;

/// Rows that are decoded at a time.
const BATCH_ROWS: usize = 64;

/// Reads one column of strings. A row without a value is an empty document.
pub(super) struct Rows {
    reader: SerializedFileReader<Pages>,
    column: usize,
    optional: bool,
    /// The row group that is next, and the open one's column.
    next_group: usize,
    open: Option<ColumnReader>,
    ready: VecDeque<ByteArray>,
    rows: u64,
}

impl Rows {
    pub(super) fn open(file: &SourceFile, field: &str, at: Cursor, stop: &AtomicBool) -> Result<Self, DataError> {
        let opened = File::open(&file.path).map_err(|cause| DataError::unreadable(&file.path, cause))?;
        let (pages, begun) = Pages::new(opened);
        let reader = guarded(|| SerializedFileReader::new(pages)).map_err(|cause| damaged(file, &cause))?;
        begun.store(true, Ordering::Relaxed);
        let (column, optional, rows) = find_column(file, &reader, field)?;
        let mut this = Rows { reader, column, optional, next_group: 0, open: None, ready: VecDeque::new(), rows };
        let mut left = this.skip_groups(at.records);
        while left > 0 {
            go_on(stop)?;
            left = this.skip_rows(left).map_err(|cause| damaged(file, &cause))?;
        }
        Ok(this)
    }

    pub(super) fn next(&mut self, file: &SourceFile, holdout: &HoldOut, at: Cursor) -> Result<Option<Unit>, DataError> {
        while self.ready.is_empty() {
            if !self.fill().map_err(|cause| damaged_row(file, at.records + 1, &cause))? {
                return match at.records == self.rows {
                    true => Ok(None),
                    false => Err(damaged(file, &format!("it has {} rows where it says {}", at.records, self.rows))),
                };
            }
        }
        let Some(value) = self.ready.pop_front() else { return Ok(None) };
        if value.len() > MAX_RECORD_BYTES {
            let problem = format!("a text longer than {} MiB", MAX_RECORD_BYTES >> 20);
            return Err(DataError::record(&file.path, at.records + 1, problem, "divide the document"));
        }
        let share = (at.records + 1) as f64 / self.rows.max(1) as f64;
        let input_bytes = ((file.bytes as f64 * share) as u64).min(file.bytes);
        let text = if value.is_empty() { Vec::new() } else { value.data().to_vec() };
        Ok(Some(record(Content::Text(text), holdout, at, 0, input_bytes)))
    }

    /// Decodes some rows more, or opens the next row group; false after the last.
    fn fill(&mut self) -> Result<bool, String> {
        if self.open.is_none() {
            if self.next_group == self.reader.num_row_groups() {
                return Ok(false);
            }
            let group = self.next_group;
            let column = guarded(|| self.reader.get_row_group(group)?.get_column_reader(self.column))?;
            self.next_group += 1;
            self.open = Some(column);
        }
        let Some(ColumnReader::ByteArrayColumnReader(column)) = &mut self.open else {
            return Err("the column changes its type".into());
        };
        let (mut levels, mut values) = (Vec::new(), Vec::new());
        let optional = self.optional;
        let (rows, ..) =
            guarded(|| column.read_records(BATCH_ROWS, optional.then_some(&mut levels), None, &mut values))?;
        if rows == 0 {
            self.open = None;
        }
        let mut values = values.into_iter();
        for row in 0..rows {
            let present = !optional || levels.get(row).is_some_and(|&level| level > 0);
            let value = if present { values.next() } else { Some(ByteArray::from(Vec::new())) };
            self.ready.push_back(value.ok_or("a value is missing")?);
        }
        Ok(true)
    }

    /// Leaves out whole row groups without reading them; gives how many of `rows` rows are still to leave out.
    fn skip_groups(&mut self, mut rows: u64) -> u64 {
        while self.next_group < self.reader.num_row_groups() {
            let group = self.reader.metadata().row_group(self.next_group).num_rows().max(0) as u64;
            if rows < group {
                break;
            }
            rows -= group;
            self.next_group += 1;
        }
        rows
    }

    /// Leaves out some of the next `rows` rows; gives how many are left.
    fn skip_rows(&mut self, rows: u64) -> Result<u64, String> {
        if self.ready.is_empty() && !self.fill()? {
            return Err("it has fewer rows than before".into());
        }
        let here = self.ready.len().min(usize::try_from(rows).unwrap_or(usize::MAX));
        self.ready.drain(..here);
        Ok(rows - here as u64)
    }
}

/// The column's index, whether rows may have none, and the number of rows.
fn find_column(
    file: &SourceFile,
    reader: &SerializedFileReader<Pages>,
    field: &str,
) -> Result<(usize, bool, u64), DataError> {
    let refuse =
        |problem: String| DataError::source(&file.path, problem, "name the column with the text in data.text_field");
    let metadata = reader.metadata().file_metadata();
    let schema = metadata.schema_descr();
    let names: Vec<String> = schema.columns().iter().map(|column| column.path().string()).collect();
    let Some(index) = names.iter().position(|name| name == field) else {
        let shown: String = names.join(", ").chars().filter(|c| !c.is_control()).take(200).collect();
        return Err(refuse(format!("it has no column {field:?}; its columns are {shown}")));
    };
    let column = schema.column(index);
    if column.physical_type() != Physical::BYTE_ARRAY || column.max_rep_level() > 0 {
        return Err(refuse(format!("its column {field:?} does not hold strings")));
    }
    Ok((index, column.max_def_level() > 0, metadata.num_rows().max(0) as u64))
}

/// What the library says, even where a file made up to hurt makes it panic.
fn guarded<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    match caught(read) {
        Some(result) => result.map_err(|error| error.to_string()),
        None => Err("the library that reads it gave up".into()),
    }
}

fn damaged(file: &SourceFile, cause: &str) -> DataError {
    DataError::source(&file.path, format!("not a whole Parquet file: {}", shown(cause)), "get the file again")
}

fn damaged_row(file: &SourceFile, row: u64, cause: &str) -> DataError {
    let problem = format!("the data are damaged at or after this row: {}", shown(cause));
    DataError::record(&file.path, row, problem, "get the file again")
}

fn shown(cause: &str) -> String {
    cause.chars().filter(|c| !c.is_control()).take(200).collect()
}
