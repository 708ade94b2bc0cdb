//! Copies of many bytes.

use crate::host::cores;
use std::ops::DerefMut;

/// Memory of the host.
pub type HostBytes = Box<dyn DerefMut<Target = [u8]> + Send + Sync>;

/// This many bytes go through the caches: a copy of fewer is read again while it is there.
const CACHED: usize = 1 << 20;

/// More threads than these do not copy faster.
const MOST_THREADS: usize = 8;

/// Copies bytes of the same number. Where there are many, several threads do: memory that is new to the process comes page by page.
pub fn copy(to: &mut [u8], from: &[u8]) {
    if to.len() <= CACHED {
        return to.copy_from_slice(from);
    }
    let part = to.len().div_ceil(MOST_THREADS.min(cores())).max(CACHED);
    let mut parts = to.chunks_mut(part).zip(from.chunks(part));
    let Some((first, of_first)) = parts.next() else { return };
    std::thread::scope(|scope| {
        for (to, from) in parts {
            scope.spawn(|| copy_here(to, from));
        }
        copy_here(first, of_first);
    });
}

/// As [`copy`], of several at once, by this many threads.
///
/// # Panics
/// If a pair has different lengths.
pub fn copy_pieces(mut pieces: Vec<(&mut [u8], &[u8])>, threads: usize) {
    let total: usize = pieces.iter().map(|(to, _)| to.len()).sum();
    let share = total.div_ceil(threads.clamp(1, MOST_THREADS));
    let run = |pieces: Vec<(&mut [u8], &[u8])>| pieces.into_iter().for_each(|(to, from)| copy_here(to, from));
    std::thread::scope(|scope| {
        while !pieces.is_empty() {
            let mut mine = Vec::new();
            let mut room = share;
            while let Some((to, from)) = pieces.pop() {
                let at = to.len().min(room);
                let ((to, more_to), (from, more_from)) = (to.split_at_mut(at), from.split_at(at));
                mine.push((to, from));
                room -= at;
                if !more_to.is_empty() {
                    pieces.push((more_to, more_from));
                    break;
                }
            }
            match pieces.is_empty() {
                true => run(mine),
                false => drop(scope.spawn(move || run(mine))),
            }
        }
    });
}

/// On this thread. Many bytes go past the caches, which saves reading what is overwritten; how many `memcpy` does so with depends on
/// the CPU, and can be more than a tensor has.
fn copy_here(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "a copy is as long as what is copied");
    if to.len() <= CACHED {
        return to.copy_from_slice(from);
    }
    past_caches(to, from);
}

#[cfg(target_arch = "x86_64")]
fn past_caches(to: &mut [u8], from: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    let start = to.as_ptr().align_offset(LINE).min(to.len());
    let lines = (to.len() - start) / LINE;
    let end = start + lines * LINE;
    to[..start].copy_from_slice(&from[..start]);
    to[end..].copy_from_slice(&from[end..]);
    let (mut at, mut source) =
        (to[start..end].as_mut_ptr().cast::<__m128i>(), from[start..end].as_ptr().cast::<__m128i>());
    for _ in 0..lines {
        // SAFETY: four times 16 bytes of both, which are apart; the target begins with a line of the cache. SSE2 is part of x86-64.
        unsafe {
            let line = [0, 1, 2, 3].map(|i| _mm_loadu_si128(source.add(i)));
            for (i, part) in line.into_iter().enumerate() {
                _mm_stream_si128(at.add(i), part);
            }
            (at, source) = (at.add(4), source.add(4));
        }
    }
    // SAFETY: only orders stores: whoever is told that the copy is done sees it.
    unsafe { _mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn past_caches(to: &mut [u8], from: &[u8]) {
    to.copy_from_slice(from);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_once_whatever_the_lengths_and_where_they_begin() {
        let from: Vec<u8> = (0..CACHED * 3 + 977).map(|i| (i % 251) as u8).collect();
        for (start, len) in [(0, 0), (3, 1000), (1, CACHED), (0, CACHED + 1), (5, 2 * CACHED + 63), (64, 3 * CACHED)] {
            let mut to = vec![0xee; from.len()];
            copy(&mut to[start..start + len], &from[start..start + len]);
            assert_eq!(to[start..start + len], from[start..start + len], "{len} from {start}");
            assert!(to[..start].iter().chain(&to[start + len..]).all(|b| *b == 0xee), "{len} from {start}");
        }
    }

    #[test]
    fn every_piece_is_copied_once_on_any_number_of_threads() {
        let from: Vec<u8> = (0..4 * CACHED).map(|i| (i % 253) as u8).collect();
        for (threads, scale) in [(1, 1), (2, 1), (3, 1), (8, 1), (2000, 1), (2, 4099), (3, 4099)] {
            let all = 1000 * scale;
            let mut to = vec![0; all];
            let mut pieces = Vec::new();
            let (mut rest, mut at) = (&mut to[..], 0);
            for len in [0, 1, 400, 7, 99, 0, 300, 193].map(|len| len * scale) {
                let (piece, behind) = rest.split_at_mut(len);
                pieces.push((piece, &from[at..at + len]));
                (rest, at) = (behind, at + len);
            }
            copy_pieces(pieces, threads);
            assert_eq!(to, from[..all], "{threads} threads");
        }
    }
}
