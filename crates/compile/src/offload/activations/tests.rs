use super::*;
use crate::passes::TRAINING_PASSES;
use crate::passes::tests::small_model_of;
use crate::{Offload, compile, stage};
use lockstep_ir::graph::{Parameter, State};
use lockstep_ir::program::Lifetime;
use lockstep_ir::{Graph, Init, Layout, Mesh, MeshAxis};

/// Four layers, of a norm and an addition each, between the embedding and the head of the small model.
fn layered() -> (Graph, Context) {
    let (mut g, context) = small_model_of(2, 4);
    let find = |g: &Graph, name: &str| ValueId(g.values.iter().position(|v| v.name == name).unwrap());
    let head = g.nodes.split_off(5);
    let mut y = find(&g, "y");
    for (layer, name) in [(2, "w3"), (3, "w4")] {
        let parameter = Parameter::new(Init::Ones, vec![name.to_owned()]);
        let w = g.state(name, g.ty(find(&g, "w1")).clone(), State::Parameter(parameter));
        let n = g.op(Op::rms_norm(1e-5), &[y, w], &format!("n{}", layer + 1)).unwrap()[0];
        y = g.op(Op::Add, &[y, n], &format!("y{layer}")).unwrap()[0];
    }
    g.nodes.extend(head);
    let logits = g.nodes.iter().position(|n| n.op == Op::Linear).unwrap();
    g.nodes[logits].inputs[0] = y;
    (1..9).for_each(|n| g.nodes[n].layer = Some((n - 1) / 2));
    (g, context)
}

/// With this many bytes of activations in the host's memory.
fn offloading(layout: Layout, activations: u64) -> (Graph, Context) {
    let (g, context) = layered();
    let stages = vec![4 / layout.stages(); layout.stages()];
    (g, Context { layout, stages, offload: Offload { optimizer: 0, activations }, ..context })
}

/// What a rank runs forward and backward: phase, outputs, op and inputs of every node.
fn nodes(layout: Layout, activations: u64, rank: usize) -> Vec<String> {
    let (g, context) = offloading(layout, activations);
    let g = TRAINING_PASSES.iter().fold(g, |g, pass| (pass.run)(&g, &context).unwrap());
    let cuts = stage::cut(&g, &context).unwrap();
    let train = stage::extract(&g, &cuts, &context.layout.pipeline(), rank).unwrap();
    let RankGraph { graph, chunks } = offload(train, &context, rank).unwrap();
    assert_eq!(graph.nodes.len(), chunks.len());
    let name = |v: &ValueId| graph.get(*v).name.as_str();
    let print = |n: &Node| {
        let made: Vec<&str> = n.outputs.iter().flatten().map(name).collect();
        let read: Vec<&str> = n.inputs.iter().map(name).collect();
        format!("{} {} = {}({})", n.phase.letter(), made.join(", "), n.op.name(), read.join(", "))
    };
    graph.nodes.iter().filter(|n| n.phase != Phase::Update).map(print).collect()
}

/// The values that a rank copies to the host, in order.
fn moved(layout: Layout, activations: u64, rank: usize) -> Vec<String> {
    let copies = nodes(layout, activations, rank).into_iter();
    copies.filter_map(|n| Some(n.split_once("offload(")?.1.trim_end_matches(')').to_owned())).collect()
}

fn stages(stages: usize, micro_batches: usize, schedule: &str) -> Layout {
    let layout = Layout { mesh: Mesh::ONE.with(MeshAxis::Pp, stages), ..Layout::single(micro_batches) };
    let schedule: lockstep_ir::Schedule = schedule.parse().unwrap();
    let chunks = if ["interleaved", "zb-v"].contains(&schedule.name()) { 2 } else { 1 };
    Layout { schedule, chunks, ..layout }
}

