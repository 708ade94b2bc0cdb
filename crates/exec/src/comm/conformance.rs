//! What every communicator must do, as a suite that any of them can run.
//!
//! Results are compared bit for bit with sums taken one after the other in the order of the group, on values for which
//! another order gives other bits. Buffers have a margin that must stay as it was.

mod buffer;
mod endings;
mod messages;
mod rank;

pub use rank::{check_rank, rank_connections};

use super::{Action, Collective, CommError, Order, Piece, ProgramPlace, RankGroup, RankGuard, Subject};
use buffer::Buffer;
use lockstep_ir::{DType, Movement, bf16, counter, f16, fixed};
use std::ops::Range;
use std::time::Duration;

/// Makes ranks under test.
#[derive(Clone, Copy)]
pub(in crate::comm) struct Make<'a> {
    /// This many of them.
    pub ranks: &'a dyn Fn(usize) -> Vec<Subject>,
    /// Where ranks are processes: how many there are at most. Those of this process are made.
    pub apart: Option<usize>,
}

const KINDS: [Collective; Collective::ALL.len()] = Collective::ALL;
const DTYPES: [DType; 6] = [DType::F32, DType::BF16, DType::F16, DType::F64, DType::Fixed64, DType::U32];

/// Runs the suite; the error says what is wrong. A run takes about two seconds; communicators need a timeout of some
/// seconds for it.
pub fn check(ranks: &dyn Fn(usize) -> Vec<Subject>) -> Result<(), String> {
    SECTIONS.iter().try_for_each(|section| section(Make { ranks, apart: None }))
}

/// As [`check`], of ranks that are processes, each of which runs it. `rank` makes this process's rank of this many, if it is one of them;
/// what takes more than `most` ranks is left out.
pub fn check_apart(most: usize, rank: &dyn Fn(usize) -> Option<Subject>) -> Result<(), String> {
    let make = Make { ranks: &|ranks| rank(ranks).into_iter().collect(), apart: Some(most) };
    SECTIONS.iter().try_for_each(|section| section(make))
}

