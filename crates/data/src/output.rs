//! What a folder of prepared data holds, by name, and how numbers are written there.

pub(crate) const DATA_JSON: &str = "data.json";
pub(crate) const FILES_JSONL: &str = "files.jsonl";
/// The first shard to train on: every finished folder has one.
pub(crate) const TRAIN_SHARD: &str = "train.shard";
pub(crate) const TOKENIZER_JSON: &str = "tokenizer.json";

/// Whether a name is that of something that is written into a folder of prepared data.
pub(crate) fn is_output(name: &str) -> bool {
    [DATA_JSON, FILES_JSONL, TOKENIZER_JSON].contains(&name) || name.ends_with(".shard")
}

/// 16 digits.
pub(crate) fn hexadecimal(value: u64) -> String {
    format!("{value:016x}")
}

pub(crate) mod hexadecimal {
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&super::hexadecimal(*value))
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16)
            .map_err(|_| de::Error::invalid_value(de::Unexpected::Str(&text), &"16 hexadecimal digits"))
    }
}
