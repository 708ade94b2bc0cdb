//! The other ranks' side of the rendezvous: each looks for the first, says who it is and is told of the others.

use super::{
    HELLO, HELLO_WITHIN, Hello, JoinError, LOOK_EVERY, Met, REFUSAL, ROSTER, Roster, Start, listen, myself, no_secret,
};
use crate::comm::processes::board::{Board, Posted};
use crate::comm::processes::over::Over;
use crate::comm::processes::secret::JobSecret;
use crate::comm::processes::sockets::tune;
use crate::comm::processes::wire::{read, read_note, write_note};
use std::io::ErrorKind;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How another rank looks for the first.
pub(super) struct Search<'a> {
    start: &'a Start,
    /// What stood on the board when it began to look.
    before: Option<Posted>,
}

/// Why a rank has not found the first yet.
pub(super) enum NotFound {
    /// It may come.
    Yet(String),
    /// It has ended.
    Never(JoinError),
}

impl<'a> Search<'a> {
    pub(super) fn new(start: &'a Start) -> Self {
        let before = start.board.as_ref().and_then(|board| board.read().ok().flatten());
        Self { start, before }
    }

    /// Looks once: a connection to the first rank, and the secret.
    pub(super) fn look(&mut self, deadline: Instant) -> Result<(TcpStream, JobSecret), NotFound> {
        let Start { rank, address, secret, board, .. } = self.start;
        let yet = |cause: String| Err(NotFound::Yet(cause));
        let posted = match board.as_ref().map(Board::read) {
            Some(Ok(posted)) => posted,
            Some(Err(cause)) if secret.is_none() => return yet(cause),
            Some(Err(_)) | None => None,
        };
        let (address, secret) = match (posted, secret) {
            (Some(Posted::Failed(reason)), _) => {
                // One that was there before may be that of an earlier start.
                return match self.before.as_ref() == Some(&Posted::Failed(reason.clone())) {
                    true => yet(format!("it has ended before all had come: {reason}")),
                    false => Err(NotFound::Never(JoinError::Early { rank: 0, host: None, reason })),
                };
            }
            (Some(Posted::At { address, secret: Some(secret) }), _) => (address, secret),
            (Some(Posted::At { address, secret: None }), Some(secret)) => (address, secret.clone()),
            (_, Some(secret)) => (address.clone(), secret.clone()),
            (_, None) => {
                let Some(board) = board else {
                    return Err(NotFound::Never(no_secret(self.start, "it was given none")));
                };
                return yet(format!("rank 0 has not written {} yet", board.path.display()));
            }
        };
        let mut last = format!("{address} has no address");
        let addresses = match address.to_socket_addrs() {
            Ok(addresses) => addresses,
            Err(e) => return yet(e.to_string()),
        };
        for at in addresses {
            self.start.waiting.check(*rank).map_err(NotFound::Never)?;
            let left = deadline.saturating_duration_since(Instant::now()).clamp(LOOK_EVERY, CONNECT_WITHIN);
            match secret.connect(&at, left) {
                Ok(stream) => return Ok((stream, secret)),
                Err(error) => last = error.to_string(),
            }
        }
        yet(last)
    }
}

/// The longest that one attempt to connect takes.
const CONNECT_WITHIN: Duration = Duration::from_secs(2);

/// The part of a rank that is not the first.
pub(super) fn visit(start: &Start, deadline: Instant) -> Result<Met, JoinError> {
    let Start { rank, ranks, address, timeout, build, .. } = start;
    let no_answer =
        |cause: String| JoinError::NoAnswer { rank: *rank, address: address.clone(), cause, within: *timeout };
    let mut search = Search::new(start);
    let (stream, secret) = loop {
        start.waiting.check(*rank)?;
        match search.look(deadline) {
            Ok(found) => break found,
            Err(NotFound::Never(error)) => return Err(error),
            Err(NotFound::Yet(cause)) if Instant::now() > deadline => return Err(no_answer(cause)),
            // It may start later than this one.
            Err(NotFound::Yet(_)) => std::thread::sleep(LOOK_EVERY),
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
    write_note(&stream, HELLO, &hello).map_err(gone)?;
    // The first rank is the one that names those who are missing.
    let until = Instant::now() + *timeout + HELLO_WITHIN;
    stream.set_read_timeout(Some(LOOK_EVERY)).map_err(gone)?;
    loop {
        start.waiting.check(*rank)?;
        match stream.peek(&mut [0]) {
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) && Instant::now() < until => {}
            Err(e) => return Err(gone(e)),
            Ok(_) => break,
        }
    }
    stream.set_read_timeout(Some(HELLO_WITHIN)).map_err(gone)?;
    let (kind, body) = read_note(&stream).map_err(gone)?;
    stream.set_read_timeout(None).map_err(gone)?;
    if kind == REFUSAL {
        return Err(JoinError::Refused(read(&body).unwrap_or_default()));
    }
    let roster = read(&body).filter(|roster: &Roster| kind == ROSTER && roster.members.len() == *ranks);
    let mut roster = roster.ok_or_else(|| no_answer("it speaks another language".to_owned()))?;
    // Whoever shares the first one's host may know itself by an address that means nothing elsewhere.
    for (_, listens) in &mut roster.members {
        if listens.ip().is_loopback() || listens.ip().is_unspecified() {
            listens.set_ip(theirs);
        }
    }
    let mut links: Vec<_> = (0..*ranks).map(|_| None).collect();
    links[0] = Some(stream);
    Ok(Met { roster, links, listener, secret, gate: None })
}
