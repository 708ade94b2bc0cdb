//! Memory over time: what was planned is what a run does.

use lockstep_config::Config;
use lockstep_exec::Timing;
use lockstep_host::Devices;
use lockstep_ir::program::Class;
use lockstep_ir::{StepScalars, account, counter};
use lockstep_model::names;
use lockstep_plan::{Clock, Plan, plan, planned_timeline};
use lockstep_train::{Session, observed_timeline};

fn config(keys: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 131\nlayers = 3\ndim = 32\nheads = 4\nkv_heads = 2\nffn = 48\n\
         [train]\nseq = 24\nglobal_batch = 6\nmicro_batch = 2\nthreads = 2\n{keys}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

/// Two steps of a real run, on tokens that differ, and the bytes that it has touched.
fn run(config: &Config, plan: &Plan) -> (Vec<Vec<Timing>>, u64) {
    let mut session = Session::new(&Devices::new(), config, plan).unwrap();
    for name in [names::TOKENS, names::TARGETS] {
        for m in 0..plan.layout.micro_batches {
            let id = |i: usize| (counter::bits(counter::key(m as u64, name), i as u64) % 131) as u32;
            let bytes: Vec<u8> =
                (0..config.train.micro_batch * config.train.seq).flat_map(|i| id(i).to_le_bytes()).collect();
            session.executor().write(name, m, &bytes).unwrap();
        }
    }
    let scalars =
        StepScalars { lr: 1e-3, inverse_count: 1.0 / 144.0, clip: 1.0, bias1: 0.1, bias2: 0.05, loss_scale: 1.0 };
    let steps = (0..2).map(|_| session.profile_step(scalars).unwrap().1).collect();
    (steps, session.executor().touched_bytes().unwrap())
}

#[test]
fn a_run_uses_the_bytes_that_were_planned_instruction_by_instruction() {
    for keys in [
        "",
        "[precision]\npolicy = \"bf16\"",
        "[recompute]\npolicy = \"full\"",
        "[recompute]\npolicy = \"selective\"\n[precision]\npolicy = \"bf16\"",
        "[recompute]\npolicy = \"sqrt\"",
        "[offload]\nactivations = true",
    ] {
        let config = config(keys);
        let plan = plan(&Devices::new(), &config).unwrap();
        let program = plan.program();
        let planned = planned_timeline(program, 2, None).unwrap();
        let (steps, touched) = run(&config, &plan);
        let observed = observed_timeline(program, &steps, Some(touched));
        assert_eq!(planned.marks.len(), observed.marks.len());
        for (i, (p, o)) in planned.marks.iter().zip(&observed.marks).enumerate() {
            assert_eq!(
                (p.step, p.segment, p.micro_batch, p.op, p.layer),
                (o.step, o.segment, o.micro_batch, o.op, o.layer)
            );
            assert_eq!(p.bytes, o.bytes, "{keys}: instruction {i}, {} of {}", p.op, p.segment);
        }
        // Time goes on.
        assert!(observed.marks.windows(2).all(|w| w[0].end <= w[1].start + 1e-9));
        // What is in use at the peak is what the bill says, and the arena holds it with little room to spare.
        let peak = planned.peak().unwrap().total();
        assert_eq!(peak, plan.memory.peak.live_bytes);
        assert_eq!(observed.peak().unwrap().total(), peak);
        assert!(peak <= program.arena_bytes && program.arena_bytes as f64 <= 1.05 * peak as f64, "{keys}");
        assert!(touched <= program.arena_bytes && touched as f64 > 0.95 * peak as f64, "{keys}: {touched} of {peak}");
        // States are there all the time.
        for class in [Class::Parameters, Class::Gradients, Class::Optimizer] {
            let first = planned.marks[0].bytes[class as usize];
            assert!(planned.marks.iter().all(|m| m.bytes[class as usize] == first));
            let padded = plan.memory.classes[class.name()];
            assert!(first <= padded && padded < first + 64 * program.tensors.len() as u64);
        }
    }
}

#[test]
fn every_stage_has_a_timeline_with_the_peak_of_its_bill() {
    let config = config("[parallel]\npp = 3\ntp = 2\ndp = 3\nzero = 1\nsequence_parallel = true");
    let plan = plan(&Devices::new(), &config).unwrap();
    for (program, bill) in plan.compiled.programs.iter().zip(&plan.stages) {
        let timeline = planned_timeline(program, 1, None).unwrap();
        assert_eq!(timeline.peak().unwrap().total(), account::memory(program).peak.live_bytes);
        assert_eq!(timeline.peak().unwrap().total(), bill.peak.live_bytes);
        assert!(timeline.marks.iter().any(|m| m.bytes[Class::Communication as usize] > 0));
    }
}

#[test]
fn long_steps_leave_out_what_repeats_and_a_gpu_gives_seconds() {
    let text = "[model]\npreset = \"llama-3-8b\"\n[train]\nseq = 128\nglobal_batch = 4096\nmicro_batch = 1\n";
    let plan = plan(&Devices::new(), &Config::parse(text, "run.toml", &[]).unwrap()).unwrap();
    let catalogue = lockstep_sim::Catalogue::builtin();
    let gpu = catalogue.gpu("h100").unwrap();
    let timeline = planned_timeline(plan.program(), 1, Some((gpu, plan.precision.multiplies()))).unwrap();
    assert!(timeline.left_out > 4000 && timeline.marks.len() < 10_000);
    assert_eq!(timeline.clock, Clock::PeakRates("h100".into()));
    assert_eq!(timeline.peak().unwrap().total(), plan.memory.peak.live_bytes);
    let seconds = timeline.marks.last().unwrap().end;
    assert!(seconds > 0.0 && seconds < 10.0, "{seconds}");
}

#[test]
fn fp32_takes_longer_than_bf16_and_collectives_have_bytes_and_no_time() {
    let catalogue = lockstep_sim::Catalogue::builtin();
    let gpu = catalogue.gpu("h100").unwrap();
    let timed = |precision: &str| {
        let text = format!(
            "[model]\npreset = \"llama-15m\"\n[train]\nseq = 256\nglobal_batch = 4\n[parallel]\ndp = 2\n\
             [precision]\npolicy = \"{precision}\"\n"
        );
        let plan = plan(&Devices::new(), &Config::parse(&text, "run.toml", &[]).unwrap()).unwrap();
        planned_timeline(plan.program(), 1, Some((gpu, plan.precision.multiplies()))).unwrap()
    };
    let (bf16, fp32) = (timed("bf16"), timed("fp32"));
    let longest = |t: &lockstep_plan::MemoryTimeline| {
        let linear = t.marks.iter().filter(|m| m.op == "linear").map(|m| m.end - m.start);
        linear.fold(0.0, f64::max)
    };
    assert!(longest(&fp32) > 1.9 * longest(&bf16), "{} and {}", longest(&fp32), longest(&bf16));
    // With TF32, attention stays in fp32.
    let tf32 = timed("tf32");
    let attention = |t: &lockstep_plan::MemoryTimeline| {
        let marks = t.marks.iter().filter(|m| m.op.starts_with("attention"));
        marks.map(|m| m.end - m.start).sum::<f64>()
    };
    assert!(longest(&tf32) < 0.5 * longest(&fp32), "{} and {}", longest(&tf32), longest(&fp32));
    assert!(attention(&fp32) > 0.0 && (attention(&tf32) / attention(&fp32) - 1.0).abs() < 1e-6);
    let collectives: Vec<_> = bf16.marks.iter().filter(|m| m.moved_bytes.is_some()).collect();
    assert!(collectives.iter().any(|m| m.op == "all_reduce" && m.moved_bytes > Some(0)));
    assert!(collectives.iter().all(|m| m.start == m.end));
    assert!(bf16.marks.iter().filter(|m| m.moved_bytes.is_none()).all(|m| m.end > m.start));
}
