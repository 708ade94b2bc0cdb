//! The search against all sets there are.

use super::{Fit, Search, fit};
use crate::passes::tests::small_model;
use crate::{Candidate, Context, Estimator, Recompute, Recomputed};
use lockstep_ir::graph::{Loss, Parameter, Phase, State};
use lockstep_ir::program::StepProgram;
use lockstep_ir::{Axis, DType, Dim, Graph, Init, Mesh, MeshAxis, Op, Section, TensorType, ValueId};
use std::collections::BTreeSet;

fn parameter(g: &mut Graph, name: String, dims: Vec<Dim>) -> ValueId {
    let parameter = Parameter::new(Init::Ones, vec![name.clone()]);
    g.state(name, TensorType::new(DType::F32, dims), State::Parameter(parameter))
}

/// Layers of attention and layers of a gated MLP in turn: two kinds.
fn model() -> (Graph, Context) {
    layers(&[true, false, true, false])
}

/// Layers of attention, and layers of a gated MLP.
fn layers(attend: &[bool]) -> (Graph, Context) {
    let (_, context) = small_model();
    let mut g = Graph::new();
    let ids = TensorType::new(DType::U32, [Dim::new(Axis::Batch, 2), Dim::new(Axis::Seq, 16)]);
    let tokens = g.input("tokens", ids.clone());
    let targets = g.input("targets", ids);
    let embed = || Dim::new(Axis::Embed, 32);
    let heads = |axis| Section { axis, count: 4, unit: 8 };
    let ffn = Section { axis: Axis::Ffn, count: 48, unit: 1 };
    let table = parameter(&mut g, "table".into(), vec![Dim::new(Axis::Vocab, 64), embed()]);
    let mut x = g.op(Op::Embedding, &[tokens, table], "x0").unwrap()[0];
    for (layer, attends) in attend.iter().enumerate() {
        g.enter_layer(Some(layer));
        let at = |name: &str| format!("{layer}.{name}");
        let norm = parameter(&mut g, at("norm"), vec![embed()]);
        let n = g.op(Op::rms_norm(1e-5), &[x, norm], &at("n")).unwrap()[0];
        let (packed, inner, op) = match attends {
            true => {
                let [q, k, v] = [Axis::Heads, Axis::KvHeads, Axis::KvHeads].map(heads);
                (Dim::packed([q, k, v]), Dim::packed([q]), Op::Attention { window: None })
            }
            false => (Dim::packed([ffn, ffn]), Dim::packed([ffn]), Op::SwiGlu),
        };
        let w = parameter(&mut g, at("in"), vec![packed, embed()]);
        let y = g.op(Op::Linear, &[n, w], &at("y")).unwrap()[0];
        let z = g.op(op, &[y], &at("z")).unwrap()[0];
        let w = parameter(&mut g, at("out"), vec![embed(), inner]);
        let delta = g.op(Op::Linear, &[z, w], &at("delta")).unwrap()[0];
        x = g.op(Op::Add, &[x, delta], &format!("x{}", layer + 1)).unwrap()[0];
    }
    g.enter_layer(None);
    let logits = g.op(Op::Linear, &[x, table], "logits").unwrap()[0];
    let loss = g.op(Op::CrossEntropy, &[logits, targets], "loss").unwrap()[0];
    g.outputs.push(loss);
    g.losses.push(Loss { value: loss, weight: 1.0 });
    (g, context)
}

/// What programs really cost: FLOPs and bytes of what is recomputed on all stages, and the largest arena.
fn measure(programs: &[StepProgram]) -> (u128, u64, u64) {
    let recomputation = |p: &StepProgram| {
        let segment = p.segments.iter().find(|s| s.name == "backward").unwrap();
        let calls = segment.instrs.iter().filter(|i| i.phase == Phase::InputGrad && i.op.spec().is_forward());
        let costs = calls.filter(|i| i.op != Op::Add).map(|i| i.cost().unwrap());
        costs.fold((0, 0), |(flops, bytes), c| (flops + c.flops.hardware, bytes + c.bytes))
    };
    let arena = programs.iter().map(|p| p.arena_bytes).max().unwrap();
    programs
        .iter()
        .map(recomputation)
        .fold((0, 0, arena), |(f, b, arena), (flops, bytes)| (f + flops, b + bytes, arena))
}

