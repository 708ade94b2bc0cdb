//! Conversations in Parquet files: columns of lists of messages, or of JSON that holds such lists.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::{ReaderIter, TreeBuilder};
use parquet::record::{Field, Row};
use parquet::schema::types::{SchemaDescPtr, SchemaDescriptor, Type};

use super::pages::Pages;
use super::rows::{damaged, damaged_row, guarded, open_file, refuse_codecs, skip_groups};
use super::{Content, Cursor, Fields, MAX_RECORD_BYTES, Unit, record};
use crate::chat::{BESIDE, CONVERSATIONS, MESSAGES};
use crate::holdout::HoldOut;
use crate::scan::SourceFile;
use crate::stop::go_on;
use crate::{DataError, DataHint, DataSetting, Result};

/// Deeper values are refused.
const MOST_DEPTH: usize = 64;

/// Rows that are made at a time.
const BATCH_ROWS: usize = 64;

/// Reads rows as JSON objects of the columns that are asked for.
pub(super) struct Nested {
    reader: SerializedFileReader<Pages>,
    schema: SchemaDescPtr,
    /// The row group that is next, and the open one's rows.
    next_group: usize,
    open: Option<ReaderIter>,
    ready: VecDeque<String>,
    rows: u64,
}

impl Nested {
    pub(super) fn open(file: &SourceFile, fields: Fields<'_>, at: Cursor, stop: &AtomicBool) -> Result<Self> {
        let (reader, rows) = open_file(file)?;
        let schema = columns(file, &reader, fields.text)?;
        let names: Vec<String> = schema.columns().iter().map(|column| column.path().string()).collect();
        refuse_codecs(file, &reader, |name| names.iter().any(|wanted| wanted == name))?;
        let (next_group, mut left) = skip_groups(&reader, at.records);
        let mut this = Nested { reader, schema, next_group, open: None, ready: VecDeque::new(), rows };
        while left > 0 {
            go_on(stop)?;
            if this.ready.is_empty() && !this.fill().map_err(|cause| damaged(file, &cause))? {
                return Err(damaged(file, "it has fewer rows than before"));
            }
            let here = this.ready.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            this.ready.drain(..here);
            left -= here as u64;
        }
        Ok(this)
    }

    pub(super) fn next(&mut self, file: &SourceFile, holdout: &HoldOut, at: Cursor) -> Result<Option<Unit>> {
        let row = at.records + 1;
        while self.ready.is_empty() {
            if !self.fill().map_err(|cause| damaged_row(file, row, &cause))? {
                return match at.records == self.rows {
                    true => Ok(None),
                    false => Err(damaged(file, &format!("it has {} rows where it says {}", at.records, self.rows))),
                };
            }
        }
        let line = self.ready.pop_front().unwrap_or_default();
        if line.len() > MAX_RECORD_BYTES {
            let problem = format!("a conversation longer than {} MiB", MAX_RECORD_BYTES >> 20);
            return Err(DataError::record(&file.path, row, problem, "divide the conversation"));
        }
        let share = row as f64 / self.rows.max(1) as f64;
        let input_bytes = ((file.bytes as f64 * share) as u64).min(file.bytes);
        Ok(Some(record(Content::JsonLine(line.into_bytes()), holdout, at, 0, input_bytes)))
    }

    /// Makes some rows more, or opens the next row group; false after the last.
    fn fill(&mut self) -> Result<bool, String> {
        let (reader, schema, group) = (&self.reader, &self.schema, self.next_group);
        let open = match &mut self.open {
            Some(open) => open,
            None if group == reader.num_row_groups() => return Ok(false),
            closed => {
                let rows = guarded(|| {
                    let group = reader.get_row_group(group)?;
                    TreeBuilder::new().with_batch_size(BATCH_ROWS).as_iter(schema.clone(), &*group)
                })?;
                self.next_group += 1;
                closed.insert(rows)
            }
        };
        for _ in 0..BATCH_ROWS {
            match guarded(|| open.next().transpose())? {
                Some(row) => self.ready.push_back(json(row)?),
                None => {
                    self.open = None;
                    break;
                }
            }
        }
        Ok(true)
    }
}

