//! Input files and tokenizers that are truncated, mistyped or made up: named with file and line, never a panic.

mod common;

use lockstep_ir::Hint;
use std::fs::{self, File};
use std::io::Write;

use common::{Case, fixture};
use lockstep_data::{PrepareSpec, TokenizerSpec};

/// The error of preparing `bytes` as a file of this name.
fn error(name: &str, bytes: &[u8]) -> String {
    let case = Case::new(&[(name, bytes)]);
    case.error(&case.spec(&[name]))
}

#[test]
fn lines_that_are_no_objects_with_text_are_named() {
    const HINT: &str = "\nhint: every line is a JSON object; TextField names the field with the text";
    let check = |line: &str, expected: &str| {
        let text = format!("{{\"text\": \"fine\"}}\n\n{line}\n{{\"text\": 7}}\n");
        assert_eq!(error("a.jsonl", text.as_bytes()), format!("ROOT/a.jsonl:3: {expected}{HINT}"));
    };
    let not = "not a JSON object with text in \"text\":";
    check("{\"txt\": \"x\"}", "the object has no field \"text\"");
    check("{\"text\": 3}", &format!("{not} invalid type: integer `3`, expected a string (column 10)"));
    check("{\"text\": [\"x\"]}", &format!("{not} invalid type: sequence, expected a string (column 9)"));
    check("\"text\"", &format!("{not} invalid type: string \"text\", expected a JSON object (column 6)"));
    check("{\"text\": \"x\"", &format!("{not} EOF while parsing an object (column 12)"));
    check("{\"text\": \"x\"} {}", &format!("{not} trailing characters (column 15)"));
    check("{\"text\": \"\\ud800\"}", &format!("{not} unexpected end of hex escape (column 17)"));
    let deep = format!("{{\"a\": {}", "[".repeat(100_000));
    assert!(error("a.jsonl", deep.as_bytes()).contains("ROOT/a.jsonl:1: "));
}

#[test]
fn lines_that_are_not_utf8_are_named() {
    let bytes = b"{\"text\": \"fine\"}\n{\"text\": \"\xff\"}\n";
    let expected = "ROOT/a.jsonl:2: byte 10 is not UTF-8 text\nhint: save the file as UTF-8";
    assert_eq!(error("a.jsonl", bytes), expected);
}

#[test]
fn text_for_a_tokenizer_must_be_utf8() {
    let text = [&b"ok\n".repeat(100_000)[..], b"\xff"].concat();
    let case = Case::new(&[("a.txt", &text)]);
    let spec = PrepareSpec { tokenizer: common::tokenizer(), ..case.spec(&["a.txt"]) };
    assert_eq!(
        case.error(&spec),
        "ROOT/a.txt: byte 300000 is not UTF-8 text\n\
         hint: save the file as UTF-8, leave it out, or use Tokenizer = \"bytes\""
    );
}

#[test]
fn an_endless_line_is_refused_in_bounded_memory() {
    let case = Case::new(&[]);
    // A sparse file of 1 GB: one line of NULs.
    File::create(case.path("a.jsonl")).unwrap().set_len(1_000_000_000).unwrap();
    assert_eq!(
        case.error(&case.spec(&["a.jsonl"])),
        "ROOT/a.jsonl:1: a line longer than 64 MiB\n\
         hint: check that the file has one JSON object per line, or divide the document"
    );
    // The same from a few kilobytes.
    let mut encoder = zstd::Encoder::new(File::create(case.path("b.jsonl.zst")).unwrap(), 1).unwrap();
    for _ in 0..100 {
        encoder.write_all(&vec![b' '; 1 << 20]).unwrap();
    }
    encoder.finish().unwrap().sync_all().unwrap();
    let error = case.error(&case.spec(&["b.jsonl.zst"]));
    assert!(error.starts_with("ROOT/b.jsonl.zst:1: a line longer than 64 MiB\n"), "{error}");
}

#[test]
fn truncated_or_damaged_compression_is_named() {
    let lines: String = (0..50_000).map(|i| format!("{{\"text\": \"line {}\"}}\n", i * 7919)).collect();
    let good = zstd::encode_all(lines.as_bytes(), 3).unwrap();
    let cut = error("a.jsonl.zst", &good[..good.len() / 2]);
    assert!(cut.contains("the compressed data are damaged or cut off in this line: "), "{cut}");
    assert!(cut.starts_with("ROOT/a.jsonl.zst:") && cut.contains("\nhint: get the file again"), "{cut}");
    let wrong = error("a.jsonl.zst", b"{\"text\": \"not compressed\"}\n");
    assert!(wrong.starts_with("ROOT/a.jsonl.zst:1: the compressed data are damaged"), "{wrong}");
}

#[test]
fn a_truncated_parquet_file_is_named() {
    let good = fs::read(fixture("rows.zstd.bin")).unwrap();
    for bytes in [&good[..good.len() / 2], b"PAR1", b"nothing of the kind"] {
        let text = error("a.parquet", bytes);
        assert!(text.starts_with("ROOT/a.parquet: not a whole Parquet file: "), "{text}");
        assert!(text.ends_with("\nhint: get the file again"), "{text}");
    }
}

#[test]
fn a_file_that_is_no_tokenizer_is_refused() {
    for json in
        ["", "{}", "[]", "null", "{\"version\": \"1.0\", \"model\": {\"type\": \"BPE\"}}", "\u{0}", "{\"model\": 3}"]
    {
        let case = Case::new(&[("a.txt", b"x"), ("t.json", json.as_bytes())]);
        let tokenizer = TokenizerSpec::file(&case.path("t.json"), None).unwrap();
        let text = case.error(&PrepareSpec { tokenizer, ..case.spec(&["a.txt"]) });
        assert!(text.starts_with("ROOT/t.json: "), "{text}");
        assert!(text.contains("\nhint: "), "{text}");
    }
    let missing = TokenizerSpec::file("/no/such/tokenizer.json".as_ref(), None).unwrap_err().with_hint();
    assert!(missing.starts_with("/no/such/tokenizer.json: cannot be read: "), "{missing}");
}

#[test]
fn a_tokenizer_with_an_absurd_token_is_refused() {
    let json = fs::read_to_string(fixture("tokenizer.json")).unwrap();
    let json = json.replacen("\"vocab\": {", "\"vocab\": {\"absurd\": 4294967295, ", 1);
    let case = Case::new(&[("a.txt", b"x"), ("t.json", json.as_bytes())]);
    let tokenizer = TokenizerSpec::file(&case.path("t.json"), None).unwrap();
    let text = case.error(&PrepareSpec { tokenizer, ..case.spec(&["a.txt"]) });
    assert!(text.contains("it has a token 4294967295, and at most 16777215 is accepted"), "{text}");
}
