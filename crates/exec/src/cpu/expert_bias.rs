//! Biases of experts. Shapes: x, dy `[rows, n]`, bias `[experts, n]`; rows are those of a token's experts or of blocks, as in `experts`.

use super::call::{Accumulator, Call, Kernel, Kernels, Ptr};
use super::columns::COLUMNS;
use super::float::Float;
use crate::by_kind;

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        GroupedBias { .. } => add::<T>(call),
        GroupedBiasGrad { .. } => grad::<T>(call),
    }
}

/// Whose rows are whose.
#[derive(Clone, Copy)]
struct Owners {
    chosen: Ptr<*const u32>,
    rows: usize,
    /// Rows and experts of a part.
    of_part: usize,
    each: usize,
}

impl Owners {
    /// Those that an input says.
    fn of(call: &Call, input: usize) -> Self {
        let parts = call.size("parts");
        let rows = call.size("batch") * call.size("seq") * call.size("choices") * parts * call.size("rows");
        let chosen = Ptr(call.input::<u32>(input));
        Self { chosen, rows, of_part: rows.div_ceil(parts), each: call.size("experts") / parts }
    }

    /// The expert of a row, if it has one.
    ///
    /// # Safety
    /// There is such a row.
    unsafe fn expert(&self, row: usize) -> Option<usize> {
        // SAFETY: the caller vouches.
        let expert = unsafe { *self.chosen.at(row) } as usize;
        (expert < self.each).then_some(row / self.of_part * self.each + expert)
    }
}

/// y = x + the bias of the row's expert; y may be in the place of x.
fn add<T: Float>(call: Call) {
    let (owners, n) = (Owners::of(&call, 2), call.size("outputs"));
    let (x, bias) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)));
    let Some(y) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(owners.rows, |from, end| {
        for row in from..end {
            // SAFETY: rows from .. end belong to this task.
            unsafe {
                let bias = owners.expert(row).map(|expert| bias.slice(expert * n, n));
                for i in 0..n {
                    let more = bias.map_or(0.0, |bias| bias[i].to());
                    *y.at(row * n + i) = T::of((*x.at(row * n + i)).to() + more);
                }
            }
        }
    });
}

/// dbias = Σ over the rows of each expert of dy: at once for float sums, sequence by sequence for fixed-point sums.
fn grad<T: Float>(call: Call) {
    let (owners, n, experts) = (Owners::of(&call, 1), call.size("outputs"), call.size("experts"));
    let dy = Ptr(call.input::<T>(0));
    let Some(sum) = call.accumulator(0).map(Ptr) else { return };
    let chunks = n.div_ceil(COLUMNS);
    let groups = if matches!(sum.get(), Accumulator::Fixed { .. }) { call.size("batch") } else { 1 };
    let rows = owners.rows / groups;
    call.pool.run(experts * chunks, |task, _| {
        let (expert, from) = (task / chunks, task % chunks * COLUMNS);
        let columns = COLUMNS.min(n - from);
        for group in 0..groups {
            let mut sums = [0.0f32; COLUMNS];
            // SAFETY: these columns of this expert belong to this task.
            unsafe {
                for row in (group * rows..(group + 1) * rows).filter(|row| owners.expert(*row) == Some(expert)) {
                    let dy = dy.slice(row * n + from, columns);
                    sums.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy.to());
                }
                let sum = sum.get().adding(group > 0);
                (0..columns).for_each(|i| sum.put(expert * n + from + i, sums[i]));
            }
        }
    });
}
