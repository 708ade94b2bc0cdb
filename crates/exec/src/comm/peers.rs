//! What the ranks of one process know of each other: where each is, who waits for whom, and what ended the run.

use super::{CommError, ProgramPlace};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, lock, spins, yield_now};
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
    /// The rank that it waits for, and where.
    waits: Option<(usize, ProgramPlace)>,
}

/// The ranks of one run.
pub struct Peers {
    /// Tells these ranks from others of the process.
    id: u64,
    start: Instant,
    timeout: Duration,
    lives: Vec<Life>,
    failure: OnceLock<CommError>,
}

thread_local! {
    /// Run, rank and place that this thread last spoke for. A rank has several threads; this one's place is what counts
    /// when it fails.
    static HERE: Cell<Option<(u64, usize, ProgramPlace)>> = const { Cell::new(None) };
}

impl Peers {
    pub fn new(ranks: usize, timeout: Duration) -> Self {
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
        self.failure.get_or_init(|| error).clone()
    }

    /// Ends the run because a rank cannot go on, and names the place of this thread if it is one of the rank's.
    pub fn fail(&self, rank: usize, reason: &str) {
        let here = HERE.get().filter(|&(id, who, _)| (id, who) == (self.id, rank)).map(|(_, _, place)| place);
        let place = here.or_else(|| lock(&self.lives[rank].whereabouts).place);
        self.end(CommError::Failed { rank, place, reason: reason.to_owned() });
    }

    /// Waits at `place` until `ready`, or with an error until the run has ended. `missing` says whether a rank is among
    /// those that `me` waits for. The lock comes back in any case.
    pub fn wait<'g, T>(
        &self,
        (me, place): (usize, ProgramPlace),
        gate: &'g Gate<T>,
        mut guard: MutexGuard<'g, T>,
        ready: impl Fn(&T) -> bool,
        missing: impl Fn(&T, usize) -> bool,
    ) -> (MutexGuard<'g, T>, Result<(), CommError>) {
        let (mut looks, mut started) = (0, None);
        let result = loop {
            if ready(&guard) {
                break Ok(());
            }
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
        lock(&self.lives[me].whereabouts).waits = Some((other, place));
        if self.now().saturating_sub(alive(other).max(started)) > self.timeout.as_nanos() as u64 {
            return Err(self.stalled(me, place, other));
        }
        Ok(())
    }

    /// The error for a rank that `me` has waited for in vain: names the last of a chain of waiting ranks.
    fn stalled(&self, me: usize, place: ProgramPlace, other: usize) -> CommError {
        let waits = |rank: usize| lock(&self.lives[rank].whereabouts).waits;
        let mut pair = (me, place, other);
        let mut circle = true;
        for _ in 0..self.ranks() {
            let Some((next, place)) = waits(pair.2) else {
                circle = false;
                break;
            };
            pair = (pair.2, place, next);
        }
        let (rank, place, other) = if circle { (me, place, other) } else { pair };
        let whereabouts = lock(&self.lives[other].whereabouts);
        CommError::Stalled {
            rank,
            place,
            other,
            other_place: whereabouts.waits.map(|(_, place)| place).or(whereabouts.place),
            seconds: self.now().saturating_sub(whereabouts.since) as f32 * 1e-9,
            other_waits_for: whereabouts.waits.map(|(rank, _)| rank),
        }
    }
}
