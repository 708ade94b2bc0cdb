//! The rendezvous: processes that were started apart find each other.
//!
//! The first rank listens at an address that all were given, or where another program has that port, at one that it [posts](super::board).
//! Every other connects there, [proves](super::secret) that it is of the job and says who it is; when all have come, the first tells them of
//! each other, and its connections to them become the [failure channel](super::control). Whatever is wrong is told to all who have come.

mod first;
mod others;

use super::ProcessCommunicator;
use super::Transport;
use super::board::{Board, Posted};
use super::control::Control;
use super::inbox::Inbox;
use super::mpi::MpiLibrary;
use super::over::{Meeting, Over, start_mpi};
use super::secret::JobSecret;
use super::sockets::{Mesh, Sockets, tune};
use super::wire::{Reader, Writer, plain, write_note};
use crate::comm::Communicator;
use crate::comm::peers::Peers;
use first::{meet, open};
use lockstep_ir::{Hint, units};
use others::{Search, visit};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How a process finds the others.
#[derive(Clone, Debug)]
pub struct Start {
    /// Which rank it is.
    pub rank: usize,
    /// Ranks in all.
    pub ranks: usize,
    /// Where the first rank listens: `host:port`.
    pub address: String,
    /// How long it waits for the others to come, and later for one that shows no sign of life.
    pub timeout: Duration,
    /// What all must have in common to understand each other: the version and the binary.
    pub build: String,
    /// The MPI library that it may use: whoever started it was an MPI.
    pub mpi: Option<MpiLibrary>,
    /// The secret of the job, where whoever started the processes gave them one; else the first rank makes one, and posts it.
    pub secret: Option<JobSecret>,
    /// Where the first rank posts what the others were not given: the secret, and its port where that is another.
    pub board: Option<Board>,
    /// Ends the waiting for others.
    pub waiting: Waiting,
}

/// What ends a process's waiting for the others before its time.
#[derive(Clone, Debug, Default)]
pub struct Waiting {
    /// It is asked to stop.
    pub stop: Option<Arc<AtomicBool>>,
    /// Another process has ended, so that there will never be all.
    pub abandoned: Option<Arc<AtomicBool>>,
}

impl Waiting {
    fn check(&self, rank: usize) -> Result<(), JoinError> {
        let set = |flag: &Option<Arc<AtomicBool>>| flag.as_ref().is_some_and(|flag| flag.load(Ordering::Acquire));
        match (set(&self.abandoned), set(&self.stop)) {
            (true, _) => Err(JoinError::Abandoned { rank }),
            (false, true) => Err(JoinError::Stopped),
            (false, false) => Ok(()),
        }
    }
}

/// A process of a run, as the others know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The name of its host.
    pub host: String,
    /// Its number there.
    pub pid: u32,
    /// Cores that it may use.
    pub cores: usize,
}

