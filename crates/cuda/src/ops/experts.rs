//! Mixtures of experts. Shapes: x `[rows, k]`, w `[experts, n, k]`, y `[rows, n]`; a token has a row for each of its experts. With expert
//! parallelism, rows are those of blocks `[parts, rows of a part]`, which have the experts of their part.
//!
//! Every matmul sorts the rows by expert for itself: numbers in its scratch, not the rows. What an expert gets is known on the device alone.

use super::grouped::{self, Product};
use super::launch::{Launches, launches};
use super::router;
use super::router::check_experts;
use crate::CudaError;
use crate::call::{Call, THREADS, suffix, sum_kind};
use crate::driver::{ALIGNMENT, Address};
use crate::kernels::args;
use lockstep_ir::{DType, Workspace};

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        Route { given, ref how } => if given { router::route_to(call, how) } else { router::route(call, how) },
        RouteGrad { ref how } => router::route_grad(call, how),
        ExpertCounts { .. } => router::counts(call),
        RouterLoss { balance, z } => router::router_loss(call, balance, z),
        RouterLossGrad { balance, z } => router::router_loss_grad(call, balance, z),
        ExpertLoad { .. } => router::load(call),
        StackTotals => router::stack_totals(call),
        MoveBias { row, rate } => router::move_bias(call, row, rate),
        GroupedLinear { each } => linear(call, call.bound.sharers(each)),
        GroupedGradInput => grad_input(call),
        GroupedGradWeight { each, .. } => grad_weight(call, call.bound.sharers(each)),
        Fp8Grouped { each } => fp8_rows(call, call.bound.sharers(each)),
        Fp8GroupedGradWeight { each, .. } => fp8_grad_weight(call, call.bound.sharers(each)),
        Fp8Rows { .. } => fp8_rows(call, 1),
        Fp8RowsGradWeight { .. } => fp8_grad_weight(call, 1),
        Combine { weighted } => combine(call, weighted),
        CombineGrad => combine_grad(call),
    }
}

/// Experts' rows start at multiples of this: as in `experts.cu`.
const TILE: usize = 128;
/// Side of a tile of the plain kernels: as in `experts.cu`.
const SIDE: usize = 64;
/// Most blocks that count rows, and rows that such a block counts at a time.
const SHARES: usize = 256;
const EACH: usize = 1024;

/// Scratch of a grouped matmul: the order of rows, with room for each expert's last tile; where experts start, how many rows they
/// have and which have most; counts of every share.
pub fn scratch() -> Workspace {
    Workspace {
        fixed: 3 * ALIGNMENT,
        terms: vec![(4, "… choices parts rows"), (4 * (TILE + 3 + SHARES) as u64, "experts")],
    }
}

/// The same of one into weights, which has x in the order of rows besides, and where in it each row is.
pub fn weight_scratch(compute: DType) -> Workspace {
    let Workspace { fixed, mut terms } = scratch();
    if grouped::multiplies(compute) {
        let bytes = compute.bytes() as u64;
        terms.extend([
            (4, "… choices parts rows"),
            (bytes, "… choices parts rows inputs"),
            (bytes * TILE as u64, "experts inputs"),
        ]);
    }
    Workspace { fixed: fixed + 2 * ALIGNMENT, terms }
}

/// The same in fp8: both operands as transposes in the order of rows.
pub fn fp8_weight_scratch() -> Workspace {
    let Workspace { fixed, mut terms } = scratch();
    let places = TILE as u64;
    terms.extend([(1, "… choices parts rows outputs"), (1, "… choices parts rows inputs")]);
    terms.extend([(places, "experts outputs"), (places, "experts inputs"), (places, "outputs"), (places, "inputs")]);
    Workspace { fixed: fixed + 3 * ALIGNMENT, terms }
}

/// Rows by expert, in the scratch of a call.
#[derive(Clone, Copy)]
pub struct Sorted {
    pub experts: usize,
    /// Most places that the order has, with padding.
    pub places: usize,
    pub order: Address,
    pub starts: Address,
    /// Where in the order each row is, if that was wanted.
    pub places_of: Option<Address>,
    /// After all of it.
    pub room: Address,
}

