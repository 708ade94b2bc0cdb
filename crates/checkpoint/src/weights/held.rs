//! Tensors in memory: what was read of a folder that keeps them in another form.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::error::{CheckpointError, Result};

/// Tensors of f32 in memory, by name.
#[derive(Debug, Clone, Default)]
pub struct HeldTensors {
    path: PathBuf,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl HeldTensors {
    /// None yet, of a folder.
    pub fn of(path: &Path) -> Self {
        Self { path: path.to_owned(), tensors: BTreeMap::new() }
    }

    /// Adds a tensor: its dims, and as many elements as they say.
    pub fn put(&mut self, name: String, shape: Vec<usize>, elements: Vec<f32>) {
        debug_assert_eq!(shape.iter().product::<usize>(), elements.len(), "{name}");
        self.tensors.insert(name, (shape, elements));
    }

    /// The folder that they came from, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|(shape, _)| shape.as_slice())
    }

    pub(super) fn read(&self, name: &str, start: usize, bytes: &mut [u8]) -> Result<()> {
        let elements = self.tensors.get(name).and_then(|(_, elements)| elements.get(start..start + bytes.len() / 4));
        let missing = || CheckpointError::unfit(&self.path, format!("no tensor `{name}`"), "check the folder");
        for (to, element) in bytes.as_chunks_mut().0.iter_mut().zip(elements.ok_or_else(missing)?) {
            *to = element.to_le_bytes();
        }
        Ok(())
    }
}
