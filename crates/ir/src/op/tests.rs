use super::*;
use crate::{Axis, Dim, Section};

fn ty(dims: &[(Axis, usize)]) -> TensorType {
    TensorType::new(DType::F32, dims.iter().map(|&(a, n)| Dim::new(a, n)).collect::<Vec<_>>())
}

#[test]
fn linear_infers_its_output_and_counts_two_flops_per_product() {
    let x = ty(&[(Axis::Batch, 2), (Axis::Seq, 3), (Axis::Embed, 5)]);
    let w = ty(&[(Axis::Ffn, 7), (Axis::Embed, 5)]);
    let y = Op::Linear.infer(&[&x, &w]).unwrap();
    assert_eq!(y[0].to_string(), "f32[batch:2, seq:3, ffn:7]");
    assert_eq!(Op::Linear.flops(&[&x, &w], &[true]).unwrap().model, 2 * 2 * 3 * 5 * 7);
}

#[test]
fn a_dimension_with_another_meaning_is_refused_even_at_the_same_size() {
    let x = ty(&[(Axis::Batch, 2), (Axis::Seq, 3), (Axis::Ffn, 5)]);
    let w = ty(&[(Axis::Ffn, 7), (Axis::Embed, 5)]);
    let error = Op::Linear.infer(&[&x, &w]).unwrap_err();
    assert_eq!(error.to_string(), "linear: input `w` has embed:5 where `inputs` is ffn:5");
}

#[test]
fn leading_dimensions_may_be_any_and_are_the_same_in_all_operands() {
    let (t, s, h, k) = ((Axis::Batch, 6), (Axis::Seq, 3), (Axis::Heads, 2), (Axis::Embed, 5));
    let w = ty(&[(Axis::Ffn, 7), k]);
    for (leading, printed) in [
        (&[t][..], "f32[batch:6, ffn:7]"),
        (&[t, s], "f32[batch:6, seq:3, ffn:7]"),
        (&[t, s, h], "f32[batch:6, seq:3, heads:2, ffn:7]"),
    ] {
        let x = ty(&[leading, &[k]].concat());
        assert_eq!(Op::Linear.infer(&[&x, &w]).unwrap()[0].to_string(), printed);
        let rows: usize = leading.iter().map(|(_, n)| n).product();
        assert_eq!(Op::Linear.flops(&[&x, &w], &[true]).unwrap().model, 2 * 5 * 7 * rows as u128);
        let dims = Op::Linear.bind(&[&x, &w]).unwrap();
        assert_eq!(dims.size("batch") * dims.size("seq"), rows);
        let spec = Op::Linear.spec();
        for dim in 0..leading.len() {
            let split = spec.splits_of(&spec.inputs[0], x.dims.len(), dim)[0];
            assert_eq!((split, spec.outputs[0].dim_of(split, x.dims.len())), (Split::Leading(dim), Some(dim)));
        }
        let split = spec.splits_of(&spec.inputs[0], x.dims.len(), leading.len())[0];
        assert_eq!((split, spec.outputs[0].dim_of(split, x.dims.len())), (Split::Group("inputs"), None));
    }
    let (one, other) = (ty(&[t, s, k]), ty(&[s, k]));
    let error = Op::Add.infer(&[&one, &other]).unwrap_err();
    assert_eq!(error.to_string(), "add: input `b` is f32[seq:3, embed:5], of other leading dimensions");
    assert!(Op::Linear.infer(&[&ty(&[k]), &w]).is_err());
}

