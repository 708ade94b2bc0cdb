//! Optimizers: against PyTorch (`golden/optimizers.py` made the file), over layouts, resumed, and by groups.

mod common;

use common::{run_to, run_with, tiny, write_corpus};
use lockstep_config::Config;
use lockstep_exec::Executor;
use lockstep_exec::cpu::CpuExecutor;
use lockstep_host::Devices;
use lockstep_infer::parts;
use lockstep_ir::Hint;
use lockstep_ir::graph::State;
use lockstep_ir::program::{Entry, Role, Slot, Tensor};
use lockstep_ir::{Layout, Op, StepProgram, StepScalars, account};
use lockstep_plan::plan;
use lockstep_train::{Event, compare};
use safetensors::SafeTensors;
use std::path::Path;

const OPTIMIZERS: [&str; 4] = ["adamw", "lion", "sgd", "muon"];

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// A tensor of the program from its unpacked parts.
fn packed(golden: &SafeTensors, tensor: &Tensor, prefix: &str) -> Vec<u8> {
    let Role::State(State::Parameter(parameter)) = &tensor.role else { panic!("{} is no parameter", tensor.name) };
    let part = |name: &String| golden.tensor(&format!("{prefix}.{name}")).unwrap().data().to_vec();
    parameter.parts.iter().flat_map(part).collect()
}

