//! Work on several threads, whose order does not matter.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Calls `each` for all indices up to `count` on some threads; `done` hears how many are.
pub(crate) fn in_parallel(count: usize, threads: usize, each: &(dyn Fn(usize) + Sync), done: &(dyn Fn(usize) + Sync)) {
    let (next, finished) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                break;
            }
            each(i);
            done(finished.fetch_add(1, Ordering::Relaxed) + 1);
        }
    };
    std::thread::scope(|scope| {
        (1..threads.min(count)).for_each(|_| {
            scope.spawn(work);
        });
        work();
    });
}

/// The same for what `each` gives, in the order of indices.
pub(crate) fn all_in_parallel<T: Send>(
    count: usize,
    threads: usize,
    each: &(dyn Fn(usize) -> T + Sync),
    done: &(dyn Fn(usize) + Sync),
) -> Vec<T> {
    let found: Vec<Mutex<Option<T>>> = (0..count).map(|_| Mutex::new(None)).collect();
    let one = |i: usize| *found[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(each(i));
    in_parallel(count, threads, &one, done);
    found.into_iter().filter_map(|found| found.into_inner().unwrap_or_else(PoisonError::into_inner)).collect()
}
