//! A step allocates nothing, and the process grows by what the plan says. One test alone in its process: it counts the
//! whole process's allocations.

use lockstep_compile::ROWS_BEYOND;
use lockstep_config::{Batch, Config};
use lockstep_data::{PrepareSpec, Sampler, prepare};
use lockstep_host::Devices;
use lockstep_ir::{StepProgram, StepScalars};
use lockstep_plan::plan;
use lockstep_train::Session;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes every call on to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What is resident of memory that no file backs: the pages of the binary are not counted.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[test]
fn a_step_allocates_nothing_and_the_process_grows_by_the_arena() {
    let text = "[model]\nvocab_size = 2048\nlayers = 6\ndim = 320\nheads = 5\nffn = 896\n[train]\nseq = 128\nglobal_batch = 2\nmicro_batch = 1";
    let config = Config::parse(text, "run.toml", &[]).unwrap();
    let plan = plan(&Devices::new(), &config).unwrap();
    assert!(plan.memory.total_bytes > 100_000_000, "{}", plan.memory.total_bytes);
    let before = resident_bytes();
    let mut session = Session::new(&Devices::new(), &config, &plan).unwrap();
    let scalars =
        StepScalars { lr: 1e-3, inverse_count: 1.0 / 256.0, clip: 1.0, bias1: 0.1, bias2: 0.05, loss_scale: 1.0 };
    session.run_step(scalars).unwrap();
    let grown = resident_bytes() - before;
    let ratio = grown as f64 / plan.memory.total_bytes as f64;
    assert!((ratio - 1.0).abs() < 0.05, "grew by {grown} bytes, the plan says {}", plan.memory.total_bytes);

    let count = ALLOCATIONS.load(Ordering::SeqCst);
    for _ in 0..3 {
        session.run_step(scalars).unwrap();
        session.executor().run(StepProgram::EVALUATE).unwrap();
    }
    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst), count);

    // The same with samples that a thread reads ahead: two micro-batches of tokens and targets are all the memory that takes.
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..2000).map(|i| format!("{i} squared is {}. ", i * i)).collect();
    std::fs::write(folder.path().join("a.txt"), text).unwrap();
    let spec = PrepareSpec { paths: vec![folder.path().join("a.txt")], ..PrepareSpec::default() };
    let data = prepare(&spec, &folder.path().join("out"), &mut |_| ()).unwrap();
    let samples = Arc::new(Sampler::new(data.train().clone(), 128, 1).unwrap());
    assert_eq!(session.read_ahead(&samples, 0).unwrap(), 2 * 2 * 128 * 4);
    let mut step = |n: u64| session.step(&samples, Batch { first_sample: 2 * n, sequences: 2 }, scalars).unwrap();
    step(0);
    let count = ALLOCATIONS.load(Ordering::SeqCst);
    (1..5).for_each(|n| assert!(step(n).loss.is_finite()));
    // Going back begins anew, in the same memory.
    step(2);
    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst), count);

    // On two ranks, what is read is put together in memory of its own, tensor by tensor. Nothing else is allocated by a bound on the
    // rows of experts, and nothing by the ranks.
    drop(session);
    let allocated = |f: &mut dyn FnMut()| {
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        f();
        ALLOCATIONS.load(Ordering::SeqCst) - before
    };
    let of_two = |bound: &str| {
        let text = format!(
            "[model]\narchitecture = \"mixtral\"\nvocab_size = 64\nlayers = 2\ndim = 32\nheads = 4\nffn = 48\nexperts = 4\n\
             [train]\nseq = 16\nglobal_batch = 4\nmicro_batch = 1\nthreads = 1\n[parallel]\nep = 2\n{bound}"
        );
        let config = Config::parse(&text, "run.toml", &[]).unwrap();
        let plan = lockstep_plan::plan(&Devices::new(), &config).unwrap();
        let mut session = Session::new(&Devices::new(), &config, &plan).unwrap();
        session.run_step(scalars).unwrap();
        let step = allocated(&mut || drop(session.run_step(scalars).unwrap()));
        assert_eq!(allocated(&mut || session.executor().run(StepProgram::TRAIN).unwrap()), 0);
        let tensors = plan.compiled.programs[0].tensors.iter();
        let beyond: Vec<&str> = tensors.map(|t| t.name.as_str()).filter(|name| name.starts_with(ROWS_BEYOND)).collect();
        let mut read = |name: &&str, m| drop(session.executor().read(name, m).unwrap());
        (beyond.len(), step, allocated(&mut || beyond.iter().for_each(|name| (0..2).for_each(|m| read(name, m)))))
    };
    let (none, without, _) = of_two("");
    let (layers, with, reads) = of_two("ep_bound = 1.5");
    assert_eq!((none, layers), (0, 2));
    assert_eq!(with, without + reads);
}
