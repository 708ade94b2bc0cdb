//! The rendezvous: processes that were started apart find each other.
//!
//! The first rank listens at an address that all were given. Every other connects there and says who it is; when all have come,
//! the first tells them of each other, and its connections to them become the [failure channel](super::control). Whatever is wrong
//! is told to all who have come.

use super::ProcessCommunicator;
use super::Transport;
use super::control::Control;
use super::inbox::Inbox;
use super::mpi::MpiLibrary;
use super::over::{Meeting, Over, start_mpi};
use super::sockets::{Mesh, Sockets, tune};
use super::wire::{Reader, Writer, read_note, write_note};
use crate::comm::Communicator;
use crate::comm::peers::Peers;
use lockstep_ir::{counter, units};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

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
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// The first rank cannot listen.
    #[error("rank 0 cannot listen at {address}: {cause}\nhint: {}", match in_use {
        true => "another process uses this port: end it, or choose another MASTER_PORT",
        false => "MASTER_ADDR must be an address of the host of rank 0",
    })]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        cause: String,
        /// Whether another process has the port.
        in_use: bool,
    },
    /// The first rank does not answer.
    #[error(
        "rank {rank} found no rank 0 at {address} within {}: {cause}\n\
         hint: is rank 0 running, and are MASTER_ADDR and MASTER_PORT those of its host? A firewall may be between them",
        units::seconds(.within.as_secs_f64())
    )]
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
        "{} of {ranks} {} not come within {}\nhint: look at their messages; were as many processes started as there are ranks?",
        units::ranks(.missing), if .missing.len() == 1 { "has" } else { "have" }, units::seconds(.within.as_secs_f64())
    )]
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
        "rank {rank} came twice: as process {} on host {} and as process {} on host {}\n\
         hint: every process needs a rank of its own (RANK, SLURM_PROCID …); two runs may use the same MASTER_PORT",
        .first.pid, .first.host, .second.pid, .second.host
    )]
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
        "process {} on host {} is rank {rank} of {theirs}, and rank 0 counts {ours} ranks\n\
         hint: start all processes with the same WORLD_SIZE, and ranks from 0 to one less",
        .member.pid, .member.host
    )]
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
    #[error(
        "rank 0 on host {first} is Lockstep {ours}, rank {rank} on host {host} is Lockstep {theirs}\n\
         hint: start all ranks from the same binary"
    )]
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
    /// The first rank has found something wrong.
    #[error("{0}")]
    Refused(String),
    /// Ranks cannot reach each other.
    #[error(
        "rank {rank}: {cause}\nhint: every host must reach every other, on any port; look for a firewall between them"
    )]
    Unconnected {
        /// The rank that says so.
        rank: usize,
        /// What is wrong.
        cause: String,
    },
    /// A rank was lost while MPI was started.
    #[error(
        "MPI does not start: {failed}\nhint: look at the messages of that rank; LOCKSTEP_MPI_LIBRARY=none goes over TCP"
    )]
    MpiStart {
        /// Who, where, and what is wrong.
        failed: String,
    },
    /// The system lacks something.
    #[error(
        "rank {rank} cannot join the others: {cause}\nhint: check the limits of threads and open files (ulimit -u, -n)"
    )]
    System {
        /// The rank.
        rank: usize,
        /// What it said.
        cause: String,
    },
}

/// The name of this host.
pub fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "unknown".to_owned() } else { name.to_owned() }
}

/// Kinds of notes.
const HELLO: u8 = 20;
const ROSTER: u8 = 21;
pub const REFUSAL: u8 = 22;
/// Says that both ends are Lockstep, before anything else.
const MAGIC: u64 = 0x6c6f_636b_7374_6570;
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
        to.u64(MAGIC);
        to.size(self.rank);
        to.size(self.ranks);
        to.text(&self.build);
        write_member(&mut to, &self.member, self.listens);
        self.offers.write(&mut to);
        to.0
    }

    fn read(body: &[u8]) -> Option<Self> {
        let mut from = Reader(body);
        if from.u64()? != MAGIC {
            return None;
        }
        let (rank, ranks, build) = (from.size()?, from.size()?, from.text()?.to_owned());
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
    let member = Member { host: from.text()?.to_owned(), pid: from.u32()?, cores: from.size()? };
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
            if listens.ip().is_loopback() {
                listens.set_ip(first);
            }
            members.push((member, listens));
        }
        Some(Self { token, over, members })
    }
}

/// Finds the other processes of a run and gives the communicator of this one.
pub fn join(start: &Start) -> Result<ProcessCommunicator, JoinError> {
    let refused = |e: std::io::Error| JoinError::Listen {
        address: start.address.clone(),
        cause: e.to_string(),
        in_use: e.kind() == ErrorKind::AddrInUse,
    };
    match start.rank {
        0 => host_at(start, TcpListener::bind(&start.address).map_err(refused)?),
        _ => joined(start, visit(start, deadline_of(start))?),
    }
}

