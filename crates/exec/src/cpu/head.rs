//! The output head fused with cross-entropy: loss, dx and dw of a chunk of rows at a time; the logits never exist whole.
//!
//! The vocabulary is cut into blocks. Of a block, the logits of a few rows are made in f32, and while they are in the cache
//! they become `e = exp(logit − largest of the row in this block)`, stored in the compute type (f16 has no range for
//! it and stores f32). When all blocks of a chunk are
//! there, each row has one factor per block that makes its `e` probabilities, so that
//!
//! - dx = Σ over blocks of factor · (E · W), less the target's row of W;
//! - dw of a block = Eᵀ · (factor · x), less x at its targets,
//!
//! where "less" is in the target's own `e`: it becomes `(p − 1) / factor` before any matmul. One exponential per
//! logit, no other pass over them. Blocks depend on the vocabulary alone, so a row's bits do not depend on other rows.

use super::call::{Accumulator, Call, Kernel, Kernels, Ptr};
use super::float::Float;
use super::gemm::{K_STEP, Matrix, NR, Packed, Target, Unit, multiply, pack_a, pack_b};
use super::linear::{add_fixed, add_rounded};
use super::pointwise::checked_target;
use super::simd::{self, Simd, vectorised};
use super::vocab::is_beaten;
use super::{loss, vocab};
use crate::by_kind;
use lockstep_ir::DType;

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        CrossEntropy => loss::cross_entropy::<T>(call),
        CrossEntropyGrad { weight } => loss::cross_entropy_grad::<T>(call, weight),
        LinearCrossEntropy { score, rows } => {
            if score { linear_score::<T>(call, rows) } else { linear_cross_entropy::<T>(call, rows) }
        },
        VocabLogits { rows, .. } => vocab::logits::<T>(call, rows),
        VocabLoss => vocab::loss(call),
        VocabMisses { rows } => vocab::misses(call, rows),
        VocabGrad { rows } => vocab::grad::<T>(call, rows),
        JoinRows => vocab::join_rows::<T>(call),
    }
}

/// Rows whose logits are made at a time: a multiple of every unit's rows.
const ROWS: usize = 96;
/// Blocks are a multiple of this: whole panels, as rows or columns.
const BLOCK_STEP: usize = 96;
/// Most blocks of a vocabulary.
const MOST_BLOCKS: usize = 72;
/// Most rows of one matmul into dx.
const MOST_DX_ROWS: usize = 192;
/// Rows of a chunk that one matmul into dw takes.
const DW_DEPTH: usize = 512;
/// The least share of a block in its row that differs from zero: its inverse must be finite.
const LEAST_SHARE: f32 = 1.0 / (1u128 << 100) as f32;

/// Columns of a block. An odd number of steps, so that the rows of a block do not fall on the same cache sets; about 2 KiB of
/// stored numbers.
const fn block(v: usize, element: usize) -> usize {
    let aim = if element == 4 { 5 } else { 9 };
    let (even, most) = (v.div_ceil(16 * BLOCK_STEP), v.div_ceil(MOST_BLOCKS * BLOCK_STEP));
    let steps = if even < aim { even } else { aim };
    (if steps > most { steps } else { most } | 1) * BLOCK_STEP
}

/// Where things are in the scratch, as offsets in bytes.
#[derive(Clone, Copy)]
struct Layout {
    /// W as the right-hand side of the logits: v columns, k deep.
    w_logits: usize,
    /// W as the right-hand side of dx: k columns, v deep.
    w_dx: usize,
    /// x of the chunk as a left-hand side.
    x: usize,
    /// E, block after block, each with rows as long as it has columns.
    e: usize,
    /// Largest logit, later factor, of each block and row.
    factors: usize,
    /// Sums of `e` of each block and row.
    sums: usize,
    /// The target's logit, and the loss, of each row.
    targets: usize,
    losses: usize,
    /// What each thread has for itself, and how much of it.
    own: usize,
    own_bytes: usize,
    /// Bytes of it all.
    #[cfg(test)]
    end: usize,
}

