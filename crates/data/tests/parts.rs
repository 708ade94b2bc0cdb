//! Parts, threads and interruptions: the same bytes in every case.

mod common;

use lockstep_ir::Hint;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Case, contents, fixture, tokenizer, tokens};
use lockstep_data::{DataError, PrepareOptions, PrepareSpec, TokenizerSpec, is_current, prepare_with};
use lockstep_ir::counter;

/// Files of every form, with a long text that spans parts.
fn case() -> (Case, PrepareSpec) {
    let lines: String =
        (0..1500).map(|i| format!("{{\"text\": \"document {i} {}\"}}\n", "word ".repeat(i % 50))).collect();
    let long: String = (0..10_000).map(|i| format!("line {i} of the long text\n")).collect();
    let compressed = zstd::encode_all(lines.as_bytes(), 1).unwrap();
    let case = Case::new(&[("a.jsonl", lines.as_bytes()), ("b.txt", long.as_bytes()), ("c.jsonl.zst", &compressed)]);
    fs::copy(fixture("rows.zstd.bin"), case.path("d.parquet")).unwrap();
    let spec = PrepareSpec {
        validation_fraction: 0.1,
        seed: 1,
        ..case.spec(&["a.jsonl", "b.txt", "c.jsonl.zst", "d.parquet"])
    };
    (case, spec)
}

fn options(threads: usize) -> PrepareOptions<'static> {
    PrepareOptions { threads, part_bytes: 60_000, ..PrepareOptions::default() }
}

fn outputs(spec: &PrepareSpec, out: &Path, options: &PrepareOptions<'_>) -> Vec<(String, Vec<u8>)> {
    prepare_with(spec, out, options, &mut |_| ()).unwrap();
    contents(out)
}

#[test]
fn the_bytes_do_not_depend_on_the_threads() {
    for tokenizer in [TokenizerSpec::Bytes, tokenizer()] {
        let (case, spec) = case();
        let spec = PrepareSpec { tokenizer, ..spec };
        let one = outputs(&spec, &case.path("one"), &options(1));
        assert!(one.len() > 6, "several parts");
        for threads in [2, 7] {
            assert!(outputs(&spec, &case.path("many"), &options(threads)) == one, "{threads} threads");
        }
    }
}

#[test]
fn the_tokens_do_not_depend_on_the_size_of_parts() {
    let (case, spec) = case();
    let prepare = |part_bytes| {
        let options = PrepareOptions { threads: 2, part_bytes, ..PrepareOptions::default() };
        prepare_with(&spec, &case.path("out"), &options, &mut |_| ())
    };
    let (whole, parts) = (prepare(1 << 30).unwrap(), prepare(5_000).unwrap());
    assert_eq!(whole.train().shards().len(), 1);
    assert!(parts.train().shards().len() > 50);
    assert_eq!(tokens(whole.train()), tokens(parts.train()));
    assert_eq!(tokens(whole.validation().unwrap()), tokens(parts.validation().unwrap()));
    assert_eq!(whole.train_summary().documents, parts.train_summary().documents);
    let starts = |prepared: &lockstep_data::Prepared| {
        let mut starts = Vec::new();
        prepared.train().documents_beginning_in(0, u64::MAX, |document| starts.push((document.start, document.origin)));
        starts
    };
    assert_eq!(starts(&whole), starts(&parts));
    let mut read = 0;
    parts.train().verify_with(&AtomicBool::new(false), &mut |bytes| read += bytes).unwrap();
    assert_eq!(read, parts.train().payload_bytes());
    let stopped = parts.train().verify_with(&AtomicBool::new(true), &mut |_| panic!("nothing is read"));
    assert!(matches!(stopped, Err(DataError::Interrupted)));
}

#[test]
fn interrupted_anywhere_and_repeated_it_gives_the_same_bytes() {
    for tokenizer in [TokenizerSpec::Bytes, tokenizer()] {
        let (case, spec) = case();
        let spec = PrepareSpec { tokenizer, ..spec };
        let whole = outputs(&spec, &case.path("whole"), &options(2));
        let mut calls = 0u64;
        prepare_with(&spec, &case.path("count"), &options(2), &mut |_| calls += 1).unwrap();
        let out = case.path("out");
        for attempt in 0..8 {
            // The hidden folder keeps what was finished; each attempt gets to another place.
            let mut left = counter::bits(3, attempt) % calls;
            let interrupted = catch_unwind(AssertUnwindSafe(|| {
                prepare_with(&spec, &out, &options(2), &mut |_| {
                    left = left.checked_sub(1).unwrap_or_else(|| std::panic::resume_unwind(Box::new("interrupt")));
                })
            }));
            assert!(interrupted.is_err() || contents(&out) == whole);
            if interrupted.is_ok() {
                fs::remove_dir_all(&out).unwrap();
            }
        }
        assert!(outputs(&spec, &out, &options(3)) == whole);
    }
}

#[test]
fn asked_to_stop_it_stops_and_repeated_it_gives_the_same_bytes() {
    let (case, spec) = case();
    let spec = PrepareSpec { tokenizer: tokenizer(), ..spec };
    let whole = outputs(&spec, &case.path("whole"), &options(2));
    let out = case.path("out");
    let stop = AtomicBool::new(true);
    let stoppable = PrepareOptions { stop: &stop, ..options(2) };
    let mut reached = 0;
    // Each attempt finishes another part or two before it is stopped.
    for share in [0, 30, 60, 90] {
        let error = prepare_with(&spec, &out, &stoppable, &mut |at| {
            assert!(at.bytes_done == 0 || !stop.load(Ordering::SeqCst), "nothing is done after the request");
            reached = at.bytes_done;
            stop.store(at.bytes_done * 100 > at.bytes_total * share, Ordering::SeqCst);
        });
        assert!(matches!(error, Err(DataError::Interrupted)), "{share}: {error:?}");
        assert!(!out.join("data.json").exists());
        stop.store(false, Ordering::SeqCst);
    }
    assert!(out.join(".partial/part-0.json").exists() && reached > 0);
    assert!(outputs(&spec, &out, &stoppable) == whole);
}

