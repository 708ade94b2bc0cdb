//! `manifest.json`: what a checkpoint consists of.
//!
//! ```text
//! {
//! "xxh3_128": "<of the body's bytes, exactly as they stand>",
//! "body": {
//!   "format": 1,
//!   "step": 100,
//!   "files": [{ "name": "model.safetensors", "bytes": 1234, "xxh3_128": "…" }],
//!   "state": { … }
//! }
//! }
//! ```
//!
//! Format 1 has a file for each group, `<group>.safetensors`. Format 2 has a file for each group and rank that holds
//! something of it, `<group>-<rank>.safetensors`; which elements those are, the files themselves say.
//!
//! Either may have `attachments`, files of any kind that belong to the checkpoint, listed as `files` are.
//!
//! The frame around the body is fixed to the byte, so no change anywhere in the file goes unseen. It stays the same in
//! every version of the format, so that a build can name a version it does not know.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::{AtPath, CheckpointError, Result};
use crate::tensor_file;

/// The version of the format with one file for each group.
pub(crate) const WHOLE: u64 = 1;
/// The version with files of ranks.
pub(crate) const IN_PARTS: u64 = 2;
/// As `WHOLE`, with tensors in blocks of 8 bits.
pub(crate) const WHOLE_WITH_BLOCKS: u64 = 3;
/// As `IN_PARTS`, with tensors in blocks of 8 bits.
pub(crate) const IN_PARTS_WITH_BLOCKS: u64 = 4;
/// The manifest's file name.
pub(crate) const NAME: &str = "manifest.json";

const MAX_BYTES: u64 = 64 << 20;
const BEFORE_CHECKSUM: &str = "{\n\"xxh3_128\": \"";
const BEFORE_BODY: &str = "\",\n\"body\": ";
const AFTER_BODY: &str = "\n}\n";

/// The body of a manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    pub(crate) format: u64,
    pub(crate) step: u64,
    /// By ascending name.
    pub(crate) files: Vec<FileEntry>,
    /// Files that hold no tensors, by ascending name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) attachments: Vec<FileEntry>,
    pub(crate) state: serde_json::Value,
}

/// One file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileEntry {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) xxh3_128: String,
}

/// Why the bytes of a manifest were not accepted.
#[derive(Debug, PartialEq)]
pub(crate) enum Unreadable {
    Damaged(String),
    UnknownFormat(u64),
}

impl Manifest {
    /// The bytes of the file, or the reason why they could not be read back.
    pub(crate) fn seal(&self) -> Result<Vec<u8>, String> {
        let body = serde_json::to_string_pretty(self).map_err(|error| error.to_string())?;
        let checksum = checksum(xxh3_128(body.as_bytes()));
        let bytes = [BEFORE_CHECKSUM, &checksum, BEFORE_BODY, &body, AFTER_BODY].concat().into_bytes();
        match Manifest::unseal(&bytes) {
            Ok(_) => Ok(bytes),
            Err(Unreadable::Damaged(cause)) => Err(format!("its state cannot be stored: {cause}")),
            Err(Unreadable::UnknownFormat(found)) => Err(format!("format {found} is unknown")),
        }
    }

    /// The inverse of [`seal`](Manifest::seal), for bytes from anywhere.
    pub(crate) fn unseal(bytes: &[u8]) -> Result<Manifest, Unreadable> {
        let damaged = |cause: &str| Unreadable::Damaged(cause.to_owned());
        if bytes.len() as u64 > MAX_BYTES {
            return Err(Unreadable::Damaged(format!("{} bytes, more than {MAX_BYTES}", bytes.len())));
        }
        let (expected, body) = unframe(bytes).ok_or_else(|| damaged("cut off or overwritten"))?;
        if checksum(xxh3_128(body)).as_bytes() != expected {
            return Err(damaged("checksum differs"));
        }

        #[derive(Deserialize)]
        struct Version {
            format: u64,
        }
        let wrong_json = |error: serde_json::Error| Unreadable::Damaged(error.to_string());
        let version: Version = serde_json::from_slice(body).map_err(wrong_json)?;
        let group_of = match version.format {
            WHOLE | WHOLE_WITH_BLOCKS => tensor_file::group_of,
            IN_PARTS | IN_PARTS_WITH_BLOCKS => tensor_file::group_of_rank_file,
            other => return Err(Unreadable::UnknownFormat(other)),
        };
        let manifest: Manifest = serde_json::from_slice(body).map_err(wrong_json)?;
        if !manifest.files.is_sorted_by(|a, b| a.name < b.name) {
            return Err(damaged("files are not in order"));
        }
        if !manifest.attachments.is_sorted_by(|a, b| a.name < b.name) {
            return Err(damaged("attachments are not in order"));
        }
        let odd = manifest.files.iter().find(|file| group_of(&file.name).is_none());
        match odd.or(manifest.attachments.iter().find(|file| !is_attachment(&file.name))) {
            Some(file) => Err(Unreadable::Damaged(format!("refused the file name {:?}", file.name))),
            None => Ok(manifest),
        }
    }

    /// The group that a file belongs to.
    pub(crate) fn group_of<'a>(&self, file: &'a FileEntry) -> Option<&'a str> {
        match self.format {
            WHOLE | WHOLE_WITH_BLOCKS => tensor_file::group_of(&file.name),
            _ => tensor_file::group_of_rank_file(&file.name),
        }
    }

    /// Reads the manifest of the checkpoint at `folder`.
    pub(crate) fn read(folder: &Path) -> Result<Manifest> {
        let (file, _) = open_regular(folder, NAME)?;
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes).at("read", &folder.join(NAME))?;
        Manifest::unseal(&bytes).map_err(|reason| reason.at(folder))
    }
}

