//! Values that are inline tables, or lists of them: their keys, and what they must keep.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{AT_LEAST_ONE, Kind, MAX_BATCH, NOT_NEGATIVE, PATHS, POSITIVE, Reading, Word};
use crate::error::Problem;
use crate::source::quoted;
use crate::suggest;
use crate::value::{CorpusConfig, GroupConfig, RopeScalingConfig, Value, WeightConfig};

/// The keys of one of `data.corpora`, in the order of [`CorpusConfig`]; the last may be left out.
pub(super) const CORPUS_KEYS: [(&str, Kind); 4] = [
    ("name", Kind::Text(NAME)),
    ("paths", Kind::Texts(PATHS)),
    ("weight", Kind::Float(NOT_NEGATIVE)),
    ("schedule", Kind::Weights),
];

/// The keys of one weight of a `schedule`.
pub(super) const WEIGHT_KEYS: [(&str, Kind); 2] =
    [("tokens", Kind::Count(1, 1 << 60)), ("weight", Kind::Float(NOT_NEGATIVE))];

const NAME: Word = Word { text: "name", rule: "name the corpus with letters, digits, - and _" };

/// The keys of one of `train.batch_ramp`.
pub(super) const RAMP_KEYS: [(&str, Kind); 2] =
    [("tokens", Kind::Count(1, 1 << 60)), ("global_batch", Kind::Sequences(MAX_BATCH))];

/// The keys of one of `optimizer.groups`, in the order of [`GroupConfig`]; all but the first may be left out.
pub(super) const GROUP_KEYS: [(&str, Kind); 3] = [
    ("match", Kind::Text(PATTERN)),
    ("lr_scale", Kind::Float(NOT_NEGATIVE)),
    ("weight_decay", Kind::Float(NOT_NEGATIVE)),
];

const PATTERN: Word = Word {
    text: "pattern",
    rule: "write a parameter's name, with * for any text and ? for any letter, such as \"*.mlp.*\"",
};

/// The keys of `model.rope_scaling` without a `type`, which is Llama 3's.
const ROPE_SCALING_KEYS: [(&str, Kind); 4] = [
    ("factor", Kind::Float(AT_LEAST_ONE)),
    ("low_freq_factor", Kind::Float(POSITIVE)),
    ("high_freq_factor", Kind::Float(POSITIVE)),
    ("original_context", Kind::Count(1, 1 << 24)),
];

const LLAMA3: &str = "llama3";
const LINEAR: &str = "linear";
const YARN: &str = "yarn";
const ROPE_TYPE: (&str, Kind) = ("type", Kind::Choice(&[LLAMA3, LINEAR, YARN]));

/// What Hugging Face calls some of these keys.
const HUGGING_FACE: [(&str, &str); 2] =
    [("rope_type", "type"), ("original_max_position_embeddings", "original_context")];

/// Those of the linear type.
const LINEAR_KEYS: [(&str, Kind); 2] = [ROPE_TYPE, ("factor", Kind::Float(AT_LEAST_ONE))];

/// Those of YaRN; the last four may be left out.
const YARN_KEYS: [(&str, Kind); 8] = [
    ROPE_TYPE,
    ("factor", Kind::Float(AT_LEAST_ONE)),
    ("original_context", Kind::Count(1, 1 << 24)),
    ("beta_fast", Kind::Float(POSITIVE)),
    ("beta_slow", Kind::Float(POSITIVE)),
    ("attention_factor", Kind::Float(POSITIVE)),
    ("mscale_all_dim", Kind::Float(POSITIVE)),
    ("truncate", Kind::Bool),
];

/// All forms of `model.rope_scaling`.
pub(super) fn rope_scaling_forms() -> String {
    let of = |word: &str, keys: &[(&str, Kind)]| form(keys).replacen("type", &format!("type = \"{word}\""), 1);
    format!("{}, {} or {}", form(&ROPE_SCALING_KEYS), of(LINEAR, &LINEAR_KEYS), of(YARN, &YARN_KEYS))
}

