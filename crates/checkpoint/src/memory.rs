//! A checkpoint that is not on a disk: its files are bytes in memory, which ranks hold and send to each other.

use std::sync::Arc;

use crate::draft::PartRef;
use crate::error::{CheckpointError, Result};
use crate::load::{Bytes, FileBytes, HeldByMany, Loaded};
use crate::stored;
use crate::tensor_file::{Item, TensorFile, header_of, rank_file_name, read_header_of};
use std::path::Path;

/// What one rank has of a group, as a file that is in memory. Clones share the bytes.
#[derive(Debug, Clone)]
pub struct MemoryFile {
    /// The group.
    pub group: String,
    /// The rank.
    pub rank: usize,
    /// The contents, those of the file that [`Draft::write`](crate::Draft::write) would write.
    pub bytes: Arc<Vec<u8>>,
}

impl MemoryFile {
    /// The file of what `rank` has of a group; none where it has nothing.
    pub fn of(group: &str, rank: usize, parts: &[PartRef<'_>]) -> Result<Option<MemoryFile>> {
        if parts.is_empty() {
            return Ok(None);
        }
        let refused = |cause: String| CheckpointError::Memory { group: group.to_owned(), rank, cause };
        let file = TensorFile::new(parts.iter().map(Item::from).collect()).map_err(refused)?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(file.bytes() as usize).map_err(|e| refused(e.to_string()))?;
        file.write(&mut bytes, &mut |_| {}).map_err(|e| refused(e.to_string()))?;
        Ok(Some(MemoryFile { group: group.to_owned(), rank, bytes: Arc::new(bytes) }))
    }
}

impl MemoryFile {
    /// Its beginning, which says what is in it.
    pub fn header(&self) -> Result<&[u8]> {
        let Self { group, rank, bytes } = self;
        header_of(bytes).map_err(|cause| CheckpointError::Memory { group: group.clone(), rank: *rank, cause })
    }
}

/// A file that is in the memory of some process.
#[derive(Debug, Clone)]
pub struct HeldFile {
    /// The group.
    pub group: String,
    /// The rank that it is of.
    pub rank: usize,
    /// Its [beginning](MemoryFile::header).
    pub header: Vec<u8>,
    /// Its length.
    pub bytes: usize,
}

impl Loaded {
    /// The checkpoint of `step` that these files make up, with its state and attachments; `held` has their bytes, by their place in `files`. What
    /// the files leave out, or hold twice, is an error. `path` is where a checkpoint of the run is found on a disk, for messages.
    pub fn from_memory(
        (step, path): (u64, &Path),
        state: serde_json::Value,
        attachments: Vec<(String, Vec<u8>)>,
        files: &[HeldFile],
        held: Arc<dyn HeldByMany>,
    ) -> Result<Loaded> {
        let (mut kept, mut contents) = (Vec::with_capacity(files.len()), Vec::with_capacity(files.len()));
        for HeldFile { group, rank, header, bytes } in files {
            let refused = |cause: String| CheckpointError::Memory { group: group.clone(), rank: *rank, cause };
            contents.push((group.as_str(), read_header_of(header, *bytes).map_err(refused)?));
            let name = rank_file_name(group, *rank).unwrap_or_else(|| group.clone());
            kept.push(FileBytes { name, bytes: Bytes::Elsewhere });
        }
        let groups = stored::join(contents).map_err(|(file, cause)| CheckpointError::Memory {
            group: files[file].group.clone(),
            rank: files[file].rank,
            cause,
        })?;
        let attachment = |(name, bytes)| FileBytes { name, bytes: Bytes::Held(bytes) };
        let attachments = attachments.into_iter().map(attachment).collect();
        Ok(Loaded::assembled(step, path.to_owned(), state, (kept, attachments), groups).held_by(held))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Slice, TensorBytes};
    use lockstep_ir::DType;
    use serde_json::json;
    use std::ops::Range;

    fn file(rank: usize, from: usize, values: &[u32]) -> MemoryFile {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let part = PartRef {
            name: "a".into(),
            dtype: DType::U32,
            shape: vec![4],
            slices: vec![Slice { start: from, len: values.len(), stride: values.len(), count: 1 }],
            data: vec![TensorBytes::from(&bytes[..])],
        };
        MemoryFile::of("model", rank, &[part]).unwrap().unwrap()
    }

    /// All in this process.
    impl HeldByMany for Vec<MemoryFile> {
        fn read(&self, wanted: &[(usize, Range<usize>)]) -> Vec<Vec<u8>> {
            wanted.iter().map(|(file, range)| self[*file].bytes[range.clone()].to_vec()).collect()
        }
    }

    #[test]
    fn files_in_memory_are_a_checkpoint_if_they_make_up_every_tensor() {
        let load = |files: &[MemoryFile]| {
            let held = |file: &MemoryFile| HeldFile {
                group: file.group.clone(),
                rank: file.rank,
                header: file.header().unwrap().to_vec(),
                bytes: file.bytes.len(),
            };
            let held: Vec<_> = files.iter().map(held).collect();
            let attachments = vec![("t".into(), vec![9])];
            Loaded::from_memory((7, Path::new("run")), json!({ "x": 1 }), attachments, &held, Arc::new(files.to_vec()))
        };
        let loaded = load(&[file(0, 0, &[1, 2]), file(3, 2, &[3, 4])]).unwrap();
        let expected: Vec<u8> = [1u32, 2, 3, 4].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(&*loaded.tensor("model", "a").unwrap().bytes(), &expected[..]);
        assert_eq!((loaded.step, &loaded.state["x"], loaded.attachment("t")), (7, &json!(1), Some(&[9u8][..])));
        assert!(loaded.is_in_memory());
        let error = load(&[file(0, 0, &[1, 2]), file(3, 3, &[4])]).unwrap_err().to_string();
        assert!(error.contains("rank 0") && error.contains("3 of 4 elements"), "{error}");
        let error = load(&[file(0, 0, &[1, 2]), file(3, 1, &[2, 3, 4])]).unwrap_err().to_string();
        assert!(error.contains("rank 3") && error.contains("a second time"), "{error}");
        assert!(MemoryFile::of("model", 0, &[]).unwrap().is_none());
    }
}
