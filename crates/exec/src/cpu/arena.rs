//! The allocation of a program: its arena, followed by what is kept in the host's memory, which here is the same memory.

use std::alloc::{Layout, alloc_zeroed, dealloc};

/// Zeroed memory, aligned to cache lines.
pub struct Arena {
    base: *mut u8,
    layout: Layout,
    arena_bytes: u64,
    host_bytes: u64,
}

// SAFETY: the arena is plain memory that it alone owns.
unsafe impl Send for Arena {}

/// Alignment of the arena and of every buffer in it.
pub const ALIGNMENT: u64 = 64;

impl Arena {
    /// Allocates both, or returns `None` where the machine cannot.
    pub fn new(arena_bytes: u64, host_bytes: u64) -> Option<Self> {
        let size = usize::try_from(arena_bytes.checked_add(host_bytes)?).ok()?.max(1);
        let layout = Layout::from_size_align(size, ALIGNMENT as usize).ok()?;
        // SAFETY: the size is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        (!base.is_null()).then_some(Self { base, layout, arena_bytes, host_bytes })
    }

    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Bytes of the arena up to the last that is not zero. Nobody may write meanwhile.
    pub fn touched(&self) -> u64 {
        // SAFETY: the arena is initialised memory of this size.
        let bytes = unsafe { std::slice::from_raw_parts(self.base, self.arena_bytes as usize) };
        bytes.iter().rposition(|b| *b != 0).map_or(0, |last| last as u64 + 1)
    }

    /// Size of the arena in bytes.
    pub fn bytes(&self) -> u64 {
        self.arena_bytes
    }

    /// Bytes after it, of what is kept in the host's memory.
    pub fn host_bytes(&self) -> u64 {
        self.host_bytes
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`.
        unsafe { dealloc(self.base, self.layout) }
    }
}
