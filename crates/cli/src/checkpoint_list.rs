//! `lockstep checkpoint list`.

use crate::Format;
use crate::failure::Result;
use crate::table::table;
use lockstep_host::date;
use lockstep_ir::units;
use lockstep_rundir::{CheckpointSummary, checkpoints};
use serde_json::json;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// A run directory.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// How to print them.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(args: &Args) -> Result<()> {
    let found = checkpoints(&args.run)?;
    let text = || match found.is_empty() {
        true => format!("{}: no checkpoints yet\n", args.run.display()),
        false => table(&["step", "size", "saved", "val loss", ""], &found.iter().map(row).collect::<Vec<_>>()),
    };
    args.format.print(|| json!({ "checkpoints": found }), text)
}

fn row(checkpoint: &CheckpointSummary) -> Vec<String> {
    let unknown = || "-".to_owned();
    vec![
        checkpoint.step.to_string(),
        units::bytes(checkpoint.bytes),
        checkpoint.unix_s.map_or_else(unknown, utc),
        checkpoint.val_loss.map_or_else(unknown, |loss| format!("{loss:.4}")),
        if checkpoint.whole { "" } else { "not whole" }.to_owned(),
    ]
}

/// `2026-11-15 16:02:34 UTC`.
fn utc(unix_s: f64) -> String {
    let seconds = unix_s as u64;
    let (hour, minute) = (seconds / 3600 % 24, seconds / 60 % 60);
    format!("{} {hour:02}:{minute:02}:{:02} UTC", date(seconds), seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (unix_s, text) in [
            (0.0, "1970-01-01 00:00:00 UTC"),
            (951_782_399.9, "2000-02-28 23:59:59 UTC"),
            (951_782_400.0, "2000-02-29 00:00:00 UTC"),
            (1_794_758_554.0, "2026-11-15 16:02:34 UTC"),
            (4_107_542_400.0, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(unix_s), text);
        }
    }
}
