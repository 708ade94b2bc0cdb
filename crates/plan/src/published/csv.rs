//! Comma-separated values with quotes, each record with the line that it starts on.

/// One record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// The line that it starts on, from 1.
    pub line: usize,
    pub fields: Vec<String>,
}

/// All records of a text; blank lines are none. A quote that never closes ends with the text.
pub(super) fn records(text: &str) -> Vec<Record> {
    let mut all = Vec::new();
    let mut chars = text.strip_prefix('\u{feff}').unwrap_or(text).chars().peekable();
    let mut line = 1;
    let mut record = Record { line, fields: Vec::new() };
    let mut field = String::new();
    let mut quoted = false;
    let mut end = |record: &mut Record, field: &mut String, next: usize| {
        record.fields.push(std::mem::take(field));
        let done = std::mem::replace(record, Record { line: next, fields: Vec::new() });
        if done.fields.iter().any(|f| !f.trim().is_empty()) {
            all.push(done);
        }
    };
    while let Some(c) = chars.next() {
        line += usize::from(c == '\n');
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => {
                chars.next();
                field.push('"');
            }
            '"' => quoted = !quoted,
            _ if quoted => field.push(c),
            ',' => record.fields.push(std::mem::take(&mut field)),
            '\n' => end(&mut record, &mut field, line),
            '\r' => {}
            _ => field.push(c),
        }
    }
    end(&mut record, &mut field, line);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_may_be_quoted_and_records_know_their_line() {
        let read = |text: &str| -> Vec<(usize, Vec<String>)> {
            records(text).into_iter().map(|r| (r.line, r.fields)).collect()
        };
        let of = |line: usize, fields: &[&str]| (line, fields.iter().map(|f| (*f).to_owned()).collect::<Vec<_>>());
        assert_eq!(
            read("a,\"b, c\",\"d \"\"e\"\"\"\r\n\n1,\"two\nlines\",\n3,,4"),
            [of(1, &["a", "b, c", "d \"e\""]), of(3, &["1", "two\nlines", ""]), of(5, &["3", "", "4"])]
        );
        assert_eq!(read(""), []);
        assert_eq!(read("\u{feff}x\n\"never closed"), [of(1, &["x"]), of(2, &["never closed"])]);
    }
}