/// The columns that are read: the messages, under the name that is asked for or ShareGPT's, and what stands beside them.
fn columns(file: &SourceFile, reader: &SerializedFileReader<Pages>, field: &str) -> Result<SchemaDescPtr> {
    let root = reader.metadata().file_metadata().schema_descr().root_schema_ptr();
    let all = root.get_fields();
    let find = |name: &str| all.iter().find(|column| column.name() == name).cloned();
    let Some(messages) = find(field).or_else(|| find(CONVERSATIONS).filter(|_| field == MESSAGES)) else {
        let names: Vec<&str> = all.iter().map(|column| column.name()).collect();
        let shown: String = names.join(", ").chars().filter(|c| !c.is_control()).take(200).collect();
        let problem = format!("it has no column {field:?}; its columns are {shown}");
        let hint = DataHint::of("name the column with the messages in {}", DataSetting::TextField);
        return Err(DataError::source(&file.path, problem, hint));
    };
    let fields = [Some(messages)].into_iter().chain(BESIDE.map(find)).flatten().collect();
    let built = guarded(|| Type::group_type_builder(root.name()).with_fields(fields).build());
    let built = built.map_err(|cause| damaged(file, &cause))?;
    Ok(Arc::new(SchemaDescriptor::new(Arc::new(built))))
}

/// A row as a JSON object.
fn json(row: Row) -> Result<String, String> {
    let mut text = String::new();
    write(&Field::Group(row), 0, &mut text)?;
    Ok(text)
}

fn write(field: &Field, depth: usize, text: &mut String) -> Result<(), String> {
    if depth > MOST_DEPTH {
        return Err("a value is too deep".to_owned());
    }
    match field {
        Field::Null => text.push_str("null"),
        Field::Bool(value) => text.push_str(if *value { "true" } else { "false" }),
        Field::Str(value) => string(value, text)?,
        Field::Bytes(value) => match value.as_utf8() {
            Ok(value) => string(value, text)?,
            Err(_) => return Err("bytes that are not UTF-8 text".to_owned()),
        },
        Field::Float(value) if !value.is_finite() => text.push_str("null"),
        Field::Double(value) if !value.is_finite() => text.push_str("null"),
        Field::Float(value) => text.push_str(&format!("{:?}", f64::from(*value))),
        Field::Double(value) => text.push_str(&format!("{value:?}")),
        Field::Group(row) => {
            let pairs = row.get_column_iter().map(|(name, value)| (Field::Str(name.clone()), value.clone()));
            object(pairs, depth, text)?;
        }
        Field::MapInternal(map) => object(map.entries().iter().cloned(), depth, text)?,
        Field::ListInternal(list) => {
            text.push('[');
            for (at, item) in list.elements().iter().enumerate() {
                if at > 0 {
                    text.push(',');
                }
                write(item, depth + 1, text)?;
            }
            text.push(']');
        }
        // Numbers and dates, as the library shows them.
        Field::Byte(_)
        | Field::Short(_)
        | Field::Int(_)
        | Field::Long(_)
        | Field::UByte(_)
        | Field::UShort(_)
        | Field::UInt(_)
        | Field::ULong(_) => text.push_str(&field.to_string()),
        other => string(&other.to_string(), text)?,
    }
    Ok(())
}

fn object(pairs: impl Iterator<Item = (Field, Field)>, depth: usize, text: &mut String) -> Result<(), String> {
    text.push('{');
    for (at, (name, value)) in pairs.enumerate() {
        if at > 0 {
            text.push(',');
        }
        match &name {
            Field::Str(name) => string(name, text)?,
            name => string(&name.to_string(), text)?,
        }
        text.push(':');
        write(&value, depth + 1, text)?;
    }
    text.push('}');
    Ok(())
}

fn string(value: &str, text: &mut String) -> Result<(), String> {
    text.push_str(&serde_json::to_string(value).map_err(|error| error.to_string())?);
    Ok(())
}
