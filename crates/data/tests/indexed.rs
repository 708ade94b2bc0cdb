//! Megatron's `.bin` and `.idx`: what its own tool wrote is read token for token, what we write is what it would write, and
//! files that are damaged or do not belong together are refused by name.

mod common;

use lockstep_ir::Hint;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use common::{Case, fixture, mutate, tokenizer, tokens};
use lockstep_data::{
    IndexedTokens, PrepareSpec, Prepared, Sampler, TokenFile, TokenStream, TokenizerSpec, export, token_files,
};

/// The files that `make_indexed.py` made, and their documents' tokens.
const GOLDEN: [(&str, &[u64], u32); 2] =
    [("indexed.uint16", &[5, 1, 17, 300, 64, 2, 90, 33], 1000), ("indexed.int32", &[7, 0, 9, 3, 40, 0, 17], 70_000)];

fn token(at: u64, vocabulary: u32) -> u32 {
    ((at * 7919 + 13) % u64::from(vocabulary)) as u32
}

fn stream(index: &Path) -> TokenStream {
    TokenStream::new(vec![Arc::new(IndexedTokens::open(index).unwrap())])
}

/// A copy of a golden pair in a folder of its own: the `.idx`.
fn copied(case: &Case, name: &str) -> PathBuf {
    for extension in ["bin", "idx"] {
        fs::copy(fixture(&format!("{name}.{extension}")), case.path(&format!("a.{extension}"))).unwrap();
    }
    case.path("a.idx")
}

#[test]
fn what_megatron_wrote_is_read_token_for_token() {
    for (name, documents, vocabulary) in GOLDEN {
        let file = IndexedTokens::open(&fixture(&format!("{name}.idx"))).unwrap();
        let all: u64 = documents.iter().sum();
        assert_eq!((file.len(), file.documents()), (all, documents.len() as u64));
        let mut start = 0;
        for (index, length) in documents.iter().enumerate() {
            let document = file.document(index as u64);
            assert_eq!((document.start, document.origin.record), (start, index as u64 + 1));
            assert_eq!(file.is_empty_document(index as u64), *length == 0);
            start += length;
        }
        let stream = stream(&fixture(&format!("{name}.idx")));
        assert_eq!(tokens(&stream), (0..all).map(|at| token(at, vocabulary)).collect::<Vec<_>>());
        let mut begun = Vec::new();
        stream.documents_beginning_in(0, all, |document| begun.push(document.origin.record));
        let with_tokens = documents.iter().zip(1..).filter(|(length, _)| **length > 0).map(|(_, record)| record);
        assert_eq!(begun, with_tokens.collect::<Vec<u64>>(), "a document without tokens is none");
        file.verify_with(&AtomicBool::new(false), &mut |_| ()).unwrap();
    }
}

#[test]
fn what_is_exported_is_what_megatron_would_write() {
    let case = Case::new(&[]);
    let never = AtomicBool::new(false);
    let (name, documents, vocabulary) = GOLDEN[0];
    let golden = stream(&fixture(&format!("{name}.idx")));
    let mut heard = 0;
    let exported = export(&golden, vocabulary, &case.path("out"), "again", &never, &mut |n| heard = n).unwrap();
    assert_eq!((exported.documents, exported.tokens, heard), (documents.len() as u64, golden.len(), golden.len()));
    for extension in ["bin", "idx"] {
        let written = fs::read(case.path(&format!("out/again.{extension}"))).unwrap();
        assert!(written == fs::read(fixture(&format!("{name}.{extension}"))).unwrap(), "{extension}");
    }
    let sizes =
        ["bin", "idx"].map(|extension| fs::metadata(case.path(&format!("out/again.{extension}"))).unwrap().len());
    assert_eq!(exported.bytes, sizes.iter().sum::<u64>());

    // Documents of several sequences become one each, and empty ones are left out; the tokens stay.
    let golden = stream(&fixture("indexed.int32.idx"));
    let exported = export(&golden, 70_000, &case.path("out"), "wide", &never, &mut |_| ()).unwrap();
    assert_eq!(exported.documents, 5);
    assert_eq!(tokens(&stream(&exported.index)), tokens(&golden));
    assert_eq!(fs::metadata(case.path("out/wide.bin")).unwrap().len(), 4 * golden.len());
    assert_eq!(fs::read_dir(case.path("out")).unwrap().count(), 4, "no temporary file stays");
}

