//! Memory of the host for bytes of tensors.

/// Bytes whose start is aligned for every type of element.
#[derive(Default)]
pub struct Buffer {
    words: Vec<u64>,
    bytes: usize,
}

impl Buffer {
    /// Makes it hold this many bytes, of any value.
    pub fn resize(&mut self, bytes: usize) {
        if self.room() < bytes {
            self.words.resize(bytes.div_ceil(8), 0);
        }
        self.bytes = bytes;
    }

    /// The same where the system may not have the memory.
    pub fn try_resize(&mut self, bytes: usize) -> bool {
        let more = bytes.div_ceil(8).saturating_sub(self.words.len());
        if self.words.try_reserve_exact(more).is_err() {
            return false;
        }
        self.resize(bytes);
        true
    }

    /// Bytes that it can have without more memory.
    pub fn room(&self) -> usize {
        self.words.len() * 8
    }

    /// Where it starts.
    pub fn pointer(&self) -> *mut u8 {
        self.words.as_ptr().cast_mut().cast()
    }

    pub fn clear(&mut self) {
        self.bytes = 0;
    }

    /// Goes on at the next multiple of 8.
    pub fn align(&mut self) {
        self.resize(self.bytes.next_multiple_of(8));
    }

    pub fn push(&mut self, data: &[u8]) {
        // SAFETY: a slice is valid.
        unsafe { self.push_from(data.as_ptr(), data.len()) }
    }

    /// Appends bytes.
    ///
    /// # Safety
    /// `data` is valid for `bytes` bytes, or there are none.
    pub unsafe fn push_from(&mut self, data: *const u8, bytes: usize) {
        let at = self.bytes;
        self.resize(at + bytes);
        if bytes > 0 {
            // SAFETY: the caller vouches for the data; the rest of the buffer has room for them.
            unsafe { std::ptr::copy_nonoverlapping(data, self.words.as_mut_ptr().cast::<u8>().add(at), bytes) };
        }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `resize` keeps the words as many as the bytes need; every bit pattern is a byte.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; every byte is part of a bit pattern of a word.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.bytes) }
    }
}
