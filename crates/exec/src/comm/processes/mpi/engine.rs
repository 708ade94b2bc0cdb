//! The thread that calls MPI.
//!
//! A small frame is one message: its head and its bytes. A large one is its head and then its bytes, in messages of at most
//! [`CHUNK`]. Messages of one rank are matched in the order in which they were sent, and frames are delivered in that order.

use super::library::{Library, MpiLibrary, Request};
use super::lock;
use crate::comm::processes::inbox::{Buffer, Inbox, Stream};
use crate::comm::processes::wire::Reader;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
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

/// The number of no communicator: the sender sends no more.
const BYE: u64 = 0;

/// Looks for something to do before the thread starts to yield, and before it sleeps.
const SPINS: u32 = 50;
const YIELDS: u32 = 400;
/// How long it sleeps while somebody waits, and while nobody does.
const SHORT_SLEEP: Duration = Duration::from_micros(20);
const LONG_SLEEP: Duration = Duration::from_micros(200);

/// Tells a sender that its frame has gone.
#[derive(Default)]
pub struct Ticket {
    pub done: Mutex<Option<Result<(), String>>>,
    pub changed: Condvar,
}

impl Ticket {
    fn finish(&self, result: Result<(), String>) {
        *lock(&self.done) = Some(result);
        self.changed.notify_all();
    }
}

/// The bytes of a large frame.
struct Body {
    data: *const u8,
    bytes: usize,
    ticket: Arc<Ticket>,
}

// SAFETY: whoever has a frame sent waits for its ticket before it touches the bytes.
unsafe impl Send for Body {}

/// A frame to be sent: a head with a small frame behind it, or with a large one elsewhere.
struct Outgoing {
    to: usize,
    head: Buffer,
    body: Option<Body>,
}

#[derive(Default)]
pub struct State {
    queue: VecDeque<Outgoing>,
    /// By the number of their communicator.
    pub inboxes: Vec<(u64, Arc<Inbox>)>,
    /// Heads to be used again.
    free: Vec<Buffer>,
    /// MPI is to be called no more.
    pub stopped: bool,
    /// The process has nothing more to send, and waits for the others to say so.
    finishing: bool,
    /// MPI has ended, or it never will.
    ended: Option<Result<(), String>>,
}

pub struct Shared {
    state: Mutex<State>,
    /// There is something to do.
    work: Condvar,
    /// MPI has ended.
    ended: Condvar,
}

impl Shared {
    pub fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut lock(&self.state))
    }
}

/// MPI, as the rest of the process knows it.
pub struct Engine {
    /// The library.
    pub name: String,
    /// Rank and ranks, as MPI counts them.
    pub place: (usize, usize),
    pub shared: Arc<Shared>,
}

impl Engine {
    /// Opens the library and starts MPI on a thread of its own.
    pub fn start(which: &MpiLibrary, deadline: Instant) -> Result<Self, String> {
        let library = Library::open(which)?;
        let name = library.name.clone();
        let shared = Arc::new(Shared { state: Mutex::default(), work: Condvar::new(), ended: Condvar::new() });
        let (sender, place) = mpsc::channel();
        let theirs = shared.clone();
        let run = move || {
            let place = library.init();
            // Who waits for it may have given up.
            let _ = sender.send(place.clone());
            if let Ok(place) = place {
                Driver::new(library, theirs, place).run();
            }
        };
        let thread = std::thread::Builder::new().name("lockstep-mpi".into());
        thread.spawn(run).map_err(|e| format!("no more threads: {e}"))?;
        let left = deadline.saturating_duration_since(Instant::now());
        match place.recv_timeout(left) {
            Ok(place) => place.map(|place| Self { name, place, shared }),
            Err(_) => Err(format!("{name} does not start")),
        }
    }

    /// Sends a small frame, which may be changed at once.
    pub fn send_copy(&self, token: u64, to: usize, stream: Stream, frame: &[u8]) -> Result<(), String> {
        let mut head = self.head(token, stream, frame.len());
        head.push(frame);
        self.enqueue(Outgoing { to, head, body: None })
    }

    /// Sends a frame.
    ///
    /// # Safety
    /// It stays as it is until the ticket is done.
    pub unsafe fn send_in_place(
        &self,
        token: u64,
        to: usize,
        stream: Stream,
        frame: &[u8],
        ticket: &Arc<Ticket>,
    ) -> Result<(), String> {
        let body = Body { data: frame.as_ptr(), bytes: frame.len(), ticket: ticket.clone() };
        let head = self.head(token, stream, frame.len());
        self.enqueue(Outgoing { to, head, body: Some(body) })
    }

    fn head(&self, token: u64, stream: Stream, bytes: usize) -> Buffer {
        let mut head = self.shared.with(|state| state.free.pop()).unwrap_or_default();
        head.clear();
        [token, stream.0, bytes as u64, self.place.0 as u64].iter().for_each(|field| head.push(&field.to_le_bytes()));
        head
    }