/// Bytes of one thread's own scratch: a phase takes as much of it as it needs.
fn own_bytes(unit: Unit, element: usize, k: usize, v: usize) -> usize {
    let (columns, lines) = (block(v, element), k.next_multiple_of(NR));
    let logits = ROWS * columns * 4;
    let dx = unit.bytes(MOST_DX_ROWS, columns) + MOST_DX_ROWS * k * 4;
    let dw = unit.bytes(ROWS, DW_DEPTH) + unit.bytes(lines, DW_DEPTH) + K_STEP * k * 4;
    logits.max(dx).max(dw).next_multiple_of(64) + 128
}

impl Layout {
    fn new(unit: Unit, element: usize, (rows, k, v): (usize, usize, usize), threads: usize) -> Self {
        let mut end = 0;
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(64);
            at
        };
        let columns = block(v, element);
        let blocks = v.div_ceil(columns);
        let own_bytes = own_bytes(unit, element, k, v);
        Self {
            w_logits: take(unit.bytes(v.next_multiple_of(NR), k)),
            w_dx: take(unit.bytes(k.next_multiple_of(NR), v)),
            x: take(unit.bytes(rows.next_multiple_of(ROWS), k)),
            e: take(rows * v * element),
            factors: take(rows * blocks * 4),
            sums: take(rows * blocks * 4),
            targets: take(rows * 4),
            losses: take(rows * 4),
            own: take(own_bytes * threads),
            own_bytes,
            #[cfg(test)]
            end,
        }
    }
}

/// Bytes of a number as it is stored between two matmuls.
fn kept_bytes(compute: DType) -> usize {
    match compute {
        DType::BF16 => 2,
        _ => 4,
    }
}

/// An upper bound of the scratch as bytes and bytes per product of dimensions.
pub fn scratch_bytes(simd: Simd, compute: DType, threads: usize) -> (u64, Vec<(u64, &'static str)>) {
    let unit = Unit::for_dtype(compute, simd);
    let packed = unit.element();
    let kept = kept_bytes(compute);
    let lines = NR.max(K_STEP);
    // Bytes of a thread per column of a block, which is this wide and for large vocabularies v / MOST_BLOCKS wider.
    let per_column = (ROWS * 4).max(MOST_DX_ROWS * packed);
    let widest = 11 * BLOCK_STEP;
    let own = per_column * widest + packed * (ROWS + 2 * lines) * DW_DEPTH + MOST_DX_ROWS * lines * packed + 256;
    let terms = [
        (2 * packed, "vocab inputs"),
        (kept, "rows vocab"),
        (packed, "rows inputs"),
        (8 * (MOST_BLOCKS + 1) + 8 + lines * packed, "rows"),
        (2 * lines * packed + threads * per_column.div_ceil(MOST_BLOCKS), "vocab"),
        ((2 * lines + ROWS) * packed + threads * (MOST_DX_ROWS * 4 + DW_DEPTH * packed + K_STEP * 4), "inputs"),
    ];
    let fixed = threads * own + (2 * lines + ROWS) * lines * packed + 1024;
    (fixed as u64, terms.map(|(bytes, letters)| (bytes as u64, letters)).to_vec())
}

/// One call's sizes and scratch.
struct Head<'a> {
    call: Call<'a>,
    /// What gradients start with.
    seed: f32,
    unit: Unit,
    k: usize,
    v: usize,
    /// Rows that the scratch has room for.
    most_rows: usize,
    columns: usize,
    blocks: usize,
    at: Layout,
    scratch: *mut u8,
}

// SAFETY: tasks write disjoint parts of the scratch.
unsafe impl Sync for Head<'_> {}

/// x `[b, s, k]`, w `[v, k]`, targets `[b, s]` → loss `[b]`, and where asked for dx `[b, s, k]` and dw `[v, k]`.
///
/// Scratch: `share` (v · k floats) for sums that are not in f32, then what `scratch_bytes` says.
pub fn linear_cross_entropy<T: Float>(call: Call, most_rows: usize) {
    chunked::<T>(call, most_rows, call.seed(3), Outputs { dx: call.output(1), dw: call.accumulator(2), misses: None });
}

/// The same without gradients, and of every position whether greedy decoding misses its target: misses `[b, s]`.
pub fn linear_score<T: Float>(call: Call, most_rows: usize) {
    chunked::<T>(call, most_rows, 1.0, Outputs { dx: None, dw: None, misses: call.output(1) });
}

/// What is made besides the loss.
struct Outputs<T> {
    dx: Option<*mut T>,
    dw: Option<Accumulator>,
    misses: Option<*mut f32>,
}

