//! The kinds of value a key can take: what each accepts, and what it says when refusing. Kinds that are tables or lists of tables
//! are in [`tables`].

mod tables;

use std::ops::Range;

use tables::{CORPUS_KEYS, GROUP_KEYS, RAMP_KEYS, WEIGHT_KEYS, form, rope_scaling_forms};
use toml::Spanned;
use toml::de::{DeFloat, DeInteger, DeValue};

use crate::error::Problem;
use crate::quantity::{self, Quantity};
use crate::source::quoted;
use crate::suggest;
use crate::value::{AUTO, Value};
use crate::words::LayerType;

/// The largest batch, in sequences.
pub(crate) const MAX_BATCH: u64 = 1 << 32;

/// What a key accepts.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// One of a few words.
    Choice(&'static [&'static str]),
    Bool,
    /// A plain integer, both ends included.
    Integer(u64, u64),
    /// An integer or a string with a decimal suffix, both ends included.
    Count(u64, u64),
    /// The same, or `"auto"`.
    CountOrAuto(u64, u64),
    /// A number of sequences from 1, or a string that gives it in tokens.
    Sequences(u64),
    /// A string of a number and a unit of bytes.
    Size,
    /// Whether at all, `"auto"`, or the same.
    SizeOrAuto,
    Float(Bounds),
    Text(Word),
    Texts(Item),
    /// A list of counts from 1.
    Counts(Item),
    RopeScaling,
    Corpora,
    /// The weights of a corpus later in a run.
    Weights,
    Groups,
    Ramp,
}

/// Which finite numbers a float key accepts.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    text: &'static str,
    hold: fn(f64) -> bool,
}

pub(crate) const POSITIVE: Bounds = Bounds { text: "greater than 0", hold: |x| x > 0.0 };
pub(crate) const NOT_NEGATIVE: Bounds = Bounds { text: "0 or greater", hold: |x| x >= 0.0 };
pub(crate) const AT_LEAST_ONE: Bounds = Bounds { text: "1 or greater", hold: |x| x >= 1.0 };
pub(crate) const UP_TO_ONE: Bounds = Bounds { text: "from 0 to 1", hold: |x| (0.0..=1.0).contains(&x) };
pub(crate) const BELOW_ONE: Bounds = Bounds { text: "from 0 up to, but not, 1", hold: |x| (0.0..1.0).contains(&x) };
pub(crate) const POWER_OF_TWO: Bounds = Bounds {
    text: "that is a power of 2 from 1 to 2^30",
    hold: |x| (1.0..=(1u64 << 30) as f64).contains(&x) && (x as u64).is_power_of_two() && x.fract() == 0.0,
};
pub(crate) const UP_TO_A_DAY: Bounds =
    Bounds { text: "greater than 0, up to 86400", hold: |x| x > 0.0 && x <= 86400.0 };
pub(crate) const UP_TO_HALF: Bounds = Bounds { text: "from 0 to 0.5", hold: |x| (0.0..=0.5).contains(&x) };

/// What a single string stands for; it is not empty.
#[derive(Clone, Copy)]
pub(crate) struct Word {
    text: &'static str,
    rule: &'static str,
}

pub(crate) const TOKENIZER: Word = Word {
    text: "\"bytes\", or a path",
    rule: "write \"bytes\", or the path of a tokenizer.json, relative to the config file's folder",
};
pub(crate) const TOKEN: Word =
    Word { text: "token", rule: "write a token of the tokenizer, such as \"<|endoftext|>\"" };
pub(crate) const TEMPLATE: Word =
    Word { text: "path", rule: "write the path of a chat template in Jinja, relative to the config file's folder" };
pub(crate) const FIELD: Word = Word { text: "name", rule: "write the name of a field or column, such as \"text\"" };
pub(crate) const FOLDER: Word =
    Word { text: "folder", rule: "write the path of a folder, relative to the config file's folder" };

pub(crate) const TIME_LIMIT: Word = Word {
    text: "time limit",
    rule: "write hours, minutes and seconds, such as \"12:00:00\", or with days before them, such as \"1-12:00:00\"",
};
pub(crate) const ELASTIC: Word =
    Word { text: "two numbers", rule: "write the fewest and the most ranks that may train, such as \"2..4\"" };
pub(crate) const SITE_NAME: Word = Word { text: "name", rule: "write the name that it has at your site" };
pub(crate) const SERVER: Word =
    Word { text: "address", rule: "write the address of the server, such as \"http://tracking.example:5000\"" };
pub(crate) const CONTAINER: Word = Word {
    text: "command",
    rule: "write what stands before the command, such as \"apptainer exec --nv lockstep.sif\"",
};

