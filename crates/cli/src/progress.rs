//! What a run shows while it goes: a bar on a terminal, a plain line every ten seconds elsewhere.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lockstep_ir::units;
use lockstep_train::{Event, StepMetrics};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Shows a run's events on stderr.
pub struct Progress {
    bar: Option<ProgressBar>,
    steps: u64,
    /// When the first step of this call began, and which it was.
    begun: Option<(Instant, u64)>,
    /// When the check of the data began.
    checking: Option<Instant>,
    last_line: Option<Instant>,
    val_loss: Option<f64>,
}

const LINE_EVERY: Duration = Duration::from_secs(10);

/// What takes no longer is not shown.
const SHORT: Duration = Duration::from_secs(2);

impl Progress {
    /// For a run of this many steps.
    pub fn new(steps: u64) -> Self {
        Self { bar: None, steps, begun: None, checking: None, last_line: None, val_loss: None }
    }

    /// Shows one event.
    pub fn show(&mut self, event: Event) {
        match event {
            Event::Preparing(p) => self.work("preparing data", p.bytes_done, p.bytes_total, units::bytes),
            Event::Checking { done, total } => {
                // Most data are checked in no time: nobody needs to hear of it.
                if self.checking.get_or_insert_with(Instant::now).elapsed() >= SHORT {
                    self.work("checking data", done, total, units::bytes);
                }
            }
            Event::Saving { done, total } if done < total => self.saving(done, total),
            Event::Saving { .. } => {}
            Event::Warning(text) => self.say(&format!("warning: {text}")),
            Event::Note(note) => self.say(&note.to_string()),
            Event::Initialised { from } => self.say(&format!("weights from {}", from.display())),
            Event::Started { plan, ceiling, arena_bytes, context_bytes, train_tokens, from_step, dir } => {
                self.clear();
                self.say(&format!(
                    "{} parameters, {} training tokens, arena {} ({} bytes){}, {}",
                    units::count(plan.parameters),
                    units::count(train_tokens),
                    units::bytes(plan.memory.total_bytes),
                    plan.memory.total_bytes,
                    match plan.layout.mesh.ranks() {
                        1 => String::new(),
                        ranks => format!(" at most on each of {ranks} ranks ({})", plan.layout),
                    },
                    plan.device
                ));
                if let Some(context) = context_bytes {
                    let [arena, context] = [arena_bytes, context].map(units::gib);
                    self.say(&format!("GPU memory: arena {arena} + context {context}"));
                }
                self.say(&format!(
                    "MFU is measured against this machine's {}, {}/s",
                    plan.ceiling_name(),
                    units::flops(ceiling)
                ));
                let resumed =
                    if from_step == 0 { "starting".to_owned() } else { format!("resuming at step {from_step}") };
                self.say(&format!("{resumed}, files in {}", dir.display()));
                self.begun = Some((Instant::now(), from_step));
                if std::io::stderr().is_terminal() {
                    let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {wide_msg}");
                    let bar = ProgressBar::with_draw_target(Some(self.steps), ProgressDrawTarget::stderr());
                    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
                    bar.set_position(from_step);
                    self.bar = Some(bar);
                }
            }
            Event::Validated { step, loss } => {
                self.val_loss = Some(loss);
                self.say(&format!("step {step}: held-out loss {loss:.4} nats per token"));
            }
            Event::Skipped { step } => {
                self.say(&format!("warning: step {step}: the gradient is not finite, update left out"));
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

    fn step(&mut self, m: &StepMetrics) {
        let left = self.begun.map_or(0.0, |(start, from)| {
            start.elapsed().as_secs_f64() / (m.step - from).max(1) as f64 * (self.steps - m.step) as f64
        });
        let held_out = self.val_loss.map_or(String::new(), |l| format!(", held-out {l:.3}"));
        // Last, since a narrow terminal cuts the line.
        let power = m.gpu.gpu_power_w.map_or(String::new(), |power| format!(", {power:.0} W"));
        let memory = m.gpu.gpu_memory_bytes.map_or(String::new(), |bytes| format!(", {}", units::bytes(bytes)));
        let text = format!(
            "loss {:.3}{held_out}, {} tokens/s, MFU {:.0}%, {} left{power}{memory}",
            m.loss,
            units::count(m.tokens_per_s as u64),
            100.0 * m.mfu,
            units::seconds(left)
        );
        if let Some(bar) = &self.bar {
            bar.set_position(m.step);
            bar.set_message(text);
        } else if m.step == self.steps || self.due() {
            self.say(&format!("step {}/{}: {text}", m.step, self.steps));
        }
    }

    fn saving(&mut self, done: u64, total: u64) {
        match &self.bar {
            Some(bar) => {
                bar.set_message(format!("saving a checkpoint: {} of {}", units::bytes(done), units::bytes(total)))
            }
            None => self.work("saving a checkpoint", done, total, units::bytes),
        }
    }

    /// A long operation outside of the steps, counted in what `amount` writes.
    pub fn work(&mut self, what: &str, done: u64, total: u64, amount: fn(u64) -> String) {
        let text = || format!("{what}: {} of {}", amount(done), amount(total));
        if std::io::stderr().is_terminal() {
            let bar = self.bar.get_or_insert_with(|| {
                let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
                let style = ProgressStyle::with_template("{bar:24} {msg}");
                bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
                bar
            });
            bar.set_length(total);
            bar.set_position(done);
            bar.set_message(text());
        } else if self.due() {
            self.say(&text());
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

    fn say(&self, text: &str) {
        // A run goes on where nobody reads its log any more.
        let print = || {
            let _ = writeln!(std::io::stderr(), "{text}");
        };
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }
}
