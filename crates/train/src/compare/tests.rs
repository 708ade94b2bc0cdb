//! Faults that are put into what a layout gave, and numbers that may differ.

use super::judge::Difference;
use super::numbers::{apart, blocks, largest, most_apart, parts};
use super::*;

fn config(keys: &str) -> Config {
    let text = format!(
        "[model]\narchitecture = \"gpt2\"\nvocab_size = 61\nlayers = 2\ndim = 16\nheads = 4\nffn = 32\n\
         [train]\nseq = 8\nglobal_batch = 4\nmicro_batch = 1\nthreads = 1\n{keys}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

/// One rank, and what runs from its states gave.
struct Runs {
    single: Trace,
    natural: Vec<Difference>,
    layout: Layout,
    promise: Promise,
    steps: Vec<Step>,
    evaluated: Evaluated,
}

fn runs(config: &Config, layout: &str) -> Runs {
    runs_from(config, layout, &|_| ())
}

/// The same from a state that was prepared; choices of experts are replayed.
fn runs_from(config: &Config, layout: &str, prepare: &dyn Fn(&mut [Stored])) -> Runs {
    let layout: Layout = layout.parse().unwrap();
    let (alone, config) = (config.at(&Layout::single(1)), config.at(&layout));
    let (devices, spare) = (Devices::new(), &mut Spare::default());
    let promise = Promise::of(&layout, &config);
    let told = plan(&devices, &alone).unwrap();
    let mut run = Run::new(&devices, &alone, &told, true).unwrap();
    let mut start = run.states(is_kept, spare).unwrap();
    prepare(&mut start);
    run.write(&start).unwrap();
    let single = trace(run, 2).unwrap();
    let replays = config.model.experts.is_some();
    let plan = if replays { replaying_plan } else { plan };
    let [single_plan, layout_plan] = [&alone, &config].map(|config| plan(&devices, config).unwrap());
    let task = Task { config: &alone, plan: &single_plan, promise, replays, disturbs: true };
    let natural = follow(&devices, &task, &single, spare).unwrap().differences();
    let mut run = Run::new(&devices, &config, &layout_plan, false).unwrap();
    let replayed = |chosen| replays.then_some(chosen);
    let mut steps = Vec::new();
    for step in 0..2 {
        run.write(&single.starts[step]).unwrap();
        steps.push(run.step(step, replayed(&single.steps[step].chosen), spare).unwrap());
    }
    run.write(&single.starts[2]).unwrap();
    let evaluated = run.evaluate(replayed(&single.evaluated.chosen)).unwrap();
    Runs { single, natural, layout, promise, steps, evaluated }
}

impl Runs {
    fn judged(&self) -> Comparison {
        let mut found = Found::new(self.promise);
        for (step, ran) in self.steps.iter().enumerate() {
            found.add_step(&self.single, step, &self.single.starts[step], ran);
        }
        found.add_evaluation(&self.single, &self.evaluated);
        judge(&self.layout, self.promise, found, &self.natural, Vec::new())
    }
}

/// Changes the f32 numbers of a tensor.
fn change(tensors: &mut [Stored], name: &str, f: impl Fn(usize, f32) -> f32) {
    let tensor = tensors.iter_mut().find(|t| t.name == name).unwrap_or_else(|| panic!("no tensor {name}"));
    for (i, b) in tensor.bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        *b = f(i, f32::from_le_bytes(*b)).to_le_bytes();
    }
}

fn numbers(tensor: &Stored) -> Vec<f64> {
    let mut all = Vec::new();
    blocks([tensor], 0..tensor.len(), |[x]| all.extend_from_slice(x));
    all
}

fn numbers_of(tensors: &[Stored], name: &str) -> Vec<f64> {
    numbers(tensors.iter().find(|t| t.name == name).unwrap())
}

/// The criteria that a change of what the layout gave breaks.
fn broken(config: &Config, plant: impl Fn(&mut Runs)) -> Vec<&'static str> {
    broken_in(runs(config, "tp=2"), plant)
}

