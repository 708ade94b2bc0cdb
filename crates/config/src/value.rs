//! Values between their TOML text and their typed fields.

use std::fmt;

use crate::words::LayerType;

/// RoPE scaling for a longer context.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScalingConfig {
    /// That of Llama 3.
    Llama3 {
        /// How many times longer the context becomes.
        factor: f64,
        /// Wavelengths longer than `original_context / low_freq_factor` are scaled in full.
        low_freq_factor: f64,
        /// Wavelengths shorter than `original_context / high_freq_factor` are left alone.
        high_freq_factor: f64,
        /// The context length, in tokens, before scaling.
        original_context: usize,
    },
    /// The same for all frequencies.
    Linear {
        /// How many times longer the context becomes.
        factor: f64,
    },
    /// YaRN.
    Yarn {
        /// How many times longer the context becomes.
        factor: f64,
        /// The context length, in tokens, before scaling.
        original_context: usize,
        /// Frequencies that turn at least as often in the original context are left alone.
        beta_fast: f64,
        /// Frequencies that turn at most as often are scaled in full.
        beta_slow: f64,
        /// What cosines and sines are multiplied by; if not given, `0.1 · ln(factor) + 1`.
        attention_factor: Option<f64>,
        /// Scores of attention are multiplied by the square of `0.1 · mscale_all_dim · ln(factor) + 1`; if not given, by nothing.
        mscale_all_dim: Option<f64>,
        /// Whether the frequencies between which is interpolated are rounded to whole indices.
        truncate: bool,
    },
}

impl RopeScalingConfig {
    /// What it is called.
    pub const fn name(&self) -> &'static str {
        match self {
            RopeScalingConfig::Llama3 { .. } => "llama3",
            RopeScalingConfig::Linear { .. } => "linear",
            RopeScalingConfig::Yarn { .. } => "yarn",
        }
    }

    /// What scores of attention are multiplied by.
    pub fn score_factor(&self) -> f64 {
        match self {
            RopeScalingConfig::Yarn { factor, mscale_all_dim: Some(weight), .. } => {
                (0.1 * weight * factor.ln() + 1.0).powi(2)
            }
            _ => 1.0,
        }
    }
}

/// As an inline table of `run.toml`.
impl fmt::Display for RopeScalingConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RopeScalingConfig::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => write!(
                f,
                "{{ factor = {factor:?}, low_freq_factor = {low_freq_factor:?}, \
                 high_freq_factor = {high_freq_factor:?}, original_context = {original_context} }}"
            ),
            RopeScalingConfig::Linear { factor } => write!(f, "{{ type = \"linear\", factor = {factor:?} }}"),
            RopeScalingConfig::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                attention_factor,
                mscale_all_dim,
                truncate,
            } => {
                write!(
                    f,
                    "{{ type = \"yarn\", factor = {factor:?}, original_context = {original_context}, \
                     beta_fast = {beta_fast:?}, beta_slow = {beta_slow:?}"
                )?;
                if let Some(attention_factor) = attention_factor {
                    write!(f, ", attention_factor = {attention_factor:?}")?;
                }
                if let Some(weight) = mscale_all_dim {
                    write!(f, ", mscale_all_dim = {weight:?}")?;
                }
                write!(f, ", truncate = {truncate} }}")
            }
        }
    }
}

/// One corpus of a mixture.
#[derive(Clone, Debug, PartialEq)]
pub struct CorpusConfig {
    /// Its name: letters, digits, `-` and `_`.
    pub name: String,
    /// Files, or folders to search for files, relative to the config file's folder.
    pub paths: Vec<String>,
    /// Its share of the samples, relative to the others'.
    pub weight: f64,
    /// Other weights later in the run, in order.
    pub schedule: Vec<WeightConfig>,
}

/// A weight of a corpus, and from when on it counts.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightConfig {
    /// Tokens that a run has seen before the first sample of this weight.
    pub tokens: u64,
    /// The share of the samples from there on; 0 for none.
    pub weight: f64,
}

/// What stands for a value that is found when a run begins.
pub(crate) const AUTO: &str = "auto";

/// Steps from one checkpoint to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveEvery {
    /// This many; with 0 none but the last is saved.
    Steps(u64),
    /// As many as lose the least time to failures and to saving, found when a run begins.
    Auto,
}

/// A size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

/// How much waits in the memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadSize {
    /// All of it, or nothing.
    All(bool),
    /// At most this many bytes of a rank.
    Most(Bytes),
    /// What lets a run fit the memory of its device at the least cost, found when it begins.
    Auto,
}

impl OffloadSize {
    /// At most this many bytes.
    pub fn of(bytes: u64) -> Self {
        match bytes {
            0 => OffloadSize::All(false),
            u64::MAX => OffloadSize::All(true),
            _ => OffloadSize::Most(Bytes(bytes)),
        }
    }

    /// Most bytes of a rank; where it has to be found yet, none.
    pub fn most_bytes(self) -> u64 {
        match self {
            OffloadSize::All(true) => u64::MAX,
            OffloadSize::Most(Bytes(bytes)) => bytes,
            OffloadSize::All(false) | OffloadSize::Auto => 0,
        }
    }
}

