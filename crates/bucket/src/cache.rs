//! Blocks on the disk of this machine, of several processes.
//!
//! ```text
//! <cache>/<hash of server, address and ETag>/<index>    a block, and its xxh3-64
//! ```
//!
//! A block appears by a rename and is checked whenever it is read. The least recently used go first; times of use are the times of
//! modification. Whatever fails here costs a request, so nothing is an error.

use crate::http::lock;
use crate::settings::own_cache;
use crate::sign::sha256;
use crate::{BucketAddress, Limits};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};
use xxhash_rust::xxh3::xxh3_64;

/// A block's time of use is written again after this long.
const TOUCH_AFTER: Duration = Duration::from_secs(60);

/// The folder is looked at again when a process has written this part of its limit: other processes write too.
const LOOKED_AT: u64 = 64;

#[derive(Default)]
pub(crate) struct DiskCache {
    /// Bytes that were there when it was last looked at, and those that this process has written since; none before.
    bytes: Mutex<Option<(u64, u64)>>,
}

impl DiskCache {
    /// The folder of an object, in the cache.
    pub fn name(server: &str, address: &BucketAddress, etag: &str) -> String {
        sha256(format!("{server}\n{address}\n{etag}").as_bytes())[..32].to_owned()
    }

    /// A block of `bytes` bytes.
    pub fn read(&self, limits: &Limits, object: &str, index: u64, bytes: u64) -> Option<Vec<u8>> {
        let path = folder(limits).join(object).join(index.to_string());
        let mut block = fs::read(&path).ok()?;
        let content = block.len().checked_sub(8)?;
        let sum = xxh3_64(&block[..content]).to_le_bytes();
        if content as u64 != bytes || block[content..] != sum {
            let _ = fs::remove_file(&path);
            return None;
        }
        block.truncate(content);
        let used = fs::metadata(&path).and_then(|metadata| metadata.modified()).ok();
        if used.and_then(|used| used.elapsed().ok()).is_some_and(|since| since > TOUCH_AFTER) {
            let _ = File::options().append(true).open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        }
        Some(block)
    }

    pub fn write(&self, limits: &Limits, object: &str, index: u64, block: &[u8]) {
        let root = folder(limits);
        let own = root.join(object);
        let beside = own.join(format!(".{index}.{}", std::process::id()));
        let write = || {
            fs::create_dir_all(&own)?;
            let mut file = File::create(&beside)?;
            file.write_all(block)?;
            file.write_all(&xxh3_64(block).to_le_bytes())?;
            drop(file);
            fs::rename(&beside, own.join(index.to_string()))
        };
        let mut bytes = lock(&self.bytes);
        let new = block.len() as u64 + 8;
        let known = bytes.filter(|(_, own)| own + new <= limits.cache_bytes / LOOKED_AT);
        let (there, own) = known.unwrap_or_else(|| (blocks_in(&root).iter().map(|(_, bytes, _)| bytes).sum(), 0));
        *bytes = Some((there, own + new));
        if there + own + new > limits.cache_bytes {
            *bytes = Some((shrink(&root, limits.cache_bytes.saturating_sub(new)), new));
        }
        if new <= limits.cache_bytes && write().is_err() {
            let _ = fs::remove_file(&beside);
        }
    }
}

fn folder(limits: &Limits) -> PathBuf {
    limits.cache.clone().unwrap_or_else(own_cache)
}

/// Removes the least recently used until there is some room below `most` bytes; gives the bytes that stay.
fn shrink(root: &Path, most: u64) -> u64 {
    let mut blocks = blocks_in(root);
    blocks.sort();
    let mut bytes: u64 = blocks.iter().map(|(_, bytes, _)| bytes).sum();
    if bytes <= most {
        return bytes;
    }
    // A tenth more, so that it is not looked at with every block.
    let most = most - most / 10;
    for (_, length, path) in blocks {
        if bytes <= most {
            break;
        }
        if fs::remove_file(&path).is_ok() {
            bytes -= length;
        }
        // Only where it is empty.
        let _ = path.parent().map(fs::remove_dir);
    }
    bytes
}

/// The files of a cache, and no others: when each was used, its bytes, its path.
fn blocks_in(root: &Path) -> Vec<(SystemTime, u64, PathBuf)> {
    let is_object = |name: &str| name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_block = |name: &str| {
        let name = name.strip_prefix('.').unwrap_or(name);
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
    };
    let mut blocks = Vec::new();
    for object in fs::read_dir(root).into_iter().flatten().flatten() {
        if !object.file_name().to_str().is_some_and(is_object) {
            continue;
        }
        for block in fs::read_dir(object.path()).into_iter().flatten().flatten() {
            if let (true, Ok(metadata)) = (block.file_name().to_str().is_some_and(is_block), block.metadata())
                && metadata.is_file()
            {
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                blocks.push((used, metadata.len(), block.path()));
            }
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_stays_below_its_size_and_keeps_what_was_used_last() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("notes.txt"), "not a block").unwrap();
        let limits = Limits { cache: Some(root.path().to_owned()), cache_bytes: 10_000, ..Limits::default() };
        let cache = DiskCache::default();
        let object = DiskCache::name("", &BucketAddress::parse("s3://bucket/a").unwrap(), "tag");
        let age = |index: u64, seconds: u64| {
            let file = File::options().append(true).open(root.path().join(&object).join(index.to_string())).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
        };
        for index in 0..9 {
            cache.write(&limits, &object, index, &[index as u8; 1000]);
            age(index, 1000 - index);
        }
        // Used again: it is not the oldest any more.
        assert_eq!(cache.read(&limits, &object, 0, 1000), Some(vec![0; 1000]));
        for index in 9..12 {
            cache.write(&limits, &object, index, &[index as u8; 1000]);
        }
        let there = |index| cache.read(&limits, &object, index, 1000).is_some();
        assert!(there(0) && there(11) && !there(1) && !there(2));
        let bytes: u64 = blocks_in(root.path()).iter().map(|(_, bytes, _)| bytes).sum();
        assert!(bytes <= 10_000, "{bytes}");
        assert!(root.path().join("notes.txt").exists());

        // One that was damaged is none.
        let path = root.path().join(&object).join("11");
        fs::write(&path, [7; 1008]).unwrap();
        assert!(!there(11) && !path.exists());
        // Where nothing can be written, nothing is kept.
        let nowhere = Limits { cache: Some("/dev/null/x".into()), ..limits };
        cache.write(&nowhere, &object, 0, &[1; 10]);
        assert_eq!(cache.read(&nowhere, &object, 0, 10), None);
    }

    #[test]
    fn several_processes_keep_to_one_limit() {
        let root = tempfile::tempdir().unwrap();
        let limits = Limits { cache: Some(root.path().to_owned()), cache_bytes: 10_000, ..Limits::default() };
        let processes: [DiskCache; 4] = Default::default();
        let object = DiskCache::name("", &BucketAddress::parse("s3://bucket/a").unwrap(), "tag");
        for index in 0..40 {
            processes[index as usize % 4].write(&limits, &object, index, &[3; 1000]);
            let bytes: u64 = blocks_in(root.path()).iter().map(|(_, bytes, _)| bytes).sum();
            assert!(bytes <= 10_000, "{bytes} bytes after block {index}");
        }
    }
}
