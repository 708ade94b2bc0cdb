//! Conversations as tokens, by the chat template of a tokenizer.
//!
//! ```text
//! conversation (a record) → template (Jinja) → marks, turns (what wrote which part of the text) → encode (tokens and loss mask)
//! ```
//!
//! The text and its tokens are those of `apply_chat_template` in transformers. Special tokens are special where the template writes
//! them; in a message they are text. What counts in the loss is known exactly or refused: blocks of `{% generation %}` say it
//! ([`marks`]), or else the template's loop over messages does ([`turns`]). No part of it is found by comparing texts of
//! conversations that are shorter by a message: a template may write an earlier message otherwise once there is a later one.

mod conversation;
mod encode;
mod generation;
mod marks;
mod python;
mod template;
mod turns;

pub use conversation::Conversation;
pub(crate) use conversation::{BESIDE, CONVERSATIONS, MESSAGES, Problem};
pub(crate) use encode::Turn;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::{DataError, DataHint, DataSetting, Result, Tokenizer};
use marks::{Marked, Spellings};
use template::{Template, Way};

/// How conversations become text, and what of it counts in the loss.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatSpec {
    /// The file that the template came from, for messages.
    pub path: PathBuf,
    /// The template, in Jinja.
    pub template: String,
    /// The template of conversations with tools, where they have one of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_template: Option<String>,
    /// Special tokens by the names that templates know them by: `bos_token`, `eos_token` …
    pub tokens: BTreeMap<String, String>,
    /// What counts.
    pub train_on: TrainOn,
    /// What `strftime_now` says, in days from 1 January 1970; only where the template asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub day: Option<i64>,
}

/// What counts in the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainOn {
    /// Every turn of the assistant.
    Assistant,
    /// The last turn of the assistant.
    Last,
    /// Everything.
    All,
}

impl ChatSpec {
    /// A template that was read from `path`, as of today.
    pub fn new(path: &Path, template: String, tokens: BTreeMap<String, String>, train_on: TrainOn) -> Self {
        let spec = ChatSpec { path: path.to_owned(), template, tool_template: None, tokens, train_on, day: None };
        spec.as_of_today()
    }

    /// The same with a template of its own for conversations with tools.
    pub fn with_tool_template(self, tool_template: Option<String>) -> Self {
        ChatSpec { tool_template, ..self }.as_of_today()
    }

    /// The same with the date of today, where a template asks for one.
    pub fn as_of_today(self) -> Self {
        let today = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs() / 86_400) as i64;
        let asks = |template: &String| template.contains("strftime_now");
        let day = (asks(&self.template) || self.tool_template.as_ref().is_some_and(asks)).then(today);
        ChatSpec { day, ..self }
    }

    /// The same, wherever and whenever it was read.
    pub(crate) fn anywhere(&self) -> Self {
        ChatSpec { path: PathBuf::new(), day: None, ..self.clone() }
    }

    /// Whether some tokens do not count.
    pub fn is_masked(&self) -> bool {
        self.train_on != TrainOn::All
    }
}

/// Makes tokens of conversations.
pub struct Chat {
    path: PathBuf,
    template: Template,
    /// The template of conversations with tools, where they have one of their own.
    tool_template: Option<Template>,
    train_on: TrainOn,
    spellings: Spellings,
}

/// A conversation as text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Rendered {
    pub(crate) text: String,
    /// The parts that count in the loss; none where all does.
    trained: Option<Vec<Range<usize>>>,
    /// Special tokens that are text.
    spelled: Vec<Range<usize>>,
}

/// An answer that no template writes by itself.
const PROBE: &str = "lockstep-answer-4711";

const TELL: DataHint = DataHint::of(
    "put {% generation %} … {% endgeneration %} around what the assistant writes in the template, as training templates have it, and name it \
     in {}",
    DataSetting::ChatTemplate,
);

