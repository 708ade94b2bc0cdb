//! From files to shards: what is read, in which order, how it is divided, and what is refused.

use lockstep_ir::Hint;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use lockstep_data::{DataError, PrepareSpec, Prepared, Progress, TokenStream, prepare};
use tempfile::TempDir;

const PIECE: usize = 64 * 1024;

/// A folder with `text/…` files to prepare into `out`.
struct Case {
    root: TempDir,
}

impl Case {
    fn new(files: &[(&str, &[u8])]) -> Self {
        let case = Case { root: tempfile::tempdir().unwrap() };
        fs::create_dir(case.text()).unwrap();
        for (name, contents) in files {
            case.write(name, contents);
        }
        case
    }

    fn text(&self) -> PathBuf {
        self.root.path().join("text")
    }

    fn out(&self) -> PathBuf {
        self.root.path().join("out")
    }

    fn write(&self, name: &str, contents: &[u8]) {
        let path = self.text().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }

    /// All `.txt` files of the folder.
    fn spec(&self, validation_fraction: f64) -> PrepareSpec {
        PrepareSpec {
            paths: vec![self.text()],
            extensions: vec!["txt".to_owned()],
            validation_fraction,
            seed: 1,
            ..PrepareSpec::default()
        }
    }

    fn prepare(&self, spec: &PrepareSpec) -> Result<Prepared, DataError> {
        prepare(spec, &self.out(), &mut |_| ())
    }

    fn error(&self, spec: &PrepareSpec) -> String {
        let error = self.prepare(spec).unwrap_err().with_hint();
        error.replace(self.root.path().to_str().unwrap(), "ROOT")
    }

    fn outputs(&self) -> Vec<(String, Vec<u8>)> {
        let mut outputs: Vec<_> = fs::read_dir(self.out())
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap()))
            .collect();
        outputs.sort();
        outputs
    }
}

/// All tokens as bytes.
fn bytes(shard: &TokenStream) -> Vec<u8> {
    let mut tokens = vec![0; shard.len() as usize];
    shard.copy(0, &mut tokens);
    tokens.into_iter().map(|token| u8::try_from(token).unwrap()).collect()
}

/// What trains when nothing is held out, with `|` for the EOS tokens.
fn check_train(case: &Case, spec: &PrepareSpec, expected: &str) {
    let prepared = case.prepare(spec).unwrap();
    let text = String::from_utf8(bytes(prepared.train())).unwrap();
    assert_eq!(text.replace('\0', "|"), expected);
}

/// `length` bytes without a NUL in which every position is recognisable.
fn long_text(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 31 + i / 251) as u8 | 1).collect()
}

#[test]
fn folders_are_read_by_name_and_each_file_ends_with_an_eos_token() {
    let case =
        Case::new(&[("b.txt", b"second"), ("a.txt", b"first"), ("c/deep/x.txt", b"third"), ("d.txt", b"fourth")]);
    check_train(&case, &case.spec(0.0), "first|second|third|fourth|");
}

#[test]
fn what_tools_made_is_skipped() {
    let case = Case::new(&[
        ("a.txt", b"kept"),
        ("code.rs", b"other extension"),
        ("none", b"no extension"),
        (".hidden.txt", b"hidden"),
        (".git/a.txt", b"in a hidden folder"),
        ("target/a.txt", b"built"),
        ("x/node_modules/a.txt", b"installed"),
        ("runs/a.txt", b"written by runs"),
        ("runs.txt", b"a file may have the name"),
    ]);
    check_train(&case, &case.spec(0.0), "kept|a file may have the name|");
}

#[test]
fn a_path_that_is_named_is_read_whatever_its_name() {
    let case = Case::new(&[("code.rs", b"code"), (".hidden", b"hidden"), ("target/a.txt", b"built")]);
    let paths = ["target", "code.rs", ".hidden"].map(|name| case.text().join(name)).to_vec();
    check_train(&case, &PrepareSpec { paths, ..case.spec(0.0) }, "built|code|hidden|");
}

#[test]
fn symbolic_links_are_followed_only_where_they_are_named() {
    let case = Case::new(&[("a.txt", b"text")]);
    symlink(case.text(), case.text().join("loop")).unwrap();
    symlink(case.text().join("a.txt"), case.text().join("b.txt")).unwrap();
    check_train(&case, &case.spec(0.0), "text|");
    let paths = vec![case.text().join("loop")];
    check_train(&case, &PrepareSpec { paths, ..case.spec(0.0) }, "text|");
}

