//! Keys by what people call them: the names, synonyms and old names of their declarations.

use crate::declare::{Key, KeyDoc};
use crate::schema::{KEYS, TABLES};

/// Every key of `run.toml`, in the order of the schema.
pub fn schema() -> Vec<KeyDoc> {
    KEYS.iter().map(Key::doc).collect()
}

/// What keys a user may look for, and what is not there yet: table, names, what they stand for.
const MISSING: &[(&str, &[&str], &str)] = &[("precision", &["fp8", "mxfp8", "nvfp4"], "fp8 and narrower")];

/// What a search found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundKey {
    /// Keys, the nearest first.
    pub keys: Vec<KeyDoc>,
    /// What the words stand for and is not there yet.
    pub missing: Vec<&'static str>,
}

/// The keys that go by these words: by name, synonym or old name, else by their meaning.
pub fn search(words: &str) -> FoundKey {
    let wanted = plain(words);
    let missing = MISSING.iter().filter(|(_, names, what)| {
        names.iter().any(|name| plain(name) == wanted) || (wanted.len() > 2 && plain(what).contains(&wanted))
    });
    let missing = missing.map(|(_, _, what)| *what).collect();
    let mut ranked: Vec<(u8, KeyDoc)> =
        KEYS.iter().zip(schema()).filter_map(|(key, doc)| Some((rank(key, &wanted)?, doc))).collect();
    // What is called so hides what only mentions it.
    let named = ranked.iter().any(|(rank, _)| *rank < MENTIONED);
    ranked.retain(|(rank, _)| !named || *rank < MENTIONED);
    ranked.sort_by_key(|(rank, _)| *rank);
    FoundKey { keys: ranked.into_iter().map(|(_, doc)| doc).collect(), missing }
}

/// The keys at `table`, `table.key` or `key`, by their names of today or before.
pub fn keys_at(path: &str) -> Vec<KeyDoc> {
    let path = path.trim().trim_matches(['[', ']']);
    let at = |key: &Key| {
        let own = [key.name].into_iter().chain(key.old_names.iter().copied());
        key.table == path || own.into_iter().any(|name| name == path || format!("{}.{name}", key.table) == path)
    };
    KEYS.iter().zip(schema()).filter(|(key, _)| at(key)).map(|(_, doc)| doc).collect()
}

const MENTIONED: u8 = 2;

fn rank(key: &Key, wanted: &str) -> Option<u8> {
    let names: Vec<String> = names(key).map(plain).collect();
    match () {
        _ if wanted.is_empty() => None,
        _ if names.iter().any(|name| name == wanted) => Some(0),
        _ if wanted.len() > 2 && names.iter().any(|name| name.contains(wanted)) => Some(1),
        _ if wanted.len() > 2 && plain(key.meaning).contains(wanted) => Some(MENTIONED),
        _ => None,
    }
}

fn names(key: &Key) -> impl Iterator<Item = &'static str> {
    let own = [key.path, key.name].into_iter();
    own.chain(key.synonyms.iter().copied()).chain(key.old_names.iter().copied())
}

/// Lower case, with blanks for what joins words.
fn plain(text: &str) -> String {
    text.to_lowercase().replace(['_', '-', '.'], " ").trim().to_owned()
}

/// The key that goes by this name in another table, or by this synonym; those of `table` first.
pub(crate) fn meant(table: &str, name: &str) -> Option<&'static Key> {
    let wanted = plain(name);
    let known = |key: &&Key| names(key).any(|known| plain(known) == wanted);
    KEYS.iter().filter(|key| key.table == table).find(known).or_else(|| KEYS.iter().find(known))
}

/// What `table.name` would be about, where that is not there yet.
pub(crate) fn missing(table: &str, name: &str) -> Option<&'static str> {
    debug_assert!(MISSING.iter().all(|(table, _, _)| TABLES.contains(table)));
    let wanted = plain(name);
    let found = MISSING.iter().find(|(of, names, _)| *of == table && names.iter().any(|name| plain(name) == wanted));
    found.map(|(_, _, what)| *what)
}
