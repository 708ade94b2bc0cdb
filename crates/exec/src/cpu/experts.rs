//! Mixtures of experts. Shapes: x `[rows, k]`, w `[experts, n, k]`, y `[rows, n]`; a token has a row for each of its experts. With expert
//! parallelism, rows are those of blocks `[parts, rows of a part]`, which have the experts of their part.
//!
//! Rows are sorted by expert. Those of one expert are gathered, a chunk at a time, multiplied, and scattered to where they belong.

use super::call::{Accumulator, Call, Kernel, Kernels, Ptr};
use super::float::{Bf16, Float};
use super::gemm::{Matrix, Target, gemm};
use super::linear::{add_fixed, add_rounded};
use super::quantise::widened;
use super::router;
use crate::by_kind;

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        Route { given, ref how } => if given { router::route_to(call, how) } else { router::route(call, how) },
        RouteGrad { ref how } => router::route_grad(call, how),
        ExpertCounts { .. } => router::counts(call),
        RouterLoss { balance, z } => router::router_loss(call, balance, z),
        RouterLossGrad { balance, z } => router::router_loss_grad(call, call.seed(2) * balance, call.seed(2) * z),
        ExpertLoad { .. } => router::load(call),
        StackTotals => router::stack_totals(call),
        MoveBias { row, rate } => router::move_bias(call, row, rate),
        GroupedLinear { each } => linear::<T>(call, call.sharers(each)),
        GroupedGradInput => grad_input::<T>(call),
        GroupedGradWeight { each, .. } => grad_weight::<T>(call, call.sharers(each)),
        Fp8Grouped { each } => fp8_linear(call, call.sharers(each)),
        Fp8GroupedGradWeight { each, .. } => fp8_grad_weight(call, call.sharers(each)),
        Fp8Rows { .. } => fp8_linear(call, 1),
        Fp8RowsGradWeight { .. } => fp8_grad_weight(call, 1),
        Combine { weighted } => combine::<T>(call, weighted),
        CombineGrad => combine_grad::<T>(call),
    }
}

/// Most rows that are gathered at a time.
const CHUNK: usize = 512;