fn holds_against_all(context: &Context) {
    let (graph, _) = model();
    let estimator = Estimator::new(&graph, context).unwrap();
    let layers = estimator.layers();
    let candidates: Vec<Candidate> = layers.candidates(&estimator.derived).into_keys().collect();
    // Norm, its statistic, packed projection and (attention: output and log-sum-exp, MLP: hidden).
    assert_eq!(candidates.len(), 5 + 4);
    let all: Vec<(u128, u64, u64)> = (0..1u32 << candidates.len())
        .map(|bits| {
            let chosen = candidates.iter().enumerate().filter(|(c, _)| bits >> c & 1 == 1).map(|(_, c)| *c);
            let set: BTreeSet<Candidate> = chosen.collect();
            measure(&estimator.programs(Recompute::Values(Recomputed::by_all(set))).unwrap())
        })
        .collect();
    let (least, most) = (all.iter().map(|a| a.2).min().unwrap(), all.iter().map(|a| a.2).max().unwrap());
    let mut answers = BTreeSet::new();
    for step in 0..=16 {
        let budget = least + (most - least) * step / 16;
        let best = all.iter().filter(|a| a.2 <= budget).map(|a| (a.0, a.1)).min().unwrap();
        let mut search = Search::new(&estimator).unwrap();
        let sets = search.sets().unwrap();
        let found = search.alike(&sets, budget).unwrap().expect("it is possible");
        let (flops, bytes, arena) = measure(&estimator.programs(search.policy(&sets[found])).unwrap());
        assert!(arena <= budget);
        assert_eq!((flops, bytes), best, "budget {budget}");
        answers.insert(best);
        if step % 4 > 0 {
            continue;
        }
        // Layers that differ never cost more.
        let Fit::Recompute(recompute) = fit(&estimator, budget).unwrap() else { panic!("{budget} is possible") };
        let (flops, bytes, arena) = measure(&estimator.programs(recompute).unwrap());
        assert!(arena <= budget && (flops, bytes) <= best, "budget {budget}");
    }
    assert!(answers.len() > 4, "{answers:?}");
    assert_eq!(fit(&estimator, most).unwrap(), Fit::Recompute(Recompute::None));
    assert_eq!(fit(&estimator, least - 1).unwrap(), Fit::Least(least));
}

#[test]
fn the_cheapest_set_that_fits_is_found() {
    holds_against_all(&model().1);
}

#[test]
fn the_cheapest_set_that_fits_is_found_over_stages() {
    let mut context = model().1;
    context.layout.mesh = Mesh::ONE.with(MeshAxis::Pp, 2);
    context.layout.micro_batches = 4;
    holds_against_all(&context);
}

/// Every pair of sets and every number of first layers, on layers of one kind.
#[test]
fn first_layers_that_recompute_more_make_it_cheaper() {
    const LAYERS: usize = 4;
    let (graph, context) = layers(&[false; LAYERS]);
    let estimator = Estimator::new(&graph, &context).unwrap();
    let candidates: Vec<Candidate> = estimator.layers().candidates(&estimator.derived).into_keys().collect();
    let set = |bits: u32| -> BTreeSet<Candidate> {
        candidates.iter().enumerate().filter(|(c, _)| bits >> c & 1 == 1).map(|(_, c)| *c).collect()
    };
    let all = 0..1u32 << candidates.len();
    let mut every = Vec::new();
    for (by_first, by_rest) in all.clone().flat_map(|a| all.clone().map(move |b| (a, b))) {
        for first in if by_first == by_rest { 0..=0 } else { 1..=LAYERS - 1 } {
            let given = Recomputed { first, by_first: set(by_first), by_rest: set(by_rest) };
            every.push((measure(&estimator.programs(Recompute::Values(given)).unwrap()), by_first == by_rest));
        }
    }
    let arenas = || every.iter().filter(|(_, alike)| *alike).map(|(m, _)| m.2);
    let (least, most) = (arenas().min().unwrap(), arenas().max().unwrap());
    let mut gained = 0;
    for step in 0..=10 {
        let budget = least + (most - least) * step / 10;
        let best = |alike: bool| {
            let fitting = every.iter().filter(|(m, a)| m.2 <= budget && (*a || !alike));
            fitting.map(|(m, _)| (m.0, m.1)).min().unwrap()
        };
        let Fit::Recompute(recompute) = fit(&estimator, budget).unwrap() else { panic!("{budget} is possible") };
        let (flops, bytes, arena) = measure(&estimator.programs(recompute).unwrap());
        assert!(arena <= budget);
        assert_eq!((flops, bytes), best(false), "budget {budget}");
        gained += usize::from((flops, bytes) < best(true));
    }
    assert!(gained > 4, "{gained}");
}
