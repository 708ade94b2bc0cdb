//! Evaluation tasks: scores against those of lm-evaluation-harness, and in a run.

mod common;

use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_infer::feed::{Feed, TextScore};
use lockstep_infer::{EvaluationShape, Request, TaskFile, TextScorer, Trained, Weights, evaluate_tasks, state};
use lockstep_ir::{StepProgram, counter};
use lockstep_plan::{Cut, Target, evaluation_program};
use lockstep_train::{Event, RunOptions, StepMetrics, run};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tasks")
}

/// The model of the golden values, whose tokenizer is that of other tests.
fn model(place: &Path) -> Trained {
    for entry in std::fs::read_dir(folder().join("model")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, place.join(path.file_name().unwrap())).unwrap();
    }
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/fixtures/tokenizer.json");
    std::fs::copy(tokenizer, place.join("tokenizer.json")).unwrap();
    Trained::open(place).unwrap()
}

#[test]
fn every_item_scores_as_in_lm_evaluation_harness() {
    let place = tempfile::tempdir().unwrap();
    let trained = model(place.path());
    let paths = [folder().join("choices.jsonl"), folder().join("cloze.jsonl")];
    let files = TaskFile::open_all(&paths, 0).unwrap();
    let found =
        evaluate_tasks(&Devices::of(&trained.config), &trained, &files, EvaluationShape::of(64), &mut |_| ()).unwrap();
    let items: Vec<_> = found.tasks.iter().flat_map(|task| &task.items).collect();
    let golden = std::fs::read_to_string(folder().join("harness.jsonl")).unwrap();
    let golden: Vec<Value> = golden.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(items.len(), golden.len());
    assert_eq!(items.len(), 100);
    for (index, (item, expected)) in items.iter().zip(&golden).enumerate() {
        let theirs: Vec<f64> =
            expected["log_likelihoods"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        assert_eq!(item.log_likelihoods.len(), theirs.len(), "item {index}");
        for (ours, theirs) in item.log_likelihoods.iter().zip(&theirs) {
            assert!((ours - theirs).abs() < 2e-5 * theirs.abs().max(1.0), "item {index}: {ours} and {theirs}");
        }
        let scores = [("acc", Some(item.acc)), ("acc_norm", item.acc_norm), ("acc_bytes", item.acc_bytes)];
        for (name, ours) in scores {
            assert_eq!(ours, expected[name].as_bool(), "item {index}, {name}");
        }
    }
    let shares: Vec<f64> = found.tasks.iter().filter_map(|task| task.scores().acc).collect();
    assert!(shares.iter().all(|share| *share > 0.0 && *share < 1.0), "a test that tells nothing: {shares:?}");
    // Lengths matter for some, and so does the difference of characters and bytes.
    assert!(items.iter().any(|item| item.acc_norm.is_some_and(|norm| norm != item.acc)));
}

#[test]
fn a_run_scores_its_tasks_as_its_checkpoints_do() {
    let dir = tempfile::tempdir().unwrap();
    common::write_corpus(dir.path());
    let question = |n: u64| {
        let right = n * n;
        format!(
            "{{\"query\":\"the square of {n} is\",\"choices\":[\"{right}, and\",\"{}, and\",\"no\"],\"gold\":0}}\n",
            right + 7
        )
    };
    std::fs::write(dir.path().join("squares.jsonl"), (3..9).map(question).collect::<String>()).unwrap();
    let cloze = "{\"query\":\"the square of 4 is 16, and so\",\"target\":\"on\"}\n";
    std::fs::write(dir.path().join("words.jsonl"), cloze).unwrap();
    let lines = "steps = 6\nvalidate_every = 0\n[eval]\ntasks = [\"squares.jsonl\", \"words.jsonl\"]\nevery = 4\nitems = 5\n[checkpoint]\nevery = 4";
    let config = common::tiny(dir.path(), lines);
    // Interrupted while tasks are scored: the line is written when the run goes on.
    let stop = AtomicBool::new(false);
    let options = RunOptions { dir: dir.path().join("run"), ..RunOptions::default() };
    let outcome = run(&Devices::new(), &config, &options, &stop, &mut |event| {
        if matches!(event, Event::EvaluatingTasks { .. }) {
            stop.store(true, Ordering::SeqCst);
        }
    });
    assert_eq!(outcome.unwrap().step, 4);
    let written = || std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    assert_eq!(written().lines().count(), 3);
    common::run_to(&config, &options.dir, 6);
    let metrics: Vec<StepMetrics> = written().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(metrics.len(), 6);
    let scored: Vec<u64> = metrics.iter().filter(|line| !line.tasks.is_empty()).map(|line| line.step).collect();
    assert_eq!(scored, [4, 6]);
    let paths = ["squares.jsonl", "words.jsonl"].map(|name| dir.path().join(name));
    let files = TaskFile::open_all(&paths, 5).unwrap();
    assert_eq!([files[0].len(), files[1].len()], [5, 1]);
    for line in metrics.iter().filter(|line| !line.tasks.is_empty()) {
        let checkpoint = dir.path().join(format!("run/checkpoints/step-{:08}", line.step));
        let trained = Trained::open(&checkpoint).unwrap();
        let found =
            evaluate_tasks(&Devices::of(&trained.config), &trained, &files, EvaluationShape::OF_TRAINING, &mut |_| ())
                .unwrap();
        let [squares, words] = &found.tasks[..] else { panic!("{found:?}") };
        // The bits of a row are those of any program.
        assert_eq!([line.tasks["squares"], line.tasks["words"]], [squares, words].map(|task| task.scores()));
        assert!(words.scores().acc.is_some() && words.scores().acc_norm.is_none());
    }
    let text = written();
    assert!(text.lines().nth(3).unwrap().contains("\"tasks\":{\"squares\":{\"acc\":"), "{text}");
}

#[test]
fn every_layout_scores_every_item_as_its_checkpoint_does() {
    let dir = tempfile::tempdir().unwrap();
    common::write_corpus(dir.path());
    // A task of each item, so that metrics tell of it.
    let ends = [("the square of 4", " is"), ("and so o", "n"), ("the squ", "are of 7"), ("line 23", ":"), ("lin", "x")];
    let items = ends.into_iter().chain([("line 7: the", " "), ("the square of 5 is", " "), (", and so on.", "\n")]);
    let names: Vec<String> = (0..8).map(|i| format!("item{i}")).collect();
    let paths: Vec<PathBuf> = names.iter().map(|name| dir.path().join(format!("{name}.jsonl"))).collect();
    for ((query, target), path) in items.zip(&paths) {
        let line = format!("{{\"query\":{query:?},\"target\":{target:?},\"delimiter\":\"\"}}\n");
        std::fs::write(path, line).unwrap();
    }
    let files = TaskFile::open_all(&paths, 0).unwrap();
    let listed: Vec<String> = paths.iter().map(|path| format!("{path:?}")).collect();
    let mut of_one_rank = None;
    for (name, layout) in [
        ("single", ""),
        ("dp", "dp = 2\nzero = 3"),
        ("tp", "tp = 2"),
        ("cp", "cp = 2"),
        ("pp", "pp = 2"),
        ("several", "cp = 2\ntp = 2\nsequence_parallel = true"),
    ] {
        let lines = format!(
            "steps = 40\nmicro_batch = 2\nvalidate_every = 0\nvalidation_sequences = 0\n[eval]\ntasks = [{}]\nevery = 40\n[parallel]\n{layout}",
            listed.join(", ")
        );
        let config = common::tiny(dir.path(), &lines);
        let ran = common::run_to(&config, &dir.path().join(name), 40);
        let found = &ran.steps.last().unwrap().tasks;
        let trained = Trained::open(&dir.path().join(name)).unwrap();
        let expected =
            evaluate_tasks(&Devices::of(&trained.config), &trained, &files, EvaluationShape::OF_TRAINING, &mut |_| ())
                .unwrap();
        let accs: Vec<f64> = names.iter().map(|name| found[name].acc.unwrap()).collect();
        assert_eq!(accs, expected.tasks.iter().map(|task| task.scores().acc.unwrap()).collect::<Vec<_>>(), "{name}");
        assert!(accs.contains(&0.0) && accs.contains(&1.0), "a test that tells nothing: {accs:?}");
        for (task, report) in names.iter().zip(&expected.tasks) {
            let [here, there] = [found[task], report.scores()].map(|scores| scores.perplexity.unwrap());
            assert!((here / there - 1.0).abs() < 1e-3, "{name}, {task}: {here} and {there}");
        }
        assert_eq!(of_one_rank.get_or_insert_with(|| accs.clone()), &accs, "{name}");
    }
}

/// The scores of texts by whole sequences of the evaluation program, as a run scores its tasks.
fn in_sequences(config: &Config, texts: &[Request]) -> Vec<TextScore> {
    let devices = Devices::of(config);
    let seq = texts.iter().map(|text| text.tokens.len() - 1).max().unwrap();
    let cut = Cut { sequences: texts.len() as u64, rest: 0 };
    let (program, threads) = evaluation_program(&devices, config, (3, seq, 1), cut, true).unwrap();
    let mut executor = devices.device(Target::of(&devices, config)).unwrap().load(program.clone(), threads).unwrap();
    state::load(&program.tensors, executor.as_mut(), Weights::Initial, config.train.seed).unwrap();
    let (numbers, entry) = ((config.train.seed, config.model.vocab_size), StepProgram::EVALUATE);
    let mut feed = Feed::new(&program.tensors, Some(entry), (3, seq), numbers, &|_, _| true);
    let (mut scores, never) = (Vec::new(), AtomicBool::new(false));
    feed.score(executor.as_mut(), entry, texts, &never, &mut |score| scores.push(score)).unwrap();
    scores
}

/// Texts of questions, and how many each has: questions of one token up to several pages, most of which begin alike, and answers of one
/// token up to many, some of which begin alike.
fn questions() -> (Vec<Request>, Vec<usize>) {
    let token = |key: usize, i: usize| (counter::bits(key as u64, i as u64) % 300) as u32;
    let (mut texts, mut groups) = (Vec::new(), Vec::new());
    for n in 0..40 {
        let length = 1 + counter::bits(3, n as u64) as usize % 290;
        let question: Vec<u32> =
            (0..length).map(|i| if i < 200 && n % 4 > 0 { token(7, i) } else { token(100 + n, i) }).collect();
        let answers = 1 + n % 5;
        for a in 0..answers {
            let count = 1 + counter::bits(5, (n * 8 + a) as u64) as usize % if a == 2 { 60 } else { 9 };
            let answer = (0..count).map(|i| if i < a { token(n, i) } else { token(1000 + n * 8 + a, i) });
            texts.push(Request { tokens: question.iter().copied().chain(answer).collect(), context: length });
        }
        groups.push(answers);
    }
    (texts, groups)
}

#[test]
fn texts_over_a_cache_score_as_in_sequences_to_the_bit() {
    let (texts, groups) = questions();
    let gqa = "heads = 6\nkv_heads = 2\ndim = 48\n";
    let windows = "sliding_window = 50\nlayer_types = [\"sliding\", \"full\"]\nattention_sinks = true\n";
    for (model, rest) in [
        (gqa.to_owned() + "tied_embeddings = true\n", ""),
        (gqa.to_owned(), "[precision]\npolicy = \"bf16\"\n"),
        (gqa.to_owned() + windows, ""),
        (
            "heads = 4\ndim = 48\nkv_lora_rank = 20\nqk_nope_head_dim = 10\nqk_rope_head_dim = 6\nv_head_dim = 12\n"
                .into(),
            "",
        ),
        ("architecture = \"gpt2\"\nheads = 4\ndim = 60\npositions = 400\ndropout = 0.1\n".into(), ""),
        (gqa.to_owned() + "architecture = \"mixtral\"\nexperts = 4\nexperts_per_token = 2\n", ""),
    ] {
        let config = format!(
            "[model]\nvocab_size = 300\nlayers = 2\nffn = 80\ninit_std = 0.3\n{model}[train]\nseq = 64\nglobal_batch = 1\n{rest}"
        );
        let config = Config::parse(&config, "run.toml", &[]).unwrap();
        let expected = in_sequences(&config, &texts);
        let mut scorer =
            TextScorer::new(&Devices::of(&config), &config, Weights::Initial, (&texts, &groups), 1).unwrap();
        let mut done = 0;
        let found = scorer.score(&texts, &groups, &mut || done += 1).unwrap();
        assert_eq!(done, texts.len());
        for (n, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let what = format!("{model}{rest}text {n} of {} tokens", texts[n].tokens.len());
            if config.model.latent().is_some() {
                // Over a cache of latents by other matmuls.
                let apart = (found.loss - expected.loss).abs();
                assert!(
                    found.greedy == expected.greedy && apart <= 1e-5 * expected.loss,
                    "{what}: {found:?}, {expected:?}"
                );
                continue;
            }
            assert_eq!(found, expected, "{what}");
        }
        // Less than half of the tokens: questions are read once, and so are their beginnings.
        let all: usize = texts.iter().map(|text| text.tokens.len() - 1).sum();
        assert!(scorer.tokens_read() * 2 < all as u64, "{} of {all}", scorer.tokens_read());
    }
}
