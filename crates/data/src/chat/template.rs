//! Chat templates, in the Jinja environment of transformers.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use minijinja::{Environment, Error, ErrorKind, Value};

use super::conversation::{Conversation, Problem};
use super::turns::{Log, Messages, Paper};
use super::{generation, marks, python};
use crate::guard::caught;
use crate::{DataError, DataHint, DataSetting, Result};

/// What a template may compute for one conversation; templates in use take some ten thousand steps.
const FUEL: u64 = 100_000_000;

const NAME: &str = "chat template";

/// A compiled template.
pub(super) struct Template {
    plain: Environment<'static>,
    /// The same, with marks around the blocks of the assistant.
    marked: Environment<'static>,
    has_generation: bool,
    looks_ahead: bool,
    /// Special tokens by the names that templates know them by.
    tokens: BTreeMap<String, String>,
}

/// Which of the two ways to render.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Plain,
    Marked,
}

impl Template {
    /// Compiles a template; `day` is what `strftime_now` says, in days from 1 January 1970.
    pub(super) fn compile(path: &Path, source: &str, tokens: &BTreeMap<String, String>, day: i64) -> Result<Self> {
        let (rewritten, has_generation) = generation::rewrite(source);
        let compiled = |way: Way| {
            let mut environment = environment(day);
            environment.add_filter(generation::FILTER, move |text: String| match way {
                Way::Plain => text,
                Way::Marked => format!("{}{text}{}", marks::OPEN, marks::CLOSE),
            });
            environment.add_template_owned(NAME, rewritten.clone()).map_err(|error| {
                let hint = DataHint::of("mend the template, or name another in {}", DataSetting::ChatTemplate);
                DataError::template(path, format!("not a chat template: {}", said(&error)), hint)
            })?;
            Ok::<_, DataError>(environment)
        };
        Ok(Template {
            plain: compiled(Way::Plain)?,
            marked: compiled(Way::Marked)?,
            has_generation,
            // Its loops take a message before they are done with the one before.
            looks_ahead: source.contains("nextitem"),
            tokens: tokens.clone(),
        })
    }

    /// Whether blocks say what the assistant writes.
    pub(super) fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// Whether a loop over messages may be a message ahead of what it writes.
    pub(super) fn looks_ahead(&self) -> bool {
        self.looks_ahead
    }

    /// A conversation as text, and which message became which part of it.
    pub(super) fn render(
        &self,
        way: Way,
        conversation: &Conversation,
        generation_prompt: bool,
    ) -> Result<(String, Arc<Log>), Problem> {
        let log = Arc::new(Log::default());
        let environment = if way == Way::Plain { &self.plain } else { &self.marked };
        let context: Value = (self.tokens.iter().map(|(name, token)| (name.clone(), Value::from(token.as_str()))))
            .chain(conversation.variables())
            .chain([
                ("messages".to_owned(), Messages::value(conversation.messages(), log.clone())),
                ("tools".to_owned(), conversation.tools().clone()),
                ("documents".to_owned(), Value::from(())),
                ("add_generation_prompt".to_owned(), Value::from(generation_prompt)),
            ])
            .collect();
        let mut paper = Paper::new(log.clone());
        let refuse = |error: Error| {
            let hint = "mend the conversation, or name another template in {}";
            (
                format!("the chat template cannot write it: {}", said(&error)),
                DataHint::of(hint, DataSetting::ChatTemplate),
            )
        };
        let template = environment.get_template(NAME).map_err(refuse)?;
        // The library promises errors, and still a template may meet a panic in it.
        let rendered = caught(|| template.render_captured_to(context, &mut paper).map(drop));
        rendered
            .unwrap_or_else(|| Err(Error::new(ErrorKind::InvalidOperation, "the template engine gave up")))
            .map_err(refuse)?;
        let text = String::from_utf8(paper.text).map_err(|_| {
            ("the chat template writes what is no text".to_owned(), "check the template with transformers".into())
        })?;
        Ok((text, log))
    }
}

/// The environment of transformers: its whitespace, its functions and what Python's values can do.
fn environment(day: i64) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(FUEL));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(python::method);
    environment.set_formatter(|out, _, value| match value.as_str() {
        Some(text) => Ok(out.write_str(text)?),
        None => Ok(out.write_str(&python::shown(value))?),
    });
    environment.add_filter("tojson", python::tojson);
    environment.add_filter("string", |value: &Value| python::shown(value));
    environment.add_filter("trim", python::trim);
    environment.add_filter("length", python::length);
    environment.add_filter("count", python::length);
    environment.add_test("sequence", python::is_sequence);
    environment.add_test("iterable", python::is_iterable);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |format: String| python::strftime(day, &format));
    environment
}

/// What an error says, with its line, and nothing that a terminal would act on.
fn said(error: &Error) -> String {
    let mut inner = error;
    while let Some(cause) = std::error::Error::source(inner).and_then(|cause| cause.downcast_ref::<Error>()) {
        inner = cause;
    }
    let what = inner.detail().map_or_else(|| inner.kind().to_string(), str::to_owned);
    let what: String = what.chars().filter(|c| !c.is_control()).take(300).collect();
    match inner.line().or(error.line()) {
        Some(line) => format!("{what} (line {line})"),
        None => what,
    }
}