impl Chat {
    /// Compiles the template for a tokenizer, which has the special tokens that keep turns apart.
    pub fn open(spec: &ChatSpec, tokenizer: &Tokenizer) -> Result<Self> {
        if tokenizer.is_bytes() {
            let problem = "bytes have no special tokens, which keep the turns of a chat apart";
            let hint = DataHint::of("name a tokenizer.json in {}", DataSetting::Tokenizer);
            return Err(DataError::template(&spec.path, problem, hint));
        }
        let compile = |text: &String| Template::compile(&spec.path, text, &spec.tokens, spec.day.unwrap_or(0));
        let special = tokenizer.special_tokens().into_iter().map(|(_, token)| token).collect();
        Ok(Chat {
            path: spec.path.clone(),
            template: compile(&spec.template)?,
            tool_template: spec.tool_template.as_ref().map(compile).transpose()?,
            train_on: spec.train_on,
            spellings: Spellings::new(special),
        })
    }

    /// The template of a conversation.
    fn template(&self, conversation: &Conversation) -> &Template {
        self.tool_template.as_ref().filter(|_| !conversation.tools().is_none()).unwrap_or(&self.template)
    }

    /// The tokens of a conversation up to where the assistant answers.
    pub fn prompt(&self, tokenizer: &Tokenizer, conversation: &Conversation) -> Result<Vec<u32>> {
        let template = self.template(conversation);
        let (text, _) = template.render(Way::Plain, conversation, true).map_err(|p| self.refused(p))?;
        let marked = self.marked(conversation, &text, false, true).map_err(|p| self.refused(p))?;
        let rendered = Rendered { text, trained: None, spelled: marked.map_or(Vec::new(), |marked| marked.spelled) };
        let (tokens, _) = rendered.encode(tokenizer)?;
        Ok(tokens)
    }

    /// The token that ends an answer, where one does: the last special token that a template writes for the assistant after its text.
    pub fn end_of_turn(&self, tokenizer: &Tokenizer) -> Result<Option<u32>> {
        let mut probe = Conversation::asking(None, "a");
        probe.say("assistant", PROBE);
        let Ok((text, log)) = self.template.render(Way::Plain, &probe, false) else { return Ok(None) };
        let Some(answer) = text.rfind(PROBE).map(|at| at..at + PROBE.len()) else { return Ok(None) };
        // What follows the last message is no part of its turn.
        let visits = log.visits();
        let turn = visits.iter().find(|visit| visit.bytes.start <= answer.start && visit.bytes.end >= answer.end);
        let turn_end = turn.map_or(text.len(), |visit| visit.bytes.end);
        let spans = tokenizer.spans(&text, true)?;
        // Some tokenizers have a line break among added tokens that are not special.
        let last = |end: usize| {
            let ends = |(token, bytes): &&(u32, Range<usize>)| {
                bytes.start >= answer.end && bytes.start < end && tokenizer.is_special(*token)
            };
            spans.iter().rev().find(ends).map(|(token, _)| *token)
        };
        Ok(last(turn_end).or_else(|| last(text.len())))
    }

    /// A conversation as text, with what counts in the loss.
    pub(crate) fn render(&self, conversation: &Conversation) -> Result<Rendered, Problem> {
        let train_on = self.train_on;
        let template = self.template(conversation);
        let (text, log) = template.render(Way::Plain, conversation, false)?;
        let marked = self.marked(conversation, &text, train_on != TrainOn::All, false)?;
        let (generated, spelled) = marked.map_or_else(Default::default, |marked| (marked.generated, marked.spelled));
        if train_on == TrainOn::All {
            return Ok(Rendered { text, trained: None, spelled });
        }
        let Some(last) = conversation.of_assistant().last() else {
            let hint = "leave the record out, or count all text with {} = \"all\"";
            let problem = "the assistant says nothing, so nothing counts in the loss";
            return Err((problem.to_owned(), DataHint::of(hint, DataSetting::TrainOn)));
        };
        let visits = log.visits();
        let outside = |what: &str| {
            (format!("the chat template has {{% generation %}}, and nothing of {what} is in such a block"), TELL)
        };
        let mut trained = match template.has_generation() {
            true if generated.is_empty() => return Err(outside("the conversation")),
            true => generated,
            false => self.turns(conversation, &text, &visits)?,
        };
        if train_on == TrainOn::Last {
            // A turn may have several blocks. Where the loop is ahead of its text, which of them are the turn's is not known.
            let from = match template.looks_ahead() {
                true => trained.last().map(|range| range.start),
                false => visits.iter().find(|visit| visit.message == last).map(|visit| visit.bytes.start),
            };
            trained.retain(|range| from.is_some_and(|from| range.start >= from));
            if trained.is_empty() {
                return Err(outside("the last message of the assistant"));
            }
        }
        Ok(Rendered { text, trained: Some(trained), spelled })
    }

