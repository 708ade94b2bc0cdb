//! Checkpoints of several ranks: each writes what it has, and readers see whole tensors.

use super::*;
use lockstep_checkpoint::{Draft, PartRef, Slice, latest, open};
use lockstep_ir::Hint;
use lockstep_ir::counter;

/// A part of a tensor of `f32`, in one piece of bytes.
fn part<'a>(name: &str, shape: &[usize], slices: &[[usize; 4]], data: &'a [u8]) -> PartRef<'a> {
    let slices = slices.iter().map(|&slice| Slice::from(slice)).collect();
    PartRef { name: name.into(), dtype: DType::F32, shape: shape.into(), slices, data: vec![data.into()] }
}

/// A checkpoint of three ranks, whose every byte is `step`: the third has nothing.
fn save_parts(dir: &Path, step: u8) -> PathBuf {
    let bytes = [step; 48];
    let draft = Draft::begin(dir, step.into()).unwrap();
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (draft, bytes) = (&draft, &bytes);
            scope.spawn(move || {
                let mut model = Vec::new();
                if rank < 2 {
                    model.push(part("embed", &[2, 6], &[[rank * 3, 3, 6, 2]], &bytes[..24]));
                }
                if rank == 0 {
                    model.push(part("norm", &[3], &[[0, 3, 3, 1]], &bytes[..12]));
                }
                draft.write(rank, "model", &model, &mut |_| {}).unwrap();
            });
        }
    });
    draft.publish(&json!({ "position": step }), 5).unwrap()
}

#[test]
fn every_rank_that_has_something_has_a_file_and_the_tensors_are_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_parts(dir.path(), 7);
    assert_eq!(entries(dir.path()), ["step-00000007"]);
    assert_eq!(entries(&path), ["manifest.json", "model-00000.safetensors", "model-00001.safetensors"]);
    let loaded = open(&path).unwrap();
    assert_eq!(loaded.names("model").unwrap(), ["embed", "norm"]);
    let embed = loaded.tensor("model", "embed").unwrap();
    assert_eq!((embed.dtype, embed.shape, &embed.bytes()[..]), (DType::F32, &[2, 6][..], &[7; 48][..]));
    assert_eq!(loaded.state, json!({ "position": 7 }));
}

#[test]
fn processes_write_to_one_draft_and_the_first_publishes_it() {
    let [one, two] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let expected = save_parts(one.path(), 7);
    let bytes = [7; 48];
    let draft = Draft::begin(two.path(), 7).unwrap();
    let parts = |rank: usize| part("embed", &[2, 6], &[[rank * 3, 3, 6, 2]], &bytes[..24]);
    draft.write(0, "model", &[parts(0), part("norm", &[3], &[[0, 3, 3, 1]], &bytes[..12])], &mut |_| {}).unwrap();
    let other = Draft::join(two.path(), 7, draft.folder());
    other.write(1, "model", &[parts(1)], &mut |_| {}).unwrap();
    let handed_over = other.hand_over().unwrap();
    draft.take_over(&handed_over).unwrap();
    assert!(draft.take_over(b"nonsense").is_err());
    let path = draft.publish(&json!({ "position": 7 }), 5).unwrap();
    for file in entries(&expected) {
        assert_eq!(fs::read(expected.join(&file)).unwrap(), fs::read(path.join(&file)).unwrap(), "{file}");
    }
}

#[test]
fn a_process_that_gives_up_leaves_the_draft_to_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let draft = Draft::begin(dir.path(), 7).unwrap();
    drop(Draft::join(dir.path(), 7, draft.folder()));
    assert!(draft.folder().exists());
    drop(draft);
    assert_eq!(entries(dir.path()), [""; 0]);
}

/// What a rank has whole it writes under its own shape, for any reader of the format.
#[test]
fn the_files_are_standard_safetensors_and_deterministic() {
    let [one, two] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let read = |dir: &Path| fs::read(save_parts(dir, 7).join("model-00000.safetensors")).unwrap();
    let bytes = read(one.path());
    assert_eq!(bytes, read(two.path()));
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("norm").unwrap().shape(), [3]);
    assert_eq!(file.tensor("embed").unwrap().shape(), [6]);
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let parts = &metadata.metadata().as_ref().unwrap()["lockstep.parts"];
    assert_eq!(parts, r#"{"embed":{"shape":[2,6],"slices":[[0,3,6,2]]}}"#);
}