    fn enqueue(&self, outgoing: Outgoing) -> Result<(), String> {
        self.shared.with(|state| match state.stopped {
            // The run has ended: what is sent now is for nobody.
            true => outgoing.body.iter().for_each(|body| body.ticket.finish(Ok(()))),
            false => state.queue.push_back(outgoing),
        });
        self.shared.work.notify_one();
        Ok(())
    }

    /// Calls MPI no more.
    pub fn stop(&self) {
        self.shared.with(|state| state.stopped = true);
        self.shared.work.notify_one();
    }

    /// Ends MPI together with all others, which may take their time.
    pub fn finish(&self) -> Result<(), String> {
        let mut state = lock(&self.shared.state);
        if state.stopped {
            return Ok(());
        }
        state.finishing = true;
        self.shared.work.notify_one();
        loop {
            if let Some(result) = &state.ended {
                return result.clone();
            }
            state = self.shared.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
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
    to: usize,
    head: Buffer,
    ticket: Option<Arc<Ticket>>,
    left: VecDeque<Request>,
}

/// What the thread has in its hands.
struct Driver {
    library: Library,
    shared: Arc<Shared>,
    me: usize,
    ranks: usize,
    /// In the order in which they were posted, from `next` on.
    slots: Vec<Slot>,
    next: usize,
    /// By sender; those that come behind one that is not whole yet wait.
    incoming: Vec<VecDeque<Incoming>>,
    sending: Vec<Sending>,
    queue: VecDeque<Outgoing>,
    /// Ranks that send no more.
    byes: usize,
    said_bye: bool,
}

impl Driver {
    fn new(library: Library, shared: Arc<Shared>, (me, ranks): (usize, usize)) -> Self {
        Self {
            library,
            shared,
            me,
            ranks,
            slots: Vec::new(),
            next: 0,
            incoming: (0..ranks).map(|_| VecDeque::new()).collect(),
            sending: Vec::new(),
            queue: VecDeque::new(),
            byes: 0,
            said_bye: false,
        }
    }

    fn run(mut self) {
        wake_on_time();
        let result = self.drive();
        if let Err(reason) = &result {
            // Whoever uses MPI cannot go on.
            let inboxes = self.shared.with(|state| state.inboxes.clone());
            inboxes.iter().for_each(|(_, inbox)| inbox.peers.fail(self.me, reason));
        }
        self.shared.with(|state| {
            state.stopped = true;
            self.queue.append(&mut state.queue);
            state.ended = Some(result.clone());
        });
        let tickets = self.sending.iter().filter_map(|s| s.ticket.as_ref());
        let waiting = self.queue.iter().filter_map(|o| Some(&o.body.as_ref()?.ticket));
        tickets.chain(waiting).for_each(|ticket| ticket.finish(result.clone()));
        self.shared.ended.notify_all();
        // MPI may still write to what is posted.
        std::mem::forget((self.slots, self.incoming, self.sending));
    }

    /// Moves bytes until MPI has ended or is to be called no more.
    fn drive(&mut self) -> Result<(), String> {
        for _ in 0..SLOTS {
            let mut buffer = Buffer::default();
            buffer.resize(HEAD + SMALL);
            self.slots.push(Slot { buffer, request: 0 });
            self.post(self.slots.len() - 1)?;
        }
        let mut idle = 0;
        loop {
            let (stopped, finishing) = self.shared.with(|state| {
                self.queue.append(&mut state.queue);
                (state.stopped, state.finishing)
            });
            if stopped {
                return Ok(());
            }
            let mut moved = !self.queue.is_empty();
            while let Some(outgoing) = self.queue.pop_front() {
                self.begin(outgoing)?;
            }
            moved |= self.progress_sends();
            moved |= self.progress_receives()?;
            if finishing && self.sending.is_empty() {
                if !self.said_bye {
                    self.say_bye()?;
                    moved = true;
                } else if self.byes + 1 == self.ranks {
                    return self.finalize();
                }
            }
            idle = if moved { 0 } else { idle + 1 };
            self.rest(idle);
        }
    }

    /// Posts the receive of a slot.
    fn post(&mut self, slot: usize) -> Result<(), String> {
        let Slot { buffer, request } = &mut self.slots[slot];
        // SAFETY: the slot's buffer is looked at when the request is done, and kept when it never is.
        *request =
            unsafe { self.library.receive(buffer.bytes_mut().as_mut_ptr(), HEAD + SMALL, None, TAG_HEAD) }?;
        Ok(())
    }

    fn begin(&mut self, Outgoing { to, head, body }: Outgoing) -> Result<(), String> {
        let mut sending = Sending { to, head, ticket: None, left: VecDeque::new() };
        let bytes = sending.head.bytes();
        // SAFETY: heads are kept until their requests are done, bodies until their ticket is.
        let started = unsafe {
            self.library.send(bytes.as_ptr(), bytes.len(), to, TAG_HEAD).and_then(|request| {
                sending.left.push_back(request);
                let Some(body) = &body else { return Ok(()) };
                for (at, n) in chunks(body.bytes) {
                    sending.left.push_back(self.library.send(body.data.wrapping_add(at), n, to, TAG_BODY)?);
                }
                Ok(())
            })
        };
        sending.ticket = body.map(|body| body.ticket);
        self.sending.push(sending);
        started
    }

    /// Looks which frames have gone out.
    fn progress_sends(&mut self) -> bool {
        let (library, mut moved) = (&self.library, false);
        let done = self.sending.extract_if(.., |sending| {
            while let Some(request) = sending.left.front_mut() {
                match library.done(request) {
                    Ok(false) => return false,
                    Ok(true) => drop(sending.left.pop_front()),
                    Err(reason) => {
                        sending.left.clear();
                        let (to, ticket) = (sending.to, sending.ticket.take());
                        match ticket {
                            Some(ticket) => ticket.finish(Err(reason)),
                            None => {
                                let inboxes = self.shared.with(|state| state.inboxes.clone());
                                inboxes.iter().for_each(|(_, inbox)| inbox.cut(to, reason.clone()));
                            }
                        }
                    }
                }
            }
            true
        });
        let mut free = Vec::new();
        for sending in done {
            moved = true;
            sending.ticket.iter().for_each(|ticket| ticket.finish(Ok(())));
            free.push(sending.head);
        }
        if moved {
            self.shared.with(|state| state.free.append(&mut free));
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
                while let Some(request) = first.left.front_mut() {
                    if !self.library.done(request)? {
                        break;
                    }
                    first.left.pop_front();
                    moved = true;
                }
                if !first.left.is_empty() {
                    break;
                }
                if let Some(Incoming { inbox: Some(inbox), stream, frame, .. }) = self.incoming[from].pop_front() {
                    inbox.deliver(from, stream, frame);
                    moved = true;
                }
            }
        }
        Ok(moved)
    }

    /// Takes the head of a slot, with a small frame, or begins to receive a large one.
    fn take(&mut self, slot: usize) -> Result<(), String> {
        let message = self.slots[slot].buffer.bytes();
        let mut fields = Reader(&message[..HEAD]);
        let mut field = || fields.u64().unwrap_or_default();
        let (token, stream, bytes, from) = (field(), Stream(field()), field() as usize, field() as usize);
        if from >= self.ranks {
            return Err(format!("a message of rank {from} of {}", self.ranks));
        }
        if token == BYE {
            self.byes += 1;
            return Ok(());
        }
        let inbox = self.shared.with(|s| s.inboxes.iter().find(|(t, _)| *t == token).map(|(_, inbox)| inbox.clone()));
        let mut frame = match &inbox {
            Some(inbox) => inbox.buffer(bytes),
            None => Buffer::default(),
        };
        frame.resize(bytes);
        let mut left = VecDeque::new();
        if bytes <= SMALL {
            frame.bytes_mut().copy_from_slice(&message[HEAD..HEAD + bytes]);
        } else {
            for (at, n) in chunks(bytes) {
                let to = frame.bytes_mut()[at..].as_mut_ptr();
                // SAFETY: the frame is kept until its requests are done.
                left.push_back(unsafe { self.library.receive(to, n, Some(from), TAG_BODY) }?);
            }
        }
        self.incoming[from].push_back(Incoming { inbox, stream, frame, left });
        Ok(())
    }

    /// Tells all others that nothing more comes.
    fn say_bye(&mut self) -> Result<(), String> {
        self.said_bye = true;
        let me = self.me;
        for to in (0..self.ranks).filter(|to| *to != me) {
            let mut head = Buffer::default();
            [BYE, 0, 0, me as u64].iter().for_each(|field| head.push(&field.to_le_bytes()));
            self.begin(Outgoing { to, head, body: None })?;
        }
        Ok(())
    }

    /// Ends MPI: all have said that nothing more comes, and everything has gone.
    fn finalize(&mut self) -> Result<(), String> {
        for slot in &mut self.slots {
            self.library.cancel(&mut slot.request)?;
        }
        self.library.finalize()
    }

    /// Lets others have the core when there was nothing to do for a while; less where somebody waits.
    fn rest(&self, idle: u32) {
        if idle < SPINS {
            return std::hint::spin_loop();
        }
        let state = lock(&self.shared.state);
        let awaited = !self.sending.is_empty() || state.inboxes.iter().any(|(_, inbox)| inbox.gate.awaited());
        if !state.queue.is_empty() {
            return;
        }
        if awaited && idle < YIELDS {
            drop(state);
            return std::thread::yield_now();
        }
        let sleep = if awaited { SHORT_SLEEP } else { LONG_SLEEP };
        // Woken or not, it looks.
        drop(self.shared.work.wait_timeout(state, sleep));
    }
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
