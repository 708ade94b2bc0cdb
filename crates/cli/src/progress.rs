//! What a run shows while it goes: a bar on a terminal, a plain line every ten seconds elsewhere.

use crate::failure::Failure;
use crate::host_memory::in_host;
use crate::remedies;
use crate::style::message;
use console::Term;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lockstep_hub::HubProgress;
use lockstep_infer::TaskScores;
use lockstep_infer::state::Converted;
use lockstep_ir::{DType, Hint, units};
use lockstep_rundir::Changed;
use lockstep_train::{Event, StepMetrics};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Shows a run's events on stderr.
pub struct Progress {
    /// Nothing but warnings is shown.
    quiet: bool,
    bar: Option<ProgressBar>,
    steps: u64,
    /// When the first step of this call began, and which it was.
    begun: Option<(Instant, u64)>,
    /// When the check of the data or the validation that is under way began.
    working: Option<Instant>,
    last_line: Option<Instant>,
    val_loss: Option<f64>,
    /// What the bar shows of the last step.
    shown: (u64, Vec<Field>),
}

/// The share of a step that it may wait for data before that is shown.
const DATA_WAIT: f64 = 0.05;

const LINE_EVERY: Duration = Duration::from_secs(10);

/// What takes no longer is not shown.
const SHORT: Duration = Duration::from_secs(2);
const SEARCH: Duration = Duration::from_millis(500);

impl Progress {
    /// For a run of this many steps.
    pub fn new(steps: u64) -> Self {
        let (begun, working, last_line) = (None, None, None);
        Self { quiet: false, bar: None, steps, begun, working, last_line, val_loss: None, shown: (0, Vec::new()) }
    }

    /// One that shows nothing but warnings.
    pub fn quiet(self) -> Self {
        Self { quiet: true, ..self }
    }