/// `{ a, b, c }`.
pub(super) fn form(keys: &[(&str, Kind)]) -> String {
    let names: Vec<_> = keys.iter().map(|(name, _)| *name).collect();
    format!("{{ {} }}", names.join(", "))
}

/// The values of an inline table that must have exactly these keys.
fn read_table<const N: usize>(
    reading: Reading<'_>,
    keys: &[(&str, Kind); N],
    table: &DeTable<'_>,
    span: &Range<usize>,
) -> Result<[Option<Value>; N], Problem> {
    read_first(reading, keys, N, table, span)
}

/// The same where all keys but the first `required` may be left out.
fn read_first<const N: usize>(
    reading: Reading<'_>,
    keys: &[(&str, Kind); N],
    required: usize,
    table: &DeTable<'_>,
    span: &Range<usize>,
) -> Result<[Option<Value>; N], Problem> {
    let accepted = || match required {
        _ if required == N => format!("give all of {}", form(keys)),
        _ => format!("give {}", form(keys)),
    };
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    let names = keys.map(|(name, _)| name);
    let mut values = [const { None }; N];
    for (key, given) in entries {
        let name = key.get_ref().as_ref();
        let Some(index) = names.iter().position(|known| *known == name) else {
            let problem = format!("{}.{} is not a key of {}", reading.path, quoted(name), reading.path);
            let theirs = HUGGING_FACE.iter().find(|(theirs, _)| *theirs == name);
            let hint = match (theirs, suggest::nearest(name, names)) {
                (Some((_, ours)), _) => format!("it is `{ours}` here"),
                (None, Some(near)) => format!("did you mean `{near}`?"),
                (None, None) => accepted(),
            };
            return Err(Problem::new(problem, hint).within(key.span()));
        };
        let path = format!("{}.{name}", reading.path);
        values[index] = Some(keys[index].1.read(Reading { path: &path, ..reading }, given)?);
    }
    if let Some(index) = values[..required].iter().position(Option::is_none) {
        let problem = format!("{}.{} is not set", reading.path, names[index]);
        return Err(Problem::new(problem, accepted()).within(span.clone()));
    }
    Ok(values)
}

/// The tables of a list, each with its place.
fn tables<'a, 'b>(
    reading: Reading<'a>,
    kind: Kind,
    plural: &'static str,
    array: &'a [Spanned<DeValue<'b>>],
) -> impl Iterator<Item = Result<(&'a DeTable<'b>, Range<usize>), Problem>> {
    array.iter().map(move |element| {
        let span = element.span();
        let DeValue::Table(table) = element.get_ref() else {
            let text = reading.text.get(span.clone()).unwrap_or_default();
            let problem = format!("{}: {} is not one of the {plural} it lists", reading.path, quoted(text));
            return Err(Problem::new(problem, kind.accepted()).within(span));
        };
        Ok((table, span))
    })
}

/// Values that count from this many tokens on, in the order of these. `what` they are: all of a key, and one list of them.
fn read_by_tokens(
    reading: Reading<'_>,
    (kind, keys): (Kind, &[(&str, Kind); 2]),
    what: [&'static str; 2],
    array: &[Spanned<DeValue<'_>>],
) -> Result<Vec<(u64, Value)>, Problem> {
    let mut later: Vec<(u64, Value)> = Vec::new();
    for element in tables(reading, kind, what[0], array) {
        let (table, span) = element?;
        let [Some(Value::Count(tokens)), Some(value)] = read_table(reading, keys, table, &span)? else {
            unreachable!("each key was read by its own kind")
        };
        if later.last().is_some_and(|(before, _)| *before >= tokens) {
            let problem = format!("{}: {tokens} tokens do not come after those before them", reading.path);
            return Err(
                Problem::new(problem, format!("list the {} in the order of their tokens", what[1])).within(span)
            );
        }
        later.push((tokens, value));
    }
    Ok(later)
}

pub(super) fn read_ramp(reading: Reading<'_>, array: &[Spanned<DeValue<'_>>]) -> Result<Value, Problem> {
    read_by_tokens(reading, (Kind::Ramp, &RAMP_KEYS), ["batch sizes", "sizes"], array).map(Value::Ramp)
}

pub(super) fn read_weights(reading: Reading<'_>, array: &[Spanned<DeValue<'_>>]) -> Result<Value, Problem> {
    let later = read_by_tokens(reading, (Kind::Weights, &WEIGHT_KEYS), ["weights", "weights"], array)?;
    let weight = |(tokens, weight)| match weight {
        Value::Float(weight) => WeightConfig { tokens, weight },
        _ => unreachable!("each key was read by its own kind"),
    };
    Ok(Value::Weights(later.into_iter().map(weight).collect()))
}

