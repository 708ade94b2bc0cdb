//! A world of one rank.

use super::World;
use crate::initial::Initial;
use crate::{ExecError, Executor, Note, Taken, Ticket, Timing};
use lockstep_ir::{Coordinates, DType, StepProgram};
use std::borrow::Cow;
use std::ops::Range;

/// One rank, whose parts are the whole tensors.
pub struct Alone {
    executor: Box<dyn Executor>,
    program: StepProgram,
}

impl Alone {
    /// The world of an executor that has loaded this program of one rank.
    pub fn new(executor: Box<dyn Executor>, program: StepProgram) -> Self {
        Self { executor, program }
    }
}

impl World for Alone {
    fn programs(&self) -> &[StepProgram] {
        std::slice::from_ref(&self.program)
    }

    fn each_rank(
        &self,
        f: &(dyn Fn(Coordinates, &dyn Executor) + Sync),
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExecError> {
        f(Coordinates::default(), self.executor.as_ref());
        meanwhile();
        Ok(())
    }
}

impl Executor for Alone {
    fn arena_bytes(&self) -> u64 {
        self.executor.arena_bytes()
    }

    fn host_bytes(&self) -> u64 {
        self.executor.host_bytes()
    }

    fn write(&mut self, tensor: &str, micro_batch: usize, data: &[u8]) -> Result<(), ExecError> {
        self.executor.write(tensor, micro_batch, data)
    }

    fn fill(&mut self, tensors: &[(&str, DType)], values: &Initial) -> Result<(), ExecError> {
        self.executor.fill(tensors, values)
    }

    fn read(&self, tensor: &str, micro_batch: usize) -> Result<Cow<'_, [u8]>, ExecError> {
        self.executor.read(tensor, micro_batch)
    }

    fn read_all(&self, tensors: &[&str], take: &mut dyn FnMut(usize, usize, &[u8])) -> Result<(), ExecError> {
        self.executor.read_all(tensors, take)
    }

    fn read_range(&self, tensor: &str, micro_batch: usize, range: Range<usize>) -> Result<Cow<'_, [u8]>, ExecError> {
        self.executor.read_range(tensor, micro_batch, range)
    }

    fn run(&mut self, entry: &str) -> Result<(), ExecError> {
        self.executor.run(entry)
    }

    fn read_later(&mut self, tensors: &[(String, usize)]) -> Result<Option<Ticket>, ExecError> {
        self.executor.read_later(tensors)
    }

    fn take(&mut self, ticket: Ticket) -> Result<Taken, ExecError> {
        self.executor.take(ticket)
    }

    fn pass(&mut self, from: &str, to: &str) -> Result<(), ExecError> {
        self.executor.pass(from, to)
    }

    fn profile(&mut self, entry: &str) -> Result<Vec<Timing>, ExecError> {
        self.executor.profile(entry)
    }

    fn check_numbers(&mut self) -> bool {
        self.executor.check_numbers()
    }

    fn touched_bytes(&self) -> Option<u64> {
        self.executor.touched_bytes()
    }

    fn notes(&self) -> &[Note] {
        self.executor.notes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::Mesh;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Counts what is passed on the device.
    struct Device(Arc<AtomicUsize>);

    impl Executor for Device {
        fn arena_bytes(&self) -> u64 {
            0
        }

        fn host_bytes(&self) -> u64 {
            0
        }

        fn write(&mut self, _: &str, _: usize, _: &[u8]) -> Result<(), ExecError> {
            Err(ExecError::Internal("the host writes".into()))
        }

        fn read(&self, _: &str, _: usize) -> Result<Cow<'_, [u8]>, ExecError> {
            Err(ExecError::Internal("the host reads".into()))
        }

        fn run(&mut self, _: &str) -> Result<(), ExecError> {
            Ok(())
        }

        fn pass(&mut self, _: &str, _: &str) -> Result<(), ExecError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }

        fn profile(&mut self, _: &str) -> Result<Vec<Timing>, ExecError> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn what_an_executor_passes_on_its_device_does_not_come_by_way_of_the_host() {
        let passed = Arc::new(AtomicUsize::new(0));
        let program = StepProgram {
            mesh: Mesh::ONE,
            stage: 0,
            arena_bytes: 0,
            host_bytes: 0,
            regions: vec![],
            buffers: vec![],
            values: vec![],
            tensors: vec![],
            segments: vec![],
            entries: vec![],
        };
        let mut alone = Alone::new(Box::new(Device(passed.clone())), program);
        alone.pass("next_token", "tokens").unwrap();
        assert_eq!(passed.load(Ordering::Relaxed), 1);
    }
}
