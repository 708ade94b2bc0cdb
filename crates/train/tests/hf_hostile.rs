//! Folders that somebody made to hurt, or cut off, or mixed up: each gives an error with a hint, and takes little memory.

mod counting;
mod hf_folder;

use counting::growth;
use hf_folder::{Model, serialize};
use lockstep_infer::{InferError, import};
use lockstep_ir::Hint;
use lockstep_ir::counter;
use safetensors::tensor::Dtype;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Tests count the memory of the whole process: one at a time.
static ALONE: Mutex<()> = Mutex::new(());

struct Place {
    dir: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Place {
    fn new() -> Self {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Self { dir: tempfile::tempdir().unwrap(), _alone }
    }

    fn folder(&self) -> PathBuf {
        self.dir.path().join("hf")
    }

    /// A sound folder in the place of the last one.
    fn fresh(&self, model: &Model) -> PathBuf {
        let _ = fs::remove_dir_all(self.folder());
        model.write(&self.folder())
    }

    fn import(&self) -> Result<(), InferError> {
        let out = self.dir.path().join("out");
        let (grown, result) = growth(|| import(&self.folder(), &out, &mut |_, _| {}));
        assert!(grown < 24 << 20, "took {grown} bytes");
        match &result {
            Ok(_) => fs::remove_dir_all(out).unwrap(),
            Err(error) => {
                let text = error.with_hint();
                assert!(!out.exists() && text.matches("\nhint: ").count() == 1, "{text}");
                assert!(text.len() < 2000 && !text.contains('\u{1b}'), "{text}");
            }
        }
        result.map(drop)
    }

    fn refused(&self, expected: &str) {
        let error = self.import().expect_err(expected);
        assert!(error.with_hint().contains(expected), "{error}");
        assert!(error.is_request() || matches!(error, InferError::Checkpoint(_)), "{error}");
    }
}

fn file(header: &str, payload: usize) -> Vec<u8> {
    [(header.len() as u64).to_le_bytes().as_slice(), header.as_bytes(), &vec![0; payload]].concat()
}

#[test]
fn tensors_that_are_not_those_of_the_model() {
    let place = Place::new();
    let check = |change: &dyn Fn(&mut Model), expected: &str| {
        let mut model = Model::golden("llama_mha");
        change(&mut model);
        place.fresh(&model);
        place.refused(expected);
    };
    check(
        &|m| m.tensors.retain(|t| !t.0.contains("norm")),
        "5 tensors are missing: `model.layers.0.input_layernorm.weight`",
    );
    check(&|m| m.tensors.clear(), "2 layers, and there are 0 tensors");
    let extra = |name: &str| (name.to_owned(), Dtype::F32, vec![1], vec![0; 4]);
    check(&|m| m.tensors.push(extra("model.layers.2.x")), "1 tensor is not part of the model: `model.layers.2.x`");
    check(&|m| m.tensors.push(extra("\u{1b}[31m")), "`\\u{1b}[31m`");
    check(&|m| (0..9).for_each(|i| m.tensors.push(extra(&format!("x{i}")))), "`x4` and 4 more");
    let shape = "tensor `model.norm.weight` is [2, 12], the model wants [24]";
    check(&|m| m.tensor("model.norm.weight").2 = vec![2, 12], shape);
    let transposed = "tensor `model.layers.0.mlp.up_proj.weight` is [24, 40], the model wants [40, 24]";
    check(&|m| m.tensor("model.layers.0.mlp.up_proj.weight").2.reverse(), transposed);
    check(&|m| m.tensor("model.norm.weight").1 = Dtype::I32, "tensor `model.norm.weight` has elements of type I32");
    let nan = |m: &mut Model| m.tensor("model.norm.weight").3[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    check(&nan, "tensor `model.norm.weight` has a number that is not finite");
    check(&|m| m.config["num_hidden_layers"] = json!(16_777_216), "16777216 layers, at most 2048 are read");
    check(&|m| m.config["num_hidden_layers"] = json!(20), "162 tensors are missing");
    check(&|m| m.config["vocab_size"] = json!(16_777_216), "is [53, 24], the model wants [16777216, 24]");
    check(&|m| m.config["vocab_size"] = json!(1_000_000_000_000u64), "`vocab_size` is 1000000000000, which is wrong");
    check(&|m| m.config["num_attention_heads"] = json!(5), "model.kv_heads = 4 does not divide model.heads = 5");
}

#[test]
fn experts_that_are_missing_or_too_many_are_named() {
    let place = Place::new();
    let check = |case: &str, change: &dyn Fn(&mut Model), expected: &str| {
        let mut model = Model::golden(case);
        change(&mut model);
        place.fresh(&model);
        place.refused(expected);
    };
    let without = |name: &'static str| move |m: &mut Model| m.tensors.retain(|t| !t.0.contains(name));
    let expert = "6 tensors are missing: `model.layers.0.block_sparse_moe.experts.4.w1.weight`";
    check("mixtral", &without("experts.4."), expert);
    let fewer = |m: &mut Model| m.config["num_local_experts"] = json!(4);
    check(
        "mixtral",
        &fewer,
        "tensor `model.layers.0.block_sparse_moe.gate.weight` is [5, 24], the model wants [4, 24]",
    );
    let bias = "2 tensors are missing: `model.layers.1.mlp.gate.e_score_correction_bias`";
    check("dots1", &without("e_score_correction_bias"), bias);
    check("deepseek", &without("shared_experts"), "6 tensors are missing: `model.layers.1.mlp.shared_experts.");
    let dense = |m: &mut Model| m.config["first_k_dense_replace"] = json!(2);
    check("deepseek", &dense, "3 tensors are missing: `model.layers.1.mlp.gate_proj.weight`");
    let top = |m: &mut Model| m.config["num_experts_per_tok"] = json!(6);
    check("mixtral", &top, "model.experts_per_token = 6 is more than model.experts = 5");
}

#[test]
fn files_that_are_not_what_they_say() {
    let place = Place::new();
    let check = |name: &str, bytes: &[u8], expected: &str| {
        let folder = place.fresh(&Model::golden("llama_mha"));
        fs::write(folder.join(name), bytes).unwrap();
        place.refused(expected);
    };
    let weights = |bytes: &[u8], expected: &str| check("model.safetensors", bytes, expected);
    for length in [1 << 20, 1 << 40, 99_999_999, u64::MAX] {
        weights(&[&length.to_le_bytes(), &b"{}"[..]].concat(), "the header's length is out of range");
    }
    weights(b"", "too short for a header");
    weights(&file("", 0), "the header is not JSON");
    weights(&file("{\"a\":", 0), "wrong header");
    weights(&file(&"{\"a\":".repeat(50_000), 0), "wrong header");
    weights(&file("{\"\u{ff}", 0), "wrong header");
    weights(&[&7u64.to_le_bytes(), &b"{\"\xff\xfe\":1}"[..7]].concat(), "wrong header");
    let one = |offsets: &str| format!(r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}}}"#);
    weights(&file(&one("[0,8]"), 4), "the header describes 8 bytes, 4 follow");
    weights(&file(&one("[4,12]"), 12), "invalid offset");
    weights(&file(&one("[0,9223372036854775807]"), 8), "wrong header");
    let entry = r#""a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    weights(&file(&format!("{{{entry},{entry}}}"), 8), "`a` is there twice");
    let overlap = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    weights(&file(overlap, 12), "invalid offset");
    let huge = r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#;
    weights(&file(huge, 0), "wrong header");
    let whole = Model::golden("llama_mha").file();
    for length in (0..whole.len()).step_by(whole.len() / 40) {
        weights(&whole[..length], "model.safetensors: ");
    }