#[test]
fn a_cast_has_a_type_on_either_side_and_a_slice_the_sections_that_it_names() {
    let head = |axis, count| Section { axis, count, unit: 4 };
    let packed = Dim::packed([head(Axis::Heads, 6), head(Axis::KvHeads, 2), head(Axis::KvHeads, 2)]);
    let x = TensorType::new(DType::BF16, [Dim::new(Axis::Batch, 3), packed]);
    let cast = Op::Cast { to: DType::F32 }.infer(&[&x]).unwrap().remove(0);
    assert_eq!((cast.dtype, &cast.dims), (DType::F32, &x.dims));
    let error = Op::Cast { to: DType::U32 }.infer(&[&x]).unwrap_err();
    assert_eq!(error.to_string(), "cast: u32 is no floating-point type");
    let slice = |first, count| Op::Slice { first, count }.infer(&[&x]).map(|mut y| y.remove(0));
    let (q, kv) = (slice(0, 1).unwrap(), slice(1, 2).unwrap());
    assert_eq!(q.to_string(), "bf16[batch:3, heads:6×4]");
    assert_eq!(Op::Concat.infer(&[&q, &kv]).unwrap(), std::slice::from_ref(&x));
    assert_eq!(slice(2, 2).unwrap_err().to_string(), "slice: 2 sections from 2 on, of 3");
    assert!(slice(0, 0).is_err());
    assert!(Op::Concat.infer(&[&q, &cast]).is_err(), "of two types");
}

#[test]
fn attention_reads_heads_from_the_packed_dimension() {
    let head = |axis, count| Section { axis, count, unit: 4 };
    let packed = Dim::packed([head(Axis::Heads, 6), head(Axis::KvHeads, 2), head(Axis::KvHeads, 2)]);
    let qkv = TensorType::new(DType::F32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 8), packed]);
    let out = Op::Attention { window: None }.infer(&[&qkv]).unwrap();
    assert_eq!(out[0].to_string(), "f32[batch:1, seq:8, heads:6×4]");
    assert_eq!(out[1].to_string(), "f32[batch:1, heads:6, seq:8]");
    let flops = Op::Attention { window: None }.flops(&[&qkv], &[true, true]).unwrap();
    assert_eq!((flops.model, flops.causal), (4 * 8 * 8 * 24, 2 * 8 * 8 * 24));
    let windowed = |window| Op::Attention { window: Some(window) };
    let flops = |window| windowed(window).flops(&[&qkv], &[true, true]).unwrap();
    // Three positions of a triangle without its corner, and five of a whole window.
    let all = 4 * 24 * (8 * 3);
    assert_eq!(flops(3), Flops { model: all, causal: all - 2 * 24 * 3 * 3, hardware: all });
    assert_eq!(flops(8), flops(100));
    let starts = |seq| TensorType::new(DType::U32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, seq)]);
    assert_eq!(Op::Attention { window: None }.infer(&[&qkv, &starts(8)]).unwrap(), out);
    let error = Op::Attention { window: None }.infer(&[&qkv, &starts(7)]).unwrap_err();
    assert_eq!(error.to_string(), "attention: input `starts` has seq:7 where `seq` is seq:8");
}

#[test]
fn a_cache_must_hold_the_keys_and_values_of_the_packed_dimension() {
    let head = |axis, count| Section { axis, count, unit: 4 };
    let kv = head(Axis::KvHeads, 2);
    let act = |rows, dim| TensorType::new(DType::F32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, rows), dim]);
    let qkv = act(3, Dim::packed([head(Axis::Heads, 6), kv, kv]));
    let cache = act(16, Dim::packed([kv, kv]));
    let number = TensorType::new(DType::U32, [Dim::new(Axis::Batch, 1)]);
    let table = TensorType::new(DType::U32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 1)]);
    let attention = Op::CachedAttention { latent: false, window: None, apart: true };
    let out = attention.infer(&[&qkv, &cache, &table, &number, &number, &number]).unwrap();
    assert_eq!(out[0].to_string(), "f32[batch:1, seq:3, heads:6×4]");
    assert_eq!(out[1], cache);
    let flops = attention.flops(&[&qkv, &cache, &table, &number, &number, &number], &[true, true]).unwrap();
    assert_eq!(flops.hardware, 4 * 3 * 16 * 24);
    let refusal = |cache: TensorType| attention.infer(&[&qkv, &cache, &table, &number, &number, &number]).unwrap_err();
    let one_head = refusal(act(16, Dim::packed([head(Axis::KvHeads, 1), kv])));
    assert!(one_head.to_string().contains("the cache must hold"), "{one_head}");
    let short = refusal(act(2, Dim::packed([kv, kv])));
    assert_eq!(short.to_string(), "cached_attention: a text has room for 2 positions in the cache, 3 are new");
}

