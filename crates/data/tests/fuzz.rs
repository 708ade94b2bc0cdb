//! A bounded, repeatable fuzzer: thousands of mutations of good files are read or refused, never a panic.

mod common;

use lockstep_ir::Hint;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use common::{Case, fixture, mutate, tokenizer};
use lockstep_data::{PrepareSpec, Prepared, Shard, TokenFile, TokenizerSpec};

/// Each target stops after this long, so a slow machine tests less rather than longer.
const TIME: Duration = Duration::from_millis(1000);

/// Tries mutations of `good` until the time is up, at least a hundred.
fn fuzz(name: &str, good: &[u8], mut target: impl FnMut(&[u8])) {
    let start = Instant::now();
    for round in 0.. {
        if round >= 100 && start.elapsed() > TIME {
            return;
        }
        let bytes = mutate(good, round);
        let result = catch_unwind(AssertUnwindSafe(|| target(&bytes)));
        assert!(result.is_ok(), "{name}: round {round} panicked on {:?}", String::from_utf8_lossy(&bytes));
    }
}

#[test]
fn shards() {
    let case = Case::new(&[("a.txt", b"one document"), ("b.txt", b"and another")]);
    case.prepare(&case.spec(&["a.txt", "b.txt"])).unwrap();
    let good = fs::read(case.path("out/train.shard")).unwrap();
    let path = case.path("fuzzed.shard");
    fuzz("shard", &good, |bytes| {
        // A new file each time: a shard that is open stays mapped.
        let _ = fs::remove_file(&path);
        fs::write(&path, bytes).unwrap();
        if let Ok(shard) = Shard::open(&path) {
            let mut tokens = vec![0; shard.len() as usize];
            shard.copy(0, &mut tokens);
            let documents: Vec<_> = (0..shard.documents()).map(|index| shard.document(index)).collect();
            assert!(documents.is_sorted_by_key(|document| document.start));
        }
    });
}

#[test]
fn descriptions() {
    let case = Case::new(&[("a.txt", b"one document"), ("b.txt", b"and another")]);
    case.prepare(&case.spec(&["a.txt", "b.txt"])).unwrap();
    let path = case.path("out/data.json");
    let good = fs::read(&path).unwrap();
    fuzz("data.json", &good, |bytes| {
        fs::write(&path, bytes).unwrap();
        let _ = Prepared::open(&case.path("out"));
    });
}

#[test]
fn json_lines() {
    let good = b"{\"text\": \"one \\u00e9\", \"id\": [1, {\"text\": null}]}\n{\"id\": 2.5e3, \"text\": \"two\"}\n";
    let case = Case::new(&[("a.jsonl", good)]);
    let spec = PrepareSpec { validation_fraction: 0.5, ..case.spec(&["a.jsonl"]) };
    fuzz("jsonl", good, |bytes| {
        fs::write(case.path("a.jsonl"), bytes).unwrap();
        if let Err(error) = case.prepare(&spec) {
            let text = error.with_hint();
            assert!(text.contains("hint: ") && !text.contains('\u{1b}'), "{text}");
        }
    });
}

#[test]
fn compressed_lines() {
    let lines: String = (0..200).map(|i| format!("{{\"text\": \"line {i}\"}}\n")).collect();
    let good = zstd::encode_all(lines.as_bytes(), 3).unwrap();
    let case = Case::new(&[("a.jsonl.zst", &good)]);
    fuzz("jsonl.zst", &good, |bytes| {
        fs::write(case.path("a.jsonl.zst"), bytes).unwrap();
        let _ = case.prepare(&case.spec(&["a.jsonl.zst"]));
    });
}

#[test]
fn tokenizers() {
    let good = fs::read(fixture("tokenizer.json")).unwrap();
    let case = Case::new(&[("a.txt", "fn été() {}\n".as_bytes())]);
    assert_ne!(tokenizer(), TokenizerSpec::Bytes);
    fuzz("tokenizer.json", &good, |bytes| {
        fs::write(case.path("t.json"), bytes).unwrap();
        let tokenizer = TokenizerSpec::file(&case.path("t.json"), None).unwrap();
        let _ = case.prepare(&PrepareSpec { tokenizer, ..case.spec(&["a.txt"]) });
    });
}
