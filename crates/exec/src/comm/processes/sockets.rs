//! Bytes between processes over TCP: a connection per pair of ranks, and a thread per connection that empties it into the inbox.
//!
//! Because these threads never wait for anybody, a sender's bytes are always taken in the end, and no order of sends and receives
//! can deadlock.

use super::Transport;
use super::inbox::{Inbox, Stream};
use super::secret::{Door, JobSecret};
use super::wire::{read, read_note_up_to, write_note};
use crate::sync::std_lock;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A connection of whose other end nothing is heard for so long is cut.
pub const CUT_AFTER: Duration = Duration::from_secs(8);
/// How often a blocked sender looks whether the run has ended.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How often a process that waits for connections looks for them.
const ACCEPT_EVERY: Duration = Duration::from_millis(1);
/// Bytes before each frame: its stream and its length.
const HEAD: usize = 16;
/// The most bytes of one frame.
const MOST: usize = 1 << 40;
/// The note that opens a connection, and its bytes.
const OPEN: u8 = 1;
const OPEN_BYTES: u32 = 64;

/// The connections of one rank, by rank; none to itself.
pub struct Sockets {
    connections: Vec<Option<Mutex<TcpStream>>>,
}

/// Where a rank can be reached, and which rank of which run it is.
pub struct Mesh<'a> {
    pub rank: usize,
    /// The listeners of all ranks.
    pub addresses: &'a [SocketAddr],
    /// Tells this run from others.
    pub token: u64,
    pub secret: &'a JobSecret,
    pub deadline: Instant,
}

impl Sockets {
    /// Connects to all ranks before this one, and waits for those after it. Whatever comes goes to the inbox from then on.
    pub fn connect(mesh: &Mesh<'_>, listener: TcpListener, inbox: &Arc<Inbox>) -> Result<Self, String> {
        let Mesh { rank, addresses, token, secret, deadline } = *mesh;
        let mut connections: Vec<Option<TcpStream>> = addresses.iter().map(|_| None).collect();
        for (other, address) in addresses.iter().enumerate().take(rank) {
            let left = deadline.saturating_duration_since(Instant::now()).max(LOOK_EVERY);
            let open = || {
                let stream = secret.connect(address, left.min(CUT_AFTER))?;
                tune(&stream)?;
                write_note(&stream, OPEN, &(token, rank))?;
                Ok(stream)
            };
            let text = |e: io::Error| format!("rank {other} cannot be reached at {address}: {e}");
            connections[other] = Some(open().map_err(text)?);
        }
        let mut door = Door::new(listener, secret.clone()).map_err(|e| format!("cannot listen: {e}"))?;
        while let Some(missing) = (rank + 1..addresses.len()).find(|&other| connections[other].is_none()) {
            if let Some(error) = inbox.peers.failure() {
                return Err(error.to_string());
            }
            // A connection that broke at once: whoever is missing is told of below.
            for stream in door.let_in() {
                if let Some(other) = opened(&stream, token)
                    && (rank + 1..addresses.len()).contains(&other)
                {
                    connections[other] = Some(stream);
                }
            }
            std::thread::sleep(ACCEPT_EVERY);
            if Instant::now() > deadline {
                return Err(format!("rank {missing} has not connected"));
            }
        }
        for (other, stream) in connections.iter().enumerate() {
            let Some(stream) = stream else { continue };
            let stream = stream.try_clone().map_err(|e| format!("no more connections: {e}"))?;
            let inbox = inbox.clone();
            inbox.set_connected(other, true);
            let thread = std::thread::Builder::new().name(format!("lockstep-from-{other}"));
            thread.spawn(move || receive(other, stream, &inbox)).map_err(|e| format!("no more threads: {e}"))?;
        }
        Ok(Self { connections: connections.into_iter().map(|c| c.map(Mutex::new)).collect() })
    }
}

