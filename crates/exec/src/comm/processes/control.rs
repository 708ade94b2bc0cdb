//! The failure channel: every rank has a connection to the first, on which both tell that they live, and on which it is settled
//! what ended the run.
//!
//! Several ranks may notice that something is wrong, each another part of it. They tell the first rank, and what it hears first is
//! the verdict for all. Where the first rank is the one that is gone, the others see that for themselves.

use super::inbox::Inbox;
use super::sockets::{CLOSED, CUT_AFTER, ENDED, ended};
use super::wire::{read, read_note, write_note};
use crate::comm::CommError;
use crate::sync::std_lock as lock;
use lockstep_ir::units;
use serde::Serialize;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often ranks tell that they live.
const BEAT_EVERY: Duration = Duration::from_millis(500);
/// How long a rank waits for the verdict of the first.
const VERDICT_WITHIN: Duration = Duration::from_secs(2);

/// A rank that lives is heard of within this time.
const HEARD_WITHIN: Duration = Duration::from_millis(1200);

/// Kinds of notes.
const BEAT: u8 = 10;
const PROPOSAL: u8 = 11;
const VERDICT: u8 = 12;
const BYE: u8 = 13;

/// One rank's end of the failure channel.
pub struct Control {
    rank: usize,
    inbox: Arc<Inbox>,
    start: Instant,
    /// By rank: those of all others on the first rank, that of the first on the others.
    links: Vec<Option<Link>>,
    verdict: Mutex<Option<CommError>>,
    changed: Condvar,
    closed: AtomicBool,
    /// A process of which nothing is heard for so long is gone.
    silence: Duration,
    /// How often this rank tells that it lives.
    beat: Duration,
}

struct Link {
    stream: Mutex<TcpStream>,
    /// When something was last heard: milliseconds since the start.
    heard: AtomicU64,
    /// The other end has said goodbye, or is gone.
    ended: AtomicBool,
}

/// The error for a rank whose process has ended, where only one of its two connections has.
fn closed(error: CommError) -> CommError {
    match error {
        CommError::Lost { rank, host, place, reason, seen } if reason.starts_with(ENDED) => {
            CommError::Lost { rank, host, place, reason: CLOSED.to_owned(), seen }
        }
        error => error,
    }
}

