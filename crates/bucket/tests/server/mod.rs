//! A server on this machine that speaks the protocol of S3, checks every signature by itself, and is slow, full or gone when a test says so.
// Each test binary uses a part of this.
#![allow(dead_code)]

use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

pub const KEY_ID: &str = "AKIATEST";
pub const SECRET: &str = "a/secret+key";
pub const REGION: &str = "eu-north-1";

/// What the server does instead of what it should.
#[derive(Clone, Debug)]
pub enum Mischief {
    /// Closes the connection after this many bytes of the body.
    Cut(usize),
    /// Says nothing for so long, then closes.
    Silence(Duration),
    /// Answers with a status and a code.
    Status(u16, &'static str),
    /// Does what it should, and closes before it says so.
    Forgets,
}

/// A request that was heard.
#[derive(Clone, Debug)]
pub struct Heard {
    pub method: String,
    /// Bucket and key.
    pub path: String,
    pub query: String,
    /// The range that is read, or copied.
    pub range: Option<String>,
}

#[derive(Default)]
struct State {
    buckets: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// Bucket and key of each, and its parts.
    uploads: BTreeMap<String, (String, BTreeMap<u64, Vec<u8>>)>,
    begun: u64,
    /// Method, end of the path or the query, what to do, how often.
    mischief: Vec<(String, String, Mischief, usize)>,
    heard: Vec<Heard>,
    /// Whether requests without a signature are answered.
    open: bool,
    down: bool,
    /// Goes down after this many more answers to GET.
    gets_left: Option<usize>,
    /// What a listing has at most.
    page: usize,
}

/// The server; it lives as long as the test.
#[derive(Clone)]
pub struct LocalS3 {
    pub endpoint: String,
    state: Arc<Mutex<State>>,
}

struct Request {
    method: String,
    /// As it came.
    path: String,
    query: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

struct Answer {
    status: u16,
    headers: String,
    body: Vec<u8>,
}

impl LocalS3 {
    /// One with a bucket.
    pub fn new(bucket: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let server = Self { endpoint, state: Arc::new(Mutex::new(State { page: 1000, ..State::default() })) };
        server.state().buckets.insert(bucket.to_owned(), BTreeMap::new());
        let own = server.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let own = own.clone();
                std::thread::spawn(move || own.serve(stream));
            }
        });
        server
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn put(&self, bucket: &str, key: &str, bytes: impl Into<Vec<u8>>) {
        self.state().buckets.entry(bucket.to_owned()).or_default().insert(key.to_owned(), bytes.into());
    }

    pub fn get(&self, bucket: &str, key: &str) -> Option<Vec<u8>> {
        self.state().buckets.get(bucket)?.get(key).cloned()
    }

    pub fn keys(&self, bucket: &str) -> Vec<String> {
        self.state().buckets.get(bucket).map(|objects| objects.keys().cloned().collect()).unwrap_or_default()
    }

    pub fn remove(&self, bucket: &str, key: &str) {
        self.state().buckets.get_mut(bucket).unwrap().remove(key).unwrap();
    }

    /// Begins an upload in parts, as a process that is killed then.
    pub fn begin_upload(&self, bucket: &str, key: &str) {
        self.state().begin(&format!("{bucket}/{key}"));
    }

    /// Uploads in parts that were begun and neither completed nor taken away.
    pub fn open_uploads(&self) -> usize {
        self.state().uploads.len()
    }

    /// What to do with the next `times` requests of a method whose path and query end so.
    pub fn plant(&self, method: &str, end: &str, mischief: Mischief, times: usize) {
        self.state().mischief.push((method.to_owned(), end.to_owned(), mischief, times));
    }

    /// Forgets what was planted.
    pub fn behave(&self) {
        self.state().mischief.clear();
    }

    /// Closes every connection from now on, or not any more.
    pub fn set_down(&self, down: bool) {
        let mut state = self.state();
        (state.down, state.gets_left) = (down, None);
    }

    /// Goes down after this many more answers to GET.
    pub fn goes_down_after(&self, gets: usize) {
        self.state().gets_left = Some(gets);
    }

    pub fn answers_all(&self) {
        self.state().open = true;
    }