/// The suite in parts: collectives one after the other, collectives at the same time, messages, and how runs end.
pub(super) const SECTIONS: [fn(Make<'_>) -> Result<(), String>; 4] =
    [one_by_one, at_once, messages::check, endings::check];

fn one_by_one(make: Make<'_>) -> Result<(), String> {
    (1..=8).try_for_each(|ranks| collectives(make, ranks))?;
    large(make)
}

fn at_once(make: Make<'_>) -> Result<(), String> {
    mesh(make)?;
    channels(make)?;
    [2, 5, 8].into_iter().try_for_each(|ranks| storm(make, ranks))
}

/// One collective with made-up data: everybody can compute everybody's inputs.
struct Job {
    kind: Collective,
    group: RankGroup,
    /// Rows, elements of a part of a row, type.
    pieces: Vec<(usize, usize, DType)>,
    in_place: bool,
    order: Order,
    key: u64,
}

/// Every kind with every type, and with several at once, in place and not, in groups of several orders.
fn collectives(make: Make<'_>, ranks: usize) -> Result<(), String> {
    together(make, ranks, "collectives", |subject| every_kind(subject, &|by| rotated_group(ranks, by)))
}

fn every_kind(subject: &Subject, group: &dyn Fn(usize) -> RankGroup) -> Result<(), String> {
    let mut key = 0;
    for kind in KINDS {
        let dtypes = || DTYPES.into_iter().filter(|&dtype| adds(kind, dtype));
        let mut shapes: Vec<Vec<_>> = dtypes().map(|dtype| [0, 1, 7, 1000].map(|n| (1, n, dtype)).into()).collect();
        shapes.extend([dtypes().map(|dtype| (1, 17, dtype)).collect(), vec![]]);
        let parts = matches!(kind, Collective::ReduceScatter | Collective::AllGather);
        if parts {
            shapes.push(dtypes().map(|dtype| (5, 9, dtype)).collect());
        }
        for pieces in shapes {
            for in_place in [false, true] {
                key += 1;
                let (group, order) = (group(key as usize), Order::Group);
                Job { kind, group, pieces: pieces.clone(), in_place, order, key }.run(subject)?;
            }
        }
        if parts {
            let pieces = dtypes().flat_map(|dtype| [(1, 10, dtype), (3, 1234, dtype)]).collect();
            let (group, order) = (group(key as usize), Order::ZigZag);
            Job { kind, group, pieces, in_place: false, order, key }.run(subject)?;
        }
    }
    Ok(())
}

/// Tensors that take the ranks some time, so that they work at the same time.
fn large(make: Make<'_>) -> Result<(), String> {
    together(make, 3, "large tensors", |subject| large_tensors(subject, &|by| rotated_group(3, by)))
}

fn large_tensors(subject: &Subject, group: &dyn Fn(usize) -> RankGroup) -> Result<(), String> {
    for (key, kind) in KINDS.into_iter().enumerate() {
        for dtype in [DType::F32, DType::BF16, DType::Fixed64] {
            let pieces = vec![(1, 30_001, dtype), (1, 8_192, dtype)];
            let (group, order) = (group(key), Order::Group);
            Job { kind, group, pieces, in_place: key.is_multiple_of(2), order, key: key as u64 }.run(subject)?;
        }
    }
    Ok(())
}

/// The axes and planes of a 2 × 2 × 2 mesh, one after the other, each of its groups at its own pace.
fn mesh(make: Make<'_>) -> Result<(), String> {
    together(make, 8, "groups of a 2x2x2 mesh", |subject| {
        let rank = subject.comm().rank();
        for round in 0..30u64 {
            for free in 1..8usize {
                // The group: ranks that differ in the `free` bits only.
                let ranks: Vec<usize> = (0..8).filter(|other| (other ^ rank) & !free == 0).collect();
                let key = round << 8 | (free as u64) << 4 | (rank & !free) as u64;
                delay(key, rank);
                let job = Job { kind: KINDS[(round as usize + free) % KINDS.len()], ..Job::random(key, ranks, 0) };
                job.run(subject)?;
            }
        }
        Ok(())
    })
}

/// Two streams of every rank in the same group at once.
fn channels(make: Make<'_>) -> Result<(), String> {
    together(make, 4, "two channels of one group", |subject| both_channels(subject, 4, 200))
}

fn both_channels(subject: &Subject, ranks: usize, rounds: u64) -> Result<(), String> {
    let stream = |channel: u32| -> Result<(), String> {
        let _guard = RankGuard::new(subject.comm());
        let round = |round: u64| {
            let key = round << 1 | u64::from(channel);
            delay(key, subject.comm().rank());
            Job::random(key, (0..ranks).collect(), channel).run(subject)
        };
        (0..rounds).try_for_each(round).inspect_err(|error| subject.comm().fail(error))
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| stream(1));
        stream(0).and(joined(other.join()))
    })
}

/// Many small collectives of changing groups with changing delays.
fn storm(make: Make<'_>, ranks: usize) -> Result<(), String> {
    together(make, ranks, "many collectives with delays", |subject| {
        for round in 0..250 {
            let key = counter::key(round, "storm");
            // All, or all but one.
            let mut group = rotated(ranks, key as usize % 97);
            if key.is_multiple_of(3) {
                group.pop();
            }
            delay(key, subject.comm().rank());
            if group.contains(&subject.comm().rank()) {
                Job::random(key, group, 0).run(subject)?;
            }
        }
        Ok(())
    })
}