/// Waits for a condition, for so long at most. Says whether it came.
fn waits_for(limit: Duration, condition: impl Fn() -> bool) -> bool {
    let until = Instant::now() + limit;
    while !condition() {
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

impl Control {
    /// Opens the channel over connections that the rendezvous has made. A rank that shows no sign of life for `timeout` ends the
    /// run.
    pub fn start(
        rank: usize,
        links: Vec<Option<TcpStream>>,
        inbox: &Arc<Inbox>,
        timeout: Duration,
    ) -> std::io::Result<Arc<Self>> {
        let link = |stream: TcpStream| Link {
            stream: Mutex::new(stream),
            heard: AtomicU64::new(0),
            ended: AtomicBool::new(false),
        };
        let readers: Vec<_> =
            links.iter().enumerate().filter_map(|(rank, s)| Some((rank, s.as_ref()?.try_clone()))).collect();
        let control = Arc::new(Self {
            rank,
            inbox: inbox.clone(),
            start: Instant::now(),
            links: links.into_iter().map(|stream| stream.map(link)).collect(),
            verdict: Mutex::new(None),
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
            silence: CUT_AFTER.min(timeout),
            // Often enough that where a rank is, and whether it waits, is known in time.
            beat: BEAT_EVERY.min(timeout / 8),
        });
        let weak = Arc::downgrade(&control);
        inbox.peers.judged_by(move |error| match weak.upgrade() {
            Some(control) => control.settle(error),
            None => error,
        });
        for (other, stream) in readers {
            let (control, stream) = (control.clone(), stream?);
            let thread = std::thread::Builder::new().name(format!("lockstep-hears-{other}"));
            thread.spawn(move || control.listen(other, &stream))?;
        }
        let beats = control.clone();
        std::thread::Builder::new().name("lockstep-beats".into()).spawn(move || beats.beat())?;
        Ok(control)
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// Sends a note to a rank that is there. Where that fails, whoever reads from it finds out.
    fn tell(&self, link: &Link, kind: u8, body: &impl Serialize) {
        if !link.ended.load(Ordering::Acquire) {
            let _ = write_note(&*lock(&link.stream), kind, body);
        }
    }

    /// What ended the run, as all will know it.
    fn settle(&self, error: CommError) -> CommError {
        if let Some(verdict) = &*lock(&self.verdict) {
            return verdict.clone();
        }
        let error = self.examined(error);
        let mut verdict = lock(&self.verdict);
        if let Some(verdict) = &*verdict {
            return verdict.clone();
        }
        if self.rank == 0 {
            *verdict = Some(error.clone());
            drop(verdict);
            self.links.iter().flatten().for_each(|link| self.tell(link, VERDICT, &error));
            return error;
        }
        let Some(link) = self.links[0].as_ref() else { return error };
        self.tell(link, PROPOSAL, &error);
        let until = Instant::now() + VERDICT_WITHIN;
        while verdict.is_none() && !link.ended.load(Ordering::Acquire) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            verdict = self.changed.wait_timeout(verdict, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let both = link.ended.load(Ordering::Acquire);
        verdict.get_or_insert_with(|| if both { error } else { closed(error) }).clone()
    }

    /// Reads what a rank tells until it tells no more.
    fn listen(&self, other: usize, stream: &TcpStream) {
        let Some(link) = &self.links[other] else { return };
        let peers = &self.inbox.peers;
        loop {
            let note = read_note(stream);
            link.heard.store(self.now(), Ordering::Relaxed);
            match note {
                Ok((BEAT, body)) => {
                    if let Some(pulse) = read(&body) {
                        peers.hear(other, pulse);
                    }
                }
                Ok((PROPOSAL, body)) if self.rank == 0 => {
                    if let Some(error) = read(&body) {
                        peers.end(self.inbox.completed(self.judged(other, error)));
                    }
                }
                Ok((VERDICT, body)) if other == 0 => {
                    if let Some(error) = read(&body) {
                        let settled = lock(&self.verdict).get_or_insert(error).clone();
                        self.changed.notify_all();
                        peers.conclude(settled);
                    }
                }
                Ok((BYE, _)) => {
                    link.ended.store(true, Ordering::Release);
                    return;
                }
                Ok(_) => {}
                Err(error) => {
                    link.ended.store(true, Ordering::Release);
                    self.changed.notify_all();
                    self.inbox.cut(other, ended(&error));
                    return;
                }
            }
        }
    }

    /// What this rank has noticed, as far as it can know it.
    fn examined(&self, error: CommError) -> CommError {
        let link = |rank: usize| self.links.get(rank).and_then(Option::as_ref);
        match error {
            // A process that ends closes both of its connections.
            CommError::Lost { rank, ref reason, .. }
                if reason.starts_with(ENDED) && link(rank).is_some_and(|link| link.ended.load(Ordering::Acquire)) =>
            {
                let both = waits_for(HEARD_WITHIN, || !self.inbox.is_connected(rank));
                if both { error } else { closed(error) }
            }
            // Their connection for frames is what this one has lost.
            CommError::Lost { rank, .. } if self.rank == 0 && rank != 0 && !self.inbox.is_connected(rank) => {
                self.judged(0, error)
            }
            CommError::Stalled { other, .. } => match link(other) {
                Some(link) if self.is_silent(link) => self.silent(other),
                _ => error,
            },
            error => error,
        }
    }

    /// Whether nothing more is heard of a rank. Where some notes in a row have not come, waits until one does or it is certain.
    fn is_silent(&self, link: &Link) -> bool {
        let (missed, limit) = (3 * self.beat.as_millis() as u64, self.silence.as_millis() as u64);
        let silent = || self.now().saturating_sub(link.heard.load(Ordering::Relaxed));
        while (missed..=limit).contains(&silent()) {
            std::thread::sleep(Duration::from_millis(5));
        }
        silent() > limit
    }

    /// The error for a rank of which nothing is heard.
    fn silent(&self, rank: usize) -> CommError {
        let seconds = units::seconds(self.silence.as_secs_f64());
        self.inbox.lost(rank, format!("nothing was heard of its process for {seconds}"))
    }

    /// What a rank proposes, as the first rank knows it: one that another has lost and this one hears is not gone.
    fn judged(&self, by: usize, error: CommError) -> CommError {
        let CommError::Lost { rank, host, reason, .. } = &error else { return error };
        let heard = match self.links.get(*rank).and_then(Option::as_ref) {
            Some(link) => {
                let since = self.now();
                let ended = waits_for(HEARD_WITHIN, || link.ended.load(Ordering::Acquire));
                !ended && link.heard.load(Ordering::Relaxed) >= since
            }
            // This one itself.
            None => *rank == self.rank,
        };
        if !heard {
            return error;
        }
        let reason = if reason.starts_with(ENDED) { "their connection was closed" } else { reason.as_str() };
        let hosts = Box::new([self.inbox.host(by).to_owned(), host.clone()]);
        CommError::Cut { ranks: (by, *rank), hosts, reason: reason.to_owned() }
    }

    /// Tells that this rank lives, and looks who does not.
    fn beat(&self) {
        let peers = &self.inbox.peers;
        while !self.closed.load(Ordering::Acquire) {
            let pulse = peers.pulse(self.rank);
            for (other, link) in self.links.iter().enumerate() {
                let Some(link) = link else { continue };
                self.tell(link, BEAT, &pulse);
                let silent = self.now().saturating_sub(link.heard.load(Ordering::Relaxed));
                if silent > self.silence.as_millis() as u64 && !link.ended.swap(true, Ordering::AcqRel) {
                    self.changed.notify_all();
                    if !peers.has_left(other) {
                        peers.end(self.silent(other));
                    }
                }
            }
            if peers.failure().is_none()
                && let Err(error) = peers.watch()
            {
                peers.end(error);
            }
            let guard = lock(&self.verdict);
            // A signal that comes while this thread is busy is seen above.
            drop(self.changed.wait_timeout(guard, self.beat));
        }
    }

    /// Closes the connections without a word.
    #[cfg(test)]
    pub fn cut(&self) {
        self.closed.store(true, Ordering::Release);
        // All at once, as where a process is killed: it tells nobody that it has lost the others.
        self.links.iter().flatten().for_each(|link| link.ended.store(true, Ordering::Release));
        for link in self.links.iter().flatten() {
            let _ = lock(&link.stream).shutdown(Shutdown::Both);
        }
    }

    /// Says goodbye: from now on nobody misses this rank.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.changed.notify_all();
        for link in self.links.iter().flatten() {
            // One that has said goodbye waits for ours as well; who is gone needs none.
            let stream = lock(&link.stream);
            let _ = write_note(&*stream, BYE, &());
            let _ = stream.shutdown(Shutdown::Write);
        }
    }
}
