//! What ranks know of each other: where each is, who waits for whom, and what ended the run.
//!
//! Ranks that are threads share one [`Peers`]. A process has one of its own and hears of the others: the first rank's of all, so
//! that it can tell who stalls; the others' of who has left.

use super::{CommError, ProgramPlace};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, lock, spins, yield_now};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Looks at a gate before a waiting thread starts to yield, and before it goes to sleep: there may be more ranks than cores.
const SPINS: usize = spins(100);
const LOOKS: usize = SPINS + spins(16);
/// How long a sleeping thread goes without looking for failures.
const SLICE: Duration = Duration::from_millis(20);

/// State under a lock that other threads wait to see changed.
pub struct Gate<T> {
    state: Mutex<T>,
    changed: Condvar,
    /// Counts changes, for those that spin. Written under the lock.
    version: AtomicU32,
    /// Threads that sleep. Written under the lock.
    sleepers: AtomicUsize,
}

impl<T> Gate<T> {
    pub fn new(state: T) -> Self {
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            version: AtomicU32::new(0),
            sleepers: AtomicUsize::new(0),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        lock(&self.state)
    }

    /// Tells those who wait that the state has changed; the caller holds the lock.
    pub fn announce(&self) {
        self.version.fetch_add(1, Ordering::Release);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            self.changed.notify_all();
        }
    }

    /// Whether a thread sleeps until the state changes.
    pub fn awaited(&self) -> bool {
        self.sleepers.load(Ordering::Relaxed) > 0
    }

    /// Gives the lock away until the state changes, for a bounded time.
    pub fn sleep<'g>(&self, guard: MutexGuard<'g, T>) -> MutexGuard<'g, T> {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        let (guard, _) = self.changed.wait_timeout(guard, SLICE).unwrap_or_else(|poisoned| poisoned.into_inner());
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        guard
    }
}

/// One rank, as the others see it.
struct Life {
    /// When it, or a rank that it waits for, last gave a sign of life: nanoseconds since the start. Taking the latest along
    /// chains of waiting ranks keeps a rank alive that waits for a busy one, and lets a circle of waiting ranks die.
    alive: AtomicU64,
    left: AtomicBool,
    whereabouts: Mutex<Whereabouts>,
}

struct Whereabouts {
    place: Option<ProgramPlace>,
    /// When it came there.
    since: u64,
    waits: Option<Waiting>,
}

/// A rank that waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Waiting {
    /// The rank that it waits for.
    pub other: usize,
    /// Where it waits.
    pub place: ProgramPlace,
    /// Since when: nanoseconds since the start.
    pub since: u64,
}

/// What a rank that is a process tells of itself. Times are nanoseconds before the telling.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pulse {
    pub alive: u64,
    pub place: Option<ProgramPlace>,
    pub since: u64,
    pub waits: Option<Waiting>,
}

/// Settles what ended a run of processes, of which several may notice something.
type Judge = Box<dyn Fn(CommError) -> CommError + Send + Sync>;

/// Hears what ended a run.
type Witness = Box<dyn Fn(&CommError) + Send + Sync>;

/// The ranks of one run.
pub struct Peers {
    /// Tells these ranks from others of the process.
    id: u64,
    start: Instant,
    /// None where another process looks for ranks that stall.
    timeout: Option<Duration>,
    lives: Vec<Life>,
    failure: OnceLock<CommError>,
    /// None where ranks are threads: the first error stays.
    judge: OnceLock<Judge>,
    /// Hears of the failure once, before anybody who waits does.
    witness: OnceLock<Witness>,
    heard: AtomicBool,
}

thread_local! {
    /// Run, rank and place that this thread last spoke for. A rank has several threads; this one's place is what counts
    /// when it fails.
    static HERE: Cell<Option<(u64, usize, ProgramPlace)>> = const { Cell::new(None) };
}

