//! Memory of a rank under test.

use crate::comm::{Memory, Subject};

/// Memory with a margin that nobody may write to.
pub(super) struct Buffer {
    memory: Box<dyn Memory>,
    bytes: usize,
}

impl Buffer {
    const MARGIN: u8 = 0xa5;

    pub fn new(subject: &Subject, bytes: usize) -> Self {
        let all = (bytes.div_ceil(8) + 8) * 8;
        let mut memory = subject.memory(all);
        memory.write(0, &vec![Self::MARGIN; all]);
        Self { memory, bytes }
    }

    pub fn pointer(&mut self) -> *mut u8 {
        self.memory.pointer()
    }

    pub fn write(&mut self, at: usize, data: &[u8]) {
        self.memory.write(at, data);
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.memory.read();
        bytes.truncate(self.bytes);
        bytes
    }

    pub fn intact(&self) -> bool {
        self.memory.read()[self.bytes..].iter().all(|&byte| byte == Self::MARGIN)
    }
}
