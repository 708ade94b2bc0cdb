//! `--write`: the keys of a layout in the config file, with its comments and everything else as they are.

use super::ranking;
use crate::ConfigArgs;
use crate::failure::{Failure, Result};
use lockstep_config::Config;
use lockstep_plan::{LayoutChoice, RankedLayout};
use std::io::Write;

/// Writes the keys that differ from the config's own, and the steps between checkpoints where the config says none.
pub(super) fn keys(args: &ConfigArgs, config: &Config, layout: &RankedLayout, save_every: Option<u64>) -> Result<()> {
    let path = &args.config;
    let failed = |e: std::io::Error| {
        Failure::run(format!("cannot write {}: {e}", path.display()), "check the file and its folder")
    };
    let before = std::fs::read_to_string(path).map_err(failed)?;
    let differ: Vec<(&str, String)> = ranking::keys(layout)
        .into_iter()
        .map(|(key, value)| (key, value.to_string()))
        .chain(
            save_every
                .filter(|_| !config.is_given("checkpoint.every"))
                .map(|steps| ("checkpoint.every", steps.to_string())),
        )
        .filter(|(key, value)| config.value(key) != *value)
        .collect();
    let after = differ.iter().fold(before, |text, (key, value)| with_key(&text, key, value));
    let name = path.display().to_string();
    let read = Config::parse(&after, &name, &args.set);
    let as_meant = read.is_ok_and(|read| LayoutChoice::of(&read) == layout.choice);
    if !as_meant {
        let keys: String = differ.iter().map(|(key, value)| format!("\n  {key} = {value}")).collect();
        return Err(Failure::run(
            format!("{name} is written in a way that --write cannot change"),
            format!("set these keys yourself:{keys}"),
        ));
    }
    let temporary = path.with_extension("toml.new");
    std::fs::write(&temporary, after).and_then(|()| std::fs::rename(&temporary, path)).map_err(failed)?;
    let list: Vec<&str> = differ.iter().map(|(key, _)| *key).collect();
    let what = if list.is_empty() { "nothing: it has this layout already".to_owned() } else { list.join(", ") };
    writeln!(std::io::stdout(), "wrote to {name}: {what}")?;
    Ok(())
}

/// The text of a config with another value of a key: in its line, at the end of its table, or in a new table.
fn with_key(text: &str, key: &str, value: &str) -> String {
    let (table, name) = key.split_once('.').unwrap_or(("", key));
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let is_header = |line: &str| line.trim_start().starts_with('[');
    let header = format!("[{table}]");
    let Some(start) = lines.iter().position(|line| line.split('#').next().unwrap_or("").trim() == header) else {
        if lines.last().is_some_and(|line| !line.trim().is_empty()) {
            lines.push(String::new());
        }
        lines.extend([header, format!("{name} = {value}")]);
        return lines.join("\n") + "\n";
    };
    let end = (start + 1..lines.len()).find(|i| is_header(&lines[*i])).unwrap_or(lines.len());
    let own = (start + 1..end).find(|i| lines[*i].split('=').next().is_some_and(|left| left.trim() == name));
    match own {
        Some(at) => {
            let line = &lines[at];
            let left = line.split('=').next().unwrap_or(name).trim_end();
            // A `#` in a text is not a comment: what this breaks is noticed when the result is read.
            let comment = line.split_once('#').map_or(String::new(), |(_, comment)| format!("  #{comment}"));
            lines[at] = format!("{left} = {value}{comment}");
        }
        None => {
            let last = (start..end).rev().find(|i| !lines[*i].trim().is_empty()).unwrap_or(start);
            lines.insert(last + 1, format!("{name} = {value}"));
        }
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::with_key;

    #[test]
    fn a_key_is_changed_added_or_given_a_table_and_comments_stay() {
        let text = "# mine\n[parallel]\ntp = 2  # inside a node\n\n[train]\nseq = 8\n";
        let changed = with_key(text, "parallel.tp", "4");
        assert_eq!(changed, text.replace("tp = 2", "tp = 4"));
        assert_eq!(with_key(text, "parallel.pp", "2"), text.replace("node\n", "node\npp = 2\n"));
        assert_eq!(with_key(text, "recompute.policy", "\"full\""), format!("{text}\n[recompute]\npolicy = \"full\"\n"));
    }
}
