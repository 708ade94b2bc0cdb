//! A process among all that there ever were, and what can be proven of it.

use lockstep_exec::comm::processes::host;
use serde::{Deserialize, Serialize};
use std::fs;

/// A process, as it is told from all others that there ever were.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// Its name: host, number and when it began.
    pub id: String,
    /// Its host.
    pub host: String,
    /// Its number there.
    pub pid: u32,
    /// In which space of numbers: containers of one host have their own.
    pub pids: String,
    /// When it began, as the system counts.
    pub began: u64,
}

impl Seat {
    pub(super) fn of_this_process() -> Self {
        let (host, pid) = (host(), std::process::id());
        let began = began(pid).unwrap_or(0);
        let pids = fs::read_link("/proc/self/ns/pid").map_or_else(|_| String::new(), |p| p.display().to_string());
        Self { id: format!("{host}-{pid}-{began}"), host, pid, pids, began }
    }

    /// Whether this process can tell that the other has ended: it ran here.
    pub(super) fn is_proven_dead(&self, me: &Seat) -> bool {
        let here = self.host == me.host && self.pids == me.pids && !me.pids.is_empty();
        here && self.id != me.id && began(self.pid) != Some(self.began)
    }
}

/// When a process began, in ticks since the start of the system; none where there is no such process, or it has ended and only its parent does not know
/// yet.
fn began(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its name, in parentheses, may hold anything.
    let rest = stat.rsplit_once(") ")?.1;
    let mut fields = rest.split(' ');
    if matches!(fields.next(), Some("Z" | "X")) {
        return None;
    }
    fields.nth(18)?.parse().ok()
}