#[test]
fn shards_and_exported_files_give_the_same_samples() {
    let case = Case::new(&[("a.txt", b"one document of some length"), ("b.txt", b"and another"), ("c.txt", b"three")]);
    let shards = case.prepare(&case.spec(&["a.txt", "b.txt", "c.txt"])).unwrap();
    let exported = export(shards.train(), 256, &case.path("x"), "train", &AtomicBool::new(false), &mut |_| ()).unwrap();
    let again = stream(&exported.index);
    let samples = |stream: Arc<TokenStream>| {
        let sampler = Sampler::new(stream, 6, 3).unwrap();
        let sample = |index| {
            let (mut tokens, mut targets, mut starts) = ([0; 6], [0; 6], [0; 6]);
            sampler.fill(index, &mut tokens, &mut targets);
            sampler.document_starts(index, &mut starts);
            (tokens, targets, starts)
        };
        (0..30).map(sample).collect::<Vec<_>>()
    };
    assert_eq!(samples(shards.train().clone()), samples(Arc::new(again)));
}

#[test]
fn several_files_are_one_corpus_and_its_last_documents_are_held_out() {
    let case = Case::new(&[]);
    let index = copied(&case, "indexed.uint16");
    for extension in ["bin", "idx"] {
        fs::copy(index.with_extension(extension), case.path(&format!("b.{extension}"))).unwrap();
    }
    let spec = |paths: &[&str]| PrepareSpec { tokenizer: tokenizer(), validation_fraction: 0.15, ..case.spec(paths) };
    let named = |paths: &[&str]| token_files(&spec(paths)).unwrap();
    let both = vec![case.path("a.idx"), case.path("b.idx")];
    assert_eq!(named(&["a.idx", "b.bin"]), Some(both.clone()));
    assert_eq!(named(&["a", "b"]), Some(both.clone()), "by what both names begin with");
    assert_eq!(named(&["."]), None, "a folder of text");
    let folder = PrepareSpec { extensions: vec!["idx".into()], ..spec(&["."]) };
    assert_eq!(token_files(&folder).unwrap().unwrap().len(), 2);
    fs::write(case.path("c.txt"), "text").unwrap();
    let error = token_files(&spec(&["a.idx", "c.txt"])).unwrap_err().with_hint();
    assert!(error.contains("c.txt: no tokens of Megatron's") && error.contains("in Corpora"), "{error}");

    let data = Prepared::in_place(&spec(&["a", "b"]), &both).unwrap();
    assert_eq!((data.train_summary().documents, data.validation_summary().unwrap().documents), (14, 2));
    assert_eq!((data.train().len(), data.validation().unwrap().len()), (2 * 512 - 123, 123));
    let whole: Vec<u32> = (0..2).flat_map(|_| (0..512).map(|at| token(at, 1000))).collect();
    assert_eq!([tokens(data.train()), tokens(data.validation().unwrap())].concat(), whole);
    let first = data.validation().unwrap().document_at(0);
    assert_eq!((first.origin.file, first.origin.record), (1, 7));
    assert_eq!(data.sources().unwrap(), both);

    // Other tokens are other data, though their number is the same.
    let other = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = fs::read(fixture("indexed.uint16.bin")).unwrap();
        change(&mut bytes);
        fs::remove_file(case.path("b.bin")).unwrap();
        fs::write(case.path("b.bin"), bytes).unwrap();
        Prepared::in_place(&spec(&["a", "b"]), &both).map(|data| data.fingerprint())
    };
    assert_eq!(other(&|_| ()).unwrap(), data.fingerprint());
    assert_ne!(other(&|bytes| bytes[600] ^= 1).unwrap(), data.fingerprint());
    let error = other(&|bytes| bytes[601] = 200).unwrap_err().with_hint();
    assert!(error.contains("b.bin: token 300 is ") && error.contains("tokens below 1000"), "{error}");
    let bytes = PrepareSpec { tokenizer: TokenizerSpec::Bytes, ..spec(&["a"]) };
    let error = Prepared::in_place(&bytes, &both[..1]).unwrap_err().with_hint();
    assert!(error.contains("hint: set Tokenizer to the tokenizer.json"), "{error}");
    let one = PrepareSpec { validation_fraction: 0.99, ..spec(&["a"]) };
    let error = Prepared::in_place(&one, &both[..1]).unwrap_err().with_hint();
    assert!(error.contains("8 documents cannot be divided"), "{error}");
}

