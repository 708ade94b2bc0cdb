//! What is still to be sent to a tracking server: a file in the run directory, and a thread that sends what it holds.
//!
//! Training appends lines to the file and never waits for anything else. The thread reads them from where the last answer left it, so
//! the queue takes no memory, and what was not sent when the run ends, or is killed, is sent when it goes on. Whatever has been
//! sent is cut off.

mod stored;

use crate::files::MOST_LINE_BYTES;
use crate::sink::{RunEnd, Sink};
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use stored::{BATCH_LINES, Kept, QUEUE, STATE, lines, read, whole_lines, write_state};
pub(crate) use stored::{Record, What};

/// Whoever sends.
pub(crate) trait Transport: Send + 'static {
    /// What it is, for messages.
    fn name(&self) -> String;

    /// Sends lines of the queue, in order. Those that have been sent before may come again.
    fn send(&mut self, records: &[Record]) -> Result<(), SendError>;

    /// What it must know when the run goes on.
    fn state(&self) -> Value;

    /// The longest pause between two attempts while the run goes on.
    fn longest_pause(&self) -> Duration {
        LONGEST_PAUSE
    }
}

/// Why something was not sent.
#[derive(Debug)]
pub(crate) enum SendError {
    /// It may be later.
    Later(String),
    /// It is not taken, now or later.
    Refused(String),
}

/// A queue with its thread.
pub(crate) struct SendQueue {
    folder: PathBuf,
    shared: Arc<Shared>,
    /// Whether the user has heard that nothing gets through, that the queue is full.
    told: [bool; 2],
}

struct Shared {
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    file: File,
    /// Bytes of the file, and those of them that are sent.
    written: u64,
    sent: u64,
    /// Why nothing gets through, since when.
    failing: Option<(Instant, String)>,
    /// Lines that were not taken, with the last reason, and lines for which there was no room.
    refused: (u64, String),
    dropped: u64,
    name: String,
    /// When something was last sent.
    progress: Instant,
    /// Nothing more comes.
    ending: bool,
    /// Nobody waits any more.
    abandoned: bool,
    done: bool,
}

/// Most bytes that wait to be sent; later lines are not kept.
const MOST_BYTES: u64 = 256 << 20;
/// Bytes of sent lines that stay in the file.
const SENT_BYTES: u64 = 1 << 20;
/// The time between two batches, and between attempts at first and at most.
const BATCH_EVERY: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(250);
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// What a run's end waits for: as long as something gets through, this long for a slow answer, and this long where there is none.
const LAST_ANSWER: Duration = Duration::from_secs(30);
const LAST_SILENCE: Duration = Duration::from_secs(5);
/// The same where others wait for this process to end.
const SHORT_SILENCE: Duration = Duration::from_secs(3);
const LAST_WAIT: Duration = Duration::from_secs(60);
/// Failures of this long are told while the run goes on.
const TOLD_AFTER: Duration = Duration::from_secs(5);

impl SendQueue {
    /// Opens the queue in a folder, with what waits there, and gives its transport what it knew when it was last open.
    pub(crate) fn open<T: Transport>(
        folder: &Path,
        start: Value,
        transport: impl FnOnce(&Value) -> io::Result<T>,
    ) -> io::Result<Box<dyn Sink>> {
        fs::create_dir_all(folder)?;
        let kept: Kept = match fs::read(folder.join(STATE)) {
            Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Kept::default(),
            Err(error) => return Err(error),
        };
        let transport = transport(&kept.state)?;
        let mut file = OpenOptions::new().create(true).read(true).append(true).open(folder.join(QUEUE))?;
        let written = whole_lines(&mut file)?;
        file.set_len(written)?;
        // A file that was cut and whose state is of before has nothing that was sent.
        let sent = if kept.sent > written { 0 } else { kept.sent };
        // Before anything is sent: a kill in the middle of it must not make a second run of this one.
        let kept = transport.state();
        write_state(folder, sent, &kept)?;
        let inner = Inner {
            file,
            written,
            sent,
            failing: None,
            refused: (0, String::new()),
            dropped: 0,
            name: transport.name(),
            progress: Instant::now(),
            ending: false,
            abandoned: false,
            done: false,
        };
        let shared = Arc::new(Shared { inner: Mutex::new(inner), changed: Condvar::new() });
        let mut queue = Self { folder: folder.to_owned(), shared: shared.clone(), told: [false; 2] };
        queue.append(What::Start(start))?;
        let mut sender = Sender { folder: folder.to_owned(), shared, transport, most: BATCH_LINES, kept };
        std::thread::Builder::new().name("lockstep-send".into()).spawn(move || sender.run())?;
        Ok(Box::new(queue))
    }

