//! What goes in comes out, and other readers of the format agree.

use super::*;
use lockstep_checkpoint::{latest, open};
use lockstep_ir::Hint;
use safetensors::{Dtype, SafeTensors};

#[test]
fn every_type_and_shape_comes_back_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = |n: usize| (0..n).map(|i| (i * 37 + 11) as u8).collect::<Vec<_>>();
    let tensors = vec![
        tensor("weights", DType::F32, &[3, 5], bytes(60)),
        tensor("loss", DType::F64, &[], bytes(8)),
        tensor("tokens", DType::U32, &[7], bytes(28)),
        tensor("a sum", DType::Fixed64, &[2, 1, 2], bytes(32)),
        tensor("empty", DType::F32, &[0, 4], Vec::new()),
        tensor("a \"quoted\"\nnamé", DType::U32, &[1], bytes(4)),
    ];
    let state = json!({"data": {"epoch": 2, "sample": 12345}, "lr": 0.1 + 0.2, "config": "a = 1\n"});
    let groups =
        [TensorGroup { name: "all", tensors: tensors.clone() }, TensorGroup { name: "none", tensors: Vec::new() }];
    let path = save(dir.path(), 100, &groups, &state, 3, &mut |_, _| {}).unwrap();
    assert_eq!(path, dir.path().join("step-00000100"));
    assert_eq!(entries(&path), ["all.safetensors", "manifest.json", "none.safetensors"]);

    let found = latest(dir.path()).unwrap();
    assert!(found.warnings.is_empty());
    let loaded = found.loaded.unwrap();
    assert_eq!((loaded.step, &loaded.path, &loaded.state), (100, &path, &state));
    for saved in &tensors {
        let view = loaded.tensor("all", &saved.name).unwrap();
        let mut data = Vec::new();
        let mut take = |chunk: &[u8]| {
            data.extend_from_slice(chunk);
            Ok(())
        };
        saved.data.chunks(5, &mut take).unwrap();
        assert_eq!((view.dtype, view.shape, &*view.bytes()), (saved.dtype, &*saved.shape, &*data));
    }
    let names = ["a \"quoted\"\nnamé", "a sum", "empty", "loss", "tokens", "weights"];
    assert_eq!(loaded.names("all").unwrap(), names);
    assert!(loaded.names("none").unwrap().is_empty());
}

#[test]
fn the_files_are_standard_safetensors() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = vec![
        tensor("w", DType::F32, &[2, 2], (0..16).collect()),
        tensor("s", DType::Fixed64, &[1], vec![9; 8]),
        tensor("t", DType::U32, &[1], vec![8; 4]),
        tensor("d", DType::F64, &[1], vec![7; 8]),
    ];
    let path = save(dir.path(), 1, &[TensorGroup { name: "model", tensors }], &json!({}), 1, &mut |_, _| {}).unwrap();

    let bytes = fs::read(path.join("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert_eq!((header % 8, bytes[8]), (0, b'{'));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let w = file.tensor("w").unwrap();
    assert_eq!((w.dtype(), w.shape(), w.data()), (Dtype::F32, [2, 2].as_slice(), &*(0..16).collect::<Vec<u8>>()));
    assert_eq!(file.tensor("s").unwrap().dtype(), Dtype::I64);
    assert_eq!(file.tensor("t").unwrap().dtype(), Dtype::U32);
    assert_eq!(file.tensor("d").unwrap().dtype(), Dtype::F64);
}

#[test]
fn the_same_content_gives_the_same_bytes_in_whatever_order_it_is_given() {
    let dir = tempfile::tempdir().unwrap();
    let a = || tensor("a", DType::U32, &[1], vec![1; 4]);
    let b = || tensor("b", DType::U32, &[1], vec![2; 4]);
    let one = [TensorGroup { name: "x", tensors: vec![a(), b()] }, TensorGroup { name: "y", tensors: vec![a()] }];
    let other = [TensorGroup { name: "y", tensors: vec![a()] }, TensorGroup { name: "x", tensors: vec![b(), a()] }];
    let read = |path: PathBuf| entries(&path).iter().map(|name| fs::read(path.join(name)).unwrap()).collect::<Vec<_>>();
    let first = read(save(dir.path(), 5, &one, &json!({}), 1, &mut |_, _| {}).unwrap());
    let second = read(save(dir.path(), 5, &other, &json!({}), 1, &mut |_, _| {}).unwrap());
    assert_eq!(first, second);
}

#[test]
fn progress_counts_every_byte_in_small_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let data = vec![3; 5 << 19];
    let tensors = vec![TensorRef {
        name: "big".into(),
        dtype: DType::U32,
        shape: vec![data.len() / 4],
        data: data.as_slice().into(),
    }];
    let mut reports = vec![(0, 0)];
    let path = save(dir.path(), 1, &[TensorGroup { name: "model", tensors }], &json!({}), 1, &mut |done, total| {
        reports.push((done, total));
    });
    let bytes = fs::metadata(path.unwrap().join("model.safetensors")).unwrap().len();
    assert!(reports.windows(2).all(|pair| pair[1].0 > pair[0].0 && pair[1].0 - pair[0].0 <= 1 << 20));
    assert!(reports[1..].iter().all(|&(_, total)| total == bytes));
    assert_eq!(reports.last(), Some(&(bytes, bytes)));
}

