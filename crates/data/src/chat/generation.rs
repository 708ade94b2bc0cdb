//! `{% generation %}` in a template: what stands inside is written by the assistant.
//!
//! The tag is Hugging Face's own. It becomes tags that minijinja knows: a scope, as Jinja has one there, and a filter.

use std::borrow::Cow;

/// The filter that sees the text of a block.
pub(super) const FILTER: &str = "__generation";

/// A template whose blocks go through [`FILTER`], and whether it has any. Tags stay in their lines.
pub(super) fn rewrite(source: &str) -> (String, bool) {
    let (mut text, mut found) = (String::with_capacity(source.len()), false);
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let (before, from) = rest.split_at(at);
        text.push_str(before);
        let length = match from.as_bytes().get(1) {
            Some(b'#') => from.find("#}").map_or(from.len(), |end| end + 2),
            Some(b'{') => end_of(from, "}}"),
            Some(b'%') => end_of(from, "%}"),
            _ => 1,
        };
        let (tag, after) = from.split_at(length);
        rest = after;
        match Tag::of(tag) {
            Some(Tag { left, word: "generation", right }) => {
                text.push_str(&format!("{{%{left} with %}}{{% filter {FILTER} {right}%}}"));
                found = true;
            }
            Some(Tag { left, word: "endgeneration", right }) => {
                text.push_str(&format!("{{%{left} endfilter %}}{{% endwith {right}%}}"));
            }
            Some(Tag { word: "raw", .. }) => {
                text.push_str(tag);
                let end = end_of_raw(rest);
                text.push_str(&rest[..end]);
                rest = &rest[end..];
            }
            _ if tag.starts_with("{#") => text.push_str(tag),
            _ => text.push_str(&joined(tag)),
        }
    }
    text.push_str(rest);
    (text, found)
}

/// A tag whose strings go on where a line ends with a backslash, as in Python. The lines stay as many: their ends move after the string.
fn joined(tag: &str) -> Cow<'_, str> {
    const CONTINUED: &str = "\\\n";
    if !tag.contains(CONTINUED) {
        return Cow::Borrowed(tag);
    }
    let (mut text, mut quote, mut lines) = (String::with_capacity(tag.len()), None, 0);
    let mut letters = tag.chars();
    while let Some(c) = letters.next() {
        match (quote, c) {
            (Some(_), '\\') => match letters.next() {
                Some('\n') => lines += 1,
                next => text.extend([Some(c), next].into_iter().flatten()),
            },
            (Some(open), _) if c == open => {
                text.push(c);
                text.extend(std::iter::repeat_n('\n', std::mem::take(&mut lines)));
                quote = None;
            }
            (None, '"' | '\'') => {
                text.push(c);
                quote = Some(c);
            }
            _ => text.push(c),
        }
    }
    Cow::Owned(text)
}

/// A `{% tag %}` of one word, with its whitespace control.
struct Tag<'a> {
    left: &'a str,
    word: &'a str,
    right: &'a str,
}

impl<'a> Tag<'a> {
    fn of(text: &'a str) -> Option<Self> {
        let inner = text.strip_prefix("{%")?.strip_suffix("%}")?;
        let is_control = |c: char| c == '-' || c == '+';
        let left = inner.len() - inner.strip_prefix(is_control).unwrap_or(inner).len();
        let (left, inner) = inner.split_at(left);
        let right = inner.strip_suffix(is_control).unwrap_or(inner).len();
        let (inner, right) = inner.split_at(right);
        Some(Tag { left, word: inner.trim(), right })
    }
}

/// The bytes up to and with `end`, which does not count inside of a string.
fn end_of(text: &str, end: &str) -> usize {
    let (mut quote, mut escaped) = (None, false);
    for (at, c) in text.char_indices().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if c == '"' || c == '\'' => quote = Some(c),
            None if text[at..].starts_with(end) => return at + end.len(),
            None => {}
        }
    }
    text.len()
}

/// The bytes before the tag that ends raw text.
fn end_of_raw(text: &str) -> usize {
    let ends = |at: &usize| {
        let from = &text[*at..];
        Tag::of(&from[..end_of(from, "%}")]).is_some_and(|tag| tag.word == "endraw")
    };
    text.match_indices("{%").map(|(at, _)| at).find(ends).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(source: &str) -> String {
        let (text, found) = rewrite(source);
        assert!(found);
        text
    }

    #[test]
    fn blocks_become_a_scope_and_a_filter_with_the_same_whitespace_control() {
        assert_eq!(
            rewritten("a\n  {%- generation -%}\n b {% endgeneration %}"),
            "a\n  {%- with %}{% filter __generation -%}\n b {% endfilter %}{% endwith %}"
        );
        assert_eq!(
            rewritten("{%+generation%}é{%-  endgeneration -%}"),
            "{%+ with %}{% filter __generation %}é{%- endfilter %}{% endwith -%}"
        );
    }

    #[test]
    fn strings_go_on_after_a_backslash_at_the_end_of_a_line() {
        let source = "{% set x = \"a \\\nb\\\\\" %}\n{{ 'it\\'s \\\n\\\nso' ~ \"\\n\" }}";
        let expected = "{% set x = \"a b\\\\\"\n %}\n{{ 'it\\'s so'\n\n ~ \"\\n\" }}";
        assert_eq!(rewrite(source), (expected.to_owned(), false));
    }

    #[test]
    fn what_is_no_tag_stays() {
        for text in [
            "{# {% generation %} #}",
            "{{ '{% generation %}' }}",
            "{% raw %}{% generation %}{%- endraw %}",
            "{% set x = \"\\\"{% generation %}\" %}",
            "{% generation_prompt %} { % generation %} {",
            "{% raw %}{% generation %}",
            "{{ 'open",
        ] {
            assert_eq!(rewrite(text), (text.to_owned(), false));
        }
    }
}
