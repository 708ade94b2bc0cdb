//! Grouped matmuls on Hopper's tensor cores, in bf16 and f16 (`grouped.cu`) and in fp8 (`grouped_fp8.cu`).

use super::experts::Sorted;
use crate::CudaError;
use crate::call::{Call, suffix, sum_kind};
use crate::driver::Address;
use crate::kernels::{Block, Value, args};
use crate::tensor_map::TensorMap;
use lockstep_ir::DType;

/// Which product of rows and weights `w [experts, n, k]`.
#[derive(Clone, Copy)]
pub enum Product {
    /// y = x · wᵀ.
    Forward,
    /// dx = dy · w.
    Input,
}

/// Most experts, and what all sizes are multiples of: as in `grouped.cu`.
const MOST_EXPERTS: usize = 256;
const BLOCK: usize = 64;
/// What they are multiples of in fp8: a line of a tile.
const BYTES: usize = 128;
/// A tile's columns, threads, and bytes of shared memory: those of `Shared` there.
const COLUMNS: u32 = 256;
const THREADS: usize = 384;
const SHARED: usize = 231_752;
/// Those of `SharedWeight` in `grouped_fp8.cu`.
const SHARED_WEIGHT: usize = 231_784;

/// Whether they multiply elements of this type.
pub fn multiplies(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// Whether these kernels take a call.
pub fn fits(call: Call) -> bool {
    let sizes = [call.size("outputs"), call.size("inputs")];
    call.kernels.capability() == 90
        && multiplies(call.float())
        && call.size("experts") <= MOST_EXPERTS
        && sizes.iter().all(|n| n.is_multiple_of(BLOCK))
}

/// Whether the kernels of bytes take a call.
pub fn fits_bytes(call: Call) -> bool {
    let sizes = [call.size("outputs"), call.size("inputs")];
    call.kernels.capability() == 90
        && call.size("experts") <= MOST_EXPERTS
        && sizes.iter().all(|n| n.is_multiple_of(BYTES))
        && call.bound.inputs[2].dtype == DType::E4M3
}

/// Rows of `a`, gathered, times weights, scattered to `out`.
///
/// # Safety
/// The operands have the sizes of the call.
pub unsafe fn rows(
    call: Call,
    product: Product,
    (a, w, out): (Address, Address, Address),
    Sorted { experts, order, starts, .. }: Sorted,
    sharers: usize,
) -> Result<(), CudaError> {
    let (n, k) = (call.size("outputs"), call.size("inputs"));
    let (name, columns, depth, lines) = match product {
        Product::Forward => ("grouped_forward", n, k, COLUMNS),
        Product::Input => ("grouped_input", k, n, BLOCK as u32),
    };
    let map = TensorMap::new(w, call.float(), &[k as u64, (experts * n) as u64], &[BLOCK as u32, lines])?;
    let args = args![a, out, order, starts, experts, columns, depth, 0, sharers, 0, false];
    // SAFETY: the caller vouches.
    unsafe { launch(call, name, [map, TensorMap::default()], args) }
}

/// dw (+)= dyᵀ · x, in f32 or bf16; x is sorted before.
///
/// # Safety
/// The operands have the sizes of the call, and so does the room.
pub unsafe fn weight(
    call: Call,
    (dy, x, dw): (Address, Address, Address),
    Sorted { experts, places, order, starts, places_of, room }: Sorted,
    sharers: usize,
    (sums, add): (DType, bool),
) -> Result<(), CudaError> {
    let (n, k) = (call.size("outputs"), call.size("inputs"));
    let from = TensorMap::new(room, call.float(), &[k as u64, places as u64], &[BLOCK as u32; 2])?;
    let to = sums_map(sums, dw, [k, n, experts])?;
    let rows = call.rows() * call.size("choices") * call.size("parts") * call.size("rows");
    let blocks = [experts + rows.div_ceil(sharers).div_ceil(8), 1, 1];
    let scattered = args![x, room, places_of, starts, rows, experts, k / 8, sharers];
    let args = args![dy, dw, order, starts, experts, k, 0, n, 1, sum_kind(sums), add];
    // SAFETY: the caller vouches.
    unsafe {
        call.plain(("experts", "scatter_rows"), blocks, 256, scattered)?;
        launch(call, "grouped_weight", [from, to], args)
    }
}

/// Rows of bytes, gathered, times weights of bytes, scattered to `out`.
///
/// # Safety
/// The operands have the sizes of the call.
pub unsafe fn rows_of_bytes(
    call: Call,
    (a, w, out): (Address, Address, Address),
    (unit, units): (Address, Address),
    Sorted { experts, order, starts, .. }: Sorted,
    sharers: usize,
) -> Result<(), CudaError> {
    let (n, k) = (call.size("outputs"), call.size("inputs"));
    let map = TensorMap::new(w, DType::E4M3, &[k as u64, (experts * n) as u64], &[BYTES as u32, COLUMNS])?;
    let args = args![a, out, order, starts, experts, n, k, sharers, unit, units];
    let name = format!("grouped_forward_{}", suffix(call.bound.inputs[0].dtype));
    // SAFETY: the caller vouches.
    unsafe { launch_of(call, ("grouped_fp8", &name), SHARED, &[map, TensorMap::default()], args) }
}

/// dw (+)= dyᵀ · x of bytes, which lie transposed in the order of rows, `pitch` of them in a line.
///
/// # Safety
/// The operands have the sizes of the call.
pub unsafe fn weight_of_bytes(
    call: Call,
    (dy, x, pitch): (Address, Address, usize),
    (unit, other): (Address, Address),
    dw: Address,
    (experts, starts): (usize, Address),
    (sums, add): (DType, bool),
) -> Result<(), CudaError> {
    let (n, k) = (call.size("outputs"), call.size("inputs"));
    let dy = TensorMap::new(dy, DType::E4M3, &[pitch as u64, n as u64], &[BYTES as u32; 2])?;
    let x = TensorMap::new(x, DType::E4M3, &[pitch as u64, k as u64], &[BYTES as u32, BYTES as u32 / 2])?;
    let args = args![dw, starts, experts, k, n, sum_kind(sums), add, unit, other];
    let name = format!("grouped_weight_{}", suffix(call.bound.inputs[0].dtype));
    let to = sums_map(sums, dw, [k, n, experts])?;
    // SAFETY: the caller vouches.
    unsafe { launch_of(call, ("grouped_fp8", &name), SHARED_WEIGHT, &[dy, x, to], args) }
}

/// Of sums in f32; those in bf16 go there without it.
fn sums_map(sums: DType, dw: Address, sizes: [usize; 3]) -> Result<TensorMap, CudaError> {
    match sums {
        DType::F32 => TensorMap::new(dw, sums, &sizes.map(|n| n as u64), &[32, BLOCK as u32, 1]),
        _ => Ok(TensorMap::default()),
    }
}

unsafe fn launch(call: Call, name: &str, maps: [TensorMap; 2], args: &[Value]) -> Result<(), CudaError> {
    // SAFETY: the caller vouches.
    unsafe { launch_of(call, ("grouped", &format!("{name}_{}", call.suffix())), SHARED, &maps, args) }
}

/// As many blocks as the device has multiprocessors, in pairs: each takes tiles until there are none.
unsafe fn launch_of(
    call: Call,
    kernel: (&str, &str),
    shared: usize,
    maps: &[TensorMap],
    args: &[Value],
) -> Result<(), CudaError> {
    let grid = [call.kernels.processors() / 2 * 2, 1, 1];
    let maps: Vec<u64> = maps.iter().flat_map(|map| map.words).collect();
    let block = Block { threads: THREADS, shared };
    // SAFETY: the caller vouches.
    unsafe { call.on().launch_with(kernel, grid, block, Some(&maps), args) }
}
