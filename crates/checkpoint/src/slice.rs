//! Which elements of a tensor a part of it holds.

use serde::{Deserialize, Serialize};

/// `count` runs of `len` elements each, `stride` elements from start to start; the first begins at element `start` of the
/// whole tensor in row-major order. Files write it as `[start, len, stride, count]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "[usize; 4]", into = "[usize; 4]")]
pub struct Slice {
    /// Where the first run begins.
    pub start: usize,
    /// Elements of a run.
    pub len: usize,
    /// From the start of a run to the start of the next; at least `len`.
    pub stride: usize,
    /// How many runs.
    pub count: usize,
}

impl From<[usize; 4]> for Slice {
    fn from([start, len, stride, count]: [usize; 4]) -> Slice {
        Slice { start, len, stride, count }
    }
}

impl From<Slice> for [usize; 4] {
    fn from(Slice { start, len, stride, count }: Slice) -> [usize; 4] {
        [start, len, stride, count]
    }
}

impl Slice {
    /// All of a tensor of `elements` elements.
    pub(crate) fn whole(elements: usize) -> Vec<Slice> {
        Slice::of_runs((elements > 0).then_some((0, elements)))
    }

    /// Describes runs, given as (start, length) in the order in which their elements are stored. Regular runs become one
    /// slice, so a part of a matrix takes a few, however large it is.
    pub fn of_runs(runs: impl IntoIterator<Item = (usize, usize)>) -> Vec<Slice> {
        let mut slices: Vec<Slice> = Vec::new();
        for (start, len) in runs {
            if let Some(last) = slices.last_mut() {
                if last.count == 1 && last.start + last.len == start {
                    last.len += len;
                    last.stride = last.len;
                    continue;
                }
                if last.count == 1 && last.len == len && start > last.start + len {
                    last.stride = start - last.start;
                    last.count = 2;
                    continue;
                }
                if last.count > 1 && last.len == len && start == last.start + last.count * last.stride {
                    last.count += 1;
                    continue;
                }
            }
            slices.push(Slice { start, len, stride: len, count: 1 });
        }
        slices
    }

    /// Where each run begins.
    pub(crate) fn starts(self) -> impl Iterator<Item = usize> {
        (0..self.count).map(move |n| self.start + n * self.stride)
    }

    /// How many elements a slice of anybody's making holds of a tensor of `elements` elements, if it lies in it.
    fn held(self, elements: usize) -> Option<usize> {
        let Slice { start, len, stride, count } = self;
        if len == 0 || count == 0 || stride < len {
            return None;
        }
        let end = (count - 1).checked_mul(stride)?.checked_add(start)?.checked_add(len)?;
        // Runs do not overlap, so they hold no more elements than lie before their end.
        (end <= elements).then_some(len * count)
    }
}

/// How many elements of a tensor of `elements` elements the slices hold together, overlaps counted twice.
pub(crate) fn held(slices: &[Slice], elements: usize) -> Result<usize, String> {
    let mut sum = 0usize;
    for slice in slices {
        let held = slice.held(elements);
        let fits = held.and_then(|held| sum.checked_add(held));
        sum = fits.ok_or_else(|| format!("{:?} is no slice of {elements} elements", <[usize; 4]>::from(*slice)))?;
    }
    Ok(sum)
}

/// How the parts of a tensor fail to make it up.
#[derive(Debug, PartialEq)]
pub(crate) enum Misfit {
    /// Elements that no part holds; `held` are there.
    Missing { held: usize },
    /// The first element of part `part` that a part before it, or itself, holds too.
    Twice { part: usize, element: usize },
}

/// Checks that the parts hold every element of a tensor once. Their slices must lie in the tensor, and it must have no more
/// elements than memory was spent on already: the check takes one bit for each.
pub(crate) fn check_cover(parts: &[&[Slice]], elements: usize) -> Result<(), Misfit> {
    let held: usize = parts.iter().flat_map(|slices| slices.iter()).map(|s| s.len * s.count).sum();
    if held < elements {
        return Err(Misfit::Missing { held });
    }
    if let [part] = parts
        && part.len() <= 1
    {
        return Ok(());
    }
    let mut seen = vec![0u64; elements.div_ceil(64)];
    for (part, slices) in parts.iter().enumerate() {
        for slice in slices.iter() {
            for start in slice.starts() {
                if let Some(element) = mark(&mut seen, start, start + slice.len) {
                    return Err(Misfit::Twice { part, element });
                }
            }
        }
    }
    Ok(())
}

