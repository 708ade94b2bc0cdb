use super::*;
use crate::program::Offsets;
use crate::{DType, counter};

/// Where a dimension of one section is split, the table of offsets says where each rank's part of it starts.
fn offsets_agree(ty: &TensorType, sharding: Sharding, mesh: Mesh) {
    for (d, dim) in ty.dims.iter().enumerate().filter(|(_, dim)| dim.sections.len() == 1) {
        let Some(offsets) = Offsets::new(ty, &sharding, d, &mesh) else { continue };
        let line = TensorType::new(DType::F32, [dim.clone()]);
        let split = Sharding::REPLICATED.with(offsets.over, Placement::Split(0));
        assert_eq!((offsets.parts.len(), offsets.whole), (mesh.size(offsets.over), dim.size()));
        for at in (0..mesh.ranks()).map(|rank| mesh.coordinates(rank)) {
            let span = offsets.parts[at.index(offsets.over, &mesh)];
            let mut has = vec![None; split.local(&line, &mesh).elements()];
            for run in split.runs(&line, &mesh, at) {
                (0..run.len).for_each(|i| has[run.local + i] = Some(run.whole + i));
            }
            for (place, entry) in has.into_iter().enumerate() {
                let expected = Some(span.entry(place)).filter(|entry| *entry < dim.size());
                assert_eq!(entry, expected, "{sharding} of {ty} on {mesh}");
            }
        }
    }
}

/// Writes the index of every element through the runs of all ranks and checks that each rank's elements are where its
/// local shape says.
fn covers(ty: &TensorType, sharding: Sharding, mesh: Mesh) {
    let mut seen = vec![0; ty.elements()];
    let mut first = vec![0; ty.elements()];
    for rank in 0..mesh.ranks() {
        let local = sharding.local(ty, &mesh).elements();
        let mut taken = vec![false; local];
        let held: usize = sharding.runs(ty, &mesh, mesh.coordinates(rank)).iter().map(|r| r.len).sum();
        assert_eq!(held, sharding.held(ty, &mesh, mesh.coordinates(rank)), "{sharding} of {ty} on rank {rank}");
        for r in sharding.runs(ty, &mesh, mesh.coordinates(rank)) {
            (0..r.len).for_each(|i| {
                seen[r.whole + i] += 1;
                assert!(!std::mem::replace(&mut taken[r.local + i], true), "an element stands twice on rank {rank}");
            });
        }
        for r in sharding.first_runs(ty, &mesh, mesh.coordinates(rank)) {
            (0..r.len).for_each(|i| first[r.whole + i] += 1);
            assert!((0..r.len).all(|i| taken[r.local + i]), "rank {rank} does not have what it is the first to have");
        }
    }
    assert!(first.iter().all(|n| *n == 1), "{sharding} of {ty} on {mesh:?}: an element has not one first holder");
    assert!(seen.iter().all(|n| *n > 0), "{sharding} of {ty} on {mesh:?} leaves elements out");
}

/// A mesh of all axes, and placements over them: any number of axes split a dimension, of what is left any number cut ranges.
#[test]
fn every_element_is_somewhere_and_no_place_is_used_twice() {
    for case in 0..400u64 {
        let draw = |i: u64, n: u64| (counter::bits(counter::key(7, "placement"), case * 32 + i) % n) as usize;
        let size = |axis: MeshAxis| match axis {
            MeshAxis::Pp => 1,
            MeshAxis::DpReplicate | MeshAxis::Cp | MeshAxis::Ep => 1 + draw(axis as u64, 2),
            MeshAxis::DpShard => 1 + draw(axis as u64, 4),
            MeshAxis::Tp => 1 << draw(axis as u64, 4),
        };
        let mesh = MeshAxis::ALL.into_iter().fold(Mesh::ONE, |mesh, axis| mesh.with(axis, size(axis)));
        let heads = |axis, count| Section { axis, count, unit: 1 + draw(8, 3) };
        let packed = Dim::packed([heads(Axis::Heads, 48 * (1 + draw(9, 2))), heads(Axis::KvHeads, 1 << draw(10, 3))]);
        let context = mesh.size(MeshAxis::Cp);
        let plain = Dim::new(Axis::Vocab, 1 + draw(11, 40));
        // What context-parallel ranks may split: two chunks for each.
        let seq = Dim::new(Axis::Seq, 2 * mesh.size(Axes::STAGE) * (1 + draw(14, 3)));
        let batch = Dim::new(Axis::Batch, mesh.size(Axes::TOKENS) * (1 + draw(12, 3)));
        let dims = match draw(13, 3) {
            0 => vec![packed, plain],
            1 => vec![plain, packed],
            _ => vec![batch, if context > 1 { seq } else { plain }, packed],
        };
        let shared = dims.iter().position(|dim| dim.sections.len() > 1);
        let rank = dims.len();
        let ty = TensorType::new(DType::F32, dims);
        let mut sharding = Sharding::REPLICATED;
        for axis in Axes::STAGE.iter() {
            let placement = match draw(16 + axis as u64, 2 + rank as u64) {
                0 => Placement::Replicated,
                1 => Placement::Flat,
                d if axis == MeshAxis::Cp && ty.dims[d - 2].sections[0].axis != Axis::Seq => Placement::Replicated,
                d => Placement::Split(d - 2),
            };
            sharding = sharding.with(axis, placement);
        }
        // Heads divide, and key and value heads divide or are divided.
        let parts = shared.map_or(1, |d| mesh.size(sharding.axes(Placement::Split(d))));
        let divides = ty.dims.iter().flat_map(|dim| &dim.sections).all(|s| match s.axis {
            Axis::Heads => s.count.is_multiple_of(parts),
            Axis::KvHeads => s.count.is_multiple_of(parts) || parts.is_multiple_of(s.count),
            _ => true,
        });
        if divides {
            covers(&ty, sharding, mesh);
            offsets_agree(&ty, sharding, mesh);
        }
    }
}

