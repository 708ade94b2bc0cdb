//! Parquet files.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use parquet::basic::{Compression, Type as Physical};
use parquet::column::reader::ColumnReader;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::pages::Pages;
use super::{Content, Cursor, Fields, Input, MAX_RECORD_BYTES, Unit, record};
use crate::guard::caught;
use crate::holdout::HoldOut;
use crate::scan::SourceFile;
use crate::stop::go_on;
use crate::{DataError, DataHint, DataSetting, Result};

/// Rows that are decoded at a time.
const BATCH_ROWS: usize = 64;

/// Reads the columns of strings that are asked for. A row without a value is an empty document, or has no prompt.
pub(super) struct Rows {
    reader: SerializedFileReader<Pages>,
    text: Column,
    prompt: Option<Column>,
    rows: u64,
}

impl Rows {
    pub(super) fn open(file: &SourceFile, fields: Fields<'_>, at: Cursor, stop: &AtomicBool) -> Result<Self> {
        let (reader, rows) = open_file(file)?;
        let hint = DataHint::of("name the column with the text in {}", DataSetting::TextField);
        let text = Column::find(file, &reader, fields.text, hint)?;
        let hint = DataHint::of("name the column with the prompt in {}", DataSetting::PromptField);
        let prompt = fields.prompt.map(|field| Column::find(file, &reader, field, hint)).transpose()?;
        let mut this = Rows { reader, text, prompt, rows };
        for column in [Some(&mut this.text), this.prompt.as_mut()].into_iter().flatten() {
            let mut left;
            (column.next_group, left) = skip_groups(&this.reader, at.records);
            while left > 0 {
                go_on(stop)?;
                left = column.skip_rows(&this.reader, left).map_err(|cause| damaged(file, &cause))?;
            }
        }
        Ok(this)
    }

    pub(super) fn next(&mut self, file: &SourceFile, holdout: &HoldOut, at: Cursor) -> Result<Option<Unit>> {
        let row = at.records + 1;
        let refuse = |cause: String| damaged_row(file, row, &cause);
        let text = self.text.next(&self.reader).map_err(refuse)?;
        let prompt = self.prompt.as_mut().map(|column| column.next(&self.reader)).transpose().map_err(refuse)?;
        let content = match (text, prompt) {
            (Some(text), None) => Content::Text(text),
            (Some(text), Some(Some(prompt))) => Content::Completion { prompt, text },
            (None, _) | (_, Some(None)) if at.records != self.rows => {
                return Err(damaged(file, &format!("it has {} rows where it says {}", at.records, self.rows)));
            }
            (None, _) | (_, Some(None)) => return Ok(None),
        };
        if content.len() > MAX_RECORD_BYTES {
            let problem = format!("a text longer than {} MiB", MAX_RECORD_BYTES >> 20);
            return Err(DataError::record(&file.path, row, problem, "divide the document"));
        }
        let share = row as f64 / self.rows.max(1) as f64;
        let input_bytes = ((file.bytes as f64 * share) as u64).min(file.bytes);
        Ok(Some(record(content, holdout, at, 0, input_bytes)))
    }
}

/// One column of strings.
struct Column {
    index: usize,
    optional: bool,
    /// The row group that is next, and the open one's column.
    next_group: usize,
    open: Option<ColumnReader>,
    ready: VecDeque<ByteArray>,
}

impl Column {
    /// The column of a name; `hint` says where the name comes from.
    fn find(file: &SourceFile, reader: &SerializedFileReader<Pages>, field: &str, hint: DataHint) -> Result<Self> {
        let refuse = |problem: String| DataError::source(&file.path, problem, hint);
        let metadata = reader.metadata();
        let schema = metadata.file_metadata().schema_descr();
        let names: Vec<String> = schema.columns().iter().map(|column| column.path().string()).collect();
        let Some(index) = names.iter().position(|name| name == field) else {
            let shown: String = names.join(", ").chars().filter(|c| !c.is_control()).take(200).collect();
            return Err(refuse(format!("it has no column {field:?}; its columns are {shown}")));
        };
        let column = schema.column(index);
        if column.physical_type() != Physical::BYTE_ARRAY || column.max_rep_level() > 0 {
            return Err(refuse(format!("its column {field:?} does not hold strings")));
        }
        refuse_codecs(file, reader, |name| name == field)?;
        let optional = column.max_def_level() > 0;
        Ok(Column { index, optional, next_group: 0, open: None, ready: VecDeque::new() })
    }

