//! The four phases of a training step, as `--timeline` shows them: forward, backward, gradient reduction, optimizer step.

use super::exact;
use crate::table::{table, wrapped};
use lockstep_ir::units::{self, thousands};
use lockstep_plan::{Clock, MemoryTimeline, PhaseTime};
use serde::Serialize;

/// The phases of a step on a rank of one stage.
#[derive(Serialize)]
pub(super) struct StagePhases {
    stage: usize,
    #[serde(skip)]
    several: bool,
    /// What times are: instructions, or seconds.
    unit: &'static str,
    phases: Vec<PhaseTime>,
    #[serde(skip)]
    left_out: usize,
}

impl StagePhases {
    pub(super) fn new(stage: usize, several: bool, timeline: &MemoryTimeline) -> Self {
        let unit = match timeline.clock {
            Clock::Instructions => "instructions",
            Clock::PeakRates(_) | Clock::Measured => "s",
        };
        Self { stage, several, unit, phases: timeline.phases(), left_out: timeline.left_out }
    }

    fn text(&self) -> String {
        let seconds = self.unit == "s";
        let time = |t: f64| if seconds { exact(t) } else { thousands(t as u64) };
        let whole: f64 = self.phases.iter().map(|p| p.takes).sum();
        let row = |p: &PhaseTime| {
            vec![
                p.phase.name().to_owned(),
                time(p.begins),
                time(p.ends),
                time(p.takes),
                format!("{:.1}%", 100.0 * p.takes / whole.max(f64::MIN_POSITIVE)),
                if p.communicated_bytes == 0 { "-".to_owned() } else { units::bytes(p.communicated_bytes) },
            ]
        };
        let of = if self.several { format!(", stage {}", self.stage) } else { String::new() };
        let unit = if seconds { "time at the GPU's peak rates" } else { "time in instructions" };
        let title = format!("phases of the first step{of} ({unit})");
        let header = ["phase", "begins", "ends", "takes", "share", "communicated"];
        let rows: Vec<_> = self.phases.iter().map(row).collect();
        let mut text = format!("\n{}{}", wrapped(&title, "  "), table(&header, &rows));
        if seconds && self.phases.iter().any(|p| p.communicated_bytes > 0) {
            text.push_str("  collectives are not timed here: the forecast has their time by class\n");
        }
        if self.left_out > 0 {
            let noun = if self.left_out == 1 { "micro-batch that repeats" } else { "micro-batches that repeat" };
            let left_out = thousands(self.left_out as u64);
            text.push_str(&wrapped(&format!("  without {left_out} {noun} those before"), "    "));
        }
        text
    }
}

/// A table for each stage; nothing where none was asked for.
pub(super) fn as_text(stages: &[StagePhases]) -> String {
    stages.iter().map(StagePhases::text).collect()
}
