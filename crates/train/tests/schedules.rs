//! Schedules: each compiles, is verified, needs the memory that theory says and runs on thread ranks with the bits of one rank; so
//! does any legal order, and what is broken is refused.

#[path = "schedules/generators.rs"]
mod generators;

use generators::Random;
use lockstep_compile::{AdamW, CompileError, Compiled, Context, Offload, Optimizer, Recompute, Steps, compile};
use lockstep_config::Config;
use lockstep_exec::cpu;
use lockstep_host::Devices;
use lockstep_ir::program::{Lifetime, Saved, StepProgram};
use lockstep_ir::schedule::Generator;
use lockstep_ir::{Layout, Op, Schedule, StepScalars, account, counter, roles, verify};
use lockstep_plan::Plan;
use lockstep_train::Session;

const ALIGNMENT: u64 = 64;

fn config(layers: usize, micro_batches: usize, keys: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 64\nlayers = {layers}\ndim = 16\nheads = 2\nffn = 24\ntied_embeddings = true\n\
         [train]\nseq = 8\nglobal_batch = {micro_batches}\nmicro_batch = 1\nthreads = 1\ndevice = \"cpu\"\n[parallel]\n{keys}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

fn plan(config: &Config) -> Plan {
    lockstep_plan::plan(&Devices::new(), config).unwrap()
}

/// Compiles what was planned once more, with another schedule.
fn with_schedule(plan: &Plan, schedule: Schedule, recompute: Recompute) -> Result<Compiled, CompileError> {
    let context = Context {
        device: cpu::profile(plan.threads, plan.precision.compute, plan.precision.gradients),
        layout: Layout { schedule, chunks: *schedule.chunks().start(), ..plan.layout },
        stages: vec![],
        optimizer: Optimizer::adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, 0.1),
        precision: plan.precision,
        recompute,
        steps: Steps::default(),
        offload: Offload::default(),
    };
    compile(&plan.forward, &context)
}

fn compiled(config: &Config, generator: impl Generator + 'static) -> Compiled {
    let schedule = Schedule::new("under test", Box::leak(Box::new(generator)));
    with_schedule(&plan(config), schedule, Recompute::None).unwrap()
}

fn copies(program: &StepProgram, saved: Saved) -> usize {
    program.regions.iter().find(|r| r.lifetime == Lifetime::Saved(saved)).map_or(0, |r| r.slots)
}

/// The plan of a schedule on `p` ranks; the arena of every rank is what its breakdown says.
fn scheduled(p: usize, layers: usize, m: usize, schedule: &str) -> Plan {
    let plan = plan(&config(layers, m, &format!("pp = {p}\n{schedule}")));
    for (program, memory) in plan.compiled.programs.iter().zip(&plan.stages) {
        assert_eq!(memory.classes.values().sum::<u64>(), program.arena_bytes, "{schedule}");
        assert_eq!(memory.total_bytes, program.arena_bytes, "{schedule}");
    }
    plan
}

#[test]
fn memory_plans_have_as_many_chunks_in_flight_as_theory_says() {
    let [to_b, to_w, from_b] = Saved::ALL;
    for (p, m) in [(4, 8), (2, 5), (4, 2)] {
        for (r, program) in scheduled(p, p, m, "").compiled.programs.iter().enumerate() {
            assert_eq!(copies(program, to_b), m.min(p - r), "1f1b, p = {p}, rank {r}");
        }
        for (r, program) in scheduled(p, p, m, "schedule = \"zb-h1\"").compiled.programs.iter().enumerate() {
            assert_eq!(copies(program, to_b), m.min(p - r), "zb-h1, p = {p}, rank {r}");
            // The first rank does both in one.
            let [most, late] = if r == 0 { [0, 0] } else { [m.min(p), m.min(r + 1)] };
            assert_eq!((copies(program, to_w), copies(program, from_b)), (most, late), "zb-h1, p = {p}, rank {r}");
        }
        for program in scheduled(p, 2 * p, m, "schedule = \"zb-v\"").compiled.programs {
            assert!(copies(&program, to_b) <= 2 * p, "zb-v, p = {p}, rank {}", program.stage);
            assert!(copies(&program, to_w) <= 2 * p, "zb-v, p = {p}, rank {}", program.stage);
        }
    }
    for (p, v, m) in [(8, 2, 16), (4, 3, 12), (2, 4, 8)] {
        let plan = scheduled(p, p * v, m, &format!("schedule = \"interleaved\"\nvirtual = {v}"));
        for (r, program) in plan.compiled.programs.iter().enumerate() {
            let theory = 2 * (p - 1 - r) + (v - 1) * p + 1;
            assert_eq!(copies(program, to_b), theory, "interleaved, p = {p}, v = {v}, rank {r}");
        }
    }
}