impl Job {
    /// A small job, the same wherever the arguments are.
    fn random(key: u64, ranks: Vec<usize>, channel: u32) -> Self {
        let draw = |i: u64, n: usize| (counter::bits(key, i) % n as u64) as usize;
        let kind = KINDS[draw(0, KINDS.len())];
        let pieces = (0..1 + draw(1, 3) as u64).map(|p| (1, draw(10 + p, 70), DTYPES[draw(20 + p, 4)])).collect();
        let group = RankGroup { ranks, channel };
        Self { kind, group, pieces, in_place: draw(2, 2) == 0, order: Order::Group, key }
    }

    /// Elements of what a member gives for piece `p`.
    fn given(&self, p: usize) -> usize {
        let (rows, elements, _) = self.pieces[p];
        rows * elements * self.kind.parts(self.group.ranks.len())[0]
    }

    /// Some elements of what a member gives for piece `p`.
    fn input(&self, any_order: bool, member: usize, p: usize, range: Range<usize>) -> Vec<u8> {
        let (dtype, key) = (self.pieces[p].2, counter::bits(self.key, (member << 8 | p) as u64));
        values(dtype, key, range, any_order)
    }

    /// Piece `p` as a call has it.
    fn piece(&self, p: usize, input: *mut u8, output: *mut u8) -> Piece {
        let (rows, elements, dtype) = self.pieces[p];
        Piece { input, output, rows, elements, order: self.order, dtype }
    }

    /// What the member at `index` must get for piece `p`.
    fn expected(&self, any_order: bool, index: usize, p: usize) -> Vec<u8> {
        let ((rows, elements, dtype), n) = (self.pieces[p], self.group.ranks.len());
        let piece = self.piece(p, std::ptr::null_mut(), std::ptr::null_mut());
        let all = |range: Range<usize>| (0..n).map(move |member| self.input(any_order, member, p, range.clone()));
        match self.kind.movement() {
            Movement::SumsWhole => sum(dtype, all(0..rows * elements)),
            Movement::Copies(rule) => {
                let part = rows * elements;
                let received = (0..n).filter_map(|member| Some((member, rule(n, member, index)?)));
                let mut parts: Vec<_> = received.map(|(member, part)| (part.output, member, part.input)).collect();
                parts.sort_unstable();
                let given = |(_, member, at)| self.input(any_order, member, p, at * part..(at + 1) * part);
                parts.into_iter().flat_map(given).collect()
            }
            Movement::SumsParts => {
                let mine = (0..rows).flat_map(|row| piece.spans(n, index).map(|(whole, _, len)| (row, whole, len)));
                let sums = mine.map(|(row, whole, len)| {
                    let start = row * n * elements + whole;
                    if len == 0 { Vec::new() } else { sum(dtype, all(start..start + len)) }
                });
                sums.flatten().collect()
            }
            Movement::Gathers => {
                let mut whole = vec![0; rows * n * elements * dtype.bytes()];
                for (row, member) in (0..rows).flat_map(|row| (0..n).map(move |member| (row, member))) {
                    for (to, from, len) in piece.spans(n, member) {
                        let (to, from) = (row * n * elements + to, row * elements + from);
                        let bytes = to * dtype.bytes()..(to + len) * dtype.bytes();
                        whole[bytes].copy_from_slice(&self.input(any_order, member, p, from..from + len));
                    }
                }
                whole
            }
        }
    }