fn chunked<T: Float>(call: Call, most_rows: usize, seed: f32, outputs: Outputs<T>) {
    let (batch, seq, k, v) = (call.size("batch"), call.size("seq"), call.size("inputs"), call.size("vocab"));
    let (x, w, targets) = (call.input::<T>(0), call.input::<T>(1), call.input::<u32>(2));
    let loss = call.output::<f64>(0);
    let Outputs { dx, dw, misses } = outputs;
    let (unit, element) = (Unit::of::<T>(call.simd), T::Kept::DTYPE.bytes());
    let at = Layout::new(unit, element, (most_rows, k, v), call.pool.threads());
    let columns = block(v, element);
    let share = if matches!(dw, None | Some(Accumulator::Float { .. })) { 0 } else { (v * k * 4).next_multiple_of(64) };
    // SAFETY: the device profile asks for this much.
    let scratch = unsafe { call.scratch::<u8>().add(share) };
    let head = Head { call, seed, unit, k, v, most_rows, columns, blocks: v.div_ceil(columns), at, scratch };
    let wanted = dx.is_some() || dw.is_some();
    // SAFETY: operands have the sizes of their types.
    unsafe { head.pack_weights(w, dx.is_some()) };
    // Fixed-point sums take each sequence's share on its own; other sums do not care where a chunk ends.
    let (spans, span) = if matches!(dw, Some(Accumulator::Fixed { .. })) { (batch, seq) } else { (1, batch * seq) };
    let chunks = (0..spans).flat_map(|b| (0..span).step_by(most_rows).map(move |s| (b * span + s, span - s)));
    for (first, left) in chunks {
        let rows = most_rows.min(left);
        // SAFETY: the chunk lies in the operands.
        unsafe {
            let (x, targets) = (x.add(first * k), Ptr(targets.add(first)));
            let misses = misses.map(|misses| Ptr(misses.add(first)));
            head.exponentials::<T>(x, targets, rows, wanted, misses);
            head.factors::<T>(targets, rows, wanted, misses);
            if let Some(loss) = loss {
                let losses: *const f32 = head.part(head.at.losses);
                for row in 0..rows {
                    let (at, start) = (loss.add((first + row) / seq), (first + row).is_multiple_of(seq));
                    *at = if start { 0.0 } else { *at } + f64::from(*losses.add(row));
                }
            }
            if let Some(dx) = dx {
                head.input_gradient(dx.add(first * k), rows);
            }
            if let Some(dw) = dw {
                head.weight_gradient(x, rows, dw.adding(first > 0), call.scratch());
            }
        }
    }
}

