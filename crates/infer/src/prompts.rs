//! Prompts in a file of JSON lines, and what becomes of each in another, in the same order.
//!
//! Lines are written as soon as all before them are. A run that was stopped goes on after the last whole line: what a prompt becomes depends on the
//! prompt, its line and the settings alone, so the file is the same in the end. The settings stand in a file beside it, and others are refused.

use crate::{InferError, Result, RunTokenizer, Sampling, Stop, TextBatch, TextRequest, TextStream, Written};
use lockstep_data::{Chat, Conversation};
use lockstep_host::ProcessGroup;
use lockstep_ir::counter;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// What is asked of every prompt of a file.
pub struct PromptOptions<'a> {
    /// Most tokens to write.
    pub max_tokens: usize,
    /// How tokens are drawn; a prompt's seed is made of this one, its line and the number of the sample.
    pub sampling: Sampling,
    /// Texts for each prompt.
    pub samples: usize,
    /// Texts end before any of these.
    pub stop: Vec<String>,
    /// Whether log-probabilities of tokens are written.
    pub logprobs: bool,
    /// Tokens that end a text.
    pub ends: Vec<u32>,
    /// Prompts are questions, written by a chat template.
    pub chat: Option<&'a Chat>,
    /// What the system says before questions.
    pub system: Option<String>,
    /// What else the texts depend on, such as the checkpoint.
    pub model: Value,
}

/// How far a file of prompts is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PromptProgress {
    /// Texts that are written, and texts in all.
    pub texts: (usize, usize),
    /// Texts that are written one token at a time now.
    pub running: usize,
    /// The share of the cache that they have.
    pub filled: f64,
    /// Tokens that were written.
    pub tokens: u64,
}

/// What became of a file of prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptSummary {
    /// Texts in all.
    pub texts: usize,
    /// Texts that were there before.
    pub before: usize,
    /// Texts for which there is an error.
    pub errors: usize,
}

/// The largest file of prompts.
const MOST_BYTES: u64 = 1 << 32;

const FORMAT: &str = "a line is {\"prompt\": \"…\"}, or {\"messages\": […]} with a chat template";