#[test]
fn extensions_match_in_any_case_with_or_without_a_dot_and_none_means_all() {
    let case = Case::new(&[("a.TXT", b"a"), ("b.md", b"b"), ("c", b"c")]);
    let spec = |extensions: &[&str]| PrepareSpec {
        extensions: extensions.iter().map(|e| e.to_string()).collect(),
        ..case.spec(0.0)
    };
    check_train(&case, &spec(&["txt", ".md"]), "a|b|");
    check_train(&case, &spec(&[]), "a|b|c|");
}

#[test]
fn a_file_that_is_reached_twice_is_read_once() {
    let case = Case::new(&[("a.txt", b"a"), ("b.txt", b"b")]);
    let paths = vec![case.text().join("b.txt"), case.text(), case.text().join("../text")];
    check_train(&case, &PrepareSpec { paths, ..case.spec(0.0) }, "b|a|");
}

#[test]
fn outputs_of_an_earlier_prepare_are_not_text() {
    let case = Case::new(&[("a.txt", b"a")]);
    let spec = PrepareSpec { extensions: vec![], ..case.spec(0.0) };
    let out = case.text().join("data");
    for _ in 0..2 {
        let prepared = prepare(&spec, &out, &mut |_| ()).unwrap();
        assert_eq!(prepared.train().len(), 2);
    }
}

#[test]
fn any_bytes_are_text() {
    let case = Case::new(&[("a.txt", &[0xff, 0xfe, 0, 0x80])]);
    let prepared = case.prepare(&case.spec(0.0)).unwrap();
    assert_eq!(bytes(prepared.train()), [0xff, 0xfe, 0, 0x80, 0]);
}

#[test]
fn empty_files_are_skipped_and_counted() {
    let case = Case::new(&[("a.txt", b""), ("b.txt", b"text"), ("c.txt", b"")]);
    let prepared = case.prepare(&case.spec(0.0)).unwrap();
    assert_eq!((prepared.files(), prepared.empty_files()), (1, 2));
    assert_eq!(bytes(prepared.train()), b"text\0");
}

#[test]
fn whole_documents_are_held_out() {
    let names: Vec<String> = (0..20).map(|i| format!("{i:02}.txt")).collect();
    let files: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), name.as_bytes())).collect();
    let case = Case::new(&files);
    let prepared = case.prepare(&case.spec(0.1)).unwrap();
    let documents = |shard: &TokenStream| -> Vec<String> {
        let text = String::from_utf8(bytes(shard)).unwrap();
        text.split_terminator('\0').map(str::to_owned).collect()
    };
    let validation = documents(prepared.validation().unwrap());
    let mut all = documents(prepared.train());
    assert_eq!((all.len(), validation.len()), (18, 2));
    assert!(all.is_sorted() && validation.is_sorted());
    all.extend(validation);
    all.sort();
    assert_eq!(all, names);
}

#[test]
fn a_fraction_of_0_writes_no_validation_and_removes_an_earlier_one() {
    let case = Case::new(&[("a.txt", b"a"), ("b.txt", b"b")]);
    assert!(case.prepare(&case.spec(0.5)).unwrap().validation().is_some());
    let prepared = case.prepare(&case.spec(0.0)).unwrap();
    assert!(prepared.validation().is_none());
    assert!(prepared.validation_summary().is_none());
    let names: Vec<_> = case.outputs().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["data.json", "files.jsonl", "train.shard"]);
}

#[test]
fn the_only_document_loses_its_end() {
    let case = Case::new(&[("a.txt", b"0123456789")]);
    let prepared = case.prepare(&case.spec(0.2)).unwrap();
    assert_eq!(bytes(prepared.train()), b"01234567\0");
    assert_eq!(bytes(prepared.validation().unwrap()), b"89\0");
}

#[test]
fn a_long_document_is_divided_by_pieces_and_nothing_is_lost() {
    let text = long_text(40 * PIECE + 77);
    let case = Case::new(&[("a.txt", &text)]);
    let prepared = case.prepare(&case.spec(0.25)).unwrap();
    let (train, validation) = (bytes(prepared.train()), bytes(prepared.validation().unwrap()));

    let summary = prepared.validation_summary().unwrap();
    assert!(summary.bytes.abs_diff(10 * PIECE as u64) < PIECE as u64, "{summary:?}");

    // Walking through the text, each piece is next in one of the two shards.
    let (mut in_train, mut in_validation) = (&train[..], &validation[..]);
    for piece in text.chunks(PIECE) {
        let skip = |shard: &mut &[u8]| {
            let rest = shard.strip_prefix(piece)?;
            *shard = rest.strip_prefix(&[0]).unwrap_or(rest);
            Some(())
        };
        skip(&mut in_train).or_else(|| skip(&mut in_validation)).expect("the piece is next");
    }
    assert!(in_train.is_empty() && in_validation.is_empty());
}