/// Sorts the rows of a call by what its last input says; says where each is if `inverse`.
pub unsafe fn sort(call: Call, inverse: bool) -> Result<Sorted, CudaError> {
    let (parts, experts) = (call.size("parts"), check_experts(call)?);
    let chosen = call.input(call.bound.inputs.len() - 1);
    let rows = call.rows() * call.size("choices") * parts * call.size("rows");
    let (of_part, of_experts) = (rows.div_ceil(parts).max(1), experts / parts);
    let whole = |elements: usize| (4 * elements as u64).next_multiple_of(ALIGNMENT);
    let order = call.scratch()?;
    let places = rows + experts * TILE;
    let starts = order + whole(places);
    let counts = starts + whole(3 * experts + 1);
    let behind = counts + whole(SHARES * experts);
    let (places_of, room) = if inverse { (Some(behind), behind + whole(rows)) } else { (None, behind) };
    let each = rows.div_ceil(SHARES).next_multiple_of(EACH);
    let blocks = [rows.div_ceil(each).max(1), 1, 1];
    // SAFETY: the operands and the scratch have these sizes.
    unsafe {
        call.plain(
            ("experts", "count_rows"),
            blocks,
            1024,
            args![chosen, counts, rows, each, experts, of_part, of_experts],
        )?;
        let args = args![chosen, counts, order, starts, places_of, rows, each, experts, of_part, of_experts];
        call.plain(("experts", "place_rows"), blocks, 1024, args)?;
    }
    Ok(Sorted { experts, places, order, starts, places_of, room })
}

/// out by rows of `a`, `sharers` of which are one, and weights.
unsafe fn rows(call: Call, product: Product, sharers: usize) -> Result<(), CudaError> {
    let Some(out) = call.output(0) else { return Ok(()) };
    let (n, k) = (call.size("outputs"), call.size("inputs"));
    let (a, w) = (call.input(0), call.input(1));
    // SAFETY: the operands have these sizes.
    unsafe {
        let sorted = sort(call, false)?;
        clear(call, out)?;
        if grouped::fits(call) {
            return grouped::rows(call, product, (a, w, out), sorted, sharers);
        }
        let (columns, depth, across) = match product {
            Product::Forward => (n, k, false),
            Product::Input => (k, n, true),
        };
        let grid = [sorted.places.div_ceil(SIDE), columns.div_ceil(SIDE), 1];
        let Sorted { experts, order, starts, .. } = sorted;
        let args = args![a, w, out, order, starts, experts, columns, depth, sharers, across];
        call.typed(("experts", "plain_rows"), grid, THREADS, args)
    }
}

/// y = x · wᵀ by each row's expert; `sharers` rows have one row of x.
pub unsafe fn linear(call: Call, sharers: usize) -> Result<(), CudaError> {
    // SAFETY: as the caller says.
    unsafe { rows(call, Product::Forward, sharers) }
}

/// dx = dy · w by each row's expert.
pub unsafe fn grad_input(call: Call) -> Result<(), CudaError> {
    // SAFETY: as the caller says.
    unsafe { rows(call, Product::Input, 1) }
}

/// dw (+)= dyᵀ · x of every expert.
pub unsafe fn grad_weight(call: Call, sharers: usize) -> Result<(), CudaError> {
    let (Some(dw), Some(at)) = (call.output(0), call.bound.outputs[0]) else { return Ok(()) };
    let (n, k, add) = (call.size("outputs"), call.size("inputs"), call.adds(0));
    let (dy, x, kind) = (call.input(0), call.input(1), sum_kind(at.dtype));
    // SAFETY: the operands have these sizes.
    unsafe {
        let by_tiles = grouped::fits(call) && at.dtype != DType::Fixed64;
        let sorted = sort(call, by_tiles)?;
        if by_tiles {
            return grouped::weight(call, (dy, x, dw), sorted, sharers, (at.dtype, add));
        }
        let Sorted { experts, order, starts, .. } = sorted;
        let of_sequence = call.size("seq") * call.size("choices") * call.size("parts") * call.size("rows");
        let grid = [k.div_ceil(SIDE), n.div_ceil(SIDE), experts];
        let args = args![dy, x, dw, order, starts, experts, n, k, sharers, kind, add, of_sequence];
        call.typed(("experts", "plain_weight"), grid, THREADS, args)
    }
}

/// Rows of no expert, which blocks have, become zeros.
unsafe fn clear(call: Call, out: Address) -> Result<(), CudaError> {
    match call.bound.outputs[0].filter(|_| call.size("rows") > 1) {
        // SAFETY: the output has these elements.
        Some(at) => unsafe { call.stream.fill(out, 0, at.elements * at.dtype.bytes()) },
        None => Ok(()),
    }
}