fn broken_in(mut runs: Runs, plant: impl Fn(&mut Runs)) -> Vec<&'static str> {
    let sound = runs.judged();
    assert!(sound.kept && !sound.identical, "{sound:#?}");
    plant(&mut runs);
    let found = runs.judged();
    let names: Vec<&str> = found.criteria.iter().filter(|c| !c.is_kept()).map(|c| c.name).collect();
    assert_eq!(found.kept, names.is_empty());
    names
}

/// A tensor of some kind: its parameter's name without layers is enough.
fn parameter(of: &Runs, part: &str) -> String {
    let is = |t: &&Stored| matches!(t.state, State::Parameter(_)) && t.name.contains(part);
    of.steps[0].after.iter().find(is).unwrap_or_else(|| panic!("no parameter {part}")).name.clone()
}

#[test]
fn faults_are_found_whatever_the_optimizer() {
    for name in ["adamw", "lion", "sgd"] {
        let config = config(&format!("[optimizer]\nname = \"{name}\""));
        let some = |t: &Runs| parameter(t, "up");
        // A sum over ranks that is left out.
        let half = broken(&config, |t| {
            let name = format!("grad.{}", some(t));
            change(&mut t.steps[1].gradients, &name, |_, x| x / 2.0);
        });
        assert_eq!(half, ["gradients"], "{name}");
        // One wrong element.
        let one = broken(&config, |t| {
            let name = format!("grad.{}", some(t));
            let largest = t.steps[0].gradients.iter().flat_map(numbers).fold(0.0, |m: f64, x| m.max(x.abs()));
            change(&mut t.steps[0].gradients, &name, |i, x| if i == 3 { x + 1e-2 * largest as f32 } else { x });
        });
        assert_eq!(one, ["gradients"], "{name}");
        // Half of a tensor that is not updated.
        let stale = broken(&config, |t| {
            let name = some(t);
            let before = numbers_of(&t.single.starts[1], &name);
            change(&mut t.steps[1].after, &name, |i, x| if i % 2 == 0 { before[i] as f32 } else { x });
        });
        assert_eq!(stale, ["updates"], "{name}");
        // An update in the wrong direction.
        let wrong = broken(&config, |t| {
            let name = some(t);
            let before = numbers_of(&t.single.starts[0], &name);
            change(&mut t.steps[0].after, &name, |i, x| 2.0 * before[i] as f32 - x);
        });
        assert_eq!(wrong, ["updates"], "{name}");
        let moment = broken(&config, |t| {
            let is = |t: &&Stored| matches!(t.state, State::Moment { .. });
            let name = t.steps[1].after.iter().find(is).unwrap().name.clone();
            change(&mut t.steps[1].after, &name, |_, x| 1.01 * x);
        });
        assert_eq!(moment, ["optimizer state"], "{name}");
        assert_eq!(broken(&config, |t| t.steps[1].loss *= 1.0001), ["loss"]);
        assert_eq!(broken(&config, |t| t.steps[0].norm *= 1.001), ["gradient norm"]);
        assert_eq!(broken(&config, |t| t.evaluated.loss *= 1.0001), ["evaluation loss"]);
    }
}

#[test]
fn where_bits_are_promised_one_of_them_counts() {
    let mut runs = runs(&config(""), "pp=2");
    assert_eq!(runs.promise, Promise::Identical);
    assert!(runs.judged().kept && runs.judged().identical);
    let name = parameter(&runs, "up");
    change(&mut runs.steps[1].after, &name, |i, x| if i == 0 { f32::from_bits(x.to_bits() ^ 1) } else { x });
    let found = runs.judged();
    assert!(!found.kept && !found.identical, "{found:#?}");
}

