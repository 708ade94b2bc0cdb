//! What bytes go over: MPI where all processes have the same library and it started them, TCP otherwise.
//!
//! Every process says what it has when it comes to the rendezvous. The first decides; where it is MPI, all start it, say whether that
//! went well, and hear what it is in the end.

use super::inbox::Inbox;
use super::mpi::{self, Mpi};
use super::start::{JoinError, Member, REFUSAL, Start};
use super::wire::{read, read_note, write_note};
use lockstep_ir::Hint;
use serde::{Deserialize, Serialize};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What bytes between processes go over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Over {
    /// Connections of our own; with why it is not MPI, where that was asked for.
    Tcp(Option<String>),
    /// This MPI library.
    Mpi(String),
}

/// Kinds of notes.
const READY: u8 = 23;
const CHOSEN: u8 = 24;

impl Over {
    /// What a process has.
    pub(super) fn offered(start: &Start) -> Self {
        match start.mpi.as_ref().map(mpi::found) {
            None => Over::Tcp(None),
            Some(Ok(name)) => Over::Mpi(name),
            Some(Err(why)) => Over::Tcp(Some(why)),
        }
    }

    /// What it is to be, by what all processes have.
    pub(super) fn agreed(offers: &[(&Member, &Over)]) -> Self {
        let [(_, first), ..] = offers else { return Over::Tcp(None) };
        let Some(rank) = offers.iter().position(|(_, offer)| offer != first) else { return (*first).clone() };
        let text = |rank: usize| match offers[rank] {
            (member, Over::Mpi(name)) => format!("rank {rank} on host {} has {name}", member.host),
            (member, Over::Tcp(Some(why))) => format!("rank {rank} on host {} has no MPI ({why})", member.host),
            (member, Over::Tcp(None)) => format!("rank {rank} on host {} was not started by MPI", member.host),
        };
        Over::Tcp(Some(format!("{}, {}", text(0), text(rank))))
    }
}

/// What there is to know of the processes when MPI is started.
pub struct MpiJoin<'a> {
    pub start: &'a Start,
    pub token: u64,
    pub members: &'a [Member],
    pub deadline: Instant,
}

/// Starts MPI on all ranks, and gives it if all could; otherwise why not.
pub fn start_mpi(
    join: &MpiJoin<'_>,
    links: &[Option<TcpStream>],
    inbox: &Arc<Inbox>,
) -> Result<Result<Mpi, String>, JoinError> {
    let MpiJoin { start, token, members, deadline } = *join;
    let Start { rank, ranks, .. } = *start;
    let attached = match &start.mpi {
        Some(library) => Mpi::attach(library, rank, ranks, token, inbox, deadline),
        None => Err("it was not started by MPI".to_owned()),
    };
    let failed = |rank: usize, why: &str| format!("rank {rank} on host {}: {why}", members[rank].host);
    let left = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
    let lost = |rank: usize, e: &std::io::Error| JoinError::MpiStart { failed: failed(rank, &e.to_string()) };
    if rank == 0 {
        let mut why = attached.as_ref().err().map(|why| failed(0, why));
        for (other, link) in links.iter().enumerate() {
            let Some(link) = link else { continue };
            let note = link.set_read_timeout(Some(left())).and_then(|()| read_note(link));
            match note {
                Ok((READY, body)) => {
                    let told = read::<Option<String>>(&body).flatten();
                    why = why.or(told.map(|told| failed(other, &told)));
                }
                Ok(_) => why = why.or(Some(failed(other, "it speaks another language"))),
                Err(error) => {
                    let error = lost(other, &error);
                    links.iter().flatten().for_each(|link| {
                        // Who is gone needs no word.
                        let _ = write_note(link, REFUSAL, &error.with_hint());
                    });
                    return Err(error);
                }
            }
            // One that is gone is missed when the failure channel is open.
            let _ = link.set_read_timeout(None);
        }
        links.iter().flatten().for_each(|link| drop(write_note(link, CHOSEN, &why)));
        return Ok(match why {
            Some(why) => Err(why),
            None => attached,
        });
    }
    let Some(link) = &links[0] else { return Ok(attached) };
    let answer = || {
        write_note(link, READY, &attached.as_ref().err())?;
        link.set_read_timeout(Some(left() + Duration::from_secs(5)))?;
        let note = read_note(link)?;
        link.set_read_timeout(None)?;
        Ok(note)
    };
    match answer().map_err(|e| lost(0, &e))? {
        (CHOSEN, body) => match read::<Option<String>>(&body) {
            Some(Some(why)) => Ok(Err(why)),
            Some(None) => Ok(attached),
            None => Err(JoinError::MpiStart { failed: failed(0, "it speaks another language") }),
        },
        (_, body) => Err(JoinError::Refused(read(&body).unwrap_or_default())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mpi_it_is_where_all_have_the_same() {
        let member = |host: &str| Member { host: host.into(), pid: 1, cores: 1 };
        let (a, b) = (member("a"), member("b"));
        let mpi = |name: &str| Over::Mpi(name.into());
        let check = |first: Over, second: Over, expected: Over| {
            assert_eq!(Over::agreed(&[(&a, &first), (&b, &second)]), expected);
            assert_eq!(read(&super::super::wire::written(&expected)), Some(expected));
        };
        check(mpi("MPICH 4"), mpi("MPICH 4"), mpi("MPICH 4"));
        check(Over::Tcp(None), Over::Tcp(None), Over::Tcp(None));
        let why = "rank 0 on host a has MPICH 4, rank 1 on host b has MPICH 5";
        check(mpi("MPICH 4"), mpi("MPICH 5"), Over::Tcp(Some(why.into())));
        let why = "rank 0 on host a has no MPI (not there), rank 1 on host b has MPICH 5";
        check(Over::Tcp(Some("not there".into())), mpi("MPICH 5"), Over::Tcp(Some(why.into())));
    }
}