pub(super) fn read_groups(reading: Reading<'_>, array: &[Spanned<DeValue<'_>>]) -> Result<Value, Problem> {
    let mut groups: Vec<GroupConfig> = Vec::new();
    for element in tables(reading, Kind::Groups, "groups", array) {
        let (table, span) = element?;
        let [pattern, lr_scale, weight_decay] = read_first(reading, &GROUP_KEYS, 1, table, &span)?;
        let Some(Value::Text(pattern)) = pattern else { unreachable!("each key was read by its own kind") };
        let number = |value| if let Some(Value::Float(x)) = value { Some(x) } else { None };
        let group = GroupConfig { pattern, lr_scale: number(lr_scale), weight_decay: number(weight_decay) };
        if group.lr_scale.or(group.weight_decay).is_none() {
            let problem = format!("{}: the group \"{}\" changes nothing", reading.path, quoted(&group.pattern));
            return Err(Problem::new(problem, "give it a lr_scale, a weight_decay, or both").within(span));
        }
        groups.push(group);
    }
    Ok(Value::Groups(groups))
}

pub(super) fn read_corpora(reading: Reading<'_>, array: &[Spanned<DeValue<'_>>]) -> Result<Value, Problem> {
    let mut corpora: Vec<CorpusConfig> = Vec::new();
    for element in tables(reading, Kind::Corpora, "corpora", array) {
        let (table, span) = element?;
        let values = read_first(reading, &CORPUS_KEYS, 3, table, &span)?;
        let [Some(Value::Text(name)), Some(Value::Texts(paths)), Some(Value::Float(weight)), schedule] = values else {
            unreachable!("each key was read by its own kind")
        };
        let schedule = if let Some(Value::Weights(weights)) = schedule { weights } else { Vec::new() };
        let refuse = |problem: String, hint: &str| Err(Problem::new(problem, hint).within(span.clone()));
        let shown = quoted(&name);
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if !name.chars().all(plain) || name.len() > 60 {
            return refuse(format!("{}.name = \"{shown}\" cannot be the name of a folder", reading.path), NAME.rule);
        }
        // Folders of two names that differ by case are one on some disks.
        if corpora.iter().any(|corpus| corpus.name.eq_ignore_ascii_case(&name)) {
            return refuse(format!("{}: two corpora are named \"{shown}\"", reading.path), "give each its own name");
        }
        if paths.is_empty() {
            return refuse(format!("{}: the corpus \"{shown}\" has no paths", reading.path), PATHS.rule);
        }
        if weight == 0.0 && schedule.iter().all(|later| later.weight == 0.0) {
            let problem = format!("{}: the corpus \"{shown}\" has weight 0 all the time", reading.path);
            return refuse(problem, "give it a weight greater than 0, or leave it out");
        }
        corpora.push(CorpusConfig { name, paths, weight, schedule });
    }
    let starts = [0].into_iter().chain(corpora.iter().flat_map(|corpus| &corpus.schedule).map(|later| later.tokens));
    let weight_at = |corpus: &CorpusConfig, tokens: u64| {
        let later = corpus.schedule.iter().rev().find(|later| later.tokens <= tokens);
        later.map_or(corpus.weight, |later| later.weight)
    };
    for tokens in starts {
        if !corpora.is_empty() && corpora.iter().all(|corpus| weight_at(corpus, tokens) == 0.0) {
            let problem = format!("{}: from {tokens} tokens on every corpus has weight 0", reading.path);
            return Err(Problem::new(problem, "give one of them a weight greater than 0 there"));
        }
    }
    Ok(Value::Corpora(corpora))
}

