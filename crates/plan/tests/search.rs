//! The search over layouts: what it finds is what looking at every layout finds.

mod common;

use common::{Gpus, config};
use lockstep_config::{Config, RecomputePolicy};
use lockstep_ir::{ContextParallel, Hint, Layout};
use lockstep_plan::{
    LayoutChoice, PlanError, RankedLayout, Rates, Room, SearchRequest, SearchResult, evaluate, every_choice, plan,
    search,
};
use lockstep_sim::{Catalogue, Hardware};

fn hardware(name: &str) -> Hardware {
    let all = Catalogue::builtin();
    all.hardware(name).or_else(|| all.gpu(name).map(Hardware::assumed)).unwrap()
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
        wanted: 5,
        threads: 2,
    }
}

fn found(request: &SearchRequest) -> SearchResult {
    search(request, &|_, _| {}).unwrap_or_else(|error| panic!("{error}"))
}

/// Step times of every layout that fits, the fastest first.
fn exhaustive(request: &SearchRequest) -> Vec<(f64, LayoutChoice)> {
    let all = every_choice(request);
    let halves: Vec<&[LayoutChoice]> = all.chunks(all.len().div_ceil(2).max(1)).collect();
    let evaluated = |choices: &[LayoutChoice]| {
        let one = |choice: &LayoutChoice| {
            let config = choice.config(request.config);
            let found = evaluate(request.machine, &config, Rates::Catalogue(request.hardware)).unwrap();
            let fits = request.room.verdict(&found.stages, request.gpus).fits;
            fits.then_some((found.forecast.step_s, *choice))
        };
        choices.iter().filter_map(one).collect::<Vec<_>>()
    };
    let mut times = std::thread::scope(|scope| {
        let threads: Vec<_> = halves.iter().map(|half| scope.spawn(move || evaluated(half))).collect();
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect::<Vec<_>>()
    });
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    times
}

/// Small models on few GPUs, with every axis free, and GPUs so small that not everything fits.
#[test]
fn the_best_of_a_search_is_the_best_of_all() {
    let small =
        "[model]\nvocab_size = 512\nlayers = 4\ndim = 128\nheads = 4\nkv_heads = 2\nffn = 256\n[train]\nseq = 1024\n";
    let wide = "[model]\nvocab_size = 1024\nlayers = 5\ndim = 512\nheads = 8\nkv_heads = 8\nffn = 1024\ntied_embeddings = true\n\
                [train]\nseq = 512\n";
    for (model, more, name, gpus, share) in [
        (small, "global_batch = 8\n[precision]\npolicy = \"bf16\"\n", "h100", 4, 1.0),
        (small, "global_batch = 4\n", "leonardo", 4, 0.0006),
        (
            wide,
            "global_batch = 8\nmicro_batch = 1\n[precision]\npolicy = \"bf16\"\n[recompute]\npolicy = \"none\"\n",
            "h100",
            8,
            0.002,
        ),
    ] {
        let (config, hardware) = (config(&format!("{model}{more}")), hardware(name));
        let room = Room::of(&hardware.gpu);
        let room = Room { bytes: (room.bytes as f64 * share) as u64, ..room };
        let request = request(&config, gpus, &hardware, &room);
        let all = exhaustive(&request);
        let found = found(&request);
        let times: Vec<f64> = found.best.iter().map(|l| l.evaluated.forecast.step_s).collect();
        let fastest = times.iter().copied().fold(f64::INFINITY, f64::min);
        assert!(all.len() < every_choice(&request).len() || share == 1.0, "everything fits {name}");
        let budget = found.best.iter().any(|l| l.choice.recompute == RecomputePolicy::Budget);
        assert!(fastest == all[0].0 || (budget && fastest < all[0].0), "{} and not {}", found.best[0].choice, all[0].1);
        let alike = |l: &&RankedLayout| l.choice.recompute != RecomputePolicy::Budget;
        let mut sorted: Vec<f64> = found.best.iter().filter(alike).map(|l| l.evaluated.forecast.step_s).collect();
        sorted.sort_by(f64::total_cmp);
        for (time, (expected, choice)) in sorted.iter().zip(&all) {
            assert!((time / expected - 1.0).abs() < 0.02, "{time} and not {expected}: {choice}");
        }
    }
}

