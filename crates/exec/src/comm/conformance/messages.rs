//! Messages: order, copies, tags, and the end of the sender.

use super::{Buffer, Make, delay, together, values};
use crate::comm::{Communicator, ProgramPlace};
use lockstep_ir::DType;

const PLACE: ProgramPlace = ProgramPlace { op: "message", layer: None, micro_batch: 0 };

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
    comm: &dyn Communicator,
    to: usize,
    tag: u32,
    text: &[u8],
    send_buffer: &mut Buffer,
    copies: usize,
) -> Result<(), String> {
    let mut data = Buffer::new(text.len());
    data.bytes_mut().copy_from_slice(text);
    comm.at(PLACE);
    // SAFETY: the send buffer has room for the copies and lives until the rank has left.
    let result = unsafe { comm.send(to, tag, data.pointer(), text.len(), send_buffer.pointer(), copies, PLACE) };
    data.bytes_mut().fill(0);
    result.map_err(|e| e.to_string())
}

fn receive(comm: &dyn Communicator, from: usize, tag: u32, expected: &[u8]) -> Result<(), String> {
    let mut data = Buffer::new(expected.len());
    comm.at(PLACE);
    // SAFETY: the buffer has as many bytes.
    unsafe { comm.receive(from, tag, data.pointer(), expected.len(), PLACE) }.map_err(|e| e.to_string())?;
    if data.bytes() != expected || !data.intact() {
        return Err(format!("a message from rank {from} with tag {tag} comes out wrong"));
    }
    Ok(())
}

fn text(from: usize, tag: u32, number: u64, bytes: usize) -> Vec<u8> {
    values(DType::U32, number << 16 | (from as u64) << 8 | u64::from(tag), 0..bytes.div_ceil(4))[..bytes].to_vec()
}

/// Everybody sends to the next, as many ahead as there are copies.
fn ring(make: Make<'_>, ranks: usize, copies: usize) -> Result<(), String> {
    const MESSAGES: u64 = 20;
    for bytes in [0, 13, 4000] {
        together(make, ranks, &format!("a ring of messages with {copies} copies"), |comm| {
            let me = comm.rank();
            let (next, before) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
            let mut send_buffer = Buffer::new(bytes * copies);
            let ahead = copies as u64;
            let run = |send_buffer: &mut Buffer| {
                for number in 0..MESSAGES + ahead {
                    delay(number, me);
                    if number >= ahead {
                        receive(comm, before, 7, &text(before, 7, number - ahead, bytes))?;
                    }
                    if number < MESSAGES {
                        send(comm, next, 7, &text(me, 7, number, bytes), send_buffer, copies)?;
                    }
                }
                Ok(())
            };
            let result = run(&mut send_buffer).and_then(|()| {
                if send_buffer.intact() { Ok(()) } else { Err("a message goes beyond the send buffer".to_owned()) }
            });
            end(comm, result)
        })?;
    }
    Ok(())
}

/// Streams of different tags do not disturb each other, whatever order they are taken in.
fn tags(make: Make<'_>) -> Result<(), String> {
    together(make, 2, "messages with tags", |comm| {
        let mut send_buffers: Vec<Buffer> = (0..3).map(|_| Buffer::new(2 * 9)).collect();
        let mut run = || {
            for round in 0..10 {
                for number in 2 * round..2 * round + 2 {
                    for (tag, send_buffer) in (0..3).zip(&mut send_buffers) {
                        if comm.rank() == 0 {
                            send(comm, 1, tag, &text(0, tag, number, 9), send_buffer, 2)?;
                        }
                    }
                }
                for tag in [2, 0, 1] {
                    for number in 2 * round..2 * round + 2 {
                        if comm.rank() == 1 {
                            receive(comm, 0, tag, &text(0, tag, number, 9))?;
                        }
                    }
                }
            }
            Ok(())
        };
        let result = run();
        end(comm, result)
    })
}

/// A stream may change its send buffer and the size of its messages.
fn shapes(make: Make<'_>) -> Result<(), String> {
    together(make, 2, "messages of changing size", |comm| {
        let mut send_buffers = [Buffer::new(30), Buffer::new(200)];
        let mut run = || {
            for number in 0..30u64 {
                let large = number / 3 % 2;
                let (bytes, copies) = [(10, 3), (100, 2)][large as usize];
                let text = text(0, 0, number, bytes);
                if comm.rank() == 0 {
                    send(comm, 1, 0, &text, &mut send_buffers[large as usize], copies)?;
                } else {
                    receive(comm, 0, 0, &text)?;
                }
            }
            Ok(())
        };
        let result = run();
        end(comm, result)
    })
}

/// What a rank sent before it left arrives, though its send buffer is gone afterwards.
fn last_words(make: Make<'_>) -> Result<(), String> {
    together(make, 2, "messages of a rank that leaves", |comm| {
        if comm.rank() == 0 {
            let mut send_buffer = Buffer::new(200);
            let result = (0..2).try_for_each(|number| send(comm, 1, 0, &text(0, 0, number, 100), &mut send_buffer, 2));
            let result = end(comm, result);
            send_buffer.bytes_mut().fill(0);
            return result;
        }
        std::thread::sleep(std::time::Duration::from_millis(30));
        (0..2).try_for_each(|number| receive(comm, 0, 0, &text(0, 0, number, 100)))
    })
}

/// Ends a rank's program before its send buffers go.
fn end(comm: &dyn Communicator, result: Result<(), String>) -> Result<(), String> {
    match &result {
        Ok(()) => comm.leave(),
        Err(error) => comm.fail(error),
    }
    result
}
