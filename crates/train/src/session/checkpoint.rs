//! The state of a session from a checkpoint, and into one: while steps wait, or in the background.

use super::Session;
use crate::Result;
use crate::checkpoint::rank_parts;
use crate::checkpoint::{SaveEnd, SaveRequest, Saver};
use lockstep_checkpoint::{About, Draft, Keep, Loaded, TensorCopy, TensorSource, require_space, save};
use lockstep_config::Config;
use lockstep_exec::ExecError;
use lockstep_infer::state::{self, Converted, Weights};
use lockstep_infer::{AdapterFolder, InferError, InitialWeights};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

impl Session {
    /// Replaces parameters and moments by a checkpoint's, of whatever layout, and says which are kept in another type now.
    pub fn restore(&mut self, checkpoint: &Loaded) -> Result<Vec<Converted>, InferError> {
        state::restore(&self.tensors, self.executor.as_mut(), checkpoint)
    }

    /// Gives every parameter its initial value again, and clears moments.
    pub(crate) fn restart(&mut self, seed: u64) -> Result<(), InferError> {
        state::load(&self.tensors, self.executor.as_mut(), Weights::Initial, seed)?;
        state::clear_moments(&self.tensors, self.executor.as_mut())
    }

    /// Replaces parameters by weights of another origin, as far as there are some.
    pub(crate) fn start_from(&mut self, weights: (TensorSource<'_>, &[TensorCopy])) -> Result<(), InferError> {
        state::start_from(&self.tensors, self.executor.as_mut(), weights)
    }

    /// The weights that a run begins with, and the adapters, where the config names some.
    pub(crate) fn begin_from(&mut self, config: &Config, weights: Option<&InitialWeights>) -> Result<(), InferError> {
        weights.map_or(Ok(()), |weights| self.start_from(weights.source()))?;
        AdapterFolder::open(config)?.map_or(Ok(()), |adapters| self.start_from(adapters.source()))
    }

    /// Takes host memory for a snapshot, so that checkpoints can be written [in the background](Session::begin_save). All processes
    /// do this together. Gives its bytes on this process.
    pub fn reserve_snapshot(&mut self) -> Result<u64> {
        let saver = Saver::new(self.executor.as_ref(), &self.tensors)?;
        let bytes = saver.snapshot_bytes();
        self.saver = Some(saver);
        Ok(bytes)
    }

    /// Bytes of host memory that this process has for a snapshot; none where checkpoints are not written in the background.
    pub fn snapshot_bytes(&self) -> Option<u64> {
        self.saver.as_ref().map(Saver::snapshot_bytes)
    }

    /// Copies parameters and moments, and has a thread write them. One save is under way at a time: what came of it is asked for
    /// with [`Session::poll_save`] or [`Session::wait_save`], by all processes at the same points. A session that is dropped finishes
    /// what it can finish alone.
    pub fn begin_save(&mut self, request: SaveRequest) -> Result<()> {
        let Some(saver) = &mut self.saver else {
            return Err(ExecError::Internal("no memory was reserved for a snapshot".into()).into());
        };
        saver.begin(self.executor.as_ref(), request, state::bytes_of(&self.tensors))
    }

    /// How the save under way ended, once it has.
    pub fn poll_save(&mut self) -> Result<Option<SaveEnd>> {
        self.saver.as_mut().map_or(Ok(None), |saver| saver.poll(self.executor.as_ref()))
    }

    /// Waits for the save under way, if there is one. `progress` hears the bytes written and the bytes in all, of this process.
    pub fn wait_save(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<Option<SaveEnd>> {
        self.saver.as_mut().map_or(Ok(None), |saver| saver.wait(self.executor.as_ref(), progress))
    }

    /// Writes parameters and moments as the checkpoint of `step` in `dir`, and gives its path. Several ranks write their parts
    /// at once; where they are processes, the first publishes the checkpoint when all have written. `progress` hears the bytes written and the bytes in all; `about` and `keep` are as for [`save`].
    pub fn save<'a>(
        &self,
        dir: &Path,
        step: u64,
        about: impl Into<About<'a>>,
        keep: impl Into<Keep>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<PathBuf> {
        if self.executor.process() == 0 {
            require_space(dir, state::bytes_of(&self.tensors))?;
        }
        match self.executor.mesh().ranks() {
            1 => {
                let groups = state::groups(&self.tensors, self.executor.as_ref());
                Ok(save(dir, step, &groups, about, keep, progress)?)
            }
            _ => self.save_parts(dir, step, about.into(), keep.into(), progress),
        }
    }

    fn save_parts(
        &self,
        dir: &Path,
        step: u64,
        about: About<'_>,
        keep: Keep,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<PathBuf> {
        let world = self.executor.as_ref();
        // Paths go between processes of one file system, as the system has them.
        let told = |path: &Path| world.exchange("save", path.as_os_str().as_encoded_bytes());
        let path = |all: Vec<Vec<u8>>| PathBuf::from(OsString::from_vec(all.into_iter().next().unwrap_or_default()));
        if world.process() > 0 {
            let draft = Draft::join(dir, step, &path(told(Path::new(""))?));
            draft.await_seen();
            world.exchange("save", &[])?;
            rank_parts::write(world, &self.tensors, &draft, progress)?;
            world.exchange("save", &draft.hand_over()?)?;
            return Ok(path(told(Path::new(""))?));
        }
        let draft = Draft::begin(dir, step)?;
        told(draft.folder())?;
        // A write that fails removes the folder: by then all have found it.
        world.exchange("save", &[])?;
        rank_parts::write(world, &self.tensors, &draft, progress)?;
        for handed_over in &world.exchange("save", &[])?[1..] {
            draft.take_over(handed_over)?;
        }
        let path = draft.publish(about, keep)?;
        told(&path)?;
        Ok(path)
    }
}