    /// Does it and looks at the result.
    fn run(&self, subject: &Subject) -> Result<(), String> {
        let n = self.group.ranks.len();
        let rank = subject.comm().rank();
        let Some(index) = self.group.ranks.iter().position(|&member| member == rank) else { return Ok(()) };
        let place = ProgramPlace { op: self.kind.name(), layer: None, micro_batch: 0 };
        subject.comm().at(place);
        let mut memory = Vec::new();
        for (p, &(rows, elements, dtype)) in self.pieces.iter().enumerate() {
            let part = elements * dtype.bytes();
            let any = subject.any_order();
            let (given, expected) = (self.input(any, index, p, 0..self.given(p)), self.expected(any, index, p));
            // In place there is one buffer, the larger one.
            let in_place = self.in_place && rows == 1;
            // Where a rank's own part is in it: of the input and of the output. Copies go from one buffer to another.
            let own = match self.kind.movement() {
                _ if !in_place => None,
                Movement::SumsWhole => Some((0, 0)),
                Movement::SumsParts => Some((0, index * part)),
                Movement::Gathers => Some((index * part, 0)),
                Movement::Copies(_) => None,
            };
            let length = if own.is_some() { given.len().max(expected.len()) } else { expected.len() };
            let mut output = Buffer::new(subject, length);
            let mut input = Buffer::new(subject, given.len());
            input.write(0, &given);
            let (mut from, mut to) = (input.pointer(), output.pointer());
            if let Some((given_at, taken_at)) = own {
                output.write(given_at, &given);
                (from, to) = (to.wrapping_add(given_at), to.wrapping_add(taken_at));
            }
            let piece = self.piece(p, from, to);
            let start = own.map_or(0, |(_, taken_at)| taken_at);
            memory.push((piece, input, output, given, expected, start));
        }
        let pieces: Vec<Piece> = memory.iter().map(|m| m.0).collect();
        subject.act(Action::Together(self.kind, self.group.clone()), &pieces, place).map_err(|e| e.to_string())?;
        for (piece, input, output, given, expected, start) in &memory {
            let wrong = if output.bytes()[*start..start + expected.len()] != expected[..] {
                "gives the wrong result"
            } else if input.bytes() != given[..] {
                "changes its input"
            } else if !input.intact() || !output.intact() {
                "writes beyond its buffers"
            } else {
                continue;
            };
            let (kind, elements, dtype) = (self.kind, piece.elements, piece.dtype);
            let how = if self.in_place { " in place" } else { "" };
            return Err(format!("{kind} of {elements} elements {dtype}{how} by {n} ranks {wrong}"));
        }
        Ok(())
    }
}

/// Runs a program on fresh ranks, one thread each. The first error counts; it ends the other ranks too.
fn together(
    make: Make<'_>,
    ranks: usize,
    what: &str,
    program: impl Fn(&Subject) -> Result<(), String> + Sync,
) -> Result<(), String> {
    if make.apart.is_some_and(|most| ranks > most) {
        return Ok(());
    }
    let subjects = (make.ranks)(ranks);
    let others =
        |(i, s): (usize, &Subject)| s.comm().ranks() != ranks || (make.apart.is_none() && s.comm().rank() != i);
    let few = make.apart.is_none() && subjects.len() != ranks;
    if few || subjects.iter().enumerate().any(others) {
        return Err(format!("asked for {ranks} ranks, got others"));
    }
    let program = &program;
    let run = |subject: &Subject| {
        let _guard = RankGuard::new(subject.comm());
        let result = program(subject);
        match &result {
            Ok(()) => subject.leave(),
            Err(error) => subject.comm().fail(error),
        }
        result
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = subjects.iter().map(|subject| scope.spawn(move || run(subject))).collect();
        let results: Vec<_> = threads.into_iter().map(|thread| joined(thread.join())).collect();
        results.into_iter().collect::<Result<(), _>>()
    })
    .map_err(|error| format!("{what}, {ranks} ranks: {error}"))
}

fn joined(result: std::thread::Result<Result<(), String>>) -> Result<(), String> {
    result.unwrap_or_else(|_| Err("a rank panicked".to_owned()))
}

fn adds(kind: Collective, dtype: DType) -> bool {
    !kind.sums() || dtype != DType::U32
}

/// All ranks, in an order that depends on `by`.
fn rotated(ranks: usize, by: usize) -> Vec<usize> {
    let order = (0..ranks).map(|i| (i + by) % ranks);
    if by.is_multiple_of(2) { order.collect() } else { order.rev().collect() }
}

fn rotated_group(ranks: usize, by: usize) -> RankGroup {
    RankGroup { ranks: rotated(ranks, by), channel: 0 }
}

