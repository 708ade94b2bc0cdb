//! A parameter may be used any number of times, on any stage that holds it: its gradient is the sum over its uses.

use lockstep_compile::{AdamW, Context, Offload, Optimizer, Precision, Recompute, Steps, compile};
use lockstep_config::Config;
use lockstep_exec::{Executor, ThreadWorld, cpu, reference};
use lockstep_ir::Hint;
use lockstep_ir::graph::{Loss, Parameter, Source, State};
use lockstep_ir::{Axis, DType, Dim, Graph, Init, Op, StepProgram, StepScalars, TensorType, ValueId, counter};
use std::time::Duration;

const VOCAB: usize = 16;
const BATCH: usize = 2;
const SEQ: usize = 8;

/// Four layers between an embedding and the head that is tied to it. The table is looked up again where `uses` says: before the
/// layers (`b`), after them (`e`).
fn model(uses: &str) -> Graph {
    let mut g = Graph::new();
    let (vocab, embed) = (Dim::new(Axis::Vocab, VOCAB), Dim::new(Axis::Embed, 8));
    let ids = TensorType::new(DType::U32, [Dim::new(Axis::Batch, BATCH), Dim::new(Axis::Seq, SEQ)]);
    let (tokens, targets) = (g.input("tokens", ids.clone()), g.input("targets", ids));
    let parameter = |g: &mut Graph, name: &str, dims: Vec<Dim>| {
        let state = Parameter::new(Init::Ones, vec![name.to_owned()]);
        g.state(name, TensorType::new(DType::F32, dims), State::Parameter(state))
    };
    let table = parameter(&mut g, "table", vec![vocab, embed.clone()]);
    let op = |g: &mut Graph, op, inputs: &[ValueId], name: &str| g.op(op, inputs, name).unwrap()[0];
    let again = |g: &mut Graph, mut x: ValueId, at: char| {
        for n in 0..uses.chars().filter(|c| *c == at).count() {
            let more = op(g, Op::Embedding, &[tokens, table], &format!("more.{at}{n}"));
            x = op(g, Op::Add, &[x, more], &format!("sum.{at}{n}"));
        }
        x
    };
    let x = op(&mut g, Op::Embedding, &[tokens, table], "x");
    let mut x = again(&mut g, x, 'b');
    for layer in 0..4 {
        g.enter_layer(Some(layer));
        let w = parameter(&mut g, &format!("w{layer}"), vec![embed.clone()]);
        let normed = op(&mut g, Op::rms_norm(1e-5), &[x, w], &format!("normed.{layer}"));
        x = op(&mut g, Op::Add, &[x, normed], &format!("x.{layer}"));
    }
    g.enter_layer(None);
    let x = again(&mut g, x, 'e');
    let logits = op(&mut g, Op::Linear, &[x, table], "logits");
    let loss = op(&mut g, Op::CrossEntropy, &[logits, targets], "loss");
    g.outputs.push(loss);
    g.losses.push(Loss { value: loss, weight: 1.0 });
    g
}

fn context(parallel: &str) -> Context {
    let text = format!(
        "[model]\nvocab_size = {VOCAB}\nlayers = 4\ndim = 8\nheads = 2\nffn = 8\n\
         [train]\nseq = {SEQ}\nglobal_batch = 4\nmicro_batch = 1\nthreads = 1\n[parallel]\n{parallel}\n"
    );
    Context {
        device: cpu::profile(1, DType::F32, DType::F32),
        layout: Config::parse(&text, "run.toml", &[]).unwrap().layout(),
        optimizer: Optimizer::adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, 0.1),
        precision: Precision::FP32,
        recompute: Recompute::None,
        stages: vec![],
        steps: Steps::default(),
        offload: Offload::default(),
    }
}

