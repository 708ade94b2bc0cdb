//! Optimizer state and activations that wait in the memory of the host: no bit of a run depends on them.

mod common;

use common::{run_to, write_corpus};
use lockstep_checkpoint::open;
use lockstep_config::{Bytes, Config, OffloadSize};
use lockstep_host::Devices;
use lockstep_ir::graph::Phase;
use lockstep_ir::program::{Lifetime, Segment, Stream};
use lockstep_ir::{Hint, Op};
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

/// Models, formats, recompute policies, schedules and layouts whose activations are moved.
const SAVED: [&[&str]; 22] = [
    &[],
    &["train.micro_batch=4", "precision.policy=fp32"],
    &["train.micro_batch=2", "precision.policy=fp16"],
    &["precision.policy=fp8", "precision.fp8_weights=0"],
    &["precision.policy=fp8", "precision.fp8_weights=0", "precision.fp8_recipe=delayed", "recompute.policy=full"],
    &["recompute.policy=full"],
    &["recompute.policy=selective", "train.noise_scale=true"],
    &["recompute.policy=every-k"],
    &["model.architecture=gpt2", "model.kv_heads=4", "model.dropout=0.1", "precision.policy=fp32"],
    &["model.mtp_depth=1", "model.mtp_loss=0.3"],
    &["lora.rank=4"],
    &["parallel.pp=2"],
    &["parallel.pp=2", "parallel.schedule=gpipe", "recompute.policy=selective"],
    &["parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual=2"],
    &["parallel.pp=2", "parallel.schedule=zb-h1", "offload.optimizer=true"],
    &["parallel.pp=2", "parallel.schedule=zb-v", "recompute.policy=selective"],
    &["parallel.dp=2", "parallel.zero=3"],
    &["parallel.dp=2", "parallel.zero=3", "parallel.reshard_after_forward=false", "offload.optimizer=true"],
    &["parallel.tp=2", "parallel.sequence_parallel=true", "offload.optimizer=true"],
    &["parallel.cp=2"],
    &["model.architecture=mixtral", "model.experts=4", "parallel.dp=2", "parallel.ep=2"],
    &["model.architecture=mixtral", "model.experts=4", "parallel.ep=2", "parallel.pp=2", "parallel.schedule=zb-v"],
];

#[test]
fn no_bit_depends_on_activations_that_wait_in_the_memory_of_the_host() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    for (s, saved) in SAVED.into_iter().enumerate() {
        let config = |offload: &str| config(dir.path(), &[saved, &[offload]].concat());
        let ran = |name: &str, offload: &str, stops: &[u64]| {
            let folder = dir.path().join(format!("{s}-{name}"));
            let steps: Vec<_> = stops.iter().flat_map(|last| run_to(&config(offload), &folder, *last).steps).collect();
            (bits(&steps), state(&folder))
        };
        let stays = ran("stays", "offload.activations=false", &[4]);
        assert!(ran("all", "offload.activations=true", &[4]) == stays, "{saved:?}");
        assert!(
            plan(&Devices::new(), &config("offload.activations=true")).unwrap().host_activation_bytes() > 0,
            "{saved:?}"
        );
        // A part of it, and across an interruption.
        if s % 4 == 0 {
            assert!(ran("part", "offload.activations=100 KiB", &[2, 4]) == stays, "{saved:?}, a part");
        }
    }
}

#[test]
fn the_device_keeps_a_window_of_the_activations_that_the_host_has() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let planned = |more: &[&str], activations: &str| {
        let keys = [&["model.layers=16", "train.seq=128"], more, &[activations]].concat();
        plan(&Devices::new(), &config(dir.path(), &keys)).unwrap()
    };
    for more in [
        &[][..],
        &["recompute.policy=full"],
        &["parallel.pp=2", "parallel.schedule=gpipe"],
        &["parallel.pp=2", "parallel.schedule=zb-v"],
    ] {
        let (stays, goes) = (planned(more, "offload.activations=false"), planned(more, "offload.activations=true"));
        assert_eq!((stays.memory.host_bytes, goes.memory.host_bytes), (0, goes.memory.host_activation_bytes));
        for (stays, goes) in stays.stages.iter().zip(&goes.stages) {
            let [fell, moved] = [stays.total_bytes - goes.total_bytes, goes.host_bytes];
            assert!(moved * 2 / 3 < fell && fell <= moved, "{more:?}: {fell} fewer on the device, {moved} in the host");
        }
        // Of a size no more than it says, and what it says but for less than a value.
        let most = goes.memory.host_bytes / 2;
        let part = planned(more, &format!("offload.activations={most} B")).memory;
        assert!(
            (most.saturating_sub(1 << 20)..=most).contains(&part.host_bytes),
            "{more:?}: {} of {most}",
            part.host_bytes
        );
        assert!(goes.memory.total_bytes < part.total_bytes && part.total_bytes < stays.memory.total_bytes, "{more:?}");
    }
}

