//! Copies of tensors to new files: a checkpoint, or safetensors shards for other programs.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use lockstep_ir::DType;
use safetensors::tensor::TensorInfo;
use serde_json::json;
use xxhash_rust::xxh3::Xxh3;

use super::convert::Float;
use super::{TensorCopy, TensorSource};
use crate::error::{AtPath, CheckpointError, Result};
use crate::manifest::{FileEntry, Manifest, WHOLE, checksum};
use crate::save::{About, TemporaryFolder, write_synced};
use crate::tensor_file;

/// Writes copies of tensors as the checkpoint of `step` in `dir`, which has one group and f32 elements, and gives its path. What is
/// infinite or no number is refused: no run could go on from it.
/// `about` is as for [`save`](crate::save). `progress` hears the bytes written and the bytes in all.
pub fn save_copies<'a>(
    dir: &Path,
    step: u64,
    group: &str,
    source: TensorSource,
    copies: &[TensorCopy],
    about: impl Into<About<'a>>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PathBuf> {
    let refused = |cause: String| CheckpointError::Refused { dir: dir.to_owned(), step, cause };
    let name = tensor_file::file_name(group).ok_or_else(|| refused(format!("no group can be named {group:?}")))?;
    let shard = Shard::new(copies, DType::F32, None).map_err(refused)?;
    let temporary = TemporaryFolder::create(dir, step)?;
    let total = shard.bytes();
    let mut done = 0;
    let xxh3_128 = shard.write(&temporary.path.join(&name), source, true, &mut |bytes| {
        done += bytes;
        progress(done, total);
    })?;
    let files = vec![FileEntry { name, bytes: total, xxh3_128 }];
    let About { state, attachments } = about.into();
    let attachments = temporary.attach(attachments)?;
    temporary.finish(dir, &Manifest { format: WHOLE, step, files, attachments, state: state.clone() }, &1.into())
}

/// Writes copies of tensors to `folder` as one file of safetensors of this name, or, beyond `most` bytes, as shards with an index: as other
/// programs read them. Elements become `dtype`, f32 or bf16, but for exact tensors. `progress` hears the bytes written and the bytes in all.
pub fn export(
    folder: &Path,
    (source, name): (TensorSource, &str),
    copies: &[TensorCopy],
    dtype: DType,
    most: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let refused = |cause: String| CheckpointError::unfit(folder, cause, "this is a mistake in lockstep");
    let mut copies = copies.to_vec();
    copies.sort_by(|a, b| a.to.cmp(&b.to));
    let mut shares: Vec<&[TensorCopy]> = Vec::new();
    let mut rest = copies.as_slice();
    while !rest.is_empty() {
        let mut bytes = 0;
        let fitting = rest.iter().take_while(|copy| {
            bytes += bytes_of(copy, dtype).unwrap_or(0);
            bytes <= most
        });
        let (share, others) = rest.split_at(fitting.count().max(1));
        shares.push(share);
        rest = others;
    }
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let shards: Result<Vec<_>, _> = shares.iter().map(|s| Shard::new(s, dtype, Some(format.clone()))).collect();
    let shards = shards.map_err(refused)?;
    let total = shards.iter().map(Shard::bytes).sum();
    let count = shards.len();
    let file = |i: usize| match count {
        1 => format!("{name}.safetensors"),
        _ => format!("{name}-{:05}-of-{count:05}.safetensors", i + 1),
    };
    let mut done = 0;
    for (i, shard) in shards.iter().enumerate() {
        shard.write(&folder.join(file(i)), source, false, &mut |bytes| {
            done += bytes;
            progress(done, total);
        })?;
    }
    if count > 1 {
        let in_file =
            |(i, share): (usize, &&[TensorCopy])| share.iter().map(move |copy| (copy.to.clone(), i)).collect();
        let map: Vec<Vec<(String, usize)>> = shares.iter().enumerate().map(in_file).collect();
        let map: serde_json::Map<_, _> = map.into_iter().flatten().map(|(to, i)| (to, json!(file(i)))).collect();
        let size: u64 = shards.iter().map(|shard| shard.payload).sum();
        let index = json!({ "metadata": { "total_size": size }, "weight_map": map });
        let path = folder.join(format!("{name}.safetensors.index.json"));
        write_synced(&path, |to| to.write_all(format!("{index:#}\n").as_bytes()))?;
    }
    Ok(())
}

/// A file that is laid out and not yet written.
struct Shard<'a> {
    front: Vec<u8>,
    copies: Vec<&'a TensorCopy>,
    dtype: DType,
    payload: u64,
}

impl<'a> Shard<'a> {
    /// Orders the tensors, wider types first as safetensors does, by name, and builds the header.
    fn new(
        copies: &'a [TensorCopy],
        dtype: DType,
        metadata: Option<HashMap<String, String>>,
    ) -> Result<Shard<'a>, String> {
        let mut copies: Vec<&TensorCopy> = copies.iter().collect();
        let width = |copy: &TensorCopy| copy.dtype(dtype).bytes();
        copies.sort_by(|a, b| width(b).cmp(&width(a)).then(a.to.cmp(&b.to)));
        if let Some(pair) = copies.windows(2).find(|pair| pair[0].to == pair[1].to) {
            return Err(format!("tensor `{}` is given twice", pair[0].to));
        }
        let mut end = 0u64;
        let mut infos = Vec::with_capacity(copies.len());
        for copy in &copies {
            let start = end;
            let bytes = bytes_of(copy, dtype).ok_or_else(|| format!("tensor `{}` is too large", copy.to))?;
            end = start.checked_add(bytes).ok_or("the tensors are too large together")?;
            let data_offsets = (start as usize, end as usize);
            let dtype = tensor_file::file_dtype(copy.dtype(dtype)).0;
            let info = TensorInfo { dtype, shape: copy.shape.clone(), data_offsets };
            infos.push((copy.to.clone(), info));
        }
        Ok(Shard { front: tensor_file::front(metadata, infos)?, copies, dtype, payload: end })
    }

    fn bytes(&self) -> u64 {
        self.front.len() as u64 + self.payload
    }

    /// Writes the file, makes it durable, and gives its checksum. Where elements are f32, what is not finite may be refused.
    fn write(
        &self,
        path: &Path,
        source: TensorSource,
        only_finite: bool,
        wrote: &mut dyn FnMut(u64),
    ) -> Result<String> {
        let mut file = File::create_new(path).at("create", path)?;
        let mut hasher = Xxh3::new();
        let mut put = |bytes: &[u8]| {
            file.write_all(bytes).at("write", path)?;
            hasher.update(bytes);
            wrote(bytes.len() as u64);
            Ok(())
        };
        put(&self.front)?;
        for copy in &self.copies {
            source.stream(copy, copy.dtype(self.dtype), &mut |bytes| {
                if only_finite && !Float::F32.all_finite(bytes) {
                    let cause = format!("tensor `{}` has a number that is not finite", copy.from);
                    return Err(CheckpointError::unfit(
                        source.path(),
                        cause,
                        "save the model again from before it diverged",
                    ));
                }
                put(bytes)
            })?;
        }
        file.sync_all().at("sync", path)?;
        Ok(checksum(hasher.digest128()))
    }
}

fn bytes_of(copy: &TensorCopy, dtype: DType) -> Option<u64> {
    Some(copy.elements()? as u64 * copy.dtype(dtype).bytes() as u64)
}