/// What the strings or numbers of a list stand for.
#[derive(Clone, Copy)]
pub(crate) struct Item {
    plural: &'static str,
    rule: &'static str,
    hold: fn(&str) -> bool,
}

pub(crate) const PATHS: Item = Item {
    plural: "paths",
    rule: "name files or folders, relative to the config file's folder, such as [\"docs\", \"src/main.rs\"]",
    hold: |text| !text.is_empty(),
};
pub(crate) const TOKENS: Item = Item {
    plural: "tokens",
    rule: "name special tokens of the tokenizer, such as [\"<|im_end|>\"]",
    hold: |text| !text.is_empty(),
};
pub(crate) const OPS: Item = Item {
    plural: "ops",
    rule: "name ops as explain shows them, such as [\"rms_norm\", \"swiglu\"]",
    hold: |text| !text.is_empty(),
};
pub(crate) const TARGETS: Item = Item {
    plural: "modules",
    rule: "name modules, whole or by their ends, such as [\"q_proj\", \"v_proj\"]",
    hold: |text| !text.is_empty(),
};
pub(crate) const EXTENSIONS: Item = Item {
    plural: "extensions",
    rule: "write file extensions without the dot, such as [\"txt\", \"md\"]",
    hold: |text| !text.is_empty() && !text.starts_with('.') && !text.contains(['/', '\\']),
};

pub(crate) const MODULES: Item =
    Item { plural: "modules", rule: "name modules, such as [\"openmpi/4.1\"]", hold: |text| !text.trim().is_empty() };
pub(crate) const SHELL_LINES: Item = Item {
    plural: "lines of shell",
    rule: "write lines of shell, such as [\"export NCCL_DEBUG=WARN\"]",
    hold: |text| !text.trim().is_empty() && !text.contains('\n'),
};
pub(crate) const SLURM_OPTIONS: Item = Item {
    plural: "options",
    rule: "write options with their dashes, such as [\"--exclusive\"]",
    hold: |text| text.starts_with('-') && !text.contains('\n'),
};
pub(crate) const LAYER_TYPES: Item = Item {
    plural: "kinds of layers",
    rule: "write \"sliding\" or \"full\" for each layer of the pattern, such as [\"sliding\", \"sliding\", \"sliding\", \"full\"]",
    hold: |text| LayerType::WORDS.contains(&text),
};
pub(crate) const ROPE_LAYERS: Item = Item {
    plural: "numbers 0 and 1",
    rule: "write 1 for a layer with RoPE and 0 for one without, such as [1, 1, 1, 0]",
    hold: |number| ["0", "1"].contains(&number),
};
pub(crate) const LAYERS_OF_STAGES: Item = Item {
    plural: "numbers of layers",
    rule: "give every virtual stage a number of layers, such as [3, 4, 4, 3]",
    hold: |number| number.parse::<u32>().is_ok(),
};

/// A value being read: where its key stands and the text it came from.
#[derive(Clone, Copy)]
pub(crate) struct Reading<'a> {
    pub path: &'a str,
    pub text: &'a str,
}

impl Reading<'_> {
    /// `train.steps = "12 parsecs"`, or `train.steps` alone where the text has several lines.
    fn assignment(&self, span: &Range<usize>) -> String {
        match self.text.get(span.clone()).map(str::trim) {
            Some(text) if !text.is_empty() && !text.contains('\n') => format!("{} = {}", self.path, quoted(text)),
            _ => self.path.to_owned(),
        }
    }
}

impl Kind {
    /// The type as the listing of `lockstep config` shows it.
    pub(crate) fn type_text(&self) -> String {
        match self {
            Kind::Choice([only]) => format!("\"{only}\""),
            Kind::Choice(words) => quote_list(words),
            Kind::Bool => "true or false".into(),
            Kind::Integer(..) => "integer".into(),
            Kind::Count(..) => "count".into(),
            Kind::CountOrAuto(..) => "count, or \"auto\"".into(),
            Kind::Sequences(_) => "sequences, or \"N tokens\"".into(),
            Kind::Size => "bytes, such as \"4 GiB\"".into(),
            Kind::SizeOrAuto => "true, false, \"auto\", or bytes, such as \"4 GiB\"".into(),
            Kind::Float(bounds) => format!("number, {}", bounds.text),
            Kind::Texts(item) | Kind::Counts(item) => format!("list of {}", item.plural),
            Kind::Text(word) => word.text.into(),
            Kind::RopeScaling => rope_scaling_forms(),
            Kind::Corpora => format!("list of {}", form(&CORPUS_KEYS)),
            Kind::Weights => format!("list of {}", form(&WEIGHT_KEYS)),
            Kind::Groups => format!("list of {}", form(&GROUP_KEYS)),
            Kind::Ramp => format!("list of {}", form(&RAMP_KEYS)),
        }
    }

