//! Tasks as files of JSON lines, and their texts as tokens.

use super::generation::GenerationTask;
use crate::{InferError, Result, RunTokenizer};
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};

/// The items of a task, from a file of JSON lines.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskFile {
    /// Its file name without the extension.
    pub name: String,
    path: PathBuf,
    pub(crate) items: Vec<TaskItem>,
}

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TaskItem {
    query: String,
    /// Choices, or the one completion.
    pub choices: Vec<String>,
    /// Index of the right choice; none where there is one text to complete with.
    pub gold: Option<usize>,
    delimiter: String,
    line: usize,
}

/// A line as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    query: String,
    choices: Option<Vec<String>>,
    gold: Option<usize>,
    target: Option<String>,
    delimiter: Option<String>,
}

/// A text whose end is scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// How many of them are read and not scored.
    pub context: usize,
}

/// The largest file of a task.
const MOST_BYTES: u64 = 1 << 30;

impl TaskFile {
    /// Reads a file; of its items the first `most`, where that is not 0.
    pub fn open(path: &Path, most: usize) -> Result<Self> {
        Self::of(path, &lines_of(&text_of(path)?), most)
    }

    pub(super) fn of(path: &Path, lines: &[(usize, &str)], most: usize) -> Result<Self> {
        if GenerationTask::is_one(lines) {
            let hint = "such tasks are scored when a run has ended, or on a checkpoint of it, not while it trains";
            return Err(wrong(path, 0, "its questions are answered by generation".into(), hint));
        }
        let most = if most == 0 { lines.len() } else { most };
        let items: Vec<TaskItem> =
            lines.iter().take(most).map(|(line, text)| TaskItem::of_line(path, *line, text)).collect::<Result<_>>()?;
        let kind = |item: &TaskItem| item.gold.is_some();
        let Some(first) = items.first().map(kind) else {
            return Err(wrong(path, 0, "it has no items".into(), FORMAT));
        };
        if let Some(other) = items.iter().find(|item| kind(item) != first) {
            let text = "it has `choices` and others of the file have a `target`, or the other way round";
            return Err(wrong(path, other.line, text.into(), "make two tasks of it"));
        }
        Ok(Self { name: name_of(path), path: path.to_owned(), items })
    }

    /// Opens several, whose names must differ.
    pub fn open_all(paths: &[PathBuf], most: usize) -> Result<Vec<Self>> {
        let files = paths.iter().map(|path| Self::open(path, most)).collect::<Result<Vec<_>, _>>()?;
        require_names(paths)?;
        Ok(files)
    }

    /// How many items it has.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether it has none; a file without any is refused.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Adds the texts of its items.
    pub fn requests(&self, tokenizer: &RunTokenizer, seq: usize, rows: &mut Vec<Request>) -> Result<()> {
        for item in &self.items {
            for choice in &item.choices {
                let (context, scored) = encoded(tokenizer, &item.query, &format!("{}{choice}", item.delimiter))?;
                if scored.is_empty() || scored.len() > seq {
                    let (place, answer) = (place(&self.path, item.line), choice.to_owned());
                    return Err(InferError::AnswerLength { place, answer, tokens: scored.len() });
                }
                // The last token is predicted and not read.
                let most = seq + 1 - scored.len();
                let context = &context[context.len().saturating_sub(most)..];
                rows.push(Request { tokens: [context, &scored].concat(), context: context.len() });
            }
        }
        Ok(())
    }
}

impl TaskItem {
    /// How many texts are scored for it.
    pub fn texts(&self) -> usize {
        self.choices.len()
    }

    fn of_line(path: &Path, line: usize, text: &str) -> Result<Self> {
        let read: Line = serde_json::from_str(text).map_err(|error| wrong(path, line, error.to_string(), FORMAT))?;
        let Line { query, choices, gold, target, delimiter } = read;
        let delimiter = delimiter.unwrap_or_else(|| " ".to_owned());
        let refuse = |text: &str| Err(wrong(path, line, text.to_owned(), FORMAT));
        let (choices, gold) = match (choices, gold, target) {
            (Some(choices), Some(gold), None) if choices.is_empty() || gold >= choices.len() => {
                return refuse(&format!("`gold` is {gold}, and there are {} choices, counted from 0", choices.len()));
            }
            (Some(choices), Some(gold), None) => (choices, Some(gold)),
            (None, None, Some(target)) => (vec![target], None),
            _ => return refuse("it has neither `choices` with `gold` nor a `target` alone"),
        };
        if choices.iter().any(String::is_empty) {
            return refuse("an answer is empty");
        }
        Ok(Self { query, choices, gold, delimiter, line })
    }
}

const FORMAT: &str = r#"a line is {"query": "…", "choices": ["…", "…"], "gold": 0} or {"query": "…", "target": "…"}"#;

/// The text of a task's file.
pub(super) fn text_of(path: &Path) -> Result<String> {
    let unread =
        |e: std::io::Error| wrong(path, 0, format!("it cannot be read: {e}"), "name a file of a task, in JSON lines");
    let bytes = fs::metadata(path).map_err(unread)?.len();
    if bytes > MOST_BYTES {
        return Err(wrong(path, 0, format!("it has {bytes} bytes"), "split it into several tasks"));
    }
    Ok(fs::read_to_string(path).map_err(unread)?.trim_start_matches('\u{feff}').to_owned())
}

