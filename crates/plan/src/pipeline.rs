//! When the stages of a pipeline compute what, as far as a plan can tell: FLOPs are time, and transfers are free.

use lockstep_compile::SEND_BUFFER_COPIES;
use lockstep_ir::account;
use lockstep_ir::schedule::{Costs, Timeline, evaluate};
use lockstep_ir::{Layout, MeshAxis, StepProgram};

/// How the pipeline of a step fills, in FLOPs of a rank: none where there is no pipeline.
pub fn pipeline_timeline(programs: &[StepProgram], layout: &Layout) -> Option<Timeline> {
    if layout.mesh.size(MeshAxis::Pp) == 1 {
        return None;
    }
    let pipeline = layout.pipeline();
    let chunks = account::chunk_costs(programs, &pipeline).ok()?;
    evaluate(&pipeline, &Costs { chunks, transfer: 0.0 }, SEND_BUFFER_COPIES).ok()
}
