//! Objects by their addresses: listed, described, read, written and removed.

use crate::address::is_key;
use crate::blocks::Blocks;
use crate::http::{Answer, Ask, Attempts, Client, Failed};
use crate::xml;
use crate::{BucketAddress, BucketError, BucketFault, BucketFile, BucketSettings, Limits, Reads};
use std::sync::{Arc, OnceLock};
use ureq::http::Method;

/// A client with its blocks. Clones share all.
#[derive(Clone)]
pub struct Buckets {
    pub(crate) client: Arc<Client>,
    pub(crate) blocks: Arc<Blocks>,
}

/// An object as a listing has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Where it is.
    pub address: BucketAddress,
    /// Its length.
    pub bytes: u64,
}

impl std::fmt::Debug for Buckets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buckets").field("settings", &self.client.settings).finish_non_exhaustive()
    }
}

impl Buckets {
    /// A client with these settings.
    pub fn new(settings: BucketSettings) -> Result<Self, BucketError> {
        Ok(Self { client: Arc::new(Client::new(settings)?), blocks: Arc::new(Blocks::default()) })
    }

    /// The client of this process, with the settings of its environment: connections, cache and limits are shared by all that read.
    pub fn of_process() -> Result<Self, BucketError> {
        static OWN: OnceLock<Result<Buckets, BucketError>> = OnceLock::new();
        OWN.get_or_init(|| Buckets::new(BucketSettings::from_env())).clone()
    }

    /// Other limits from now on.
    pub fn set_limits(&self, limits: Limits) {
        self.client.set_limits(limits);
    }

    /// Who hears, in a line, that a server is waited for.
    pub fn on_wait(&self, tell: impl Fn(&str) + Send + Sync + 'static) {
        self.client.set_tell(Box::new(tell));
    }

    /// The length and the ETag of an object; none where there is no such object.
    pub fn look(&self, address: &BucketAddress) -> Result<Option<(u64, String)>, BucketError> {
        let ask = Ask { method: Method::HEAD, also: &[404], ..Ask::default() };
        let answer = self.client.ask(address, &ask)?;
        if answer.status == 404 {
            return Ok(None);
        }
        let bytes = answer.header("content-length").and_then(|text| text.parse().ok());
        match (bytes, answer.etag()) {
            (Some(bytes), Some(etag)) => Ok(Some((bytes, etag))),
            _ => Err(BucketError::at(address, BucketFault::Refused, "the server tells no length or no ETag")),
        }
    }

    /// Opens an object, to be read in blocks.
    pub fn open(&self, address: &BucketAddress, reads: Reads) -> Result<BucketFile, BucketError> {
        match self.look(address)? {
            Some((bytes, etag)) => Ok(BucketFile::new(self, address, (bytes, etag), reads)),
            None => Err(BucketError::at(address, BucketFault::Missing, "no such object")),
        }
    }

    /// All of a small object; none where there is no such object.
    pub fn read(&self, address: &BucketAddress, most: u64) -> Result<Option<Vec<u8>>, BucketError> {
        let Some((bytes, etag)) = self.look(address)? else { return Ok(None) };
        if bytes > most {
            return Err(BucketError::at(
                address,
                BucketFault::Refused,
                format!("it has {bytes} bytes, more than {most}"),
            ));
        }
        self.range(address, &etag, 0, bytes).map(Some)
    }

