//! Records and tokenizers: what becomes a document, what its tokens are, and where it came from.

mod common;

use lockstep_ir::Hint;
use std::fs;

use common::{Case, fixture, tokenizer, tokens};
use lockstep_data::{DataError, PrepareOptions, PrepareSpec, Prepared, Tokenizer, TokenizerSpec, prepare_with};
use lockstep_ir::counter;
use lockstep_ir::op::IGNORED_TARGET;

/// What trains, with `|` for the EOS tokens.
fn train_text(prepared: &Prepared) -> String {
    let bytes: Vec<u8> = tokens(prepared.train()).iter().map(|&token| token as u8).collect();
    String::from_utf8(bytes).unwrap().replace('\0', "|")
}

#[test]
fn every_line_of_a_jsonl_file_is_a_document() {
    let lines =
        "{\"text\": \"one\", \"id\": 1}\n\n{\"id\": {\"text\": 3}, \"text\": \"tw\\u00f6\"}\r\n{\"text\": \"three\"}";
    let case = Case::new(&[("a.jsonl", lines.as_bytes())]);
    let prepared = case.prepare(&case.spec(&["a.jsonl"])).unwrap();
    assert_eq!(train_text(&prepared), "one|tw\u{f6}|three|");
    assert_eq!(prepared.train_summary().documents, 3);
    let origin = prepared.train().document_at(5).origin;
    assert_eq!((origin.file, origin.record), (0, 3), "lines are counted from 1, blank ones too");
    assert_eq!(prepared.sources().unwrap(), [case.path("a.jsonl")]);
}

#[test]
fn empty_and_null_texts_leave_no_trace() {
    let case = Case::new(&[("a.jsonl", b"{\"text\": \"\"}\n{\"text\": null}\n{\"text\": \"x\"}\n")]);
    let prepared = case.prepare(&case.spec(&["a.jsonl"])).unwrap();
    assert_eq!((train_text(&prepared).as_str(), prepared.train_summary().documents), ("x|", 1));
}

#[test]
fn another_field_may_hold_the_text() {
    let case = Case::new(&[("a.jsonl", b"{\"text\": 1, \"body\": \"b\"}\n")]);
    let spec = PrepareSpec { text_field: "body".into(), ..case.spec(&["a.jsonl"]) };
    assert_eq!(train_text(&case.prepare(&spec).unwrap()), "b|");
}

#[test]
fn compressed_lines_are_the_lines() {
    let lines: String = (0..5000).map(|i| format!("{{\"text\": \"line {i}\"}}\n")).collect();
    let compressed = zstd::encode_all(lines.as_bytes(), 3).unwrap();
    let twice = [&compressed[..], &compressed].concat();
    let case = Case::new(&[("a.jsonl", (lines.clone() + &lines).as_bytes()), ("b.jsonl.zst", &twice)]);
    let plain = train_text(&case.prepare(&case.spec(&["a.jsonl"])).unwrap());
    let packed = train_text(&case.prepare(&case.spec(&["b.jsonl.zst"])).unwrap());
    assert_eq!(plain, packed);
    assert!(plain.ends_with("line 4999|") && plain.len() > 90_000);
}

#[test]
fn every_row_of_a_parquet_file_is_a_document() {
    for codec in ["snappy", "zstd", "gzip", "brotli", "lz4"] {
        let case = Case::new(&[("a.parquet", &fs::read(fixture(&format!("rows.{codec}.bin"))).unwrap())]);
        let prepared = case.prepare(&case.spec(&["a.parquet"])).unwrap();
        let text = train_text(&prepared);
        assert!(text.starts_with("row 0: |row 1: the quick brown fox. |row 2: "), "{codec}: {text}");
        assert_eq!(prepared.train_summary().documents, 298, "one is null and one is empty");
        let last = prepared.train().document_at(prepared.train().len() - 1);
        assert_eq!(last.origin.record, 300);
    }
}