    /// Shows one event.
    pub fn show(&mut self, event: Event) {
        match event {
            Event::Warning(text) => self.warn(text),
            Event::Trouble { what, error } => self.warn(&format!("{what}{}", Failure::from(error).with_hint())),
            Event::Undone { change, goes_back } => self.warn(&remedies::undone(change, goes_back)),
            Event::Overruled(overruled) => self.warn(&remedies::overruled(overruled)),
            Event::Skipped(skipped) => self.warn(&format!("step {}: {skipped}, update skipped", skipped.step)),
            Event::WorldChanged(change) => {
                let line = change.to_string();
                self.warn(&change.cause.as_ref().map_or(line.clone(), |cause| format!("{cause}\n{line}")));
            }
            Event::RolledBack(roll_back) => self.warn(&format!("rolled back {roll_back}")),
            _ if self.quiet => {}
            Event::InWorld { .. } | Event::LeftOut { .. } => {}
            Event::Preparing(p) => self.preparing("data", p),
            // Most data are checked in no time: nobody needs to hear of it.
            Event::Checking { done, total } => self.long_work("checking data", done, total, units::bytes),
            Event::Saving { done, total } if done < total => {
                self.work("saving a checkpoint", done, total, units::bytes);
            }
            Event::Saving { .. } => self.show_steps(),
            Event::Note(note) => self.say(&note.to_string()),
            Event::Converted(kind) => self.say(&converted(kind)),
            Event::PrecisionInherited(policy) => self.say(&format!(
                "precision.policy = \"{policy}\", as these weights are; an export keeps it unless it is given --dtype"
            )),
            Event::Initialised { from } => self.say(&format!("weights from {}", from.display())),
            Event::Changed { step, changed } => self.say(&format!("from step {step} on: {}", change(changed))),
            Event::RateChanged { before, now } => self.say(&format!(
                "the schedule with these values counts from here on: learning rate {now:.3e} next, {before:.3e} without them"
            )),
            Event::SetAside { step, later, to } => self.say(&format!(
                "back to step {step}: {} checkpoint{} of later steps and the metrics after it are kept in {}",
                later.len(),
                if later.len() == 1 { "" } else { "s" },
                to.display()
            )),
            Event::Started { plan, peak, processes, arena_bytes, snapshot_bytes, context_bytes, train_tokens, steps, from_step, dir } => {
                self.steps = steps;
                self.clear();
                self.working = None;
                self.say(&format!(
                    "{} parameters{}, {} training tokens, {}",
                    units::count(plan.parameters),
                    match plan.trained_parameters == plan.parameters {
                        true => String::new(),
                        false => format!(" ({} trained)", units::count(plan.trained_parameters)),
                    },
                    units::count(train_tokens),
                    plan.device
                ));
                if let Some(processes) = processes {
                    self.say(&processes);
                }
                self.say(&format!(
                    "arena {} ({} bytes){}",
                    units::bytes(plan.memory.total_bytes),
                    plan.memory.total_bytes,
                    match plan.layout.mesh.ranks() {
                        1 => String::new(),
                        ranks => format!(" at most on each of {ranks} ranks ({})", plan.layout),
                    }
                ));
                if plan.host_bytes() > 0 {
                    let bytes = plan.host_bytes();
                    let what = in_host(bytes, plan.host_activation_bytes());
                    self.say(&format!("host memory for {what} {} ({bytes} bytes)", units::bytes(bytes)));
                }
                if let Some(bytes) = snapshot_bytes {
                    self.say(&format!("host memory for a snapshot of a checkpoint {} ({bytes} bytes)", units::bytes(bytes)));
                }
                if let Some(context) = context_bytes {
                    let [arena, context] = [arena_bytes, context].map(units::gib);
                    self.say(&format!("GPU memory: arena {arena} + context {context}"));
                }
                self.say(&format!("MFU is a share of {}/s: {}", units::flops(peak.flops_per_s), peak.name));
                let resumed =
                    if from_step == 0 { "starting".to_owned() } else { format!("resuming at step {from_step}") };
                self.say(&format!("{resumed}, files in {}", dir.display()));
                self.begun = Some((Instant::now(), from_step));
                self.shown = (from_step, Vec::new());
                if std::io::stderr().is_terminal() {
                    self.bar = Some(bar());
                    self.show_steps();
                }
            }
            Event::Planning { small, whole } => {
                self.found("searching layouts: small programs", small, "whole programs", whole);
            }
            Event::Validating { done, total } => {
                self.long_work("validating", done, total, |n| format!("{} tokens", units::count(n)));
            }
            Event::Validated { step, loss } => {
                self.working = None;
                self.val_loss = Some(loss);
                self.say(&format!("step {step}: validation loss {loss:.4} nats per token"));
                // The time that is left is that of steps.
                self.begun = self.begun.map(|(at, from)| (if from == step { Instant::now() } else { at }, from));
                self.show_steps();
            }
            Event::EvaluatingTasks { done, total } => {
                self.long_work("evaluating tasks", done, total, texts);
            }
            Event::EvaluatedTasks { step, tasks } => {
                self.working = None;
                tasks.iter().for_each(|(name, scores)| self.say(&format!("step {step}: {name} {}", in_words(scores))));
                self.show_steps();
            }
            Event::Saved { step, path } => self.say(&format!("step {step}: saved {}", path.display())),
            Event::Stepped(metrics) => self.step(metrics),
        }
    }

    /// Takes the bar away.
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// Data that are prepared, or that another process prepares.
    pub fn preparing(&mut self, what: &str, at: lockstep_data::Progress) {
        if at.waiting {
            self.clear();
            if self.due() {
                self.say(&format!("waiting for another process that prepares {what}"));
            }
            return;
        }
        self.work(&format!("preparing {what}"), at.bytes_done, at.bytes_total, units::bytes);
    }

    /// Files that come from the hub, or that another process downloads.
    pub fn downloading(&mut self, at: HubProgress<'_>) {
        match at {
            HubProgress::Waiting(name) => {
                if !self.quiet && self.due() {
                    self.say(&format!("waiting for another process that downloads {name}"));
                }
            }
            // Hubs that tell no lengths tell no total.
            HubProgress::Downloading { name, done, total } => {
                self.work(&format!("downloading {name}"), done, total.max(done), units::bytes);
            }
        }
    }

