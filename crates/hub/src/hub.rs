//! From a name to a folder.

use crate::cache::RepositoryCache;
use crate::download::Download;
use crate::http::{Answer, Ask, Client, Retries};
use crate::listing::{HubFile, Listing};
use crate::{HubError, HubFiles, HubName, HubSettings};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Attempts to ask for a listing.
const ATTEMPTS: u32 = 3;
/// The largest listing that is read.
const MOST_BYTES: u64 = 256 << 20;

/// A hub and its local cache.
#[derive(Clone, Debug)]
pub struct Hub {
    settings: HubSettings,
}

/// What a download tells while it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubProgress<'a> {
    /// Another process downloads the same.
    Waiting(&'a HubName),
    /// Files come.
    Downloading {
        /// What.
        name: &'a HubName,
        /// Bytes that are here.
        done: u64,
        /// Bytes in all, as far as the hub tells.
        total: u64,
    },
}

/// What is here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The name, at the commit.
    pub name: HubName,
    /// The commit.
    pub commit: String,
    /// The folder with the files.
    pub folder: PathBuf,
    /// Which were wanted, by their names, with their checksums: `sha256:…`, `git-sha1:…`; empty where the cache does not tell.
    pub files: BTreeMap<String, String>,
}

impl Hub {
    /// The hub and the cache of these settings.
    pub fn new(settings: HubSettings) -> Self {
        Self { settings }
    }

    /// Those of the environment.
    pub fn from_env() -> Self {
        Self::new(HubSettings::from_env())
    }

    /// The same, without any connection.
    pub fn offline(&self) -> Self {
        Self::new(HubSettings { offline: true, ..self.settings.clone() })
    }