#[test]
fn a_codec_that_is_not_read_is_named() {
    // No writer makes LZO files any more: a file whose footer says that it is one.
    let mut bytes = fs::read(fixture("rows.brotli.bin")).unwrap();
    let (brotli, lzo) = (b"\x04text\x15\x08", b"\x04text\x15\x06");
    let places: Vec<_> = (0..bytes.len() - 7).filter(|&at| bytes[at..].starts_with(brotli)).collect();
    assert_eq!(places.len(), 3, "a column of each row group");
    places.into_iter().for_each(|at| bytes[at..at + 7].copy_from_slice(lzo));
    let case = Case::new(&[("a.parquet", &bytes)]);
    assert_eq!(
        case.error(&case.spec(&["a.parquet"])),
        "ROOT/a.parquet: its column \"text\" is compressed with lzo, which is not supported\n\
         hint: write the file again with zstd, snappy, gzip, brotli, lz4 or no compression"
    );
}

/// What is to be predicted of all tokens but the first, with `|` for EOS tokens and `.` for what does not count.
fn targets(prepared: &Prepared) -> String {
    let mut targets = vec![0; prepared.train().len() as usize - 1];
    prepared.train().copy_targets(0, &mut targets);
    // Wherever a sample begins, it has the same targets.
    for from in 1..targets.len() {
        let mut rest = vec![0; targets.len() - from];
        prepared.train().copy_targets(from as u64, &mut rest);
        assert_eq!(rest, targets[from..]);
    }
    // How many count is known without reading them.
    for (from, to) in (0..targets.len()).flat_map(|from| (from..=targets.len()).map(move |to| (from, to))) {
        let counted = targets[from..to].iter().filter(|target| **target != IGNORED_TARGET).count();
        assert_eq!(prepared.train().counted_targets(from as u64, to - from), counted as u64);
    }
    let shown = |target: &u32| match *target {
        IGNORED_TARGET => '.',
        0 => '|',
        byte => char::from(byte as u8),
    };
    targets.iter().map(shown).collect()
}

#[test]
fn a_prompt_stands_before_the_text_and_does_not_count() {
    let lines = "{\"prompt\": \"ab\", \"text\": \"cd\"}\n{\"text\": \"x\", \"prompt\": null}\n\
                 {\"prompt\": \"\", \"text\": \"\"}\n{\"prompt\": \"pq\", \"text\": \"\"}\n{\"prompt\": \"r\", \"text\": \"st\"}\n";
    let case = Case::new(&[("a.jsonl", lines.as_bytes())]);
    let spec = PrepareSpec { prompt_field: Some("prompt".into()), ..case.spec(&["a.jsonl"]) };
    let prepared = case.prepare(&spec).unwrap();
    assert_eq!(train_text(&prepared), "abcd|x|pq|rst|");
    assert_eq!(targets(&prepared), ".cd|x|..|.st|");
    assert_eq!(prepared.train_summary().bytes, 10);
    // Over several shards too.
    let options = PrepareOptions { part_bytes: 1, ..PrepareOptions::default() };
    let parts = prepare_with(&spec, &case.path("parts"), &options, &mut |_| ()).unwrap();
    assert!(parts.train().shards().len() > 2);
    assert_eq!(targets(&parts), ".cd|x|..|.st|");
    // Without the field everything counts.
    assert_eq!(targets(&case.prepare(&case.spec(&["a.jsonl"])).unwrap()), "d|x|st|");

    let spec = PrepareSpec { tokenizer: tokenizer(), ..spec };
    let prepared = case.prepare(&spec).unwrap();
    let tokenizer = prepared.tokenizer().unwrap();
    let (prompt, text) = (tokenizer.tokens("ab").unwrap(), tokenizer.tokens("cd").unwrap());
    let all = [prompt.clone(), text.clone(), vec![tokenizer.eos()]].concat();
    assert_eq!(tokens(prepared.train())[..all.len()], all, "a prompt is tokenised on its own");
    assert_eq!(prepared.train().document_at(0).prompt, prompt.len() as u64);
}

#[test]
fn prompts_of_parquet_files_are_a_column() {
    let case = Case::new(&[("a.parquet", &fs::read(fixture("prompts.bin")).unwrap())]);
    let spec = |prompt: &str| PrepareSpec {
        text_field: "answer".into(),
        prompt_field: Some(prompt.into()),
        ..case.spec(&["a.parquet"])
    };
    assert_eq!(targets(&case.prepare(&spec("question")).unwrap()), "............three|four|five|");
    fs::remove_dir_all(case.path("out")).unwrap();
    let error = case.error(&spec("query"));
    assert!(error.ends_with("hint: name the column with the prompt in PromptField"), "{error}");
}