    fn step(&mut self, m: &StepMetrics) {
        let left = self.begun.map_or(0.0, |(start, from)| {
            start.elapsed().as_secs_f64() / (m.step - from).max(1) as f64 * self.steps.saturating_sub(m.step) as f64
        });
        let fields = [
            Some((0, format!("loss {:.3}", m.loss))),
            self.val_loss.map(|loss| (3, format!("val loss {loss:.3}"))),
            Some((2, format!("{} tokens/s", units::count(m.tokens_per_s as u64)))),
            Some((4, format!("MFU {:.0}%", 100.0 * m.mfu))),
            (m.data_wait_s > DATA_WAIT * m.step_s)
                .then(|| (3, format!("{:.0}% waiting for data", 100.0 * m.data_wait_s / m.step_s))),
            Some((1, format!("{} left", units::seconds(left)))),
            m.gpu.gpu_power_w.map(|power| (5, format!("{power:.0} W"))),
            m.gpu.gpu_memory_bytes.map(|bytes| (6, units::bytes(bytes))),
        ];
        let fields: Vec<Field> = fields.into_iter().flatten().map(|(rank, text)| Field { rank, text }).collect();
        self.shown = (m.step, fields);
        if self.bar.is_some() {
            self.show_steps();
        } else if m.step == self.steps || self.due() {
            let texts: Vec<&str> = self.shown.1.iter().map(|field| field.text.as_str()).collect();
            self.say(&format!("step {}/{}: {}", m.step, self.steps, texts.join(", ")));
        }
    }

    /// The bar of the steps, with the last one's fields.
    fn show_steps(&self) {
        let (step, fields) = &self.shown;
        if let (Some(bar), true) = (&self.bar, self.begun.is_some()) {
            bar.set_message(line(columns(), (*step, self.steps), &format!("{step}/{}", self.steps), fields));
        }
    }

    /// As [`work`](Self::work), where it takes long enough to be worth a word.
    fn long_work(&mut self, what: &str, done: u64, total: u64, amount: fn(u64) -> String) {
        if self.working.get_or_insert_with(Instant::now).elapsed() >= SHORT {
            self.work(what, done, total, amount);
        }
    }

    /// A long operation outside of the steps, counted in what `amount` writes.
    pub fn work(&mut self, what: &str, done: u64, total: u64, amount: fn(u64) -> String) {
        self.work_with(what, (done, total), amount, "");
    }

    /// The same, with more to say after it.
    pub fn work_with(&mut self, what: &str, (done, total): (u64, u64), amount: fn(u64) -> String, more: &str) {
        let text = format!("{what}: {} of {}{more}", amount(done), amount(total));
        self.show_work(&text, || line(columns(), (done, total), &text, &[]));
    }

    /// A search whose end is not known: how many it has looked at, in two ways.
    pub fn found(&mut self, what: &str, one: u64, which: &str, other: u64) {
        if self.working.get_or_insert_with(Instant::now).elapsed() < SEARCH {
            return;
        }
        let text = format!("{what}: {one}, {which}: {other}");
        self.show_work(&text, || text.clone());
    }

    /// Shows what is done outside of the steps: on a terminal as a bar.
    fn show_work(&mut self, text: &str, on_terminal: impl FnOnce() -> String) {
        if self.quiet {
        } else if std::io::stderr().is_terminal() {
            self.bar.get_or_insert_with(bar).set_message(on_terminal());
        } else if self.due() {
            self.say(text);
        }
    }

    /// Whether ten seconds have passed since the last plain line.
    fn due(&mut self) -> bool {
        let now = Instant::now();
        let due = self.last_line.is_none_or(|last| now - last >= LINE_EVERY);
        if due {
            self.last_line = Some(now);
        }
        due
    }

    fn warn(&self, text: &str) {
        self.say(&format!("warning: {text}"));
    }

    fn say(&self, text: &str) {
        // A run goes on where nobody reads its log any more.
        let print = || {
            let _ = writeln!(std::io::stderr(), "{}", message(text));
        };
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }
}

/// A key with its values.
pub fn change(changed: &Changed) -> String {
    let Changed { key, before, now, follows } = changed;
    format!("{key} = {now}, {before} before{}", if *follows { " (follows)" } else { "" })
}

/// Something to show of a step.
struct Field {
    /// The larger, the sooner it is left out.
    rank: usize,
    text: String,
}

/// Widest and narrowest bar.
const BAR: (usize, usize) = (24, 8);

