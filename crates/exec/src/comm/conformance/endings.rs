//! How runs end: ranks that disagree, fail or leave.

use super::{Buffer, Make, Subject, adds, must_fail, together};
use crate::comm::{Action, Collective, CommError, Piece, ProgramPlace, RankGroup};
use lockstep_ir::DType;
use std::time::{Duration, Instant};

const PLACE: ProgramPlace = ProgramPlace { op: "sum_gradients", layer: Some(2), micro_batch: 1 };
/// The time in which all must know.
const SOON: Duration = Duration::from_secs(3);

pub fn check(make: Make<'_>) -> Result<(), String> {
    let f32s = (10, DType::F32);
    let (sum, gather) = (Collective::AllReduce, Collective::AllGather);
    disagree(make, "kinds", (sum, &[f32s]), (gather, &[f32s]))?;
    disagree(make, "sizes", (sum, &[f32s, f32s]), (sum, &[f32s, (11, DType::F32)]))?;
    disagree(make, "types", (gather, &[f32s]), (gather, &[(10, DType::U32)]))?;
    disagree(make, "numbers of tensors", (sum, &[f32s, f32s]), (sum, &[f32s]))?;
    message_sizes(make)?;
    no_sum(make)?;
    failure(make)?;
    leaving(make)
}

/// A collective whose outputs must stay untouched.
fn call(subject: &Subject, kind: Collective, shapes: &[(usize, DType)]) -> (Result<(), CommError>, Result<(), String>) {
    let action = Action::Together(kind, RankGroup::all(subject.comm().ranks()));
    let mut memory: Vec<_> = shapes.iter().map(|_| (Buffer::new(subject, 1000), Buffer::new(subject, 1000))).collect();
    let piece = |((input, output), &(elements, dtype)): (&mut (Buffer, Buffer), &(usize, DType))| {
        Piece::new(input.pointer(), output.pointer(), elements, dtype)
    };
    let pieces: Vec<Piece> = memory.iter_mut().zip(shapes).map(piece).collect();
    subject.comm().at(PLACE);
    let start = Instant::now();
    // The buffers are larger than what is asked for, whoever is right.
    let result = subject.act(action, &pieces, PLACE);
    let fresh = Buffer::new(subject, 1000);
    let state = if start.elapsed() > SOON {
        Err(format!("{kind} takes {:?} to end", start.elapsed()))
    } else if memory.iter().any(|(input, output)| input.bytes() != fresh.bytes() || output.bytes() != fresh.bytes()) {
        Err(format!("{kind} that is refused touches memory"))
    } else {
        Ok(())
    };
    (result, state)
}

fn receive(subject: &Subject, from: usize, data: &mut Buffer, bytes: usize) -> Result<(), CommError> {
    let message = Piece::message(data.pointer(), data.pointer(), bytes);
    subject.act(Action::Receive { from, tag: 0 }, &[message], PLACE)
}

type Wish<'a> = (Collective, &'a [(usize, DType)]);

/// Rank 1 wants something else than ranks 0 and 2: all learn of it, and nothing is touched.
fn disagree(make: Make<'_>, what: &str, most: Wish<'_>, one: Wish<'_>) -> Result<(), String> {
    together(make, 3, &format!("ranks that disagree in their {what}"), |subject| {
        let (kind, shapes) = if subject.comm().rank() == 1 { one } else { most };
        let (result, state) = call(subject, kind, shapes);
        state?;
        let text = must_fail(result, "a disagreement")?;
        says(&text, &["ranks 0 and 1 do not agree", most.0.name(), one.0.name()])?;
        says(&subject.comm().failure().map(|e| e.to_string()).unwrap_or_default(), &[&text])
    })
}

/// The receiver expects another size than was sent.
fn message_sizes(make: Make<'_>) -> Result<(), String> {
    together(make, 2, "messages of another size than expected", |subject| {
        let (mut data, mut send_buffer) = (Buffer::new(subject, 64), Buffer::new(subject, 64));
        let comm = subject.comm();
        comm.at(PLACE);
        let text = if comm.rank() == 0 {
            let start = Instant::now();
            // The receiver may have refused it before the sender has gone on.
            let message = Piece::message(data.pointer(), send_buffer.pointer(), 40);
            match subject.act(Action::Send { to: 1, tag: 0, copies: 1 }, &[message], PLACE) {
                Err(error) => error.to_string(),
                Ok(()) => loop {
                    if let Some(error) = comm.failure() {
                        break error.to_string();
                    }
                    if start.elapsed() > SOON {
                        comm.fail("not told");
                        return Err("the sender of a message that is refused is not told".to_owned());
                    }
                    std::thread::sleep(Duration::from_millis(1));
                },
            }
        } else {
            must_fail(receive(subject, 0, &mut data, 48), "a message of another size")?
        };
        subject.leave();
        if data.bytes() != Buffer::new(subject, 64).bytes() {
            return Err("a message that is refused touches memory".to_owned());
        }
        says(&text, &["ranks 0 and 1 do not agree", "40 bytes", "48 bytes"])
    })
}

/// Types without a sum are refused.
fn no_sum(make: Make<'_>) -> Result<(), String> {
    for ranks in 1..3 {
        together(make, ranks, "sums of u32", |subject| {
            for kind in super::KINDS.into_iter().filter(|&kind| !adds(kind, DType::U32)) {
                let (result, state) = call(subject, kind, &[(10, DType::U32)]);
                state?;
                says(&must_fail(result, "a sum of u32")?, &["u32"])?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// A rank that fails ends the others' waiting, whatever they wait in.
fn failure(make: Make<'_>) -> Result<(), String> {
    together(make, 4, "a rank that fails", |subject| {
        let all = ["failed in attention_grad, layer 3, micro-batch 1: no more memory", "rank 2 "];
        let comm = subject.comm();
        match comm.rank() {
            2 => {
                std::thread::sleep(Duration::from_millis(60));
                comm.at(ProgramPlace { op: "attention_grad", layer: Some(3), micro_batch: 1 });
                comm.fail("no more memory");
            }
            3 => {
                let result = receive(subject, 2, &mut Buffer::new(subject, 8), 8);
                says(&must_fail(result, "a message of a failed rank")?, &all)?;
            }
            _ => {
                let (result, state) = call(subject, Collective::AllReduce, &[(10, DType::F32)]);
                state?;
                says(&must_fail(result, "a collective with a failed rank")?, &all)?;
            }
        }
        // From then on everything ends at once.
        let (result, state) = call(subject, Collective::AllGather, &[(10, DType::F32)]);
        state?;
        says(&must_fail(result, "a call after a failure")?, &all)
    })
}

/// A rank that has ended its program ends the waiting of those who need it.
fn leaving(make: Make<'_>) -> Result<(), String> {
    for by_message in [false, true] {
        together(make, 3, "a rank that ends early", |subject| {
            if subject.comm().rank() == 1 {
                std::thread::sleep(Duration::from_millis(30));
                subject.leave();
                return Ok(());
            }
            let result = if by_message {
                receive(subject, 1, &mut Buffer::new(subject, 8), 8)
            } else {
                let (result, state) = call(subject, Collective::AllReduce, &[(10, DType::F32)]);
                state?;
                result
            };
            says(&must_fail(result, "waiting for a rank that has left")?, &["rank 1 has ended its program", "layer 2"])
        })?;
    }
    Ok(())
}

fn says(text: &str, parts: &[&str]) -> Result<(), String> {
    match parts.iter().find(|part| !text.contains(**part)) {
        Some(part) => Err(format!("the error should say `{part}`, but says `{text}`")),
        None => Ok(()),
    }
}
