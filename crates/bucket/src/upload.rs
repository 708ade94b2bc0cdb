//! Objects from files and bytes, and copies inside of a server.

use crate::address::is_key;
use crate::http::{Answer, Ask, Attempts, Failed, lock};
use crate::xml;
use crate::{BucketAddress, BucketError, BucketFault, Buckets};
use std::io::Read;
use std::sync::Mutex;
use ureq::http::Method;

/// Bytes of a part, and the most parts that servers take.
const PART_BYTES: u64 = 16 << 20;
const MOST_PARTS: u64 = 10_000;
/// Parts that are sent at once.
const THREADS: usize = 4;
/// Bytes that one request copies: a server may say nothing until it is done, and a long silence is a failure.
const COPIED_BYTES: u64 = 128 << 20;

impl Buckets {
    /// Writes an object at once.
    pub fn write(&self, address: &BucketAddress, bytes: &[u8]) -> Result<(), BucketError> {
        self.client.ask(address, &Ask { method: Method::PUT, body: bytes, ..Ask::default() }).map(|_| ())
    }

    /// Writes an object of `bytes` bytes, in parts where it is long. It appears when all parts are there; after an error none of them stays.
    pub fn upload(
        &self,
        address: &BucketAddress,
        from: &mut (impl Read + Send),
        bytes: u64,
    ) -> Result<(), BucketError> {
        let local = |cause: std::io::Error| BucketError::at(address, BucketFault::Local, cause.to_string());
        let each = part_bytes(PART_BYTES, bytes);
        if bytes <= each {
            let mut all = Vec::with_capacity(bytes as usize);
            from.take(bytes).read_to_end(&mut all).map_err(local)?;
            return match all.len() as u64 == bytes {
                true => self.write(address, &all),
                false => Err(local(std::io::ErrorKind::UnexpectedEof.into())),
            };
        }
        self.in_parts(address, bytes, |id| {
            let source = Mutex::new((from, 0u64));
            self.send_parts(address, id, || {
                let (from, done) = &mut *lock(&source);
                let here = each.min(bytes - *done);
                if here == 0 {
                    return Ok(None);
                }
                let number = *done / each + 1;
                let mut part = vec![0; here as usize];
                from.read_exact(&mut part).map_err(local)?;
                *done += here;
                Ok(Some((number, Part::Bytes(part))))
            })
        })
    }

    /// Copies an object of `bytes` bytes to another key of its server.
    pub fn copy(&self, from: &BucketAddress, to: &BucketAddress, bytes: u64) -> Result<(), BucketError> {
        let source = crate::address::escaped(&format!("/{}/{}", from.bucket(), from.key()), true);
        let each = part_bytes(COPIED_BYTES, bytes);
        if bytes <= each {
            let ask = Ask { method: Method::PUT, headers: vec![("x-amz-copy-source", source)], ..Ask::default() };
            let answer = self.client.ask(to, &ask)?;
            return said_no(to, &answer);
        }
        self.in_parts(to, bytes, |id| {
            let at = Mutex::new(0u64);
            self.send_parts(to, id, || {
                let mut at = lock(&at);
                if *at == bytes {
                    return Ok(None);
                }
                let (start, end) = (*at, bytes.min(*at + each));
                *at = end;
                let range = format!("bytes={start}-{}", end - 1);
                Ok(Some((start / each + 1, Part::Range(source.clone(), range))))
            })
        })
    }

    /// Takes away the parts of uploads into a folder that were neither completed nor taken away: those of processes that were killed. Every
    /// request is sent once. Where the server cannot list uploads, or the credentials may not, the parts stay.
    pub fn remove_unfinished(&self, folder: &BucketAddress) {
        let prefix = folder.prefix();
        let query = vec![("uploads", String::new()), ("encoding-type", "url".to_owned()), ("prefix", prefix.clone())];
        let Ok(answer) = self.client.once(&folder.with_key(""), &Ask { query, ..Ask::default() }) else { return };
        let text = answer.text();
        let is_url = xml::is_url(&text);
        for entry in xml::elements(&text, "Upload") {
            if let (Some(key), Some(id)) = (xml::key(entry, is_url), xml::text(entry, "UploadId"))
                && is_key(&key)
                && key.starts_with(&prefix)
            {
                let query = vec![("uploadId", id)];
                let _ =
                    self.client.once(&folder.with_key(&key), &Ask { method: Method::DELETE, query, ..Ask::default() });
            }
        }
    }

