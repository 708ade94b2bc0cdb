//! Generation tasks: questions that a model answers by greedy decoding, scored by exact match.
//!
//! A file of JSON lines. Its first line may declare how answers are written and read; every other line is a question with the answers that are right.

use super::read::{lines_of, name_of, text_of, wrong};
use crate::prompts::first_stop;
use crate::{
    EvaluateProgress, EvaluationShape, Result, RunTokenizer, Sampling, Stop, TextBatch, TextRequest, TextStream,
    Trained,
};
use lockstep_host::Devices;
use lockstep_plan::{GenerationShape, check_positions};
use regex::Regex;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Questions to be answered, from a file of JSON lines.
#[derive(Clone, Debug)]
pub struct GenerationTask {
    /// Its file name without the extension.
    pub name: String,
    path: PathBuf,
    declared: Declaration,
    /// The line of the declaration; 0 where there is none.
    line: usize,
    pattern: Option<Regex>,
    questions: Vec<Question>,
}

/// The first line, where it is no question.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Declaration {
    pattern: Option<String>,
    max_tokens: Option<usize>,
    #[serde(default)]
    stop: Vec<String>,
}

/// A question as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    prompt: String,
    answer: Option<String>,
    answers: Option<Vec<String>>,
}

#[derive(Clone, Debug)]
struct Question {
    prompt: String,
    answers: Vec<String>,
    line: usize,
}

/// What became of a question.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GenerationItem {
    /// Its line in the file.
    pub line: usize,
    /// What the model wrote, up to a stop string.
    pub text: String,
    /// What was read as the answer; none where the pattern is not in the text.
    pub extracted: Option<String>,
    /// The answers that are right.
    pub answers: Vec<String>,
    /// Whether it is one of them.
    pub exact_match: bool,
    /// Tokens that were written.
    pub tokens: usize,
    /// Why there are no more.
    #[serde(serialize_with = "stop_word")]
    pub stop: Stop,
}

/// A task and its questions.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationReport {
    /// Its name.
    pub name: String,
    /// Each question, in the order of the file.
    pub items: Vec<GenerationItem>,
}

/// How a model answers tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationEvaluation {
    /// Each task, in the order in which they were given.
    pub tasks: Vec<GenerationReport>,
    /// Most tokens of a prompt and its answer.
    pub seq: usize,
    /// Tokens that the model read, and tokens that it wrote.
    pub tokens: (u64, u64),
    /// Bytes allocated.
    pub arena_bytes: u64,
}

/// Most tokens of an answer, where a task does not say.
const MAX_TOKENS: usize = 256;

/// Questions that are answered at once.
const AT_ONCE: usize = 64;

const FORMAT: &str = r#"a line is {"prompt": "…", "answer": "…"} or {"prompt": "…", "answers": ["…", "…"]}; the first may be {"pattern": "…", "max_tokens": 64, "stop": ["…"]}"#;

impl GenerationTask {
    /// Whether a file is one, by the keys of its first line.
    pub(super) fn is_one(lines: &[(usize, &str)]) -> bool {
        let first = lines.first().and_then(|(_, line)| serde_json::from_str::<Value>(line).ok());
        let has = |key: &str| first.as_ref().is_some_and(|line| line.get(key).is_some());
        !has("query") && ["prompt", "answer", "answers", "pattern", "max_tokens", "stop"].into_iter().any(has)
    }

    /// Reads a file; of its questions the first `most`, where that is not 0.
    pub fn open(path: &Path, most: usize) -> Result<Self> {
        Self::of(path, &lines_of(&text_of(path)?), most)
    }