impl Unreadable {
    /// The error for a manifest of the checkpoint at `folder`.
    pub(crate) fn at(self, folder: &Path) -> CheckpointError {
        match self {
            Unreadable::Damaged(cause) => damaged(folder, NAME, cause),
            Unreadable::UnknownFormat(found) => CheckpointError::UnknownFormat { path: folder.to_owned(), found },
        }
    }
}

/// Whether a file that holds no tensors may have a name: lower-case letters, digits, `_` and `-`, and `.json`.
fn is_attachment(name: &str) -> bool {
    let plain = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_' || c == b'-';
    name != NAME && name.strip_suffix(".json").is_some_and(|stem| !stem.is_empty() && stem.bytes().all(plain))
}

/// Opens a plain file of the checkpoint at `folder`, and tells its length.
pub(crate) fn open_regular(folder: &Path, name: &str) -> Result<(File, u64)> {
    let path = folder.join(name);
    let metadata = match fs::metadata(&path) {
        Err(cause) if cause.kind() == ErrorKind::NotFound => return Err(damaged(folder, name, "missing")),
        metadata => metadata.at("read", &path)?,
    };
    if !metadata.is_file() {
        return Err(damaged(folder, name, "not a plain file"));
    }
    Ok((File::open(&path).at("open", &path)?, metadata.len()))
}

/// The error for a wrong file of the checkpoint at `folder`.
pub(crate) fn damaged(folder: &Path, file: &str, cause: impl Into<String>) -> CheckpointError {
    CheckpointError::Damaged { path: folder.to_owned(), file: file.to_owned(), cause: cause.into() }
}

/// A checksum as manifests spell it.
pub(crate) fn checksum(digest: u128) -> String {
    format!("{digest:032x}")
}

fn unframe(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let rest = bytes.strip_prefix(BEFORE_CHECKSUM.as_bytes())?;
    let (checksum, rest) = rest.split_at_checked(32)?;
    let body = rest.strip_prefix(BEFORE_BODY.as_bytes())?.strip_suffix(AFTER_BODY.as_bytes())?;
    Some((checksum, body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn example() -> Manifest {
        let file = FileEntry { name: "model.safetensors".into(), bytes: 16, xxh3_128: checksum(7) };
        Manifest { format: WHOLE, step: 100, files: vec![file], attachments: Vec::new(), state: json!({"position": 5}) }
    }

    fn check_refused(manifest: &Manifest, expected: &str) {
        let refusal = manifest.seal().expect_err("this manifest must not be sealed");
        assert!(refusal.contains(expected), "{refusal}");
    }

    #[test]
    fn the_file_is_json_and_reads_back() {
        let bytes = example().seal().unwrap();
        let json: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(json["body"]["state"]["position"], 5);
        assert_eq!(Manifest::unseal(&bytes), Ok(example()));
    }

    #[test]
    fn numbers_of_the_state_come_back_to_the_bit() {
        let spread = (1..500u64).map(|i| f64::from_bits(i.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let edges = [-0.0, 0.1 + 0.2, f64::MIN_POSITIVE, f64::MAX, 5e-324];
        let numbers: Vec<f64> = spread.filter(|x| x.is_finite()).chain(edges).collect();
        let bytes = Manifest { state: json!(numbers), ..example() }.seal().unwrap();
        let read = Manifest::unseal(&bytes).unwrap().state;
        for (i, x) in numbers.iter().enumerate() {
            assert_eq!(read[i].as_f64().map(f64::to_bits), Some(x.to_bits()), "{x}");
        }
        let state = json!({"seed": u64::MAX, "offset": i64::MIN});
        let bytes = Manifest { state: state.clone(), ..example() }.seal().unwrap();
        assert_eq!(Manifest::unseal(&bytes).unwrap().state, state);
    }

    #[test]
    fn another_version_is_named() {
        let body = r#"{"format": 5, "shards": []}"#;
        let checksum = checksum(xxh3_128(body.as_bytes()));
        let bytes = [BEFORE_CHECKSUM, &checksum, BEFORE_BODY, body, AFTER_BODY].concat();
        assert_eq!(Manifest::unseal(bytes.as_bytes()), Err(Unreadable::UnknownFormat(5)));
    }

    #[test]
    fn file_names_cannot_leave_the_folder() {
        for name in ["../model.safetensors", "/etc/passwd", "a/b.safetensors", ".safetensors", "model.bin", ""] {
            let mut manifest = example();
            manifest.files[0].name = name.into();
            check_refused(&manifest, "refused the file name");
        }
        for name in ["../model-00003.safetensors", "model.safetensors", "model-3.safetensors"] {
            let mut manifest = Manifest { format: IN_PARTS, ..example() };
            manifest.files[0].name = name.into();
            check_refused(&manifest, "refused the file name");
        }
    }

    #[test]
    fn attachments_have_plain_names_of_their_own() {
        let attached = |name: &str| {
            let file = FileEntry { name: name.into(), bytes: 1, xxh3_128: checksum(7) };
            Manifest { attachments: vec![file], ..example() }
        };
        assert!(attached("tokenizer.json").seal().is_ok());
        for name in ["manifest.json", "../tokenizer.json", "a/b.json", ".json", "a.txt", "model.safetensors", ""] {
            check_refused(&attached(name), "refused the file name");
        }
    }

    #[test]
    fn a_file_is_named_once() {
        let mut manifest = example();
        manifest.files.push(manifest.files[0].clone());
        check_refused(&manifest, "not in order");
    }

    #[test]
    fn a_state_too_deep_to_read_back_is_refused() {
        let deep = (0..200).fold(json!(1), |inner, _| json!([inner]));
        check_refused(&Manifest { state: deep, ..example() }, "recursion limit");
    }
}
