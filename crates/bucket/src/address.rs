//! How objects are named: `s3://bucket/key`.

use crate::{BucketError, BucketFault};
use std::fmt;
use std::path::{Path, PathBuf};

/// What an address begins with.
pub const SCHEME: &str = "s3://";

/// Whether a path is an address.
pub fn is_address(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.starts_with(SCHEME))
}

/// An object, or what stands for a folder: the beginning of the keys of several.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BucketAddress {
    bucket: String,
    key: String,
}

impl BucketAddress {
    /// Reads `s3://bucket/key`. The key may be missing, which is all of the bucket; a `/` at its end counts for nothing.
    pub fn parse(text: &str) -> Result<Self, BucketError> {
        let wrong = |problem: &str| BucketError::of(text, BucketFault::Address, problem);
        let rest = text.strip_prefix(SCHEME).ok_or_else(|| wrong("an address begins with s3://"))?;
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        if !(3..=63).contains(&bucket.len()) || !bucket.chars().all(plain) || bucket.starts_with(['-', '.']) {
            return Err(wrong("a bucket's name has 3 to 63 letters, digits, `-`, `.` and `_`"));
        }
        let key = key.trim_end_matches('/');
        if !key.is_empty() && !is_key(key) {
            return Err(wrong(
                "a key has names between single `/`, none of them `.` or `..`, and no control characters",
            ));
        }
        Ok(Self { bucket: bucket.to_owned(), key: key.to_owned() })
    }

    /// The address that a path is; none where it is a path of this machine.
    pub fn of(path: &Path) -> Option<Result<Self, BucketError>> {
        path.to_str().filter(|text| text.starts_with(SCHEME)).map(Self::parse)
    }

    /// The bucket.
    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// The key; empty for all of the bucket.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// What is inside, by its name or its path.
    pub fn join(&self, name: &str) -> Self {
        let key = if self.key.is_empty() { name.to_owned() } else { format!("{}/{name}", self.key) };
        Self { bucket: self.bucket.clone(), key }
    }

    /// What the keys inside begin with.
    pub(crate) fn prefix(&self) -> String {
        if self.key.is_empty() { String::new() } else { format!("{}/", self.key) }
    }

    /// Another key of the same bucket.
    pub(crate) fn with_key(&self, key: &str) -> Self {
        Self { bucket: self.bucket.clone(), key: key.to_owned() }
    }

    /// The address as a path, which no file has.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(self.to_string())
    }
}

impl fmt::Display for BucketAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.bucket)?;
        if self.key.is_empty() { Ok(()) } else { write!(f, "/{}", self.key) }
    }
}

/// Whether a key can be read and printed as a path. Keys come from a server.
pub(crate) fn is_key(key: &str) -> bool {
    let sound = |part: &str| !["", ".", ".."].contains(&part);
    key.len() <= 1024 && key.split('/').all(sound) && !key.contains(char::is_control)
}

/// A text as a part of an address, as signatures want it.
pub(crate) fn escaped(text: &str, keeps_slashes: bool) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        match byte {
            b'/' if keeps_slashes => escaped.push('/'),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => escaped.push(byte.into()),
            _ => escaped += &format!("%{byte:02X}"),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_as_they_are_written() {
        for text in ["s3://bucket", "s3://my.bucket-1/a", "s3://bucket/a b/ü.txt"] {
            assert_eq!(BucketAddress::parse(text).unwrap().to_string(), text);
        }
        let folder = BucketAddress::parse("s3://bucket/a/").unwrap();
        assert_eq!((folder.key(), folder.join("b").to_string()), ("a", "s3://bucket/a/b".to_owned()));
        assert_eq!(BucketAddress::parse("s3://bucket").unwrap().join("b").key(), "b");
        assert!(is_address(Path::new("s3://bucket")) && !is_address(Path::new("/s3://bucket")));
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in [
            "s3://",
            "s3:///key",
            "s3://a/key",
            "s3://bu cket/a",
            "s3://bucket/a//b",
            "s3://bucket/../a",
            "s3://bucket/a\nb",
            "bucket/a",
        ] {
            let error = BucketAddress::parse(text).unwrap_err();
            assert!(error.hint().contains("s3://BUCKET/KEY"), "{text}: {error}");
        }
    }
}
