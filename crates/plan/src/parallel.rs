//! Work on several threads, whose order does not matter.

use std::sync::atomic::{AtomicUsize, Ordering};

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
        (1..threads).for_each(|_| {
            scope.spawn(work);
        });
        work();
    });
}