#[test]
fn sections_are_gathered_one_by_one_and_neighbours_give_a_share_each_of_what_they_share() {
    let heads = |axis, count| Section { axis, count, unit: 2 };
    let packed = |q, kv| Dim::packed([heads(Axis::Heads, q), heads(Axis::KvHeads, kv), heads(Axis::KvHeads, kv)]);
    let matrix = |rows: Dim, columns| TensorType::new(DType::F32, [rows, Dim::new(Axis::Embed, columns)]);
    let piece = |part, whole, elements, sharers| Gathered { part, whole, rows: 1, elements, sharers };
    let four = gathered(&matrix(packed(1, 1), 3), &matrix(packed(4, 2), 3), 0, 4).unwrap();
    assert_eq!(four, [piece(0, 0, 6, 1), piece(6, 24, 3, 2), piece(12, 36, 3, 2)]);
    let two = gathered(&matrix(packed(2, 1), 3), &matrix(packed(4, 2), 3), 0, 2).unwrap();
    assert_eq!(two, [piece(0, 0, 12, 1), piece(12, 24, 6, 1), piece(18, 36, 6, 1)]);
    // Columns: as many of every row.
    let columns = gathered(&matrix(packed(4, 2), 3), &matrix(packed(4, 2), 6), 1, 2).unwrap();
    assert_eq!(columns, [Gathered { part: 0, whole: 0, rows: 16, elements: 3, sharers: 1 }]);
    // Shares that do not come out even, and parts of something else.
    assert_eq!(gathered(&matrix(packed(8, 1), 3), &matrix(packed(64, 2), 3), 0, 8), None);
    assert_eq!(gathered(&matrix(packed(1, 1), 3), &matrix(packed(4, 2), 3), 0, 3), None);
}

const DP: MeshAxis = MeshAxis::DpShard;
const TP: MeshAxis = MeshAxis::Tp;

#[test]
fn neighbours_share_a_head_where_there_are_more_ranks() {
    let mesh = Mesh::ONE.with(TP, 4);
    let heads = |axis, count| Section { axis, count, unit: 2 };
    let packed = Dim::packed([heads(Axis::Heads, 4), heads(Axis::KvHeads, 2)]);
    let ty = TensorType::new(DType::F32, [packed]);
    let sharding = Sharding::REPLICATED.with(TP, Placement::Split(0));
    assert_eq!(sharding.local(&ty, &mesh).to_string(), "f32[heads:1×2+kv_heads:1×2]");
    assert_eq!(sharding.sharers(&ty, 0, &mesh), [1, 2]);
    let of = |tp| sharding.runs(&ty, &mesh, Coordinates::default().with(TP, tp));
    let run = |whole, local| Run { whole, local, len: 2 };
    assert_eq!(of(1), [run(2, 0), run(8, 2)]);
    assert_eq!(of(2), [run(4, 0), run(10, 2)]);
}

