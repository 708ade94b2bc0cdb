//! Bytes to be saved, wherever they are.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// What takes a chunk of bytes.
pub type Take<'t> = &'t mut dyn FnMut(&[u8]) -> io::Result<()>;

type Give<'a> = Arc<dyn Fn(Range<usize>, Take<'_>) -> io::Result<()> + 'a>;

/// Bytes that are asked for a chunk at a time, so that those of a device need not be in memory together.
#[derive(Clone)]
pub struct TensorBytes<'a> {
    count: usize,
    give: Give<'a>,
}

impl<'a> TensorBytes<'a> {
    /// This many bytes; `give` hands any range of them over.
    pub fn new(count: usize, give: impl Fn(Range<usize>, Take<'_>) -> io::Result<()> + 'a) -> Self {
        Self { count, give: Arc::new(give) }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Hands all over, in order, at most `most` at a time.
    pub fn chunks(&self, most: usize, take: Take<'_>) -> io::Result<()> {
        let end = |start: usize| self.count.min(start + most);
        (0..self.count).step_by(most).try_for_each(|start| (self.give)(start..end(start), take))
    }
}

impl<'a> From<&'a [u8]> for TensorBytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::new(bytes.len(), move |range, take| take(&bytes[range]))
    }
}

impl From<Vec<u8>> for TensorBytes<'_> {
    fn from(bytes: Vec<u8>) -> Self {
        Self::new(bytes.len(), move |range, take| take(&bytes[range]))
    }
}

impl fmt::Debug for TensorBytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.count)
    }
}
