//! Tokenising on all cores, with the results in the order of the text.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread::Scope;

use serde::Deserializer;
use serde::de::{self, IgnoredAny, MapAccess, Visitor};

use crate::chat::{Chat, Conversation, Turn};
use crate::cut;
use crate::holdout::Split;
use crate::scan::SourceFile;
use crate::source::{Content, Cursor, Fields, MAX_RECORD_BYTES, Unit};
use crate::stop::go_on;
use crate::{DataError, DataHint, DataSetting, Origin, Result, Tokenizer};

/// Units with about this much text are handed to a thread at once.
const BATCH_BYTES: usize = 256 << 10;
const BATCH_UNITS: usize = 1024;

/// The most text that is between reading and writing, unless a single unit is longer.
const IN_FLIGHT_BYTES: usize = 48 << 20;

/// A unit as tokens.
#[derive(Debug)]
pub(crate) struct Tokenised {
    /// As bytes of the tokenizer's width, with the BOS and EOS tokens where the document begins and ends.
    pub(crate) tokens: Vec<u8>,
    pub(crate) text_bytes: u64,
    /// Which tokens count in the loss: those of a prompt do not.
    pub(crate) turns: Vec<Turn>,
    pub(crate) split: Split,
    pub(crate) origin: Origin,
    pub(crate) begins: bool,
    pub(crate) after: Cursor,
    pub(crate) input_bytes: u64,
}

/// What the threads need to know.
#[derive(Clone, Copy)]
pub(crate) struct Work<'a> {
    pub(crate) files: &'a [SourceFile],
    pub(crate) fields: Fields<'a>,
    pub(crate) tokenizer: &'a Tokenizer,
    /// What makes text of records that are conversations.
    pub(crate) chat: Option<&'a Chat>,
    pub(crate) stop: &'a AtomicBool,
}

/// A batch and its number.
type Job = (u64, Vec<Unit>);

/// The results of a batch and its number.
type Done = (u64, Vec<Result<Tokenised>>);

/// Where the threads get their work from.
pub(crate) type Queue = Mutex<Option<Receiver<Job>>>;

/// Threads that tokenise batches of units.
pub(crate) struct Workers {
    jobs: Sender<Job>,
    done: Receiver<Done>,
    threads: usize,
    batch: Vec<Unit>,
    batch_bytes: usize,
    /// Text bytes of each batch that was sent and not taken back.
    in_flight: BTreeMap<u64, usize>,
    sent: u64,
    early: BTreeMap<u64, Vec<Result<Tokenised>>>,
}

impl Workers {
    /// Starts the threads, which end with the scope or when this is dropped.
    pub(crate) fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        threads: usize,
        queue: &'scope Queue,
        work: Work<'scope>,
    ) -> Self {
        let (jobs, waiting) = mpsc::channel();
        let (finished, done) = mpsc::channel();
        *lock(queue) = Some(waiting);
        for _ in 0..threads {
            let finished = finished.clone();
            scope.spawn(move || {
                while let Some((number, units)) = next_job(queue) {
                    let results = units.into_iter().map(|unit| tokenise(unit, work)).collect();
                    if finished.send((number, results)).is_err() {
                        break;
                    }
                }
            });
        }
        Workers {
            jobs,
            done,
            threads,
            batch: Vec::new(),
            batch_bytes: 0,
            in_flight: BTreeMap::new(),
            sent: 0,
            early: BTreeMap::new(),
        }
    }

    /// Whether more units may be added before results are taken.
    pub(crate) fn has_room(&self) -> bool {
        let bytes: usize = self.in_flight.values().sum();
        bytes + self.batch_bytes < IN_FLIGHT_BYTES && self.in_flight.len() < 4 * self.threads + 2
    }

    /// Adds the next unit.
    pub(crate) fn add(&mut self, unit: Unit) {
        self.batch_bytes += unit.content.len();
        self.batch.push(unit);
        if self.batch_bytes >= BATCH_BYTES || self.batch.len() >= BATCH_UNITS {
            self.flush();
        }
    }

    /// Sends what was added, though it is little.
    pub(crate) fn flush(&mut self) {
        let batch = std::mem::take(&mut self.batch);
        let bytes = std::mem::take(&mut self.batch_bytes);
        if !batch.is_empty() {
            // The queue outlives the sender, so this cannot fail.
            let _ = self.jobs.send((self.sent, batch));
            self.in_flight.insert(self.sent, bytes);
            self.sent += 1;
        }
    }

    /// The results of the oldest batch that was sent; none if all have been taken.
    pub(crate) fn take(&mut self) -> Option<Vec<Result<Tokenised>>> {
        let (&oldest, _) = self.in_flight.first_key_value()?;
        loop {
            if let Some(results) = self.early.remove(&oldest) {
                self.in_flight.remove(&oldest);
                return Some(results);
            }
            let (number, results) = self.done.recv().expect("a thread panicked outside of the tokenizer");
            self.early.insert(number, results);
        }
    }
}

