//! A conversation, from a record.

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::{DataHint, DataSetting};

/// What is wrong with a record, and what to do.
pub(crate) type Problem = (String, DataHint);

/// Who speaks, as templates know them.
const ROLES: [&str; 7] = ["system", "developer", "user", "assistant", "tool", "function", "ipython"];

/// What ShareGPT calls them.
const SHAREGPT_ROLES: [(&str, &str); 3] = [("human", "user"), ("gpt", "assistant"), ("system", "system")];

/// The field of messages where nothing else is said, and ShareGPT's name for it.
pub(crate) const MESSAGES: &str = "messages";
pub(crate) const CONVERSATIONS: &str = "conversations";

/// The names that reasoning has; the first is what most templates read.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

const FORM: DataHint = DataHint::of(
    "every record has a list of messages in the field that {} names, each with a \"role\" and \"content\"",
    DataSetting::TextField,
);

/// The fields beside the messages.
const TOOLS: &str = "tools";
const TEMPLATE_KWARGS: &str = "chat_template_kwargs";

/// The fields of a record that are read beside its messages.
pub(crate) const BESIDE: [&str; 2] = [TOOLS, TEMPLATE_KWARGS];

/// Messages in order, and the tools that they may call.
#[derive(Clone, Debug)]
pub struct Conversation {
    messages: Vec<Value>,
    roles: Vec<String>,
    tools: Value,
    /// What the record gives its template beside these, by name; none where it gives nothing.
    variables: Value,
}

impl Conversation {
    /// A question to be answered.
    pub fn asking(system: Option<&str>, question: &str) -> Self {
        let said = system.map(|text| ("system", text)).into_iter().chain([("user", question)]);
        let mut this = Self::empty(Value::from(()), Value::from(()));
        said.for_each(|(role, text)| this.say(role, text));
        this
    }

    fn empty(tools: Value, variables: Value) -> Self {
        Conversation { messages: Vec::new(), roles: Vec::new(), tools, variables }
    }

    /// Adds a message.
    pub(super) fn say(&mut self, role: &str, text: &str) {
        self.messages.push([("role", role), ("content", text)].into_iter().collect());
        self.roles.push(role.to_owned());
    }

    /// Reads a conversation in a line of JSON, or says what is wrong with it.
    pub fn from_json(line: &str) -> Result<Self, String> {
        Self::parse(line, MESSAGES).map_err(|(problem, _)| problem)
    }

    /// Reads the record in a line of JSON.
    pub(crate) fn parse(line: &str, field: &str) -> Result<Self, Problem> {
        let record: Value = serde_json::from_str(line).map_err(|error| {
            // The library names the line of the text it was given, which is always the first.
            let text = error.to_string();
            let what = text.split(" at line ").next().unwrap_or_default();
            let what: String = what.chars().filter(|c| !c.is_control()).take(200).collect();
            (format!("not a JSON object with messages: {what} (column {})", error.column()), FORM)
        })?;
        if record.kind() != ValueKind::Map {
            return Err(("not a JSON object with messages".to_owned(), FORM));
        }
        let get = |name: &str| record.get_attr(name).ok().filter(|value| !value.is_undefined());
        let messages = match get(field) {
            Some(messages) => messages,
            None if field == MESSAGES => get(CONVERSATIONS)
                .ok_or_else(|| (format!("the object has no field {MESSAGES:?}, nor {CONVERSATIONS:?}"), FORM))?,
            None => return Err((format!("the object has no field {field:?}"), FORM)),
        };
        let beside = |name: &str| get(name).map_or(Ok(Value::from(())), |value| decoded(value, name));
        let mut this = Self::empty(beside(TOOLS)?, beside(TEMPLATE_KWARGS)?);
        if !matches!(this.variables.kind(), ValueKind::None | ValueKind::Map) {
            let hint = "give it an object of names and values, or leave it out";
            return Err((format!("{TEMPLATE_KWARGS:?} is not an object"), hint.into()));
        }
        let messages = decoded(messages, field)?;
        if messages.is_none() {
            return Ok(this);
        }
        if messages.kind() != ValueKind::Seq {
            return Err((format!("{field:?} is not a list of messages"), FORM));
        }
        for (index, message) in messages.try_iter().into_iter().flatten().enumerate() {
            let (role, message) =
                read(&message).map_err(|(problem, hint)| (format!("message {}: {problem}", index + 1), hint))?;
            this.messages.push(message);
            this.roles.push(role);
        }
        let first = this.roles.iter().find(|role| !["system", "developer"].contains(&role.as_str()));
        if first.is_some_and(|role| role == "assistant") {
            let hint = "begin with what the user says, or leave the record out";
            return Err(("the conversation begins with the assistant".to_owned(), hint.into()));
        }
        Ok(this)
    }

    /// Whether nobody says anything.
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub(super) fn messages(&self) -> &[Value] {
        &self.messages
    }

    pub(super) fn tools(&self) -> &Value {
        &self.tools
    }

