//! Optimizer state that waits in the memory of the host: no bit of a run depends on it.

mod common;

use common::{run_to, write_corpus};
use lockstep_checkpoint::open;
use lockstep_config::{Bytes, Config, OffloadSize};
use lockstep_host::Devices;
use lockstep_ir::Op;
use lockstep_ir::graph::Phase;
use lockstep_ir::program::{Lifetime, Segment, Stream};
use lockstep_plan::{Room, plan, with_fitting_offload};
use lockstep_train::{StepMetrics, settled};
use std::path::Path;

fn config(dir: &Path, set: &[&str]) -> Config {
    let text = "[model]\nvocab_size = 256\nlayers = 4\ndim = 256\nheads = 4\nkv_heads = 2\nffn = 256\n\
         [data]\npaths = [\".\"]\nextensions = [\"txt\"]\n[optimizer]\nlr = 1e-3\nwarmup_steps = 2\n\
         [train]\nsteps = 4\nseq = 32\nglobal_batch = 4\nmicro_batch = 1\nvalidate_every = 2\n\
         [precision]\npolicy = \"bf16\"\n";
    std::fs::write(dir.join("run.toml"), text).unwrap();
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    Config::load(&dir.join("run.toml"), &set).unwrap()
}

fn bits(steps: &[StepMetrics]) -> Vec<(u64, u32)> {
    steps.iter().map(|m| (m.loss.to_bits(), m.grad_norm.to_bits())).collect()
}

/// All bytes of the last checkpoint, by group and name.
fn state(run: &Path) -> Vec<(String, Vec<u8>)> {
    let checkpoint = open(&run.join("checkpoints/step-00000004")).unwrap();
    let of = |group: &'static str| {
        let names = checkpoint.names(group).unwrap().into_iter();
        names
            .map(|name| (format!("{group}.{name}"), checkpoint.tensor(group, name).unwrap().bytes().into_owned()))
            .collect::<Vec<_>>()
    };
    of("model").into_iter().chain(of("optimizer")).collect()
}

const FORMATS: [&[&str]; 4] = [
    &[],
    &["precision.moments=int8", "precision.master=bf16", "precision.gradients=bf16"],
    &["precision.moments=bf16", "optimizer.name=muon"],
    &["precision.policy=fp32", "optimizer.name=lion", "optimizer.lr=1e-4"],
];

const LAYOUTS: [&[&str]; 8] = [
    // More activations: most state comes while backward runs.
    &["train.seq=64"],
    &["parallel.dp=2", "parallel.zero=1"],
    &["parallel.dp=2", "parallel.zero=2"],
    &["parallel.dp=2", "parallel.zero=3"],
    &["parallel.tp=2", "parallel.sequence_parallel=true"],
    &["parallel.pp=2", "parallel.schedule=zb-v"],
    &["parallel.cp=2"],
    &["train.noise_scale=true", "recompute.policy=full"],
];

#[test]
fn no_bit_depends_on_what_waits_in_the_memory_of_the_host() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    for (l, layout) in LAYOUTS.into_iter().enumerate() {
        for (f, format) in FORMATS.into_iter().enumerate().filter(|(f, _)| l == 0 || *f == l % FORMATS.len()) {
            let ran = |name: &str, offload: &str, stops: &[u64]| {
                let config = config(dir.path(), &[layout, format, &[offload]].concat());
                let folder = dir.path().join(format!("{l}-{f}-{name}"));
                let steps: Vec<_> = stops.iter().flat_map(|last| run_to(&config, &folder, *last).steps).collect();
                (bits(&steps), state(&folder))
            };
            let stays = ran("stays", "offload.optimizer=false", &[4]);
            assert!(ran("all", "offload.optimizer=true", &[4]) == stays, "{layout:?} {format:?}");
            // A part of it, and across an interruption.
            if l % 2 == 1 {
                continue;
            }
            assert!(ran("part", "offload.optimizer=1 MiB", &[2, 4]) == stays, "{layout:?} {format:?}, a part");
        }
    }
}

#[test]
fn a_run_may_be_resumed_with_and_without() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let with = |offload: &str| config(dir.path(), &[offload]);
    let (stays, goes) = (with("offload.optimizer=false"), with("offload.optimizer=true"));
    let whole = run_to(&stays, &dir.path().join("whole"), 4);
    for (name, first, then) in [("out", &stays, &goes), ("back", &goes, &stays)] {
        let folder = dir.path().join(name);
        let steps = [run_to(first, &folder, 2).steps, run_to(then, &folder, 4).steps].concat();
        assert_eq!(bits(&steps), bits(&whole.steps), "{name}");
        assert!(state(&folder) == state(&dir.path().join("whole")), "{name}");
    }
}