    pub fn lists_at_most(&self, page: usize) {
        self.state().page = page;
    }

    /// The requests so far, which are forgotten.
    pub fn heard(&self) -> Vec<Heard> {
        std::mem::take(&mut self.state().heard)
    }

    fn serve(&self, stream: TcpStream) {
        if self.state().down {
            return;
        }
        let Some(request) = read_request(&stream) else { return };
        let path = decoded(request.path.trim_start_matches('/'));
        let mut state = self.state();
        let heard = Heard {
            method: request.method.clone(),
            path: path.clone(),
            query: request.query.clone(),
            range: ["range", "x-amz-copy-source-range"].iter().find_map(|name| request.headers.get(*name).cloned()),
        };
        state.heard.push(heard);
        if let (Some(left), "GET") = (state.gets_left, request.method.as_str()) {
            state.gets_left = left.checked_sub(1);
            state.down = left == 0;
            if state.down {
                return;
            }
        }
        let all = format!("{path}?{}", request.query);
        let fits = |(method, end, _, times): &&mut (String, String, Mischief, usize)| {
            *times > 0 && *method == request.method && (path.ends_with(end.as_str()) || all.ends_with(end.as_str()))
        };
        let mischief = state.mischief.iter_mut().find(fits).map(|(_, _, mischief, times)| {
            *times -= 1;
            mischief.clone()
        });
        let answer = match (&mischief, problem(&request, state.open)) {
            (Some(Mischief::Status(status, code)), _) => error(*status, code),
            (_, Some(code)) => error(403, code),
            (_, None) => state.answer(&request, &path),
        };
        drop(state);
        match mischief {
            Some(Mischief::Silence(time)) => return std::thread::sleep(time),
            Some(Mischief::Forgets) => return,
            _ => {}
        }
        let Answer { status, headers, body } = answer;
        let mut text = format!("HTTP/1.1 {status} X\r\nConnection: close\r\n{headers}");
        if !headers.contains("Content-Length") {
            text += &format!("Content-Length: {}\r\n", body.len());
        }
        text += "\r\n";
        let sent = match mischief {
            Some(Mischief::Cut(bytes)) => &body[..bytes.min(body.len())],
            _ if request.method == "HEAD" => &[],
            _ => &body[..],
        };
        let mut stream = stream;
        let _ = stream.write_all(text.as_bytes()).and_then(|()| stream.write_all(sent));
    }
}

impl State {
    fn begin(&mut self, path: &str) -> String {
        self.begun += 1;
        let id = format!("upload-{}", self.begun);
        self.uploads.insert(id.clone(), (path.to_owned(), BTreeMap::new()));
        id
    }

