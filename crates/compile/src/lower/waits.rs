//! Which stream an instruction runs on, and what it waits for on the others.

use crate::offload::window;
use lockstep_ir::graph::{Node, Phase};
use lockstep_ir::op::Transfer;
use lockstep_ir::program::{BufferId, Segment, Stream};
use lockstep_ir::{Axes, Op};
use std::collections::BTreeMap;

/// Collectives over ranks that have other tokens overlap with the kernels of a pass; others are waited for at once.
pub(super) fn stream(node: &Node) -> Stream {
    let overlaps = !node.op.over().within(Axes::TOKENS).is_empty() && node.phase != Phase::Update;
    match (node.op, node.op.transfer()) {
        (Op::Fetch, _) => Stream::Fetch,
        (Op::Offload, _) => Stream::Offload,
        (_, Some(Transfer::AllToAll { .. })) if overlaps => Stream::Exchange,
        _ if overlaps => Stream::Communication,
        _ => Stream::Compute,
    }
}

/// What runs beside kernels on one stream: by buffer the last instruction that made it, and the last that touched it.
#[derive(Default)]
struct Beside {
    made: BTreeMap<usize, usize>,
    touched: BTreeMap<usize, usize>,
    /// The last that a kernel has waited for.
    ended: Option<usize>,
}

/// Lets every instruction wait for what other streams have made of what it reads, or still do with what it writes. State that goes to the
/// host gives its memory back when an update waits for it: each update of what has come from there leaves the last bytes on their way, as many
/// as the [`window`] has. (For activations see [`crate::offload::bounded`].)
pub(super) fn wait(segment: &mut Segment) {
    let mut streams = Stream::BESIDE.map(|stream| (stream, Beside::default()));
    let window = window(&updated_from_host(segment));
    // What has been sent back to the host: which instruction, and how many bytes.
    let mut sent: Vec<(usize, u64)> = Vec::new();
    for (t, instr) in segment.instrs.iter_mut().enumerate() {
        let reads: Vec<usize> = instr.inputs.iter().map(|a| a.buffer.0).collect();
        let writes: Vec<usize> = instr.outputs.iter().flatten().map(|a| a.buffer.0).collect();
        let has_come = |(stream, beside): &(Stream, Beside)| {
            *stream == Stream::Fetch && reads.iter().any(|b| beside.made.contains_key(b))
        };
        let updates = instr.stream == Stream::Compute && streams.iter().any(has_come);
        let mut on_the_way = 0;
        let room = sent.iter().rev().find(|(_, bytes)| {
            on_the_way += bytes;
            on_the_way > window + bytes
        });
        let room = room.filter(|_| updates).map(|(at, _)| *at);
        if instr.stream == Stream::Offload && instr.phase == Phase::Update {
            sent.push((t, instr.inputs[0].ty.bytes()));
        }
        for (stream, beside) in &mut streams {
            if instr.stream == *stream {
                beside.made.extend(writes.iter().map(|b| (*b, t)));
                beside.touched.extend(reads.iter().chain(&writes).map(|b| (*b, t)));
                continue;
            }
            let made = reads.iter().filter_map(|b| beside.made.get(b));
            let room = room.filter(|_| *stream == Stream::Offload);
            let last = made.chain(writes.iter().filter_map(|b| beside.touched.get(b))).copied().chain(room).max();
            if let Some(last) = last.filter(|last| beside.ended.is_none_or(|ended| ended < *last)) {
                instr.waits.push(last);
                if instr.stream == Stream::Compute {
                    beside.ended = Some(last);
                }
            }
        }
    }
}

/// Bytes that have come from the host, of every instruction that updates some.
fn updated_from_host(segment: &Segment) -> Vec<u64> {
    let come: BTreeMap<BufferId, u64> = segment
        .instrs
        .iter()
        .filter(|i| i.stream == Stream::Fetch)
        .flat_map(|i| i.outputs.iter().flatten().map(|a| (a.buffer, a.ty.bytes())))
        .collect();
    let kernels = segment.instrs.iter().filter(|i| i.stream == Stream::Compute);
    let bytes = kernels.map(|i| i.inputs.iter().filter_map(|a| come.get(&a.buffer)).sum());
    bytes.filter(|bytes| *bytes > 0).collect()
}