#[test]
fn the_summary_counts_what_was_written() {
    let case = Case::new(&[("a.txt", b"abc"), ("b.txt", b"defg"), ("c.txt", &long_text(PIECE + 1))]);
    let prepared = case.prepare(&case.spec(0.4)).unwrap();
    let (train, validation) = (prepared.train_summary(), prepared.validation_summary().unwrap());
    assert_eq!(train.bytes + validation.bytes, 3 + 4 + PIECE as u64 + 1);
    assert_eq!(train.tokens, train.bytes + train.documents);
    assert_eq!(train.tokens, prepared.train().len());
    assert_eq!(validation.tokens, prepared.validation().unwrap().len());
    assert_eq!(prepared.files(), 3);
}

#[test]
fn data_json_reads_well() {
    let case = Case::new(&[("a.txt", b"0123456789"), ("b.txt", b"")]);
    case.prepare(&case.spec(0.2)).unwrap();
    let text = fs::read_to_string(case.out().join("data.json")).unwrap();
    let expected = r#"{
  "format": 2,
  "files": 1,
  "empty_files": 1,
  "listing": "LISTING",
  "content": "c014dddceff1c34a",
  "vocabulary": 256,
  "separator": 0,
  "train": {
    "documents": 1,
    "bytes": 8,
    "tokens": 9,
    "shards": [
      {
        "file": "train.shard",
        "documents": 1,
        "bytes": 8,
        "tokens": 9,
        "xxh3": "6c24f0fd4b644a5a"
      }
    ]
  },
  "validation": {
    "documents": 1,
    "bytes": 2,
    "tokens": 3,
    "shards": [
      {
        "file": "validation.shard",
        "documents": 1,
        "bytes": 2,
        "tokens": 3,
        "xxh3": "7f9ddfb7d574ce11"
      }
    ]
  },
  "spec": {
    "paths": [
      "ROOT/text"
    ],
    "extensions": [
      "txt"
    ],
    "text_field": "text",
    "tokenizer": {
      "kind": "bytes"
    },
    "validation_fraction": 0.2,
    "seed": 1
  }
}
"#;
    // The listing hashes the paths, and those have a new root each time.
    let listing = text.split("\"listing\": \"").nth(1).unwrap().split('"').next().unwrap();
    assert_eq!(text.replace(listing, "LISTING").replace(case.root.path().to_str().unwrap(), "ROOT"), expected);
}

#[test]
fn preparing_twice_gives_identical_files() {
    let case = Case::new(&[("a.txt", &long_text(5 * PIECE)), ("b.txt", b"b"), ("c.txt", b"c")]);
    case.prepare(&case.spec(0.3)).unwrap();
    let first = case.outputs();
    fs::remove_dir_all(case.out()).unwrap();
    case.prepare(&case.spec(0.3)).unwrap();
    assert_eq!(case.outputs(), first);
    case.prepare(&case.spec(0.3)).unwrap();
    assert_eq!(case.outputs(), first, "over what was there");
    assert_eq!(first.len(), 4, "no temporary file is left");
}

#[test]
fn the_fingerprint_tells_data_sets_and_divisions_apart() {
    let case = Case::new(&[("a.txt", b"a"), ("b.txt", b"b")]);
    let fingerprint = |fraction| case.prepare(&case.spec(fraction)).unwrap().fingerprint();
    let (whole, divided) = (fingerprint(0.0), fingerprint(0.5));
    assert_eq!(whole, fingerprint(0.0));
    assert_ne!(whole, divided);
    case.write("a.txt", b"x");
    assert_ne!(whole, fingerprint(0.0));
}

#[test]
fn open_gives_back_what_prepare_gave() {
    let case = Case::new(&[("a.txt", b"a"), ("b.txt", b"b")]);
    assert!(Prepared::open(&case.out()).unwrap().is_none(), "no folder");
    let spec = case.spec(0.1 + 0.2);
    let prepared = case.prepare(&spec).unwrap();
    let opened = Prepared::open(&case.out()).unwrap().unwrap();
    assert_eq!(opened.spec(), &spec);
    assert_eq!(opened.folder(), case.out());
    assert_eq!(opened.fingerprint(), prepared.fingerprint());
    fs::remove_file(case.out().join("data.json")).unwrap();
    assert!(Prepared::open(&case.out()).unwrap().is_none(), "not finished");
}