fn feed(graph: &Graph, v: ValueId) -> Option<Vec<f64>> {
    let value = graph.get(v);
    let key = counter::key(5, &value.name);
    let id = |i| (counter::bits(key, i as u64) % VOCAB as u64) as f64;
    let weight = |i| f64::from(counter::normal(key, i as u64));
    match value.source {
        Source::Input => Some((0..value.ty.elements()).map(id).collect()),
        Source::State(State::Parameter(_)) => Some((0..value.ty.elements()).map(weight).collect()),
        _ => None,
    }
}

/// The table after a step, and its gradient.
fn step(uses: &str, parallel: &str) -> [Vec<f32>; 2] {
    let (graph, context) = (model(uses), context(parallel));
    let programs = compile(&graph, &context).unwrap_or_else(|e| panic!("{uses}, {parallel}: {e}")).programs;
    let mut ranks = ThreadWorld::on_cpu(programs, 1, Duration::from_secs(20)).unwrap();
    for (v, value, _) in graph.parameters() {
        let data: Vec<u8> = feed(&graph, v).unwrap().iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
        ranks.write(&value.name, 0, &data).unwrap();
    }
    for m in 0..context.layout.micro_batches {
        for v in graph.values.iter().filter(|v| v.ty.dtype == DType::U32) {
            let v = ValueId(graph.values.iter().position(|other| other.name == v.name).unwrap());
            let data: Vec<u8> = feed(&graph, v).unwrap().iter().flat_map(|x| (*x as u32).to_le_bytes()).collect();
            ranks.write(&graph.get(v).name, m, &data).unwrap();
        }
    }
    let scalars =
        StepScalars { lr: 0.1, inverse_count: 1.0, clip: f32::INFINITY, bias1: 0.1, bias2: 0.05, loss_scale: 1.0 };
    let scalars: Vec<u8> = scalars.to_array().iter().flat_map(|x| x.to_le_bytes()).collect();
    ranks.write(StepScalars::NAME, 0, &scalars).unwrap();
    ranks.run(StepProgram::TRAIN).unwrap();
    ["table", "grad.table"].map(|name| {
        let bytes = ranks.read(name, 0).unwrap();
        bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    })
}

#[test]
fn the_gradient_is_the_sum_over_all_uses() {
    for uses in ["", "b", "e", "be", "bbe", "bee"] {
        let graph = lockstep_compile::autodiff(&model(uses), &context("")).unwrap();
        let values = reference::evaluate(&graph, |v| feed(&graph, v));
        let table = graph.parameters().next().unwrap().0;
        let accumulators = graph.gradients_of(table);
        assert_eq!(accumulators.len(), 2 + uses.len());
        let [_, found] = step(uses, "");
        let micro_batches = context("").layout.micro_batches as f64;
        for (i, x) in found.iter().enumerate() {
            let sum: f64 = accumulators.iter().map(|v| values[v.0].as_ref().unwrap()[i]).sum::<f64>() * micro_batches;
            assert!((f64::from(*x) - sum).abs() < 1e-4 * sum.abs().max(1.0), "{uses} {i}: {x} and {sum}");
        }
    }
}

#[test]
fn stages_that_share_a_parameter_add_its_uses_in_one_order() {
    for uses in ["", "b", "e", "be", "bbe", "bee"] {
        let whole = step(uses, "");
        for parallel in ["pp = 2", "pp = 4"] {
            assert_eq!(step(uses, parallel), whole, "{uses}, {parallel}");
        }
    }
}

#[test]
fn a_parameter_that_layers_of_two_stages_share_is_refused() {
    let mut g = model("");
    let w = |g: &Graph, name: &str| ValueId(g.values.iter().position(|v| v.name == name).unwrap());
    let (first, last) = (w(&g, "w1"), w(&g, "w2"));
    for node in &mut g.nodes {
        node.inputs.iter_mut().filter(|v| **v == last).for_each(|v| *v = first);
    }
    assert!(compile(&g, &context("")).is_ok());
    assert!(compile(&g, &context("pp = 2")).unwrap_err().with_hint().contains("pipeline stages"));
}