#[test]
fn copies_of_activations_run_beside_the_kernels_of_other_layers() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let keys = ["model.layers=8", "offload.activations=true", "offload.optimizer=true"];
    let planned = plan(&Devices::new(), &config(dir.path(), &keys)).unwrap();
    let program = planned.program();
    let copies = |name: &str, op: Op| {
        let segment = program.segments.iter().find(|s| s.name == name).unwrap();
        let copies = segment.instrs.iter().enumerate().filter(|(_, i)| i.op == op && i.phase != Phase::Update);
        (segment, copies.map(|(at, i)| (at, i.layer)).collect::<Vec<_>>())
    };
    let (forward, out) = copies("forward", Op::Offload);
    // A layer's copies are waited for when another layer has added its own.
    let waits: Vec<(usize, usize)> =
        forward.instrs.iter().enumerate().flat_map(|(t, i)| i.waits.iter().map(move |w| (t, *w))).collect();
    let copies_waited_for = waits.iter().filter(|(_, w)| forward.instrs[*w].stream == Stream::Offload);
    assert!(copies_waited_for.clone().count() > 4);
    for (kernel, copy) in copies_waited_for {
        let later = out.iter().filter(|(at, _)| (copy + 1..*kernel).contains(at)).count();
        assert!(later >= 2, "instruction {kernel} waits for copy {copy} at once");
    }
    for name in ["backward", Segment::BACKWARD_AND_UPDATE] {
        let (backward, back) = copies(name, Op::Fetch);
        assert_eq!(back.len(), out.len());
        // In the order in which layers need them, and read after others have been.
        assert!(back.windows(2).all(|pair| pair[0].1 >= pair[1].1), "{back:?}");
        let reader = |at: usize| {
            let to = backward.instrs[at].outputs[0].as_ref().unwrap().buffer;
            backward.instrs.iter().position(|i| i.inputs.iter().any(|x| x.buffer == to)).unwrap()
        };
        assert!(back.iter().all(|(at, _)| reader(*at) > at + 2), "{back:?}");
        // The last layer's stay on the device: they are read at once.
        assert!(back.iter().all(|(_, layer)| layer.is_some_and(|layer| layer < 7)), "{back:?}");
    }
}

#[test]
fn a_run_may_be_resumed_with_and_without() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let with = |offload: &[&str]| config(dir.path(), offload);
    let (stays, goes) = (with(&[]), with(&["offload.optimizer=true", "offload.activations=true"]));
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
    let found = |bytes: u64| with_fitting_offload(&Devices::new(), auto.clone(), &room(bytes), None).unwrap();
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
fn auto_moves_the_fewest_activations_that_fit_where_times_are_not_known() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let set = ["model.layers=8", "train.seq=128"];
    let planned = |config: &Config| plan(&Devices::new(), config).unwrap().memory;
    let stays = planned(&config(dir.path(), &set));
    let all = planned(&config(dir.path(), &[&set[..], &["offload.activations=true"]].concat()));
    let auto = config(dir.path(), &[&set[..], &["offload.activations=auto"]].concat());
    let found = |bytes: u64| {
        let room = Room { bytes, shared: true, place: "on a test".into() };
        with_fitting_offload(&Devices::new(), auto.clone(), &room, None).unwrap()
    };
    assert_eq!(found(stays.total_bytes).offload.activations, OffloadSize::All(false));
    let room = (stays.total_bytes + all.total_bytes) / 2;
    let part = planned(&found(room));
    assert!(part.total_bytes <= room && part.host_bytes < all.host_bytes, "{part:?}");
    // What can never fit has all of it out.
    assert_eq!(planned(&found(1 << 20)).host_bytes, all.host_bytes);
    // On this machine it fits, and runs.
    assert_eq!(
        settled(&Devices::new(), &auto, None, &mut |_, _| {}).unwrap().offload.activations,
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

#[test]
fn activations_that_the_host_has_no_room_for_are_refused_before_the_start() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let Some(free) = lockstep_exec::cpu::available_bytes() else { return };
    // What enters a layer is 4096 bytes of a position: on a CPU, all of them are as much as what is free, beside the arena.
    let layers = 64;
    let seq = format!("train.seq={}", (free / layers / 4096).next_multiple_of(64));
    let layers = format!("model.layers={layers}");
    let set = ["model.dim=2048", "model.heads=16", "model.ffn=64", &layers, &seq, "train.global_batch=1"];
    let keys = [&set[..], &["recompute.policy=full", "train.device=cpu", "offload.activations=true"]].concat();
    let config = config(dir.path(), &keys);
    let planned = plan(&Devices::new(), &config).unwrap();
    let error = Devices::new().require_memory(&config, &planned).unwrap_err().with_hint();
    assert!(error.starts_with("offload.activations puts "), "{error}");
    assert!(
        error.contains("into the memory of the host") && error.contains("\nhint: set offload.activations to "),
        "{error}"
    );
}
