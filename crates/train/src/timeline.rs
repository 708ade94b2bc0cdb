//! Memory over the first steps of a run, in the form that the plan gives.

use lockstep_exec::Timing;
use lockstep_ir::{StepProgram, timeline};
use lockstep_plan::{Clock, Mark, MemoryTimeline};

/// The timeline of a run's first steps, from when each instruction ran and the addresses that it used.
pub fn observed_timeline(program: &StepProgram, steps: &[Vec<Timing>], touched_bytes: Option<u64>) -> MemoryTimeline {
    let mut marks = Vec::new();
    let mut begin = 0.0;
    for (step, timings) in steps.iter().enumerate() {
        let points = timeline::observed(program, timings.iter().map(|t| (t.slot, t.instr)));
        for (t, point) in timings.iter().zip(&points) {
            let start = begin + t.start_s;
            marks.push(Mark::new(program, step, start, start + t.seconds, point));
        }
        begin = marks.last().map_or(begin, |mark| mark.end);
    }
    MemoryTimeline { marks, arena_bytes: program.arena_bytes, touched_bytes, clock: Clock::Measured, left_out: 0 }
}
