//! `lockstep config`: every key, from the schema.

use crate::Format;
use crate::failure::Failure;
use std::io::Write;

#[derive(clap::Args)]
pub struct Args {
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(args: Args) -> Result<(), Failure> {
    let keys = lockstep_config::schema();
    let mut out = std::io::stdout().lock();
    if args.format == Format::Json {
        writeln!(out, "{:#}", serde_json::json!(keys))?;
        return Ok(());
    }
    let mut table = "";
    for key in &keys {
        let (section, name) = key.path.split_once('.').unwrap_or(("", key.path));
        if section != table {
            writeln!(out, "{}[{section}]", if table.is_empty() { "" } else { "\n" })?;
            table = section;
        }
        writeln!(out, "{name} = {}  ({})\n    {}", key.default, key.type_text, key.meaning)?;
    }
    let presets: Vec<&str> = lockstep_config::presets().collect();
    writeln!(out, "\npresets: {}", presets.join(", "))?;
    Ok(())
}