#[test]
fn prompts_that_are_not_there_are_refused() {
    let case =
        Case::new(&[("a.jsonl", b"{\"prompt\": \"a\", \"text\": \"b\"}\n{\"text\": \"c\"}\n"), ("b.txt", b"text")]);
    let error = |file: &str| case.error(&PrepareSpec { prompt_field: Some("prompt".into()), ..case.spec(&[file]) });
    assert_eq!(
        error("a.jsonl"),
        "ROOT/a.jsonl:2: the object has no field \"prompt\"\n\
         hint: PromptField names the field with the prompt; null or \"\" stands for no prompt"
    );
    assert!(error("b.txt").starts_with("ROOT/b.txt: prompts are in the field \"prompt\", and this is plain text"));
}

#[test]
fn a_column_that_is_not_text_is_refused() {
    let case = Case::new(&[("a.parquet", &fs::read(fixture("rows.snappy.bin")).unwrap())]);
    let error = |field: &str| case.error(&PrepareSpec { text_field: field.into(), ..case.spec(&["a.parquet"]) });
    assert_eq!(
        error("body"),
        "ROOT/a.parquet: it has no column \"body\"; its columns are id, text\n\
         hint: name the column with the text in TextField"
    );
    assert!(error("id").contains("its column \"id\" does not hold strings"));
}

#[test]
fn records_are_held_out_whole() {
    let lines: String = (0..100).map(|i| format!("{{\"text\": \"<{i}>\"}}\n")).collect();
    let case = Case::new(&[("a.jsonl", lines.as_bytes())]);
    let spec = PrepareSpec { validation_fraction: 0.2, seed: 3, ..case.spec(&["a.jsonl"]) };
    let prepared = case.prepare(&spec).unwrap();
    let held = prepared.validation_summary().unwrap();
    assert_eq!((prepared.train_summary().documents, held.documents), (80, 20));
}

#[test]
fn a_tokenizer_makes_the_tokens_and_gives_the_text_back() {
    let case = Case::new(&[("a.txt", "fn main() {}\nété <|endoftext|>\n".as_bytes()), ("b.txt", b"struct Shard;")]);
    let spec = PrepareSpec { tokenizer: tokenizer(), ..case.spec(&["a.txt", "b.txt"]) };
    let prepared = case.prepare(&spec).unwrap();
    assert_eq!((prepared.vocabulary(), prepared.eos()), (1000, 0));
    let made = tokens(prepared.train());
    assert!(made.len() < 30, "{made:?}");
    assert_eq!(made.iter().filter(|&&token| token == 0).count(), 2, "text does not stand for a special token");
    fs::remove_file(case.path("a.txt")).unwrap();
    let text = prepared.tokenizer().unwrap().decode(&made);
    assert_eq!(text, "fn main() {}\nété <|endoftext|>\n<|endoftext|>struct Shard;<|endoftext|>");
    let bytes = fs::metadata(case.path("out/train.shard")).unwrap().len();
    assert_eq!(bytes, 64 + 2 * made.len() as u64 + 2 * 16, "two bytes hold a token below 1000");
}

#[test]
fn a_long_text_is_cut_where_the_tokens_stay_the_same() {
    // The tokens of each line on its own, since this tokenizer joins nothing across lines that begin with a letter.
    let line = |i: usize| format!("line {i} of a long file, which is cut between lines\n");
    let text: String = (0..10_000).map(line).collect();
    let case = Case::new(&[("a.txt", text.as_bytes()), ("one.txt", line(7).as_bytes())]);
    let of = |name: &str| {
        let spec = PrepareSpec { tokenizer: tokenizer(), ..case.spec(&[name]) };
        tokens(case.prepare(&spec).unwrap().train())
    };
    let one = of("one.txt");
    let all = of("a.txt");
    let tokenizer = Tokenizer::open(&tokenizer()).unwrap();
    assert_eq!(tokenizer.decode(&all[..all.len() - 1]), text);
    let lines: Vec<_> = all.split_inclusive(|token| one[one.len() - 2] == *token).collect();
    assert_eq!(lines.len(), 10_001, "a line ends with the same token everywhere");
    assert_eq!(lines[7], &one[..one.len() - 1]);
}