thread_local! {
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// How long this thread has waited for other ranks, in all.
pub fn waited() -> Duration {
    WAITED.get()
}

/// Counts the time since `began` as waited, if this thread had to wait.
pub fn has_waited(began: Option<Instant>) {
    if let Some(began) = began {
        WAITED.set(WAITED.get() + began.elapsed());
    }
}

impl Peers {
    /// Ranks that are threads, or as one of several processes knows them; all but the first leave it to that one to look for those
    /// that stall, and have no timeout.
    pub fn new(ranks: usize, timeout: Option<Duration>) -> Self {
        static RUNS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let life = |_| Life {
            alive: AtomicU64::new(0),
            left: AtomicBool::new(false),
            whereabouts: Mutex::new(Whereabouts { place: None, since: 0, waits: None }),
        };
        Self {
            id: RUNS.fetch_add(1, Ordering::Relaxed),
            start: Instant::now(),
            timeout,
            lives: (0..ranks).map(life).collect(),
            failure: OnceLock::new(),
            judge: OnceLock::new(),
            witness: OnceLock::new(),
            heard: AtomicBool::new(false),
        }
    }

    /// Lets `judge` settle what ended the run. It may wait for the verdict of another process.
    pub fn judged_by(&self, judge: impl Fn(CommError) -> CommError + Send + Sync + 'static) {
        // There is one per run.
        let _ = self.judge.set(Box::new(judge));
    }

    /// Calls `witness` with what ends the run; at once if it has ended.
    pub fn on_end(&self, witness: impl Fn(&CommError) + Send + Sync + 'static) {
        // There is one per run.
        let _ = self.witness.set(Box::new(witness));
        if let Some(error) = self.failure() {
            self.tell(error);
        }
    }

    fn tell(&self, error: &CommError) {
        if let Some(witness) = self.witness.get()
            && !self.heard.swap(true, Ordering::AcqRel)
        {
            witness(error);
        }
    }

    pub fn ranks(&self) -> usize {
        self.lives.len()
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// A sign of life of a rank.
    pub fn alive(&self, rank: usize) {
        self.lives[rank].alive.fetch_max(self.now(), Ordering::Relaxed);
    }

    /// A rank says where it is.
    pub fn at(&self, rank: usize, place: ProgramPlace) {
        HERE.set(Some((self.id, rank, place)));
        let now = self.now();
        let life = &self.lives[rank];
        life.alive.fetch_max(now, Ordering::Relaxed);
        let mut whereabouts = lock(&life.whereabouts);
        (whereabouts.place, whereabouts.since) = (Some(place), now);
        // Another of its threads that waits says so again.
        whereabouts.waits = None;
    }

    /// A rank says whom it waits for and where, if it does: its device waits, which no [`wait`](Self::wait) sees.
    pub fn awaits(&self, rank: usize, waits: Option<(usize, ProgramPlace)>) {
        let now = self.now();
        let mut whereabouts = lock(&self.lives[rank].whereabouts);
        let before = whereabouts.waits;
        // The host may have been ahead of it.
        if let Some((_, place)) = waits.filter(|(_, place)| whereabouts.place != Some(*place)) {
            (whereabouts.place, whereabouts.since) = (Some(place), now);
        }
        whereabouts.waits = waits.map(|(other, place)| {
            before.filter(|w| (w.other, w.place) == (other, place)).unwrap_or(Waiting { other, place, since: now })
        });
    }

    /// A rank ends its program.
    pub fn leave(&self, rank: usize) {
        self.lives[rank].left.store(true, Ordering::Release);
    }

    pub fn has_left(&self, rank: usize) -> bool {
        self.lives[rank].left.load(Ordering::Acquire)
    }

    pub fn failure(&self) -> Option<&CommError> {
        self.failure.get()
    }

    /// Ends the run; the first error stays.
    pub fn end(&self, error: CommError) -> CommError {
        let error = self.failure.get_or_init(|| match self.judge.get() {
            Some(judge) => judge(error),
            None => error,
        });
        self.tell(error);
        error.clone()
    }

    /// Ends the run with what another process has settled.
    pub fn conclude(&self, error: CommError) {
        // Where this process has ended it, that waited for the same verdict.
        if self.failure.set(error).is_ok()
            && let Some(error) = self.failure()
        {
            self.tell(error);
        }
    }

    /// Every call of a rank starts here.
    pub fn begin(&self, rank: usize, place: ProgramPlace) -> Result<(), CommError> {
        if let Some(error) = self.failure() {
            return Err(error.clone());
        }
        if self.has_left(rank) {
            return Err(self.refuse(rank, place, "this rank has ended its program"));
        }
        self.alive(rank);
        Ok(())
    }

    /// Ends the run because a rank asks for what cannot be done.
    pub fn refuse(&self, rank: usize, place: ProgramPlace, reason: impl Into<String>) -> CommError {
        self.end(CommError::Refused { rank, place, reason: reason.into() })
    }

    /// Where a rank was when it was last heard of.
    pub fn place(&self, rank: usize) -> Option<ProgramPlace> {
        lock(&self.lives[rank].whereabouts).place
    }

    /// What a rank tells of itself.
    pub fn pulse(&self, rank: usize) -> Pulse {
        let (now, life) = (self.now(), &self.lives[rank]);
        let whereabouts = lock(&life.whereabouts);
        let ago = |then: u64| now.saturating_sub(then);
        let waits = whereabouts.waits.map(|w| Waiting { since: ago(w.since), ..w });
        let alive = ago(life.alive.load(Ordering::Relaxed));
        Pulse { alive, place: whereabouts.place, since: ago(whereabouts.since), waits }
    }

    /// What another process tells of its rank.
    pub fn hear(&self, rank: usize, pulse: Pulse) {
        let (now, life) = (self.now(), &self.lives[rank]);
        let then = |ago: u64| now.saturating_sub(ago);
        life.alive.fetch_max(then(pulse.alive), Ordering::Relaxed);
        let mut whereabouts = lock(&life.whereabouts);
        (whereabouts.place, whereabouts.since) = (pulse.place, then(pulse.since));
        whereabouts.waits = pulse.waits.map(|w| Waiting { since: then(w.since), ..w });
    }

    /// Looks whether a rank waits for one that shows no sign of life, on behalf of ranks that are other processes.
    pub fn watch(&self) -> Result<(), CommError> {
        let Some(timeout) = self.timeout else { return Ok(()) };
        let waits = |rank: usize| lock(&self.lives[rank].whereabouts).waits.filter(|w| w.other < self.ranks());
        let alive = |rank: usize| self.lives[rank].alive.load(Ordering::Relaxed);
        // Whoever waits is as alive as the one that it waits for, along chains of any length.
        for _ in 0..self.ranks() {
            let mut changed = false;
            for rank in 0..self.ranks() {
                if let Some(waiting) = waits(rank) {
                    let other = alive(waiting.other);
                    changed |= self.lives[rank].alive.fetch_max(other, Ordering::Relaxed) < other;
                }
            }
            if !changed {
                break;
            }
        }
        for rank in 0..self.ranks() {
            if let Some(Waiting { other, place, since }) = waits(rank)
                && self.now().saturating_sub(alive(other).max(since)) > timeout.as_nanos() as u64
            {
                return Err(self.stalled(rank, place, other));
            }
        }
        Ok(())
    }

    /// Ends the run because a rank cannot go on, and names the place of this thread if it is one of the rank's.
    pub fn fail(&self, rank: usize, host: Option<&str>, reason: &str, hint: Option<String>) {
        let here = HERE.get().filter(|&(id, who, _)| (id, who) == (self.id, rank)).map(|(_, _, place)| place);
        let place = here.or_else(|| lock(&self.lives[rank].whereabouts).place);
        let (host, hint) = (host.map(str::to_owned), hint.map(String::into_boxed_str));
        self.end(CommError::Failed { rank, host, place, reason: reason.to_owned(), hint });
    }

    /// Waits at `place` until `ready`, or with an error until the run has ended. `missing` says whether a rank is among
    /// those that `me` waits for. The lock comes back in any case.
    pub fn wait<'g, T>(
        &self,
        me: usize,
        place: ProgramPlace,
        gate: &'g Gate<T>,
        mut guard: MutexGuard<'g, T>,
        ready: impl Fn(&T) -> bool,
        missing: impl Fn(&T, usize) -> bool,
    ) -> (MutexGuard<'g, T>, Result<(), CommError>) {
        let (mut looks, mut started, mut began) = (0, None, None);
        let result = loop {
            if ready(&guard) {
                break Ok(());
            }
            began.get_or_insert_with(Instant::now);
            if let Some(error) = self.failure() {
                break Err(error.clone());
            }
            if looks < LOOKS {
                let seen = gate.version.load(Ordering::Relaxed);
                drop(guard);
                while looks < LOOKS && gate.version.load(Ordering::Acquire) == seen && self.failure().is_none() {
                    looks += 1;
                    if looks < SPINS { std::hint::spin_loop() } else { yield_now() }
                }
                guard = gate.lock();
                continue;
            }
            let started = *started.get_or_insert_with(|| self.now());
            if let Err(error) = self.look(me, place, started, |rank| missing(&guard, rank)) {
                break Err(self.end(error));
            }
            guard = gate.sleep(guard);
        };
        if started.is_some() {
            lock(&self.lives[me].whereabouts).waits = None;
        }
        has_waited(began);
        (guard, result)
    }

    /// Whether there is hope in waiting on.
    fn look(
        &self,
        me: usize,
        place: ProgramPlace,
        started: u64,
        missing: impl Fn(usize) -> bool,
    ) -> Result<(), CommError> {
        let awaited = || (0..self.ranks()).filter(|&rank| missing(rank));
        if let Some(other) = awaited().find(|&rank| self.has_left(rank)) {
            return Err(CommError::Left { rank: me, place, other });
        }
        let alive = |rank: usize| self.lives[rank].alive.load(Ordering::Relaxed);
        let Some(other) = awaited().min_by_key(|&rank| alive(rank)) else { return Ok(()) };
        self.lives[me].alive.fetch_max(alive(other), Ordering::Relaxed);
        lock(&self.lives[me].whereabouts).waits = Some(Waiting { other, place, since: started });
        match self.timeout {
            Some(timeout) if self.now().saturating_sub(alive(other).max(started)) > timeout.as_nanos() as u64 => {
                Err(self.stalled(me, place, other))
            }
            _ => Ok(()),
        }
    }

    /// The error for a rank that `me` has waited for in vain: names the last of a chain of waiting ranks.
    fn stalled(&self, me: usize, place: ProgramPlace, other: usize) -> CommError {
        let waits = |rank: usize| lock(&self.lives[rank].whereabouts).waits;
        let mut pair = (me, place, other);
        let mut circle = true;
        for _ in 0..self.ranks() {
            let Some(next) = waits(pair.2) else {
                circle = false;
                break;
            };
            pair = (pair.2, next.place, next.other);
        }
        let (rank, place, other) = if circle { (me, place, other) } else { pair };
        let whereabouts = lock(&self.lives[other].whereabouts);
        CommError::Stalled {
            rank,
            place,
            other,
            other_place: whereabouts.waits.map(|w| w.place).or(whereabouts.place),
            seconds: self.now().saturating_sub(whereabouts.since) as f32 * 1e-9,
            other_waits_for: whereabouts.waits.map(|w| w.other),
        }
    }
}
