//! The one allocation of a program.

use std::alloc::{Layout, alloc_zeroed, dealloc};

/// Zeroed memory, aligned to cache lines.
pub struct Arena {
    base: *mut u8,
    layout: Layout,
}

// SAFETY: the arena is plain memory that it alone owns.
unsafe impl Send for Arena {}

/// Alignment of the arena and of every buffer in it.
pub const ALIGNMENT: u64 = 64;

impl Arena {
    /// Allocates `bytes`, or returns `None` where the machine cannot.
    pub fn new(bytes: u64) -> Option<Self> {
        let size = usize::try_from(bytes).ok()?.max(1);
        let layout = Layout::from_size_align(size, ALIGNMENT as usize).ok()?;
        // SAFETY: the size is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        (!base.is_null()).then_some(Self { base, layout })
    }

    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Bytes up to the last that is not zero. Nobody may write meanwhile.
    pub fn touched(&self) -> u64 {
        // SAFETY: the arena is initialised memory of this size.
        let bytes = unsafe { std::slice::from_raw_parts(self.base, self.layout.size()) };
        bytes.iter().rposition(|b| *b != 0).map_or(0, |last| last as u64 + 1)
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.layout.size() as u64
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`.
        unsafe { dealloc(self.base, self.layout) }
    }
}
