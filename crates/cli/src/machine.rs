//! `bench --save` and `bench --learn`: this machine's profile; `explain --analyze`: what it predicted beside what was measured.

use crate::Format;
use crate::failure::{Failure, Result};
use crate::table::{table, wrapped};
use lockstep_host::{Devices, Prediction, write_machine};
use lockstep_ir::units::counted;
use lockstep_train::{Analysis, CalibrationSpec, ClassTime, analyze, learn as learn_from, measure_machine};
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Instant;

/// Measures this machine, and saves that under a name.
pub fn save(name: &str, device: &str, ranks: &[usize]) -> Result<()> {
    let legal = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.starts_with('.') || !name.chars().all(legal) {
        return Err(Failure::request(
            format!("--save {name}: a profile's name has letters, digits, '-', '_' and '.'"),
            "--save this-machine, say",
        ));
    }
    let terminal = std::io::stderr().is_terminal();
    let (begun, mut last) = (Instant::now(), Instant::now());
    let mut show = |text: &str, done: usize, all: usize| {
        if terminal || last.elapsed().as_secs() >= 10 {
            let _ = writeln!(std::io::stderr(), "{done} of {all}: {text}");
            last = Instant::now();
        }
    };
    let spec = CalibrationSpec { name: name.to_owned(), device: device.to_owned(), ranks: ranks.to_vec() };
    let profile = measure_machine(&Devices::new(), &spec, &mut show)?;
    let path = write_machine(&profile)?;
    let mut out = std::io::stdout().lock();
    let points: usize = profile.settings.iter().flat_map(|s| &s.tables).map(|t| t.points.len()).sum();
    writeln!(
        out,
        "measured {} in {:.0} s: {points} times by op and size",
        profile.processor,
        begun.elapsed().as_secs_f64()
    )?;
    writeln!(out, "saved in {}", path.display())?;
    Ok(())
}

/// Adds what a run measured to this machine's profile.
pub fn learn(run: &Path) -> Result<()> {
    let learned = learn_from(&Devices::new(), run)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{} times by op and size added to {}", learned.points, learned.file.display())?;
    Ok(())
}

/// A predicted step beside the measured one. A line.
pub fn beside(prediction: &Prediction, measured_s: f64) -> String {
    let predicted = prediction.forecast.step_s;
    let apart = 100.0 * (predicted / measured_s - 1.0);
    format!("predicted {:.1} ms a step ({}): {apart:+.1}%\n", predicted * 1e3, prediction.by)
}

/// Predicted beside measured of a run.
pub fn show_analysis(run: &Path, format: Format) -> Result<()> {
    let analysis = analyze(run)?;
    let learn = "adds the measured times to this machine's profile";
    let text = || analysis_text(&analysis) + &format!("lockstep bench --learn {} {learn}\n", run.display());
    format.print(|| serde_json::json!(analysis), text)
}

/// Predicted beside measured, as text.
pub fn analysis_text(a: &Analysis) -> String {
    let ms = |seconds: Option<f64>| seconds.map_or("-".to_owned(), |s| format!("{:.2} ms", s * 1e3));
    let row = |class: &str, predicted: Option<f64>, measured: Option<f64>| {
        let apart = predicted.zip(measured).map(|(p, m)| m - p);
        let share = apart.map_or("-".to_owned(), |s| format!("{:+.1}%", 100.0 * s / a.measured_step_s));
        vec![class.to_owned(), ms(predicted), ms(measured), ms(apart), share]
    };
    let mut rows: Vec<_> = a.classes.iter().map(|c: &ClassTime| row(&c.class, c.predicted_s, c.measured_s)).collect();
    rows.push(row("step", Some(a.predicted_step_s), Some(a.measured_step_s)));
    let mut text = format!(
        "predicted by {}; measured: {}{}\n{}",
        a.by,
        counted(a.steps, "step"),
        a.profiled_step.map_or(String::new(), |step| format!(", ops in step {step}")),
        table(&["time of a step", "predicted", "measured", "apart", "of the step"], &rows)
    );
    if let Some((class, seconds)) = a.parts_most() {
        let more = if seconds < 0.0 { "less" } else { "more" };
        text.push_str(&format!("they part most in {class}: {:.2} ms {more} than predicted\n", seconds.abs() * 1e3));
    }
    if let Some(over) = a.kernels_over_step_s {
        let line = format!(
            "nothing is left for communication, waits and the host: the timed kernels sum to {:.2} ms more than a step, as they \
             overlap, and each was slower for being timed",
            over * 1e3
        );
        text.push_str(&wrapped(&line, "  "));
    }
    if !a.unmeasured.is_empty() {
        text.push_str(&format!("never measured, estimated from other ops: {}\n", a.unmeasured.join(", ")));
    }
    text
}
