//! Shards and descriptions that are truncated, damaged or made up are refused by name, never read past their end.

use lockstep_ir::Hint;
use std::fs;
use std::path::Path;

use lockstep_data::{DataError, PrepareSpec, Prepared, Shard, ShardFault, TokenFile, prepare};
use tempfile::TempDir;
use xxhash_rust::xxh3::xxh3_64;

/// A file of the documented format, written out by hand: one document.
fn shard_bytes(width: u32, tokens: u64, payload: &[u8]) -> Vec<u8> {
    let documents: &[u64] = if tokens == 0 { &[] } else { &[0] };
    shard_of(width, tokens, payload, documents)
}

/// The same with documents at these offsets.
fn shard_of(width: u32, tokens: u64, payload: &[u8], documents: &[u64]) -> Vec<u8> {
    let table = documents.iter().flat_map(|start| [start.to_le_bytes(), [0; 8]].concat());
    let rest: Vec<u8> = payload.iter().copied().chain(table).collect();
    let mut bytes = b"LKSHARD1".to_vec();
    bytes.extend(2u32.to_le_bytes());
    bytes.extend(width.to_le_bytes());
    bytes.extend(tokens.to_le_bytes());
    bytes.extend(xxh3_64(&rest).to_le_bytes());
    bytes.extend((documents.len() as u64).to_le_bytes());
    bytes.resize(64, 0);
    bytes.extend(rest);
    bytes
}

fn open(bytes: &[u8]) -> Result<Shard, DataError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.shard");
    fs::write(&path, bytes).unwrap();
    Shard::open(&path)
}

fn fault(bytes: &[u8]) -> ShardFault {
    match open(bytes).unwrap_err() {
        DataError::Shard { fault, .. } => fault,
        other => panic!("{other}"),
    }
}

/// The sound shard `0 1 2 3` of single bytes, changed by `change`.
fn damaged(change: impl Fn(&mut Vec<u8>)) -> ShardFault {
    let mut bytes = shard_bytes(1, 4, &[0, 1, 2, 3]);
    change(&mut bytes);
    fault(&bytes)
}

#[test]
fn tokens_of_every_width_are_read() {
    let payload = [1, 0, 0, 0, 2, 1, 0, 0xff];
    let read = |width, tokens: usize| {
        let shard = open(&shard_bytes(width, tokens as u64, &payload)).unwrap();
        assert_eq!(shard.len(), tokens as u64);
        let mut all = vec![0; tokens - 1];
        shard.copy(1, &mut all);
        all
    };
    assert_eq!(read(1, 8), [0, 0, 0, 2, 1, 0, 0xff]);
    assert_eq!(read(2, 4), [0, 0x102, 0xff00]);
    assert_eq!(read(4, 2), [0xff00_0102]);
}

#[test]
fn a_shard_may_be_empty() {
    let shard = open(&shard_bytes(1, 0, &[])).unwrap();
    assert!(shard.is_empty());
    shard.copy(0, &mut []);
}

#[test]
fn a_file_shorter_than_a_header_is_refused() {
    assert_eq!(fault(&[]), ShardFault::NoHeader { bytes: 0 });
    assert_eq!(damaged(|bytes| bytes.truncate(63)), ShardFault::NoHeader { bytes: 63 });
}

#[test]
fn a_payload_of_another_length_is_refused() {
    let refused = |found| ShardFault::Length { expected: 84, found };
    assert_eq!(damaged(|bytes| bytes.truncate(83)), refused(83));
    assert_eq!(damaged(|bytes| bytes.truncate(64)), refused(64));
    assert_eq!(damaged(|bytes| bytes.push(0)), refused(85));
}

#[test]
fn another_magic_version_or_width_is_refused() {
    assert_eq!(damaged(|bytes| bytes[7] = b'2'), ShardFault::Magic);
    assert_eq!(damaged(|bytes| bytes[8] = 1), ShardFault::Version { version: 1 });
    for width in [0, 3, 8, u32::MAX] {
        let change = |bytes: &mut Vec<u8>| bytes[12..16].copy_from_slice(&width.to_le_bytes());
        assert_eq!(damaged(change), ShardFault::Width { width });
    }
}

#[test]
fn absurd_counts_are_refused_without_being_believed() {
    let payload = [0; 4];
    for (width, tokens) in [(1, u64::MAX), (4, u64::MAX), (2, 1 << 63), (4, 1 << 62), (1, u64::MAX - 63)] {
        assert_eq!(fault(&shard_bytes(width, tokens, &payload)), ShardFault::Count { tokens });
    }
    let huge = ShardFault::Length { expected: (1 << 62) + 80, found: 84 };
    assert_eq!(fault(&shard_bytes(1, 1 << 62, &payload)), huge);
    // 4 · (2⁶² + 1) wraps round to the 4 bytes that are there.
    let tokens = (1 << 62) + 1;
    assert_eq!(fault(&shard_bytes(4, tokens, &payload)), ShardFault::Count { tokens });
}

#[test]
fn a_flipped_bit_is_found() {
    for position in 16..84 {
        let mut bytes = shard_bytes(1, 4, &[0, 1, 2, 3]);
        bytes[position] ^= 1;
        match open(&bytes) {
            Err(DataError::Shard { fault: ShardFault::Hash { .. }, .. }) if !(32..64).contains(&position) => (),
            Err(DataError::Shard { fault: ShardFault::Length { .. }, .. }) if position < 40 => (),
            Err(DataError::Shard { fault: ShardFault::DocumentCount { .. }, .. }) if position < 40 => (),
            Err(DataError::Shard { fault: ShardFault::Reserved, .. }) if (41..64).contains(&position) => (),
            // Entries of the table are longer where they have prompts.
            Err(DataError::Shard { fault: ShardFault::Length { .. }, .. }) if position == 44 => (),
            // The mark of a continued document is a bit of its own.
            Ok(_) if position == 40 => (),
            other => panic!("byte {position}: {other:?}"),
        }
    }
}