#[test]
fn four_steps_are_those_of_pytorch() {
    let bytes = std::fs::read(format!("{}/tests/golden/optimizers.safetensors", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    for name in OPTIMIZERS {
        let text = format!(
            "[model]\nvocab_size = 16\nlayers = 1\ndim = 8\nheads = 2\nkv_heads = 1\nhead_dim = 6\nffn = 12\n\
             [train]\nseq = 4\nglobal_batch = 1\nthreads = 2\n[optimizer]\nname = \"{name}\"\n"
        );
        let config = Config::parse(&text, "golden.toml", &[]).unwrap();
        let plan = plan(&Devices::new(), &config).unwrap();
        let mut program = plan.program().clone();
        // The update alone, on gradients that are written.
        let segment = program.segments.iter().position(|s| s.name == "update").unwrap();
        let entry = Entry { name: "update".into(), schedule: vec![Slot::new(segment, 0)] };
        program.entries = vec![entry];
        let is_parameter = |t: &&Tensor| matches!(t.role, Role::State(State::Parameter(_)));
        let parameters: Vec<Tensor> = program.tensors.iter().filter(is_parameter).cloned().collect();
        let mut executor = CpuExecutor::load(program, plan.threads).unwrap();
        for tensor in &parameters {
            executor.write(&tensor.name, 0, &packed(&golden, tensor, "param")).unwrap();
        }
        let o = &config.optimizer;
        for step in 0..4 {
            for tensor in &parameters {
                let gradient = packed(&golden, tensor, &format!("grad.{step}"));
                executor.write(&format!("grad.{}", tensor.name), 0, &gradient).unwrap();
            }
            let bias = |beta: Option<f64>| beta.map_or(1.0, |beta| 1.0 - beta.powi(step + 1)) as f32;
            let (bias1, bias2) = (bias(o.beta1), bias(o.beta2));
            let scalars =
                StepScalars { lr: 0.01, inverse_count: 1.0, clip: f32::INFINITY, bias1, bias2, loss_scale: 1.0 };
            let scalars: Vec<u8> = scalars.to_array().iter().flat_map(|x| x.to_le_bytes()).collect();
            executor.write(StepScalars::NAME, 0, &scalars).unwrap();
            executor.run("update").unwrap();
        }
        for tensor in &parameters {
            let (found, all) = (executor.read(&tensor.name, 0).unwrap(), floats(&packed(&golden, tensor, name)));
            let Role::State(State::Parameter(parameter)) = &tensor.role else { continue };
            for part in parts(parameter, &tensor.whole) {
                let range = part.start..part.start + part.elements;
                let (found, expected) = (&floats(&found)[range.clone()], &all[range]);
                let largest = expected.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
                let error = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest;
                assert!(error < 1e-5, "{name}: {} differs by {error:e}", part.name);
            }
        }
    }
}

fn layout_config(optimizer: &str, train: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 67\nlayers = 2\ndim = 32\nheads = 4\nkv_heads = 2\nffn = 48\ntied_embeddings = true\n\
         [optimizer]\nname = \"{optimizer}\"\n[train]\nseq = 12\nglobal_batch = 8\nthreads = 2\nmicro_batch = 1\n{train}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

fn check(config: &Config, layouts: &[&str]) {
    let layouts: Vec<Layout> = layouts.iter().map(|l| l.parse().unwrap()).collect();
    for c in compare(&Devices::new(), config, &layouts, 3, &mut |_| ()).unwrap() {
        assert!(c.kept, "{}: {c:#?}", config.optimizer.name);
        assert!(c.identical || !config.train.reproducible || c.layout.contains("tp="), "{c:#?}");
    }
}

#[test]
fn every_layout_moves_parameters_as_one_rank_does() {
    let layouts = ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=4,zero=1,pp=2", "pp=2"];
    let split = ["tp=2,sp", "dp=2,zero=3,tp=2", "dp=2,zero=1,tp=2,pp=2"];
    for optimizer in &OPTIMIZERS[1..] {
        for train in ["", "[precision]\npolicy = \"bf16\"\ngradients = \"bf16\"", "reproducible = true"] {
            let config = layout_config(optimizer, train);
            check(&config, &layouts);
            check(&config, &split);
        }
    }
}

/// What Muon orthogonalises is the same matrix, whoever has which part of it.
#[test]
fn muon_gathers_what_tensor_parallel_ranks_split_and_share() {
    let layouts = [
        "tp=4",
        "tp=4,sp",
        "dp=2,zero=1,tp=4",
        "dp=2,zero=2,tp=2,sp",
        "dp=2,zero=3,tp=4",
        "dp=2,zero=3,tp=2,pp=2",
        "dp_replicate=2,dp=2,zero=1,tp=2",
        "dp_replicate=2,dp=2,zero=3,pp=2",
        "dp=2,zero=3,cp=2,tp=2",
    ];
    for train in ["", "[precision]\npolicy = \"bf16\""] {
        check(&layout_config("muon", train), &layouts);
    }
    // As many bytes as a matrix has, whoever shares a part of it.
    let config = layout_config("muon", "").at(&"tp=4".parse().unwrap());
    let planned = plan(&Devices::new(), &config).unwrap();
    let program = planned.program();
    let all = account::communication(program, program.entry(StepProgram::TRAIN).unwrap());
    let gathers = all.iter().find(|c| (c.segment, c.op, c.axis.as_str()) == ("update", "all_gather", "tp")).unwrap();
    let layer = (32 + 2 * 16) * 32 + 32 * 32 + 3 * 48 * 32;
    assert_eq!((gathers.calls, gathers.bytes, gathers.sent_bytes), (2 * 4, 2 * layer * 4, 2 * layer * 3));
}

#[test]
fn a_resumed_run_leaves_no_trace_whatever_its_optimizer_and_layout() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    for optimizer in &OPTIMIZERS[1..] {
        let at = |layout: &str| {
            let keys =
                format!("steps = 6\nreproducible = true\nmicro_batch = 1\nvalidate_every = 0\n[parallel]\n{layout}");
            let config = tiny(dir.path(), &keys).resolved_toml();
            let lr = if *optimizer == "lion" { 3e-4 } else { 3e-3 };
            let unset = ["beta1", "beta2", "eps"].map(|key| format!("\n{key} = "));
            let config =
                unset.iter().fold(config, |text, key| text.replace(key.as_str(), &format!("\n# {}", &key[1..])));
            let set = [format!("optimizer.name={optimizer}"), format!("optimizer.lr={lr}")];
            Config::parse(&config, "run.toml", &set).unwrap()
        };
        let losses = |layout: &str, dir: &Path, last| {
            run_to(&at(layout), dir, last).steps.iter().map(|m| m.loss).collect::<Vec<f64>>()
        };
        let whole = losses("", &dir.path().join(format!("{optimizer}-whole")), 6);
        let run_dir = dir.path().join(format!("{optimizer}-parts"));
        let legs = [("dp = 2\nzero = 1", 2), ("pp = 2", 4), ("dp = 4\nzero = 3", 6)];
        let parts: Vec<f64> = legs.iter().flat_map(|(layout, last)| losses(layout, &run_dir, *last)).collect();
        assert_eq!(parts, whole, "{optimizer}");
        assert!(whole[5] < whole[0] - 0.02, "{optimizer} learns: {whole:?}");
    }
}

#[test]
fn a_checkpoint_of_another_optimizer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let config = tiny(dir.path(), "steps = 4\nvalidate_every = 0");
    run_with(&config, &dir.path().join("run"), &mut |_| ()).unwrap();
    let lion = Config::load(&dir.path().join("run.toml"), &["optimizer.name=lion".into()]).unwrap();
    let error = run_with(&lion, &dir.path().join("run"), &mut |_| ()).unwrap_err().with_hint();
    assert!(error.contains("optimizer.name: \"adamw\" before, \"lion\" now"), "{error}");
}

#[test]
fn groups_change_the_learning_rate_and_the_decay_of_what_they_match() {
    let groups = "[[optimizer.groups]]\nmatch = \"*.mlp.*\"\nlr_scale = 0.25\n\
                  [[optimizer.groups]]\nmatch = \"model.norm.*\"\nweight_decay = 0.5\n";
    for optimizer in OPTIMIZERS {
        let plan = plan(&Devices::new(), &layout_config(optimizer, groups)).unwrap();
        let program = plan.program();
        let mut seen = 0;
        for instr in program.segments.iter().flat_map(|s| &s.instrs) {
            let (Op::AdamW { decay, lr_scale, .. }
            | Op::Lion { decay, lr_scale, .. }
            | Op::Sgd { decay, lr_scale, .. }
            | Op::Descend { decay, lr_scale }) = instr.op
            else {
                continue;
            };
            let name = program.values[instr.inputs[0].value].as_str();
            let ffn = name.contains("gate_up") || name.contains("down");
            let usual = if name.contains("norm") { 0.0 } else { 0.1 };
            let expected = (if ffn { 0.25 } else { 1.0 }, if name == "final_norm" { 0.5 } else { usual });
            assert_eq!((lr_scale, decay), expected, "{optimizer}: {name}");
            seen += 1;
        }
        assert_eq!(seen, 2 + 6 * 2, "{optimizer}");
    }
}

#[test]
fn a_learning_rate_of_zero_freezes_parameters() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let groups = "steps = 4\nvalidate_every = 0\n[[optimizer.groups]]\nmatch = \"*\"\nlr_scale = 0\n";
    let config = tiny(dir.path(), groups);
    let mut losses = Vec::new();
    run_with(&config, &dir.path().join("run"), &mut |event| {
        if let Event::Validated { loss, .. } = event {
            losses.push(loss);
        }
    })
    .unwrap();
    assert_eq!(losses.len(), 2);
    assert_eq!(losses[0], losses[1]);
}