    /// What marks say of a rendered conversation, of blocks of the assistant too where `blocks`; none where there is nothing to mark.
    fn marked(
        &self,
        conversation: &Conversation,
        text: &str,
        blocks: bool,
        generation_prompt: bool,
    ) -> Result<Option<Marked>, Problem> {
        let (template, mut texts) = (self.template(conversation), Vec::new());
        conversation.values().for_each(|value| marks::texts(value, &mut texts));
        let changed = conversation.changed(|value| self.spellings.mark(value, &texts));
        let spells = changed.is_some();
        if !(spells || blocks && template.has_generation()) {
            return Ok(None);
        }
        if texts.iter().any(|text| marks::has_mark(text)) {
            let problem = "it has one of the characters U+FDD0 to U+FDD2, which are no characters of a text";
            return Err((problem.to_owned(), "remove it".into()));
        }
        let changed = changed.unwrap_or_else(|| conversation.clone());
        let (marked, _) = template.render(Way::Marked, &changed, generation_prompt)?;
        match Marked::read(&marked, &self.spellings).filter(|marked| marked.text == text) {
            Some(marked) => Ok(Some(marked)),
            None if spells => {
                let problem = "a message spells a special token, and the chat template decides by that text: which special \
                               tokens are its own cannot be told";
                Err((
                    problem.to_owned(),
                    DataHint::of("read such text as special tokens with {}", DataSetting::SpecialTokens),
                ))
            }
            None => Err(("the chat template changes the text of its {% generation %} blocks".to_owned(), TELL)),
        }
    }

    /// The turns of the assistant, each from after the generation prompt up to what comes next.
    fn turns(
        &self,
        conversation: &Conversation,
        text: &str,
        visits: &[turns::Visit],
    ) -> Result<Vec<Range<usize>>, Problem> {
        let unknown = |reason: String| {
            (format!("what the assistant writes cannot be told from the rest in this chat template: {reason}"), TELL)
        };
        let template = self.template(conversation);
        if template.looks_ahead() {
            return Err(unknown("it reads the next message (`nextitem`) while it writes one".to_owned()));
        }
        if visits.windows(2).any(|pair| pair[0].bytes.end > pair[1].bytes.start) {
            return Err(unknown("its loops over messages write inside of one another".to_owned()));
        }
        let first = conversation.of_assistant().next().unwrap_or(0);
        let asked = conversation.up_to(first);
        let (before, _) = template.render(Way::Plain, &asked, false)?;
        let (with_prompt, _) = template.render(Way::Plain, &asked, true)?;
        let prompt = with_prompt.strip_prefix(&before).ok_or_else(|| {
            unknown("with a generation prompt it also writes what comes before that otherwise".to_owned())
        })?;
        let turn = |message: usize| {
            let mut own = visits.iter().filter(|visit| visit.message == message);
            let (Some(visit), None) = (own.next(), own.next()) else {
                let reason = "it does not write it in one place of one loop over `messages`";
                return Err(unknown(format!("message {}: {reason}", message + 1)));
            };
            match text[visit.bytes.clone()].starts_with(prompt) {
                true => Ok(visit.bytes.start + prompt.len()..visit.bytes.end),
                false => {
                    let reason = format!("its text does not begin with the generation prompt, {prompt:?}");
                    Err(unknown(format!("message {}: {reason}", message + 1)))
                }
            }
        };
        conversation.of_assistant().map(turn).collect()
    }

    fn refused(&self, (problem, hint): Problem) -> DataError {
        DataError::template(&self.path, problem, hint)
    }
}

impl std::fmt::Debug for Chat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chat").field("path", &self.path).field("train_on", &self.train_on).finish()
    }
}