    fn append(&mut self, what: What) -> io::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
        let mut line = serde_json::to_vec(&Record { unix_ms: now, what })?;
        line.push(b'\n');
        let mut inner = self.shared.lock();
        if inner.written - inner.sent + line.len() as u64 > MOST_BYTES || line.len() > MOST_LINE_BYTES {
            inner.dropped += 1;
            return Ok(());
        }
        if let Err(error) = inner.file.write_all(&line) {
            // No part of a line stays before the next one.
            let _ = inner.file.set_len(inner.written);
            return Err(error);
        }
        inner.written += line.len() as u64;
        self.shared.changed.notify_all();
        Ok(())
    }

    /// What was not sent, for people.
    fn unsent(&self, inner: &Inner) -> Option<String> {
        let mut parts = Vec::new();
        let waiting = match lines(&self.folder.join(QUEUE), inner.sent, inner.written) {
            Ok(0) => None,
            Ok(lines) => Some(format!("{lines} lines")),
            Err(_) => Some(format!("{} bytes", inner.written - inner.sent)),
        };
        if let Some(waiting) = waiting {
            let why = inner.failing.as_ref().map_or("it is slow", |(_, cause)| cause.as_str());
            parts.push(format!(
                "{waiting} of metrics and events were not sent to {}: {why}; they are in {}, and resuming the run sends them",
                inner.name,
                self.folder.join(QUEUE).display()
            ));
        }
        let (refused, cause) = &inner.refused;
        if *refused > 0 {
            parts.push(format!("{} did not take {refused} lines of metrics and events: {cause}", inner.name));
        }
        if inner.dropped > 0 {
            parts.push(format!(
                "{} lines were dropped, as {} was full",
                inner.dropped,
                self.folder.join(QUEUE).display()
            ));
        }
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

impl Sink for SendQueue {
    fn write(&mut self, line: &str) -> io::Result<()> {
        self.append(What::Metrics(serde_json::from_str(line)?))
    }

    fn event(&mut self, line: &str) -> io::Result<()> {
        let event: Value = serde_json::from_str(line)?;
        // What validations give is in the metrics.
        if event["event"] == "validation" { Ok(()) } else { self.append(What::Event(event)) }
    }

    fn stays(&self) -> bool {
        true
    }

    fn notes(&mut self) -> Vec<String> {
        let inner = self.shared.lock();
        let (mut notes, [failing, full]) = (Vec::new(), &mut self.told);
        match &inner.failing {
            Some((since, cause)) if !*failing && since.elapsed() > TOLD_AFTER => {
                *failing = true;
                let kept = self.folder.join(QUEUE);
                notes.push(format!("nothing gets through to {}: {cause}; {} keeps it", inner.name, kept.display()));
            }
            None if *failing => {
                *failing = false;
                notes.push(format!("{} takes metrics again", inner.name));
            }
            _ => {}
        }
        if inner.dropped > 0 && !*full {
            *full = true;
            notes.push(format!(
                "{} is full: what comes now is not sent to {}",
                self.folder.join(QUEUE).display(),
                inner.name
            ));
        }
        notes
    }

    fn end(&mut self, how: RunEnd) -> Option<String> {
        let (word, answer, silence) = match how {
            RunEnd::Finished => ("finished", LAST_ANSWER, LAST_SILENCE),
            RunEnd::Interrupted => ("interrupted", LAST_ANSWER, LAST_SILENCE),
            RunEnd::Failed => ("failed", SHORT_SILENCE, SHORT_SILENCE),
            RunEnd::Continues => ("continues", SHORT_SILENCE, SHORT_SILENCE),
        };
        let unwritten = self.append(What::End(word.into())).err();
        let unwritten =
            unwritten.map(|error| format!("{} cannot be written: {error}", self.folder.join(QUEUE).display()));
        let mut inner = self.shared.lock();
        let begun = Instant::now();
        (inner.ending, inner.progress) = (true, begun);
        self.shared.changed.notify_all();
        while !inner.done && begun.elapsed() < LAST_WAIT {
            let most = if inner.failing.is_some() { silence } else { answer };
            if inner.progress.elapsed() >= most {
                break;
            }
            let waited = self.shared.changed.wait_timeout(inner, Duration::from_millis(100));
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        inner.abandoned = true;
        self.shared.changed.notify_all();
        // Whoever comes next sends the rest.
        let unsent = if how == RunEnd::Continues { None } else { self.unsent(&inner) };
        let told: Vec<String> = unwritten.into_iter().chain(unsent).collect();
        (!told.is_empty()).then(|| told.join("; "))
    }
}

impl Drop for SendQueue {
    /// Ends the thread, once it has the answer that it waits for.
    fn drop(&mut self) {
        self.shared.lock().abandoned = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread's part.
struct Sender<T> {
    folder: PathBuf,
    shared: Arc<Shared>,
    transport: T,
    /// Most lines of the next batch.
    most: usize,
    /// The transport's state as it was last written.
    kept: Value,
}

impl<T: Transport> Sender<T> {
    fn run(&mut self) {
        let mut pause = FIRST_PAUSE;
        while let Some((from, to)) = self.next() {
            let read = read(&self.folder.join(QUEUE), (from, to), self.most);
            let sent = match &read {
                Ok((records, _)) => self.transport.send(records),
                Err(error) => {
                    Err(SendError::Later(format!("{} cannot be read: {error}", self.folder.join(QUEUE).display())))
                }
            };
            let (lines, bytes) = read.map_or((0, 0), |(records, bytes)| (records.len(), bytes));
            match sent {
                Ok(()) => {
                    (pause, self.most) = (FIRST_PAUSE, (2 * self.most).min(BATCH_LINES));
                    self.sent(from + bytes);
                    self.wait(BATCH_EVERY);
                }
                // One of them: each alone, until it is found.
                Err(SendError::Refused(_)) if lines > 1 => self.most = lines / 2,
                Err(SendError::Refused(cause)) => {
                    let mut inner = self.shared.lock();
                    inner.refused = (inner.refused.0 + 1, cause);
                    drop(inner);
                    self.sent(from + bytes);
                }
                Err(SendError::Later(cause)) => {
                    let shared = self.shared.clone();
                    let mut inner = shared.lock();
                    if inner.abandoned {
                        break;
                    }
                    let since = inner.failing.take().map_or_else(Instant::now, |(since, _)| since);
                    inner.failing = Some((since, cause));
                    // A run that was made there must be found again.
                    if self.transport.state() != self.kept {
                        self.keep(from);
                    }
                    drop(inner);
                    self.wait(pause);
                    pause = (2 * pause).min(self.transport.longest_pause());
                }
            }
        }
        let mut inner = self.shared.lock();
        inner.done = true;
        self.shared.changed.notify_all();
    }

    /// Where the next lines are, once there are some; none at the end.
    fn next(&self) -> Option<(u64, u64)> {
        let mut inner = self.shared.lock();
        loop {
            if inner.abandoned || (inner.ending && inner.sent == inner.written) {
                return None;
            }
            if inner.sent < inner.written {
                return Some((inner.sent, inner.written));
            }
            inner = self.shared.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Everything up to here is sent.
    fn sent(&mut self, to: u64) {
        let shared = self.shared.clone();
        let mut inner = shared.lock();
        if inner.abandoned {
            // Another may have the files by now.
            return;
        }
        (inner.sent, inner.failing, inner.progress) = (to, None, Instant::now());
        if to == inner.written && to > SENT_BYTES && inner.file.set_len(0).is_ok() {
            (inner.sent, inner.written) = (0, 0);
            // Before anything is added: or it would be taken for sent.
            self.keep(0);
            return;
        }
        self.keep(to);
    }

    /// Writes down what was sent. Where that fails some lines are sent a second time, which does no harm. The caller holds the lock and has
    /// seen that nobody else has the files.
    fn keep(&mut self, sent: u64) {
        self.kept = self.transport.state();
        let _ = write_state(&self.folder, sent, &self.kept);
    }

    /// Waits this long, or until the run ends; then a tenth of a second at most.
    fn wait(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut inner = self.shared.lock();
        let was_ending = inner.ending;
        let until = if was_ending { until.min(Instant::now() + FIRST_PAUSE) } else { until };
        while !inner.abandoned && inner.ending == was_ending && !(was_ending && inner.failing.is_none()) {
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                return;
            };
            inner = self.shared.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests;