    pub(super) fn of(path: &Path, lines: &[(usize, &str)], most: usize) -> Result<Self> {
        let (declared, line, rest) = match lines.split_first() {
            Some(((number, first), rest)) if !Self::is_question(first) => {
                let declared: Declaration =
                    serde_json::from_str(first).map_err(|error| wrong(path, *number, error.to_string(), FORMAT))?;
                (declared, *number, rest)
            }
            _ => (Declaration::default(), 0, lines),
        };
        let refuse = |text: String, hint: &str| Err(wrong(path, line, text, hint));
        if declared.max_tokens == Some(0) {
            return refuse("`max_tokens` is 0".into(), "let answers have at least one token");
        }
        if declared.stop.iter().any(String::is_empty) {
            return refuse("a text of `stop` is empty".into(), "name texts that end an answer, such as \"\\n\"");
        }
        let pattern = match declared.pattern.as_deref().map(Regex::new).transpose() {
            Ok(pattern) => pattern,
            Err(error) => {
                // Its first lines show the place in the pattern.
                let error = error.to_string().lines().last().unwrap_or_default().to_owned();
                let text = format!("`pattern` is no regular expression: {}", error.trim_start_matches("error: "));
                return refuse(
                    text,
                    "write it as the Rust crate regex reads it; in JSON, a backslash is written twice",
                );
            }
        };
        let rest = if most > 0 { &rest[..rest.len().min(most)] } else { rest };
        let questions =
            rest.iter().map(|(line, text)| Question::of_line(path, *line, text)).collect::<Result<Vec<_>>>()?;
        if questions.is_empty() {
            return Err(wrong(path, 0, "it has no questions".into(), FORMAT));
        }
        Ok(Self { name: name_of(path), path: path.to_owned(), declared, line, pattern, questions })
    }

    /// Lines with mistakes are questions, which are then named.
    fn is_question(line: &str) -> bool {
        let line: Option<Value> = serde_json::from_str(line).ok();
        let keys = ["prompt", "answer", "answers"];
        line.is_none_or(|line| !line.is_object() || keys.into_iter().any(|key| line.get(key).is_some()))
    }

    /// How many questions it has.
    pub fn len(&self) -> usize {
        self.questions.len()
    }

    /// Whether it has none; a file without any is refused.
    pub fn is_empty(&self) -> bool {
        self.questions.is_empty()
    }

    fn max_tokens(&self) -> usize {
        self.declared.max_tokens.unwrap_or(MAX_TOKENS)
    }

    /// The tokens of each prompt, cut from the left so that `seq` have room for the answer too.
    fn prompts(&self, tokenizer: &RunTokenizer, seq: usize) -> Result<Vec<Vec<u32>>> {
        let Some(room) = seq.checked_sub(self.max_tokens()).filter(|room| *room > 0) else {
            let text = format!("answers of {} tokens leave no room for a prompt in {seq} tokens", self.max_tokens());
            let hint = "declare fewer `max_tokens` in its first line, or evaluate with longer sequences";
            return Err(wrong(&self.path, self.line, text, hint));
        };
        let of = |question: &Question| {
            let tokens = tokenizer.encode_beginning(&question.prompt)?;
            let tokens = if tokens.is_empty() { vec![tokenizer.eos()] } else { tokens };
            Ok(tokens[tokens.len().saturating_sub(room)..].to_vec())
        };
        self.questions.iter().map(of).collect()
    }

    /// The answer in a text: what the first group of the pattern has matched, or all of the pattern where there is no group.
    fn extracted(&self, text: &str) -> Option<String> {
        let Some(pattern) = &self.pattern else { return Some(text.trim().to_owned()) };
        let found = pattern.captures(text)?;
        Some(found.get(1).or(found.get(0))?.as_str().trim().to_owned())
    }

    fn item(&self, question: &Question, mut text: String, tokens: usize, stop: Stop) -> GenerationItem {
        let cut = first_stop(&text, 0, &self.declared.stop);
        text.truncate(cut.unwrap_or(text.len()));
        let extracted = self.extracted(&text);
        let is_right = |found: &String| question.answers.iter().any(|answer| answer.trim() == found);
        let exact_match = extracted.as_ref().is_some_and(is_right);
        GenerationItem {
            line: question.line,
            text,
            extracted,
            answers: question.answers.clone(),
            exact_match,
            tokens,
            stop,
        }
    }
}

impl Question {
    fn of_line(path: &Path, line: usize, text: &str) -> Result<Self> {
        let read: Line = serde_json::from_str(text).map_err(|error| wrong(path, line, error.to_string(), FORMAT))?;
        let refuse = |text: &str| Err(wrong(path, line, text.to_owned(), FORMAT));
        let answers = match (read.answer, read.answers) {
            (Some(answer), None) => vec![answer],
            (None, Some(answers)) if !answers.is_empty() => answers,
            (None, Some(_)) => return refuse("`answers` is empty"),
            (None, None) => return refuse("it has no `answer`"),
            (Some(_), Some(_)) => return refuse("it has `answer` and `answers`"),
        };
        if answers.iter().any(|answer| answer.trim().is_empty()) {
            return refuse("an answer is empty");
        }
        Ok(Self { prompt: read.prompt, answers, line })
    }
}

