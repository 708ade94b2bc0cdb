//! Biases of experts.

use super::experts::{Sorted, sort};
use super::launch::{Launches, launches};
use super::pointwise::in_parts;
use crate::CudaError;
use crate::call::{Call, THREADS, sum_kind};
use crate::kernels::args;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        GroupedBias { .. } => add(call),
        GroupedBiasGrad { .. } => grad(call),
    }
}

/// y = x + the bias of the row's expert.
unsafe fn add(call: Call) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let (n, parts) = (call.size("outputs"), call.size("parts"));
    let rows = call.rows() * call.size("choices") * parts * call.size("rows");
    let (of_part, of_experts) = (rows.div_ceil(parts).max(1), call.size("experts") / parts);
    let wide = call.wide(n);
    let work = if wide { n / call.pack() } else { n };
    in_parts([work.div_ceil(THREADS), rows, 1], |first, grid| {
        let (x, bias, chosen) = (call.input(0), call.input(1), call.input(2));
        let args = args![x, bias, chosen, y, first, of_part, of_experts, n, wide];
        // SAFETY: the operands have these sizes.
        unsafe { call.typed(("expert_bias", "grouped_bias"), grid, THREADS, args) }
    })
}

/// dbias (+)= dy, summed over the rows of every expert.
unsafe fn grad(call: Call) -> Result<(), CudaError> {
    let (Some(out), Some(at)) = (call.output(0), call.bound.outputs[0]) else { return Ok(()) };
    let (n, kind, add) = (call.size("outputs"), sum_kind(at.dtype), call.adds(0));
    let of_sequence = call.size("seq") * call.size("choices") * call.size("parts") * call.size("rows");
    // SAFETY: the operands and the scratch have these sizes.
    unsafe {
        let Sorted { experts, order, starts, .. } = sort(call, false)?;
        let args = args![call.input(0), order, starts, out, experts, n, kind, add, of_sequence];
        call.typed(("expert_bias", "grouped_bias_grad"), [n.div_ceil(32), experts, 1], 1024, args)
    }
}