    fn answer(&mut self, request: &Request, path: &str) -> Answer {
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let query: BTreeMap<String, String> = request
            .query
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
            .map(|(name, value)| (decoded(name), decoded(value)))
            .collect();
        let page = self.page;
        if !self.buckets.contains_key(bucket) {
            return error(404, "NoSuchBucket");
        }
        let copied = request.headers.get("x-amz-copy-source").map(|source| {
            let source = decoded(source.trim_start_matches('/'));
            let (bucket, key) = source.split_once('/').unwrap_or_default();
            let bytes = self.buckets.get(bucket).and_then(|objects| objects.get(key)).cloned().unwrap_or_default();
            match request.headers.get("x-amz-copy-source-range").map(|range| range_of(range, bytes.len())) {
                Some((from, to)) => bytes[from..to].to_vec(),
                None => bytes,
            }
        });
        let body = copied.unwrap_or_else(|| request.body.clone());
        match (request.method.as_str(), query.get("uploadId"), query.get("partNumber")) {
            ("POST", None, _) if query.contains_key("uploads") => {
                let id = self.begin(path);
                return xml(format!(
                    "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
                ));
            }
            ("PUT", Some(id), Some(number)) => {
                let Some((_, parts)) = self.uploads.get_mut(id) else { return error(404, "NoSuchUpload") };
                let headers = format!("ETag: \"{}\"\r\n", etag(&body));
                parts.insert(number.parse().unwrap(), body);
                return Answer { status: 200, headers, body: Vec::new() };
            }
            ("POST", Some(id), _) => {
                let Some((_, parts)) = self.uploads.remove(id) else { return error(404, "NoSuchUpload") };
                let wanted = String::from_utf8_lossy(&request.body).into_owned();
                for (number, part) in &parts {
                    let line = format!("<PartNumber>{number}</PartNumber><ETag>&quot;{}&quot;</ETag>", etag(part));
                    if !wanted.contains(&line) {
                        return error(400, "InvalidPart");
                    }
                }
                let whole = parts.into_values().flatten().collect();
                self.buckets.entry(bucket.to_owned()).or_default().insert(key.to_owned(), whole);
                return xml("<CompleteMultipartUploadResult></CompleteMultipartUploadResult>".into());
            }
            ("DELETE", Some(id), _) => {
                self.uploads.remove(id);
                return Answer { status: 204, headers: String::new(), body: Vec::new() };
            }
            ("GET", None, None) if query.contains_key("uploads") => {
                let prefix = format!("{bucket}/{}", query["prefix"]);
                let all = self.uploads.iter().filter(|(_, (path, _))| path.starts_with(&prefix));
                let entries = all.map(|(id, (path, _))| {
                    let key = escaped(&path[bucket.len() + 1..]);
                    format!("<Upload><Key>{key}</Key><UploadId>{id}</UploadId></Upload>")
                });
                let text: String = entries.collect();
                return xml(format!(
                    "<ListMultipartUploadsResult><EncodingType>url</EncodingType>{text}</ListMultipartUploadsResult>"
                ));
            }
            _ => {}
        }
        let objects = self.buckets.entry(bucket.to_owned()).or_default();
        match request.method.as_str() {
            "PUT" => {
                objects.insert(key.to_owned(), body);
                Answer { status: 200, headers: "ETag: \"x\"\r\n".into(), body: Vec::new() }
            }
            "DELETE" => {
                objects.remove(key);
                Answer { status: 204, headers: String::new(), body: Vec::new() }
            }
            "GET" if key.is_empty() => listing(objects, &query, page),
            _ => {
                let Some(bytes) = objects.get(key) else { return error(404, "NoSuchKey") };
                let tag = etag(bytes);
                if request.headers.get("if-match").is_some_and(|wanted| wanted.trim_matches('"') != tag) {
                    return error(412, "PreconditionFailed");
                }
                let headers = format!("ETag: \"{tag}\"\r\n");
                if request.method == "HEAD" {
                    return Answer {
                        status: 200,
                        headers: format!("{headers}Content-Length: {}\r\n", bytes.len()),
                        body: Vec::new(),
                    };
                }
                match request.headers.get("range").map(|range| range_of(range, bytes.len())) {
                    Some((from, to)) => {
                        let headers = format!("{headers}Content-Range: bytes {from}-{}/{}\r\n", to - 1, bytes.len());
                        Answer { status: 206, headers, body: bytes[from..to].to_vec() }
                    }
                    None => Answer { status: 200, headers, body: bytes.clone() },
                }
            }
        }
    }
}

fn listing(objects: &BTreeMap<String, Vec<u8>>, query: &BTreeMap<String, String>, page: usize) -> Answer {
    let prefix = query.get("prefix").cloned().unwrap_or_default();
    let after = query.get("continuation-token").cloned().unwrap_or_default();
    let mut keys = objects.iter().filter(|(key, _)| key.starts_with(&prefix) && **key > after);
    let shown: Vec<_> = keys.by_ref().take(page).collect();
    let more = keys.next().is_some();
    let mut text = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">".to_owned();
    text += &format!(
        "<EncodingType>url</EncodingType><KeyCount>{}</KeyCount><IsTruncated>{more}</IsTruncated>",
        shown.len()
    );
    if let (true, Some((last, _))) = (more, shown.last()) {
        text += &format!("<NextContinuationToken>{last}</NextContinuationToken>");
    }
    for (key, bytes) in shown {
        let key = escaped(key);
        text += &format!("<Contents><Key>{key}</Key><Size>{}</Size></Contents>", bytes.len());
    }
    xml(text + "</ListBucketResult>")
}