#[test]
fn a_large_shard_is_opened_unread_and_verified_on_demand() {
    let mut payload = vec![0; 64 << 20];
    let good = shard_bytes(1, payload.len() as u64, &payload);
    payload[12345] = 1;
    let bad = [&good[..64], &payload, &[0; 16]].concat();
    open(&good).unwrap().verify().unwrap();
    let fault = open(&bad).unwrap().verify().unwrap_err();
    assert!(matches!(fault, DataError::Shard { fault: ShardFault::Hash { .. }, .. }));
}

#[test]
#[should_panic(expected = "3 tokens from 2 on are outside 4")]
fn copying_past_the_end_panics() {
    open(&shard_bytes(1, 4, &[0, 1, 2, 3])).unwrap().copy(2, &mut [0; 3]);
}

#[test]
#[should_panic(expected = "are outside 4")]
fn copying_from_an_absurd_offset_panics() {
    open(&shard_bytes(4, 4, &[0; 16])).unwrap().copy(u64::MAX, &mut [0]);
}

#[test]
fn faults_say_what_is_wrong() {
    let faults = [
        fault(&[1, 2, 3]),
        damaged(|bytes| bytes[0] = 0),
        damaged(|bytes| bytes[8] = 9),
        damaged(|bytes| bytes[12] = 3),
        fault(&shard_bytes(4, u64::MAX, &[])),
        damaged(|bytes| bytes.truncate(66)),
        ShardFault::Hash { expected: 1, found: 0xfedc_ba98_7654_3210 },
    ];
    let expected = [
        "3 bytes are too few for the header of a shard (64 bytes)",
        "not a shard: it does not begin with `LKSHARD1`",
        "shard version 9 is not supported (this build reads version 2)",
        "tokens of 3 bytes are not supported (1, 2 or 4)",
        "the header claims 18446744073709551615 tokens, more than a file can hold",
        "66 bytes long where the header says 84",
        "the tokens hash to fedcba9876543210 where the header says 0000000000000001",
    ];
    assert_eq!(faults.map(|fault| fault.to_string()), expected);
}

/// Prepares two documents, lets `damage` loose on the folder and gives the error of opening it.
fn open_damaged(damage: impl Fn(&Path)) -> String {
    let root: TempDir = tempfile::tempdir().unwrap();
    let texts = ["a.txt", "b.txt"].map(|name| root.path().join(name));
    for text in &texts {
        fs::write(text, "some text").unwrap();
    }
    let spec = PrepareSpec { paths: texts.to_vec(), validation_fraction: 0.5, seed: 1, ..PrepareSpec::default() };
    let out = root.path().join("out");
    prepare(&spec, &out, &mut |_| ()).unwrap();
    damage(&out);
    let error = Prepared::open(&out).unwrap_err().with_hint();
    error.replace(root.path().to_str().unwrap(), "ROOT")
}

fn edit(path: &Path, change: impl Fn(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_damaged_folder_names_the_file_and_the_way_out() {
    let hint = "\nhint: delete the folder ROOT/out to prepare it again";
    let check = |damage: &dyn Fn(&Path), expected: &str| {
        assert_eq!(open_damaged(damage), format!("{expected}{hint}"));
    };
    check(
        &|out| fs::remove_file(out.join("validation.shard")).unwrap(),
        "ROOT/out/validation.shard: the shard is missing",
    );
    check(
        &|out| edit(&out.join("train.shard"), |bytes| bytes.truncate(70)),
        "ROOT/out/train.shard: 70 bytes long where the header says 90",
    );
    check(
        &|out| fs::write(out.join("train.shard"), shard_bytes(1, 3, b"abc")).unwrap(),
        "ROOT/out/train.shard: not the shard that data.json describes (another number of tokens)",
    );
    check(
        &|out| fs::write(out.join("train.shard"), shard_bytes(1, 10, b"other text")).unwrap(),
        "ROOT/out/train.shard: not the shard that data.json describes (another hash)",
    );
    let flipped = open_damaged(|out| edit(&out.join("train.shard"), |bytes| bytes[64] ^= 1));
    assert!(flipped.starts_with("ROOT/out/train.shard: the tokens hash to "), "{flipped}");
}

#[test]
fn a_damaged_description_is_refused() {
    let hint = "\nhint: delete the folder ROOT/out to prepare it again";
    let check = |contents: &str, expected: &str| {
        let error = open_damaged(|out| fs::write(out.join("data.json"), contents).unwrap());
        assert_eq!(error, format!("ROOT/out/data.json: {expected}{hint}"));
    };
    let not = "not a description of prepared data:";
    check("", &format!("{not} EOF while parsing a value at line 1 column 0"));
    check("{\"format\": 2}", &format!("{not} missing field `files` at line 1 column 13"));
    check("{\"format\": 1}", "format 1 is not supported (this build reads format 2)");
    let nested = open_damaged(|out| fs::write(out.join("data.json"), "[".repeat(1 << 20)).unwrap());
    assert!(nested.contains(not), "{nested}");
    let binary = open_damaged(|out| fs::write(out.join("data.json"), [0xff; 9]).unwrap());
    assert!(binary.contains(not), "{binary}");
    let hash = open_damaged(|out| {
        let text = fs::read_to_string(out.join("data.json")).unwrap();
        let text = text.replace("\"xxh3\": \"", "\"xxh3\": \"g");
        fs::write(out.join("data.json"), text).unwrap();
    });
    assert!(hash.contains("expected 16 hexadecimal digits"), "{hash}");
}
