//! One file: begun or resumed, checked, and put into place.

use crate::cache::{AtPath, RepositoryCache, create_parent};
use crate::http::{Answer, Ask, Client, Failed, Retries};
use crate::listing::HubFile;
use crate::name::is_hex;
use crate::{HubError, HubName, HubSettings};
use sha1::{Digest, Sha1};
use sha2::Sha256;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use ureq::http::header;

/// Attempts in a row that bring nothing.
const ATTEMPTS: u32 = 5;
/// Bytes that are read at once.
const CHUNK: usize = 256 << 10;

/// Where a file comes from and goes to.
pub(crate) struct Download<'a> {
    pub client: &'a Client<'a>,
    pub settings: &'a HubSettings,
    pub cache: &'a RepositoryCache,
    pub name: &'a HubName,
    pub commit: &'a str,
    pub file: &'a HubFile,
}

impl Download<'_> {
    /// Brings the file into the cache. `show` hears how many bytes of it are here; none while another process downloads it.
    pub fn run(&self, show: &mut dyn FnMut(Option<u64>)) -> Result<(), HubError> {
        let (checksum, bytes) = match &self.file.checksum {
            Some(checksum) => (checksum.clone(), self.file.bytes),
            None => self.describe()?,
        };
        let blob = self.cache.blob(&checksum);
        // As huggingface_hub does.
        let _lock = self.cache.lock(&checksum, &mut || show(None))?;
        if !blob.is_file() {
            self.fill(&blob, &checksum, bytes, &mut |here| show(Some(here)))?;
        }
        self.cache.link(self.commit, &self.file.name, &checksum)
    }

    /// Asks the hub for checksum and length of the file, where its listing does not tell.
    fn describe(&self) -> Result<(String, Option<u64>), HubError> {
        let mut retries = Retries::new(ATTEMPTS, self.settings.pause);
        let path = self.name.file(self.commit, &self.file.name);
        loop {
            match self.client.ask(&path, Ask { head: true, stay: true, ..Ask::default() }) {
                Ok(answer) => {
                    let status = answer.response.status();
                    if !(status.is_success() || status.is_redirection()) {
                        return Err(self.refused(&answer));
                    }
                    let length = || {
                        let length = answer.response.headers().get(header::CONTENT_LENGTH)?.to_str().ok()?;
                        length.parse().ok().filter(|_| status.is_success())
                    };
                    let bytes = answer.size.or_else(length);
                    let sum = answer.etag.filter(|etag| [40, 64].contains(&etag.len()) && is_hex(etag));
                    return match sum {
                        Some(sum) => Ok((sum, bytes)),
                        None => Err(self.nonsense(format!("no checksum of {}", self.file.name))),
                    };
                }
                Err(failed) => retries.wait(failed).map_err(|cause| self.unreachable(cause))?,
            }
        }
    }

    /// Downloads until the file is whole and has its checksum.
    fn fill(&self, blob: &Path, sum: &str, bytes: Option<u64>, show: &mut dyn FnMut(u64)) -> Result<(), HubError> {
        create_parent(blob)?;
        let mut part = blob.as_os_str().to_owned();
        part.push(".incomplete");
        let part = PathBuf::from(part);
        let mut wrong = false;
        loop {
            self.receive(&part, bytes, show)?;
            let found = checksum(&part, sum.len()).at(&part)?;
            if found == sum {
                return fs::rename(&part, blob).at(blob);
            }
            fs::remove_file(&part).at(&part)?;
            // What was resumed may have begun wrong: once from the start.
            if std::mem::replace(&mut wrong, true) {
                let (name, file) = (self.name.clone().into(), self.file.name.clone());
                return Err(HubError::Checksum { name, file, expected: sum.to_owned(), found });
            }
        }
    }

    /// Receives what is missing of a file, in as many connections as it takes.
    fn receive(&self, part: &Path, bytes: Option<u64>, show: &mut dyn FnMut(u64)) -> Result<(), HubError> {
        let mut retries = Retries::new(ATTEMPTS, self.settings.pause);
        let path = self.name.file(self.commit, &self.file.name);
        let mut file = File::options().create(true).append(true).open(part).at(part)?;
        loop {
            let here = file.metadata().at(part)?.len();
            show(here);
            match bytes {
                Some(bytes) if here == bytes => return Ok(()),
                // Of another file, it seems.
                Some(bytes) if here > bytes => {
                    file.set_len(0).at(part)?;
                    continue;
                }
                _ => {}
            }
            let failed = match self.client.ask(&path, Ask { from: here, ..Ask::default() }) {
                Ok(answer) => match self.store(answer, &mut file, part, here, bytes, show)? {
                    Ok(()) => return Ok(()),
                    Err(failed) => failed,
                },
                Err(failed) => failed,
            };
            file.flush().at(part)?;
            if file.metadata().at(part)?.len() > here {
                retries.renew();
            }
            retries.wait(failed).map_err(|cause| self.unreachable(format!("{}: {cause}", self.file.name)))?;
        }
    }

    /// Appends an answer to what is here. The inner error is that of a connection, which may be tried again.
    fn store(
        &self,
        mut answer: Answer,
        file: &mut File,
        part: &Path,
        from: u64,
        bytes: Option<u64>,
        show: &mut dyn FnMut(u64),
    ) -> Result<Result<(), Failed>, HubError> {
        let response = &mut answer.response;
        let mut here = match response.status().as_u16() {
            206 if starts_at(response.headers(), from) => from,
            // The whole file, whatever was asked for.
            200 => {
                file.set_len(0).at(part)?;
                0
            }
            // What is here is of another file, it seems.
            206 | 416 => {
                file.set_len(0).at(part)?;
                let cause = "it does not go on where the last connection ended".to_owned();
                return Ok(Err(Failed::Again { cause, after: None }));
            }
            _ => return Err(self.refused(&answer)),
        };
        let announced = response.body().content_length().map(|length| here + length);
        let whole = bytes.or(announced);
        let mut reader = response.body_mut().as_reader();
        let mut chunk = vec![0; CHUNK];
        loop {
            match reader.read(&mut chunk) {
                Ok(0) => break,
                Ok(read) => {
                    file.write_all(&chunk[..read]).at(part)?;
                    here += read as u64;
                    // Nobody fills a disk with what was not announced.
                    if whole.is_some_and(|whole| here > whole) {
                        break;
                    }
                    show(here);
                }
                Err(error) => return Ok(Err(Failed::Again { cause: error.to_string(), after: None })),
            }
        }
        match whole {
            Some(whole) if here < whole => {
                let cause = format!("the connection ended after {here} of {whole} bytes");
                Ok(Err(Failed::Again { cause, after: None }))
            }
            _ => Ok(Ok(())),
        }
    }

    fn refused(&self, answer: &Answer) -> HubError {
        let status = answer.response.status();
        match status.as_u16() {
            401 | 403 => HubError::Gated {
                name: self.name.clone().into(),
                page: format!("{}/{}", self.settings.endpoint, self.name.page()),
                with_token: self.settings.token.is_some(),
            },
            404 => HubError::NoFile { name: self.name.clone().into(), file: self.file.name.clone() },
            _ => self.nonsense(format!("{status} for {}", self.file.name)),
        }
    }

    fn unreachable(&self, cause: String) -> HubError {
        HubError::Unreachable { name: self.name.clone().into(), endpoint: self.settings.endpoint.clone(), cause }
    }

    fn nonsense(&self, problem: String) -> HubError {
        HubError::Nonsense { name: self.name.clone().into(), endpoint: self.settings.endpoint.clone(), problem }
    }
}