/// Where what recomputes nothing is a little too large, and what recomputes whole layers wastes memory, some of a layer is recomputed.
#[test]
fn a_layout_that_almost_fits_recomputes_as_little_as_lets_it() {
    let config = config(
        "[model]\nvocab_size = 1024\nlayers = 4\ndim = 512\nheads = 8\nffn = 1536\n[train]\nseq = 1024\nglobal_batch = 16\n\
         micro_batch = 8\n[precision]\npolicy = \"bf16\"\ngradients = \"fp32\"\n[parallel]\ntp = 1\npp = 1\ncp = 1\n",
    );
    let hardware = hardware("h100");
    let whole = Room::of(&hardware.gpu);
    let none = found(&request(&config, 2, &hardware, &whole));
    let needed = none.best[0].evaluated.memory().total_bytes;
    assert_eq!(none.best[0].choice.recompute, RecomputePolicy::None);
    let room = Room { bytes: needed * 9 / 10, ..whole };
    let request = request(&config, 2, &hardware, &room);
    let all = exhaustive(&request);
    let found = found(&request);
    let LayoutChoice { recompute, budget, .. } = found.best[0].choice;
    assert_eq!(
        (recompute, budget),
        (RecomputePolicy::Budget, Some(room.bytes >> 20 << 20)),
        "{}",
        found.best[0].choice
    );
    let RankedLayout { choice, evaluated } = &found.best[0];
    assert!(evaluated.forecast.step_s < all[0].0, "{} and not {}", evaluated.forecast.step_s, all[0].0);
    assert!(evaluated.forecast.step_s > none.best[0].evaluated.forecast.step_s);
    // As it is compiled for a run, and no layout under a budget that was not tried is faster.
    let plan = plan(&Gpus, &choice.config(&config)).unwrap();
    assert_eq!(plan.memory.total_bytes, evaluated.memory().total_bytes);
    for other in every_choice(&request) {
        let other = LayoutChoice { recompute, budget, ..other };
        let timed = evaluate(&Gpus, &other.config(&config), Rates::Catalogue(&hardware));
        assert!(timed.is_err() || timed.unwrap().forecast.step_s >= evaluated.forecast.step_s, "{other}");
    }
}

/// Where not even what recomputes everything fits, as little state as lets it waits in the memory of the host.
#[test]
fn what_does_not_fit_otherwise_has_optimizer_state_in_the_memory_of_the_host() {
    let text = "[model]\nvocab_size = 1024\nlayers = 8\ndim = 1024\nheads = 8\nffn = 4096\n[train]\nseq = 1024\nglobal_batch = 8\n\
                [precision]\npolicy = \"bf16\"\ngradients = \"fp32\"\n";
    let (free, hardware) = (config(text), hardware("h100"));
    let whole = Room::of(&hardware.gpu);
    let bytes = |choice: &LayoutChoice| {
        let evaluated = evaluate(&Gpus, &choice.config(&free), Rates::Catalogue(&hardware)).unwrap();
        evaluated.memory().total_bytes
    };
    let least = every_choice(&request(&free, 1, &hardware, &whole)).iter().map(bytes).min().unwrap();
    let missing = 64 << 20;
    let room = Room { bytes: least - missing, ..whole };
    let stays = config(&format!("{text}[offload]\noptimizer = false\n"));
    let refused = search(&request(&stays, 1, &hardware, &room), &|_, _| {});
    assert!(matches!(refused, Err(PlanError::NoLayout(_))));
    let auto = config(&format!("{text}[offload]\noptimizer = \"auto\"\n"));
    for config in [&free, &auto] {
        let found = found(&request(config, 1, &hardware, &room));
        let RankedLayout { choice, evaluated } = &found.best[0];
        let memory = evaluated.memory();
        assert!(memory.total_bytes <= room.bytes && choice.offload >= missing, "{choice}");
        assert!((missing..=choice.offload).contains(&memory.host_bytes), "{} bytes", memory.host_bytes);
        let planned = plan(&Gpus, &choice.config(config)).unwrap();
        assert_eq!((planned.memory.total_bytes, planned.memory.host_bytes), (memory.total_bytes, memory.host_bytes));
    }
}

#[test]
fn the_same_answer_comes_every_time_and_its_bytes_are_those_of_the_plan() {
    let config = config(
        "[model]\nvocab_size = 512\nlayers = 4\ndim = 128\nheads = 4\nffn = 256\n[train]\nseq = 1024\nglobal_batch = 64\n",
    );
    let hardware = hardware("leonardo");
    let room = Room::of(&hardware.gpu);
    let one = found(&request(&config, 16, &hardware, &room));
    let other = found(&SearchRequest { threads: 1, ..request(&config, 16, &hardware, &room) });
    let choices = |found: &SearchResult| found.best.iter().map(|l| l.choice).collect::<Vec<_>>();
    assert_eq!((choices(&one), one.counts), (choices(&other), other.counts));
    assert_eq!(one.best.len(), 5);
    for layout in &one.best {
        let plan = plan(&Gpus, &layout.choice.config(&config)).unwrap();
        assert_eq!(plan.memory.total_bytes, layout.evaluated.memory().total_bytes, "{}", layout.choice);
        assert_eq!(plan.layout, layout.choice.layout);
        assert_eq!(plan.layout.mesh.ranks(), 16);
    }
    let all: u64 = one.rejected.iter().map(|r| r.layouts).sum::<u64>() + one.best.len() as u64;
    assert_eq!(all, one.counts.legal, "{:?}", one.rejected);
}