    /// Begins an upload in parts, lets them be sent, and ends it; with an error, takes them away.
    fn in_parts(
        &self,
        address: &BucketAddress,
        bytes: u64,
        send: impl FnOnce(&str) -> Result<Vec<(u64, String)>, BucketError>,
    ) -> Result<(), BucketError> {
        let before = self.look(address)?.map(|(_, etag)| etag);
        let begin = Ask { method: Method::POST, query: vec![("uploads", String::new())], ..Ask::default() };
        let id = xml::text(&self.client.ask(address, &begin)?.text(), "UploadId").filter(|id| !id.is_empty());
        let Some(id) = id else {
            return Err(BucketError::at(address, BucketFault::Refused, "the server names no upload"));
        };
        let done = send(&id).and_then(|parts| self.complete(address, &id, parts, (bytes, before)));
        if done.is_err() {
            // Once: a server that is gone is not waited for a second time.
            let query = vec![("uploadId", id)];
            let _ = self.client.once(address, &Ask { method: Method::DELETE, query, ..Ask::default() });
        }
        done
    }

    fn send_parts(
        &self,
        address: &BucketAddress,
        id: &str,
        next: impl Fn() -> Result<Option<(u64, Part)>, BucketError> + Sync,
    ) -> Result<Vec<(u64, String)>, BucketError> {
        let sent = Mutex::new(Ok(Vec::new()));
        let work = || {
            while lock(&sent).is_ok() {
                let one = next().and_then(|part| match part {
                    Some((number, part)) => self.send_part(address, id, number, &part).map(|tag| Some((number, tag))),
                    None => Ok(None),
                });
                match (one, &mut *lock(&sent)) {
                    (Ok(Some(one)), Ok(all)) => all.push(one),
                    (Err(error), all @ Ok(_)) => *all = Err(error),
                    (Ok(None), _) | (_, Err(_)) => return,
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..THREADS {
                scope.spawn(work);
            }
            work();
        });
        let mut parts = sent.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)?;
        parts.sort();
        Ok(parts)
    }

    /// Sends a part, and gives the ETag that the server has for it.
    fn send_part(&self, address: &BucketAddress, id: &str, number: u64, part: &Part) -> Result<String, BucketError> {
        let query = vec![("partNumber", number.to_string()), ("uploadId", id.to_owned())];
        let ask = match part {
            Part::Bytes(body) => Ask { method: Method::PUT, query, body, ..Ask::default() },
            Part::Range(source, range) => {
                let headers = vec![("x-amz-copy-source", source.clone()), ("x-amz-copy-source-range", range.clone())];
                Ask { method: Method::PUT, query, headers, ..Ask::default() }
            }
        };
        let answer = self.client.ask(address, &ask)?;
        said_no(address, &answer)?;
        let tag = answer.etag().or_else(|| Some(xml::text(&answer.text(), "ETag")?.trim_matches('"').to_owned()));
        tag.ok_or_else(|| {
            BucketError::at(address, BucketFault::Refused, format!("part {number} came back without an ETag"))
        })
    }

    /// Makes an object of the parts, of this length. Where an answer was lost, the object itself tells that they were taken: it has another
    /// ETag than `before`.
    fn complete(
        &self,
        address: &BucketAddress,
        id: &str,
        parts: Vec<(u64, String)>,
        (bytes, before): (u64, Option<String>),
    ) -> Result<(), BucketError> {
        let part = |(number, tag): &(u64, String)| {
            format!("<Part><PartNumber>{number}</PartNumber><ETag>&quot;{}&quot;</ETag></Part>", xml::escaped(tag))
        };
        let parts: String = parts.iter().map(part).collect();
        let body = format!("<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>");
        let query = vec![("uploadId", id.to_owned())];
        let ask = Ask { method: Method::POST, query, body: body.as_bytes(), also: &[404], ..Ask::default() };
        let mut attempts = Attempts::new(&self.client, address);
        let is_answered = loop {
            let failed = match self.client.once(address, &ask) {
                Ok(Answer { cut: Some(cause), .. }) => Failed::Again { cause, after: None },
                Ok(answer) => match (answer.status, said_no(address, &answer)) {
                    (404, _) => break false,
                    (_, Ok(())) => break true,
                    (_, Err(error)) => Failed::Again { cause: error.problem, after: None },
                },
                Err(failed) => failed,
            };
            attempts.wait(failed)?;
        };
        attempts.succeeded();
        match self.look(address)? {
            Some((there, etag)) if there == bytes && (is_answered || before.as_ref() != Some(&etag)) => Ok(()),
            _ => Err(BucketError::at(address, BucketFault::Refused, "the server has lost the upload")),
        }
    }
}

/// Bytes of a part of an object: `least`, or more where there would be too many parts.
fn part_bytes(least: u64, bytes: u64) -> u64 {
    least.max(bytes.div_ceil(MOST_PARTS))
}

/// What is sent as a part.
enum Part {
    Bytes(Vec<u8>),
    /// An object to copy from, and which bytes of it.
    Range(String, String),
}

/// A success may still be an error, in its body.
fn said_no(address: &BucketAddress, answer: &Answer) -> Result<(), BucketError> {
    let text = answer.text();
    match xml::elements(&text, "Error").first() {
        None => Ok(()),
        Some(error) => {
            let said = xml::text(error, "Code").unwrap_or_default();
            Err(BucketError::at(address, BucketFault::Refused, format!("the server answers {said}")))
        }
    }
}