    /// A range of an object that has this ETag. Where a connection is cut, the next one goes on from there.
    pub(crate) fn range(
        &self,
        address: &BucketAddress,
        etag: &str,
        from: u64,
        bytes: u64,
    ) -> Result<Vec<u8>, BucketError> {
        let mut attempts = Attempts::new(&self.client, address);
        let mut got: Vec<u8> = Vec::new();
        while (got.len() as u64) < bytes {
            let here = from + got.len() as u64;
            let headers =
                vec![("range", format!("bytes={here}-{}", from + bytes - 1)), ("if-match", format!("\"{etag}\""))];
            let ask = Ask { headers, ..Ask::default() };
            let answer = match self.client.once(address, &ask) {
                Ok(answer) => answer,
                Err(failed) => {
                    attempts.wait(failed)?;
                    continue;
                }
            };
            if answer.etag().is_some_and(|own| own != etag) {
                let problem = "the object has another ETag than when it was opened";
                return Err(BucketError::at(address, BucketFault::Changed, problem));
            }
            let (part, cut) = part_from(address, answer, here)?;
            let wanted = bytes - got.len() as u64;
            let came = !part.is_empty();
            got.extend(part.into_iter().take(wanted as usize));
            if came {
                attempts.succeeded();
            }
            if (got.len() as u64) < bytes {
                let cause = cut.unwrap_or_else(|| format!("it ends after {} of {bytes} bytes", got.len()));
                attempts.wait(Failed::Again { cause, after: None })?;
            }
        }
        Ok(got)
    }

    /// All objects in what stands for a folder, in the order of their keys. Keys that could be no path, and those that stand for a folder
    /// themselves, are left out.
    pub fn list(&self, folder: &BucketAddress) -> Result<Vec<Listed>, BucketError> {
        let prefix = folder.prefix();
        let mut found: Vec<Listed> = Vec::new();
        let mut next: Option<String> = None;
        loop {
            let mut query =
                vec![("list-type", "2".to_owned()), ("encoding-type", "url".to_owned()), ("prefix", prefix.clone())];
            query.extend(next.take().map(|token| ("continuation-token", token)));
            let root = folder.with_key("");
            let answer = self.client.ask(&root, &Ask { query, ..Ask::default() }).map_err(|error| {
                // Of a bucket alone, this is what is missing.
                let fault = if error.fault == BucketFault::Missing { BucketFault::NoBucket } else { error.fault };
                BucketError { address: folder.to_string(), fault, ..error }
            })?;
            let text = answer.text();
            let nonsense = |what: &str| BucketError::at(folder, BucketFault::Refused, format!("its listing {what}"));
            let is_url = xml::is_url(&text);
            if !text.contains("ListBucketResult") {
                return Err(nonsense("is no listing"));
            }
            for entry in xml::elements(&text, "Contents") {
                let key = xml::key(entry, is_url).ok_or_else(|| nonsense("has an entry without a key"))?;
                let bytes = xml::text(entry, "Size").and_then(|size| size.parse().ok());
                let bytes = bytes.ok_or_else(|| nonsense("has an entry without a size"))?;
                if is_key(&key) && key.starts_with(&prefix) {
                    found.push(Listed { address: folder.with_key(&key), bytes });
                }
            }
            if xml::text(&text, "IsTruncated").as_deref() != Some("true") {
                break;
            }
            next = xml::text(&text, "NextContinuationToken").filter(|token| !token.is_empty());
            if next.is_none() {
                return Err(nonsense("is cut off and does not say how to go on"));
            }
        }
        found.sort_by(|a, b| a.address.cmp(&b.address));
        found.dedup_by(|a, b| a.address == b.address);
        Ok(found)
    }

    /// Removes an object, whether or not there is one.
    pub fn remove(&self, address: &BucketAddress) -> Result<(), BucketError> {
        self.client.ask(address, &Ask { method: Method::DELETE, also: &[404], ..Ask::default() }).map(|_| ())
    }
}

/// The bytes of an answer that begin where they should, and why they are not all.
fn part_from(address: &BucketAddress, answer: Answer, from: u64) -> Result<(Vec<u8>, Option<String>), BucketError> {
    let nonsense = |what: &str| BucketError::at(address, BucketFault::Refused, format!("the server {what}"));
    match answer.status {
        206 => {
            let range = answer
                .header("content-range")
                .and_then(|text| text.strip_prefix("bytes ")?.split('-').next()?.parse().ok());
            match range {
                Some::<u64>(start) if start == from => Ok((answer.body, answer.cut)),
                _ => Err(nonsense("answers with another range than was asked for")),
            }
        }
        // Some servers send all where the range is all.
        200 if from == 0 => Ok((answer.body, answer.cut)),
        _ => Err(nonsense("does not answer with the range that was asked for")),
    }
}