#[test]
fn norms_of_heads_have_a_weight_of_two_sections_and_a_deviation_per_head() {
    let head = |axis, count| Section { axis, count, unit: 4 };
    let packed = Dim::packed([head(Axis::Heads, 6), head(Axis::KvHeads, 2), head(Axis::KvHeads, 2)]);
    let qkv = TensorType::new(DType::F32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 8), packed]);
    let weight = |n| {
        let of_head = Section { axis: Axis::HeadDim, count: n, unit: 1 };
        TensorType::new(DType::F32, [Dim::packed([of_head, of_head])])
    };
    let norm = Op::QkNorm { plus_one: false, eps: 1e-6 };
    let out = norm.infer(&[&qkv, &weight(4)]).unwrap();
    assert_eq!((&out[0], out[1].to_string().as_str()), (&qkv, "f32[batch:1, seq:8, heads:6+kv_heads:2]"));
    let error = norm.infer(&[&qkv, &weight(3)]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "qk_norm: `weights` is head_dim:3+head_dim:3 where the heads ask for head_dim:4+head_dim:4"
    );
}

#[test]
fn weights_of_attention_are_of_every_query_and_key() {
    let head = |axis, count| Section { axis, count, unit: 4 };
    let packed = Dim::packed([head(Axis::Heads, 6), head(Axis::KvHeads, 2), head(Axis::KvHeads, 2)]);
    let qkv = TensorType::new(DType::F32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 8), packed]);
    let scores = Op::AttentionScores { window: None };
    let p = scores.infer(&[&qkv]).unwrap().remove(0);
    assert_eq!(p.to_string(), "f32[batch:1, heads:6, seq:8, seq:8]");
    let mix = Op::AttentionMix { window: None };
    assert_eq!(mix.infer(&[&p, &qkv]).unwrap()[0].to_string(), "f32[batch:1, seq:8, heads:6×4]");
    let whole = Op::Attention { window: None }.flops(&[&qkv], &[true, true]).unwrap();
    let naive = scores.flops(&[&qkv], &[true]).unwrap() + mix.flops(&[&p, &qkv], &[true]).unwrap();
    assert_eq!(naive, whole);
    let fewer = ty(&[(Axis::Batch, 1), (Axis::Heads, 5), (Axis::Seq, 8), (Axis::Seq, 8)]);
    let error = mix.infer(&[&fewer, &qkv]).unwrap_err();
    assert_eq!(error.to_string(), "attention_mix: `heads` is heads:5 where the heads ask for heads:6");
}

/// The types of a sample's inputs, and what the op makes of them.
fn inferred(sample: &Sample) -> (Vec<TensorType>, Vec<TensorType>) {
    let types = sample.types(DType::BF16, DType::F32);
    let outputs = sample.op.infer(&types.iter().collect::<Vec<_>>());
    let outputs = outputs.unwrap_or_else(|e| panic!("{:?} of {types:?}: {e}", sample.op));
    (types, outputs)
}