/// Why processes did not find each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, lockstep_ir::Hint)]
pub enum JoinError {
    /// The first rank cannot listen.
    #[error("rank 0 cannot listen at {address}: {cause}")]
    #[hint("{}", if *in_use { PORT_IN_USE } else { "MASTER_ADDR must be an address of the host of rank 0" })]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        cause: String,
        /// Whether another process has the port.
        in_use: bool,
    },
    /// The first rank does not answer.
    #[error("rank {rank} found no rank 0 at {address} within {}: {cause}", units::seconds(.within.as_secs_f64()))]
    #[hint("is rank 0 running, and are MASTER_ADDR and MASTER_PORT those of its host? A firewall may be between them")]
    NoAnswer {
        /// The rank that looked.
        rank: usize,
        /// Where.
        address: String,
        /// What the system said last.
        cause: String,
        /// How long it looked.
        within: Duration,
    },
    /// Some have not come.
    #[error(
        "{} of {ranks} {} not come within {}",
        units::ranks(.missing),
        if .missing.len() == 1 { "has" } else { "have" },
        units::seconds(.within.as_secs_f64())
    )]
    #[hint("look at their messages; were as many processes started as there are ranks?")]
    Missing {
        /// Who.
        missing: Vec<usize>,
        /// Ranks in all.
        ranks: usize,
        /// How long they were waited for.
        within: Duration,
    },
    /// Two processes are the same rank.
    #[error(
        "rank {rank} came twice: as process {} on host {} and as process {} on host {}",
        .first.pid, .first.host, .second.pid, .second.host
    )]
    #[hint("every process needs a rank of its own (RANK, SLURM_PROCID …); two runs may use the same MASTER_PORT")]
    Twice {
        /// The rank.
        rank: usize,
        /// Who came first.
        first: Member,
        /// Who came then.
        second: Member,
    },
    /// A process counts other ranks than the first.
    #[error(
        "process {} on host {} is rank {rank} of {theirs}, and rank 0 counts {ours} ranks",
        .member.pid, .member.host
    )]
    #[hint("start all processes with the same WORLD_SIZE, and ranks from 0 to one less")]
    OtherSize {
        /// The process.
        member: Member,
        /// The rank that it says it is.
        rank: usize,
        /// The ranks that it counts.
        theirs: usize,
        /// The ranks that the first counts.
        ours: usize,
    },
    /// A process is of another build.
    #[error("rank 0 on host {first} is Lockstep {ours}, rank {rank} on host {host} is Lockstep {theirs}")]
    #[hint("start all ranks from the same binary")]
    OtherBuild {
        /// The host of the first rank.
        first: String,
        /// The rank.
        rank: usize,
        /// Its host.
        host: String,
        /// The build of the first rank.
        ours: String,
        /// Its build.
        theirs: String,
    },
    /// A process has ended before all had come.
    #[error(
        "rank {rank}{} has ended before all had come: {reason}",
        host.as_ref().map_or_else(String::new, |host| format!(" on host {host}"))
    )]
    #[hint("look at the messages of rank {rank}")]
    Early {
        /// The rank.
        rank: usize,
        /// Its host, where that is known.
        host: Option<String>,
        /// What it said.
        reason: String,
    },
    /// Whoever started the processes says that one of them has ended.
    #[error("rank {rank} waits no longer: another rank has ended before all had come")]
    #[hint("look at the messages of the other ranks")]
    Abandoned {
        /// The rank that waited.
        rank: usize,
    },
    /// The process is asked to stop.
    #[error("interrupted before all ranks had come")]
    #[hint("the same command again starts the run, or goes on with it")]
    Stopped,
    /// There is no secret, and no folder to keep one in.
    #[error("rank {rank} cannot prove to the others that it is of their job: {cause}")]
    #[hint(
        "choose a folder that all ranks can use, or give all the same LOCKSTEP_JOB_SECRET: 64 hexadecimal digits, \
         as `openssl rand -hex 32` prints"
    )]
    NoSecret {
        /// The rank.
        rank: usize,
        /// What is wrong.
        cause: String,
    },
    /// The first rank has found something wrong.
    #[error("{0}")]
    Refused(String),
    /// Ranks cannot reach each other.
    #[error("rank {rank}: {cause}")]
    #[hint("every host must reach every other, on any port; look for a firewall between them")]
    Unconnected {
        /// The rank that says so.
        rank: usize,
        /// What is wrong.
        cause: String,
    },
    /// A rank was lost while MPI was started.
    #[error("MPI does not start: {failed}")]
    #[hint("look at the messages of that rank; LOCKSTEP_MPI_LIBRARY=none goes over TCP")]
    MpiStart {
        /// Who, where, and what is wrong.
        failed: String,
    },
    /// The system lacks something.
    #[error("rank {rank} cannot join the others: {cause}")]
    #[hint("check the limits of threads and open files (ulimit -u, -n)")]
    System {
        /// The rank.
        rank: usize,
        /// What it said.
        cause: String,
    },
}

const PORT_IN_USE: &str = "another process uses this port, and there is no folder in which to tell the other ranks of another: \
                           choose another MASTER_PORT";

/// The name of this host.
pub fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "unknown".to_owned() } else { plain(name) }
}

/// Kinds of notes.
const HELLO: u8 = 20;
const ROSTER: u8 = 21;
pub const REFUSAL: u8 = 22;
/// The process of this rank has ended.
const ENDED: u8 = 25;
/// The most bytes that a process says of itself.
const HELLO_BYTES: u32 = 64 << 10;
/// How often a process looks again for one that is not there yet.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The longest that a process that has connected may take to say who it is.
const HELLO_WITHIN: Duration = Duration::from_secs(5);

