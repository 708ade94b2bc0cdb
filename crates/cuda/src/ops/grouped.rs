//! Grouped matmuls in bf16 and f16 on Hopper's tensor cores (`grouped.cu`).

use super::experts::Sorted;
use crate::CudaError;
use crate::call::{Call, sum_kind};
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
/// A tile's columns, threads, and bytes of shared memory: those of `Shared` there.
const COLUMNS: u32 = 256;
const THREADS: usize = 384;
const SHARED: usize = 231_752;

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
    // Sums in bf16 go there without it.
    let to = match sums {
        DType::F32 => TensorMap::new(dw, sums, &[k as u64, n as u64, experts as u64], &[32, BLOCK as u32, 1])?,
        _ => TensorMap::default(),
    };
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

/// As many blocks as the device has multiprocessors, in pairs: each takes tiles until there are none.
unsafe fn launch(call: Call, name: &str, maps: [TensorMap; 2], args: &[Value]) -> Result<(), CudaError> {
    let grid = [call.kernels.processors() / 2 * 2, 1, 1];
    let (name, maps) = (format!("{name}_{}", call.suffix()), maps.map(|map| map.words));
    let block = Block { threads: THREADS, shared: SHARED };
    // SAFETY: the caller vouches.
    unsafe { call.on().launch_with(("grouped", &name), grid, block, Some(maps.as_flattened()), args) }
}