impl Head<'_> {
    /// A part of the scratch.
    fn part<T>(&self, offset: usize) -> *mut T {
        // SAFETY: offsets come from the layout.
        unsafe { self.scratch.add(offset).cast() }
    }

    /// What worker `worker` has for itself.
    fn own(&self, worker: usize) -> *mut u8 {
        self.part(self.at.own + worker * self.at.own_bytes)
    }

    /// Columns of block `j`.
    fn width(&self, j: usize) -> usize {
        self.columns.min(self.v - j * self.columns)
    }

    /// E of block `j`: rows of `width(j)` elements.
    fn e<T>(&self, j: usize) -> *mut T {
        self.part(self.at.e + j * self.columns * self.most_rows * size_of::<T>())
    }

    /// Packs W for the logits and, where `dx` says so, for dx.
    unsafe fn pack_weights<T: Float>(&self, w: *const T, dx: bool) {
        let (unit, simd, k) = (self.unit, self.call.simd, self.k);
        let (logits, inputs) = (self.part(self.at.w_logits), self.part(self.at.w_dx));
        let shared = Ptr((Packed::b(unit, logits, k), Packed::b(unit, inputs, self.v), w));
        self.call.pool.run(self.blocks, |j, _| {
            let (logits, inputs, w) = shared.get();
            let (first, width) = (j * self.columns, self.width(j));
            // SAFETY: W has v rows; each block has its own panels of the first and its own depth of the second.
            unsafe {
                let w = Matrix::rows(w.add(first * k), k);
                pack_b(simd, w.transposed(), width, k, logits.columns_from(first));
                if dx {
                    pack_b(simd, w, k, width, inputs.columns_deep(unit, first));
                }
            }
        });
    }

    /// E, the largest logit and the sum of `e` of every row and block, and the targets' logits. Where misses are asked for, they are
    /// those by the target's own block.
    unsafe fn exponentials<T: Float>(
        &self,
        x: *const T,
        targets: Ptr<*const u32>,
        rows: usize,
        wanted: bool,
        misses: Option<Ptr<*mut f32>>,
    ) {
        let (unit, simd, k) = (self.unit, self.call.simd, self.k);
        let x = Ptr((Matrix::rows(x, k), Packed::a(unit, self.part(self.at.x), k)));
        let row_blocks = rows.div_ceil(ROWS);
        self.call.pool.run(row_blocks, |task, _| {
            let ((from, to), first) = (x.get(), task * ROWS);
            // SAFETY: x has these rows; each task has its own panels.
            unsafe { pack_a(simd, from.skip_rows(first), ROWS.min(rows - first), k, to.rows_from(unit, first)) };
        });
        self.call.pool.run(self.blocks * row_blocks, |task, worker| {
            let (j, first) = (task / row_blocks, task % row_blocks * ROWS);
            let (here, width) = (ROWS.min(rows - first), self.width(j));
            // SAFETY: each task has its own rows of a block; each worker has its own logits.
            unsafe {
                let logits: *mut f32 = self.own(worker).cast();
                let w = Packed::b(unit, self.part(self.at.w_logits), k).columns_from(j * self.columns);
                let depth = if k <= DW_DEPTH { k } else { DW_DEPTH };
                for k0 in (0..k).step_by(depth) {
                    let (a, b) = (x.get().1.rows_from(unit, first).rows_deep(unit, k0), w.columns_deep(unit, k0));
                    let c = Target::F32 { ptr: logits, stride: width, add: k0 > 0 };
                    multiply::<T>(simd, (here, width, depth.min(k - k0)), a, b, c);
                }
                for r in 0..here {
                    let row = first + r;
                    let (logits, at) = (logits.add(r * width), j * self.most_rows + row);
                    let target = checked_target(*targets.at(row), self.v);
                    if let Some(target) = target.filter(|target| target / self.columns == j) {
                        let (at, all) = (target % self.columns, std::slice::from_raw_parts(logits, width));
                        *self.part::<f32>(self.at.targets).add(row) = all[at];
                        if let Some(misses) = misses {
                            *misses.at(row) = f32::from(u8::from(is_beaten(all, all[at], at)));
                        }
                    }
                    let to = if wanted { self.e::<T::Kept>(j).add(row * width) } else { std::ptr::null_mut() };
                    let (max, sum) = exponentials_of_row(simd, logits, to, width);
                    *self.part::<f32>(self.at.factors).add(at) = max;
                    *self.part::<f32>(self.at.sums).add(at) = sum;
                }
            }
        });
    }

    /// Each row's factor of every block and its loss; the target's `e` becomes `(p − 1) / factor`. Misses by other blocks are added to
    /// those by the target's own.
    unsafe fn factors<T: Float>(
        &self,
        targets: Ptr<*const u32>,
        rows: usize,
        wanted: bool,
        misses: Option<Ptr<*mut f32>>,
    ) {
        let (factors, sums) = (Ptr(self.part::<f32>(self.at.factors)), Ptr(self.part::<f32>(self.at.sums)));
        let (logits, losses) = (Ptr(self.part::<f32>(self.at.targets)), Ptr(self.part::<f32>(self.at.losses)));
        self.call.ranges(rows, 64, |from, to| {
            for row in from..to {
                // SAFETY: the row belongs to this task.
                unsafe {
                    let at = |j: usize| j * self.most_rows + row;
                    let maxima = (0..self.blocks).map(|j| *factors.at(at(j)));
                    let top = maxima.fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a });
                    let mut sum = 0.0;
                    // What is ignored has no loss, and factors of 0 make its gradients 0.
                    let Some(target) = checked_target(*targets.at(row), self.v) else {
                        (0..self.blocks).for_each(|j| *factors.at(at(j)) = 0.0);
                        *losses.at(row) = 0.0;
                        if let Some(misses) = misses {
                            *misses.at(row) = 0.0;
                        }
                        continue;
                    };
                    let logit = *logits.at(row);
                    let (hit, before) = (target / self.columns, *factors.at(at(target / self.columns)));
                    if let Some(misses) = misses {
                        // Of equal logits the first is taken, which is in a block before.
                        let beats = |j: usize| *factors.at(at(j)) > logit || (j < hit && *factors.at(at(j)) == logit);
                        if (0..self.blocks).any(beats) {
                            *misses.at(row) = 1.0;
                        }
                    }
                    for j in 0..self.blocks {
                        let share = simd::exp(*factors.at(at(j)) - top);
                        sum += *sums.at(at(j)) * share;
                        *factors.at(at(j)) = if share < LEAST_SHARE { LEAST_SHARE } else { share };
                    }
                    *losses.at(row) = top + sum.ln() - logit;
                    if wanted {
                        (0..self.blocks).for_each(|j| *factors.at(at(j)) /= sum);
                        let (factor, e) = (*factors.at(at(hit)), simd::exp(logit - before));
                        let to = self.e::<T::Kept>(hit).add(row * self.width(hit) + target % self.columns);
                        *to = T::Kept::of((e * factor - 1.0) / factor);
                    }
                }
            }
        });
    }

    /// dx of the chunk.
    unsafe fn input_gradient<T: Float>(&self, dx: *mut T, rows: usize) {
        let (unit, simd, k, dx) = (self.unit, self.call.simd, self.k, Ptr(dx));
        // As many equal tasks as threads, or a multiple.
        let tasks = rows.div_ceil(MOST_DX_ROWS).next_multiple_of(self.call.pool.threads());
        let most = rows.div_ceil(tasks).next_multiple_of(unit.rows()).min(MOST_DX_ROWS);
        self.call.pool.run(rows.div_ceil(most), |task, worker| {
            let first = task * most;
            let here = most.min(rows - first);
            // SAFETY: each task has its own rows; each worker has its own packed rows and sums.
            unsafe {
                let own = self.own(worker);
                let sums: *mut f32 = own.add(unit.bytes(MOST_DX_ROWS, self.columns)).cast();
                sums.write_bytes(0, here * k);
                for j in 0..self.blocks {
                    let width = self.width(j);
                    let e = Matrix::rows(self.e::<T::Kept>(j).add(first * width).cast_const(), width);
                    let packed = Packed::a(unit, own, width);
                    pack_a(simd, e, here, width, packed);
                    let w = Packed::b(unit, self.part(self.at.w_dx), self.v).columns_deep(unit, j * self.columns);
                    let factors = self.part::<f32>(self.at.factors).add(j * self.most_rows + first).cast_const();
                    multiply::<T>(simd, (here, k, width), packed, w, Target::Scaled { ptr: sums, stride: k, factors });
                }
                round(simd, sums, dx.at(first * k), here * k, self.seed);
            }
        });
    }

    /// dw += the chunk's share, each block as a task. `share` is v · k floats for sums that are not in f32.
    unsafe fn weight_gradient<T: Float>(&self, x: *const T, rows: usize, dw: Accumulator, share: *mut f32) {
        let (unit, simd, k) = (self.unit, self.call.simd, self.k);
        let shared = Ptr((x, dw, share));
        self.call.pool.run(self.blocks, |j, worker| {
            let (x, dw, share) = shared.get();
            let (first, width) = (j * self.columns, self.width(j));
            // SAFETY: each task has its own rows of dw; each worker has its own packed operands.
            unsafe {
                let own = self.own(worker);
                let packed_x = own.add(unit.bytes(ROWS, DW_DEPTH));
                let scaled: *mut T::Kept = packed_x.add(unit.bytes(k.next_multiple_of(NR), DW_DEPTH)).cast();
                let factors = self.part::<f32>(self.at.factors).add(j * self.most_rows).cast_const();
                for r0 in (0..rows).step_by(DW_DEPTH) {
                    let depth = DW_DEPTH.min(rows - r0);
                    let (a, b) = (Packed::a(unit, own, depth), Packed::b(unit, packed_x, depth));
                    for r in (0..depth).step_by(K_STEP) {
                        let here = K_STEP.min(depth - r);
                        scale_rows(simd, x.add((r0 + r) * k), scaled, factors.add(r0 + r), here, k, self.seed);
                        pack_b(simd, Matrix::rows(scaled.cast_const(), k), k, here, b.columns_deep(unit, r));
                    }
                    for i in (0..width).step_by(ROWS) {
                        let here = ROWS.min(width - i);
                        let e = Matrix::rows(self.e::<T::Kept>(j).add(r0 * width + i).cast_const(), width);
                        pack_a(simd, e.transposed(), here, depth, a);
                        let (ptr, add) = match dw {
                            Accumulator::Float { sum, add } => (sum, add || r0 > 0),
                            Accumulator::Bf16 { .. } | Accumulator::Fixed { .. } => (share, r0 > 0),
                        };
                        let c = Target::F32 { ptr: ptr.add((first + i) * k), stride: k, add };
                        multiply::<T>(simd, (here, k, depth), a, b, c);
                    }
                }
                let (from, n) = (share.add(first * k).cast_const(), width * k);
                match dw {
                    Accumulator::Float { .. } => {}
                    Accumulator::Bf16 { sum, add } => add_rounded(simd, from, sum.add(first * k), n, add),
                    Accumulator::Fixed { sum, add } => add_fixed(simd, from, sum.add(first * k), n, add),
                }
            }
        });
    }
}