#[test]
fn damaged_files_are_refused_by_name() {
    let refused = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let case = Case::new(&[]);
        let index = copied(&case, "indexed.uint16");
        let path = case.path(name);
        let mut bytes = fs::read(&path).unwrap();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
        let error = IndexedTokens::open(&index).unwrap_err().with_hint();
        error.replace(&format!("{}/", case.root.path().display()), "")
    };
    let copy = "\nhint: copy both files again from where they were made (x.bin and x.idx belong together)";
    let make = "\nhint: make them with Megatron's tools/preprocess_data.py, or with `lockstep data export`";
    let index = |change: &dyn Fn(&mut Vec<u8>)| refused("a.idx", change);
    assert_eq!(
        index(&|b| b.truncate(20)),
        format!("a.idx: 20 bytes are too few for the header of an index (34 bytes){copy}")
    );
    assert_eq!(index(&|b| b.truncate(100)), format!("a.idx: 100 bytes long where the header says 202{copy}"));
    assert_eq!(index(&|b| b.push(0)), format!("a.idx: 203 bytes long where the header says 202{copy}"));
    assert_eq!(
        index(&|b| b[0] = b'X'),
        format!("a.idx: not an index of Megatron's: it does not begin with `MMIDIDX`{make}")
    );
    assert!(index(&|b| b[..8].copy_from_slice(b"TNTIDX\0\0")).contains("of the old kind (TNTIDX)"));
    assert_eq!(
        index(&|b| b[9] = 2),
        format!("a.idx: index version 2 is not supported (this build reads version 1){make}")
    );
    assert!(index(&|b| b[17] = 5).contains("tokens of type 5 (int64) are not read, only uint8, uint16 and int32"));
    assert!(index(&|b| b[17] = 99).contains("tokens of type 99 are not read"));
    assert!(index(&|b| b[25] = 0xff).contains("more than a file can hold"));
    assert!(index(&|b| b[34] = 6).contains("damaged: sequence 1 does not begin where the one before ends"));
    assert!(index(&|b| b[37] = 0xff).contains("damaged: sequence 0 has less than no token"));
    assert!(index(&|b| b[138] = 7).contains("damaged: the document table is not in order"));
    assert!(index(&|b| b[194] = 7).contains("damaged: the document table does not hold all sequences"));
    // The type of four bytes makes other offsets of the same numbers.
    assert!(index(&|b| b[17] = 4).contains("where a.idx says"), "{}", index(&|b| b[17] = 4));
    let bin = |change: &dyn Fn(&mut Vec<u8>)| refused("a.bin", change);
    assert_eq!(bin(&|b| b.truncate(1000)), format!("a.bin: 1000 bytes long where a.idx says 1024{copy}"));
    assert!(bin(&Vec::clear).contains("a.bin: 0 bytes long where a.idx says 1024"));

    let case = Case::new(&[]);
    let path = copied(&case, "indexed.uint16");
    fs::remove_file(case.path("a.bin")).unwrap();
    let error = IndexedTokens::open(&path).unwrap_err().with_hint();
    assert!(error.contains("a.bin: missing, and ") && error.contains("is nothing without it"), "{error}");
    let error = IndexedTokens::open(&case.path("b.idx")).unwrap_err().with_hint();
    assert!(error.contains("b.idx: missing"), "{error}");
}

#[test]
fn made_up_indices_never_panic() {
    let case = Case::new(&[]);
    let path = copied(&case, "indexed.int32");
    let good = fs::read(&path).unwrap();
    for round in 0..2000 {
        fs::remove_file(&path).unwrap();
        fs::write(&path, mutate(&good, round)).unwrap();
        if let Ok(file) = IndexedTokens::open(&path) {
            let stream = TokenStream::new(vec![Arc::new(file)]);
            tokens(&stream);
            stream.documents_beginning_in(0, stream.len(), |document| assert!(document.start < stream.len()));
        }
    }
}
