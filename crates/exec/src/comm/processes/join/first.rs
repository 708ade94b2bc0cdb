//! The first rank's side of the rendezvous: it listens, hears who comes, and tells all of them of each other.

use super::{
    ENDED, HELLO, HELLO_BYTES, HELLO_WITHIN, Hello, JoinError, LOOK_EVERY, Member, Met, REFUSAL, ROSTER, Roster, Start,
    listen, myself, no_secret, system,
};
use crate::comm::processes::board::{Notice, Posted};
use crate::comm::processes::over::Over;
use crate::comm::processes::secret::{Door, JobSecret};
use crate::comm::processes::sockets::tune;
use crate::comm::processes::wire::{read, read_note_up_to, write_note};
use lockstep_ir::{Hint, counter};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Where the first rank listens, the secret of the job, and what it has posted for the others, if that was needed.
pub(super) fn open(start: &Start) -> Result<(TcpListener, JobSecret, Option<Notice>), JoinError> {
    let refused = |e: &std::io::Error| JoinError::Listen {
        address: start.address.clone(),
        cause: e.to_string(),
        in_use: e.kind() == ErrorKind::AddrInUse,
    };
    let name = start.address.rsplit_once(':').map_or(start.address.as_str(), |(name, _)| name);
    let (listener, taken) = match TcpListener::bind(&start.address) {
        Ok(listener) => (listener, None),
        Err(e) if e.kind() == ErrorKind::AddrInUse && start.board.is_some() => {
            (TcpListener::bind((name, 0)).map_err(|_| refused(&e))?, Some(refused(&e)))
        }
        Err(e) => return Err(refused(&e)),
    };
    let secret = match &start.secret {
        Some(secret) => secret.clone(),
        None => JobSecret::random().map_err(|e| no_secret(start, format!("no random numbers: {e}")))?,
    };
    if taken.is_none() && start.secret.is_some() {
        return Ok((listener, secret, None));
    }
    let Some(board) = &start.board else { return Err(no_secret(start, "it was given none")) };
    let port = listener.local_addr().map_err(system(0))?.port();
    let posted =
        Posted::At { address: format!("{name}:{port}"), secret: start.secret.is_none().then(|| secret.clone()) };
    match board.post(&posted) {
        Ok(()) => Ok((listener, secret, Some(Notice { board: board.clone(), posted }))),
        Err(e) => Err(match (taken, &start.secret) {
            (Some(taken), Some(_)) => taken,
            _ => no_secret(start, format!("cannot write {}: {e}", board.path.display())),
        }),
    }
}

/// The part of the first rank, which has the listener that others come to.
pub(super) fn meet(
    start: &Start,
    listener: TcpListener,
    secret: JobSecret,
    deadline: Instant,
) -> Result<Met, JoinError> {
    let Start { ranks, timeout, .. } = start;
    let ip = listener.local_addr().map_err(system(0))?.ip();
    let mut door = Door::new(listener, secret.clone()).map_err(system(0))?;
    let (listener, listens) = listen(ip, 0)?;
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
        if let Err(error) = start.waiting.check(0) {
            break Err((error, None));
        }
        door.let_in().into_iter().for_each(|stream| hear(stream, &sender));
        let (hello, stream) = match hellos.recv_timeout(Duration::from_millis(1)) {
            Ok((Heard::Came(hello), stream)) => (hello, stream),
            Ok((Heard::Ended { rank, host, reason }, _)) => {
                break Err((JoinError::Early { rank, host: Some(host), reason }, None));
            }
            Err(_) => continue,
        };
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
        let text = error.with_hint();
        let refuse = |link: &TcpStream| drop(write_note(link, REFUSAL, &text));
        links.iter().flatten().chain(&stream).for_each(refuse);
        // Those who are about to come are told as well.
        let until = Instant::now() + REFUSES_FOR;
        while members.iter().any(Option::is_none) && Instant::now() < until {
            door.let_in().into_iter().for_each(|stream| hear(stream, &sender));
            hellos.recv_timeout(Duration::from_millis(1)).iter().for_each(|(_, stream)| refuse(stream));
        }
        return Err(error);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let token = counter::bits(now, u64::from(std::process::id()));
    let members: Vec<_> = members.into_iter().flatten().collect();
    let over = Over::agreed(&members.iter().map(|(member, _)| member).zip(&offers).collect::<Vec<_>>());
    let roster = Roster { token, over, members };
    for link in links.iter().flatten() {
        // One that is gone already is missed as soon as the failure channel is open.
        let _ = write_note(link, ROSTER, &roster);
    }
    let gate = Arc::new(AtomicBool::new(false));
    let (closed, known, start) = (gate.clone(), roster.members.clone(), start.clone());
    let late = move || refuse_latecomers(&mut door, &start, &known, &closed);
    let thread = std::thread::Builder::new().name("lockstep-latecomers".into()).spawn(late);
    thread.map_err(system(0))?;
    Ok(Met { roster, links, listener, secret, gate: Some(gate) })
}

/// What a process of the job says.
enum Heard {
    Came(Hello),
    Ended { rank: usize, host: String, reason: String },
}

/// How long the first rank tells who comes why it has ended.
const REFUSES_FOR: Duration = Duration::from_millis(500);

/// Hears what a process says without waiting for it. Where there is no thread for that, it will be missed.
fn hear(stream: TcpStream, to: &mpsc::Sender<(Heard, TcpStream)>) {
    let to = to.clone();
    let _ = std::thread::Builder::new().name("lockstep-hello".into()).spawn(move || {
        if let Some(heard) = heard(&stream) {
            let _ = to.send((heard, stream));
        }
    });
}

/// What a process that has proven itself says.
fn heard(stream: &TcpStream) -> Option<Heard> {
    tune(stream).ok()?;
    stream.set_read_timeout(Some(HELLO_WITHIN)).ok()?;
    let (kind, body) = read_note_up_to(stream, HELLO_BYTES).ok()?;
    stream.set_read_timeout(None).ok()?;
    match kind {
        HELLO => read(&body).map(Heard::Came),
        ENDED => read(&body).map(|(rank, host, reason)| Heard::Ended { rank, host, reason }),
        _ => None,
    }
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
fn refuse_latecomers(door: &mut Door, start: &Start, members: &[(Member, SocketAddr)], closed: &AtomicBool) {
    let known: Vec<_> = members.iter().cloned().map(Some).collect();
    while !closed.load(Ordering::Acquire) {
        for stream in door.let_in() {
            if let Some(Heard::Came(hello)) = heard(&stream)
                && let Err(error) = check(start, &members[0].0, &hello, &known)
            {
                let _ = write_note(&stream, REFUSAL, &error.with_hint());
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