/// A tokenizer as Llama 2 has it: a space is put before every text, and nothing divides it into words.
const WHOLE_TEXT: &str = r#"{
    "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
    "normalizer": { "type": "Sequence", "normalizers": [
        { "type": "Prepend", "prepend": "_" }, { "type": "Replace", "pattern": { "String": " " }, "content": "_" } ] },
    "pre_tokenizer": null, "post_processor": null,
    "decoder": { "type": "Replace", "pattern": { "String": "_" }, "content": " " },
    "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
        "vocab": { "</s>": 0, "_": 1, "a": 2, "b": 3, "c": 4, "\n": 5, "ab": 6, "_a": 7, "_ab": 8, "bc": 9, "abc": 10, "__": 11 },
        "merges": [["a", "b"], ["_", "ab"], ["b", "c"], ["ab", "c"], ["_", "a"], ["_", "_"]] } }"#;

#[test]
fn the_tokens_of_a_long_text_are_those_of_the_whole_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, WHOLE_TEXT).unwrap();
    let letters = |alphabet: &[&str], n: usize| -> String {
        (0..n).map(|i| alphabet[(counter::bits(9, i as u64) % alphabet.len() as u64) as usize]).collect()
    };
    let cases = [
        (TokenizerSpec::file(&path, None).unwrap(), letters(&["a", "b", "c"], 300_000)),
        (TokenizerSpec::file(&path, None).unwrap(), letters(&["ab", "c", " ", "bc", "a", "\n"], 300_000)),
        (tokenizer(), letters(&["let", "x", "fn", "e", "th", "\u{e9}"], 150_000)),
        (tokenizer(), letters(&["the ", "a, ", "\n", "\n\n", "  ", "of", "! "], 150_000)),
    ];
    for (index, (spec, text)) in cases.into_iter().enumerate() {
        let TokenizerSpec::File { path, .. } = &spec else { unreachable!() };
        let theirs = tokenizers::Tokenizer::from_file(path).unwrap();
        let whole = theirs.encode_fast(&*text, false).unwrap().get_ids().to_vec();
        assert!(text.len() > 2 << 17);
        assert!(Tokenizer::open(&spec).unwrap().tokens(&text).unwrap() == whole, "{index}: a text");
        // As a file it is cut once more, into units.
        let (long, ids) = match index {
            0..2 => (text.clone() + &text + &text + &text, None),
            _ => (text.clone(), Some(&whole)),
        };
        let whole = ids.cloned().unwrap_or_else(|| theirs.encode_fast(&*long, false).unwrap().get_ids().to_vec());
        let case = Case::new(&[("a.txt", long.as_bytes())]);
        let prepared = case.prepare(&PrepareSpec { tokenizer: spec, ..case.spec(&["a.txt"]) }).unwrap();
        let found = tokens(prepared.train());
        assert!(found[..found.len() - 1] == whole, "{index}: a file");
    }
}

#[test]
fn an_end_token_can_be_named_and_must_exist() {
    let json = fs::read_to_string(fixture("tokenizer.json")).unwrap().replace("<|endoftext|>", "<stop>");
    let case = Case::new(&[("a.txt", b"x"), ("t.json", json.as_bytes())]);
    let spec = |end: Option<&str>| {
        let tokenizer = TokenizerSpec::file(&case.path("t.json"), end.map(str::to_owned)).unwrap();
        PrepareSpec { tokenizer, ..case.spec(&["a.txt"]) }
    };
    assert_eq!(
        case.error(&spec(None)),
        "ROOT/t.json: it has none of the usual tokens to end a document (<|end_of_text|>, <|endoftext|>, </s>, <eos>)\n\
         hint: name the token to use in EosToken; of a model to import, as eos_token in tokenizer_config.json"
    );
    assert!(
        case.error(&spec(Some("<halt>")))
            .contains("it has no token \"<halt>\"\nhint: name a token of its vocabulary in EosToken")
    );
    assert_eq!(tokens(case.prepare(&spec(Some("<stop>"))).unwrap().train()).last(), Some(&0));
}

