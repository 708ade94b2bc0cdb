//! A fixed set of threads that run the tasks of one kernel at a time.
//!
//! Written by hand because the steady state must not allocate: general pools allocate queue blocks now and then.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, Thread};

/// `f(task, worker)`, with the lifetime hidden: valid while `Pool::run` waits.
type Job = *const (dyn Fn(usize, usize) + Sync);

struct Shared {
    job: Mutex<Option<SendJob>>,
    /// Counts jobs; workers wait for it to move.
    generation: AtomicUsize,
    next_task: AtomicUsize,
    tasks: AtomicUsize,
    /// Workers that have not finished the current job.
    busy: AtomicUsize,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Clone, Copy)]
struct SendJob(Job);
// SAFETY: the closure behind the pointer is Sync, and `Pool::run` keeps it alive until every worker is done with it.
unsafe impl Send for SendJob {}

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
const SPINS: usize = 20_000;

impl Pool {
    /// A pool of this many threads, at least one.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            job: Mutex::new(None),
            generation: AtomicUsize::new(0),
            next_task: AtomicUsize::new(0),
            tasks: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let workers = (1..threads.max(1))
            .map(|worker| {
                let asleep = Arc::new(AtomicBool::new(false));
                let (theirs, flag) = (shared.clone(), asleep.clone());
                let handle = std::thread::spawn(move || theirs.work(worker, &flag));
                Worker { thread: handle.thread().clone(), handle: Some(handle), asleep }
            })
            .collect();
        Self { shared, workers }
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
        let job: &(dyn Fn(usize, usize) + Sync) = &f;
        // SAFETY: only the lifetime changes; this function returns after every worker has finished with the job.
        let job: Job = unsafe { std::mem::transmute(job) };
        let shared = &*self.shared;
        *lock(&shared.job) = Some(SendJob(job));
        shared.tasks.store(tasks, Ordering::Relaxed);
        shared.next_task.store(0, Ordering::Relaxed);
        shared.busy.store(self.workers.len(), Ordering::Relaxed);
        shared.generation.fetch_add(1, Ordering::SeqCst);
        for w in &self.workers {
            if w.asleep.swap(false, Ordering::SeqCst) {
                w.thread.unpark();
            }
        }
        let mine = catch_unwind(AssertUnwindSafe(|| shared.drain(&f, 0)));
        let mut spins = 0;
        while shared.busy.load(Ordering::Acquire) != 0 {
            pause(&mut spins);
        }
        let theirs = lock(&shared.panic).take();
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        if let Some(panic) = theirs {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.generation.fetch_add(1, Ordering::SeqCst);
        for w in &mut self.workers {
            w.thread.unpark();
            if let Some(handle) = w.handle.take() {
                // A worker catches the panics of its jobs, so joining cannot fail.
                let _ = handle.join();
            }
        }
    }
}

impl Shared {
    fn work(&self, worker: usize, asleep: &AtomicBool) {
        let mut seen = 0;
        loop {
            let mut spins = 0;
            while self.generation.load(Ordering::SeqCst) == seen {
                spins += 1;
                if spins < SPINS {
                    std::hint::spin_loop();
                    continue;
                }
                asleep.store(true, Ordering::SeqCst);
                if self.generation.load(Ordering::SeqCst) == seen {
                    std::thread::park();
                }
                asleep.store(false, Ordering::SeqCst);
            }
            seen += 1;
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let job = *lock(&self.job);
            if let Some(SendJob(job)) = job {
                // SAFETY: `Pool::run` waits for `busy` to reach zero before the closure goes away.
                let f = unsafe { &*job };
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.drain(f, worker))) {
                    *lock(&self.panic) = Some(panic);
                }
            }
            self.busy.fetch_sub(1, Ordering::Release);
        }
    }

    fn drain(&self, f: &(dyn Fn(usize, usize) + Sync), worker: usize) {
        let tasks = self.tasks.load(Ordering::Relaxed);
        loop {
            let task = self.next_task.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            f(task, worker);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn pause(spins: &mut usize) {
    *spins += 1;
    if *spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        let pool = Pool::new(3);
        for tasks in [0, 1, 2, 100] {
            let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            pool.run(tasks, |t, worker| {
                assert!(worker < 3);
                counts[t].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn a_panic_in_any_task_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(2);
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(50, |t, _| assert!(t != 49))));
        assert!(result.is_err());
        let count = AtomicUsize::new(0);
        pool.run(10, |_, _| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 10);
    }
}