#[test]
fn zero_bubble_schedules_need_little_more_memory_than_1f1b() {
    // Wide enough for activations to be most of it, as they are in models worth splitting.
    let largest = |schedule: &str| {
        let keys = format!("pp = 4\nschedule = \"{schedule}\"");
        let set = ["train.seq=256", "model.vocab_size=64", "model.dim=64", "model.ffn=192", "model.heads=4"];
        let text = config(16, 12, &keys).resolved_toml();
        let plan = plan(&Config::parse(&text, "run.toml", &set.map(String::from)).unwrap());
        plan.memory.total_bytes
    };
    let [usual, h1, v] = ["1f1b", "zb-h1", "zb-v"].map(largest);
    // What B makes for W is there beside what B reads: once more than 1f1b has it on the largest rank, and in zb-v for as many
    // chunks as wait for W at the end.
    assert!((100..=105).contains(&(h1 * 100 / usual)), "{usual} bytes, zb-h1 {h1}");
    assert!((100..=115).contains(&(v * 100 / usual)), "{usual} bytes, zb-v {v}");
}

/// Three steps on random tokens: the bits of every loss and norm.
fn steps(config: &Config, plan: &Plan) -> Vec<(u64, u32)> {
    let mut session = Session::new(&Devices::new(), config, plan).unwrap();
    for m in 0..plan.layout.micro_batches {
        for (i, name) in ["tokens", "targets"].into_iter().enumerate() {
            let token = |t: u64| (counter::bits(7 + i as u64, m as u64 * 8 + t) % 64) as u32;
            let bytes: Vec<u8> = (0..8).flat_map(|t| token(t).to_le_bytes()).collect();
            session.executor().write(name, m, &bytes).unwrap();
        }
    }
    let inverse_count = 1.0 / (8 * plan.layout.micro_batches) as f32;
    let scalars = StepScalars { lr: 0.01, inverse_count, clip: 1.0, bias1: 0.1, bias2: 0.05, loss_scale: 1.0 };
    let step = |_| {
        let result = session.run_step(scalars).unwrap();
        (result.loss.to_bits(), result.grad_norm.to_bits())
    };
    (0..3).map(step).collect()
}

#[test]
fn thread_ranks_give_the_bits_of_one_rank_under_any_order() {
    let m = 4;
    let random = |seed, chunks, separate, turns| Random { seed, chunks, separate, turns };
    let cases = [
        (2, random(1, 2, true, true)),
        (4, random(2, 2, true, true)),
        (3, random(3, 2, false, true)),
        (2, random(4, 3, true, false)),
    ];
    let one = config(8, m, "");
    let mut single = plan(&one);
    single.compiled = with_schedule(&single, Schedule::USUAL, Recompute::None).unwrap();
    let expected = steps(&one, &single);
    for (i, (p, generator)) in cases.into_iter().enumerate() {
        let config = config(8, m, &format!("pp = {p}"));
        let mut plan = plan(&config);
        let schedule = Schedule::new("under test", Box::leak(Box::new(generator)));
        for recompute in [Recompute::None, Recompute::Full] {
            plan.compiled = with_schedule(&plan, schedule, recompute).unwrap();
            plan.stages = plan.compiled.programs.iter().map(account::memory).collect();
            assert_eq!(steps(&config, &plan), expected, "case {i}");
        }
    }
}

/// The layouts of every schedule: with any number of micro-batches, with data and tensor parallelism, ZeRO and recomputation.
#[test]
fn thread_ranks_give_the_bits_of_one_rank_under_every_schedule() {
    let schedules =
        ["1f1b", "gpipe", "interleaved", "interleaved\"\nvirtual = 3\nstages = [1, 2, 1, 1, 2, 1]#", "zb-h1", "zb-v"];
    for (m, recompute) in [(8, "none"), (5, "full"), (1, "none"), (3, "selective")] {
        let policy = format!("[recompute]\npolicy = \"{recompute}\"");
        let one = config(8, m, &policy);
        let expected = steps(&one, &plan(&one));
        for (p, schedule) in [2, 4].into_iter().flat_map(|p| schedules.map(|schedule| (p, schedule))) {
            if p == 4 && schedule.contains("stages") {
                continue;
            }
            let config = config(8, m, &format!("pp = {p}\nschedule = \"{schedule}\"\n{policy}"));
            assert_eq!(steps(&config, &plan(&config)), expected, "p = {p}, m = {m}, {schedule}, {recompute}");
        }
    }
}

/// A random legal schedule and what it compiles to.
fn random_case(case: u64) -> Vec<StepProgram> {
    let pick = |what: u64, of: &[usize]| of[(counter::bits(case, what) % of.len() as u64) as usize];
    let (p, chunks) = (pick(0, &[2, 3, 4]), pick(1, &[1, 2, 3]));
    let keys = ["", "\ntp = 2", "\ndp = 2", "\ndp = 2\nzero = 1", "\ntp = 2\nsequence_parallel = true"];
    let keys = keys[pick(2, &[0, 1, 2, 3, 4])];
    let m = pick(3, &[1, 2, 5, 12]);
    let generator = Random { seed: case, chunks, separate: pick(4, &[0, 1]) == 1, turns: pick(5, &[0, 1]) == 1 };
    let ranks = if keys.contains("dp = 2") { 2 } else { 1 };
    compiled(&config(p * chunks, m * ranks, &format!("pp = {p}{keys}")), generator).programs
}

