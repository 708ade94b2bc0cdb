//! Memory: gives every buffer its offset. The last pass: what it says is what the executor allocates.
//!
//! Persistent, host and saved buffers stand side by side. Temporary buffers of a segment share the frame: largest
//! first, each at the lowest offset where no buffer that is live at the same time stands. All segments share one frame;
//! evaluation, which saves nothing, uses the saved region and the frame together.

use crate::Context;
use crate::lower::Unplaced;
use lockstep_ir::StepProgram;
use lockstep_ir::program::{Buffer, Lifetime, Region, Segment};

pub(crate) fn place(unplaced: Unplaced, context: &Context) -> StepProgram {
    let Unplaced { stage, buffers, values, tensors, segments, entries, micro_batches, saved_slots } = unplaced;
    let align = |bytes: u64| context.device.align(bytes);
    const REGIONS: [Lifetime; 5] =
        [Lifetime::Run, Lifetime::MicroBatch, Lifetime::Saved, Lifetime::Frame, Lifetime::Overlay];
    let sizes: Vec<u64> = buffers.iter().map(|b| align(b.bytes)).collect();
    let mut offsets = vec![0; buffers.len()];
    let mut packed = |lifetime: Lifetime| {
        let members: Vec<bool> = buffers.iter().map(|b| b.lifetime == lifetime).collect();
        segments.iter().map(|s| pack(s, &members, &sizes, &mut offsets)).max().unwrap_or(0)
    };
    let (frame, overlay) = (packed(Lifetime::Frame), packed(Lifetime::Overlay));
    let mut side_by_side = |lifetime: Lifetime| {
        let members = (0..buffers.len()).filter(|&i| buffers[i].lifetime == lifetime);
        members.fold(0, |offset, i| {
            offsets[i] = offset;
            offset + sizes[i]
        })
    };
    let [run, host, saved] = [Lifetime::Run, Lifetime::MicroBatch, Lifetime::Saved].map(&mut side_by_side);
    let saved_bytes = saved * saved_slots as u64;
    let frame = frame.max(overlay.saturating_sub(saved_bytes));
    let mut regions = Vec::new();
    let mut end = 0;
    let sizes = [(run, 1), (host, micro_batches), (saved, saved_slots), (frame, 1)];
    for (lifetime, (slot_bytes, slots)) in REGIONS.into_iter().zip(sizes) {
        regions.push(Region { lifetime, offset: end, slot_bytes, slots });
        end += slot_bytes * slots as u64;
    }
    let under = end - frame - saved_bytes;
    regions.push(Region { lifetime: Lifetime::Overlay, offset: under, slot_bytes: overlay, slots: 1 });
    let buffers = buffers
        .into_iter()
        .zip(offsets)
        .map(|(b, offset)| Buffer {
            region: REGIONS.iter().position(|l| *l == b.lifetime).unwrap_or(0),
            name: b.name,
            class: b.class,
            layer: b.layer,
            offset,
            bytes: b.bytes,
        })
        .collect();
    let mesh = context.layout.mesh;
    StepProgram { mesh, stage, arena_bytes: end, regions, buffers, values, tensors, segments, entries }
}

/// Packs the `members` that one segment uses and returns the bytes they need.
fn pack(segment: &Segment, members: &[bool], sizes: &[u64], offsets: &mut [u64]) -> u64 {
    struct Life {
        buffer: usize,
        first: usize,
        last: usize,
    }
    let mut lives: Vec<Life> = Vec::new();
    let mut index = vec![usize::MAX; sizes.len()];
    for (t, instr) in segment.instrs.iter().enumerate() {
        let args = instr.inputs.iter().chain(instr.outputs.iter().flatten()).map(|a| a.buffer.0);
        let in_use = segment.in_use(t);
        for buffer in args.chain(instr.workspace.map(|w| w.0)).filter(|&b| members[b]) {
            if index[buffer] == usize::MAX {
                index[buffer] = lives.len();
                lives.push(Life { buffer, first: *in_use.start(), last: t });
            }
            let life = &mut lives[index[buffer]];
            life.last = life.last.max(*in_use.end());
        }
    }
    lives.sort_by_key(|l| (std::cmp::Reverse(sizes[l.buffer]), l.first, l.buffer));
    let mut frame = 0;
    for k in 0..lives.len() {
        let life = &lives[k];
        let mut blocks: Vec<(u64, u64)> = lives[..k]
            .iter()
            .filter(|o| o.first <= life.last && life.first <= o.last)
            .map(|o| (offsets[o.buffer], offsets[o.buffer] + sizes[o.buffer]))
            .collect();
        blocks.sort_unstable();
        let mut at = 0;
        for (start, stop) in blocks {
            if start >= at + sizes[life.buffer] {
                break;
            }
            at = at.max(stop);
        }
        offsets[life.buffer] = at;
        frame = frame.max(at + sizes[life.buffer]);
    }
    frame
}