#[test]
fn progress_runs_from_nothing_to_everything() {
    let case = Case::new(&[("a.txt", &long_text(3 << 20)), ("b.txt", b"b"), ("c.txt", b"")]);
    let mut seen = Vec::new();
    prepare(&case.spec(0.0), &case.out(), &mut |progress| seen.push(progress)).unwrap();
    let bytes_total = (3 << 20) + 1;
    let (first, last) = (seen[0], *seen.last().unwrap());
    assert_eq!(first, Progress { bytes_done: 0, bytes_total, files_done: 0, files_total: 2, waiting: false });
    assert_eq!(last, Progress { bytes_done: bytes_total, files_done: 2, ..first });
    assert!(seen.is_sorted_by_key(|progress| (progress.bytes_done, progress.files_done)));
    assert!(seen.windows(2).all(|pair| pair[1].bytes_done - pair[0].bytes_done <= 1 << 20));
}

#[test]
fn paths_that_name_no_text_are_refused() {
    let case = Case::new(&[("empty.md", b""), ("a.txt", b"")]);
    let spec = |paths: &[&str], extensions: &[&str]| PrepareSpec {
        paths: paths.iter().map(|path| case.root.path().join(path)).collect(),
        extensions: extensions.iter().map(|e| e.to_string()).collect(),
        ..case.spec(0.1)
    };
    assert_eq!(case.error(&spec(&[], &["txt"])), "no path to read text from\nhint: name at least one file or folder");
    assert_eq!(
        case.error(&spec(&["text", "missing"], &["txt"])),
        "ROOT/missing: no such file or folder\n\
         hint: check the spelling; paths in a config start at the config's folder"
    );
    assert_eq!(
        case.error(&spec(&["text", "text/empty.md/.."], &["rs", "toml"])).lines().next().unwrap(),
        "ROOT/text/empty.md/..: cannot be read: Not a directory (os error 20)"
    );
    assert_eq!(
        case.error(&spec(&["text"], &["rs", "toml"])),
        "ROOT/text: found 0 files with extensions rs, toml\n\
         hint: name other extensions, or name the files themselves"
    );
    assert_eq!(
        case.error(&spec(&["text", "text/a.txt"], &["md"])),
        "ROOT/text, ROOT/text/a.txt: found 2 files, all empty\n\
         hint: name files that hold text"
    );
    assert_eq!(
        case.error(&PrepareSpec { paths: vec!["/dev/null".into()], ..case.spec(0.1) }),
        "/dev/null: neither a file nor a folder\nhint: write the text to a file first"
    );
    assert!(!case.out().exists(), "a refused spec writes nothing");
}

#[test]
fn a_path_that_data_json_cannot_hold_is_refused() {
    use std::os::unix::ffi::OsStrExt;
    let case = Case::new(&[]);
    let path = Path::new(std::ffi::OsStr::from_bytes(b"\xff.txt")).to_owned();
    assert_eq!(
        case.error(&PrepareSpec { paths: vec![path], ..case.spec(0.1) }),
        "\u{fffd}.txt: the path is not valid UTF-8\nhint: rename it, or name a folder above it"
    );
}

/// Prepares two files; `disturb` is called once, when both have been listed and none read.
fn check_disturbed(disturb: impl Fn(&Case), expected: &str) {
    let case = Case::new(&[("a.txt", b"first"), ("b.txt", b"second")]);
    let mut calm = true;
    let result = prepare(&case.spec(0.5), &case.out(), &mut |_| {
        if std::mem::take(&mut calm) {
            disturb(&case);
        }
    });
    let error = result.unwrap_err().with_hint();
    assert_eq!(error.replace(case.root.path().to_str().unwrap(), "ROOT"), expected);
    assert_eq!(case.outputs(), [], "temporary files are removed");
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    check_disturbed(
        |case| fs::remove_file(case.text().join("b.txt")).unwrap(),
        "ROOT/text/b.txt: cannot be read: No such file or directory (os error 2)\n\
         hint: check that it still exists and that you may read it",
    );
}

#[test]
fn a_file_that_changes_is_named() {
    for contents in [&b"short"[..], b"second and more"] {
        check_disturbed(
            |case| case.write("b.txt", contents),
            "ROOT/text/b.txt: changed while being read; it had 6 bytes before\n\
             hint: prepare again once it is at rest",
        );
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let case = Case::new(&[("a.txt", b"text")]);
    fs::write(case.out(), "a file stands here").unwrap();
    assert_eq!(
        case.error(&case.spec(0.0)),
        "ROOT/out: cannot be written: File exists (os error 17)\nhint: choose another folder"
    );
}
