//! `data.format = "chat"`: a model is fine-tuned on conversations, answers by the same template, and stops.

mod common;

use common::{losses, run_to};
use lockstep_config::Config;
use lockstep_data::Conversation;
use lockstep_host::Devices;
use lockstep_infer::{
    EvaluationShape, ExportOptions, Generator, Sampling, Stop, Text, Trained, evaluate, export, generate,
};
use lockstep_ir::Hint;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

const TASK: [(&str, &str); 6] =
    [("sky", "blue"), ("grass", "green"), ("blood", "red"), ("snow", "white"), ("night", "black"), ("sun", "yellow")];

fn question(thing: &str) -> String {
    format!("The colour of {thing}?")
}

/// Conversations of two questions each, the tokenizer with its template beside it, and a tiny model.
fn config(dir: &Path, more: &str) -> Config {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/fixtures/chats");
    fs::copy(fixtures.join("tokenizer.json"), dir.join("tokenizer.json")).unwrap();
    let template = fs::read_to_string(fixtures.join("chatml.jinja")).unwrap();
    let template = serde_json::json!({ "bos_token": "<s>", "chat_template": format!("{{{{ bos_token }}}}{template}") });
    fs::write(dir.join("tokenizer_config.json"), template.to_string()).unwrap();
    let turn = |(thing, colour): (&str, &str)| {
        format!(
            "{{\"from\": \"human\", \"value\": \"{}\"}}, {{\"from\": \"gpt\", \"value\": \"{colour}\"}}",
            question(thing)
        )
    };
    let chat = |i: usize| {
        let (one, two) = (TASK[i % 6], TASK[(i / 6) % 6]);
        format!("{{\"conversations\": [{}, {}]}}\n", turn(one), turn(two))
    };
    fs::write(dir.join("chats.jsonl"), (0..144).map(chat).collect::<String>()).unwrap();
    let text = format!(
        "[model]\nvocab_size = 384\nlayers = 2\ndim = 64\nheads = 4\nkv_heads = 2\nffn = 128\n\
         [data]\npaths = [\"chats.jsonl\"]\nformat = \"chat\"\ntokenizer = \"tokenizer.json\"\n\
         [optimizer]\nlr = 4e-3\nwarmup_steps = 5\n[train]\nseq = 96\nglobal_batch = 8\nthreads = 2\nvalidate_every = 0\n{more}\n"
    );
    fs::write(dir.join("run.toml"), text).unwrap();
    Config::load(&dir.join("run.toml"), &[]).unwrap()
}

#[test]
fn a_model_that_was_tuned_on_chats_answers_and_stops() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "steps = 90");
    assert!(config.data.document_mask, "conversations do not see each other");
    let run = dir.path().join("run");
    let ran = run_to(&config, &run, 90);
    assert!(ran.steps[89].loss < 0.1, "{}", ran.steps[89].loss);
    // What it was trained with goes with the checkpoint: nothing else is left.
    fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    fs::remove_file(dir.path().join("tokenizer_config.json")).unwrap();
    fs::remove_dir_all(run.join("data")).unwrap();
    let trained = Trained::open(&run).unwrap();
    let tokenizer = trained.tokenizer().unwrap();
    let chat = trained.chat(&tokenizer).unwrap();
    let mut ends = trained.end_tokens(&tokenizer).unwrap();
    ends.extend(chat.end_of_turn(&tokenizer).unwrap());
    let mut generator = Generator::new(&Devices::new(), &trained.config, 96, trained.weights()).unwrap();
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    for (thing, colour) in TASK {
        let prompt = chat.prompt(&tokenizer, &Conversation::asking(None, &question(thing))).unwrap();
        assert_eq!(tokenizer.token(prompt[0]).as_deref(), Some("<s>"));
        let listen = &mut |_| ControlFlow::Continue(());
        let text = generate(&mut generator, &tokenizer, &ends, &prompt, 20, &greedy, listen).unwrap();
        assert_eq!((tokenizer.decode(&text.tokens).as_str(), text.stop), (colour, Stop::Eos), "{thing}");
    }
}

#[test]
fn losses_of_chats_are_the_same_on_any_layout_and_after_a_pause() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &str| {
        let config = config(dir.path(), &format!("steps = 6\nreproducible = true\n{more}"));
        losses(&config, &dir.path().join(name))
    };
    let whole = run("whole", "micro_batch = 8");
    assert_eq!(run("ranks", "micro_batch = 1\n[parallel]\ndp = 2\nzero = 3"), whole);
    let config = config(dir.path(), "steps = 6\nreproducible = true\nmicro_batch = 8");
    run_to(&config, &dir.path().join("paused"), 3);
    assert_eq!(losses(&config, &dir.path().join("paused")), whole[3..]);
}