#[test]
fn a_document_begins_with_the_bos_token_that_is_named() {
    let lines = "{\"text\": \"one\", \"ask\": \"\"}\n{\"text\": \"\", \"ask\": \"\"}\n{\"text\": \"two\", \"ask\": \"why? \"}\n";
    let long = "a long line of text, and then another one. ".repeat(8000);
    let case = Case::new(&[("a.jsonl", lines.as_bytes()), ("b.txt", long.as_bytes())]);
    let file = TokenizerSpec::file(&fixture("tokenizer.json"), None).unwrap();
    let spec = |bos: Option<&str>, path: &str| PrepareSpec {
        tokenizer: file.clone().with_bos(bos),
        prompt_field: (path == "a.jsonl").then(|| "ask".into()),
        ..case.spec(&[path])
    };
    let of = |bos: Option<&str>, path: &str| case.prepare(&spec(bos, path)).unwrap();
    let plain = Tokenizer::open(&file).unwrap();
    let (eos, bos) = (plain.eos(), plain.tokens("!").unwrap()[0]);
    let tokens_of = |text: &str| plain.tokens(text).unwrap();
    let found = of(Some("!"), "a.jsonl");
    let expected =
        [vec![bos], tokens_of("one"), vec![eos, bos], tokens_of("why? "), tokens_of("two"), vec![eos]].concat();
    assert_eq!(tokens(found.train()), expected, "a document without text leaves no trace");
    assert_eq!((found.bos(), found.tokenizer().unwrap().bos()), (Some(bos), Some(bos)));
    // It is read before a prompt, and not predicted then.
    let second = tokens_of("one").len() as u64 + 2;
    assert_eq!(found.train().document_at(second).prompt, tokens_of("why? ").len() as u64 + 1);
    // A long document begins once.
    let (with, without) = (tokens(of(Some("!"), "b.txt").train()), tokens(of(None, "b.txt").train()));
    assert!(with[0] == bos && with[1..] == without);
    // Data with one are other data than those without.
    assert!(!spec(Some("!"), "b.txt").reads_alike(&spec(None, "b.txt")));
    let error = case.prepare(&spec(Some("<s>"), "b.txt")).unwrap_err().with_hint();
    assert!(error.contains("it has no token \"<s>\"\nhint: name a token of its vocabulary in BosToken"), "{error}");
}

#[test]
fn a_tokenizer_that_changed_is_refused() {
    let case = Case::new(&[("a.txt", b"x")]);
    fs::copy(fixture("tokenizer.json"), case.path("t.json")).unwrap();
    let tokenizer = TokenizerSpec::file(&case.path("t.json"), None).unwrap();
    fs::write(case.path("t.json"), "{}").unwrap();
    let error = case.prepare(&PrepareSpec { tokenizer, ..case.spec(&["a.txt"]) }).unwrap_err();
    assert!(matches!(error, DataError::Tokenizer { .. }), "{error}");
}

#[test]
fn compressed_text_is_refused_by_its_first_bytes() {
    let folder = tempfile::tempdir().unwrap();
    for (name, begins, said) in [
        ("a.txt.gz", &[0x1f, 0x8b, 8, 0][..], "the file is compressed (gzip), and is read as text"),
        ("a.txt", &[0x1f, 0x8b, 8, 0], "the file is compressed (gzip), and is read as text"),
        ("a.jsonl", &[0x28, 0xb5, 0x2f, 0xfd], "the file is compressed (zstd), and is read as text"),
        ("a.txt.xz", &[0xfd, b'7', b'z', b'X', b'Z', 0], "the file is compressed (xz), and is read as text"),
        ("a.txt.bz2", b"BZh9", "the file is compressed (bzip2), and is read as text"),
        ("a.zip", b"PK\x03\x04", "the file is compressed (zip), and is read as text"),
        ("a.jsonl.zst", &[0x1f, 0x8b, 8, 0], "the file is compressed by gzip, and its name says zstd"),
    ] {
        let path = folder.path().join(name);
        std::fs::write(&path, [begins, &[7; 100]].concat()).unwrap();
        let spec = lockstep_data::PrepareSpec { paths: vec![path.clone()], ..Default::default() };
        let error = lockstep_data::prepare(&spec, &folder.path().join("out"), &mut |_| ()).unwrap_err().with_hint();
        assert!(error.starts_with(&format!("{}: {said}\nhint: ", path.display())), "{name}: {error}");
    }
}
