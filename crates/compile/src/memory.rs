//! Memory: gives every buffer its offset. The last pass: what it says is what the executor allocates (where state comes from the host,
//! `ahead` moves buffers of the update within the same arena).
//!
//! Persistent, host and saved buffers stand side by side; all chunks of a rank share the copies of a saved region, each has what it
//! saves from the start of a copy on. Temporary buffers of a segment share the frame: largest
//! first, each at the lowest offset where no buffer that is live at the same time stands. All segments share one frame;
//! evaluation, which saves nothing, uses the saved regions and the frame together, and so do an update
//! whose state comes from the host and what is done before the first micro-batch. What lives for a step stands within persistent buffers that are
//! free meanwhile. What waits there stands side by side in the host's memory: optimizer state, then activations with as many
//! copies as those that are saved on the device.

use crate::Context;
use crate::lower::Unplaced;
use crate::room::lowest;
use lockstep_ir::StepProgram;
use lockstep_ir::program::{Buffer, Lifetime, Region, Segment};

pub(crate) fn place(unplaced: Unplaced, context: &Context) -> StepProgram {
    let Unplaced { stage, buffers, values, tensors, segments, entries, micro_batches, saved } = unplaced;
    let sizes: Vec<u64> = buffers.iter().map(|b| context.device.align(b.bytes)).collect();
    let mut offsets = vec![0; buffers.len()];
    let mut packed = |lifetime: Lifetime| {
        let members: Vec<bool> = buffers.iter().map(|b| b.lifetime == lifetime).collect();
        segments.iter().map(|s| pack(s, &members, &sizes, &mut offsets)).max().unwrap_or(0)
    };
    let (frame, overlay) = (packed(Lifetime::Frame), packed(Lifetime::Overlay));
    let mut side_by_side = |lifetime: Lifetime| {
        let chunks = segments.iter().map(|s| s.chunk).max().unwrap_or(0);
        let chunk = |chunk: usize| {
            let members = (0..buffers.len()).filter(|&i| (buffers[i].lifetime, buffers[i].chunk) == (lifetime, chunk));
            members.fold(0, |offset, i| {
                offsets[i] = offset;
                offset + sizes[i]
            })
        };
        (0..=chunks).map(chunk).max().unwrap_or(0)
    };
    let lasting = [(Lifetime::Run, 1), (Lifetime::MicroBatch, micro_batches)];
    let lasting = lasting.into_iter().chain(saved.iter().map(|(saved, slots)| (Lifetime::Saved(*saved), *slots)));
    let mut regions: Vec<Region> = Vec::new();
    let (mut end, mut under) = (0, 0);
    for (lifetime, slots) in lasting {
        let region = Region { lifetime, offset: end, slot_bytes: side_by_side(lifetime), slots };
        end += region.bytes();
        if !matches!(lifetime, Lifetime::Saved(_)) {
            under = end;
        }
        regions.push(region);
    }
    let frame = frame.max(overlay.saturating_sub(end - under));
    regions.push(Region { lifetime: Lifetime::Frame, offset: end, slot_bytes: frame, slots: 1 });
    end += frame;
    let waiting = saved.iter().map(|(saved, slots)| (Lifetime::SavedInHost(*saved), *slots));
    let mut host_bytes = 0;
    for (lifetime, slots) in [(Lifetime::Host, 1)].into_iter().chain(waiting) {
        let region = Region { lifetime, offset: end + host_bytes, slot_bytes: side_by_side(lifetime), slots };
        if region.slot_bytes > 0 {
            host_bytes += region.bytes();
            regions.push(region);
        }
    }
    regions.push(Region { lifetime: Lifetime::Overlay, offset: under, slot_bytes: overlay, slots: 1 });
    // In memory of the run.
    for (i, (home, at)) in buffers.iter().enumerate().filter_map(|(i, b)| Some((i, b.within?))) {
        offsets[i] = offsets[home.0] + at;
    }
    if buffers.iter().any(|b| b.lifetime == Lifetime::Step) {
        regions.push(Region { lifetime: Lifetime::Step, ..regions[0] });
    }
    let buffers = buffers
        .into_iter()
        .zip(offsets)
        .map(|(b, offset)| Buffer {
            region: regions.iter().position(|r| r.lifetime == b.lifetime).unwrap_or(0),
            name: b.name,
            class: b.class,
            layer: b.layer,
            offset,
            bytes: b.bytes,
        })
        .collect();
    let mesh = context.layout.mesh;
    StepProgram { mesh, stage, arena_bytes: end, host_bytes, regions, buffers, values, tensors, segments, entries }
}

