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
    evaluated: f64,
}

fn runs(config: &Config, layout: &str) -> Runs {
    let layout: Layout = layout.parse().unwrap();
    let (alone, config) = (config.at(&Layout::single(1)), config.at(&layout));
    let (devices, spare) = (Devices::new(), &mut Spare::default());
    let promise = Promise::of(&layout, &config);
    let [single_plan, layout_plan] = [&alone, &config].map(|config| plan(&devices, config).unwrap());
    let single = trace(&devices, (&alone, &single_plan), 2).unwrap();
    let task = Task { config: &alone, plan: &single_plan, promise, disturbs: true };
    let natural = follow(&devices, &task, &single, spare).unwrap().differences();
    let mut run = Run::new(&devices, &config, &layout_plan, false).unwrap();
    let mut steps = Vec::new();
    for step in 0..2 {
        run.write(&single.starts[step]).unwrap();
        steps.push(run.step(step, spare).unwrap());
    }
    run.write(&single.starts[2]).unwrap();
    let evaluated = run.evaluate().unwrap();
    Runs { single, natural, layout, promise, steps, evaluated }
}

impl Runs {
    fn judged(&self) -> Comparison {
        let mut found = Found::new(self.promise);
        for (step, ran) in self.steps.iter().enumerate() {
            found.add_step(&self.single, step, &self.single.starts[step], ran);
        }
        found.add_evaluation(&self.single, self.evaluated);
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
    let mut runs = runs(config, "tp=2");
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
        assert_eq!(broken(&config, |t| t.evaluated *= 1.0001), ["evaluation loss"]);
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
