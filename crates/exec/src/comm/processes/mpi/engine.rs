//! What drives MPI.
//!
//! A small frame is one message: its head and its bytes. A large one is its head and then its bytes, in messages of at most
//! [`CHUNK`]. Messages of one rank are matched in the order in which they were sent, and frames are delivered in that order.

use super::library::{Library, MpiLibrary, Request};
use crate::comm::buffer::Buffer;
use crate::comm::processes::inbox::{Inbox, Stream};
use crate::sync::std_lock as lock;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, PoisonError, TryLockError, mpsc};
use std::time::{Duration, Instant};

/// The most bytes of a frame that is sent with its head.
pub const SMALL: usize = 8 << 10;
/// The most bytes of one message; MPI counts in ints.
const CHUNK: usize = 1 << 30;
/// Bytes before each frame: its communicator, its stream, its length, its sender.
const HEAD: usize = 32;
/// Receives that are posted for heads.
const SLOTS: usize = 8;

const TAG_HEAD: c_int = 1;
const TAG_BODY: c_int = 2;

/// The number of no communicator: what drivers tell each other, by stream.
const DRIVER: u64 = 0;
/// The sender sends no more.
const BYE: Stream = Stream(0);
/// It waits for the receiver to say so, and asks whether that lives; the answer.
const ASK: Stream = Stream(1);
const ALIVE: Stream = Stream(2);

/// How often a process that waits for another to end asks whether it lives, and how long it goes on without an answer.
const ASK_EVERY: Duration = Duration::from_secs(2);
const SILENT_FOR: Duration = Duration::from_secs(9);

/// How long a frame that is under way when the run ends may still take to arrive; then MPI is called no more, which has its bytes.
const GRACE: Duration = Duration::from_millis(500);

/// How long the thread sleeps while somebody waits, and while nobody does.
const SHORT_SLEEP: Duration = Duration::from_micros(30);
const LONG_SLEEP: Duration = Duration::from_micros(200);

/// MPI, as the rest of the process knows it.
pub struct Engine {
    /// The library.
    pub name: String,
    /// Rank and ranks, as MPI counts them.
    pub place: (usize, usize),
    shared: Arc<Shared>,
}

struct Shared {
    driver: Mutex<Driver>,
    ended: Condvar,
}

impl Engine {
    /// Opens the library and starts MPI on a thread of its own.
    pub fn start(which: &MpiLibrary, deadline: Instant) -> Result<Self, String> {
        let library = Library::open(which)?;
        let name = library.name.clone();
        let (sender, started) = mpsc::channel();
        let run = move || {
            let driver = library.init().and_then(|place| Ok((place, Driver::new(library, place)?)));
            let shared = driver
                .map(|(place, driver)| (place, Arc::new(Shared { driver: Mutex::new(driver), ended: Condvar::new() })));
            // Nobody may wait for it any more.
            let _ = sender.send(shared.clone());
            if let Ok((_, shared)) = shared {
                drive(&shared);
            }
        };
        let thread = std::thread::Builder::new().name("lockstep-mpi".into());
        thread.spawn(run).map_err(|e| format!("no more threads: {e}"))?;
        let left = deadline.saturating_duration_since(Instant::now());
        match started.recv_timeout(left) {
            Ok(started) => started.map(|(place, shared)| Self { name, place, shared }),
            Err(_) => Err(format!("{name} does not start")),
        }
    }

    /// Has what comes for a communicator delivered.
    pub fn attach(&self, token: u64, inbox: &Arc<Inbox>) -> Result<(), String> {
        let mut driver = lock(&self.shared.driver);
        if driver.stopped {
            return Err(format!("{} is called no more", self.name));
        }
        driver.inboxes.push((token, inbox.clone()));
        Ok(())
    }

    /// Drops what still comes for a communicator. What it has sent goes out.
    pub fn detach(&self, token: u64) {
        lock(&self.shared.driver).inboxes.retain(|(other, _)| *other != token);
    }

    /// Moves what can be moved, if nobody does so already.
    pub fn progress(&self) {
        match self.shared.driver.try_lock() {
            Ok(mut driver) => drop(driver.progress()),
            Err(TryLockError::Poisoned(driver)) => drop(driver.into_inner().progress()),
            Err(TryLockError::WouldBlock) => {}
        }
    }

    /// Sends a small frame, which may be changed at once.
    pub fn send_copy(&self, token: u64, to: usize, stream: Stream, frame: &[u8]) -> Result<(), String> {
        let mut driver = lock(&self.shared.driver);
        if driver.stopped || driver.finalizing.is_some() {
            // The run has ended: what is sent now is for nobody.
            return Ok(());
        }
        let mut head = driver.head(token, stream, frame.len());
        head.push(frame);
        driver.begin(to, head, None)?;
        driver.progress();
        Ok(())
    }

