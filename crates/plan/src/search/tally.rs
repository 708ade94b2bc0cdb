//! What a search left out, and why.

use super::{LayoutChoice, RankedLayout, SearchRequest};
use crate::NoLayout;
use lockstep_ir::units;
use lockstep_ir::units::thousands;
use serde::Serialize;

/// How a search went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SearchCounts {
    /// Choices that divide model, batch and GPUs.
    pub legal: u64,
    /// Of these, left out because they do not fit the memory.
    pub too_large: u64,
    /// Of these, left out because a bound on their step time is above that of the results.
    pub too_slow: u64,
    /// Small programs that were compiled for bounds and estimates.
    pub small: u64,
    /// Choices that were compiled whole and simulated.
    pub compiled: u64,
    /// Whether it ended before bounds had settled all choices: what was not looked at could be faster.
    pub stopped: bool,
}

/// Choices that were left out for one reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rejection {
    /// Why.
    pub reason: String,
    /// How many.
    pub layouts: u64,
    /// The one that came nearest.
    pub nearest: Option<String>,
}

pub(super) struct Tally {
    room: u64,
    pub counts: SearchCounts,
    least: Option<(u64, LayoutChoice)>,
    simulated: u64,
    next: Option<(f64, LayoutChoice)>,
    /// The least that a choice takes by its bound which was not looked at, where the search ended before.
    left_s: Option<f64>,
}

impl Tally {
    pub fn new(room: u64) -> Self {
        Self { room, counts: SearchCounts::default(), least: None, simulated: 0, next: None, left_s: None }
    }

    pub fn too_large(&mut self, choice: LayoutChoice, bytes: u64) {
        self.counts.too_large += 1;
        if self.least.is_none_or(|(least, _)| bytes < least) {
            self.least = Some((bytes, choice));
        }
    }

    /// The search ends here, and a choice that is left takes so long at least; none where it goes on.
    pub fn stopped_at(&mut self, left_s: Option<f64>) {
        (self.left_s, self.counts.stopped) = (left_s, left_s.is_some());
    }

    pub fn slower(&mut self, choice: LayoutChoice, seconds: f64) {
        self.simulated += 1;
        if self.next.is_none_or(|(next, _)| seconds < next) {
            self.next = Some((seconds, choice));
        }
    }

    pub fn nothing_fits(&self, request: &SearchRequest) -> NoLayout {
        let layouts = match self.counts.legal {
            1 => "the one layout".to_owned(),
            legal => format!("none of the {} layouts", thousands(legal)),
        };
        let reason = format!(
            "{layouts} of {} {} {} {}",
            units::counted(request.gpus, "GPU"),
            if self.counts.legal == 1 { "does not fit" } else { "fits" },
            units::bytes(self.room),
            request.room.place
        );
        match &self.least {
            None => {
                let hint = "give more GPUs, or a smaller train.seq".into();
                NoLayout { reason, hint, too_large: true, nearest: None }
            }
            Some((bytes, choice)) => {
                let missing = units::bytes(bytes.saturating_sub(self.room));
                let reason =
                    format!("{reason}; {choice} comes nearest and needs {} ({missing} too many)", units::bytes(*bytes));
                let hint = "give more GPUs, or a smaller train.seq or model".into();
                NoLayout { reason, hint, too_large: true, nearest: Some(Box::new(*choice)) }
            }
        }
    }

    pub fn end(mut self, best: &[RankedLayout], request: &SearchRequest) -> (SearchCounts, Vec<Rejection>) {
        let counts = &mut self.counts;
        counts.too_slow = counts.legal - counts.too_large - self.simulated - best.len() as u64;
        let mut all = Vec::new();
        if let Some((bytes, choice)) = &self.least {
            let over = units::bytes(bytes.saturating_sub(self.room));
            all.push(Rejection {
                reason: format!("does not fit {} {}", units::bytes(self.room), request.room.place),
                layouts: counts.too_large,
                nearest: Some(format!("{choice}: {over} too many")),
            });
        }
        let slowest = best.iter().map(|l| l.evaluated.forecast.step_s).fold(0.0, f64::max);
        if counts.too_slow > 0 {
            all.push(Rejection {
                reason: match self.left_s {
                    None => format!("a bound on the step time is above the {slowest:.4} s of the last that is shown"),
                    Some(left_s) => format!(
                        "the search ended after {} small and {} whole programs: bounds tell only that these take {left_s:.4} s or more",
                        counts.small, counts.compiled
                    ),
                },
                layouts: counts.too_slow,
                nearest: None,
            });
        }
        if let Some((seconds, choice)) = &self.next {
            all.push(Rejection {
                reason: "simulated, and slower than those that are shown".into(),
                layouts: self.simulated,
                nearest: Some(format!("{choice}: {:+.1}%", 100.0 * (seconds / slowest - 1.0))),
            });
        }
        (self.counts, all)
    }
}
