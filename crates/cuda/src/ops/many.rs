//! Launches of one kernel for many tensors.

use crate::CudaError;
use crate::call::{Call, THREADS};
use crate::kernels::{Block, Value};

/// The first parameter of kernels that take several tensors, at most `MOST`: how many, the first block of each, and `WORDS` words of each.
pub struct Many<const WORDS: usize, const MOST: usize = 64> {
    blocks: usize,
    first: Vec<u32>,
    entries: Vec<[u64; WORDS]>,
}

impl<const WORDS: usize, const MOST: usize> Many<WORDS, MOST> {
    pub fn new() -> Self {
        Self { blocks: 0, first: Vec::new(), entries: Vec::new() }
    }

    pub fn push(&mut self, blocks: usize, entry: [u64; WORDS]) {
        self.first.push(self.blocks as u32);
        self.entries.push(entry);
        self.blocks += blocks;
    }

    pub fn is_full(&self) -> bool {
        self.entries.len() == MOST
    }

    /// As the kernels' struct: a count, then `MOST` numbers of 32 bits, padding, then the entries.
    fn words(&self) -> Vec<u64> {
        let mut numbers = vec![0u32; (1 + MOST).next_multiple_of(2)];
        numbers[0] = self.entries.len() as u32;
        numbers[1..].iter_mut().zip(&self.first).for_each(|(to, first)| *to = *first);
        let pairs = numbers.as_chunks::<2>().0.iter().map(|[low, high]| u64::from(*low) | u64::from(*high) << 32);
        let mut words: Vec<u64> = pairs.chain(self.entries.iter().flatten().copied()).collect();
        words.resize(numbers.len() / 2 + MOST * WORDS, 0);
        words
    }

    /// Queues a kernel for them, where there are any.
    ///
    /// # Safety
    /// The entries are those of the kernel's struct.
    pub unsafe fn launch(&mut self, call: Call, kernel: (&str, &str), args: &[Value]) -> Result<(), CudaError> {
        if self.entries.is_empty() {
            return Ok(());
        }
        let grid = [self.blocks, 1, 1];
        // SAFETY: the caller vouches.
        unsafe {
            let block = Block { threads: THREADS, shared: 0 };
            call.on().launch_with(kernel, grid, block, Some(&self.words()), args)?;
        }
        *self = Self::new();
        Ok(())
    }
}