/// A size of steps, and from when on it counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RampConfig {
    /// Tokens that a run has seen before the first step of this size.
    pub tokens: u64,
    /// Sequences per optimizer step from there on.
    pub global_batch: usize,
}

/// Other numbers for some parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupConfig {
    /// Which, by their Hugging Face names: `*` stands for any text, `?` for any letter.
    pub pattern: String,
    /// Times the learning rate.
    pub lr_scale: Option<f64>,
    /// Instead of the optimizer's.
    pub weight_decay: Option<f64>,
}

/// The value of a key.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Count(u64),
    /// A batch given in tokens. `resolve` turns it into a count of sequences.
    Tokens(u64),
    Bytes(u64),
    Float(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Counts(Vec<u64>),
    RopeScaling(RopeScalingConfig),
    Corpora(Vec<CorpusConfig>),
    /// Of one of the corpora.
    Weights(Vec<WeightConfig>),
    Groups(Vec<GroupConfig>),
    /// Tokens and a batch, which `resolve` turns into a count of sequences.
    Ramp(Vec<(u64, Value)>),
}

/// Writes the value as TOML that reads back as the same value.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Count(n) => write!(f, "{n}"),
            Value::Tokens(n) => write!(f, "\"{n} tokens\""),
            Value::Bytes(n) => {
                let units = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1u64)];
                let (unit, size) = units.into_iter().find(|(_, size)| n.is_multiple_of(*size)).unwrap_or(("B", 1));
                write!(f, "\"{} {unit}\"", n / size)
            }
            Value::Float(x) => write!(f, "{x:?}"),
            Value::Bool(b) => write!(f, "{b}"),
            Value::Text(text) => write_string(f, text),
            Value::Texts(texts) => write_list(f, texts, |f, text| write_string(f, text)),
            Value::Counts(counts) => write_list(f, counts, |f, count| write!(f, "{count}")),
            Value::Corpora(corpora) => write_list(f, corpora, |f, CorpusConfig { name, paths, weight, schedule }| {
                write!(f, "{{ name = \"{name}\", paths = {}, weight = {weight:?}", Value::Texts(paths.clone()))?;
                if !schedule.is_empty() {
                    write!(f, ", schedule = {}", Value::Weights(schedule.clone()))?;
                }
                f.write_str(" }")
            }),
            Value::Weights(weights) => write_list(f, weights, |f, WeightConfig { tokens, weight }| {
                write!(f, "{{ tokens = {tokens}, weight = {weight:?} }}")
            }),
            Value::Ramp(stages) => {
                write_list(f, stages, |f, (tokens, batch)| write!(f, "{{ tokens = {tokens}, global_batch = {batch} }}"))
            }
            Value::Groups(groups) => write_list(f, groups, |f, GroupConfig { pattern, lr_scale, weight_decay }| {
                write!(f, "{{ match = {}", Value::Text(pattern.clone()))?;
                let given = [("lr_scale", lr_scale), ("weight_decay", weight_decay)];
                for (name, x) in given.into_iter().filter_map(|(name, x)| x.map(|x| (name, x))) {
                    write!(f, ", {name} = {x:?}")?;
                }
                f.write_str(" }")
            }),
            Value::RopeScaling(scaling) => write!(f, "{scaling}"),
        }
    }
}