    /// Sends a frame and returns when it has gone, or some time after `goes_on` says no.
    pub fn send_in_place(
        &self,
        token: u64,
        to: usize,
        stream: Stream,
        frame: &[u8],
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(), String> {
        let mut driver = lock(&self.shared.driver);
        if driver.stopped || driver.finalizing.is_some() {
            return Ok(());
        }
        let head = driver.head(token, stream, frame.len());
        let number = driver.begin(to, head, Some(frame))?;
        let mut ended: Option<Instant> = None;
        loop {
            driver.progress();
            if let Some(result) = driver.gone(number) {
                return result;
            }
            // Nobody calls MPI any more, which has the frame.
            if driver.stopped {
                return Ok(());
            }
            if ended.is_none() && !goes_on() {
                ended = Some(Instant::now());
            }
            if ended.is_some_and(|since| since.elapsed() > GRACE) {
                driver.stopped = true;
            }
            drop(driver);
            std::thread::yield_now();
            driver = lock(&self.shared.driver);
        }
    }

    /// Calls MPI no more.
    pub fn stop(&self) {
        lock(&self.shared.driver).stopped = true;
    }

    /// Ends MPI together with all others, which may take their time.
    pub fn finish(&self) -> Result<(), String> {
        let mut driver = lock(&self.shared.driver);
        driver.finishing = true;
        driver.heard.fill(Instant::now());
        while driver.ended.is_none() && !driver.stopped {
            // All have said that they come to it; one may be stopped on the way.
            if driver.finalizing.is_some_and(|since| since.elapsed() > SILENT_FOR) {
                let seconds = SILENT_FOR.as_secs();
                return Err(format!("MPI does not end within {seconds} s: a rank has stopped just before its end"));
            }
            driver = self.shared.ended.wait_timeout(driver, LONG_SLEEP).unwrap_or_else(PoisonError::into_inner).0;
        }
        driver.ended.clone().unwrap_or(Ok(()))
    }
}

/// Moves bytes when nobody else does, until MPI has ended or is to be called no more.
fn drive(shared: &Shared) {
    wake_on_time();
    loop {
        let mut driver = lock(&shared.driver);
        let moved = driver.progress();
        if driver.finishing && !driver.stopped {
            match driver.finish() {
                None => {}
                Some(Err(reason)) => driver.ended = Some(Err(reason)),
                Some(Ok(())) => {
                    // It waits for all others, and whoever waits for it looks at the time.
                    driver.finalizing = Some(Instant::now());
                    let library = driver.library.clone();
                    drop(driver);
                    let ended = library.finalize();
                    driver = lock(&shared.driver);
                    driver.ended = Some(ended);
                }
            }
        }
        if driver.stopped || driver.ended.is_some() {
            driver.stopped = true;
            shared.ended.notify_all();
            return;
        }
        let awaited = !driver.sending.is_empty() || driver.inboxes.iter().any(|(_, inbox)| inbox.gate.awaited());
        drop(driver);
        if !moved {
            std::thread::sleep(if awaited { SHORT_SLEEP } else { LONG_SLEEP });
        }
    }
}

/// A receive that is posted for a head.
struct Slot {
    buffer: Buffer,
    request: Request,
}

/// A frame whose bytes are coming.
struct Incoming {
    /// None where its communicator is gone.
    inbox: Option<Arc<Inbox>>,
    stream: Stream,
    frame: Buffer,
    left: VecDeque<Request>,
}

/// A frame that is on its way out.
struct Sending {
    /// Given to large ones, whose sender waits.
    number: Option<u64>,
    to: usize,
    head: Buffer,
    left: VecDeque<Request>,
    /// How it went, once it has.
    result: Option<Result<(), String>>,
}

/// What is under way. Whoever has the lock around it may call MPI.
struct Driver {
    library: Arc<Library>,
    me: usize,
    ranks: usize,
    /// By the number of their communicator.
    inboxes: Vec<(u64, Arc<Inbox>)>,
    /// In the order in which they were posted, from `next` on.
    slots: Vec<Slot>,
    next: usize,
    /// By sender; those that come after one that is not whole yet wait.
    incoming: Vec<VecDeque<Incoming>>,
    sending: Vec<Sending>,
    numbers: u64,
    /// Large frames that have gone, or cannot.
    gone: Vec<(u64, Result<(), String>)>,
    /// Heads to be used again.
    free: Vec<Buffer>,
    /// MPI is to be called no more.
    stopped: bool,
    /// This process sends no more, and waits for the others to say the same.
    finishing: bool,
    said_bye: bool,
    /// By rank: who has said so, and when each was last heard of.
    byes: Vec<bool>,
    heard: Vec<Instant>,
    asked: Instant,
    /// Since when MPI is being ended.
    finalizing: Option<Instant>,
    /// How MPI has ended.
    ended: Option<Result<(), String>>,
}

impl Driver {
    fn new(library: Library, (me, ranks): (usize, usize)) -> Result<Self, String> {
        let mut driver = Self {
            library: Arc::new(library),
            me,
            ranks,
            inboxes: Vec::new(),
            slots: Vec::new(),
            next: 0,
            incoming: (0..ranks).map(|_| VecDeque::new()).collect(),
            sending: Vec::new(),
            numbers: 0,
            gone: Vec::new(),
            free: Vec::new(),
            stopped: false,
            finishing: false,
            said_bye: false,
            byes: vec![false; ranks],
            heard: vec![Instant::now(); ranks],
            asked: Instant::now(),
            finalizing: None,
            ended: None,
        };
        for slot in 0..SLOTS {
            let mut buffer = Buffer::default();
            buffer.resize(HEAD + SMALL);
            driver.slots.push(Slot { buffer, request: 0 });
            driver.post(slot)?;
        }
        Ok(driver)
    }

