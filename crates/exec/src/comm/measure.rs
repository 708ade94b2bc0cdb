//! How fast the ranks of a world talk to each other: every collective over sizes, with results that are checked.
//!
//! Sizes and bandwidths are those of NCCL's tests, so that they can be compared. The *algorithm bandwidth* is the size over the time;
//! the *bus bandwidth* is what each rank's link must have carried for that, whatever the number of ranks.

use super::{
    Action, Collective, CommError, CommunicationCall, Connection, Memory, Piece, ProgramPlace, RankGroup, Subject,
};
use lockstep_ir::{DType, Movement, units};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// All ranks together.
    Together(Collective),
    /// Messages to and fro between pairs of neighbours, as between pipeline stages; the time is that of one of them. With an odd
    /// number of ranks the last watches.
    SendReceive,
}

impl Pattern {
    /// All of them.
    pub const ALL: [Pattern; Collective::ALL.len() + 1] = {
        let mut all = [Pattern::SendReceive; Collective::ALL.len() + 1];
        let mut i = 0;
        while i < Collective::ALL.len() {
            all[i] = Pattern::Together(Collective::ALL[i]);
            i += 1;
        }
        all
    };

    /// Its name in tables and files.
    pub const fn name(self) -> &'static str {
        match self {
            Pattern::Together(kind) => kind.name(),
            Pattern::SendReceive => "send_receive",
        }
    }

    /// The bytes that each link carries for every byte of the size: bus bandwidth over algorithm bandwidth.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        match self {
            Pattern::Together(kind) => kind.bus_factor(ranks),
            Pattern::SendReceive => 1.0,
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One size of one pattern.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// What was done.
    pub pattern: Pattern,
    /// Its size: of the tensor that is summed or sent, of the whole that is gathered or scattered; of all parts that a rank sends in an
    /// all-to-all.
    pub bytes: usize,
    /// Seconds of one, in the mean over the repeats, of the rank for which it took longest.
    pub seconds: f64,
    /// How often it was done.
    pub repeats: usize,
}

impl Measured {
    /// Bytes per second of the size.
    pub fn algorithm_bytes_per_s(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }

    /// Bytes per second that each rank's link carries.
    pub fn bus_bytes_per_s(&self, ranks: usize) -> f64 {
        self.algorithm_bytes_per_s() * self.pattern.bus_factor(ranks)
    }
}

/// Why a measurement ended.
#[derive(Clone, Debug, PartialEq, thiserror::Error, lockstep_ir::Hint)]
pub enum MeasureError {
    /// The ranks did not come to its end.
    #[error(transparent)]
    #[hint(_0.hint())]
    Comm(#[from] CommError),
    /// A result is not what it must be.
    #[error(
        "{pattern} of {} gave rank {rank} {found} at element {element}, and {expected} is right",
        units::bytes(*.bytes as u64)
    )]
    #[hint(
        "this is a bug in Lockstep or in what carries its bytes (network, MPI, NCCL): please report it with the \
         output of `lockstep doctor`"
    )]
    Wrong {
        /// What was done.
        pattern: Pattern,
        /// Its size.
        bytes: usize,
        /// The rank that found it.
        rank: usize,
        /// Where.
        element: usize,
        /// What is there.
        found: f32,
        /// What should be.
        expected: f32,
    },
}

/// The connections that [`measure`] uses among this many ranks.
pub fn connections(ranks: usize) -> Vec<Connection> {
    let pairs = (0..ranks).step_by(2).filter(|first| first + 1 < ranks);
    let messages = |first: usize| {
        [(first, first + 1), (first + 1, first)].map(|(from, to)| Connection::Messages { from, to, tag: TAG })
    };
    std::iter::once(Connection::Group(RankGroup::all(ranks))).chain(pairs.flat_map(messages)).collect()
}

/// Measures these patterns at these sizes in bytes, each for about `seconds`; all ranks call it alike. `show` hears of each as it is
/// done.
pub fn measure(
    subject: &Subject,
    patterns: &[Pattern],
    sizes: &[usize],
    seconds: f64,
    show: &mut dyn FnMut(&Measured),
) -> Result<Vec<Measured>, MeasureError> {
    let (rank, ranks) = (subject.comm().rank(), subject.comm().ranks());
    let largest = sizes.iter().copied().max().unwrap_or(0).div_ceil(WIDTH) + ranks;
    let memory = |bytes: usize| subject.memory(bytes);
    let mut bench = Bench {
        subject,
        ranks,
        input: memory(largest * WIDTH),
        output: memory(largest * WIDTH),
        send_buffer: memory(largest * WIDTH),
        told: [memory(size_of::<f64>()), memory(ranks * size_of::<f64>())],
    };
    let values: Vec<u8> = (0..largest).flat_map(|i| value(rank, i).to_ne_bytes()).collect();
    bench.input.write(0, &values);
    let mut all = Vec::new();
    for pattern in patterns {
        for size in sizes {
            let measured = bench.size(*pattern, *size, seconds)?;
            show(&measured);
            all.push(measured);
        }
    }
    Ok(all)
}

