//! What no run can have measured: rows with a slip in a unit or a column.

use super::row::{Measured, PublishedShape, Row};
use lockstep_ir::units;
use lockstep_sim::GpuSpec;

/// Sources count parameters and bytes differently, by no more than this.
const SLACK: f64 = 1.25;

/// The reason why a row cannot be true on its GPU.
pub fn check(row: &Row, gpu: &GpuSpec) -> Result<(), String> {
    let PublishedShape { params, seq, .. } = row.shape;
    let (least, most) = parameters(&row.shape);
    // Of experts, sizes say what one has.
    let params = params.filter(|_| row.known.as_ref().is_none_or(|known| known.active_experts.is_none()));
    if let Some(params) = params.filter(|params| *params * SLACK < least || *params > most * SLACK) {
        return Err(format!("params = {params:e}, and layers, hidden, ffn and vocab make {least:.2e} to {most:.2e}"));
    }
    let Some(Measured { step_s, memory_bytes }) = row.measured else { return Ok(()) };
    let tokens = (row.split.global_batch * seq) as f64 / row.gpus as f64;
    let peak = gpu.peak_flops_per_s.max(gpu.fp8_flops_per_s.unwrap_or(0.0));
    let fastest = 6.0 * matmul_parameters(&row.shape, 2) * tokens / peak;
    if let Some(step) = step_s.filter(|step| *step < fastest) {
        let (name, took) = (&gpu.name, units::seconds(step));
        return Err(format!(
            "a step of {took} is faster than its matmuls at the peak of {name}, {}",
            units::seconds(fastest)
        ));
    }
    let room = gpu.memory_bytes as f64;
    if let Some(bytes) = memory_bytes.filter(|bytes| *bytes > room * SLACK) {
        let (said, has) = (units::bytes(bytes as u64), units::bytes(gpu.memory_bytes));
        return Err(format!("mem_gb is {said}, and {} has {has}", gpu.name));
    }
    Ok(())
}

/// Parameters of the layers' matmuls, where an MLP has this many.
fn matmul_parameters(shape: &PublishedShape, of_mlp: usize) -> f64 {
    let (hidden, heads) = (shape.hidden as f64, shape.heads as f64);
    let queries = shape.kv_heads.map_or(1.0, |kv| (kv as f64 / heads).min(1.0));
    let attention = hidden * hidden * (2.0 + 2.0 * queries);
    let ffn = shape.ffn.map_or(4.0 * hidden, |ffn| ffn as f64);
    shape.layers as f64 * (attention + of_mlp as f64 * hidden * ffn)
}

/// The least and the most parameters that a shape may have: two or three matrices of an MLP, embeddings that are shared or not.
fn parameters(shape: &PublishedShape) -> (f64, f64) {
    let table = shape.hidden as f64 * shape.vocab.map_or(0.0, |vocab| vocab as f64);
    let largest = shape.hidden as f64 * shape.vocab.unwrap_or(300_000) as f64;
    (matmul_parameters(shape, 2) + table, matmul_parameters(shape, 3) + 2.0 * largest)
}