    /// What the record gives its template by name (`chat_template_kwargs`).
    pub(super) fn variables(&self) -> impl Iterator<Item = (String, Value)> {
        let names = self.variables.try_iter().into_iter().flatten();
        names.filter_map(|name| Some((name.as_str()?.to_owned(), self.variables.get_item(&name).ok()?)))
    }

    /// All values that a template may write.
    pub(super) fn values(&self) -> impl Iterator<Item = &Value> {
        self.messages.iter().chain([&self.tools, &self.variables])
    }

    /// The messages of the assistant.
    pub(super) fn of_assistant(&self) -> impl Iterator<Item = usize> {
        self.roles.iter().enumerate().filter(|(_, role)| *role == "assistant").map(|(index, _)| index)
    }

    /// The first messages.
    pub(super) fn up_to(&self, end: usize) -> Self {
        Conversation {
            messages: self.messages[..end].to_vec(),
            roles: self.roles[..end].to_vec(),
            tools: self.tools.clone(),
            variables: self.variables.clone(),
        }
    }

    /// The same with other values, none where all are as they were.
    pub(super) fn changed(&self, change: impl Fn(&Value) -> Option<Value>) -> Option<Self> {
        let changed: Vec<Option<Value>> = self.messages.iter().map(&change).collect();
        let (tools, variables) = (change(&self.tools), change(&self.variables));
        if tools.is_none() && variables.is_none() && changed.iter().all(Option::is_none) {
            return None;
        }
        let pairs = self.messages.iter().zip(changed);
        Some(Conversation {
            messages: pairs.map(|(old, new)| new.unwrap_or_else(|| old.clone())).collect(),
            roles: self.roles.clone(),
            tools: tools.unwrap_or_else(|| self.tools.clone()),
            variables: variables.unwrap_or_else(|| self.variables.clone()),
        })
    }
}

/// A value, or what a string of JSON holds: columns of strings hold lists in that form.
fn decoded(value: Value, field: &str) -> Result<Value, Problem> {
    match value.as_str() {
        None => Ok(value),
        Some("") => Ok(Value::from(())),
        Some(text) => serde_json::from_str(text).map_err(|_| (format!("{field:?} is text, and not JSON"), FORM)),
    }
}

/// Who says a message, and the message with the names that templates know.
fn read(message: &Value) -> Result<(String, Value), Problem> {
    if message.kind() != ValueKind::Map {
        return Err(("it is not an object".to_owned(), FORM));
    }
    let get = |name: &str| message.get_attr(name).ok().filter(|value| !value.is_undefined());
    let (is_sharegpt, role) = match (get("role"), get("from")) {
        (Some(role), _) => (false, role),
        (None, Some(from)) => (true, from),
        (None, None) => return Err(("it has no \"role\"".to_owned(), FORM)),
    };
    let said = role.as_str().ok_or_else(|| ("its role is not text".to_owned(), FORM))?;
    let names = SHAREGPT_ROLES.iter().find(|(theirs, _)| is_sharegpt && *theirs == said);
    let Some(role) = names.map(|(_, ours)| *ours).or(ROLES.into_iter().find(|known| *known == said)) else {
        let said: String = said.chars().take(100).collect();
        let hint = "roles are system, developer, user, assistant, tool, function and ipython; ShareGPT's are human, gpt and system";
        return Err((format!("the role {said:?} is not known"), hint.into()));
    };
    let content = get(if is_sharegpt { "value" } else { "content" });
    let calls = get("tool_calls").is_some_and(|calls| calls.is_true());
    let content = match content.as_ref().map(Value::kind) {
        Some(ValueKind::String | ValueKind::Seq) => content,
        Some(ValueKind::None) | None if calls || REASONING.iter().any(|name| get(name).is_some()) => content,
        Some(ValueKind::None) | None => return Err((format!("the {role} says nothing: it has no content"), FORM)),
        Some(kind) => return Err((format!("its content is a {kind}, not text"), FORM)),
    };
    let reasoning = REASONING.iter().find_map(|name| get(name).filter(|value| !value.is_none()));
    let renamed: &[&str] = if is_sharegpt { &["from", "value", "role", "content"] } else { &["role", "content"] };
    let mut pairs = vec![("role".to_owned(), Value::from(role))];
    pairs.extend(content.filter(|content| !content.is_none()).map(|content| ("content".to_owned(), content)));
    for key in message.try_iter().into_iter().flatten() {
        let name = key.as_str().unwrap_or_default();
        if renamed.contains(&name) || name == REASONING[0] && reasoning.is_some() {
            continue;
        }
        let value = message.get_item(&key).unwrap_or_default();
        // As transformers passes them on: many templates can do with a key that is not there, and not with one that is null.
        if !value.is_none() {
            pairs.push((name.to_owned(), value));
        }
    }
    // As transformers passes it on: by the name that most templates read, and by the one that others read.
    if let Some(reasoning) = reasoning {
        pairs.push((REASONING[0].to_owned(), reasoning.clone()));
        if get(REASONING[1]).is_none_or(|value| value.is_none()) {
            pairs.push((REASONING[1].to_owned(), reasoning));
        }
    }
    Ok((role.to_owned(), pairs.into_iter().collect()))
}