    /// The text of the next row; none after the last.
    fn next(&mut self, reader: &SerializedFileReader<Pages>) -> Result<Option<Vec<u8>>, String> {
        while self.ready.is_empty() {
            if !self.fill(reader)? {
                return Ok(None);
            }
        }
        let text = |value: ByteArray| if value.is_empty() { Vec::new() } else { value.data().to_vec() };
        Ok(self.ready.pop_front().map(text))
    }

    /// Decodes some rows more, or opens the next row group; false after the last.
    fn fill(&mut self, reader: &SerializedFileReader<Pages>) -> Result<bool, String> {
        if self.open.is_none() {
            if self.next_group == reader.num_row_groups() {
                return Ok(false);
            }
            let group = self.next_group;
            let column = guarded(|| reader.get_row_group(group)?.get_column_reader(self.index))?;
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

    /// Leaves out some of the next `rows` rows; gives how many are left.
    fn skip_rows(&mut self, reader: &SerializedFileReader<Pages>, rows: u64) -> Result<u64, String> {
        if self.ready.is_empty() && !self.fill(reader)? {
            return Err("it has fewer rows than before".into());
        }
        let here = self.ready.len().min(usize::try_from(rows).unwrap_or(usize::MAX));
        self.ready.drain(..here);
        Ok(rows - here as u64)
    }
}

/// Opens a file; gives the number of its rows too.
pub(super) fn open_file(file: &SourceFile) -> Result<(SerializedFileReader<Pages>, u64)> {
    let opened = Input::open(&file.path).map_err(|cause| DataError::unreadable(&file.path, cause))?;
    let (pages, begun) = Pages::new(opened);
    let reader = guarded(|| SerializedFileReader::new(pages)).map_err(|cause| damaged(file, &cause))?;
    begun.store(true, Ordering::Relaxed);
    let rows = reader.metadata().file_metadata().num_rows().max(0) as u64;
    Ok((reader, rows))
}

/// Leaves out whole row groups without reading them; gives the first that is read, and how many of `rows` rows are still to leave out.
pub(super) fn skip_groups(reader: &SerializedFileReader<Pages>, mut rows: u64) -> (usize, u64) {
    let groups = reader.metadata().row_groups();
    for (index, group) in groups.iter().enumerate() {
        let here = group.num_rows().max(0) as u64;
        if rows < here {
            return (index, rows);
        }
        rows -= here;
    }
    (groups.len(), rows)
}

/// Refuses columns that are compressed in a way that cannot be read.
pub(super) fn refuse_codecs(
    file: &SourceFile,
    reader: &SerializedFileReader<Pages>,
    is_read: impl Fn(&str) -> bool,
) -> Result<()> {
    let chunks = reader.metadata().row_groups().iter().flat_map(|group| group.columns());
    for chunk in chunks {
        let name = chunk.column_path().string();
        if let Some(codec) = unreadable_codec(chunk.compression()).filter(|_| is_read(&name)) {
            let problem = format!("its column {name:?} is compressed with {codec}, which is not supported");
            let hint = "write the file again with zstd, snappy, gzip, brotli, lz4 or no compression";
            return Err(DataError::source(&file.path, problem, hint));
        }
    }
    Ok(())
}

/// The name of a codec that the library was built without.
fn unreadable_codec(codec: Compression) -> Option<&'static str> {
    match codec {
        Compression::UNCOMPRESSED
        | Compression::SNAPPY
        | Compression::GZIP(_)
        | Compression::ZSTD(_)
        | Compression::BROTLI(_)
        | Compression::LZ4
        | Compression::LZ4_RAW => None,
        Compression::LZO => Some("lzo"),
    }
}

/// What the library says, even where a file made up to hurt makes it panic.
pub(super) fn guarded<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    match caught(read) {
        Some(result) => result.map_err(|error| error.to_string()),
        None => Err("the library that reads it gave up".into()),
    }
}

pub(super) fn damaged(file: &SourceFile, cause: &str) -> DataError {
    DataError::source(&file.path, format!("not a whole Parquet file: {}", shown(cause)), "get the file again")
}

pub(super) fn damaged_row(file: &SourceFile, row: u64, cause: &str) -> DataError {
    let problem = format!("the data are damaged at or after this row: {}", shown(cause));
    DataError::record(&file.path, row, problem, "get the file again")
}

fn shown(cause: &str) -> String {
    cause.chars().filter(|c| !c.is_control()).take(200).collect()
}
