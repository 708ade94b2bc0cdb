//! Faults that are put into what a layout gave, and numbers that may differ.

use super::*;

fn config(keys: &str) -> Config {
    let text = format!(
        "[model]\narchitecture = \"gpt2\"\nvocab_size = 61\nlayers = 2\ndim = 16\nheads = 4\nffn = 32\n\
         [train]\nseq = 8\nglobal_batch = 4\nmicro_batch = 1\nthreads = 1\n{keys}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

/// One rank, one rank from weights that differ in the last bit, and a layout.
fn traces(config: &Config, layout: &str) -> ([Trace; 3], Layout) {
    let layout: Layout = layout.parse().unwrap();
    let alone = config.at(&Layout::single(1));
    let single = trace(&Devices::new(), &alone, 2, None).unwrap();
    let disturbed = trace(&Devices::new(), &alone, 2, Some(disturb(&single.starts))).unwrap();
    let parallel = trace(&Devices::new(), &config.at(&layout), 2, Some(single.starts.clone())).unwrap();
    ([single, disturbed, parallel], layout)
}

/// Changes the f32 numbers of a tensor.
fn change(tensors: &mut [Stored], name: &str, f: impl Fn(usize, f32) -> f32) {
    let tensor = tensors.iter_mut().find(|t| t.name == name).unwrap_or_else(|| panic!("no tensor {name}"));
    for (i, b) in tensor.bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        *b = f(i, f32::from_le_bytes(*b)).to_le_bytes();
    }
}

fn numbers(tensors: &[Stored], name: &str) -> Vec<f64> {
    let tensor = tensors.iter().find(|t| t.name == name).unwrap();
    (0..tensor.len()).map(|i| tensor.number(i)).collect()
}

/// The criteria that a change of what the layout gave breaks.
fn broken(config: &Config, plant: impl Fn(&mut Trace)) -> Vec<&'static str> {
    let ([single, disturbed, mut parallel], layout) = traces(config, "tp=2");
    let judged = |parallel: &Trace| {
        let promise = Promise::of(&layout, config);
        judge(&layout, promise, &single, (Some(&disturbed), &mut Natural::default()), parallel)
    };
    let sound = judged(&parallel);
    assert!(sound.kept && !sound.identical, "{sound:#?}");
    plant(&mut parallel);
    let found = judged(&parallel);
    let names: Vec<&str> = found.criteria.iter().filter(|c| !c.is_kept()).map(|c| c.name).collect();
    assert_eq!(found.kept, names.is_empty());
    names
}

/// A tensor of some kind: its parameter's name without layers is enough.
fn parameter(of: &Trace, part: &str) -> String {
    let is = |t: &&Stored| matches!(t.state, State::Parameter(_)) && t.name.contains(part);
    of.steps[0].after.iter().find(is).unwrap_or_else(|| panic!("no parameter {part}")).name.clone()
}

#[test]
fn faults_are_found_whatever_the_optimizer() {
    for name in ["adamw", "lion", "sgd"] {
        let config = config(&format!("[optimizer]\nname = \"{name}\""));
        let some = |t: &Trace| parameter(t, "up");
        // A sum over ranks that is left out.
        let half = broken(&config, |t| {
            let name = format!("grad.{}", some(t));
            change(&mut t.steps[1].gradients, &name, |_, x| x / 2.0);
        });
        assert_eq!(half, ["gradients"], "{name}");
        // One wrong element.
        let one = broken(&config, |t| {
            let name = format!("grad.{}", some(t));
            let largest = t.steps[0]
                .gradients
                .iter()
                .flat_map(|g| (0..g.len()).map(|i| g.number(i)))
                .fold(0.0, |m: f64, x| m.max(x.abs()));
            change(&mut t.steps[0].gradients, &name, |i, x| if i == 3 { x + 1e-2 * largest as f32 } else { x });
        });
        assert_eq!(one, ["gradients"], "{name}");
        // Half of a tensor that is not updated.
        let stale = broken(&config, |t| {
            let name = some(t);
            let before = numbers(&t.starts[1], &name);
            change(Arc::make_mut(&mut t.steps[1].after).as_mut_slice(), &name, |i, x| {
                if i % 2 == 0 { before[i] as f32 } else { x }
            });
        });
        assert_eq!(stale, ["updates"], "{name}");
        // An update in the wrong direction.
        let wrong = broken(&config, |t| {
            let name = some(t);
            let before = numbers(&t.starts[0], &name);
            change(Arc::make_mut(&mut t.steps[0].after).as_mut_slice(), &name, |i, x| 2.0 * before[i] as f32 - x);
        });
        assert_eq!(wrong, ["updates"], "{name}");
        let moment = broken(&config, |t| {
            let is = |t: &&Stored| matches!(t.state, State::Moment { .. });
            let name = t.steps[1].after.iter().find(is).unwrap().name.clone();
            change(Arc::make_mut(&mut t.steps[1].after).as_mut_slice(), &name, |_, x| 1.01 * x);
        });
        assert_eq!(moment, ["optimizer state"], "{name}");
        assert_eq!(broken(&config, |t| t.steps[1].loss *= 1.0001), ["loss"]);
        assert_eq!(broken(&config, |t| t.steps[0].norm *= 1.001), ["gradient norm"]);
        assert_eq!(broken(&config, |t| t.evaluated *= 1.0001), ["evaluation loss"]);
    }
}

#[test]
fn where_bits_are_promised_one_of_them_counts() {
    let config = config("");
    let ([single, disturbed, mut parallel], layout) = traces(&config, "pp=2");
    let judged = |parallel: &Trace| {
        judge(&layout, Promise::Identical, &single, (Some(&disturbed), &mut Natural::default()), parallel)
    };
    assert!(judged(&parallel).kept && judged(&parallel).identical);
    let name = parameter(&parallel, "up");
    change(Arc::make_mut(&mut parallel.steps[1].after).as_mut_slice(), &name, |i, x| {
        if i == 0 { f32::from_bits(x.to_bits() ^ 1) } else { x }
    });
    let found = judged(&parallel);
    assert!(!found.kept && !found.identical, "{found:#?}");
}

#[test]
fn weights_that_change_in_the_last_bit_raise_a_bound_only_where_a_step_is_chaotic() {
    let ([single, disturbed, parallel], layout) = traces(&config(""), "tp=2");
    let calm = judge(
        &layout,
        Promise::of(&layout, &config("")),
        &single,
        (Some(&disturbed), &mut Natural::default()),
        &parallel,
    );
    assert!(calm.criteria.iter().all(|c| !c.raised), "{calm:#?}");
    let wild = config("[optimizer]\nlr = 30.0\nname = \"sgd\"\ngrad_clip = 0.0");
    let ([single, disturbed, parallel], layout) = traces(&wild, "tp=2");
    let found =
        judge(&layout, Promise::of(&layout, &wild), &single, (Some(&disturbed), &mut Natural::default()), &parallel);
    assert!(found.kept, "{found:#?}");
}