#[test]
fn finished_parts_are_not_made_again() {
    let (case, spec) = case();
    let out = case.path("out");
    let mut seen = 0;
    let interrupted = catch_unwind(AssertUnwindSafe(|| {
        prepare_with(&spec, &out, &options(2), &mut |progress| {
            seen = progress.bytes_done;
            if seen > progress.bytes_total / 2 {
                std::panic::resume_unwind(Box::new("interrupt"));
            }
        })
    }));
    assert!(interrupted.is_err());
    let mut first = None;
    prepare_with(&spec, &out, &options(2), &mut |progress| {
        first.get_or_insert(progress.bytes_done);
    })
    .unwrap();
    assert!(first.unwrap() > 0 && first.unwrap() <= seen, "{first:?} {seen}");
}

#[test]
fn parts_of_files_that_changed_are_made_again() {
    let (case, spec) = case();
    let out = case.path("out");
    let interrupted = catch_unwind(AssertUnwindSafe(|| {
        prepare_with(&spec, &out, &options(2), &mut |progress| {
            if progress.bytes_done > progress.bytes_total / 2 {
                std::panic::resume_unwind(Box::new("interrupt"));
            }
        })
    }));
    assert!(interrupted.is_err());
    let text = fs::read_to_string(case.path("a.jsonl")).unwrap().replace("document", "DOCUMENT");
    fs::write(case.path("a.jsonl"), text).unwrap();
    let expected = outputs(&spec, &case.path("fresh"), &options(2));
    assert!(outputs(&spec, &out, &options(2)) == expected);
}

#[test]
fn damaged_parts_are_made_again() {
    let (case, spec) = case();
    let expected = outputs(&spec, &case.path("fresh"), &options(2));
    for damage in ["part-0.json", "train-1.shard"] {
        let out = case.path(&format!("out-{damage}"));
        let interrupted = catch_unwind(AssertUnwindSafe(|| {
            prepare_with(&spec, &out, &options(2), &mut |progress| {
                if progress.bytes_done > progress.bytes_total * 3 / 4 {
                    std::panic::resume_unwind(Box::new("interrupt"));
                }
            })
        }));
        assert!(interrupted.is_err());
        let path = out.join(".partial").join(damage);
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] = b'?';
        fs::write(&path, bytes).unwrap();
        assert!(outputs(&spec, &out, &options(2)) == expected, "{damage}");
    }
}

#[test]
fn of_two_that_prepare_one_folder_the_second_waits_and_takes_what_the_first_made() {
    let (case, spec) = case();
    let out = case.path("out");
    let (waits, waited) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let mut second = None;
        let first = prepare_with(&spec, &out, &options(1), &mut |_| {
            let (waits, spec, out) = (waits.clone(), spec.clone(), out.clone());
            let prepare_second = move || {
                let adopting = PrepareOptions { adopt: true, ..options(1) };
                let mut seen = Vec::new();
                let prepared = prepare_with(&spec, &out, &adopting, &mut |progress| {
                    seen.push(progress.waiting);
                    let _ = waits.send(());
                });
                (prepared.unwrap().fingerprint(), seen)
            };
            if second.is_none() {
                second = Some(scope.spawn(prepare_second));
                waited.recv().unwrap();
            }
        })
        .unwrap();
        let (fingerprint, seen) = second.unwrap().join().unwrap();
        assert_eq!(fingerprint, first.fingerprint());
        assert!(seen.iter().all(|waiting| *waiting), "it prepared nothing itself");
    });
}

#[test]
fn one_that_waits_can_be_stopped() {
    let (case, spec) = case();
    let out = case.path("out");
    let stop = AtomicBool::new(false);
    let stoppable = PrepareOptions { stop: &stop, ..options(1) };
    let mut inner = None;
    prepare_with(&spec, &out, &options(1), &mut |_| {
        inner.get_or_insert_with(|| {
            let stopped = prepare_with(&spec, &out, &stoppable, &mut |_| stop.store(true, Ordering::Relaxed));
            stopped.unwrap_err().with_hint()
        });
    })
    .unwrap();
    assert!(inner.unwrap().contains("interrupted"));
}

#[test]
fn prepared_data_are_known_by_content_not_by_place() {
    let (case, spec) = case();
    let prepared = prepare_with(&spec, &case.path("out"), &options(1), &mut |_| ()).unwrap();
    let never = AtomicBool::new(false);
    let current = |spec: &PrepareSpec| is_current(spec, &prepared, &never).unwrap();
    assert!(current(&spec));
    let moved = case.path("elsewhere");
    fs::create_dir(&moved).unwrap();
    let names: Vec<_> = (0..).zip(&spec.paths).map(|(n, path)| (moved.join(format!("{n}")), path)).collect();
    for (to, from) in &names {
        // Names end as before: extensions say what a file holds.
        let to = to.with_extension(from.file_name().unwrap());
        fs::copy(from, to).unwrap();
    }
    let paths = names.iter().map(|(to, from)| to.with_extension(from.file_name().unwrap())).collect();
    let elsewhere = PrepareSpec { paths, ..spec.clone() };
    assert!(current(&elsewhere));
    assert!(!current(&PrepareSpec { seed: 99, ..elsewhere.clone() }));
    // The same length, another last letter.
    let first = &elsewhere.paths[0];
    let mut bytes = fs::read(first).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(first, bytes).unwrap();
    assert!(!current(&elsewhere));
}