/// One thread waits for the next batch with the queue locked, the others for the lock. A function of its own, so that the
/// lock is not held while the batch is worked on.
fn next_job(queue: &Queue) -> Option<Job> {
    lock(queue).as_ref()?.recv().ok()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn tokenise(unit: Unit, work: Work<'_>) -> Result<Tokenised> {
    // What waits when the work is interrupted is not worked on.
    go_on(work.stop)?;
    let Unit { content, context, split, origin, begins, ends, offset, after, input_bytes } = unit;
    let path = &work.files[origin.file as usize].path;
    let tokenizer = work.tokenizer;
    if let (Content::JsonLine(line), Some(chat)) = (&content, work.chat) {
        let line = std::str::from_utf8(line).map_err(|error| not_utf8(path, origin, offset, &error))?;
        let refuse = |(problem, hint)| DataError::record(path, origin.record, problem, hint);
        let conversation = Conversation::parse(line, work.fields.text).map_err(refuse)?;
        let (mut tokens, mut turns, mut text_bytes) = (Vec::new(), Turn::alone(0), 0);
        // As with text, one without messages leaves no trace.
        if !conversation.is_empty() {
            let rendered = chat.render(&conversation).map_err(refuse)?;
            let (ids, counted) = rendered.encode(tokenizer)?;
            tokenizer.width().append(&ids, &mut tokens);
            (turns, text_bytes) = (counted, rendered.text.len() as u64);
        }
        return Ok(Tokenised { tokens, text_bytes, turns, split, origin, begins, after, input_bytes });
    }
    let (mut tokens, mut prompt) = (Vec::new(), 0);
    if let Some(bos) = tokenizer.bos().filter(|_| begins) {
        tokenizer.width().append(&[bos], &mut tokens);
    }
    // A prompt is tokenised on its own, as it will be when the model is asked to go on.
    let mut completion = |before: &str, text: &str, tokens: &mut Vec<u8>| -> Result<usize> {
        tokenizer.encode("", before, tokens, work.stop)?;
        // A BOS token stands before the prompt; where there is none, it is predicted like the text.
        prompt = if before.is_empty() { 0 } else { (tokens.len() / tokenizer.width() as usize) as u64 };
        tokenizer.encode("", text, tokens, work.stop)?;
        Ok(before.len() + text.len())
    };
    let text_bytes = match content {
        Content::Text(bytes) if tokenizer.is_bytes() => {
            tokens = bytes;
            tokens.len()
        }
        Content::Text(bytes) => {
            let text = std::str::from_utf8(&bytes).map_err(|error| not_utf8(path, origin, offset, &error))?;
            tokenizer.encode(cut::characters(&context), text, &mut tokens, work.stop)?;
            text.len()
        }
        Content::JsonLine(line) => {
            let line = std::str::from_utf8(&line).map_err(|error| not_utf8(path, origin, offset, &error))?;
            let [before, text] = texts_of(line, work.fields)
                .map_err(|(problem, hint)| DataError::record(path, origin.record, problem, hint))?;
            completion(&before, &text, &mut tokens)?
        }
        Content::Completion { prompt, text } => {
            let utf8 = |bytes| std::str::from_utf8(bytes).map_err(|error| not_utf8(path, origin, offset, &error));
            completion(utf8(&prompt)?, utf8(&text)?, &mut tokens)?
        }
    };
    // A document without text leaves no trace, not even an EOS token.
    if begins && ends && text_bytes == 0 {
        tokens.clear();
    } else if ends {
        tokenizer.width().append(&[tokenizer.eos()], &mut tokens);
    }
    let text_bytes = text_bytes as u64;
    let turns = Turn::alone(prompt);
    Ok(Tokenised { tokens, text_bytes, turns, split, origin, begins, after, input_bytes })
}

fn not_utf8(path: &std::path::Path, origin: Origin, offset: u64, error: &std::str::Utf8Error) -> DataError {
    let at = error.valid_up_to();
    match origin.record {
        0 => DataError::source(
            path,
            format!("byte {} is not UTF-8 text", offset + at as u64),
            DataHint::of("save the file as UTF-8, leave it out, or use {} = \"bytes\"", DataSetting::Tokenizer),
        ),
        record => DataError::record(path, record, format!("byte {at} is not UTF-8 text"), "save the file as UTF-8"),
    }
}

/// The strings in the fields of a JSON object, prompt and text; empty where a field is null or not asked for. The problem
/// and a hint where it has none.
fn texts_of<'a>(line: &'a str, fields: Fields<'_>) -> Result<[Cow<'a, str>; 2], (String, DataHint)> {
    const HINT: DataHint =
        DataHint::of("every line is a JSON object; {} names the field with the text", DataSetting::TextField);
    const PROMPT_HINT: DataHint =
        DataHint::of("{} names the field with the prompt; null or \"\" stands for no prompt", DataSetting::PromptField);
    let mut json = serde_json::Deserializer::from_str(line);
    let found = json.deserialize_map(Wanted(fields)).and_then(|found| json.end().map(|()| found));
    let field = fields.text;
    match found {
        Ok(Found { text: None, .. }) => Err((format!("the object has no field {field:?}"), HINT)),
        Ok(Found { text: Some(text), prompt }) => {
            let prompt = match (prompt, fields.prompt) {
                (Some(prompt), _) => prompt,
                (None, None) => Cow::Borrowed(""),
                (None, Some(field)) => return Err((format!("the object has no field {field:?}"), PROMPT_HINT)),
            };
            match prompt.len().max(text.len()) <= MAX_RECORD_BYTES {
                true => Ok([prompt, text]),
                false => {
                    Err((format!("a text longer than {} MiB", MAX_RECORD_BYTES >> 20), "divide the document".into()))
                }
            }
        }
        Err(error) => {
            // The library names the line of the text it was given, which is always the first.
            let text = error.to_string();
            let what = text.split(" at line ").next().unwrap_or_default();
            let what: String = what.chars().filter(|c| !c.is_control()).take(200).collect();
            Err((format!("not a JSON object with text in {field:?}: {what} (column {})", error.column()), HINT))
        }
    }
}

/// Finds the fields that are read without keeping the others.
struct Wanted<'f>(Fields<'f>);

/// The fields that were there.
#[derive(Default)]
struct Found<'a> {
    text: Option<Cow<'a, str>>,
    prompt: Option<Cow<'a, str>>,
}

impl<'de> Visitor<'de> for Wanted<'_> {
    type Value = Found<'de>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = Found::default();
        while let Some(Text(key)) = map.next_key()? {
            let slot = if key == self.0.text {
                &mut found.text
            } else if self.0.prompt == Some(&*key) {
                &mut found.prompt
            } else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            *slot = Some(map.next_value::<Option<Text>>()?.map_or(Cow::Borrowed(""), |text| text.0));
        }
        Ok(found)
    }
}

/// A string that is borrowed where it has no escapes.
struct Text<'a>(Cow<'a, str>);

impl<'de> serde::Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Strings;
        impl<'de> Visitor<'de> for Strings {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(Strings)
    }
}
