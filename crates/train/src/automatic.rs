//! `parallel.layout = "auto"`: the layout that a run begins with is searched for, and stays while there are as many ranks.

use crate::{Result, TrainError};
use lockstep_config::{Bytes, Config, DeviceChoice, OffloadSize, PLANNED, RecomputePolicy, legal};
use lockstep_exec::cpu;
use lockstep_host::{Devices, catalogue};
use lockstep_ir::{Layout, Mesh, MeshAxis, units};
use lockstep_plan::{LayoutChoice, RankedLayout, Room, SearchRequest, Target, search};
use lockstep_sim::{ClusterSpec, GpuSpec, Hardware};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A layout that was found, as the first process tells the others.
#[derive(Serialize, Deserialize)]
struct Found {
    layout: String,
    micro_batch: usize,
    recompute: String,
    budget: Option<u64>,
    /// Most bytes in the memory of the host, where the config leaves that open and they have been searched for.
    offload: Option<u64>,
    how: String,
}

/// How often it is shown how far a search is.
const SHOW_EVERY: Duration = Duration::from_millis(100);

/// The config with a layout for the ranks that there are: the one that a run in `dir` has, if that is of as many, or the fastest that
/// fits. `heard` hears how many small and how many whole programs are compiled.
pub(crate) fn with_layout(
    devices: &Devices,
    config: &Config,
    dir: Option<&Path>,
    heard: &mut dyn FnMut(u64, u64),
) -> Result<Config> {
    if !config.plans_layout() {
        return Ok(config.clone());
    }
    let ranks = devices.processes().or(config.parallel.ranks).unwrap_or(1);
    // What fits is the first process's to find out: others may have other memory.
    let found = devices.group().told::<_, TrainError>("plan", || match begun(config, dir, ranks) {
        Some(found) => Ok(found),
        None => searched(devices, config, ranks, heard),
    })?;
    // One rank alone has no words.
    let layout = found.layout.parse().unwrap_or(Layout::single(1));
    let recompute = RecomputePolicy::ALL.iter().copied().find(|policy| policy.word() == found.recompute);
    // It was written by this very build.
    let Some(recompute) = recompute else { unreachable!("a layout that was found is one") };
    let planned =
        config.with_planned_layout(&layout, found.micro_batch, (recompute, found.budget.map(Bytes)), &found.how);
    Ok(match found.offload {
        Some(bytes) => planned.with_optimizer_offload(bytes, &found.how),
        None => planned,
    })
}

impl Found {
    fn new(choice: &LayoutChoice, how: String) -> Self {
        let LayoutChoice { layout, micro_batch, recompute, budget, .. } = *choice;
        let (layout, recompute) = (layout.to_string(), recompute.to_string());
        Self { layout, micro_batch, recompute, budget, offload: None, how }
    }
}

/// The layout that the run has, if it is of as many ranks and still what the config allows.
fn begun(config: &Config, dir: Option<&Path>, ranks: usize) -> Option<Found> {
    let path = dir.map(|dir| dir.join("run.toml")).filter(|path| path.is_file())?;
    let before = Config::load(&path, &[]).ok().filter(|before| before.layout().mesh.ranks() == ranks)?;
    let same = |key: &str| key == "parallel.dp" || !config.is_given(key) || config.value(key) == before.value(key);
    let choice = LayoutChoice { gradients: config.precision.gradients, ..LayoutChoice::of(&before) };
    let now = choice.config(config);
    let fits = now.batches().stages().iter().all(|stage| stage.sequences.is_multiple_of(now.round()));
    let keeps = PLANNED.iter().all(|key| same(key)) && fits;
    let keeps = keeps && legal::check(&before.layout(), &now.extents()).is_empty();
    keeps.then(|| Found::new(&choice, "as the run began".into()))
}