    let config = |bytes: &[u8], expected: &str| check("config.json", bytes, expected);
    config(b"", "not the JSON that is expected");
    config(b"[]", "it is not a JSON object");
    config(b"{\"model_type\": \"\xff\"}", "not the JSON that is expected");
    config(br#"{"rms_norm_eps": NaN}"#, "not the JSON that is expected");
    config(br#"{"rms_norm_eps": 1e999}"#, "number out of range");
    config("[".repeat(100_000).as_bytes(), "recursion limit");
    config(&vec![b' '; (32 << 20) + 1], "33554433 bytes, more than 33554432");
    check("tokenizer.json", b"{}", "tokenizer");
    fs::remove_dir_all(place.folder()).unwrap();
    place.refused("no config.json");
    fs::create_dir_all(place.folder()).unwrap();
    fs::write(place.folder().join("config.json"), Model::golden("llama_mha").config.to_string()).unwrap();
    place.refused("no model.safetensors and no model.safetensors.index.json");
    fs::create_dir(place.folder().join("model.safetensors")).unwrap();
    place.refused("not a plain file");
}

/// A folder with two shards, and the index that belongs to it.
fn sharded(place: &Place) -> serde_json::Map<String, serde_json::Value> {
    let model = Model::golden("llama_mha");
    let folder = place.fresh(&model);
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    let (a, b) = model.tensors.split_at(7);
    let mut map = serde_json::Map::new();
    for (name, tensors) in [("a.safetensors", a), ("b.safetensors", b)] {
        fs::write(folder.join(name), serialize(tensors)).unwrap();
        map.extend(tensors.iter().map(|t| (t.0.clone(), json!(name))));
    }
    write_index(&folder, &map);
    map
}

fn write_index(folder: &Path, map: &serde_json::Map<String, serde_json::Value>) {
    let text = json!({ "metadata": {}, "weight_map": map }).to_string();
    fs::write(folder.join("model.safetensors.index.json"), text).unwrap();
}

#[test]
fn an_index_that_leads_astray() {
    let place = Place::new();
    let map = sharded(&place);
    place.import().unwrap();
    let outside = place.dir.path().join("outside.safetensors");
    fs::copy(place.folder().join("a.safetensors"), &outside).unwrap();
    let names = [
        "../outside.safetensors",
        outside.to_str().unwrap(),
        "/etc/passwd",
        "x/../a.safetensors",
        "./a.safetensors",
        "..safetensors",
        "a.bin",
        "",
    ];
    for name in names {
        let mut map = map.clone();
        map.insert("model.norm.weight".into(), json!(name));
        write_index(&place.folder(), &map);
        place.refused("is not the name of a safetensors file in this folder");
    }
    for (name, file, expected) in [
        ("model.norm.weight", json!(["a.safetensors"]), "is not the name of a safetensors file"),
        (
            "model.norm.weight",
            json!("a.safetensors"),
            "tensor `model.norm.weight` is in a.safetensors, which does not have it",
        ),
        ("model.nothing", json!("a.safetensors"), "tensor `model.nothing` is in a.safetensors, which does not have it"),
        ("model.norm.weight", json!("gone.safetensors"), "names gone.safetensors, which is not in the folder"),
    ] {
        let mut map = map.clone();
        map.insert(name.into(), file);
        write_index(&place.folder(), &map);
        place.refused(expected);
    }
    let mut short = map.clone();
    short.remove("model.norm.weight");
    write_index(&place.folder(), &short);
    place.refused("1 tensor is in the shards and not in it: `model.norm.weight`");
    for text in ["{}", "{\"weight_map\": 3}", "nonsense"] {
        fs::write(place.folder().join("model.safetensors.index.json"), text).unwrap();
        place.refused("model.safetensors.index.json: ");
    }
    let many: serde_json::Map<_, _> =
        (0..2000).map(|i| (format!("t{i}"), json!(format!("s{i}.safetensors")))).collect();
    write_index(&place.folder(), &many);
    place.refused("the index names 2000 files, more than 1000");

    write_index(&place.folder(), &map);
    let mut twice = Model::golden("llama_mha").tensors;
    twice.truncate(8);
    fs::write(place.folder().join("a.safetensors"), serialize(&twice)).unwrap();
    place.refused("is in another file too");
}

#[test]
#[cfg(unix)]
fn links_lead_to_the_blobs_of_a_cache_and_to_nowhere_else_outside() {
    use std::os::unix::fs::symlink;
    let place = Place::new();
    let model = Model::golden("llama_mha");
    let folder = place.fresh(&model);
    for name in ["model.safetensors", "config.json"] {
        let outside = place.dir.path().join(name);
        fs::rename(folder.join(name), &outside).unwrap();
        symlink(&outside, folder.join(name)).unwrap();
        place.refused("outside of its folder\nhint: copy the file into the folder");
        fs::remove_file(folder.join(name)).unwrap();
        fs::rename(&outside, folder.join(name)).unwrap();
    }
    // `models--x/snapshots/rev/model.safetensors -> ../../blobs/…`, as the cache of huggingface_hub has it.
    let cache = place.dir.path().join("models--x");
    let snapshot = cache.join("snapshots/rev");
    model.write(&snapshot);
    fs::create_dir(cache.join("blobs")).unwrap();
    for name in ["model.safetensors", "config.json"] {
        fs::rename(snapshot.join(name), cache.join("blobs").join(name)).unwrap();
        symlink(format!("../../blobs/{name}"), snapshot.join(name)).unwrap();
    }
    import(&snapshot, &place.dir.path().join("run"), &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"));
}

/// Bytes of a file changed at random, most of them where the JSON is.
fn mutated(sound: &[u8], seed: u64) -> Vec<u8> {
    let mut draws = 0;
    let mut draw = |below: usize| {
        draws += 1;
        (counter::bits(seed, draws) % below.max(1) as u64) as usize
    };
    let mut bytes = sound.to_vec();
    for _ in 0..1 + draw(3) {
        let front = bytes.len().min(if draw(8) == 0 { usize::MAX } else { 2400 });
        let at = draw(front);
        match draw(6) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << draw(8),
            1 if !bytes.is_empty() => bytes[at] = draw(256) as u8,
            2 => bytes.truncate(at),
            3 => {
                let digits = b"9999999999999999999"[..1 + draw(19)].to_vec();
                bytes.splice(at..at, digits);
            }
            4 => {
                let piece = bytes[at..(at + draw(200)).min(bytes.len())].to_vec();
                bytes.splice(at..at, piece);
            }
            _ => {
                let end = (at + draw(40)).min(bytes.len());
                bytes.drain(at..end);
            }
        }
    }
    bytes
}

#[test]
fn no_mutation_of_a_folder_does_more_than_fail() {
    let place = Place::new();
    sharded(&place);
    let names = ["config.json", "model.safetensors.index.json", "a.safetensors", "b.safetensors"];
    let sound = names.map(|name| fs::read(place.folder().join(name)).unwrap());
    let (mut refused, rounds) = (0, 600);
    for round in 0..rounds {
        let which = (counter::bits(1, round) % 4) as usize;
        fs::write(place.folder().join(names[which]), mutated(&sound[which], counter::bits(2, round))).unwrap();
        refused += u64::from(place.import().is_err());
        fs::write(place.folder().join(names[which]), &sound[which]).unwrap();
    }
    // Some only change a number that nobody looks at, or a weight.
    assert!(refused > rounds / 2 && refused < rounds, "{refused} of {rounds}");
    place.import().unwrap();
}