    /// Moves what can be moved, and says whether anything was.
    fn progress(&mut self) -> bool {
        if self.stopped || self.finalizing.is_some() || self.ended.is_some() {
            return false;
        }
        let sent = self.progress_sends();
        match self.progress_receives() {
            Ok(received) => sent || received,
            Err(reason) => {
                // Whoever uses MPI cannot go on.
                self.stopped = true;
                self.inboxes.iter().for_each(|(_, inbox)| inbox.fail(self.me, &reason));
                true
            }
        }
    }

    /// Begins a frame.
    fn head(&mut self, token: u64, stream: Stream, bytes: usize) -> Buffer {
        let mut head = self.free.pop().unwrap_or_default();
        head.clear();
        [token, stream.0, bytes as u64, self.me as u64].iter().for_each(|field| head.push(&field.to_le_bytes()));
        head
    }

    /// Posts the receive of a slot.
    fn post(&mut self, slot: usize) -> Result<(), String> {
        let Slot { buffer, request } = &mut self.slots[slot];
        // SAFETY: the slot's buffer is looked at when the request is done; the driver lives as long as the process.
        *request = unsafe { self.library.receive(buffer.bytes_mut().as_mut_ptr(), HEAD + SMALL, None, TAG_HEAD) }?;
        Ok(())
    }

    /// Sends a head, and a large frame after it, whose bytes stay until it has [gone](Self::gone) or MPI is called no more. Gives its
    /// number.
    fn begin(&mut self, to: usize, head: Buffer, body: Option<&[u8]>) -> Result<u64, String> {
        self.numbers += 1;
        let number = body.map(|_| self.numbers);
        let mut sending = Sending { number, to, head, left: VecDeque::new(), result: None };
        let bytes = sending.head.bytes();
        // SAFETY: heads are kept until their requests are done, bodies by their sender.
        unsafe {
            sending.left.push_back(self.library.send(bytes.as_ptr(), bytes.len(), to, TAG_HEAD)?);
            for (at, n) in chunks(body.map_or(0, <[u8]>::len)) {
                let data = body.map_or(std::ptr::null(), |body| body[at..].as_ptr());
                match self.library.send(data, n, to, TAG_BODY) {
                    Ok(request) => sending.left.push_back(request),
                    Err(reason) => {
                        // What has begun is MPI's for good.
                        self.stopped = true;
                        std::mem::forget(sending);
                        return Err(reason);
                    }
                }
            }
        }
        self.sending.push(sending);
        Ok(self.numbers)
    }

    /// How a large frame went, once it has.
    fn gone(&mut self, number: u64) -> Option<Result<(), String>> {
        let at = self.gone.iter().position(|(other, _)| *other == number)?;
        Some(self.gone.swap_remove(at).1)
    }

    /// Looks which frames have gone out.
    fn progress_sends(&mut self) -> bool {
        let Self { library, sending, inboxes, gone, free, .. } = self;
        let mut moved = false;
        let done = sending.extract_if(.., |sending| {
            sending.result = match all_done(library, &mut sending.left) {
                Ok(done) => done.then_some(Ok(())),
                Err(reason) => Some(Err(reason)),
            };
            sending.result.is_some()
        });
        for done in done {
            moved = true;
            match (done.number, done.result.unwrap_or(Ok(()))) {
                (Some(number), result) => gone.push((number, result)),
                (None, Err(reason)) => inboxes.iter().for_each(|(_, inbox)| inbox.cut(done.to, reason.clone())),
                (None, Ok(())) => {}
            }
            free.push(done.head);
        }
        moved
    }