vectorised! {
    /// `e` of a row of logits in `to`, unless that is null; their maximum and the sum of `e`.
    unsafe fn exponentials_of_row<T>(logits: *const f32, to: *mut T, n: usize) -> (f32, f32) {
        const LANES: usize = 64;
        let max = simd::max(std::slice::from_raw_parts(logits, n));
        let mut sums = [0.0f32; LANES];
        let whole = n / LANES * LANES;
        for start in (0..whole).step_by(LANES) {
            let (from, mut e) = (&*logits.add(start).cast::<[f32; LANES]>(), [0.0f32; LANES]);
            for i in 0..LANES {
                e[i] = simd::exp(from[i] - max);
            }
            for i in 0..LANES {
                sums[i] += e[i];
            }
            if !to.is_null() {
                for (i, &e) in e.iter().enumerate() {
                    *to.add(start + i) = T::of(e);
                }
            }
        }
        for i in whole..n {
            let e = simd::exp(*logits.add(i) - max);
            sums[i - whole] += e;
            if !to.is_null() {
                *to.add(i) = T::of(e);
            }
        }
        (max, simd::sum(LANES, |i| sums[i]))
    }
}

vectorised! {
    /// Rounds, times the seed.
    unsafe fn round<T>(from: *const f32, to: *mut T, n: usize, seed: f32) -> () {
        for i in 0..n {
            *to.add(i) = T::of(*from.add(i) * seed);
        }
    }
}