#[test]
fn every_op_has_samples_that_it_takes_with_each_optional_input_and_without() {
    let mut names = std::collections::BTreeSet::new();
    for (kind, spec) in OpKind::ALL.iter().flat_map(|kind| kind.rows().iter().map(move |row| (kind, row))) {
        assert!(names.insert(spec.name), "{} is the name of two ops", spec.name);
        let (one, three) = ((spec.samples)(1), (spec.samples)(3));
        assert!(!three.is_empty() && one.len() >= three.len(), "{}", spec.name);
        for (one, three) in one.iter().zip(&three) {
            assert_eq!(one.op, three.op);
            assert_eq!(one.inputs.len(), three.inputs.len(), "{}", spec.name);
        }
        for sample in one.iter().chain(&three) {
            assert_eq!((sample.op.kind(), sample.op.name()), (*kind, spec.name));
            if *kind != OpKind::Receive {
                inferred(sample);
            }
        }
        for count in spec.inputs.len() - spec.optional..spec.inputs.len() {
            assert!(three.iter().any(|s| s.inputs.len() == count), "{} with {count} inputs", spec.name);
        }
    }
}

#[test]
fn every_in_place_pair_names_operands_of_equal_type() {
    for sample in samples(2) {
        let spec = sample.op.spec();
        let (inputs, outputs) = if spec.in_place.is_empty() { continue } else { inferred(&sample) };
        for &(input, output) in spec.in_place {
            assert_eq!(inputs[input], outputs[output], "{}", spec.name);
        }
    }
}

#[test]
fn what_a_row_says_of_its_operands_is_there() {
    for spec in OpKind::ALL.iter().flat_map(|kind| kind.rows()) {
        let operands = || spec.inputs.iter().chain(spec.outputs);
        for split in spec.splits.iter().flat_map(|group| names(group)) {
            // Bound by a shape rule: heads that packed Q·K·V is of.
            let known = operands().any(|o| names(o.dims).any(|name| name == split));
            assert!(known || ["heads", "kv_heads"].contains(&split), "{} splits {split}", spec.name);
        }
        assert!(spec.same_over_tp.iter().all(|group| spec.splits.contains(group)), "{}", spec.name);
        for (i, group) in spec.splits.iter().enumerate() {
            // Rows of a chunk are of sequences and of their positions, and heads in parts of those and of a part.
            let parted = |name| name == "packed" && spec.splits.contains(&"packed parts");
            let before = |name| spec.splits[..i].iter().any(|other| names(other).any(|other| other == name));
            // Ranks have parts of one dimension or of another, and a number of each.
            let counted = |name| name == "counted" && group.ends_with(" counted");
            let again = |name| ![ROWS, ANY].contains(&name) && !parted(name) && !counted(name) && before(name);
            assert!(!names(group).any(again), "{} splits a dimension of {group} twice", spec.name);
        }
        for saved in spec.gradient_reads.unwrap_or_default() {
            match saved {
                Saved::Input(i) => assert!(*i < spec.inputs.len(), "{}", spec.name),
                Saved::Output(o) => assert!(*o < spec.outputs.len(), "{}", spec.name),
            }
        }
        let made = spec.cheap.iter().chain(spec.always_made).chain(&spec.sums);
        assert!(made.into_iter().all(|o| *o < spec.outputs.len()), "{}", spec.name);
        if let Some(sum) = spec.sums {
            // Sums of whole numbers are exact in f64.
            let sums = matches!(spec.outputs[sum].elem, Elem::Accumulator | Elem::Is(DType::F64));
            assert!(sums, "{}", spec.name);
        }
        assert!(spec.optional == 0 || !spec.variadic, "{}: which inputs are left out?", spec.name);
    }
}

/// Every file below a folder of sources.
fn files(folder: &std::path::Path, found: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        match entry.is_dir() {
            true => files(&entry, found),
            false => found.push(entry),
        }
    }
}