    /// Takes what has come.
    fn progress_receives(&mut self) -> Result<bool, String> {
        let mut moved = false;
        while self.library.done(&mut self.slots[self.next].request)? {
            moved = true;
            self.take(self.next)?;
            self.post(self.next)?;
            self.next = (self.next + 1) % SLOTS;
        }
        for from in 0..self.ranks {
            while let Some(first) = self.incoming[from].front_mut() {
                if !all_done(&self.library, &mut first.left)? {
                    break;
                }
                moved = true;
                if let Some(Incoming { inbox: Some(inbox), stream, frame, .. }) = self.incoming[from].pop_front() {
                    inbox.deliver(from, stream, frame);
                }
            }
        }
        Ok(moved)
    }

    /// Takes the head of a slot, with a small frame, or begins to receive a large one.
    fn take(&mut self, slot: usize) -> Result<(), String> {
        let message = self.slots[slot].buffer.bytes();
        let field = |i: usize| u64::from_le_bytes(message.as_chunks().0[i]);
        let (token, stream, bytes, from) = (field(0), Stream(field(1)), field(2) as usize, field(3) as usize);
        if from >= self.ranks {
            return Err(format!("a message of rank {from} of {}", self.ranks));
        }
        if token == DRIVER {
            self.heard[from] = Instant::now();
            match stream {
                BYE => self.byes[from] = true,
                ASK => {
                    let head = self.head(DRIVER, ALIVE, 0);
                    self.begin(from, head, None)?;
                }
                _ => {}
            }
            return Ok(());
        }
        let inbox = self.inboxes.iter().find(|(other, _)| *other == token).map(|(_, inbox)| inbox.clone());
        let mut frame = inbox.as_ref().map_or_else(Buffer::default, |inbox| inbox.buffer(bytes));
        frame.resize(bytes);
        let mut left = VecDeque::new();
        if bytes <= SMALL {
            frame.bytes_mut().copy_from_slice(&message[HEAD..HEAD + bytes]);
        }
        for (at, n) in chunks(if bytes <= SMALL { 0 } else { bytes }) {
            let to = frame.bytes_mut()[at..].as_mut_ptr();
            // SAFETY: the frame is kept until its requests are done.
            left.push_back(unsafe { self.library.receive(to, n, Some(from), TAG_BODY) }?);
        }
        self.incoming[from].push_back(Incoming { inbox, stream, frame, left });
        Ok(())
    }

    /// Whether MPI can be ended: everything has gone, and all have said that nothing more comes. An error where one does not live to
    /// say so. One that still has work to do answers meanwhile.
    fn finish(&mut self) -> Option<Result<(), String>> {
        let others = (0..self.ranks).filter(|to| *to != self.me);
        let missing: Vec<usize> = others.clone().filter(|other| !self.byes[*other]).collect();
        let silent = |other: &&usize| self.heard[**other].elapsed() > SILENT_FOR;
        if let Some(other) = missing.iter().find(silent) {
            let seconds = SILENT_FOR.as_secs();
            return Some(Err(format!(
                "nothing was heard of rank {other} for {seconds} s, and MPI ends with all ranks"
            )));
        }
        let (word, to) = match (self.said_bye, self.asked.elapsed() > ASK_EVERY) {
            (false, _) if self.sending.is_empty() => (BYE, others.collect()),
            (_, true) => (ASK, missing.clone()),
            _ => (ASK, Vec::new()),
        };
        if word == BYE {
            self.said_bye = true;
        }
        if !to.is_empty() {
            self.asked = Instant::now();
        }
        for to in to {
            let head = self.head(DRIVER, word, 0);
            if let Err(reason) = self.begin(to, head, None) {
                return Some(Err(reason));
            }
        }
        if !self.said_bye || !missing.is_empty() || !self.sending.is_empty() {
            return None;
        }
        Some(self.slots.iter_mut().try_for_each(|slot| self.library.cancel(&mut slot.request)))
    }
}

/// Whether all requests of a frame are done.
fn all_done(library: &Library, left: &mut VecDeque<Request>) -> Result<bool, String> {
    while let Some(request) = left.front_mut() {
        if !library.done(request)? {
            return Ok(false);
        }
        left.pop_front();
    }
    Ok(true)
}

/// The messages of a large frame: where each starts, and its bytes.
fn chunks(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes).step_by(CHUNK).map(move |at| (at, CHUNK.min(bytes - at)))
}

/// Sleeps of this thread end when they should, not 50 µs later.
fn wake_on_time() {
    // SAFETY: a setting of this thread. Where it is refused, sleeps are longer.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_frames_go_in_messages_that_mpi_can_count() {
        let check = |bytes, expected: &[(usize, usize)]| assert_eq!(chunks(bytes).collect::<Vec<_>>(), expected);
        check(0, &[]);
        check(SMALL + 1, &[(0, SMALL + 1)]);
        check(CHUNK, &[(0, CHUNK)]);
        check(2 * CHUNK + 5, &[(0, CHUNK), (CHUNK, CHUNK), (2 * CHUNK, 5)]);
        assert!(i32::try_from(CHUNK).is_ok());
    }
}