/// Sometimes lets others go first.
fn delay(key: u64, rank: usize) {
    match counter::bits(key, 1000 + rank as u64) % 16 {
        0 => std::thread::sleep(Duration::from_micros(200)),
        1..4 => std::thread::yield_now(),
        _ => {}
    }
}

/// Values whose sum depends on the order of the terms: many are large powers of two, which swallow the others and cancel. In `any_order`
/// they are small whole numbers, whose sum is the same in every order. What is added in fixed point is up to half of what fits: some
/// sums leave the range, depending on the order.
fn values(dtype: DType, key: u64, range: Range<usize>, any_order: bool) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(range.len() * dtype.bytes());
    for i in range {
        let bits = counter::bits(key, i as u64);
        let number = |large: f64| {
            let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
            let small = 1.0 + (bits >> 12) as f64 / (1u64 << 52) as f64;
            match any_order {
                true => f64::from((bits % 9) as i8 - 4),
                false => sign * if bits & 2 == 0 { large } else { small },
            }
        };
        match dtype {
            DType::F32 => bytes.extend((number((1u64 << 40) as f64) as f32).to_le_bytes()),
            DType::BF16 => bytes.extend(bf16::from_f32(number((1u64 << 40) as f64) as f32).to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f32(number(f64::from(1 << 14)) as f32).to_le_bytes()),
            DType::E4M3 | DType::E5M2 | DType::Int8 => bytes.push(bits as u8),
            DType::F64 => bytes.extend(number((1u128 << 80) as f64).to_le_bytes()),
            DType::Fixed64 => bytes.extend((bits as i64 >> 2).to_le_bytes()),
            DType::U32 => bytes.extend((bits as u32).to_le_bytes()),
            DType::Signed8 | DType::Unsigned8 => unreachable!("moments stay where they are"),
        }
    }
    bytes
}

/// The sum of the terms, one after the other.
fn sum(dtype: DType, terms: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    fn fold<const N: usize, S: Copy>(
        terms: impl Iterator<Item = Vec<u8>>,
        read: impl Fn([u8; N]) -> S,
        add: impl Fn(S, S) -> S,
        write: impl Fn(S) -> [u8; N],
    ) -> Vec<u8> {
        let mut sums: Vec<S> = Vec::new();
        for (i, term) in terms.enumerate() {
            let elements = term.as_chunks::<N>().0.iter().map(|&bytes| read(bytes));
            if i == 0 {
                sums = elements.collect();
            } else {
                sums.iter_mut().zip(elements).for_each(|(sum, x)| *sum = add(*sum, x));
            }
        }
        sums.into_iter().flat_map(write).collect()
    }
    match dtype {
        DType::F32 => fold(terms, f32::from_le_bytes, |a, b| a + b, f32::to_le_bytes),
        DType::F64 => fold(terms, f64::from_le_bytes, |a, b| a + b, f64::to_le_bytes),
        DType::Fixed64 => fold(terms, i64::from_le_bytes, fixed::merge, i64::to_le_bytes),
        DType::BF16 => {
            let widen = |bytes| bf16::to_f32(u16::from_le_bytes(bytes));
            fold(terms, widen, |a, b| a + b, |sum| bf16::from_f32(sum).to_le_bytes())
        }
        DType::F16 => {
            let widen = |bytes| f16::to_f32(u16::from_le_bytes(bytes));
            fold(terms, widen, |a, b| a + b, |sum| f16::from_f32(sum).to_le_bytes())
        }
        DType::E4M3 | DType::E5M2 | DType::Int8 | DType::Signed8 | DType::Unsigned8 | DType::U32 => Vec::new(),
    }
}

/// The text of an error that must be there.
fn must_fail(result: Result<(), CommError>, what: &str) -> Result<String, String> {
    result.err().map(|error| error.to_string()).ok_or_else(|| format!("{what} is not refused"))
}
