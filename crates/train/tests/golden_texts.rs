//! Texts by greedy decoding against `transformers`, several at once: a model of every family. `golden/texts.py` made the file.

mod hf_folder;

use hf_folder::Model;
use lockstep_host::Devices;
use lockstep_infer::{Sampling, TextBatch, TextRequest, Trained};
use lockstep_plan::{GenerationShape, PAGE};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::ControlFlow;

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32).collect()
}

#[test]
fn texts_of_every_family_are_those_of_transformers() {
    let path = format!("{}/tests/golden/texts.json", env!("CARGO_MANIFEST_DIR"));
    let models: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let models = models.as_object().unwrap();
    assert!(models.len() >= 8);
    for (case, texts) in models {
        let place = tempfile::tempdir().unwrap();
        let trained = Trained::open(&Model::golden(case).write(&place.path().join("model"))).unwrap();
        let texts: Vec<[Vec<u32>; 2]> =
            texts.as_array().unwrap().iter().map(|t| [numbers(&t["prompt"]), numbers(&t["text"])]).collect();
        let longest = texts.iter().map(|[prompt, text]| prompt.len() + text.len()).max().unwrap();
        // Fewer slots than texts, so that some come in when others have ended.
        let shape = GenerationShape { texts: 3, ..GenerationShape::one(longest) };
        let mut batch = TextBatch::new(&Devices::new(), &trained.config, shape, trained.weights()).unwrap();
        for (id, [prompt, text]) in texts.iter().enumerate() {
            let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
            let (prompt, max_tokens) = (prompt.clone(), text.len());
            let request = TextRequest { prompt, max_tokens, sampling, ends: Vec::new(), logprobs: false };
            batch.submit(id as u64, request).unwrap();
        }
        let mut written = BTreeMap::new();
        while !batch.is_done() {
            let ended = batch.step(&mut |_, _| ControlFlow::Continue(())).unwrap();
            written.extend(ended.into_iter().map(|(id, text)| (id as usize, text.unwrap().tokens)));
        }
        for (id, [prompt, text]) in texts.iter().enumerate() {
            assert_eq!(&written[&id], text, "{case}, text {id}, whose prompt has {} tokens", prompt.len());
        }
        let shares = longest > PAGE && trained.config.model.sliding_window.is_none();
        assert_eq!(batch.counts().shared > 0, shares, "{case}");
    }
}
