//! A model passes through import and export in chunks, never as a whole. One test alone in its process: it counts the whole
//! process's memory.

mod counting;

use counting::growth;
use lockstep_infer::{ExportOptions, export, import};
use serde_json::json;
use std::fs::File;
use std::io::{Seek, Write};

#[test]
fn a_model_is_never_in_memory_as_a_whole() {
    const MIB: usize = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let (from, run, out) = (dir.path().join("hf"), dir.path().join("run"), dir.path().join("out"));
    std::fs::create_dir(&from).unwrap();
    // 134 MB of bf16, most of it in two tensors, and a matrix of 50 MB that is kept the other way round.
    let (vocab, dim, ffn) = (16384, 1024, 24576);
    let config = json!({
        "model_type": "gpt2", "vocab_size": vocab, "n_layer": 1, "n_embd": dim, "n_head": 8, "n_inner": ffn, "n_positions": 64,
    });
    std::fs::write(from.join("config.json"), config.to_string()).unwrap();
    let layer = [
        ("ln_1.weight", vec![dim]),
        ("ln_1.bias", vec![dim]),
        ("attn.c_attn.weight", vec![dim, 3 * dim]),
        ("attn.c_attn.bias", vec![3 * dim]),
        ("attn.c_proj.weight", vec![dim, dim]),
        ("attn.c_proj.bias", vec![dim]),
        ("ln_2.weight", vec![dim]),
        ("ln_2.bias", vec![dim]),
        ("mlp.c_fc.weight", vec![dim, ffn]),
        ("mlp.c_fc.bias", vec![ffn]),
        ("mlp.c_proj.weight", vec![ffn, dim]),
        ("mlp.c_proj.bias", vec![dim]),
    ];
    let mut tensors: Vec<(String, Vec<usize>)> =
        layer.into_iter().map(|(name, shape)| (format!("transformer.h.0.{name}"), shape)).collect();
    tensors.push(("transformer.wte.weight".into(), vec![vocab, dim]));
    tensors.push(("transformer.wpe.weight".into(), vec![64, dim]));
    tensors.push(("transformer.ln_f.weight".into(), vec![dim]));
    tensors.push(("transformer.ln_f.bias".into(), vec![dim]));
    let mut end = 0;
    let mut header = serde_json::Map::new();
    for (name, shape) in &tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        header.insert(name.clone(), json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, end] }));
    }
    let header = json!(header).to_string();
    let mut file = File::create(from.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let payload = file.stream_position().unwrap();
    // Zeros, and a one here and there.
    file.set_len(payload + end as u64).unwrap();
    for at in (0..end as u64).step_by(1 << 21) {
        file.seek(std::io::SeekFrom::Start(payload + at)).unwrap();
        file.write_all(&[0x80, 0x3f]).unwrap();
    }
    drop(file);

    let (grown, imported) = growth(|| import(&from, &run, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}")));
    assert!(imported.parameters > 70_000_000 && end > 140_000_000, "{}", imported.parameters);
    // A transposed matrix is there twice, in the type of its file.
    let matrix = 2 * dim * ffn;
    assert!(grown < 2 * matrix + 16 * MIB, "import took {grown} bytes");
    let options = ExportOptions { shard_bytes: 60_000_000, ..Default::default() };
    let (grown, _) = growth(|| export(&run, &out, options, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}")));
    // In f32 it is larger than a block.
    assert!(grown < 2 * 64 * MIB + 16 * MIB, "export took {grown} bytes");
    let again = dir.path().join("again");
    import(&out, &again, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"));
    let weights =
        |run: &std::path::Path| std::fs::read(run.join("checkpoints/step-00000000/model.safetensors")).unwrap();
    assert!(weights(&run) == weights(&again));
}
