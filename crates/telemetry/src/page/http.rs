//! A small HTTP/1.1 server: GET of a few fixed paths, nothing from the file system, everything bounded.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most bytes of a request.
const MOST_BYTES: usize = 8 << 10;
/// Time in which a request must be there, and in which an answer must be taken.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Most requests at a time. One more, and that which has been silent the longest goes: whoever opens connections and sends nothing
/// keeps nobody else out.
const MOST_AT_ONCE: usize = 32;

/// What was asked for.
pub(crate) struct Asked<'a> {
    pub(crate) path: &'a str,
    /// After the question mark, as it came.
    query: &'a str,
}

impl<'a> Asked<'a> {
    /// The value of a parameter. Those that are known here need no escapes.
    pub(crate) fn parameter(&self, name: &str) -> Option<&'a str> {
        self.query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
    }
}

/// An answer with status 200.
pub(crate) struct Answer {
    pub(crate) kind: &'static str,
    pub(crate) body: Vec<u8>,
    /// Of the scripts that a page may run.
    pub(crate) nonce: Option<String>,
}

/// Who may ask.
pub(crate) struct Gate {
    /// What every request must know; none where only this machine can ask.
    pub(crate) token: Option<String>,
}

/// Answers requests until the process ends.
pub(crate) fn serve(
    listener: &TcpListener,
    gate: Gate,
    answer: impl Fn(&Asked<'_>) -> Option<Answer> + Send + Sync + 'static,
) -> io::Result<()> {
    let (gate, answer) = (Arc::new(gate), Arc::new(answer));
    let mut open: VecDeque<Waiting> = VecDeque::new();
    loop {
        let mut stream = match listener.accept() {
            Ok((stream, _)) => stream,
            // The other side is gone already, or there are too many open files: others come.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(error),
            Err(_) => {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
        };
        open.retain(|waiting| !waiting.state.is_done());
        if open.len() >= MOST_AT_ONCE {
            // Those that have asked get their answer.
            let Some(silent) = open.iter().position(|waiting| waiting.state.give_up()) else { continue };
            let handle = open.remove(silent);
            let handle = handle.and_then(|w| w.stream.lock().unwrap_or_else(PoisonError::into_inner).take());
            if let Some(stream) = handle {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
        let Ok(other) = stream.try_clone() else { continue };
        let other = Arc::new(Mutex::new(Some(other)));
        let state = Arc::new(State::default());
        open.push_back(Waiting { stream: other.clone(), state: state.clone() });
        let (gate, answer) = (gate.clone(), answer.clone());
        let done = state.clone();
        let spawned = std::thread::Builder::new().stack_size(512 << 10).spawn(move || {
            // Whoever hangs up gets nothing.
            let _ = one(&mut stream, &state, &gate, answer.as_ref());
            let _ = stream.shutdown(Shutdown::Both);
            // Only when both handles are gone does a client that still sends hear of it.
            drop(other.lock().unwrap_or_else(PoisonError::into_inner).take());
            state.0.store(DONE, Ordering::SeqCst);
        });
        if spawned.is_err() {
            done.0.store(DONE, Ordering::SeqCst);
        }
    }
}

/// A connection that is open, in the order in which they came.
struct Waiting {
    /// A second handle, for as long as the connection is open.
    stream: Arc<Mutex<Option<TcpStream>>>,
    state: Arc<State>,
}

/// How far the request of a connection is.
#[derive(Default)]
struct State(AtomicUsize);

/// It is not there yet; it is there; the connection is answered or closed.
const SILENT: usize = 0;
const ASKED: usize = 1;
const DONE: usize = 2;

impl State {
    fn is_done(&self) -> bool {
        self.0.load(Ordering::SeqCst) == DONE
    }

    /// Moves on from `SILENT`; false where another was faster.
    fn move_to(&self, state: usize) -> bool {
        self.0.compare_exchange(SILENT, state, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn give_up(&self) -> bool {
        self.move_to(DONE)
    }
}

fn one(
    stream: &mut TcpStream,
    state: &State,
    gate: &Gate,
    answer: &dyn Fn(&Asked<'_>) -> Option<Answer>,
) -> io::Result<()> {
    stream.set_write_timeout(Some(TIMEOUT))?;
    let head = match read_head(stream) {
        Ok(head) => head,
        Err(status) => return refuse(stream, status),
    };
    if !state.move_to(ASKED) {
        return Ok(());
    }
    let checked = match check(&head, gate, stream.local_addr()?) {
        Ok(asked) => asked,
        Err(status) => return refuse(stream, status),
    };
    let Some(Answer { kind, body, nonce }) = answer(&checked) else { return refuse(stream, "404 Not Found") };
    let policy = match nonce {
        Some(nonce) => format!(
            "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; \
             img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        None => "default-src 'none'".to_owned(),
    };
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nContent-Security-Policy: {policy}\r\n{COMMON}\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(&body)
}

const COMMON: &str = "Connection: close\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n\
    Referrer-Policy: no-referrer\r\nX-Frame-Options: DENY\r\nCross-Origin-Resource-Policy: same-origin\r\n";

fn refuse(stream: &mut TcpStream, status: &str) -> io::Result<()> {
    let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n{COMMON}\r\n");
    stream.write_all(answer.as_bytes())
}

/// The lines of a request up to the empty one.
fn read_head(stream: &mut TcpStream) -> Result<String, &'static str> {
    let begun = Instant::now();
    let mut bytes = Vec::new();
    let mut chunk = [0; 1024];
    loop {
        let left = TIMEOUT.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()).ok_or(TOO_LATE)?;
        stream.set_read_timeout(Some(left)).map_err(|_| BAD)?;
        let count = match stream.read(&mut chunk) {
            Ok(0) => return Err(BAD),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return Err(TOO_LATE),
        };
        // The end may be cut in two.
        let looked_at = bytes.len().saturating_sub(3);
        bytes.extend_from_slice(&chunk[..count]);
        let end = bytes[looked_at..].windows(4).position(|four| four == b"\r\n\r\n").map(|at| looked_at + at);
        // The end counts as well.
        if end.map_or(bytes.len(), |end| end + 4) > MOST_BYTES {
            return Err("431 Request Header Fields Too Large");
        }
        if let Some(end) = end {
            bytes.truncate(end);
            return String::from_utf8(bytes).map_err(|_| BAD);
        }
    }
}

const BAD: &str = "400 Bad Request";
const TOO_LATE: &str = "408 Request Timeout";
const FORBIDDEN: &str = "403 Forbidden";

/// What is asked for, if whoever asks may know it; else the status of the refusal.
fn check<'a>(head: &'a str, gate: &Gate, here: SocketAddr) -> Result<Asked<'a>, &'static str> {
    let mut lines = head.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(BAD);
    };
    if !version.starts_with("HTTP/1.") || !target.starts_with('/') {
        return Err(BAD);
    }
    if method != "GET" {
        return Err("405 Method Not Allowed");
    }
    let (mut host, mut origin, mut site, mut bearer) = (None, None, None, None);
    for line in lines {
        let (name, value) = line.split_once(':').ok_or(BAD)?;
        let place = match name.to_ascii_lowercase().as_str() {
            "host" => &mut host,
            "origin" => &mut origin,
            "sec-fetch-site" => &mut site,
            "authorization" => &mut bearer,
            _ => continue,
        };
        if place.replace(value.trim()).is_some() {
            return Err(BAD);
        }
    }
    let host = host.ok_or(BAD)?;
    // Another page that a browser shows may make it ask us, even under a name of its own that leads here.
    if origin.is_some_and(|origin| origin.strip_prefix("http://") != Some(host)) {
        return Err(FORBIDDEN);
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    if path != "/" && site.is_some_and(|site| site != "same-origin" && site != "none") {
        return Err(FORBIDDEN);
    }
    let asked = Asked { path, query };
    match &gate.token {
        None if here.ip().is_loopback() && is_this_machine(host) => Ok(asked),
        None => Err(FORBIDDEN),
        Some(token) => {
            let given = bearer.and_then(|b| b.strip_prefix("Bearer ")).or_else(|| asked.parameter("token"));
            match given.is_some_and(|given| same(given.as_bytes(), token.as_bytes())) {
                true => Ok(asked),
                false => Err("401 Unauthorized"),
            }
        }
    }
}

/// Whether a `Host` names this machine to itself; any port, since a tunnel may have another.
fn is_this_machine(host: &str) -> bool {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    let address = name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    address || name.eq_ignore_ascii_case("localhost")
}

/// Whether two texts are equal, in a time that does not tell where they differ.
fn same(a: &[u8], b: &[u8]) -> bool {
    let differ = a.iter().zip(b).fold(a.len() ^ b.len(), |differ, (a, b)| differ | usize::from(a ^ b));
    std::hint::black_box(differ) == 0
}