/// Packs the `members` that one segment uses and returns the bytes they need.
fn pack(segment: &Segment, members: &[bool], sizes: &[u64], offsets: &mut [u64]) -> u64 {
    let mut lives = segment.lives(|b| members[b.0]);
    lives.sort_by_key(|l| (std::cmp::Reverse(sizes[l.buffer.0]), l.first, l.buffer));
    let mut frame = 0;
    for k in 0..lives.len() {
        let life = &lives[k];
        let mut blocks: Vec<(u64, u64)> = lives[..k]
            .iter()
            .filter(|o| o.first <= life.last && life.first <= o.last)
            .map(|o| (offsets[o.buffer.0], offsets[o.buffer.0] + sizes[o.buffer.0]))
            .collect();
        let at = lowest(&mut blocks, sizes[life.buffer.0]);
        offsets[life.buffer.0] = at;
        frame = frame.max(at + sizes[life.buffer.0]);
    }
    frame
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::UnplacedBuffer;
    use crate::passes::tests::small_model;
    use lockstep_ir::program::{BufferId, Class, Saved};

    fn buffer(lifetime: Lifetime, chunk: usize, bytes: u64) -> UnplacedBuffer {
        UnplacedBuffer {
            name: String::new(),
            class: Class::Activations,
            layer: None,
            chunk,
            lifetime,
            bytes,
            within: None,
        }
    }

    fn unplaced(buffers: Vec<UnplacedBuffer>, saved: Vec<(Saved, usize)>) -> Unplaced {
        let segment = |chunk| Segment { name: "forward", chunk, instrs: vec![], groups: vec![] };
        let segments = vec![segment(0), segment(1)];
        let (values, tensors, entries) = (vec![], vec![], vec![]);
        Unplaced { stage: 0, buffers, values, tensors, segments, entries, micro_batches: 2, saved }
    }

    #[test]
    fn chunks_share_the_copies_of_a_saved_region_and_each_stands_at_its_start() {
        let [to_b, to_w, _] = Saved::ALL.map(Lifetime::Saved);
        let buffers = vec![
            buffer(Lifetime::Run, 0, 10),
            buffer(to_b, 0, 100),
            buffer(to_b, 1, 40),
            buffer(to_b, 0, 70),
            buffer(Lifetime::MicroBatch, 0, 1),
            buffer(to_w, 1, 65),
        ];
        let saved = vec![(Saved::ForwardToBackward, 3), (Saved::ForwardToWeightGrad, 2)];
        let program = place(unplaced(buffers, saved), &small_model().1);
        let regions: Vec<_> = program.regions.iter().map(|r| (r.lifetime, r.offset, r.slot_bytes, r.slots)).collect();
        assert_eq!(
            regions,
            [
                (Lifetime::Run, 0, 64, 1),
                (Lifetime::MicroBatch, 64, 64, 2),
                (to_b, 192, 256, 3),
                (to_w, 960, 128, 2),
                (Lifetime::Frame, 1216, 0, 1),
                (Lifetime::Overlay, 192, 0, 1),
            ]
        );
        assert_eq!(program.arena_bytes, 1216);
        assert_eq!(program.buffers.iter().map(|b| b.offset).collect::<Vec<_>>(), [0, 0, 0, 128, 0, 0]);
        assert_eq!(program.lifetime(BufferId(5)), to_w);
    }

    #[test]
    fn temporaries_that_live_at_the_same_time_stand_apart() {
        let (graph, context) = small_model();
        let program = crate::compile(&graph, &context).unwrap().programs.swap_remove(0);
        let frame = program.regions.iter().position(|r| r.lifetime == Lifetime::Frame).unwrap();
        for segment in &program.segments {
            let lives = segment.lives(|b| program.buffers[b.0].region == frame);
            for (i, a) in lives.iter().enumerate() {
                for b in &lives[..i] {
                    let [x, y] = [a, b].map(|l| &program.buffers[l.buffer.0]);
                    let same_bytes = x.offset < y.offset + y.bytes && y.offset < x.offset + x.bytes;
                    let same_time = a.first <= b.last && b.first <= a.last;
                    assert!(!(same_bytes && same_time), "{a:?} and {b:?}");
                }
            }
        }
    }
}
