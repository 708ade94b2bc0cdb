//! Values that ranks of one process hand each other, for executors that communicate otherwise than through the host's memory.

use super::peers::{Gate, Peers};
use super::{CommError, ProgramPlace, RankGroup};
use std::any::Any;
use std::collections::VecDeque;

type Value = Box<dyn Any + Send>;

/// Where the ranks of a group bring a value each, and the last makes something of them for all.
pub struct ValueRendezvous {
    members: Vec<usize>,
    gate: Gate<Round>,
}

struct Round {
    /// Counts the rounds that have ended.
    ended: u64,
    brought: Vec<Option<Value>>,
    /// What came of the last round. It is there until all have come to the next.
    result: Option<Value>,
}

impl ValueRendezvous {
    pub fn new(group: &RankGroup) -> Self {
        let brought = group.ranks.iter().map(|_| None).collect();
        Self { members: group.ranks.clone(), gate: Gate::new(Round { ended: 0, brought, result: None }) }
    }

    /// Brings what member `index` has. The last to come calls `act` with everybody's, in the order of the group.
    pub fn meet<T: Send + 'static, R: Clone + Send + 'static>(
        &self,
        peers: &Peers,
        index: usize,
        place: ProgramPlace,
        value: T,
        act: impl FnOnce(Vec<T>) -> R,
    ) -> Result<R, CommError> {
        let me = self.members[index];
        let refused = |reason: &str| peers.refuse(me, place, reason);
        let mut round = self.gate.lock();
        if round.brought[index].is_some() {
            return Err(refused("two collectives of one group at once on one channel"));
        }
        round.brought[index] = Some(Box::new(value));
        let before = round.ended;
        if round.brought.iter().all(Option::is_some) {
            let values = round.brought.iter().flatten().count();
            let values: Vec<T> = (0..values).filter_map(|i| take(&mut round.brought[i])).collect();
            // Others wait for the end of the round, which is below.
            drop(round);
            if values.len() != self.members.len() {
                return Err(refused("ranks that bring different things"));
            }
            let result = act(values);
            let mut round = self.gate.lock();
            round.result = Some(Box::new(result.clone()));
            round.ended += 1;
            self.gate.announce();
            return Ok(result);
        }
        // Who waits for the last to act waits for that one as well.
        let absent = |round: &Round, rank: usize| {
            let gone = round.brought.iter().all(Option::is_none);
            self.members.iter().zip(&round.brought).any(|(&m, b)| m == rank && m != me && (gone || b.is_none()))
        };
        let (round, result) = peers.wait(me, place, &self.gate, round, |round| round.ended != before, absent);
        result?;
        let result = round.result.as_ref().and_then(|value| value.downcast_ref::<R>()).cloned();
        drop(round);
        result.ok_or_else(|| refused("ranks that expect different things"))
    }
}

fn take<T: 'static>(value: &mut Option<Value>) -> Option<T> {
    value.take()?.downcast::<T>().ok().map(|value| *value)
}

/// Values from one rank to another, in order.
pub struct Post {
    pub from: usize,
    pub to: usize,
    gate: Gate<VecDeque<Value>>,
}

impl Post {
    pub fn new(from: usize, to: usize) -> Self {
        Self { from, to, gate: Gate::new(VecDeque::new()) }
    }

    pub fn send<T: Send + 'static>(&self, value: T) {
        let mut values = self.gate.lock();
        values.push_back(Box::new(value));
        self.gate.announce();
    }

    /// The next value, when it is there.
    pub fn receive<T: 'static>(&self, peers: &Peers, place: ProgramPlace) -> Result<T, CommError> {
        let values = self.gate.lock();
        let there = |values: &VecDeque<Value>| !values.is_empty();
        let (mut values, result) = peers.wait(self.to, place, &self.gate, values, there, |_, rank| rank == self.from);
        result?;
        let value = take(&mut values.pop_front());
        drop(values);
        value.ok_or_else(|| peers.refuse(self.to, place, "a value of another kind than was sent"))
    }
}
