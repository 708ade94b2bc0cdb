//! Messages: order, copies, tags, and the end of the sender.

use super::{Buffer, Make, Subject, delay, together, values};
use crate::comm::{Action, Piece, ProgramPlace};
use lockstep_ir::DType;

/// A message of this tag, for errors.
const fn place(tag: u32) -> ProgramPlace {
    ProgramPlace { op: if tag == RING { "ring" } else { "message" }, layer: Some(tag as usize), micro_batch: 0 }
}

pub fn check(make: Make<'_>) -> Result<(), String> {
    for ranks in 1..=5 {
        for copies in 1..=3 {
            ring(make, ranks, copies)?;
        }
    }
    tags(make)?;
    shapes(make)?;
    last_words(make)
}

/// Sends from a buffer that is overwritten at once.
fn send(
    subject: &Subject,
    to: usize,
    tag: u32,
    text: &[u8],
    send_buffer: &mut Buffer,
    copies: usize,
) -> Result<(), String> {
    let mut data = Buffer::new(subject, text.len());
    data.write(0, text);
    subject.comm().at(place(tag));
    // The send buffer has room for the copies and lives until the rank has left.
    let message = Piece::message(data.pointer(), send_buffer.pointer(), text.len());
    subject.act(Action::Send { to, tag, copies }, &[message], place(tag)).map_err(|e| e.to_string())?;
    data.write(0, &vec![0; text.len()]);
    Ok(())
}

fn receive(subject: &Subject, from: usize, tag: u32, expected: &[u8]) -> Result<(), String> {
    let mut data = Buffer::new(subject, expected.len());
    subject.comm().at(place(tag));
    let message = Piece::message(data.pointer(), data.pointer(), expected.len());
    subject.act(Action::Receive { from, tag }, &[message], place(tag)).map_err(|e| e.to_string())?;
    if data.bytes() != expected || !data.intact() {
        return Err(format!("a message from rank {from} with tag {tag} comes out wrong"));
    }
    Ok(())
}

fn text(from: usize, tag: u32, number: u64, bytes: usize) -> Vec<u8> {
    let key = number << 16 | (from as u64) << 8 | u64::from(tag);
    values(DType::U32, key, 0..bytes.div_ceil(4), false)[..bytes].to_vec()
}

/// Everybody sends to the next, as many ahead as there are copies.
fn ring(make: Make<'_>, ranks: usize, copies: usize) -> Result<(), String> {
    for bytes in [0, 14, 4000] {
        together(make, ranks, &format!("a ring of messages with {copies} copies"), |subject| {
            round_the_ring(subject, copies, bytes, &|result| end(subject, result))
        })?;
    }
    Ok(())
}

/// What comes after a rank's last message, before its send buffers go.
pub(super) type Ending<'a> = &'a dyn Fn(Result<(), String>) -> Result<(), String>;

pub(super) fn round_the_ring(subject: &Subject, copies: usize, bytes: usize, ending: Ending<'_>) -> Result<(), String> {
    const MESSAGES: u64 = 20;
    let (me, ranks) = (subject.comm().rank(), subject.comm().ranks());
    let (next, before) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
    let mut send_buffer = Buffer::new(subject, bytes * copies);
    let ahead = copies as u64;
    let run = |send_buffer: &mut Buffer| {
        for number in 0..MESSAGES + ahead {
            delay(number, me);
            if number >= ahead {
                receive(subject, before, RING, &text(before, RING, number - ahead, bytes))?;
            }
            if number < MESSAGES {
                send(subject, next, RING, &text(me, RING, number, bytes), send_buffer, copies)?;
            }
        }
        Ok(())
    };
    let result = run(&mut send_buffer).and_then(|()| {
        if send_buffer.intact() { Ok(()) } else { Err("a message goes beyond the send buffer".to_owned()) }
    });
    ending(result)
}

/// The tag of messages in a ring, and those of others, from the first rank to the second.
pub(super) const RING: u32 = 7;
pub(super) const TAGS: [u32; 3] = [0, 1, 2];

/// Streams of different tags do not disturb each other, whatever order they are taken in.
fn tags(make: Make<'_>) -> Result<(), String> {
    together(make, 2, "messages with tags", |subject| several_tags(subject, &|result| end(subject, result)))
}

pub(super) fn several_tags(subject: &Subject, ending: Ending<'_>) -> Result<(), String> {
    let mut send_buffers: Vec<Buffer> = TAGS.iter().map(|_| Buffer::new(subject, 2 * 10)).collect();
    let mut run = || {
        for round in 0..10 {
            for number in 2 * round..2 * round + 2 {
                for (tag, send_buffer) in TAGS.into_iter().zip(&mut send_buffers) {
                    if subject.comm().rank() == 0 {
                        send(subject, 1, tag, &text(0, tag, number, 10), send_buffer, 2)?;
                    }
                }
            }
            for tag in [2, 0, 1] {
                for number in 2 * round..2 * round + 2 {
                    if subject.comm().rank() == 1 {
                        receive(subject, 0, tag, &text(0, tag, number, 10))?;
                    }
                }
            }
        }
        Ok(())
    };
    let result = run();
    ending(result)
}

/// A stream may change its send buffer and the size of its messages.
fn shapes(make: Make<'_>) -> Result<(), String> {
    together(make, 2, "messages of changing size", |subject| several_shapes(subject, &|result| end(subject, result)))
}

pub(super) fn several_shapes(subject: &Subject, ending: Ending<'_>) -> Result<(), String> {
    let mut send_buffers = [Buffer::new(subject, 30), Buffer::new(subject, 200)];
    let mut run = || {
        for number in 0..30u64 {
            let large = number / 3 % 2;
            let (bytes, copies) = [(10, 3), (100, 2)][large as usize];
            let text = text(0, 0, number, bytes);
            match subject.comm().rank() {
                0 => send(subject, 1, 0, &text, &mut send_buffers[large as usize], copies)?,
                1 => receive(subject, 0, 0, &text)?,
                _ => {}
            }
        }
        Ok(())
    };
    let result = run();
    ending(result)
}

/// What a rank sent before it left arrives, though its send buffer is gone afterwards.
fn last_words(make: Make<'_>) -> Result<(), String> {
    together(make, 2, "messages of a rank that leaves", |subject| {
        if subject.comm().rank() == 0 {
            let mut send_buffer = Buffer::new(subject, 200);
            let result =
                (0..2).try_for_each(|number| send(subject, 1, 0, &text(0, 0, number, 100), &mut send_buffer, 2));
            let result = end(subject, result);
            send_buffer.write(0, &[0; 200]);
            return result;
        }
        std::thread::sleep(std::time::Duration::from_millis(30));
        (0..2).try_for_each(|number| receive(subject, 0, 0, &text(0, 0, number, 100)))
    })
}

/// Ends a rank's program before its send buffers go.
fn end(subject: &Subject, result: Result<(), String>) -> Result<(), String> {
    match &result {
        Ok(()) => subject.leave(),
        Err(error) => subject.comm().fail(error),
    }
    result
}