/// The rank that opened a connection, if it is one of this run.
fn opened(stream: &TcpStream, token: u64) -> Option<usize> {
    tune(stream).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    let (kind, body) = read_note_up_to(stream, OPEN_BYTES).ok()?;
    stream.set_read_timeout(None).ok()?;
    let (theirs, rank): (u64, usize) = read(&body)?;
    (kind == OPEN && theirs == token).then_some(rank)
}

/// Small frames go at once; a connection whose other end is silent is cut; who writes comes back now and then.
pub fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(LOOK_EVERY))?;
    let options = [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 2),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 2),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3),
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, CUT_AFTER.as_millis() as libc::c_int),
    ];
    for (level, option, value) in options {
        let size = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the socket is open; the value is an int, as these options take.
        let done = unsafe { libc::setsockopt(stream.as_raw_fd(), level, option, (&raw const value).cast(), size) };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Reads what a rank sends until it sends no more.
fn receive(from: usize, mut stream: TcpStream, inbox: &Inbox) {
    let mut head = [0; HEAD];
    let error = loop {
        if let Err(error) = stream.read_exact(&mut head) {
            break error;
        }
        let [kind, bytes] = [0, 1].map(|i| u64::from_le_bytes(head.as_chunks().0[i]));
        let bytes = bytes as usize;
        let Some(mut frame) = (bytes <= MOST).then(|| inbox.buffer_for(bytes)).flatten() else {
            break io::Error::other(format!("there is no memory for a frame of {bytes} bytes"));
        };
        if let Err(error) = stream.read_exact(frame.bytes_mut()) {
            break error;
        }
        inbox.deliver(from, Stream(kind), frame);
    };
    inbox.set_connected(from, false);
    inbox.cut(from, ended(&error));
}

/// What a connection that ends without a word says of the other end.
pub const ENDED: &str = "its process has ended";

/// The same where another connection to that end still stands, or may.
pub const CLOSED: &str = "the connection to it was closed, and its process may still run";

/// What the end of a connection means.
pub fn ended(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            format!("{ENDED}, and its connections with it")
        }
        _ => format!("its connection was cut: {error}"),
    }
}

impl Transport for Sockets {
    fn send(&self, to: usize, stream: Stream, frame: &[u8], goes_on: &dyn Fn() -> bool) -> Result<(), String> {
        let Some(connection) = &self.connections[to] else { return Err("no connection".to_owned()) };
        let mut head = [0; HEAD];
        head[..8].copy_from_slice(&stream.0.to_le_bytes());
        head[8..].copy_from_slice(&(frame.len() as u64).to_le_bytes());
        let mut connection = std_lock(connection);
        let mut sent = 0;
        while sent < HEAD + frame.len() {
            let slices =
                [io::IoSlice::new(&head[sent.min(HEAD)..]), io::IoSlice::new(&frame[sent.saturating_sub(HEAD)..])];
            match connection.write_vectored(&slices) {
                Ok(0) => return Err("its connection takes no more".to_owned()),
                Ok(bytes) => sent += bytes,
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    if !goes_on() {
                        return Ok(());
                    }
                }
                Err(e) => return Err(ended(&e)),
            }
        }
        Ok(())
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        for connection in self.connections.iter().flatten() {
            // What was sent still arrives; the threads that read end when the others have closed too.
            let _ = std_lock(connection).shutdown(Shutdown::Write);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::peers::Peers;
    use lockstep_ir::Hint;

    #[test]
    fn a_frame_that_is_too_long_is_refused_before_memory_is_asked_for() {
        for bytes in [1u64 << 62, u64::MAX, MOST as u64 + 1] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let inbox = Inbox::new(0, Arc::new(Peers::new(2, None)), vec!["first".into(), "second".into()]);
            // It would wait for the bytes, which never come.
            let receiver = listener.accept().unwrap().0;
            sender.write_all(&[7u64.to_le_bytes(), bytes.to_le_bytes()].concat()).unwrap();
            receive(1, receiver, &inbox);
            let text = inbox.peers.failure().unwrap().with_hint();
            assert!(text.contains(&format!("there is no memory for a frame of {bytes} bytes")), "{text}");
        }
    }
}