/// As [`join`], for the first rank, which listens already.
pub fn host_at(start: &Start, door: TcpListener) -> Result<ProcessCommunicator, JoinError> {
    joined(start, meet(start, door, deadline_of(start))?)
}

fn deadline_of(start: &Start) -> Instant {
    Instant::now() + start.timeout
}

/// What follows the rendezvous.
fn joined(start: &Start, met: Met) -> Result<ProcessCommunicator, JoinError> {
    let Met { roster, links, listener, gate } = met;
    let rank = start.rank;
    let system = |cause: std::io::Error| JoinError::System { rank, cause: cause.to_string() };
    let peers = Arc::new(match rank {
        0 => Peers::new(start.ranks, start.timeout),
        _ => Peers::unwatched(start.ranks),
    });
    let (members, addresses): (Vec<Member>, Vec<SocketAddr>) = roster.members.into_iter().unzip();
    let inbox = Arc::new(Inbox::new(peers, members.iter().map(|m| m.host.clone()).collect()));
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
                deadline: deadline_of(start).max(Instant::now() + HELLO_WITHIN),
            };
            Sockets::connect(&mesh, &listener, &inbox).map(|sockets| Box::new(sockets) as Box<dyn Transport>)
        }
    };
    match transport {
        Ok(transport) => Ok(ProcessCommunicator::new(rank, inbox, (transport, over), control, members, gate)),
        Err(_) if inbox.peers.failure().is_some() => {
            let text = inbox.peers.failure().map_or_else(String::new, ToString::to_string);
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
    /// What tells latecomers that all have come.
    gate: Option<Arc<AtomicBool>>,
}

fn myself() -> Member {
    Member { host: host(), pid: std::process::id(), cores: crate::cpu::cores() }
}

/// A listener for other ranks, at the address by which this rank is known.
fn listen(ip: IpAddr, rank: usize) -> Result<(TcpListener, SocketAddr), JoinError> {
    let system = |cause: std::io::Error| JoinError::System { rank, cause: cause.to_string() };
    let any: IpAddr = match ip {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let listener = TcpListener::bind((if ip.is_loopback() { ip } else { any }, 0)).map_err(system)?;
    let port = listener.local_addr().map_err(system)?.port();
    Ok((listener, SocketAddr::new(ip, port)))
}

/// The part of a rank that is not the first.
fn visit(start: &Start, deadline: Instant) -> Result<Met, JoinError> {
    let Start { rank, ranks, address, timeout, build, .. } = start;
    let no_answer =
        |cause: String| JoinError::NoAnswer { rank: *rank, address: address.clone(), cause, within: *timeout };
    let connect = || -> std::io::Result<TcpStream> {
        let mut last = std::io::Error::new(ErrorKind::NotFound, "the name has no address");
        for at in address.to_socket_addrs()? {
            let left = deadline.saturating_duration_since(Instant::now()).max(LOOK_EVERY);
            match TcpStream::connect_timeout(&at, left) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    let stream = loop {
        match connect() {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > deadline => return Err(no_answer(error.to_string())),
            // It may start later than this one.
            Err(_) => std::thread::sleep(LOOK_EVERY),
        }
    };
    let gone = |e: std::io::Error| {
        no_answer(match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => "it answers nothing".to_owned(),
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => "it has ended".to_owned(),
            _ => e.to_string(),
        })
    };
    tune(&stream).map_err(gone)?;
    let (ours, theirs) = (stream.local_addr().map_err(gone)?.ip(), stream.peer_addr().map_err(gone)?.ip());
    let (listener, listens) = listen(ours, *rank)?;
    let hello = Hello {
        rank: *rank,
        ranks: *ranks,
        build: build.clone(),
        member: myself(),
        listens,
        offers: Over::offered(start),
    };
    write_note(&stream, HELLO, &hello.write()).map_err(gone)?;
    // The first rank is the one that names those who are missing.
    stream.set_read_timeout(Some(*timeout + HELLO_WITHIN)).map_err(gone)?;
    let (kind, body) = read_note(&stream).map_err(gone)?;
    stream.set_read_timeout(None).map_err(gone)?;
    match kind {
        ROSTER => {}
        REFUSAL => return Err(JoinError::Refused(String::from_utf8_lossy(&body).into_owned())),
        _ => return Err(no_answer("it speaks another language".to_owned())),
    }
    let roster = Roster::read(&body, theirs).filter(|roster| roster.members.len() == *ranks);
    let roster = roster.ok_or_else(|| no_answer("it speaks another language".to_owned()))?;
    let mut links: Vec<_> = (0..*ranks).map(|_| None).collect();
    links[0] = Some(stream);
    Ok(Met { roster, links, listener, gate: None })
}

/// The part of the first rank, which has the door that others come to.
fn meet(start: &Start, door: TcpListener, deadline: Instant) -> Result<Met, JoinError> {
    let Start { ranks, timeout, .. } = start;
    let system = |cause: std::io::Error| JoinError::System { rank: 0, cause: cause.to_string() };
    let ip = door.local_addr().map_err(system)?.ip();
    let (listener, listens) = listen(ip, 0)?;
    door.set_nonblocking(true).map_err(system)?;
    let first = myself();
    let mut members: Vec<Option<(Member, SocketAddr)>> = vec![None; *ranks];
    members[0] = Some((first.clone(), listens));
    let mut links: Vec<Option<TcpStream>> = (0..*ranks).map(|_| None).collect();
    let mut offers = vec![Over::offered(start); *ranks];
    let (sender, hellos) = mpsc::channel();
    let verdict = loop {
        if members.iter().all(Option::is_some) {
            break Ok(());
        }
        if Instant::now() > deadline {
            let missing = (0..*ranks).filter(|&rank| members[rank].is_none()).collect();
            break Err((JoinError::Missing { missing, ranks: *ranks, within: *timeout }, None));
        }
        while let Ok((stream, _)) = door.accept() {
            let sender = sender.clone();
            // One that says nothing holds up nobody. Where there is no thread for it, it will be missed.
            let _ = std::thread::Builder::new().name("lockstep-hello".into()).spawn(move || {
                if let Some(hello) = heard(&stream) {
                    let _ = sender.send((hello, stream));
                }
            });
        }
        let Ok((hello, stream)) = hellos.recv_timeout(Duration::from_millis(1)) else { continue };
        match check(start, &first, &hello, &members) {
            Ok(()) => {
                members[hello.rank] = Some((hello.member, hello.listens));
                links[hello.rank] = Some(stream);
                offers[hello.rank] = hello.offers;
            }
            Err(error) => break Err((error, Some(stream))),
        }
    };
    if let Err((error, stream)) = verdict {
        let text = error.to_string();
        for link in links.iter().flatten().chain(&stream) {
            let _ = write_note(link, REFUSAL, text.as_bytes());
        }
        return Err(error);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let token = counter::bits(now, u64::from(std::process::id()));
    let members: Vec<_> = members.into_iter().flatten().collect();
    let over = Over::agreed(&members.iter().map(|(member, _)| member).zip(&offers).collect::<Vec<_>>());
    let roster = Roster { token, over, members };
    let text = roster.write();
    for link in links.iter().flatten() {
        // One that is gone already is missed as soon as the failure channel is open.
        let _ = write_note(link, ROSTER, &text);
    }
    let gate = Arc::new(AtomicBool::new(false));
    let (closed, known, start) = (gate.clone(), roster.members.clone(), start.clone());
    let late = move || refuse_latecomers(&door, &start, &known, &closed);
    let thread = std::thread::Builder::new().name("lockstep-latecomers".into()).spawn(late);
    thread.map_err(|e| JoinError::System { rank: 0, cause: e.to_string() })?;
    Ok(Met { roster, links, listener, gate: Some(gate) })
}

/// What a process that has connected says of itself.
fn heard(stream: &TcpStream) -> Option<Hello> {
    stream.set_nonblocking(false).ok()?;
    tune(stream).ok()?;
    stream.set_read_timeout(Some(HELLO_WITHIN)).ok()?;
    let (kind, body) = read_note(stream).ok()?;
    stream.set_read_timeout(None).ok()?;
    Hello::read(&body).filter(|_| kind == HELLO)
}

/// Whether the first rank can take a process.
fn check(
    start: &Start,
    first: &Member,
    hello: &Hello,
    members: &[Option<(Member, SocketAddr)>],
) -> Result<(), JoinError> {
    let Hello { rank, ranks, build, member, .. } = hello;
    if *ranks != start.ranks || *rank >= start.ranks {
        return Err(JoinError::OtherSize { member: member.clone(), rank: *rank, theirs: *ranks, ours: start.ranks });
    }
    if let Some((before, _)) = &members[*rank] {
        return Err(JoinError::Twice { rank: *rank, first: before.clone(), second: member.clone() });
    }
    if *build != start.build {
        let (first, host) = (first.host.clone(), member.host.clone());
        let (ours, theirs) = (start.build.clone(), build.clone());
        return Err(JoinError::OtherBuild { first, rank: *rank, host, ours, theirs });
    }
    Ok(())
}

/// Tells whoever comes when all are there that it is one too many.
fn refuse_latecomers(door: &TcpListener, start: &Start, members: &[(Member, SocketAddr)], closed: &AtomicBool) {
    let known: Vec<_> = members.iter().cloned().map(Some).collect();
    while !closed.load(Ordering::Acquire) {
        if let Ok((stream, _)) = door.accept()
            && let Some(hello) = heard(&stream)
            && let Err(error) = check(start, &members[0].0, &hello, &known)
        {
            let _ = write_note(&stream, REFUSAL, error.to_string().as_bytes());
            continue;
        }
        std::thread::sleep(LOOK_EVERY);
    }
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
