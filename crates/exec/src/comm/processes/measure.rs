//! What links between processes give: time of a small message, bytes per second, and how clocks differ.

use super::ProcessCommunicator;
use crate::comm::{Action, CommError, Communicator, HostCommunicator, Piece, ProgramPlace};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// What a rank has measured of the link to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds that a small message takes, half of there and back.
    pub latency: f64,
    /// Bytes per second of a large message to the other.
    pub bytes_per_s: f64,
    /// Seconds that the other's clock is ahead of this one's, as well as half the time of a message there and back tells.
    pub ahead: f64,
}

const PLACE: ProgramPlace = ProgramPlace { op: "measure", layer: None, micro_batch: 0 };
/// Small messages of which the fastest counts, and large ones.
const TRIPS: usize = 30;
const LARGE_TRIPS: usize = 3;
/// Bytes of a large message.
const LARGE: usize = 8 << 20;
/// A tag that programs do not use.
const TAG: u32 = u32::MAX;

/// Measures the link from this rank to `other`. Both call it: the one that asks, then the other, and so on.
pub fn measure_link(comm: &ProcessCommunicator, other: usize) -> Result<Link, CommError> {
    let asks_first = comm.rank() < other;
    if !asks_first {
        answer(comm, other)?;
    }
    let link = ask(comm, other)?;
    if asks_first {
        answer(comm, other)?;
    }
    Ok(link)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
}

fn ask(comm: &ProcessCommunicator, other: usize) -> Result<Link, CommError> {
    let mut best = (f64::INFINITY, 0.0);
    for _ in 0..TRIPS {
        let (start, before) = (Instant::now(), now());
        send(comm, other, &[0; 8])?;
        let mut there = [0; 8];
        receive(comm, other, &mut there)?;
        let trip = start.elapsed().as_secs_f64();
        if trip < best.0 {
            let there = i128::from(u64::from_le_bytes(there)) - i128::from(before);
            best = (trip, there as f64 * 1e-9 - trip / 2.0);
        }
    }
    let data = vec![0; LARGE];
    let mut large = f64::INFINITY;
    for _ in 0..LARGE_TRIPS {
        let start = Instant::now();
        send(comm, other, &data)?;
        receive(comm, other, &mut [0; 8])?;
        large = large.min(start.elapsed().as_secs_f64());
    }
    let latency = best.0 / 2.0;
    // The answer takes as long as a small message.
    let bytes_per_s = LARGE as f64 / (large - latency).max(latency);
    Ok(Link { latency, bytes_per_s, ahead: best.1 })
}

fn answer(comm: &ProcessCommunicator, other: usize) -> Result<(), CommError> {
    for _ in 0..TRIPS {
        receive(comm, other, &mut [0; 8])?;
        send(comm, other, &now().to_le_bytes())?;
    }
    let mut data = vec![0; LARGE];
    for _ in 0..LARGE_TRIPS {
        receive(comm, other, &mut data)?;
        send(comm, other, &[0; 8])?;
    }
    Ok(())
}

fn send(comm: &ProcessCommunicator, to: usize, data: &[u8]) -> Result<(), CommError> {
    comm.at(PLACE);
    let message = Piece::message(data.as_ptr().cast_mut(), std::ptr::null_mut(), data.len());
    // SAFETY: the data are there until this returns; processes do not use a send buffer.
    unsafe { comm.act(&Action::Send { to, tag: TAG, copies: 1 }, &[message], PLACE) }
}

fn receive(comm: &ProcessCommunicator, from: usize, data: &mut [u8]) -> Result<(), CommError> {
    comm.at(PLACE);
    let message = Piece::message(data.as_mut_ptr(), data.as_mut_ptr(), data.len());
    // SAFETY: the memory is this call's.
    unsafe { comm.act(&Action::Receive { from, tag: TAG }, &[message], PLACE) }
}