    /// The files of a repository: from the cache where they are there, without any connection, and else from the hub.
    pub fn fetch(
        &self,
        name: &HubName,
        wanted: &HubFiles,
        show: &mut dyn FnMut(HubProgress<'_>),
    ) -> Result<Fetched, HubError> {
        let cache = RepositoryCache::of(&self.settings.cache, name);
        if let Some(fetched) = self.cached(&cache, name, wanted) {
            return Ok(fetched);
        }
        if self.settings.offline {
            return Err(HubError::Offline { name: name.clone().into(), cache: self.settings.cache.clone() });
        }
        let _lock = cache.lock("lockstep", &mut || show(HubProgress::Waiting(name)))?;
        // Whoever was waited for may have done it.
        if let Some(fetched) = self.cached(&cache, name, wanted) {
            return Ok(fetched);
        }
        match self.download(&cache, name, wanted, show) {
            Err(HubError::Unreachable { .. }) if self.is_enough(&cache, name, wanted) => {
                self.cached_as_it_is(&cache, name, wanted).ok_or_else(|| self.unreachable(name, "no answer".into()))
            }
            result => result,
        }
    }

    /// The folder where a commit is, or would be.
    pub fn folder(&self, name: &HubName) -> Option<PathBuf> {
        let cache = RepositoryCache::of(&self.settings.cache, name);
        cache.commit(name).map(|commit| cache.snapshot(&commit))
    }

    /// What is wanted, where all of it is in the cache.
    fn cached(&self, cache: &RepositoryCache, name: &HubName, wanted: &HubFiles) -> Option<Fetched> {
        let commit = cache.commit(name)?;
        let Some(listing) = cache.listing(&commit) else {
            // Others have filled the cache, and nothing says with how much of the repository.
            let here = cache.listing_of_snapshot(&commit);
            let whole = self.settings.offline || here.is_likely_whole(name, wanted);
            return self.cached_as_it_is(cache, name, wanted).filter(|_| whole);
        };
        let files = listing.wanted(name, wanted, &cache.snapshot(&commit)).ok()?;
        let whole = files.iter().all(|file| cache.has(&commit, file));
        whole.then(|| fetched(cache, name, &commit, &files))
    }

    /// What is wanted, by the files that are in the cache alone.
    fn cached_as_it_is(&self, cache: &RepositoryCache, name: &HubName, wanted: &HubFiles) -> Option<Fetched> {
        let commit = cache.commit(name)?;
        let here = cache.listing_of_snapshot(&commit);
        let files = here.wanted(name, wanted, &cache.snapshot(&commit)).ok()?;
        Some(fetched(cache, name, &commit, &files))
    }

    /// Whether to be content with what is in the cache where the hub cannot be reached: a model whose config and weights are there,
    /// but no folder of data, of which a part may be missing.
    fn is_enough(&self, cache: &RepositoryCache, name: &HubName, wanted: &HubFiles) -> bool {
        let unlisted = cache.commit(name).is_some_and(|commit| cache.listing(&commit).is_none());
        unlisted && !matches!(wanted, HubFiles::Data(_))
    }

    fn download(
        &self,
        cache: &RepositoryCache,
        name: &HubName,
        wanted: &HubFiles,
        show: &mut dyn FnMut(HubProgress<'_>),
    ) -> Result<Fetched, HubError> {
        let client = Client::new(&self.settings).map_err(|cause| self.unreachable(name, cause))?;
        // What was begun is finished, whatever the branch says by now.
        let begun = cache.commit(name).and_then(|commit| cache.listing(&commit));
        let listing = match begun {
            Some(listing) => listing,
            None => {
                let listing = self.ask_listing_of_cached(&client, cache, name)?;
                listing.wanted(name, wanted, &cache.snapshot(&listing.commit))?;
                cache.put_listing(&listing)?;
                cache.put_commit(name, &listing.commit)?;
                listing
            }
        };
        let commit = &listing.commit;
        loop {
            // The index of shards is one of the first files: then the shards are known.
            let files = listing.wanted(name, wanted, &cache.snapshot(commit))?;
            let missing: Vec<&HubFile> = files.iter().filter(|file| !cache.has(commit, file)).copied().collect();
            if missing.is_empty() {
                return Ok(fetched(cache, name, commit, &files));
            }
            let total = missing.iter().filter_map(|file| file.bytes).sum();
            let mut before = 0;
            for file in missing {
                let download =
                    Download { client: &client, settings: &self.settings, cache, name, commit: commit.as_str(), file };
                let mut here = 0;
                download.run(&mut |bytes| match bytes {
                    None => show(HubProgress::Waiting(name)),
                    Some(bytes) => {
                        here = bytes;
                        show(HubProgress::Downloading { name, done: before + bytes, total });
                    }
                })?;
                if !cache.has(commit, file) {
                    let problem = format!("another length of {} than it lists", file.name);
                    return Err(self.nonsense(name, problem));
                }
                before += file.bytes.unwrap_or(here);
            }
        }
    }

    /// Asks the hub for the files of the commit that the cache has for a branch, so that what is here counts; where the hub has it no
    /// more, or nothing is here, for those of the revision.
    fn ask_listing_of_cached(
        &self,
        client: &Client<'_>,
        cache: &RepositoryCache,
        name: &HubName,
    ) -> Result<Listing, HubError> {
        let here = cache.commit(name).filter(|commit| cache.snapshot(commit).is_dir());
        match here.map(|commit| self.ask_listing(client, &name.at(&commit))) {
            None | Some(Err(HubError::NoRevision { .. })) => self.ask_listing(client, name),
            Some(result) => result,
        }
    }

    /// Asks the hub for the files of a revision.
    fn ask_listing(&self, client: &Client<'_>, name: &HubName) -> Result<Listing, HubError> {
        let mut retries = Retries::new(ATTEMPTS, self.settings.pause);
        loop {
            let failed = match client.ask(&name.api(), Ask::default()) {
                Ok(mut answer) if answer.response.status() == 200 => {
                    let body = answer.response.body_mut().with_config().limit(MOST_BYTES).read_to_vec();
                    match body {
                        Ok(body) => {
                            let value: Value = serde_json::from_slice(&body)
                                .map_err(|error| self.nonsense(name, format!("no JSON: {error}")))?;
                            let listing = Listing::read(&value).map_err(|problem| self.nonsense(name, problem))?;
                            return match name.commit() {
                                Some(commit) if commit != listing.commit => {
                                    Err(self.nonsense(name, format!("another commit: {}", listing.commit)))
                                }
                                _ => Ok(listing),
                            };
                        }
                        Err(error) => crate::http::Failed::Again { cause: error.to_string(), after: None },
                    }
                }
                Ok(answer) => return Err(self.refused(name, &answer)),
                Err(failed) => failed,
            };
            retries.wait(failed).map_err(|cause| self.unreachable(name, cause))?;
        }
    }

    fn refused(&self, name: &HubName, answer: &Answer) -> HubError {
        let status = answer.response.status();
        let code = answer.response.headers().get("x-error-code").and_then(|value| value.to_str().ok());
        let (endpoint, with_token) = (self.settings.endpoint.clone(), self.settings.token.is_some());
        let name = Box::new(name.clone());
        match (code, status.as_u16()) {
            (Some("GatedRepo"), _) | (None, 403) => {
                let page = format!("{endpoint}/{}", name.page());
                HubError::Gated { name, page, with_token }
            }
            (Some("RevisionNotFound"), _) => HubError::NoRevision { name },
            (_, 401 | 403 | 404) => HubError::NotThere { name, endpoint, with_token },
            _ => HubError::Nonsense { name, endpoint, problem: status.to_string() },
        }
    }

    fn unreachable(&self, name: &HubName, cause: String) -> HubError {
        HubError::Unreachable { name: name.clone().into(), endpoint: self.settings.endpoint.clone(), cause }
    }

    fn nonsense(&self, name: &HubName, problem: String) -> HubError {
        HubError::Nonsense { name: name.clone().into(), endpoint: self.settings.endpoint.clone(), problem }
    }
}

fn fetched(cache: &RepositoryCache, name: &HubName, commit: &str, files: &[&HubFile]) -> Fetched {
    let told = |file: &HubFile| match cache.checksum(commit, &file.name) {
        Some(sum) if sum.len() == 64 => format!("sha256:{sum}"),
        Some(sum) => format!("git-sha1:{sum}"),
        None => String::new(),
    };
    Fetched {
        name: name.at(commit),
        commit: commit.to_owned(),
        folder: cache.snapshot(commit),
        files: files.iter().map(|file| (file.name.clone(), told(file))).collect(),
    }
}
