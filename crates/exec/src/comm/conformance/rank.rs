//! The part of the suite for a rank that is a process of its own, and has the connections that it uses from the start.

use super::messages::{RING, TAGS, round_the_ring, several_shapes, several_tags};
use super::{RankGroup, Subject, both_channels, every_kind, large_tensors};
use crate::comm::Connection;
use std::collections::BTreeSet;

/// All, in two orders.
fn groups(ranks: usize) -> [RankGroup; 2] {
    [(0..ranks).collect(), (0..ranks).rev().collect()].map(|ranks| RankGroup { ranks, channel: 0 })
}

/// The connections that [`check_rank`] uses among this many ranks.
pub fn rank_connections(ranks: usize) -> Vec<Connection> {
    let mut all: BTreeSet<_> = groups(ranks).map(Connection::Group).into();
    all.insert(Connection::Group(RankGroup { channel: 1, ..groups(ranks)[0].clone() }));
    all.extend((0..ranks).map(|from| Connection::Messages { from, to: (from + 1) % ranks, tag: RING }));
    all.extend(TAGS.map(|tag| Connection::Messages { from: 0, to: 1 % ranks, tag }));
    all.retain(|connection| connection.ranks().len() > 1);
    all.into_iter().collect()
}

/// Runs the suite as one of several ranks, all of which call it, and have not left then; the error says what is wrong. How runs end
/// is not tried.
pub fn check_rank(subject: &Subject) -> Result<(), String> {
    let ranks = subject.comm().ranks();
    let group = |by: usize| groups(ranks)[by % 2].clone();
    // Send buffers go when what was sent is taken.
    let ending = |result: Result<(), String>| {
        subject.finish();
        result
    };
    let run = || {
        every_kind(subject, &group)?;
        large_tensors(subject, &group)?;
        both_channels(subject, ranks, 50)?;
        for (copies, bytes) in [(1, 14), (3, 4000), (2, 0), (2, 1 << 20)] {
            round_the_ring(subject, copies, bytes, &ending)?;
        }
        several_tags(subject, &ending)?;
        several_shapes(subject, &ending)
    };
    let result = run();
    if let Err(error) = &result {
        subject.comm().fail(error);
    }
    result
}
