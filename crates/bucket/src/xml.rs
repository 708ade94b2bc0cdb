//! The few elements of XML that servers answer with: no attributes are read, and an element is never inside one of its own name.

/// The contents of all elements of a name, in order.
pub(crate) fn elements<'a>(xml: &'a str, name: &str) -> Vec<&'a str> {
    let (open, close) = (format!("<{name}"), format!("</{name}>"));
    let (mut found, mut rest) = (Vec::new(), xml);
    while let Some(at) = rest.find(&open) {
        let after = &rest[at + open.len()..];
        let Some(end) = after.find('>') else { break };
        let (tag, inside) = (&after[..end], &after[end + 1..]);
        // `<KeyCount>` is no `<Key>`.
        if !(tag.is_empty() || tag.starts_with([' ', '/', '\t', '\n'])) {
            rest = after;
            continue;
        }
        if tag.ends_with('/') {
            found.push("");
            rest = inside;
            continue;
        }
        let Some(end) = inside.find(&close) else { break };
        found.push(&inside[..end]);
        rest = &inside[end + close.len()..];
    }
    found
}

/// The text of the first element of a name.
pub(crate) fn text(xml: &str, name: &str) -> Option<String> {
    elements(xml, name).first().map(|text| unescaped(text))
}

/// Whether the keys of a listing are written as parts of an address.
pub(crate) fn is_url(listing: &str) -> bool {
    text(listing, "EncodingType").is_some_and(|encoding| encoding == "url")
}

/// The key of an entry of a listing.
pub(crate) fn key(entry: &str, is_url: bool) -> Option<String> {
    let key = text(entry, "Key")?;
    if is_url { percent_decoded(&key) } else { Some(key) }
}

fn unescaped(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let Some(end) = rest.find(';') else { break };
        let entity = &rest[1..end];
        let number = entity.strip_prefix("#x").map(|hex| u32::from_str_radix(hex, 16));
        let number = number.or_else(|| entity.strip_prefix('#').map(str::parse));
        match (entity, number) {
            ("amp", _) => out.push('&'),
            ("lt", _) => out.push('<'),
            ("gt", _) => out.push('>'),
            ("quot", _) => out.push('"'),
            ("apos", _) => out.push('\''),
            (_, Some(Ok(code))) => out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)),
            _ => out.push_str(&rest[..=end]),
        }
        rest = &rest[end + 1..];
    }
    out + rest
}

/// A text with characters for element content.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A text whose characters may be written as `%41`, as listings have them.
fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        match byte {
            b'%' => {
                let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
                bytes.push(u8::from_str_radix(digits, 16).ok()?);
                rest = &rest[2..];
            }
            b'+' => bytes.push(b' '),
            _ => bytes.push(byte),
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_found_by_their_whole_names() {
        let xml = "<?xml version=\"1.0\"?><R xmlns=\"x\"><KeyCount>2</KeyCount><C><Key>a&amp;b&#x41;</Key></C><C><Key/></C></R>";
        let keys: Vec<_> = elements(xml, "C").into_iter().map(|c| text(c, "Key")).collect();
        assert_eq!(keys, [Some("a&bA".to_owned()), Some(String::new())]);
        assert_eq!((text(xml, "KeyCount").as_deref(), text(xml, "Nothing")), (Some("2"), None));
        assert_eq!(elements("<Key>cut", "Key").len() + elements("<Key", "Key").len(), 0);
        assert_eq!(percent_decoded("a%20b+c%C3%BC").as_deref(), Some("a b cü"));
        assert_eq!((percent_decoded("%4"), percent_decoded("%ff")), (None, None));
        assert_eq!(unescaped(&escaped("\"a&<b>\"")), "\"a&<b>\"");
    }
}
