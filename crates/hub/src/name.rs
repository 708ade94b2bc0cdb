//! How repositories on the hub are named: `hf:org/name@revision`.

use crate::HubError;
use std::fmt;

/// What a name on the hub begins with.
pub const PREFIX: &str = "hf:";

/// The revision that is meant where none is named.
pub(crate) const MAIN: &str = "main";

/// A repository of models or data, at a revision, and a path in it.
///
/// `hf:org/name`, `hf:org/name@revision`, `hf:datasets/org/name@revision/folder/file.parquet`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HubName {
    dataset: bool,
    repository: String,
    revision: Option<String>,
    path: String,
}

impl HubName {
    /// Reads the name of a model, with or without the prefix.
    pub fn model(text: &str) -> Result<Self, HubError> {
        let wrong = |problem| HubError::Name { name: text.to_owned(), problem };
        let name = text.strip_prefix(PREFIX).unwrap_or(text);
        if name.starts_with("datasets/") {
            return Err(wrong("this is a dataset, and a model is wanted"));
        }
        let (repository, revision) = match name.split_once('@') {
            Some((repository, revision)) => (repository, Some(revision)),
            None => (name, None),
        };
        if repository.matches('/').count() > 1 {
            return Err(wrong("a model is named by its owner and its name, and no file in it"));
        }
        let name = Self {
            dataset: false,
            repository: repository.to_owned(),
            revision: revision.map(str::to_owned),
            path: String::new(),
        };
        name.checked(text)
    }

    /// Reads the name of a dataset, or of a file or folder in it, with or without the prefix and `datasets/`.
    pub fn dataset(text: &str) -> Result<Self, HubError> {
        let name = text.strip_prefix(PREFIX).unwrap_or(text);
        let name = name.strip_prefix("datasets/").unwrap_or(name);
        let mut parts = name.splitn(3, '/');
        let (Some(owner), Some(name)) = (parts.next(), parts.next()) else {
            let problem = "a dataset is named by its owner and its name";
            return Err(HubError::Name { name: text.to_owned(), problem });
        };
        let (name, revision) = match name.split_once('@') {
            Some((name, revision)) => (name, Some(revision.to_owned())),
            None => (name, None),
        };
        let path = parts.next().unwrap_or_default().trim_end_matches('/').to_owned();
        Self { dataset: true, repository: format!("{owner}/{name}"), revision, path }.checked(text)
    }

    /// Whether a text could name a repository without the prefix: an owner and a name, and nothing that only paths have.
    pub fn is_plausible(text: &str) -> bool {
        !text.starts_with("hf:") && text.matches('/').count() == 1 && Self::model(text).is_ok()
    }

    fn checked(self, text: &str) -> Result<Self, HubError> {
        let wrong = |problem| HubError::Name { name: text.to_owned(), problem };
        if !self.repository.split('/').all(is_part) || self.repository.contains("--") {
            return Err(wrong("owner and name have letters, digits, `-`, `_` and `.` alone, and no `--`"));
        }
        if !self.revision.as_deref().is_none_or(|revision| revision.split('/').all(is_part)) {
            return Err(wrong("what follows `@` is a branch, a tag or a commit"));
        }
        if !self.path.is_empty() && !is_inside(&self.path) {
            return Err(wrong("what follows the name is a path inside of the repository"));
        }
        Ok(self)
    }

    /// The same at a commit.
    pub fn at(&self, commit: &str) -> Self {
        Self { revision: Some(commit.to_owned()), ..self.clone() }
    }

    /// The same without a revision.
    pub fn without_revision(&self) -> Self {
        Self { revision: None, ..self.clone() }
    }

    /// Whether a revision is named.
    pub fn has_revision(&self) -> bool {
        self.revision.is_some()
    }

    /// The revision that is meant.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }

    /// The revision, where it is a commit.
    pub(crate) fn commit(&self) -> Option<&str> {
        self.revision.as_deref().filter(|revision| is_commit(revision))
    }

    /// `org/name`.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The file or folder in it; empty for all of it.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The folder of the cache.
    pub(crate) fn folder(&self) -> String {
        format!("{}--{}", if self.dataset { "datasets" } else { "models" }, self.repository.replace('/', "--"))
    }