#[test]
fn what_the_config_gives_is_fixed() {
    let config = config(
        "[model]\npreset = \"llama-3-8b\"\n[train]\nglobal_batch = 1024\nmicro_batch = 2\n[parallel]\ntp = 1\npp = 1\ncp = 1\n",
    );
    let hardware = hardware("h100");
    let room = Room::of(&hardware.gpu);
    let all = every_choice(&request(&config, 128, &hardware, &room));
    assert!(!all.is_empty());
    for choice in all {
        assert_eq!((choice.micro_batch, choice.layout.micro_batches), (2, 4), "{choice}");
        assert_eq!(choice.layout.mesh.ranks(), 128);
    }
}

#[test]
fn an_impossible_request_is_refused_with_the_nearest_that_works() {
    let hardware = hardware("h100");
    let room = Room::of(&hardware.gpu);
    let refused = |text: &str, gpus: usize| match search(&request(&config(text), gpus, &hardware, &room), &|_, _| {}) {
        Err(PlanError::NoLayout(why)) => why.with_hint(),
        Err(error) => panic!("{error}"),
        Ok(found) => panic!("{}", found.best[0].choice),
    };
    let model = "[model]\nvocab_size = 512\nlayers = 2\ndim = 128\nheads = 4\nffn = 256\n[train]\nseq = 512\n";
    let text = refused(&format!("{model}global_batch = 10\n[parallel]\ntp = 1\npp = 1\n"), 8);
    assert!(
        text.contains("no layout of 8 GPUs divides a batch of 10 sequences: they leave 8 data-parallel ranks"),
        "{text}"
    );
    assert!(text.contains("hint: use train.global_batch = 8 or 16"), "{text}");
    let text = refused(&format!("{model}global_batch = 8\n[parallel]\ntp = 4\n"), 6);
    assert!(text.contains("takes 4 ranks or a multiple, and the plan is for 6 GPUs\nhint: give --gpus 4"), "{text}");
    let text = refused(
        "[model]\npreset = \"llama-3-405b\"\n[train]\nglobal_batch = 8\n[parallel]\ntp = 8\ncp = 1\nzero = 0\n",
        8,
    );
    assert!(text.contains("layouts of 8 GPUs fits 78.5 GiB on an H100 80GB") && text.contains("too many)"), "{text}");
}

/// Most of the model is its table, which embedding and output head share.
#[test]
fn a_tied_model_is_found_in_the_memory_that_its_program_needs() {
    let config = config(
        "[model]\nvocab_size = 16384\nlayers = 2\ndim = 256\nheads = 4\nkv_heads = 4\nffn = 256\ntied_embeddings = true\n[train]\nseq = 256\n\
         global_batch = 1\nmicro_batch = 1\n[recompute]\npolicy = \"none\"\n[offload]\noptimizer = false\n",
    );
    let hardware = hardware("h100");
    let bytes = evaluate(&Gpus, &config, Rates::Catalogue(&hardware)).unwrap().memory().total_bytes;
    let room = Room { bytes, ..Room::of(&hardware.gpu) };
    assert_eq!(found(&request(&config, 1, &hardware, &room)).best.len(), 1);
    let less = Room { bytes: bytes - 1, ..room };
    let refused = search(&request(&config, 1, &hardware, &less), &|_, _| {}).unwrap_err();
    let PlanError::NoLayout(why) = refused else { panic!("{refused}") };
    let layout = why.nearest.unwrap();
    let exact = evaluate(&Gpus, &layout.config(&config), Rates::Catalogue(&hardware)).unwrap();
    assert_eq!(exact.memory().total_bytes, bytes);
}

#[test]
fn the_latent_goes_around_where_that_is_faster() {
    // Four GPUs of a node, and few heads, whose keys and values are hardly wider than the latent; or eight nodes, and many heads, which
    // that many ranks do not divide.
    let text = |heads: usize, seq: usize, cp: usize| {
        format!(
            "[model]\nvocab_size = 1024\nlayers = 2\ndim = 1024\nheads = {heads}\nffn = 2048\nkv_lora_rank = 512\n[train]\nseq = {seq}\n\
             global_batch = 1\nmicro_batch = 1\n[precision]\npolicy = \"bf16\"\n[recompute]\npolicy = \"none\"\n[parallel]\ncp = {cp}\n"
        )
    };
    for (heads, seq, gpus, latent) in [(4, 16_384, 4, false), (48, 32_768, 32, true)] {
        let (config, hardware) = (config(&text(heads, seq, gpus)), hardware("leonardo"));
        let room = Room::of(&hardware.gpu);
        let request = request(&config, gpus, &hardware, &room);
        let best = found(&request).best[0].choice;
        assert_eq!(best.layout.context == ContextParallel::Latent, latent, "{}", best.layout);
        // It is the faster of the two by the forecast of either.
        let step = |context| {
            let choice = LayoutChoice { layout: Layout { context, ..best.layout }, ..best };
            let config = choice.config(&config);
            evaluate(request.machine, &config, Rates::Catalogue(&hardware)).unwrap().forecast.step_s
        };
        assert_eq!(step(ContextParallel::Latent) < step(ContextParallel::Ring), latent, "{heads} heads");
    }
}