    /// Reads one value, or says why it is refused.
    pub(crate) fn read(&self, reading: Reading<'_>, given: &Spanned<DeValue<'_>>) -> Result<Value, Problem> {
        let span = given.span();
        let assignment = reading.assignment(&span);
        let refuse = |why: String| Problem::new(format!("{assignment} {why}"), self.accepted());
        let wrong_type = || match given.get_ref() {
            DeValue::Table(_) => {
                Problem::new(format!("{} is a table, not {}", reading.path, self.noun()), self.accepted())
            }
            _ => refuse(format!("is not {}", self.noun())),
        };
        let bounded = |number: Option<u64>, min: u64, max: u64| {
            let number = number.filter(|n| (min..=max).contains(n));
            number.map(Value::Count).ok_or_else(|| refuse("is out of range".into()))
        };
        match (self, given.get_ref()) {
            (Kind::Choice(words), DeValue::String(word)) => {
                if words.contains(&word.as_ref()) {
                    return Ok(Value::Text(word.to_string()));
                }
                let known = self.accepted();
                Err(Problem::new(
                    format!("{assignment} is not known"),
                    match suggest::nearest(word, words.iter().copied()) {
                        Some(near) if words.len() > 1 => format!("did you mean \"{near}\"? {known}"),
                        _ => known,
                    },
                ))
            }
            (Kind::Bool, DeValue::Boolean(b)) => Ok(Value::Bool(*b)),
            (
                Kind::Integer(min, max) | Kind::Count(min, max) | Kind::CountOrAuto(min, max),
                DeValue::Integer(integer),
            ) => bounded(integer_value(integer), *min, *max),
            (Kind::CountOrAuto(..), DeValue::String(text)) if text == AUTO => Ok(Value::Text(AUTO.into())),
            (Kind::Sequences(max), DeValue::Integer(integer)) => bounded(integer_value(integer), 1, *max),
            (Kind::Count(min, max) | Kind::CountOrAuto(min, max), DeValue::String(text)) => match quantity::parse(text)
            {
                Some(Quantity { number, unit: None }) => bounded(Some(number), *min, *max),
                _ => Err(wrong_type()),
            },
            (Kind::Sequences(max), DeValue::String(text)) => match quantity::parse(text) {
                Some(Quantity { number: number @ 1.., unit: Some("tokens") }) => Ok(Value::Tokens(number)),
                Some(Quantity { number, unit: None | Some("sequences") }) => bounded(Some(number), 1, *max),
                _ => Err(wrong_type()),
            },
            (Kind::SizeOrAuto, DeValue::Boolean(b)) => Ok(Value::Bool(*b)),
            (Kind::SizeOrAuto, DeValue::String(text)) if text == AUTO => Ok(Value::Text(AUTO.into())),
            (Kind::Size | Kind::SizeOrAuto, DeValue::String(text)) => match quantity::bytes(text) {
                Some(bytes @ 1..) => Ok(Value::Bytes(bytes)),
                _ => Err(wrong_type()),
            },
            (Kind::Float(bounds), DeValue::Integer(_) | DeValue::Float(_)) => match float_value(given.get_ref()) {
                Some(x) if x.is_finite() && (bounds.hold)(x) => Ok(Value::Float(x)),
                Some(x) if x.is_finite() => Err(refuse("is out of range".into())),
                _ => Err(refuse("is not a finite number".into())),
            },
            (Kind::Texts(item), DeValue::Array(array)) => array
                .iter()
                .map(|element| match element.get_ref() {
                    DeValue::String(text) if (item.hold)(text) => Ok(text.to_string()),
                    _ => Err(refuse_element(reading, item, element)),
                })
                .collect::<Result<_, _>>()
                .map(Value::Texts),
            (Kind::Counts(item), DeValue::Array(array)) => array
                .iter()
                .map(|element| match element.get_ref() {
                    DeValue::Integer(integer) if (item.hold)(integer.as_str()) => {
                        integer_value(integer).ok_or_else(|| refuse_element(reading, item, element))
                    }
                    _ => Err(refuse_element(reading, item, element)),
                })
                .collect::<Result<_, _>>()
                .map(Value::Counts),
            (Kind::Text(_), DeValue::String(text)) if text.trim().is_empty() => Err(refuse("is empty".into())),
            (Kind::Text(_), DeValue::String(text)) => Ok(Value::Text(text.to_string())),
            (Kind::RopeScaling, DeValue::Table(table)) => tables::read_rope_scaling(reading, table, &span),
            (Kind::Corpora, DeValue::Array(array)) => tables::read_corpora(reading, array),
            (Kind::Weights, DeValue::Array(array)) => tables::read_weights(reading, array),
            (Kind::Groups, DeValue::Array(array)) => tables::read_groups(reading, array),
            (Kind::Ramp, DeValue::Array(array)) => tables::read_ramp(reading, array),
            _ => Err(wrong_type()),
        }
        .map_err(|problem| problem.within(span))
    }