/// Whether a part of a file is the one from here on.
fn starts_at(headers: &header::HeaderMap, from: u64) -> bool {
    let range = headers.get(header::CONTENT_RANGE).and_then(|value| value.to_str().ok());
    range.is_some_and(|range| range.trim_start_matches("bytes ").split('-').next() == Some(&from.to_string()))
}

/// The checksum of a file in this many hexadecimal digits: its SHA-256, or the SHA-1 of the git object that it is.
fn checksum(path: &Path, digits: usize) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    match digits {
        64 => {
            let mut hash = Sha256::new();
            feed(&mut file, &mut |bytes| hash.update(bytes))?;
            Ok(hex(&hash.finalize()))
        }
        _ => {
            let mut hash = Sha1::new();
            hash.update(format!("blob {}\0", file.metadata()?.len()));
            feed(&mut file, &mut |bytes| hash.update(bytes))?;
            Ok(hex(&hash.finalize()))
        }
    }
}

fn feed(file: &mut File, hear: &mut dyn FnMut(&[u8])) -> std::io::Result<()> {
    let mut chunk = vec![0; CHUNK];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(()),
            read => hear(&chunk[..read]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_git_and_of_large_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "hello\n").unwrap();
        // `git hash-object` and `sha256sum`.
        assert_eq!(checksum(&path, 40).unwrap(), "ce013625030ba8dba906f756967f9e9ca394464a");
        let sum = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        assert_eq!(checksum(&path, 64).unwrap(), sum);
    }
}