#[test]
fn weights_that_change_in_the_last_bit_raise_a_bound_only_where_a_step_is_chaotic() {
    let calm = runs(&config(""), "tp=2").judged();
    assert!(calm.criteria.iter().all(|c| !c.raised), "{calm:#?}");
    let wild = runs(&config("[optimizer]\nlr = 30.0\nname = \"sgd\"\ngrad_clip = 0.0"), "tp=2").judged();
    assert!(wild.kept, "{wild:#?}");
}

/// A model whose tokens go to three of eight experts.
fn routed(architecture: &str, keys: &str, precision: &str) -> Config {
    let text = format!(
        "[model]\narchitecture = \"{architecture}\"\nvocab_size = 131\nlayers = 4\ndim = 32\nheads = 4\nkv_heads = 2\nffn = 48\n\
         experts = 8\nexperts_per_token = 3\nexpert_ffn = 24\n{keys}\n\
         [train]\nseq = 16\nglobal_batch = 8\nmicro_batch = 1\nthreads = 1\n[precision]\npolicy = \"{precision}\"\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

/// One step and an evaluation from one state, with a layout's own choices or with given ones.
fn ran(config: &Config, layout: &str, given: Option<&(Choices, Choices)>) -> (Step, Evaluated) {
    let (devices, spare) = (Devices::new(), &mut Spare::default());
    let config = config.at(&layout.parse().unwrap());
    let plan = if given.is_some() { replaying_plan(&devices, &config) } else { plan(&devices, &config) }.unwrap();
    let mut run = Run::new(&devices, &config, &plan, true).unwrap();
    let step = run.step(0, given.map(|given| &given.0), spare).unwrap();
    (step, run.evaluate(given.map(|given| &given.1)).unwrap())
}

#[test]
fn a_layouts_own_choices_replayed_change_no_bit_wherever_its_tokens_are() {
    let grouped = "shared_experts = 1\ndense_layers = 1\nexpert_groups = 2\nexpert_top_groups = 1\nbalance_bias = 0.01";
    for (architecture, keys, layouts) in [
        (
            "qwen3_moe",
            "",
            &["dp=1", "dp=2,zero=3", "cp=2", "cp=4,context=gather", "tp=2,sp", "cp=2,ep=2,tp=2,sp,pp=2"][..],
        ),
        ("dots1", grouped, &["ep=2,pp=2,interleaved,virtual=2", "dp=2,ep=2,tp=2", "cp=2,ep=2,pp=2,zb-h1"]),
    ] {
        let config = routed(architecture, keys, "bf16");
        for layout in layouts {
            let (own, evaluated) = ran(&config, layout, None);
            let mut chosen = (own.chosen.clone(), evaluated.chosen.clone());
            let (again, again_evaluated) = ran(&config, layout, Some(&chosen));
            assert_eq!(own.chosen, again.chosen, "{layout}");
            let bits = |s: &Step, e: &Evaluated| (s.loss.to_bits(), s.norm.to_bits(), e.loss.to_bits());
            assert_eq!(bits(&own, &evaluated), bits(&again, &again_evaluated), "{layout}");
            for (ours, theirs) in [(&own.gradients, &again.gradients), (&own.after, &again.after)] {
                for (a, b) in ours.iter().zip(theirs) {
                    assert!(a.name == b.name && a.bytes == b.bytes, "{layout}: {}", a.name);
                }
            }
            // Those of one other token are noticed.
            chosen.0[1][..3].rotate_left(1);
            chosen.0[1].swap(0, 9);
            assert_ne!(ran(&config, layout, Some(&chosen)).0.loss.to_bits(), own.loss.to_bits(), "{layout}");
        }
    }
}

#[test]
fn where_choices_flip_one_ranks_are_replayed() {
    let config = routed("qwen3_moe", "", "bf16");
    let layouts = ["ep=2", "tp=2", "cp=2,ep=2", "cp=2,ep=2,tp=2,sp"].map(|l| l.parse().unwrap());
    let found = compare(&Devices::new(), &config, &layouts, 3, &mut |_| ()).unwrap();
    assert!(found.iter().all(|c| c.kept), "{found:#?}");
    // Of three steps and the evaluation.
    let all = 4 * 3 * 16 * 8 * (3 + 1);
    assert_eq!((found[0].flipped_choices, found[0].own_choices), (Some((0, all)), None));
    for c in &found[1..] {
        assert!((1..all / 20).contains(&c.flipped_choices.unwrap().0), "{c:#?}");
        let own = c.own_choices.unwrap().gradient_difference;
        assert!(own > 0.05 && c.gradient_difference < 0.05, "{c:#?}");
    }
}

/// Routers whose experts come in pairs that differ by rounding alone.
fn near_ties(start: &mut [Stored]) {
    for layer in 0..4 {
        let name = format!("layers.{layer}.router");
        let rows = numbers_of(start, &name);
        let pair = |i: usize| rows[i / 64 * 64 + i % 32] as f32;
        let odd = |i: usize| (i / 32 % 2 * (1 + i % 2)) as u32;
        change(start, &name, |i, _| f32::from_bits(pair(i).to_bits() + odd(i)));
    }
}

#[test]
fn faults_are_found_behind_choices_that_flip() {
    let config = routed("mixtral", "", "fp32");
    let tied = || runs_from(&config, "tp=2", &near_ties);
    let flips = |t: &Runs| replay::flipped(&t.single.steps[0].chosen, &t.steps[0].chosen, t.single.tokens).0;
    assert!(flips(&tied()) > 5, "{}", flips(&tied()));
    assert_eq!(broken_in(tied(), |_| ()), [""; 0]);
    // What a rank gives for one expert is not summed.
    let half = broken_in(tied(), |t| {
        let name = format!("grad.{}", parameter(t, "wdown"));
        change(&mut t.steps[0].gradients, &name, |i, x| if i < 32 * 24 { x / 2.0 } else { x });
    });
    assert_eq!(half, ["gradients"]);
    assert_eq!(broken_in(tied(), |t| t.steps[0].loss *= 1.0001), ["loss"]);
    // A bias of the choice that a rank does not have would send many tokens elsewhere.
    let elsewhere = broken(&routed("qwen3_moe", "", "bf16"), |t| {
        t.steps[0].chosen.iter_mut().flat_map(|c| c.iter_mut().step_by(4)).for_each(|e| *e = (*e + 1) % 8);
    });
    assert_eq!(elsewhere, ["choices of experts"]);
}

/// Numbers of which some are none or infinite, at the edges of blocks and parts.
#[test]
fn distances_are_those_of_one_element_after_the_other() {
    let stored = |numbers: &[f32]| Stored {
        name: "x".into(),
        value: ValueId(0),
        state: State::Constant(lockstep_ir::Init::Ones),
        dtype: lockstep_ir::DType::F32,
        bytes: numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    let len = (1 << 15) + 1025;
    let ours: Vec<f32> = (0..len).map(|i| (i % 97) as f32 - 48.0).collect();
    let places = [0, 1023, 1024, (1 << 15) - 1, 1 << 15, len - 1];
    for (place, x) in places.into_iter().zip([50.5, f32::NAN, f32::INFINITY, -0.0, f32::NEG_INFINITY, 1e30]) {
        let mut theirs = ours.clone();
        theirs[place] = x;
        let (a, b) = (stored(&ours), stored(&theirs));
        let expected = apart(ours[place].into(), x.into());
        assert_eq!(most_apart(&a, &b, 0..len), expected, "{x} at {place}");
        assert_eq!(most_apart(&b, &b, 0..len), 0.0);
        let found = parts(&[0, len], |i, range| if i == 1 { most_apart(&a, &b, range) } else { 0.0 });
        assert_eq!(found[1].iter().copied().fold(0.0, f64::max), expected);
        let size = if x.is_nan() { 48.0 } else { f64::from(x.abs()).max(48.0) };
        assert_eq!(largest(&b, 0..len), size);
    }
}