    /// The kind as a noun with its article.
    fn noun(&self) -> &'static str {
        match self {
            Kind::Choice(_) => "a string",
            Kind::Bool => "true or false",
            Kind::Integer(..) => "an integer",
            Kind::Count(..) => "a count",
            Kind::CountOrAuto(..) => "a count or \"auto\"",
            Kind::Sequences(_) => "a number of sequences or tokens",
            Kind::Size => "a size",
            Kind::SizeOrAuto => "true, false, \"auto\" or a size",
            Kind::Float(_) => "a number",
            Kind::Texts(_) => "a list of strings",
            Kind::Counts(_) => "a list of integers",
            Kind::Text(_) => "a string",
            Kind::RopeScaling => "an inline table",
            Kind::Corpora => "a list of corpora",
            Kind::Weights => "a list of weights",
            Kind::Groups => "a list of groups",
            Kind::Ramp => "a list of batch sizes",
        }
    }

    /// The hint: what would be accepted.
    fn accepted(&self) -> String {
        match self {
            Kind::Choice([only]) => format!("only \"{only}\" is supported"),
            Kind::Choice(words) => format!("choose one of {}", quote_list(words)),
            Kind::Bool => "write true or false, without quotes".into(),
            Kind::Integer(min, max) => format!("give an integer from {min} to {max}"),
            Kind::CountOrAuto(min, max) => format!(
                "give an integer from {min} to {max}, a string with a decimal suffix (K, M, B or T) such as \"2K\", or \"auto\""
            ),
            Kind::Count(min, max) => format!(
                "give an integer from {min} to {max}, or a string with a decimal suffix (K, M, B or T) such as \"2K\""
            ),
            Kind::Sequences(max) => format!(
                "give a number of sequences from 1 to {max}, or a string in tokens with a decimal suffix (K, M, B or T) \
                 such as \"4M tokens\""
            ),
            Kind::Size => {
                "give a number and its unit, such as \"4 GiB\" (KiB, MiB, GiB, TiB; KB, MB, GB, TB; B)".into()
            }
            Kind::SizeOrAuto => {
                "write true or false, \"auto\", or a number and its unit, such as \"4 GiB\" (KiB, MiB, GiB, TiB; KB, MB, GB, TB; B)".into()
            }
            Kind::Float(bounds) => format!("give a number {}", bounds.text),
            Kind::Texts(item) | Kind::Counts(item) => item.rule.into(),
            Kind::Text(word) => word.rule.into(),
            Kind::RopeScaling => format!("give {}", rope_scaling_forms()),
            Kind::Corpora => format!("give a list of {}; schedule may be left out", form(&CORPUS_KEYS)),
            Kind::Weights => {
                format!("give a list of {}, such as {{ tokens = \"2T\", weight = 0.3 }}", form(&WEIGHT_KEYS))
            }
            Kind::Ramp => format!(
                "give a list of {}, such as {{ tokens = \"69B\", global_batch = \"32M tokens\" }}",
                form(&RAMP_KEYS)
            ),
            Kind::Groups => format!("give a list of {}; all but match may be left out", form(&GROUP_KEYS)),
        }
    }
}

/// `"a", "b", "c"`.
pub(crate) fn quote_list(words: &[&str]) -> String {
    words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ")
}

fn integer_value(integer: &DeInteger<'_>) -> Option<u64> {
    u64::from_str_radix(integer.as_str(), integer.radix()).ok()
}

fn float_value(value: &DeValue<'_>) -> Option<f64> {
    match value {
        DeValue::Float(float) => DeFloat::as_str(float).parse().ok(),
        DeValue::Integer(integer) => {
            i64::from_str_radix(integer.as_str(), integer.radix()).ok().map(|integer| integer as f64)
        }
        _ => None,
    }
}

fn refuse_element(reading: Reading<'_>, item: &Item, element: &Spanned<DeValue<'_>>) -> Problem {
    let text = reading.text.get(element.span()).unwrap_or_default();
    let problem = format!("{}: {} is not one of the {} it lists", reading.path, quoted(text), item.plural);
    Problem::new(problem, item.rule).within(element.span())
}