fn write_list<T>(
    f: &mut fmt::Formatter<'_>,
    items: &[T],
    write: impl Fn(&mut fmt::Formatter<'_>, &T) -> fmt::Result,
) -> fmt::Result {
    f.write_str("[")?;
    for (i, item) in items.iter().enumerate() {
        f.write_str(if i > 0 { ", " } else { "" })?;
        write(f, item)?;
    }
    f.write_str("]")
}

/// A TOML basic string, always on one line.
fn write_string(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    f.write_str("\"")?;
    for c in text.chars() {
        match c {
            '"' | '\\' => write!(f, "\\{c}")?,
            c if c.is_control() => write!(f, "\\u{:04X}", u32::from(c))?,
            c => write!(f, "{c}")?,
        }
    }
    f.write_str("\"")
}

/// A Rust type that a key can have.
pub(crate) trait Field: Sized {
    /// `None` when the value is of another type or a value that must be there is not.
    fn from_value(value: Option<Value>) -> Option<Self>;
    /// `None` for a key that is not set.
    fn to_value(&self) -> Option<Value>;
}

macro_rules! field {
    ($($ty:ty: $from:pat => $taken:expr, $self:ident => $to:expr;)+) => {$(
        impl Field for $ty {
            fn from_value(value: Option<Value>) -> Option<Self> {
                match value {
                    $from => $taken,
                    _ => None,
                }
            }

            fn to_value(&self) -> Option<Value> {
                let $self = self;
                $to
            }
        }
    )+};
}

field! {
    u8: Some(Value::Count(n)) => u8::try_from(n).ok(), this => Some(Value::Count(u64::from(*this)));
    u64: Some(Value::Count(n)) => Some(n), this => Some(Value::Count(*this));
    usize: Some(Value::Count(n)) => usize::try_from(n).ok(), this => Some(Value::Count(*this as u64));
    Bytes: Some(Value::Bytes(n)) => Some(Bytes(n)), this => Some(Value::Bytes(this.0));
    f64: Some(Value::Float(x)) => Some(x), this => Some(Value::Float(*this));
    bool: Some(Value::Bool(b)) => Some(b), this => Some(Value::Bool(*this));
    String: Some(Value::Text(text)) => Some(text), this => Some(Value::Text(this.clone()));
    Vec<String>: Some(Value::Texts(texts)) => Some(texts), this => Some(Value::Texts(this.clone()));
    Vec<CorpusConfig>: Some(Value::Corpora(corpora)) => Some(corpora), this => Some(Value::Corpora(this.clone()));
    Vec<GroupConfig>: Some(Value::Groups(groups)) => Some(groups), this => Some(Value::Groups(this.clone()));
    RopeScalingConfig: Some(Value::RopeScaling(s)) => Some(s), this => Some(Value::RopeScaling(this.clone()));
}

impl Field for SaveEvery {
    fn from_value(value: Option<Value>) -> Option<Self> {
        match value {
            Some(Value::Count(steps)) => Some(SaveEvery::Steps(steps)),
            Some(Value::Text(word)) if word == AUTO => Some(SaveEvery::Auto),
            _ => None,
        }
    }

    fn to_value(&self) -> Option<Value> {
        match self {
            SaveEvery::Steps(steps) => Some(Value::Count(*steps)),
            SaveEvery::Auto => Some(Value::Text(AUTO.into())),
        }
    }
}

impl Field for OffloadSize {
    fn from_value(value: Option<Value>) -> Option<Self> {
        match value {
            Some(Value::Bool(all)) => Some(OffloadSize::All(all)),
            Some(Value::Bytes(bytes)) => Some(OffloadSize::Most(Bytes(bytes))),
            Some(Value::Text(word)) if word == AUTO => Some(OffloadSize::Auto),
            _ => None,
        }
    }

    fn to_value(&self) -> Option<Value> {
        Some(match self {
            OffloadSize::All(all) => Value::Bool(*all),
            OffloadSize::Most(Bytes(bytes)) => Value::Bytes(*bytes),
            OffloadSize::Auto => Value::Text(AUTO.into()),
        })
    }
}

impl Field for Vec<usize> {
    fn from_value(value: Option<Value>) -> Option<Self> {
        let Some(Value::Counts(counts)) = value else { return None };
        counts.into_iter().map(|count| usize::try_from(count).ok()).collect()
    }

    fn to_value(&self) -> Option<Value> {
        Some(Value::Counts(self.iter().map(|count| *count as u64).collect()))
    }
}

impl Field for Vec<LayerType> {
    fn from_value(value: Option<Value>) -> Option<Self> {
        let Some(Value::Texts(words)) = value else { return None };
        words.into_iter().map(|word| LayerType::from_value(Some(Value::Text(word)))).collect()
    }

    fn to_value(&self) -> Option<Value> {
        Some(Value::Texts(self.iter().map(|kind| kind.word().to_owned()).collect()))
    }
}

impl Field for Vec<RampConfig> {
    fn from_value(value: Option<Value>) -> Option<Self> {
        let Some(Value::Ramp(stages)) = value else { return None };
        let stage = |(tokens, batch)| Some(RampConfig { tokens, global_batch: usize::from_value(Some(batch))? });
        stages.into_iter().map(stage).collect()
    }

    fn to_value(&self) -> Option<Value> {
        let stage = |stage: &RampConfig| (stage.tokens, Value::Count(stage.global_batch as u64));
        Some(Value::Ramp(self.iter().map(stage).collect()))
    }
}

impl<T: Field> Field for Option<T> {
    fn from_value(value: Option<Value>) -> Option<Self> {
        match value {
            None => Some(None),
            some => T::from_value(some).map(Some),
        }
    }

    fn to_value(&self) -> Option<Value> {
        self.as_ref().and_then(T::to_value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_as_toml() {
        assert_eq!(Value::Float(1e-5).to_string(), "1e-5");
        assert_eq!(Value::Bytes(3 << 29).to_string(), "\"1536 MiB\"");
        assert_eq!(Value::Bytes(1_000_000_001).to_string(), "\"1000000001 B\"");
        assert_eq!(Value::Float(500000.0).to_string(), "500000.0");
        assert_eq!(Value::Text("a \"b\" \\ \n".into()).to_string(), r#""a \"b\" \\ \u000A""#);
        assert_eq!(Value::Texts(vec!["a".into(), "b".into()]).to_string(), r#"["a", "b"]"#);
        assert_eq!(Value::Counts(vec![3, 4]).to_string(), "[3, 4]");
    }

    #[test]
    fn an_optional_field_may_be_missing_and_a_plain_one_may_not() {
        assert_eq!(Option::<String>::from_value(None), Some(None));
        assert_eq!(String::from_value(None), None);
        assert_eq!(usize::from_value(Some(Value::Bool(true))), None);
    }
}