fn searched(devices: &Devices, config: &Config, ranks: usize, heard: &mut dyn FnMut(u64, u64)) -> Result<Found> {
    let (target, config) = on_target(devices, config, ranks);
    let hardware = hardware(devices, target, ranks)?;
    let room = devices.room(&config);
    let room = room.unwrap_or_else(|| Room { bytes: u64::MAX, shared: true, place: "on this machine".into() });
    let offload = config.offload.optimizer == OffloadSize::Auto;
    let request = SearchRequest {
        machine: devices,
        config: &config,
        gpus: ranks,
        hardware: &hardware,
        room: &room,
        free: false,
        // What changes the losses is not a layout's to decide, nor what takes memory of the host without being asked for.
        fixed: if offload { &["precision.gradients"] } else { &["precision.gradients", "offload.optimizer"] },
        trainer: None,
        wanted: 5,
        threads: cpu::cores(),
    };
    let (small, whole) = (AtomicU64::new(0), AtomicU64::new(0));
    let result = std::thread::scope(|scope| {
        let search = scope.spawn(|| {
            search(&request, &|a, b| {
                small.store(a, Ordering::Relaxed);
                whole.store(b, Ordering::Relaxed);
            })
        });
        while !search.is_finished() {
            heard(small.load(Ordering::Relaxed), whole.load(Ordering::Relaxed));
            std::thread::park_timeout(SHOW_EVERY);
        }
        search.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    let Some(RankedLayout { choice, .. }) = result.best.first() else {
        unreachable!("a search without an error has a result")
    };
    let (legal, s) = (units::thousands(result.counts.legal), if ranks == 1 { "" } else { "s" });
    let found = Found::new(choice, format!("the fastest of {legal} layouts of {ranks} rank{s}"));
    // Where all fits without, the least that fits is found when the layout is known.
    Ok(Found { offload: (choice.offload > 0).then_some(choice.offload).filter(|_| offload), ..found })
}

/// The device that ranks run on, and the config with it named: layouts that are compared have other numbers of ranks.
fn on_target(devices: &Devices, config: &Config, ranks: usize) -> (Target, Config) {
    let mesh = Mesh::ONE.with(MeshAxis::DpShard, ranks);
    let target = Target::of(devices, &config.at(&Layout { mesh, ..Layout::single(1) }));
    let mut config = config.clone();
    config.train.device = match target {
        Target::Cpu => DeviceChoice::Cpu,
        Target::Cuda { .. } => DeviceChoice::Cuda,
    };
    (target, config)
}

/// What steps are timed by: the GPU of the catalogue, or a CPU whose cores the ranks of a host share. Of a CPU nothing is measured
/// here: layouts are compared by the same figures on all machines.
pub(crate) fn hardware(devices: &Devices, target: Target, ranks: usize) -> Result<Hardware> {
    let local = ranks / devices.nodes();
    let mut hardware = match target {
        Target::Cuda { .. } => {
            let name = devices.processor(target)?;
            let catalogue = catalogue()?;
            // One that is not known is like the latest that is.
            let gpu = catalogue.of_device(&name).or(catalogue.gpu("h100")).cloned();
            gpu.map(|gpu| Hardware::assumed(&gpu)).unwrap_or_else(|| processor_of(1.0))
        }
        Target::Cpu => processor_of(cpu::cores() as f64 / local.max(1) as f64),
    };
    hardware.cluster.gpus_per_node = local.max(1);
    Ok(hardware)
}

/// Some cores: 50 GFLOP/s each, 10 GB/s of memory, and 1 GB/s between hosts.
fn processor_of(cores: f64) -> Hardware {
    let gpu = GpuSpec {
        name: "cpu".into(),
        product: None,
        family: "cpu".into(),
        peak_flops_per_s: 50e9 * cores,
        fp32_flops_per_s: 50e9 * cores,
        tf32_flops_per_s: None,
        fp8_flops_per_s: None,
        memory_bytes: u64::MAX,
        nominal_memory_bytes: u64::MAX,
        bytes_per_s: 10e9 * cores,
        units: (cores.ceil() as usize).max(1),
        power_w: None,
        link_bytes_per_s: 5e9 * cores,
        domain: None,
        host_bytes_per_s: None,
        node_bytes_per_s: None,
        source: "round figures".into(),
        unverified: Vec::new(),
    };
    let cluster = ClusterSpec {
        name: "cpu".into(),
        label: "CPUs".into(),
        gpu: "cpu".into(),
        gpus_per_node: 1,
        nodes: None,
        node_bytes_per_s: 1e9,
        fabric: "infiniband".into(),
        link_bytes_per_s: None,
        source: "round figures".into(),
        unverified: Vec::new(),
    };
    Hardware { gpu, cluster }
}
