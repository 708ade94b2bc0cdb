//! Keys and tables by the names that a file or an option gives them.

use crate::declare::Key;
use crate::error::Problem;
use crate::schema::{KEYS, TABLES};
use crate::source::quoted;
use crate::{search, suggest};

/// A key, and the old name that it was given by, if it was.
pub(crate) struct Named {
    pub key: &'static Key,
    pub old_name: Option<&'static str>,
}

/// The key at `table.name`, or why there is none.
pub(crate) fn key(table: &str, name: &str) -> Result<Named, Problem> {
    let siblings = || KEYS.iter().filter(|key| key.table == table);
    if let Some(key) = siblings().find(|key| key.name == name) {
        return Ok(Named { key, old_name: None });
    }
    let renamed = |key: &'static Key| {
        let old_name = key.old_names.iter().copied().find(|old| *old == name)?;
        Some(Named { key, old_name: Some(old_name) })
    };
    if let Some(named) = siblings().find_map(renamed) {
        return Ok(named);
    }
    let shown = quoted(name);
    let list =
        || format!("the keys of [{table}] are {}", siblings().map(|key| key.name).collect::<Vec<_>>().join(", "));
    if let Some(missing) = search::missing(table, name) {
        return Err(Problem::new(format!("{table}.{shown}: {} is not there yet", missing.what), missing.instead));
    }
    let problem = format!("{table}.{shown} is not a key of [{table}]");
    let hint = if let Some(key) = search::meant(table, name) {
        let near = if key.table == table { key.name } else { key.path };
        format!("did you mean `{near}`?")
    } else if let Some(near) = suggest::nearest(name, siblings().map(|key| key.name)) {
        format!("did you mean `{near}`?")
    } else {
        list()
    };
    Err(Problem::new(problem, hint))
}

/// Checks that `[table]` exists, or says why not.
pub(crate) fn table(table: &str) -> Result<(), Problem> {
    if TABLES.contains(&table) {
        return Ok(());
    }
    let problem = format!("{} is not a table of the config", quoted(table));
    let hint = if let Some(key) = search::meant("", table) {
        format!("did you mean `{}`?", key.path)
    } else if let Some(near) = suggest::nearest(table, TABLES.iter().copied()) {
        format!("did you mean `{near}`?")
    } else {
        format!("the tables are {}", TABLES.join(", "))
    };
    Err(Problem::new(problem, hint))
}