pub(super) fn read_rope_scaling(
    reading: Reading<'_>,
    table: &DeTable<'_>,
    span: &Range<usize>,
) -> Result<Value, Problem> {
    let given = table.iter().find(|(key, _)| key.get_ref().as_ref() == ROPE_TYPE.0);
    let path = format!("{}.{}", reading.path, ROPE_TYPE.0);
    let kind = given.map(|(_, kind)| ROPE_TYPE.1.read(Reading { path: &path, ..reading }, kind)).transpose()?;
    match kind {
        None => {
            let values = read_table(reading, &ROPE_SCALING_KEYS, table, span)?;
            llama3(reading, values, span)
        }
        Some(Value::Text(word)) if word == LINEAR => {
            let [_, Some(Value::Float(factor))] = read_table(reading, &LINEAR_KEYS, table, span)? else {
                unreachable!("each key was read by its own kind")
            };
            Ok(Value::RopeScaling(RopeScalingConfig::Linear { factor }))
        }
        Some(Value::Text(word)) if word == YARN => yarn(reading, table, span),
        Some(_) => {
            let [factor, low, high, original] = ROPE_SCALING_KEYS;
            let keys = [factor, low, high, original, ROPE_TYPE];
            let [factor, low, high, original, _] = read_first(reading, &keys, 4, table, span)?;
            llama3(reading, [factor, low, high, original], span)
        }
    }
}

fn yarn(reading: Reading<'_>, table: &DeTable<'_>, span: &Range<usize>) -> Result<Value, Problem> {
    let values = read_first(reading, &YARN_KEYS, 3, table, span)?;
    let [_, Some(Value::Float(factor)), Some(Value::Count(original_context)), fast, slow, attention, scores, truncate] =
        values
    else {
        unreachable!("each key was read by its own kind")
    };
    let number = |value| if let Some(Value::Float(x)) = value { Some(x) } else { None };
    let (beta_fast, beta_slow) = (number(fast).unwrap_or(32.0), number(slow).unwrap_or(1.0));
    if beta_fast <= beta_slow {
        let problem = format!("{}.beta_fast = {beta_fast:?} is not above beta_slow = {beta_slow:?}", reading.path);
        return Err(Problem::new(problem, "published models use beta_fast = 32, beta_slow = 1").within(span.clone()));
    }
    Ok(Value::RopeScaling(RopeScalingConfig::Yarn {
        factor,
        original_context: original_context as usize,
        beta_fast,
        beta_slow,
        attention_factor: number(attention),
        mscale_all_dim: number(scores),
        truncate: truncate != Some(Value::Bool(false)),
    }))
}

fn llama3(reading: Reading<'_>, values: [Option<Value>; 4], span: &Range<usize>) -> Result<Value, Problem> {
    let [
        Some(Value::Float(factor)),
        Some(Value::Float(low_freq_factor)),
        Some(Value::Float(high_freq_factor)),
        Some(Value::Count(original_context)),
    ] = values
    else {
        unreachable!("each key was read by its own kind")
    };
    if high_freq_factor <= low_freq_factor {
        let problem = format!(
            "{}.high_freq_factor = {high_freq_factor:?} is not above low_freq_factor = {low_freq_factor:?}",
            reading.path
        );
        return Err(
            Problem::new(problem, "Llama 3 uses low_freq_factor = 1, high_freq_factor = 4").within(span.clone())
        );
    }
    let original_context = original_context as usize;
    Ok(Value::RopeScaling(RopeScalingConfig::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }))
}
