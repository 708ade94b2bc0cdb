//! `lockstep config`: the keys of a config, from the schema.

use crate::Format;
use crate::failure::{Failure, Result};
use crate::style;
use crate::table::wrapped;
use lockstep_config::{FoundKey, KeyDoc, MissingFeature, keys_at, nearest, presets, schema, search};
use std::io::Write;

#[derive(clap::Args)]
pub struct Args {
    /// Show one key or one table: train.seq, seq, parallel.
    #[arg(value_name = "KEY", conflicts_with = "search")]
    key: Option<String>,
    /// Find keys by what they are called elsewhere: fsdp, "master weights", "activation checkpointing".
    #[arg(long, value_name = "WORDS")]
    search: Option<String>,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(args: Args) -> Result<()> {
    let whole = args.key.is_none() && args.search.is_none();
    let (keys, missing) = match (&args.key, &args.search) {
        (Some(path), _) => (at(path)?, Vec::new()),
        (None, Some(words)) => searched(words)?,
        (None, None) => (schema(), Vec::new()),
    };
    let mut out = std::io::stdout().lock();
    if args.format == Format::Json {
        writeln!(out, "{:#}", serde_json::json!(keys))?;
        return Ok(());
    }
    for MissingFeature { what, instead } in missing {
        write!(out, "{}", wrapped(&format!("{what} is not there yet: {instead}"), "    "))?;
    }
    let mut table = "";
    for key in &keys {
        let (section, name) = key.path.split_once('.').unwrap_or(("", key.path));
        if section != table {
            writeln!(out, "{}{}", if table.is_empty() { "" } else { "\n" }, style::heading(&format!("[{section}]")))?;
            table = section;
        }
        write!(out, "{}", entry(key, name, !whole))?;
    }
    if whole {
        let names: Vec<&str> = presets().collect();
        write!(out, "\n{}", wrapped(&format!("presets: {}", names.join(", ")), ""))?;
    }
    Ok(())
}

/// A key, its default, type and meaning; with what else it is called, where it was asked for.
fn entry(key: &KeyDoc, name: &str, names: bool) -> String {
    let mut text = wrapped(&format!("{} = {}  ({})", style::name(name), key.default, key.type_text), "        ");
    text += &wrapped(&format!("    {}", key.meaning), "    ");
    if names && !key.synonyms.is_empty() {
        text += &wrapped(&format!("    also called: {}", key.synonyms.join(", ")), "    ");
    }
    if names && !key.old_names.is_empty() {
        text += &format!("    old name: {}\n", key.old_names.join(", "));
    }
    text
}

fn at(path: &str) -> Result<Vec<KeyDoc>> {
    let found = keys_at(path);
    if !found.is_empty() {
        return Ok(found);
    }
    let keys = schema();
    let names = keys.iter().flat_map(|key| [Some(key.path), key.path.split('.').next_back()].into_iter().flatten());
    let (whole, last) = (search(path), search(path.rsplit('.').next().unwrap_or(path)));
    if let Some(MissingFeature { what, instead }) = whole.missing.first().or(last.missing.first()) {
        return Err(Failure::request(format!("{path} is not a key of the config: {what} is not there yet"), *instead));
    }
    let called = whole.keys.first().map(|key| key.path);
    let guess = called.or_else(|| nearest(path, names));
    let hint = match guess {
        Some(guess) => format!("did you mean `{guess}`?"),
        None => {
            "`lockstep config` lists all keys; `lockstep config --search WORDS` finds them by what they mean".to_owned()
        }
    };
    Err(Failure::request(format!("{path} is not a key of the config"), hint))
}

fn searched(words: &str) -> Result<(Vec<KeyDoc>, Vec<MissingFeature>)> {
    let FoundKey { keys, missing } = search(words);
    match keys.is_empty() && missing.is_empty() {
        false => Ok((keys, missing)),
        true => Err(Failure::request(
            format!("no key goes by \"{words}\""),
            "try one word of it, or list all keys with `lockstep config`",
        )),
    }
}
