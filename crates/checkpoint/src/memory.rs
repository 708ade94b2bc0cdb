//! A checkpoint that is not on a disk: its files are bytes in memory, which ranks hold and send to each other.

use std::sync::Arc;

use crate::draft::PartRef;
use crate::error::{CheckpointError, Result};
use crate::load::{Bytes, FileBytes, Loaded};
use crate::stored;
use crate::tensor_file::{Item, TensorFile, rank_file_name, read_header};
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

impl Loaded {
    /// The checkpoint of `step` that these files make up, with its state and attachments. What the files leave out, or hold twice, is an
    /// error. `path` is where a checkpoint of the run is found on a disk, for messages.
    pub fn from_memory(
        step: u64,
        path: &Path,
        state: serde_json::Value,
        attachments: Vec<(String, Vec<u8>)>,
        files: &[MemoryFile],
    ) -> Result<Loaded> {
        let (mut kept, mut contents) = (Vec::with_capacity(files.len()), Vec::with_capacity(files.len()));
        for MemoryFile { group, rank, bytes } in files {
            let refused = |cause: String| CheckpointError::Memory { group: group.clone(), rank: *rank, cause };
            contents.push((group.as_str(), read_header(bytes).map_err(refused)?));
            kept.push(FileBytes {
                name: rank_file_name(group, *rank).unwrap_or_else(|| group.clone()),
                bytes: Bytes::Held(bytes.clone()),
            });
        }
        let groups = stored::join(contents).map_err(|(file, cause)| CheckpointError::Memory {
            group: files[file].group.clone(),
            rank: files[file].rank,
            cause,
        })?;
        let attachments = attachments
            .into_iter()
            .map(|(name, bytes)| FileBytes { name, bytes: Bytes::Held(Arc::new(bytes)) })
            .collect();
        Ok(Loaded::assembled(step, path.to_owned(), state, (kept, attachments), groups))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Slice, TensorBytes};
    use lockstep_ir::DType;
    use serde_json::json;

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

    #[test]
    fn files_in_memory_are_a_checkpoint_if_they_make_up_every_tensor() {
        let load = |files: &[MemoryFile]| {
            Loaded::from_memory(7, Path::new("run"), json!({ "x": 1 }), vec![("t".into(), vec![9])], files)
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