#[test]
fn what_a_layer_saves_goes_after_its_last_use_and_comes_ahead_of_its_first_reader() {
    // The last layer reads what it saves at once: that stays.
    let expected = "\
F x = embedding(tokens, table)
F n1, n1.rstd = rms_norm(x, w1)
F n1.rstd.host = offload(n1.rstd)
F mid = add(x, n1)
F x.host = offload(x)
F n2, n2.rstd = rms_norm(mid, w2)
F n2.rstd.host = offload(n2.rstd)
F y = add(mid, n2)
F mid.host = offload(mid)
F n3, n3.rstd = rms_norm(y, w3)
F n3.rstd.host = offload(n3.rstd)
F y2 = add(y, n3)
F y.host = offload(y)
F n4, n4.rstd = rms_norm(y2, w4)
F y3 = add(y2, n4)
F loss, loss.dx, loss.dw = linear_cross_entropy(y3, table, targets)
B y.here = fetch(y.host)
B n3.rstd.here = fetch(n3.rstd.host)
B mid.here = fetch(mid.host)
W dw.w4 = rms_norm_grad_weight(loss.dx, y2, n4.rstd)
B d.y2 = add_rms_norm_grad(loss.dx, y2, w4, n4.rstd, loss.dx)
B n2.rstd.here = fetch(n2.rstd.host)
W dw.w3 = rms_norm_grad_weight(d.y2, y.here, n3.rstd.here)
B d.y = add_rms_norm_grad(d.y2, y.here, w3, n3.rstd.here, d.y2)
B x.here = fetch(x.host)
B n1.rstd.here = fetch(n1.rstd.host)
W dw.w2 = rms_norm_grad_weight(d.y, mid.here, n2.rstd.here)
B d.mid = add_rms_norm_grad(d.y, mid.here, w2, n2.rstd.here, d.y)
W dw.w1 = rms_norm_grad_weight(d.mid, x.here, n1.rstd.here)
B d.x = add_rms_norm_grad(d.mid, x.here, w1, n1.rstd.here, d.mid)
W dw.table = embedding_grad(d.x, tokens)";
    assert_eq!(nodes(Layout::single(2), u64::MAX, 0).join("\n"), expected);
}

#[test]
fn what_enters_layers_moves_first_and_as_much_as_there_is_room_for() {
    // Each has 64 bytes, of every micro-batch in flight.
    assert_eq!(moved(Layout::single(2), 64, 0), ["x"]);
    // Layers far apart first.
    assert_eq!(moved(Layout::single(2), 2 * 64, 0), ["x", "y"]);
    assert_eq!(moved(Layout::single(2), 3 * 64 + 63, 0), ["x", "mid", "y"]);
    assert_eq!(moved(Layout::single(2), 4 * 64, 0), ["n1.rstd", "x", "mid", "y"]);
    assert_eq!(moved(stages(2, 4, "1f1b"), 3 * 64, 0), ["x"]);
    assert_eq!(moved(stages(2, 4, "gpipe"), 4 * 64, 0), ["x"]);
    assert!(moved(Layout::single(2), 63, 0).is_empty());
}

#[test]
fn everything_moves_where_backward_does_not_follow_at_once() {
    assert_eq!(moved(stages(2, 4, "1f1b"), u64::MAX, 0), ["n1.rstd", "x", "n2.rstd", "mid"]);
    assert_eq!(moved(stages(2, 4, "1f1b"), u64::MAX, 1), ["n3.rstd", "y"]);
    // What the loss passes back is made in forward.
    assert_eq!(moved(stages(2, 4, "gpipe"), u64::MAX, 1), ["n3.rstd", "y", "n4.rstd", "y2", "loss.dx"]);
}

#[test]
fn programs_of_every_schedule_are_sound_and_keep_in_the_host_what_is_in_flight() {
    let schedules = ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"];
    for layout in schedules.map(|schedule| stages(2, 4, schedule)).into_iter().chain([Layout::single(3)]) {
        let (g, context) = offloading(layout, u64::MAX);
        for program in compile(&g, &context).unwrap().programs {
            let saved = |r: &&lockstep_ir::program::Region| matches!(r.lifetime, Lifetime::SavedInHost(_));
            let bytes: u64 = program.regions.iter().filter(saved).map(|r| r.bytes()).sum();
            assert!(bytes > 0 && bytes == program.host_bytes, "{program}");
        }
    }
}

#[test]
fn forward_waits_for_the_oldest_copies_where_more_than_a_window_is_on_its_way() {
    let (g, context) = offloading(Layout::single(2), u64::MAX);
    let program = &compile(&g, &context).unwrap().programs[0];
    let forward = program.segments.iter().find(|s| s.name == "forward").unwrap();
    let waits: Vec<(usize, &[usize])> = forward
        .instrs
        .iter()
        .enumerate()
        .filter(|(_, i)| !i.waits.is_empty())
        .map(|(t, i)| (t, &i.waits[..]))
        .collect();
    // Two values of a layer may be on their way; a third lets the next kernel wait for the first.
    assert_eq!(waits, [(9, &[2][..]), (11, &[4]), (13, &[6])], "{program}");
    let copies: Vec<usize> = (0..forward.instrs.len()).filter(|t| forward.instrs[*t].op == Op::Offload).collect();
    assert_eq!(copies, [2, 4, 6, 8, 10, 12]);
}
