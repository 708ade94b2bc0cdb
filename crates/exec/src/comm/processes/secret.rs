//! The secret of a job, and how both ends of a connection prove that they know it before either reads anything else.
//!
//! Whoever connects sends 32 random bytes, its nonce. Whoever accepts answers with a nonce of its own and the HMAC-SHA256 of both, and the
//! first proves the same in turn. All three messages have one length, so a stranger chooses none. What follows is neither encrypted
//! nor signed: the secret keeps out who cannot read the network.

use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long a connection may take to prove that it is one of the job's.
pub const PROVEN_WITHIN: Duration = Duration::from_secs(3);
/// Connections that may be about to prove themselves at once. Where more come, those that came first go: ranks come again.
const MOST_STRANGERS: usize = 128;

const NONCE: usize = 32;
const PROOF: usize = 32;
/// Says that both ends are Lockstep.
const MAGIC: &[u8; 8] = b"lockstep";
const OPENING: usize = MAGIC.len() + NONCE;
const ANSWER: usize = NONCE + PROOF;

/// What all processes of a job know, and nobody else.
#[derive(Clone, PartialEq, Eq)]
pub struct JobSecret([u8; 32]);

impl fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobSecret(..)")
    }
}

impl JobSecret {
    /// A new one.
    pub fn random() -> io::Result<Self> {
        random().map(Self)
    }

    /// As 64 hexadecimal digits.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// From 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digits = text.as_bytes();
        if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(bytes))
    }

    /// What only somebody who knows the secret can say of two nonces; another thing for either end.
    fn mac(&self, end: &[u8], nonces: [&[u8]; 2]) -> Hmac<Sha256> {
        // A key of any length is one.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).unwrap_or_else(|_| unreachable!("HMAC takes any key"));
        mac.update(end);
        nonces.iter().for_each(|nonce| mac.update(nonce));
        mac
    }

    fn proof(&self, end: &[u8], nonces: [&[u8]; 2]) -> [u8; PROOF] {
        self.mac(end, nonces).finalize().into_bytes().into()
    }

    fn holds(&self, end: &[u8], nonces: [&[u8]; 2], proof: &[u8]) -> bool {
        self.mac(end, nonces).verify_slice(proof).is_ok()
    }

    /// Connects to a process of the job: each has proven to the other that it is one.
    pub fn connect(&self, to: &SocketAddr, within: Duration) -> io::Result<TcpStream> {
        let until = Instant::now() + within;
        let mut stream = TcpStream::connect_timeout(to, within)?;
        let until = until.min(Instant::now() + PROVEN_WITHIN).max(Instant::now() + SHORTEST);
        let mine = random()?;
        stream.set_write_timeout(Some(PROVEN_WITHIN))?;
        stream.write_all(&[&MAGIC[..], &mine].concat())?;
        let mut answer = [0; ANSWER];
        read_until(&mut stream, &mut answer, until)?;
        let (theirs, proof) = answer.split_at(NONCE);
        if !self.holds(ACCEPTS, [&mine, theirs], proof) {
            return Err(io::Error::new(ErrorKind::PermissionDenied, STRANGER));
        }
        stream.write_all(&self.proof(CONNECTS, [&mine, theirs]))?;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        Ok(stream)
    }
}

/// What each end says before the nonces.
const CONNECTS: &[u8] = b"lockstep connects";
const ACCEPTS: &[u8] = b"lockstep accepts";
/// Of a listener that does not know the secret.
const STRANGER: &str = "who listens there is no process of this job";
/// The least time that an answer may take.
const SHORTEST: Duration = Duration::from_millis(100);

fn random() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Fills `bytes` before a moment, however slowly they come.
fn read_until(stream: &mut TcpStream, bytes: &mut [u8], until: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// A listener that lets in who knows the secret. It never waits for anybody, and keeps few bytes of few strangers for a short time.
pub struct Door {
    listener: TcpListener,
    secret: JobSecret,
    strangers: VecDeque<Stranger>,
}

/// A connection that has proven nothing yet.
struct Stranger {
    stream: TcpStream,
    until: Instant,
    said: [u8; OPENING],
    filled: usize,
    /// The proof that it owes, once its nonce has come: both nonces.
    nonces: Option<[[u8; NONCE]; 2]>,
}

/// How far a stranger has come.
enum Proven {
    Yes,
    No,
    NotYet,
}

impl Door {
    /// Lets in at this listener.
    pub fn new(listener: TcpListener, secret: JobSecret) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener, secret, strangers: VecDeque::new() })
    }

    /// Those who have proven themselves since the last call.
    pub fn let_in(&mut self) -> Vec<TcpStream> {
        // No more at once than are kept: who waits in the system's queue costs nothing here.
        for _ in 0..MOST_STRANGERS {
            let Ok((stream, _)) = self.listener.accept() else { break };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.strangers.len() == MOST_STRANGERS {
                self.strangers.pop_front();
            }
            let until = Instant::now() + PROVEN_WITHIN;
            self.strangers.push_back(Stranger { stream, until, said: [0; OPENING], filled: 0, nonces: None });
        }
        let (mut proven, mut left) = (Vec::new(), VecDeque::new());
        for mut stranger in self.strangers.drain(..) {
            match stranger.listen(&self.secret) {
                Proven::Yes if stranger.stream.set_nonblocking(false).is_ok() => proven.push(stranger.stream),
                Proven::NotYet if Instant::now() < stranger.until => left.push_back(stranger),
                Proven::Yes | Proven::No | Proven::NotYet => {}
            }
        }
        self.strangers = left;
        proven
    }
}