fn escaped(key: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/.-_".contains(&byte);
    key.bytes().map(|byte| if plain(byte) { (byte as char).to_string() } else { format!("%{byte:02X}") }).collect()
}

fn xml(text: String) -> Answer {
    Answer { status: 200, headers: "Content-Type: application/xml\r\n".into(), body: text.into_bytes() }
}

fn error(status: u16, code: &str) -> Answer {
    let text = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>says the test</Message></Error>");
    Answer { status, ..xml(text) }
}

fn etag(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))[..32].to_owned()
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn range_of(text: &str, length: usize) -> (usize, usize) {
    let (from, to) = text.trim_start_matches("bytes=").split_once('-').unwrap();
    (from.parse::<usize>().unwrap().min(length), to.parse::<usize>().map_or(length, |to| (to + 1).min(length)))
}

fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte == b'%' {
            bytes.push(u8::from_str_radix(std::str::from_utf8(&rest[..2]).unwrap(), 16).unwrap());
            rest = &rest[2..];
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).unwrap()
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first).ok()?;
    let mut parts = first.split_whitespace();
    let (method, target) = (parts.next()?.to_owned(), parts.next()?.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    Some(Request { method, path: path.to_owned(), query: query.to_owned(), headers, body })
}

/// The code of what is wrong with a request's signature: the steps of the specification, on the request as it came.
fn problem(request: &Request, open: bool) -> Option<&'static str> {
    let header = |name: &str| request.headers.get(name).map(String::as_str).unwrap_or_default();
    let Some(authorization) = request.headers.get("authorization") else {
        return (!open).then_some("AccessDenied");
    };
    let field = |name: &str| {
        let rest = &authorization[authorization.find(name).unwrap() + name.len() + 1..];
        rest.split(',').next().unwrap().trim()
    };
    let scope: Vec<&str> = field("Credential").split('/').collect();
    let [id, day, region, "s3", "aws4_request"] = scope[..] else { return Some("AuthorizationHeaderMalformed") };
    if id != KEY_ID {
        return Some("InvalidAccessKeyId");
    }
    if region != REGION || !header("x-amz-date").starts_with(day) {
        return Some("AuthorizationHeaderMalformed");
    }
    let sum = hexadecimal(&Sha256::digest(&request.body));
    if header("x-amz-content-sha256") != sum {
        return Some("XAmzContentSHA256Mismatch");
    }
    let signed = field("SignedHeaders");
    let must = request.headers.keys().filter(|name| *name == "host" || name.starts_with("x-amz-"));
    if must.clone().any(|name| !signed.split(';').any(|own| own == name)) {
        return Some("AccessDenied");
    }
    let lines: String = signed.split(';').map(|name| format!("{name}:{}\n", header(name))).collect();
    let mut query: Vec<&str> = request.query.split('&').filter(|pair| !pair.is_empty()).collect();
    query.sort_unstable();
    let canonical = format!("{}\n{}\n{}\n{lines}\n{signed}\n{sum}", request.method, request.path, query.join("&"));
    let text = format!(
        "AWS4-HMAC-SHA256\n{}\n{day}/{region}/s3/aws4_request\n{}",
        header("x-amz-date"),
        hexadecimal(&Sha256::digest(canonical.as_bytes()))
    );
    let key = [day, region, "s3", "aws4_request"]
        .iter()
        .fold(format!("AWS4{SECRET}").into_bytes(), |key, part| hmac(&key, part.as_bytes()));
    (hexadecimal(&hmac(&key, text.as_bytes())) != field("Signature")).then_some("SignatureDoesNotMatch")
}

/// HMAC-SHA256 as RFC 2104 has it, not as the client has it.
fn hmac(key: &[u8], text: &[u8]) -> Vec<u8> {
    let mut block = [0u8; 64];
    match key.len() > 64 {
        true => block[..32].copy_from_slice(&Sha256::digest(key)),
        false => block[..key.len()].copy_from_slice(key),
    }
    let pad = |with: u8| block.map(|byte| byte ^ with).to_vec();
    let inner = Sha256::digest([pad(0x36), text.to_vec()].concat());
    Sha256::digest([pad(0x5c), inner.to_vec()].concat()).to_vec()
}
