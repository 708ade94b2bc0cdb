//! A hub on this machine that speaks the HTTP API of the real one, and is slow, rude or wrong when a test says so.
// Each test binary uses a part of this.
#![allow(dead_code)]

use sha1::{Digest, Sha1};
use sha2::Sha256;
use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What the server does once instead of what it should.
#[derive(Clone, Debug)]
pub enum Mischief {
    /// Closes the connection after this many bytes of the body.
    Cut(usize),
    /// Says nothing at all for so long, then closes.
    Silence(Duration),
    /// Sends other bytes, as many.
    Wrong,
    /// Sends the body in small pieces with pauses.
    Slow,
    /// Answers with a status and headers.
    Status(u16, &'static str),
    /// Ignores `Range`.
    Whole,
}

/// A request that was heard.
#[derive(Clone, Debug)]
pub struct Heard {
    pub path: String,
    pub token: Option<String>,
    pub range: Option<String>,
}

#[derive(Default)]
struct State {
    /// Of each file: its bytes, and whether it is a large one (LFS).
    files: BTreeMap<String, (Vec<u8>, bool)>,
    mischief: BTreeMap<String, VecDeque<Mischief>>,
    heard: Vec<Heard>,
    /// The token that it asks for.
    token: Option<String>,
    /// Where large files are sent to.
    storage: Option<String>,
    /// Whether listings have checksums.
    blobs: bool,
}

/// The server; it lives as long as the test.
#[derive(Clone)]
pub struct LocalHub {
    pub endpoint: String,
    state: Arc<Mutex<State>>,
}

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

impl LocalHub {
    pub fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let hub = Self { endpoint, state: Arc::new(Mutex::new(State { blobs: true, ..State::default() })) };
        let server = hub.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = server.clone();
                std::thread::spawn(move || server.serve(stream));
            }
        });
        hub
    }

    pub fn file(&self, name: &str, bytes: impl Into<Vec<u8>>, large: bool) -> &Self {
        self.state.lock().unwrap().files.insert(name.to_owned(), (bytes.into(), large));
        self
    }

    /// What to do once with the next request whose path ends so.
    pub fn once(&self, path: &str, mischief: Mischief) -> &Self {
        self.state.lock().unwrap().mischief.entry(path.to_owned()).or_default().push_back(mischief);
        self
    }

    pub fn asks_for(&self, token: &str) -> &Self {
        self.state.lock().unwrap().token = Some(token.to_owned());
        self
    }

    pub fn sends_large_files_to(&self, storage: &LocalHub) -> &Self {
        self.state.lock().unwrap().storage = Some(storage.endpoint.replace("127.0.0.1", "localhost"));
        self
    }

    pub fn lists_no_checksums(&self) -> &Self {
        self.state.lock().unwrap().blobs = false;
        self
    }

    /// The requests so far, which are forgotten.
    pub fn heard(&self) -> Vec<Heard> {
        std::mem::take(&mut self.state.lock().unwrap().heard)
    }

    fn serve(&self, stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
        let Some(first) = lines.next() else { return };
        let head = first.starts_with("HEAD");
        let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
        let headers: Vec<(String, String)> = lines
            .take_while(|line| !line.is_empty())
            .filter_map(|line| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned())))
            .collect();
        let header = |name: &str| headers.iter().find(|(own, _)| own == name).map(|(_, value)| value.clone());
        let token = header("authorization").map(|value| value.trim_start_matches("Bearer ").to_owned());
        let heard = Heard { path: path.clone(), token: token.clone(), range: header("range") };
        let mut state = self.state.lock().unwrap();
        state.heard.push(heard.clone());
        let mischief = {
            let found = state.mischief.iter_mut().find(|(end, all)| path.ends_with(end.as_str()) && !all.is_empty());
            found.and_then(|(_, all)| all.pop_front())
        };
        let refused = state.token.is_some() && state.token != token;
        let (status, more, body, total) = match (&mischief, refused) {
            (Some(Mischief::Status(status, more)), _) => (*status, (*more).to_owned(), Vec::new(), 0),
            (_, true) => (401, "X-Error-Code: GatedRepo\r\n".to_owned(), Vec::new(), 0),
            _ => state.answer(&path, heard.range.as_deref().filter(|_| !matches!(mischief, Some(Mischief::Whole)))),
        };
        drop(state);
        if let Some(Mischief::Silence(time)) = mischief {
            return std::thread::sleep(time);
        }
        answer(stream, status, &more, body, total, head, mischief);
    }
}