#[test]
fn a_checkpoint_can_be_opened_from_a_folder_of_another_name() {
    let dir = tempfile::tempdir().unwrap();
    let best = dir.path().join("best");
    fs::rename(save_small(dir.path(), 7, 1).unwrap(), &best).unwrap();
    assert_eq!(open(&best).unwrap().step, 7);
}

#[test]
fn a_loaded_checkpoint_survives_its_removal() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 1, 1).unwrap();
    let loaded = latest(dir.path()).unwrap().loaded.unwrap();
    save_small(dir.path(), 2, 1).unwrap();
    assert_eq!(entries(dir.path()), ["step-00000002"]);
    assert_eq!(loaded.tensor("model", "embed").unwrap().bytes()[..], [1; 24]);
}

#[test]
fn what_a_checkpoint_lacks_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let loaded = open(&save_small(dir.path(), 1, 1).unwrap()).unwrap();
    let error = loaded.tensor("model", "head").unwrap_err().with_hint();
    assert!(error.ends_with(
        "step-00000001 holds no tensor `head` in group `model`\nhint: group `model` has 2 tensors of other names"
    ));
    let error = loaded.names("ema").unwrap_err().with_hint();
    assert!(error.ends_with("holds no group `ema`\nhint: its groups are: model, optimizer"), "{error}");
}

/// Saving `groups` must be refused for `expected`, before anything is written.
fn check_refused(groups: &[TensorGroup<'_>], expected: &str) {
    let dir = tempfile::tempdir().unwrap();
    let checkpoints = dir.path().join("checkpoints");
    let error = save(&checkpoints, 3, groups, &json!({}), 1, &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, CheckpointError::Refused { .. }));
    assert!(error.with_hint().contains(expected), "{error}");
    assert!(!checkpoints.exists());
}

#[test]
fn requests_that_could_not_be_read_back_are_refused() {
    let group = |name, tensors| TensorGroup { name, tensors };
    let scalar = |name| tensor(name, DType::F32, &[], vec![0; 4]);
    check_refused(&[group("a/b", vec![])], "group name \"a/b\"");
    check_refused(&[group("", vec![])], "group name \"\"");
    check_refused(&[group("m", vec![]), group("m", vec![])], "two groups would be written to m.safetensors");
    check_refused(&[group("m", vec![scalar("x"), scalar("x")])], "tensor `x` is given twice");
    check_refused(&[group("m", vec![scalar("__metadata__")])], "reserved");
    check_refused(
        &[group("m", vec![tensor("x", DType::F32, &[2], vec![0; 7])])],
        "group `m`: tensor `x` has 7 bytes, which is not f32 [2]",
    );
    check_refused(
        &[group("m", vec![tensor("x", DType::F32, &[usize::MAX, 2], vec![0; 8])])],
        "[18446744073709551615, 2] is too large",
    );
}
