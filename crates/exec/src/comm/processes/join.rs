//! The rendezvous: processes that were started apart find each other.
//!
//! The first rank listens at an address that all were given, or where another program has that port, at one that it [posts](super::board).
//! Every other connects there, [proves](super::secret) that it is of the job and says who it is; when all have come, the first tells them of
//! each other, and its connections to them become the [failure channel](super::control). Whatever is wrong is told to all who have come.

mod first;
mod others;

use super::ProcessCommunicator;
use super::board::Posted;
use super::control::Control;
use super::inbox::Inbox;
use super::over::{MpiJoin, Over, start_mpi};
use super::secret::JobSecret;
use super::sockets::{Mesh, Sockets, tune};
use super::start::{JoinError, Member, REFUSAL, Start, host};
use super::transport::Transport;
use super::wire::write_note;
use crate::comm::Communicator;
use crate::comm::peers::Peers;
use first::{meet, open};
use lockstep_ir::Hint;
use others::{Search, visit};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Kinds of notes.
const HELLO: u8 = 20;
const ROSTER: u8 = 21;
/// The process of this rank has ended.
const ENDED: u8 = 25;
/// The most bytes that a process says of itself.
const HELLO_BYTES: u32 = 64 << 10;
/// How often a process looks again for one that is not there yet.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The longest that a process that has connected may take to say who it is.
const HELLO_WITHIN: Duration = Duration::from_secs(5);

/// What a process says when it comes.
#[derive(Serialize, Deserialize)]
struct Hello {
    rank: usize,
    ranks: usize,
    build: String,
    member: Member,
    /// Where it listens for other ranks.
    listens: SocketAddr,
    offers: Over,
}

/// Who is there, and how they are reached.
#[derive(Serialize, Deserialize)]
struct Roster {
    token: u64,
    over: Over,
    members: Vec<(Member, SocketAddr)>,
}

/// Finds the other processes of a run and gives the communicator of this one.
pub fn join(start: &Start) -> Result<ProcessCommunicator, JoinError> {
    match start.rank {
        0 => {
            let (listener, secret, notice) = open(start)?;
            let mut comm = joined(start, meet(start, listener, secret, deadline_of(start))?)?;
            // Who comes too late still finds it.
            comm.notice = notice;
            Ok(comm)
        }
        _ => joined(start, visit(start, deadline_of(start))?),
    }
}

/// As [`join`], for the first rank, which listens already; all were given the secret.
pub fn host_at(start: &Start, listener: TcpListener) -> Result<ProcessCommunicator, JoinError> {
    let secret = start.secret.clone().ok_or_else(|| no_secret(start, "it was given none"))?;
    joined(start, meet(start, listener, secret, deadline_of(start))?)
}

/// Tells the others that this process ends before it has joined them, if they are there: they wait no longer.
pub fn end_early(start: &Start, reason: &str) {
    if start.rank == 0 {
        if let Some(board) = &start.board {
            // Where it cannot be written, they wait.
            let _ = board.post(&Posted::Failed(reason.to_owned()));
        }
        return;
    }
    let until = Instant::now() + END_WITHIN.min(start.timeout);
    let mut search = Search::new(start);
    while Instant::now() < until {
        if let Ok((stream, _)) = search.look(until) {
            let _ = tune(&stream).and_then(|()| write_note(&stream, ENDED, &(start.rank, host(), reason)));
            return;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// How long a process that ends looks for the others.
const END_WITHIN: Duration = Duration::from_secs(2);

fn no_secret(start: &Start, cause: impl Into<String>) -> JoinError {
    JoinError::NoSecret { rank: start.rank, cause: cause.into() }
}

fn deadline_of(start: &Start) -> Instant {
    Instant::now() + start.timeout
}

/// What follows the rendezvous.
fn joined(start: &Start, met: Met) -> Result<ProcessCommunicator, JoinError> {
    let Met { roster, links, listener, secret, gate } = met;
    let rank = start.rank;
    let peers = Arc::new(Peers::new(start.ranks, (rank == 0).then_some(start.timeout)));
    let (members, addresses): (Vec<Member>, Vec<SocketAddr>) = roster.members.into_iter().unzip();
    let inbox = Arc::new(Inbox::new(rank, peers, members.iter().map(|m| m.host.clone()).collect()));
    let (token, mut over) = (roster.token, roster.over);
    let mut mpi = None;
    if let Over::Mpi(name) = &over {
        let join = MpiJoin { start, token, members: &members, deadline: deadline_of(start) };
        match start_mpi(&join, &links, &inbox)? {
            Ok(started) => mpi = Some(started),
            Err(why) => over = Over::Tcp(Some(format!("{name} cannot be used: {why}"))),
        }
    }
    let control = Control::start(rank, links, &inbox, start.timeout).map_err(system(rank))?;
    let transport = match mpi {
        Some(mpi) => Ok(Box::new(mpi) as Box<dyn Transport>),
        None => {
            let mesh = Mesh {
                rank,
                addresses: &addresses,
                token,
                secret: &secret,
                deadline: deadline_of(start).max(Instant::now() + HELLO_WITHIN),
            };
            Sockets::connect(&mesh, listener, &inbox).map(|sockets| Box::new(sockets) as Box<dyn Transport>)
        }
    };
    match transport {
        Ok(transport) => Ok(ProcessCommunicator {
            rank,
            inbox,
            transport: Some(transport),
            over,
            control,
            members,
            channels: Mutex::default(),
            exchanging: Mutex::default(),
            gate,
            notice: None,
            secret,
            device: Mutex::default(),
            goes_on: OnceLock::new(),
        }),
        Err(_) if inbox.peers.failure().is_some() => {
            let text = inbox.peers.failure().map_or_else(String::new, Hint::with_hint);
            control.close();
            Err(JoinError::Refused(text))
        }
        Err(cause) => {
            inbox.fail(rank, &cause);
            control.close();
            Err(JoinError::Unconnected { rank, cause })
        }
    }
}

/// What comes of a rendezvous.
struct Met {
    roster: Roster,
    /// The connections that become the failure channel, by rank.
    links: Vec<Option<TcpStream>>,
    /// Where this rank listens for others.
    listener: TcpListener,
    secret: JobSecret,
    /// What tells latecomers that all have come.
    gate: Option<Arc<AtomicBool>>,
}

/// The error for what the system refuses a rank.
fn system(rank: usize) -> impl Fn(std::io::Error) -> JoinError {
    move |cause| JoinError::System { rank, cause: cause.to_string() }
}

fn myself() -> Member {
    Member { host: host(), pid: std::process::id(), cores: crate::cpu::cores() }
}

/// A listener for other ranks, at the address by which this rank is known and at no other.
fn listen(ip: IpAddr, rank: usize) -> Result<(TcpListener, SocketAddr), JoinError> {
    let listener = TcpListener::bind((ip, 0)).map_err(system(rank))?;
    let address = listener.local_addr().map_err(system(rank))?;
    Ok((listener, address))
}

impl Drop for ProcessCommunicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail("panicked");
        } else {
            self.leave();
        }
        self.close();
    }
}