/// y = x · wᵀ of bytes, by each row's expert.
unsafe fn fp8_rows(call: Call, sharers: usize) -> Result<(), CudaError> {
    let Some(out) = call.output(0) else { return Ok(()) };
    let (n, k) = (call.size("outputs"), call.size("inputs"));
    let [a, unit, w, units] = [0, 1, 2, 3].map(|i| call.input(i));
    // SAFETY: the operands have these sizes.
    unsafe {
        let sorted = sort(call, false)?;
        clear(call, out)?;
        if grouped::fits_bytes(call) {
            return grouped::rows_of_bytes(call, (a, w, out), (unit, units), sorted, sharers);
        }
        let Sorted { experts, order, starts, places, .. } = sorted;
        let grid = [places.div_ceil(SIDE), n.div_ceil(SIDE), 1];
        let args = args![a, w, out, order, starts, experts, n, k, sharers, false, unit, units];
        let kernel = format!("plain_rows_{}", suffix(call.bound.inputs[0].dtype));
        call.plain(("experts", &kernel), grid, THREADS, args)
    }
}

/// dw (+)= dyᵀ · x of bytes, of every expert.
unsafe fn fp8_grad_weight(call: Call, sharers: usize) -> Result<(), CudaError> {
    let (Some(dw), Some(at)) = (call.output(0), call.bound.outputs[0]) else { return Ok(()) };
    let (n, k, add) = (call.size("outputs"), call.size("inputs"), call.adds(0));
    let [dy, unit, x, other] = [0, 1, 2, 3].map(|i| call.input(i));
    // SAFETY: the operands have these sizes, and the scratch those of the transposes.
    unsafe {
        let sorted = sort(call, false)?;
        let Sorted { experts, order, starts, places, room, .. } = sorted;
        if grouped::fits_bytes(call) && at.dtype != DType::Fixed64 {
            let pitch = places.next_multiple_of(TILE);
            let other_room = room + ((pitch * n) as u64).next_multiple_of(ALIGNMENT);
            for (from, to, columns, sharers) in [(dy, room, n, 1), (x, other_room, k, sharers)] {
                let args = args![from, to, order, starts, experts, columns, pitch, sharers];
                let grid = [places.div_ceil(TILE), columns.div_ceil(TILE), 1];
                call.plain(("experts", "sort_bytes"), grid, 256, args)?;
            }
            let factors = (room, other_room, pitch);
            return grouped::weight_of_bytes(call, factors, (unit, other), dw, (experts, starts), (at.dtype, add));
        }
        let of_sequence = call.size("seq") * call.size("choices") * call.size("parts") * call.size("rows");
        let grid = [k.div_ceil(SIDE), n.div_ceil(SIDE), experts];
        let kind = sum_kind(at.dtype);
        let args = args![dy, x, dw, order, starts, experts, n, k, sharers, kind, add, of_sequence, unit, other];
        let kernel = format!("plain_weight_{}", suffix(call.bound.inputs[0].dtype));
        call.plain(("experts", &kernel), grid, THREADS, args)
    }
}

/// out `[tokens, d]`: the sum of y `[tokens, choices, d]`, by their weights where `weighted`.
pub unsafe fn combine(call: Call, weighted: bool) -> Result<(), CudaError> {
    let Some(out) = call.output(0) else { return Ok(()) };
    let (d, weights) = (call.size("features"), weighted.then(|| call.input(1)));
    let wide = call.wide(d);
    let work = if wide { d / call.pack() } else { d };
    let threads = work.next_multiple_of(32).clamp(32, THREADS);
    let args = args![call.input(0), weights, out, call.size("choices"), d, wide];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("experts", "combine"), [call.rows(), 1, 1], threads, args) }
}

/// dy = weight · dout, dweight = dout · y.
pub unsafe fn combine_grad(call: Call) -> Result<(), CudaError> {
    let (d, choices) = (call.size("features"), call.size("choices"));
    let rows = call.rows() * choices;
    let (dout, y, weights) = (call.input(0), call.input(1), call.input(2));
    let args = args![dout, y, weights, call.output(0), call.output(1), rows, choices, d, call.wide(d)];
    // SAFETY: the operands have these sizes; an element of y is read before dy is written.
    unsafe { call.typed(("experts", "combine_grad"), [rows.div_ceil(THREADS / 32), 1, 1], THREADS, args) }
}