/// Lines that are not empty, with their numbers.
pub(super) fn lines_of(text: &str) -> Vec<(usize, &str)> {
    text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(|(i, line)| (i + 1, line)).collect()
}

/// The name of a task: that of its file, without the extension.
pub(super) fn name_of(path: &Path) -> String {
    let name = path.file_stem().map_or("task".into(), |name| name.to_string_lossy().into_owned());
    name.replace('/', "_")
}

/// Refuses tasks of the same name.
pub(super) fn require_names(paths: &[PathBuf]) -> Result<()> {
    for (index, path) in paths.iter().enumerate() {
        let name = name_of(path);
        if paths[..index].iter().any(|other| name_of(other) == name) {
            let text = format!("another task is called `{name}` too");
            return Err(wrong(path, 0, text, "rename the file: a task has the name of its file"));
        }
    }
    Ok(())
}

pub(super) fn wrong(path: &Path, line: usize, text: String, hint: &str) -> InferError {
    InferError::Unusable { problem: format!("{}: {text}", place(path, line)), hint: hint.to_owned() }
}

fn place(path: &Path, line: usize) -> String {
    let line = if line == 0 { String::new() } else { format!(", line {line}") };
    format!("{}{line}", path.display())
}

/// The tokens of a context and of what follows it. Spaces at the end of the context belong to what follows, and the tokens of both
/// are those of the whole text, cut where the context's own tokens end. A context begins with
/// the BOS token, where there is one. Where there is no context, the text follows it, or else an EOS token.
fn encoded(tokenizer: &RunTokenizer, query: &str, answer: &str) -> Result<(Vec<u32>, Vec<u32>)> {
    if query.is_empty() {
        return Ok((vec![tokenizer.bos().unwrap_or(tokenizer.eos())], tokenizer.tokens(answer)?));
    }
    let context = tokenizer.encode_beginning(query.trim_end())?;
    let mut whole = tokenizer.encode_beginning(&format!("{query}{answer}"))?;
    let scored = whole.split_off(context.len().min(whole.len()));
    // The model reads at least one token.
    let context = if context.is_empty() { vec![tokenizer.eos()] } else { context };
    Ok((context, scored))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::Hint;

    fn file(text: &str) -> Result<TaskFile> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a task.jsonl");
        fs::write(&path, text).unwrap();
        TaskFile::open(&path, 0)
    }

    #[test]
    fn texts_are_cut_as_the_harness_cuts_them() {
        let tasks = file("{\"query\":\"ab \",\"choices\":[\"c\",\"de\"],\"gold\":1}\n\n{\"query\":\"\",\"choices\":[\"x\"],\"gold\":0,\"delimiter\":\"\"}").unwrap();
        let (mut rows, bytes) = (Vec::new(), RunTokenizer::from(lockstep_data::Tokenizer::bytes()));
        tasks.requests(&bytes, 5, &mut rows).unwrap();
        let eos = bytes.eos();
        let tokens = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
        assert_eq!(rows[0], Request { tokens: tokens("ab  c"), context: 2 });
        assert_eq!(rows[1], Request { tokens: tokens("ab  de"), context: 2 });
        assert_eq!(rows[2], Request { tokens: vec![eos, u32::from(b'x')], context: 1 });
        rows.clear();
        tasks.requests(&bytes, 4, &mut rows).unwrap();
        assert_eq!(rows[1], Request { tokens: tokens("b  de"), context: 1 });
        let error = tasks.requests(&bytes, 3, &mut rows).unwrap_err().with_hint();
        assert!(error.contains("a task.jsonl, line 1: the answer \"de\" has 4 tokens"), "{error}");
    }

    #[test]
    fn a_file_that_is_not_there_is_a_wrong_request_and_a_byte_order_mark_is_none_of_its_text() {
        let error = TaskFile::open(Path::new("/no/such.jsonl"), 0).map(|_| ()).unwrap_err();
        assert!(error.is_request(), "{error}");
        assert!(error.with_hint().contains("such.jsonl: it cannot be read: "), "{error}");
        assert_eq!(file("\u{feff}{\"query\":\"a\",\"target\":\"b\"}").unwrap().items.len(), 1);
    }

    #[test]
    fn lines_that_are_no_items_are_refused() {
        for (text, word) in [
            ("", "no items"),
            ("{\"prompt\":\"a\",\"answer\":\"b\"}", "its questions are answered by generation"),
            ("{}", "missing field `query`"),
            ("{\"query\":\"a\"}", "neither"),
            ("{\"query\":\"a\",\"choices\":[\"b\"],\"gold\":1}", "`gold` is 1, and there are 1 choices"),
            ("{\"query\":\"a\",\"choices\":[\"b\"],\"gold\":0,\"target\":\"c\"}", "neither"),
            ("{\"query\":\"a\",\"target\":\"\"}", "an answer is empty"),
            ("{\"query\":\"a\",\"target\":\"b\",\"answer\":3}", "unknown field `answer`"),
            (
                "{\"query\":\"a\",\"target\":\"b\"}\n{\"query\":\"a\",\"choices\":[\"b\"],\"gold\":0}",
                "line 2: it has `choices`",
            ),
            ("nonsense", "line 1"),
        ] {
            let error = file(text).unwrap_err().with_hint();
            assert!(error.contains(word) && error.contains("\nhint: "), "{error}");
        }
    }
}