impl Stranger {
    fn listen(&mut self, secret: &JobSecret) -> Proven {
        loop {
            let wanted = if self.nonces.is_none() { OPENING } else { PROOF };
            match self.stream.read(&mut self.said[self.filled..wanted]) {
                Ok(0) => return Proven::No,
                Ok(count) => self.filled += count,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Proven::NotYet,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Proven::No,
            }
            if self.filled < wanted {
                continue;
            }
            match &self.nonces {
                None => {
                    if self.answer(secret).is_err() {
                        return Proven::No;
                    }
                }
                Some([theirs, mine]) => {
                    return match secret.holds(CONNECTS, [theirs, mine], &self.said[..PROOF]) {
                        true => Proven::Yes,
                        false => Proven::No,
                    };
                }
            }
        }
    }

    /// Answers its opening with a proof of ours.
    fn answer(&mut self, secret: &JobSecret) -> io::Result<()> {
        let (magic, nonce) = self.said.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(ErrorKind::InvalidData.into());
        }
        let mut theirs = [0; NONCE];
        theirs.copy_from_slice(nonce);
        let mine = random()?;
        // So few bytes go at once, or the connection is of no use.
        self.stream.write_all(&[&mine[..], &secret.proof(ACCEPTS, [&theirs, &mine])].concat())?;
        (self.nonces, self.filled) = (Some([theirs, mine]), 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mac_is_that_of_rfc_4231_and_depends_on_all_that_goes_in() {
        // Test case 2 of RFC 4231, with a key of another length.
        let mut mac = Hmac::<Sha256>::new_from_slice(b"Jefe").unwrap();
        mac.update(b"what do ya want for nothing?");
        let text: String = mac.finalize().into_bytes().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(text, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        let (a, b) = (JobSecret::random().unwrap(), JobSecret::random().unwrap());
        let proof = a.proof(CONNECTS, [&[1; 32], &[2; 32]]);
        assert!(a.holds(CONNECTS, [&[1; 32], &[2; 32]], &proof));
        assert!(!a.holds(ACCEPTS, [&[1; 32], &[2; 32]], &proof), "what one end says is no answer of the other");
        assert!(!a.holds(CONNECTS, [&[2; 32], &[1; 32]], &proof) && !b.holds(CONNECTS, [&[1; 32], &[2; 32]], &proof));
    }

    #[test]
    fn secrets_pass_as_text_and_are_not_shown() {
        let secret = JobSecret::random().unwrap();
        assert_eq!(JobSecret::from_hex(&secret.to_hex()), Some(secret.clone()));
        assert_ne!(JobSecret::random().unwrap(), secret);
        assert!(!format!("{secret:?}").contains(&secret.to_hex()));
        for bad in ["", "00", &"g".repeat(64), &"0".repeat(63), &"0".repeat(66), &"é".repeat(32)] {
            assert_eq!(JobSecret::from_hex(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_door_lets_in_who_knows_the_secret_past_silent_slow_and_lying_strangers() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let secret = JobSecret::random().unwrap();
        let mut door = Door::new(listener, secret.clone()).unwrap();
        let mut silent = Vec::new();
        for _ in 0..2 * MOST_STRANGERS {
            silent.push(TcpStream::connect(at).unwrap());
            assert!(door.let_in().is_empty());
        }
        let mut http = TcpStream::connect(at).unwrap();
        http.write_all(b"GET / HTTP/1.1\r\nHost: a.host.that.is.longer.than.an.opening\r\n\r\n").unwrap();
        std::thread::scope(|s| {
            let liar = s.spawn(|| JobSecret::random().unwrap().connect(&at, Duration::from_secs(5)));
            let rank = s.spawn(|| secret.connect(&at, Duration::from_secs(5)));
            let mut let_in = Vec::new();
            let until = Instant::now() + Duration::from_secs(10);
            while (!liar.is_finished() || !rank.is_finished() || let_in.is_empty()) && Instant::now() < until {
                let_in.extend(door.let_in());
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(liar.join().unwrap().unwrap_err().kind(), ErrorKind::PermissionDenied);
            let mut rank = rank.join().unwrap().unwrap();
            rank.write_all(b"hello").unwrap();
            let mut said = [0; 5];
            assert_eq!(let_in.len(), 1);
            let_in[0].read_exact(&mut said).unwrap();
            assert_eq!(&said, b"hello");
        });
        assert!(door.strangers.len() <= MOST_STRANGERS);
        drop(silent);
    }

    #[test]
    fn who_listens_without_the_secret_is_found_out() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let stranger = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&[7; ANSWER]).unwrap();
            // Nothing of ours comes after a wrong answer.
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest);
            rest.len()
        });
        let error = JobSecret::random().unwrap().connect(&at, Duration::from_secs(5)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        assert_eq!(stranger.join().unwrap(), OPENING);
    }
}