pub type Scratch = (u64, Vec<(u64, &'static str)>);

/// Scratch of a grouped matmul: that of a matmul, of its rounded results, of the order of rows, of the gathered, and of a sum that is
/// not in f32.
pub fn scratch(gemm: u64, rounded: Option<(u64, &'static str)>, share: Option<(u64, &'static str)>) -> Scratch {
    let each = 4 * CHUNK as u64;
    let rows = [(4, "… choices parts rows"), (8, "experts"), (each, "outputs"), (each, "inputs")];
    (gemm + 6 * 64, rows.into_iter().chain(rounded).chain(share).collect())
}

/// The same of one in fp8, with its operands as bf16; which these are.
pub fn fp8_scratch((fixed, mut terms): Scratch, operands: [&'static str; 2]) -> Scratch {
    terms.extend(operands.map(|of| (2, of)));
    (fixed + 2 * 64, terms)
}

/// The rows of a call by expert, and room to gather them.
struct Grouped<'a> {
    call: Call<'a>,
    /// The expert of every row, of this many of its part.
    chosen: &'a [u32],
    each: usize,
    /// Rows, those of the first expert first, in their order.
    order: &'a [u32],
    /// Where those of each expert end.
    ends: &'a [u32],
    gemm: *mut f32,
    n: usize,
    k: usize,
    /// Room for a chunk of n or of k features of any type.
    of_n: *mut u8,
    of_k: *mut u8,
    /// After all of it.
    share: *mut f32,
}

impl<'a> Grouped<'a> {
    /// Sorts the rows of a call by what input `chosen` says, with the scratch from `at` on.
    fn new(call: Call<'a>, chosen: usize, mut at: *mut u8) -> Self {
        let blocks = call.size("parts") * call.size("rows");
        let (rows, experts) =
            (call.size("batch") * call.size("seq") * call.size("choices") * blocks, call.size("experts"));
        let (of_part, each) = (rows.div_ceil(call.size("parts")), experts / call.size("parts"));
        let (n, k) = (call.size("outputs"), call.size("inputs"));
        let gemm = at.cast();
        // SAFETY: the scratch has room for all of it, as `scratch` says; each part starts at a multiple of 64.
        unsafe {
            let mut next = |bytes: usize| {
                at = at.add(bytes.next_multiple_of(64));
                at
            };
            let order: *mut u32 = next(call.gemm_scratch()).cast();
            let ends: *mut u32 = next(4 * rows).cast();
            let of_n = next(8 * experts);
            let of_k = next(4 * CHUNK * n);
            let share = next(4 * CHUNK * k).cast();
            let chosen = std::slice::from_raw_parts(call.input::<u32>(chosen), rows);
            let expert = |row: usize| {
                let expert = chosen[row] as usize;
                (expert < each).then_some(row / of_part * each + expert)
            };
            let (order, ends) =
                (std::slice::from_raw_parts_mut(order, rows), std::slice::from_raw_parts_mut(ends, experts));
            ends.fill(0);
            (0..rows).filter_map(expert).for_each(|expert| ends[expert] += 1);
            let mut before = 0;
            for end in ends.iter_mut() {
                (before, *end) = (before + *end, before);
            }
            for (row, expert) in (0..rows).filter_map(|row| Some((row, expert(row)?))) {
                order[ends[expert] as usize] = row as u32;
                ends[expert] += 1;
            }
            Self { call, chosen, each, order, ends, gemm, n, k, of_n, of_k, share }
        }
    }

    fn experts(&self) -> usize {
        self.ends.len()
    }

    /// The rows of an expert.
    fn rows(&self, expert: usize) -> &'a [u32] {
        let start = if expert == 0 { 0 } else { self.ends[expert - 1] };
        &self.order[start as usize..self.ends[expert] as usize]
    }

    /// Copies rows of `width` features of `from`, of which `sharers` have the same, to `to`, one after the other.
    unsafe fn gather<T: Float>(&self, rows: &[u32], sharers: usize, width: usize, from: *const T, to: *mut T) {
        let (from, to) = (Ptr(from), Ptr(to));
        self.call.rows(rows.len(), |first, end| {
            for (i, row) in (first..end).zip(&rows[first..end]) {
                // SAFETY: the caller vouches for the rows; each goes to a place of its own.
                unsafe {
                    to.slice(i * width, width).copy_from_slice(from.slice(*row as usize / sharers * width, width));
                }
            }
        });
    }

    /// Rows of no expert become zeros.
    unsafe fn clear<T: Float>(&self, width: usize, to: *mut T) {
        let (to, chosen, each) = (Ptr(to), self.chosen, self.each);
        self.call.rows(chosen.len(), |first, end| {
            for row in (first..end).filter(|row| chosen[*row] as usize >= each) {
                // SAFETY: the caller vouches for the rows, each of which is one task's.
                unsafe { to.slice(row * width, width).fill(T::of(0.0)) };
            }
        });
    }

    /// The other way.
    unsafe fn scatter<T: Float>(&self, rows: &[u32], width: usize, from: *const T, to: *mut T) {
        let (from, to) = (Ptr(from), Ptr(to));
        self.call.rows(rows.len(), |first, end| {
            for (i, row) in (first..end).zip(&rows[first..end]) {
                // SAFETY: the caller vouches for the rows; no two of them are the same.
                unsafe {
                    to.slice(*row as usize * width, width).copy_from_slice(from.slice(i * width, width));
                }
            }
        });
    }

    /// Adds dyᵀ · x over some rows of an expert to a sum in f32, or puts it there.
    unsafe fn weight_product<T: Float>(
        &self,
        rows: &[u32],
        sharers: usize,
        (dy, x): (*const T, *const T),
        sum: *mut f32,
        add: bool,
    ) {
        let (n, k) = (self.n, self.k);
        let (of_n, of_k): (*mut T, *mut T) = (self.of_n.cast(), self.of_k.cast());
        for (i, rows) in rows.chunks(CHUNK).enumerate() {
            // SAFETY: the caller vouches for the operands; the rooms hold a chunk.
            unsafe {
                self.gather(rows, 1, n, dy, of_n);
                self.gather(rows, sharers, k, x, of_k);
                let (dy, x) = (Matrix::rows(of_n.cast_const(), n), Matrix::rows(of_k.cast_const(), k));
                let target = Target::F32 { ptr: sum, stride: k, add: add || i > 0 };
                gemm(self.call.pool, self.call.simd, (n, k, rows.len()), dy.transposed(), x, target, self.gemm);
            }
        }
    }
}

/// y = x · wᵀ by each row's expert; `sharers` rows have one row of x.
pub fn linear<T: Float>(call: Call, sharers: usize) {
    let grouped = Grouped::new(call, 2, call.scratch());
    // SAFETY: sizes come from the operands' types.
    unsafe { linear_of::<T>(&grouped, (call.input(0), call.input(1)), sharers) }
}

/// The same of operands of any type.
///
/// # Safety
/// The operands have the sizes of the call.
unsafe fn linear_of<T: Float>(grouped: &Grouped, (x, w): (*const T, *const T), sharers: usize) {
    let call = grouped.call;
    let Some(y) = call.output::<T>(0) else { return };
    let (n, k) = (grouped.n, grouped.k);
    let (of_n, of_k): (*mut T, *mut T) = (grouped.of_n.cast(), grouped.of_k.cast());
    // SAFETY: as below.
    unsafe { grouped.clear(n, y) };
    for expert in 0..grouped.experts() {
        for rows in grouped.rows(expert).chunks(CHUNK) {
            // SAFETY: the caller vouches for the operands; the verifier keeps outputs and scratch apart from inputs.
            unsafe {
                grouped.gather(rows, sharers, k, x, of_k);
                let (a, b) = (Matrix::rows(of_k.cast_const(), k), Matrix::rows(w.add(expert * n * k), k));
                let target = Target::new(of_n, n);
                gemm(call.pool, call.simd, (rows.len(), n, k), a, b.transposed(), target, grouped.gemm);
                grouped.scatter(rows, n, of_n, y);
            }
        }
    }
}

/// Operands of a call in fp8 as bf16, and the rows by expert.
fn widened_operands(call: Call<'_>) -> (Grouped<'_>, (*const Bf16, *const Bf16)) {
    // SAFETY: the scratch has room for both operands, and after them for the rest.
    unsafe {
        let x: *mut Bf16 = call.scratch();
        let w = widened(call, 0, x);
        let rest = widened(call, 2, w);
        (Grouped::new(call, 4, rest.cast()), (x, w))
    }
}

fn fp8_linear(call: Call, sharers: usize) {
    let (grouped, operands) = widened_operands(call);
    // SAFETY: as in `linear`.
    unsafe { linear_of(&grouped, operands, sharers) }
}

fn fp8_grad_weight(call: Call, sharers: usize) {
    let (grouped, operands) = widened_operands(call);
    // SAFETY: as in `linear`.
    unsafe { grad_weight_of(&grouped, operands, sharers) }
}

/// dx = dy · w by each row's expert.
pub fn grad_input<T: Float>(call: Call) {
    let Some(dx) = call.output::<T>(0) else { return };
    let grouped = Grouped::new(call, 2, call.scratch());
    let (n, k) = (grouped.n, grouped.k);
    let (of_n, of_k): (*mut T, *mut T) = (grouped.of_n.cast(), grouped.of_k.cast());
    let (dy, w) = (call.input::<T>(0), call.input::<T>(1));
    // SAFETY: as in `linear`.
    unsafe { grouped.clear(k, dx) };
    for expert in 0..grouped.experts() {
        for rows in grouped.rows(expert).chunks(CHUNK) {
            // SAFETY: as in `linear`.
            unsafe {
                grouped.gather(rows, 1, n, dy, of_n);
                let (a, b) = (Matrix::rows(of_n.cast_const(), n), Matrix::rows(w.add(expert * n * k), k));
                gemm(call.pool, call.simd, (rows.len(), k, n), a, b, Target::new(of_k, k), grouped.gemm);
                grouped.scatter(rows, k, of_k, dx);
            }
        }
    }
}

/// dw = dyᵀ · x of every expert: at once for float sums, sequence by sequence for fixed-point sums.
pub fn grad_weight<T: Float>(call: Call, sharers: usize) {
    let grouped = Grouped::new(call, 2, call.scratch());
    // SAFETY: as in `linear`.
    unsafe { grad_weight_of::<T>(&grouped, (call.input(0), call.input(1)), sharers) }
}

/// The same of operands of any type.
///
/// # Safety
/// The operands have the sizes of the call.
unsafe fn grad_weight_of<T: Float>(grouped: &Grouped, operands: (*const T, *const T), sharers: usize) {
    let call = grouped.call;
    let Some(dw) = call.accumulator(0) else { return };
    let size = grouped.n * grouped.k;
    let of_sequence = (call.size("seq") * call.size("choices") * call.size("parts") * call.size("rows")) as u32;
    let share = grouped.share;
    for expert in 0..grouped.experts() {
        let rows = grouped.rows(expert);
        // SAFETY: as in `linear`; sums that are not in f32 have n · k floats after the rest; tasks convert disjoint ranges.
        unsafe {
            if rows.is_empty() {
                match dw {
                    Accumulator::Float { sum, add: false } => Ptr(sum).slice(expert * size, size).fill(0.0),
                    Accumulator::Bf16 { sum, add: false } => Ptr(sum).slice(expert * size, size).fill(Float::of(0.0)),
                    Accumulator::Fixed { sum, add: false } => Ptr(sum).slice(expert * size, size).fill(0),
                    Accumulator::Float { .. } | Accumulator::Bf16 { .. } | Accumulator::Fixed { .. } => {}
                }
                continue;
            }
            let part = Ptr(share.cast_const());
            match dw {
                Accumulator::Float { sum, add } => {
                    grouped.weight_product(rows, sharers, operands, sum.add(expert * size), add);
                }
                Accumulator::Bf16 { sum, add } => {
                    grouped.weight_product(rows, sharers, operands, share, false);
                    let sum = Ptr(sum.add(expert * size));
                    call.rows(size, |from, to| add_rounded(call.simd, part.at(from), sum.at(from), to - from, add));
                }
                Accumulator::Fixed { sum, add } => {
                    let sum = Ptr(sum.add(expert * size));
                    for (i, rows) in rows.chunk_by(|a, b| a / of_sequence == b / of_sequence).enumerate() {
                        grouped.weight_product(rows, sharers, operands, share, false);
                        call.rows(size, |from, to| {
                            add_fixed(call.simd, part.at(from), sum.at(from), to - from, add || i > 0);
                        });
                    }
                }
            }
        }
    }
}

/// out `[tokens, d]`: the sum of y `[tokens, choices, d]`, by their weights where `weighted`.
pub fn combine<T: Float>(call: Call, weighted: bool) {
    let (tokens, choices, d) = (call.size("batch") * call.size("seq"), call.size("choices"), call.size("features"));
    let (y, weights) = (Ptr(call.input::<T>(0)), weighted.then(|| Ptr(call.input::<f32>(1))));
    let Some(out) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(tokens, |from, to| {
        for token in from..to {
            // SAFETY: tokens from .. to belong to this task.
            unsafe {
                let weight = |i: usize| weights.map_or(1.0, |weights| *weights.at(token * choices + i));
                for (feature, out) in out.slice(token * d, d).iter_mut().enumerate() {
                    let of = |i: usize| weight(i) * (*y.at((token * choices + i) * d + feature)).to();
                    *out = T::of((0..choices).map(of).sum());
                }
            }
        }
    });
}

/// dy = weight · dout, dweight = dout · y.
pub fn combine_grad<T: Float>(call: Call) {
    let (tokens, choices, d) = (call.size("batch") * call.size("seq"), call.size("choices"), call.size("features"));
    let (dout, y, weights) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)), Ptr(call.input::<f32>(2)));
    let (dy, dweights) = (call.output::<T>(0).map(Ptr), call.output::<f32>(1).map(Ptr));
    call.rows(tokens * choices, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task; each element of y is read before dy, which may be in its place.
            unsafe {
                let (mut dot, weight, first) = (0.0, *weights.at(row), row / choices * d);
                for i in 0..d {
                    let dout = (*dout.at(first + i)).to();
                    dot += dout * (*y.at(row * d + i)).to();
                    if let Some(dy) = dy {
                        *dy.at(row * d + i) = T::of(weight * dout);
                    }
                }
                if let Some(dweights) = dweights {
                    *dweights.at(row) = dot;
                }
            }
        }
    });
}