#[test]
fn rows_of_matmuls_say_what_enters_them() {
    for sample in samples(2).filter(|s| s.op.kind() != OpKind::Receive) {
        let (spec, (types, outputs)) = (sample.op.spec(), inferred(&sample));
        let call = Call { wanted: &vec![true; outputs.len()], sums: spec.sums.is_some() };
        let (cost, flops) = sample.op.cost(&types.iter().collect::<Vec<_>>(), &call).unwrap();
        let multiplies = matches!(cost, Cost::Matmul(_) | Cost::Attention { .. } | Cost::Scores);
        assert_eq!((multiplies, multiplies), (flops.hardware > 0, !spec.multiplies.is_empty()), "{}", spec.name);
        assert!(
            spec.multiplies.iter().all(|i| types[*i].dtype.is_float() || types[*i].dtype.is_fp8()),
            "{}",
            spec.name
        );
        if let Cost::Matmul(m) = cost {
            // Rows that do not come in equal shares round up.
            let (least, made) = (flops.hardware as u64, 2 * m.rows * m.cols * m.inner * m.calls);
            assert!(least <= made && made <= least * 3, "{}: {made} for {least}", spec.name);
        }
    }
}

#[test]
fn the_simulator_names_no_op() {
    let mut sources = Vec::new();
    files(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../sim/src"), &mut sources);
    for source in sources {
        let text = std::fs::read_to_string(&source).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap();
        let named = OpKind::ALL.iter().find(|kind| code.contains(&format!("Op::{kind:?}")));
        assert_eq!(named, None, "{}", source.display());
    }
}

#[test]
fn the_guide_lists_every_file_that_names_its_op() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let guide = std::fs::read_to_string(root.join("docs/adding-an-op.md")).unwrap();
    let (mut sources, mut naming) = (Vec::new(), std::collections::BTreeSet::new());
    for krate in std::fs::read_dir(root.join("crates")).unwrap() {
        for folder in ["src", "kernels"].map(|folder| krate.as_ref().unwrap().path().join(folder)) {
            if folder.is_dir() {
                files(&folder, &mut sources);
            }
        }
    }
    for source in sources {
        let path = source.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
        let text = std::fs::read_to_string(&source).unwrap();
        let names = ["Op::Cast", "OpKind::Cast", "Cast {", " CAST", "::CAST", "fn cast", "(cast"]
            .iter()
            .any(|name| text.contains(name));
        // This file, and who makes nodes of the op or takes them out.
        let users = [
            "compile/src/gradients/at.rs",
            "compile/src/gradients/mod.rs",
            "ir/src/op/tests.rs",
            "compile/src/passes/context.rs",
            "compile/src/passes/context/latent.rs",
            "compile/src/passes/experts.rs",
            "compile/src/passes/precision.rs",
            "model/src/decoder.rs",
            "model/src/mixture.rs",
        ];
        if names && !users.iter().any(|user| path == format!("crates/{user}")) {
            naming.insert(path);
        }
    }
    let example = guide.split("\n## ").find(|section| section.starts_with("A worked example")).unwrap();
    let listed: std::collections::BTreeSet<String> = example.lines().filter_map(item_file).map(str::to_owned).collect();
    assert_eq!(listed, naming);
    assert_eq!(listed.len(), 6);
}

/// The file that an item of a numbered list begins with.
fn item_file(line: &str) -> Option<&str> {
    let (number, rest) = line.split_once(". `")?;
    rest.split('`').next().filter(|file| number.parse::<u32>().is_ok() && file.starts_with("crates/"))
}

#[test]
fn the_code_of_the_guide_stands_in_the_files_that_it_names() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |file: &str| std::fs::read_to_string(root.join(file)).unwrap();
    // Line breaks and indents are those of rustfmt.
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let guide = read("docs/adding-an-op.md");
    let (mut file, mut code, mut blocks) = (String::new(), None::<String>, 0);
    for line in guide.lines() {
        if let Some(found) = item_file(line) {
            file = found.to_owned();
        }
        match (line.trim(), &mut code) {
            ("```rust", None) => code = Some(String::new()),
            ("```", Some(text)) => {
                assert!(words(&read(&file)).contains(&words(text)), "{file} has no\n{text}");
                (code, blocks) = (None, blocks + 1);
            }
            (_, Some(text)) => *text += &format!("{line}\n"),
            (_, None) => {}
        }
    }
    assert_eq!(blocks, 12);
}
