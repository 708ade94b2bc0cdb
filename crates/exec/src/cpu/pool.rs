//! A fixed set of threads that run the tasks of one kernel at a time.
//!
//! Written by hand because the steady state must not allocate: general pools allocate queue blocks now and then. A job is
//! done when its tasks are, whether or not every thread has woken for it, so a machine with fewer free cores than threads
//! is not slowed down by those that sleep.

use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Arc, JoinHandle, Mutex, Thread, lock, park, spawn, spin, spins, yield_now};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// `f(task, worker)`, with the lifetime hidden: valid while `Pool::run` waits.
type Job = *const (dyn Fn(usize, usize) + Sync);

#[derive(Clone, Copy)]
struct SendJob(Job, usize);
// SAFETY: the closure that the pointer refers to is Sync; it is called only for claimed tasks, which `Pool::run` waits for.
unsafe impl Send for SendJob {}

struct Shared {
    /// Number of the job in the upper half, next task in the lower. A task is claimed by moving this on, which fails if the
    /// job has changed meanwhile.
    ticket: AtomicU64,
    /// The job of the current ticket and its number of tasks.
    job: Mutex<Option<SendJob>>,
    /// Tasks of the current job that are finished.
    done: AtomicUsize,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

struct Worker {
    handle: Option<JoinHandle<()>>,
    thread: Thread,
    asleep: Arc<AtomicBool>,
}

/// A pool of `threads` workers; the caller is one of them.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
}

/// Spins before a waiting thread goes to sleep: about the time between two kernels of a step.
const SPINS: usize = spins(2_000);
/// A ticket from which no task can be claimed.
const CLOSED: u64 = u32::MAX as u64;

impl Pool {
    /// A pool of this many threads, at least one.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            ticket: AtomicU64::new(CLOSED),
            job: Mutex::new(None),
            done: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let mut pool = Self { shared, workers: Vec::new() };
        for worker in 1..threads.max(1) {
            let asleep = Arc::new(AtomicBool::new(false));
            let (theirs, flag) = (pool.shared.clone(), asleep.clone());
            let handle = spawn(format!("lockstep-{worker}"), move || theirs.work(worker, &flag))?;
            pool.workers.push(Worker { thread: handle.thread().clone(), handle: Some(handle), asleep });
        }
        Ok(pool)
    }

    /// Number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(task, worker)` once for every task below `tasks`, on all threads, and waits for the last.
    pub fn run(&self, tasks: usize, f: impl Fn(usize, usize) + Sync) {
        if tasks <= 1 || self.workers.is_empty() {
            (0..tasks).for_each(|t| f(t, 0));
            return;
        }
        assert!((tasks as u64) < CLOSED, "too many tasks");
        let job: &(dyn Fn(usize, usize) + Sync) = &f;
        // SAFETY: only the lifetime changes; this function returns after every claimed task is finished, and no task of
        // this job can be claimed after that.
        let job: Job = unsafe { std::mem::transmute(job) };
        let shared = &*self.shared;
        let number = (shared.ticket.load(Ordering::SeqCst) >> 32).wrapping_add(1) << 32;
        shared.ticket.store(number | CLOSED, Ordering::SeqCst);
        *lock(&shared.job) = Some(SendJob(job, tasks));
        shared.done.store(0, Ordering::SeqCst);
        shared.ticket.store(number, Ordering::SeqCst);
        let asleep = self.workers.iter().filter(|w| w.asleep.load(Ordering::SeqCst));
        for w in asleep.take(tasks - 1) {
            w.asleep.store(false, Ordering::SeqCst);
            w.thread.unpark();
        }
        while shared.work_once(0) {}
        let mut spins = 0;
        while shared.done.load(Ordering::SeqCst) < tasks {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { yield_now() }
        }
        shared.ticket.store(number | CLOSED, Ordering::SeqCst);
        let panic = lock(&shared.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for w in &mut self.workers {
            w.thread.unpark();
            if let Some(handle) = w.handle.take() {
                // A worker catches the panics of its tasks, so joining cannot fail.
                let _ = handle.join();
            }
        }
    }
}

impl Shared {
    fn work(&self, worker: usize, asleep: &AtomicBool) {
        let mut spins = 0;
        while !self.stop.load(Ordering::SeqCst) {
            if self.work_once(worker) {
                spins = 0;
                continue;
            }
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
                continue;
            }
            asleep.store(true, Ordering::SeqCst);
            if !self.open() && !self.stop.load(Ordering::SeqCst) {
                park();
            }
            asleep.store(false, Ordering::SeqCst);
            spin();
            spins = 0;
        }
    }

    /// Whether a task may be there to claim.
    fn open(&self) -> bool {
        self.ticket.load(Ordering::SeqCst) & CLOSED != CLOSED
    }

    /// Claims a task and runs it; `false` if there is none.
    fn work_once(&self, worker: usize) -> bool {
        let ticket = self.ticket.load(Ordering::SeqCst);
        let task = ticket & CLOSED;
        if task == CLOSED {
            return false;
        }
        let Some(SendJob(job, tasks)) = *lock(&self.job) else { return false };
        if task as usize >= tasks {
            return false;
        }
        // If the ticket has not moved, the job that was read is the ticket's: the caller closes the ticket before it
        // changes the job.
        if self.ticket.compare_exchange(ticket, ticket + 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return true;
        }
        // SAFETY: a claimed task keeps `Pool::run` waiting, so the closure is alive.
        let f = unsafe { &*job };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| f(task as usize, worker))) {
            *lock(&self.panic) = Some(panic);
        }
        self.done.fetch_add(1, Ordering::SeqCst);
        true
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 3, 17] {
            let pool = Pool::new(threads).unwrap();
            for tasks in [0, 1, 2, 100].repeat(200) {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, |t, worker| {
                    assert!(worker < threads);
                    counts[t].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_panic_in_any_task_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(2).unwrap();
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(50, |t, _| assert!(t != 49))));
        assert!(result.is_err());
        let count = AtomicUsize::new(0);
        pool.run(10, |_, _| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 10);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;

    /// What tasks count. loom tells of two accesses at once, and of a count that is read before the task is done.
    struct Counts(Vec<loom::cell::UnsafeCell<u32>>);
    // SAFETY: a task is claimed once, which is what is tested.
    unsafe impl Sync for Counts {}

    #[test]
    fn loom_every_task_of_two_jobs_runs_once_and_is_waited_for() {
        crate::sync::explore(|| {
            let pool = Pool::new(2).unwrap();
            for tasks in [2, 3] {
                let counts = Counts((0..tasks).map(|_| loom::cell::UnsafeCell::new(0)).collect());
                let all = &counts;
                // SAFETY: as above.
                pool.run(tasks, move |task, _| all.0[task].with_mut(|count| unsafe { *count += 1 }));
                // SAFETY: all tasks are done.
                counts.0.iter().for_each(|count| count.with(|count| assert_eq!(unsafe { *count }, 1)));
            }
        });
    }
}
