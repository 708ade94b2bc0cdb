//! A folder of input files and the data prepared from it.
// Each test binary uses a part of this.
#![allow(dead_code)]

use lockstep_ir::Hint;
use std::fs;
use std::path::{Path, PathBuf};

use lockstep_data::{DataError, PrepareOptions, PrepareSpec, Prepared, TokenStream, TokenizerSpec, prepare_with};
use lockstep_ir::counter;
use tempfile::TempDir;

pub struct Case {
    pub root: TempDir,
}

impl Case {
    pub fn new(files: &[(&str, &[u8])]) -> Self {
        let case = Case { root: tempfile::tempdir().unwrap() };
        for (name, contents) in files {
            fs::write(case.path(name), contents).unwrap();
        }
        case
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// These files, as bytes, nothing held out.
    pub fn spec(&self, files: &[&str]) -> PrepareSpec {
        PrepareSpec { paths: files.iter().map(|name| self.path(name)).collect(), ..PrepareSpec::default() }
    }

    pub fn prepare(&self, spec: &PrepareSpec) -> Result<Prepared, DataError> {
        prepare_with(spec, &self.path("out"), &PrepareOptions::default(), &mut |_| ())
    }

    /// The error of preparing one file, with the case's folder as `ROOT`.
    pub fn error(&self, spec: &PrepareSpec) -> String {
        let error = self.prepare(spec).unwrap_err().with_hint();
        assert!(!self.path("out/data.json").exists());
        error.replace(self.root.path().to_str().unwrap(), "ROOT")
    }
}

/// Everything in a folder, by name.
pub fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap()))
        .collect();
    all.sort();
    all
}

pub fn tokens(stream: &TokenStream) -> Vec<u32> {
    let mut tokens = vec![0; stream.len() as usize];
    stream.copy(0, &mut tokens);
    tokens
}

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A byte-level BPE of 1000 tokens that ends documents with token 0.
pub fn tokenizer() -> TokenizerSpec {
    TokenizerSpec::file(&fixture("tokenizer.json"), None).unwrap()
}

/// `good` with a few bytes flipped, removed, repeated or replaced, the same for the same `round`.
pub fn mutate(good: &[u8], round: u64) -> Vec<u8> {
    let mut bytes = good.to_vec();
    let mut draws = (0..).map(|i| counter::bits(counter::key(round, "fuzz"), i));
    let mut draw = |below: usize| (draws.next().unwrap() % below.max(1) as u64) as usize;
    for _ in 0..1 + draw(4) {
        let at = draw(bytes.len());
        let end = (at + 1 + draw(24)).min(bytes.len());
        match draw(6) {
            0 if at < bytes.len() => bytes[at] ^= 1 << draw(8),
            1 if at < bytes.len() => bytes[at] = [0, 0xff, b'"', b'{', b'\n', 0x7f][draw(6)],
            2 => drop(bytes.drain(at.min(end)..end)),
            3 => bytes.truncate(at),
            4 => {
                let copy = bytes[at.min(end)..end].to_vec();
                bytes.splice(at..at, copy);
            }
            _ => {
                let value = [u64::MAX, 1 << 63, 1 << 32, 0][draw(4)].to_le_bytes();
                let end = (at + 8).min(bytes.len());
                bytes[at..end].copy_from_slice(&value[..end - at]);
            }
        }
    }
    bytes
}