#[test]
fn the_device_keeps_what_the_host_does_not_and_copies_run_beside_backward_and_update() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let planned = |offload: &str| plan(&Devices::new(), &config(dir.path(), &[offload])).unwrap();
    let (stays, goes) = (planned("offload.optimizer=false"), planned("offload.optimizer=true"));
    let part = planned("offload.optimizer=3 MiB");
    let optimizer = |p: &lockstep_plan::Plan| p.memory.classes["optimizer"];
    // Three tensors of f32 for every parameter.
    assert!(goes.memory.host_bytes >= 12 * goes.parameters && goes.memory.host_bytes < 12 * goes.parameters + 65536);
    assert_eq!(stays.memory.host_bytes, 0);
    assert!(optimizer(&goes) < optimizer(&stays) / 4, "{} and {}", optimizer(&goes), optimizer(&stays));
    assert!(goes.memory.total_bytes < stays.memory.total_bytes);
    assert!((2 << 20..=3 << 20).contains(&part.memory.host_bytes), "{}", part.memory.host_bytes);
    let program = goes.program();
    let end = program.segments.iter().find(|s| s.name == Segment::BACKWARD_AND_UPDATE).unwrap();
    let at = |op: Op| (0..end.instrs.len()).filter(move |i| end.instrs[*i].op == op).collect::<Vec<_>>();
    let (fetches, offloads) = (at(Op::Fetch), at(Op::Offload));
    assert_eq!(fetches.len(), offloads.len());
    let hosted = program.tensors.iter().filter(|t| program.lifetime(t.buffer) == Lifetime::Host).count();
    assert_eq!(fetches.len(), hosted);
    assert!(fetches.iter().all(|i| end.instrs[*i].stream == Stream::Fetch));
    // The first copies come while backward still runs, the others two updates ahead of who reads them.
    let backward = (0..end.instrs.len()).rfind(|i| end.instrs[*i].phase == Phase::WeightGrad).unwrap();
    assert!(fetches.iter().filter(|i| **i < backward).count() >= 2, "{fetches:?}, backward ends at {backward}");
    let updates: Vec<usize> = (0..end.instrs.len()).filter(|i| end.instrs[*i].op.name() == "adamw").collect();
    for (k, pair) in updates.windows(3).enumerate() {
        let read = |i: usize| end.instrs[i].inputs.iter().map(|a| a.buffer).collect::<Vec<_>>();
        let comes = |i: &&usize| end.instrs[**i].outputs.iter().flatten().any(|o| read(pair[2]).contains(&o.buffer));
        assert!(fetches.iter().filter(comes).all(|i| *i < pair[0]), "update {k}");
    }
}

#[test]
fn auto_takes_the_least_that_fits() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let stays = plan(&Devices::new(), &config(dir.path(), &[])).unwrap().memory.total_bytes;
    let room = |bytes: u64| Room { bytes, shared: true, place: "on a test".into() };
    let auto = config(dir.path(), &["offload.optimizer=auto"]);
    let found = |bytes: u64| with_fitting_offload(&Devices::new(), auto.clone(), &room(bytes)).unwrap();
    assert_eq!(found(stays).offload.optimizer, OffloadSize::All(false));
    let fits = found(stays - (2 << 20));
    assert!(matches!(fits.offload.optimizer, OffloadSize::Most(Bytes(bytes)) if (2 << 20..6 << 20).contains(&bytes)));
    let planned = plan(&Devices::new(), &fits).unwrap();
    assert!(planned.memory.total_bytes <= stays - (2 << 20), "{}", planned.memory.total_bytes);
    assert!(fits.resolved_toml().contains("the least that fits"), "{}", fits.resolved_toml());
    // What can never fit has all of it out.
    let least = found(1 << 20);
    let all = plan(&Devices::new(), &config(dir.path(), &["offload.optimizer=true"])).unwrap();
    assert_eq!(plan(&Devices::new(), &least).unwrap().memory.host_bytes, all.memory.host_bytes);
    // On this machine it fits.
    assert_eq!(
        settled(&Devices::new(), &auto, None, &mut |_, _| {}).unwrap().offload.optimizer,
        OffloadSize::All(false)
    );
}

#[test]
fn memory_that_the_host_does_not_have_is_refused_before_the_start() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let Some(free) = lockstep_exec::cpu::available_bytes() else { return };
    // A layer has 252M parameters: with 4 bytes of each the arena has half of what is free, and the state, 12 bytes, more than all.
    let layers = format!("model.layers={}", (free / 9 / 252_000_000).max(1));
    let set = ["model.dim=4096", "model.ffn=16384", "precision.gradients=bf16", "train.device=cpu", &layers];
    let planned = |offload: &str| {
        let config = config(dir.path(), &[&set[..], &[offload]].concat());
        let planned = plan(&Devices::new(), &config).unwrap();
        Devices::new().require_memory(&config, &planned).map_err(|error| error.to_string())
    };
    let stays = planned("offload.optimizer=false").unwrap_err();
    assert!(stays.starts_with("the step needs"), "{stays}");
    let goes = planned("offload.optimizer=true").unwrap_err();
    assert!(goes.contains("into the memory of the host"), "{goes}");
}