    /// Where its listing is, below the endpoint.
    pub(crate) fn api(&self) -> String {
        let kind = if self.dataset { "datasets" } else { "models" };
        format!("api/{kind}/{}/revision/{}?blobs=true", self.repository, escaped(self.revision(), false))
    }

    /// Where a file of it is, below the endpoint.
    pub(crate) fn file(&self, commit: &str, file: &str) -> String {
        format!("{}/resolve/{commit}/{}", self.page(), escaped(file, true))
    }

    /// Its page, below the endpoint.
    pub(crate) fn page(&self) -> String {
        format!("{}{}", if self.dataset { "datasets/" } else { "" }, self.repository)
    }

    /// The command of the hub's own tool that fetches it into the cache.
    pub fn command(&self) -> String {
        let revision = self.revision.as_ref().map_or(String::new(), |revision| format!(" --revision {revision}"));
        let kind = if self.dataset { " --repo-type dataset" } else { "" };
        format!("hf download {}{kind}{revision}", self.repository)
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.page())?;
        self.revision.iter().try_for_each(|revision| write!(f, "@{revision}"))?;
        if self.path.is_empty() { Ok(()) } else { write!(f, "/{}", self.path) }
    }
}

/// A commit as the hub writes it.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && is_hex(text)
}

pub(crate) fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// One part of a name: what the hub allows, and neither `.` nor `..`.
fn is_part(part: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !part.is_empty() && part.len() <= 96 && !part.starts_with(['.', '-']) && part.chars().all(plain)
}

/// Whether a path stays inside of the folder that it starts from. Names of files come from a server: nothing else is written.
pub(crate) fn is_inside(path: &str) -> bool {
    let sound = |part: &str| !["", ".", ".."].contains(&part) && part.len() <= 255;
    path.len() <= 1024 && path.split('/').all(sound) && !path.contains(|c: char| c.is_control() || c == '\\')
}

/// A text as a part of an address.
fn escaped(text: &str, keeps_slashes: bool) -> String {
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
    fn names_read_as_they_are_written() {
        let commit = "a".repeat(40);
        for (text, folder) in [
            ("hf:org/name", "models--org--name"),
            ("hf:gpt2", "models--gpt2"),
            ("hf:org/name@v1.0", "models--org--name"),
            ("hf:org/name@refs/pr/1", "models--org--name"),
            (&format!("hf:org/name@{commit}"), "models--org--name"),
        ] {
            let name = HubName::model(text).unwrap();
            assert_eq!((name.to_string().as_str(), name.folder().as_str()), (text, folder));
            assert_eq!(name.commit().is_some(), text.ends_with(&commit), "{text}");
        }
        for text in ["hf:datasets/org/name", "hf:datasets/org/name@v1/data/a.parquet"] {
            let name = HubName::dataset(text).unwrap();
            assert_eq!((name.to_string().as_str(), name.folder().as_str()), (text, "datasets--org--name"));
        }
        assert_eq!(HubName::dataset("hf:org/name/data/").unwrap().to_string(), "hf:datasets/org/name/data");
        assert_eq!(HubName::model("org/name").unwrap().at("v2").to_string(), "hf:org/name@v2");
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in [
            "hf:",
            "hf:../x",
            "hf:a/../b",
            "hf:a/b/c",
            "hf:/a/b",
            "hf://a/b",
            "hf:a b/c",
            "hf:a--b/c",
            "hf:a/b@",
            "hf:a/b@..",
            "hf:datasets/a/b",
        ] {
            assert!(HubName::model(text).is_err(), "{text}");
        }
        for text in ["hf:datasets/a", "hf:a/b/../c", "hf:a/b//c", "hf:a/b/c\nd"] {
            assert!(HubName::dataset(text).is_err(), "{text}");
        }
        assert!(HubName::is_plausible("org/name"));
        for text in ["name", "./name", "../name", "/org/name", "a/b/c", "hf:org/name", "~/x"] {
            assert!(!HubName::is_plausible(text), "{text}");
        }
    }

    #[test]
    fn addresses_are_escaped() {
        let name = HubName::model("hf:org/name@refs/pr/1").unwrap();
        assert_eq!(name.api(), "api/models/org/name/revision/refs%2Fpr%2F1?blobs=true");
        let name = HubName::dataset("hf:org/name").unwrap();
        assert_eq!(name.file("abc", "a b/c#1.txt"), "datasets/org/name/resolve/abc/a%20b/c%231.txt");
    }
}
