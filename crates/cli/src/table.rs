//! Text tables.

/// Lays rows out in columns: the first left, the others right.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |c: usize| {
        let cells = rows.iter().filter_map(|r| r.get(c)).map(|cell| cell.chars().count());
        cells.chain([header[c].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let padded = cells
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(c, (cell, width))| if c == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") });
        format!("  {}\n", padded.collect::<Vec<_>>().join("  ").trim_end())
    };
    let mut text = line(header.to_vec());
    rows.iter().for_each(|r| text.push_str(&line(r.iter().map(String::as_str).collect())));
    text
}

/// `1234567` as `1,234,567`.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(c);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = vec![vec!["a".into(), "12".into()], vec!["long".into(), "3".into()]];
        assert_eq!(table(&["op", "n"], &rows), "  op     n\n  a     12\n  long   3\n");
        assert_eq!(thousands(1234567), "1,234,567");
        assert_eq!(thousands(12), "12");
    }
}
