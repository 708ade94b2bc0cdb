//! Words for a shell.

/// A word as a shell takes it for itself: as it is, or in single quotes.
pub fn shell_quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=:,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back_from_a_shell() {
        for (word, quoted) in [
            ("runs/a-1.toml", "runs/a-1.toml"),
            ("my run", "'my run'"),
            ("it's", r"'it'\''s'"),
            ("optimizer.schedule=\"wsd\"", "'optimizer.schedule=\"wsd\"'"),
            ("", "''"),
        ] {
            assert_eq!(shell_quoted(word), quoted);
        }
    }
}
