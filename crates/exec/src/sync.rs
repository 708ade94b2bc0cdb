//! Threads, locks and atomics of the thread pool, the communicator and the communication thread: those of the standard library,
//! or under `cfg(loom)` those of loom, which runs a test in every order that the threads can take.

use std::sync::PoisonError;

#[cfg(not(loom))]
pub use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, RwLock, atomic},
    thread::{JoinHandle, Thread, park, yield_now},
};

#[cfg(loom)]
pub use loom::{
    cell::UnsafeCell,
    sync::{Arc, Condvar, Mutex, MutexGuard, RwLock, atomic},
    thread::{JoinHandle, Thread, park, yield_now},
};

/// A value that several threads use in turns, in the form that loom watches.
#[cfg(not(loom))]
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// How often a thread looks before it yields or sleeps. loom takes every look for another course of events.
pub const fn spins(count: usize) -> usize {
    if cfg!(loom) { 1 } else { count }
}

/// Lets others go first for a moment.
pub fn spin() {
    if cfg!(loom) { yield_now() } else { std::hint::spin_loop() }
}

/// A lock, whether or not a thread has panicked with it.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same of what loom does not watch.
pub fn std_lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives a lock away until another thread has changed something.
pub fn wait<'g, T>(changed: &Condvar, guard: MutexGuard<'g, T>) -> MutexGuard<'g, T> {
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Starts a thread of this name.
#[cfg(not(loom))]
pub fn spawn(name: String, work: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name).spawn(work)
}

/// Starts a thread. loom's have no names.
#[cfg(loom)]
pub fn spawn(_: String, work: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    Ok(loom::thread::spawn(work))
}

/// Runs a test in every order that its threads can take, with up to two preemptions.
#[cfg(all(test, loom))]
pub fn explore(test: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.max_branches = 10_000;
    model.check(test);
}