impl State {
    fn answer(&self, path: &str, range: Option<&str>) -> (u16, String, Vec<u8>, usize) {
        if path.starts_with("/api/") {
            if !path.contains("/org/name/revision/") {
                return (404, "X-Error-Code: RepoNotFound\r\n".into(), Vec::new(), 0);
            }
            if !(path.contains("/main?") || path.contains(COMMIT)) {
                return (404, "X-Error-Code: RevisionNotFound\r\n".into(), Vec::new(), 0);
            }
            let body = self.listing().into_bytes();
            let length = body.len();
            return (200, String::new(), body, length);
        }
        let name = path.split_once(COMMIT).map_or(path, |(_, name)| name).trim_start_matches('/');
        let Some((bytes, large)) = self.files.get(name) else {
            return (404, "X-Error-Code: EntryNotFound\r\n".into(), Vec::new(), 0);
        };
        let etag = if *large { sha256(bytes) } else { git_sha1(bytes) };
        if let Some(storage) = self.storage.as_ref().filter(|_| *large) {
            let size = bytes.len();
            let more = format!("Location: {storage}/{name}\r\nX-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {size}\r\n");
            return (302, more, Vec::new(), 0);
        }
        let more = format!("ETag: \"{etag}\"\r\n");
        let from = range.and_then(|range| range.strip_prefix("bytes=")?.trim_end_matches('-').parse::<usize>().ok());
        match from {
            None => (200, more, bytes.clone(), bytes.len()),
            Some(from) if from >= bytes.len() => (416, more, Vec::new(), 0),
            Some(from) => {
                let range = format!("Content-Range: bytes {from}-{}/{}\r\n", bytes.len() - 1, bytes.len());
                (206, more + &range, bytes[from..].to_vec(), bytes.len() - from)
            }
        }
    }

    fn listing(&self) -> String {
        let sibling = |(name, (bytes, large)): (&String, &(Vec<u8>, bool))| {
            let size = bytes.len();
            let sum = match (self.blobs, large) {
                (false, _) => String::new(),
                (true, true) => {
                    let sum = sha256(bytes);
                    format!(r#", "size": {size}, "lfs": {{ "sha256": "{sum}", "size": {size}, "pointerSize": 130 }}"#)
                }
                (true, false) => format!(r#", "size": {size}, "blobId": "{}""#, git_sha1(bytes)),
            };
            format!(r#"{{ "rfilename": "{name}"{sum} }}"#)
        };
        let siblings: Vec<String> = self.files.iter().map(sibling).collect();
        format!(r#"{{ "id": "org/name", "sha": "{COMMIT}", "siblings": [{}] }}"#, siblings.join(", "))
    }
}

fn answer(
    mut stream: TcpStream,
    status: u16,
    more: &str,
    mut body: Vec<u8>,
    length: usize,
    head: bool,
    mischief: Option<Mischief>,
) {
    let start = format!("HTTP/1.1 {status} Status\r\nContent-Length: {length}\r\nConnection: close\r\n{more}\r\n");
    if stream.write_all(start.as_bytes()).is_err() || head {
        return;
    }
    match mischief {
        Some(Mischief::Cut(bytes)) => body.truncate(bytes),
        Some(Mischief::Wrong) => body.fill(b'?'),
        Some(Mischief::Slow) => {
            for piece in body.chunks(body.len().div_ceil(10).max(1)) {
                std::thread::sleep(Duration::from_millis(250));
                if stream.write_all(piece).and_then(|()| stream.flush()).is_err() {
                    return;
                }
            }
            return;
        }
        _ => {}
    }
    let _ = stream.write_all(&body);
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn git_sha1(bytes: &[u8]) -> String {
    let mut hash = Sha1::new();
    hash.update(format!("blob {}\0", bytes.len()));
    hash.update(bytes);
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