/// What a process says when it comes.
struct Hello {
    rank: usize,
    ranks: usize,
    build: String,
    member: Member,
    /// Where it listens for other ranks.
    listens: SocketAddr,
    offers: Over,
}

impl Hello {
    fn write(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.size(self.rank);
        to.size(self.ranks);
        to.text(&self.build);
        write_member(&mut to, &self.member, self.listens);
        self.offers.write(&mut to);
        to.0
    }

    fn read(body: &[u8]) -> Option<Self> {
        let mut from = Reader(body);
        let (rank, ranks, build) = (from.size()?, from.size()?, from.shown()?);
        let (member, listens) = read_member(&mut from)?;
        Some(Self { rank, ranks, build, member, listens, offers: Over::read(&mut from)? })
    }
}

fn write_member(to: &mut Writer, member: &Member, listens: SocketAddr) {
    to.text(&member.host);
    to.u32(member.pid);
    to.size(member.cores);
    to.text(&listens.to_string());
}

fn read_member(from: &mut Reader<'_>) -> Option<(Member, SocketAddr)> {
    let member = Member { host: from.shown()?, pid: from.u32()?, cores: from.size()? };
    Some((member, from.text()?.parse().ok()?))
}

/// Who is there, and how they are reached.
struct Roster {
    token: u64,
    over: Over,
    members: Vec<(Member, SocketAddr)>,
}

impl Roster {
    fn write(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.u64(self.token);
        self.over.write(&mut to);
        to.size(self.members.len());
        self.members.iter().for_each(|(member, listens)| write_member(&mut to, member, *listens));
        to.0
    }

    /// As read by a rank that reached the first one at `first`: whoever shares the first one's host may know itself by an address
    /// that means nothing elsewhere.
    fn read(body: &[u8], first: IpAddr) -> Option<Self> {
        let mut from = Reader(body);
        let (token, over) = (from.u64()?, Over::read(&mut from)?);
        let count = from.size()?;
        let mut members = Vec::new();
        for _ in 0..count {
            let (member, mut listens) = read_member(&mut from)?;
            if listens.ip().is_loopback() || listens.ip().is_unspecified() {
                listens.set_ip(first);
            }
            members.push((member, listens));
        }
        Some(Self { token, over, members })
    }
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
            let mut body = Writer::default();
            body.size(start.rank);
            body.text(&host());
            body.text(reason);
            let _ = tune(&stream).and_then(|()| write_note(&stream, ENDED, &body.0));
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
    let system = |cause: std::io::Error| JoinError::System { rank, cause: cause.to_string() };
    let peers = Arc::new(match rank {
        0 => Peers::new(start.ranks, start.timeout),
        _ => Peers::unwatched(start.ranks),
    });
    let (members, addresses): (Vec<Member>, Vec<SocketAddr>) = roster.members.into_iter().unzip();
    let inbox = Arc::new(Inbox::new(rank, peers, members.iter().map(|m| m.host.clone()).collect()));
    let (token, mut over) = (roster.token, roster.over);
    let mut mpi = None;
    if let Over::Mpi(name) = &over {
        let meeting = Meeting { start, token, members: &members, deadline: deadline_of(start) };
        match start_mpi(&meeting, &links, &inbox)? {
            Ok(started) => mpi = Some(started),
            Err(why) => over = Over::Tcp(Some(format!("{name} cannot be used: {why}"))),
        }
    }
    let control = Control::start(rank, links, &inbox, start.timeout).map_err(system)?;
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
        Ok(transport) => Ok(ProcessCommunicator::new(rank, inbox, (transport, over), control, members, (secret, gate))),
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

fn myself() -> Member {
    Member { host: host(), pid: std::process::id(), cores: crate::cpu::cores() }
}

/// A listener for other ranks, at the address by which this rank is known and at no other.
fn listen(ip: IpAddr, rank: usize) -> Result<(TcpListener, SocketAddr), JoinError> {
    let system = |cause: std::io::Error| JoinError::System { rank, cause: cause.to_string() };
    let listener = TcpListener::bind((ip, 0)).map_err(system)?;
    let address = listener.local_addr().map_err(system)?;
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