/// Bytes of an element.
const WIDTH: usize = size_of::<f32>();
/// Repeats of one size, whatever time they take.
const REPEATS: std::ops::RangeInclusive<usize> = 3..=10_000;
/// Elements of a result that are looked at.
const CHECKED: usize = 1 << 18;
/// The stream of messages.
const TAG: u32 = 0;

/// What a rank gives: whole numbers whose sums are exact.
fn value(rank: usize, element: usize) -> f32 {
    ((element * 7 + rank * 31) % 61) as f32
}

struct Bench<'a> {
    subject: &'a Subject,
    ranks: usize,
    input: Box<dyn Memory>,
    output: Box<dyn Memory>,
    send_buffer: Box<dyn Memory>,
    /// A number of this rank, and those of all.
    told: [Box<dyn Memory>; 2],
}

impl Bench<'_> {
    fn size(&mut self, pattern: Pattern, size: usize, seconds: f64) -> Result<Measured, MeasureError> {
        let ranks = self.ranks;
        // Elements of a piece, and of all that a rank gives or gets.
        let parts = match pattern {
            Pattern::Together(kind) => {
                let [given, taken, _] = kind.parts(ranks);
                given.max(taken)
            }
            Pattern::SendReceive => 1,
        };
        let elements = size.div_ceil(WIDTH * parts);
        let whole = elements * parts;
        let bytes = whole * WIDTH;
        self.output.write(0, &vec![u8::MAX; bytes]);
        let calls = self.calls(pattern, elements);
        self.run(pattern, &calls, 1)?;
        self.check(pattern, elements, bytes)?;
        let begin = Instant::now();
        self.run(pattern, &calls, 1)?;
        // All must do as many: what they agree on is the sum.
        let guess = self.all(begin.elapsed())?.iter().sum::<f64>() / ranks as f64;
        let repeats = ((seconds / guess.max(1e-9)) as usize).clamp(*REPEATS.start(), *REPEATS.end());
        self.all(Duration::ZERO)?;
        let begin = Instant::now();
        self.run(pattern, &calls, repeats)?;
        let longest = self.all(begin.elapsed())?.into_iter().fold(0.0, f64::max);
        let each = match pattern {
            Pattern::Together(_) => 1,
            Pattern::SendReceive => 2,
        };
        Ok(Measured { pattern, bytes, seconds: longest / (each * repeats) as f64, repeats })
    }

    /// What this rank does for it once.
    fn calls(&self, pattern: Pattern, elements: usize) -> Vec<Arc<CommunicationCall>> {
        let (input, output) = (self.input.pointer(), self.output.pointer());
        let call = |action, input, output| {
            let piece = Piece::new(input, output, elements, DType::F32);
            Arc::new(CommunicationCall::absolute(action, &[piece], ProgramPlace::outside(pattern.name())))
        };
        match pattern {
            Pattern::Together(kind) => vec![call(Action::Together(kind, RankGroup::all(self.ranks)), input, output)],
            Pattern::SendReceive => {
                let Some((other, first)) = self.partner() else { return Vec::new() };
                // The second answers with what it has received.
                let data = if first { input } else { output };
                let send = call(Action::Send { to: other, tag: TAG, copies: 1 }, data, self.send_buffer.pointer());
                let receive = call(Action::Receive { from: other, tag: TAG }, input, output);
                if first { vec![send, receive] } else { vec![receive, send] }
            }
        }
    }

    /// This many times, and to the end of the last.
    fn run(&self, pattern: Pattern, calls: &[Arc<CommunicationCall>], times: usize) -> Result<(), CommError> {
        let mut last = None;
        for call in (0..times).flat_map(|_| calls) {
            last = Some(self.subject.enqueue(0, call, ProgramPlace::outside(pattern.name()))?);
        }
        last.map_or(Ok(()), |last| self.subject.wait(0, last))
    }

    /// The rank that this one sends messages to and fro with, and whether it begins.
    fn partner(&self) -> Option<(usize, bool)> {
        let rank = self.subject.comm().rank();
        let first = rank.is_multiple_of(2);
        let other = if first { rank + 1 } else { rank - 1 };
        (other < self.ranks).then_some((other, first))
    }

    /// What every rank measured.
    fn all(&mut self, mine: Duration) -> Result<Vec<f64>, CommError> {
        let [one, all] = &mut self.told;
        one.write(0, &mine.as_secs_f64().to_ne_bytes());
        let piece = Piece::new(one.pointer(), all.pointer(), 1, DType::F64);
        let action = Action::Together(Collective::AllGather, RankGroup::all(self.ranks));
        self.subject.act(action, &[piece], ProgramPlace::outside("bench"))?;
        Ok(all.read().as_chunks().0.iter().map(|bytes| f64::from_ne_bytes(*bytes)).collect())
    }

    /// Refuses a result that is not right.
    fn check(&self, pattern: Pattern, elements: usize, bytes: usize) -> Result<(), MeasureError> {
        let (rank, ranks) = (self.subject.comm().rank(), self.ranks);
        let sum = |element: usize| (0..ranks).map(|other| value(other, element)).sum::<f32>();
        let (count, right): (usize, Box<dyn Fn(usize) -> f32>) = match pattern {
            Pattern::Together(kind) => {
                let right: Box<dyn Fn(usize) -> f32> = match kind.movement() {
                    Movement::SumsWhole => Box::new(sum),
                    Movement::SumsParts => Box::new(|i| sum(rank * elements + i)),
                    Movement::Gathers => Box::new(|i| value(i / elements, i % elements)),
                    Movement::Copies(rule) => Box::new(move |i| {
                        let part = |from: usize| rule(ranks, from, rank).filter(|part| part.output == i / elements);
                        let sent = (0..ranks).find_map(|from| Some((from, part(from)?.input)));
                        sent.map_or(f32::NAN, |(from, input)| value(from, input * elements + i % elements))
                    }),
                };
                (elements * kind.parts(ranks)[1], right)
            }
            Pattern::SendReceive => match self.partner() {
                // What the first of a pair sent has come back.
                Some(_) => (elements, Box::new(|i| value(rank - rank % 2, i))),
                None => return Ok(()),
            },
        };
        let step = (count / CHECKED).max(1);
        let output = self.output.read();
        let found = |i: usize| output.as_chunks().0.get(i).map_or(f32::NAN, |bytes| f32::from_ne_bytes(*bytes));
        let wrong = (0..count).step_by(step).chain([count - 1]).find(|i| found(*i) != right(*i));
        match wrong {
            None => Ok(()),
            Some(element) => {
                let (found, expected) = (found(element), right(element));
                Err(MeasureError::Wrong { pattern, bytes, rank, element, found, expected })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::tests::{Fault, wrong};
    use lockstep_ir::Hint;

    fn on(ranks: usize, fault: Fault, sizes: &[usize]) -> Vec<Result<Vec<Measured>, MeasureError>> {
        let subjects = wrong(ranks, Duration::from_secs(20), fault);
        std::thread::scope(|scope| {
            let run = |subject: &Subject| {
                let result = measure(subject, &Pattern::ALL, sizes, 1e-3, &mut |_| ());
                if let Err(MeasureError::Wrong { .. }) = &result {
                    subject.comm().fail("wrong");
                }
                result
            };
            let threads: Vec<_> = subjects.iter().map(|subject| scope.spawn(move || run(subject))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_pattern_is_measured_at_every_size_alike_on_all_ranks() {
        for ranks in [2, 3] {
            let found = on(ranks, Fault::None, &[4, 1000, 100_000]);
            let all: Vec<_> = found.into_iter().map(Result::unwrap).collect();
            assert!(all.iter().all(|found| *found == all[0]), "ranks say different things");
            let found: Vec<_> = all[0].iter().map(|m| (m.pattern.name(), m.bytes)).collect();
            let scattered = |bytes: usize| bytes.next_multiple_of(4 * ranks);
            let expected = Pattern::ALL.iter().flat_map(|pattern| {
                let whole = matches!(pattern.name(), "reduce_scatter" | "all_gather" | "all_to_all");
                [4, 1000, 100_000].map(|b| (pattern.name(), if whole { scattered(b) } else { b }))
            });
            assert_eq!(found, expected.collect::<Vec<_>>());
            assert!(all[0].iter().all(|m| m.seconds > 0.0 && REPEATS.contains(&m.repeats)));
        }
    }

    #[test]
    fn wrong_results_are_found() {
        for kind in Collective::ALL {
            let found = on(2, Fault::Spoils(kind), &[1000]);
            let Err(error @ MeasureError::Wrong { rank: 1, element: 0, .. }) = &found[1] else { panic!("{found:?}") };
            assert!(error.with_hint().starts_with(&format!("{kind} of 1000 B gave rank 1 ")), "{error}");
        }
    }

    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        let measured = |pattern| Measured { pattern, bytes: 1 << 20, seconds: 0.5, repeats: 1 };
        let expected = [
            ("all_reduce", 1.5),
            ("reduce_scatter", 0.75),
            ("all_gather", 0.75),
            ("shift", 1.0),
            ("all_to_all", 0.75),
            ("send_receive", 1.0),
        ];
        for (name, factor) in expected {
            let pattern = Pattern::ALL.into_iter().find(|pattern| pattern.name() == name).unwrap();
            assert_eq!(measured(pattern).bus_bytes_per_s(4) / (1 << 21) as f64, factor, "{name}");
        }
    }
}