#[test]
fn evaluation_counts_the_answers() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "steps = 2");
    let ran = run_to(&config, &dir.path().join("run"), 2);
    let trained = Trained::open(&dir.path().join("run")).unwrap();
    let found =
        evaluate(&Devices::new(), &trained, &Text::Validation, EvaluationShape::OF_TRAINING, &mut |_| ()).unwrap();
    assert!((found.score.loss - ran.outcome.last_val_loss.unwrap()).abs() < 1e-9);
    let text = Text::Paths(vec![dir.path().join("chats.jsonl")]);
    let found = evaluate(&Devices::new(), &trained, &text, EvaluationShape::OF_TRAINING, &mut |_| ()).unwrap();
    let tokenizer = trained.tokenizer().unwrap();
    // An answer, the token that ends it and a line end.
    let tokens = |i: usize| tokenizer.tokens(TASK[i].1).unwrap().len() as u64 + 2;
    let answers: u64 = (0..144).map(|i| tokens(i % 6) + tokens((i / 6) % 6)).sum();
    assert_eq!(found.score.tokens, answers);
    // The token that ends an answer is no text.
    let bytes = |i: usize| TASK[i].1.len() as u64 + 1;
    assert_eq!(found.score.bytes, (0..144).map(|i| bytes(i % 6) + bytes((i / 6) % 6)).sum::<u64>());

    let empty = dir.path().join("empty.jsonl");
    fs::write(&empty, "{\"messages\": []}\n{\"messages\": null}\n").unwrap();
    let error =
        evaluate(&Devices::new(), &trained, &Text::Paths(vec![empty]), EvaluationShape::OF_TRAINING, &mut |_| ())
            .unwrap_err();
    assert!(error.with_hint().starts_with("there is nothing to predict: the text is empty\nhint: "), "{error}");
}

#[test]
fn a_chat_goes_out_with_the_eos_token_that_its_template_wrote() {
    let dir = tempfile::tempdir().unwrap();
    config(dir.path(), "steps = 1");
    // The tokenizer alone would take "<|endoftext|>".
    let beside = dir.path().join("tokenizer_config.json");
    let mut file: serde_json::Value = serde_json::from_str(&fs::read_to_string(&beside).unwrap()).unwrap();
    file["eos_token"] = "<|im_end|>".into();
    fs::write(&beside, file.to_string()).unwrap();
    for (name, keys, eos) in [("theirs", &[][..], "<|im_end|>"), ("own", &["data.eos_token=</s>".to_owned()], "</s>")] {
        let config = Config::load(&dir.path().join("run.toml"), keys).unwrap();
        let (run, out) = (dir.path().join(name), dir.path().join(format!("{name}-hf")));
        run_to(&config, &run, 1);
        let trained = Trained::open(&run).unwrap();
        let chat = lockstep_infer::RunData::open(&trained.config, &trained.data).unwrap().unwrap();
        assert_eq!(chat.chat().unwrap().tokens["eos_token"], eos);
        export(&run, &out, ExportOptions::default(), &mut |_, _| {}).unwrap();
        let written = fs::read(out.join("tokenizer_config.json")).unwrap();
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&written).unwrap()["eos_token"], eos, "{name}");
    }
}

#[test]
fn a_template_for_tools_is_found_beside_the_default_one_and_goes_out() {
    let dir = tempfile::tempdir().unwrap();
    config(dir.path(), "steps = 1");
    let beside = dir.path().join("tokenizer_config.json");
    let mut file: serde_json::Value = serde_json::from_str(&fs::read_to_string(&beside).unwrap()).unwrap();
    let plain = file["chat_template"].as_str().unwrap().to_owned();
    let of_tools = format!("{{{{ tools | length }}}}{plain}");
    file["chat_template"] = serde_json::json!([
        { "name": "tool_use", "template": of_tools },
        { "name": "default", "template": plain },
    ]);
    fs::write(&beside, file.to_string()).unwrap();
    let config = Config::load(&dir.path().join("run.toml"), &[]).unwrap();
    run_to(&config, &dir.path().join("run"), 1);
    export(&dir.path().join("run"), &dir.path().join("hf"), ExportOptions::default(), &mut |_, _| {}).unwrap();
    let written = |name: &str| fs::read_to_string(dir.path().join("hf").join(name)).unwrap();
    assert_eq!(written("chat_template.jinja"), plain);
    assert_eq!(written("additional_chat_templates/tool_use.jinja"), of_tools);
    // The export is read as the folder was, and so is the run.
    let question = r#"{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}]}"#;
    for place in ["run", "hf"] {
        let trained = Trained::open(&dir.path().join(place)).unwrap();
        let tokenizer = trained.tokenizer().unwrap();
        let prompt = |text: &str| {
            let conversation = Conversation::from_json(text).unwrap();
            tokenizer.decode(&trained.chat(&tokenizer).unwrap().prompt(&tokenizer, &conversation).unwrap())
        };
        assert!(prompt(question).starts_with("1<s>"), "{place}: {}", prompt(question));
        assert!(prompt(&question.replace("[{\"name\": \"f\"}]", "null")).starts_with("<s>"), "{place}");
    }
}
