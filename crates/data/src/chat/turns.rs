//! Which part of a rendered conversation each message became.
//!
//! A template writes a conversation in a loop over its messages. The list that it gets notes how much was written whenever the loop
//! takes the next message, so the text between two notes is what the template wrote for a message: nothing is guessed from the text.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::Value;
use minijinja::value::{Enumerator, Object, ObjectRepr};

/// What was written, and for which message.
#[derive(Debug, Default)]
pub(super) struct Log {
    written: AtomicUsize,
    visits: Mutex<Vec<Visit>>,
}

/// The bytes that were written while a loop was at a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Visit {
    pub(super) message: usize,
    pub(super) bytes: Range<usize>,
}

impl Log {
    /// The visits that wrote something, in the order of their text.
    pub(super) fn visits(&self) -> Vec<Visit> {
        let mut visits = self.visits.lock().unwrap_or_else(PoisonError::into_inner).clone();
        visits.sort_by_key(|visit| (visit.bytes.start, visit.bytes.end));
        visits
    }

    fn now(&self) -> usize {
        self.written.load(Ordering::Relaxed)
    }
}

/// Where a template writes to.
pub(super) struct Paper {
    pub(super) text: Vec<u8>,
    log: Arc<Log>,
}

impl Paper {
    pub(super) fn new(log: Arc<Log>) -> Self {
        Paper { text: Vec::new(), log }
    }
}

impl io::Write for Paper {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.extend(bytes);
        self.log.written.store(self.text.len(), Ordering::Relaxed);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The messages of a conversation, as a template sees them.
#[derive(Debug)]
pub(super) struct Messages {
    messages: Vec<Value>,
    log: Arc<Log>,
}

impl Messages {
    pub(super) fn value(messages: &[Value], log: Arc<Log>) -> Value {
        Value::from_object(Messages { messages: messages.to_vec(), log })
    }
}

impl Object for Messages {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.messages.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Iter(Box::new(Walk { of: self.clone(), next: 0, at: None, since: 0 }))
    }
}

/// A loop over messages.
struct Walk {
    of: Arc<Messages>,
    next: usize,
    /// The message that it is at.
    at: Option<usize>,
    /// What was written before that message.
    since: usize,
}

impl Walk {
    /// Notes what was written for the message that it is at.
    fn leave(&mut self) {
        let now = self.of.log.now();
        if let Some(message) = self.at.filter(|_| now > self.since) {
            let visit = Visit { message, bytes: self.since..now };
            self.of.log.visits.lock().unwrap_or_else(PoisonError::into_inner).push(visit);
        }
        self.since = now;
    }
}

impl Iterator for Walk {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        self.leave();
        let message = self.of.messages.get(self.next).cloned();
        self.at = message.is_some().then_some(self.next);
        self.next += usize::from(message.is_some());
        message
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.of.messages.len() - self.next;
        (left, Some(left))
    }
}

/// A loop ends with its last message, or where the template breaks it off.
impl Drop for Walk {
    fn drop(&mut self) {
        self.leave();
    }
}