/// Continues every prompt of a file, and writes what becomes of them to another. Of several processes that share the model all do the same, and the first
/// writes.
pub fn write_prompts(
    batch: &mut TextBatch,
    tokenizer: &RunTokenizer,
    (prompts, out): (&Path, &Path),
    options: &PromptOptions,
    group: ProcessGroup,
    show: &mut dyn FnMut(&PromptProgress),
) -> Result<PromptSummary> {
    options.sampling.check()?;
    let text = read(prompts)?;
    let lines: Vec<(usize, &str)> =
        text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(|(i, line)| (i + 1, line)).collect();
    if lines.is_empty() {
        return Err(wrong(prompts, "it has no prompts", FORMAT));
    }
    let total = lines.len() * options.samples;
    let settings = settings(options, &text);
    group.agree("prompts and settings", &Value::Object(settings.clone()).to_string())?;
    let mut to = None;
    let before = group.told("texts", || {
        let (file, before) = resume(out, &settings, total)?;
        to = Some(file);
        Ok::<_, InferError>(before)
    })?;
    let unwritten =
        |e: std::io::Error| wrong(out, &format!("it cannot be written: {e}"), "free some space, then start again");
    let mut errors = 0;
    let mut next = before;
    let mut submitted = before;
    let mut ready: BTreeMap<usize, String> = BTreeMap::new();
    let mut under_way: HashMap<u64, Under> = HashMap::new();
    while next < total {
        // As many wait as make sure that no slot is empty; a file of any length takes little memory.
        while submitted < total && batch.texts().1 < batch.cache().shape.slots {
            let (number, line) = lines[submitted / options.samples];
            let sample = submitted % options.samples;
            let of_line = Line::of(line, number, sample);
            let submit = of_line.as_ref().map_err(Clone::clone).and_then(|of_line| {
                let request = of_line.request(tokenizer, options).map_err(|error| error.to_string())?;
                batch.submit(submitted as u64, request).map_err(|error| error.to_string())
            });
            match (submit, of_line) {
                (Ok(()), Ok(line)) => {
                    let under = Under { line, stream: TextStream::new(tokenizer.clone()), text: String::new() };
                    under_way.insert(submitted as u64, under);
                }
                (Err(error), _) | (_, Err(error)) => {
                    errors += 1;
                    let line = json!({"line": number, "sample": sample, "error": error});
                    ready.insert(submitted, line.to_string());
                }
            }
            submitted += 1;
        }
        let ended = batch.step(&mut |id, token| {
            let stops = under_way.get_mut(&id).is_some_and(|under| under.hear(token, &options.stop));
            if stops { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        for (id, written) in ended {
            let Some(under) = under_way.remove(&id) else { continue };
            errors += usize::from(written.is_err());
            ready.insert(id as usize, under.end(written, options));
        }
        let mut lines = String::new();
        while let Some(line) = ready.remove(&next) {
            lines += &line;
            lines.push('\n');
            next += 1;
        }
        if let Some(to) = &mut to {
            to.write_all(lines.as_bytes()).map_err(unwritten)?;
        }
        let (running, tokens) = (batch.texts().0, batch.counts().written);
        show(&PromptProgress { texts: (next, total), running, filled: batch.filled(), tokens });
    }
    Ok(PromptSummary { texts: total, before, errors })
}

fn wrong(path: &Path, problem: &str, hint: &str) -> InferError {
    InferError::Unusable { problem: format!("{}: {problem}", path.display()), hint: hint.to_owned() }
}

fn read(path: &Path) -> Result<String> {
    let hint = "name a file of prompts, in JSON lines";
    let unread = |e: std::io::Error| wrong(path, &format!("it cannot be read: {e}"), hint);
    let about = std::fs::metadata(path).map_err(unread)?;
    if !about.is_file() {
        return Err(wrong(path, "it is no file", hint));
    }
    if about.len() > MOST_BYTES {
        return Err(wrong(path, "it is larger than 4 GiB", "split it into several files"));
    }
    let text = String::from_utf8(std::fs::read(path).map_err(unread)?);
    let text = text.map_err(|_| wrong(path, "it is not UTF-8 text", "save the prompts as UTF-8"))?;
    Ok(text.trim_start_matches('\u{feff}').to_owned())
}

/// All that the texts of a file depend on.
fn settings(options: &PromptOptions, prompts: &str) -> Map<String, Value> {
    let PromptOptions { max_tokens, sampling, samples, stop, logprobs, ends, chat, system, model } = options;
    let all = json!({
        "prompts": format!("{:016x}", counter::key(prompts.len() as u64, prompts)),
        "max_tokens": max_tokens,
        "sampling": sampling,
        "samples": samples,
        "stop": stop,
        "logprobs": logprobs,
        "ends": ends,
        "chat": chat.is_some(),
        "system": system,
        "model": model,
    });
    if let Value::Object(all) = all { all } else { Map::new() }
}

/// The file beside another that has the settings of its texts.
fn beside(out: &Path) -> PathBuf {
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(".settings.json");
    out.with_file_name(name)
}

/// Opens the file of texts after its last whole line, and says how many there are.
fn resume(out: &Path, settings: &Map<String, Value>, total: usize) -> Result<(File, usize)> {
    let other = "name another file for the texts, or remove this one and the .settings.json beside it";
    let io = |e: std::io::Error| {
        wrong(out, &format!("it cannot be written: {e}"), "name a file in a folder that can be written")
    };
    let beside = beside(out);
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(out).map_err(io)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(io)?;
    if bytes.is_empty() {
        let text = format!("{:#}\n", Value::Object(settings.clone()));
        std::fs::write(&beside, text).map_err(io)?;
        return Ok((file, 0));
    }
    let before = std::fs::read_to_string(&beside).ok().and_then(|text| serde_json::from_str::<Value>(&text).ok());
    let Some(before) = before else {
        return Err(wrong(out, "it is there, and not the result of an earlier run with this file of prompts", other));
    };
    if let Some((key, now)) = settings.iter().find(|(key, now)| before.get(key.as_str()) != Some(now)) {
        let then = before.get(key).cloned().unwrap_or_default();
        return Err(wrong(out, &format!("its texts were written with {key} {then}, now it is {now}"), other));
    }
    let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    let lines = bytes[..whole].iter().filter(|b| **b == b'\n').count();
    if lines > total {
        return Err(wrong(out, "it has more lines than there are texts", other));
    }
    file.set_len(whole as u64).map_err(io)?;
    file.seek(std::io::SeekFrom::Start(whole as u64)).map_err(io)?;
    Ok((file, lines))
}

/// A line of prompts, and the number of the sample.
struct Line {
    number: usize,
    sample: usize,
    id: Option<Value>,
    /// A text or a conversation.
    prompt: Result<String, Conversation>,
}

impl Line {
    /// Reads a line, or says what is wrong with it.
    fn of(line: &str, number: usize, sample: usize) -> Result<Self, String> {
        let parsed: Value =
            serde_json::from_str(line).map_err(|error| format!("not a JSON object: {error}; {FORMAT}"))?;
        let prompt = match (&parsed["prompt"], &parsed["messages"]) {
            (Value::String(text), Value::Null) => Ok(text.clone()),
            (Value::Null, Value::Array(_)) => Err(Conversation::from_json(line)?),
            (Value::Null, Value::Null) => {
                return Err(format!("neither \"prompt\" nor \"messages\" is there: {FORMAT}"));
            }
            _ => return Err(format!("\"prompt\" is a text, \"messages\" a list, and one of them is given: {FORMAT}")),
        };
        let id = parsed.get("id").cloned();
        Ok(Self { number, sample, id, prompt })
    }

    fn request(&self, tokenizer: &RunTokenizer, options: &PromptOptions) -> Result<TextRequest> {
        let prompt = match (&self.prompt, options.chat) {
            (Ok(text), None) => {
                let tokens = tokenizer.tokens(text)?;
                // A BOS token alone is no prompt.
                if tokens.is_empty() { tokens } else { tokenizer.encode_beginning(text)? }
            }
            (Ok(text), Some(chat)) => chat.prompt(tokenizer, &Conversation::asking(options.system.as_deref(), text))?,
            (Err(conversation), Some(chat)) => chat.prompt(tokenizer, conversation)?,
            (Err(_), None) => {
                return Err(InferError::Unusable {
                    problem: "the line has messages, and no chat template is asked for".into(),
                    hint: "ask for the chat template".into(),
                });
            }
        };
        let sampling = Sampling { seed: seed(options.sampling.seed, self.number, self.sample), ..options.sampling };
        let PromptOptions { max_tokens, ends, logprobs, .. } = options;
        Ok(TextRequest { prompt, max_tokens: *max_tokens, sampling, ends: ends.clone(), logprobs: *logprobs })
    }
}

/// The seed of a sample of the prompt in a line.
fn seed(seed: u64, line: usize, sample: usize) -> u64 {
    counter::bits(counter::key(seed, "prompts"), (line as u64) << 20 | sample as u64)
}

/// A text that is written.
struct Under {
    line: Line,
    stream: TextStream,
    text: String,
}

impl Under {
    /// Takes the next token, and says whether the text has come to a stop.
    fn hear(&mut self, token: u32, stop: &[String]) -> bool {
        let known = self.text.len();
        self.text += &self.stream.push(token);
        first_stop(&self.text, known, stop).is_some()
    }

    /// The line that is written.
    fn end(mut self, written: Result<Written>, options: &PromptOptions) -> String {
        let Line { number, sample, id, prompt } = self.line;
        let mut line = json!({"line": number, "sample": sample});
        if let Some(id) = id {
            line["id"] = id;
        }
        match written {
            Err(error) => line["error"] = error.to_string().into(),
            Ok(Written { tokens, logprobs, stop }) => {
                self.text += &self.stream.finish();
                let cut = first_stop(&self.text, 0, &options.stop);
                self.text.truncate(cut.unwrap_or(self.text.len()));
                if let Ok(prompt) = prompt {
                    line["prompt"] = prompt.into();
                }
                line["text"] = self.text.into();
                line["tokens"] = tokens.len().into();
                line["stop"] = if stop == Stop::Listener { json!("stop_string") } else { json!(stop) };
                if options.logprobs {
                    line["logprobs"] = logprobs.into();
                }
            }
        }
        line.to_string()
    }
}

/// Where the first text that ends another begins, of those that end after byte `known`.
pub(crate) fn first_stop(text: &str, known: usize, stop: &[String]) -> Option<usize> {
    let of = |s: &String| {
        let mut from = known.saturating_sub(s.len());
        while !text.is_char_boundary(from) {
            from -= 1;
        }
        text[from..].find(s.as_str()).map(|at| from + at)
    };
    stop.iter().filter(|s| !s.is_empty()).filter_map(of).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_stops_at_the_first_of_the_stops_wherever_pieces_were_cut() {
        let stop = ["\n\n".to_owned(), "é!".to_owned()];
        assert_eq!(first_stop("ab\n\nc", 0, &stop), Some(2));
        assert_eq!(first_stop("ab\n\nc", 3, &stop), Some(2));
        assert_eq!(first_stop("né! \n\n", 2, &stop), Some(1));
        assert_eq!(first_stop("né", 0, &stop), None);
        assert_eq!(first_stop("anything", 0, &["".to_owned()]), None);
    }

    #[test]
    fn seeds_differ_by_line_and_sample() {
        let all = [seed(0, 1, 0), seed(0, 1, 1), seed(0, 2, 0), seed(1, 1, 0)];
        assert!((0..4).all(|i| (0..i).all(|j| all[i] != all[j])));
    }
}