#[test]
fn a_torn_flipped_or_missing_file_of_one_rank_gives_the_checkpoint_before_it() {
    let dir = tempfile::tempdir().unwrap();
    save_parts(dir.path(), 1);
    let newest = save_parts(dir.path(), 2);
    let check = |expected: &str| {
        let found = latest(dir.path()).unwrap();
        assert_eq!(found.loaded.unwrap().step, 1);
        let [warning] = &found.warnings[..] else { panic!("{:?}", found.warnings) };
        assert_eq!(*warning, format!("checkpoint step 2 is damaged ({expected}); using step 1"));
    };
    for name in ["model-00000.safetensors", "model-00001.safetensors"] {
        let path = newest.join(name);
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            check(&format!("{name}: {length} bytes instead of {}", whole.len()));
        }
        for position in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[position] ^= 0x10;
            fs::write(&path, flipped).unwrap();
            check(&format!("{name}: checksum differs"));
        }
        fs::remove_file(&path).unwrap();
        check(&format!("{name}: missing"));
        fs::write(&path, whole).unwrap();
    }
    // A sound file of another step.
    let name = "model-00001.safetensors";
    fs::copy(dir.path().join("step-00000001").join(name), newest.join(name)).unwrap();
    check(&format!("{name}: checksum differs"));
}

#[test]
fn a_draft_that_is_not_published_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    save_parts(dir.path(), 1);
    let draft = Draft::begin(dir.path(), 2).unwrap();
    draft.write(0, "model", &[part("a", &[1], &[[0, 1, 1, 1]], &[0; 4])], &mut |_| {}).unwrap();
    drop(draft);
    assert_eq!(entries(dir.path()), ["step-00000001"]);
}

#[test]
fn parts_that_could_not_be_read_back_are_refused_before_the_checkpoint_exists() {
    let dir = tempfile::tempdir().unwrap();
    let check = |ranks: &[Vec<PartRef<'_>>], expected: &str| {
        let draft = Draft::begin(dir.path(), 3).unwrap();
        let write = |(rank, parts): (usize, &Vec<PartRef<'_>>)| draft.write(rank, "m", parts, &mut |_| {});
        let written: Result<(), _> = ranks.iter().enumerate().try_for_each(write);
        let error = written.and_then(|()| draft.publish(&json!({}), 1).map(|_| ())).unwrap_err();
        assert!(matches!(error, CheckpointError::Refused { .. }), "{error}");
        assert!(error.with_hint().contains(expected), "{error}");
        assert!(entries(dir.path()).is_empty());
    };
    let bytes = [0; 64];
    let a = |slices: &[[usize; 4]], count: usize| part("a", &[4, 2], slices, &bytes[..count * 4]);
    check(&[vec![a(&[[0, 4, 4, 1]], 4)]], "m-00000.safetensors: tensor `a`: its files have 4 of 8 elements");
    check(
        &[vec![a(&[[0, 8, 8, 1]], 8)], vec![a(&[[7, 1, 1, 1]], 1)]],
        "m-00001.safetensors: tensor `a`: element 7 is there a second time",
    );
    check(&[vec![a(&[[0, 8, 8, 1]], 7)]], "group `m` of rank 0: tensor `a` has 28 bytes");
    check(&[vec![a(&[[1, 8, 8, 1]], 8)]], "[1, 8, 8, 1] is no slice of 8 elements");
    check(&[vec![a(&[[0, 8, 8, 1]], 8), a(&[[0, 8, 8, 1]], 8)]], "tensor `a` is given twice");
}

/// Tensors cut at random places, dealt to ranks at random, come back whole.
#[test]
fn whatever_way_a_tensor_is_cut_it_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    for case in 0..60u64 {
        let draw =
            |i: usize, n: usize| (counter::bits(counter::key(11, "cuts"), case * 1000 + i as u64) % n as u64) as usize;
        let (rows, columns, ranks) = (1 + draw(0, 12), 1 + draw(1, 9), 1 + draw(2, 5));
        let whole: Vec<u8> = (0..rows * columns).flat_map(|i| (i as f32).to_le_bytes()).collect();
        // Each column belongs to a rank, but for the rows before `top`, which belong to the first.
        let top = draw(3, rows + 1);
        let owner = |row: usize, column: usize| if row < top { 0 } else { draw(10 + column, ranks) };
        let draft = Draft::begin(dir.path(), case).unwrap();
        let mut sum = 0;
        for rank in 0..ranks {
            let held = |i: &usize| owner(i / columns, i % columns) == rank;
            let mut positions: Vec<usize> = (0..rows * columns).filter(held).collect();
            if draw(4, 2) == 0 {
                positions.reverse();
            }
            let data = positions.iter().map(|&i| whole[i * 4..i * 4 + 4].into()).collect();
            let slices = Slice::of_runs(positions.iter().map(|&i| (i, 1)));
            let name = "a".to_owned();
            let parts = [PartRef { name, dtype: DType::F32, shape: vec![rows, columns], slices, data }];
            let parts = if positions.is_empty() { &parts[..0] } else { &parts[..] };
            draft.write(rank, "m", parts, &mut |bytes| sum += bytes).unwrap();
        }
        assert_eq!(sum, whole.len() as u64);
        let loaded = open(&draft.publish(&json!({}), 1).unwrap()).unwrap();
        let view = loaded.tensor("m", "a").unwrap();
        assert_eq!((view.shape, &*view.bytes()), (&[rows, columns][..], &*whole), "case {case}");
    }
}