#[test]
fn context_parallel_parts_are_an_early_and_a_late_chunk() {
    let mesh = Mesh::ONE.with(MeshAxis::Cp, 2).with(TP, 2);
    let ty = TensorType::new(DType::U32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 16)]);
    let split = Sharding::REPLICATED.with(MeshAxis::Cp, Placement::Split(1));
    assert_eq!(format!("{:?}", split.spans(&ty, 1, &mesh)), "[0+4, 12, 4]");
    let run = |whole, local, len| Run { whole, local, len };
    let of = |cp| split.runs(&ty, &mesh, Coordinates::default().with(MeshAxis::Cp, cp));
    assert_eq!(of(0), [run(0, 0, 4), run(12, 4, 4)]);
    assert_eq!(of(1), [run(4, 0, 4), run(8, 4, 4)]);
    // A piece of a part, over tp, may have some of either chunk.
    let pieces = split.with(TP, Placement::Split(1));
    assert_eq!(format!("{:?}", pieces.spans(&ty, 1, &mesh)), "[0, 12, 4, 8]");
    let thirds = TensorType::new(DType::U32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 12)]);
    let mesh = Mesh::ONE.with(MeshAxis::Cp, 2).with(TP, 3);
    assert_eq!(format!("{:?}", pieces.spans(&thirds, 1, &mesh)), "[0, 2+1, 9, 10, 3, 5, 7]");
}

#[test]
fn flat_ranges_are_of_what_splits_leave() {
    let mesh = Mesh::ONE.with(DP, 2).with(TP, 2);
    let ty = TensorType::new(DType::F32, [Dim::new(Axis::Ffn, 4), Dim::new(Axis::Embed, 50)]);
    let sharding = Sharding::REPLICATED.with(DP, Placement::Flat).with(TP, Placement::Split(0));
    assert_eq!(sharding.local(&ty, &mesh).elements(), 64);
    let runs = sharding.runs(&ty, &mesh, Coordinates::default().with(DP, 1).with(TP, 1));
    assert_eq!(runs, [Run { whole: 164, local: 0, len: 36 }]);
}

#[test]
fn ranges_over_several_axes_count_over_all_of_them() {
    let mesh = Mesh::ONE.with(MeshAxis::DpReplicate, 2).with(DP, 2).with(MeshAxis::Cp, 2);
    let ty = TensorType::new(DType::F32, [Dim::new(Axis::Embed, 200)]);
    let sharding = Sharding::REPLICATED.with(Axes::of(&[DP, MeshAxis::Cp]), Placement::Flat);
    let of = |rank| sharding.runs(&ty, &mesh, mesh.coordinates(rank));
    assert_eq!(of(2), [Run { whole: 128, local: 0, len: 64 }]);
    assert_eq!(of(3), [Run { whole: 192, local: 0, len: 8 }]);
    assert_eq!(of(6), of(2));
    assert_eq!(sharding.to_string(), "dp: flat, cp: flat");
}

#[test]
fn a_collective_takes_what_it_changes_and_nothing_else() {
    let (dp, cp, tp) = (DP.into(), Axes::from(MeshAxis::Cp), Axes::from(TP));
    let both = Axes::of(&[DP, MeshAxis::Cp]);
    let at = |axes: Axes, placement| Sharding::REPLICATED.with(axes, placement);
    let partial = at(both, Placement::Partial);
    let flat = at(both, Placement::Flat);
    let split = at(cp.and(tp), Placement::Split(1));
    assert_eq!(partial.after(&Op::AllReduce { over: both }), Ok(Sharding::REPLICATED));
    assert_eq!(partial.after(&Op::ReduceScatter { over: both, dim: None }), Ok(flat));
    assert_eq!(flat.after(&Op::AllGather { over: both, dim: None }), Ok(Sharding::REPLICATED));
    assert_eq!(Sharding::REPLICATED.after(&Op::Shard { over: both }), Ok(flat));
    assert_eq!(split.after(&Op::AllGather { over: tp, dim: Some(1) }), Ok(at(cp, Placement::Split(1))));
    let refused = [
        (partial, Op::AllReduce { over: tp }),
        (flat, Op::AllGather { over: dp, dim: None }),
        (split, Op::AllGather { over: cp, dim: Some(1) }),
        (split, Op::AllGather { over: tp, dim: Some(0) }),
        (flat, Op::Shard { over: tp }),
        (partial, Op::Add),
    ];
    for (sharding, op) in refused {
        assert!(sharding.after(&op).is_err(), "{} of {sharding}", op.name());
    }
    let refusal = split.after(&Op::AllReduce { over: tp }).unwrap_err().to_string();
    assert_eq!(refusal, "all_reduce: cannot be { over: tp } of a tensor that is cp: split 1, tp: split 1");
}