impl GenerationReport {
    /// The share of questions whose answer is right.
    pub fn exact_match(&self) -> f64 {
        self.items.iter().filter(|item| item.exact_match).count() as f64 / self.items.len().max(1) as f64
    }

    /// Its standard error, as of a sample of all that could be asked; 0 of one question.
    pub fn standard_error(&self) -> f64 {
        super::score::standard_error(self.exact_match(), self.items.len())
    }

    /// Questions in whose text the pattern is not.
    pub fn unmatched(&self) -> usize {
        self.items.iter().filter(|item| item.extracted.is_none()).count()
    }
}

/// Lets a model answer tasks, many questions at once. Prompts are cut from the left so that they and their answers have `seq` tokens (by default those of
/// its training).
pub fn evaluate_generation(
    devices: &Devices,
    trained: &Trained,
    tasks: &[GenerationTask],
    shape: EvaluationShape,
    show: &mut dyn FnMut(EvaluateProgress<'_>),
) -> Result<GenerationEvaluation> {
    let (config, tokenizer) = (&trained.config, trained.tokenizer()?);
    let most = shape.seq_of(config);
    check_positions(config, most)?;
    let ends = trained.end_tokens(&tokenizer)?;
    let mut asked: Vec<(&GenerationTask, &Question, Vec<u32>)> = Vec::new();
    for task in tasks {
        let prompts = task.prompts(&tokenizer, most)?;
        asked.extend(task.questions.iter().zip(prompts).map(|(question, prompt)| (task, question, prompt)));
    }
    let context = asked.iter().map(|(task, _, prompt)| prompt.len() + task.max_tokens()).max().unwrap_or(1);
    let known = Some(tokenizer.vocabulary() as usize);
    let of_cache = GenerationShape { context, texts: asked.len().clamp(1, AT_ONCE), cache: None, known, tp: shape.tp };
    let mut batch = TextBatch::new(devices, config, of_cache, trained.weights())?;
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    for (id, (task, _, prompt)) in asked.iter().enumerate() {
        let (prompt, max_tokens, ends) = (prompt.clone(), task.max_tokens(), ends.clone());
        batch.submit(id as u64, TextRequest { prompt, max_tokens, sampling, ends, logprobs: false })?;
    }
    let mut texts: HashMap<u64, (TextStream, String)> = HashMap::new();
    let mut items: Vec<Option<GenerationItem>> = vec![None; asked.len()];
    let (mut done, total) = (0, asked.len() as u64);
    while !batch.is_done() {
        let ended = batch.step(&mut |id, token| {
            let new = || (TextStream::new(tokenizer.clone()), String::new());
            let (stream, text) = texts.entry(id).or_insert_with(new);
            let known = text.len();
            *text += &stream.push(token);
            match first_stop(text, known, &asked[id as usize].0.declared.stop) {
                Some(_) => ControlFlow::Break(()),
                None => ControlFlow::Continue(()),
            }
        })?;
        for (id, written) in ended {
            let written = written?;
            let text = texts.remove(&id).map(|(mut stream, text)| text + &stream.finish()).unwrap_or_default();
            let (task, question, _) = &asked[id as usize];
            items[id as usize] = Some(task.item(question, text, written.tokens.len(), written.stop));
            done += 1;
        }
        show(EvaluateProgress::Answering { done, total });
    }
    let mut items = items.into_iter().flatten();
    let report = |task: &GenerationTask| GenerationReport {
        name: task.name.clone(),
        items: items.by_ref().take(task.len()).collect(),
    };
    Ok(GenerationEvaluation {
        tasks: tasks.iter().map(report).collect(),
        seq: most,
        tokens: (batch.counts().read, batch.counts().written),
        arena_bytes: batch.arena_bytes(),
    })
}

/// The word for why a text ended: what listens ends it at a stop string.
fn stop_word<S: Serializer>(stop: &Stop, to: S) -> Result<S::Ok, S::Error> {
    if *stop == Stop::Listener { to.serialize_str("stop_string") } else { stop.serialize(to) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::Hint;

    fn task(text: &str) -> Result<GenerationTask> {
        GenerationTask::of(Path::new("sums.jsonl"), &lines_of(text), 0)
    }

    #[test]
    fn an_answer_is_the_first_group_of_the_pattern_or_all_of_it_or_the_whole_text() {
        let question = "\n{\"prompt\":\"a\",\"answers\":[\"42\",\" 43 \"]}";
        let match_of = |declared: &str, text: &str| {
            let task = task(&format!("{declared}{question}")).unwrap();
            let item = task.item(&task.questions[0], text.to_owned(), 3, Stop::Eos);
            (item.extracted, item.exact_match)
        };
        let found = |text: &str, right: bool| (Some(text.to_owned()), right);
        let group = r#"{"pattern":"is (\\d+)"}"#;
        assert_eq!(match_of(group, "it is 42, or is 7"), found("42", true));
        assert_eq!(match_of(group, "it is 4"), found("4", false));
        assert_eq!(match_of(group, "42"), (None, false));
        assert_eq!(match_of(r#"{"pattern":"\\d+"}"#, "it is 43."), found("43", true));
        assert_eq!(match_of("", " 42\n"), found("42", true));
        assert_eq!(match_of(r#"{"stop":[","]}"#, "42, and so on"), found("42", true));
        // What a pattern leaves out of a match is no answer of its own.
        assert_eq!(match_of(r#"{"pattern":"x(\\d)?"}"#, "x"), found("x", false));
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said_with_its_line() {
        let good = "{\"prompt\":\"a\",\"answer\":\"b\"}\n";
        for (text, expected) in [
            (String::new(), "sums.jsonl: it has no questions"),
            ("{\"max_tokens\":4}\n".into(), "sums.jsonl: it has no questions"),
            (
                format!("\n{{\"pattern\":\"(\"}}\n{good}"),
                "sums.jsonl, line 2: `pattern` is no regular expression: unclosed group",
            ),
            (format!("{good}\n{{\"prompt\":\"c\"}}\n"), "sums.jsonl, line 3: it has no `answer`"),
            (format!("{good}{{\"prompt\":\"c\",\"answers\":[]}}"), "sums.jsonl, line 2: `answers` is empty"),
            (format!("{good}{{\"prompt\":\"c\",\"answer\":\" \"}}"), "sums.jsonl, line 2: an answer is empty"),
            (format!("{good}{{\"answer\":\"c\"}}"), "sums.jsonl, line 2: missing field `prompt`"),
            (format!("{good}{{\"max_tokens\":3}}"), "sums.jsonl, line 2: unknown field `max_tokens`"),
            (format!("{good}nonsense"), "sums.jsonl, line 2: expected ident"),
            (format!("{{\"max_tokens\":0}}\n{good}"), "sums.jsonl, line 1: `max_tokens` is 0"),
            (format!("{{\"stop\":[\"\"]}}\n{good}"), "sums.jsonl, line 1: a text of `stop` is empty"),
            (format!("{{\"stops\":[]}}\n{good}"), "sums.jsonl, line 1: unknown field `stops`"),
        ] {
            let error = task(&text).unwrap_err().with_hint();
            assert!(error.starts_with(expected) && error.contains("\nhint: "), "{error}");
        }
    }

    #[test]
    fn prompts_lose_their_beginning_where_an_answer_needs_room() {
        let task =
            task("{\"max_tokens\":3}\n{\"prompt\":\"abcdef\",\"answer\":\"x\"}\n{\"prompt\":\"\",\"answer\":\"x\"}")
                .unwrap();
        let bytes = RunTokenizer::from(lockstep_data::Tokenizer::bytes());
        let text: Vec<u32> = "cdef".bytes().map(u32::from).collect();
        assert_eq!(task.prompts(&bytes, 7).unwrap(), [text, vec![bytes.eos()]]);
        let error = task.prompts(&bytes, 3).unwrap_err().with_hint();
        assert!(error.starts_with("sums.jsonl, line 1: answers of 3 tokens leave no room"), "{error}");
    }
}
