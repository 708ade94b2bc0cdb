//! Patterns of names: `*` stands for any text, `?` for any letter.

/// Whether a name fits a pattern: `*` stands for any text, `?` for any letter.
pub fn fits_pattern(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // Where the last `*` stands, and how far its text reaches.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(c) if *c == '?' || *c == name[n] => (p, n) = (p + 1, n + 1),
            _ => {
                let Some((at, reach)) = star else { return false };
                star = Some((at, reach + 1));
                (p, n) = (at + 1, reach + 1);
            }
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// Names as a list of all shows them: each once, with `*` for numbers.
pub fn names_without_numbers<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let word = |word: &'a str| if word.parse::<u64>().is_ok() { "*" } else { word };
    let mut shown: Vec<String> = Vec::new();
    for name in names.map(|name| name.split('.').map(word).collect::<Vec<_>>().join(".")) {
        if !shown.contains(&name) {
            shown.push(name);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::fits_pattern;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, fits) in [
            ("*", "", true),
            ("a*c", "abcbc", true),
            ("a*c", "abcb", false),
            ("*.norm*", "model.norm.weight", true),
            ("*norm*", "model.layers.0.input_layernorm.weight", true),
            ("model.layers.?.mlp.*", "model.layers.7.mlp.up_proj.weight", true),
            ("model.layers.?.mlp.*", "model.layers.17.mlp.up_proj.weight", false),
            ("norm", "model.norm.weight", false),
            ("a**b", "ab", true),
            ("", "a", false),
        ] {
            assert_eq!(fits_pattern(pattern, name), fits, "{pattern} on {name}");
        }
    }
}