#[test]
fn random_legal_schedules_and_placements_are_accepted() {
    for case in 0..24 {
        for program in random_case(case) {
            let memory = account::memory(&program);
            assert_eq!(memory.classes.values().sum::<u64>(), program.arena_bytes, "case {case}");
            assert!(memory.peak.live_bytes <= program.arena_bytes, "case {case}");
        }
    }
}

/// What the verifier and the role check say of programs; `None` if they accept them.
fn refused(programs: &[StepProgram]) -> Option<String> {
    let verified = programs.iter().try_for_each(|p| verify::program(p, ALIGNMENT)).map_err(|e| e.to_string());
    verified.and_then(|()| roles::check(programs).map_err(|e| e.to_string())).err()
}

/// Plants a fault into programs that are sound.
fn check_refused(
    case: u64,
    rank: usize,
    programs: &[StepProgram],
    plant: impl FnOnce(&mut StepProgram),
    says: &[&str],
) {
    assert_eq!(refused(programs), None, "case {case}");
    let mut programs = programs.to_vec();
    plant(&mut programs[rank]);
    let text = refused(&programs).unwrap_or_else(|| panic!("case {case}: accepted, wanted {says:?}"));
    assert!(text.contains("rank ") && text.contains(", instruction "), "case {case}: {text}");
    // Embedding, final norm (of the residual stream `x3`, say) and head belong to no layer.
    let no_layer = ["final_norm", "`x", "embed", "head", "loss"];
    assert!(text.contains("layer") || no_layer.iter().any(|name| text.contains(name)), "case {case}: {text}");
    assert!(says.iter().any(|words| text.contains(words)), "case {case}: {text}");
}

#[test]
fn planted_faults_are_refused_with_rank_op_and_layer() {
    let mut planted = [0; 4];
    for case in 0..16 {
        let programs = random_case(case);
        for (rank, program) in programs.iter().enumerate() {
            // Two micro-batches in one copy of a saved region.
            for saved in Saved::ALL {
                let most = copies(program, saved);
                let holds = program.regions.iter().any(|r| r.lifetime == Lifetime::Saved(saved) && r.slot_bytes > 0);
                if most < 2 || !holds {
                    continue;
                }
                let twice = |p: &mut StepProgram| {
                    let slots = &mut p.entries[0].schedule;
                    slots.iter_mut().for_each(|slot| slot.saved[saved as usize] %= most - 1);
                };
                check_refused(case, rank, &programs, twice, &["the buffer holds"]);
                planted[0] += 1;
            }
            // A micro-batch whose weight gradients are not computed.
            let schedule = &program.entries[0].schedule;
            let name = |s: usize| program.segments[schedule[s].segment].name;
            let sums = |s: &usize| name(*s).starts_with("weight_grad") || name(*s).starts_with("backward");
            let all: Vec<usize> = (0..schedule.len()).filter(sums).collect();
            let missing = all[(counter::bits(case, 100 + rank as u64) % all.len() as u64) as usize];
            let without = |p: &mut StepProgram| {
                p.entries[0].schedule.remove(missing);
            };
            check_refused(case, rank, &programs, without, &["the sum of", "the buffer holds"]);
            planted[1] += 1;
            // The same twice.
            let again = |p: &mut StepProgram| {
                let slot = p.entries[0].schedule[missing];
                p.entries[0].schedule.insert(missing, slot);
            };
            let mut programs_again = programs.clone();
            again(&mut programs_again[rank]);
            assert!(refused(&programs_again).unwrap().contains("stands twice"));
            planted[2] += 1;
            // Messages of two streams exchanged.
            let tags = |p: &StepProgram| -> Vec<u32> {
                let instrs = p.segments.iter().flat_map(|s| &s.instrs);
                let layered = instrs.filter(|i| i.layer.is_some());
                layered.filter_map(|i| if let Op::Send { tag, .. } = i.op { Some(tag) } else { None }).collect()
            };
            let mut tags = tags(program);
            tags.sort_unstable();
            tags.dedup();
            if let [a, b, ..] = tags[..] {
                let swap = |p: &mut StepProgram| {
                    for instr in p.segments.iter_mut().flat_map(|s| &mut s.instrs) {
                        if let Op::Send { tag, .. } = &mut instr.op {
                            *tag = if *tag == a {
                                b
                            } else if *tag == b {
                                a
                            } else {
                                *tag
                            };
                        }
                    }
                };
                check_refused(case, rank, &programs, swap, &["can never run", "sends", "never received"]);
                planted[3] += 1;
            }
        }
    }
    assert!(planted.iter().all(|n| *n >= 10), "{planted:?}");
}
