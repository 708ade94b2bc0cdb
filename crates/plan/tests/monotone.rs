//! Predictions move the right way: more of a network, of memory or of its bandwidth never makes a step slower, nor what the search finds.

mod common;

use common::{Gpus, config};
use lockstep_config::Config;
use lockstep_plan::{LayoutChoice, PlanError, Rates, Room, SIMPLER, SearchRequest, evaluate, every_choice, search};
use lockstep_sim::{Catalogue, Hardware};

/// Runs that differ in what their layouts can be.
const RUNS: [&str; 3] = [
    "[model]\nvocab_size = 1024\nlayers = 4\ndim = 512\nheads = 8\nkv_heads = 4\nffn = 1536\n[train]\nseq = 1024\nglobal_batch = 32\n\
     [precision]\npolicy = \"bf16\"\n",
    "[model]\narchitecture = \"gpt2\"\nvocab_size = 4096\nlayers = 6\ndim = 384\nheads = 6\nffn = 1536\n[train]\nseq = 512\n\
     global_batch = 48\n[precision]\npolicy = \"bf16\"\n",
    "[model]\npreset = \"mixtral-8x7b\"\nvocab_size = 2048\nlayers = 4\ndim = 256\nheads = 4\nkv_heads = 2\nffn = 512\n[train]\n\
     seq = 512\nglobal_batch = 32\n[precision]\npolicy = \"bf16\"\n[parallel]\nep_bound = 2\n",
];

/// How much slower something may be that should not be: rounding, and what the search takes for equal.
const EQUAL: f64 = 1.0 + 1e-9;

fn leonardo() -> Hardware {
    Catalogue::builtin().hardware("leonardo").unwrap()
}

fn request<'a>(config: &'a Config, gpus: usize, hardware: &'a Hardware, room: &'a Room) -> SearchRequest<'a> {
    SearchRequest {
        machine: &Gpus,
        config,
        gpus,
        hardware,
        room,
        free: false,
        fixed: &[],
        trainer: None,
        wanted: 1,
        threads: 2,
    }
}

/// Numbers that look random and are the same every time.
struct Random(u64);

impl Random {
    /// Between these, as likely at each order of magnitude.
    fn between(&mut self, least: f64, most: f64) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let share = (self.0 >> 11) as f64 / (1u64 << 53) as f64;
        least * (most / least).powf(share)
    }
}

/// Changes of a machine that make it better by a factor.
type Better = (&'static str, fn(&mut Hardware, f64));

const BETTER: [Better; 5] = [
    ("network between nodes", |hardware, times| hardware.cluster.node_bytes_per_s *= times),
    ("links inside a node", |hardware, times| {
        let rate = hardware.link_bytes_per_s();
        hardware.cluster.link_bytes_per_s = Some(rate * times);
    }),
    ("memory bandwidth", |hardware, times| hardware.gpu.bytes_per_s *= times),
    ("matmuls", |hardware, times| hardware.gpu.peak_flops_per_s *= times),
    ("link to the host", |hardware, times| {
        hardware.gpu.host_bytes_per_s = Some(hardware.gpu.host_bytes_per_s.unwrap_or(32e9) * times);
    }),
];

#[test]
fn a_better_machine_makes_no_layout_slower() {
    let mut random = Random(7);
    for text in RUNS {
        let config = config(text);
        let room = Room::of(&leonardo().gpu);
        let plain = leonardo();
        let all = every_choice(&request(&config, 16, &plain, &room));
        assert!(all.len() > 100, "{}", all.len());
        let chosen: Vec<&LayoutChoice> = all.iter().step_by(all.len() / 10).collect();
        for choice in chosen {
            let mut hardware = leonardo();
            // Anything from a slow Ethernet to a fast fabric.
            hardware.cluster.node_bytes_per_s = random.between(0.1e9, 400e9);
            hardware.cluster.link_bytes_per_s = Some(random.between(5e9, 900e9));
            let at = choice.config(&config);
            let step_s = |hardware: &Hardware| {
                evaluate(&Gpus, &at, Rates::Catalogue(hardware))
                    .unwrap_or_else(|error| panic!("{choice}: {error}"))
                    .forecast
                    .step_s
            };
            let before = step_s(&hardware);
            for (what, better) in BETTER {
                let mut faster = hardware.clone();
                better(&mut faster, random.between(1.05, 20.0));
                let after = step_s(&faster);
                assert!(after <= before * EQUAL, "{what}: {choice}: {before} s, then {after} s; {faster:?}");
            }
        }
    }
}

#[test]
fn a_better_network_or_more_memory_makes_no_search_slower() {
    let best = |config: &Config, hardware: &Hardware, bytes: u64| {
        let room = Room { bytes, ..Room::of(&hardware.gpu) };
        match search(&request(config, 8, hardware, &room), &|_, _| {}) {
            Ok(found) => found.best[0].evaluated.forecast.step_s,
            Err(PlanError::NoLayout(_)) => f64::INFINITY,
            Err(error) => panic!("{error}"),
        }
    };
    for text in &RUNS[..2] {
        let config = config(text);
        let mut last = f64::INFINITY;
        for gigabytes in [0.05, 5.0, 500.0] {
            let mut hardware = leonardo();
            hardware.cluster.node_bytes_per_s = gigabytes * 1e9;
            let step_s = best(&config, &hardware, hardware.gpu.memory_bytes);
            assert!(step_s <= last * (1.0 + SIMPLER), "{gigabytes} GB/s: {last} s, then {step_s} s");
            last = step_s;
        }
        let mut last = f64::INFINITY;
        for mebibytes in [64, 192, 512, 16_384] {
            let step_s = best(&config, &leonardo(), mebibytes << 20);
            assert!(step_s <= last * (1.0 + SIMPLER), "{mebibytes} MiB: {last} s, then {step_s} s");
            last = step_s;
        }
        assert!(last.is_finite());
    }
}

#[test]
fn twice_the_gpus_are_not_slower_where_the_network_is_fast_and_never_more_than_twice_as_fast() {
    // A model large enough that two GPUs share it well.
    let config = config(
        "[model]\nvocab_size = 8192\nlayers = 8\ndim = 2048\nheads = 16\nffn = 5632\n[train]\nseq = 2048\nglobal_batch = 64\n\
         [precision]\npolicy = \"bf16\"\n[parallel]\ncp = 1\n",
    );
    let hardware = leonardo();
    let room = Room::of(&hardware.gpu);
    let mut last = 0.0;
    for gpus in [1, 2, 4, 8, 16] {
        let found =
            search(&request(&config, gpus, &hardware, &room), &|_, _| {}).unwrap_or_else(|error| panic!("{error}"));
        let tokens_per_s = found.best[0].evaluated.forecast.tokens_per_s;
        assert!(tokens_per_s > last, "{gpus} GPUs: {last} tokens/s, then {tokens_per_s}");
        // Of twice the GPUs each may have a larger share of its time in kernels, as less has to fit.
        assert!(last == 0.0 || tokens_per_s < 2.1 * last, "{gpus} GPUs: {last} tokens/s, then {tokens_per_s}");
        last = tokens_per_s;
    }
}