/// Sets the bits `from..to`, up to the first that is set already, which it returns.
fn mark(seen: &mut [u64], from: usize, to: usize) -> Option<usize> {
    let mut at = from;
    while at < to {
        let (word, bit) = (at / 64, at % 64);
        let bits = (to - at).min(64 - bit);
        let mask = (u64::MAX >> (64 - bits)) << bit;
        let twice = seen[word] & mask;
        if twice != 0 {
            return Some(word * 64 + twice.trailing_zeros() as usize);
        }
        seen[word] |= mask;
        at += bits;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(start: usize, len: usize, stride: usize, count: usize) -> Slice {
        Slice { start, len, stride, count }
    }

    #[test]
    fn regular_runs_become_one_slice() {
        assert_eq!(Slice::of_runs([(0, 10), (10, 5)]), [slice(0, 15, 15, 1)]);
        let columns = (0..1000).map(|row| (row * 32 + 8, 8));
        assert_eq!(Slice::of_runs(columns.clone()), [slice(8, 8, 32, 1000)]);
        // A range of a part of the columns: the end of a row, rows, the start of a row.
        let range = [(13, 3)].into_iter().chain(columns.skip(1)).chain([(32008, 5)]);
        assert_eq!(Slice::of_runs(range), [slice(13, 3, 3, 1), slice(40, 8, 32, 999), slice(32008, 5, 5, 1)]);
        assert_eq!(Slice::of_runs([(8, 4), (0, 4)]), [slice(8, 4, 4, 1), slice(0, 4, 4, 1)]);
        assert_eq!(Slice::whole(0), []);
    }

    #[test]
    fn slices_outside_the_tensor_are_refused() {
        let most = usize::MAX;
        for (bad, elements) in [
            (slice(0, 0, 1, 1), 9),
            (slice(0, 1, 1, 0), 9),
            (slice(0, 2, 1, 2), 9),
            (slice(9, 1, 1, 1), 9),
            (slice(0, 3, 4, 3), 10),
            (slice(most, 1, 1, 1), most),
            (slice(1, most, most, 1), most),
            (slice(0, 1, most, most), most),
            (slice(0, 2, most, 2), most),
        ] {
            assert!(held(&[bad], elements).is_err(), "{bad:?}");
        }
        assert_eq!(held(&[slice(0, 3, 4, 3)], 11), Ok(9));
        assert!(held(&[slice(0, most, most, 1); 2], most).is_err());
    }

    #[test]
    fn parts_must_make_up_the_tensor() {
        let check = |parts: &[&[Slice]]| check_cover(parts, 200);
        assert_eq!(check(&[&[slice(0, 200, 200, 1)]]), Ok(()));
        assert_eq!(check(&[&[slice(0, 50, 100, 2)], &[slice(50, 50, 100, 2)]]), Ok(()));
        assert_eq!(check(&[&[slice(50, 50, 100, 2), slice(0, 50, 100, 2)]]), Ok(()));
        assert_eq!(check(&[&[slice(0, 50, 100, 2)], &[slice(50, 50, 50, 1)]]), Err(Misfit::Missing { held: 150 }));
        let twice = |part, element| Err(Misfit::Twice { part, element });
        assert_eq!(check(&[&[slice(0, 50, 100, 2)], &[slice(49, 50, 100, 2)]]), twice(1, 49));
        assert_eq!(check(&[&[slice(0, 200, 200, 1)], &[slice(130, 1, 1, 1)]]), twice(1, 130));
        assert_eq!(check(&[&[slice(0, 100, 100, 1), slice(64, 100, 100, 1)]]), twice(0, 64));
        assert_eq!(check(&[]), Err(Misfit::Missing { held: 0 }));
    }
}