/// A line with a bar that is shorter than `width` columns: fields are left out whole, the last in rank first.
fn line(width: usize, (done, total): (u64, u64), head: &str, fields: &[Field]) -> String {
    let text = |most: usize| {
        let kept: Vec<&str> = fields.iter().filter(|f| f.rank < most).map(|f| f.text.as_str()).collect();
        if kept.is_empty() { head.to_owned() } else { format!("{head} {}", kept.join(", ")) }
    };
    let room = |text: &str| (width.max(1) - 1).checked_sub(text.chars().count() + 1);
    let ranks = fields.iter().map(|f| f.rank + 1).max().unwrap_or(0);
    let fitting = (0..=ranks).rev().map(text).find(|text| room(text).is_some_and(|room| room >= BAR.1));
    let Some(text) = fitting else { return head.chars().take(width.max(1) - 1).collect() };
    let cells = room(&text).unwrap_or(0).min(BAR.0);
    let full = (done.min(total) as u128 * cells as u128 / u128::from(total.max(1))) as usize;
    format!("{}{} {text}", "█".repeat(full), "░".repeat(cells - full))
}

fn columns() -> usize {
    Term::stderr().size_checked().map_or(80, |(_, columns)| columns.into())
}

fn bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// `acc 0.2500, acc_norm 0.3125`.
fn in_words(scores: &TaskScores) -> String {
    let TaskScores { acc, acc_norm, acc_bytes: _, perplexity } = scores;
    let all = [("acc", acc), ("acc_norm", acc_norm), ("perplexity", perplexity)];
    let known: Vec<String> = all.iter().filter_map(|(name, value)| Some(format!("{name} {:.4}", (**value)?))).collect();
    known.join(", ")
}

/// What a run that goes on keeps otherwise than its checkpoint did.
fn converted(kind: &Converted) -> String {
    let Converted { group, from, to, tensors, .. } = kind;
    let what = if *group == "model" { "master weights" } else { "optimizer state" };
    let lost = match kind.lost() {
        0.0 => "nothing is lost".to_owned(),
        lost => format!("rounding moves them by {:.2}% (root of mean squares)", 100.0 * lost),
    };
    let shown = |dtype: &DType| match dtype {
        DType::Signed8 => "int8 (first moments)",
        DType::Unsigned8 => "int8 (second moments)",
        other => other.name(),
    };
    format!("{what}: {tensors} tensors go from {} to {}; {lost}", shown(from), shown(to))
}

/// `1 text`, `1.20K texts`.
pub fn texts(n: u64) -> String {
    format!("{} text{}", units::count(n), if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(width: usize) -> String {
        let fields = [
            (0, "loss 2.027"),
            (3, "val loss 2.126"),
            (2, "9.93K tokens/s"),
            (4, "MFU 71%"),
            (1, "40.5 s left"),
            (5, "690 W"),
            (6, "102 GiB"),
        ];
        let fields = fields.map(|(rank, text)| Field { rank, text: text.to_owned() });
        line(width, (101, 200), "101/200", &fields)
    }

    #[test]
    fn one_text_is_no_plural() {
        assert_eq!([0, 1, 2, 1200].map(texts), ["0 texts", "1 text", "2 texts", "1.20K texts"]);
    }

    #[test]
    fn a_line_is_shorter_than_the_terminal_and_leaves_out_whole_fields() {
        let all = "101/200 loss 2.027, val loss 2.126, 9.93K tokens/s, MFU 71%, 40.5 s left, 690 W, 102 GiB";
        for width in 1..200 {
            let line = shown(width);
            assert!(line.chars().count() < width.max(2), "{width}: {line}");
            let text = line.trim_start_matches(['█', '░', ' ']);
            if width > 30 {
                let (head, fields) = text.split_once(' ').unwrap_or((text, ""));
                assert_eq!(head, "101/200", "{width}");
                let known: Vec<&str> = all["101/200 ".len()..].split(", ").collect();
                let whole = |field: &str| field.is_empty() || known.contains(&field);
                assert!(fields.split(", ").all(whole), "{width}: {line}");
            }
        }
        assert_eq!(shown(200), format!("{}{} {all}", "█".repeat(12), "░".repeat(12)));
    }

    #[test]
    fn eighty_columns_show_what_matters_most() {
        assert_eq!(shown(80), "███████░░░░░░░░ 101/200 loss 2.027, val loss 2.126, 9.93K tokens/s, 40.5 s left");
        assert_eq!(shown(45), "██████░░░░░░ 101/200 loss 2.027, 40.5 s left");
        assert_eq!(shown(40), "██████████░░░░░░░░░░ 101/200 loss 2.027");
    }
}