vectorised! {
    /// `rows` rows of `k` elements, each times its factor and the seed.
    unsafe fn scale_rows<T>(x: *const T, to: *mut T::Kept, factors: *const f32, rows: usize, k: usize, seed: f32) -> () {
        for r in 0..rows {
            let factor = *factors.add(r) * seed;
            for i in r * k..(r + 1) * k {
                *to.add(i) = T::Kept::of((*x.add(i)).to() * factor);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_asks_for_enough_scratch_at_every_shape() {
        use lockstep_ir::op::names;
        let types = [DType::F32, DType::BF16, DType::F16];
        for (simd, compute) in [Simd::Avx512, Simd::Amx].into_iter().flat_map(|simd| types.map(|t| (simd, t))) {
            let unit = Unit::for_dtype(compute, simd);
            for threads in [1, 2, 7] {
                let (fixed, terms) = scratch_bytes(simd, compute, threads);
                for rows in [1, 23, 96, 512, 1000, 1024] {
                    for k in [1, 7, 32, 71, 288, 512, 1000, 4096] {
                        for v in [1, 50, 256, 1536, 1537, 8192, 32000, 50257, 151_936, 262_144] {
                            let size = |name| if name == "rows" { rows } else if name == "inputs" { k } else { v } as u64;
                            let product = |of: &'static str| names(of).map(size).product::<u64>();
                            let asked = fixed + terms.iter().map(|(bytes, l)| bytes * product(l)).sum::<u64>();
                            let needed = Layout::new(unit, kept_bytes(compute), (rows, k, v), threads).end as u64;
                            assert!(asked >= needed, "{compute} {threads} {rows} {k} {v}: {asked} < {needed}");
                        }
                    }
                }
            }
        }
    }
}
